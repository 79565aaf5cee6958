"""The parts of the guards that need no socket."""

import types

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub, ValidationCache
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from swarmnode.errors import Refused
from swarmnode.p2p import guards
from swarmnode.p2p.guards import counting, gossip, inbox, pubsub, rpc, swarm


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(guards.importlib.metadata, "version", lambda name: "0.9.0")
    with pytest.raises(Refused, match=r"0\.9\.0"):
        guards.install()


def test_installing_twice_changes_nothing():
    guards.install()
    methods = Yamux._write_frame, Yamux.__init__
    guards.install()
    assert (Yamux._write_frame, Yamux.__init__) == methods


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("203.0.113.5", "203.0.113.6", False),
    ],
)
def test_an_ipv6_network_of_64_bits_is_one_origin(one, other, same):
    origins = [
        swarm._origin(
            types.SimpleNamespace(get_remote_address=lambda address=address: (address, 1))
        )
        for address in (one, other)
    ]
    assert (origins[0] == origins[1]) is same


def test_statistics_are_a_frozen_copy_with_every_name():
    before = guards.statistics()
    counting.fired("write_stalled")
    assert set(before.fired) == set(guards.NAMES)
    assert guards.statistics().fired["write_stalled"] == before.fired["write_stalled"] + 1
    with pytest.raises(AttributeError):
        before.fired = {}


def test_a_name_outside_the_closed_set_is_an_error():
    with pytest.raises(KeyError):
        counting.fired("something else")


def test_a_total_recounts_what_was_removed_before_it_says_no():
    held = [60]
    total = inbox.Total(lambda: 100, lambda: sum(held))
    assert not total.passes(60)
    held[:] = [10]  # 50 were read meanwhile
    assert not total.passes(50)
    held[:] = [60]
    assert total.passes(50)


def test_an_rpc_is_cut_down_to_its_caps():
    sent = rpc_pb2.RPC(publish=[rpc_pb2.Message(data=b"x")] * 300)
    sent.subscriptions.extend(
        [rpc_pb2.RPC.SubOpts(subscribe=True, topicid="t" * size) for size in (5, 500)]
    )
    sent.control.ihave.add(topicID="ours", messageIDs=[b"a", b"a", b"b" * 100])
    sent.control.ihave.add(topicID="theirs", messageIDs=[b"c"])
    sent.control.iwant.add(messageIDs=[b"a"] * 1000)
    sent.control.prune.add(topicID="ours", backoff=2**60).peers.add(peerID=b"p")
    sent.control.graft.add(topicID="theirs")
    out = rpc.parse(sent.SerializeToString(), {"ours"})
    assert len(out.publish) == 256
    assert [one.topicid for one in out.subscriptions] == ["ttttt"]
    assert [(one.topicID, list(one.messageIDs)) for one in out.control.ihave] == [("ours", [b"a"])]
    assert list(out.control.iwant[0].messageIDs) == [b"a"]
    assert out.control.prune[0].backoff == rpc.BACK_OFF_SECONDS
    assert not out.control.prune[0].peers
    assert not out.control.graft


@pytest.mark.parametrize("frame", [b"\x0a\xff", b"\xff" * 20, b"\x12\x03\x1a\x05x"])
def test_bytes_that_are_no_rpc_are_undecodable(frame):
    with pytest.raises(rpc.Undecodable):
        rpc.parse(frame, set())


def test_a_long_record_is_left_out():
    short, long = (
        rpc_pb2.RPC(senderRecord=bytes(size)).SerializeToString() for size in (300, 100_000)
    )
    assert rpc.parse(short, set()).HasField("senderRecord")
    assert not rpc.parse(long, set()).HasField("senderRecord")


@pytest.mark.parametrize("guard", [False, True])
def test_a_full_peer_store_keeps_our_own_keys(guard):
    keys = create_new_key_pair(bytes(32))
    host = new_host(key_pair=keys)
    if guard:
        guards.guard_host(host)
    address = Multiaddr("/ip4/192.0.2.1/tcp/1")
    for number in range(1100):
        host.get_peerstore().add_addrs(ID(number.to_bytes(34, "big")), [address], 7200)
    assert len(host.get_peerstore().peer_data_map) <= 1000
    if guard:
        assert host.get_public_key() == keys.public_key
    else:
        with pytest.raises(PeerStoreError):
            assert not host.get_public_key(), "upstream fixed this: remove guard guard_peerstore"


