"""How far the listings of each peer are believed, by comparing them with the groups that came. Pure
and bounded.

    listed ─▶ fetched ─▶ not there                     `absent`, a quarter: it may have expired
                      └▶ other bytes, or not its size, author, task or creation time
                      └▶ scored ─▶ another spread of rewards

A lie halves the belief in a holder, up to six times; eight groups that were as listed restore one
halving.
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
"""Lies that a signed group proves. The others may have an honest reason."""
COST: dict[Lie, float] = {"absent": 0.25, "slow": 0.5}
"""Halvings of belief per lie; every other kind costs one."""
KEPT = 0.125
"""Halvings that one group as listed restores."""
DEEPEST = 6.0
"""Most halvings: such a holder is still asked for one group in 64 and can recover."""
PROVING_GROUPS = 8
NEWCOMER = 0.25
"""Belief in a holder of which nothing came yet. It rises to 1 over the first PROVING_GROUPS groups
that were as listed."""
SPREAD_SLACK = 0.01
"""Tolerance for rounding: rewards are deterministic."""
MOST_HOLDERS = 1024


def contradiction(listed: Listed, author: bytes, group: RolloutGroup, size: int) -> Lie | None:
    """Return how a listing contradicts the signed group, None where it does not.

    Args:
        listed: the line of the listing.
        author: raw key of the group's signer.
        group: the group.
        size: bytes of its envelope.
    """
    if size != listed.size:
        return "size"
    if author != listed.author:
        return "author"
    if group.task.id != listed.task:
        return "task"
    return "age" if group.created_at != listed.created_at else None


def has_spread(listed: Listed, rewards: list[float]) -> bool:
    """Return whether rewards (G,), as computed here, have the listed spread."""
    return math.isclose(sampling.spread(rewards), listed.spread, abs_tol=SPREAD_SLACK)


class BeliefStatistics(msgspec.Struct, frozen=True):
    kept: int = 0
    """Groups that were as listed, spread of rewards included."""
    lies: dict[str, int] = {}
    """Listings that were wrong, by kind of LIES."""
    holders: int = 0
    """Peers whose listings are remembered."""


class Claims:
    """True and false listings of the MOST_HOLDERS peers asked last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._debt: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def keep(self, holder: str) -> None:
        """Count a group that was as `holder` listed it."""
        self._counts["kept"] += 1
        self._touch(holder)
        self._kept[holder] = min(PROVING_GROUPS, self._kept[holder] + 1)
        if (left := self._debt.pop(holder, 0.0) - KEPT) > 0:
            self._debt[holder] = left

    def lie(self, holder: str, lie: Lie) -> None:
        """Count a lie of `holder`."""
        self._counts[lie] += 1
        self._touch(holder)
        self._debt[holder] = min(DEEPEST, self._debt.get(holder, 0.0) + COST.get(lie, 1.0))

    def credit(self, holder: str) -> float:
        """Return 0.5 to the power of its halvings."""
        return float(0.5 ** self._debt.get(holder, 0.0))

    def belief(self, holder: str) -> float:
        """Return how far `holder` is believed, above 0 to 1: its credit × a share that rises with
        the groups that were as listed."""
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
