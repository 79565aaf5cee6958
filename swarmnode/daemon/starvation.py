"""What a silent process could not help: it wanted a processor and had none, it waited for a disk,
or nobody listened.

A node often runs at the end of a queue (`nice`, a container's share) on a machine that others use,
and on one disk with them. Ended for that, it only has more to do: all that a start takes. Linux
counts the first for each thread (`/proc/PID/task/TID/schedstat`) and shows the second as a thread's
state D, which no signal ends anyway. Elsewhere neither is known, and neither counts.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

LOOK_SECONDS = 1.0
"""Between two looks at a process: two files for each of its threads."""
NANOSECOND = 1e-9


def processor_waits(pid: int) -> dict[int, float]:
    """Seconds that each thread of a process has waited for a processor since it began, by thread
    id. Empty where that cannot be had."""
    found = {}
    for thread in _threads(pid):
        try:
            _, waited, _ = (thread / "schedstat").read_text().split()
            found[int(thread.name)] = int(waited) * NANOSECOND
        except (OSError, ValueError):  # no such system, or it ended just now
            continue
    return found


def waits_for_a_disk(pid: int) -> bool:
    """Whether a thread of it does at this moment."""
    for thread in _threads(pid):
        try:
            if (thread / "stat").read_text().rpartition(")")[2].split()[0] == "D":
                return True
        except (OSError, IndexError):
            continue
    return False


def _threads(pid: int) -> list[Path]:
    try:
        return list((Path("/proc") / str(pid) / "task").iterdir())
    except OSError:
        return []


class Starvation:
    """Follows one process by a look every `LOOK_SECONDS`. If the next comes after twice that,
    nobody looked. now: seconds of any clock."""

    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self._mark: Hashable = None
        self._before = self._waits = processor_waits(pid)
        self._looked_at = now
        self._unheard = 0.0

    def due(self, now: float) -> bool:
        return now >= self._looked_at + LOOK_SECONDS

    def since(self, mark: Hashable, now: float) -> float:
        """Seconds since `mark` changed in which the process could not help being silent, and up to
        `LOOK_SECONDS` of those before.

        The longest wait of a thread for a processor, with the looks at which one waited for a disk
        and the time in which nobody looked.
        """
        if mark != self._mark:
            self._mark, self._before, self._unheard = mark, self._waits, 0.0
        elapsed = now - self._looked_at
        if elapsed > 2 * LOOK_SECONDS or waits_for_a_disk(self._pid):
            self._unheard += elapsed
        self._waits, self._looked_at = processor_waits(self._pid), now
        return self._unheard + max(
            (waited - self._before.get(thread, 0.0) for thread, waited in self._waits.items()),
            default=0.0,
        )
