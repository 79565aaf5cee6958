"""Frames over streams: one duplex stream to every other member of a crew, read at once, written in
order. No torch, no libp2p.

The member that uses it never waits for a slow neighbour: sending queues, and a task per neighbour
writes. What is queued is bounded by not beginning what would add to it: while a link is `full`, its
member starts no forward, score or wave whose activations would go there, and sends no further part
of an embedding. Everything else goes on: what arrives is always taken, and gradients, tokens and
the commit are always sent, each the answer to something that was let through before. So two stages
never wait for each other: what a stage holds back waits only for the next stage on its way to read,
and the tail holds back nothing.

What a neighbour may make us keep is bounded by streams that are not read while enough has arrived
and is not handled yet.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import trio

from swarmnode.errors import BadMessage
from swarmnode.pipeline.frames import CHUNK_BYTES, Frame, FrameLimits, read_frame
from swarmnode.pipeline.whereabouts import Passed
from swarmnode.wire import headed

INBOX: Final = 64
"""Frames received and not yet handled, all neighbours together."""
INBOX_BYTES: Final = 64 * 2**20
"""Their bodies, at most; one frame of each neighbour may be on its way beyond that."""
OUTBOX: Final = 4096
"""Frames to one neighbour, queued: far more than a crew has in flight. The stream of a neighbour
that lets it fill up is ended."""
OUTBOX_BYTES: Final = 64 * 2**20
"""From here on the link to a neighbour is full. A frame that is begun before may be queued beyond
it, and gradients: no more of them than there are micro-batches in flight."""


@dataclass(frozen=True)
class Arrival:
    sender: int
    """Stage."""
    frame: Frame | None
    """None: the stream ended, or what came was no frame."""
    body: bytes
    reason: str = ""


class Inbox:
    """What arrived and was not handled yet, in order; bodies from others are counted. own: our
    stage."""

    def __init__(self, own: int) -> None:
        self._own = own
        self._send, self._receive = trio.open_memory_channel[Arrival | None](INBOX)
        self._unhandled = 0
        """Bytes of others' bodies in it."""
        self._handled = trio.Event()
        self.awaited = False
        """Its reader waits for something to arrive, and does nothing else."""

    async def room(self) -> None:
        """Returns once another stream may be read."""
        while self._unhandled >= INBOX_BYTES:
            await self._handled.wait()

    async def put(self, arrival: Arrival) -> None:
        if arrival.sender != self._own:
            self._unhandled += len(arrival.body)
        await self._send.send(arrival)

    def put_room(self) -> None:
        """There is room again on a link that was full."""
        # a member that has arrivals to take looks for room after them anyway
        with contextlib.suppress(trio.WouldBlock):
            self._send.send_nowait(None)

    def take_nowait(self) -> Arrival | None:
        """The next arrival; None: there is room again on a link that was full. Raises
        trio.WouldBlock."""
        return self._taken(self._receive.receive_nowait())

    async def take(self) -> Arrival | None:
        """As `take_nowait`, once there is something."""
        self.awaited = True
        try:
            return self._taken(await self._receive.receive())
        finally:
            self.awaited = False

    def _taken(self, arrival: Arrival | None) -> Arrival | None:
        if arrival is not None and arrival.sender != self._own:
            self._unhandled -= len(arrival.body)
            self._handled.set()
            self._handled = trio.Event()
        return arrival


class Links:
    """`streams`: stage → stream. Frames to our own stage come back without a stream."""

    def __init__(
        self, stage: int, streams: Mapping[int, trio.abc.Stream], limits: FrameLimits
    ) -> None:
        self.stage = stage
        self.limits = limits
        self._streams = dict(streams)
        self.inbox = Inbox(stage)
        self._to_self, self._from_self = trio.open_memory_channel[Arrival](OUTBOX)
        self._out = {peer: trio.open_memory_channel[bytes](OUTBOX) for peer in self._streams}
        self.queued = dict.fromkeys(self._streams, 0)
        """Bytes not sent yet, of those whose stream takes any."""
        self.frames_received = 0
        self.passed = Passed()
        self.at_once: Callable[[int, Frame], bool] = lambda sender, frame: False
        """Whether it has dealt with a frame of stage `sender`, which goes to no inbox then: what
        cannot wait for computing."""
        self.counts: Callable[[int, Frame], bool] = lambda sender, frame: True
        """Whether a frame of stage `sender` is among what `passed` counts: what is made up for that
        shall not be."""
        self.refused: Counter[str] = Counter()
        """What was no frame, by FRAME_REASONS, and `unsent`: queues that were full."""
        self._nursery: trio.Nursery | None = None

    def full(self, stage: int) -> bool:
        """Whether nothing new is to be begun that goes to `stage`. Never of a stream that is gone:
        its end arrives as such."""
        return self.queued.get(stage, 0) >= OUTBOX_BYTES

    @property
    def any_full(self) -> bool:
        return any(self.full(stage) for stage in self.queued)

    def send(self, stage: int, frame: Frame, body: bytes = b"") -> None:
        """Queues. To a stage whose stream is gone it does nothing; one whose queue has too many
        frames loses its stream."""
        if stage == self.stage:
            self._to_self.send_nowait(Arrival(stage, frame, body))
            return
        if stage not in self.queued:
            return
        data = headed.pack(frame, body)
        try:
            self._out[stage][0].send_nowait(data)
        except trio.WouldBlock:
            self.refused["unsent"] += 1
            self._give_up(stage)
        else:
            self.queued[stage] += len(data)
            self.passed.sent.count(stage, frame)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._loop_back)
            for peer, stream in self._streams.items():
                nursery.start_soon(self._read, peer, stream)
                nursery.start_soon(self._write, peer, stream)

    def _give_up(self, peer: int) -> None:
        """Frames to it cannot be kept, and none is dropped while others go on: this stream ends,
        and the crew gets new ones."""
        self._no_more(peer)
        if self._nursery is not None:
            self._nursery.start_soon(trio.aclose_forcefully, self._streams[peer])

    def _no_more(self, peer: int) -> None:
        """What was held back for it waits for nothing any more."""
        self.queued.pop(peer, None)
        self.inbox.put_room()

    async def _loop_back(self) -> None:
        async for arrival in self._from_self:
            await self.inbox.put(arrival)

    async def _read(self, peer: int, stream: trio.abc.Stream) -> None:
        reason = "closed"
        try:
            while True:
                await self.inbox.room()
                got = await read_frame(stream, self.limits)
                if got is None:
                    break
                self.frames_received += 1
                if self.counts(peer, got[0]):
                    self.passed.arrived.count(peer, got[0])
                if not self.at_once(peer, got[0]):
                    await self.inbox.put(Arrival(peer, *got))
        except BadMessage as error:
            reason = error.reason
            self.refused[reason] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the arrival below says it
        await self.inbox.put(Arrival(peer, None, b"", reason))

    async def _write(self, peer: int, stream: trio.abc.Stream) -> None:
        try:
            async for data in self._out[peer][1]:
                for at in range(0, len(data), CHUNK_BYTES):
                    part = data[at : at + CHUNK_BYTES]
                    await stream.send_all(part)
                    if peer not in self.queued:
                        return
                    self.passed.chunks += len(part) == CHUNK_BYTES
                    was_full = self.full(peer)
                    self.queued[peer] -= len(part)
                    if was_full and not self.full(peer):
                        self.inbox.put_room()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._no_more(peer)