def test_a_forwarder_waits_once_its_burst_is_spent():
    pace = rpc.Pace(now=0.0)
    assert pace.wait(400, now=0.0) == 0.0
    assert pace.wait(100, now=0.0) == pytest.approx(0.5)
    assert pace.wait(1, now=10.0) == 0.0


def test_seen_messages_are_bounded(monkeypatch):
    monkeypatch.setattr(pubsub, "SEEN_MESSAGES", 3)
    seen = pubsub.Seen()
    assert [seen.add(one) for one in (b"a", b"b", b"c", b"a", b"d")] == [
        True,
        True,
        True,
        False,
        True,
    ]
    assert seen.has(b"a")  # renewed, so b was the oldest
    assert not seen.has(b"b")
    assert seen.length() == 3


def test_seen_messages_expire(monkeypatch):
    seen = pubsub.Seen()
    seen.add(b"a")
    now = pubsub.time.monotonic() + pubsub.SEEN_SECONDS + 1
    monkeypatch.setattr(pubsub.time, "monotonic", lambda: now)
    assert not seen.has(b"a")
    seen.add(b"b")
    assert seen.length() == 1


def test_the_message_cache_gives_up_its_oldest(monkeypatch):
    monkeypatch.setattr(gossip, "CACHE_BYTES", 250)
    cache = gossip.BoundedCache(3, 5)
    for number in range(4):
        cache.put(
            rpc_pb2.Message(from_id=b"p", seqno=bytes([number]), topicIDs=["t"], data=bytes(100))
        )
    assert cache.get(b"p\x00") is None
    assert cache.get(b"p\x03") is not None
    assert cache.bytes == 200
    for _ in range(5):
        cache.shift()
    assert cache.bytes == 0


def test_guard_gossip_turns_off_what_upstream_has_on():
    router = GossipSub(protocols=["/meshsub/1.1.0"], degree=8, degree_low=6, degree_high=32)
    assert router.spam_protection_enabled, (
        "upstream fixed this: remove guard spam_protection_enabled"
    )
    assert router.adaptive_gossip_enabled, (
        "upstream fixed this: remove guard adaptive_gossip_enabled"
    )
    assert router.heartbeat_interval == 120, "upstream fixed this: remove guard heartbeat_interval"
    guards.guard_gossip(router)
    assert not router.spam_protection_enabled
    assert not router.adaptive_gossip_enabled
    assert router.heartbeat_interval == 1


async def test_a_heartbeat_that_raises_is_restarted(autojump_clock):
    router = guards.guard_gossip(
        GossipSub(protocols=["/meshsub/1.1.0"], degree=8, degree_low=6, degree_high=32)
    )
    beats = []

    def mesh_heartbeat():
        beats.append(trio.current_time())
        if len(beats) == 2:
            raise RuntimeError("a heartbeat with a bug")
        return {}, {}

    router.mesh_heartbeat = mesh_heartbeat
    with trio.move_on_after(10):
        await router.heartbeat()
    assert len(beats) > 5


class Unprintable(bytes):
    def hex(self):
        raise AssertionError("a rejected message was written out as text")


@pytest.mark.parametrize(("kind", "prints"), [(Pubsub, True), (guards.GuardedPubsub, False)])
async def test_a_rejected_message_is_not_written_out(kind, prints):
    message = types.SimpleNamespace(
        from_id=bytes(38),
        seqno=bytes(8),
        topicIDs=["t"],
        data=Unprintable(b"x"),
        ByteSize=lambda: 60,
    )
    one = object.__new__(kind)
    one.router = one.scorer = None
    one.host = types.SimpleNamespace(get_id=lambda: ID(b"me"))
    one.blacklisted_peers, one.strict_signing, one._msg_id_constructor, one.peer_queues = (
        set(),
        False,
        lambda msg: msg.seqno,
        {},
    )
    one.seen_messages, one.validation_cache, one.subscribed_topics_receive = (
        pubsub.Seen(),
        ValidationCache(),
        {"t": None},
    )
    one.topic_validators = {}
    one.set_topic_validator("t", lambda forwarder, msg: False, False)
    printed = False
    try:
        await one.push_msg(ID(b"peer"), message)
    except AssertionError:
        printed = True
    assert printed is prints, (
        "upstream fixed this: remove the rejection path of GuardedPubsub.push_msg"
    )
    assert one.seen_messages.has(message.seqno) is not prints


def test_asynchronous_validators_are_refused():
    one = object.__new__(guards.GuardedPubsub)
    with pytest.raises(ValueError, match="race"):
        one.set_topic_validator("t", lambda forwarder, msg: True, True)
