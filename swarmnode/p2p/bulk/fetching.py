"""The side that wants something: reads chunks into a sink, verifies each beside the reading,
accepts what fits.

    stream   event loop: read ─▶ sink's memory ─▶ (4 chunks) ─▶ worker thread: hash ─▶ accept
    socket   thread: recv_into the sink's memory ─▶ (4 chunks) ─▶ another thread: hash ─▶ accept

Reading and hashing overlap, because each of them can use a core; four chunks bound what one may be
ahead of the other.
"""

from __future__ import annotations

import math
import queue
import socket
import ssl

import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import BulkPath, Declined
from swarmnode.p2p.bulk import tls
from swarmnode.p2p.bulk.content import BulkSink
from swarmnode.p2p.conversations import LENGTH, converse, frame, read_frame
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.streams import Stream
from swarmnode.wire import bulk, codec, ids, limits
from swarmnode.wire.messages import BulkManifest, BulkRequest, BulkResponse

AHEAD = 4
"""Chunks that may wait to be verified."""


class Pull:
    """What is fetched, and how far it is. Once `live` is False, because a chunk was wrong or nobody
    waits any more, nothing is written to the sink."""

    def __init__(
        self, peer: str, transfer: bytes, manifest: BulkManifest, sink: BulkSink, wanted: list[int]
    ) -> None:
        self.peer = peer
        self.transfer = transfer
        self.root = bulk.root(manifest)
        self.manifest = manifest
        self.sink = sink
        self.wanted = wanted
        self.size = sum(
            end - start for start, end in (bulk.span(manifest, index) for index in wanted)
        )
        self.path: BulkPath = "stream"
        self.moved = 0
        self.accepted = 0
        self.metered = 0
        self.live = True
        self.error: Exception | None = None
        self.stream: Stream | None = None

    def request(self) -> bytes:
        """The frame that asks for what is wanted."""
        return frame(
            codec.encode(
                BulkRequest(
                    self.transfer,
                    self.root,
                    bulk.pack_wanted(self.wanted, bulk.count(self.manifest)),
                )
            )
        )

    def check_response(self, data: bytes) -> None:
        """Raises Declined, or BadMessage when what is to follow is not what was asked for."""
        response = codec.decode(data, BulkResponse, limits.BULK_RESPONSE_BYTES)
        if response.status != "ok":
            raise Declined(response.status)
        if response.size != self.size:
            raise BadMessage(
                "bounds", f"{response.size} bytes are to follow, {self.size} were asked for"
            )

    def verify(self, index: int) -> bool:
        """In a worker thread, one chunk at a time. Whether the chunk is right and accepted; if not,
        nothing more is verified."""
        if not self.live:
            return False
        try:
            if bulk.digest(self.sink.view(index)) != bulk.expected(self.manifest, index):
                raise BadMessage("hash", f"chunk {index} is not what the manifest says")
            self.sink.accept(index)
        except Exception as error:  # noqa: BLE001
            # the peer's chunk is wrong, or the caller's sink cannot take it: the caller is told
            self.error, self.live = error, False
            return False
        self.accepted += 1
        return True

    def fail(self, error: Exception) -> None:
        """The first cause counts, later ones follow from it; but a chunk that was wrong counts
        however the reading ended."""
        self.error = self.error or error

    def count(self, more: int) -> None:
        self.moved += more

    def conclude(self) -> None:
        """Raises what went wrong, if anything did."""
        if self.error is not None:
            raise self.error
        if self.accepted < len(self.wanted):
            raise PeerError("this host was closed")


# -- over a libp2p stream


async def over_stream(host: Host, pull: Pull, limiter: trio.CapacityLimiter) -> None:
    """Returns when everything is accepted; raises PeerError, and what the sink raises. May be
    cancelled: the stream is reset then, and nothing touches the sink when this has ended, which
    takes no longer than to hash a chunk."""
    read, arrived = trio.open_memory_channel[int](AHEAD)
    verified = trio.Event()
    host.nursery.start_soon(_verify, host, pull, arrived, verified, limiter)

    async def ask(stream: Stream) -> None:
        pull.stream = stream
        await stream.write(pull.request())
        pull.check_response(await read_frame(stream, limits.BULK_RESPONSE_BYTES))
        await _read_chunks(stream, pull, read)

    try:
        try:
            await converse(host, pull.peer, ids.BULK_PROTOCOL, ask, deadline=math.inf)
        except PeerError as error:
            pull.fail(error)
        read.close()
        await verified.wait()
    finally:
        pull.live = False
        read.close()
        with trio.CancelScope(shield=True):
            await verified.wait()
    pull.conclude()


async def _read_chunks(stream: Stream, pull: Pull, read: trio.MemorySendChannel[int]) -> None:
    for index in pull.wanted:
        view, filled = pull.sink.view(index), 0
        while filled < len(view):
            data = await stream.read(len(view) - filled)
            if not pull.live:
                raise PeerError("given up")
            view[filled : filled + len(data)] = data
            filled += len(data)
            pull.moved += len(data)
        await read.send(index)


async def _verify(
    host: Host,
    pull: Pull,
    arrived: trio.MemoryReceiveChannel[int],
    verified: trio.Event,
    limiter: trio.CapacityLimiter,
) -> None:
    """Never raises; takes everything from the channel until it is closed, so that the reader is
    never held up."""
    try:
        async for index in arrived:
            if not pull.live:
                continue
            if (
                not await trio.to_thread.run_sync(pull.verify, index, limiter=limiter)
                and pull.stream is not None
            ):
                host.nursery.start_soon(pull.stream.reset)
    finally:
        verified.set()


# -- over a TLS socket


def open_socket(connection: ssl.SSLSocket, token: bytes, pull: Pull) -> None:
    """Blocks. Presents the token, asks, reads the answer. Raises PeerError."""
    tls.send(connection, token + pull.request())
    (length,) = LENGTH.unpack(tls.receive_exactly(connection, LENGTH.size))
    if length > limits.BULK_RESPONSE_BYTES:
        raise BadMessage(
            "oversize", f"{length} bytes announced, {limits.BULK_RESPONSE_BYTES} allowed"
        )
    pull.check_response(tls.receive_exactly(connection, length))


async def over_socket(
    control: socket.socket, connection: ssl.SSLSocket, pull: Pull, limiter: trio.CapacityLimiter
) -> None:
    """Returns when everything is accepted; raises PeerError. May be cancelled; nothing touches the
    sink when it has returned."""
    read: queue.Queue[int | None] = queue.Queue(AHEAD)

    def verify() -> None:
        while (index := read.get()) is not None:
            if not pull.verify(index):
                tls.shut_down(control)

    def receive() -> None:
        try:
            for index in pull.wanted:
                tls.fill(connection, pull.sink.view(index), pull.count)
                read.put(index)
        except Exception as error:  # of the connection, or of the caller's sink  # noqa: BLE001
            pull.fail(error)
        finally:
            read.put(None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tls.in_thread, control, limiter, verify)
        nursery.start_soon(tls.in_thread, control, limiter, receive)
    pull.conclude()
