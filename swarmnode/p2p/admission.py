"""Admission of connections at the end of a handshake."""

from __future__ import annotations

from collections.abc import Callable, Collection

import trio

from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.library.gater import HandshakePeer
from swarmnode.p2p.reputation import PeerScores

MIN_PER_PREFIX = 4
PREFIX_SHARE = 4
"""One /24 or /48 network, or the peers behind one relay, may hold 1/PREFIX_SHARE of the
connections, and never fewer than MIN_PER_PREFIX."""


class Admission:
    """Admission rules of one node.

    Args:
        own: peer id of this node.
        connections: the open connections.
        scores: reputation of the peers.
        max_connections: as `network.max_connections`.
        members: peer ids that may connect; None for all.
        arrived: called with the peer id when a peer has authenticated over a direct inbound
            connection. The AutoNAT check relies on it.
    """

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
        self._max_per_group = max(MIN_PER_PREFIX, max_connections // PREFIX_SHARE)
        self._members = members
        self._arrived = arrived

    def admits(self, candidate: HandshakePeer) -> bool:
        """Return True if the connection may stay.

        A connection is refused if the peer is this node itself, is banned, is not a member of a
        private swarm, or exceeds the share of its network prefix. A peer behind a relay has no
        prefix, because it must not be blamed for the relay's neighbours; it counts towards the
        share of that relay. Outbound direct connections are exempt from the share.
        """
        now = trio.current_time()
        prefix = candidate.remote.prefix if candidate.remote is not None else None
        self._scores.reputation.set_prefix(candidate.peer, prefix, now)
        if candidate.peer == self._own or not self._scores.may_connect(candidate.peer, now):
            return False
        if self._members is not None and candidate.peer not in self._members:
            return False
        if candidate.inbound and candidate.relay is None:
            self._arrived(candidate.peer)
        if candidate.inbound and prefix is not None:
            return self._connections.count_in_prefix(prefix) < self._max_per_group
        return (
            candidate.relay is None
            or self._connections.count_behind(candidate.relay) < self._max_per_group
        )
