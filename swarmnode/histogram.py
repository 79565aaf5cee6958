"""Histograms of durations, as Prometheus counts them."""

from __future__ import annotations

import bisect

import msgspec


class Histogram(msgspec.Struct, frozen=True):
    """Number of observations by size.

    `counts[i]` is the number of observations above `bounds[i - 1]` and at most `bounds[i]`. The
    last of the `len(bounds) + 1` counts is of observations above every bound.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float = 0.0


class HistogramCounter:
    """Counts observations into a histogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value`, unless it is negative, infinite or not a number."""
        if 0 <= value < float("inf"):
            self._counts[bisect.bisect_left(self._bounds, value)] += 1
            self._sum += value

    def statistics(self) -> Histogram:
        """Return the counts so far."""
        return Histogram(bounds=self._bounds, counts=tuple(self._counts), sum=self._sum)
