"""What a gossiped message costs: what a stock py-libp2p pays for many times, and a guarded one
once."""

import time
from types import SimpleNamespace

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.exceptions import StreamFailure
from libp2p.io.exceptions import IncompleteReadError, MessageTooLarge
from libp2p.peer.id import ID
from libp2p.peer.peerstore import env_to_send_in_RPC
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.pubsub import utils
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited

from swarmnode.p2p import guards
from swarmnode.p2p.guards import frames, outbox, pubsub, rpc
from tests.support import attacker
from tests.support.host_process import guarded, processes, stock

TOPIC = "t"
PEERS = [ID(bytes([0, 36, 8, 1, 18, 32]) + bytes(31) + bytes([number])) for number in range(16)]
US = ID(bytes([0, 36, 8, 1, 18, 32]) + bytes(32 * [255]))


def message(number, author=PEERS[0], size=10):
    return rpc_pb2.Message(
        from_id=author.to_bytes(),
        seqno=number.to_bytes(8, "big"),
        topicIDs=[TOPIC],
        data=bytes(size),
    )


def router(guard, queue=RpcQueue):
    """A router that has joined TOPIC, with 16 neighbours there; their queues are never emptied."""
    degrees = {
        "degree": guards.DEGREE,
        "degree_low": guards.DEGREE_LOW,
        "degree_high": guards.DEGREE_HIGH,
    }
    made = GossipSub(
        protocols=[PROTOCOL_ID_V11], heartbeat_interval=1, prune_back_off=10, **degrees
    )
    if guard:
        guards.guard_gossip(made)
    keys = create_new_key_pair(bytes(32))
    made.pubsub = object.__new__(guards.GuardedPubsub if guard else Pubsub)
    made.pubsub.host = new_host(key_pair=keys)
    made.pubsub.peer_topics = {TOPIC: set(PEERS)}
    made.pubsub.peers = dict.fromkeys(PEERS)
    made.pubsub.peer_queues = {peer: queue() for peer in PEERS}
    made.pubsub.get_message_id = lambda msg: msg.from_id + msg.seqno
    made.peer_protocol = dict.fromkeys(PEERS, PROTOCOL_ID_V11)
    made.mesh = {TOPIC: set(PEERS[: guards.DEGREE])}
    return made


# -- the mesh


def test_a_mesh_does_not_grow_beyond_its_degree():
    sizes = []
    for guard in (False, True):
        one = router(guard)
        for _ in range(10):
            one.mesh_heartbeat()
            sizes.append(len(one.mesh[TOPIC]))
    assert max(sizes[:10]) > guards.DEGREE, (
        "upstream fixed this: remove guard _hold_degree (grafting)"
    )
    assert sizes[10:] == [guards.DEGREE] * 10


def test_few_are_told_of_messages_and_of_none_that_is_still_on_its_way():
    told = []
    for guard in (False, True):
        one = router(guard)
        one.mcache.put(message(1))
        one.mcache.shift()
        one.mcache.put(message(2))
        told.append(one.gossip_heartbeat())
    assert len(told[0]) > 2, "upstream fixed this: remove guard _hold_degree (IHAVE)"
    assert all(len(topics[TOPIC]) == 2 for topics in told[0].values())
    assert len(told[1]) == 2
    assert all(
        topics[TOPIC] == [PEERS[0].to_bytes() + (1).to_bytes(8, "big")]
        for topics in told[1].values()
    )


def grafted(one, other, monkeypatch, pruned, received, heartbeat):
    """Whether `other`, which has left the topic at the second `pruned` and taken it up again, is in
    `one`'s mesh by its first graft, at a heartbeat whose phase of the second is `heartbeat`; PRUNE
    arrives at `received`."""
    clock = SimpleNamespace(now=pruned)
    monkeypatch.setattr(time, "time", lambda: clock.now)
    sent = []
    for node in (one, other):
        node.send_rpc = lambda peer, packet, **_: sent.append(packet.control)
    ours, theirs = PEERS[0], PEERS[1]  # who is who to the other
    one.mesh, other.mesh = {TOPIC: {theirs}}, {TOPIC: {ours}}

    async def leave_and_come_back():
        await other.leave(TOPIC)
        clock.now = received
        await one.handle_prune(sent.pop().prune[0], theirs)
        other.mesh = {TOPIC: set()}
        clock.now = int(pruned) + heartbeat
        while other._check_back_off(ours, TOPIC):
            clock.now += 1
        await one.handle_graft(rpc_pb2.ControlGraft(topicID=TOPIC), theirs)

    trio.run(leave_and_come_back)
    return theirs in one.mesh[TOPIC]


