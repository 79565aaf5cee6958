"""The side that wants something: reads chunks into a sink, verifies each beside the reading, accepts what fits.

    stream   event loop: read ─▶ sink's memory ─▶ (4 chunks) ─▶ worker thread: hash ─▶ accept
    socket   thread: recv_into the sink's memory ─▶ (4 chunks) ─▶ another thread: hash ─▶ accept

Reading and hashing overlap, because each of them can use a core; four chunks bound what one may be ahead of the other.
"""

from __future__ import annotations

import queue
import socket
import ssl
from typing import Any

import trio
from libp2p.peer.id import ID

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import Declined
from swarmnode.p2p.bulk import tls
from swarmnode.p2p.bulk.content import BulkSink
from swarmnode.p2p.requests import LENGTH, close, read_frame, reset
from swarmnode.wire import bulk, codec, ids, limits
from swarmnode.wire.messages import BulkManifest, BulkRequest, BulkResponse

AHEAD = 4
"""Chunks that may wait to be verified."""


class Pull:
    """What is fetched, and how far it is. Nothing is written to the sink once `live` is False."""

    def __init__(self, peer: str, transfer: bytes, manifest: BulkManifest, sink: BulkSink, wanted: list[int]) -> None:
        self.peer = peer
        self.transfer = transfer
        self.root = bulk.root(manifest)
        self.manifest = manifest
        self.sink = sink
        self.wanted = wanted
        self.size = sum(end - start for start, end in (bulk.span(manifest, index) for index in wanted))
        request = BulkRequest(transfer, self.root, bulk.pack_wanted(wanted, bulk.count(manifest)))
        encoded = codec.encode(request)
        self.request = LENGTH.pack(len(encoded)) + encoded
        self.path = "stream"
        self.moved = 0
        self.accepted = 0
        self.told = 0
        self.live = True
        self.spoilt = False
        self.error: Exception | None = None
        self.stream: Any = None
        self.done = trio.Event()
        self.verifying = trio.Lock()

    def check_response(self, frame: bytes) -> None:
        """Raises Declined, or BadMessage when what is to follow is not what was asked for."""
        response = codec.decode(frame, BulkResponse, limits.BULK_RESPONSE_BYTES)
        if response.status != "ok":
            raise Declined(response.status)
        if response.size != self.size:
            raise BadMessage("bounds", f"{response.size} bytes are to follow, {self.size} were asked for")

    def verify(self, index: int) -> None:
        """In a worker thread. Raises BadMessage("hash")."""
        if bulk.digest(self.sink.view(index)) != bulk.expected(self.manifest, index):
            raise BadMessage("hash", f"chunk {index} is not what the manifest says")
        self.sink.accept(index)
        self.accepted += 1

    def fail(self, error: Exception) -> None:
        """The first cause counts; later ones follow from it."""
        self.error = self.error or error

    def spoil(self, error: Exception) -> None:
        """A chunk was wrong, or the sink cannot take it: that counts, however the reading ended, and nothing more is verified."""
        if not self.spoilt:
            self.error, self.spoilt = error, True

    def count(self, more: int) -> None:
        self.moved += more

    def conclude(self) -> None:
        """Raises what went wrong, if anything did."""
        if self.error is not None:
            raise self.error
        if self.accepted < len(self.wanted):
            raise PeerError("this host was closed")


# -- over a libp2p stream


async def over_stream(host: Any, nursery: trio.Nursery, pull: Pull, limiter: trio.CapacityLimiter) -> None:
    """Returns when everything is accepted; raises PeerError. As with requests, the I/O has a task of its own in `nursery` and is never
    cancelled: a caller that gives up resets the stream, and waits only for a chunk that is being hashed in the sink's memory."""
    nursery.start_soon(_read_stream, host, nursery, pull, limiter)
    try:
        await pull.done.wait()
    finally:
        pull.live = False
        if not pull.done.is_set():
            if pull.stream is not None:
                nursery.start_soon(reset, pull.stream)
            with trio.CancelScope(shield=True):
                async with pull.verifying:
                    pass
    pull.conclude()


