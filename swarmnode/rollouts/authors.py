"""Trust in the authors of groups, from the trainer's judgements of their groups."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import get_args

from swarmnode.p2p.api import Network
from swarmnode.p2p.reputation import GREYLIST
from swarmnode.rollouts import sampling
from swarmnode.rollouts.groups import Judged, Outcome
from swarmnode.rollouts.reasons import REASONS, Verdict

MAX_PEERS = 4096
"""Authors that are remembered in each table."""
DISTRUSTED: frozenset[Outcome] = frozenset(
    {"forged_ids", "no_ids", "special_ids", "spot_check", "surprise", "temperature"}
)
"""Judgements that put a group's author on probation again."""
REFUSED_AT_MOST = 4
"""Most refusals that count against an author, so that it can recover."""


class Authors:
    """Authors by peer id: their admitted groups, the trainer's judgements of drawn groups, and
    trust. Bounded: the author without a group for longest is forgotten.

    Each group that the trainer refuses for a reason of DISTRUSTED halves the share of draws in
    which its author takes part. It quarters the share if no group of the author was used since the
    last such refusal. The share is at least 1/16. Each group that is trained on doubles it again,
    so that an author can recover if this node's own policy was the one that differed.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._trust = AuthorTrust()
        self._admitted: OrderedDict[str, int] = OrderedDict()
        self._outcomes: Counter[str] = Counter(dict.fromkeys(get_args(Outcome), 0))

    @property
    def outcomes(self) -> dict[str, int]:
        """Counts of drawn groups by the trainer's judgement."""
        return dict(self._outcomes)

    @property
    def used(self) -> int:
        """Number of authors with a group that was trained on and none refused since."""
        return len(self._trust)

    def peers(self) -> list[str]:
        """Return the authors of admitted groups, the latest last."""
        return list(self._admitted)

    def admitted_of(self, peer: str) -> int:
        """Return the number of admitted groups of `peer`; 0 if it is not among the MAX_PEERS latest
        authors."""
        return self._admitted.get(peer, 0)

    def admitted(self, peer: str) -> None:
        """Count a group of `peer` that reached the pool."""
        count(self._admitted, peer)

    def judged(self, judged: Judged) -> None:
        """Record the trainer's judgement of a drawn group, which raises or lowers trust and
        reputation."""
        self._outcomes[judged.outcome] += 1
        self._trust.judged(judged.peer, judged.outcome)
        if judged.outcome == "used":
            self._network.accepted(judged.peer)
        elif REASONS[judged.outcome] is Verdict.REJECT:
            self._network.rejected(judged.peer, judged.outcome)

    def trust(self, peer: str) -> float:
        """Return the weight of the groups of `peer` in a draw, 0 to 1; 0 for a greylisted peer."""
        if not self._network.is_allowed(peer):
            return 0.0
        score = self._network.score(peer)
        return self._trust.of(peer, 1.0 + min(0.0, score) / -GREYLIST)

    def participation(self, peer: str) -> float:
        """Return the share of draws in which the groups of `peer` take part."""
        return self._trust.participation(peer)

    def fetch_weight(self, peer: str) -> float:
        """Return the weight of the groups of `peer` in the choice of fetches, 0 to 1: its trust ×
        the share of draws in which its groups take part."""
        return self.trust(peer) * self.participation(peer)


class AuthorTrust:
    """Counts of judged groups by peer, bounded."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, int] = OrderedDict()
        self._refused: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of authors with a group that was trained on and none refused since."""
        return len(self._used)

    def used(self, peer: str) -> int:
        """Return the number of groups of `peer` that were trained on since its last refused one."""
        return self._used.get(peer, 0)

    def judged(self, peer: str, outcome: Outcome) -> None:
        """Record the trainer's judgement of a drawn group of `peer`."""
        if outcome == "used":
            count(self._used, peer)
            if (refused := self._refused.pop(peer, 0)) > 1:
                self._refused[peer] = refused - 1
        elif outcome in DISTRUSTED:
            known = self._used.pop(peer, 0)
            for _ in range(1 if known else 2):
                count(self._refused, peer, REFUSED_AT_MOST)

    def of(self, peer: str, reputation: float) -> float:
        """Return the weight of its groups in a draw, 0 to 1: `reputation` × probation
        (`sampling.trust`)."""
        return sampling.trust(reputation, self.used(peer))

    def participation(self, peer: str) -> float:
        """Return the share of draws in which its groups take part: `0.5 ** refusals`.

        The count is 0 to 4. A refusal adds 1, or 2 if no group was used since the last one. A used
        group subtracts 1.
        """
        return float(0.5 ** self._refused.get(peer, 0))


def count(counts: OrderedDict[str, int], peer: str, most: int | None = None) -> None:
    """Add 1 to the count of `peer`, at most `most`, and make it the latest. If there are more than
    MAX_PEERS, forget the earliest."""
    number = counts.pop(peer, 0) + 1
    counts[peer] = number if most is None else min(number, most)
    if len(counts) > MAX_PEERS:
        counts.popitem(last=False)
