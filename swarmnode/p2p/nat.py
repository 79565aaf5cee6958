"""NAT traversal: own reachability, relays, circuit dials and hole punching.

peer connects ─▶ can it dial back (autonat.py)? ─┬─ yes ─▶ relay for other peers (relay.py)
                                                 └─ no ──▶ reserve at relays (relay_client.py)
                                                           and advertise their addresses
inbound circuit ─▶ punch.py ─▶ direct: close the circuit, else keep it
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable

import msgspec
import trio

from swarmnode.config import NetworkConfig
from swarmnode.p2p import addresses
from swarmnode.p2p.addresses import PUBLIC, Address, Circuit, OwnAddresses, parse_any
from swarmnode.p2p.autonat import DialBack, Reachability, ReachabilityCheck, ReachStatistics
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.gateway import ExternalView, Forwarding, RouterKind
from swarmnode.p2p.library.hosts import Connection, Host
from swarmnode.p2p.peers import PeerTable
from swarmnode.p2p.punch import Puncher, PunchStatistics
from swarmnode.p2p.relay import Relay, RelayLimits, RelayStatistics
from swarmnode.p2p.relay_client import RelayClient, RelayClientStatistics

log = logging.getLogger(__name__)

RELAY_LIMITS = RelayLimits()
AUTO_RELAY_BYTES_PER_SECOND = 2 * 2**20
"""Limit for all circuits together on a node with `network.relay = "auto"`. A `server` is bounded by
`network.upload_bytes_per_second` only."""
PUNCH_DELAY_SECONDS = 0.5
"""Delay of hole punching after an inbound circuit, so that the caller's own tasks come first."""
GRACE_SECONDS = 2.0
"""Delay until a circuit is closed after a direct connection has replaced it."""


class NatStatistics(msgspec.Struct, frozen=True):
    reach: ReachStatistics = ReachStatistics()
    relay: RelayStatistics = RelayStatistics()
    client: RelayClientStatistics = RelayClientStatistics()
    punch: PunchStatistics = PunchStatistics()
    router: RouterKind = "none"
    """Kind of the router's external address by UPnP, queried while peers cannot dial this node."""
    direct: int = 0
    """Number of connected peers with a direct connection."""
    relayed: int = 0
    """Number of peers that are connected through a relay only."""


