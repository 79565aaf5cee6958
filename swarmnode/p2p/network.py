"""The network on libp2p: implements `api.Network` and provides one snapshot of its statistics.

    open_host ─▶ choose the port ─▶ guarded host (TCP, Noise, Yamux) ─▶ Libp2pNetwork ─▶ its tasks
    exit      ─▶ save the book ─▶ end the tasks ─▶ close connections and host

Everything runs on one trio thread. The parts, one file each:

    library ─▶ connections ─┬▶ connection_manager ─ dials ─▶ library
                            └▶ nat (relays, hole punching)
    peers, reputation        pure tables, updated from here
    requests, streams, bulk  protocols on connections
    discovery, neighbours    sources of peer addresses; sessions, summaries, successors

Closing is shielded and bounded in time, because py-libp2p leaks every socket otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from swarmnode.config import NetworkConfig
from swarmnode.p2p import guards, listening, turnover
from swarmnode.p2p.addresses import Address, OwnAddresses
from swarmnode.p2p.api import Network
from swarmnode.p2p.budget import TrafficStatistics
from swarmnode.p2p.bulk import BulkStatistics, Libp2pBulk
from swarmnode.p2p.connection_manager import Admission, ConnectionManager, Dialer
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.discovery import Discovery
from swarmnode.p2p.identity import Identity
from swarmnode.p2p.library import build
from swarmnode.p2p.library.gater import ConnectionGater
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.mdns import MdnsDiscovery
from swarmnode.p2p.nat import Nat, NatStatistics
from swarmnode.p2p.neighbours import Neighbours
from swarmnode.p2p.peers import PeerStatistics, PeerTable
from swarmnode.p2p.reputation import PeerScores, ReputationStatistics
from swarmnode.p2p.requests import Libp2pRequests, RequestStatistics
from swarmnode.p2p.streams import Libp2pStreams, StreamStatistics
from swarmnode.wire.envelope import Credentials
from swarmnode.wire.limits import SWARM_ID_BYTES

log = logging.getLogger(__name__)

NO_SWARM = bytes(SWARM_ID_BYTES)
TARGET_PEERS = 16
"""Known peers are dialled until this many are connected, at least half of them by this node
(`peers.OUTBOUND_SHARE`). This is twice the 8 peers whose listings a node polls, so that half of
them may leave."""


@contextlib.asynccontextmanager
async def open_host(
    cfg: NetworkConfig,
    identity: Identity,
    data_dir: Path,
    *,
    swarm: bytes = NO_SWARM,
    secret: bytes | None = None,
    members: Collection[str] | None = None,
) -> AsyncIterator[Libp2pNetwork]:
    """Run a host that listens and connects to peers until the block is left.

    A single exception is raised as itself, without the exception groups of the nurseries that it
    passed. An exception of the library ends the block.

    Args:
        cfg: network settings.
        identity: key of the node.
        data_dir: holds the port and the peer book.
        swarm: swarm id, 32 bytes. Neighbours and mDNS ignore peers of other swarms.
        secret: 32 bytes that a peer of a private swarm needs for the handshake.
        members: peer ids that may connect; None for all.

    Raises:
        ConfigError: an address is invalid.
        Unavailable: a port is in use, or an address does not belong to this machine.
        StateError: `data_dir/port` does not hold a port.
        Refused: another process with this key started earlier (`Neighbours.detect_duplicates`).
    """
    try:
        own = listening.own_addresses(cfg, data_dir)
        settings = SwarmSettings(
            Credentials(identity.private_key, swarm), members, listening.bootstrap_peers(cfg)
        )
        gater = ConnectionGater()
        guards.install()
        library = build.build_host(
            identity.key_pair, own.announce, gater, cfg.max_connections, secret
        )
        async with guards.running(library, own.listen), trio.open_nursery() as nursery:
            network = Libp2pNetwork(Host(library, nursery), gater, cfg, own, settings, data_dir)
            await network.start()
            try:
                yield network
            finally:
                network.stop()
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if (error := _only(group)) is not None:
            raise error from error.__cause__
        raise


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
    reported_addresses: dict[str, int] = {}
    """Addresses received from neighbours, by outcome of `reports.OUTCOMES`."""
    nat: NatStatistics = NatStatistics()
    """Reachability, relays and hole punching."""


@dataclasses.dataclass(frozen=True)
class SwarmSettings:
    """The swarm of a host.

    Attributes:
        credentials: key and swarm id.
        members: peer ids that may connect; None for all.
        bootstrap: addresses and peer ids to join through.
    """

    credentials: Credentials
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
        self.neighbours = Neighbours(
            self.requests,
            swarm.credentials,
            self.peers,
            self.connections,
            self.nat,
            dialer.wake,
            self.is_allowed,
            rng,
        )
        mdns = (
            MdnsDiscovery(host.peer_id, swarm.credentials.swarm, own.listen) if cfg.mdns else None
        )
        self.discovery = Discovery(
            self.peers,
            self.reputation,
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
            self.neighbours,
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
        self.host.nursery.start_soon(self.neighbours.run)
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

    def origin(self, peer: str) -> str | None:
        return self.connections.origin(peer)

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
            reported_addresses=dict(self.neighbours.reports.outcomes),
            nat=self.nat.statistics(),
        )


def _only(group: BaseExceptionGroup) -> Exception | None:
    """Return the single exception in `group`; None if there are several, or if one is a
    cancellation, which must stay in its group."""
    found: list[BaseException] = []
    nested: list[BaseException] = [group]
    while nested:
        error = nested.pop()
        if isinstance(error, BaseExceptionGroup):
            nested += error.exceptions
        else:
            found.append(error)
    return found[0] if len(found) == 1 and isinstance(found[0], Exception) else None


if TYPE_CHECKING:
    _: type[Network] = Libp2pNetwork
