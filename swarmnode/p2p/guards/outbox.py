"""What waits to be sent to one gossip neighbour: a message serialised once for all of them, many in
one frame, none that it has already."""

import collections
import random

import trio
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.rpc_queue import DefaultMaxMessageSize, RpcQueue
from libp2p.utils.varint import encode_varint_prefixed

from swarmnode.p2p.guards.counting import fired

QUEUE_BYTES = 2 * 1024 * 1024
QUEUE_MESSAGES = 512
"""What may wait for one peer."""
FRAME_BYTES = 256 * 1024
FRAME_MESSAGES = 128
"""What is sent in one frame. A receiver takes 1 MiB and 256 messages."""
FORWARD_SECONDS = 0.25
"""A forwarded message waits for a random part of this, in case the neighbour sends it to us
first."""


class Outbox(RpcQueue):
    """`RpcQueue` by bytes, for messages that many peers get, each of which may get them elsewhere
    first.

    Defects: `RpcQueue` holds 32 RPCs, so that the 33rd message published without a pause is
    silently lost, while 32 RPCs of 1 MiB may wait for each peer. For each recipient a message is
    copied, split and serialised anew, and each is a frame of its own, whose cost (2 ms from socket
    to socket) hardly depends on its size. Two neighbours that get a message in the same moment send
    it to each other. Here: `QUEUE_MESSAGES` and `QUEUE_BYTES`; the caller serialises once; what
    waits is sent as one frame (the concatenation of serialised RPCs is their union, protobuf
    encoding, "Merging"); what others made waits up to `FORWARD_SECONDS`, so that there is something
    to put together, and is dropped when the neighbour turns out to have it, which saves IDONTWANT
    with its own frames. Cost: half of `FORWARD_SECONDS` of delay for each hop but the first. Not
    needed any more when upstream's bounds are settings, and a stock node sends a burst of 100
    messages in fewer than 50 frames.
    """

    def __init__(self) -> None:
        super().__init__(QUEUE_MESSAGES, DefaultMaxMessageSize)
        self._rpcs: collections.deque[bytes] = collections.deque()
        self._messages: dict[bytes, bytes] = {}
        self._bytes = 0
        self._due = 0.0

    def __len__(self) -> int:
        return len(self._rpcs) + len(self._messages)

    def push(self, rpc: rpc_pb2.RPC, priority: bool = False) -> bool:
        """Send `rpc` as soon as the stream takes it; False where there is no room, or nobody to
        send any more."""
        data = rpc.SerializeToString()
        if not self._fits(len(data)):
            return False
        self._rpcs.append(data)
        self._send_by(trio.current_time())
        return True

    def publish(self, message_id: bytes, data: bytes, forwarded: bool) -> bool:
        """Send a message, `data` being an RPC with nothing else in it; a `forwarded` one may wait.
        False as for `push`."""
        if message_id in self._messages:
            return True
        if not self._fits(len(data)):
            return False
        self._messages[message_id] = data
        self._send_by(
            trio.current_time() + (random.uniform(0, FORWARD_SECONDS) if forwarded else 0.0)
        )
        return True

    def drop(self, message_id: bytes) -> None:
        """The neighbour has this message: it need not be sent."""
        data = self._messages.pop(message_id, None)
        if data is not None:
            self._bytes -= len(data)

    async def take(self) -> bytes | None:
        """The next frame with its length before it, once it is due; None when the queue was
        closed."""
        while not self._closed:
            if len(self) and trio.current_time() >= self._due:
                return encode_varint_prefixed(self._frame())
            with trio.move_on_at(self._due if len(self) else float("inf")):
                await self._notify.wait()
        return None

    def _fits(self, size: int) -> bool:
        if self._closed:
            return False
        full = len(self) >= QUEUE_MESSAGES or (len(self) and self._bytes + size > QUEUE_BYTES)
        if full:
            fired("queue_full")
            return False
        self._bytes += size
        return True

    def _send_by(self, due: float) -> None:
        if len(self) == 1 or due < self._due:
            self._due = due
            self._notify.set()
            self._notify = trio.Event()

    def _frame(self) -> bytes:
        """One RPC of control messages, and as many messages as fit."""
        parts = [self._rpcs.popleft()] if self._rpcs else []
        size = sum(map(len, parts))
        for message_id, data in list(self._messages.items())[:FRAME_MESSAGES]:
            if parts and size + len(data) > FRAME_BYTES:
                break
            parts.append(data)
            size += len(data)
            del self._messages[message_id]
        self._bytes -= size
        return b"".join(parts)
