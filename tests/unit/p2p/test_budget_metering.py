"""The monthly total survives a restart, and a node over its budget stops optional transfers."""

import time

import trio
import trio.testing

from swarmnode.config import NetworkConfig
from swarmnode.p2p.budget import BUDGET_FILE, Meter, Month, TrafficStatistics, load_month
from tests.support.waiting import until


class Traffic:
    sent = received = 0

    def __call__(self):
        return TrafficStatistics(received={"/a": self.received, "/b": 0}, sent={"/a": self.sent})


def meter(tmp_path, traffic, **caps):
    return Meter(NetworkConfig(**caps), "", tmp_path, traffic)


async def test_month_total_survives_a_restart(tmp_path, autojump_clock):
    traffic = Traffic()
    first = meter(tmp_path, traffic)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.run)
        await trio.testing.wait_all_tasks_blocked()
        traffic.sent, traffic.received = 70, 30
        nursery.cancel_scope.cancel()
    assert load_month(tmp_path / BUDGET_FILE) == Month(time.strftime("%Y-%m"), 70, 30)
    second = meter(tmp_path, Traffic(), monthly_bytes=100)
    assert not second.has_room("fetch")
    assert not second.allows("publish")


async def test_the_total_is_saved_while_it_runs(tmp_path, autojump_clock):
    traffic = Traffic()
    traffic.sent = 5
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meter(tmp_path, traffic).run)
        await trio.sleep(61)
        await until((tmp_path / BUDGET_FILE).exists)
        saved = load_month(tmp_path / BUDGET_FILE)
        nursery.cancel_scope.cancel()
    assert saved is not None
    assert saved.sent == 5


def test_damaged_total_starts_at_zero(tmp_path):
    (tmp_path / BUDGET_FILE).write_bytes(b'{"month": 7')
    assert meter(tmp_path, Traffic(), monthly_bytes=100).has_room("fetch")
