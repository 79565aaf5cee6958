"""Peer exchange, `/swarmnode/peers/1`: nodes that share a bootstrap peer find each other through
it.

    we ─ our swarm, our listen addresses ─▶ peer      it believes the ports and puts the IP address
    it sees before them
    we ◀─ peers it is connected to now ──── peer      we believe nothing: only a dial that ends with
    that very peer id proves an address

An address that a peer claims for itself is kept only at the IP address we see it at, and what is
told on was seen like that or dialled. So nobody can point the swarm at a machine that is not its
own; what is left to a liar is a few failed dials per peer (peers.py bounds them).
"""

from __future__ import annotations

import collections
import dataclasses
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
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.messages import PeerAddresses, PeersRequest, PeersResponse

log = logging.getLogger(__name__)

DEADLINE = 10.0
ASK_SECONDS = 120.0
"""Between two rounds of asking, with jitter."""
ASK_AT_ONCE = 4
"""Peers asked in one round; each is also asked right after it connected."""
CHANGES_SECONDS = 0.5
"""Changes of our addresses within this time are told together."""
REQUESTS_PER_PEER = 4
REQUEST_SECONDS = 30.0
"""A peer may ask REQUESTS_PER_PEER times at once and once more for each REQUEST_SECONDS."""


@dataclasses.dataclass
class _Allowance:
    left: float
    at: float


LEARNED = ("learned", "malformed", "out_of_reach", "other_swarm", "failed")
"""What becomes of an address, or of a whole answer."""


class PeerExchange:
    """`connections`: where peers are. `nat`: where we are. `news()`: is called when the table has
    changed."""

    def __init__(
        self,
        table: PeerTable,
        requests: Requests,
        swarm: bytes,
        connections: ConnectionTable,
        nat: Nat,
        news: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._table = table
        self._requests = requests
        self._swarm = swarm
        self._connections = connections
        self._nat = nat
        self._news = news
        self._rng = rng
        self._allowances: dict[str, _Allowance] = {}
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
        """Asks a few connected peers every ASK_SECONDS, and when there is something to tell them,
        until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_changes)
            while True:
                await trio.sleep(ASK_SECONDS * self._rng.uniform(0.75, 1.25))
                await self.ask_some(heeded=True)

    async def _tell_changes(self) -> None:
        """Several changes within CHANGES_SECONDS are told together."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._nat.addresses_changed()
                await trio.sleep(CHANGES_SECONDS)
                nursery.start_soon(self.ask_some)

    async def ask_some(self, *, heeded: bool = False) -> None:
        """Asks a few connected peers, and so tells them where we are now. heeded: of those alone
        whose answers count."""
        connected = [
            peer for peer in self._table.connected() if not heeded or self._table.heeds(peer)
        ]
        async with trio.open_nursery() as nursery:
            for peer in self._rng.sample(connected, min(ASK_AT_ONCE, len(connected))):
                nursery.start_soon(self.ask, peer)

    async def ask(self, peer: str) -> None:
        """Asks one connected peer and puts what it tells into the table. Never raises for anything
        the peer does."""
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
        teller = self._connections.vantage(peer)
        if teller is not None and self._table.heeds(peer):
            self._learn(response.peers, peer, teller)

    async def greet(self, peer: str) -> None:
        """Asks a new peer. Before it is told our addresses, we want to know whether they are any
        good. Never raises for anything the peer does."""
        await self._nat.greet(peer)
        if peer in self._table.connected():
            await self.ask(peer)

    def forget(self, peer: str) -> None:
        """`peer` is gone."""
        self._allowances.pop(peer, None)

    def _learn(self, told: list[PeerAddresses], peer: str, teller: Address) -> None:
        """`peer`, who told, is at the address `teller`, or behind a relay there."""
        now = trio.current_time()
        for each in told:
            for text in each.addresses:
                try:
                    address, _ = addresses.parse_any(text)
                    addresses.check_peer_id(each.peer)
                except ValueError:
                    self.learned["malformed"] += 1
                    continue
                if isinstance(address, Circuit):
                    address = self._place(address, peer, teller)
                if not addresses.dialable(address, teller):
                    self.learned["out_of_reach"] += 1
                elif self._table.add(each.peer, str(address), "exchange", now):
                    self.learned["learned"] += 1
        self._news()

    async def _answer(self, peer: str, data: bytes) -> bytes:
        """Their request. Raises BadMessage, or PeerError when they ask too often."""
        if not self._may_ask(peer, trio.current_time()):
            raise PeerError(f"{peer} asks too often")
        request = codec.decode(data, PeersRequest, limits.PEERS_REQUEST_BYTES)
        seen = self._connections.vantage(peer)
        if request.swarm != self._swarm or seen is None:
            return codec.encode(PeersResponse(self._swarm, []))
        self._believe(peer, request.addresses, self._connections.observed(peer))
        good = self._table.good(
            limits.PEERS, apart_from=peer, scope=seen.scope, also=self._nat.relayed_here
        )
        return codec.encode(
            PeersResponse(
                self._swarm,
                [PeerAddresses(other, where[: limits.PEER_ADDRESSES]) for other, where in good],
            )
        )

    def _place(self, circuit: Circuit, peer: str, teller: Address) -> Circuit:
        """Where the relay is, if we know better than who told; a relay that speaks of itself is
        where we see it."""
        known = self._nat.address_of(circuit.relay)
        if (
            known is None
            and circuit.relay == peer
            and circuit.address.ip is not None
            and circuit.address.ip.is_unspecified
        ):
            known = Address(teller.kind, teller.host, circuit.address.port)
        return circuit if known is None else Circuit(known, circuit.relay)

    def _believe(self, peer: str, claimed: list[str], seen: Address | None) -> None:
        """Keeps the requester's own ports, at the IP address it really has (`seen`; None if it is
        relayed), and its relays, where we know the address of those ourselves."""
        for text in claimed:
            try:
                address, _ = addresses.parse_any(text)
            except ValueError as error:
                raise BadMessage("bounds", "address") from error
            if isinstance(address, Circuit):
                where = self._nat.address_of(address.relay)
                if where is not None and address.relay != peer:
                    self._table.claim(peer, str(Circuit(where, address.relay)), trio.current_time())
            elif (
                seen is not None
                and address.ip is not None
                and address.port
                and (address.ip.is_unspecified or address.ip == seen.ip)
            ):
                self._table.claim(
                    peer, str(Address(seen.kind, seen.host, address.port)), trio.current_time()
                )

    def _may_ask(self, peer: str, now: float) -> bool:
        allowance = self._allowances.setdefault(peer, _Allowance(REQUESTS_PER_PEER, now))
        allowance.left = (
            min(REQUESTS_PER_PEER, allowance.left + (now - allowance.at) / REQUEST_SECONDS) - 1.0
        )
        allowance.at = now
        if allowance.left < 0:
            allowance.left = 0.0
            return False
        return True
