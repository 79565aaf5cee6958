"""The verdict of the demo with a crew: each condition can fail."""

from dataclasses import replace

import pytest

from swarmnode.demo.crew import StageKill, judge_crew
from swarmnode.demo.nodes import View

KILL = StageKill(
    stage=2, name="node2", step_before=40, at=50.0, step_after=41, seconds=6.5, source="checkpoint"
)
GOOD = {"formed_at": 20.0, "kills": [KILL], "held_out": (0.02, 0.4), "crashed": []}
VIEWS = [(f"node{i}", View(stage=i, stage_step=90)) for i in range(4)]


def failed(**changes):
    return [
        finding.text
        for finding in judge_crew(**{"views": VIEWS, **GOOD, **changes})
        if not finding.ok
    ]


def test_a_good_run_has_no_failure():
    assert failed() == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"formed_at": None}, "the crew formed after –"),
        ({"views": [("node0", View())]}, "took 0 steps"),
        ({"held_out": (0.02, 0.05)}, "held-out reward 0.020 → 0.050"),
        ({"held_out": (0.02, None)}, "held-out reward 0.020 → –"),
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


def test_latency_skips_the_held_out_reward():
    assert failed(held_out=None) == []
    assert len(failed(held_out=None, kills=[])) == 1
