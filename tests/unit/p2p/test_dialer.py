"""The redial loop on a fake clock."""

import dataclasses
import logging
import random

import trio

from swarmnode.errors import PeerError
from swarmnode.p2p import connection_manager
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.connection_manager import Admission, Dialer
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.library.gater import HandshakePeer
from swarmnode.p2p.peers import PeerTable
from swarmnode.p2p.reputation import BAN, PeerScores


class World:
    """Fake connect function: peers in `up` answer; counts the dials."""

    def __init__(self, table: PeerTable) -> None:
        self.table = table
        self.up: set[str] = set()
        self.hang: set[str] = set()
        self.dials: list[tuple[float, str, str]] = []
        self.under_way = self.most = 0

    async def connect(self, peer: str, address: str) -> bool:
        self.dials.append((trio.current_time(), peer, address))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if peer in self.hang:
                await trio.sleep_forever()
            await trio.sleep(0.05)
            if peer not in self.up:
                raise PeerError("connection refused")
            self.table.record_connected(peer, inbound=False, now=trio.current_time())
            return True
        finally:
            self.under_way -= 1


def make(target: int = 16) -> tuple[PeerTable, World, Dialer]:
    table = PeerTable("own", target, random.Random(0))
    world = World(table)
    return table, world, Dialer(table, world.connect)


async def test_dead_bootstrap_is_retried_with_one_warning(autojump_clock, nursery, caplog):
    caplog.set_level(logging.INFO)
    table, world, loop = make()
    for port in (1, 2):
        table.add("b", f"/ip4/20.0.0.1/tcp/{port}", "bootstrap", trio.current_time())
    nursery.start_soon(loop.run)
    await trio.sleep(3600)
    assert len(world.dials) > 2 * 3600 / 16
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert len(warnings) == 2
    assert "connection refused" in warnings[0]
    world.up.add("b")
    await trio.sleep(16)
    assert table.connected() == ["b"]
    nursery.cancel_scope.cancel()


async def test_hanging_dial_ends_at_its_deadline(autojump_clock, nursery):
    table, world, loop = make()
    world.hang.add("b")
    for port in (1, 2):
        table.add("b", f"/ip4/20.0.0.1/tcp/{port}", "bootstrap", trio.current_time())
    start = trio.current_time()
    nursery.start_soon(loop.run)
    await trio.sleep(connection_manager.DIAL_SECONDS + 1)
    assert [(round(at - start), address[-1]) for at, _, address in world.dials] == [
        (0, "1"),
        (10, "2"),
    ]
    nursery.cancel_scope.cancel()


async def test_concurrent_dials_are_limited(autojump_clock, nursery):
    table, world, loop = make(target=40)
    for index in range(60):
        world.hang.add(f"x{index}") if index < 6 else world.up.add(f"x{index}")
        table.add(f"x{index}", f"/ip4/20.{index}.0.1/tcp/1", "mdns", trio.current_time())
    nursery.start_soon(loop.run)
    await trio.sleep(9.0)
    assert world.most <= connection_manager.MAX_CONCURRENT_DIALS
    assert len(table.connected()) >= 30
    nursery.cancel_scope.cancel()


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
