"""The failure detector: which members are probably gone. Pure; times are this machine's monotonic
seconds; no torch.

φ-accrual (Hayashibara et al. 2004): φ = −log10 of the probability that a heartbeat still comes,
with intervals taken as normal. Their tail is heavier than that, so the deviation has a floor of a
second: over ten simulated node-days that cut false suspicions from 16 to 0.4 a day.

Evidence that something broke (a stream was reset, the connection ended) suspects at once. Any sign
of life that is younger refutes it: a suspicion costs a pause, giving somebody up costs a founding,
so the first is quick and the second is not.

A process that runs late sees everybody else late. How much later than planned its ticks come
multiplies its own timeouts; the factor fades over a few ticks, in which whatever waited in the
sockets can be heard.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import msgspec
from msgspec.structs import replace

EXPECTED_SECONDS: Final = 1.0
"""Between two heartbeats."""
FLOOR_SECONDS: Final = 1.0
PHI: Final = 8.0
WEIGHT: Final = 1 / 32
"""The newest interval's share of the running mean."""
FADING: Final = 0.7
"""The share of the slowness factor that is left after a tick."""
HEARD_SECONDS: Final = 60.0
"""A member of which bytes come is taken to be alive for so long after its last heartbeat."""
STEPS: Final = 100
"""Steps whose durations are remembered."""
LEAST: Final = 5
"""Intervals, or steps, below which nothing is known."""
STALL_FLOOR_SECONDS: Final = 15.0
"""No progress for less is no failure, however short steps are: a pause of the device or the disk is
longer than a tiny model's step."""


def phi(elapsed: float, mean: float, deviation: float) -> float:
    """−log10 P(interval > elapsed) for a normal interval; 300 where that is too small for a
    float."""
    later = 0.5 * math.erfc((elapsed - mean) / (deviation * math.sqrt(2)))
    return -math.log10(later) if later > 1e-300 else 300.0


class Signs(msgspec.Struct, frozen=True):
    """Signs of life of one peer."""

    last_seen: float
    """When its last heartbeat came, or its answer to ours."""
    last_heard: float = -math.inf
    """When bytes of any kind last came from it: a line that tensors fill holds a heartbeat up for
    seconds, and they are there meanwhile."""
    count: int = 0
    mean: float = EXPECTED_SECONDS
    variance: float = 0.0
    suspected: bool = False
    gone_since: float | None = None
    """When its last connection ended; None while there is one."""

    def seen(self, now: float) -> Signs:
        """A sign of life, which refutes a suspicion."""
        interval = now - self.last_seen
        if interval <= 0.1 * EXPECTED_SECONDS:  # the answer to our own heartbeat right after theirs
            return replace(self, suspected=False)
        weight = max(WEIGHT, 1 / (self.count + 1))
        off = interval - self.mean
        mean, variance = (
            self.mean + weight * off,
            (1 - weight) * (self.variance + weight * off * off),
        )
        return replace(
            self, last_seen=now, count=self.count + 1, mean=mean, variance=variance, suspected=False
        )

    def heard(self, at: float) -> Signs:
        """Bytes came."""
        if at <= self.last_heard:
            return self
        return replace(
            self,
            last_heard=at,
            gone_since=None
            if self.gone_since is not None and at > self.gone_since
            else self.gone_since,
        )

    def silent_seconds(self, now: float, slowness: float) -> float:
        """Seconds since the last sign of life, by this process's own slow clock. Who sends no
        heartbeat is not believed for ever."""
        return (
            now - max(self.last_seen, min(self.last_heard, self.last_seen + HEARD_SECONDS))
        ) / slowness

    def overdue(self, now: float, slowness: float) -> bool:
        elapsed = self.silent_seconds(now, slowness)
        if elapsed < 2 * EXPECTED_SECONDS:  # φ is not worth computing
            return False
        known = self.count >= LEAST
        mean, deviation = (
            (self.mean, max(FLOOR_SECONDS, math.sqrt(self.variance)))
            if known
            else (EXPECTED_SECONDS, FLOOR_SECONDS)
        )
        return phi(elapsed, mean, deviation) > PHI


def slowness_at(before: float, last_tick: float | None, now: float, tick_seconds: float) -> float:
    """What our own timeouts are multiplied by, after a tick."""
    late = 1.0 if last_tick is None else (now - last_tick) / tick_seconds
    return max(1.0, late, before * FADING)


class Progress:
    """Whether a trainer with work in hand does any of it."""

    def __init__(self, slow_steps: float) -> None:
        self._slow_steps = slow_steps
        self._durations: deque[float] = deque(maxlen=STEPS)
        self._step: tuple[int, float] | None = None
        self._progress: tuple[int, float] | None = None

    def restart(self) -> None:
        """The time until now belongs to no step."""
        self._step = self._progress = None

    def report(self, step: int, progress: int, load: int, now: float) -> None:
        if self._step is None or step < self._step[0]:
            self._step = (step, now)
        elif step > self._step[0]:
            self._durations.append((now - self._step[1]) / (step - self._step[0]))
            self._step = (step, now)
        if self._progress is None or progress != self._progress[0] or load == 0:
            self._progress = (progress, now)

    @property
    def slow_step_seconds(self) -> float | None:
        """99th percentile of the last steps; None while they are too few."""
        if len(self._durations) < LEAST:
            return None
        ordered = sorted(self._durations)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def stalled(self, now: float) -> bool:
        slow = self.slow_step_seconds
        if self._progress is None or slow is None:
            return False
        return now - self._progress[1] > max(STALL_FLOOR_SECONDS, self._slow_steps * slow)
