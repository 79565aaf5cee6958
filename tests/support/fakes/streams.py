"""Streams and bulk transfers of the in-memory network (network.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout
from swarmnode.p2p.api import Declined, StreamHandler
from swarmnode.wire import bulk

if TYPE_CHECKING:  # loads libp2p
    from swarmnode.p2p.bulk.content import BulkSink, BulkSource
    from swarmnode.p2p.reputation import PeerScores
    from swarmnode.wire.messages import BulkManifest
    from tests.support.fakes.network import MemoryNetwork, MemorySwarm

CHUNKS_AHEAD = 16
"""Chunks that the sender may be ahead of the receiver."""
BULK_SECONDS = 10.0


class MemoryStream:
    """One end of a stream; see `api.PeerStream`."""

    def __init__(
        self,
        peer: str,
        out: trio.MemorySendChannel[bytes],
        arrivals: trio.MemoryReceiveChannel[bytes],
    ) -> None:
        self.peer = peer
        self.sent = 0
        self.received = 0
        self.broken = trio.Event()
        self.closed = trio.Event()
        self.other: MemoryStream
        self._out = out
        self._arrivals = arrivals
        self._unread = b""
        self._why = ""
        self._finished = self._ended = False

    async def receive(self) -> bytes:
        if self._unread:
            data, self._unread = self._unread, b""
            return data
        try:
            data = await self._arrivals.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            if self._why:
                raise PeerError(self._why) from None
            self._ended = True
            self._close_if_done()
            return b""
        self.received += len(data)
        return data

    def unread(self, data: bytes) -> None:
        self._unread = data + self._unread

    async def send(self, data: bytes | memoryview) -> None:
        if self._finished and not self._why:
            raise ValueError("sent after the end")
        try:
            await self._out.send(bytes(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise PeerError(self._why or "the stream ended") from None
        self.sent += len(data)

    def finish(self) -> None:
        self._finished = True
        self._out.close()
        self._close_if_done()

    def reset(self, why: str = "reset here") -> None:
        if not self.closed.is_set():
            self._break(why)
            self.other._break("broken: reset by the peer")

    def _break(self, why: str) -> None:
        if self.closed.is_set():
            return
        self._why = why
        self._out.close()
        self._arrivals.close()
        self.broken.set()
        self.closed.set()

    def _close_if_done(self) -> None:
        if self._finished and self._ended:
            self.closed.set()


def stream_pair(one: str, other: str) -> tuple[MemoryStream, MemoryStream]:
    """Return both ends of a stream between two peers: the end of `one`, then the end of `other`."""
    there, at_other = trio.open_memory_channel[bytes](CHUNKS_AHEAD)
    back, at_one = trio.open_memory_channel[bytes](CHUNKS_AHEAD)
    ends = MemoryStream(other, there, at_one), MemoryStream(one, back, at_other)
    ends[0].other, ends[1].other = ends[1], ends[0]
    return ends


@dataclass
class _Served:
    accept: StreamHandler
    concurrent: int
    per_peer: int


class MemoryStreams:
    """Streams of one node. They end when their peers are cut from each other."""

    def __init__(self, network: MemoryNetwork, swarm: MemorySwarm) -> None:
        self._network = network
        self._swarm = swarm
        self._served: dict[str, _Served] = {}
        self._open: set[MemoryStream] = set()

    async def open(self, peer: str, protocol: str, *, deadline: float) -> MemoryStream:
        with trio.move_on_after(deadline):
            await trio.sleep(self._swarm.latency)
            if peer not in self._network.connected():
                raise PeerError(f"{peer} is not connected")
            return self._swarm.nodes[peer].streams.take(self._network, protocol)
        raise PeerTimeout(f"{peer} opened no {protocol} within {deadline:g} s")

    def serve(
        self, protocol: str, accept: StreamHandler, *, concurrent: int, per_peer: int
    ) -> None:
        self._served[protocol] = _Served(accept, concurrent, per_peer)

    def drop(self, connected: Collection[str]) -> None:
        """End the streams of peers that are no longer connected."""
        for stream in [
            each for each in self._open if each.closed.is_set() or each.peer not in connected
        ]:
            stream.reset("the connection is gone")
            self._open.discard(stream)

    def keep(self, stream: MemoryStream) -> None:
        """Track a stream, which ends when its peer is cut off."""
        self._open.add(stream)

    def take(self, opener: MemoryNetwork, protocol: str) -> MemoryStream:
        """Return the opener's end of a stream to this node."""
        if protocol not in self._served:
            raise Incompatible(f"{protocol} is not supported here")
        served, peer = self._served[protocol], opener.peer_id
        theirs, ours = stream_pair(peer, self._network.peer_id)
        self.drop(self._network.connected())
        active = Counter(each.peer for each in self._open)
        if (
            active.total() >= served.concurrent
            or active[peer] >= served.per_peer
            or not self._network.is_allowed(peer)
        ):
            ours.reset()
            return theirs
        self.keep(ours)
        opener.streams.keep(theirs)
        served.accept(ours)
        return theirs


