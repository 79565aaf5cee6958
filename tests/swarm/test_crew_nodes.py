"""Three real nodes hold one policy in stages. They find each other, train, and survive the loss of
any node without losing a step."""

import signal
import time

import pytest

from swarmnode.policy.build_deep import write_deep_model
from tests.support.forked_node import ForkedNode
from tests.support.waiting import snapshot, wait_for
from tests.support.whole_crew import (
    PATIENCE,
    WholeCrew,
    child_of,
    kill_trainers,
    start,
    stop,
    trainer_of,
    whole_settings,
)

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

STAGES = 3
"""The smallest number with a stage that has two neighbours, both of which can be lost together."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_deep_model(tmp_path_factory.mktemp("model"), layers=6)


@pytest.fixture(scope="module")
def crew(tmp_path_factory, model):
    directory = tmp_path_factory.mktemp("crew")
    made = WholeCrew(
        [
            ForkedNode(f"node{i}", directory / f"node{i}", whole_settings(model, i, STAGES))
            for i in range(STAGES)
        ],
        [],
        STAGES,
    )
    try:
        made.address = start(made.nodes)
        wait_for(lambda: made.at(6), made.story)
        yield made
    finally:
        stop(made.nodes)


def test_crew_trains_and_only_the_head_publishes(crew):
    seen = wait_for(lambda: crew.at(6), crew.story)
    whole = {stage: snapshot(node) for stage, (node, _) in seen.items()}
    assert whole[0]["rollouts"]["published"] > 0
    assert whole[0]["trainer"]["report"]["step"] >= 6
    assert not any(whole[stage]["rollouts"]["published"] for stage in (1, 2))
    assert all(view["streams"].get("frames") == STAGES - 1 for _, view in seen.values())
    assert {s["node"]["peer"] for s in whole.values()} == {
        slot["peer"] for slot in seen[0][1]["slots"]
    }


@pytest.mark.parametrize("stages", [(0,), (1, 2)])
def test_killed_trainers_lose_no_committed_step(crew, stages):
    def kill(nodes):
        kill_trainers([nodes[stage] for stage in stages])

    before, after = crew.lose(kill)
    for stage in stages:
        assert after[stage][1]["source"] in ("checkpoint", "neighbour"), crew.story()
    for stage in set(range(STAGES)) - set(stages):
        assert trainer_of(after[stage][0]) is not None
        assert after[stage][0] is before[stage][0]


def test_killed_network_process_loses_no_committed_step(crew):
    trainers = {}

    def kill(nodes):
        trainers.update({stage: trainer_of(node).pid for stage, node in nodes.items()})
        child_of(nodes[1], "swarmnode.daemon.node").send_signal(signal.SIGKILL)

    _, after = crew.lose(kill)
    assert {stage: trainer_of(node).pid for stage, (node, _) in after.items()} == trainers, (
        "no trainer had to be restarted"
    )


def test_spare_replaces_a_lost_node(crew, model, tmp_path):
    spare = ForkedNode("spare", tmp_path / "spare", whole_settings(model, STAGES, STAGES))
    crew.nodes.append(spare)
    spare.start(crew.address)
    spare.wait_for_address(time.monotonic() + PATIENCE)
    wait_for(
        lambda: (s := snapshot(crew.seen()[0][0])) and s["stages"]["crew"]["offers"], crew.story
    )

    def kill(nodes):
        nodes[1].kill()
        crew.nodes.remove(nodes[1])

    _, after = crew.lose(kill)
    node, view = after[1]
    assert node is spare
    assert view["source"] in ("neighbour", "base"), crew.story()
