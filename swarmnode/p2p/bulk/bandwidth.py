"""How fast each peer was, and how long a transfer from it may therefore take. Pure.

deadline = bytes / bandwidth · 3 + 2 s: a constant would be too long for a small fragment and too
short for a slow line.
"""

from __future__ import annotations

import collections

PEERS = 1024
"""Peers remembered, those heard of last."""
WEIGHT = 0.3
"""The newest transfer's weight in the moving average."""
UNKNOWN = 2e6
"""Bytes per second assumed of a peer nobody has measured yet, at most, and of all before the
first."""
OTHERS = 0.75
"""A stranger is assumed to be as fast as this part of those measured is at most: what our own line
can do. Their mean would be for the slow to choose."""
SLOWEST = 64 * 1024
"""Bytes per second: a peer that is slower gets no more time than this would take."""
LEAST_BYTES = 256 * 1024
"""Shorter transfers measure latency, not bandwidth."""
FACTOR = 3.0
SLACK_SECONDS = 2.0


class Bandwidth:
    """Exponential moving averages, bytes per second."""

    def __init__(self) -> None:
        self._peers: collections.OrderedDict[str, float] = collections.OrderedDict()

    def observe(self, peer: str, count: int, seconds: float) -> None:
        """`count` bytes came from `peer` in `seconds`, whether or not that was all there should
        have been."""
        if count < LEAST_BYTES or seconds <= 0:
            return
        rate = max(SLOWEST, count / seconds)
        before = self._peers.pop(peer, None)
        self._peers[peer] = rate if before is None else before + WEIGHT * (rate - before)
        if len(self._peers) > PEERS:
            self._peers.popitem(last=False)

    def estimate(self, peer: str) -> float:
        """Bytes per second. For a stranger: UNKNOWN, or what the faster of the others give when
        that is less."""
        if peer in self._peers or not self._peers:
            return self._peers.get(peer, UNKNOWN)
        return min(UNKNOWN, sorted(self._peers.values())[int(OTHERS * len(self._peers))])

    def deadline(self, peer: str, count: int) -> float:
        """Seconds that `count` bytes from `peer` may take."""
        return count / self.estimate(peer) * FACTOR + SLACK_SECONDS

    def snapshot(self) -> dict[str, float]:
        """By peer, those heard of last at the end."""
        return dict(self._peers)
