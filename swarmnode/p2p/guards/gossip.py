"""What GossipSub loses, keeps for ever or lets end: guards around libp2p/pubsub/gossipsub.py, mcache.py and rpc_queue.py."""

# mypy: disable-error-code="method-assign,assignment,attr-defined,arg-type,type-arg,override"

import functools
import time
from collections.abc import Callable

import trio
from libp2p.pubsub import pubsub as upstream
from libp2p.pubsub import rpc_queue
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.mcache import CacheEntry, MessageCache
from libp2p.pubsub.pb import rpc_pb2

from swarmnode.p2p.guards.counting import fired

CACHE_BYTES = 32 * 1024 * 1024
"""Messages kept for peers that ask for them (five heartbeats)."""
QUEUE_BYTES = 2 * 1024 * 1024
QUEUE_MESSAGES = 512
"""What may wait for one peer."""
SUBSCRIPTION_MESSAGES = 1024
"""Messages that wait for our own subscriber."""


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


async def _heartbeat(gs: GossipSub, original: Callable) -> None:
    while True:
        try:
            await original()
        except Exception as error:
            fired("heartbeat_failed", repr(error))
            await trio.sleep(gs.heartbeat_interval)


def _cleanup(gs: GossipSub, original: Callable) -> None:
    original()
    gs.recent_message_deliveries.clear()
    now = time.time()
    for topic in list(gs.back_off):
        gs.back_off[topic] = {peer: until for peer, until in gs.back_off[topic].items() if until > now}
        if not gs.back_off[topic]:
            del gs.back_off[topic]


async def _no_error(original: Callable, *args: object) -> None:
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
        self.bytes = held + size
        return True

    def _pop(self: rpc_queue.PriorityQueue) -> rpc_pb2.RPC | None:
        rpc = pop(self)
        if rpc is not None:
            self.bytes -= rpc.ByteSize()
        return rpc

    rpc_queue.PriorityQueue.push, rpc_queue.PriorityQueue.pop = _push, _pop


def install() -> None:
    """Replace what has no constructor argument, for every pubsub of this process."""
    upstream.SUBSCRIPTION_CHANNEL_SIZE = SUBSCRIPTION_MESSAGES
    _install_queue()
