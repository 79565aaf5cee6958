"""Reasons to pause training, and the file through which the supervisor reports them to the other
processes of the node.

    owner      `swarmnode pause`, until `swarmnode resume`; outlasts restarts of the node
    battery    the machine runs on battery                        (node.rest_when)
    busy       other programs use the machine's processors        (node.rest_when)

Quiet hours are not in this file: each process compares them with its clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from swarmnode.files import write_atomically

REASONS = ("owner", "battery", "busy")
FILE = "pauses.json"
FILE_BYTES = 4096
POLL_INTERVAL = 1.0
"""Interval between reads of the file, in seconds."""
DAY_MINUTES = 24 * 60


def write(data_dir: Path, since: Mapping[str, float]) -> None:
    """Write the current pauses.

    Args:
        since: Reason of `REASONS` → start of the pause, Unix seconds.

    Raises:
        OSError: The disk is full.
    """
    write_atomically(data_dir / FILE, msgspec.json.encode(dict(since)))


def read(data_dir: Path) -> dict[str, float]:
    """Return the current pauses; empty if the file is missing or damaged. Never raises."""
    try:
        with (data_dir / FILE).open("rb") as file:
            found = msgspec.json.decode(file.read(FILE_BYTES), type=dict[str, float])
    except (OSError, msgspec.MsgspecError):
        return {}
    return {
        reason: found[reason]
        for reason in REASONS
        if reason in found and math.isfinite(found[reason])
    }


class PauseFlags:
    """Current reasons to pause, cached for `POLL_INTERVAL`."""

    def __init__(self, data_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._data_dir = data_dir
        self._clock = clock
        self._read_at = -math.inf
        self._reasons: tuple[str, ...] = ()

    def __call__(self) -> tuple[str, ...]:
        """Return the reasons in the order of `REASONS`; empty if the node may train."""
        now = self._clock()
        if now - self._read_at >= POLL_INTERVAL:
            self._read_at, self._reasons = now, tuple(read(self._data_dir))
        return self._reasons


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
