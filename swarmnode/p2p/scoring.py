"""Reputation on the network's clock, and what a ban leads to."""

from __future__ import annotations

from collections.abc import Callable

import trio

from swarmnode.p2p.reputation import COST, Reputation, Standing


class PeerScores:
    """See `api.PeerScoring`. `disconnect(peer)` is called for a peer that is banned."""

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
