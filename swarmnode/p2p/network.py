"""The network as the rest of a node sees it: who is connected, gossip, requests, standing of peers, and one snapshot of it all.

Made by `host.open_host`, never by hand. Everything runs on the one trio thread; the pure parts (peers, reputation) are fed from here.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import trio
from libp2p.abc import INotifee
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.config import NetworkConfig
from swarmnode.errors import PeerError
from swarmnode.p2p import book, guards, mdns
from swarmnode.p2p.addresses import Address, Circuit, from_socket, parse_any
from swarmnode.p2p.bulk import Bulk, BulkStatistics
from swarmnode.p2p.dialer import DIAL_SECONDS, Dialer, first_cause
from swarmnode.p2p.exchange import PeerExchange
from swarmnode.p2p.gate import Gate
from swarmnode.p2p.gossip import Gossip, GossipStatistics, Validation
from swarmnode.p2p.liveness import Liveness
from swarmnode.p2p.nat import Nat, NatStatistics
from swarmnode.p2p.peers import PeerStatistics, PeerTable
from swarmnode.p2p.reputation import COST, Reputation, ReputationStatistics, Standing
from swarmnode.p2p.requests import Requests, RequestStatistics
from swarmnode.p2p.streams import Streams, StreamStatistics
from swarmnode.p2p.traffic import Traffic, TrafficStatistics

log = logging.getLogger(__name__)

TARGET_PEERS = 16
"""Known peers are dialled until this many are connected: twice the mesh of a gossip topic, so that half of them may go."""
BOOK_SECONDS = 60.0
TEND_SECONDS = 10.0
ASK_JITTER_SECONDS = 0.5
HELD = "held"
"""Tag of connections that the library's pruner leaves alone."""


class NetworkStatistics(msgspec.Struct, frozen=True):
    """Counters since the host was opened, gauges of now."""

    peers: PeerStatistics = PeerStatistics()
    gossip: GossipStatistics = GossipStatistics()
    requests: RequestStatistics = RequestStatistics()
    bulk: BulkStatistics = BulkStatistics()
    streams: StreamStatistics = StreamStatistics()
    traffic: TrafficStatistics = TrafficStatistics()
    reputation: ReputationStatistics = ReputationStatistics()
    guards: dict[str, int] = {}
    """Times each guard fired, in this process."""
    refused_connections: int = 0
    """After the handshake: banned, from a crowded prefix, or ourselves."""
    failed_handshakes: int = 0
    """Inbound connections that ended before it: garbage, port scans, silence."""
    exchange: dict[str, int] = {}
    """Addresses heard of by peer exchange, by what became of them."""
    mdns_running: bool = False
    nat: NatStatistics = NatStatistics()
    """Whether we can be reached, relays, hole punching."""


