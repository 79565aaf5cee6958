"""The peer table with fake time, dropped and replaced peers, and many hostile identities. Pure."""

import math
import random
from typing import NamedTuple

import pytest

from benchmarks.eclipse import Attack, Swarm
from swarmnode.p2p import peers
from swarmnode.p2p.addresses import LOOPBACK, PUBLIC
from swarmnode.p2p.peers import PeerTable
from swarmnode.p2p.turnover import (
    SETTLED_SECONDS,
    SILENT_SECONDS,
    Liveness,
    PeerLink,
    peer_to_replace,
    peers_to_drop,
)


def address(index: int, port: int = 4001) -> str:
    """Return a public address in a /24 of its own."""
    return f"/ip4/{20 + index // 250}.{index % 250}.7.1/tcp/{port}"


def table(target: int = 16, seed: int = 0) -> PeerTable:
    return PeerTable("own", target, random.Random(seed))


def names(dials) -> list[str]:
    return [dial.peer for dial in dials]


def connect(table: PeerTable, peer: str, now: float) -> None:
    table.record_dialled(peer, table.get(peer).addresses[0], now)
    table.record_connected(peer, inbound=False, now=now)


def test_bootstrap_peer_is_dialled_without_limit():
    t = table()
    t.add("b", address(0), "bootstrap", 0.0)
    now, waits = 0.0, []
    for _ in range(500):
        assert names(t.to_dial(now)) == ["b"]
        t.record_failed("b", now)
        waits.append(t.next_due(now))
        now += waits[-1]
    assert waits[0] <= 1.0
    assert max(waits) <= peers.BOOTSTRAP_BACKOFF
    assert min(waits[10:]) >= peers.BOOTSTRAP_BACKOFF / 2
    assert len(set(waits[10:])) > 400  # jitter: a swarm does not come back in step


def test_backoff_is_longer_unless_all_are_lost():
    t = table()
    t.add("x", address(0), "mdns", 0.0)
    t.add("friend", address(1), "mdns", 0.0)
    t.get("x").last_seen = 0.0  # it worked before, so it is not forgotten
    connect(t, "friend", 0.0)

    def wait_after_failures(now: float) -> float:
        for _ in range(15):
            t.record_failed("x", now)
        return t.get("x").due - now

    assert peers.OTHER_BACKOFF / 2 <= wait_after_failures(0.0) <= peers.OTHER_BACKOFF
    t.record_disconnected("friend", 100.0)
    assert wait_after_failures(100.0) <= peers.BOOTSTRAP_BACKOFF


def test_unreachable_peer_is_forgotten_unless_bootstrap():
    t = table()
    for peer, source in (("b", "bootstrap"), ("x", "exchange"), ("friend", "mdns")):
        t.add(peer, address(len(peer)), source, 0.0)
    connect(t, "friend", 0.0)
    for _ in range(peers.HOPELESS_NEVER_CONNECTED):
        t.record_failed("x", 1.0)
        t.record_failed("b", 1.0)
    assert t.get("x") is None
    assert t.get("b") is not None
    assert t.statistics().forgotten == 1


def test_no_peer_is_forgotten_during_an_outage():
    t = table()
    for index in range(20):
        t.add(f"x{index}", address(index), "exchange", 0.0)
    for _ in range(50):
        for index in range(20):
            t.record_failed(f"x{index}", 1.0)
    assert t.statistics().known == 20


def test_bootstrap_then_recently_seen_peers_are_dialled():
    t = table()
    t.add("x", address(0), "exchange", 0.0)
    t.restore("old", [address(1)], last_seen=-1000.0, now=0.0)
    t.restore("new", [address(2)], last_seen=-10.0, now=0.0)
    t.add("b", address(3), "bootstrap", 0.0)
    assert names(t.to_dial(1.0)) == ["b", "new", "old", "x"]


def test_full_node_still_retries_one_bootstrap_peer():
    t = table(target=1)
    t.add("x", address(0), "mdns", 0.0)
    connect(t, "x", 0.0)
    t.add("b", address(1), "bootstrap", 0.0)
    assert names(t.to_dial(0.0)) == ["b"]  # two halves of a swarm must be able to meet
    connect(t, "b", 0.0)
    t.add("c", address(2), "bootstrap", 0.0)
    assert t.to_dial(0.0) == []
    assert t.next_due(0.0) >= peers.IDLE_BOOTSTRAP_BACKOFF / 2


