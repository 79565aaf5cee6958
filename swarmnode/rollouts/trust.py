"""Authors of groups: how many groups of each were admitted, what the trainer made of them, and how
far each is trusted.

A peer whose text our policy would not have sampled takes part in half as many draws with each such
group (a quarter, where nothing of it was used since the last one), down to one in sixteen, and in
more again with each group that is trained on. So it can recover where our own policy differed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from swarmnode.p2p.api import Network
from swarmnode.p2p.reputation import GREYLIST
from swarmnode.rollouts import sampling
from swarmnode.rollouts.groups import Judged, Outcome
from swarmnode.rollouts.reasons import REASONS, Verdict

MAX_PEERS = 4096
"""Peers that are remembered."""
DISTRUSTED: frozenset[Outcome] = frozenset(
    {"forged_ids", "no_ids", "special_ids", "spot_check", "surprise", "temperature"}
)
"""Judgements that put a group's author on probation again."""
REFUSED_AT_MOST = 4
"""Refusals that count against a peer at a time, so that it can recover."""


class Authors:
    """Authors by peer id. Bounded: the author that was silent for longest is forgotten."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._trust = PeerTrust()
        self._admitted: OrderedDict[str, int] = OrderedDict()
        self._outcomes: Counter[str] = Counter()

    @property
    def outcomes(self) -> dict[str, int]:
        """Drawn groups by the trainer's judgement."""
        return dict(self._outcomes)

    @property
    def used(self) -> int:
        """Peers of which a group was trained on."""
        return len(self._trust)

    def peers(self) -> list[str]:
        """Return the peers of which a group was admitted, the latest last."""
        return list(self._admitted)

    def admitted_of(self, peer: str) -> int:
        """Return the number of admitted groups of `peer`; 0 once it is not among the MAX_PEERS
        latest."""
        return self._admitted.get(peer, 0)

    def known(self, peer: str) -> bool:
        """Return whether a group of `peer` was trained on and none was refused since."""
        return self._trust.used(peer) > 0

    def admitted(self, peer: str) -> None:
        """Count a group of `peer` that reached the pool."""
        count(self._admitted, peer)

    def judged(self, judged: Judged) -> None:
        """Take the trainer's judgement of a drawn group, which raises or lowers trust."""
        self._outcomes[judged.outcome] += 1
        self._trust.judged(judged.peer, judged.outcome)
        if judged.outcome == "used":
            self._network.accepted(judged.peer)
        elif REASONS[judged.outcome] is Verdict.REJECT:
            self._network.rejected(judged.peer, judged.outcome)

    def trust(self, peer: str) -> float:
        """Return how much the groups of `peer` weigh in a draw, 0 to 1; 0 for a greylisted peer."""
        if not self._network.welcome(peer):
            return 0.0
        score = self._network.score(peer)
        return self._trust.of(peer, 1.0 + min(0.0, score) / -GREYLIST)

    def belief(self, peer: str) -> float:
        """Return the share of draws in which the groups of `peer` take part."""
        return self._trust.belief(peer)

    def fetch_weight(self, peer: str) -> float:
        """Return how much the groups of `peer` count when groups to fetch are chosen, 0 to 1: its
        trust × the share of draws in which its groups take part."""
        return self.trust(peer) * self.belief(peer)


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
        """Take the trainer's judgement of a drawn group of `peer`."""
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
