"""Two crews of two real nodes each: the nodes that the first one does not need form the second, and
each stage is averaged with the same stage of the other crew."""

import pytest

from swarmnode.demo.nodes import ACCEPTED_OUTCOMES, DemoNode
from swarmnode.policy.build_deep import write_deep_model
from tests.support.whole_crew import (
    snapshot,
    stage_view,
    start,
    stop,
    until,
    whole_settings,
)

pytestmark = [pytest.mark.swarm, pytest.mark.long, pytest.mark.timeout(600)]

STAGES = 2


class Crews:
    """Of four nodes, by the id of the crew that each says it is in."""

    def __init__(self, nodes):
        self.nodes = nodes

    def seen(self):
        """crew → stage → (node, all that it says of itself); as far as they answer and hold a
        stage."""
        found = {}
        for node in self.nodes:
            told = snapshot(node) if node.started else None
            view = None if told is None else stage_view(told)
            if view is not None and view["stage"] is not None:
                found.setdefault(view["id"], {})[view["stage"]] = (node, {**told, "view": view})
        return found

    def running(self, step=0):
        seen = self.seen()
        views = [told["view"] for stages in seen.values() for _, told in stages.values()]
        well = (
            len(seen) == 2
            and len(views) == len(self.nodes)
            and all(v["state"] == "running" and v["step"] >= step for v in views)
        )
        return seen if well else None

    def story(self):
        return [
            (
                crew[:8],
                stage,
                told["view"]["state"],
                told["view"]["step"],
                told["view"]["source"],
                told["weights"]["pairs"],
            )
            for crew, stages in self.seen().items()
            for stage, (_, told) in sorted(stages.items())
        ]


@pytest.fixture(scope="module")
def crews(tmp_path_factory):
    directory = tmp_path_factory.mktemp("crews")
    # Two layers, so that both crews are split alike; steps so small that the gate finds nothing in
    # what two crews differ by; and no third crew is there to compare the second one's state with.
    model = write_deep_model(directory / "model", layers=2, tied=False)
    sections = {
        "weights": {"sync_every": 2, "fragments": 1, "join_from_one": True},
        "training": {"learning_rate": 1e-6, "step_interval": 0.3},
    }
    nodes = [
        DemoNode(f"node{i}", directory / f"node{i}", whole_settings(model, i, STAGES, **sections))
        for i in range(2 * STAGES)
    ]
    made = Crews(nodes)
    try:
        start(nodes)
        until(made.running, made.story)
        yield made
    finally:
        stop(nodes)


def peers(seen):
    """stage → the two nodes that hold it."""
    return {
        stage: {stages[stage][1]["node"]["peer"] for stages in seen.values()}
        for stage in range(STAGES)
    }


def averaged(crews):
    """Once every stage has been averaged with somebody."""
    seen = crews.running(1)
    told = [] if seen is None else [told for stages in seen.values() for _, told in stages.values()]
    done = told and all(t["weights"]["pairs"] for t in told)
    return seen if done else None


def test_each_stage_is_averaged_with_the_same_stage_of_the_other_crew_and_with_no_other(crews):
    seen = until(lambda: averaged(crews), crews.story)
    same = peers(seen)
    for stages in seen.values():
        for stage, (_, told) in stages.items():
            assert set(told["weights"]["pairs"]) == same[stage] - {told["node"]["peer"]}
            assert told["weights"]["candidates"] == 1
    # The crew that is ahead may step alone while the other one, which is behind, takes what it is
    # given.
    for stage in range(STAGES):
        judged = [stages[stage][1]["weights"]["judged"] for stages in seen.values()]
        accepted = set(ACCEPTED_OUTCOMES) - {"lagging"}
        assert any(each.get(outcome) for each in judged for outcome in accepted)
