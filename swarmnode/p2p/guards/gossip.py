"""What GossipSub loses, keeps for ever, lets end or pays for many times: guards around
libp2p/pubsub/gossipsub.py and mcache.py."""

# mypy: disable-error-code="method-assign,assignment,attr-defined,arg-type,type-arg,override,misc"

import functools
import time
from collections.abc import Callable

import trio
from libp2p.peer.id import ID
from libp2p.pubsub import pubsub as upstream
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.mcache import CacheEntry, MessageCache
from libp2p.pubsub.pb import rpc_pb2

from swarmnode.p2p.guards.counting import contained, fired
from swarmnode.p2p.guards.outbox import Outbox
from swarmnode.p2p.guards.pubsub import GuardedPubsub

CACHE_BYTES = 32 * 1024 * 1024
"""Messages kept for peers that ask for them (five heartbeats)."""
SUBSCRIPTION_MESSAGES = 1024
"""Messages that wait for our own subscriber."""
DEGREE, DEGREE_LOW, DEGREE_HIGH = 5, 4, 6
"""Neighbours in the mesh: wanted, fewest and most before a heartbeat mends it. Measured:
benchmarks/RESULTS.md, "gossip"."""
IHAVE_PEERS = 2
"""Neighbours outside the mesh that are told of recent messages at each heartbeat."""
SLACK_SECONDS = 2
"""Who was pruned waits so much longer than it was asked to: clocks are read in whole seconds, and a
PRUNE takes its time."""


