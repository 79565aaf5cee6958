"""Did the demo show what it is there to show? Pure: views in, findings out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from swarmnode.demo.nodes import View

CLOSE = 0.01
"""Relative distance below which two replicas count as averaged. It is 0.69 % at most after 30
recorded runs, and 1.8 % at least after runs without averaging
(tests/unit/demo/averaging_runs.json)."""
SHRINK = 2 / 3
"""A replica that is not close yet, for example after a short run, must have come nearer than this
share of the largest distance. The share is 0.64 at most in the recorded runs after half of their
exchanges. In every run without averaging it is above 0.75 on some node."""
FEW = 5
"""So many distances or fewer are judged by the last one; twice as many, or fewer, by the median of
the last three; more by the least of them."""
RISE = 0.05
"""Least rise of held-out reward on every node. Sampling 576 answers leaves a standard error of at
most 0.02."""
LOST_STEPS = 6
"""Steps that a killed node may lose: those of two writes of the state, of less than two seconds
each on a busy disk."""


@dataclass(frozen=True)
class Finding:
    text: str
    ok: bool


@dataclass(frozen=True)
class Kill:
    """One node that was killed -9: what it had done, and what it was when it had come back."""

    name: str
    peer_before: str
    step_before: int
    saved_before: int
    """Step of the state that it said was on disk."""
    step_after: int | None = None
    """First step seen after its return; None if it never returned."""
    peer_after: str = ""


def judge(
    views: Sequence[tuple[str, View]],
    *,
    sharing: bool,
    liars: Sequence[str] = (),
    kills: Sequence[Kill] = (),
    crashed: Sequence[str] = (),
    averaging: bool = False,
) -> list[Finding]:
    """Everything that has to be true, each with its numbers. `liars`: their peer ids."""
    killed = {kill.name for kill in kills}
    furthest = max(
        (distance for name, view in views if name not in killed for distance in view.distances),
        default=0.0,
    )
    findings = []
    for name, view in views:
        start, end = view.held_out_start, view.held_out
        rose = start is not None and end is not None and end - start >= RISE
        findings.append(
            Finding(
                f"{name}: held-out reward {_number(start)} → {_number(end)} in {view.step} steps",
                rose,
            )
        )
        if sharing:
            honest = {peer: n for peer, n in view.peers_used.items() if peer not in liars}
            findings.append(
                Finding(
                    f"{name}: trained on {sum(honest.values())} groups of {len(honest)} peers",
                    sum(honest.values()) > 0,
                )
            )
        if liars:
            reasons = (
                ", ".join(
                    f"{reason} {n}"
                    for reason, n in sorted(view.rejected.items(), key=lambda item: -item[1])
                )
                or "none"
            )
            believed = sum(view.peers_used.get(liar, 0) for liar in liars)
            findings.append(
                Finding(
                    f"{name}: rejected from peers: {reasons}; peers ignored: {view.greylisted},"
                    f" banned: {view.banned}",
                    bool(view.rejected),
                )
            )
            findings.append(
                Finding(
                    f"{name}: trained on {believed} groups of the Byzantine node", believed == 0
                )
            )
        if averaging:
            findings.append(_consensus(name, view, furthest if name not in killed else None))
        if name not in killed:
            findings.append(Finding(f"{name}: {view.restarts} restarts", view.restarts == 0))
    for kill in kills:
        kept = kill.step_after is not None and kill.step_after >= max(
            kill.saved_before, kill.step_before - LOST_STEPS
        )
        came_back = kept and kill.peer_after == kill.peer_before
        after = "never" if kill.step_after is None else f"at step {kill.step_after}"
        before = f"killed -9 at step {kill.step_before} (on disk: {kill.saved_before})"
        findings.append(
            Finding(f"{kill.name}: {before}, came back {after} as the same peer", came_back)
        )
    findings += [Finding(f"{line}", False) for line in crashed]
    return findings


def _consensus(name: str, view: View, furthest: float | None) -> Finding:
    """Check that averaging keeps the replicas together.

    Replicas move apart fastest at the start, when they learn fastest. Averaging then brings them
    within `CLOSE`, or at least to `SHRINK` of the largest distance. Without averaging the distance
    grows until the end.

    Args:
        furthest: Largest distance seen by any node that was never killed. None for a node that was
            killed: it only has to average at all.

    The last exchanges may have been with a node that has just restarted and is still far away. With
    many distances the smallest of the last three is judged, because it belongs to a replica that
    was there all the time.
    """
    seen = view.distances
    if not seen:
        return Finding(f"{name}: averaged with nobody", False)
    refused = ", ".join(f"{cause} {n}" for cause, n in sorted(view.refused.items())) or "none"
    last = (
        min(seen[-3:])
        if len(seen) > 2 * FEW
        else median(seen[-3:])
        if len(seen) > FEW
        else seen[-1]
    )
    text = (
        f"{name}: averaged {view.exchanges} times; replicas were up to {max(seen):.2%} apart, then"
        f" {last:.2%}; refused: {refused}"
    )
    together = furthest is None or last <= max(CLOSE, furthest * SHRINK)
    return Finding(text, view.exchanges > 0 and together)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"
