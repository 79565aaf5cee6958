"""Dropped and replaced peers, and the effect of many hostile identities. Pure."""

import math
import random
from typing import NamedTuple

import pytest

from benchmarks.eclipse import Attack, Swarm
from swarmnode.p2p import peers
from swarmnode.p2p.addresses import PUBLIC
from swarmnode.p2p.peers import PeerTable
from swarmnode.p2p.turnover import (
    SETTLED_SECONDS,
    SILENT_SECONDS,
    Liveness,
    PeerLink,
    peer_to_replace,
    peers_to_drop,
)


def links(count, *, inbound=True, since=0.0, group=None, spare=True, name="p"):
    return [
        PeerLink(f"{name}{number}", inbound, since + number, group, spare)
        for number in range(count)
    ]


def address(number):
    return f"/ip4/20.{number // 250}.{number % 250}.1/tcp/4001"


def table(target=16):
    return PeerTable("own", target, random.Random(0))


def connect(known, peer, *, inbound=False, now=0.0):
    known.record_connected(peer, inbound=inbound, now=now)
    if not inbound:
        known.record_dialled(peer, known.get(peer).addresses[0], now)


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
    connect(known, "p0")
    connect(known, "p1")
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
    connect(known, "boot")
    connect(known, "p")
    known.record_disconnected("boot", 100.0)
    assert known.to_dial(200.0) == []
    assert [dial.peer for dial in known.to_dial(100.0 + 2 * peers.IDLE_BOOTSTRAP_BACKOFF)] == [
        "boot"
    ]
    alone = table(target=1)
    alone.add("boot", address(0), "bootstrap", 0.0)
    connect(alone, "boot")
    alone.record_disconnected("boot", 100.0)
    assert [dial.peer for dial in alone.to_dial(120.0)] == ["boot"]


def test_reports_of_inbound_peers_are_ignored_once_enough():
    known = table()
    for number in range(9):
        known.add(f"p{number}", address(number), "exchange", 0.0)
    connect(known, "p8", inbound=True)
    for number in range(7):
        connect(known, f"p{number}")
    assert known.accepts_reports("p8")
    connect(known, "p7")
    assert not known.accepts_reports("p8")
    assert known.accepts_reports("p0")
    assert not known.accepts_reports("unknown")


def test_rejected_newcomer_ignores_reports_of_inbound_peers():
    known = table()
    for name in ("boot", "other"):
        known.add(name, address(len(name)), "bootstrap", 0.0)
    known.add("finder", address(9), "exchange", 0.0)
    connect(known, "finder", inbound=True)
    for _ in range(peers.TRIES_TO_GET_IN):
        assert not known.accepts_reports("finder")
        known.record_failed("boot", 0.0)
    assert known.accepts_reports("finder")  # an unreachable bootstrap peer does not isolate a node
    known.add("third", address(7), "bootstrap", 0.0)
    connect(known, "other")
    assert known.accepts_reports("finder")


def crowded():
    """Return a table with eight outbound and ninety inbound peers."""
    known = table()
    for number in range(8):
        known.add(f"out{number}", address(number), "exchange", 0.0)
        connect(known, f"out{number}")
    for number in range(90):
        known.record_connected(f"guest{number}", inbound=True, now=0.0)
        known.add_self_reported(f"guest{number}", address(100 + number), 0.0)
    return known


def test_peer_that_dials_all_is_not_shared_by_all():
    known = crowded()
    known.add("boot", address(200), "bootstrap", 0.0)
    shared = [peer for peer, _ in known.peers_to_share(32, exclude="x", scope=PUBLIC)]
    assert sum(peer.startswith("out") for peer in shared) == 8
    assert sum(peer.startswith("guest") for peer in shared) == 8 // peers.GUEST_SHARE
    for number in range(8):
        known.record_disconnected(f"out{number}", 100.0)
    assert len(known.peers_to_share(32, exclude="x", scope=PUBLIC)) == 32


def test_node_without_bootstrap_shares_inbound_peers():
    shared = [peer for peer, _ in crowded().peers_to_share(32, exclude="x", scope=PUBLIC)]
    assert sum(peer.startswith("guest") for peer in shared) > 20


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
        connect(known, dial.peer, now=10.0)
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
