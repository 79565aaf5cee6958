"""Pure functions from a snapshot to verdicts.

alive     /healthz: false only if a restart of the network process would help
ready     /readyz: the node listens, and the trainer has a policy
troubles  problems for the operator; the node continues, and the page shows "needs a look"
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from swarmnode.drops import DropCounts
from swarmnode.link.messages import Report
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.stages.network.crew_service import StagesStatistics

MAX_LOOP_SILENCE = 30.0
"""Seconds without a turn of the event loop's timer after which the process counts as hung."""
LONELY_SECONDS = 60.0
"""Time without peers after the start that is not reported."""
STALL_STEPS = 4
STALL_FLOOR_SECONDS = 60.0
CLOCK_SECONDS = 30.0
"""Clock difference that is not reported. At 120 s, nodes drop each other's groups."""
STOPPED_SECONDS = 30.0
"""Time without a step of the crew that is not reported. Recovery from a neighbour takes a third."""
DISK_SHARE = 0.05
DISK_BYTES = 10 * 2**30
REJECTED_SHARE = 0.5
REJECTED_LEAST = 20

CUT_REWARDED_SHARE = 0.2
"""Share of answers in recent steps that are cut and earn 1 above which it is reported."""
CUT_SHARE = 0.9
"""Share of answers in recent steps cut at the length limit above which it is reported."""
NOT_FINITE_STEPS = 5
STEPS_WITHOUT_UPDATE = 20
"""Steps in a row without an update after which it is reported."""
UNSHARED_GROUPS = 20
"""Unshared own groups with an advantage, in a row and with peers, after which it is reported."""
UNSHARED_SILENT_GROUPS = 200
"""The same, with groups without an advantage included."""
MOST_SHARE, MOST_LEAST = 0.5, 20
"""Share of dropped items, and number of dropped items, above which it is reported."""
EXPECTED_DROPS = {
    "update": frozenset({"no_signal", "overflow"}),
    "completion": frozenset({"cut"}),
    "group": frozenset({"zero_advantage", "budget", "disabled"}),
}
"""Reasons of normal operation, by kind. They do not count as dropped for MOST_SHARE."""
EXPECTED_REFUSALS = frozenset(
    {"own", "duplicate", "sequence_reused", "greylisted", "rate", "busy", "not_pooled"}
)
"""Reasons to ignore a peer's group that do not depend on its content."""
REASON_TEXTS = {
    "no_signal": "no group had an advantage",
    "not_finite": "the gradient is not finite",
    "overflow": "the gradient is beyond float16",
    "refused": "the crew took no step",
    "no_question": "the task has no question",
    "not_scored": "the scorer fails",
    "cut": "the answers end at the length limit",
    "zero_advantage": "all rewards of a group are equal",
    "budget": "a byte cap is reached",
    "rate": "there are more than sharing.groups_per_second allows",
    "oversize": "they are longer than a message",
    "invalid": "they break the rules of the swarm",
    "no_policy": "the trainer has not reported its model",
    "failed": "an exception was raised; see the log",
    "untokenizable": "their text has no tokens here",
    "special_ids": "the answers contain tokens without text",
    "forged_ids": "their tokens do not spell their text",
    "no_ids": "they have no token ids",
    "spot_check": "their log-probabilities differ from those computed here",
    "surprise": "they are too improbable under this node's policy",
    "improbable": "this node almost never samples the tokens of their rewarded answers",
    "drift": "they contain a token that is rare in own rewarded answers",
    "temperature": "their temperature is far from this node's",
    "too_large": "they do not fit into memory",
    "no_gradient": "their scores or gradients are not finite",
    "too_long": "they are too long",
    "outdated": "their policy is too old",
    "stale": "they are too old",
    "future": "they are dated ahead of this clock",
    "charset": "the answers contain control characters",
    "scorer": "this node's scorer fails",
    "link_full": "the network process was not connected",
    "signature": "their signature is not valid in this swarm",
    "seed": "their question does not belong to their author",
    "agreement": "they break the rules of the manifest",
    "tokens": "they claim fewer tokens than their text has",
    "turns": "their episodes have more or fewer turns than the task",
    "trajectory": "a replay of their episodes has another end here",
}
"""Reasons as text; other reasons are shown by name."""

PAUSE_TEXTS = {
    "quiet_hours": "quiet hours{until}: no training and no sharing",
    "owner": "paused by its owner: `swarmnode resume` continues",
}
"""Reasons to pause as text."""


class Verdict(msgspec.Struct, frozen=True):
    ok: bool
    reasons: list[str] = []
    """Reasons against it, one sentence each; empty if ok."""


def _verdict(reasons: list[str]) -> Verdict:
    return Verdict(not reasons, reasons)