@pytest.mark.parametrize(("pruned", "received"), [(100.9, 100.91), (100.9, 101.1), (100.0, 101.9)])
def test_a_peer_is_grafted_again_after_its_backoff(monkeypatch, pruned, received):
    for heartbeat in (0.05, 0.5, 0.95):
        assert grafted(router(True), router(True), monkeypatch, pruned, received, heartbeat)
    stock_is = grafted(router(False), router(False), monkeypatch, pruned, received, 0.05)
    assert not stock_is, "upstream fixed this: remove guard _graft_in_time"


def test_who_comes_back_at_once_is_pruned_again(monkeypatch):
    one = router(True)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "time", lambda: clock.now)
    one.mesh = {TOPIC: set()}
    one._add_back_off(PEERS[0], TOPIC, False)
    refused = []
    for clock.now in (104.0, 109.0, 120.0):  # each that is refused begins the wait anew
        trio.run(one.handle_graft, rpc_pb2.ControlGraft(topicID=TOPIC), PEERS[0])
        refused.append(PEERS[0] not in one.mesh[TOPIC])
    assert refused == [True, True, False]


# -- window updates


async def updates(host):
    """Window updates for 200 messages of 100 bytes that the host reads one by one."""
    async with attacker.connect(host.address) as peer:
        stream = await peer.open("/test/sink/1")
        before = peer.window_updates
        for _ in range(200):
            await stream.send(bytes(100))
            await trio.sleep(0.001)
        await host.rests()
        return peer.window_updates - before


async def test_small_reads_send_no_window_update_each():
    with processes(stock(), guarded()) as (eager, patient):
        assert await updates(eager) > 20, "upstream fixed this: remove guard grant_credit"
        assert await updates(patient) == 0


async def test_a_window_is_granted_again_before_it_is_used_up():
    with processes(guarded(), guarded()) as (node, server):
        answer = await node.ask(
            "cancel_reads", size=8_000_000, address=server.address, peer=server.peer
        )
        assert answer == {"intact": True}


# -- frames


class Arrived:
    """A stream in which everything has arrived already; counts its reads."""

    def __init__(self, *parts):
        self.parts, self.reads = list(parts), 0

    async def read(self, n=None):
        self.reads += 1
        if not self.parts:
            return b""
        part, rest = self.parts[0][:n], self.parts[0][n:]
        self.parts[:1] = [rest] if rest else []
        return part


async def test_a_frame_is_read_in_one_read():
    one, other = (
        Arrived(encode_varint_prefixed(bytes(2000))),
        Arrived(encode_varint_prefixed(bytes(2000))),
    )
    assert (
        await read_varint_prefixed_bytes_limited(one, 4096)
        == await frames.Frames(other, 4096).read()
    )
    assert one.reads > 2, "upstream fixed this: remove guard Frames"
    assert other.reads == 1


async def test_frames_come_whole_however_they_arrive():
    sent = [bytes([number]) * size for number, size in enumerate((0, 1, 127, 128, 300, 5000))]
    data = b"".join(map(encode_varint_prefixed, sent))
    for step in (1, 3, 1000, len(data)):
        reader = frames.Frames(
            Arrived(*(data[at : at + step] for at in range(0, len(data), step))), 5000
        )
        assert [await reader.read() for _ in sent] == sent
        with pytest.raises(IncompleteReadError):
            await reader.read()


async def test_a_frame_is_refused_before_its_body_has_come():
    with pytest.raises(MessageTooLarge):
        await frames.Frames(Arrived(attacker.varint(4097)), 4096).read()
    with pytest.raises(frames.ParseError):
        await frames.Frames(Arrived(b"\xff" * 10), 4096).read()


# -- records


