"""Verdict of the demo: findings of counted facts from the status of the nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnode.demo.nodes import rise_of
from swarmnode.link.messages import Report
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.weights.local import WeightsReport

ACCEPTED_OUTCOMES = ("accepted", "lagging")
"""Outcomes of swaps that are no refusal."""
LOST_STEPS = 6
"""Steps that a killed node may lose: the time of two saves of the state, each less than two seconds
on a busy disk."""


@dataclass(frozen=True)
class Finding:
    """One line of the verdict."""

    text: str
    ok: bool


@dataclass(frozen=True)
class Kill:
    """A node that was killed with SIGKILL, before the kill and after its restart."""

    name: str
    peer_before: str
    step_before: int
    saved_before: int
    """Step of the last saved state, as reported before the kill."""
    step_after: int | None = None
    """First step after the restart; None if the node has not returned."""
    peer_after: str = ""


def judge(
    nodes: Sequence[tuple[str, NodeSnapshot]],
    *,
    shares: bool,
    questions: int = 0,
    liars: Sequence[str] = (),
    kills: Sequence[Kill] = (),
    crashed: Sequence[str] = (),
) -> list[Finding]:
    """Judge a demo.

    Args:
        nodes: (name, last status) of each honest node.
        shares: True if the nodes share groups and average weights.
        questions: Number of held-out questions.
        liars: Peer ids of the liars.
        crashed: One line for each node that ended before the demo.
    """
    killed = {kill.name for kill in kills}
    findings = []
    for name, status in nodes:
        report = status.trainer.report or Report("loading")
        rise = rise_of(report)
        findings.append(
            Finding(
                f"{name}: held-out reward {rise} on the same {questions} questions, after"
                f" {rise.step} steps",
                rise.is_significant,
            )
        )
        if shares:
            honest = {peer: n for peer, n in report.peers_used.items() if peer not in liars}
            groups = sum(honest.values())
            swaps = (report.weights or WeightsReport()).exchanges_total
            refused = {
                cause: count
                for cause, count in status.weights.judged.items()
                if cause not in ACCEPTED_OUTCOMES
            }
            findings += [
                Finding(f"{name}: trained on {groups} groups of {len(honest)} peers", groups > 0),
                Finding(f"{name}: averaged {swaps} times; refused: {_counts(refused)}", swaps > 0),
            ]
        if liars:
            accepted = sum(report.peers_used.get(liar, 0) for liar in liars)
            rejected, reputation = status.rollouts.admission.rejected, status.network.reputation
            findings += [
                Finding(
                    f"{name}: rejected groups: {_counts(rejected)}; peers greylisted:"
                    f" {reputation.greylisted}, banned: {reputation.banned}",
                    # A killed node counts since its restart: on a busy machine, for a few steps.
                    any(rejected.values()) or name in killed,
                ),
                Finding(
                    f"{name}: trained on {accepted} groups of the Byzantine node", accepted == 0
                ),
            ]
        if name not in killed:
            restarts = sum(status.supervisor.restarts.values())
            findings.append(Finding(f"{name}: {restarts} restarts", restarts == 0))
    for kill in kills:
        kept = kill.step_after is not None and kill.step_after >= max(
            kill.saved_before, kill.step_before - LOST_STEPS
        )
        returned = kept and kill.peer_after == kill.peer_before
        after = "never" if kill.step_after is None else f"at step {kill.step_after}"
        before = f"killed at step {kill.step_before} (saved: {kill.saved_before})"
        findings.append(
            Finding(f"{kill.name}: {before}, returned {after} with the same key", returned)
        )
    return [*findings, *(Finding(line, False) for line in crashed)]


def _counts(numbers: Mapping[str, int]) -> str:
    most_first = sorted(numbers.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} {n}" for cause, n in most_first if n) or "none"
