"""The few numbers that must be kept between two scrapes: histograms, and the age of what other
processes told us.

Everything else in a snapshot is read from its owner at the moment of asking.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import psutil

from swarmnode.histogram import Histogram, HistogramCounter
from swarmnode.link.messages import Report

STEP_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds. From the embedded policy on a CPU to a large model on a slow card."""
SUPERVISOR_FILE_BYTES = 2**16


class TrainerStatistics(msgspec.Struct, frozen=True):
    """The trainer as seen over the link."""

    connected: bool = False
    report: Report | None = None
    """Its last report, however old."""
    age_seconds: float | None = None
    """Since the last report: a finished step, an evaluation or a change of phase."""
    step_seconds: Histogram | None = None
    pid: int | None = None


class SupervisorStatistics(msgspec.Struct, frozen=True):
    """Read from `<data_dir>/run/supervisor.json`. Empty when the node runs without a supervisor."""

    restarts: dict[str, int] = {}
    """By process: network, trainer."""
    stalls: dict[str, int] = {}
    """Restarts because a process made no progress, by process."""
    down: dict[str, str] = {}
    """Why a process is not at work: by process, from its end until the next one is past loading."""


class DiskStatistics(msgspec.Struct, frozen=True):
    """Room on a file system. None where it cannot be asked."""

    free_bytes: int | None = None
    """For this user."""
    total_bytes: int | None = None


class ProcessStatistics(msgspec.Struct, frozen=True):
    memory_bytes: int = 0
    """Resident."""
    cpu_seconds: float = 0.0
    """User and system, since the process started."""


class TrainerWatch:
    """Follows the trainer's reports. `now` is any monotonic clock, seconds."""

    def __init__(self) -> None:
        self._report: Report | None = None
        self._reported_at = 0.0
        self._connected = False
        self._pid: int | None = None
        self._steps = HistogramCounter(STEP_BOUNDS)

    @property
    def pid(self) -> int | None:
        """None while no trainer is connected."""
        return self._pid

    def connected(self, pid: int = 0) -> None:
        """A trainer has said hello. `pid`: 0 where it is not known."""
        self._connected, self._pid = True, pid or None

    def disconnected(self) -> None:
        self._connected, self._pid = False, None

    def report(self, report: Report, now: float) -> None:
        """Take over a report. A step is observed once, however often it is mentioned; one that a
        restored trainer repeats, again."""
        before = self._report.step if self._report is not None else 0
        if report.step > before and report.step_seconds is not None:
            self._steps.observe(report.step_seconds)
        self._report, self._reported_at = report, now

    def statistics(self, now: float) -> TrainerStatistics:
        age = None if self._report is None else max(0.0, now - self._reported_at)
        return TrainerStatistics(
            self._connected, self._report, age, self._steps.statistics(), self._pid
        )


class SupervisedProcess(msgspec.Struct, frozen=True):
    restarts: int = 0
    stalls: int = 0
    down: str = ""
    """Why it is not at work; empty while it is, and before its first start."""


class SupervisorFile(msgspec.Struct, frozen=True):
    """What the supervisor writes; fields it adds later are none of our business."""

    processes: dict[str, SupervisedProcess] = {}


class SupervisorWatch:
    """Reads `<data_dir>/run/supervisor.json` and makes a histogram that only grows out of its
    bounded lists.

    The file is our own, but it may be absent, or from another version: then the last view stays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = SupervisorFile()

    def read(self) -> SupervisorStatistics:
        """Read the file again. Never raises for what is or is not in it."""
        try:
            with self._path.open("rb") as file:
                told = msgspec.json.decode(file.read(SUPERVISOR_FILE_BYTES), type=SupervisorFile)
        except (OSError, msgspec.MsgspecError):
            return self.statistics()
        self._file = told
        return self.statistics()

    def statistics(self) -> SupervisorStatistics:
        processes = self._file.processes.items()
        return SupervisorStatistics(
            restarts={name: process.restarts for name, process in processes},
            stalls={name: process.stalls for name, process in processes},
            down={name: process.down for name, process in processes if process.down},
        )


def disk_use(directory: Path) -> DiskStatistics:
    """Room where `directory` lies. Never raises."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return DiskStatistics()
    return DiskStatistics(usage.free, usage.total)


def process_use(pids: dict[str, int | None]) -> dict[str, ProcessStatistics]:
    """Memory and CPU by process name. A process that is gone is left out."""
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
