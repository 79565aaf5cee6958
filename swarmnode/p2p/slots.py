"""Limits on concurrent operations, on the requests of a served protocol, and on rates, per peer and
in total."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import AsyncIterator, Iterator

import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.latest import Latest
from swarmnode.p2p.api import RequestHandler

SLOW_SECONDS = 60.0
MAX_SLOW_SECONDS = 3600.0
MAX_SLOW_PEERS = 1024
SLOW_SHARE = 4
"""All slow peers together may use 1/SLOW_SHARE of the slots of a service."""
MAX_RATE_KEYS = 4096


class PeerSlots:
    """Slots for outbound operations: more than `per_peer` with one peer, or `total` with all,
    wait."""

    def __init__(self, per_peer: int, total: int) -> None:
        self._per_peer = per_peer
        self._all = trio.Semaphore(total)
        self._peers: dict[str, trio.Semaphore] = {}
        self._present: collections.Counter[str] = collections.Counter()

    @contextlib.asynccontextmanager
    async def slot(self, peer: str) -> AsyncIterator[None]:
        """Wait for a slot and hold it for the duration of the block."""
        self._present[peer] += 1
        try:
            async with self._peers.setdefault(peer, trio.Semaphore(self._per_peer)), self._all:
                yield
        finally:
            self._present[peer] -= 1
            if not self._present[peer]:
                del self._present[peer], self._peers[peer]

    def __len__(self) -> int:
        """Return the number of operations that hold a slot or wait for one."""
        return self._present.total()


class PeerCap:
    """Slots for inbound operations: more than `per_peer` of one peer, or `total` of all, are
    refused."""

    def __init__(self, per_peer: int, total: float = math.inf) -> None:
        self._per_peer = per_peer
        self._total = total
        self._present: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def slot(self, peer: str) -> Iterator[bool]:
        """Take a slot for the duration of the block; yields False if none is free."""
        if len(self) >= self._total or self._present[peer] >= self._per_peer:
            yield False
            return
        self._present[peer] += 1
        try:
            yield True
        finally:
            self._present[peer] -= 1
            if not self._present[peer]:
                del self._present[peer]

    def __len__(self) -> int:
        return self._present.total()


class Busy(PeerError):
    """Raised when a service has no free slot."""


class Service:
    """A served protocol: its handler and limits. See `api.Requests.serve` for the arguments."""

    def __init__(
        self,
        handler: RequestHandler,
        *,
        max_request_bytes: int,
        max_response_bytes: int,
        concurrent: int = 16,
        per_peer: int | None = None,
        deadline: float = 30.0,
    ) -> None:
        self.max_request_bytes = max_request_bytes
        self.deadline = deadline
        self._handler = handler
        self._max_response_bytes = max_response_bytes
        most = per_peer or max(1, concurrent // 4)
        self._slots = PeerCap(most, concurrent)
        self._slow_slots = PeerCap(max(1, most // 2), max(1, concurrent // SLOW_SHARE))

    def __len__(self) -> int:
        """Return the number of requests that are served now."""
        return len(self._slots)

    @contextlib.asynccontextmanager
    async def respond(
        self, peer: str, request: bytes, *, slow: bool = False
    ) -> AsyncIterator[bytes]:
        """Run the handler, and hold a slot while the block sends the response.

        Args:
            peer: the requester.
            request: its request.
            slow: take one of the few slots of slow peers.

        Raises:
            Busy: no slot is free.
            BadMessage: the request is too long.
            PeerTimeout: the deadline passed.
            PeerError: the handler refuses.
            ValueError: the response is too long. The handler's own exceptions pass as well.
        """
        if len(request) > self.max_request_bytes:
            raise BadMessage("oversize", f"{len(request)} bytes, {self.max_request_bytes} allowed")
        with contextlib.ExitStack() as slots:
            for cap in (self._slow_slots, self._slots) if slow else (self._slots,):
                if not slots.enter_context(cap.slot(peer)):
                    raise Busy("no slot is free")
            response: bytes | None = None
            with trio.move_on_after(self.deadline):
                response = await self._handler(peer, request)
            if response is None:
                raise PeerTimeout(f"not handled within {self.deadline:g} s")
            if len(response) > self._max_response_bytes:
                raise ValueError(f"the response of {len(response)} bytes is too long")
            yield response


class SlowPeers:
    """Peers that blocked a slot by reading too slowly. An entry lasts SLOW_SECONDS, and twice as
    long after each repetition, up to MAX_SLOW_SECONDS. Pure and bounded."""

    def __init__(self) -> None:
        self._until = Latest[str, tuple[float, float]](MAX_SLOW_PEERS)

    def add(self, peer: str, now: float) -> None:
        """Record that `peer` was slow."""
        until, seconds = self._until.get(peer, (-math.inf, 0.0))
        seconds = min(2 * seconds, MAX_SLOW_SECONDS) if now < until + seconds else SLOW_SECONDS
        self._until[peer] = (now + seconds, seconds)

    def has(self, peer: str, now: float) -> bool:
        """Return True while `peer` counts as slow."""
        until, _ = self._until.get(peer, (-math.inf, 0.0))
        return now < until


class RateLimiter:
    """A token bucket for each key, a peer id or an IP address. Pure: `now` is monotonic time in
    seconds.

    Beyond MAX_RATE_KEYS the least recently active key is dropped.

    Args:
        burst: number of uses at once.
        seconds: interval after which another use is allowed.
    """

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst = burst
        self._seconds = seconds
        self._buckets = Latest[str, tuple[float, float]](MAX_RATE_KEYS)
        """Key → (remaining uses, time of the last call)."""

    def allow(self, key: str, now: float) -> bool:
        """Count one use and return True, or return False if none is left."""
        left, at = self._buckets.get(key, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) / self._seconds)
        allowed = left >= 1.0
        self._buckets[key] = (left - allowed, now)
        return allowed
