"""Guards around libp2p/pubsub: a total parser of peers' RPCs, bounded caches and queues, a heartbeat that goes on."""

import collections
import functools
import logging
import time
from collections.abc import Callable, Collection

import trio
from google.protobuf.message import DecodeError
from libp2p.abc import INetStream
from libp2p.custom_types import ValidatorFn
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IncompleteReadError, IOException, MessageTooLarge
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.pubsub import pubsub as upstream
from libp2p.pubsub import rpc_queue
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.mcache import CacheEntry, MessageCache
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.utils import maybe_consume_signed_record
from libp2p.pubsub.validators import signature_validator
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from swarmnode.p2p.guards.counting import fired
from swarmnode.wire.limits import GOSSIP_BYTES

RPC_BYTES = 1024 * 1024
"""Largest RPC read from a peer; upstream's senders split at this size."""
MESSAGE_OVERHEAD_BYTES = 2048
"""Ids, topic, key and signature of one message."""
MESSAGES_PER_RPC = 256
TOPIC_BYTES = 128
RECORD_BYTES = 4096
"""A forwarder's signed record of its own addresses, which rides on every RPC; ours is below 300."""
ID_BYTES = 80
"""Message ids and peer ids; ours are 46 and 38 bytes long."""
IDS_PER_RPC = 512
CONTROLS_PER_RPC = 32
SUBSCRIPTIONS_PER_RPC = 128
BACK_OFF_SECONDS = 600
"""A peer may keep us out of its mesh for this long at a time."""
FORWARDER_RATE = 200.0
"""Messages per second that one forwarder may bring for long; it is made to wait, nothing is dropped."""
FORWARDER_BURST = 400.0
SEEN_SECONDS = 120.0
SEEN_MESSAGES = 100_000
CACHE_BYTES = 32 * 1024 * 1024
"""Messages kept for peers that ask for them (five heartbeats)."""
QUEUE_BYTES = 2 * 1024 * 1024
QUEUE_MESSAGES = 512
"""What may wait for one peer."""
SUBSCRIPTION_MESSAGES = 1024
"""Messages that wait for our own subscriber."""

log = logging.getLogger("swarmnode.p2p.guards")


class Undecodable(Exception):
    """Raised for bytes that are not an RPC."""


class Seen:
    """Message ids of the last `SEEN_SECONDS`, at most `SEEN_MESSAGES`; `LastSeenCache` has no bound, and a thread per pubsub."""

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


class Pace:
    """A token bucket that tells how long to wait instead of refusing. Times in seconds on the caller's clock."""

    def __init__(self, now: float) -> None:
        self.tokens, self.at = FORWARDER_BURST, now

    def wait(self, messages: int, now: float) -> float:
        """Seconds after which `messages` more are within the rate."""
        self.tokens = min(FORWARDER_BURST, self.tokens + (now - self.at) * FORWARDER_RATE) - messages
        self.at = now
        return max(0.0, -self.tokens / FORWARDER_RATE)


def parse(frame: bytes, topics: Collection[str]) -> rpc_pb2.RPC:
    """The RPC in `frame`, cut down to what an honest peer would send about `topics`; raises `Undecodable`.

    Defects: bytes that are no protobuf raise `DecodeError` through the stream handler (process ends); one RPC of 1 MiB may carry 50,000
    messages, each of which becomes a task, or ask 20,000 times for the same cached message (1 GB answer); IHAVE, PRUNE and
    subscriptions for invented topics of any length are remembered. Here: counts, lengths and topics are bounded before anything is done.
    Cost: a copy of the control part. Not needed any more when upstream has such limits, as js-libp2p's decodeRpcLimits.
    """
    rpc = rpc_pb2.RPC()
    try:
        rpc.ParseFromString(frame)
    except (DecodeError, UnicodeDecodeError) as error:
        raise Undecodable(str(error)) from error
    before = len(rpc.publish) + len(rpc.subscriptions)
    del rpc.publish[MESSAGES_PER_RPC:]
    del rpc.subscriptions[SUBSCRIPTIONS_PER_RPC:]
    for index in reversed(range(len(rpc.subscriptions))):
        if len(rpc.subscriptions[index].topicid) > TOPIC_BYTES:
            del rpc.subscriptions[index]
    oversize = len(rpc.senderRecord) > RECORD_BYTES
    if oversize:
        rpc.ClearField("senderRecord")
    if oversize or before != len(rpc.publish) + len(rpc.subscriptions):
        fired("rpc_bounded")
    if rpc.HasField("control"):
        control = _bounded_control(rpc.control, topics)
        rpc.control.CopyFrom(control)
    return rpc