def test_self_and_connected_peers_are_not_dialled():
    t = table()
    assert not t.add("own", address(0), "bootstrap", 0.0)
    t.add("x", address(1), "bootstrap", 0.0)
    assert names(t.to_dial(1.0)) == ["x"]
    assert t.to_dial(1.0) == []
    connect(t, "x", 1.0)
    assert t.to_dial(1e6) == []
    assert t.next_due(1.0) == math.inf


def test_short_connections_cause_backoff():
    t = table()
    t.add("x", address(0), "bootstrap", 0.0)
    now = 0.0
    for _ in range(12):
        now += t.next_due(now)
        t.to_dial(now)
        connect(t, "x", now)
        t.record_disconnected("x", now + 0.5)
    assert t.next_due(now + 0.5) >= peers.BOOTSTRAP_BACKOFF / 2


def test_banned_peer_is_neither_stored_nor_dialled():
    banned: set[str] = set()
    t = PeerTable("own", 16, random.Random(0), may_connect=lambda peer, now: peer not in banned)
    t.add("b", address(0), "bootstrap", 0.0)
    t.add("x", address(1), "mdns", 0.0)
    connect(t, "x", 0.0)
    banned |= {"b", "x", "y"}
    t.record_disconnected("x", 1.0)
    assert t.get("x") is None
    assert not t.add("y", address(2), "exchange", 1.0)
    assert t.to_dial(1.0) == []
    banned.clear()
    assert names(t.to_dial(1.0 + peers.OTHER_BACKOFF)) == ["b"]  # a person configured it


def test_strangers_cannot_fill_the_table():
    t = table()
    t.add("b", address(0), "bootstrap", 0.0)
    t.record_connected("friend", inbound=True, now=0.0)
    for index in range(peers.MAX_PEERS + 50):
        t.add(f"x{index}", address(index), "exchange", float(index))
    assert t.statistics().known == peers.MAX_PEERS
    assert t.get("b") is not None
    assert t.connected() == ["friend"]


def test_one_public_prefix_cannot_fill_the_table():
    t = table()
    for index in range(100):
        t.add(f"x{index}", f"/ip4/9.9.9.{index}/tcp/1", "exchange", 0.0)
    assert t.statistics().known == peers.PEERS_PER_PREFIX
    assert t.statistics().refused == 100 - peers.PEERS_PER_PREFIX
    assert t.add("elsewhere", "/ip4/9.9.8.1/tcp/1", "exchange", 0.0)
    for index in range(50):
        assert t.add(f"m{index}", f"/ip4/192.168.1.{index}/tcp/1", "mdns", 0.0)
        assert t.add(f"l{index}", f"/ip4/127.0.0.1/tcp/{index + 1}", "exchange", 0.0)


def test_working_addresses_are_kept():
    t = table()
    for port in range(1, 30):
        t.add("x", address(0, port), "exchange", 0.0)
    assert len(t.get("x").addresses) == peers.ADDRESSES_PER_PEER
    t.record_dialled("x", address(0, 3), 0.0)
    for port in range(30, 60):
        t.add("x", address(0, port), "exchange", 0.0)
    assert t.get("x").addresses[0] == address(0, 3)
    assert len(t.get("x").addresses) == peers.ADDRESSES_PER_PEER


def test_reports_shorten_backoff_once_a_minute():
    t = table()
    t.add("x", address(0), "exchange", 0.0)
    for _ in range(4):
        t.record_failed("x", 0.0)
    t.record_failed("x", 0.0)
    assert t.next_due(0.0) > 2.0
    t.add("x", address(0), "exchange", 0.0)
    assert t.next_due(0.0) <= 2.0
    t.record_failed("x", 1.0)
    t.add("x", address(0), "exchange", 1.0)
    assert t.next_due(1.0) > 2.0


def test_reported_addresses_are_not_passed_on():
    t = table()
    t.record_connected("x", inbound=True, now=0.0)
    t.add("x", address(0), "exchange", 0.0)  # a liar's word
    t.add_self_reported("x", address(1), 0.0)  # its own, seen there
    assert t.peers_to_share(32, exclude="", scope=PUBLIC) == [("x", [address(1)])]
    t.record_dialled("x", address(2), 0.0)
    assert t.peers_to_share(32, exclude="", scope=PUBLIC) == [("x", [address(2), address(1)])]
    assert t.get("x").addresses == [address(2), address(0), address(1)]


