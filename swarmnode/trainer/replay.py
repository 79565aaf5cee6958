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
"""How often a group is trained on again, at most. More were not tried."""
STEPS = 8
"""How long a group is kept. At that age the corrected gradient of a token has a bias of 0.2
(benchmarks/RESULTS.md, "Rollouts")."""
RARE = 0.35
"""Share of useful groups among sampled groups above which they are not rare. Replay then stays off
until the trainer restarts."""
SMOOTHING = 0.05
"""Weight of the newest sampled group in that share."""
TOKENS = 1_000_000
"""Tokens of completions that are kept, some 70 bytes each: beyond that the oldest groups go
first."""


@dataclass
class Kept:
    group: TrainingGroup
    step: int
    uses: int = 0


class ReplayBuffer:
    """Useful groups of the last steps. It is not saved: after a restart the first steps fill it
    again."""

    def __init__(self, uses: int = USES) -> None:
        """uses: 0 keeps nothing."""
        self._uses = uses
        self._useful = 0.0
        """Share of what was sampled that was useful, smoothed."""
        self._rare = True
        self._kept: list[Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def spares(self) -> int:
        """How many groups the next step need not sample for what it can train on again."""
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

    def sampled(self, groups: Sequence[TrainingGroup]) -> None:
        """Take what a step has sampled, useful or not: whether a useful group is still rare."""
        for group in groups:
            self._useful += SMOOTHING * (is_useful(group.rewards) - self._useful)
        self._rare = self._rare and self._useful < RARE

    def keep(self, groups: Sequence[TrainingGroup], step: int) -> None:
        """After a step: what it has learnt from for the first time; and nothing that cannot be used
        at the next."""
        if not self._uses:
            return
        self._kept = [
            kept for kept in self._kept if kept.uses < self._uses and step + 1 - kept.step <= STEPS
        ]
        self._kept += [Kept(group, step) for group in groups if is_useful(group.rewards)]
        room = TOKENS
        for number in reversed(range(len(self._kept))):
            room -= sum(len(row.completion) for row in self._kept[number].group.rows)
            if room < 0:
                del self._kept[: number + 1]
                break


def lacking(batch: int, groups: Sequence[TrainingGroup]) -> int:
    """How many useful groups `groups` lack of a batch."""
    return max(0, batch - sum(is_useful(group.rewards) for group in groups))
