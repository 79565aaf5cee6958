"""Authors of the groups that come here: how many were admitted of each, what the trainer made of
them, and how far each is trusted."""

from __future__ import annotations

from collections import Counter, OrderedDict

from swarmnode.p2p.api import Network
from swarmnode.p2p.reputation import GREYLIST
from swarmnode.rollouts.groups import Judged
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.rollouts.trust import PeerTrust, count


class Authors:
    """Bounded: the author not heard of for longest is forgotten."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._trust = PeerTrust()
        self._admitted: OrderedDict[str, int] = OrderedDict()
        self._outcomes: Counter[str] = Counter()

    @property
    def outcomes(self) -> dict[str, int]:
        """Drawn groups, by what the trainer made of them."""
        return dict(self._outcomes)

    @property
    def used(self) -> int:
        """Peers of which a group was trained on."""
        return len(self._trust)

    def peers(self) -> list[str]:
        """Peers of whom a group was admitted, the latest last."""
        return list(self._admitted)

    def admitted_of(self, peer: str) -> int:
        """Groups of `peer` that were admitted; 0 once it is not among the MAX_PEERS latest any
        more."""
        return self._admitted.get(peer, 0)

    def known(self, peer: str) -> bool:
        """Whether a group of `peer` was trained on, and none refused by the trainer since."""
        return self._trust.used(peer) > 0

    def admitted(self, peer: str) -> None:
        """A group of `peer` has reached the pool."""
        count(self._admitted, peer)

    def judged(self, judged: Judged) -> None:
        """What the trainer made of a drawn group: builds its author's trust, or costs it."""
        self._outcomes[judged.outcome] += 1
        self._trust.judged(judged.peer, judged.outcome)
        if judged.outcome == "used":
            self._network.accepted(judged.peer)
        elif REASONS[judged.outcome] is Verdict.REJECT:
            self._network.rejected(judged.peer, judged.outcome)

    def trust(self, peer: str) -> float:
        """How much of a step the groups of `peer` may be, 0 to 1; 0 where the network stops
        listening."""
        if not self._network.welcome(peer):
            return 0.0
        score = self._network.score(peer)
        return self._trust.of(peer, 1.0 + min(0.0, score) / -GREYLIST)

    def belief(self, peer: str) -> float:
        """In what share of draws the groups of `peer` take part; see `PeerTrust`."""
        return self._trust.belief(peer)

    def worth(self, peer: str) -> float:
        """How gladly groups of `peer` are asked for, 0 to 1: what no draw would take is not worth
        its bytes."""
        return self.trust(peer) * self.belief(peer)
