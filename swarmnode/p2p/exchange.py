"""Peer exchange, `/swarmnode/peers/1`: nodes with a common bootstrap peer find each other through
it.

    this node ─ swarm id, listen addresses ─▶ peer    keeps the ports, at the IP address it sees
    this node ◀─ its connected peers ──────── peer    untrusted until a dial proves the peer id

An address that a peer reports for itself is stored only with the IP address at which this node sees
that peer. Only addresses that were observed or dialled are passed on. A peer therefore cannot
direct the swarm at a third party. The damage of a liar is a few failed dials per peer, which
peers.py bounds.
"""

from __future__ import annotations

import collections
import logging
import random
from collections.abc import Callable

import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p import addresses
from swarmnode.p2p.addresses import Address, Circuit
from swarmnode.p2p.api import Requests
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.nat import Nat
from swarmnode.p2p.peers import PeerTable
from swarmnode.p2p.slots import RateLimiter
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.messages import PeerAddresses, PeersRequest, PeersResponse

log = logging.getLogger(__name__)

DEADLINE = 10.0
QUERY_INTERVAL_SECONDS = 120.0
"""Interval between rounds of requests, before jitter."""
PEERS_PER_ROUND = 4
"""Number of peers that receive a request in one round. Each peer also receives one right after it
connects."""
CHANGES_SECONDS = 0.5
"""Changes of own addresses within this time are sent together."""
REQUEST_BURST = 4
REQUEST_SECONDS = 30.0
"""A peer may send REQUEST_BURST requests at once and one more per REQUEST_SECONDS."""
LEARNED = ("learned", "malformed", "out_of_reach", "other_swarm", "failed")
"""Outcomes of a received address, or of a whole response."""


