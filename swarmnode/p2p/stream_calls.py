"""Short exchanges on a stream: open it, send and receive messages, close it, all before a deadline.

The I/O runs in a task of its own, because a cancel scope must not enclose it (see
library/streams.py). The caller waits beside it. When the deadline passes, another task resets the
stream. The caller therefore returns in time even if the connection blocks the reset itself.

Frames of swarmnode's own protocols are a big-endian u32 length and the body. Messages of libp2p's
protocols (relay, AutoNAT, DCUtR) are protobuf after a varint length. In both cases the length is
checked before the body is read.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio
from google.protobuf.message import DecodeError, Message

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.library.errors import peer_errors
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.streams import Stream

log = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")
MESSAGE_BYTES = 4096
"""Limit for a protobuf message, which holds a peer id, a few addresses and numbers."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")

StreamFunction = Callable[[Stream], Awaitable[T]]
"""Reads from and writes to a stream. Raises PeerError for faults of the peer."""


class _StreamCall(Generic[T]):
    """State of a running exchange. Its task sets `value` or `error`, then `done`; the caller may
    have left before."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.stream: Stream | None = None
        self.value: list[T] = []
        self.error: PeerError | None = None
        self.abandoned = False


async def run_on_new_stream(
    host: Host,
    peer: str,
    protocol: str,
    function: StreamFunction[T],
    *,
    deadline: float,
    keep: bool = False,
) -> tuple[T, Stream]:
    """Open a stream, run `function` on it and return its result together with the stream.

    Args:
        host: the libp2p host.
        peer: a connected peer.
        protocol: the protocol id.
        function: reads from and writes to the stream.
        deadline: seconds for everything.
        keep: return the stream open, for the caller to end; it is closed otherwise.

    Raises:
        PeerTimeout: the deadline passed.
        Incompatible: the peer does not support the protocol.
        PeerError: the peer is not connected, or anything else failed. The stream has been reset.
    """
    call = _StreamCall[T]()
    taken = False
    try:
        with trio.move_on_after(deadline):
            host.nursery.start_soon(_run, call, host, peer, protocol, function, keep)
            await call.done.wait()
        taken = call.done.is_set()
    finally:
        stream, call.abandoned = call.stream, not taken
        if not taken and stream is not None and (keep or not call.done.is_set()):
            host.nursery.start_soon(stream.reset)
    if call.error is not None:
        raise call.error
    if taken and (stream is None or not call.value):
        raise PeerError("this host was closed")
    if not taken or stream is None:
        raise PeerTimeout(f"{peer} did not answer {protocol} within {deadline:g} s")
    return call.value[0], stream


async def _run(
    call: _StreamCall[T],
    host: Host,
    peer: str,
    protocol: str,
    function: StreamFunction[T],
    keep: bool,
) -> None:
    """Run an exchange. Never raises. Ends the stream unless the caller keeps it."""
    try:
        call.stream = await host.open_stream(peer, protocol, lazily=not keep)
        if not call.abandoned:
            # bytes from a peer can make any parser raise
            with peer_errors(f"{protocol} with {peer}"):
                call.value.append(await function(call.stream))
    except PeerError as error:
        call.error = error
    finally:
        finished = bool(call.value) and not call.abandoned
        call.done.set()
        if call.stream is not None and not (finished and keep):
            await (call.stream.close() if finished else call.stream.reset())


async def run_on_stream(deadline: float, stream: Stream, function: StreamFunction[T]) -> T:
    """Run `function` on a stream that a peer opened, and reset the stream after `deadline` seconds.

    The caller ends the stream.

    Raises:
        PeerTimeout: the deadline passed.
        PeerError: `function` failed.
    """
    late = trio.current_time() + deadline
    results: list[T] = []
    failure: PeerError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_reset_later, stream, deadline)
        try:
            with peer_errors():
                results.append(await function(stream))
        except PeerError as error:  # a fault of the peer ends only this stream
            failure = error
            if trio.current_time() >= late:
                failure = PeerTimeout(f"{stream.peer} took longer than {deadline:g} s")
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return results[0]


async def _reset_later(stream: Stream, seconds: float) -> None:
    """Reset a stream after a delay; cancelled if the reader or writer finishes first."""
    await trio.sleep(seconds)
    await stream.reset()


async def try_on_stream(
    stream: Stream, function: StreamFunction[T], *, deadline: float
) -> T | None:
    """Like `run_on_stream`, but returns None and resets the stream on failure instead of
    raising."""
    try:
        return await run_on_stream(deadline, stream, function)
    except PeerError as error:
        log.debug("stream of %s failed: %r", stream.peer, error)
    await stream.reset()
    return None


# -- frames


def frame(data: bytes) -> bytes:
    """Return `data` with its length prefix."""
    return LENGTH.pack(len(data)) + data


async def read_frame(stream: Stream, limit: int) -> bytes:
    """Read one frame. Raises BadMessage("oversize") before it reads a body longer than `limit`,
    PeerError if the stream ends early."""
    (length,) = LENGTH.unpack(await stream.read_exactly(LENGTH.size))
    if length > limit:
        raise BadMessage("oversize", f"{length} bytes announced, {limit} allowed")
    return await stream.read_exactly(length)


# -- protobuf


async def read_message(stream: Stream, kind: type[M], limit: int = MESSAGE_BYTES) -> M:
    """Read one protobuf message. Raises BadMessage, or PeerError if the stream ends early."""
    length = shift = 0
    while True:
        (byte,) = await stream.read_exactly(1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 21:
            raise BadMessage("oversize", "a length of more than three bytes")
    if length > limit:
        raise BadMessage("oversize", f"{length} bytes announced, {limit} allowed")
    message = kind()
    try:
        message.ParseFromString(await stream.read_exactly(length))
    except DecodeError as error:
        raise BadMessage("malformed", kind.__name__) from error
    return message


async def write_message(stream: Stream, message: Message) -> bool:
    """Write one protobuf message. Returns True, so that it can be used as a `StreamFunction`.
    Raises PeerError."""
    data = message.SerializeToString()
    length, prefix = len(data), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    await stream.write(bytes(prefix) + data)
    return True
