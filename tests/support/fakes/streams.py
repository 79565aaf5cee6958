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


class MemoryBulk:
    """Copy chunks from the source to the sink and verify them as a real network does."""

    def __init__(self, network: MemoryNetwork, swarm: MemorySwarm) -> None:
        self._network = network
        self._swarm = swarm
        self._offers: dict[bytes, tuple[BulkSource, frozenset[str] | None]] = {}

    def offer(
        self, transfer: bytes, source: BulkSource, *, audience: Collection[str] | None = None
    ) -> None:
        self._offers[transfer] = source, None if audience is None else frozenset(audience)

    def withdraw(self, transfer: bytes) -> None:
        self._offers.pop(transfer, None)

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
            manifest = self._source(peer, transfer).manifest(transfer)
            if root is not None and bulk.root(manifest) != root:
                raise BadMessage("bounds", "a manifest of another transfer")
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
                source = self._source(peer, transfer)
                if source.root != bulk.root(manifest):
                    raise Declined("unknown")
                view = sink.view(index)
                view[:] = source.chunk(index)
                if bulk.digest(view) != bulk.expected(manifest, index):
                    self._network.rejected(peer, "bulk_hash")
                    raise BadMessage("hash", f"chunk {index} does not match the manifest")
                sink.accept(index)
            return
        raise PeerTimeout(f"{peer} did not send {manifest.size} bytes within {deadline:g} s")

    def deadline(self, peer: str, count: int) -> float:
        return BULK_SECONDS

    def _source(self, peer: str, transfer: bytes) -> BulkSource:
        """Return an offered source. Raise PeerError."""
        if peer not in self._network.connected():
            raise PeerError(f"{peer} is not connected")
        source = self._swarm.nodes[peer].bulk.offered_to(self._network.peer_id, transfer)
        if source is None:
            raise Declined("unknown")
        return source

    def offered_to(self, peer: str, transfer: bytes) -> BulkSource | None:
        """Return the source offered under this id, if `peer` may read it."""
        source, audience = self._offers.get(transfer, (None, None))
        return (
            source
            if (audience is None or peer in audience) and self._network.is_allowed(peer)
            else None
        )
