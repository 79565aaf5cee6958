"""Opens, admits, maintains and closes connections.

The manager runs the redial loop, greets new peers, closes dead connections, and drops peers to make
room for new ones or to meet other peers.

    peer table ─ peers to dial ─▶ Dialer ─▶ library, Admission ─▶ connections ─ opened, closed ─▶
    ConnectionManager ─▶ peer table, Dialer

The library's bootstrap and auto-connector are not used: in measurements they did not recover from a
20 s outage within 85 s.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection

import trio

from swarmnode.errors import PeerError
from swarmnode.p2p import turnover
from swarmnode.p2p.addresses import is_circuit
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.library.gater import HandshakePeer
from swarmnode.p2p.library.hosts import Connection, Host
from swarmnode.p2p.neighbours import Neighbours
from swarmnode.p2p.peers import Dial, DropReason, PeerTable
from swarmnode.p2p.reputation import PeerScores
from swarmnode.p2p.turnover import Liveness, PeerLink
from swarmnode.wire.envelope import peer_key

log = logging.getLogger(__name__)

CHECK_INTERVAL_SECONDS = 10.0
GREET_JITTER_SECONDS = 0.5
"""Maximum random delay before a new peer is greeted, because that peer may have connected to many
nodes at once."""
DIAL_SECONDS = 10.0
"""Timeout for one address: TCP connect, Noise and Yamux."""
ADDRESSES_PER_DIAL = 4
DIRECT_SECONDS = 4.0
"""Timeout for a direct address of a peer that also has a relay address. A router drops unwanted
SYNs silently."""
MAX_CONCURRENT_DIALS = 8
MAX_SLEEP_SECONDS = 5.0
"""Maximum sleep of the redial loop, so that a lost wake-up delays a dial by this much at most."""
MIN_PER_PREFIX = 4
PREFIX_SHARE = 4
"""One /24 or /48 network, or the peers behind one relay, may hold 1/PREFIX_SHARE of the
connections, and never fewer than MIN_PER_PREFIX."""

Connect = Callable[[str, str], Awaitable[bool]]
"""(peer id, address) → True if it connected, False if the peer was already connected. Raises
PeerError."""


class ConnectionManager:
    """Listens to `connections` and keeps `table` consistent with them.

    Args:
        host: the libp2p host.
        connections: the open connections.
        table: the known peers.
        scores: bans of peers.
        dialer: dials the peers that `table` selects.
        neighbours: greets new peers.
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
        neighbours: Neighbours,
        max_connections: int,
        depends_on: Callable[[str], bool],
        rng: random.Random,
    ) -> None:
        self._host = host
        self._connections = connections
        self._table = table
        self._scores = scores
        self._dialer = dialer
        self._neighbours = neighbours
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
        if not self._scores.may_connect(connection.peer, now):
            self.disconnect(connection.peer)  # the peer was banned after its handshake
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
            await self._neighbours.greet(peer)
            await trio.sleep(turnover.SETTLED_SECONDS)
            self._make_room()

    async def _close_dead_connections(self) -> None:
        """Close dead connections, and process closures that the library did not announce."""
        liveness = Liveness()
        while True:
            await trio.sleep(CHECK_INTERVAL_SECONDS)
            for connection in self._connections:
                if connection.is_closed:
                    connection.forget()
                    self._connections.closed(connection)
            for connection in liveness.dead(self._connections, trio.current_time()):
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


class Dialer:
    """The redial loop: dials the peers that `table` selects, with `connect`.

    table.to_dial ─▶ one task per peer: its addresses in turn, each with a deadline
      ─▶ table.record_dialled | record_failed ─▶ sleep until the next dial is due
    """

    def __init__(self, table: PeerTable, connect: Connect) -> None:
        self._table = table
        self._connect = connect
        self._wake = trio.Event()
        self._unreachable: set[tuple[str, str]] = set()

    def wake(self) -> None:
        """Check the table again now, because it has changed."""
        self._wake.set()

    async def dial_once(self, peer: str, address: str) -> None:
        """Connect now, independent of the table. Raises PeerError with the reason."""
        with trio.move_on_after(DIAL_SECONDS):
            await self._connect(peer, address)
            return
        raise PeerError(f"no answer within {DIAL_SECONDS:g} s")

    async def run(self) -> None:
        """Dial until cancelled."""
        async with trio.open_nursery() as nursery:
            running = 0

            async def dial(order: Dial) -> None:
                nonlocal running
                try:
                    await self._dial(order)
                finally:
                    running -= 1
                    self.wake()

            while True:
                self._wake = trio.Event()
                free = MAX_CONCURRENT_DIALS - running
                for order in self._table.to_dial(trio.current_time(), free):
                    running += 1
                    nursery.start_soon(dial, order)
                full = running == MAX_CONCURRENT_DIALS
                pause = math.inf if full else self._table.next_due(trio.current_time())
                with trio.move_on_after(min(max(pause, 0.05), MAX_SLEEP_SECONDS)):
                    await self._wake.wait()

    async def _dial(self, order: Dial) -> None:
        """Dial one peer. Never raises; every failure is recorded as an outcome."""
        relayed = any(map(is_circuit, order.addresses))
        for address in order.addresses[:ADDRESSES_PER_DIAL]:
            seconds = DIRECT_SECONDS if relayed and not is_circuit(address) else DIAL_SECONDS
            why = f"no answer within {seconds:g} s"
            with trio.move_on_after(seconds):
                try:
                    if await self._connect(order.peer, address):
                        self._table.record_dialled(order.peer, address, trio.current_time())
                    else:
                        self._table.cancel_dial(order.peer)
                    self._log_reached(order)
                    return
                except PeerError as error:
                    why = str(error)
            self._log_failure(order, address, why)
        self._table.record_failed(order.peer, trio.current_time())

    def _log_failure(self, order: Dial, address: str, why: str) -> None:
        """Log one warning per bootstrap address and outage. Other failures are frequent, because
        strangers report many stale addresses, and are logged at debug level."""
        if order.source == "bootstrap" and (order.peer, address) not in self._unreachable:
            self._unreachable.add((order.peer, address))
            log.warning(
                "bootstrap peer unreachable, will retry: %s/p2p/%s (%s)",
                address,
                order.peer,
                why[:200],
            )
        else:
            log.debug("dial failed: %s/p2p/%s (%s)", address, order.peer, why[:200])

    def _log_reached(self, order: Dial) -> None:
        lost = {each for each in self._unreachable if each[0] == order.peer}
        if lost:
            self._unreachable -= lost
            log.info("bootstrap peer reached: %s", order.peer)


class Admission:
    """Admission of connections at the end of a handshake.

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
