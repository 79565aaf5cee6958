"""A `Pubsub` that no peer's bytes can end, fill or stop: guards around libp2p/pubsub/pubsub.py."""

# mypy: disable-error-code="method-assign,assignment,attr-defined,arg-type,type-arg,override"

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import ValidatorFn
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IncompleteReadError, IOException, MessageTooLarge
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.utils import maybe_consume_signed_record
from libp2p.pubsub.validators import signature_validator

from swarmnode.p2p.guards.counting import contained, fired, log
from swarmnode.p2p.guards.frames import Frames
from swarmnode.p2p.guards.outbox import Outbox
from swarmnode.p2p.guards.rpc import ID_BYTES, Pace, Undecodable, parse
from swarmnode.wire.limits import GOSSIP_BYTES

RPC_BYTES = 1024 * 1024
"""Largest RPC read from a peer; upstream's senders split at this size."""
MESSAGE_OVERHEAD_BYTES = 2048
"""Ids, topic, key and signature of one message."""
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.5, 60.0
"""Between two attempts to open our stream to a neighbour; twice as long after each."""
LONGEST_OPENING_SECONDS = 12.0
"""How long another task that opens it is waited for: a negotiation ends after ten."""
NOT_SPOKEN = "protocols not supported"
"""How the library says that a peer does not speak a protocol; it has no exception type for that."""
SEEN_SECONDS = 120.0
SEEN_MESSAGES = 100_000


@dataclasses.dataclass
class Forwarder:
    """A neighbour's stream to us. `record`: its signed addresses, as it last sent them."""

    peer: ID
    pace: Pace
    record: bytes = b""


class Seen:
    """Message ids of the last `SEEN_SECONDS`, at most `SEEN_MESSAGES`; `LastSeenCache` has no
    bound, and a thread per pubsub."""

    def __init__(self) -> None:
        self._until: collections.OrderedDict[bytes, float] = collections.OrderedDict()

    def has(self, message_id: bytes) -> bool:
        until = self._until.get(message_id)
        return until is not None and until > time.monotonic()

    def add(self, message_id: bytes) -> bool:
        known = self.has(message_id)
        self._until[message_id] = time.monotonic() + SEEN_SECONDS
        self._until.move_to_end(message_id)
        if len(self._until) > SEEN_MESSAGES:
            self._until.popitem(last=False)
        while self._until and next(iter(self._until.values())) <= time.monotonic():
            self._until.popitem(last=False)
        return not known

    def length(self) -> int:
        return len(self._until)


