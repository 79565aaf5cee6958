"""`p2p.api.Network` over simulated wires, with the product's own peer table, dialler, neighbours,
reputation and admission.

This module replaces the libp2p host: connections with a handshake and pings, requests with one
response, bulk chunks. Bytes are counted by protocol.
"""

from __future__ import annotations

import collections
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout
from swarmnode.p2p.addresses import Address, parse
from swarmnode.p2p.api import WrongPeer
from swarmnode.p2p.budget import TrafficStatistics
from swarmnode.p2p.connection_manager import Admission, ConnectionManager, Dialer
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.discovery import Discovery
from swarmnode.p2p.library.gater import HandshakePeer
from swarmnode.p2p.neighbours import Neighbours
from swarmnode.p2p.network import TARGET_PEERS
from swarmnode.p2p.peers import PeerTable
from swarmnode.p2p.reputation import PeerScores
from swarmnode.p2p.requests import OUTBOUND, OUTBOUND_PER_PEER
from swarmnode.p2p.slots import PeerSlots
from swarmnode.wire import ids
from swarmnode.wire.envelope import Credentials
from tests.support.fakes.bulk import RequestBulk
from tests.support.fakes.network import ServedProtocols
from tests.support.sim.wires import History, Link, Timeline, Wires

HANDSHAKE_BYTES = 1500
FRAME_BYTES = 40
"""Overhead of a frame in bytes."""
PING_SECONDS, NEXT_PING_SECONDS = 30.0, 40.0
MAX_CONNECTIONS = 200


class Medium:
    """Listening nodes and the wires between nodes. waits: pending requests, each with its node,
    peer and start time."""

    def __init__(self, wires: Wires, timeline: Timeline, history: History) -> None:
        self.history = history
        self.wires = wires
        self.timeline = timeline
        self.listening: dict[str, SimNetwork] = {}
        """Nodes by address."""
        self.waits: dict[int, Wait] = {}
        self._number = 0

    def begin(self, wait: Wait) -> int:
        self._number += 1
        self.waits[self._number] = wait
        return self._number


@dataclass
class Wait:
    node: str
    what: str
    since: float


class SimConnection:
    """One end of a link; a `p2p.connections.Connection`."""

    relay = None

    def __init__(
        self, network: SimNetwork, link: Link, other: SimNetwork, *, inbound: bool
    ) -> None:
        self.peer = other.peer_id
        self.inbound = inbound
        self.remote = Address(
            other.address.kind, other.address.host, 40_000 if inbound else other.address.port
        )
        self.link = link
        self.other = other
        self.network = network
        self._ping = (0, True, link.opened_at)

    @property
    def is_closed(self) -> bool:
        return not self.link.open

    @property
    def ping(self) -> tuple[int, bool]:
        number, answered, at = self._ping
        now, wires = trio.current_time(), self.network.medium.wires
        mine, theirs = str(self.network.address), str(self.other.address)
        alive = self.other.alive and wires.passes(mine, theirs) and wires.passes(theirs, mine)
        if now - at >= (PING_SECONDS if answered else NEXT_PING_SECONDS):
            number, at = number + 1, now
        self._ping = (number, (alive if number else True), at)
        return self._ping[:2]

    last_received = None

    @property
    def is_busy(self) -> bool:
        return self.link.under_way[self.network.peer_id] > 0

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()
        self.link.close()

    def forget(self) -> None:
        self.link.close()


class SimHost:
    """The part of a libp2p host that `ConnectionManager` uses."""

    def __init__(self, network: SimNetwork, nursery: trio.Nursery) -> None:
        self.peer_id = network.peer_id
        self.nursery = nursery
        self.pinned: set[str] = set()
        self._network = network

    def pin(self, peers: Collection[str]) -> None:
        self.pinned = set(peers)

    async def close_peer(self, peer: str) -> None:
        await trio.lowlevel.checkpoint()
        for connection in self._network.connections.with_peer(peer):
            await connection.close()


