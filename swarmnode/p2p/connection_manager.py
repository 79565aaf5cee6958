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
from dataclasses import dataclass
from typing import Protocol

import trio

from swarmnode.p2p import turnover
from swarmnode.p2p.connections import Connection, ConnectionTable
from swarmnode.p2p.dialer import Dialer
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.identifiers import is_peer_id
from swarmnode.p2p.liveness import Liveness
from swarmnode.p2p.peers import LetGo, PeerTable
from swarmnode.p2p.scoring import PeerScores
from swarmnode.p2p.turnover import Link

log = logging.getLogger(__name__)

TEND_SECONDS = 10.0
GREET_JITTER_SECONDS = 0.5
"""Maximum random delay before a new peer is greeted, because that peer may have connected to many
nodes at once."""


class Greeter(Protocol):
    """Runs the first exchange with a new peer."""

    async def greet(self, peer: str) -> None:
        """Greet a newly connected peer. Never raises for a fault of the peer."""
        ...

    def forget(self, peer: str) -> None:
        """Drop the state of a disconnected peer."""
        ...


@dataclass(frozen=True)
class Keeping:
    """Limits on the number of connections.

    Attributes:
        most: maximum number of connections.
        target: desired number of connected peers.
        depends_on: returns True for peers that must be kept.
        rng: random source.
    """

    most: int
    target: int
    depends_on: Callable[[str], bool]
    rng: random.Random


class ConnectionManager:
    """Listens to `connections` and keeps `table` consistent with them."""

    def __init__(
        self,
        host: Host,
        connections: ConnectionTable,
        table: PeerTable,
        scores: PeerScores,
        dialer: Dialer,
        greeter: Greeter,
        keeping: Keeping,
    ) -> None:
        self._host = host
        self._connections = connections
        self._table = table
        self._scores = scores
        self._dialer = dialer
        self._greeter = greeter
        self._keeping = keeping

    async def run(self) -> None:
        """Dial peers and maintain connections until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._dialer.run)
            nursery.start_soon(self._tend)
            nursery.start_soon(self._meet_others)

    async def dial(self, peer: str, address: str) -> None:
        """See `api.Connections.dial`."""
        await self._dialer.dial_once(peer, address)

    def hold(self, peers: Collection[str]) -> None:
        """See `api.Connections.hold`."""
        held = {peer for peer in peers if peer != self._host.peer_id and is_peer_id(peer)}
        self._host.hold(held)
        self._table.hold(held, trio.current_time())
        self._dialer.wake()

    def disconnect(self, peer: str) -> None:
        """See `api.Connections.disconnect`."""
        if peer in self._table.connected():
            self._host.nursery.start_soon(self._host.close_peer, peer)

    # -- connections as they come and go

    def opened(self, connection: Connection, first: bool) -> None:
        """See `connections.Listener`."""
        now = trio.current_time()
        self._table.connected_to(connection.peer, inbound=connection.inbound, now=now)
        if not self._scores.wanted(connection.peer, now):  # the peer was banned after its handshake
            self.disconnect(connection.peer)
        elif first:
            self._host.nursery.start_soon(self._greet, connection.peer)

    def closed(self, connection: Connection, last: bool) -> None:
        """See `connections.Listener`."""
        now, heard = trio.current_time(), connection.heard
        when = "before any bytes" if heard is None else f"{now - heard:.1f} s after its last bytes"
        log.debug("connection with %s closed, %s", connection.peer, when)
        self._table.disconnected(connection.peer, now)
        if last:
            self._greeter.forget(connection.peer)
        self._dialer.wake()

    async def _greet(self, peer: str) -> None:
        await trio.sleep(self._keeping.rng.uniform(0.0, GREET_JITTER_SECONDS))
        if peer in self._table.connected():
            await self._greeter.greet(peer)
            await trio.sleep(turnover.SETTLED_SECONDS)
            self._make_room()

    async def _tend(self) -> None:
        """Close dead connections, and process closures that the library did not announce."""
        liveness = Liveness[Connection]()
        while True:
            await trio.sleep(TEND_SECONDS)
            for connection in self._connections:
                if connection.is_closed:
                    connection.forget()
                    self._connections.closed(connection)
            pings = {each: each.ping for each in self._connections}
            heard = {each: each.heard for each in self._connections}
            for connection in liveness.dead(pings, trio.current_time(), heard):
                log.debug(
                    "closing the connection with %s: no ping response and no other bytes",
                    connection.peer,
                )
                self._host.nursery.start_soon(connection.close)

    def _make_room(self) -> None:
        """Close connections so that new peers always find a free place and receive addresses of
        other peers."""
        for peer in turnover.make_room(self._links(), self._keeping.most, trio.current_time()):
            log.debug("dropping %s to make room", peer)
            self._let_go(peer, "full")

    async def _meet_others(self) -> None:
        """Replace a random peer by another at intervals."""
        while True:
            await trio.sleep(turnover.TURNOVER_SECONDS * self._keeping.rng.uniform(0.75, 1.25))
            now = trio.current_time()
            peer = turnover.exchanged(self._links(), self._keeping.target, now, self._keeping.rng)
            if peer is not None and self._table.has_others(now):
                log.debug("dropping %s to meet another peer", peer)
                self._let_go(peer, "exchanged")

    def _let_go(self, peer: str, why: LetGo) -> None:
        self._table.rest(peer, trio.current_time(), why)
        self.disconnect(peer)

    def _links(self) -> list[Link]:
        bootstrap = {each.peer for each in self._table.bootstrap()}
        return self._connections.links(
            lambda peer: (
                peer in self._host.held or peer in bootstrap or self._keeping.depends_on(peer)
            )
        )
