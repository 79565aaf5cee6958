"""Requests and responses: one stream each, one frame each way.

    requester ─ u32 length, request ─▶ responder        lengths are big-endian and checked against the cap before anything is read
    requester ◀─ u32 length, response ─ responder       whoever does not want to go on resets the stream

No cancel scope is ever put around stream I/O: cancelled in the middle, py-libp2p burns a Noise nonce or loses bytes it has read, and the
whole connection dies. So the I/O runs in a task of its own, the caller waits beside it, and when the deadline passes the stream is reset
by another. A caller is back on time even when the connection is so stuck that the reset itself has to wait.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import trio
from libp2p.peer.id import ID

from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout
from swarmnode.p2p.api import RequestHandler

log = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")
READ_BYTES = 65536
OUTBOUND_PER_PEER = 8
OUTBOUND = 64
"""Requests under way, to one peer and to all; more wait their turn within their own deadline."""
END_SECONDS = 30.0
"""Closing or resetting a stream is given up after this. The guards drop a connection that takes no frame for half as long, so that this
cuts no frame in two."""
OUTCOMES = ("ok", "timeout", "failed", "malformed")
"""Of our requests."""
SERVED = ("ok", "timeout", "failed", "malformed", "busy", "unwelcome", "error")
"""Of theirs; `error` is a handler of ours that raised something unforeseen."""


class RequestStatistics(msgspec.Struct, frozen=True):
    requests: dict[str, dict[str, int]] = {}
    """Of ours: protocol → outcome → count."""
    served: dict[str, dict[str, int]] = {}
    """Of theirs: protocol → outcome → count."""
    in_flight: int = 0
    serving: int = 0


@dataclasses.dataclass
class _Service:
    handler: RequestHandler
    max_request_bytes: int
    max_response_bytes: int
    concurrent: int
    per_peer: int
    deadline: float
    active: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class _Exchange:
    """One request under way. The I/O task fills in `response` or `error` and sets `done`; the caller may have gone by then."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.stream: Any = None
        self.response: bytes | None = None
        self.error: PeerError | None = None
        self.abandoned = False


