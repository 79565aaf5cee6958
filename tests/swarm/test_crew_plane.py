"""Crews over real libp2p hosts on loopback, with real control and trainers that pretend: forming, losses, hostile peers, the end."""

import contextlib

import msgspec
import pytest
import trio

from swarmnode.crew import messages
from swarmnode.crew import plane as plane_module
from swarmnode.crew.stream_handshake import Circle
from swarmnode.errors import PeerError
from swarmnode.p2p import identity
from swarmnode.wire import ids
from tests.support.crew_node import MODEL, QUICK, crew_node
from tests.support.hosts import host
from tests.support.pipe_ends import open_pipe
from tests.support.waiting import until

pytestmark = [pytest.mark.swarm, pytest.mark.slow]

PATIENT = msgspec.structs.replace(QUICK, sigma_floor_seconds=8.0, evict_seconds=60.0, lease_seconds=60)
"""Nobody is suspected for silence within 30 s, not even on a busy machine: what happens sooner has another reason."""


class Crew:
    """Nodes, each in a task of its own, so that one can be ended alone. The first host is everybody's bootstrap peer and no node."""

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
            key = identity.load_or_create(directory / "identity.key").private_key
            async with crew_node(network, key, directory, **options) as node:
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
        """(name, node) of the stage's holder, by what the nodes that are left say."""
        return next((name, node) for name, node in self.nodes.items() if node.stage == stage)

    def seated(self):
        return {name: node for name, node in self.nodes.items() if node.stage is not None}

    async def running(self, *, stages=3, above=0, seconds=240):
        """All stages are held by nodes that are here, under one roster, and steps above `above` were taken."""

        def well():
            seated = list(self.seated().values())
            return (
                len(seated) == stages
                and len({node.epoch for node in seated}) == 1
                and all(node.state == "running" and node.trainer.step > above for node in seated)
            )

        await until(well, seconds=seconds)
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
                await node.network.wait_connected(len(names))
        yield made, bootstrap
        await made.kill(*list(made.nodes))


def notes(node):
    return node.plane.statistics().control.notes


async def test_four_nodes_form_a_crew_and_a_busy_pipe_holds_up_no_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(plane_module, "SAY_SECONDS", 60.0)
    async with crew(tmp_path, "abcd", layers=4, settings=PATIENT) as (made, _):
        await made.running(above=3, stages=4)
        nodes = [made.holder(stage)[1] for stage in range(4)]
        assert {node.epoch for node in nodes} == {1}
        assert all(node.trainer.assigned.founding for node in nodes)
        statistics = nodes[0].plane.statistics()
        assert statistics.layers == (1, 1, 1, 1)
        assert [slot.state for slot in statistics.control.slots] == ["active"] * 4
        assert [slot.peer for slot in statistics.control.slots] == [node.network.peer_id for node in nodes]
        assert statistics.pipes.open == {"frames": 3, "state": 0}
        held = nodes[0].network.host.held
        assert held == {node.network.peer_id for node in nodes[1:]}

        # as much as fits, both ways between two stages, while the crew goes on
        a = nodes[1].trainer.assigned
        ends = []
        for here, there in ((1, 2), (2, 1)):
            circle = Circle(a.crew, a.roster_epoch, here, a.members, a.stage_epochs)
            ends.append(await open_pipe(nodes[here].plane.pipes, circle, there, "state"))
        moved = [0, 0]

        async def pour(stream):
            while True:
                await stream.send_all(bytes(2**20))

        async def drink(stream, index):
            while True:
                moved[index] += len(await stream.receive_some(2**20))

        before, answered = [dict(notes(node)) for node in nodes], [set() for _ in nodes]

        def beats():
            """Both pipes are busy, and since they are every node has had answers to three heartbeats."""
            if min(moved) > 8 * 2**20:
                for seconds, node in zip(answered, nodes, strict=True):
                    seconds.add(node.plane.statistics().heartbeat_seconds)
            return min(map(len, answered)) > 3  # one may have been on its way before

        async with trio.open_nursery() as nursery:
            for index, end in enumerate(ends):
                nursery.start_soon(pour, end)
                nursery.start_soon(drink, end, index)
            await until(beats, seconds=240)
            nursery.cancel_scope.cancel()
        assert max(max(filter(None, seconds)) for seconds in answered) < PATIENT.evict_seconds / 2
        assert [notes(node)["suspected"] for node in nodes] == [each["suspected"] for each in before]
        assert all(node.state == "running" and node.epoch == 1 for node in nodes)
        assert sum(node.plane.statistics().unanswered.get("heartbeat", 0) for node in nodes) == 0


