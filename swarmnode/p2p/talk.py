"""Short conversations in libp2p's own protocols (relay, AutoNAT, DCUtR): protobuf messages behind a varint length, over one stream.

The rules are those of requests.py: no cancel scope around stream I/O, a deadline over everything, a length that is checked before anything
is read. A conversation that we begin runs in a task of its own; when its deadline passes, the stream is reset and the caller goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
from google.protobuf.message import DecodeError, Message
from libp2p.peer.id import ID

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.requests import close, read_exactly, reset

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4096
"""A message of these protocols: a peer id, a few addresses, numbers."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")


async def read_message(stream: Any, kind: type[M], limit: int = MESSAGE_BYTES) -> M:
    """Raises BadMessage, or what the stream raises."""
    length = shift = 0
    while True:
        (byte,) = await read_exactly(stream, 1)
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
        message.ParseFromString(await read_exactly(stream, length))
    except DecodeError as error:
        raise BadMessage("malformed", kind.__name__) from error
    return message


async def write_message(stream: Any, message: Message) -> None:
    """Raises what the stream raises."""
    data = message.SerializeToString()
    length, prefix = len(data), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    await stream.write(bytes(prefix) + data)


class _Outcome:
    def __init__(self) -> None:
        self.done = trio.Event()
        self.stream: Any = None
        self.value: Any = None
        self.error: PeerError | None = None
        self.abandoned = False


async def converse(
    host: Any,
    nursery: trio.Nursery,
    peer: str,
    protocol: str,
    talk: Callable[[Any], Awaitable[T]],
    *,
    deadline: float,
    keep: bool = False,
) -> tuple[T, Any]:
    """What `talk(stream)` returns, and the stream: closed, or with `keep` open and the caller's to end.

    `deadline` in seconds covers everything. Raises PeerTimeout after it, PeerError if the peer is not connected, does not speak the
    protocol, or anything else goes wrong; then the stream has been reset.
    """
    outcome = _Outcome()
    try:
        with trio.move_on_after(deadline):
            nursery.start_soon(_converse, outcome, host, peer, protocol, talk, keep)
            await outcome.done.wait()
    finally:
        if not outcome.done.is_set():
            outcome.abandoned = True
            if outcome.stream is not None:
                nursery.start_soon(reset, outcome.stream)
    if not outcome.done.is_set():
        raise PeerTimeout(f"{peer} did not answer {protocol} within {deadline:g} s")
    if outcome.error is not None:
        raise outcome.error
    return outcome.value, outcome.stream


async def _converse(outcome: _Outcome, host: Any, peer: str, protocol: str, talk: Callable[[Any], Awaitable[T]], keep: bool) -> None:
    """Never raises; the stream is ended unless it is handed over."""
    try:
        identity = ID.from_string(peer)
        if not host.get_network().get_connections(identity):
            raise PeerError(f"{peer} is not connected")
        outcome.stream = await host.new_stream(identity, [protocol])
        if not outcome.abandoned:
            outcome.value = await talk(outcome.stream)
    except PeerError as error:
        outcome.error = error
    except Exception as error:  # the library raises many kinds; each means that this conversation is over
        outcome.error = PeerError(f"{protocol} with {peer} failed: {type(error).__name__}: {error}"[:300])
    finally:
        failed = outcome.error is not None or outcome.abandoned
        outcome.done.set()
        if outcome.stream is not None and (failed or not keep):
            await (reset if failed else close)(outcome.stream)


async def answer(stream: Any, talk: Callable[[Any], Awaitable[T]], *, deadline: float) -> T | None:
    """Runs `talk(stream)` on a stream that a peer opened, and resets the stream after `deadline` seconds. None if it failed; the stream
    is then reset, else it is open and the caller's. Never raises."""
    result: T | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_reset_later, stream, deadline)
        try:
            result = await talk(stream)
        except Exception as error:  # whatever a peer does on its stream ends that stream
            log.debug("a stream of %s ended: %r", stream.muxed_conn.peer_id, error)
        nursery.cancel_scope.cancel()
    if result is None:
        await reset(stream)
    return result


async def _reset_later(stream: Any, seconds: float) -> None:
    await trio.sleep(seconds)
    await reset(stream)
