"""The network on libp2p: implements `api.Network` and provides one snapshot of its statistics.

Created by `host.open_host`. Everything runs on one trio thread. The parts, one file each:

    library ─▶ admission ─▶ connections ─┬▶ connection_manager ─▶ dialer ─▶ library
                                         └▶ nat (relays, hole punching)
    peers, reputation                     pure tables, updated from here
    requests, streams, bulk               protocols on connections
    discovery                             sources of peer addresses
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from swarmnode.config import NetworkConfig
from swarmnode.p2p import guards, turnover
from swarmnode.p2p.addresses import Address, OwnAddresses
from swarmnode.p2p.admission import Admission
from swarmnode.p2p.api import Network
from swarmnode.p2p.budget import TrafficStatistics
from swarmnode.p2p.bulk import BulkStatistics, Libp2pBulk
from swarmnode.p2p.connection_manager import ConnectionManager
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.dialer import Dialer
from swarmnode.p2p.discovery import Discovery
from swarmnode.p2p.exchange import PeerExchange
from swarmnode.p2p.library.gater import ConnectionGater
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.mdns import MdnsDiscovery
from swarmnode.p2p.nat import Nat, NatStatistics
from swarmnode.p2p.peers import PeerStatistics, PeerTable
from swarmnode.p2p.reputation import PeerScores, ReputationStatistics
from swarmnode.p2p.requests import Libp2pRequests, RequestStatistics
from swarmnode.p2p.streams import Libp2pStreams, StreamStatistics

log = logging.getLogger(__name__)

TARGET_PEERS = 16
"""Known peers are dialled until this many are connected, at least half of them by this node
(`peers.OUTBOUND_SHARE`). This is twice the 8 peers whose listings a node polls, so that half of
them may leave."""


class NetworkStatistics(msgspec.Struct, frozen=True):
    """Counters since the host was opened, and current gauges."""

    peers: PeerStatistics = PeerStatistics()
    requests: RequestStatistics = RequestStatistics()
    bulk: BulkStatistics = BulkStatistics()
    streams: StreamStatistics = StreamStatistics()
    traffic: TrafficStatistics = TrafficStatistics()
    reputation: ReputationStatistics = ReputationStatistics()
    guards: dict[str, int] = {}
    """Number of times each guard fired in this process."""
    refused_connections: int = 0
    """Refused after the handshake: banned, from a crowded prefix, or this node itself."""
    failed_handshakes: int = 0
    """Inbound connections that failed before the end of the handshake: garbage, port scans,
    timeouts."""
    exchange: dict[str, int] = {}
    """Addresses received by peer exchange, by outcome."""
    mdns_running: bool = False
    nat: NatStatistics = NatStatistics()
    """Reachability, relays and hole punching."""


@dataclasses.dataclass(frozen=True)
class SwarmSettings:
    """The swarm of a host.

    Attributes:
        swarm: swarm id, 32 bytes.
        members: peer ids that may connect; None for all.
        bootstrap: addresses and peer ids to join through.
    """

    swarm: bytes
    members: Collection[str] | None
    bootstrap: list[tuple[Address, str]]


class Libp2pNetwork(PeerScores):
    """`api.Network` on libp2p. See there for `requests`, `streams` and `bulk`; `peers` is the table
    of known peers."""

    def __init__(
        self,
        host: Host,
        gater: ConnectionGater,
        cfg: NetworkConfig,
        own: OwnAddresses,
        swarm: SwarmSettings,
        data_dir: Path,
    ) -> None:
        super().__init__()
        rng = random.Random()
        self.host = host
        self.listen_addrs = [f"{address}/p2p/{host.peer_id}" for address in own.advertised()]
        target = max(1, min(TARGET_PEERS, int(turnover.FULL_SHARE * cfg.max_connections)))
        self.peers = PeerTable(host.peer_id, target, rng, may_connect=self.may_connect)
        self.connections = ConnectionTable()
        self.requests = Libp2pRequests(host, self.is_allowed)
        self.streams = Libp2pStreams(host, self.is_allowed)
        self.bulk = Libp2pBulk(host, self.requests, self)
        self.nat = Nat(host, self.connections, self.peers, cfg, own, self.is_allowed, rng)
        dialer = Dialer(self.peers, self.nat.connect)
        exchange = PeerExchange(
            self.peers, self.requests, swarm.swarm, self.connections, self.nat, dialer.wake, rng
        )
        mdns = MdnsDiscovery(host.peer_id, swarm.swarm, own.listen) if cfg.mdns else None
        self.discovery = Discovery(
            self.peers,
            self.reputation,
            exchange,
            mdns,
            data_dir / "peers.json",
            swarm.bootstrap,
            dialer.wake,
        )
        self.manager = ConnectionManager(
            host,
            self.connections,
            self.peers,
            self,
            dialer,
            exchange,
            cfg.max_connections,
            self.nat.depends_on,
            rng,
        )
        self._gater = gater
        admission = Admission(
            host.peer_id,
            self.connections,
            self,
            cfg.max_connections,
            swarm.members,
            self.nat.reach.arrived,
        )
        gater.admits = admission.admits
        self.connections.listeners += [self.nat, self.manager]

    def set_budget(self, allows: Callable[[str], bool]) -> None:
        """Serve and relay only while `allows(choice)` returns True; see `Meter.allows`."""
        self.bulk.set_budget(lambda: allows("serve"))
        self.nat.relay.allows = lambda: allows("relay")

    # -- for `open_host`

    async def start(self) -> None:
        """Load the book and start the background tasks."""
        loaded = self.discovery.load()
        self.host.watch(self.connections)
        self.bulk.start()
        self.nat.start()
        self.host.nursery.start_soon(self.manager.run)
        self.host.nursery.start_soon(self.discovery.run)
        log.info("listening on %s, %d peers in the book", ", ".join(self.listen_addrs), loaded)

    def stop(self) -> None:
        """Save the book a last time. Blocks for an fsync."""
        self.discovery.save()

    # -- connections

    @property
    def peer_id(self) -> str:
        return self.host.peer_id

    def connected(self) -> list[str]:
        return self.peers.connected()

    async def wait_connected(self, count: int = 1) -> None:
        while len(self.connected()) < count:
            await self.changed()

    async def changed(self) -> None:
        await self.connections.changed()

    async def dial(self, peer: str, address: str) -> None:
        await self.manager.dial(peer, address)

    def pin(self, peers: Collection[str]) -> None:
        self.manager.pin(peers)

    def disconnect(self, peer: str) -> None:
        self.manager.disconnect(peer)

    def observed(self, peer: str) -> Address | None:
        return self.connections.observed(peer)

    def last_received(self, peer: str) -> float | None:
        return self.connections.last_received(peer)

    def group(self, peer: str) -> str | None:
        return self.connections.group(peer)

    def statistics(self) -> NetworkStatistics:
        return NetworkStatistics(
            peers=self.peers.statistics(),
            requests=self.requests.statistics(),
            bulk=self.bulk.statistics(),
            streams=self.streams.statistics(),
            traffic=TrafficStatistics(dict(self.host.received), dict(self.host.sent)),
            reputation=self.reputation.statistics(trio.current_time()),
            guards=dict(guards.statistics().fired),
            refused_connections=self._gater.refused,
            failed_handshakes=self._gater.failed,
            exchange=self.discovery.learned(),
            mdns_running=self.discovery.mdns_running,
            nat=self.nat.statistics(),
        )


if TYPE_CHECKING:
    _: type[Network] = Libp2pNetwork