class GuardedPubsub(Pubsub):
    """`Pubsub` that no peer's bytes can end.

    Defects closed here, all in pubsub/pubsub.py: `continuously_read_stream` lets `DecodeError` out
    of the handler (C2); `push_msg` lets the exceptions of `signature_validator` (poisoned keys, C3)
    and of topic validators (C5) end the service; it is started as one task per message, without
    bound; async validators race the check for duplicates; a failed validation formats the whole
    message as text, twice; ids of any length are cached for 120 s; the cache of seen ids has no
    bound. Here: frames are read, bounded (`parse`), paced per forwarder and handled one after
    another; only synchronous validators are taken; authentic messages are marked as seen before
    they are judged, so a rejected one is not judged again. Cost: none measurable; a forwarder above
    `FORWARDER_RATE` waits. Not needed any more when the tests named in docs/py-libp2p.md pass on a
    stock `Pubsub`.
    """

    peer_queues: dict[ID, Outbox]

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("max_inbound_rpc_size", RPC_BYTES)
        super().__init__(*args, **kwargs)
        self.seen_messages.stop()
        self.seen_messages = Seen()
        self.counter = time.time_ns()
        """The number of our last message. Defect: it begins at the seconds of the clock, so that
        who has sent more than one message a second and is started again sends numbers that it has
        used, which everybody drops as seen, for two minutes. Cost: none. Not needed any more when a
        stock node's messages arrive after its restart."""
        self.opening: dict[ID, trio.Event] = {}
        """Peers to whom a task opens our stream, and what is set when it has ended."""
        self.may_publish: Callable[[ID], bool] = lambda peer: True
        """Asked for each message that a peer hands over as its own."""

    def set_topic_validator(
        self, topic: str, validator: ValidatorFn, is_async_validator: bool = False
    ) -> None:
        """Register `validator(forwarder: ID, message) -> bool`, which must not await; `ValueError`
        for an asynchronous one."""
        if is_async_validator:
            raise ValueError(
                "asynchronous validators race the check for duplicates; check after the message was"
                " taken from the queue"
            )
        super().set_topic_validator(topic, validator, False)

    async def continuously_read_stream(self, stream: INetStream) -> None:
        """Read RPCs from `stream` until it ends; an RPC that breaks the rules ends it. Raises only
        what `stream_handler` expects."""
        peer = stream.muxed_conn.peer_id
        forwarder = Forwarder(peer, Pace(trio.current_time()))
        frames = Frames(stream, self.max_inbound_rpc_size)
        try:
            while self.manager.is_running:
                await self._handle_frame(forwarder, await frames.read())
        except (Undecodable, MessageTooLarge) as error:
            fired("rpc_oversize" if isinstance(error, MessageTooLarge) else "rpc_undecodable", peer)
            await stream.reset()
            self._handle_dead_peer(peer)
        except (StreamError, IncompleteReadError, ParseError, IOException, RawConnError) as error:
            log.debug("pubsub stream of %s ended: %s", peer, error)

    async def _handle_frame(self, forwarder: Forwarder, frame: bytes) -> None:
        peer = forwarder.peer
        rpc = parse(frame, self.topic_ids)
        if not self.take_record(forwarder, rpc):
            return
        for message in rpc.publish:
            await self.push_msg(peer, message)
            await trio.lowlevel.checkpoint()  # a full RPC must not hold up everybody else
        for subscription in rpc.subscriptions:
            self.handle_subscription(peer, subscription)
        if rpc.HasField("control"):
            with contained("rpc_failed", peer):
                await self.router.handle_rpc(rpc, peer)
        delay = forwarder.pace.wait(max(1, len(rpc.publish)), trio.current_time())
        if delay:
            fired("forwarder_paced", peer)
            await trio.sleep(delay)

    def take_record(self, forwarder: Forwarder, rpc: rpc_pb2.RPC) -> bool:
        """Keep the addresses that a forwarder signed, if they are news, and take them off `rpc`;
        False if they are not its own.

        Defect: a record rides on every RPC, and each is verified and stored again, twice where the
        RPC has control messages. Here: a record that is the same as the stream's last is known to
        be good. Cost: none. Not needed any more when a stock node verifies it once.
        """
        if rpc.HasField("senderRecord") and rpc.senderRecord != forwarder.record:
            if not maybe_consume_signed_record(rpc, self.host, forwarder.peer):
                return False
            forwarder.record = rpc.senderRecord
        rpc.ClearField("senderRecord")
        return True

    async def handle_sending_messages(self, peer_id: ID, stream: INetStream, queue: Outbox) -> None:
        """Write what waits in `queue` to `stream` until either ends."""
        with contained("sending_failed", peer_id) as failure:
            while (frame := await queue.take()) is not None:
                await stream.write(frame)
        if failure.error is not None:
            self._handle_dead_peer(peer_id)

    async def _handle_new_peer_with_retry(self, peer_id: ID, timeout: float | None = None) -> None:  # noqa: ASYNC109 - upstream's
        """Open our stream to a peer, again and again while it is connected.

        Defect: of all errors only two are tried again, and a negotiation that took more than ten
        seconds is none of them. On a busy machine that is where gossip to a neighbour ends for as
        long as the connection lives: 147 of 646 directed links of 32 nodes that joined at once
        stayed silent. Here: whatever went wrong, but for a peer that does not speak the protocol.
        Cost: a stream a minute for a peer that answers nothing. Not needed any more when a stock
        node opens the stream again.

        Defect: with two connections, as when both dial, two tasks open a stream each. The second
        takes the first one's place, whose sender waits for messages for ever: 17 tasks more in an
        hour at each of eight nodes among which one comes and goes every 20 s. Here: the second
        waits for the first. Cost: none. Not needed any more when stock does the same.
        """
        delay, deadline = (
            RETRY_SECONDS,
            math.inf if timeout is None else trio.current_time() + timeout,
        )
        while trio.current_time() < deadline:
            topics = set(self.topic_ids)
            with contained("stream_unopened", peer_id) as failure:
                await self._open_alone(peer_id)
                self._announce_changes(peer_id, topics)
            if not self._peer_is_connected(peer_id) or (
                failure.error is not None and NOT_SPOKEN in str(failure.error.__cause__)
            ):
                return
            if failure.error is None:
                stream = self.peers.get(peer_id)
                if stream is None or not stream.muxed_conn.is_closed:
                    return
                # its connection ended while nobody knew that our stream was on it
                self._begin_again(peer_id)
            await trio.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY_SECONDS)

    async def _open_alone(self, peer_id: ID) -> None:
        """Open our stream unless another task has meanwhile; one that hangs is not waited for."""
        while (other := self.opening.get(peer_id)) is not None:
            with trio.move_on_after(LONGEST_OPENING_SECONDS) as late:
                await other.wait()
            if late.cancelled_caught:
                break
        done = self.opening[peer_id] = trio.Event()
        try:
            await self._handle_new_peer(peer_id)
        finally:
            if self.opening.get(peer_id) is done:
                del self.opening[peer_id]
            done.set()

    def _announce_changes(self, peer_id: ID, topics: set[str]) -> None:
        """Tell a new peer of subscriptions that have changed since our stream to it was begun with
        `topics`.

        Defect: its first message lists our topics, and changes are announced to those who have had
        theirs: a topic that is joined while the message is being written is told to nobody, for as
        long as the connection lives. Not needed any more when stock adds the peer first.
        """
        queue, now = self.peer_queues.get(peer_id), set(self.topic_ids)
        for topic in sorted(topics ^ now) if queue is not None else ():
            packet, announced = self._build_announce_rpc(topic, subscribe=topic in now)
            self._enqueue_or_retry_announce(peer_id, queue, packet, announced)

    async def handle_dead_peer_queue(self) -> None:
        """Begin again on another connection when the one that carried our stream has closed.

        Defect: while a peer has another connection nothing is done, and `peers` keeps the dead
        stream until something is written to it. A node that only listens never notices, the peer
        has forgotten its subscriptions, and gossip between the two is over. It happens when a
        circuit is replaced by a direct connection, and when two that dialled each other at once
        give one connection up.
        """
        async with self.dead_peer_receive_channel:
            self.event_handle_dead_peer_queue_started.set()
            async for peer in self.dead_peer_receive_channel:
                stream = self.peers.get(peer)
                if not self._peer_is_connected(peer):
                    self._handle_dead_peer(peer)
                elif stream is not None and stream.muxed_conn.is_closed:
                    self._begin_again(peer)

    def _begin_again(self, peer: ID) -> None:
        """A new stream to a peer that is still connected. What it subscribed to stays: its own
        stream to us may be alive, and silent."""
        topics = [topic for topic, peers in self.peer_topics.items() if peer in peers]
        count = self._peer_subscription_count.get(peer)
        self._handle_dead_peer(peer)
        for topic in topics:
            self.peer_topics.setdefault(topic, set()).add(peer)
        if count is not None:
            self._peer_subscription_count[peer] = count

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        """Judge, deliver and forward one message. Never raises for a peer's message; for our own,
        what the router raises."""
        own = msg_forwarder == self.my_id
        if (
            not own
            and msg.from_id == msg_forwarder.to_bytes()
            and not self.may_publish(msg_forwarder)
        ):
            fired("publisher_refused", msg_forwarder)
            return
        if not own and (queue := self.peer_queues.get(msg_forwarder)) is not None:
            queue.drop(self.get_message_id(msg))
        if self._is_msg_seen(msg):
            return
        if not own and not self._admissible(msg_forwarder, msg):
            return
        if self.strict_signing and not own and not _signed(msg):
            return
        self._mark_msg_seen(msg)
        if not own and (
            msg.from_id == self.my_id.to_bytes() or not self._valid(msg_forwarder, msg)
        ):
            return
        self.notify_subscriptions(msg)
        with contained("rpc_failed", msg_forwarder) as failure:
            await self.router.publish(msg_forwarder, msg)
        if own:
            failure.raise_again()

    def _admissible(self, forwarder: ID, msg: rpc_pb2.Message) -> bool:
        """Plain form: exactly one topic, which we are in; ids as long as ids are; nothing large
        beside the data."""
        if self.is_peer_blacklisted(forwarder) or self.is_peer_blacklisted(ID(msg.from_id)):
            return False
        if len(msg.topicIDs) == 1 and msg.topicIDs[0] not in self.topic_ids:
            return False
        plain = (
            len(msg.topicIDs) == 1
            and len(msg.seqno) == 8
            and 0 < len(msg.from_id) <= ID_BYTES
            and len(msg.data) <= GOSSIP_BYTES
            and msg.ByteSize() - len(msg.data) <= MESSAGE_OVERHEAD_BYTES
        )
        if not plain:
            fired("message_refused", forwarder)
        return plain

    def _valid(self, forwarder: ID, msg: rpc_pb2.Message) -> bool:
        with contained("validator_failed", forwarder):
            return all(
                validator.validator(forwarder, msg) for validator in self.get_msg_validators(msg)
            )
        return False

    def notify_subscriptions(self, publish_message: rpc_pb2.Message) -> None:
        """Hand the message to our subscriber; a full channel is counted instead of only logged."""
        for topic in publish_message.topicIDs:
            channel = self.subscribed_topics_send.get(topic)
            if channel is not None:
                try:
                    channel.send_nowait(publish_message)
                except trio.WouldBlock:
                    fired("delivery_dropped", topic)


def _signed(msg: rpc_pb2.Message) -> bool:
    """Whether the signature is that of `from_id`; upstream's check raises for keys it cannot
    parse."""
    with contained("message_unsigned"):
        if signature_validator(msg):
            return True
        fired("message_unsigned", "wrong signature")
    return False
