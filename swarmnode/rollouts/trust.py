"""How much of a step a peer's groups may be, by what became of those that were drawn. Pure.

Whoever sends text that our policy would not have sampled is looked at half as often with each such
group, a quarter as often where nothing of it was trained on since the last one, down to one step in
sixteen; and more again with each that is trained on: so that it can come back, also where it was
our own policy that was far from everybody else's.
"""

from __future__ import annotations

from collections import OrderedDict

from swarmnode.rollouts import sampling
from swarmnode.rollouts.groups import Outcome

MAX_PEERS = 4096
"""Peers that are remembered, those heard of last."""
DISTRUSTED: frozenset[Outcome] = frozenset(
    {"forged_ids", "no_ids", "special_ids", "spot_check", "surprise", "temperature"}
)
"""Outcomes that put a group's author on probation again."""
REFUSED_AT_MOST = 4
"""Refusals that are held against a peer at a time, so that it can come back."""


class PeerTrust:
    """Counts of judged groups by peer, bounded."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, int] = OrderedDict()
        self._refused: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        """Peers of which a group was trained on since the last one that was refused."""
        return len(self._used)

    def used(self, peer: str) -> int:
        """Groups of `peer` that were trained on since the last one that was refused."""
        return self._used.get(peer, 0)

    def judged(self, peer: str, outcome: Outcome) -> None:
        """Take what the trainer made of a drawn group of `peer`."""
        if outcome == "used":
            count(self._used, peer)
            if (refused := self._refused.pop(peer, 0)) > 1:
                self._refused[peer] = refused - 1
        elif outcome in DISTRUSTED:
            known = self._used.pop(peer, 0)
            for _ in range(1 if known else 2):
                count(self._refused, peer, REFUSED_AT_MOST)

    def of(self, peer: str, reputation: float) -> float:
        """How much its groups weigh in drawing, 0 to 1: `reputation` × probation
        (`sampling.trust`)."""
        return sampling.trust(reputation, self.used(peer))

    def belief(self, peer: str) -> float:
        """In what share of draws its groups take part at all: one half for each that was refused
        more than were used since; those of which nothing was used count twice."""
        return float(0.5 ** self._refused.get(peer, 0))


def count(counts: OrderedDict[str, int], peer: str, most: int | None = None) -> None:
    """Count one more of `peer`, which becomes the latest; the one not heard of for longest is
    forgotten."""
    number = counts.pop(peer, 0) + 1
    counts[peer] = number if most is None else min(number, most)
    if len(counts) > MAX_PEERS:
        counts.popitem(last=False)