class PeerExchange:
    """Sends and answers requests for peer addresses.

    Args:
        table: receives and provides the addresses.
        requests: transport of the messages.
        swarm: swarm id; responses of other swarms are ignored.
        connections: the open connections.
        nat: own addresses and relays.
        on_change: called when the table has changed.
        rng: random source.
    """

    def __init__(
        self,
        table: PeerTable,
        requests: Requests,
        swarm: bytes,
        connections: ConnectionTable,
        nat: Nat,
        on_change: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._table = table
        self._requests = requests
        self._swarm = swarm
        self._connections = connections
        self._nat = nat
        self._on_change = on_change
        self._rng = rng
        self._limiter = RateLimiter(REQUEST_BURST, REQUEST_SECONDS)
        self.learned = collections.Counter[str](dict.fromkeys(LEARNED, 0))
        requests.serve(
            ids.PEERS_PROTOCOL,
            self._answer,
            max_request_bytes=limits.PEERS_REQUEST_BYTES,
            max_response_bytes=limits.PEERS_RESPONSE_BYTES,
            concurrent=16,
            per_peer=1,
            deadline=DEADLINE,
        )

    async def run(self) -> None:
        """Ask a few connected peers every QUERY_INTERVAL_SECONDS, and after changes of own
        addresses, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_address_changes)
            while True:
                await trio.sleep(QUERY_INTERVAL_SECONDS * self._rng.uniform(0.75, 1.25))
                await self.ask_some(trusted_only=True)

    async def _send_address_changes(self) -> None:
        """Ask peers when own addresses change, because a request carries them."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._nat.addresses_changed()
                await trio.sleep(CHANGES_SECONDS)
                nursery.start_soon(self.ask_some)

    async def ask_some(self, *, trusted_only: bool = False) -> None:
        """Ask a few connected peers, which also sends them the current own addresses.

        Args:
            trusted_only: ask only peers whose responses are accepted.
        """
        connected = [
            peer
            for peer in self._table.connected()
            if not trusted_only or self._table.accepts_reports(peer)
        ]
        async with trio.open_nursery() as nursery:
            for peer in self._rng.sample(connected, min(PEERS_PER_ROUND, len(connected))):
                nursery.start_soon(self.ask, peer)

    async def ask(self, peer: str) -> None:
        """Ask one connected peer and add its response to the table. Never raises for a fault of the
        peer."""
        try:
            request = codec.encode(
                PeersRequest(self._swarm, self._nat.own_addresses(peer)[: limits.PEER_ADDRESSES])
            )
            data = await self._requests.request(
                peer,
                ids.PEERS_PROTOCOL,
                request,
                deadline=DEADLINE,
                max_response_bytes=limits.PEERS_RESPONSE_BYTES,
            )
            response = codec.decode(data, PeersResponse, limits.PEERS_RESPONSE_BYTES)
        except PeerError as error:
            self.learned["failed"] += 1
            log.debug("no peers from %s: %s", peer, error)
            return
        if response.swarm != self._swarm:
            self.learned["other_swarm"] += 1
            return
        reporter = self._connections.vantage_address(peer)
        if reporter is not None and self._table.accepts_reports(peer):
            self._store_response(response.peers, peer, reporter)

    async def greet(self, peer: str) -> None:
        """Ask a new peer, after its reachability check, because the request carries own addresses.
        Never raises for a fault of the peer."""
        await self._nat.greet(peer)
        if peer in self._table.connected():
            await self.ask(peer)

    def _store_response(self, reported: list[PeerAddresses], peer: str, reporter: Address) -> None:
        """Add the addresses that `peer`, observed at `reporter`, reported."""
        now = trio.current_time()
        for each in reported:
            for text in each.addresses:
                try:
                    address, _ = addresses.parse_any(text)
                    addresses.check_peer_id(each.peer)
                except ValueError:
                    self.learned["malformed"] += 1
                    continue
                if isinstance(address, Circuit):
                    address = self._correct_relay_address(address, peer, reporter)
                if not addresses.dialable(address, reporter):
                    self.learned["out_of_reach"] += 1
                elif self._table.add(each.peer, str(address), "exchange", now):
                    self.learned["learned"] += 1
        self._on_change()

    async def _answer(self, peer: str, data: bytes) -> bytes:
        """Handle a request. Raises BadMessage, or PeerError above the peer's request rate."""
        if not self._limiter.allow(peer, trio.current_time()):
            raise PeerError(f"{peer} sends too many requests")
        request = codec.decode(data, PeersRequest, limits.PEERS_REQUEST_BYTES)
        seen = self._connections.vantage_address(peer)
        if request.swarm != self._swarm or seen is None:
            return codec.encode(PeersResponse(self._swarm, []))
        self._store_reported(peer, request.addresses, self._connections.observed(peer))
        good = self._table.peers_to_share(
            limits.PEERS, exclude=peer, scope=seen.scope, also=self._nat.relay_addresses
        )
        return codec.encode(
            PeersResponse(
                self._swarm,
                [PeerAddresses(other, where[: limits.PEER_ADDRESSES]) for other, where in good],
            )
        )

    def _correct_relay_address(self, circuit: Circuit, peer: str, reporter: Address) -> Circuit:
        """Replace the relay's address by the one this node knows. A relay that reports itself is at
        its observed address."""
        known = self._nat.address_of(circuit.relay)
        if (
            known is None
            and circuit.relay == peer
            and circuit.address.ip is not None
            and circuit.address.ip.is_unspecified
        ):
            known = Address(reporter.kind, reporter.host, circuit.address.port)
        return circuit if known is None else Circuit(known, circuit.relay)

    def _store_reported(self, peer: str, claimed: list[str], seen: Address | None) -> None:
        """Store the requester's own ports and relays.

        A port is stored with `seen`, the observed IP address of the requester; `seen` is None for a
        relayed peer. A relay is stored only if this node knows its address itself.
        """
        for text in claimed:
            try:
                address, _ = addresses.parse_any(text)
            except ValueError as error:
                raise BadMessage("bounds", "address") from error
            if isinstance(address, Circuit):
                where = self._nat.address_of(address.relay)
                if where is not None and address.relay != peer:
                    self._table.add_self_reported(
                        peer, str(Circuit(where, address.relay)), trio.current_time()
                    )
            elif (
                seen is not None
                and address.ip is not None
                and address.port
                and (address.ip.is_unspecified or address.ip == seen.ip)
            ):
                self._table.add_self_reported(
                    peer, str(Address(seen.kind, seen.host, address.port)), trio.current_time()
                )