def test_a_record_is_verified_once(monkeypatch):
    verified = []
    consume = utils.consume_envelope
    monkeypatch.setattr(
        utils, "consume_envelope", lambda *args: verified.append(args) or consume(*args)
    )
    neighbour, ours = (
        new_host(key_pair=create_new_key_pair(bytes([number]) * 32)) for number in (1, 2)
    )
    peer = neighbour.get_id()
    carrying = lambda record: rpc_pb2.RPC(senderRecord=record)
    record, _ = env_to_send_in_RPC(neighbour)
    for _ in range(2):
        assert utils.maybe_consume_signed_record(carrying(record), ours, peer)
    assert len(verified) == 2, "upstream fixed this: remove guard take_record"
    one = object.__new__(guards.GuardedPubsub)
    one.host = ours
    forwarder = pubsub.Forwarder(peer, rpc.Pace(0.0))
    for _ in range(2):
        taken = carrying(record)
        assert one.take_record(forwarder, taken)
        assert not taken.HasField("senderRecord")  # the router would verify it again
    assert len(verified) == 3
    assert not one.take_record(pubsub.Forwarder(US, rpc.Pace(0.0)), carrying(record))  # another's
    assert not one.take_record(forwarder, carrying(record[:-1] + bytes([record[-1] ^ 1])))


# -- what is sent


class Noted(RpcQueue):
    """What was given to the queue of one neighbour."""

    def __init__(self):
        super().__init__()
        self.given = []

    def push(self, sent, priority=False):
        self.given.append(sent)
        return True

    def publish(self, message_id, data, forwarded):
        self.given.append(data)


async def test_a_message_is_serialised_once_for_all_neighbours():
    given = []
    for guard in (False, True):
        one = router(guard, Noted)
        await one.publish(one.pubsub.my_id if guard else PEERS[15], message(1, size=1000))
        given.append(
            [sent for peer in one.mesh[TOPIC] for sent in one.pubsub.peer_queues[peer].given]
        )
    assert len({id(each) for each in given[0]}) > 1, "upstream fixed this: remove guard _send_once"
    assert all(each.HasField("senderRecord") for each in given[0]), (
        "upstream fixed this: remove guard _send_once (record)"
    )
    assert len(given[1]) == guards.DEGREE - 1  # all but its author
    assert len({id(each) for each in given[1]}) == 1
    assert not rpc_pb2.RPC.FromString(given[1][0]).HasField("senderRecord")


class Written:
    def __init__(self):
        self.writes = []

    async def write(self, data):
        self.writes.append(data)


async def frames_of_a_burst(guard):
    """What is written to one neighbour for a burst of 100 messages."""
    kind, queue = (guards.GuardedPubsub, outbox.Outbox()) if guard else (Pubsub, RpcQueue(100))
    for number in range(100):
        if guard:
            queue.publish(
                bytes([number]),
                rpc_pb2.RPC(publish=[message(number)]).SerializeToString(),
                forwarded=False,
            )
        else:
            queue.push(rpc_pb2.RPC(publish=[message(number)]))
    stream = Written()
    with trio.move_on_after(1):
        await object.__new__(kind).handle_sending_messages(PEERS[0], stream, queue)
    return stream.writes


async def test_a_burst_is_one_frame(autojump_clock):
    assert len(await frames_of_a_burst(False)) == 100, (
        "upstream fixed this: remove guard Outbox (frames)"
    )
    (frame,) = await frames_of_a_burst(True)
    body = await frames.Frames(Arrived(frame), pubsub.RPC_BYTES).read()
    assert [each.seqno[-1] for each in rpc.parse(body, {TOPIC}).publish] == list(range(100))


async def test_a_frame_holds_what_a_receiver_takes(autojump_clock):
    box = outbox.Outbox()
    for number in range(300):
        data = rpc_pb2.RPC(publish=[message(number, size=4000)]).SerializeToString()
        assert box.publish(number.to_bytes(2, "big"), data, forwarded=False)
    box.push(
        rpc_pb2.RPC(control=rpc_pb2.ControlMessage(graft=[rpc_pb2.ControlGraft(topicID=TOPIC)]))
    )
    received = []
    while len(box):
        body = await frames.Frames(Arrived(await box.take()), pubsub.RPC_BYTES).read()
        assert len(body) <= outbox.FRAME_BYTES + 5000
        received.append(rpc.parse(body, {TOPIC}))
    assert [each.seqno for part in received for each in part.publish] == [
        message(number).seqno for number in range(300)
    ]
    assert received[0].control.graft[0].topicID == TOPIC  # before what waited already


