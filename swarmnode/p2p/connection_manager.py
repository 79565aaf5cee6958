"""Opens, maintains and closes connections.

The manager runs the redial loop, greets new peers, closes dead connections, and drops peers to make
room for new ones or to meet other peers.

    peer table ─ peers to dial ─▶ Dialer ─▶ library ─▶ connections ─ opened, closed ─▶
    ConnectionManager ─▶ peer table, Dialer
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection

import trio

from swarmnode.p2p import turnover
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.dialer import Dialer
from swarmnode.p2p.exchange import PeerExchange
from swarmnode.p2p.library.hosts import Connection, Host
from swarmnode.p2p.peers import DropReason, PeerTable
from swarmnode.p2p.reputation import PeerScores
from swarmnode.p2p.turnover import Liveness, PeerLink
from swarmnode.wire.envelope import peer_key

log = logging.getLogger(__name__)

CHECK_INTERVAL_SECONDS = 10.0
GREET_JITTER_SECONDS = 0.5
"""Maximum random delay before a new peer is greeted, because that peer may have connected to many
nodes at once."""


class ConnectionManager:
    """Listens to `connections` and keeps `table` consistent with them.

    Args:
        host: the libp2p host.
        connections: the open connections.
        table: the known peers.
        scores: bans of peers.
        dialer: dials the peers that `table` selects.
        exchange: greets new peers.
        max_connections: as `network.max_connections`.
        depends_on: returns True for peers that must be kept.
        rng: random source.
    """

    def __init__(
        self,
        host: Host,
        connections: ConnectionTable,
        table: PeerTable,
        scores: PeerScores,
        dialer: Dialer,
        exchange: PeerExchange,
        max_connections: int,
        depends_on: Callable[[str], bool],
        rng: random.Random,
    ) -> None:
        self._host = host
        self._connections = connections
        self._table = table
        self._scores = scores
        self._dialer = dialer
        self._exchange = exchange
        self._max_connections = max_connections
        self._depends_on = depends_on
        self._rng = rng

    async def run(self) -> None:
        """Dial peers and maintain connections until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._dialer.run)
            nursery.start_soon(self._close_dead_connections)
            nursery.start_soon(self._rotate_peers)

    async def dial(self, peer: str, address: str) -> None:
        """See `api.Connections.dial`."""
        await self._dialer.dial_once(peer, address)

    def pin(self, peers: Collection[str]) -> None:
        """See `api.Connections.pin`."""
        pinned = {
            peer for peer in peers if peer != self._host.peer_id and peer_key(peer) is not None
        }
        self._host.pin(pinned)
        self._table.pin(pinned, trio.current_time())
        self._dialer.wake()

    def disconnect(self, peer: str) -> None:
        """See `api.Connections.disconnect`."""
        if peer in self._table.connected():
            self._host.nursery.start_soon(self._host.close_peer, peer)

    # -- connections as they come and go

    def opened(self, connection: Connection) -> None:
        """Record a new connection; ban or greet its peer."""
        now = trio.current_time()
        self._table.record_connected(connection.peer, inbound=connection.inbound, now=now)
        if not self._scores.may_connect(
            connection.peer, now
        ):  # the peer was banned after its handshake
            self.disconnect(connection.peer)
        elif len(self._connections.with_peer(connection.peer)) == 1:
            self._host.nursery.start_soon(self._greet, connection.peer)

    def closed(self, connection: Connection) -> None:
        """Record a closed connection."""
        now, last_received = trio.current_time(), connection.last_received
        silent = (
            "no bytes received" if last_received is None else f"silent {now - last_received:.1f} s"
        )
        log.debug("connection with %s closed, %s", connection.peer, silent)
        self._table.record_disconnected(connection.peer, now)
        self._dialer.wake()

    async def _greet(self, peer: str) -> None:
        await trio.sleep(self._rng.uniform(0.0, GREET_JITTER_SECONDS))
        if peer in self._table.connected():
            await self._exchange.greet(peer)
            await trio.sleep(turnover.SETTLED_SECONDS)
            self._make_room()

    async def _close_dead_connections(self) -> None:
        """Close dead connections, and process closures that the library did not announce."""
        liveness = Liveness[Connection]()
        while True:
            await trio.sleep(CHECK_INTERVAL_SECONDS)
            for connection in self._connections:
                if connection.is_closed:
                    connection.forget()
                    self._connections.closed(connection)
            pings = {each: each.ping for each in self._connections}
            last_received = {each: each.last_received for each in self._connections}
            for connection in liveness.dead(pings, trio.current_time(), last_received):
                log.debug(
                    "closing the connection with %s: no ping response and no other bytes",
                    connection.peer,
                )
                self._host.nursery.start_soon(connection.close)

    def _make_room(self) -> None:
        """Close connections so that new peers always find a free place and receive addresses of
        other peers."""
        for peer in turnover.peers_to_drop(
            self._links(), self._max_connections, trio.current_time()
        ):
            log.debug("dropping %s to make room", peer)
            self._drop(peer, "full")

    async def _rotate_peers(self) -> None:
        """Replace a random peer by another at intervals."""
        while True:
            await trio.sleep(turnover.TURNOVER_SECONDS * self._rng.uniform(0.75, 1.25))
            now = trio.current_time()
            peer = turnover.peer_to_replace(self._links(), self._table.target, now, self._rng)
            if peer is not None and self._table.has_fresh_peers(now):
                log.debug("dropping %s to meet another peer", peer)
                self._drop(peer, "exchanged")

    def _drop(self, peer: str, why: DropReason) -> None:
        self._table.cool_down(peer, trio.current_time(), why)
        self.disconnect(peer)

    def _links(self) -> list[PeerLink]:
        bootstrap = {each.peer for each in self._table.bootstrap()}
        return self._connections.links(
            lambda peer: peer in self._host.pinned or peer in bootstrap or self._depends_on(peer)
        )
