"""Load of other programs and battery state, for `node.rest_when`.

No portable idle-user detection exists. Measured is the processor time of other programs: a
compiler, a game or a video call is visible, a program that uses only the graphics card is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import psutil

SMOOTH_SECONDS = 60.0
"""Time constant of the average load: a short peak does not pause the node."""
CALM_SECONDS = 300.0
"""Duration of a pause after the load was last too high."""
LOAD_LIMIT = 0.25
"""Average load of other programs, as a share of all processors, above which a node pauses."""


@dataclass(frozen=True)
class LoadAverage:
    """Average load of other programs."""

    mean: float = 0.0
    at: float | None = None
    """Time of the last measurement."""
    busy_until: float = -math.inf


def update_load(load: LoadAverage, share: float, now: float) -> LoadAverage:
    """Update the average with `share`, the load of other programs since the last measurement. `now`
    is monotonic time in seconds."""
    if load.at is None:
        return LoadAverage(at=now)
    mean = load.mean + (1 - math.exp(-(now - load.at) / SMOOTH_SECONDS)) * (share - load.mean)
    return LoadAverage(mean, now, now + CALM_SECONDS if mean > LOAD_LIMIT else load.busy_until)


class Machine:
    """Measures the machine. Never raises; a failed measurement does not pause the node."""

    def __init__(self) -> None:
        self._taken = 0.0
        self._own: dict[int, float] = {}
        self._at: float | None = None

    def on_battery(self) -> bool:
        """Return True if there is a battery and it is not charging."""
        try:
            battery = psutil.sensors_battery()
        except (AttributeError, OSError, RuntimeError, psutil.Error):
            # not available on this system, or not readable
            return False
        return battery is not None and battery.power_plugged is False

    def load_of_others(self, now: float) -> float:
        """Return the share of all processors that other programs used since the last call; 0 at the
        first call. This process and its children are excluded."""
        try:
            own, taken = _own_seconds(), _busy_seconds()
        except (OSError, psutil.Error):
            return 0.0
        own_seconds = sum(seconds - self._own.get(pid, 0.0) for pid, seconds in own.items())
        elapsed = now - self._at if self._at is not None else 0.0
        others = (
            (taken - self._taken - own_seconds) / (elapsed * (psutil.cpu_count() or 1))
            if elapsed > 0
            else 0.0
        )
        self._taken, self._own, self._at = taken, own, now
        return min(1.0, max(0.0, others))


def _busy_seconds() -> float:
    """Return the busy seconds of all processors since boot. `user` already includes guest time."""
    times = psutil.cpu_times()
    return float(
        sum(
            getattr(times, name, 0.0)
            for name in ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc", "steal")
        )
    )


def _own_seconds() -> dict[int, float]:
    found = {}
    this_process = psutil.Process()
    for process in [this_process, *this_process.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        found[process.pid] = times.user + times.system
    return found
