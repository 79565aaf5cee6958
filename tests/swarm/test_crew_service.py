"""Crews over real libp2p hosts on loopback, with real control and simulated trainers: founding,
losses, hostile peers."""

import contextlib

import pytest
import trio

from swarmnode.errors import PeerError
from swarmnode.stages import wire
from swarmnode.stages.wire import CrewMember, CrewRecord, HeldBlock
from swarmnode.wire import ids
from tests.support.crew_node import MODEL, crew_node
from tests.support.hosts import host
from tests.support.waiting import until, wait_connected

pytestmark = [pytest.mark.swarm, pytest.mark.slow]


class Crew:
    """Nodes, each in its own task, so that one can be ended alone. The first host is the bootstrap
    peer of all and no node."""

    def __init__(self, directory, nursery, **options):
        self.directory, self.nursery, self.options = directory, nursery, options
        self.nodes = {}
        self.ends = {}
        self.stopped = {}
        self.known = []

    async def start(self, name, **options):
        await self.nursery.start(self._run, name, {**self.options, **options})
        return self.nodes[name]

    async def _run(self, name, options, task_status=trio.TASK_STATUS_IGNORED):
        directory = self.directory / name
        self.ends[name], self.stopped[name] = trio.Event(), trio.Event()
        async with host(directory, initial_peers=self.known) as network:
            async with crew_node(network, directory, **options) as node:
                self.nodes[name] = node
                task_status.started()
                await self.ends[name].wait()
        self.stopped[name].set()

    async def kill(self, *names):
        for name in names:
            self.ends[name].set()
            del self.nodes[name]
        for name in names:
            await self.stopped[name].wait()

    def holder(self, stage):
        """Return (name, node) of the stage's holder, according to the remaining nodes."""
        return next((name, node) for name, node in self.nodes.items() if node.stage == stage)

    def seated(self):
        return {name: node for name, node in self.nodes.items() if node.stage is not None}

    async def running(self, *, stages=3, above=0, seconds=240):
        """Wait until all stages are held in one crew by existing nodes, and steps above `above`
        were taken."""

        def all_seated():
            seated = list(self.seated().values())
            return (
                len(seated) == stages
                and len({node.crew for node in seated}) == 1
                and all(node.state == "running" and node.trainer.step > above for node in seated)
            )

        await until(all_seated, seconds=seconds)
        return min(node.trainer.step for node in self.seated().values())


@contextlib.asynccontextmanager
async def crew(directory, names="abc", **options):
    async with trio.open_nursery() as nursery, host(directory / "bootstrap") as bootstrap:
        made = Crew(directory, nursery, **options)
        made.known = [bootstrap.listen_addrs[0]]
        for name in names:
            await made.start(name)
        for node in made.nodes.values():
            with trio.fail_after(60):
                await wait_connected(node.network, len(names))
        yield made, bootstrap
        await made.kill(*list(made.nodes))


def notes(node):
    return node.service.statistics().events


async def test_three_nodes_found_a_crew_and_take_steps(tmp_path):
    async with crew(tmp_path) as (made, _):
        await made.running(above=3)
        nodes = [made.holder(stage)[1] for stage in range(3)]
        statistics = nodes[0].service.statistics()
        assert [(slot.state, slot.layers) for slot in statistics.crew.slots] == [("active", 1)] * 3
        assert (statistics.enabled, statistics.crew.state, statistics.crew.stage) == (
            True,
            "running",
            0,
        )
        assert statistics.own is not None
        assert (statistics.own.crew.hex(), statistics.own.stage) == (statistics.crew.id, 0)
        assert [slot.peer for slot in statistics.crew.slots] == [
            node.network.peer_id for node in nodes
        ]
        assert statistics.streams.open == {"frames": 2, "state": 0}
        assert 0 < statistics.crew.peer_seconds < 5
        assert all(notes(node)["broken"] == 0 for node in nodes)