async def _read_stream(host: Any, nursery: trio.Nursery, pull: Pull, limiter: trio.CapacityLimiter) -> None:
    """Never raises; always closes or resets its stream."""
    send, receive = trio.open_memory_channel[int](AHEAD)
    verified = trio.Event()
    nursery.start_soon(_verify, pull, receive, verified, limiter)
    try:
        identity = ID.from_string(pull.peer)
        if not host.get_network().get_connections(identity):
            raise PeerError(f"{pull.peer} is not connected")
        pull.stream = stream = await host.new_stream(identity, [ids.BULK_PROTOCOL])
        if pull.live:
            await stream.write(pull.request)
            pull.check_response(await read_frame(stream, limits.BULK_RESPONSE_BYTES))
            await _read_chunks(stream, pull, send)
    except PeerError as error:
        pull.fail(error)
    except Exception as error:  # the library raises many kinds; each means that this peer did not deliver
        pull.fail(PeerError(f"{ids.BULK_PROTOCOL} with {pull.peer} failed: {type(error).__name__}: {error}"[:300]))
    finally:
        send.close()
        with trio.CancelScope(shield=True):  # no stream I/O, and no longer than it takes to hash four chunks
            await verified.wait()
        pull.done.set()
        if pull.stream is not None:
            await (reset(pull.stream) if pull.error or not pull.live else close(pull.stream))


async def _read_chunks(stream: Any, pull: Pull, send: Any) -> None:
    for index in pull.wanted:
        view, filled = pull.sink.view(index), 0
        while filled < len(view):
            data = await stream.read(len(view) - filled)
            if not pull.live or pull.error is not None:
                raise PeerError("given up")
            view[filled : filled + len(data)] = data
            filled += len(data)
            pull.moved += len(data)
        await send.send(index)


async def _verify(pull: Pull, receive: Any, verified: trio.Event, limiter: trio.CapacityLimiter) -> None:
    """Never raises; takes everything from the channel until it is closed, so that the reader is never held up."""
    try:
        async for index in receive:
            async with pull.verifying:
                if pull.live and not pull.spoilt:
                    await trio.to_thread.run_sync(pull.verify, index, limiter=limiter)
    except Exception as error:  # a chunk that does not fit, or a sink that cannot take it: the latter is for the caller to see
        pull.spoil(error)
        if pull.stream is not None:
            await reset(pull.stream)
        async for _ in receive:
            pass
    finally:
        verified.set()


# -- over a TLS socket


def open_socket(connection: ssl.SSLSocket, token: bytes, pull: Pull) -> None:
    """Blocks. Presents the token, asks, reads the answer. Raises PeerError."""
    tls.send(connection, token + pull.request)
    (length,) = LENGTH.unpack(tls.receive_exactly(connection, LENGTH.size))
    if length > limits.BULK_RESPONSE_BYTES:
        raise BadMessage("oversize", f"{length} bytes announced, {limits.BULK_RESPONSE_BYTES} allowed")
    pull.check_response(tls.receive_exactly(connection, length))


async def over_socket(control: socket.socket, connection: ssl.SSLSocket, pull: Pull, limiter: trio.CapacityLimiter) -> None:
    """Returns when everything is accepted; raises PeerError. May be cancelled; nothing touches the sink when it has returned."""
    read: queue.Queue[int | None] = queue.Queue(AHEAD)

    def verify() -> None:
        while (index := read.get()) is not None:
            if not pull.spoilt:
                try:
                    pull.verify(index)
                except Exception as error:  # as above
                    pull.spoil(error)
                    tls.shut_down(control)

    def receive() -> None:
        try:
            for index in pull.wanted:
                tls.fill(connection, pull.sink.view(index), pull.count)
                read.put(index)
        except Exception as error:
            pull.fail(error)
        finally:
            read.put(None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tls.in_thread, control, limiter, verify)
        nursery.start_soon(tls.in_thread, control, limiter, receive)
    pull.conclude()
