"""Limits on concurrent operations, per peer and in total."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import AsyncIterator, Iterator

import trio

FIRST_SECONDS = 60.0
LONGEST_SECONDS = 3600.0
MOST_SLOW = 1024


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


class SlowPeers:
    """Peers that blocked a slot by reading too slowly. An entry lasts FIRST_SECONDS, and twice as
    long after each repetition, up to LONGEST_SECONDS. Pure and bounded."""

    def __init__(self) -> None:
        self._until: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def add(self, peer: str, now: float) -> None:
        """Record that `peer` was slow."""
        until, seconds = self._until.pop(peer, (-math.inf, 0.0))
        seconds = min(2 * seconds, LONGEST_SECONDS) if now < until + seconds else FIRST_SECONDS
        self._until[peer] = (now + seconds, seconds)
        if len(self._until) > MOST_SLOW:
            self._until.popitem(last=False)

    def has(self, peer: str, now: float) -> bool:
        """Return True while `peer` counts as slow."""
        until, _ = self._until.get(peer, (-math.inf, 0.0))
        return now < until
