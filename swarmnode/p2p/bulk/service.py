"""The bulk service of a network: the content that this node offers, and its fetches from peers.

    fetch ─▶ wait for a slot ─▶ request ─▶ response ─▶ each chunk: read, compare its hash, accept

The sink knows which chunks it has. A fetch that fails is not repeated here: the caller calls again
for the missing chunks. serving.py is the other end of the stream.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Collection, Iterator

import msgspec
import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.latest import Latest
from swarmnode.p2p.api import Declined, PeerScoring, Requests
from swarmnode.p2p.bulk.content import BulkSink, BulkSource
from swarmnode.p2p.bulk.serving import STALL_SECONDS, BulkServer
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.slots import PeerSlots
from swarmnode.p2p.stream_calls import frame, read_frame, run_on_new_stream
from swarmnode.wire import bulk, codec, ids, limits
from swarmnode.wire.bounds import check_message
from swarmnode.wire.messages import (
    BulkManifest,
    BulkManifestRequest,
    BulkManifestResponse,
    BulkRequest,
    BulkResponse,
)

MANIFEST_TIMEOUT_SECONDS = 10.0
FETCHES = 4
FETCHES_PER_PEER = 1
"""Concurrent fetches. Others wait for a slot within their own deadlines."""
BANDWIDTH_PEERS = 1024
"""Number of peers with an estimate; the least recently measured is dropped."""
NEWEST_WEIGHT = 0.3
"""Weight of the newest transfer in the moving average."""
DEFAULT_BANDWIDTH = 2e6
"""Bytes per second: upper bound for a peer without measurements."""
DEFAULT_QUANTILE = 0.75
"""A peer without measurements is estimated at this quantile of the measured peers. A mean would let
slow peers lower the estimate of every peer."""
MIN_BANDWIDTH = 64 * 1024
"""Bytes per second: lower bound of every estimate, so that no deadline is without bound."""
MIN_MEASURED_BYTES = 256 * 1024
"""Shorter transfers measure latency, not bandwidth."""
DEADLINE_FACTOR = 3.0
DEADLINE_SLACK_SECONDS = 2.0


class BulkStatistics(msgspec.Struct, frozen=True):
    """Counters since the host was opened, and gauges of now."""

    fetched: dict[str, int] = {}
    """Ended fetches of this node, by outcome: ok, timeout, unknown, busy, hash, malformed, failed,
    cancelled."""
    served: dict[str, int] = {}
    """Ended streams of peers that fetched, by outcome: ok, unknown, busy, unwelcome, malformed,
    stalled, withdrawn, failed."""
    received_bytes: int = 0
    """Bytes that arrived, including chunks that were refused afterwards."""
    offers: int = 0
    fetching: int = 0
    serving: int = 0


class Libp2pBulk:
    """Implementation of `api.Bulk` on libp2p streams."""

    def __init__(self, host: Host, requests: Requests, scores: PeerScoring) -> None:
        self._host = host
        self._requests = requests
        self._scores = scores
        self._server = BulkServer(scores.is_allowed)
        self._slots = PeerSlots(FETCHES_PER_PEER, FETCHES)
        self._bandwidth = BandwidthEstimates()
        self._outcomes: collections.Counter[str] = collections.Counter()
        self._received_bytes = 0

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
        data = await self._requests.request(
            peer,
            ids.BULK_MANIFEST_PROTOCOL,
            codec.encode(BulkManifestRequest(transfer)),
            deadline=deadline,
            max_response_bytes=limits.BULK_MANIFEST_RESPONSE_BYTES,
        )
        response = codec.decode(data, BulkManifestResponse, limits.BULK_MANIFEST_RESPONSE_BYTES)
        if response.status != "ok":
            raise Declined(response.status)
        manifest = codec.decode(response.manifest, BulkManifest, limits.BULK_MANIFEST_BYTES)
        bulk.check_manifest(manifest, transfer, root)
        return manifest

    async def fetch(
        self,
        peer: str,
        transfer: bytes,
        manifest: BulkManifest,
        sink: BulkSink,
        *,
        deadline: float,
    ) -> None:
        """See `api.Bulk.fetch`. After it returns or raises, nothing writes to the sink."""
        check_message(manifest)
        if sink.size != manifest.size:
            raise ValueError(f"the sink is for {sink.size} bytes, the manifest of {manifest.size}")
        download = Download(transfer, manifest, sink)
        if not download.wanted:
            return
        outcome = "failed"
        try:
            with trio.move_on_after(deadline) as scope:
                async with self._slots.slot(peer):
                    await self._receive(peer, download)
            if scope.cancelled_caught:
                raise PeerTimeout(
                    f"{peer} sent {download.received} of {download.size} bytes in {deadline:g} s"
                )
            outcome = "ok"
        except trio.Cancelled:
            outcome = "cancelled"
            raise
        except PeerError as error:
            outcome = _outcome(error)
            if isinstance(error, BadMessage):
                self._scores.rejected(peer, f"bulk_{outcome}")
            raise
        finally:
            self._outcomes[outcome] += 1

    def deadline(self, peer: str, count: int) -> float:
        """See `api.Bulk.deadline`."""
        return self._bandwidth.deadline(peer, count)

    def statistics(self) -> BulkStatistics:
        return BulkStatistics(
            fetched=dict(self._outcomes),
            served=dict(self._server.outcomes),
            received_bytes=self._received_bytes,
            offers=len(self._server.offers),
            fetching=len(self._slots),
            serving=self._server.active,
        )

    async def _receive(self, peer: str, download: Download) -> None:
        """Receive all wanted chunks on one stream, and record the bandwidth."""
        began = trio.current_time()
        try:
            with download.stall_scope:
                download.postpone_stall()
                await run_on_new_stream(
                    self._host, peer, ids.BULK_PROTOCOL, download.receive, deadline=math.inf
                )
            if download.stall_scope.cancelled_caught:
                raise PeerTimeout(f"{peer} sent nothing for {STALL_SECONDS:g} s")
        except PeerError:
            if download.sink_error is not None:
                raise download.sink_error from None
            raise
        finally:
            download.abandoned = True
            elapsed = trio.current_time() - began
            self._bandwidth.observe(peer, download.received, elapsed)
            self._received_bytes += download.received


class Download:
    """One fetch on one stream.

    `receive` runs in a task of the host, because a cancel scope around stream I/O would break the
    connection (library/streams.py). `abandoned` stops that task from writing to the sink after the
    caller has left.
    """

    def __init__(self, transfer: bytes, manifest: BulkManifest, sink: BulkSink) -> None:
        self.wanted = sink.missing()
        spans = [bulk.span(manifest, index) for index in self.wanted]
        self.size = sum(end - start for start, end in spans)
        self.received = 0
        self.stall_scope = trio.CancelScope()
        self.abandoned = False
        self.sink_error: Exception | None = None
        self._transfer = transfer
        self._manifest = manifest
        self._sink = sink

    async def receive(self, stream: Stream) -> None:
        """Send the request, then read, verify and accept the chunks in ascending order.

        Raises:
            Declined: The peer does not send.
            BadMessage: The response does not fit the request, or a chunk has another hash.
            PeerError: The stream ended, or the sink failed (see `sink_error`).
        """
        bits = bulk.pack_wanted(self.wanted, bulk.count(self._manifest))
        request = BulkRequest(self._transfer, bulk.root(self._manifest), bits)
        await stream.write(frame(codec.encode(request)))
        data = await read_frame(stream, limits.BULK_RESPONSE_BYTES)
        response = codec.decode(data, BulkResponse, limits.BULK_RESPONSE_BYTES)
        if response.status != "ok":
            raise Declined(response.status)
        if response.size != self.size:
            raise BadMessage("bounds", f"{response.size} bytes announced, {self.size} requested")
        for index in self.wanted:
            with self._sink_errors():
                view = self._sink.view(index)
            await self._fill(stream, view)
            # In the event loop: BLAKE3 hashes 1 MiB faster than a thread starts and returns.
            bulk.check_chunk(self._manifest, index, view)
            with self._sink_errors():
                self._sink.accept(index)

    def postpone_stall(self) -> None:
        """Start the stall timeout again."""
        self.stall_scope.deadline = trio.current_time() + STALL_SECONDS

    async def _fill(self, stream: Stream, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            data = await stream.read(len(view) - filled)
            if self.abandoned:
                raise PeerError("the fetch was abandoned")
            view[filled : filled + len(data)] = data
            filled += len(data)
            self.received += len(data)
            self.postpone_stall()

    @contextlib.contextmanager
    def _sink_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # An error of the sink is raised to the caller; the peer is not at fault.
            self.sink_error = error
            raise PeerError("the sink failed") from error


class BandwidthEstimates:
    """Exponential moving average of bytes per second for each peer, and the deadlines from it."""

    def __init__(self) -> None:
        self._peers = Latest[str, float](BANDWIDTH_PEERS)

    def observe(self, peer: str, count: int, seconds: float) -> None:
        """Record that `peer` sent `count` bytes in `seconds`, whether or not it sent all."""
        if count < MIN_MEASURED_BYTES or seconds <= 0:
            return
        rate = max(MIN_BANDWIDTH, count / seconds)
        before = self._peers.get(peer, rate)
        self._peers[peer] = before + NEWEST_WEIGHT * (rate - before)

    def estimate(self, peer: str) -> float:
        """Return bytes per second: the peer's average, or a cautious default without one."""
        if peer in self._peers or not self._peers:
            return self._peers.get(peer, DEFAULT_BANDWIDTH)
        rates = sorted(self._peers.values())
        return min(DEFAULT_BANDWIDTH, rates[int(DEFAULT_QUANTILE * len(rates))])

    def deadline(self, peer: str, count: int) -> float:
        """Return the seconds that `count` bytes from `peer` may take."""
        return count / self.estimate(peer) * DEADLINE_FACTOR + DEADLINE_SLACK_SECONDS


def _outcome(error: PeerError) -> str:
    """Return the outcome of a failed fetch."""
    if isinstance(error, Declined):
        return error.status
    if isinstance(error, BadMessage):
        return "hash" if error.reason == "hash" else "malformed"
    return "timeout" if isinstance(error, PeerTimeout) else "failed"
