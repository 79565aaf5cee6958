"""Reputation on trio's clock, with disconnection of banned peers."""

from __future__ import annotations

from collections.abc import Callable

import trio

from swarmnode.p2p.reputation import COST, Reputation, Standing


class PeerScores:
    """`api.PeerScoring` on a `Reputation`. `disconnect(peer)` is called when a peer is banned."""

    def __init__(self, reputation: Reputation) -> None:
        self.reputation = reputation
        self.disconnect: Callable[[str], None] = lambda peer: None

    def welcome(self, peer: str) -> bool:
        """See `api.PeerScoring.welcome`."""
        return self.reputation.standing(peer, trio.current_time()) is Standing.GOOD

    def wanted(self, peer: str, now: float) -> bool:
        """Return False if `peer` is banned, so that no connection with it is wanted."""
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
