"""Mostly dropped items are reported on the page, by `swarmnode status` and in /status."""

from __future__ import annotations

import msgspec
import pytest

from swarmnode.drops import DropCounts
from swarmnode.observe.health import ready, troubles
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.status import render
from tests.support.snapshots import example

replace = msgspec.structs.replace


def dropping(kind: str, counts: DropCounts) -> NodeSnapshot:
    s = example()
    report = replace(s.trainer.report, drops={**s.trainer.report.drops, kind: counts})
    return replace(s, trainer=replace(s.trainer, report=report))


def row(kind: str, **since: int) -> NodeSnapshot:
    """Return an example in which only the newest items were dropped."""
    return dropping(kind, DropCounts(10_000, since, since))


def test_unchanged_policy_is_reported() -> None:
    assert troubles(row("update", not_finite=4)) == []
    assert troubles(row("update", not_finite=5)) == [
        "the policy has not changed for 5 steps: the gradient is not finite"
    ]
    assert troubles(row("update", no_signal=19)) == []
    assert troubles(row("update", no_signal=20)) == [
        "the policy has not changed for 20 steps: no group had an advantage"
    ]
    (mixed,) = troubles(row("update", no_signal=12, overflow=8))
    assert "no group had an advantage" in mixed


def test_node_with_a_problem_is_not_shown_as_ready() -> None:
    s = row("update", not_finite=5)
    status = {
        "snapshot": msgspec.to_builtins(s),
        "ready": msgspec.to_builtins(ready(s)),
        "troubles": troubles(s),
        "history": {},
    }
    head = render(status).splitlines()[0]
    assert "has not changed" in head
    assert "ready" not in head


@pytest.mark.parametrize("reason", ["special_ids"])
def test_no_shared_group_with_peers_is_reported(reason: str) -> None:
    peers = example().network.peers.connected
    assert troubles(row("group", **{reason: 19})) == []
    (found,) = troubles(row("group", **{reason: 20}))
    assert found.startswith(f"none of the last 20 own groups was shared, with {peers} peers")


@pytest.mark.parametrize("reason", ["invalid", "rate"])
def test_no_published_group_with_peers_is_reported(reason: str) -> None:
    s = example()
    kept = replace(s.rollouts, unpublished_since={reason: 20})
    (found,) = troubles(replace(s, rollouts=kept))
    assert "was shared" in found


def test_groups_without_advantage_are_reported_later() -> None:
    s = example()
    silent = lambda count: replace(
        s, rollouts=replace(s.rollouts, unpublished_since={"zero_advantage": count})
    )
    assert troubles(silent(199)) == []
    assert "all rewards of a group are equal" in troubles(silent(200))[0]


def test_lone_or_paused_node_reports_no_unshared_groups() -> None:
    s = row("group", special_ids=500)
    alone = replace(
        s, network=replace(s.network, peers=replace(s.network.peers, connected=0, known=0))
    )
    private = replace(s, node=replace(s.node, sharing=False))
    resting = replace(s, budget=replace(s.budget, paused={"owner": True}))
    assert not any("shared" in each for t in (alone, private, resting) for each in troubles(t))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("update", "not_finite"), ("question", "no_question"), ("message", "link_full")],
)
def test_mostly_dropped_for_a_fault_is_reported(kind: str, reason: str) -> None:
    most, half = DropCounts(19, {reason: 20}), DropCounts(20, {reason: 20})
    (found,) = troubles(dropping(kind, most))
    assert "20 of 39" in found
    assert troubles(dropping(kind, half)) == []
    assert troubles(dropping(kind, DropCounts(0, {reason: 19}))) == []


@pytest.mark.parametrize(
    ("kind", "reason"), [("update", "no_signal"), ("completion", "cut"), ("update", "overflow")]
)
def test_mostly_dropped_by_design_is_not_reported(kind: str, reason: str) -> None:
    assert troubles(dropping(kind, DropCounts(1, {reason: 1000}))) == []


def test_mostly_refused_groups_of_peers_are_reported() -> None:
    s = example()
    judged = {"used": 1, "untokenizable": 57}
    (found,) = troubles(replace(s, rollouts=replace(s.rollouts, judged=judged)))
    assert found == ("most groups of peers are refused, 57 of 58: their text has no tokens here")


@pytest.mark.parametrize("reason", ["too_long", "outdated"])
def test_mostly_ignored_groups_of_peers_are_reported(reason: str) -> None:
    s = example()
    admission = replace(s.rollouts.admission, admitted=9, ignored={reason: 50, "duplicate": 500})
    (found,) = troubles(replace(s, rollouts=replace(s.rollouts, admission=admission)))
    assert found.startswith("most groups from peers are ignored, 50 of 59")


def test_duplicates_and_groups_beyond_a_share_are_not_reported() -> None:
    s = example()
    ignored = {"duplicate": 5000, "rate": 500, "busy": 100, "not_pooled": 900}
    admission = replace(s.rollouts.admission, admitted=9, ignored=ignored)
    assert troubles(replace(s, rollouts=replace(s.rollouts, admission=admission))) == []
