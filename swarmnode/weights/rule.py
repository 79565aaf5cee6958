"""The outer rule: its parameters, the weight of a lagging partner, and the outer step counter. No
torch.

    θ̄ = θ_i + w (θ_j − θ_i) ;  δ ← α δ + β (θ̄ − φ) ;  φ ← φ + δ ;  θ ← φ

This is NoLoCo (arXiv 2506.10911, equations 1 to 3) with γ = β, in which case the slow weights φ of
the partner cancel and only θ has to travel.
"""

from __future__ import annotations

from typing import Final

import msgspec

LARGEST_OUTER_STEP: Final = 10**8
"""Largest plausible outer step counter: one step per second for three years. A new node ignores a
state with a larger one."""
MAX_LAG: Final = 4.0
"""Largest lag, in outer steps, at which a partner's weights are averaged. A partner further behind
still receives this node's weights."""


class Rule(msgspec.Struct, frozen=True):
    """Parameters of the outer step.

    Replicas diverge unless 0 ≤ α < 1 and 0 < β < 2(1 − α²). The bound follows from the second
    moments of disagreement and momentum, averaged over random pairs. The bound of the paper (its
    equation 74) is neither necessary nor sufficient.
    """

    alpha: float
    """Momentum of δ."""
    beta: float
    """Outer learning rate."""


NOLOCO: Final = Rule(alpha=0.5, beta=0.7)


def mixing_weight(lag: float) -> float:
    """Return w of θ̄ = θ_i + w (θ_j − θ_i): ½ / (1 + max(0, lag)).

    Args:
        lag: Outer steps by which the partner is behind this node. A peer that lies about it can
            only lower its own weight.
    """
    return 0.5 / (1.0 + max(0.0, lag))


def too_far_behind(lag: float) -> bool:
    """Return True if a partner's weights are too old to be averaged into this node's."""
    return lag > MAX_LAG


def next_outer_step(mine: int, theirs: int | None) -> int:
    """Return this node's outer step counter after an outer step.

    The counter grows by 1, and by 2 while this node is behind its partner, so that the counters of
    slow and fast nodes stay comparable. A lie changes it by 1.

    Args:
        mine: The counter before the step.
        theirs: The partner's claim; None after a solo step.
    """
    return mine + 1 + int(theirs is not None and theirs > mine)
