"""The verdict of the demo with a crew: each condition can fail."""

from dataclasses import replace

import pytest

from swarmnode.demo.crew import StageKill, judge_crew
from swarmnode.demo.nodes import Rise
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.stages.crew_messages import StageStatus
from swarmnode.stages.network.crew_service import StagesStatistics

KILL = StageKill(
    stage=2, name="node2", step_before=40, at=50.0, step_after=41, seconds=6.5, source="checkpoint"
)
GOOD = {"formed_at": 20.0, "kills": [KILL], "rise": Rise(0.02, 0.01, 0.4, 0.03), "crashed": []}
NODES = [
    NodeSnapshot(stages=StagesStatistics(own=StageStatus(b"", i, "active", 90))) for i in range(4)
]


def failed(**changes):
    return [
        finding.text
        for finding in judge_crew(**{"nodes": NODES, **GOOD, **changes})
        if not finding.ok
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"formed_at": None}, "the crew formed after –"),
        ({"nodes": [NodeSnapshot()]}, "took 0 steps"),
        ({"rise": Rise(0.02, 0.01, 0.08, 0.03)}, "held-out reward 0.020 ± 0.010 → 0.080 ± 0.030"),
        ({"rise": Rise(0.02, 0.01)}, "held-out reward 0.020 ± 0.010 → –"),
        ({"kills": []}, "killed 0 stages"),
        (
            {"kills": [replace(KILL, step_after=None, seconds=None)]},
            "stage 2 killed at step 40: not restored",
        ),
        ({"kills": [replace(KILL, step_after=38)]}, "stage 2 killed at step 40"),
        ({"kills": [replace(KILL, source="")]}, "restored from ?"),
        ({"crashed": ["node1 ended with exit code 1: boom"]}, "node1 ended"),
    ],
)
def test_each_condition_can_fail(changes, problem):
    (text,) = failed(**changes)
    assert problem in text
