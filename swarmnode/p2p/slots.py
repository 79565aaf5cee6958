"""How many of something may go on at a time, with one peer and with all."""

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
    """For what we do: more than `per_peer` with one peer, or `total` with all, wait their turn."""

    def __init__(self, per_peer: int, total: int) -> None:
        self._per_peer = per_peer
        self._all = trio.Semaphore(total)
        self._peers: dict[str, trio.Semaphore] = {}
        self._present: collections.Counter[str] = collections.Counter()

    @contextlib.asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[None]:
        """Waits for a slot, and has it for as long as the block lasts."""
        self._present[peer] += 1
        try:
            async with self._peers.setdefault(peer, trio.Semaphore(self._per_peer)), self._all:
                yield
        finally:
            self._present[peer] -= 1
            if not self._present[peer]:
                del self._present[peer], self._peers[peer]

    def __len__(self) -> int:
        """Those that have a slot or wait for one."""
        return self._present.total()


class PeerCap:
    """For what peers ask of us: more than `per_peer` of one peer, or `total` of all, are turned
    away."""

    def __init__(self, per_peer: int, total: float = math.inf) -> None:
        self._per_peer = per_peer
        self._total = total
        self._present: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def entered(self, peer: str) -> Iterator[bool]:
        """Whether there was room; if so, it is taken for as long as the block lasts."""
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
    """Peers that kept a place by reading too slowly: for FIRST_SECONDS, and if that was not long
    ago, for twice as long each time. Pure, bounded."""

    def __init__(self) -> None:
        self._until: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def found(self, peer: str, now: float) -> None:
        """`peer` was slow."""
        until, seconds = self._until.pop(peer, (-math.inf, 0.0))
        seconds = min(2 * seconds, LONGEST_SECONDS) if now < until + seconds else FIRST_SECONDS
        self._until[peer] = (now + seconds, seconds)
        if len(self._until) > MOST_SLOW:
            self._until.popitem(last=False)

    def has(self, peer: str, now: float) -> bool:
        until, _ = self._until.get(peer, (-math.inf, 0.0))
        return now < until
