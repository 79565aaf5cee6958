"""Crews over real libp2p hosts on loopback, with real control and trainers that are active at once:
founding, leaving, pauses, strangers. tests/swarm/test_crew_nodes.py has the losses."""

import contextlib

import pytest
import trio

from swarmnode.config import StagesConfig
from swarmnode.errors import PeerError
from swarmnode.stages.crew_messages import (
    MESSAGE_BYTES,
    CrewEnd,
    CrewMember,
    CrewRecord,
    CrewStart,
    ProposeRequest,
    RefuseAnswer,
    StageAssignment,
    StageStatus,
    TrainerOffer,
    crew_id,
    decode_answer,
)
from swarmnode.stages.network.crew_service import NodeCallbacks, StageService
from swarmnode.stages.network.crew_state import MembershipSettings
from swarmnode.stages.specs import ModelCost, PartCost
from swarmnode.swarm.known import KnownPeers
from swarmnode.wire import ids, strict
from tests.support.hosts import hosts
from tests.support.waiting import until, wait_connected

pytestmark = pytest.mark.swarm

MODEL = b"\x05" * 32
LAYER = 1e9
"""Size of one layer in bytes."""
QUICK = MembershipSettings(
    tick_seconds=0.25,
    heartbeat_seconds=1.0,
    offer_seconds=2.0,
    gather_seconds=1.5,
    turn_seconds=2.0,
    discard_wait_seconds=5.0,
    join_seconds=4.0,
    gone_seconds=8.0,
    base_wait_seconds=5.0,
    strike_seconds=2.0,
)


def offer(layers):
    """Return the offer of a trainer that can hold one layer."""
    ends = PartCost(0.1 * LAYER, 0), PartCost(0.1 * LAYER, 1e5)
    cost = ModelCost(ends[0], (PartCost(LAYER, 1e6),) * layers, ends[1])
    return TrainerOffer(MODEL, 1.3 * LAYER, 1e9, cost)


class Node:
    """A stage service whose trainer is active as soon as it has a stage."""

    def __init__(self, network, directory, layers=3, known=KnownPeers(everyone=True), **config):  # noqa: B008
        self.network = network
        self.paused = ""
        self.started = False
        self._offer = offer(layers)
        self._outbox, self._inbox = trio.open_memory_channel(256)
        (directory / "run").mkdir(exist_ok=True)
        self.service = StageService(
            network,
            StagesConfig(**config),
            known,
            directory,
            NodeCallbacks(self._send_to_trainer, lambda: self.paused),
            settings=QUICK,
        )

    def _send_to_trainer(self, message):
        self._outbox.send_nowait(message)
        return True

    @property
    def crew(self):
        return self.service.statistics().crew

    async def run(self, task_status=trio.TASK_STATUS_IGNORED):
        async with trio.open_nursery() as nursery:
            await nursery.start(self.service.run)
            task_status.started()
            self.service.hello(1)
            self.service.receive(self._offer)
            async for message in self._inbox:
                match message:
                    case StageAssignment(crew, _, stage):
                        self.service.receive(StageStatus(crew, stage, "active", 0))
                    case CrewStart():
                        self.started = True
                    case CrewEnd():
                        self.started = False
                        self.service.receive(self._offer)


@contextlib.asynccontextmanager
async def nodes(directory, count, **options):
    """Yield `count` nodes and the host of a stranger, all connected."""
    async with hosts(directory, count + 1) as networks, trio.open_nursery() as nursery:
        made = []
        for number, network in enumerate(networks[:count]):
            await wait_connected(network, count)
            made.append(Node(network, directory / str(number), **options))
            await nursery.start(made[-1].run)
        yield made, networks[count]
        nursery.cancel_scope.cancel()


async def running(made):
    """Wait until all nodes are in one running crew."""
    await until(
        lambda: (
            all(node.crew.state == "running" and node.started for node in made)
            and len({node.crew.id for node in made}) == 1
            and {node.crew.stage for node in made} == set(range(len(made)))
        )
    )


def ask(stranger, node, message):
    data = message if isinstance(message, bytes) else strict.encode(message)
    return stranger.requests.request(
        node.network.peer_id, ids.CREWS_PROTOCOL, data, deadline=5, max_response_bytes=MESSAGE_BYTES
    )


async def test_a_crew_ends_when_a_member_leaves_or_pauses(tmp_path):
    async with nodes(tmp_path, 3) as (made, _):
        await running(made)
        peers = {node.crew.stage: node.network.peer_id for node in made}
        assert [slot.peer for slot in made[0].crew.slots] == [peers[stage] for stage in range(3)]
        first = made[0].crew.id
        made[1].paused = "quiet_hours"
        await until(lambda: all(node.crew.stage is None for node in made))
        made[1].paused = ""
        await running(made)
        assert made[0].crew.id != first
        with trio.fail_after(60):
            await made[2].service.leave("its node stops")
        await until(lambda: all(node.crew.stage is None for node in made[:2]), seconds=60)
        for node in made[:2]:
            assert "its node stops" in node.service.statistics().last_reason


async def test_a_stranger_joins_no_crew_and_the_log_names_the_setting(tmp_path, caplog):
    async with nodes(tmp_path, 1, layers=2, known=KnownPeers()) as ((node,), stranger):
        members = tuple(CrewMember(peer, 1) for peer in (stranger.peer_id, node.network.peer_id))
        record = CrewRecord(b"l" * 32, MODEL, 0, members, bytes(8))
        answer = await ask(stranger, node, ProposeRequest(record))
        assert decode_answer(answer) == RefuseAnswer("trust", crew_id(record))
        with pytest.raises(PeerError):
            await ask(stranger, node, b"no message")
        rejected = node.network.reputation.statistics(trio.current_time()).rejected
        assert "stages_malformed" in rejected
    assert any("stages.trust" in line for line in caplog.messages)


async def test_disabled_service_answers_no_peer(tmp_path):
    async with nodes(tmp_path, 1, mode="off") as ((node,), stranger):
        with pytest.raises(PeerError):
            await ask(stranger, node, b"")
