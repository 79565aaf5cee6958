"""Throughput of fetches from peers, and the deadline that follows from it. Pure, bounded."""

from __future__ import annotations

import statistics
from collections import OrderedDict

DEFAULT_BYTES_PER_SECOND = 256 * 1024.0
"""Assumed throughput of one more peer in the median, and of all peers before the first fetch."""
LEAST_BYTES_PER_SECOND = 64 * 1024.0
"""Lower bound of the estimate, so that a slow peer does not extend its own deadline."""
MEASURABLE_BYTES = 16 * 2**10
"""A shorter fetch measures the round trip and counts only if it raises the estimate."""
MOST_PEERS = 16
"""Peers with a moving average; the one measured least recently is dropped."""
NEWEST_WEIGHT = 0.3
"""Weight of the newest fetch in a peer's moving average."""
LEAST_SECONDS = 5.0
"""Constant part of a deadline. A trainer may leave the network process little CPU: with 2 s and a
tenth of a core, fetches timed out and were repeated, and half of the groups were missing."""
LONGEST_SECONDS = 30.0
"""Longest deadline."""


class Throughput:
    """Median throughput of the MOST_PEERS latest holders, each a moving average. The median keeps
    one slow holder from extending all deadlines."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, float] = OrderedDict()

    @property
    def bytes_per_second(self) -> float:
        """The estimate for any holder."""
        rates = [DEFAULT_BYTES_PER_SECOND, *self._of.values()]
        return max(LEAST_BYTES_PER_SECOND, statistics.median(rates))

    def observe(self, peer: str, size: int, seconds: float) -> None:
        """Record that `peer` sent `size` bytes in `seconds`."""
        rate = size / max(seconds, 1e-3)
        if size < MEASURABLE_BYTES and rate < self.bytes_per_second:
            return
        self._of[peer] = (1 - NEWEST_WEIGHT) * self._of.pop(peer, rate) + NEWEST_WEIGHT * rate
        if len(self._of) > MOST_PEERS:
            self._of.popitem(last=False)

    def deadline(self, size: int) -> float:
        """Return LEAST_SECONDS plus three times the estimated time of `size` bytes, at most
        LONGEST_SECONDS."""
        return min(LONGEST_SECONDS, LEAST_SECONDS + 3.0 * size / self.bytes_per_second)
