"""Peer addresses that connected peers report, in requests about themselves and in answers about
others.

An address that a peer reports for itself is stored only with the IP address at which this node sees
that peer. Only addresses that were observed or dialled are passed on. A peer therefore cannot
direct the swarm at a third party. The damage of a liar is a few failed dials per peer, which
peers.py bounds.
"""

from __future__ import annotations

import collections

from swarmnode.errors import BadMessage
from swarmnode.p2p import addresses
from swarmnode.p2p.addresses import Address, Circuit
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.nat import Nat
from swarmnode.p2p.peers import PeerTable
from swarmnode.wire import limits
from swarmnode.wire.messages import PeerAddresses

OUTCOMES = ("learned", "malformed", "out_of_reach", "other_swarm")
"""Outcomes of a reported address; `other_swarm` is the answer of a peer in another swarm."""


class AddressReports:
    """Stores reported addresses in `table`, and selects those to report to a peer.

    Attributes:
        outcomes: number of received addresses by outcome of OUTCOMES.
    """

    def __init__(self, table: PeerTable, connections: ConnectionTable, nat: Nat) -> None:
        self._table = table
        self._connections = connections
        self._nat = nat
        self.outcomes = collections.Counter[str](dict.fromkeys(OUTCOMES, 0))

    def to_share(self, peer: str) -> list[PeerAddresses]:
        """Return a random choice of the connected peers, for `peer`."""
        seen = self._connections.vantage_address(peer)
        if seen is None:
            return []
        shared = self._table.peers_to_share(
            limits.PEERS, exclude=peer, scope=seen.scope, also=self._nat.relay_addresses
        )
        return [PeerAddresses(other, where[: limits.PEER_ADDRESSES]) for other, where in shared]

    def store_others(self, reported: list[PeerAddresses], peer: str, now: float) -> None:
        """Store the addresses of other peers that `peer` reported, if its reports are accepted.
        `now` is trio's clock."""
        reporter = self._connections.vantage_address(peer)
        if reporter is None or not self._table.accepts_reports(peer):
            return
        for each in reported:
            for text in each.addresses:
                try:
                    address, _ = addresses.parse_any(text)
                    addresses.check_peer_id(each.peer)
                except ValueError:
                    self.outcomes["malformed"] += 1
                    continue
                if isinstance(address, Circuit):
                    address = self._correct_relay_address(address, peer, reporter)
                if not addresses.dialable(address, reporter):
                    self.outcomes["out_of_reach"] += 1
                elif self._table.add(each.peer, str(address), "exchange", now):
                    self.outcomes["learned"] += 1

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

    def store_own(self, claimed: list[str], peer: str, now: float) -> None:
        """Store the ports and relays that `peer` reported for itself.

        A port is stored with the observed IP address of the peer; a relayed peer has none. A relay
        is stored only if this node knows its address itself. `now` is trio's clock. Raises
        BadMessage.
        """
        seen = self._connections.observed(peer)
        for text in claimed:
            try:
                address, _ = addresses.parse_any(text)
            except ValueError as error:
                raise BadMessage("bounds", "address") from error
            if isinstance(address, Circuit):
                where = self._nat.address_of(address.relay)
                if where is not None and address.relay != peer:
                    self._table.add_self_reported(peer, str(Circuit(where, address.relay)), now)
            elif (
                seen is not None
                and address.ip is not None
                and address.port
                and (address.ip.is_unspecified or address.ip == seen.ip)
            ):
                self._table.add_self_reported(
                    peer, str(Address(seen.kind, seen.host, address.port)), now
                )
