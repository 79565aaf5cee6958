"""Reaching and being reached across routers: what we know of our own reachability, relays, calls and hole punching, held together.

a peer connects ─▶ can it dial us back (autonat.py)? ─┬─ yes ─▶ we relay for others (relay.py), unless we are not to
                                                      └─ no ──▶ we reserve with relays (relay_client.py) and tell their addresses
a call comes in through a relay ─▶ try to connect directly (punch.py) ─▶ direct: the circuit is closed, else it stays
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import trio
from libp2p.network.connection.swarm_connection import SwarmConn

from swarmnode.config import NetworkConfig
from swarmnode.p2p import addresses
from swarmnode.p2p.addresses import PUBLIC, Address, Circuit, from_socket
from swarmnode.p2p.autonat import Reach, ReachStatistics, Verdict
from swarmnode.p2p.circuits import relay_of
from swarmnode.p2p.peers import PeerTable
from swarmnode.p2p.punch import Puncher, PunchStatistics
from swarmnode.p2p.relay import Relay, RelayLimits, RelayStatistics
from swarmnode.p2p.relay_client import RelayClient, RelayClientStatistics

log = logging.getLogger(__name__)

RELAY_LIMITS = RelayLimits()
"""All but the rate, which is a person's to set: `network.relay_bytes_per_second`."""
PUNCH_DELAY_SECONDS = 0.5
"""After a call: the caller's own tasks come first."""
GRACE_SECONDS = 2.0
"""A circuit is closed this long after a direct connection has replaced it."""
NEWS_SECONDS = 0.5
"""Changes of our addresses within this time are told together."""


class NatStatistics(msgspec.Struct, frozen=True):
    reach: ReachStatistics = ReachStatistics()
    relay: RelayStatistics = RelayStatistics()
    client: RelayClientStatistics = RelayClientStatistics()
    punch: PunchStatistics = PunchStatistics()
    direct: int = 0
    """Connected peers."""
    relayed: int = 0
    """Peers that are connected through a relay only."""