async def test_what_was_forwarded_waits_and_is_dropped_when_the_neighbour_has_it(autojump_clock):
    box = outbox.Outbox()
    for mid in (b"a", b"b"):
        box.publish(
            mid,
            rpc_pb2.RPC(publish=[message(1, size=ord(mid))]).SerializeToString(),
            forwarded=True,
        )
    box.drop(b"a")
    box.drop(b"unknown")
    began = trio.current_time()
    sent = rpc.parse(await frames.Frames(Arrived(await box.take()), 4096).read(), {TOPIC})
    assert [len(each.data) for each in sent.publish] == [ord("b")]
    assert 0 < trio.current_time() - began <= outbox.FORWARD_SECONDS
    box.publish(b"c", b"", forwarded=True)
    box.publish(b"d", b"", forwarded=False)  # our own waits for nobody, and takes along what waits
    began = trio.current_time()
    await box.take()
    assert trio.current_time() == began
    assert len(box) == 0


async def test_a_queue_refuses_more_than_its_caps_and_takes_them_once_there_is_room():
    box, half = outbox.Outbox(), bytes(outbox.QUEUE_BYTES // 2 + 1)
    assert box.publish(b"a", half, forwarded=True)
    assert not box.publish(b"b", half, forwarded=True)
    assert not box.push(rpc_pb2.RPC(publish=[message(1, size=len(half))]))
    box.drop(b"a")
    assert box.publish(b"b", half, forwarded=True)
    many = outbox.Outbox()
    assert [
        many.publish(number.to_bytes(2, "big"), b"", forwarded=True)
        for number in range(outbox.QUEUE_MESSAGES + 1)
    ].count(False) == 1


async def test_a_queue_that_is_closed_sends_no_more(autojump_clock):
    box = outbox.Outbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(frames_of_nobody, box)
        await trio.sleep(1)
        box.close()
    assert not box.publish(b"a", b"", forwarded=False)
    assert not box.push(rpc_pb2.RPC())


async def frames_of_nobody(box):
    assert await box.take() is None


# -- a neighbour that is slow to answer


def opening(kind, errors, connected=lambda: True):
    """A pubsub whose streams fail with `errors`, one by one, before one opens."""
    one, remaining = object.__new__(kind), list(errors)
    one.subscribed_topics_receive, one.peer_queues, one.opening = {}, {}, {}

    async def open_stream(peer):
        await trio.lowlevel.checkpoint()
        if remaining:
            raise remaining.pop(0)
        one.peers[peer] = None

    vars(one).update(
        _handle_new_peer=open_stream,
        _peer_is_connected=lambda peer: connected(),
        peers={},
        blacklisted_peers=set(),
    )
    return one


def slow():
    """What `host.new_stream` raises when a negotiation took more than ten seconds."""
    error = StreamFailure("failed to open a stream")
    error.__cause__ = MultiselectClientError(
        "response timed out after 10s, protocols tried: ['/meshsub/1.1.0']"
    )
    return error


@pytest.mark.parametrize(("kind", "opens"), [(Pubsub, False), (guards.GuardedPubsub, True)])
async def test_a_stream_whose_negotiation_took_too_long_is_opened_again(
    autojump_clock, kind, opens
):
    one = opening(kind, [slow(), slow(), slow()])
    assert await one.ensure_peer_stream(PEERS[0], 60) is opens, (
        "upstream fixed this: remove guard _handle_new_peer_with_retry"
    )


async def test_a_peer_that_does_not_gossip_is_not_asked_again(autojump_clock):
    error = StreamFailure("failed to open a stream")
    error.__cause__ = MultiselectClientError("protocols not supported: ['/meshsub/1.1.0']")
    began = trio.current_time()
    assert not await opening(guards.GuardedPubsub, [error]).ensure_peer_stream(PEERS[0], 60)
    assert trio.current_time() == began


async def test_a_peer_that_is_gone_is_not_asked_again(autojump_clock):
    began, gone = trio.current_time(), trio.current_time() + 100
    one = opening(
        guards.GuardedPubsub, [slow() for _ in range(1000)], lambda: trio.current_time() < gone
    )
    assert not await one.ensure_peer_stream(PEERS[0], 1000)
    assert gone <= trio.current_time() < gone + 60
    began = trio.current_time()
    assert not await opening(
        guards.GuardedPubsub, [slow() for _ in range(1000)]
    ).ensure_peer_stream(PEERS[0], 10)
    assert trio.current_time() - began < 30


async def streams_after_silence(host):
    """The streams that the host opens to a peer once all that it opened before have gone unanswered
    for too long."""
    async with attacker.connect(host.address) as peer:
        await trio.sleep(2.5)
        first = len(peer.inbound)
        assert first
        with trio.move_on_after(8):
            while len(peer.inbound) == first:  # noqa: ASYNC110 - another process
                await trio.sleep(0.05)
            return await attacker.accept(peer.inbound[-1])
    return None


async def test_a_neighbour_that_was_busy_for_too_long_is_gossiped_with_once_it_answers():
    with processes(stock(negotiation=1), guarded(negotiation=1)) as (gives_up, persists):
        assert await streams_after_silence(gives_up) is None, (
            "upstream fixed this: remove guard _handle_new_peer_with_retry"
        )
        assert await streams_after_silence(persists) == attacker.MESHSUB
        assert await persists.serves()


@pytest.mark.parametrize(("kind", "streams"), [(Pubsub, 2), (guards.GuardedPubsub, 1)])
async def test_two_connections_to_a_peer_open_one_stream(autojump_clock, kind, streams):
    """Of two, one would take the other's place, whose sender waits for ever."""
    one, opened = opening(kind, []), []

    async def open_stream(peer):
        """As stock: it looks, waits for the stream, and only then the peer is one that has one."""
        if peer not in one.peers:
            await trio.sleep(1)
            opened.append(peer)
            one.peers[peer] = None

    vars(one).update(_handle_new_peer=open_stream)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.ensure_peer_stream, PEERS[0], 60)
        nursery.start_soon(one.ensure_peer_stream, PEERS[0], 60)
    assert len(opened) == streams, (
        "upstream fixed this: remove the second part of guard _handle_new_peer_with_retry"
    )
    assert PEERS[0] in one.peers
    assert not getattr(one, "opening", None)


