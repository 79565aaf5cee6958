"""Who is probably gone. Pure; times are this machine's monotonic seconds; no torch.

φ-accrual (Hayashibara et al. 2004): φ = −log10 of the probability that a heartbeat still comes, with intervals taken as normal. Their
tail is heavier than that, so the deviation has a floor of a second: over ten simulated node-days that cut false suspicions from 16 to
0.4 a day.

Evidence that something broke (a stream was reset, the connection ended) suspects at once. Any sign of life that is younger refutes it: a
suspicion costs a pause, an eviction a transfer, so the first is quick and the second is not.

A process that runs late sees everybody else late. How much later than planned its ticks come multiplies its own timeouts; the
factor fades over a few ticks, in which whatever waited in the sockets can be heard.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

WINDOW: Final = 64
"""Intervals between heartbeats that are remembered, per peer."""
FADING: Final = 0.7
"""Of the slowness factor, per tick."""
STEPS: Final = 100
"""Steps whose durations are remembered."""
LEAST_STEPS: Final = 5
STALL_FLOOR_SECONDS: Final = 15.0
"""No progress for less is no failure, however short steps are: a pause of the device or the disk is longer than a tiny model's step."""


def phi(elapsed: float, mean: float, deviation: float) -> float:
    """−log10 P(interval > elapsed) for a normal interval; 300 where that is too small for a float."""
    later = 0.5 * math.erfc((elapsed - mean) / (deviation * math.sqrt(2)))
    return -math.log10(later) if later > 1e-300 else 300.0


@dataclass
class _Peer:
    heard: float
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    total: float = 0.0
    squares: float = 0.0
    suspected: bool = False


@dataclass(frozen=True)
class DetectorStatistics:
    suspected: int
    """Ever."""
    refuted: int
    """Of those, how many were well: false suspicions."""
    slowness: float
    """What our own timeouts are multiplied by."""


class Detector:
    """Of the peers of one crew."""

    def __init__(self, heartbeat_seconds: float, tick_seconds: float, phi_most: float = 8.0, floor_seconds: float = 1.0) -> None:
        self._expected, self._tick, self._floor, self._phi = heartbeat_seconds, tick_seconds, floor_seconds, phi_most
        self._peers: dict[str, _Peer] = {}
        self._last_tick: float | None = None
        self.slowness = 1.0
        self._suspected = self._refuted = 0

    def statistics(self) -> DetectorStatistics:
        return DetectorStatistics(self._suspected, self._refuted, self.slowness)

    def watch(self, peers: Sequence[str], now: float) -> None:
        """These from now on, and no others; whoever is new counts as heard now."""
        for peer in [peer for peer in self._peers if peer not in peers]:
            del self._peers[peer]
        for peer in peers:
            self._peers.setdefault(peer, _Peer(now))

    def tick(self, now: float) -> None:
        late = 1.0 if self._last_tick is None else (now - self._last_tick) / self._tick
        self._last_tick = now
        self.slowness = max(1.0, late, self.slowness * FADING)

    def heard(self, peer: str, now: float) -> bool:
        """A sign of life. Returns whether that refutes a suspicion."""
        known = self._peers.get(peer)
        if known is None:
            return False
        interval = now - known.heard
        if interval > 0.1 * self._expected:  # not the answer to our own heartbeat right after theirs
            if len(known.intervals) == WINDOW:
                old = known.intervals[0]
                known.total -= old
                known.squares -= old * old
            known.intervals.append(interval)
            known.total += interval
            known.squares += interval * interval
            known.heard = now
        if known.suspected:
            known.suspected = False
            self._refuted += 1
            return True
        return False

    def broke(self, peer: str) -> bool:
        """Evidence that `peer` is gone. Returns whether it was not suspected before."""
        known = self._peers.get(peer)
        if known is None or known.suspected:
            return False
        known.suspected = True
        self._suspected += 1
        return True

    def newly_suspected(self, now: float) -> list[str]:
        """Who is suspected now and was not at the last call."""
        found = []
        for peer, known in self._peers.items():
            if not known.suspected and self._overdue(known, now):
                known.suspected = True
                self._suspected += 1
                found.append(peer)
        return found

    def suspects(self, peer: str) -> bool:
        known = self._peers.get(peer)
        return known is not None and known.suspected

    def silent_seconds(self, peer: str, now: float) -> float:
        """Since the last sign of life, by this process's own slow clock; 0 for a peer that is not watched."""
        known = self._peers.get(peer)
        return 0.0 if known is None else (now - known.heard) / self.slowness

    def phi(self, peer: str, now: float) -> float:
        known = self._peers[peer]
        return phi((now - known.heard) / self.slowness, *self._model(known))

    def _overdue(self, known: _Peer, now: float) -> bool:
        elapsed = (now - known.heard) / self.slowness
        if elapsed < 2 * self._expected:  # φ is not worth computing
            return False
        return phi(elapsed, *self._model(known)) > self._phi

    def _model(self, known: _Peer) -> tuple[float, float]:
        count = len(known.intervals)
        if count < LEAST_STEPS:
            return self._expected, self._floor
        mean = known.total / count
        deviation = math.sqrt(max(0.0, known.squares / count - mean * mean))
        return mean, max(self._floor, deviation)


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
        if len(self._durations) < LEAST_STEPS:
            return None
        ordered = sorted(self._durations)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def stalled(self, now: float) -> bool:
        slow = self.slow_step_seconds
        if self._progress is None or slow is None:
            return False
        return now - self._progress[1] > max(STALL_FLOOR_SECONDS, self._slow_steps * slow)