class Requests:
    """`host`: a guarded libp2p host. `nursery`: where the I/O lives; it outlives every request.
    `welcome(peer)`: False if nothing of this peer is to be served."""

    def __init__(self, host: Any, nursery: trio.Nursery, *, welcome: Callable[[str], bool] = lambda peer: True) -> None:
        self._host = host
        self._nursery = nursery
        self._welcome = welcome
        self._slots = trio.Semaphore(OUTBOUND)
        self._peer_slots: dict[str, trio.Semaphore] = {}
        self._services: dict[str, _Service] = {}
        self._outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._served: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._in_flight = 0

    # -- ours

    async def request(
        self, peer: str, protocol: str, data: bytes, *, deadline: float, max_response_bytes: int, urgent: bool = False
    ) -> bytes:
        """The response of a connected peer. `deadline` in seconds covers everything, waiting for a slot included. `urgent` ones wait for no
        slot; whoever sends them sees to it that they are few.

        Raises PeerTimeout after the deadline, BadMessage("oversize") if the response is announced longer than `max_response_bytes`,
        Incompatible if the peer does not speak the protocol (ask again by an older ordinal, if there is one), PeerError if it is not
        connected or resets the stream.
        """
        exchange = _Exchange()
        try:
            with trio.move_on_after(deadline):
                async with contextlib.AsyncExitStack() as slots:
                    if not urgent:
                        await slots.enter_async_context(self._peer_slots.setdefault(peer, trio.Semaphore(OUTBOUND_PER_PEER)))
                        await slots.enter_async_context(self._slots)
                    self._nursery.start_soon(self._exchange, exchange, peer, protocol, data, max_response_bytes)
                    await exchange.done.wait()
        finally:
            if not exchange.done.is_set():
                self._abandon(exchange)
        if exchange.response is not None:
            self._outcomes[protocol]["ok"] += 1
            return exchange.response
        if exchange.error is None:
            self._outcomes[protocol]["timeout"] += 1
            raise PeerTimeout(f"{peer} did not answer {protocol} within {deadline:g} s")
        self._outcomes[protocol]["malformed" if isinstance(exchange.error, BadMessage) else "failed"] += 1
        raise exchange.error

    def forget(self, peer: str) -> None:
        """Drops what is kept for a peer that is gone."""
        self._peer_slots.pop(peer, None)

    def _abandon(self, exchange: _Exchange) -> None:
        exchange.abandoned = True
        if exchange.stream is not None:
            self._nursery.start_soon(reset, exchange.stream)

    async def _exchange(self, exchange: _Exchange, peer: str, protocol: str, data: bytes, max_response_bytes: int) -> None:
        """The I/O of one request. Never raises; always closes or resets its stream."""
        self._in_flight += 1
        finished = False
        try:
            identity = ID.from_string(peer)
            if not self._host.get_network().get_connections(identity):
                raise PeerError(f"{peer} is not connected")
            exchange.stream = stream = await self._host.new_stream(identity, [protocol])
            if not exchange.abandoned:
                await stream.write(LENGTH.pack(len(data)) + data)
                exchange.response = await read_frame(stream, max_response_bytes)
                finished = True
        except PeerError as error:
            exchange.error = error
        except Exception as error:  # the library raises many kinds; each means that this peer did not answer
            kind = Incompatible if "protocols not supported" in str(error.__cause__) else PeerError
            exchange.error = kind(f"{protocol} with {peer} failed: {type(error).__name__}: {error}"[:300])
        finally:
            self._in_flight -= 1
            exchange.done.set()
            if exchange.stream is not None:
                await (close(exchange.stream) if finished else reset(exchange.stream))

    # -- theirs

    def serve(
        self,
        protocol: str,
        handler: RequestHandler,
        *,
        max_request_bytes: int,
        max_response_bytes: int,
        concurrent: int = 16,
        per_peer: int | None = None,
        deadline: float = 30.0,
    ) -> None:
        """Answers `protocol` with `handler`. `concurrent`, `per_peer` (default: a quarter of it): streams served at a time, others are
        reset at once. `deadline` in seconds covers reading, handling and writing."""
        service = _Service(handler, max_request_bytes, max_response_bytes, concurrent, per_peer or max(1, concurrent // 4), deadline)
        self._services[protocol] = service

        async def on_stream(stream: Any) -> None:
            await self._serve(protocol, service, stream)

        self._host.set_stream_handler(protocol, on_stream)

    async def _serve(self, protocol: str, service: _Service, stream: Any) -> None:
        """One stream from a peer. Never raises; always closes or resets."""
        peer = stream.muxed_conn.peer_id.to_base58()
        outcome = "failed"
        if not self._welcome(peer):
            outcome = "unwelcome"
        elif service.active.total() >= service.concurrent or service.active[peer] >= service.per_peer:
            outcome = "busy"
        else:
            service.active[peer] += 1
            try:
                outcome = await self._answer(service, peer, stream)
            finally:
                service.active[peer] -= 1
                if not service.active[peer]:
                    del service.active[peer]
        self._served[protocol][outcome] += 1
        await (close(stream) if outcome == "ok" else reset(stream))

    async def _answer(self, service: _Service, peer: str, stream: Any) -> str:
        """Reads, handles and writes under a watchdog; returns the outcome."""
        late = trio.current_time() + service.deadline
        outcome = "failed"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watchdog, stream, late)
            try:
                request = await read_frame(stream, service.max_request_bytes)
                with trio.CancelScope(deadline=late):  # around our own handler only, never around the stream
                    response = await service.handler(peer, request)
                    if len(response) > service.max_response_bytes:
                        raise ValueError(f"the response of {len(response)} bytes is longer than this protocol allows")
                    outcome = "written"
                if outcome == "written":
                    await stream.write(LENGTH.pack(len(response)) + response)
                    outcome = "ok"
            except BadMessage:
                outcome = "malformed"
            except PeerError:
                outcome = "failed"
            except Exception as error:
                if _is_ours(error):
                    outcome = "error"
                    log.exception("serving %s failed", peer)
                else:
                    log.debug("a stream of %s ended: %r", peer, error)
            nursery.cancel_scope.cancel()
        if outcome != "ok" and trio.current_time() >= late:
            outcome = "timeout"
        return outcome

    def statistics(self) -> RequestStatistics:
        return RequestStatistics(
            requests={protocol: dict(counts) for protocol, counts in self._outcomes.items()},
            served={protocol: dict(counts) for protocol, counts in self._served.items()},
            in_flight=self._in_flight,
            serving=sum(service.active.total() for service in self._services.values()),
        )


async def read_frame(stream: Any, limit: int) -> bytes:
    """One length-prefixed frame. Raises BadMessage("oversize") before reading a body longer than `limit`, or what the stream raises."""
    (length,) = LENGTH.unpack(await read_exactly(stream, LENGTH.size))
    if length > limit:
        raise BadMessage("oversize", f"{length} bytes announced, {limit} allowed")
    return await read_exactly(stream, length)


async def read_exactly(stream: Any, count: int) -> bytes:
    """`count` bytes; `stream.read` gives what there is. An early end is the stream's own exception."""
    buffer = bytearray()
    while len(buffer) < count:
        buffer += await stream.read(min(count - len(buffer), READ_BYTES))
    return bytes(buffer)


async def close(stream: Any) -> None:
    """Ends our side in order. Whatever the library raises here has no one left to tell."""
    with trio.CancelScope(shield=True), trio.move_on_after(END_SECONDS):
        try:
            await stream.close()
        except Exception as error:
            log.debug("closing a stream failed: %r", error)


async def reset(stream: Any) -> None:
    """Ends both sides at once and wakes whoever reads or writes.

    Yamux forgets a stream that is reset here without telling our own reader, which would wait for ever: its event is set by hand. The
    woken reader leaves a fresh one behind, which the second reset, that of the task which did the I/O, takes away.
    """
    muxed = stream.muxed_stream
    waiting = muxed.conn.stream_events.get(muxed.stream_id)
    with trio.CancelScope(shield=True), trio.move_on_after(END_SECONDS):
        try:
            await stream.reset()
        except Exception as error:
            log.debug("resetting a stream failed: %r", error)
    if muxed.stream_id not in muxed.conn.streams:
        muxed.conn.stream_events.pop(muxed.stream_id, None)
    if waiting is not None:
        waiting.set()


async def _watchdog(stream: Any, late: float) -> None:
    await trio.sleep_until(late)
    await reset(stream)


def _is_ours(error: Exception) -> bool:
    """Whether an exception came from a handler of ours; those of the stream are defined by the library."""
    return not type(error).__module__.startswith(("libp2p", "trio"))
