"""Reputation on the network's clock, and what a ban leads to."""

from __future__ import annotations

from collections.abc import Callable

import trio

from swarmnode.p2p.gossip import Validation
from swarmnode.p2p.reputation import COST, Reputation, Standing

STORM_COST = 60.0
"""What a storm costs: a stranger is greylisted by one, and banned by two within ten minutes."""


class PeerScores:
    """See `api.PeerScoring`. `disconnect(peer)` is called for one that has lost the last of its
    standing, or storms."""

    def __init__(self, reputation: Reputation) -> None:
        self.reputation = reputation
        self.disconnect: Callable[[str], None] = lambda peer: None

    def welcome(self, peer: str) -> bool:
        """See `api.PeerScoring.welcome`."""
        return self.reputation.standing(peer, trio.current_time()) is Standing.GOOD

    def wanted(self, peer: str, now: float) -> bool:
        """Whether we would be connected with `peer` at all: it is not banned."""
        return self.reputation.standing(peer, now) is not Standing.BANNED

    def score(self, peer: str) -> float:
        """See `api.PeerScoring.score`."""
        return self.reputation.score(peer, trio.current_time())

    def accepted(self, peer: str) -> None:
        """See `api.PeerScoring.accepted`."""
        self.reputation.accepted(peer, trio.current_time())

    def rejected(self, peer: str, reason: str, cost: float = COST) -> None:
        """See `api.PeerScoring.rejected`."""
        if self.reputation.rejected(peer, reason, trio.current_time(), cost) is Standing.BANNED:
            self.disconnect(peer)

    def judged(self, peer: str, validation: Validation, reason: str) -> None:
        """What gossip made of a message that `peer` forwarded. Forwarding earns nothing: what is in
        the message is credited to whoever signed it."""
        if validation is Validation.REJECT:
            self.rejected(peer, f"gossip_{reason}")

    def stormed(self, peer: str) -> None:
        """`peer` has published far more than anybody may (`storms.py`). Its bytes are the harm, so
        it is not only listened to no more."""
        self.rejected(peer, "storm", STORM_COST)
        self.disconnect(peer)
