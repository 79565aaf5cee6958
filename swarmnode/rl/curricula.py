"""Which question next: of which task, at which difficulty. No torch here.

A group teaches when its rewards differ. How often they do differs between buckets, a bucket being a
task at one difficulty, and changes as the policy learns. Thompson sampling over a Beta posterior of
that share asks where a signal is likely, and explores where little is known.

Only own groups count as evidence. Peers' groups counted too once: no gain in held-out reward could
be shown, and liars cost signals (benchmarks/RESULTS.md, "curriculum").
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

MEMORY = 0.9
"""Share of a bucket's evidence that is kept when a group of it arrives. About the last ten count,
since the policy changes."""
PRIOR = 2.0
"""Weight of the mean over all buckets in each bucket, in own groups: where most buckets are too
hard, an untried one probably is."""
EXPLORE = 0.2
"""Share of the questions that are drawn uniformly from all buckets."""


class Bucket(NamedTuple):
    """A task at one difficulty."""

    task: str
    difficulty: int = 0


class Curriculum:
    """Beta posteriors by bucket, and the choice from them. The caller's generator is all its
    randomness.

    Groups in buckets other than `buckets` are not counted. Raises ValueError when there is none.
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
        """Sorted."""
        return list(self._own)

    def own(self, bucket: Bucket, useful: bool) -> None:
        """Take an own group: whether its rewards differed."""
        if bucket in self._own:
            yes, no = self._own[bucket]
            self._own[bucket] = (MEMORY * yes + useful, MEMORY * no + (not useful))

    def posterior(self, bucket: Bucket) -> tuple[float, float]:
        """Return (α, β) of the share of groups with a signal; (1, 1) without any evidence."""
        return self._posterior(bucket, self._mean())

    def _mean(self) -> float:
        """Return the share of own groups with a signal over all buckets, each of which counts ten
        groups at most."""
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
        """Return how many own groups each posterior rests on."""
        return {bucket: sum(counted) for bucket, counted in self._own.items()}

    def choose(self, rng: random.Random) -> Bucket:
        """Return the next question's bucket."""
        if rng.random() < self._explore:
            return rng.choice(self.buckets)
        mean = self._mean()
        return max(self._own, key=lambda bucket: rng.betavariate(*self._posterior(bucket, mean)))
