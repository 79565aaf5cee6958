"""Requests and responses: one stream each, one frame each way.

    requester ─ u32 length, request ─▶ responder        lengths are big-endian and checked against the cap before anything is read
    requester ◀─ u32 length, response ─ responder       whoever does not want to go on resets the stream
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator

import msgspec
import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.api import RequestHandler
from swarmnode.p2p.conversations import converse, frame, read_frame, reset_later
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.slots import PeerCap, PeerSlots

log = logging.getLogger(__name__)

OUTBOUND_PER_PEER = 8
OUTBOUND = 64
"""Requests under way, to one peer and to all; more wait their turn within their own deadline."""
OUTCOMES = ("ok", "timeout", "failed", "malformed")
"""How our requests end."""
SERVED = ("ok", "timeout", "failed", "malformed", "busy", "unwelcome", "error")
"""How theirs end; `error` is a handler of ours that raised something unforeseen."""


class RequestStatistics(msgspec.Struct, frozen=True):
    requests: dict[str, dict[str, int]] = {}
    """Our requests: protocol → outcome → count."""
    served: dict[str, dict[str, int]] = {}
    """Their requests: protocol → outcome → count."""
    in_flight: int = 0
    serving: int = 0


@dataclasses.dataclass
class _Service:
    handler: RequestHandler
    max_request_bytes: int
    max_response_bytes: int
    cap: PeerCap
    deadline: float


class Libp2pRequests:
    """See `api.Requests`. `welcome(peer)`: False if nothing of this peer is to be served."""

    def __init__(self, host: Host, welcome: Callable[[str], bool] = lambda peer: True) -> None:
        self._host = host
        self._welcome = welcome
        self._slots = PeerSlots(OUTBOUND_PER_PEER, OUTBOUND)
        self._services: dict[str, _Service] = {}
        self._outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._served: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._in_flight = 0

    # -- ours

    async def request(
        self, peer: str, protocol: str, data: bytes, *, deadline: float, max_response_bytes: int, urgent: bool = False
    ) -> bytes:
        """See `api.Requests.request`."""

        async def ask(stream: Stream) -> bytes:
            await stream.write(frame(data))
            return await read_frame(stream, max_response_bytes)

        late = trio.current_time() + deadline
        try:
            with trio.move_on_at(late):
                async with contextlib.AsyncExitStack() as slots:
                    if not urgent:
                        await slots.enter_async_context(self._slots.turn(peer))
                    slots.enter_context(self._counted())
                    response, _ = await converse(self._host, peer, protocol, ask, deadline=max(late - trio.current_time(), 0.0))
                    self._outcomes[protocol]["ok"] += 1
                    return response
            raise PeerTimeout(f"{peer} did not answer {protocol} within {deadline:g} s")
        except PeerError as error:
            self._outcomes[protocol][_outcome(error)] += 1
            raise

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

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
        """See `api.Requests.serve`."""
        cap = PeerCap(per_peer or max(1, concurrent // 4), concurrent)
        service = _Service(handler, max_request_bytes, max_response_bytes, cap, deadline)
        self._services[protocol] = service

        async def on_stream(stream: Stream) -> None:
            await self._serve(protocol, service, stream)

        self._host.set_handler(protocol, on_stream)

    async def _serve(self, protocol: str, service: _Service, stream: Stream) -> None:
        """One stream from a peer. Never raises; always closes or resets."""
        outcome = "unwelcome"
        if self._welcome(stream.peer):
            with service.cap.entered(stream.peer) as room:
                outcome = await _answer(service, stream) if room else "busy"
        self._served[protocol][outcome] += 1
        await (stream.close() if outcome == "ok" else stream.reset())

    def statistics(self) -> RequestStatistics:
        return RequestStatistics(
            requests={protocol: dict(counts) for protocol, counts in self._outcomes.items()},
            served={protocol: dict(counts) for protocol, counts in self._served.items()},
            in_flight=self._in_flight,
            serving=sum(len(service.cap) for service in self._services.values()),
        )


async def _answer(service: _Service, stream: Stream) -> str:
    """Reads, handles and writes under a watchdog; returns the outcome, of SERVED."""
    late = trio.current_time() + service.deadline
    outcome = "failed"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reset_later, stream, service.deadline)
        try:
            request = await read_frame(stream, service.max_request_bytes)
            response: bytes | None = None
            with trio.CancelScope(deadline=late):  # around our own handler only, never around the stream
                response = await _handle(service, stream.peer, request)
            if response is not None:
                await stream.write(frame(response))
                outcome = "ok"
        except BadMessage:
            outcome = "malformed"
        except PeerError as error:
            log.debug("a stream of %s ended: %s", stream.peer, error)
        except _OurError:
            outcome = "error"
        nursery.cancel_scope.cancel()
    if outcome != "ok" and trio.current_time() >= late:
        outcome = "timeout"
    return outcome


class _OurError(Exception):
    """Raised when a handler failed in a way that is not the peer's fault; it has been logged."""


async def _handle(service: _Service, peer: str, request: bytes) -> bytes:
    """Raises PeerError when the handler refuses, _OurError when it fails."""
    try:
        response = await service.handler(peer, request)
        if len(response) > service.max_response_bytes:
            raise ValueError(f"the response of {len(response)} bytes is longer than this protocol allows")
        return response
    except PeerError:
        raise
    except Exception as error:  # whatever a peer made our own code do ends here, and is counted
        log.exception("serving %s failed", peer)
        raise _OurError from error


def _outcome(error: PeerError) -> str:
    """The one of OUTCOMES that an error means."""
    if isinstance(error, PeerTimeout):
        return "timeout"
    return "malformed" if isinstance(error, BadMessage) else "failed"