class BoundedCache(MessageCache):
    """`MessageCache` of at most `CACHE_BYTES`; the oldest message goes first.

    Defect: it holds every message of five heartbeats whatever its size, so memory is what peers
    care to send in five seconds. Cost: a length per message. Not needed any more when
    `MessageCache` has a bound in bytes.
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
    """Turn off what loses messages, and bound what grows; returns `gs`. Call before it is attached
    to a `Pubsub`.

    Defects in pubsub/gossipsub.py: `spam_protection_enabled` silently drops above 10 messages per
    second and forwarder, own ones included; `adaptive_gossip_enabled` sets the heartbeat to 30–120
    s when it likes; `heartbeat_interval` is 120 s by default; `equivocation_detection` keeps the
    last 500–1000 whole messages for ever; `recent_message_deliveries` grows by one float per
    message; `back_off` keeps every peer that was ever pruned; an exception in a heartbeat ends the
    service; the message cache has no bound. Here: off, off, 1 s, off (a second message with the
    same id is dropped as seen anyway), emptied, pruned, restarted, bounded. Cost: a pass over
    `back_off` per heartbeat. Not needed any more when each has a setting or a bound upstream.
    """
    gs.spam_protection_enabled = gs.adaptive_gossip_enabled = gs.do_px = False
    if gs.heartbeat_interval > 10:
        gs.heartbeat_interval = gs.heartbeat_interval_base = 1
    gs._check_equivocation = lambda msg: True
    gs.mcache = BoundedCache(gs.mcache.window_size, len(gs.mcache.history))
    gs.heartbeat = functools.partial(_heartbeat, gs, gs.heartbeat)
    gs._periodic_security_cleanup = functools.partial(_cleanup, gs, gs._periodic_security_cleanup)
    gs.on_peer_subscribed = functools.partial(_no_error, gs.on_peer_subscribed)
    _hold_degree(gs)
    _graft_in_time(gs)
    _send_once(gs)
    return gs


def _hold_degree(gs: GossipSub) -> None:
    """Keep the mesh at its degree, and what is told outside it small.

    Defects: `_perform_opportunistic_grafting` adds two peers at each heartbeat while all scores are
    equal, which they are where nothing is scored, so a mesh becomes every connection up to
    `degree_high`, and each message comes from all of them. At each heartbeat six neighbours or a
    quarter of them, whichever is more, are told the ids of three seconds, those included that are
    only just on their way to them: they ask for them, and get them twice. Here: no such grafting;
    `IHAVE_PEERS`; ids that are a heartbeat old. Cost: a message that was lost is asked for a second
    later. Not needed any more when the mesh of a stock node with 16 neighbours and `degree` 6 stays
    below 9, and the numbers are settings.
    """
    gs._perform_opportunistic_grafting = lambda topic, peers_to_graft: 0
    gs._get_adaptive_gossip_peers_count = lambda topic, total_peers: IHAVE_PEERS
    gs.gossip_heartbeat = functools.partial(_settled_only, gs, gs.gossip_heartbeat)


def _settled_only(gs: GossipSub, original: Callable) -> dict[ID, dict[str, list[bytes]]]:
    newest = {entry.mid for entry in gs.mcache.history[0]}
    told = {}
    for peer, topics in original().items():
        settled = {
            topic: [mid for mid in mids if mid not in newest] for topic, mids in topics.items()
        }
        told[peer] = {topic: mids for topic, mids in settled.items() if mids}
    return {peer: topics for peer, topics in told.items() if topics}


def _graft_in_time(gs: GossipSub) -> None:
    """Let who was pruned come back once its time is over, by either's clock.

    Defects: back-off ends at a whole second, so a graft comes up to a second early, which
    `_check_graft_flood_protection`, to the millisecond, takes for a flood: it prunes again and
    lowers the sender's score, and the next graft is left to the same chance. Who prunes counts from
    before its PRUNE has arrived, so that it is the first to graft, and is refused by the other. Two
    nodes of which one had left a topic for a moment heard nothing of each other in it for more than
    half a minute, one time in three on a busy machine. Here: half of the back-off counts as a
    flood, and who grafts waits `SLACK_SECONDS` longer than who accepts. Cost: two seconds more
    outside the mesh. Not needed any more when a graft that arrives 9.2 s after a PRUNE of 10 s is
    accepted.
    """
    gs.graft_flood_threshold = gs.prune_back_off / 2
    gs._add_back_off = functools.partial(_add_back_off, gs, gs._add_back_off)
    gs.handle_graft = functools.partial(_handle_graft, gs, gs.handle_graft)


def _add_back_off(
    gs: GossipSub, original: Callable, peer: ID, topic: str, is_unsubscribe: bool, seconds: int = 0
) -> None:
    seconds = seconds or (gs.unsubscribe_back_off if is_unsubscribe else gs.prune_back_off)
    original(peer, topic, is_unsubscribe, seconds + SLACK_SECONDS)


async def _handle_graft(
    gs: GossipSub, original: Callable, graft: rpc_pb2.ControlGraft, sender: ID
) -> None:
    waiting = gs.back_off.get(graft.topicID, {})
    if waiting.get(sender, 0) - SLACK_SECONDS <= time.time():
        waiting.pop(sender, None)
    await original(graft, sender)


def _send_once(gs: GossipSub) -> None:
    """Serialise a message once, and leave our own address record out.

    Defects: `publish` and `emit_control_message` put the sender's signed record on every RPC, 200
    bytes for which the host's addresses are compared and which each receiver verifies again; each
    recipient's RPC is copied, split and serialised for itself; a message is kept for every
    connected peer that is not in its topic, a hundred for each, in case it joins;
    `send_recent_messages` writes to the stream beside the queue, and where credit is short the two
    cut each other's frames in two. Here: the record goes with the first RPC of a stream
    (`get_hello_packet`); one serialisation, see `Outbox`; whoever joins gets the messages of the
    last three seconds, through its queue. Cost: none. Not needed any more when a stock node
    serialises a message once for ten neighbours.
    """
    gs.publish = functools.partial(_publish, gs)
    gs.send_recent_messages = functools.partial(_send_recent_messages, gs)
    gs.emit_control_message = functools.partial(_emit_control_message, gs)


async def _publish(gs: GossipSub, forwarder: ID, message: rpc_pb2.Message) -> None:
    ps = _pubsub(gs)
    gs.mcache.put(message)
    message_id = ps.get_message_id(message)
    data = _serialised(gs, message)
    for peer in gs._get_peers_to_send(
        message.topicIDs, msg_forwarder=forwarder, origin=ID(message.from_id), msg_id=message_id
    ):
        if (outbox := ps.peer_queues.get(peer)) is not None:
            outbox.publish(message_id, data, forwarded=forwarder != ps.my_id)
    for topic in message.topicIDs:
        gs.time_since_last_publish[topic] = int(time.time())


async def _send_recent_messages(gs: GossipSub, peer: ID, topic: str) -> None:
    if (outbox := _pubsub(gs).peer_queues.get(peer)) is not None:
        for message_id in gs.mcache.window(topic):
            if (message := gs.mcache.get(message_id)) is not None:
                outbox.publish(message_id, _serialised(gs, message), forwarded=True)


def _pubsub(gs: GossipSub) -> GuardedPubsub:
    if not isinstance(gs.pubsub, GuardedPubsub):
        raise TypeError("a guarded GossipSub needs a GuardedPubsub")
    return gs.pubsub


def _serialised(gs: GossipSub, message: rpc_pb2.Message) -> bytes:
    return rpc_pb2.RPC(publish=[message]).SerializeToString()


async def _emit_control_message(gs: GossipSub, control: rpc_pb2.ControlMessage, peer: ID) -> None:
    packet = rpc_pb2.RPC()
    packet.control.CopyFrom(control)
    gs.send_rpc(peer, packet, priority=True)


async def _heartbeat(gs: GossipSub, original: Callable) -> None:
    while True:
        with contained("heartbeat_failed"):
            await original()
        await trio.sleep(gs.heartbeat_interval)


def _cleanup(gs: GossipSub, original: Callable) -> None:
    original()
    gs.recent_message_deliveries.clear()
    now = time.time()
    for topic in list(gs.back_off):
        gs.back_off[topic] = {
            peer: until for peer, until in gs.back_off[topic].items() if until > now
        }
        if not gs.back_off[topic]:
            del gs.back_off[topic]


async def _no_error(original: Callable, *args: object) -> None:
    """Tasks that upstream starts on the whole service."""
    with contained("rpc_failed"):
        await original(*args)


def install() -> None:
    """Replace what has no constructor argument, for every pubsub of this process."""
    upstream.SUBSCRIPTION_CHANNEL_SIZE = SUBSCRIPTION_MESSAGES
    upstream.RpcQueue = Outbox