class Nat:
    """NAT traversal of one node; listens to `connections`.

    Args:
        host: the libp2p host.
        connections: the open connections.
        table: the known peers.
        cfg: network settings.
        own: addresses of this node.
        is_allowed: returns False for peers that are not served.
        rng: random source.
    """

    def __init__(
        self,
        host: Host,
        connections: ConnectionTable,
        table: PeerTable,
        cfg: NetworkConfig,
        own: OwnAddresses,
        is_allowed: Callable[[str], bool],
        rng: random.Random,
    ) -> None:
        self._host = host
        self._connections = connections
        self._table = table
        self._role = cfg.relay
        self._punching = cfg.hole_punching and cfg.relay != "off"
        self._own = own
        self._addresses_event = trio.Event()
        self._rng = rng
        self._forwarding = Forwarding(
            next(iter(own.external_ports()), 0), self._external_view, self._check_again
        )
        self.reach = ReachabilityCheck(
            host, connections, own.external_ports(), self._reachability_changed, rng
        )
        self.dial_back = DialBack(host, is_allowed)
        limits = dataclasses.replace(
            RELAY_LIMITS,
            bytes_per_second=0 if cfg.relay == "server" else AUTO_RELAY_BYTES_PER_SECOND,
        )
        self.relay = Relay(host, limits, lambda: [str(self._best_own_address())], is_allowed)
        self.client = RelayClient(
            host,
            candidates=self._candidates,
            needed=self._needs_relays,
            address_of=self.address_of,
            on_change=self._addresses_changed,
            rng=rng,
        )
        self.puncher = Puncher(host, connections, own.listen, self._outside, is_allowed)

    def start(self) -> None:
        """Start the background tasks. The host must already listen."""
        if self._punching:
            self.puncher.start()
        self.relay.serve(self._role == "server")
        self._host.nursery.start_soon(self.reach.run)
        self._host.nursery.start_soon(self.client.run)
        if self._role == "auto" and self._own.external_ports() and not self._own.announce:
            self._host.nursery.start_soon(self._forwarding.run)

    # -- connections

    def opened(self, connection: Connection) -> None:
        """Punch a hole for an inbound circuit, or replace the circuits by a direct connection."""
        if connection.relay is None:
            self.client.wake()
            if self._connections.circuits(connection.peer):
                self._host.nursery.start_soon(self._replace_circuits, connection.peer)
        elif self._punching and connection.inbound:
            self._host.nursery.start_soon(self._punch, connection.peer)

    def closed(self, connection: Connection) -> None:
        """Drop the reservations of a peer without a direct connection."""
        if connection.relay is None and not self._connections.is_direct(connection.peer):
            self.relay.forget_peer(connection.peer)
            self.client.forget_peer(connection.peer)
        if not len(self._connections):
            self.reach.reset_votes()

    async def greet(self, peer: str) -> None:
        """Check reachability through a new peer, before own addresses are sent to it."""
        if self._role != "off":
            await self.reach.greet(peer)

    async def connect(self, peer: str, address: str) -> bool:
        """Connect directly, or through the relay in the address. A `connection_manager.Connect`."""
        if self._host.is_connected(peer):
            return False
        where, _ = parse_any(address)
        if isinstance(where, Circuit):
            await self.client.call(peer, where)
        else:
            await self._host.dial(peer, where)
        return True

    async def addresses_changed(self) -> None:
        """Return when own addresses have changed."""
        await self._addresses_event.wait()

    # -- addresses of peers

    def address_of(self, peer: str) -> Address | None:
        """Return an address of `peer` that this node verified: it dialled the peer there, or the
        peer listens at its observed IP address."""
        if (dialled := self._connections.dialled_at(peer)) is not None:
            return dialled
        known = self._table.get(peer)
        sure = (
            [each for each in known.addresses if each in known.worked | known.claimed]
            if known is not None
            else []
        )
        direct = [addresses.parse(each)[0] for each in sure if not addresses.is_circuit(each)]
        return next((each for each in direct if each.ip is not None), None)

    # -- own addresses

    def own_addresses(self, peer: str) -> list[str]:
        """Return the addresses to send to `peer`. The peer combines the ports of direct addresses
        with the IP address that it sees."""
        seen = self._connections.observed(peer)
        useless = (
            self.reach.verdict == "private"
            and not self._own.announce
            and (seen is None or seen.scope == PUBLIC)
        )
        direct = [] if useless else [str(each) for each in self._own.advertised()]
        return direct + [str(each) for each in self.client.addresses()]

    def depends_on(self, peer: str) -> bool:
        """Return True if `peer` is dialled through this node, or is a relay of this node."""
        return self.relay.reserved(peer) or peer in self.client.statistics().relays

    def relay_addresses(self, peer: str) -> list[str]:
        """Return the address at this relay of a peer with a reservation."""
        return (
            [str(Circuit(self._best_own_address(), self._host.peer_id))]
            if self.relay.reserved(peer)
            else []
        )

    def statistics(self) -> NatStatistics:
        own = self.reach.own_address
        peers = self._connections.peers()
        direct = sum(1 for peer in peers if self._connections.is_direct(peer))
        return NatStatistics(
            reach=ReachStatistics(
                self.reach.verdict,
                own.host if own is not None else "",
                own is not None and own.scope < PUBLIC,
                dict(self.dial_back.outcomes),
            ),
            relay=self.relay.statistics(),
            client=self.client.statistics(),
            punch=self.puncher.statistics(),
            router=self._forwarding.kind,
            direct=direct,
            relayed=len(peers) - direct,
        )

    # -- rules

    def _needs_relays(self) -> bool:
        return self._role == "client" or (self._role == "auto" and self.reach.verdict == "private")

    def _candidates(self) -> list[str]:
        """Return directly connected peers with a verified address, bootstrap peers first, because
        every node knows them."""
        direct = [
            peer
            for peer in self._table.connected()
            if self._connections.is_direct(peer) and self.address_of(peer) is not None
        ]
        bootstrap = {each.peer for each in self._table.bootstrap()}
        return sorted(direct, key=lambda peer: peer not in bootstrap)

    def _best_own_address(self) -> Address:
        """Return the best known own address. It may be unspecified; other peers then use the IP
        address that they see."""
        return (
            self._own.announce[0]
            if self._own.announce
            else self.reach.own_address or self._own.listen[0]
        )

    def _outside(self) -> list[Address]:
        """Return the addresses at which peers see this node, for hole punching."""
        own = self.reach.own_address
        return list(dict.fromkeys([*self._own.announce, *([own] if own is not None else [])]))

    def _reachability_changed(self, reachability: Reachability) -> None:
        if self._role == "auto":
            self.relay.serve(reachability == "public")
        self.client.wake()
        self._addresses_changed()

    def _addresses_changed(self) -> None:
        self._addresses_event.set()
        self._addresses_event = trio.Event()

    def _external_view(self) -> ExternalView:
        outside = self.reach.own_address
        if outside is None or outside.scope != PUBLIC:
            return ExternalView()
        return ExternalView(outside.host, self.reach.verdict == "private")

    async def _check_again(self) -> None:
        if peers := self._connections.peers():
            await self.reach.check(self._rng.choice(peers))

    async def _punch(self, peer: str) -> None:
        await trio.sleep(PUNCH_DELAY_SECONDS)
        if not self._connections.is_direct(peer) and self._connections.circuits(peer):
            await self.puncher.upgrade(peer)

    async def _replace_circuits(self, peer: str) -> None:
        """Close the circuits with `peer` once there is a direct connection. Pending requests on
        them fail and are sent again on the direct connection."""
        await trio.sleep(GRACE_SECONDS)
        if self._connections.is_direct(peer):
            for connection in self._connections.circuits(peer):
                await connection.close()
