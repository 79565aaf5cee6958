"""How fast groups come in, and how long one is waited for. Pure, bounded."""

from __future__ import annotations

import statistics
from collections import OrderedDict

START = 256 * 1024.0
"""Bytes per second that are believed before anything came, and beside what few peers achieve."""
LEAST = 64 * 1024.0
"""Bytes per second: never less is believed, so that whoever drips is given up in time."""
MEASURABLE = 16 * 2**10
"""Bytes: what takes a round trip says little about what is shorter."""
MOST_PEERS = 16
SHARE = 0.3
LEAST_SECONDS = 5.0
"""A trainer may leave the network process little CPU. With 2 s at a tenth of a core, fetches timed
out and were repeated, and half of the groups were missing."""
LONGEST = 30.0


class Throughput:
    """The median over the MOST_PEERS peers that gave something last, each as a moving average: one
    that drips changes nobody's deadline."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, float] = OrderedDict()

    @property
    def bytes_per_second(self) -> float:
        return max(LEAST, statistics.median([START, *self._of.values()]))

    def observe(self, peer: str, size: int, seconds: float) -> None:
        """`peer` gave `size` bytes in this time."""
        rate = size / max(seconds, 1e-3)
        if size < MEASURABLE and rate < self.bytes_per_second:
            return
        self._of[peer] = (1 - SHARE) * self._of.pop(peer, rate) + SHARE * rate
        if len(self._of) > MOST_PEERS:
            self._of.popitem(last=False)

    def deadline(self, size: int) -> float:
        """Return LEAST_SECONDS plus three times what `size` bytes should take, at most LONGEST."""
        return min(LONGEST, LEAST_SECONDS + 3.0 * size / self.bytes_per_second)
