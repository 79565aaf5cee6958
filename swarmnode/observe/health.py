"""From a snapshot to verdicts. Pure, so that what an orchestrator acts on can be read and tested in
one place.

alive     /healthz: false only when a restart of the network process would help
ready     /readyz: the node does its job: it listens, and the trainer has a policy
troubles  what an operator should look at; the node goes on (the page calls it "degraded")
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from swarmnode.drops import DropCounts
from swarmnode.link.messages import Report
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.stages.service import StagesStatistics

MAX_LOOP_SILENCE = 30.0
"""Seconds without a turn of the event loop's own ticker after which the process counts as hung."""
QUIET_SECONDS = 60.0
"""A node may be without peers this long before anybody is told."""
STALL_STEPS = 4
STALL_FLOOR_SECONDS = 60.0
CLOCK_SECONDS = 30.0
"""Peers' clocks may be this far from ours; at 120 s they stop taking our groups, or we theirs."""
STANDING_SECONDS = 30.0
"""A crew may stand still this long before anybody is told: a stage comes back from a neighbour in a
third of that."""
DISK_SHARE = 0.05
DISK_BYTES = 10 * 2**30
REJECTED_SHARE = 0.5
REJECTED_LEAST = 20

COLLAPSED_SHARE = 0.9
"""Share of majorities with one answer above which the operator is told."""
NOT_FINITE_STEPS = 5
STEPS_WITHOUT_UPDATE = 20
"""Steps in a row after which the operator is told that the policy does not change."""
UNSHARED_GROUPS = 20
"""Own groups worth sharing that may stay here in a row while peers are connected."""
UNSHARED_SILENT_GROUPS = 200
"""The same, groups without an advantage included."""
MOST_SHARE, MOST_LEAST = 0.5, 20
"""Share of what is dropped above which the operator is told, and the fewest drops that count."""
EXPECTED_DROPS = {
    "update": frozenset({"no_signal", "overflow"}),
    "completion": frozenset({"cut"}),
    "group": frozenset({"zero_advantage", "budget", "disabled"}),
}
"""Reasons that are no fault, by what is dropped. They count as kept where most is looked for."""
EXPECTED_REFUSALS = frozenset(
    {"own", "duplicate", "sequence_reused", "greylisted", "rate", "busy", "pool_full"}
)
"""Reasons why a peer's group is ignored that say nothing of its content."""
DROP_WORDS = {
    "no_signal": "no group had an advantage",
    "not_finite": "the gradient is not finite",
    "overflow": "the gradient is beyond float16",
    "refused": "the crew takes no step",
    "no_question": "the task makes no question",
    "not_scored": "the scorer fails",
    "cut": "the answers end at the length limit",
    "zero_advantage": "all rewards of a group are equal",
    "budget": "the bytes are used up",
    "rate": "more are sampled than sharing.groups_per_second allows",
    "oversize": "they are longer than a message",
    "invalid": "they break the rules of the swarm",
    "no_policy": "the trainer has not said its model",
    "failed": "an exception was raised, see the log",
    "untokenizable": "their text has no tokens here",
    "special_ids": "the answers hold tokens without text",
    "forged_ids": "their tokens do not spell their text",
    "no_ids": "they have no token ids",
    "spot_check": "their log-probabilities are not ours",
    "surprise": "our policy would not have sampled them",
    "drift": "they have a token that own rewarded answers hardly have",
    "temperature": "their temperature is far from ours",
    "too_large": "they do not fit into memory",
    "no_gradient": "their scores or gradients are not finite",
    "too_long": "they are too long",
    "outdated": "their policy is too old",
    "stale": "they are too old",
    "future": "they are dated ahead of this clock",
    "charset": "the answers hold control characters",
    "scorer": "the scorer here fails",
    "link_full": "the network process was away",
    "signature": "their signature is not that of this swarm",
    "seed": "their question is not their sender's",
    "agreement": "they are not as the manifest says",
    "tokens": "they claim fewer tokens than their text has",
    "turns": "their episodes have more or fewer turns than the task",
    "trajectory": "their episodes end elsewhere when they are replayed here",
}
"""A reason in a sentence; another reason is shown by its name."""

RESTS = {
    "quiet_hours": "quiet hours: neither training nor sharing",
    "owner": "paused by its owner: `swarmnode resume` goes on",
    "battery": "the trainer rests: the machine runs on its battery",
    "busy": "the trainer rests: other programs want the machine",
}
"""What is said while this reason holds."""


class Verdict(msgspec.Struct, frozen=True):
    ok: bool
    reasons: list[str] = []
    """Why not, one sentence each; empty when ok."""


def _verdict(reasons: list[str]) -> Verdict:
    return Verdict(not reasons, reasons)


def alive(silence_seconds: float) -> Verdict:
    """`silence_seconds`: since the event loop's ticker last ran."""
    if silence_seconds > MAX_LOOP_SILENCE:
        return _verdict([f"the event loop's ticker has not run for {silence_seconds:.0f} s"])
    return _verdict([])


def ready(s: NodeSnapshot) -> Verdict:
    """True once the network listens and the policy, or this node's stage of it, is loaded, and
    until the node drains.

    Peers are not needed: a lone node trains. One whose policy needs a crew is not ready without
    one.
    """
    reasons = []
    if s.health.draining:
        reasons.append("draining")
    if not s.health.network_ready:
        reasons.append("network not up yet")
    if s.node.trainer and not s.health.policy_loaded:
        waiting = (
            "waits for others to hold the policy with"
            if s.stages.crew.stage is None
            else "its stage is not loaded yet"
        )
        reasons.append(waiting if s.stages.enabled else "policy not loaded yet")
        if why := s.supervisor.down.get("trainer"):
            reasons.append(f"the trainer ended: {why}")
    return _verdict(reasons)