async def test_a_trainer_that_is_killed_claims_its_own_stage_again(tmp_path):
    async with crew(tmp_path) as (made, _):
        step = await made.running(above=3)
        name, node = made.holder(2)
        node.kill_trainer()
        await until(lambda: all(each.state != "running" for each in made.nodes.values()), seconds=120)
        node.start_trainer()
        again = await made.running(above=step + 3)
        assert again > step
        assert made.holder(2)[0] == name
        slots = node.plane.statistics().control.slots
        assert [slot.stage_epoch for slot in slots] == [1, 1, 2]
        assert not node.trainer.assigned.held
        others = [each for each in made.nodes.values() if each is not node]
        assert all(each.trainer.assigned.held for each in others)
        assert all(each.plane.statistics().recoveries == 1 for each in made.nodes.values())
        assert all(0 < each.plane.statistics().recovery_seconds_total < 30 for each in others)
        assert node.plane.statistics().rungs == {"R2": 1}


async def test_a_host_that_is_killed_is_suspected_at_once_and_a_spare_takes_its_stage(tmp_path):
    async with crew(tmp_path, "abcd", settings=PATIENT) as (made, _):
        step = await made.running(above=3)
        spare = next(name for name, node in made.nodes.items() if node.stage is None)
        gone, _ = made.holder(1)
        await made.kill(gone)
        left = made.seated()
        await until(lambda: all(notes(node)["suspected"] for node in left.values()), seconds=PATIENT.evict_seconds / 2)
        await made.running(above=step + 3)
        assert made.holder(1)[0] == spare
        assert all(node.epoch >= 2 for node in made.seated().values())


async def test_a_crew_that_finds_nobody_for_a_stage_ends_and_says_why(tmp_path):
    short = msgspec.structs.replace(QUICK, wait_seconds=4.0)
    async with crew(tmp_path, settings=short) as (made, _):
        await made.running(above=3)
        gone, _ = made.holder(2)
        await made.kill(gone)
        await until(lambda: all(node.state == "none" for node in made.nodes.values()), seconds=120)
        await until(lambda: all("stage 2" in node.plane.statistics().last_reason for node in made.nodes.values()))
        for node in made.nodes.values():
            assert node.trainer.assigned is None
            await until(lambda node=node: node.plane.statistics().pipes.open == {"frames": 0, "state": 0})
            await until(lambda node=node: not node.network.host.held)


async def test_who_is_left_alone_waits_for_nobody_for_ever(tmp_path):
    short = msgspec.structs.replace(QUICK, wait_seconds=4.0)
    async with crew(tmp_path, settings=short) as (made, _):
        await made.running(above=3)
        name, last = made.holder(2)
        await made.kill(*(each for each in list(made.nodes) if each != name))
        await until(lambda: last.state == "none", seconds=120)
        statistics = last.plane.statistics()
        assert statistics.last_reason
        assert statistics.control.notes["fenced"] == 1  # before anything else: it could not know that it was not the one cut off
        assert last.trainer.assigned is None


async def test_a_node_that_starts_again_finds_its_crew(tmp_path):
    async with crew(tmp_path) as (made, _):
        step = await made.running(above=3)
        name, before = made.holder(1)
        crew_of = before.plane.statistics().control.crew
        await made.kill(name)
        after = await made.start(name)
        await made.running(above=step)
        assert after.plane.statistics().control.crew == crew_of
        assert after.stage == 1


async def test_a_node_that_stops_says_so_and_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(plane_module, "LEAVE_SECONDS", 30.0)
    async with crew(tmp_path, "abcd") as (made, _):
        step = await made.running(above=3)
        gone, node = made.holder(0)
        await node.plane.leave("its node stops")
        assert node.state == "none"
        assert notes(node)["released"] == 1
        await made.kill(gone)
        await made.running(above=step + 3)
        assert all(notes(each)["evicted"] == 0 for each in made.seated().values())


