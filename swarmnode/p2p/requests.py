"""Requests and responses: one stream each, one frame each way.

    requester ─ u32 length, request ─▶ responder        lengths are big-endian and checked against
    the cap before anything is read
    requester ◀─ u32 length, response ─ responder       whoever does not want to go on resets the
    stream

A place at a service is taken when the request is there, so that who opens a stream and says nothing
costs nobody else anything. Who then does not read what it asked for in time is answered last: all
that did so share a few of the places, for longer each time.
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
from swarmnode.p2p.conversations import converse, frame, read_frame, within
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.slots import PeerCap, PeerSlots, SlowPeers

log = logging.getLogger(__name__)

OUTBOUND_PER_PEER = 8
OUTBOUND = 64
"""Requests of one protocol under way, to one peer and to all; more wait their turn within their own
deadline. Not of all protocols at once: newcomers that do not answer a greeting would hold up what
others are asked for, who would be blamed for it."""
READ_SECONDS = 10.0
"""A request is there after this time, also where the line is full both ways."""
READING_PER_PEER = 16
"""Requests of one peer that may be on their way here: of at most 64 KiB each, so 1 MiB, of the 32
that a peer may leave unread."""
WRITE_SECONDS = 10.0
WRITE_BYTES_PER_SECOND = 35_000.0
"""A response is read in WRITE_SECONDS and what it takes at this speed, a third of a line of 0.8
Mbit/s."""
SLOW_SHARE = 4
"""Peers that are answered last have, all together, one in so many of a service's places."""
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
    slow: PeerCap
    """For those of `cap` that are answered last."""
    deadline: float

    def write_seconds(self, size: int) -> float:
        """How long a response of `size` bytes may take to be read."""
        return min(self.deadline, WRITE_SECONDS + size / WRITE_BYTES_PER_SECOND)

    @contextlib.contextmanager
    def place(self, peer: str, *, last: bool) -> Iterator[bool]:
        """Whether there was one; if so, it is taken for as long as the block lasts. last: `peer` is
        answered last."""
        with contextlib.ExitStack() as places:
            yield all(
                places.enter_context(cap.entered(peer))
                for cap in ((self.slow, self.cap) if last else (self.cap,))
            )


class Libp2pRequests:
    """See `api.Requests`. `welcome(peer)`: False if nothing of this peer is to be served."""

    def __init__(self, host: Host, welcome: Callable[[str], bool] = lambda peer: True) -> None:
        self._host = host
        self._welcome = welcome
        self._slots: dict[str, PeerSlots] = collections.defaultdict(
            lambda: PeerSlots(OUTBOUND_PER_PEER, OUTBOUND)
        )
        self._services: dict[str, _Service] = {}
        self._reading = PeerCap(READING_PER_PEER)
        self._slow = SlowPeers()
        self._outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self._served: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self._in_flight = 0

    # -- ours

    async def request(
        self,
        peer: str,
        protocol: str,
        data: bytes,
        *,
        deadline: float,
        max_response_bytes: int,
        urgent: bool = False,
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
                        await slots.enter_async_context(self._slots[protocol].turn(peer))
                    slots.enter_context(self._counted())
                    response, _ = await converse(
                        self._host,
                        peer,
                        protocol,
                        ask,
                        deadline=max(late - trio.current_time(), 0.0),
                    )
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
        most = per_peer or max(1, concurrent // 4)
        cap, slow = (
            PeerCap(most, concurrent),
            PeerCap(max(1, most // 2), max(1, concurrent // SLOW_SHARE)),
        )
        service = _Service(handler, max_request_bytes, max_response_bytes, cap, slow, deadline)
        self._services[protocol] = service

        async def on_stream(stream: Stream) -> None:
            await self._serve(protocol, service, stream)

        self._host.set_handler(protocol, on_stream)

    async def _serve(self, protocol: str, service: _Service, stream: Stream) -> None:
        """One stream from a peer. Never raises; always closes or resets."""
        outcome = await self._answer(service, stream) if self._welcome(stream.peer) else "unwelcome"
        self._served[protocol][outcome] += 1
        await (stream.close() if outcome == "ok" else stream.reset())

    async def _answer(self, service: _Service, stream: Stream) -> str:
        """Reads, and then has a place in which to handle and write; returns the outcome, of
        SERVED."""
        try:
            with self._reading.entered(stream.peer) as room:
                if not room:
                    return "busy"
                read = lambda stream: read_frame(stream, service.max_request_bytes)
                request = await within(min(READ_SECONDS, service.deadline), stream, read)
            with service.place(
                stream.peer, last=self._slow.has(stream.peer, trio.current_time())
            ) as room:
                return await self._respond(service, stream, request) if room else "busy"
        except BadMessage:
            return "malformed"
        except PeerTimeout:
            return "timeout"
        except PeerError as error:
            log.debug("a stream of %s ended: %s", stream.peer, error)
            return "failed"
        except _OurError:
            return "error"

    async def _respond(self, service: _Service, stream: Stream, request: bytes) -> str:
        """Raises PeerError, _OurError."""
        response: bytes | None = None
        # around our own handler only, never around the stream
        with trio.move_on_after(service.deadline):
            response = await _handle(service, stream.peer, request)
        if response is None:
            return "timeout"
        answer, began = frame(response), trio.current_time()
        seconds = service.write_seconds(len(response))
        try:
            await within(seconds, stream, lambda stream: stream.write(answer))
        except PeerError:
            # its connection may have been dropped for it before
            if trio.current_time() >= began + min(seconds, WRITE_SECONDS):
                self._slow.found(stream.peer, trio.current_time())
            raise
        return "ok"

    def statistics(self) -> RequestStatistics:
        return RequestStatistics(
            requests={protocol: dict(counts) for protocol, counts in self._outcomes.items()},
            served={protocol: dict(counts) for protocol, counts in self._served.items()},
            in_flight=self._in_flight,
            serving=sum(len(service.cap) for service in self._services.values()),
        )


class _OurError(Exception):
    """Raised when a handler failed in a way that is not the peer's fault; it has been logged."""


async def _handle(service: _Service, peer: str, request: bytes) -> bytes:
    """Raises PeerError when the handler refuses, _OurError when it fails."""
    try:
        response = await service.handler(peer, request)
        if len(response) > service.max_response_bytes:
            raise ValueError(
                f"the response of {len(response)} bytes is longer than this protocol allows"
            )
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
