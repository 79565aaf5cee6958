"""Gets connected with peers and stays so: dials, again and again, greets whoever is new, closes
what is dead, and lets go of peers where newcomers need their places or others are to be met.

    peer table ─ whom to dial ─▶ Dialer ─▶ library ─▶ connections ─ opened, closed ─▶
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
"""A new peer is greeted within this time, because it may have connected to many at once."""


class Greeter(Protocol):
    """Says what there is to say to a new peer."""

    async def greet(self, peer: str) -> None:
        """Never raises for anything the peer does."""
        ...

    def forget(self, peer: str) -> None:
        """`peer` is gone."""
        ...


@dataclass(frozen=True)
class Keeping:
    """How many peers are kept: `most` connections, `target` peers, and for any number those that
    the node depends on."""

    most: int
    target: int
    depends_on: Callable[[str], bool]
    rng: random.Random


class ConnectionManager:
    """Listens to `connections`, and keeps `table` in step with them."""

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
        """Dials and tends until cancelled."""
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
        if not self._scores.wanted(connection.peer, now):  # banned since the handshake
            self.disconnect(connection.peer)
        elif first:
            self._host.nursery.start_soon(self._greet, connection.peer)

    def closed(self, connection: Connection, last: bool) -> None:
        """See `connections.Listener`."""
        now, heard = trio.current_time(), connection.heard
        when = "before any bytes" if heard is None else f"{now - heard:.1f} s after its last bytes"
        log.debug("a connection with %s has ended, %s", connection.peer, when)
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
        """Closes connections whose other end is gone without a word, and takes note of ends that
        the library did not announce."""
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
                    "%s neither answers nor says anything: its connection is closed",
                    connection.peer,
                )
                self._host.nursery.start_soon(connection.close)

    def _make_room(self) -> None:
        """So that a newcomer finds a place here, and is told of others, however many have found
        theirs before."""
        for peer in turnover.make_room(self._links(), self._keeping.most, trio.current_time()):
            log.debug("making room: %s gives its place up", peer)
            self._let_go(peer, "full")

    async def _meet_others(self) -> None:
        """Exchanges a peer for another, now and then."""
        while True:
            await trio.sleep(turnover.TURNOVER_SECONDS * self._keeping.rng.uniform(0.75, 1.25))
            now = trio.current_time()
            peer = turnover.exchanged(self._links(), self._keeping.target, now, self._keeping.rng)
            if peer is not None and self._table.has_others(now):
                log.debug("meeting others: %s is exchanged", peer)
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
