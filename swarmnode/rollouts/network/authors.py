"""Trust in the authors of groups, from the trainer's judgements of their groups."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import msgspec

from swarmnode.latest import Latest
from swarmnode.p2p.api import Network
from swarmnode.p2p.reputation import GREYLIST
from swarmnode.rollouts import sampling
from swarmnode.rollouts.groups import Outcome
from swarmnode.rollouts.reasons import REASONS, Verdict

MAX_PEERS = 4096
"""Authors that are remembered; the one judged or admitted least recently is forgotten."""
DISTRUSTED: frozenset[Outcome] = frozenset(
    {"forged_ids", "no_ids", "special_ids", "spot_check", "surprise", "temperature"}
)
"""Judgements that put a group's author on probation again."""
REFUSED_AT_MOST = 4
"""Maximum number of refusals that count against an author, so that it can recover."""


class Author(msgspec.Struct):
    """Memory of one author."""

    admitted: int = 0
    used: int = 0
    """Groups that were trained on."""
    used_since: int = 0
    """The same, since the last refused one."""
    refused: int = 0
    """Refusals that count: each adds 1, or 2 if no group was used since the last one. A used group
    subtracts 1. At most REFUSED_AT_MOST."""


class AuthorTrust:
    """Trust in authors from the judgements of their groups, bounded.

    Each group that the trainer refuses for a reason of DISTRUSTED halves the share of draws in
    which its author takes part, or quarters it if no group was used since the last refusal. The
    share is at least 1/16. Each group that is trained on doubles it again, so that an author can
    recover if this node's own policy was the one that differed.
    """

    def __init__(self) -> None:
        self._authors = Latest[str, Author](MAX_PEERS)

    def __len__(self) -> int:
        """Return the number of authors with a group that was trained on and none refused since."""
        return sum(author.used_since > 0 for author in self._authors.values())

    def judged(self, peer: str, outcome: Outcome) -> None:
        """Record the trainer's judgement of a drawn group of `peer`."""
        author = self._author(peer)
        if outcome == "used":
            author.used += 1
            author.used_since += 1
            author.refused = max(0, author.refused - 1)
        elif outcome in DISTRUSTED:
            author.refused = min(REFUSED_AT_MOST, author.refused + (1 if author.used_since else 2))
            author.used_since = 0

    def of(self, peer: str, reputation: float) -> float:
        """Return the weight of its groups in a draw, 0 to 1: `reputation` × probation
        (`sampling.trust`)."""
        return sampling.trust(reputation, self._known(peer).used_since)

    def participation(self, peer: str) -> float:
        """Return the share of draws in which the groups of `peer` take part: `0.5 ** refused`."""
        return float(0.5 ** self._known(peer).refused)

    def _author(self, peer: str) -> Author:
        """Return the memory of `peer` for changing, and make it the latest."""
        author = self._authors[peer] = self._known(peer)
        return author

    def _known(self, peer: str) -> Author:
        """Return the memory of `peer` for reading; a new one is not stored."""
        return self._authors.get(peer) or Author()


class Authors(AuthorTrust):
    """Authors by peer id: their admitted groups, the trainer's judgements of drawn groups, and
    trust, which includes the reputation."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network
        self._outcomes: Counter[str] = Counter(dict.fromkeys(get_args(Outcome), 0))

    @property
    def outcomes(self) -> dict[str, int]:
        """Counts of drawn groups by the trainer's judgement."""
        return dict(self._outcomes)

    def peers(self) -> list[str]:
        """Return the authors of admitted groups, the latest last."""
        return [peer for peer, author in self._authors.items() if author.admitted]

    def admitted_of(self, peer: str) -> int:
        """Return the number of admitted groups of `peer`."""
        return self._known(peer).admitted

    def used_of(self, peer: str) -> int:
        """Return the number of groups of `peer` that were trained on."""
        return self._known(peer).used

    def admitted(self, peer: str) -> None:
        """Count a group of `peer` that reached the pool."""
        self._author(peer).admitted += 1

    def judged(self, peer: str, outcome: Outcome) -> None:
        """Record the trainer's judgement of a drawn group, which raises or lowers trust and
        reputation."""
        self._outcomes[outcome] += 1
        super().judged(peer, outcome)
        if outcome == "used":
            self._network.accepted(peer)
        elif REASONS[outcome] is Verdict.REJECT:
            self._network.rejected(peer, outcome)

    def trust(self, peer: str) -> float:
        """Return the weight of the groups of `peer` in a draw, 0 to 1; 0 for a greylisted peer."""
        if not self._network.is_allowed(peer):
            return 0.0
        score = self._network.score(peer)
        return self.of(peer, 1.0 + min(0.0, score) / -GREYLIST)

    def fetch_weight(self, peer: str) -> float:
        """Return the weight of the groups of `peer` in the choice of fetches, 0 to 1: its trust ×
        the share of draws in which its groups take part."""
        return self.trust(peer) * self.participation(peer)
