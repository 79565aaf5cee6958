"""`network.bulk`: what this node offers, and what it fetches from others."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec
import trio

from swarmnode.p2p.addresses import Address
from swarmnode.p2p.api import BulkPath, PeerScoring, Requests
from swarmnode.p2p.bulk.bandwidth import Bandwidth
from swarmnode.p2p.bulk.calling import Calling
from swarmnode.p2p.bulk.content import BulkSink, BulkSource
from swarmnode.p2p.bulk.fetcher import FETCHING, Fetcher
from swarmnode.p2p.bulk.listener import HANDSHAKES, TlsListener, Tokens
from swarmnode.p2p.bulk.serving import SERVING, BulkOffer, Serving
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.library.certificates import Contexts
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.traffic import Traffic
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.messages import (
    BulkManifest,
    BulkManifestRequest,
    BulkManifestResponse,
    BulkSocketRequest,
    BulkSocketResponse,
)

OFF = -1
"""The value of `network.bulk_port` that means no socket."""
REQUEST_SECONDS = 10.0
"""For a manifest, and for a port and token."""


class BulkStatistics(msgspec.Struct, frozen=True):
    """Counters since the host was opened, gauges of now. Paths are `stream` and `socket`."""

    fetched: dict[str, dict[str, int]] = {}
    """Ours: path → outcome (`fetcher.OUTCOMES`) → count."""
    served: dict[str, dict[str, int]] = {}
    """Theirs: path → outcome (`serving.OUTCOMES`) → count."""
    received_bytes: dict[str, int] = {}
    """By path; also what was refused afterwards."""
    sent_bytes: dict[str, int] = {}
    """By path, of transfers that have ended."""
    seconds: dict[str, float] = {}
    """By path: spent fetching, waiting for a slot not included."""
    fallbacks: dict[str, int] = {}
    """By reason (`calling.FALLBACKS`)."""
    handshakes: dict[str, int] = {}
    """Inbound TLS connections by outcome (`listener.OUTCOMES`)."""
    bandwidth: dict[str, float] = {}
    """Bytes per second by peer, moving average; at most `bandwidth.PEERS`."""
    offers: int = 0
    fetching: int = 0
    serving: int = 0
    port: int = 0
    """Where the TLS listener is, 0 if there is none."""


class Libp2pBulk:
    """See `api.Bulk`. `listen`: our addresses, whose IPs get a TLS listener. `port`: as
    `network.bulk_port`. `threads`: those that bulk transfers may use."""

    def __init__(
        self,
        host: Host,
        requests: Requests,
        connections: ConnectionTable,
        scores: PeerScoring,
        traffic: Traffic,
        listen: list[Address],
        port: int,
    ) -> None:
        self._host = host
        self._requests = requests
        self._listen = listen
        self._port = port
        self.threads = trio.CapacityLimiter(HANDSHAKES + SERVING + 3 * FETCHING)
        self._serving = Serving(host.nursery, self.threads, scores.welcome, traffic)
        self._calling = Calling(requests, self.threads, connections.observed)
        self._fetcher = Fetcher(host, requests, self._calling, scores, traffic, self.threads)
        self._tokens = Tokens()
        self._listener: TlsListener | None = None

    def keep_to(self, allows: Callable[[], bool]) -> None:
        """Serves peers only while `allows()`."""
        self._serving.allows = allows

    @property
    def bandwidth(self) -> Bandwidth:
        return self._fetcher.bandwidth

    async def start(self) -> None:
        """Serves from now on; listens for TLS connections unless the port is OFF. Raises
        Unavailable if that is taken."""
        self._host.set_handler(ids.BULK_PROTOCOL, self._serving.on_stream)
        self._requests.serve(
            ids.BULK_MANIFEST_PROTOCOL,
            self._serve_manifest,
            deadline=REQUEST_SECONDS,
            max_request_bytes=limits.BULK_MANIFEST_REQUEST_BYTES,
            max_response_bytes=limits.BULK_MANIFEST_RESPONSE_BYTES,
        )
        if self._port == OFF:
            return
        contexts = self._calling.contexts = await trio.to_thread.run_sync(
            Contexts, self._host.key_pair
        )
        self._listener = TlsListener(contexts, self._tokens, self._serving.on_caller, self.threads)
        await self._listener.start(self._host.nursery, self._listen, self._port)
        self._requests.serve(
            ids.BULK_SOCKET_PROTOCOL,
            self._serve_token,
            deadline=REQUEST_SECONDS,
            max_request_bytes=limits.BULK_SOCKET_REQUEST_BYTES,
            max_response_bytes=limits.BULK_SOCKET_RESPONSE_BYTES,
        )

    # -- what we have

    def offer(
        self, transfer: bytes, source: BulkSource, *, audience: Collection[str] | None = None
    ) -> None:
        """See `api.Bulk.offer`."""
        if len(transfer) != limits.TRANSFER_BYTES:
            raise ValueError(f"a transfer's id has {limits.TRANSFER_BYTES} bytes")
        self.withdraw(transfer)
        self._serving.offers[transfer] = BulkOffer(
            source, None if audience is None else frozenset(audience)
        )

    def withdraw(self, transfer: bytes) -> None:
        """See `api.Bulk.withdraw`."""
        self._serving.withdraw(transfer)

    # -- what others have

    async def manifest(
        self,
        peer: str,
        transfer: bytes,
        *,
        deadline: float = REQUEST_SECONDS,
        root: bytes | None = None,
    ) -> BulkManifest:
        """See `api.Bulk.manifest`."""
        return await self._fetcher.manifest(peer, transfer, deadline, root)

    def deadline(self, peer: str, count: int) -> float:
        """See `api.Bulk.deadline`, and `Bandwidth`."""
        return self.bandwidth.deadline(peer, count)

    async def fetch(
        self,
        peer: str,
        transfer: bytes,
        manifest: BulkManifest,
        sink: BulkSink,
        *,
        deadline: float,
        path: BulkPath | None = None,
    ) -> None:
        """See `api.Bulk.fetch`. Once this has ended, nothing writes to the sink."""
        await self._fetcher.fetch(peer, transfer, manifest, sink, deadline, path)

    # -- what others ask

    async def _serve_manifest(self, peer: str, data: bytes) -> bytes:
        request = codec.decode(data, BulkManifestRequest, limits.BULK_MANIFEST_REQUEST_BYTES)
        await trio.lowlevel.checkpoint()
        offer = self._serving.find(peer, request.transfer)
        if offer is None:
            return codec.encode(BulkManifestResponse("unknown", b""))
        return codec.encode(
            BulkManifestResponse("ok", codec.encode(offer.source.manifest(request.transfer)))
        )

    async def _serve_token(self, peer: str, data: bytes) -> bytes:
        request = codec.decode(data, BulkSocketRequest, limits.BULK_SOCKET_REQUEST_BYTES)
        await trio.lowlevel.checkpoint()
        offer = self._serving.find(peer, request.transfer, request.root)
        if offer is None or self._listener is None:
            return codec.encode(BulkSocketResponse("unknown", 0, b""))
        if not self._serving.has_room(peer, offer):
            return codec.encode(BulkSocketResponse("busy", 0, b""))
        token = self._tokens.issue(peer, request.transfer, trio.current_time())
        return codec.encode(BulkSocketResponse("ok", self._listener.port, token))

    def statistics(self) -> BulkStatistics:
        counts = self._fetcher.counts
        return BulkStatistics(
            fetched={path: dict(outcomes) for path, outcomes in counts.outcomes.items()},
            served={path: dict(outcomes) for path, outcomes in self._serving.outcomes.items()},
            received_bytes=dict(counts.received),
            sent_bytes=dict(self._serving.sent),
            seconds=dict(counts.seconds),
            fallbacks=dict(counts.fallbacks),
            handshakes=dict(self._listener.outcomes) if self._listener else {},
            bandwidth=self.bandwidth.snapshot(),
            offers=len(self._serving.offers),
            fetching=len(self._fetcher.slots),
            serving=self._serving.active,
            port=self._listener.port if self._listener else 0,
        )
