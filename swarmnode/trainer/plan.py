"""Plan of a step: the number of groups, and how many of them this node samples itself.

No node waits for a slow node, but a slow node's steps must not take so long that its groups are
stale when they are trained on. With `training.target_step_seconds`, such a node uses smaller
batches. Fixed costs of a step need no model, because every step is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import structlog

from swarmnode.config import SharingConfig, TrainingConfig
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.rollouts.groups import is_useful
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.trainer.state import Counters

log = structlog.get_logger("swarmnode.trainer")

SMALLEST_SHARE = 1 / 8
"""Least share of the configured groups. With fewer groups the gradient is too noisy."""
CLOSE_ENOUGH = 0.1
"""Relative distance from the target within which the number of groups does not change."""
LARGEST_FACTOR = 2.0
"""Largest factor by which one step changes the number of groups. Other programs may slow down a
single step."""


def fit_groups(groups: float, seconds: float, target: float, configured: int) -> float:
    """Return the number of groups of the next step, not rounded, from 1 to `configured`.

    The number moves half of the distance to the target on a logarithmic scale, so that noise does
    not make it oscillate.

    Args:
        groups: Groups of the last step.
        seconds: Duration of the last step.
        target: Target duration in seconds; 0 disables the adaptation.
        configured: `training.groups_per_step`.
    """
    smallest = max(1, math.ceil(configured * SMALLEST_SHARE))
    if target <= 0:
        return float(configured)
    if seconds > 0 and abs(seconds / target - 1) > CLOSE_ENOUGH:
        factor = math.sqrt(target / seconds)
        groups *= min(LARGEST_FACTOR, max(1 / LARGEST_FACTOR, factor))
    return min(float(configured), max(float(smallest), groups))


class StepPlan:
    """Numbers of own and external groups of the next step. They are stored in the counters and
    survive a restart."""

    def __init__(
        self, training: TrainingConfig, sharing: SharingConfig, counters: Counters
    ) -> None:
        self._target = training.target_step_seconds
        self._configured = training.groups_per_step
        self._shares = sharing.enabled
        self._counters = counters
        counters.groups_per_step = fit_groups(
            counters.groups_per_step or self._configured, 0.0, self._target, self._configured
        )
        self._split = AdaptiveSplit(self._configured, counters.useful_per_step)
        self._split.resize(self.groups)

    @property
    def groups(self) -> int:
        """Number of groups of the next step, B."""
        return max(1, round(self._counters.groups_per_step))

    @property
    def own_groups(self) -> int:
        """Number of groups to sample for the next step, I."""
        return self._split.own_groups if self._shares else self.groups

    @property
    def external_room(self) -> int:
        """Largest number of external groups in the next step, J."""
        return self._split.external_room if self._shares else 0

    def fit(self, seconds: float) -> None:
        """Adapt the number of groups to the duration of the last step."""
        self._counters.groups_per_step = fit_groups(
            self._counters.groups_per_step, seconds, self._target, self._configured
        )
        if self.groups != self._split.batch:
            log.info("groups per step", groups=self.groups, step_seconds=round(seconds, 2))
            self._split.resize(self.groups)

    def observe(self, external: Sequence[TrainingGroup]) -> None:
        """Adapt the split to the peers' groups that a step was trained on: the next steps sample
        fewer groups by the number of useful ones."""
        self._split.observe(sum(is_useful(group.rewards) for group in external))
        self._counters.useful_per_step = self._split.smoothed