class Network:
    """`peer_id`: ours. `listen_addrs`: multiaddrs others can dial, with our peer id. `gossip`, `requests`, …: see their files."""

    def __init__(
        self,
        host: Any,
        pubsub: Any,
        router: Any,
        nursery: trio.Nursery,
        gate: Gate,
        *,
        own: str,
        cfg: NetworkConfig,
        data_dir: Path,
        swarm: bytes,
        listen: list[Address],
        announce: list[Address],
        bootstrap: list[tuple[Address, str]],
        members: Collection[str] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        rng = rng or random.Random()
        self.peer_id = own
        self.listen_addrs = [f"{address}/p2p/{own}" for address in announce or listen]
        self.reputation = Reputation()
        self.peers = PeerTable(own, TARGET_PEERS, rng, wanted=self._wanted)
        self.requests = Requests(host, nursery, welcome=self.welcome)
        self.streams = Streams(host, nursery, welcome=self.welcome)
        self.gossip = Gossip(pubsub, router, own, nursery, welcome=self.welcome, judged=self._judged)
        self._host = host
        self._nursery = nursery
        self._gate = gate
        self._rng = rng
        self._cfg = cfg
        self._book = data_dir / "peers.json"
        self._traffic = Traffic()
        self.bulk = Bulk(
            host, nursery, self.requests,
            listen=listen, port=cfg.bulk_port, observed=self.observed,
            welcome=self.welcome, judged=self.rejected, metered=self._traffic.count,
        )  # fmt: skip
        self._live: dict[SwarmConn, str] = {}
        self._held: set[str] = set()
        self._changed = trio.Event()
        self._dialer = Dialer(self.peers, self._connect)
        self.nat = Nat(
            host, nursery, self.peers, cfg, own=own, listen=listen, announce=announce, welcome=self.welcome,
            dial=self._dial_direct, tell=self._tell, rng=rng,
        )  # fmt: skip
        self._exchange = PeerExchange(self.peers, self.requests, swarm=swarm, nat=self.nat, news=self._dialer.wake, rng=rng)
        self._mdns = mdns.Discovery(own, swarm, listen, self._heard) if cfg.mdns else None
        self._bootstrap = bootstrap
        self._members = members

    def keep_to(self, allows: Callable[[str], bool]) -> None:
        """Ask `allows(choice)`, see `Meter.allows`, before bytes are spent on others: what is served to them, what is relayed."""
        self.bulk.allows = allows
        self.nat.relay.allows = lambda: allows("relay")

    # -- for `open_host`

    async def start(self) -> None:
        """Reads the book and starts what runs for as long as the host does."""
        now = trio.current_time()
        for address, peer in self._bootstrap:
            self.peers.add(peer, str(address), "bootstrap", now)
        loaded = book.load(self._book, self.peers, self.reputation, now)
        swarm = self._host.get_network()
        swarm.register_notifee(self._traffic)
        swarm.register_notifee(_Events(self))
        self._gate.admit = self._admit
        await self.bulk.start()
        self.nat.start()
        self._nursery.start_soon(self._dialer.run)
        self._nursery.start_soon(self._exchange.run)
        self._nursery.start_soon(self._tend)
        self._nursery.start_soon(self._keep_book)
        if self._mdns is not None:
            self._nursery.start_soon(self._mdns.run)
        log.info("listening on %s, %d peers in the book", ", ".join(self.listen_addrs), loaded)

    def stop(self) -> None:
        """Saves the book one last time. Blocks for an fsync."""
        book.save(self._book, book.render(self.peers, self.reputation, trio.current_time()))

    # -- for everybody

    def connected(self) -> list[str]:
        """Peer ids."""
        return self.peers.connected()

    async def wait_connected(self, count: int = 1) -> None:
        """Returns once `count` peers are connected."""
        while len(self.connected()) < count:
            await self._changed.wait()

    async def changed(self) -> None:
        """Returns when a connection was opened or closed."""
        await self._changed.wait()

    def welcome(self, peer: str) -> bool:
        """Whether anything of `peer` is to be looked at: it is neither greylisted nor banned."""
        return self.reputation.standing(peer, trio.current_time()) is Standing.GOOD

    def score(self, peer: str) -> float:
        """See `Reputation.score`."""
        return self.reputation.score(peer, trio.current_time())

    def accepted(self, peer: str) -> None:
        """Something that `peer` made passed every check."""
        self.reputation.accepted(peer, trio.current_time())

    def rejected(self, peer: str, reason: str, cost: float = COST) -> None:
        """Something that `peer` made was provably wrong; it may be banned and disconnected for it. `reason`: of a closed set."""
        if self.reputation.rejected(peer, reason, trio.current_time(), cost) is Standing.BANNED:
            self.disconnect(peer)

    async def dial(self, peer: str, address: str) -> None:
        """Connects now, beside the redial loop. Raises PeerError, which says why it failed."""
        why = f"no answer within {DIAL_SECONDS:g} s"
        with trio.move_on_after(DIAL_SECONDS):
            try:
                await self._connect(peer, address)
                return
            except Exception as error:  # as in the dialer: a dozen exception types, each of which says that it failed
                why = first_cause(error)
        raise PeerError(why)

    def hold(self, peers: Collection[str]) -> None:
        """Somebody here depends on these, and no longer on those of the last call: redial them first and for ever, and never prune them."""
        swarm, mine = self._host.get_network(), {peer for peer in peers if peer != self.peer_id and _is_peer_id(peer)}
        for peer in self._held - mine:
            swarm.unprotect(ID.from_string(peer), HELD)
        for peer in mine - self._held:
            swarm.protect(ID.from_string(peer), HELD)
        self._held = mine
        self.peers.hold(mine, trio.current_time())
        self._dialer.wake()

    def disconnect(self, peer: str) -> None:
        """Closes all connections with `peer`, soon."""
        if peer in self.connected():
            self._nursery.start_soon(self._close_peer, peer)

    def observed(self, peer: str) -> Address | None:
        """The address at which we see a connected peer; the port is ephemeral if it dialled us."""
        return self.nat.observed(peer)

    def statistics(self) -> NetworkStatistics:
        now = trio.current_time()
        return NetworkStatistics(
            peers=self.peers.statistics(),
            gossip=self.gossip.statistics(),
            requests=self.requests.statistics(),
            bulk=self.bulk.statistics(),
            streams=self.streams.statistics(),
            traffic=self._traffic.statistics(),
            reputation=self.reputation.statistics(now),
            guards=dict(guards.statistics().fired),
            refused_connections=self._gate.refused,
            failed_handshakes=self._gate.failed,
            exchange=dict(self._exchange.learned),
            mdns_running=self._mdns is not None and self._mdns.running,
            nat=self.nat.statistics(),
        )

    # -- connections

    def _wanted(self, peer: str, now: float) -> bool:
        return self.reputation.standing(peer, now) is not Standing.BANNED

    def _admit(self, peer: str, address: tuple[str, int] | None, inbound: bool, relay: str | None = None) -> bool:
        """At the end of a handshake: a member if the swarm is private; neither ourselves, nor banned, nor one too many from its prefix.

        Who comes through a relay has no prefix, so that it does not answer for the relay's neighbours; it counts among those behind it."""
        now = trio.current_time()
        prefix = _prefix(address)
        self.reputation.place(peer, prefix, now)
        if peer == self.peer_id or not self._wanted(peer, now):
            return False
        if self._members is not None and peer not in self._members:
            return False
        most = max(4, self._cfg.max_connections // 4)
        if inbound and relay is None:
            self.nat.reach.came(peer)
        if inbound and prefix is not None:
            return most > sum(1 for connection in self._live if (seen := _remote(connection)) is not None and seen.prefix == prefix)
        return relay is None or self.nat.behind(relay) < most

    def _opened(self, connection: SwarmConn) -> None:
        peer = connection.muxed_conn.peer_id.to_base58()
        if connection.is_closed or connection in self._live:
            return
        first = peer not in self._live.values()
        self._live[connection] = peer
        self.nat.opened(connection, peer)
        self.peers.connected_to(peer, inbound=str(connection.direction).lower().endswith("inbound"), now=trio.current_time())
        if not self._wanted(peer, trio.current_time()):  # banned since the handshake
            self.disconnect(peer)
        elif first:
            self._nursery.start_soon(self._greet, peer)
        self._notify()

    def _closed(self, connection: SwarmConn) -> None:
        peer = self._live.pop(connection, None)
        if peer is None:
            return
        self.nat.closed(connection)
        self.peers.disconnected(peer, trio.current_time())
        if peer not in self._live.values():
            self._exchange.forget(peer)
            self.requests.forget(peer)
        self._dialer.wake()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _greet(self, peer: str) -> None:
        """Asks a new peer whom it knows; with jitter, because it may have connected to many at once."""
        await trio.sleep(self._rng.uniform(0.0, ASK_JITTER_SECONDS))
        if peer in self.connected():
            await self.nat.greet(peer)
        if peer in self.connected():
            await self._exchange.ask(peer)

    async def _tell(self) -> None:
        await self._exchange.ask_some()

    async def _connect(self, peer: str, address: str) -> bool:
        """Dials; see `dialer.Connect`. Raises what the library raises."""
        identity = ID.from_string(peer)
        swarm = self._host.get_network()
        if swarm.get_connections(identity):
            return False
        where, _ = parse_any(address)
        if isinstance(where, Circuit):
            await self.nat.call(peer, where)
        else:
            await self._dial_direct(where, peer)
        return True

    async def _dial_direct(self, address: Address, peer: str) -> None:
        swarm, identity = self._host.get_network(), ID.from_string(peer)
        swarm.unblock_peer(identity)
        await swarm.dial_addr(Multiaddr(f"{address}/p2p/{peer}"), identity)

    async def _close_peer(self, peer: str) -> None:
        await self._host.get_network().close_peer(ID.from_string(peer))

    # -- events from elsewhere

    def _judged(self, peer: str, verdict: Validation, reason: str) -> None:
        """Gossip's verdict on what `peer` forwarded. Forwarding earns nothing: what is in the message is credited to whoever signed it."""
        if verdict is Validation.REJECT:
            self.rejected(peer, f"gossip_{reason}")

    def _heard(self, peer: str, address: str) -> None:
        """mDNS found a peer."""
        if self.peers.add(peer, address, "mdns", trio.current_time()):
            self._dialer.wake()

    # -- what goes on all the time

    async def _tend(self) -> None:
        """Closes connections whose other end is gone without a word, and tells the table of ends that the library did not announce."""
        swarm, liveness = self._host.get_network(), Liveness()
        while True:
            await trio.sleep(TEND_SECONDS)
            for connection in [each for each in self._live if each.is_closed]:
                swarm.remove_conn(connection)
                self._closed(connection)
            pings = {each: (each.muxed_conn._ping_id, each.muxed_conn._ping_event.is_set()) for each in self._live}
            for connection in liveness.dead(pings, trio.current_time()):
                self._nursery.start_soon(_close_connection, connection)

    async def _keep_book(self) -> None:
        while True:
            await trio.sleep(BOOK_SECONDS)
            data = book.render(self.peers, self.reputation, trio.current_time())
            await trio.to_thread.run_sync(book.save, self._book, data)


async def _close_connection(connection: SwarmConn) -> None:
    try:
        await connection.close()
    except Exception as error:  # a connection that is gone for good has many ways to say so
        log.debug("closing a silent connection: %r", error)


class _Events(INotifee):
    """The swarm's announcements, passed on."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def connected(self, network: Any, conn: Any) -> None:
        self._network._opened(conn)

    async def disconnected(self, network: Any, conn: Any) -> None:
        self._network._closed(conn)

    async def opened_stream(self, network: Any, stream: Any) -> None:
        return None

    async def closed_stream(self, network: Any, stream: Any) -> None:
        return None

    async def listen(self, network: Any, multiaddr: Any) -> None:
        return None

    async def listen_close(self, network: Any, multiaddr: Any) -> None:
        return None


def _is_peer_id(text: str) -> bool:
    try:
        return ID.from_string(text).to_base58() == text
    except ValueError:
        return False


def _remote(connection: Any) -> Address | None:
    remote = connection.muxed_conn.get_remote_address()
    return from_socket(*remote[:2]) if remote else None


def _prefix(address: tuple[str, int] | None) -> str | None:
    return from_socket(*address[:2]).prefix if address else None