def _ids(wanted: Collection[bytes]) -> list[bytes]:
    """Distinct ids of a plausible length, at most `IDS_PER_RPC`."""
    return [one for one in dict.fromkeys(wanted) if len(one) <= ID_BYTES][:IDS_PER_RPC]


def _bounded_control(control: rpc_pb2.ControlMessage, topics: Collection[str]) -> rpc_pb2.ControlMessage:
    out = rpc_pb2.ControlMessage()
    for ihave in control.ihave[:CONTROLS_PER_RPC]:
        if ihave.topicID in topics:
            out.ihave.add(topicID=ihave.topicID, messageIDs=_ids(ihave.messageIDs))
    wanted = _ids([one for iwant in control.iwant[:CONTROLS_PER_RPC] for one in iwant.messageIDs[:IDS_PER_RPC]])
    if wanted:
        out.iwant.add(messageIDs=wanted)
    for graft in control.graft[:CONTROLS_PER_RPC]:
        if graft.topicID in topics:
            out.graft.add(topicID=graft.topicID)
    for prune in control.prune[:CONTROLS_PER_RPC]:
        if prune.topicID in topics:  # the peers it offers are left out: we have our own peer table
            out.prune.add(topicID=prune.topicID, backoff=min(prune.backoff, BACK_OFF_SECONDS))
    for unwanted in control.idontwant[:CONTROLS_PER_RPC]:
        out.idontwant.add(messageIDs=_ids(unwanted.messageIDs))
    return out


