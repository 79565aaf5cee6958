"""The outer rule in numbers: what it is called, when it is stable, how fast replicas agree, what lag costs. No torch.

    δ ← α δ + β (θ̄ − φ) ;  φ ← φ + δ ;  θ ← φ          θ̄: mean of my θ and my partners'

That is NoLoCo (arXiv 2506.10911, equations 1 to 3) with γ = β, in which case the slow weights φ of the partner cancel and only θ has to
travel. All rules here are this line with other α, β and partners.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Partners = Literal["one", "all", "none"]

MAX_LAG: Final = 4.0
"""Outer steps. A partner further behind is offered our state instead of being averaged with."""
PAIR: Final = 0.5
"""Share of the disagreement that averaging with one partner removes in the mean, of many replicas."""


class Rule(msgspec.Struct, frozen=True):
    """One way to take an outer step. Make it with `make_rule`, which checks it."""

    name: str
    alpha: float
    """Momentum of δ."""
    beta: float
    """Outer learning rate."""
    gamma: float
    """Pull towards the partner's φ; equal to `beta` except in the two-tensor form."""
    partners: Partners


_DEFAULTS: Final[dict[str, tuple[float, float, Partners]]] = {
    "noloco": (0.5, 0.7, "one"),
    "noloco_two": (0.5, 0.7, "one"),
    "gossip": (0.0, 1.0, "one"),
    "diloco": (0.3, 0.7, "all"),
    "off": (0.0, 1.0, "none"),
}
RULES: Final = ("noloco", "gossip", "diloco", "off")
"""What a person can choose. `noloco_two` is the paper's form with twice the bytes, for tests and benchmarks."""


def make_rule(name: str = "noloco", alpha: float | None = None, beta: float | None = None, gamma: float | None = None) -> Rule:
    """The rule `name`; None takes its default. Raises ValueError for an unknown name, a value it does not have, or an unstable pair."""
    if name not in _DEFAULTS:
        raise ValueError(f"no outer rule {name!r}: one of {', '.join(RULES)}")
    alpha_default, beta_default, partners = _DEFAULTS[name]
    if name in ("gossip", "off") and (alpha, beta) != (None, None):
        raise ValueError(f"{name} has neither alpha nor beta")
    if gamma is not None and name != "noloco_two":
        raise ValueError("gamma is beta except in noloco_two")
    alpha = alpha_default if alpha is None else alpha
    beta = beta_default if beta is None else beta
    gamma = beta if gamma is None else gamma
    check_stability(alpha, gamma)
    if not beta > 0:
        raise ValueError("beta must be above 0")
    return Rule(name, alpha, beta, gamma, partners)


def stable_bound(alpha: float, share: float = PAIR) -> float:
    """Largest γ with which the expected squared disagreement does not grow: 2(1 − α²) / (1 + α − 2αq), for pairs 2(1 − α²).

    share: q, mean share of the disagreement that one averaging removes; 1/2 for pairs of many, N/(2(N−1)) for pairs of N.
    Follows from the second moments of (x, m), x' = x + m', m' = αm − γQx with Q a random projection of mean q. The paper's own bound
    (its equation 74) is neither necessary nor sufficient.
    """
    return 2 * (1 - alpha**2) / (1 + alpha - 2 * alpha * share)


def check_stability(alpha: float, gamma: float) -> None:
    """Raises ValueError unless 0 ≤ α < 1 and 0 < γ < 2(1 − α²): outside, replicas drift apart whatever they learn."""
    if not 0 <= alpha < 1:
        raise ValueError(f"outer momentum alpha must be in [0, 1), not {alpha}")
    if not 0 < gamma < stable_bound(alpha):
        raise ValueError(f"beta {gamma} with alpha {alpha} makes replicas diverge: it must be in (0, {stable_bound(alpha):.3g})")


def contraction(alpha: float, gamma: float, share: float = PAIR) -> float:
    """Factor of the expected squared disagreement per outer step, without inner steps; below 1 exactly within `stable_bound`.

    Spectral radius of the recursion of (E‖x‖², E⟨x, m⟩, E‖m‖²); 0.70 at α = 0.5, γ = 0.7.
    """
    import numpy as np  # late: the rule itself does without

    m = np.array([gamma**2 * share, -2 * alpha * gamma * share, alpha**2])
    xm = np.array([-gamma * share, alpha, 0.0]) + m
    x = np.array([1 - 2 * gamma * share, 2 * alpha, 0.0]) + m
    return float(np.abs(np.linalg.eigvals(np.stack([x, xm, m]))).max())


def mixing_weight(lag: float) -> float:
    """w of θ̄ = θ_i + w (θ_j − θ_i) for a partner `lag` outer steps behind us: ½ / (1 + lag), never above ½ for one that is ahead.

    A lag is a peer's claim; lying about it can only lower its own weight.
    """
    return 0.5 / (1.0 + max(0.0, lag))


def too_far_behind(lag: float) -> bool:
    """Whether a partner `lag` outer steps behind should take our state rather than average with it."""
    return lag > MAX_LAG


def next_clock(mine: int, theirs: int | None) -> int:
    """Our outer step counter after an outer step; `theirs` is the partner's claim, None after a solo step.

    One more, and another one while we are behind, so that nodes of unequal speed that keep meeting stay comparable. A liar moves it by one.
    """
    return mine + 1 + int(theirs is not None and theirs > mine)
