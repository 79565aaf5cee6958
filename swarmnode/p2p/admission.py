"""Who is let in at the end of a handshake."""

from __future__ import annotations

from collections.abc import Callable, Collection

import trio

from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.library.gater import Newcomer
from swarmnode.p2p.scoring import PeerScores

LEAST_PER_PREFIX = 4
PREFIX_SHARE = 4
"""One /24 or /48, and the peers behind one relay, get one connection in so many, but at least
LEAST_PER_PREFIX."""


class Admission:
    """`members`: the peer ids that may connect, None for everybody. `max_connections`: as
    `network.max_connections`. `arrived(peer)`: is called when a peer has proved who it is over a
    direct connection to our listener."""

    def __init__(
        self,
        own: str,
        connections: ConnectionTable,
        scores: PeerScores,
        max_connections: int,
        members: Collection[str] | None,
        arrived: Callable[[str], None],
    ) -> None:
        self._own = own
        self._connections = connections
        self._scores = scores
        self._most_alike = max(LEAST_PER_PREFIX, max_connections // PREFIX_SHARE)
        self._members = members
        self._arrived = arrived

    def admits(self, newcomer: Newcomer) -> bool:
        """A member if the swarm is private; neither ourselves, nor banned, nor one too many from
        its prefix.

        Who comes through a relay has no prefix, so that it does not answer for the relay's
        neighbours; it counts among those behind it. Whom we dial is our own choice."""
        now = trio.current_time()
        prefix = newcomer.remote.prefix if newcomer.remote is not None else None
        self._scores.reputation.place(newcomer.peer, prefix, now)
        if newcomer.peer == self._own or not self._scores.wanted(newcomer.peer, now):
            return False
        if self._members is not None and newcomer.peer not in self._members:
            return False
        if newcomer.inbound and newcomer.relay is None:
            self._arrived(newcomer.peer)
        if newcomer.inbound and prefix is not None:
            return self._connections.of_prefix(prefix) < self._most_alike
        return newcomer.relay is None or self._connections.behind(newcomer.relay) < self._most_alike
