"""The demo's finding about averaging: whether the replicas stay together."""

import json
from pathlib import Path

import msgspec
import pytest

from swarmnode.demo.nodes import View, parse_snapshot
from swarmnode.demo.verdict import Kill, judge
from swarmnode.link.messages import Report, WeightsReport
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.watch import TrainerStatistics
from swarmnode.weights.service import WeightsStatistics


def finding(kills=(), **fields):
    view = View(held_out_start=0.0, held_out=0.5, **fields)
    (found,) = [
        f
        for f in judge([("node0", view)], sharing=False, averaging=True, kills=kills)
        if "averaged" in f.text
    ]
    return found


@pytest.mark.parametrize(
    ("distances", "exchanges", "ok"),
    [
        ([0.01, 0.02, 0.005], 3, True),
        ([0.0055, 0.0044], 20, True),  # close all the time
        ([0.009] * 20, 20, True),
        ([0.01, 0.02], 3, False),
        ([0.03] * 20, 20, False),  # averaging that does nothing
        ([0.04, 0.045, 0.034], 3, False),
        ([0.08, 0.06, 0.03], 3, True),
        ([], 0, False),
        ([0.02, 0.01], 0, False),
        ([0.01, 0.02, 0.01, 0.005, 0.004, 0.004, 0.02], 7, True),
        ([0.012, 0.014, 0.016, 0.018, 0.02, 0.022, 0.024], 7, False),
        # two exchanges with a node that has just restarted
        ([0.015, *[0.01] * 6, 0.005, 0.005, 0.004, 0.014, 0.013], 12, True),
        ([0.001 * i for i in range(1, 22)], 21, False),
    ],
)
def test_replicas_must_stay_together(distances, exchanges, ok):
    assert finding(distances=distances, exchanges=exchanges).ok is ok


def together(runs):
    """Return whether each node's averaging is accepted.

    Args:
        runs: Name → (exchanges, distances).
    """
    views = [
        (name, View(held_out_start=0.0, held_out=0.5, exchanges=exchanges, distances=distances))
        for name, (exchanges, distances) in runs.items()
    ]
    found = judge(views, sharing=False, averaging=True)
    return [finding.ok for finding in found if "averaged" in finding.text]


def test_compares_with_the_largest_distance_of_all_nodes():
    near, far = (9, [0.012, 0.0115]), (9, [0.023, 0.009])
    assert together({"node0": near, "node1": far}) == [True, True]
    assert together({"node0": near}) == [False]
    assert together({"node0": near, "node1": (9, [0.01, 0.017])}) == [False, False]


RECORDED = json.loads((Path(__file__).parent / "averaging_runs.json").read_text())


@pytest.mark.parametrize("share", [0.5, 0.65, 0.8, 1.0])
@pytest.mark.parametrize("run", RECORDED["honest"])
def test_no_recorded_honest_run_fails(run, share):
    """A shorter run, with this share of the exchanges, does not fail either."""
    cut = {
        name: (exchanges, distances[: int(share * len(distances))])
        for name, (exchanges, distances) in run.items()
    }
    assert all(together(cut))


@pytest.mark.parametrize("run", RECORDED["without_averaging"])
def test_recorded_runs_without_averaging_fail(run):
    assert not all(together(run))


def test_a_killed_node_needs_one_exchange():
    kill = Kill("node0", "p", 3, 3, 4, "p")
    assert finding([kill], distances=[0.01, 0.02], exchanges=1).ok


def test_no_finding_without_averaging():
    assert not [f for f in judge([("node0", View())], sharing=False) if "averaged" in f.text]


def test_collects_distances_over_polls():
    def snapshot_with(distance):
        report = Report(
            phase="training", weights=WeightsReport(distance=distance, exchanges_total=2)
        )
        judged = {"accepted": 3, "not_finite": 1, "clipped": 1}
        snapshot = NodeSnapshot(
            trainer=TrainerStatistics(report=report), weights=WeightsStatistics(judged=judged)
        )
        return msgspec.to_builtins(snapshot, str_keys=True)

    view = View()
    for distance in (None, 0.02, 0.02, 0.01):
        view = parse_snapshot(snapshot_with(distance), view.distances)
    assert view.distances == [0.02, 0.01]
    assert view.exchanges == 2
    assert view.refused == {"not_finite": 1}
