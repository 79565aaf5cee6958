"""How long a transfer may take, from how long the last ones took: a constant is too short for one node and far too long for another."""

from __future__ import annotations

import math

import msgspec

FIRST_GUESS = 1e6
"""Bytes per second before anything was measured: 8 Mbit/s."""
SMOOTHING = 0.3
PATIENCE = 3.0
FLOOR_SECONDS = 2.0
LONGEST_SECONDS = 3600.0


class ThroughputStatistics(msgspec.Struct, frozen=True):
    bytes_per_second: float
    """Smoothed."""
    measured: int
    """Finished transfers."""


class Throughput:
    """Exponential moving average of the bandwidth to one peer, or to all of them."""

    def __init__(self, bytes_per_second: float = FIRST_GUESS) -> None:
        self._smoothed = bytes_per_second
        self._measured = 0

    def finished(self, bytes: int, seconds: float) -> None:
        """A transfer of `bytes` took `seconds`."""
        if bytes <= 0 or not seconds > 0:
            return
        rate = bytes / seconds
        share = max(SMOOTHING, 1 / (self._measured + 1))  # the first measurement replaces the guess
        self._smoothed = math.exp((1 - share) * math.log(self._smoothed) + share * math.log(rate))  # rates are ratios: average their logs
        self._measured += 1

    def overran(self) -> None:
        """A transfer missed its deadline: without this a link that became slow would never be given the time to show how slow."""
        self._smoothed = max(1.0, self._smoothed / 2)

    def deadline_seconds(self, bytes: int) -> float:
        """Three times what `bytes` should take, and two seconds for the round trips; an hour at most."""
        return min(LONGEST_SECONDS, PATIENCE * bytes / self._smoothed + FLOOR_SECONDS)

    def statistics(self) -> ThroughputStatistics:
        return ThroughputStatistics(self._smoothed, self._measured)
