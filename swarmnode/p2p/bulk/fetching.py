"""One fetch on one stream, and estimates of the peers' bandwidth.

    request ─▶ response ─▶ each chunk: read, compare its hash, accept

The sink knows which chunks it has. A fetch that fails is not repeated here: the caller calls again
for the missing chunks.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import Declined
from swarmnode.p2p.bulk.content import BulkSink
from swarmnode.p2p.bulk.serving import STALL_SECONDS
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.stream_calls import frame, read_frame
from swarmnode.wire import bulk, codec, limits
from swarmnode.wire.messages import BulkManifest, BulkRequest, BulkResponse

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
            # Whatever the caller's sink raises is raised to the caller; the peer is not at fault.
            self.sink_error = error
            raise PeerError("the sink failed") from error


class BandwidthEstimates:
    """Exponential moving average of bytes per second for each peer, and the deadlines from it."""

    def __init__(self) -> None:
        self._peers: collections.OrderedDict[str, float] = collections.OrderedDict()

    def observe(self, peer: str, count: int, seconds: float) -> None:
        """Record that `peer` sent `count` bytes in `seconds`, whether or not it sent all."""
        if count < MIN_MEASURED_BYTES or seconds <= 0:
            return
        rate = max(MIN_BANDWIDTH, count / seconds)
        before = self._peers.pop(peer, rate)
        self._peers[peer] = before + NEWEST_WEIGHT * (rate - before)
        if len(self._peers) > BANDWIDTH_PEERS:
            self._peers.popitem(last=False)

    def estimate(self, peer: str) -> float:
        """Return bytes per second: the peer's average, or a cautious default without one."""
        if peer in self._peers or not self._peers:
            return self._peers.get(peer, DEFAULT_BANDWIDTH)
        rates = sorted(self._peers.values())
        return min(DEFAULT_BANDWIDTH, rates[int(DEFAULT_QUANTILE * len(rates))])

    def deadline(self, peer: str, count: int) -> float:
        """Return the seconds that `count` bytes from `peer` may take."""
        return count / self.estimate(peer) * DEADLINE_FACTOR + DEADLINE_SLACK_SECONDS

    def snapshot(self) -> dict[str, float]:
        """Return the estimates by peer, the most recently measured peer last."""
        return dict(self._peers)
