"""The redial loop on a fake clock."""

import logging
import random

import trio

from swarmnode.errors import PeerError
from swarmnode.p2p import connection_manager
from swarmnode.p2p.connection_manager import Dialer
from swarmnode.p2p.peers import PeerTable


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
