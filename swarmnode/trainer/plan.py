"""Plan of a step: the number of groups, and how many of them this node samples itself."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.config import SharingConfig, TrainingConfig
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.rollouts.groups import is_useful
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.trainer.state import Counters


class StepPlan:
    """Numbers of own and external groups of the next step. The average behind them is stored in the
    counters and survives a restart."""

    def __init__(
        self, training: TrainingConfig, sharing: SharingConfig, counters: Counters
    ) -> None:
        self.groups = training.groups_per_step
        """Number of groups of a step, B."""
        self._shares = sharing.enabled
        self._counters = counters
        self._split = AdaptiveSplit(self.groups, counters.useful_per_step)

    @property
    def own_groups(self) -> int:
        """Number of groups to sample for the next step, I."""
        return self._split.own_groups if self._shares else self.groups

    @property
    def external_room(self) -> int:
        """Largest number of external groups in the next step, J."""
        return self._split.external_room if self._shares else 0

    def observe(self, external: Sequence[TrainingGroup]) -> None:
        """Adapt the split to the peers' groups that a step was trained on: the next steps sample
        fewer groups by the number of useful ones."""
        self._split.observe(sum(is_useful(group.rewards) for group in external))
        self._counters.useful_per_step = self._split.smoothed
