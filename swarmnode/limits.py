"""Limits of this process from the kernel: the memory, processors and processes that its control
groups leave, in versions 1 and 2.

A container has the host's /proc/meminfo and processors. Its limits are those of its control group
and of all groups above.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePath

import psutil

PROC = Path("/proc/self")
NODE_TASKS = 24
"""Processes and threads of a node in addition to its computing threads: the supervisor, the network
process, the trainer, their scorers, and threads that wait."""


def available_memory(proc: Path | None = None) -> int:
    """Return the host memory in bytes that this process can still allocate: the minimum of the
    kernel's estimate and of what each control group leaves. Cached files count as free."""
    free = [psutil.virtual_memory().available]
    for group in _groups("memory", proc or PROC):
        is_v2 = (group / "memory.max").exists()
        names = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
        # Above `memory.high` the kernel stalls a group instead of killing it.
        limits = [found for name in names if (found := _number(group / name)) is not None]
        used = _number(group / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if not limits or used is None:
            continue
        prefix = "" if is_v2 else "total_"
        statistics = dict(line.split() for line in _read(group / "memory.stat").splitlines())
        cached = sum(
            int(statistics.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive")
        )
        free.append(max(0, min(limits) - max(0, used - cached)))
    return min(free)


def processors(proc: Path | None = None) -> int:
    """Return the number of processors that this process may use, from its affinity and from the
    quotas of its control groups, rounded up."""
    affinity = getattr(os, "sched_getaffinity", None)
    counts = [len(affinity(0)) if affinity else os.cpu_count() or 1]
    for group in _groups("cpu", proc or PROC):
        if (group / "cpu.max").exists():
            quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        else:
            quota = _read(group / "cpu.cfs_quota_us").strip()
            period = _read(group / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            counts.append(max(1, math.ceil(int(quota) / int(period))))
    return min(counts)


def missing_tasks(proc: Path | None = None) -> str:
    """Return a line with the remedy if a control group leaves too few processes and threads for a
    node; empty if not."""
    need = NODE_TASKS + processors(proc)
    for group in _groups("pids", proc or PROC):
        limit, used = _number(group / "pids.max"), _number(group / "pids.current")
        if limit is not None and used is not None and limit - used < need:
            return (
                f"the control group allows {limit} processes and threads (pids.max), {used} exist,"
                f" and a node needs about {need}: raise the limit (docker: --pids-limit, systemd:"
                " TasksMax)"
            )
    return ""


def _groups(controller: str, proc: Path) -> Iterator[Path]:
    """Yield the directories of the control groups of this process that limit a resource, from its
    own group to the topmost visible one."""
    for line in _read(proc / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for root, mount in _mounts(controller if controllers else "", proc):
            # Without a namespace of its own, a container has the host's path and a mount of its own
            # group.
            is_below = PurePath(path).is_relative_to(root) and ".." not in PurePath(path).parts
            group = mount / PurePath(path).relative_to(root) if is_below else mount
            if not group.is_dir():
                group = mount
            while group != mount:
                yield group
                group = group.parent
            yield mount


def _mounts(controller: str, proc: Path) -> Iterator[tuple[str, Path]]:
    """Yield (group at the mount's root, directory) of each mount of a hierarchy.

    Args:
        controller: A controller of version 1; empty for version 2.
    """
    for line in _read(proc / "mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        _, _, _, root, directory, *_ = place.split()
        name, _, options = kind.split(" ", 2)
        is_wanted = controller in options.split(",") if controller else True
        if name == ("cgroup" if controller else "cgroup2") and is_wanted:
            yield root, Path(directory)


def _read(path: Path) -> str:
    """Return the content of a file; empty if it does not exist, such as outside Linux."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """Return the number in a file; None for `max` or without the file."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None
