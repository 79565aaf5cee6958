"""Why a node rests though it could train, and the file by which the supervisor tells the node's
other processes.

    owner      `swarmnode pause`, until `swarmnode resume`; kept over restarts of the node
    battery    the machine runs on its battery                    (node.rest_on_battery)
    busy       other programs want the machine's processors       (node.rest_above_load)

Quiet hours, the part of a day in which a node leaves machine and line to its owner, are not among
them: each process knows the time.
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
"""Between two readings of the file."""
DAY_MINUTES = 24 * 60


def write(data_dir: Path, since: Mapping[str, float]) -> None:
    """Say why the node rests: reason of REASONS → since when, in Unix seconds. Raises OSError: a
    full disk."""
    write_atomically(data_dir / FILE, msgspec.json.encode(dict(since)))


def read(data_dir: Path) -> dict[str, float]:
    """What was written; empty where nothing was, or what is there is none of ours. Never raises."""
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
    """Reasons for which this node rests, as the supervisor says them. Call it as often as you
    like."""

    def __init__(self, data_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._data_dir = data_dir
        self._clock = clock
        self._read_at = -math.inf
        self._reasons: tuple[str, ...] = ()

    def __call__(self) -> tuple[str, ...]:
        """In the order of REASONS; none while the node may train."""
        now = self._clock()
        if now - self._read_at >= POLL_INTERVAL:
            self._read_at, self._reasons = now, tuple(read(self._data_dir))
        return self._reasons


def is_quiet(hours: str, minute: int) -> bool:
    """Whether `minute` (of the local day, 0 to 1439) lies in `hours`, "22:00-07:00"; the end is no
    longer part of it. Empty is never.

    Equal ends mean the whole day: whoever writes "00:00-00:00" wants no work at all.
    """
    if not hours:
        return False
    start, end = (_minute(text) for text in hours.split("-"))
    return (minute - start) % DAY_MINUTES < ((end - start) % DAY_MINUTES or DAY_MINUTES)


def _minute(text: str) -> int:
    hour, minute = text.split(":")
    return int(hour) * 60 + int(minute)
