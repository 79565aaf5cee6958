"""Two crews of two real nodes each: nodes that the first crew does not need form the second, and
each stage is averaged with the same stage of the other crew."""

import pytest

from swarmnode.demo.verdict import ACCEPTED_OUTCOMES
from swarmnode.policy.build_deep import write_deep_model
from tests.support.forked_node import ForkedNode
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
    """Four nodes, grouped by the crew that each reports."""

    def __init__(self, nodes):
        self.nodes = nodes

    def seen(self):
        """Return crew → stage → (node, snapshot) of the nodes that answer and hold a stage."""
        found = {}
        for node in self.nodes:
            status = snapshot(node) if node.started else None
            view = None if status is None else stage_view(status)
            if view is not None and view["stage"] is not None:
                found.setdefault(view["id"], {})[view["stage"]] = (node, {**status, "view": view})
        return found

    def running(self, step=0):
        seen = self.seen()
        views = [status["view"] for stages in seen.values() for _, status in stages.values()]
        running = (
            len(seen) == 2
            and len(views) == len(self.nodes)
            and all(v["state"] == "running" and v["step"] >= step for v in views)
        )
        return seen if running else None

    def story(self):
        return [
            (
                crew[:8],
                stage,
                status["view"]["state"],
                status["view"]["step"],
                status["view"]["source"],
                status["weights"]["pairs"],
            )
            for crew, stages in self.seen().items()
            for stage, (_, status) in sorted(stages.items())
        ]


@pytest.fixture(scope="module")
def crews(tmp_path_factory):
    directory = tmp_path_factory.mktemp("crews")
    # Two layers, so that both crews split alike. Steps are small, so that the gate accepts the
    # difference between two crews.
    model = write_deep_model(directory / "model", layers=2, tied=False)
    sections = {
        "weights": {"sync_every": 2, "fragments": 1},
        "training": {"learning_rate": 1e-6, "step_interval": 0.3},
    }
    nodes = [
        ForkedNode(f"node{i}", directory / f"node{i}", whole_settings(model, i, STAGES, **sections))
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
    """Return stage → the two nodes that hold it."""
    return {
        stage: {stages[stage][1]["node"]["peer"] for stages in seen.values()}
        for stage in range(STAGES)
    }


def averaged(crews):
    """Wait until every stage has been averaged with a peer."""
    seen = crews.running(1)
    views = (
        [] if seen is None else [view for stages in seen.values() for _, view in stages.values()]
    )
    done = views and all(view["weights"]["pairs"] for view in views)
    return seen if done else None


def test_averages_only_equal_stages_of_two_crews(crews):
    seen = until(lambda: averaged(crews), crews.story)
    same = peers(seen)
    for stages in seen.values():
        for stage, (_, status) in stages.items():
            assert set(status["weights"]["pairs"]) == same[stage] - {status["node"]["peer"]}
            assert status["weights"]["candidates"] == 1
    # The crew that is ahead may take a solo step while the other crew loads the state it receives.
    for stage in range(STAGES):
        judged = [stages[stage][1]["weights"]["judged"] for stages in seen.values()]
        accepted = set(ACCEPTED_OUTCOMES) - {"lagging"}
        assert any(each.get(outcome) for each in judged for outcome in accepted)
