"""The month's total survives the process, and a node without budget takes part no more than it can
afford."""

import time

import trio
import trio.testing

from swarmnode.config import NetworkConfig
from swarmnode.p2p import metering
from swarmnode.p2p.budget import Month
from swarmnode.p2p.gossip import Validation
from swarmnode.p2p.metering import FILE, Meter, load
from swarmnode.p2p.traffic import TrafficStatistics
from tests.support.hosts import hosts
from tests.support.waiting import until


class Traffic:
    sent = received = 0

    def __call__(self):
        return TrafficStatistics(received={"/a": self.received, "/b": 0}, sent={"/a": self.sent})


def meter(tmp_path, traffic, **caps):
    return Meter(NetworkConfig(**caps), "", tmp_path, traffic)


async def test_the_total_is_saved_when_the_process_ends_and_read_when_it_starts(
    tmp_path, autojump_clock
):
    traffic = Traffic()
    first = meter(tmp_path, traffic)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.run)
        await trio.testing.wait_all_tasks_blocked()
        traffic.sent, traffic.received = 70, 30
        nursery.cancel_scope.cancel()
    assert load(tmp_path / FILE) == Month(time.strftime("%Y-%m"), 70, 30)
    second = meter(tmp_path, Traffic(), monthly_bytes=100)
    assert not second.listening()
    assert not second.allows("publish")


async def test_the_total_is_saved_while_it_runs(tmp_path, autojump_clock):
    traffic = Traffic()
    traffic.sent = 5
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meter(tmp_path, traffic).run)
        await trio.sleep(61)
        await until((tmp_path / FILE).exists)
        saved = load(tmp_path / FILE)
        nursery.cancel_scope.cancel()
    assert saved is not None
    assert saved.sent == 5


def test_a_damaged_total_is_no_reason_not_to_start(tmp_path):
    (tmp_path / FILE).write_bytes(b'{"month": 7')
    assert meter(tmp_path, Traffic(), monthly_bytes=100).listening()


async def test_a_full_disk_costs_the_total_and_not_the_node(tmp_path, monkeypatch):
    traffic = Traffic()
    traffic.sent = 1
    (tmp_path / "file").touch()
    m = meter(tmp_path / "file", traffic)  # no directory, and none can be made
    errors = []
    monkeypatch.setattr(metering.log, "error", lambda *args: errors.append(args[0]))
    with trio.move_on_after(0.01):
        await m.run()
    assert ["cannot save" in text for text in errors] == [True]


async def test_a_host_that_left_the_topic_hears_nothing_can_still_publish_and_comes_back(tmp_path):
    async with hosts(tmp_path, 2) as (a, b):
        heard = {a: [], b: []}
        for network in (a, b):
            await network.gossip.join(
                "t",
                lambda data, peer, mine=heard[network]: (mine.append(data), Validation.ACCEPT)[1],
            )
        await until(lambda: b.gossip.statistics().mesh["t"] and a.gossip.statistics().mesh["t"])
        await b.gossip.leave("t")
        await until(lambda: not a.gossip.peers("t"))
        await a.gossip.publish("t", b"while away")
        await b.gossip.publish("t", b"from outside")
        await until(lambda: heard[a] == [b"from outside"])
        assert heard[b] == []
        await b.gossip.rejoin("t")
        await until(lambda: a.gossip.peers("t"))
        await a.gossip.publish("t", b"back")
        # at once, or when the mesh's back-off has passed: neighbours tell what they have heard
        # lately
        await until(lambda: heard[b])
