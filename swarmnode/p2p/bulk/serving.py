"""The side that has something: what is offered, to whom, how many at a time, and the writing of it.

Transfers offered to everybody may fill at most half of the slots, so that strangers cannot keep a
partner from what is offered to it alone. Of these a slow one makes room for a peer that has none,
and takes up again what is left when there is room.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Literal

import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import BulkPath
from swarmnode.p2p.bulk import tls
from swarmnode.p2p.bulk.content import BulkSource
from swarmnode.p2p.bulk.listener import Caller
from swarmnode.p2p.conversations import frame, read_frame
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.slots import PeerCap
from swarmnode.p2p.traffic import Traffic
from swarmnode.wire import bulk, codec, ids, limits
from swarmnode.wire.messages import BulkRequest, BulkResponse

log = logging.getLogger(__name__)

SERVING = 8
"""Transfers served at a time, on both paths together."""
SERVING_PUBLIC = SERVING // 2
"""Transfers that anybody may ask for get at most so many of these slots."""
SERVING_PER_PEER = 2
STEADY = 10**6
"""Bytes per second. While all slots for strangers are taken, one in which less has moved is given
to the next peer."""
SETTLED_SECONDS = 10.0
"""A transfer keeps its slot at least for so long."""
STREAMS = 64
"""Streams that may be open to us at a time, those included that have not asked for anything yet.
More are reset."""
STREAMS_PER_PEER = 4
STALL_SECONDS = 30.0
"""A transfer of which nothing moves for this long is ended, by either side."""
SLOWEST = 64 * 1024
"""Bytes per second: no peer may hold a slot longer than its transfer would take at this rate, and
STALL_SECONDS."""
REFUSAL_SECONDS = 5.0
Refusal = Literal["unknown", "busy"]
OUTCOMES = ("ok", "unknown", "busy", "unwelcome", "malformed", "stalled", "withdrawn", "failed")


class BulkOffer:
    """`audience`: peer ids, None for everybody. `pushes`: transfers of it that are under way."""

    def __init__(self, source: BulkSource, audience: frozenset[str] | None) -> None:
        self.source = source
        self.audience = audience
        self.pushes: set[Push] = set()


@dataclasses.dataclass(eq=False)
class Push:
    """One transfer under way. `stop()` ends its connection; `outcome` says why, once somebody
    has."""

    peer: str
    offer: BulkOffer
    indices: list[int]
    stop: Callable[[], None]
    began: float
    moved: int = 0
    metered: int = 0
    """As much of `moved` was counted as traffic."""
    outcome: str | None = None

    @property
    def size(self) -> int:
        return sum(len(self.offer.source.chunk(index)) for index in self.indices)

    @property
    def longest(self) -> float:
        """Seconds after which even a transfer that moves is ended."""
        return STALL_SECONDS + self.size / SLOWEST

    def end(self, outcome: str) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.stop()


class Serving:
    """`nursery`: outlives every stream. `welcome(peer)`: whether anything of it is looked at.
    `allows()`: whether there is budget. `clock`: seconds."""

    def __init__(
        self,
        nursery: trio.Nursery,
        limiter: trio.CapacityLimiter,
        welcome: Callable[[str], bool],
        traffic: Traffic,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.allows: Callable[[], bool] = lambda: True
        self.offers: dict[bytes, BulkOffer] = {}
        self.outcomes: dict[BulkPath, collections.Counter[str]] = {
            "stream": collections.Counter(),
            "socket": collections.Counter(),
        }
        self.sent: collections.Counter[str] = collections.Counter()
        self._nursery = nursery
        self._limiter = limiter
        self._welcome = welcome
        self._traffic = traffic
        self._clock = clock
        self._streams = PeerCap(STREAMS_PER_PEER, STREAMS)
        self._pushes: set[Push] = set()

    @property
    def active(self) -> int:
        return len(self._pushes)

    def withdraw(self, transfer: bytes) -> None:
        offer = self.offers.pop(transfer, None)
        for push in tuple(offer.pushes) if offer else ():
            push.end("withdrawn")

    def find(self, peer: str, transfer: bytes, root: bytes | None = None) -> BulkOffer | None:
        """What `peer` may have under this id and root."""
        offer = self.offers.get(transfer)
        if offer is None or (offer.audience is not None and peer not in offer.audience):
            return None
        return offer if root is None or offer.source.root == root else None

    def has_room(self, peer: str, offer: BulkOffer) -> bool:
        if sum(push.peer == peer for push in self._pushes) >= SERVING_PER_PEER or not self.allows():
            return False
        return (
            self._yielding(peer) is not None if self._is_crowded(offer) else self.active < SERVING
        )

    def _is_crowded(self, offer: BulkOffer) -> bool:
        """Whether it is to everybody, and strangers have all the slots that they may have."""
        return offer.audience is None and len(self._public()) >= SERVING_PUBLIC

    def _public(self) -> list[Push]:
        return [push for push in self._pushes if push.offer.audience is None]

    def _yielding(self, peer: str) -> Push | None:
        """The slowest of the strangers' transfers, where it is slow enough to make room for `peer`,
        which has none of them."""
        public, now = self._public(), self._clock()
        slow = [
            push
            for push in public
            if now - push.began >= SETTLED_SECONDS and push.moved < STEADY * (now - push.began)
        ]
        has_none = all(push.peer != peer for push in public)
        return (
            min(slow, key=lambda push: push.moved / (now - push.began))
            if slow and has_none
            else None
        )

    def begin(self, peer: str, request: BulkRequest, stop: Callable[[], None]) -> Push | Refusal:
        """Takes a slot, or says why not: `unknown` or `busy`. Raises BadMessage when the request
        does not fit what is offered."""
        offer = self.find(peer, request.transfer, request.root)
        if offer is None:
            return "unknown"
        indices = bulk.unpack_wanted(
            request.wanted, bulk.count(offer.source.manifest(request.transfer))
        )
        if not self.has_room(peer, offer):
            return "busy"
        if self._is_crowded(offer) and (slow := self._yielding(peer)) is not None:
            slow.end("stalled")
            self.finish(slow)
        push = Push(peer, offer, indices, stop, self._clock())
        self._pushes.add(push)
        offer.pushes.add(push)
        return push

    def finish(self, push: Push) -> None:
        self._pushes.discard(push)
        push.offer.pushes.discard(push)

    async def on_stream(self, stream: Stream) -> None:
        """Handler of the bulk protocol. Never raises; always closes or resets."""
        outcome = "unwelcome"
        if self._welcome(stream.peer):
            with self._streams.entered(stream.peer) as room:
                outcome = await self._answer(stream) if room else "busy"
        self.outcomes["stream"][outcome] += 1
        await (stream.close() if outcome in ("ok", "unknown") else stream.reset())

    async def _answer(self, stream: Stream) -> str:
        """As for requests: no scope around stream I/O, a watchdog resets the stream instead."""
        outcome = "failed"
        push: Push | Refusal | None = None
        async with trio.open_nursery() as nursery:
            # not this nursery: it may be gone when an offer is withdrawn
            stop = lambda: self._nursery.start_soon(stream.reset)
            asking = trio.CancelScope()
            nursery.start_soon(_watch_request, asking, stop)
            try:
                request = codec.decode(
                    await read_frame(stream, limits.BULK_REQUEST_BYTES),
                    BulkRequest,
                    limits.BULK_REQUEST_BYTES,
                )
                asking.cancel()
                push = self.begin(stream.peer, request, stop)
                if isinstance(push, str):
                    await stream.write(refusal(push))
                    outcome = push
                else:
                    stream.keep_connection()
                    nursery.start_soon(
                        watch, lambda: push.moved, lambda: push.end("stalled"), push.longest
                    )
                    await stream.write(response(push))
                    for index in push.indices:
                        await stream.write(push.offer.source.chunk(index))
                        push.moved += len(push.offer.source.chunk(index))
                    outcome = "ok"
            except BadMessage:
                outcome = "malformed"
            except PeerError as error:
                log.debug("a bulk stream of %s ended: %s", stream.peer, error)
            finally:
                if isinstance(push, Push):
                    self.finish(push)
                    self.sent["stream"] += push.moved
            nursery.cancel_scope.cancel()
        if isinstance(push, Push):
            outcome = outcome if outcome == "ok" else push.outcome or outcome
        return outcome

    async def on_caller(self, caller: Caller, control: socket.socket) -> None:
        """A TLS connection whose token was good. Never raises; whoever calls closes the
        connection."""
        outcome = "unwelcome"
        if self._welcome(caller.peer):
            try:
                push = self.begin(caller.peer, caller.request, lambda: tls.shut_down(control))
                outcome = await self._send(caller.connection, control, push)
            except BadMessage:
                outcome = "malformed"
        self.outcomes["socket"][outcome] += 1

    async def _send(
        self, connection: ssl.SSLSocket, control: socket.socket, push: Push | Refusal
    ) -> str:
        if isinstance(push, str):
            with trio.move_on_after(REFUSAL_SECONDS), contextlib.suppress(PeerError):
                await tls.in_thread(control, self._limiter, tls.send, connection, refusal(push))
            return push
        outcome = "failed"
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    watch, lambda: self._meter(push), lambda: push.end("stalled"), push.longest
                )
                try:
                    await tls.in_thread(control, self._limiter, _send_chunks, connection, push)
                    outcome = "ok"
                except PeerError as error:
                    log.debug("a bulk connection of %s ended: %s", push.peer, error)
                    outcome = push.outcome or outcome
                nursery.cancel_scope.cancel()
        finally:
            self.finish(push)
            self.sent["socket"] += push.moved
            self._meter(push)
        return outcome

    def _meter(self, push: Push) -> int:
        self._traffic.count(ids.BULK_SOCKET_PROTOCOL, 0, push.moved - push.metered)
        push.metered = push.moved
        return push.moved


def _send_chunks(connection: ssl.SSLSocket, push: Push) -> None:
    """Blocks, in a thread. Raises PeerError."""
    tls.send(connection, response(push))
    for index in push.indices:
        chunk = push.offer.source.chunk(index)
        tls.send(connection, chunk)
        push.moved += len(chunk)


def response(push: Push) -> bytes:
    """The frame that precedes the chunks."""
    return frame(codec.encode(BulkResponse("ok", push.size)))


def refusal(status: Refusal) -> bytes:
    return frame(codec.encode(BulkResponse(status, 0)))


async def _watch_request(scope: trio.CancelScope, stop: Callable[[], None]) -> None:
    """Until `scope`, which is the watch's and not the stream's, is cancelled."""
    with scope:
        await watch(lambda: 0, stop, STALL_SECONDS)


async def watch(moved: Callable[[], int], stop: Callable[[], None], longest: float) -> None:
    """Calls `stop` once `moved()` has not changed for STALL_SECONDS, or `longest` seconds have
    passed."""
    began = changed = trio.current_time()
    last = moved()
    while True:
        await trio.sleep(1.0)
        now, current = trio.current_time(), moved()
        if current != last:
            last, changed = current, now
        if now - changed >= STALL_SECONDS or now - began >= longest:
            return stop()
