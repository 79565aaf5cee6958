"""How many groups a step holds on a machine of this speed. Pure.

A slow node is never waited for, but its own steps should not take so long that its policy is old before it has changed: with a target it
takes smaller batches. What a step costs besides its groups need not be known, since the next step is measured again.
"""

from __future__ import annotations

import math

SMALLEST_SHARE = 1 / 8
"""Of the configured groups: below that a step says too little about the gradient."""
CLOSE_ENOUGH = 0.1
"""Relative distance from the target within which nothing changes."""
LARGEST_FACTOR = 2.0
"""A step changes the number by this factor at most: one slow step may be somebody else's compile job."""


def fitted(groups: float, seconds: float, target: float, configured: int) -> float:
    """The groups to take after a step of `groups` took `seconds`, not rounded; `target` seconds, 0 is off.

    Half of the distance on a logarithmic scale, so that noise does not swing it. Always within 1 … `configured`.
    """
    smallest = max(1, math.ceil(configured * SMALLEST_SHARE))
    if target <= 0:
        return float(configured)
    if seconds > 0 and abs(seconds / target - 1) > CLOSE_ENOUGH:
        factor = math.sqrt(target / seconds)
        groups *= min(LARGEST_FACTOR, max(1 / LARGEST_FACTOR, factor))
    return min(float(configured), max(float(smallest), groups))
