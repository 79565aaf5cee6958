"""Admission of connections at the end of a handshake."""

import dataclasses

import trio

from swarmnode.p2p.addresses import Address
from swarmnode.p2p.connection_manager import Admission
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.library.gater import HandshakePeer
from swarmnode.p2p.reputation import BAN, PeerScores


@dataclasses.dataclass(frozen=True)
class Live:
    """Connection as seen by `Admission`."""

    peer: str
    remote: Address | None = None
    relay: str | None = None
    inbound: bool = True
    is_closed: bool = False


def at(host: str) -> Address:
    return Address("ip4", host, 4001)


def candidate(
    peer: str, host: str | None = None, *, inbound: bool = True, relay: str | None = None
) -> HandshakePeer:
    return HandshakePeer(peer, at(host) if host else None, inbound, relay)


def admission(
    max_connections: int = 40, members: set[str] | None = None, arrived=lambda peer: None
) -> tuple[Admission, ConnectionTable, PeerScores]:
    table, scores = ConnectionTable(), PeerScores()
    return Admission("own", table, scores, max_connections, members, arrived), table, scores


async def test_one_network_prefix_gets_a_quarter_of_the_connections():
    rule, table, _ = admission(max_connections=40)
    admitted = 0
    for index in range(20):
        if rule.admits(candidate(f"x{index}", f"9.9.9.{index}")):
            admitted += 1
            table.opened(Live(f"x{index}", at(f"9.9.9.{index}")))
    assert admitted == 10
    assert rule.admits(candidate("other", "9.9.8.1"))
    assert rule.admits(
        candidate("x30", "9.9.9.30", inbound=False)
    )  # outbound connections are exempt


async def test_loopback_has_no_prefix():
    rule, table, _ = admission(max_connections=16)
    for index in range(10):
        assert rule.admits(candidate(f"x{index}", "127.0.0.1"))
        table.opened(Live(f"x{index}", at("127.0.0.1")))


async def test_relayed_peers_count_towards_their_relay():
    rule, table, scores = admission(max_connections=16)
    for index in range(4):
        assert rule.admits(candidate(f"x{index}", relay="relay"))
        table.opened(Live(f"x{index}", relay="relay"))
    assert not rule.admits(candidate("y", relay="relay"))
    assert rule.admits(candidate("y", relay="another"))
    assert rule.admits(candidate("y", "5.5.5.5"))  # the relay's own address is not theirs
    scores.reputation.rejected("x0", "test", trio.current_time(), -BAN)
    assert scores.score("x5") == 0.0  # loopback peers share no prefix


async def test_self_banned_and_non_members_are_refused():
    rule, _, scores = admission(members={"a", "b", "own"})
    assert rule.admits(candidate("a", "9.9.9.9"))
    assert not rule.admits(candidate("stranger", "9.9.9.9"))
    assert not rule.admits(candidate("own", "9.9.9.9"))
    scores.reputation.rejected("b", "test", trio.current_time(), -BAN)
    assert not rule.admits(candidate("b", "9.9.9.9"))
    assert not rule.admits(candidate("b", "9.9.9.9", inbound=False))


async def test_only_direct_inbound_peers_count_as_arrived():
    arrived = []
    rule, _, _ = admission(members={"a", "b", "c"}, arrived=arrived.append)
    assert rule.admits(candidate("a", "9.9.9.9"))
    assert rule.admits(candidate("b", relay="relay"))
    assert rule.admits(candidate("c", "9.9.9.9", inbound=False))
    assert not rule.admits(candidate("d", "9.9.9.9"))
    assert arrived == ["a"]