def policy_loaded(report: Report | None, stages: StagesStatistics) -> bool:
    """Whether a node whose trainer said this last has the policy, or its stage of it, in working
    order."""
    if stages.enabled:
        return stages.own is not None and stages.own.phase == "active"
    return report is not None and report.phase != "loading"


def troubles(s: NodeSnapshot) -> list[str]:
    """What is wrong with a node that runs, worst first. Empty is good."""
    found = []
    if s.node.sharing and s.budget.paused.get("month"):
        found.append("the month's bytes are used up; sharing pauses until the next month")
    found += [words for reason, words in RESTS.items() if s.budget.paused.get(reason)]
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
    # a clock that was set back counts like one that was set forward
    uptime = abs(s.at - s.node.started_at)
    report, age = s.trainer.report, s.trainer.age_seconds
    if s.node.trainer and s.health.policy_loaded and not s.trainer.connected:
        why = s.supervisor.down.get("trainer")
        found.append(f"the trainer is not connected{': ' if why else ''}{why or ''}")
    if (
        s.leads
        and s.trainer.connected
        and report is not None
        and age is not None
        and report.phase not in ("loading", "paused", "draining")
    ):
        patience = max(STALL_FLOOR_SECONDS, STALL_STEPS * (report.step_seconds or 0.0))
        if age > patience:
            found.append(f"the trainer has reported nothing for {age:.0f} s")
    if (
        s.node.sharing
        and s.health.network_ready
        and s.network.peers.connected == 0
        and uptime > QUIET_SECONDS
    ):
        found.append("no peers connected" + ("" if s.network.peers.known else " and none known"))
    own, standing = s.stages.own, s.stages.crew.stopped_seconds
    if own is not None and own.phase == "failed":
        found.append(
            f"this node's stage could not be restored{': ' if own.reason else ''}{own.reason}"
        )
    if standing is not None and standing > STANDING_SECONDS:
        found.append(f"the crew has taken no step for {standing:.0f} s")
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
            f"{s.disk.free_bytes / 2**20:.0f} MiB are left on the data directory's disk; state may"
            " not be saved"
        )
    found += _stuck(s)
    found += _mostly_dropped(s)
    rejected = sum(s.rollouts.admission.rejected.values())
    if rejected >= REJECTED_LEAST and rejected > REJECTED_SHARE * s.rollouts.received:
        found.append(f"most groups from peers are rejected: {_why(s.rollouts.admission.rejected)}")
    failed = sum(s.scorer.reward_errors.values()) + (
        sum(report.reward_errors.values()) if report is not None else 0
    )
    if failed:
        last = (
            report.last_reward_error
            if report is not None and report.last_reward_error
            else s.scorer.last_reward_error
        )
        found.append(f"a reward failed {failed} times, each counted as 0; the last: {last}")
    if report is not None and report.server is not None and report.server.reason:
        server = report.server
        found.append(
            f"the {server.kind} server at {server.url} does not sample, the own engine does:"
            f" {server.reason}"
        )
    if report is not None and (report.top_answer_share or 0.0) > COLLAPSED_SHARE:
        found.append(
            f"{report.top_answer_share:.0%} of the majorities chose one and the same answer: stop,"
            " and go back to a state before that"
        )
    if report is not None and report.external_scale < 0.5:
        found.append("peers' groups disagree with what helps this node; fewer are used")
    if report is not None and report.oom_retries_total and report.micro_batch_tokens:
        found.append(
            f"memory ran out; micro-batches are down to {report.micro_batch_tokens} tokens"
        )
    return found


def _stuck(s: NodeSnapshot) -> list[str]:
    """The policy does not change, or nothing of this node reaches its peers."""
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
            f"the policy has not changed for {sum(skipped.values())} steps: {_why(skipped)}"
        )
    if not s.node.sharing or not s.network.peers.connected or any(s.budget.paused.values()):
        return found
    for unshared in (_drops(report, "group").since_kept, s.rollouts.unpublished_since):
        silent = unshared.get("zero_advantage", 0)
        total = sum(unshared.values())
        if total - silent >= UNSHARED_GROUPS or total >= UNSHARED_SILENT_GROUPS:
            found.append(
                f"none of the last {total} own groups was shared, with"
                f" {s.network.peers.connected} peers connected: {_why(unshared)}"
            )
    return found


def _mostly_dropped(s: NodeSnapshot) -> list[str]:
    """Return the kinds that are dropped more often than kept, with the most frequent reason."""
    admission, report = s.rollouts.admission, s.trainer.report
    own = DropCounts(s.rollouts.published, s.rollouts.unpublished)
    counts = [("own groups are not published", "group", own)]
    if report is not None:
        counts += [
            ("steps change nothing", "update", _drops(report, "update")),
            ("questions are not asked", "question", _drops(report, "question")),
            ("held-out questions are left out", "held_out", _drops(report, "held_out")),
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
    for words, kind, tally in counts:
        expected = EXPECTED_DROPS.get(kind, frozenset())
        dropped = {reason: n for reason, n in tally.dropped.items() if reason not in expected}
        lost, total = sum(dropped.values()), tally.kept + sum(tally.dropped.values())
        if lost >= MOST_LEAST and lost > MOST_SHARE * total:
            found.append(f"most {words}, {lost} of {total}: {_why(dropped)}")
    return found


def _drops(report: Report, kind: str) -> DropCounts:
    return report.drops.get(kind, DropCounts())


def _why(counts: Mapping[str, int]) -> str:
    """The most frequent of `counts` in words."""
    reason = max(counts, key=lambda each: counts[each])
    return DROP_WORDS.get(reason, reason.replace("_", " "))
