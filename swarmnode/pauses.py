"""The operator's pause of training, and the file through which the supervisor reports it to the
other processes. It lasts from `swarmnode pause` until `swarmnode resume`, also across restarts.

Quiet hours are not in this file: each process compares them with its clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from swarmnode.files import write_atomically

FILE = "pauses.json"
FILE_BYTES = 4096
POLL_INTERVAL = 1.0
"""Interval between reads of the file, in seconds."""
DAY_MINUTES = 24 * 60


class SavedPause(msgspec.Struct, frozen=True):
    """Content of the file."""

    owner: float | None = None
    """Start of the operator's pause, Unix seconds; None without one."""


def write(data_dir: Path, since: float | None) -> None:
    """Write the start of the pause, Unix seconds; None without one. Raises OSError."""
    write_atomically(data_dir / FILE, msgspec.json.encode(SavedPause(since)))


def read(data_dir: Path) -> float | None:
    """Return the start of the present pause; None without one, or if the file is damaged. Never
    raises."""
    try:
        with (data_dir / FILE).open("rb") as file:
            since = msgspec.json.decode(file.read(FILE_BYTES), type=SavedPause).owner
    except (OSError, msgspec.MsgspecError):
        return None
    return since if since is not None and math.isfinite(since) else None


class PauseFlag:
    """Flag of the operator's pause, cached for `POLL_INTERVAL`."""

    def __init__(self, data_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._data_dir = data_dir
        self._clock = clock
        self._read_at = -math.inf
        self._is_paused = False

    def __call__(self) -> bool:
        now = self._clock()
        if now - self._read_at >= POLL_INTERVAL:
            self._read_at, self._is_paused = now, read(self._data_dir) is not None
        return self._is_paused


def is_quiet(hours: str, minute: int) -> bool:
    """Return True if a minute lies in the quiet hours.

    Args:
        hours: Such as "22:00-07:00", which excludes 07:00. Empty means never; equal ends mean the
            whole day.
        minute: Minute of the local day, 0 to 1439.
    """
    if not hours:
        return False
    start, end = (_minute(text) for text in hours.split("-"))
    return (minute - start) % DAY_MINUTES < ((end - start) % DAY_MINUTES or DAY_MINUTES)


def _minute(text: str) -> int:
    hour, minute = text.split(":")
    return int(hour) * 60 + int(minute)
