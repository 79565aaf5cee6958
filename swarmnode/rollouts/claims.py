"""Whose listings are believed: what a holder said of a group, against the group. Pure, bounded.

listed ─▶ asked for ─▶ not there           absent     a little: it may have been pushed out
meanwhile
                    └▶ came ─▶ other bytes, or not its size, author, task or time: content, size,
                    author, task, age
                           └▶ scored ─▶ not its spread
a claim that was kept pays back a little of what a lie has cost
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Literal

import msgspec

from swarmnode.rollouts import sampling
from swarmnode.wire.listings import Listed
from swarmnode.wire.messages import RolloutGroup

Lie = Literal["absent", "content", "size", "author", "task", "age", "spread", "cursor", "slow"]
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
)
PROVEN: frozenset[Lie] = frozenset({"content", "size", "author", "task", "age"})
"""What no honest holder says: listing and signed group contradict each other. The rest may have
another reason."""
COST: dict[Lie, float] = {"absent": 0.25, "slow": 0.5}
"""Halvings of belief that a lie costs; every other costs one."""
KEPT = 0.125
"""Halvings that a kept claim gives back."""
DEEPEST = 6.0
"""Halvings at most, so that a holder can come back: by being asked for one group in 64."""
PROVING_GROUPS = 8
NEWCOMER = 0.25
"""Belief in a holder of which nothing came yet: identities are free. It rises to 1 over the first
PROVING_GROUPS that were as listed."""
SPREAD_SLACK = 0.01
"""Rewards are the same at everybody up to rounding."""
MOST_HOLDERS = 1024


def contradiction(listed: Listed, author: bytes, group: RolloutGroup, size: int) -> Lie | None:
    """What the listing said that the signed group does not. author: its raw key; size: of its
    envelope."""
    if size != listed.size:
        return "size"
    if author != listed.author:
        return "author"
    if group.task.id != listed.task:
        return "task"
    return "age" if group.created_at != listed.created_at else None


def has_spread(listed: Listed, rewards: list[float]) -> bool:
    """Whether rewards (G,), as computed here, are as spread as the listing said."""
    return math.isclose(sampling.spread(rewards), listed.spread, abs_tol=SPREAD_SLACK)


class BeliefStatistics(msgspec.Struct, frozen=True):
    kept: int = 0
    """Groups that were as listed, rewards included."""
    lies: dict[str, int] = {}
    """Claims that were not, by what was wrong."""
    holders: int = 0
    """Peers whose claims are remembered."""


class Claims:
    """Kept claims and lies of the MOST_HOLDERS peers that were asked last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._debt: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def keep(self, holder: str) -> None:
        """A group of its listing was what it said."""
        self._counts["kept"] += 1
        self._touch(holder)
        self._kept[holder] = min(PROVING_GROUPS, self._kept[holder] + 1)
        if (left := self._debt.pop(holder, 0.0) - KEPT) > 0:
            self._debt[holder] = left

    def lie(self, holder: str, lie: Lie) -> None:
        self._counts[lie] += 1
        self._touch(holder)
        self._debt[holder] = min(DEEPEST, self._debt.get(holder, 0.0) + COST.get(lie, 1.0))

    def credit(self, holder: str) -> float:
        """What its lies have left of it, above 0 to 1."""
        return float(0.5 ** self._debt.get(holder, 0.0))

    def belief(self, holder: str) -> float:
        """How gladly it is asked, above 0 to 1: its credit, and whether anything has come of it
        yet."""
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
