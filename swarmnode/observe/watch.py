"""Numbers that must be stored between two snapshots: step times, and reports of other processes.

All other numbers of a snapshot are read from their owners when it is taken.
"""

from __future__ import annotations

import shutil
from collections import deque
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
import psutil

from swarmnode.histogram import Histogram, HistogramCounter
from swarmnode.link.messages import Report

STEP_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of step times, in seconds."""
RECENT_STEPS = 10
RECENT_FIELDS = (
    "reward_own",
    "reward_external",
    "step_seconds",
    "tokens_per_second",
    "completion_cut_share",
    "cut_rewarded_share",
)
SUPERVISOR_FILE_BYTES = 2**16


class TrainerStatistics(msgspec.Struct, frozen=True):
    """State of the trainer as the network process knows it."""

    connected: bool = False
    report: Report | None = None
    """Last report of any age."""
    recent: dict[str, float] = {}
    """Means of RECENT_FIELDS of the report over the last RECENT_STEPS steps that measured them, and
    `interval_seconds`, the median time between two of these steps, with pauses and averaging."""
    age_seconds: float | None = None
    """Time since the last report: a finished step, an evaluation or a change of phase."""
    step_seconds: Histogram | None = None
    pid: int | None = None


class SupervisorStatistics(msgspec.Struct, frozen=True):
    """Content of `<data_dir>/run/supervisor.json`. Empty without a supervisor."""

    restarts: dict[str, int] = {}
    """Number by process: network, trainer."""
    stalls: dict[str, int] = {}
    """Restarts of a process that made no progress, by process."""
    down: dict[str, str] = {}
    """Reason why a process is down, from its end until its successor has loaded, by process."""
    loading: dict[str, str] = {}
    """Current activity of each process that is still loading, by process."""


class DiskStatistics(msgspec.Struct, frozen=True):
    """Space of a file system. None if it is unknown."""

    free_bytes: int | None = None
    """Available to this user."""
    total_bytes: int | None = None


class ProcessStatistics(msgspec.Struct, frozen=True):
    memory_bytes: int = 0
    """Resident memory."""
    cpu_seconds: float = 0.0
    """User and system time since the start of the process."""


class TrainerWatch:
    """Stores the trainer's reports. `now` is the time of any monotonic clock in seconds."""

    def __init__(self) -> None:
        self._report: Report | None = None
        self._reported_at = 0.0
        self._connected = False
        self._pid: int | None = None
        self._steps = HistogramCounter(STEP_BOUNDS)
        self._recent: deque[tuple[float, Report]] = deque(maxlen=RECENT_STEPS)
        """Time and report of the last steps."""

    @property
    def pid(self) -> int | None:
        """Process id of the trainer; None while none is connected."""
        return self._pid

    def connected(self, pid: int = 0) -> None:
        """Record that a trainer has connected. `pid` is 0 if unknown."""
        self._connected, self._pid = True, pid or None

    def disconnected(self) -> None:
        self._connected, self._pid = False, None

    def report(self, report: Report, now: float) -> None:
        """Store a report. Each step counts once for the step times, and again if a restored trainer
        repeats it."""
        before = self._report.step if self._report is not None else 0
        if report.step < before:
            self._recent.clear()
        if report.step > before and report.step_seconds is not None:
            self._steps.observe(report.step_seconds)
            self._recent.append((now, report))
        self._report, self._reported_at = report, now

    def statistics(self, now: float) -> TrainerStatistics:
        age = None if self._report is None else max(0.0, now - self._reported_at)
        measured = {
            name: [getattr(report, name) for _, report in self._recent] for name in RECENT_FIELDS
        }
        known = {name: [v for v in values if v is not None] for name, values in measured.items()}
        recent = {name: sum(values) / len(values) for name, values in known.items() if values}
        times = [at for at, _ in self._recent]
        if len(times) > 1:
            recent["interval_seconds"] = median(b - a for a, b in pairwise(times))
        return TrainerStatistics(
            self._connected, self._report, recent, age, self._steps.statistics(), self._pid
        )


class SupervisorWatch:
    """Reads `<data_dir>/run/supervisor.json`.

    If the file is missing or of another version, the last valid content stays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = SupervisorStatistics()

    def read(self) -> SupervisorStatistics:
        """Read the file again. Never raises."""
        try:
            with self._path.open("rb") as file:
                data = file.read(SUPERVISOR_FILE_BYTES)
            self._last = msgspec.json.decode(data, type=SupervisorStatistics)
        except (OSError, msgspec.MsgspecError):
            pass
        return self._last


def disk_use(directory: Path) -> DiskStatistics:
    """Return the space of the file system of `directory`. Never raises."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return DiskStatistics()
    return DiskStatistics(usage.free, usage.total)


def process_use(pids: dict[str, int | None]) -> dict[str, ProcessStatistics]:
    """Return memory and CPU use by process name, without processes that have ended."""
    found = {}
    for name, pid in pids.items():
        try:
            process = psutil.Process(pid) if pid else None
            if process is not None:
                with process.oneshot():
                    times = process.cpu_times()
                    found[name] = ProcessStatistics(
                        process.memory_info().rss, times.user + times.system
                    )
        except psutil.Error:
            continue
    return found
