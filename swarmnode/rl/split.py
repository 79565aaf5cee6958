"""How much of a training batch a node samples itself, and how much room it leaves for others'
groups.

With q the share of own groups that carry a signal, N nodes and a batch of B = I + J groups, a node
trains on I·q + min(J, (N−1)·I·q) useful groups, at most where I* = B / (1 + (N−1)·q). No node knows
N or q. Each knows how many useful groups of others it was trained on: `AdaptiveSplit` needs nothing
else, and when everybody does the same its fixed point is I*. No torch here.
"""

from __future__ import annotations

import math

SMOOTHING = 0.4
"""Weight of the newest count in the average: half of it is forgotten in 1.4 steps."""
OWN_SHARE = 0.25
"""Least share of the batch that a node generates itself: what it takes from the swarm must come
from somewhere."""


def floor_groups(batch: int) -> int:
    """Least own groups per step: at least one, since a node that only takes starves the swarm."""
    return min(batch, max(1, math.ceil(batch * OWN_SHARE - 1e-9)))


def _check(batch: int, scale: float) -> None:
    if batch < 1 or not 0.0 <= scale <= 1.0:
        raise ValueError(f"batch must be >= 1 and external_scale in [0, 1], not {batch}, {scale}")


class AdaptiveSplit:
    """I = B − min(room, round(s) + k), s ← 0.6 s + 0.4 · used, and room = B − floor external groups
    whatever s is.

    Room does not shrink with s: rare successes come in bursts, and a burst refused is the only
    signal of many steps. A step may therefore train on more than B groups. k: groups of the last
    steps that can be trained on again (`trainer.replay`).
    """

    def __init__(self, batch: int, smoothed: float = 0.0, external_scale: float = 1.0) -> None:
        """smoothed, external_scale: as they were before a restart. Raises ValueError."""
        _check(batch, external_scale)
        self.batch = batch
        self.smoothed = smoothed
        """Useful external groups that a step was trained on, averaged: s."""
        self.external_scale = external_scale
        """Set by the utility guard: what is left of J, 0 to 1."""
        self.replayable = 0
        """Useful groups that the next step can train on again, k."""

    def observe(self, used: int) -> None:
        """Take how many useful (non-zero-advantage) external groups a step was trained on.

        What merely arrives does not count: until they are judged a liar's groups look useful, and
        whoever sends enough of them would keep a node from sampling without teaching it anything.
        """
        self.smoothed = (1.0 - SMOOTHING) * self.smoothed + SMOOTHING * used

    def resize(self, batch: int) -> None:
        """Take another B from the next step on. Raises ValueError below 1."""
        _check(batch, self.external_scale)
        self.batch = batch

    @property
    def external_room(self) -> int:
        """External groups that the next step takes at most, J."""
        return math.floor((self.batch - floor_groups(self.batch)) * self.external_scale + 1e-9)

    @property
    def own_groups(self) -> int:
        """Groups to generate for the next step, I."""
        # half up, not Python's half to even: 0.5 and 2.5 should not differ in kind
        return self.batch - min(
            self.external_room, math.floor(self.smoothed + 0.5) + self.replayable
        )
