"""Experience replay: while useful groups are rare, recent useful groups fill up the batch.

When most sampled groups have no learning signal, each useful group is valuable. It stays useful for
a few updates: its ratios use the log-probabilities recorded at sampling, so the objective's clip
drops tokens that have moved far enough. Without these ratios, the same completions are reinforced
without bound, and the policy gets worse permanently. Replay also allows sampling less (`rl.split`).

When useful groups are not rare, replay is harmful: on answers of 35 tokens with a quarter correct,
a policy learned almost nothing with it. Where replay helps is in benchmarks/RESULTS.md, "Rollouts".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarmnode.rollouts.groups import is_useful
from swarmnode.trainer.batch import TrainingGroup

USES = 4
"""Largest number of times that a group is replayed. Larger values were not tried."""
STEPS = 8
"""Steps after which a group is discarded. The bias of groups of that age is 0.2 with token-level
corrections (benchmarks/RESULTS.md, "Rollouts")."""
RARE = 0.35
"""Share of useful groups among sampled groups above which they are not rare. Replay then stays off
until the trainer restarts."""
SMOOTHING = 0.05
"""Weight of the newest sampled group in that share."""
TOKENS = 1_000_000
"""Largest number of completion tokens in the buffer, about 70 bytes each. The oldest groups are
discarded first."""


@dataclass
class ReplayedGroup:
    """A group in the buffer."""

    group: TrainingGroup
    step: int
    """Step of its first use."""
    uses: int = 0
    """Number of times that it was replayed."""


class ReplayBuffer:
    """Useful groups of recent steps. The buffer is not saved; it is empty after a restart.

    Args:
        uses: Largest number of replays of a group; 0 disables the buffer.
    """

    def __init__(self, uses: int = USES) -> None:
        self._uses = uses
        self._useful = 0.0
        """Smoothed share of useful groups among the sampled ones."""
        self._rare = True
        self._kept: list[ReplayedGroup] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def spared_groups(self) -> int:
        """Number of groups that replay saves the next step from sampling."""
        return len(self._kept) if self._rare else 0

    def take(self, count: int) -> list[TrainingGroup]:
        """Return at most `count` groups for the current step; none if useful groups are not rare.

        Groups that were used least come first, and newer groups before older ones. Their ratios use
        only the recorded log-probabilities, because the groups are not samples of the current
        policy.
        """
        if not self._rare:
            return []
        taken = sorted(self._kept, key=lambda kept: (kept.uses, -kept.step))[: max(0, count)]
        for kept in taken:
            kept.uses += 1
        return [replace(kept.group, sampler_logprobs=[]) for kept in taken]

    def observe(self, groups: Sequence[TrainingGroup]) -> None:
        """Update the share of useful groups with all groups that a step has sampled."""
        for group in groups:
            self._useful += SMOOTHING * (is_useful(group.rewards) - self._useful)
        self._rare = self._rare and self._useful < RARE

    def store(self, groups: Sequence[TrainingGroup], step: int) -> None:
        """Discard groups that are used up or too old, and add the useful ones of `groups`.

        Args:
            groups: Groups that were trained on for the first time in step number `step`.
        """
        if not self._uses:
            return
        self._kept = [
            kept for kept in self._kept if kept.uses < self._uses and step + 1 - kept.step <= STEPS
        ]
        self._kept += [ReplayedGroup(group, step) for group in groups if is_useful(group.rewards)]
        room = TOKENS
        for number in reversed(range(len(self._kept))):
            room -= sum(len(row.completion) for row in self._kept[number].group.rows)
            if room < 0:
                del self._kept[: number + 1]
                break


def missing_groups(batch: int, groups: Sequence[TrainingGroup]) -> int:
    """Return the number of useful groups that are missing to fill a batch of `batch` groups."""
    return max(0, batch - sum(is_useful(group.rewards) for group in groups))
