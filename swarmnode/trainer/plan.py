"""How many groups a step holds on a machine of this speed, and how many of them a node samples
itself.

A slow node is never waited for, but its own steps should not take so long that its policy is old
before it has changed: with a target it takes smaller batches. What a step costs besides its groups
need not be known, since the next step is measured again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import structlog

from swarmnode.config import SharingConfig, TrainingConfig
from swarmnode.rl.objectives import CLIPS_TOKENS
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.rl.utility import UtilityGuard
from swarmnode.rollouts.groups import is_useful
from swarmnode.trainer.batch import TrainingGroup
from swarmnode.trainer.replay import USES, ReplayBuffer, lacking
from swarmnode.trainer.state import Counters

log = structlog.get_logger("swarmnode.trainer")

SMALLEST_SHARE = 1 / 8
"""Least share of the configured groups: below that a step says too little about the gradient."""
CLOSE_ENOUGH = 0.1
"""Relative distance from the target within which nothing changes."""
LARGEST_FACTOR = 2.0
"""A step changes the number by this factor at most: one slow step may be somebody else's compile
job."""


def fitted(groups: float, seconds: float, target: float, configured: int) -> float:
    """The groups to take after a step of `groups` took `seconds`, not rounded; `target` seconds, 0
    is off.

    Half of the distance on a logarithmic scale, so that noise does not swing it. Always within 1 …
    `configured`.
    """
    smallest = max(1, math.ceil(configured * SMALLEST_SHARE))
    if target <= 0:
        return float(configured)
    if seconds > 0 and abs(seconds / target - 1) > CLOSE_ENOUGH:
        factor = math.sqrt(target / seconds)
        groups *= min(LARGEST_FACTOR, max(1 / LARGEST_FACTOR, factor))
    return min(float(configured), max(float(smallest), groups))


class StepPlan:
    """Own and external groups of the next step. What it has learnt is kept in the counters, and so
    survives a restart."""

    def __init__(
        self, training: TrainingConfig, sharing: SharingConfig, counters: Counters
    ) -> None:
        self._target = training.target_step_seconds
        self._configured = training.groups_per_step
        self._shares = sharing.enabled
        self._counters = counters
        counters.groups_per_step = fitted(
            counters.groups_per_step or self._configured, 0.0, self._target, self._configured
        )
        self._split = AdaptiveSplit(
            self._configured, counters.useful_per_step, counters.external_scale
        )
        self._split.resize(self.groups)
        self._guard = UtilityGuard(counters.external_scale)
        again = (
            self._shares
            and training.loss_type in CLIPS_TOKENS
            and "train_once" not in training.options
        )
        self._replay = ReplayBuffer(USES if again else 0)

    @property
    def groups(self) -> int:
        """Groups of the next step, B."""
        return max(1, round(self._counters.groups_per_step))

    @property
    def own_groups(self) -> int:
        """Groups to sample for the next step, I."""
        return self._split.own_groups if self._shares else self.groups

    @property
    def external_room(self) -> int:
        """External groups that the next step takes at most, J."""
        return self._split.external_room if self._shares else 0

    def stepped(self, seconds: float) -> None:
        """Take fewer groups where a step took longer than it should, more where it need not be so
        few."""
        self._counters.groups_per_step = fitted(
            self._counters.groups_per_step, seconds, self._target, self._configured
        )
        if self.groups != self._split.batch:
            log.info("groups per step", groups=self.groups, step_seconds=round(seconds, 2))
            self._split.resize(self.groups)

    def again(self, fresh: Sequence[TrainingGroup]) -> list[TrainingGroup]:
        """Useful groups of the last steps, as many as the step's own and external ones lack of a
        batch."""
        return self._replay.take(lacking(self.groups, fresh))

    def learnt(self, fresh: Sequence[TrainingGroup], sampled: Sequence[TrainingGroup]) -> None:
        """Take what the step, the `Counters.step`th, has learnt from for the first time. The next
        steps sample fewer by what came of peers, and while useful groups are rare among those that
        were sampled, by what can be trained on again."""
        self._split.observe(sum(bool(group.peer) and is_useful(group.rewards) for group in fresh))
        self._counters.useful_per_step = self._split.smoothed
        self._replay.sampled(sampled)
        self._replay.keep(fresh, self._counters.step)
        self._split.replayable = self._replay.spares

    def measured(
        self,
        reward_own: float | None,
        agreement: float | None,
        external_share: float,
        reward_held_out: float | None = None,
    ) -> None:
        """Leave less room for external groups while they go together with getting worse; see
        `UtilityGuard.observe`."""
        if self._shares:
            self._split.external_scale = self._guard.observe(
                reward_own, agreement, external_share, reward_held_out
            )
            self._counters.external_scale = self._split.external_scale
