"""Which question next: of which task, at which difficulty. From own groups, and as bounded hints
from peers'. No torch here.

A group teaches when its rewards differ. How often that happens differs between buckets, a bucket
being a task at one difficulty, and changes as the policy learns. Thompson sampling over a Beta
posterior of it asks where a signal is likely, and goes on looking elsewhere as long as little is
known there.

A peer's group says how hard its bucket is, for nothing. But a peer's policy is another one, and a
peer may lie: its word counts less than an own group, and less still once what it spoke of has
disappointed; it is bounded by peer and in all, and fades; and a share of the questions is drawn
from all buckets alike, whatever is said.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

MEMORY = 0.9
"""What is left of a bucket's evidence when a group of it arrives: about the last ten count, since
the policy changes."""
FADES = 0.9
"""What is left of all hints after a step."""
HINT = 0.25
"""What a peer's group counts, of an own one."""
PEER_MOST = 0.5
"""What one peer's hints count in a bucket, at most: of two own groups, a quarter."""
HINTS_MOST = 2.0
"""What all hints count in a bucket, at most."""
PRIOR = 2.0
"""What the mean over all buckets counts in each, of an own group: where most are too hard, one that
was not asked yet probably is."""
RECORD = 0.98
"""What is left of a peer's record when one of its hints was tried: about the last fifty count."""
EXPLORE = 0.2
"""Share of the questions that are drawn from all buckets alike."""
PEERS = 64
"""Peers whose hints are remembered; whose last hint is oldest makes room."""


class Bucket(NamedTuple):
    """A task at one difficulty."""

    task: str
    difficulty: int = 0


def useful_chance(rewards: Sequence[float]) -> float:
    """The chance that another group on the same question has a signal, by the mean reward of this
    one.

    The chance that G answers, each right with that probability, are neither all right nor all
    wrong: 1 − p^G − (1 − p)^G.
    """
    right = fmean(rewards)
    return 1.0 - right ** len(rewards) - (1.0 - right) ** len(rewards)


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
        self._peers: OrderedDict[str, dict[Bucket, tuple[float, float]]] = OrderedDict()
        self._heeded: dict[str, tuple[float, float]] = {}
        """How often a bucket that the peer had a word on had a signal here, and how often not."""
        self._explore = explore

    @property
    def buckets(self) -> list[Bucket]:
        """Sorted."""
        return list(self._own)

    def own(self, bucket: Bucket, useful: bool) -> None:
        """Take an own group: whether its rewards differed. Peers who had a word on that bucket are
        remembered by it."""
        if bucket in self._own:
            for peer, known in self._peers.items():
                if bucket in known:
                    right, wrong = self._heeded[peer]
                    self._heeded[peer] = (RECORD * right + useful, RECORD * wrong + (not useful))
            yes, no = self._own[bucket]
            self._own[bucket] = (MEMORY * yes + useful, MEMORY * no + (not useful))

    def hint(self, peer: str, bucket: Bucket, rewards: Sequence[float]) -> None:
        """Take a peer's group that this node found fit to train on. rewards: (G,), as this node
        scored them."""
        if bucket not in self._own:
            return
        known = self._peers.setdefault(peer, {})
        self._peers.move_to_end(peer)
        self._heeded.setdefault(peer, (0.0, 0.0))
        while len(self._peers) > PEERS:
            del self._heeded[self._peers.popitem(last=False)[0]]
        chance = useful_chance(rewards)
        yes, no = known.get(bucket, (0.0, 0.0))
        known[bucket] = _at_most(PEER_MOST, yes + HINT * chance, no + HINT * (1.0 - chance))

    def step(self) -> None:
        """A step has passed: hints fade."""
        for known in self._peers.values():
            for bucket, (yes, no) in known.items():
                known[bucket] = (FADES * yes, FADES * no)

    def posterior(self, bucket: Bucket) -> tuple[float, float]:
        """(α, β) of the share of groups with a signal; (1, 1) where nothing is known of any
        bucket."""
        return self._posterior(bucket, self._mean())

    def _mean(self) -> float:
        """The share of own groups with a signal, over all buckets. Of what is remembered, so that
        one bucket counts ten groups at most."""
        yes, no = map(sum, zip(*self._own.values(), strict=True))
        return (1.0 + yes) / (2.0 + yes + no)

    def _posterior(self, bucket: Bucket, mean: float) -> tuple[float, float]:
        (yes, no), hinted = self._own[bucket], self._hinted(bucket, mean)
        return PRIOR * mean + yes + hinted[0], PRIOR * (1.0 - mean) + no + hinted[1]

    def _hinted(self, bucket: Bucket, mean: float) -> tuple[float, float]:
        """What peers' groups count for a signal, and against one."""
        hints = [
            (self._belief(peer, mean), *known[bucket])
            for peer, known in self._peers.items()
            if bucket in known
        ]
        return _at_most(
            HINTS_MOST,
            sum(belief * yes for belief, yes, _ in hints),
            sum(belief * no for belief, _, no in hints),
        )

    def _belief(self, peer: str, mean: float) -> float:
        """What a peer's hints count, 0 to 1: less where what it spoke of has had fewer signals than
        questions have on the whole."""
        right, wrong = self._heeded[peer]
        return min(1.0, (PRIOR * mean + right) / (PRIOR + right + wrong) / mean)

    def expected(self) -> dict[Bucket, float]:
        """Mean of each posterior."""
        return {
            bucket: alpha / (alpha + beta)
            for bucket in self._own
            for alpha, beta in [self.posterior(bucket)]
        }

    def evidence(self) -> dict[Bucket, tuple[float, float]]:
        """What is known of each bucket, in own groups: from own ones, and from peers'."""
        mean = self._mean()
        return {
            bucket: (sum(counted), sum(self._hinted(bucket, mean)))
            for bucket, counted in self._own.items()
        }

    def choose(self, rng: random.Random) -> Bucket:
        """The next question's bucket."""
        if rng.random() < self._explore:
            return rng.choice(self.buckets)
        mean = self._mean()
        return max(self._own, key=lambda bucket: rng.betavariate(*self._posterior(bucket, mean)))


def _at_most(most: float, yes: float, no: float) -> tuple[float, float]:
    total = yes + no
    return (yes, no) if total <= most else (yes * most / total, no * most / total)