def alive(silence_seconds: float) -> Verdict:
    """Return False if the network process hangs.

    Args:
        silence_seconds: time since the last turn of the event loop's timer.
    """
    if silence_seconds > MAX_LOOP_SILENCE:
        return _verdict([f"the event loop has not run for {silence_seconds:.0f} s"])
    return _verdict([])


def ready(s: NodeSnapshot) -> Verdict:
    """Return True if the policy, or this node's stage of it, is loaded. The network process answers
    only once the network listens.

    A draining node is not ready. A node without peers is, because it can train alone. A node whose
    policy needs a crew is not ready without one.
    """
    reasons = []
    if s.health.draining:
        reasons.append("draining")
    if s.node.trainer and not s.health.policy_loaded:
        waiting = (
            "waits for other nodes to form a crew"
            if s.stages.crew.stage is None
            else "its stage is not loaded yet"
        )
        doing = s.supervisor.loading.get("trainer", "")
        loading = f"the policy is not loaded yet{': ' if doing else ''}{doing}"
        reasons.append(waiting if s.stages.enabled else loading)
        if why := s.supervisor.down.get("trainer"):
            reasons.append(f"the trainer ended: {why}")
    return _verdict(reasons)


def policy_loaded(report: Report | None, stages: StagesStatistics) -> bool:
    """Return True if the trainer has loaded the policy, or this node's stage of it.

    Args:
        report: the trainer's last report.
    """
    if stages.enabled:
        return stages.own is not None and stages.own.phase == "active"
    return report is not None and report.phase != "loading"


def troubles(s: NodeSnapshot) -> list[str]:
    """Return the problems of a running node."""
    found = []
    if s.node.sharing and s.budget.paused.get("month"):
        found.append("the monthly byte limit is reached; sharing is paused until the next month")
    end = s.node.quiet_hours.partition("-")[2]
    found += [
        text.format(until=f" until {end}" if end else "")
        for reason, text in PAUSE_TEXTS.items()
        if s.budget.paused.get(reason)
    ]
    if s.successor.problems:
        problems = "; ".join(s.successor.problems)
        found.append(
            f"the founder signed a successor, {s.successor.name!r}, that this node cannot follow:"
            f" {problems}"
        )
    elif s.successor.swarm:
        found.append(
            f"the founder signed a successor, {s.successor.name!r}: `swarmnode manifest follow`"
            " moves this node there"
        )
    # the clock may have been set back
    uptime = abs(s.at - s.node.started_at)
    report, age = s.trainer.report, s.trainer.age_seconds
    stopping = report is not None and report.phase == "draining"
    if s.node.trainer and s.health.policy_loaded and not s.trainer.connected and not stopping:
        why = s.supervisor.down.get("trainer")
        found.append(f"the trainer is not connected{': ' if why else ''}{why or ''}")
    if (
        s.leads
        and s.trainer.connected
        and report is not None
        and age is not None
        and report.step_seconds is not None  # the first step may take long
        and report.phase not in ("loading", "paused", "draining")
    ):
        limit = max(STALL_FLOOR_SECONDS, STALL_STEPS * report.step_seconds)
        if age > limit:
            found.append(f"the trainer has reported nothing for {age:.0f} s")
    if report is not None and report.state_error:
        found.append(f"the trainer's state is not saved: {report.state_error}")
    if s.node.sharing and s.network.peers.connected == 0 and uptime > LONELY_SECONDS:
        found.append("no peers connected" + ("" if s.network.peers.known else " and none known"))
    own, stopped = s.stages.own, s.stages.crew.stopped_seconds
    if own is not None and own.phase == "failed":
        found.append(
            f"this node's stage could not be restored{': ' if own.reason else ''}{own.reason}"
        )
    if stopped is not None and stopped > STOPPED_SECONDS:
        found.append(f"the crew has taken no step for {stopped:.0f} s")
    offset = s.swarm.clock_offset_seconds
    if offset is not None and abs(offset) > CLOCK_SECONDS:
        found.append(
            f"this clock is {abs(offset):.0f} s {'behind' if offset > 0 else 'ahead of'} those of"
            " most peers"
        )
    if (
        s.disk.free_bytes is not None
        and s.disk.total_bytes
        and s.disk.free_bytes < min(DISK_BYTES, DISK_SHARE * s.disk.total_bytes)
    ):
        found.append(
            f"the disk of the data directory has {s.disk.free_bytes / 2**20:.0f} MiB left; state"
            " may not be saved"
        )
    found += _stuck(s)
    found += _mostly_dropped(s)
    rejected = sum(s.rollouts.admission.rejected.values())
    if rejected >= REJECTED_LEAST and rejected > REJECTED_SHARE * s.rollouts.received:
        found.append(
            f"most groups from peers are rejected: {_main_reason(s.rollouts.admission.rejected)}"
        )
    failed = sum(s.scorer.reward_errors.values()) + (
        sum(report.reward_errors.values()) if report is not None else 0
    )
    if failed:
        last = (
            report.last_reward_error
            if report is not None and report.last_reward_error
            else s.scorer.last_reward_error
        )
        found.append(
            f"the reward failed for {failed} completions, which count as 0; the last error: {last}"
        )
    refused = sum(s.scorer.refusals.values()) + (
        sum(report.refusals.values()) if report is not None else 0
    )
    if refused:
        last = (report.last_refusal if report is not None else "") or s.scorer.last_refusal
        found.append(
            f"the scorer's sandbox refused {refused} actions of a task's code, so its rewards may"
            f" be wrong; the last: {last}; do this at the top of the module"
        )
    if report is not None and report.server is not None and report.server.reason:
        server = report.server
        found.append(
            f"the vLLM server at {server.url} does not sample, this node's engine does:"
            f" {server.reason}"
        )
    if report is not None and report.learning_problem:
        found.append(report.learning_problem)
    cut, rewarded = (
        s.trainer.recent.get(name, 0.0) for name in ("completion_cut_share", "cut_rewarded_share")
    )
    if cut > CUT_SHARE:
        found.append(
            f"{cut:.0%} of the answers are cut at"
            " training.max_completion_length: raise it, or let the model answer briefly"
        )
    if rewarded > CUT_REWARDED_SHARE:
        found.append(
            f"{rewarded:.0%} of the answers are cut and earn 1, so the policy does"
            ' not learn to stop: set training.options = ["mask_truncated"], or nothing_after for'
            " a dataset"
        )
    if report is not None and report.oom_retries_total and report.micro_batch_tokens:
        found.append(
            f"memory ran out; micro-batches were reduced to {report.micro_batch_tokens} tokens"
        )
    return found