class GuardedPubsub(upstream.Pubsub):
    """`Pubsub` that no peer's bytes can end.

    Defects closed here, all in pubsub/pubsub.py: `continuously_read_stream` lets `DecodeError` out of the handler (C2); `push_msg` lets
    the exceptions of `signature_validator` (poisoned keys, C3) and of topic validators (C5) end the service; it is started as one task per
    message, without bound; async validators race the check for duplicates; a failed validation formats the whole message as text, twice;
    ids of any length are cached for 120 s; the cache of seen ids has no bound.
    Here: frames are read, bounded (`parse`), paced per forwarder and handled one after another; only synchronous validators are taken;
    authentic messages are marked as seen before they are judged, so a rejected one is not judged again.
    Cost: none measurable; a forwarder above `FORWARDER_RATE` waits.
    Not needed any more when the tests named in docs/py-libp2p.md pass on a stock `Pubsub`.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("max_inbound_rpc_size", RPC_BYTES)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.seen_messages.stop()
        self.seen_messages = Seen()  # type: ignore[assignment]

    def set_topic_validator(self, topic: str, validator: ValidatorFn, is_async_validator: bool = False) -> None:
        """Register `validator(forwarder: ID, message) -> bool`, which must not await; `ValueError` for an asynchronous one."""
        if is_async_validator:
            raise ValueError("asynchronous validators race the check for duplicates; check after the message was taken from the queue")
        super().set_topic_validator(topic, validator, False)

    async def continuously_read_stream(self, stream: INetStream) -> None:
        """Read RPCs from `stream` until it ends; an RPC that breaks the rules ends it. Raises only what `stream_handler` expects."""
        peer = stream.muxed_conn.peer_id
        pace = Pace(trio.current_time())
        try:
            while self.manager.is_running:
                frame = await read_varint_prefixed_bytes_limited(stream, self.max_inbound_rpc_size)
                await self._handle_frame(peer, frame, pace)
        except (Undecodable, MessageTooLarge) as error:
            fired("rpc_oversize" if isinstance(error, MessageTooLarge) else "rpc_undecodable", peer)
            await stream.reset()
            self._handle_dead_peer(peer)
        except (StreamError, IncompleteReadError, ParseError, IOException, RawConnError) as error:
            log.debug("pubsub stream of %s ended: %s", peer, error)

    async def _handle_frame(self, peer: ID, frame: bytes, pace: Pace) -> None:
        rpc = parse(frame, self.topic_ids)
        if not maybe_consume_signed_record(rpc, self.host, peer):
            return
        for message in rpc.publish:
            await self.push_msg(peer, message)
            await trio.lowlevel.checkpoint()  # a full RPC must not hold up everybody else
        for subscription in rpc.subscriptions:
            self.handle_subscription(peer, subscription)
        if rpc.HasField("control"):
            try:
                await self.router.handle_rpc(rpc, peer)
            except Exception as error:
                fired("rpc_failed", f"{peer}: {error!r}")
        delay = pace.wait(max(1, len(rpc.publish)), trio.current_time())
        if delay:
            fired("forwarder_paced", peer)
            await trio.sleep(delay)

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        """Judge, deliver and forward one message. Never raises for a peer's message; for our own, what the router raises."""
        own = msg_forwarder == self.my_id
        if not own and not self._admissible(msg_forwarder, msg):
            return
        if self._is_msg_seen(msg):
            return
        if self.strict_signing and not own and not _signed(msg):
            return
        self._mark_msg_seen(msg)
        if not own and (msg.from_id == self.my_id.to_bytes() or not self._valid(msg_forwarder, msg)):
            return
        self.notify_subscriptions(msg)
        try:
            await self.router.publish(msg_forwarder, msg)
        except Exception as error:
            if own:
                raise
            fired("rpc_failed", f"{msg_forwarder}: {error!r}")

    def _admissible(self, forwarder: ID, msg: rpc_pb2.Message) -> bool:
        """Plain form: exactly one topic, which we are in; ids as long as ids are; nothing large beside the data."""
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
        for validator in self.get_msg_validators(msg):
            try:
                if not validator.validator(forwarder, msg):
                    return False
            except Exception as error:
                fired("validator_failed", f"{forwarder}: {error!r}")
                return False
        return True

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
    """Whether the signature is that of `from_id`; upstream's check raises for keys it cannot parse."""
    try:
        if signature_validator(msg):
            return True
    except Exception as error:
        fired("message_unsigned", repr(error))
        return False
    fired("message_unsigned", "wrong signature")
    return False


class BoundedCache(MessageCache):
    """`MessageCache` of at most `CACHE_BYTES`; the oldest message goes first.

    Defect: it holds every message of five heartbeats whatever its size, so memory is what peers care to send in five seconds.
    Cost: a length per message. Not needed any more when `MessageCache` has a bound in bytes.
    """

    def __init__(self, window_size: int, history_size: int) -> None:
        super().__init__(window_size, history_size)
        self.bytes = 0

    def put(self, msg: rpc_pb2.Message) -> None:
        mid = msg.from_id + msg.seqno
        if mid in self.msgs:
            return
        self.msgs[mid] = msg
        self.history[0].append(CacheEntry(mid, msg.topicIDs))
        self.bytes += len(msg.data)
        while self.bytes > CACHE_BYTES:  # dicts keep insertion order: the first is the oldest
            oldest = next(iter(self.msgs))
            self.bytes -= len(self.msgs.pop(oldest).data)
            fired("cache_evicted")

    def shift(self) -> None:
        super().shift()
        self.bytes = sum(len(msg.data) for msg in self.msgs.values())


