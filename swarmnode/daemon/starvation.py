"""Time in which a silent process was starved: it waited for a processor or a disk, or the
supervisor itself did not run.

A node often runs at low priority (`nice`, a container's share) on a shared machine and disk.
Killing it for starvation only adds the work of a restart. Linux counts the wait for a processor per
thread (`/proc/PID/task/TID/schedstat`), and shows a wait for the disk as thread state D, in which
no signal ends the process anyway. On other systems neither is known and both count as zero.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

LOOK_SECONDS = 1.0
"""Interval between measurements of a process; each reads two files per thread."""
NANOSECOND = 1e-9


def processor_waits(pid: int) -> dict[int, float]:
    """Return the seconds that each thread of a process has waited for a processor since its start,
    by thread id. Empty if unavailable."""
    found = {}
    for thread in _threads(pid):
        try:
            _, waited, _ = (thread / "schedstat").read_text().split()
            found[int(thread.name)] = int(waited) * NANOSECOND
        except (OSError, ValueError):  # not Linux, or the thread has just ended
            continue
    return found


def waits_for_disk(pid: int) -> bool:
    """Return True if a thread of the process waits for a disk now."""
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
    """Starvation of one process, measured every `LOOK_SECONDS`. A gap of more than twice that means
    that the supervisor did not run. `now` is in seconds on any clock."""

    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self._mark: Hashable = None
        self._before = self._waits = processor_waits(pid)
        self._looked_at = now
        self._unobserved = 0.0

    def due(self, now: float) -> bool:
        return now >= self._looked_at + LOOK_SECONDS

    def since(self, mark: Hashable, now: float) -> float:
        """Return the seconds of starvation since `mark` changed, plus up to `LOOK_SECONDS` before.

        The result is the longest wait of a thread for a processor, plus the intervals in which a
        thread waited for a disk or the supervisor did not run.
        """
        if mark != self._mark:
            self._mark, self._before, self._unobserved = mark, self._waits, 0.0
        elapsed = now - self._looked_at
        if elapsed > 2 * LOOK_SECONDS or waits_for_disk(self._pid):
            self._unobserved += elapsed
        self._waits, self._looked_at = processor_waits(self._pid), now
        return self._unobserved + max(
            (waited - self._before.get(thread, 0.0) for thread, waited in self._waits.items()),
            default=0.0,
        )
