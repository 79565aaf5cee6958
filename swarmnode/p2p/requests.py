"""Requests and responses: one stream per request, one frame each way.

    requester ─ u32 length, request ──▶ responder
    requester ◀─ u32 length, response ─ responder

Lengths are big-endian and checked against the limit before the body is read. Either side resets the
stream to abort.

A service slot is taken only once the request has arrived, so an open but silent stream costs other
peers nothing. A peer that does not read its response in time is moved to a small share of the
slots, longer after each repetition.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Iterator

import msgspec
import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.api import RequestHandler
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.slots import Busy, PeerCap, PeerSlots, Service, SlowPeers
from swarmnode.p2p.stream_calls import frame, read_frame, run_on_new_stream, run_on_stream

log = logging.getLogger(__name__)

OUTBOUND_PER_PEER = 8
OUTBOUND = 64
"""Concurrent requests of one protocol, to one peer and to all; more requests wait within their own
deadline. The limit is per protocol: otherwise new peers that do not answer a greeting would delay
other requests, whose receivers would be blamed."""
READ_SECONDS = 10.0
"""Timeout for the arrival of a request, also on a line that is full in both directions."""
READING_PER_PEER = 16
"""Requests of one peer that may be arriving: at most 64 KiB each, so 1 MiB of the 32 MiB that a
peer may leave unread."""
WRITE_SECONDS = 10.0
WRITE_BYTES_PER_SECOND = 35_000.0
"""Timeout for writing a response: WRITE_SECONDS plus its size at this rate, a third of a line of
0.8 Mbit/s."""


class RequestStatistics(msgspec.Struct, frozen=True):
    requests: dict[str, dict[str, int]] = {}
    """Outbound requests: protocol → outcome → count. Outcomes: ok, timeout, failed, malformed."""
    served: dict[str, dict[str, int]] = {}
    """Inbound requests: protocol → outcome → count. Outcomes: ok, timeout, failed, malformed, busy,
    unwelcome, and error for an unexpected exception of a handler of this node."""
    in_flight: int = 0
    serving: int = 0


class Libp2pRequests:
    """`api.Requests` on libp2p. `is_allowed(peer)` returns False for peers that are not served."""

    def __init__(self, host: Host, is_allowed: Callable[[str], bool] = lambda peer: True) -> None:
        self._host = host
        self._is_allowed = is_allowed
        self._slots: dict[str, PeerSlots] = collections.defaultdict(
            lambda: PeerSlots(OUTBOUND_PER_PEER, OUTBOUND)
        )
        self._services: dict[str, Service] = {}
        self._reading = PeerCap(READING_PER_PEER)
        self._slow = SlowPeers()
        self._outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self._served: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self._in_flight = 0

    # -- outbound

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
                        await slots.enter_async_context(self._slots[protocol].slot(peer))
                    slots.enter_context(self._count_in_flight())
                    response, _ = await run_on_new_stream(
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
    def _count_in_flight(self) -> Iterator[None]:
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    # -- inbound

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
        service = self._services[protocol] = Service(
            handler,
            max_request_bytes=max_request_bytes,
            max_response_bytes=max_response_bytes,
            concurrent=concurrent,
            per_peer=per_peer,
            deadline=deadline,
        )

        async def on_stream(stream: Stream) -> None:
            await self._serve(protocol, service, stream)

        self._host.set_handler(protocol, on_stream)

    async def _serve(self, protocol: str, service: Service, stream: Stream) -> None:
        """Handle one stream. Never raises; always closes or resets it."""
        outcome = (
            await self._answer(service, stream) if self._is_allowed(stream.peer) else "unwelcome"
        )
        self._served[protocol][outcome] += 1
        await (stream.close() if outcome == "ok" else stream.reset())

    async def _answer(self, service: Service, stream: Stream) -> str:
        """Read the request, then take a slot to handle and answer it. Returns the outcome."""
        peer = stream.peer
        try:
            with self._reading.slot(peer) as room:
                if not room:
                    return "busy"
                read = lambda stream: read_frame(stream, service.max_request_bytes)
                request = await run_on_stream(min(READ_SECONDS, service.deadline), stream, read)
            slow = self._slow.has(peer, trio.current_time())
            async with service.respond(peer, request, slow=slow) as response:
                await self._write(stream, response, service.deadline)
            return "ok"
        except Busy:
            return "busy"
        except BadMessage:
            return "malformed"
        except PeerTimeout:
            return "timeout"
        except PeerError as error:
            log.debug("stream of %s failed: %s", peer, error)
            return "failed"
        except Exception:  # an exception that a peer provoked in a handler must end here
            log.exception("serving %s failed", peer)
            return "error"

    async def _write(self, stream: Stream, response: bytes, deadline: float) -> None:
        """Write the response, and record a peer that reads it too slowly. Raises PeerError."""
        answer, began = frame(response), trio.current_time()
        seconds = min(deadline, WRITE_SECONDS + len(response) / WRITE_BYTES_PER_SECOND)
        try:
            await run_on_stream(seconds, stream, lambda stream: stream.write(answer))
        except PeerError:
            # the connection may have been dropped early for another reason
            if trio.current_time() >= began + min(seconds, WRITE_SECONDS):
                self._slow.add(stream.peer, trio.current_time())
            raise

    def statistics(self) -> RequestStatistics:
        return RequestStatistics(
            requests={protocol: dict(counts) for protocol, counts in self._outcomes.items()},
            served={protocol: dict(counts) for protocol, counts in self._served.items()},
            in_flight=self._in_flight,
            serving=sum(len(service) for service in self._services.values()),
        )


def _outcome(error: PeerError) -> str:
    """Return the outcome of a failed outbound request."""
    if isinstance(error, PeerTimeout):
        return "timeout"
    return "malformed" if isinstance(error, BadMessage) else "failed"