def _stuck(s: NodeSnapshot) -> list[str]:
    """Return problems of a policy that does not change, and of groups that reach no peer."""
    report = s.trainer.report
    if report is None or not s.trainer.connected or not s.leads:
        return []
    found = []
    skipped = _drops(report, "update").since_kept
    if (
        skipped.get("not_finite", 0) >= NOT_FINITE_STEPS
        or sum(skipped.values()) >= STEPS_WITHOUT_UPDATE
    ):
        found.append(
            f"the policy has not changed for {sum(skipped.values())} steps: {_main_reason(skipped)}"
        )
    if not s.node.sharing or not s.network.peers.connected or any(s.budget.paused.values()):
        return found
    for unshared in (_drops(report, "group").since_kept, s.rollouts.unpublished_since):
        silent = unshared.get("zero_advantage", 0)
        total = sum(unshared.values())
        if total - silent >= UNSHARED_GROUPS or total >= UNSHARED_SILENT_GROUPS:
            found.append(
                f"none of the last {total} own groups was shared, with"
                f" {s.network.peers.connected} peers connected: {_main_reason(unshared)}"
            )
    return found


def _mostly_dropped(s: NodeSnapshot) -> list[str]:
    """Return each kind of item that is mostly dropped, with the most frequent reason."""
    admission, report = s.rollouts.admission, s.trainer.report
    own = DropCounts(s.rollouts.published, s.rollouts.unpublished)
    counts = [("own groups are not published", "group", own)]
    if report is not None:
        counts += [
            ("steps change nothing", "update", _drops(report, "update")),
            ("questions are not asked", "question", _drops(report, "question")),
            ("held-out questions are not asked", "held_out", _drops(report, "held_out")),
            ("own groups are not shared", "group", _drops(report, "group")),
            ("completions are dropped", "completion", _drops(report, "completion")),
            ("messages between the processes are lost", "message", _drops(report, "message")),
        ]
    judged = s.rollouts.judged
    refused = {outcome: n for outcome, n in judged.items() if outcome != "used"}
    ignored = {r: n for r, n in admission.ignored.items() if r not in EXPECTED_REFUSALS}
    counts += [
        ("groups of peers are refused", "judged", DropCounts(judged.get("used", 0), refused)),
        ("groups from peers are ignored", "ignored", DropCounts(admission.admitted, ignored)),
    ]
    found = []
    for text, kind, tally in counts:
        expected = EXPECTED_DROPS.get(kind, frozenset())
        dropped = {reason: n for reason, n in tally.dropped.items() if reason not in expected}
        lost, total = sum(dropped.values()), tally.kept + sum(tally.dropped.values())
        if lost >= MOST_LEAST and lost > MOST_SHARE * total:
            found.append(f"most {text}, {lost} of {total}: {_main_reason(dropped)}")
    return found


def _drops(report: Report, kind: str) -> DropCounts:
    return report.drops.get(kind, DropCounts())


def _main_reason(counts: Mapping[str, int]) -> str:
    """Return the most frequent reason of `counts` as text."""
    reason = max(counts, key=lambda each: counts[each])
    return REASON_TEXTS.get(reason, reason.replace("_", " "))
