"""Decides when a child process is stalled, when to restart it, and when to give up. Pure: no clock,
no process.

    started ──past loading──▶ running ──no progress──▶ stalled (killed by the caller)
       │                          │                        │
       └────────── exited ◀───────┴────────────────────────┘ ──▶ Restart(after) | End(exit code)
"""

from __future__ import annotations

import math
import random
import re
import signal
from collections import deque
from dataclasses import dataclass

from swarmnode.errors import Unavailable
from swarmnode.process import RESTART_CODE

DEFECT = 70
"""Exit code of a node whose process fails with the same exception at every start."""
FINAL_CODES = frozenset({2, DEFECT, 77, 78})
"""Exit codes that a restart cannot fix: usage, a defect, refused, configuration."""
START_CODES = frozenset({69, 75})
"""Exit codes that end the node if the process never worked: a port in use, a model that does not
fit."""
LOADING = "loading"
"""A status with this prefix is progress, but not yet work."""
SAVING = "draining"
"""Status of a process that was asked to stop, has finished its step, and saves."""
BACKOFF_SECONDS = 0.5
"""First pause before a restart, long enough for a port to become free. It doubles, with jitter, up
to the cap."""
BACKOFF_CAP_SECONDS = 60.0
CRASH_WINDOW_SECONDS = 300.0
"""Crashes further apart than this are assumed to have different causes."""
CRASH_LIMIT = 6
"""Number of crashes within the window that end the node: five restarts with growing pauses have not
helped."""
IDENTICAL_LIMIT = 3
"""Number of consecutive crashes by the same exception that end the node."""
STALL_FLOOR_SECONDS = 60.0
"""Minimum time without progress before a process counts as stalled. Progress is reported per
decoding step, and load bursts of other programs are shorter."""
STARTUP_SECONDS = 600.0
"""Longest time to the first progress of a process, and between two reports of progress while a
model is loaded. A slow disk reads a model of 30 GB in five minutes."""
DRAIN_SECONDS = 20.0
"""Time to stop after the first SIGTERM, in addition to that of the present step."""
STEPS_REMEMBERED = 256


@dataclass(frozen=True)
class Restart:
    """Restart the process after a pause."""

    after_seconds: float


@dataclass(frozen=True)
class EndNode:
    """End the node with an exit code."""

    exit_code: int
    reason: str


class CrashBreaker:
    """Decides after each crash how long to wait, and when to give up. `rng` is for the jitter of
    the back-off."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._crashes: deque[float] = deque()
        self._failures_in_a_row = 0

    def crashed(self, name: str, now: float, ran_seconds: float) -> Restart | EndNode:
        """Return the action after a crash of the process `name`, which ran for `ran_seconds`."""
        self._crashes.append(now)
        while self._crashes[0] <= now - CRASH_WINDOW_SECONDS:
            self._crashes.popleft()
        if len(self._crashes) >= CRASH_LIMIT:
            return EndNode(
                75, f"{name} ended {len(self._crashes)} times within {CRASH_WINDOW_SECONDS:.0f} s"
            )
        if ran_seconds > BACKOFF_CAP_SECONDS:
            self._failures_in_a_row = 0
        pause = min(BACKOFF_CAP_SECONDS, BACKOFF_SECONDS * 2**self._failures_in_a_row)
        self._failures_in_a_row += 1
        return Restart(pause * self._rng.uniform(0.5, 1.0))


class Watchdog:
    """Monitors one child process. The caller reports events and executes the decisions.

    Args:
        name: name of the process for messages.
        rng: random source for the jitter of the back-off.
    """

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self._breaker = CrashBreaker(rng)
        self._started_at = 0.0
        self._last_progress: float | None = None
        self._ever_ran = False
        self.past_loading = False
        """True once the present process works."""
        self._step_seconds: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self.restarts = 0
        self.stalls = 0
        self.status = "starting"
        self._cause, self._identical_crashes = "", 0
        """Exception of the last process, and the number of consecutive processes that it ended."""
        self._stepped = False

    def started(self, now: float) -> None:
        """Record the start of the process."""
        self._started_at = now
        self._last_progress = None
        self.past_loading = False
        self._stepped = False

    def progressed(self, now: float, step_seconds: float | None, status: str) -> None:
        """Record progress, the duration of a finished step (or None) and the status."""
        if not status.startswith(LOADING):
            self._ever_ran = self.past_loading = True
        if step_seconds is not None and math.isfinite(step_seconds):
            self._step_seconds.append(step_seconds)
            self._stepped = True
        self._last_progress = now
        self.status = status

    def deadline(self) -> float:
        """Return the time at which the process counts as stalled without further progress."""
        if self._last_progress is None:
            return self._started_at + STARTUP_SECONDS
        return self._last_progress + self._stall_seconds()

    def _stall_seconds(self) -> float:
        # step times of an earlier process do not apply to loading
        loads = not self.past_loading or not self._step_seconds
        if loads and self.status.startswith(LOADING):
            return STARTUP_SECONDS
        return max(STALL_FLOOR_SECONDS, 4 * self._p99_step_seconds())

    def drain_deadline(self, asked_at: float) -> float:
        """Return the time by which a process that was asked to stop at `asked_at` must have ended:
        DRAIN_SECONDS plus a long step. A process that saves its state may continue while it makes
        progress, because killing it would lose everything learnt since the last save."""
        patience = asked_at + DRAIN_SECONDS + 4 * self._p99_step_seconds()
        return max(patience, self.deadline()) if self.status == SAVING else patience

    def stalled(self) -> None:
        """Record a stall: the deadline passed and the caller kills the process; `exited`
        follows."""
        self.stalls += 1

    def exited(self, now: float, exit_code: int, cause: str = "") -> Restart | EndNode:
        """Return the action after an unexpected exit.

        Args:
            now: time in seconds.
            exit_code: negative for a signal.
            cause: the exception that ended the process; empty if unknown.
        """
        self.status = "down"
        if exit_code == 0:
            return EndNode(0, f"{self.name} finished")
        if exit_code == RESTART_CODE and self.past_loading:
            self.restarts += 1
            return Restart(0.0)
        if exit_code in FINAL_CODES or (exit_code in START_CODES and not self._ever_ran):
            return EndNode(exit_code, f"{self.name} cannot run")
        if exit_code == -signal.SIGILL:  # the processor is the same at every start
            return EndNode(Unavailable.exit_code, f"{self.name} cannot run")
        if self._repeats(now - self._started_at, exit_code, cause):
            code = exit_code if exit_code in START_CODES else DEFECT
            return EndNode(
                code, f"{self.name} ended {self._identical_crashes} times by the same error"
            )
        verdict = self._breaker.crashed(self.name, now, now - self._started_at)
        self.restarts += isinstance(verdict, Restart)
        return verdict

    def _repeats(self, ran_seconds: float, exit_code: int, cause: str) -> bool:
        """Return True if the same exception has ended enough consecutive processes. The count
        restarts after a process that took steps for minutes. Exit code 75 is exempt, because a
        device may come back."""
        # sizes and addresses differ between runs
        cause = re.sub(r"0x[0-9a-f]+|\d+", "#", cause) if exit_code > 0 and exit_code != 75 else ""
        worked = self._stepped and ran_seconds > CRASH_WINDOW_SECONDS
        self._identical_crashes = (
            self._identical_crashes + 1 if cause and cause == self._cause and not worked else 1
        )
        self._cause = cause
        return bool(cause) and self._identical_crashes >= IDENTICAL_LIMIT

    def _p99_step_seconds(self) -> float:
        if not self._step_seconds:
            return 0.0
        ordered = sorted(self._step_seconds)
        return ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
