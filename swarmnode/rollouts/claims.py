"""Belief in the listings of each peer, from comparing them with the fetched groups. Pure, bounded.

    listed ─▶ fetched ─▶ not on the holder's shelf    `absent`: it may have expired
                      └▶ other bytes, size, author, task or creation time than listed
                      ├▶ replayed ─▶ its episodes end elsewhere: `trajectory`, another version?
                      └▶ scored ─▶ another spread of rewards than listed

A false listing halves the belief in its holder, at most DEEPEST times; `absent`, `slow` and
`trajectory` cost a fraction of a halving (COST). Eight groups that are as listed restore one
halving.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Literal

import msgspec

from swarmnode.rollouts import sampling
from swarmnode.wire.listings import ListedGroup
from swarmnode.wire.messages import RolloutGroup

Lie = Literal[
    "absent",
    "content",
    "size",
    "author",
    "task",
    "age",
    "spread",
    "cursor",
    "slow",
    "trajectory",
]
LIES: tuple[Lie, ...] = (
    "absent",
    "content",
    "size",
    "author",
    "task",
    "age",
    "spread",
    "cursor",
    "slow",
    "trajectory",
)
PROVEN: frozenset[Lie] = frozenset({"content", "size", "author", "task", "age"})
"""Lies that the fetched bytes prove; they also cost reputation. Other lies may have an honest
explanation."""
COST: dict[Lie, float] = {"absent": 0.25, "slow": 0.5, "trajectory": 0.5}
"""Halvings of belief per lie; every other kind costs one."""
KEPT = 0.125
"""Halvings restored by each group that is as listed."""
DEEPEST = 6.0
"""Most halvings. Such a holder keeps 1/64 of its belief, so that it can recover."""
PROVING_GROUPS = 8
"""Groups as listed after which a new holder has full belief."""
NEWCOMER = 0.25
"""Belief in a holder before its first fetched group. It rises to 1 over the first PROVING_GROUPS
groups that are as listed."""
SPREAD_SLACK = 0.01
"""Tolerance for rounding. Rewards are deterministic."""
MOST_HOLDERS = 1024
"""Holders that are remembered; the one observed least recently is forgotten."""


def contradiction(listed: ListedGroup, author: bytes, group: RolloutGroup, size: int) -> Lie | None:
    """Return the first field of a listing that contradicts the signed group, or None.

    Args:
        listed: The group as listed.
        author: Raw key of the group's signer.
        group: The fetched group.
        size: Length of its envelope, bytes.
    """
    if size != listed.size:
        return "size"
    if author != listed.author:
        return "author"
    if group.task.id != listed.task:
        return "task"
    return "age" if group.created_at != listed.created_at else None


def has_spread(listed: ListedGroup, rewards: list[float]) -> bool:
    """Return True if the rewards (G,), as computed by this node, have the listed spread."""
    return math.isclose(sampling.spread(rewards), listed.spread, abs_tol=SPREAD_SLACK)


class BeliefStatistics(msgspec.Struct, frozen=True):
    """Counts of true and false listings."""

    kept: int = 0
    """Groups that were as listed, including the spread of rewards."""
    lies: dict[str, int] = {}
    """False listings by kind, of LIES."""
    holders: int = 0
    """Holders that are remembered."""


class Claims:
    """True and false listings of the MOST_HOLDERS latest holders."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._debt: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def keep(self, holder: str) -> None:
        """Count a group that is as `holder` listed it."""
        self._counts["kept"] += 1
        self._touch(holder)
        self._kept[holder] = min(PROVING_GROUPS, self._kept[holder] + 1)
        if (left := self._debt.pop(holder, 0.0) - KEPT) > 0:
            self._debt[holder] = left

    def lie(self, holder: str, lie: Lie) -> None:
        """Count a false listing of `holder`, or an unanswered request to it."""
        self._counts[lie] += 1
        self._touch(holder)
        self._debt[holder] = min(DEEPEST, self._debt.get(holder, 0.0) + COST.get(lie, 1.0))

    def credit(self, holder: str) -> float:
        """Return `0.5 ** halvings` of `holder`."""
        return float(0.5 ** self._debt.get(holder, 0.0))

    def belief(self, holder: str) -> float:
        """Return the belief in `holder`, above 0 and at most 1: its credit × a share that rises
        from NEWCOMER to 1 with the number of groups that were as listed."""
        proven = self._kept.get(holder, 0) / PROVING_GROUPS
        return self.credit(holder) * (NEWCOMER + (1 - NEWCOMER) * proven)

    def statistics(self) -> BeliefStatistics:
        return BeliefStatistics(
            self._counts["kept"],
            {lie: self._counts[lie] for lie in LIES if self._counts[lie]},
            len(self._kept),
        )

    def _touch(self, holder: str) -> None:
        self._kept[holder] = self._kept.pop(holder, 0)
        if len(self._kept) > MOST_HOLDERS:
            forgotten, _ = self._kept.popitem(last=False)
            self._debt.pop(forgotten, None)
