"""Conversations: a stream is opened, something is said both ways, and the stream ends, all of it
before a deadline.

The I/O runs in a task of its own, because no cancel scope may be put around it (library/streams.py
says why); the caller waits beside it, and when the deadline passes another task resets the stream.
So a caller is back on time even when the connection is so stuck that the reset itself has to wait.

Frames, as our own protocols have them, are a big-endian u32 length and that many bytes; the
messages of libp2p's own protocols (relay, AutoNAT, DCUtR) are protobuf behind a varint length.
Either way the length is checked before anything is read.
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
"""A protobuf message: a peer id, a few addresses, numbers."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")

Talk = Callable[[Stream], Awaitable[T]]
"""What is said on a stream. Raises PeerError for what the peer does wrong."""


class _Conversation(Generic[T]):
    """One that is under way. Its task fills in `value` or `error` and sets `done`; the caller may
    have gone by then."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.stream: Stream | None = None
        self.value: list[T] = []
        self.error: PeerError | None = None
        self.abandoned = False


async def converse(
    host: Host, peer: str, protocol: str, talk: Talk[T], *, deadline: float, keep: bool = False
) -> tuple[T, Stream]:
    """What `talk(stream)` returns, and the stream: closed, or with `keep` open and the caller's to
    end.

    `deadline` in seconds covers everything. Raises PeerTimeout after it, Incompatible if the peer
    does not speak the protocol, PeerError if it is not connected or anything else goes wrong; then
    the stream has been reset.
    """
    under_way = _Conversation[T]()
    taken = False
    try:
        with trio.move_on_after(deadline):
            host.nursery.start_soon(_converse, under_way, host, peer, protocol, talk, keep)
            await under_way.done.wait()
        taken = under_way.done.is_set()
    finally:
        stream, under_way.abandoned = under_way.stream, not taken
        if not taken and stream is not None and (keep or not under_way.done.is_set()):
            host.nursery.start_soon(stream.reset)
    if under_way.error is not None:
        raise under_way.error
    if taken and (stream is None or not under_way.value):
        raise PeerError("this host was closed")
    if not taken or stream is None:
        raise PeerTimeout(f"{peer} did not answer {protocol} within {deadline:g} s")
    return under_way.value[0], stream


async def _converse(
    under_way: _Conversation[T], host: Host, peer: str, protocol: str, talk: Talk[T], keep: bool
) -> None:
    """Never raises; the stream is ended unless it is handed over."""
    try:
        under_way.stream = await host.open_stream(peer, protocol, lazily=not keep)
        if not under_way.abandoned:
            # a peer's bytes may surprise whoever reads them
            with peer_errors(f"{protocol} with {peer}"):
                under_way.value.append(await talk(under_way.stream))
    except PeerError as error:
        under_way.error = error
    finally:
        finished = bool(under_way.value) and not under_way.abandoned
        under_way.done.set()
        if under_way.stream is not None and not (finished and keep):
            await (under_way.stream.close() if finished else under_way.stream.reset())


async def within(deadline: float, stream: Stream, talk: Talk[T]) -> T:
    """What `talk(stream)` returns, on a stream that a peer opened and that is reset after
    `deadline` seconds. Raises PeerTimeout then, else the PeerError that `talk` raised; the stream
    is the caller's to end."""
    late = trio.current_time() + deadline
    said: list[T] = []
    failure: PeerError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_reset_later, stream, deadline)
        try:
            with peer_errors():
                said.append(await talk(stream))
        except PeerError as error:  # whatever a peer does on its stream ends that stream
            failure = error
            if trio.current_time() >= late:
                failure = PeerTimeout(f"{stream.peer} took longer than {deadline:g} s")
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return said[0]


async def _reset_later(stream: Stream, seconds: float) -> None:
    """The watchdog of whoever reads or writes meanwhile."""
    await trio.sleep(seconds)
    await stream.reset()


async def answer(stream: Stream, talk: Talk[T], *, deadline: float) -> T | None:
    """As `within`, but never raises: None if it failed, and the stream is then reset."""
    try:
        return await within(deadline, stream, talk)
    except PeerError as error:
        log.debug("a stream of %s ended: %r", stream.peer, error)
    await stream.reset()
    return None


# -- frames


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


async def read_frame(stream: Stream, limit: int) -> bytes:
    """Raises BadMessage("oversize") before reading a body longer than `limit`, PeerError if the
    stream ends before."""
    (length,) = LENGTH.unpack(await stream.read_exactly(LENGTH.size))
    if length > limit:
        raise BadMessage("oversize", f"{length} bytes announced, {limit} allowed")
    return await stream.read_exactly(length)


# -- protobuf


async def read_message(stream: Stream, kind: type[M], limit: int = MESSAGE_BYTES) -> M:
    """Raises BadMessage, or PeerError if the stream ends before."""
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
    """True, so that it can be all that is said on a stream. Raises PeerError."""
    data = message.SerializeToString()
    length, prefix = len(data), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    await stream.write(bytes(prefix) + data)
    return True