class OfferedTransfers:
    """The offers of one node, and the checks of its fetches, for networks without streams."""

    def __init__(self, network: PeerScores) -> None:
        self._scores = network
        self._offers: dict[bytes, tuple[BulkSource, frozenset[str] | None]] = {}

    def offer(
        self, transfer: bytes, source: BulkSource, *, audience: Collection[str] | None = None
    ) -> None:
        self._offers[transfer] = source, None if audience is None else frozenset(audience)

    def withdraw(self, transfer: bytes) -> None:
        self._offers.pop(transfer, None)

    def deadline(self, peer: str, count: int) -> float:
        return BULK_SECONDS

    def source(self, peer: str, transfer: bytes, root: bytes | None = None) -> BulkSource:
        """Return the source that `peer` may read. Raise Declined."""
        source, audience = self._offers.get(transfer, (None, None))
        if (
            source is None
            or (audience is not None and peer not in audience)
            or root not in (None, source.root)
            or not self._scores.is_allowed(peer)
        ):
            raise Declined("unknown")
        return source

    def store_chunk(
        self, peer: str, manifest: BulkManifest, sink: BulkSink, index: int, data: memoryview
    ) -> None:
        """Verify and store a chunk that `peer` sent. Raise BadMessage."""
        view = sink.view(index)
        if len(data) != len(view):
            raise PeerError("wrong length of a chunk")
        view[:] = data
        try:
            bulk.check_chunk(manifest, index, view)
        except BadMessage as error:
            self._scores.rejected(peer, f"bulk_{error.reason}")
            raise
        sink.accept(index)


class MemoryBulk(OfferedTransfers):
    """Copy chunks from the source to the sink."""

    def __init__(self, network: MemoryNetwork, swarm: MemorySwarm) -> None:
        super().__init__(network)
        self._network = network
        self._swarm = swarm

    async def manifest(
        self,
        peer: str,
        transfer: bytes,
        *,
        deadline: float = BULK_SECONDS,
        root: bytes | None = None,
    ) -> BulkManifest:
        with trio.move_on_after(deadline):
            await trio.sleep(self._swarm.latency)
            manifest = self._source_of(peer, transfer).manifest(transfer)
            bulk.check_manifest(manifest, transfer, root)
            return manifest
        raise PeerTimeout(f"no manifest of {peer} within {deadline:g} s")

    async def fetch(
        self,
        peer: str,
        transfer: bytes,
        manifest: BulkManifest,
        sink: BulkSink,
        *,
        deadline: float,
    ) -> None:
        if sink.size != manifest.size:
            raise ValueError(f"the sink is for {sink.size} bytes, the manifest of {manifest.size}")
        with trio.move_on_after(deadline):
            for index in sink.missing():
                await trio.sleep(self._swarm.latency)
                source = self._source_of(peer, transfer, bulk.root(manifest))
                self.store_chunk(peer, manifest, sink, index, source.chunk(index))
            return
        raise PeerTimeout(f"{peer} did not send {manifest.size} bytes within {deadline:g} s")

    def _source_of(self, peer: str, transfer: bytes, root: bytes | None = None) -> BulkSource:
        """Return the source that `peer` offers to this node. Raise PeerError."""
        if peer not in self._network.connected():
            raise PeerError(f"{peer} is not connected")
        return self._swarm.nodes[peer].bulk.source(self._network.peer_id, transfer, root)
