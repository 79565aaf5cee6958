"""What the machine does beside this node, and when that means rest. The rule is pure; the two
readings are psutil's.

There is no library that says on every system whether somebody sits at the keyboard. Measured is
what other programs take of the processors: a compiler, a game, a video call show in it, a program
that uses the graphics card alone does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import psutil

SMOOTH_SECONDS = 60.0
"""What others take is averaged over about so long: opening a web page is no reason to rest."""
CALM_SECONDS = 300.0
"""The node rests for so long after others last took too much."""


@dataclass(frozen=True)
class Rules:
    """When to rest for the machine's sake (node.rest_on_battery, node.rest_above_load)."""

    on_battery: bool = False
    above_load: float = 0.0
    """Share of all processors, 0 to 1; 0 is never."""


@dataclass(frozen=True)
class Load:
    """What other programs take, as far as it matters here."""

    mean: float = 0.0
    at: float | None = None
    """When it was last looked at."""
    busy_until: float = -math.inf


def observed(load: Load, share: float, limit: float, now: float) -> Load:
    """After other programs took `share` of all processors since the last look. `now`: seconds of
    any clock that only goes on."""
    if load.at is None:
        return replace(load, at=now)
    mean = load.mean + (1 - math.exp(-(now - load.at) / SMOOTH_SECONDS)) * (share - load.mean)
    return Load(mean, now, now + CALM_SECONDS if mean > limit else load.busy_until)


class Machine:
    """Reads the machine. Nothing here raises: what cannot be measured is no reason to rest."""

    def __init__(self) -> None:
        self._taken = 0.0
        self._own: dict[int, float] = {}
        self._at: float | None = None

    def on_battery(self) -> bool:
        """Whether there is a battery, and nothing charges it."""
        try:
            battery = psutil.sensors_battery()
        except (AttributeError, OSError, RuntimeError, psutil.Error):
            # no such thing on this system, or not to be read
            return False
        return battery is not None and battery.power_plugged is False

    def load_of_others(self, now: float) -> float:
        """Share of all processors that programs other than this process and its children took since
        the last call; 0 at the first."""
        try:
            own, taken = _own_seconds(), _busy_seconds()
        except (OSError, psutil.Error):
            return 0.0
        ours = sum(seconds - self._own.get(pid, 0.0) for pid, seconds in own.items())
        elapsed = now - self._at if self._at is not None else 0.0
        others = (
            (taken - self._taken - ours) / (elapsed * (psutil.cpu_count() or 1))
            if elapsed > 0
            else 0.0
        )
        self._taken, self._own, self._at = taken, own, now
        return min(1.0, max(0.0, others))


def _busy_seconds() -> float:
    """Since the machine started, all processors together. Time of guests is part of `user`
    already."""
    times = psutil.cpu_times()
    return float(
        sum(
            getattr(times, name, 0.0)
            for name in ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc", "steal")
        )
    )


def _own_seconds() -> dict[int, float]:
    found = {}
    us = psutil.Process()
    for process in [us, *us.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended just now
            continue
        found[process.pid] = times.user + times.system
    return found