class Nat:
    """`tell()`: tells connected peers our addresses, which have changed. `dial(address, peer)`: connects directly."""

    def __init__(
        self,
        host: Any,
        nursery: trio.Nursery,
        table: PeerTable,
        cfg: NetworkConfig,
        *,
        own: str,
        listen: list[Address],
        announce: list[Address],
        welcome: Callable[[str], bool],
        dial: Callable[[Address, str], Awaitable[None]],
        tell: Callable[[], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        self._host = host
        self._nursery = nursery
        self._table = table
        self._role = cfg.relay
        self._punching = cfg.hole_punching and cfg.relay != "off"
        self._own = own
        self._listen = listen
        self._announce = announce
        self._tell = tell
        self._telling = False
        self._live: dict[SwarmConn, tuple[str, str | None]] = {}
        self._punched: set[str] = set()
        outside = [each.port for each in announce or listen if each.scope > addresses.LOOPBACK or each.ip.is_unspecified]  # type: ignore[union-attr]
        self.reach = Reach(
            host, nursery, own=own, ports=list(dict.fromkeys(outside)), welcome=welcome, observed=self.observed,
            connected=lambda: [peer for peer in table.connected() if peer not in self._punched], changed=self._verdict_changed, rng=rng,
        )  # fmt: skip
        limits = dataclasses.replace(RELAY_LIMITS, bytes_per_second=cfg.relay_bytes_per_second)
        self.relay = Relay(host, nursery, limits, own=own, addresses=lambda: [str(self._own_place())], welcome=welcome)
        self._client = RelayClient(
            host, nursery, candidates=self._candidates, wanted=self._wants_relays, address_of=self.address_of, dial=dial,
            news=self._news, rng=rng,
        )  # fmt: skip
        self._puncher = Puncher(
            host, nursery, own_id=own, own=self._outside, listen=listen, direct=self.is_direct, welcome=welcome, vantage=self.vantage
        )

    def start(self) -> None:
        """Starts what runs for as long as the host does; the host listens."""
        if self._punching:
            self._puncher.start()
        self.relay.serve(self._role == "server")
        self._nursery.start_soon(self.reach.run)
        self._nursery.start_soon(self._client.run)

    # -- connections

    def opened(self, connection: SwarmConn, peer: str) -> None:
        """A connection with `peer` was opened."""
        relay = relay_of(connection.muxed_conn)
        self._live[connection] = (peer, relay)
        if relay is None:
            self._client.wake()
            if self._circuits(peer):
                self._punched.add(peer)
                self._nursery.start_soon(self._replace_circuits, peer)
        elif self._punching and _inbound(connection):
            self._nursery.start_soon(self._punch, peer)

    def closed(self, connection: SwarmConn) -> None:
        """That connection was closed."""
        peer, relay = self._live.pop(connection)
        if relay is None and not self.is_direct(peer):
            self._punched.discard(peer)
            self.relay.gone(peer)
            self._client.gone(peer)
        if not self._live:
            self.reach.alone()

    async def greet(self, peer: str) -> None:
        """A new peer: before it is told our addresses, we want to know whether they are any good."""
        if self._role != "off" and peer not in self._punched:  # our router lets those in that we punched a hole for
            await self.reach.greet(peer)

    async def call(self, peer: str, circuit: Circuit) -> None:
        """Connects through a relay. Raises PeerError, or what the library raises."""
        await self._client.call(peer, circuit)

    # -- who is where

    def is_direct(self, peer: str) -> bool:
        """Whether there is a direct connection with `peer`."""
        return any(owner == peer and relay is None for owner, relay in self._live.values())

    def observed(self, peer: str) -> Address | None:
        """The address at which we see a connected peer, None if it is relayed; the port is ephemeral if it dialled us."""
        found = (_remote(each) for each, (owner, relay) in self._live.items() if owner == peer and relay is None)
        return next((address for address in found if address is not None), None)

    def vantage(self, peer: str) -> Address | None:
        """From where `peer` speaks: its own address, or that of the relay that it is connected through."""
        if (seen := self.observed(peer)) is not None:
            return seen
        relays = (relay for owner, relay in self._live.values() if owner == peer and relay is not None)
        return next((address for relay in relays if (address := self.observed(relay)) is not None), None)

    def behind(self, relay: str) -> int:
        """Peers that are connected to us through this relay."""
        return sum(1 for _, through in self._live.values() if through == relay)

    def address_of(self, peer: str) -> Address | None:
        """Where `peer` can be dialled, as far as we know it ourselves: we dialled it there, or it listens at the IP address we see."""
        for connection, (owner, relay) in self._live.items():
            if owner == peer and relay is None and not _inbound(connection):
                return _remote(connection)
        known = self._table.get(peer)
        sure = [each for each in known.addresses if each in known.worked | known.claimed] if known is not None else []
        direct = [addresses.parse(each)[0] for each in sure if not addresses.is_circuit(each)]
        return next((each for each in direct if each.ip is not None), None)

    # -- what we tell

    def own_addresses(self, peer: str) -> list[str]:
        """What `peer` is told of where we can be reached. It puts the IP address that it sees before the ports of the direct ones."""
        seen = self.observed(peer)
        useless = self.reach.verdict == "private" and not self._announce and (seen is None or seen.scope == PUBLIC)
        direct = [] if useless else [str(each) for each in self._announce or self._listen]
        return direct + [str(each) for each in self._client.addresses()]

    def relayed_here(self, peer: str) -> list[str]:
        """Where others can call a peer that has reserved with us."""
        return [str(Circuit(self._own_place(), self._own))] if self.relay.reserved(peer) else []

    def statistics(self) -> NatStatistics:
        direct = {peer for peer, relay in self._live.values() if relay is None}
        everybody = {peer for peer, _ in self._live.values()}
        return NatStatistics(
            reach=self.reach.statistics(),
            relay=self.relay.statistics(),
            client=self._client.statistics(),
            punch=self._puncher.statistics(),
            direct=len(direct),
            relayed=len(everybody - direct),
        )

    # -- rules

    def _wants_relays(self) -> bool:
        return self._role == "client" or (self._role == "auto" and self.reach.verdict == "private")

    def _candidates(self) -> list[str]:
        """Directly connected peers whose address we know; bootstrap peers first: they are meant to be found by all."""
        direct = [peer for peer in self._table.connected() if self.is_direct(peer) and self.address_of(peer) is not None]
        bootstrap = {each.peer for each in self._table.bootstrap()}
        return sorted(direct, key=lambda peer: peer not in bootstrap)

    def _own_place(self) -> Address:
        """Best guess of where we can be dialled; may be unspecified, others then see the IP address for themselves."""
        return self._announce[0] if self._announce else self.reach.own_address or self._listen[0]

    def _outside(self) -> list[Address]:
        """Where others see us, for hole punching."""
        own = self.reach.own_address
        return list(dict.fromkeys([*self._announce, *([own] if own is not None else [])]))

    def _verdict_changed(self, verdict: Verdict) -> None:
        if self._role == "auto":
            self.relay.serve(verdict == "public")
        self._client.wake()
        self._news()

    def _news(self) -> None:
        if not self._telling:
            self._telling = True
            self._nursery.start_soon(self._tell_news)

    async def _tell_news(self) -> None:
        await trio.sleep(NEWS_SECONDS)
        self._telling = False
        await self._tell()

    async def _punch(self, peer: str) -> None:
        await trio.sleep(PUNCH_DELAY_SECONDS)
        if not self.is_direct(peer) and self._circuits(peer):
            await self._puncher.upgrade(peer)

    async def _replace_circuits(self, peer: str) -> None:
        """Gossip and requests go over whichever connection they were begun on; those on the circuit are begun again on the direct one."""
        await trio.sleep(GRACE_SECONDS)
        if self.is_direct(peer):
            for connection in self._circuits(peer):
                try:
                    await connection.close()
                except Exception as error:  # it may be gone by itself
                    log.debug("closing a circuit: %r", error)

    def _circuits(self, peer: str) -> list[SwarmConn]:
        return [each for each, (owner, relay) in self._live.items() if owner == peer and relay is not None]


def _inbound(connection: SwarmConn) -> bool:
    return str(connection.direction).lower().endswith("inbound")


def _remote(connection: SwarmConn) -> Address | None:
    remote = connection.muxed_conn.get_remote_address()
    return from_socket(*remote[:2]) if remote else None