def test_only_reachable_connected_peers_are_shared():
    t = table()
    t.add("public", address(0), "exchange", 0.0)
    t.add("here", "/ip4/127.0.0.1/tcp/1", "exchange", 0.0)
    t.add("away", address(1), "exchange", 0.0)
    connect(t, "public", 0.0)
    connect(t, "here", 0.0)
    assert t.peers_to_share(32, exclude="", scope=PUBLIC) == [("public", [address(0)])]
    assert sorted(peer for peer, _ in t.peers_to_share(32, exclude="", scope=LOOPBACK)) == [
        "here",
        "public",
    ]
    assert t.peers_to_share(32, exclude="public", scope=PUBLIC) == []
    assert len(t.peers_to_share(1, exclude="", scope=LOOPBACK)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_events_keeps_the_table_sound(seed):
    rng = random.Random(seed)
    t = table(target=4, seed=seed)
    now, open_connections = 0.0, {}
    for _ in range(2000):
        now += rng.expovariate(2.0)
        peer = f"p{rng.randrange(40)}"
        event = rng.randrange(7)
        if event == 0:
            t.add(peer, address(rng.randrange(500)), rng.choice(peers.SOURCES), now)
        elif event == 1:
            t.record_connected(peer, inbound=rng.random() < 0.5, now=now)
            open_connections[peer] = open_connections.get(peer, 0) + 1
        elif event == 2 and open_connections.get(peer):
            t.record_disconnected(peer, now)
            open_connections[peer] -= 1
        elif event == 3:
            t.record_failed(peer, now)
        elif event == 4:
            t.record_dialled(peer, address(rng.randrange(500)), now)
        elif event == 5:
            t.restore(peer, [address(rng.randrange(500))], now - 5.0, now)
        else:
            for dial in t.to_dial(now):
                assert dial.addresses
                assert not open_connections.get(dial.peer)
        assert set(t.connected()) == {each for each, count in open_connections.items() if count}
        statistics = t.statistics()
        assert statistics.known <= peers.MAX_PEERS
        assert statistics.known == sum(statistics.known_by_source.values())
        assert t.next_due(now) >= 0.0


def test_pinned_peer_is_dialled_first():
    t = table(target=1)
    for index, name in enumerate(("friend", "member", "other")):
        t.add(name, address(index), "exchange", 0.0)
    connect(t, "friend", 0.0)
    assert names(t.to_dial(10.0)) == []
    t.pin(["member", "unknown"], 10.0)
    assert names(t.to_dial(10.0)) == ["member"]
    now, waits = 10.0, []
    for _ in range(50):
        t.record_failed("member", now)
        waits.append(t.next_due(now))
        now += waits[-1]
        assert names(t.to_dial(now)) == ["member"]
    assert max(waits) <= peers.PINNED_BACKOFF
    t.record_failed("member", now)
    t.pin([], now)
    assert names(t.to_dial(now + 1000.0)) == []
    assert t.next_due(now) == math.inf


def test_full_table_keeps_pinned_peers(monkeypatch):
    monkeypatch.setattr(peers, "MAX_PEERS", 3)
    t = table()
    for index in range(3):
        t.add(f"p{index}", address(index), "exchange", 0.0)
    t.pin(["p0", "p1"], 0.0)
    assert t.add("new", address(9), "exchange", 1.0)
    assert t.get("p0") is not None
    assert t.get("p1") is not None
    assert t.get("p2") is None


def test_half_of_the_peers_are_outbound():
    t = table(target=16)
    for number in range(40):
        t.record_connected(f"sybil{number}", inbound=True, now=0.0)
    for number in range(40):
        t.add(f"p{number}", f"/ip4/20.{number}.0.1/tcp/1", "exchange", 0.0)
    dialled = [each.peer for each in t.to_dial(100.0, limit=40)]
    assert len(dialled) == 8
    for peer in dialled:
        t.record_connected(peer, inbound=False, now=100.0)
        t.record_dialled(peer, t.get(peer).addresses[0], 100.0)
    assert t.to_dial(200.0, limit=40) == []
    assert t.next_due(200.0) == math.inf
    t.record_disconnected(dialled[0], 300.0)
    assert len(t.to_dial(1000.0, limit=40)) == 1


def links(count, *, inbound=True, since=0.0, group=None, spare=True, name="p"):
    return [
        PeerLink(f"{name}{number}", inbound, since + number, group, spare)
        for number in range(count)
    ]


def test_full_bootstrap_drops_its_oldest_inbound_peers():
    assert peers_to_drop(links(75), 100, 1000.0) == []
    assert peers_to_drop(links(80), 100, 1000.0) == ["p0", "p1", "p2", "p3", "p4"]
    # new peers have not received addresses yet
    assert peers_to_drop(links(80), 100, SETTLED_SECONDS) == ["p0"]


def test_needed_and_outbound_peers_are_kept():
    assert peers_to_drop(
        [*links(90, spare=False), *links(3, since=500.0, name="guest")], 100, 1000.0
    ) == ["guest0", "guest1", "guest2"]
    assert peers_to_drop(links(90, inbound=False), 100, 1000.0) == []


def test_largest_group_is_dropped_first():
    gone = peers_to_drop(
        [*links(60), *links(30, since=100.0, group="20.0.0.0/24", name="many")], 100, 1000.0
    )
    assert gone == [f"many{number}" for number in range(15)]


def test_oldest_outbound_half_is_never_replaced():
    outbound, inbound = links(8, inbound=False, name="out"), links(20, name="in")
    gone = {
        peer_to_replace([*inbound, *outbound], 16, 1000.0, random.Random(seed))
        for seed in range(100)
    }
    assert gone == {"out4", "out5", "out6", "out7"}
    # not before there are enough
    assert peer_to_replace([*inbound, *outbound[:7]], 16, 1000.0, random.Random(0)) is None
    assert peer_to_replace([*outbound], 16, 1000.0, random.Random(0)) is None
    assert (
        peer_to_replace(
            [*inbound, *links(8, inbound=False, spare=False)], 16, 1000.0, random.Random(0)
        )
        is None
    )


def test_dropped_peer_cools_down():
    known = table(target=2)
    for number in range(3):
        known.add(f"p{number}", address(number), "exchange", 0.0)
    connect(known, "p0", 0.0)
    connect(known, "p1", 0.0)
    assert known.has_fresh_peers(100.0)
    known.cool_down("p0", 100.0, "exchanged")
    assert known.statistics().dropped == {"exchanged": 1, "full": 0}
    known.record_disconnected("p0", 100.0)
    assert [dial.peer for dial in known.to_dial(200.0)] == ["p2"]
    known.record_failed("p2", 200.0)
    assert not known.has_fresh_peers(201.0)
    assert "p0" in [dial.peer for dial in known.to_dial(100.0 + peers.COOL_DOWN_SECONDS + 1)]


def test_member_with_enough_peers_redials_bootstrap_late():
    known = table(target=1)
    known.add("boot", address(0), "bootstrap", 0.0)
    known.add("p", address(1), "exchange", 0.0)
    connect(known, "boot", 0.0)
    connect(known, "p", 0.0)
    known.record_disconnected("boot", 100.0)
    assert known.to_dial(200.0) == []
    assert [dial.peer for dial in known.to_dial(100.0 + 2 * peers.IDLE_BOOTSTRAP_BACKOFF)] == [
        "boot"
    ]
    alone = table(target=1)
    alone.add("boot", address(0), "bootstrap", 0.0)
    connect(alone, "boot", 0.0)
    alone.record_disconnected("boot", 100.0)
    assert [dial.peer for dial in alone.to_dial(120.0)] == ["boot"]


def test_reports_of_inbound_peers_are_ignored_once_enough():
    known = table()
    for number in range(9):
        known.add(f"p{number}", address(number), "exchange", 0.0)
    known.record_connected("p8", inbound=True, now=0.0)
    for number in range(7):
        connect(known, f"p{number}", 0.0)
    assert known.accepts_reports("p8")
    connect(known, "p7", 0.0)
    assert not known.accepts_reports("p8")
    assert known.accepts_reports("p0")
    assert not known.accepts_reports("unknown")


def test_rejected_newcomer_ignores_reports_of_inbound_peers():
    known = table()
    for name in ("boot", "other"):
        known.add(name, address(len(name)), "bootstrap", 0.0)
    known.add("finder", address(9), "exchange", 0.0)
    known.record_connected("finder", inbound=True, now=0.0)
    for _ in range(peers.TRIES_TO_GET_IN):
        assert not known.accepts_reports("finder")
        known.record_failed("boot", 0.0)
    assert known.accepts_reports("finder")  # an unreachable bootstrap peer does not isolate a node
    known.add("third", address(7), "bootstrap", 0.0)
    connect(known, "other", 0.0)
    assert known.accepts_reports("finder")


def crowded():
    """Return a table with eight outbound and ninety inbound peers."""
    known = table()
    for number in range(8):
        known.add(f"out{number}", address(number), "exchange", 0.0)
        connect(known, f"out{number}", 0.0)
    for number in range(90):
        known.record_connected(f"guest{number}", inbound=True, now=0.0)
        known.add_self_reported(f"guest{number}", address(100 + number), 0.0)
    return known


def test_peer_that_dials_all_is_not_shared_by_all():
    known = crowded()
    assert len(known.peers_to_share(32, exclude="x", scope=PUBLIC)) > 8 + 20, "no bootstrap peer"
    known.add("boot", address(200), "bootstrap", 0.0)
    shared = [peer for peer, _ in known.peers_to_share(32, exclude="x", scope=PUBLIC)]
    assert sum(peer.startswith("out") for peer in shared) == 8
    assert sum(peer.startswith("guest") for peer in shared) == 8 // peers.GUEST_SHARE
    for number in range(8):
        known.record_disconnected(f"out{number}", 100.0)
    assert len(known.peers_to_share(32, exclude="x", scope=PUBLIC)) == 32


def test_full_table_is_a_uniform_sample_of_reports():
    known = table()
    for number in range(peers.MAX_PEERS):
        known.add(f"honest{number}", address(number), "exchange", 0.0)
    for _ in range(3):
        for number in range(peers.MAX_PEERS):
            known.add(f"liar{number}", address(10_000 + number), "exchange", 1.0)
    kept = sum(known.get(f"honest{number}") is not None for number in range(peers.MAX_PEERS))
    assert math.isclose(kept / peers.MAX_PEERS, 0.5, abs_tol=0.06)


def test_crowded_networks_are_dialled_last():
    known = table()
    for number in range(8):
        known.add(f"liar{number}", f"/ip4/30.0.0.{number + 1}/tcp/1", "exchange", 0.0)
    for number in range(14):
        known.add(f"honest{number}", address(number), "exchange", 0.0)
    for _ in range(16):
        (dial,) = known.to_dial(10.0, 1)
        connect(known, dial.peer, 10.0)
        known.cancel_dial(dial.peer)
    assert sum(peer.startswith("liar") for peer in known.connected()) == 2


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_few_nodes_are_surrounded_with_a_full_bootstrap(share):
    outcome = Swarm(Attack(nodes=160, share=share, networks=4, minutes=40, places=40)).run()
    assert outcome.surrounded < 0.05  # half of them were, once


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_hostile_identities_surround_no_node(share):
    outcome = Swarm(Attack(nodes=80, share=share, networks=4, minutes=60)).run()
    assert outcome.surrounded == 0
    assert outcome.hostile_dialled < share
    still = Swarm(Attack(nodes=80, share=share, networks=4, minutes=60, turnover=False)).run()
    assert outcome.met > still.met


class Pinged(NamedTuple):
    """A connection as seen by `Liveness`. Only its name identifies it."""

    name: str
    ping: tuple[int, bool]
    last_received: float | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pinged) and self.name == other.name


