"""The outer rule in numbers: when it is stable, what lag costs, how the outer step counter goes on.
No torch.

    δ ← α δ + β (θ̄ − φ) ;  φ ← φ + δ ;  θ ← φ          θ̄: mean of my θ and my partner's

That is NoLoCo (arXiv 2506.10911, equations 1 to 3) with γ = β, in which case the slow weights φ of
the partner cancel and only θ has to travel. `gossip` is the same line with α = 0 and β = 1. The
paper's form with two tensors, DiLoCo and the theory of how fast replicas agree are in
benchmarks/outer_rules.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from typing import Final, Literal

import msgspec

RuleName = Literal["noloco", "gossip"]
ALPHA: Final = 0.5
BETA: Final = 0.7
LARGEST_OUTER_STEP: Final = 10**8
"""No swarm has taken more outer steps: one a second for three years. A newcomer believes no state
that claims to have."""
WITNESSES: Final = 3
"""Partners too far behind us, and most of those met lately, after which our own counter is taken
for wrong."""
MAX_LAG: Final = 4.0
"""Outer steps. A partner further behind is served our weights, and its own are not mixed in."""


class Rule(msgspec.Struct, frozen=True):
    """One way to take an outer step. Make it with `make_rule`, which checks it."""

    name: str
    alpha: float
    """Momentum of δ."""
    beta: float
    """Outer learning rate."""


def make_rule(name: str = "noloco", alpha: float = ALPHA, beta: float = BETA) -> Rule:
    """The rule `name`; alpha and beta are NoLoCo's. Raises ValueError for an unknown name or an
    unstable pair."""
    if name == "gossip":
        return Rule(name, 0.0, 1.0)
    if name != "noloco":
        raise ValueError(f"no outer rule {name!r}: noloco or gossip")
    check_stability(alpha, beta)
    return Rule(name, alpha, beta)


def check_stability(alpha: float, beta: float) -> None:
    """Raises ValueError unless 0 ≤ α < 1 and 0 < β < 2(1 − α²): outside, replicas drift apart
    whatever they learn.

    The bound follows from the second moments of disagreement and momentum in the mean over random
    pairs (benchmarks/outer_rules.py). The paper's own bound (its equation 74) is neither necessary
    nor sufficient.
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"outer momentum alpha must be in [0, 1), not {alpha}")
    bound = 2 * (1 - alpha**2)
    if not 0 < beta < bound:
        raise ValueError(
            f"beta {beta} with alpha {alpha} makes replicas diverge: it must be in (0, {bound:.3g})"
        )


def mixing_weight(lag: float) -> float:
    """w of θ̄ = θ_i + w (θ_j − θ_i) for a partner `lag` outer steps behind us: ½ / (1 + lag), never
    above ½ for one that is ahead.

    A lag is a peer's claim; lying about it can only lower its own weight.
    """
    return 0.5 / (1.0 + max(0.0, lag))


def too_far_behind(lag: float) -> bool:
    """Whether a partner `lag` outer steps behind has more to gain from us than we from it."""
    return lag > MAX_LAG


def excess(lags: Collection[int]) -> int:
    """By how much our outer step counter is wrong, where the partners met lately were so many outer
    steps behind us: 0 where it is right.

    Whoever was told an absurd one as a newcomer would mix with nobody for ever. WITNESSES of them,
    and most of them, have to be too far behind, and the one in the middle says how far: a few that
    agree on a lie must not part us from all the others.
    """
    behind = sum(too_far_behind(lag) for lag in lags)
    return statistics.median_low(lags) if behind >= WITNESSES and 2 * behind > len(lags) else 0


def next_outer_step(mine: int, theirs: int | None) -> int:
    """Our outer step counter after an outer step; `theirs` is the partner's claim, None after a
    solo step.

    One more, and another one while we are behind, so that nodes of unequal speed that keep meeting
    stay comparable. A liar moves it by one.
    """
    return mine + 1 + int(theirs is not None and theirs > mine)
