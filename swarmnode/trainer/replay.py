"""Experience replay: while useful groups are rare, a batch is filled with those of the last steps.

Where nearly everything that is sampled fails, a group that says something is dear. It still says it
a few updates later: its ratios are against what was recorded when it was sampled, so that the
objective's clip ends what has moved far enough. Without that the same completions are pushed on and
on, and a policy learns less for good. What can be trained on again also leaves room for sampling
less (`rl.split`). Where useful groups are not rare, replay does harm: on answers of 35 tokens of
which a quarter is right, a policy learnt nearly nothing with it (benchmarks/RESULTS.md, "second";
"sapo: groups that are trained on again" has the cases in which it helps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarmnode.rollouts.groups import is_useful
from swarmnode.trainer.batch import TrainingGroup

USES = 4
"""How often a group is trained on again, at most. More were not tried."""
STEPS = 8
"""How long a group is kept. The bias of what is that old is in benchmarks/RESULTS.md, under
corrections: 0.2 where tokens are corrected."""
RARE = 0.35
"""Useful share of sampled groups from which on they are not rare: nothing is trained on again until
the trainer is started anew."""
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
        """At most `count` groups for the present step, those that were used least and the newest
        first; none where useful groups are not rare. Their ratios are against what was recorded, a
        group's own sampler included: it is no sample of the present policy any more."""
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