def guard_gossip(gs: GossipSub) -> GossipSub:
    """Turn off what loses messages, and bound what grows; returns `gs`. Call before it is attached to a `Pubsub`.

    Defects in pubsub/gossipsub.py: `spam_protection_enabled` silently drops above 10 messages per second and forwarder, own ones included;
    `adaptive_gossip_enabled` sets the heartbeat to 30–120 s when it likes; `heartbeat_interval` is 120 s by default;
    `equivocation_detection` keeps the last 500–1000 whole messages for ever; `recent_message_deliveries` grows by one float per message;
    `back_off` keeps every peer that was ever pruned; an exception in a heartbeat ends the service; the message cache has no bound.
    Here: off, off, 1 s, off (a second message with the same id is dropped as seen anyway), emptied, pruned, restarted, bounded.
    Cost: a pass over `back_off` per heartbeat. Not needed any more when each has a setting or a bound upstream.
    """
    gs.spam_protection_enabled = gs.adaptive_gossip_enabled = gs.do_px = False
    if gs.heartbeat_interval > 10:
        gs.heartbeat_interval = gs.heartbeat_interval_base = 1
    gs._check_equivocation = lambda msg: True
    gs.mcache = BoundedCache(gs.mcache.window_size, len(gs.mcache.history))
    gs.heartbeat = functools.partial(_heartbeat, gs, gs.heartbeat)
    gs._periodic_security_cleanup = functools.partial(_cleanup, gs, gs._periodic_security_cleanup)
    gs.on_peer_subscribed = functools.partial(_no_error, gs.on_peer_subscribed)
    gs.flush_pending_messages = functools.partial(_no_error, gs.flush_pending_messages)
    return gs


async def _heartbeat(gs: GossipSub, original: Callable) -> None:  # type: ignore[type-arg]
    while True:
        try:
            await original()
        except Exception as error:
            fired("heartbeat_failed", repr(error))
            await trio.sleep(gs.heartbeat_interval)


def _cleanup(gs: GossipSub, original: Callable) -> None:  # type: ignore[type-arg]
    original()
    gs.recent_message_deliveries.clear()
    now = time.time()
    for topic in list(gs.back_off):
        gs.back_off[topic] = {peer: until for peer, until in gs.back_off[topic].items() if until > now}
        if not gs.back_off[topic]:
            del gs.back_off[topic]


async def _no_error(original: Callable, *args: object) -> None:  # type: ignore[type-arg]
    """Tasks that upstream starts on the whole service."""
    try:
        await original(*args)
    except Exception as error:
        fired("rpc_failed", repr(error))


def _install_queue() -> None:
    """A peer that does not read costs at most `QUEUE_BYTES`, and a burst of small messages is not lost.

    Defect: `RpcQueue` holds 32 RPCs, so the 33rd message published without a pause is silently lost, while 32 RPCs of 1 MiB may wait for
    each peer. Here: `QUEUE_MESSAGES` and `QUEUE_BYTES`. Cost: one `ByteSize` per RPC. Not needed any more when both are settings.
    """
    rpc_queue.RpcQueue.__init__.__defaults__ = (QUEUE_MESSAGES, rpc_queue.DefaultMaxMessageSize)
    push, pop = rpc_queue.PriorityQueue.push, rpc_queue.PriorityQueue.pop

    def _push(self: rpc_queue.PriorityQueue, rpc: rpc_pb2.RPC, priority: bool = False) -> bool:
        size = rpc.ByteSize()
        held = getattr(self, "bytes", 0)
        if (held and held + size > QUEUE_BYTES) or not push(self, rpc, priority):
            fired("queue_full")
            return False
        self.bytes = held + size  # type: ignore[attr-defined]
        return True

    def _pop(self: rpc_queue.PriorityQueue) -> rpc_pb2.RPC | None:
        rpc = pop(self)
        if rpc is not None:
            self.bytes -= rpc.ByteSize()  # type: ignore[attr-defined]
        return rpc

    rpc_queue.PriorityQueue.push, rpc_queue.PriorityQueue.pop = _push, _pop


def install() -> None:
    """Replace what has no constructor argument, for every pubsub of this process."""
    upstream.SUBSCRIPTION_CHANNEL_SIZE = SUBSCRIPTION_MESSAGES
    _install_queue()