class NoNat:
    """Every node is reachable at the address where it listens."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def own_addresses(self, peer: str) -> list[str]:
        return [str(self._address)]

    async def addresses_changed(self) -> None:
        await trio.sleep_forever()

    async def greet(self, peer: str) -> None:
        await trio.lowlevel.checkpoint()

    def address_of(self, relay: str) -> Address | None:
        return None

    def relay_addresses(self, peer: str) -> list[str]:
        return []


class SimNetwork(PeerScores):
    """The network of one node; satisfies `api.Network`. rng: its own. clock: returns Unix time in
    seconds. nursery: ends with the node."""

    def __init__(
        self,
        medium: Medium,
        credentials: Credentials,
        address: Address,
        data_dir: Path,
        bootstrap: list[tuple[Address, str]],
        rng: random.Random,
        clock: Callable[[], float],
        nursery: trio.Nursery,
    ) -> None:
        super().__init__()
        self.medium = medium
        self.peer_id = peer_id = credentials.peer
        self.address = address
        self.listen_addrs = [f"{address}/p2p/{peer_id}"]
        self.alive = True
        self.nursery = nursery
        self.rng = rng
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.peers = PeerTable(peer_id, TARGET_PEERS, rng, may_connect=self.may_connect)
        self.connections = ConnectionTable()
        self.requests = SimRequests(self)
        self.bulk = RequestBulk(self.requests, self)
        self.streams = NoStreams()
        dialer = Dialer(self.peers, self._connect)
        self.neighbours = Neighbours(
            self.requests,
            credentials,
            self.peers,
            self.connections,
            NoNat(address),  # type: ignore[arg-type]
            dialer.wake,
            self.is_allowed,
            rng,
            clock=clock,
        )
        self.discovery = Discovery(
            self.peers, self.reputation, None, data_dir / "peers.json", bootstrap, dialer.wake
        )
        self.manager = ConnectionManager(
            SimHost(self, nursery),
            self.connections,
            self.peers,
            self,
            dialer,
            self.neighbours,
            MAX_CONNECTIONS,
            lambda peer: False,
            rng,
        )  # type: ignore[arg-type]
        self.admission = Admission(
            peer_id, self.connections, self, MAX_CONNECTIONS, None, lambda peer: None
        )
        self.connections.listeners.append(self.manager)

    def start(self) -> None:
        """Start listening. Peers connected with an earlier life at this address detect the loss
        now."""
        for link in self.medium.wires.links_of(str(self.address)):
            link.close()
        self.medium.listening[str(self.address)] = self
        self.discovery.load()
        self.nursery.start_soon(self.manager.run)
        self.nursery.start_soon(self.discovery.run)
        self.nursery.start_soon(self.neighbours.run)

    def stop(self, *, silently: bool) -> None:
        """Stop the network.

        Args:
            silently: As after a power cut: peers detect the loss by pings or when the address
                answers again.
        """
        self.alive = False
        self.medium.listening.pop(str(self.address), None)
        if not silently:
            for link in self.medium.wires.links_of(str(self.address)):
                link.close()

    # -- api.Connections

    def connected(self) -> list[str]:
        return self.peers.connected()

    async def changed(self) -> None:
        await self.connections.changed()

    async def dial(self, peer: str, address: str) -> None:
        await self.manager.dial(peer, address)

    def pin(self, peers: Collection[str]) -> None:
        self.manager.pin(peers)

    def disconnect(self, peer: str) -> None:
        self.manager.disconnect(peer)

    def last_received(self, peer: str) -> float | None:
        return None

    def observed(self, peer: str) -> Address | None:
        return self.connections.observed(peer)

    def origin(self, peer: str) -> str | None:
        return self.connections.origin(peer)

    # -- wire

    def traffic(self) -> TrafficStatistics:
        return TrafficStatistics(received=dict(self.received), sent=dict(self.sent))

    def connection(self, peer: str) -> SimConnection:
        """Return a connection to `peer`. Raise PeerError."""
        for each in self.connections.with_peer(peer):
            if not each.is_closed and isinstance(each, SimConnection):
                return each
        raise PeerError(f"{peer} is not connected")

    def transmit(
        self, connection: SimConnection, protocol: str, size: int, arrive: Callable[[], None]
    ) -> None:
        """Call `arrive` in the other node when the bytes have arrived."""
        size += FRAME_BYTES
        self.sent[protocol] += size
        other = connection.other

        def arrived() -> None:
            if other.alive:
                self.medium.history.note(
                    f"{self.peer_id[-6:]} > {other.peer_id[-6:]} {protocol} {size}"
                )
                other.received[protocol] += size
                arrive()

        connection.link.send(str(self.address), size, arrived)

    async def _connect(self, peer: str, text: str) -> bool:
        """See `connection_manager.Connect`."""
        if self.connections.with_peer(peer):
            return False
        address, _ = parse(text)
        here, there, wires = str(self.address), str(address), self.medium.wires
        await trio.sleep(wires.way(here, there).delay * 2)
        if not (wires.passes(here, there) and wires.passes(there, here)):
            await trio.sleep_forever()  # no answer
        other = self.medium.listening.get(there)
        if other is None:
            raise PeerError("connection refused")
        await trio.sleep(wires.way(there, here).delay * 2)
        if not (wires.passes(here, there) and wires.passes(there, here)):
            await trio.sleep_forever()
        if other.peer_id != peer:
            raise WrongPeer(f"{other.peer_id} answers there")
        if self.connections.with_peer(peer):
            return False
        if not other.alive or not self.alive:
            raise PeerError("gone")
        if not self.admission.admits(HandshakePeer(peer, address, False, None)):
            raise PeerError("not wanted here")
        if not other.admission.admits(
            HandshakePeer(
                self.peer_id, Address(self.address.kind, self.address.host, 40_000), True, None
            )
        ):
            raise PeerError("refused")
        link = wires.connect(here, there)
        for network, its_other, inbound in ((self, other, False), (other, self, True)):
            network.sent["handshake"] += HANDSHAKE_BYTES
            network.received["handshake"] += HANDSHAKE_BYTES
            network._opened(SimConnection(network, link, its_other, inbound=inbound))
        return True

    def _opened(self, connection: SimConnection) -> None:
        connection.link.on_close.append(lambda: self._closed(connection))
        self.connections.opened(connection)

    def _closed(self, connection: SimConnection) -> None:
        if self.alive:
            self.requests.lost(connection)
            self.connections.closed(connection)


# ---- requests ------------------------------------------------------------------------------------


class Pending:
    """A pending request. outcome: bytes, or the error to raise."""

    def __init__(self, connection: SimConnection) -> None:
        self.connection = connection
        self.done = trio.Event()
        self.outcome: bytes | PeerError = PeerError("the stream was reset")

    def resolve(self, outcome: bytes | PeerError) -> None:
        if not self.done.is_set():
            self.outcome = outcome
            self.done.set()


class SimRequests(ServedProtocols):
    """Requests with one response and the limits of `p2p.requests`."""

    def __init__(self, network: SimNetwork) -> None:
        super().__init__(network.is_allowed)
        self._network = network
        self._slots: dict[str, PeerSlots] = collections.defaultdict(
            lambda: PeerSlots(OUTBOUND_PER_PEER, OUTBOUND)
        )
        self._pending: dict[Pending, None] = {}

    async def request(
        self,
        peer: str,
        protocol: str,
        data: bytes,
        *,
        deadline: float,
        max_response_bytes: int,
        urgent: bool = False,
    ) -> bytes:
        medium = self._network.medium
        number = medium.begin(Wait(self._network.peer_id, protocol, trio.current_time()))
        try:
            with trio.move_on_after(deadline):
                if urgent:
                    return await self._ask(peer, protocol, data, max_response_bytes)
                async with self._slots[protocol].slot(peer):
                    return await self._ask(peer, protocol, data, max_response_bytes)
        finally:
            del medium.waits[number]
        raise PeerTimeout(f"{peer} did not answer {protocol} within {deadline:g} s")

    async def _ask(self, peer: str, protocol: str, data: bytes, max_response_bytes: int) -> bytes:
        connection = self._network.connection(peer)
        pending = Pending(connection)
        self._pending[pending] = None
        other = connection.other
        granted = protocol == ids.BULK_PROTOCOL  # a transfer keeps the connection at both ends
        busy = [self._network.peer_id, *([other.peer_id] if granted else [])]
        connection.link.under_way.update(busy)
        try:
            self._network.transmit(
                connection,
                protocol,
                len(data),
                lambda: other.requests.arrived(
                    connection, pending, protocol, data, max_response_bytes
                ),
            )
            await pending.done.wait()
        finally:
            connection.link.under_way.subtract(busy)
            del self._pending[pending]
        if isinstance(pending.outcome, PeerError):
            raise pending.outcome
        return pending.outcome

    def lost(self, connection: SimConnection) -> None:
        """End the requests of a lost connection."""
        for pending in list(self._pending):
            if pending.connection.link is connection.link:
                pending.resolve(PeerError("the connection is gone"))

    # -- server side

    def arrived(
        self, connection: SimConnection, pending: Pending, protocol: str, data: bytes, most: int
    ) -> None:
        """Handle a request. connection: the client's end."""
        self._network.nursery.start_soon(self._answer, connection, pending, protocol, data, most)

    async def _answer(
        self, connection: SimConnection, pending: Pending, protocol: str, data: bytes, most: int
    ) -> None:
        peer = connection.network.peer_id
        outcome: bytes | PeerError
        try:
            outcome = await self.answer(peer, protocol, data)
        except PeerError as error:
            outcome = error
        if isinstance(outcome, bytes) and len(outcome) > most:
            outcome = BadMessage("oversize", f"{len(outcome)} bytes announced, {most} allowed")
        back = [
            each
            for each in self._network.connections.with_peer(peer)
            if isinstance(each, SimConnection) and each.link is connection.link
        ]
        if back:
            size = len(outcome) if isinstance(outcome, bytes) else 0
            self._network.transmit(back[0], protocol, size, lambda: pending.resolve(outcome))


class NoStreams:
    """Rejects all streams: this simulator has no crews."""

    def serve(self, protocol: str, accept: Any, *, concurrent: int, per_peer: int) -> None:
        pass

    async def open(self, peer: str, protocol: str, *, deadline: float) -> Any:
        await trio.lowlevel.checkpoint()
        raise Incompatible(f"{protocol} is not supported here")
