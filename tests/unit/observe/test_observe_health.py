"""Reports of a node's state on the page, in `swarmnode status` and at /readyz."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from swarmnode.drops import DropCounts
from swarmnode.link.messages import Report
from swarmnode.observe.health import policy_loaded, ready, troubles
from swarmnode.observe.history import History
from swarmnode.observe.snapshot import Health
from swarmnode.observe.status import render
from swarmnode.observe.watch import DiskStatistics, SupervisorStatistics, TrainerStatistics
from swarmnode.p2p.network import NetworkStatistics
from swarmnode.p2p.summaries import SummaryStatistics
from swarmnode.rollouts.network.admission import AdmissionStatistics
from swarmnode.rollouts.network.exchange import ExchangeStatistics
from swarmnode.stages.network.crew_service import StagesStatistics
from swarmnode.stages.network.crew_state import CrewStatistics
from swarmnode.tasks.child import ScorerStatistics
from tests.support.snapshots import STARTED_AT, example, example_at, status_of

replace = msgspec.structs.replace
UNTIL_7 = {"budget.paused": {"quiet_hours": True}, "node.quiet_hours": "22:00-07:00"}
GONE = {
    "trainer.connected": False,
    "supervisor.down": {"trainer": "KeyError: 'x' (exit code 1)"},
}
QUIET = {"trainer.age_seconds": 100.0, "trainer.report.phase": "training"}
GIB = 2**30


def at(path: str, value: Any) -> dict[str, Any]:
    return {path: value}


def changed(values: dict[str, Any], snapshot: Any = None) -> Any:
    """Return the example, or `snapshot`, with other values at these paths. A part of a path is an
    attribute or a key."""
    found = example() if snapshot is None else snapshot
    for path, value in values.items():
        name, _, rest = path.partition(".")
        inside = found[name] if isinstance(found, dict) else getattr(found, name)
        new = changed({rest: value}, inside) if rest else value
        found = {**found, name: new} if isinstance(found, dict) else replace(found, **{name: new})
    return found


def dropped(kind: str, kept: int = 10_000, **since: int) -> dict[str, Any]:
    """Only the newest items of a kind were dropped."""
    report = example().trainer.report
    assert report is not None
    counts = DropCounts(kept, since, since if kept == 10_000 else {})
    return {"trainer.report.drops": {**report.drops, kind: counts}}


def scored(rejected: int, received: int) -> dict[str, Any]:
    admission = AdmissionStatistics(rejected={"signature": rejected})
    return {"rollouts": ExchangeStatistics(received=received, admission=admission)}


def ignored(**counts: int) -> dict[str, Any]:
    return {"rollouts.admission.admitted": 9, "rollouts.admission.ignored": counts}


UNSHARED = "none of the last 20 own groups was shared, with "
CASES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    (at("swarm", SummaryStatistics(clock_offset_seconds=95.0)), "this clock is 95 s behind those"),
    (at("swarm", SummaryStatistics(clock_offset_seconds=-95.0)), "this clock is 95 s ahead of"),
    (at("swarm", SummaryStatistics(clock_offset_seconds=29.0)), ""),
    (at("swarm", SummaryStatistics()), ""),
    ({"network.peers.connected": 0, "at": STARTED_AT + 86_400.0}, "no peers connected"),
    ({"network.peers.connected": 0, "at": STARTED_AT - 86_400.0}, "no peers connected"),
    (at("disk", DiskStatistics(GIB, 100 * GIB)), "disk"),
    (at("disk", DiskStatistics(20 * GIB, 4096 * GIB)), ""),  # a small share of much
    (at("disk", DiskStatistics(GIB, 10 * GIB)), ""),  # a small disk as it was
    (at("disk", DiskStatistics()), ""),
    (at("trainer.report.state_error", "No space left"), "state is not saved: No space left"),
    ({**QUIET, "trainer.report.step_seconds": 40.0}, ""),
    ({**QUIET, "trainer.report.step_seconds": 2.0}, "the trainer has reported nothing for 100 s"),
    (at("trainer", TrainerStatistics(True, Report("evaluating"), age_seconds=300.0)), ""),
    (at("trainer", TrainerStatistics(True, Report("generating"), age_seconds=300.0)), ""),
    (UNTIL_7, "quiet hours until 07:00: no training and no sharing"),
    (scored(10, 10), ""),
    (scored(40, 100), ""),
    (scored(60, 100), "most groups from peers are rejected: their signature is not valid"),
    (at("stages.crew.stopped_seconds", 30.0), ""),
    (
        {"stages.crew.stopped_seconds": 31.0, "stages.crew.state": "preparing"},
        "the crew has taken no step for 31 s",
    ),
    (
        {"stages.own.phase": "failed", "stages.own.reason": "gate: KL 0.4"},
        "this node's stage could not be restored: gate: KL 0.4",
    ),
    (
        at("scorer", ScorerStatistics(reward_errors={"a": 2}, last_reward_error="a: Zero")),
        "the reward failed for 2 completions, which count as 0; the last error: a: Zero",
    ),
    (
        {
            "scorer": ScorerStatistics(reward_errors={"a": 2}, last_reward_error="a: Zero"),
            "trainer.report.reward_errors": {"b": 1},
            "trainer.report.last_reward_error": "b: KeyError: 'x'",
        },
        "the reward failed for 3 completions, which count as 0; the last error: b: KeyError: 'x'",
    ),
    (at("trainer.recent", {"cut_rewarded_share": 0.2}), ""),
    (at("trainer.recent", {"cut_rewarded_share": 0.25}), "25% of the answers are cut and earn 1"),
    (at("trainer.recent", {"completion_cut_share": 0.9}), ""),
    (at("trainer.recent", {"completion_cut_share": 0.95}), "95% of the answers are cut"),
    (
        {"scorer.refusals": {"own/a": 2}, "scorer.last_refusal": "own/a: import x"},
        "refused 2 actions",
    ),
    (GONE, "the trainer is not connected: KeyError: 'x' (exit code 1)"),
    ({**GONE, "trainer.report.phase": "draining"}, ""),
    (
        {"trainer.report.server.state": "away", "trainer.report.server.reason": "EngineCore died"},
        "does not sample, this node's engine does: EngineCore died",
    ),
    (dropped("update", not_finite=4), ""),
    (dropped("update", not_finite=5), "not changed for 5 steps: the gradient is not finite"),
    (dropped("update", no_signal=19), ""),
    (dropped("update", no_signal=20), "not changed for 20 steps: no group had an advantage"),
    (dropped("update", no_signal=12, overflow=8), "no group had an advantage"),
    (dropped("group", special_ids=19), ""),
    (dropped("group", special_ids=20), UNSHARED),
    (at("rollouts.unpublished_since", {"invalid": 20}), UNSHARED),
    (at("rollouts.unpublished_since", {"zero_advantage": 199}), ""),
    (at("rollouts.unpublished_since", {"zero_advantage": 200}), "all rewards of a group are equal"),
    (dropped("update", 19, not_finite=20), "20 of 39"),
    (dropped("question", 19, no_question=20), "20 of 39"),
    (dropped("message", 19, link_full=20), "20 of 39"),
    (dropped("message", 20, link_full=20), ""),
    (dropped("message", 0, link_full=19), ""),
    (dropped("update", 1, no_signal=1000), ""),  # by design
    (dropped("completion", 1, cut=1000), ""),
    (dropped("update", 1, overflow=1000), ""),
    (
        at("rollouts.judged", {"used": 1, "untokenizable": 57}),
        "most groups of peers are refused, 57 of 58: their text has no tokens here",
    ),
    (ignored(outdated=50, duplicate=500), "most groups from peers are ignored, 50 of 59"),
    (ignored(duplicate=5000, rate=500, busy=100, not_pooled=900), ""),
]
"""Changes of the example, and a part of the one trouble that is then reported."""


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_each_trouble_is_reported(changes, expected) -> None:
    found = troubles(changed(changes))
    assert len(found) == bool(expected), found
    assert all(expected in each for each in found)


def test_missing_peers_are_reported_after_a_minute() -> None:
    alone = NetworkStatistics()
    assert troubles(replace(example_at(30.0), network=alone)) == []
    assert troubles(replace(example_at(90.0), network=alone)) == [
        "no peers connected and none known"
    ]
    unshared = replace(example().node, sharing=False)
    assert troubles(replace(example_at(90.0), network=alone, node=unshared)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"network.peers.connected": 0, "network.peers.known": 0},
        {"node.sharing": False},
        {"budget.paused": {"owner": True}},
    ],
)
def test_lone_or_paused_node_reports_no_unshared_groups(changes) -> None:
    found = troubles(changed({**dropped("group", special_ids=500), **changes}))
    assert not any("shared" in each for each in found)


def test_node_with_a_problem_is_not_shown_as_ready() -> None:
    s = changed(dropped("update", not_finite=5))
    head = render(status_of(s)).splitlines()[0]
    assert "has not changed" in head
    assert "ready" not in head


NOT_LOADED = {"health": Health()}
LOADING = SupervisorStatistics(loading={"trainer": "loading, trying the policy"})


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"health": Health(policy_loaded=True, draining=True)}, ["draining"]),
        (
            {**NOT_LOADED, "stages.crew": CrewStatistics(), "stages.own": None},
            ["waits for other nodes to form a crew"],
        ),
        ({**NOT_LOADED, "stages.own.phase": "loading"}, ["its stage is not loaded yet"]),
        ({**NOT_LOADED, "stages.enabled": False}, ["the policy is not loaded yet"]),
        (
            {**NOT_LOADED, "stages.enabled": False, "supervisor": LOADING},
            ["the policy is not loaded yet: loading, trying the policy"],
        ),
        (
            {**NOT_LOADED, "stages.enabled": False, **GONE},
            ["the policy is not loaded yet", "the trainer ended: KeyError: 'x' (exit code 1)"],
        ),
    ],
)
def test_node_is_ready_without_reasons(changes, reasons) -> None:
    assert ready(changed(changes)).reasons == reasons
    assert ready(changed(changes)).ok == (not reasons)


def test_node_is_ready_once_stage_or_policy_is_loaded() -> None:
    stages, alone = example().stages, StagesStatistics()
    assert policy_loaded(None, stages)  # only the head reports
    assert policy_loaded(None, replace(stages, own=replace(stages.own, phase="active")))
    assert not policy_loaded(
        Report(phase="generating"), replace(stages, own=replace(stages.own, phase="loading"))
    )
    # the node was a head, and its crew has ended
    assert not policy_loaded(Report(phase="generating"), replace(stages, own=None))
    assert policy_loaded(Report(phase="generating"), alone)
    assert not policy_loaded(Report(phase="loading"), alone)
    assert not policy_loaded(None, alone)


def test_history_covers_the_whole_life_in_bounded_memory() -> None:
    history = History(capacity=100)
    for second in range(1000):
        history.add(replace(example(), at=STARTED_AT + second))
    at = history.columns()["at"]
    assert 50 <= len(at) <= 100
    assert at[0] == STARTED_AT
    assert at[-1] > STARTED_AT + 980
    gaps = {round(b - a) for a, b in pairwise(at)}
    assert gaps == {16}


def test_history_returns_the_requested_points_with_the_newest() -> None:
    history = History()
    for second in range(301):
        history.add(example_at(float(second)))
    columns = history.columns(points=50)
    assert {len(column) for column in columns.values()} == {43}
    assert columns["at"][-1] == STARTED_AT + 300


def test_history_continues_after_a_restart_with_a_gap(tmp_path) -> None:
    before, after = History(), History()
    for second in range(100):
        before.add(example_at(float(second)))
    before.save(tmp_path)
    after.load(tmp_path)
    after.add(example_at(160.0))
    columns = after.columns()
    assert len(columns["at"]) == 102
    assert (columns["at"][0], columns["at"][-1]) == (STARTED_AT, STARTED_AT + 160)
    assert [each is None for each in columns["reward_held_out"][99:]] == [False, True, False]
    assert columns["at"] == sorted(columns["at"])


def test_loaded_history_stays_bounded(tmp_path) -> None:
    full, after = History(capacity=50), History(capacity=50)
    for second in range(300):
        full.add(example_at(float(second)))
    full.save(tmp_path)
    after.load(tmp_path)
    assert len(after.columns()["at"]) <= 50
    text = b'{"interval": 1.0, "columns": ["at"], "rows": [["x"]]}'
    still = b'{"interval": 0.0, "columns": ["at"], "rows": [[1]]}'
    for broken in (b"", b"{", b"[]", text, still):
        (tmp_path / "log" / "history.json").write_bytes(broken)
        fresh = History()
        fresh.load(tmp_path)
        assert fresh.columns()["at"] == []
