"""How many of something may go on at a time, with one peer and with all."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import AsyncIterator, Iterator

import trio


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
    """For what peers ask of us: more than `per_peer` of one peer, or `total` of all, are turned away."""

    def __init__(self, per_peer: int, total: int) -> None:
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