async def test_a_stream_on_a_connection_that_ended_meanwhile_is_opened_again(autojump_clock):
    """The notice that the connection has ended came before anybody knew that our stream was on
    it."""
    one, connections = opening(guards.GuardedPubsub, []), [True, False]

    async def open_stream(peer):
        await trio.sleep(1)
        one.peers[peer] = SimpleNamespace(muxed_conn=SimpleNamespace(is_closed=connections.pop(0)))

    vars(one).update(_handle_new_peer=open_stream, _begin_again=lambda peer: one.peers.pop(peer))
    assert await one.ensure_peer_stream(PEERS[0], 60)
    assert connections == []


async def test_a_task_that_hangs_or_sleeps_holds_up_no_other(autojump_clock):
    one, began = opening(guards.GuardedPubsub, [slow()]), trio.current_time()
    opens = vars(one)["_handle_new_peer"]
    async with trio.open_nursery() as nursery:
        # fails, and waits for half a second
        nursery.start_soon(one.ensure_peer_stream, PEERS[0], 300)
        await trio.sleep(0.1)
        assert await one.ensure_peer_stream(PEERS[0], 60)
        assert trio.current_time() - began < 0.2
    one.peers.clear()

    async def hangs(peer):
        await trio.sleep_forever()

    vars(one).update(_handle_new_peer=hangs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.ensure_peer_stream, PEERS[0], 300)
        await trio.sleep(1)
        vars(one).update(_handle_new_peer=opens)
        began = trio.current_time()
        assert await one.ensure_peer_stream(PEERS[0], 60)
        assert 5 < trio.current_time() - began < 20
        nursery.cancel_scope.cancel()
    assert one.opening == {}


# -- subscriptions


async def test_a_topic_that_is_joined_while_the_first_message_is_written_is_told_to_the_peer(
    monkeypatch, autojump_clock
):
    peer, told = PEERS[0], []

    async def begun(self, peer_id):
        """As stock: the list of topics is made, written, and only then the peer is one of those who
        are told of changes."""
        await trio.sleep(1)
        self.subscribed_topics_receive = {"stays": None, "joined": None}
        self.peer_queues[peer_id] = object()

    monkeypatch.setattr(Pubsub, "_handle_new_peer", begun)
    one = object.__new__(guards.GuardedPubsub)
    one.host = new_host(key_pair=create_new_key_pair(bytes([1]) * 32))
    one.subscribed_topics_receive, one.peer_queues, one.opening = (
        {"stays": None, "left": None},
        {},
        {},
    )
    monkeypatch.setattr(
        one,
        "_enqueue_or_retry_announce",
        lambda to, queue, packet, announced: told.append((to, packet)),
        raising=False,
    )
    await one._handle_new_peer_with_retry(peer)
    assert [
        (to, each.topicid, each.subscribe) for to, packet in told for each in packet.subscriptions
    ] == [
        (peer, "joined", True),
        (peer, "left", False),
    ]
