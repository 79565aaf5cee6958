"""Curriculum: the task and difficulty of the next question. No torch.

A group has a signal if its rewards differ. The share of such groups differs between buckets (a task
at one difficulty) and changes as the policy learns. Thompson sampling over a Beta posterior of this
share prefers buckets with a likely signal, and explores those with little evidence.

Only own groups count as evidence. Counting peers' groups showed no gain in held-out reward, and
gave liars influence (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

MEMORY = 0.9
"""Decay of a bucket's evidence per group. About the last ten groups count, because the policy
changes."""
PRIOR = 2.0
"""Weight of the prior, the mean over all buckets, in groups. If most buckets are too hard, an
untried one probably is too."""
EXPLORE = 0.2
"""Share of the questions whose bucket is drawn uniformly."""


class Bucket(NamedTuple):
    """A task at one difficulty."""

    task: str
    difficulty: int = 0


class Curriculum:
    """Beta posteriors by bucket, and the choice of a bucket.

    Args:
        buckets: The buckets; groups of other buckets are ignored.
        explore: Share of uniform choices.

    Raises:
        ValueError: `buckets` is empty.
    """

    def __init__(self, buckets: Sequence[Bucket], explore: float = EXPLORE) -> None:
        if not buckets:
            raise ValueError("no bucket to choose from")
        self._own: dict[Bucket, tuple[float, float]] = dict.fromkeys(
            sorted(set(buckets)), (0.0, 0.0)
        )
        self._explore = explore

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, sorted."""
        return list(self._own)

    def own(self, bucket: Bucket, useful: bool) -> None:
        """Record an own group. `useful` is True if its rewards differed."""
        if bucket in self._own:
            yes, no = self._own[bucket]
            self._own[bucket] = (MEMORY * yes + useful, MEMORY * no + (not useful))

    def posterior(self, bucket: Bucket) -> tuple[float, float]:
        """Return (α, β) of the share of groups with a signal; (1, 1) without any evidence."""
        return self._posterior(bucket, self._mean())

    def _mean(self) -> float:
        """Return the share of own groups with a signal over all buckets. Each bucket counts at most
        ten groups."""
        yes, no = map(sum, zip(*self._own.values(), strict=True))
        return (1.0 + yes) / (2.0 + yes + no)

    def _posterior(self, bucket: Bucket, mean: float) -> tuple[float, float]:
        yes, no = self._own[bucket]
        return PRIOR * mean + yes, PRIOR * (1.0 - mean) + no

    def expected(self) -> dict[Bucket, float]:
        """Return the mean of each posterior."""
        return {
            bucket: alpha / (alpha + beta)
            for bucket in self._own
            for alpha, beta in [self.posterior(bucket)]
        }

    def evidence(self) -> dict[Bucket, float]:
        """Return the number of own groups, after decay, in each posterior."""
        return {bucket: sum(counted) for bucket, counted in self._own.items()}

    def choose(self, rng: random.Random) -> Bucket:
        """Return the next question's bucket."""
        if rng.random() < self._explore:
            return rng.choice(self.buckets)
        mean = self._mean()
        return max(self._own, key=lambda bucket: rng.betavariate(*self._posterior(bucket, mean)))
