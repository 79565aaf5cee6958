"""How fast this node's line takes what its stage sends. Pure; times are this machine's monotonic
seconds; no torch."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

WINDOW_SECONDS: Final = 1.0
BUSY: Final = 0.5
"""A line that sends waited for in this share of a window was full; else it is not known how fast it
is."""
WINDOWS: Final = 32
LEAST: Final = 64 * 1024.0
"""Bytes per second: no line is taken to be slower."""


class Uplink:
    """The upper quartile of the last windows in which the line was full: neither what buffers
    swallow at first, nor a member that reads slowly, is taken for the line."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=WINDOWS)
        self._since: float | None = None
        self._bytes, self._waited = 0, 0.0

    @property
    def bytes_per_second(self) -> float:
        """Infinite while it was never full."""
        return (
            max(LEAST, sorted(self._rates)[len(self._rates) * 3 // 4]) if self._rates else math.inf
        )

    def sent(self, count: int, seconds: float, now: float) -> None:
        """`count` bytes were taken `now`, after `seconds`."""
        if self._since is None:
            self._since = now - seconds
        self._bytes, self._waited = self._bytes + count, self._waited + seconds
        elapsed = now - self._since
        if elapsed >= WINDOW_SECONDS:
            if self._waited >= BUSY * elapsed:
                self._rates.append(self._bytes / elapsed)
            self._since, self._bytes, self._waited = None, 0, 0.0