async def test_killed_trainer_resumes_without_losing_a_step(tmp_path):
    async with crew(tmp_path) as (made, _):
        step = await made.running(above=3)
        name, node = made.holder(1)
        node.kill_trainer()
        await until(lambda: all(one.stage is None for one in made.nodes.values()))
        # A new process without anything in memory, so the others' copies are offered.
        node.start_trainer()
        made.nodes[name].trainer.step = 0
        await made.running(above=step, seconds=120)


async def test_spare_takes_the_stage_of_a_lost_host(tmp_path):
    async with crew(tmp_path, "abcd") as (made, _):
        step = await made.running(above=3)
        name, _ = made.holder(2)
        spare = next(node for node in made.nodes.values() if node.stage is None)
        await until(lambda: made.holder(0)[1].service.statistics().crew.offers >= 1)
        # Real trainers also store their neighbours' snapshots.
        for node in made.nodes.values():
            node.trainer.keeps = [(2, step)]
        await made.kill(name)
        await until(lambda: spare.stage == 2, seconds=120)
        await made.running(above=step, seconds=120)


async def test_restarted_network_process_rejoins_the_crew(tmp_path):
    async with crew(tmp_path) as (made, _):
        step = await made.running(above=3)
        name, node = made.holder(1)
        trainer = node.trainer
        await made.kill(name)
        again = await made.start(name)
        again.trainer.take_over(trainer)  # the trainer continues without its network process
        await made.running(above=step, seconds=120)


async def test_stopping_node_announces_its_leave(tmp_path):
    async with crew(tmp_path) as (made, _):
        await made.running(above=1)
        _, node = made.holder(2)
        others = [one for one in made.nodes.values() if one is not node]
        with trio.fail_after(5):
            await node.service.leave("its node stops")
        await until(lambda: all(one.stage is None for one in others), seconds=2)
        assert all("its node stops" in one.service.statistics().last_reason for one in others)


async def test_node_leaves_its_crew_in_quiet_hours(tmp_path):
    async with crew(tmp_path) as (made, _):
        step = await made.running(above=1)
        _, node = made.holder(1)
        node.paused = "quiet_hours"
        await until(lambda: all(one.stage is None for one in made.nodes.values()))
        node.paused = ""
        await made.running(above=step, seconds=120)


async def test_strangers_do_not_affect_a_running_crew(tmp_path):
    async with crew(tmp_path) as (made, bootstrap):
        await made.running(above=1)
        target = made.holder(1)[1]
        crew_id = bytes.fromhex(target.crew)
        peers = [node.network.peer_id for node in made.nodes.values()]
        record = CrewRecord(
            b"l" * 32, MODEL, 10**12, tuple(CrewMember(peer, 1) for peer in peers), bytes(8)
        )
        copies = tuple(HeldBlock(b"l" * 32, (1, 1, 1), i, 10**12, "memory") for i in range(3))
        for message in (
            wire.LeaveRequest(crew_id, "it is over"),
            wire.Heartbeat(crew_id, wire.MemberStatus("failed")),
            wire.ProposeRequest(record),
            wire.Offer(MODEL, 1e30, 1e30, copies),
            b"no message",
        ):
            data = message if isinstance(message, bytes) else wire.encode_message(message)
            with contextlib.suppress(PeerError):
                await bootstrap.requests.request(
                    target.network.peer_id,
                    ids.CREWS_PROTOCOL,
                    data,
                    deadline=5,
                    max_response_bytes=wire.MESSAGE_BYTES,
                )
        step = target.trainer.step
        await made.running(above=step + 3)
        assert bytes.fromhex(target.crew) == crew_id
        rejected = target.network.reputation.statistics(trio.current_time()).rejected
        assert "stages_malformed" in rejected


async def test_disabled_service_answers_no_peer(tmp_path):
    async with (
        host(tmp_path / "a") as one,
        host(tmp_path / "b", initial_peers=[one.listen_addrs[0]]) as other,
    ):
        async with crew_node(other, tmp_path / "b", mode="off"):
            await wait_connected(one)
            with pytest.raises(PeerError):
                await one.requests.request(
                    other.peer_id, ids.CREWS_PROTOCOL, b"", deadline=5, max_response_bytes=64
                )