def dead(liveness: Liveness, now: float, *connections: Pinged) -> list[str]:
    return [each.name for each in liveness.dead(connections, now)]


def test_unanswered_ping_ends_the_connection():
    liveness = Liveness()
    for now in range(0, int(SILENT_SECONDS), 10):
        answered = now > 0
        assert dead(liveness, now, Pinged("gone", (1, False)), Pinged("alive", (1, answered))) == []
    last = Pinged("gone", (1, False)), Pinged("alive", (1, True))
    assert dead(liveness, SILENT_SECONDS, *last) == ["gone"]


def test_late_answer_keeps_the_connection():
    liveness = Liveness()
    for number in range(1, 20):
        at = 40.0 * number
        assert dead(liveness, at, Pinged("slow", (number, False))) == []
        assert dead(liveness, at + 20.0, Pinged("slow", (number, False))) == []
        assert dead(liveness, at + 30.0, Pinged("slow", (number, True))) == []


def test_unpinged_connection_is_alive():
    liveness = Liveness()
    assert dead(liveness, 0.0, Pinged("new", (0, False))) == []
    assert dead(liveness, 1e6, Pinged("new", (0, False))) == []
    dead(liveness, 0.0, Pinged("x", (1, False)))
    dead(liveness, 10.0)
    assert dead(liveness, 100.0, Pinged("x", (1, False))) == []


def test_received_bytes_count_as_alive():
    liveness = Liveness()
    for now in range(0, 300, 10):
        assert dead(liveness, now, Pinged("full", (1, False), now - 5.0)) == []
    assert dead(liveness, 315.0, Pinged("full", (1, False), 285.0)) == ["full"]
    assert dead(liveness, 0.0, Pinged("mute", (1, False))) == []
    assert dead(liveness, SILENT_SECONDS, Pinged("mute", (1, False))) == ["mute"]
