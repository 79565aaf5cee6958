"""Number of groups that a node samples itself, and its room for peers' groups.

A batch has B = I + J groups: I own groups and J of peers. Let q be the share of own groups that are
useful, and N the number of nodes. A node then trains on I·q + min(J, (N−1)·I·q) useful groups. This
is largest at I* = B / (1 + (N−1)·q). No node knows N or q, but each node knows the number of useful
external groups that it trained on. `AdaptiveSplit` needs nothing else, and if all nodes use it, its
fixed point is I*. No torch.
"""

from __future__ import annotations

import math

SMOOTHING = 0.4
"""Weight of the newest count in the average. Half of an older count is forgotten after 1.4
steps."""
OWN_SHARE = 0.25
"""Least share of the batch that a node samples itself, so that the swarm does not run out of
groups."""


def floor_groups(batch: int) -> int:
    """Return the least number of own groups per step, at least 1."""
    return min(batch, max(1, math.ceil(batch * OWN_SHARE - 1e-9)))


class AdaptiveSplit:
    """Adaptive split of a batch: I = B − min(J, round(s)), with s ← 0.6 s + 0.4 · used, and a
    constant J = B − floor.

    J does not shrink with s. Rare successes come in bursts, and a burst may be the only signal of
    many steps. Therefore a step may train on more than B groups.

    Args:
        batch: Groups per step, B.
        smoothed: Average s of an earlier process.
        shares: False if the node trains on its own groups only.
    """

    def __init__(self, batch: int, smoothed: float = 0.0, *, shares: bool = True) -> None:
        self.batch = batch
        self.smoothed = smoothed
        self._shares = shares
        """Average number of useful external groups that a step was trained on, s."""

    def observe(self, used: int) -> None:
        """Record the number of useful external groups that a step was trained on.

        Groups that only arrived do not count. Groups of a lying peer look useful until they are
        judged, and would keep a node from sampling without teaching it anything.
        """
        self.smoothed = (1.0 - SMOOTHING) * self.smoothed + SMOOTHING * used

    @property
    def external_room(self) -> int:
        """Largest number of external groups in the next step, J."""
        return self.batch - floor_groups(self.batch) if self._shares else 0

    @property
    def own_groups(self) -> int:
        """Number of groups to sample for the next step, I."""
        # Half up and not Python's half to even, so that 0.5 and 2.5 are treated alike.
        return self.batch - min(self.external_room, math.floor(self.smoothed + 0.5))