async def test_in_quiet_hours_a_node_is_in_no_crew_and_comes_back_after(tmp_path):
    async with crew(tmp_path, "abcd") as (made, _):
        step = await made.running(above=3)
        _, node = made.holder(2)
        node.paused = "quiet_hours"
        await until(lambda: node.state == "none", seconds=120)
        step = await made.running(above=step + 3)
        assert node.trainer.assigned is None
        gone, _ = made.holder(0)
        node.paused = ""
        await until(lambda: all(each.plane.statistics().control.offers for each in made.seated().values()), seconds=120)
        await made.kill(gone)
        await made.running(above=step + 3)
        assert node.stage is not None


async def say(network, peer, data):
    return await network.requests.request(
        peer, ids.CREWS_PROTOCOL, data, deadline=5, max_response_bytes=messages.MESSAGE_BYTES
    )  # fmt: skip


async def test_hostile_messages_are_counted_and_harmless(tmp_path):
    async with crew(tmp_path) as (made, stranger):
        step = await made.running(above=3)
        _, node = made.holder(0)
        victim = node.network.peer_id
        roster = node.plane._control.roster
        crew_id = messages.crew_id(roster)

        for data in (b"", b"\xc1", b"\x81\xa4type\xa5offer", b"\x92\x01\x02", bytes(1000)):
            with pytest.raises(PeerError):
                await say(stranger, victim, data)
        assert node.plane.statistics().malformed == 5

        async with host(tmp_path / "liar", initial_peers=[node.network.listen_addrs[0]]) as liar:
            await liar.wait_connected()
            status = messages.Status("active", step=10**9)
            answers = [
                messages.decode_answer(await say(liar, victim, messages.encode_message(message)))
                for message in (
                    messages.Heartbeat(crew_id, roster.epoch, 1, status),
                    messages.Heartbeat(b"x" * 32, 7, 1, status),
                    messages.Leave(crew_id, roster.epoch, "I say so"),
                    messages.Prepare(crew_id, roster.epoch + 1, messages.record_hash(roster), 99, (victim,)),
                    messages.Propose(taken_over(roster, liar.peer_id), 99),
                    messages.Adopt((messages.Certificate(taken_over(roster, liar.peer_id), 99, forged(roster)),)),
                    messages.Offer(MODEL, b"i" * 8, 1e12, 1e12, 0.0),
                )
            ]
            names = [type(each).__name__ for each in answers]
            assert names[0] in ("Refuse", "Adopt")  # the roster is no secret
            assert names[1:] == ["Refuse", "Noted", "Refuse", "Refuse", "Noted", "Noted"]
            assert notes(node)["paused"] == 0
            await made.running(above=step + 3)
            assert all(each.epoch == 1 for each in made.nodes.values())
            assert all(each.plane._control.roster == roster for each in made.nodes.values())


def taken_over(roster, liar):
    """The next record, with the liar in everybody's place."""
    seats = (messages.Seat(liar, b"i" * 8, roster.seats[0].stage_epoch + 1), *roster.seats[1:])
    return msgspec.structs.replace(
        roster, crew=messages.crew_id(roster), epoch=roster.epoch + 1, previous=messages.record_hash(roster), seats=seats,
        voters=messages.voters_of(roster),
    )  # fmt: skip


def forged(roster):
    return tuple(messages.Signed(voter.peer, voter.incarnation, bytes(64)) for voter in messages.voters_of(roster))


async def test_without_a_disk_nothing_is_voted_for(tmp_path, monkeypatch):
    full = [True]
    written = plane_module.write_atomically

    def write(path, data):
        if full[0] and path.parent.name == "b":
            raise OSError(28, "No space left on device")
        written(path, data)

    monkeypatch.setattr(plane_module, "write_atomically", write)
    monkeypatch.setattr(plane_module, "SAVE_SECONDS", 0.1)
    async with crew(tmp_path) as (made, _):
        await until(lambda: made.nodes["b"].plane.statistics().unsaved >= 3)
        assert made.nodes["b"].trainer.assigned is None
        full[0] = False
        await made.running(above=3)


async def test_switched_off_it_answers_nobody(tmp_path):
    async with crew(tmp_path, "a", mode="off") as (made, stranger):
        with pytest.raises(PeerError):
            await say(stranger, made.nodes["a"].network.peer_id, messages.encode_message(messages.Noted()))
        assert not made.nodes["a"].plane.statistics().enabled
        assert not (tmp_path / "a" / "run" / "stages.sock").exists()
