"""Verdict of the demo: findings from the views of the nodes. Pure."""

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
"""Up to `FEW` distances, the last one is judged. Up to `2 * FEW`, the median of the last three, and
beyond that the smallest of the last three."""
RISE = 0.05
"""Least rise of the held-out reward on every node. The standard error of 576 sampled answers is at
most 0.02."""
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
    views: Sequence[tuple[str, View]],
    *,
    sharing: bool,
    liars: Sequence[str] = (),
    kills: Sequence[Kill] = (),
    crashed: Sequence[str] = (),
    averaging: bool = False,
) -> list[Finding]:
    """Judge a demo.

    Args:
        views: (name, view) of each honest node.
        sharing: True if the nodes share groups.
        liars: Peer ids of the liars.
        crashed: One line for each node that ended before the demo.
        averaging: True if the nodes average weights.
    """
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
            accepted = sum(view.peers_used.get(liar, 0) for liar in liars)
            findings.append(
                Finding(
                    f"{name}: rejected groups: {reasons}; peers greylisted: {view.greylisted},"
                    f" banned: {view.banned}",
                    bool(view.rejected),
                )
            )
            findings.append(
                Finding(
                    f"{name}: trained on {accepted} groups of the Byzantine node", accepted == 0
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
        returned = kept and kill.peer_after == kill.peer_before
        after = "never" if kill.step_after is None else f"at step {kill.step_after}"
        before = f"killed at step {kill.step_before} (saved: {kill.saved_before})"
        findings.append(
            Finding(f"{kill.name}: {before}, returned {after} with the same key", returned)
        )
    findings += [Finding(f"{line}", False) for line in crashed]
    return findings


def _consensus(name: str, view: View, furthest: float | None) -> Finding:
    """Check that averaging keeps the replicas together.

    Replicas diverge fastest at the start, when they learn fastest. Averaging then brings them
    within `CLOSE`, or at least to `SHRINK` of the largest distance. Without averaging, the distance
    grows until the end.

    The last exchanges may have been with a node that has just restarted and is still far away. With
    many distances, the smallest of the last three is judged, because it belongs to a replica that
    was not restarted.

    Args:
        furthest: Largest distance of any node that was never killed. None for a killed node, which
            only needs one exchange.
    """
    seen = view.distances
    if not seen:
        return Finding(f"{name}: averaged with no peer", False)
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
