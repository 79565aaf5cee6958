"""`network.bulk`: the transfers that this node offers, and its fetches from peers."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from swarmnode.p2p.api import PeerScoring, Requests
from swarmnode.p2p.bulk.content import BulkSink, BulkSource
from swarmnode.p2p.bulk.fetching import MANIFEST_TIMEOUT_SECONDS, BulkFetcher
from swarmnode.p2p.bulk.serving import BulkServer
from swarmnode.p2p.library.hosts import Host
from swarmnode.wire import ids, limits
from swarmnode.wire.messages import BulkManifest


class BulkStatistics(msgspec.Struct, frozen=True):
    """Counters since the host was opened, and gauges of now."""

    fetched: dict[str, int] = {}
    """Ended fetches of this node, by outcome (`fetching.OUTCOMES`)."""
    served: dict[str, int] = {}
    """Ended streams of peers that fetched, by outcome (`serving.OUTCOMES`)."""
    received_bytes: int = 0
    """Bytes that arrived, including chunks that were refused afterwards."""
    sent_bytes: int = 0
    """Bytes sent by the uploads that have ended."""
    seconds: float = 0.0
    """Time spent fetching, without the wait for a slot."""
    bandwidth: dict[str, float] = {}
    """Moving average of bytes per second by peer; at most `fetching.BANDWIDTH_PEERS`."""
    offers: int = 0
    fetching: int = 0
    serving: int = 0


class Libp2pBulk:
    """Implementation of `api.Bulk` on libp2p streams."""

    def __init__(self, host: Host, requests: Requests, scores: PeerScoring) -> None:
        self._host = host
        self._requests = requests
        self._server = BulkServer(scores.is_allowed)
        self._fetcher = BulkFetcher(host, requests, scores)

    def start(self) -> None:
        """Start to serve chunks and manifests."""
        self._host.set_handler(ids.BULK_PROTOCOL, self._server.on_stream)
        self._requests.serve(
            ids.BULK_MANIFEST_PROTOCOL,
            self._server.answer_manifest,
            deadline=MANIFEST_TIMEOUT_SECONDS,
            max_request_bytes=limits.BULK_MANIFEST_REQUEST_BYTES,
            max_response_bytes=limits.BULK_MANIFEST_RESPONSE_BYTES,
        )

    def set_budget(self, allows: Callable[[], bool]) -> None:
        """Serve chunks only while `allows()` returns True."""
        self._server.allows = allows

    def offer(
        self, transfer: bytes, source: BulkSource, *, audience: Collection[str] | None = None
    ) -> None:
        """See `api.Bulk.offer`."""
        self._server.offer(transfer, source, None if audience is None else frozenset(audience))

    def withdraw(self, transfer: bytes) -> None:
        """See `api.Bulk.withdraw`."""
        self._server.withdraw(transfer)

    async def manifest(
        self,
        peer: str,
        transfer: bytes,
        *,
        deadline: float = MANIFEST_TIMEOUT_SECONDS,
        root: bytes | None = None,
    ) -> BulkManifest:
        """See `api.Bulk.manifest`."""
        return await self._fetcher.manifest(peer, transfer, deadline, root)

    async def fetch(
        self,
        peer: str,
        transfer: bytes,
        manifest: BulkManifest,
        sink: BulkSink,
        *,
        deadline: float,
    ) -> None:
        """See `api.Bulk.fetch`."""
        await self._fetcher.fetch(peer, transfer, manifest, sink, deadline)

    def deadline(self, peer: str, count: int) -> float:
        """See `api.Bulk.deadline`."""
        return self._fetcher.bandwidth.deadline(peer, count)

    def statistics(self) -> BulkStatistics:
        fetcher, server = self._fetcher, self._server
        return BulkStatistics(
            fetched=dict(fetcher.outcomes),
            served=dict(server.outcomes),
            received_bytes=fetcher.received_bytes,
            sent_bytes=server.sent_bytes,
            seconds=fetcher.seconds,
            bandwidth=fetcher.bandwidth.snapshot(),
            offers=len(server.offers),
            fetching=len(fetcher.slots),
            serving=server.active,
        )
