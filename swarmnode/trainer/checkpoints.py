"""Saves the state in the background, and keeps earlier states for a rollback.

    main thread      when a save is due, between two steps: acquire the optimizer's lock ─▶ continue
                     with the next step
    saver's thread   copy to host memory, release the lock ─▶ write, sync, rename ─▶ sometimes keep
                     the former state

Generation and backward passes continue during a save; only an optimizer step waits for the copy. A
crash loses everything after the last state that is *on disk*. Therefore a snapshot is taken one
step and one write before `save_every` seconds are over.

The bytes per day are bounded, because states of a large model would wear out a disk within weeks.
When the bound is reached, states are saved less often.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import structlog
import torch

from swarmnode.errors import StateError
from swarmnode.files import sync_directory
from swarmnode.swarm.rollback import DAMAGED, HISTORY
from swarmnode.trainer import state
from swarmnode.trainer.state import SEQUENCE_MARGIN, Counters, Snapshot

log = structlog.get_logger("swarmnode.trainer")

COMPLAIN_SECONDS = 30.0
"""Interval between log lines that the state cannot be saved."""
ALIVE_SECONDS = 1.0
"""Interval between progress reports during a wait."""
LONGEST_WRITE_SECONDS = 1800.0
"""Time after which a write counts as hung. It suffices for a hundred gigabytes on a slow disk."""
HISTORY_SECONDS = 900.0
"""Interval between two stored earlier states, in seconds."""
SLOTS, SPACING = 3, 4
"""Maximum number of earlier states, and the ratio between the age limits of two consecutive ones:
15 minutes, one hour, four hours."""
BYTES_PER_DAY = 10**12
"""Maximum number of bytes saved per day. A disk endures about 600 TB in total; 3 billion weights
with their moments, saved every minute, are 52 TB a day."""
DAY, AT_ONCE = 86400.0, 3600.0
"""Seconds. The bytes allowed for AT_ONCE may be written without delay, so that a small state
never reaches the bound."""


class Saver:
    """Writes one snapshot at a time in its own thread."""

    def __init__(
        self,
        directory: Path,
        history_seconds: float = HISTORY_SECONDS,
        saved_step: int = 0,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.saved_step = saved_step
        self.due_at: float | None = None
        """Unix time at which a save became due that is not on disk; None if none is due."""
        self.seconds = 0.0
        """Duration of the last write including the copy."""
        self.error: str | None = None
        """Error of the last write; None if it succeeded. Training continues in both cases."""
        self.written = 0
        """Bytes of all states."""
        self._directory = directory
        self._history_seconds = history_seconds
        self._on_end = on_end
        self._kept = 0
        self._kept_at = time.monotonic()
        self._condition = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="state", daemon=True)

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """True if a submitted snapshot would be written at once."""
        with self._condition:
            return self._snapshot is None

    def wait(self, alive: Callable[[], None] = lambda: None) -> None:
        """Wait until the saver is idle. `alive` is called regularly, but not longer than
        LONGEST_WRITE_SECONDS, because a disk may hang."""
        late = time.monotonic() + LONGEST_WRITE_SECONDS
        with self._condition:
            while not self._condition.wait_for(lambda: self._snapshot is None, ALIVE_SECONDS):
                if time.monotonic() < late:
                    alive()

    def submit(self, snapshot: Snapshot) -> None:
        """Write `snapshot` in the saver's thread. The saver must be idle."""
        with self._condition:
            self._snapshot = snapshot
            self._condition.notify_all()

    def close(self) -> None:
        """Stop the thread after it has written the submitted snapshot."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._snapshot is not None or self._closing)
                snapshot = self._snapshot
            if snapshot is None:
                return
            began = time.monotonic()
            try:
                state.write(self._directory, snapshot, self._keep)
                self.written += (self._directory / state.FILE).stat().st_size
                self.saved_step, self.error = snapshot.counters.step, None
                self.due_at = None
            except (OSError, RuntimeError, MemoryError, StateError) as error:
                # torch raises RuntimeError and MemoryError if the copy does not fit into memory.
                self.error = str(error)
                if "No space left" in self.error:
                    self._remove_history()
            self.seconds = time.monotonic() - began
            self._on_end()
            with self._condition:
                self._snapshot = None
                self._condition.notify_all()

    def _keep(self) -> None:
        """Keep the state that is about to be replaced, by a hard link, if the last kept state is
        old enough."""
        now = time.monotonic()
        if now - self._kept_at < self._history_seconds:
            return
        self._kept += 1
        self._kept_at = now
        slot = next(
            slot for slot in range(SLOTS) if slot == SLOTS - 1 or self._kept % SPACING ** (slot + 1)
        )
        history = self._directory / HISTORY
        try:
            history.mkdir(exist_ok=True, mode=0o700)
            kept = history / f"{slot}.safetensors"
            kept.unlink(missing_ok=True)
            os.link(self._directory / state.FILE, kept)
            sync_directory(history)
        except OSError as error:
            # For example a file system without hard links. The state itself is still saved.
            log.warning("cannot keep an earlier state", error=str(error))

    def _remove_history(self) -> None:
        """Delete earlier states, to make room for the next write of the present one."""
        (self._directory / DAMAGED).unlink(missing_ok=True)
        for kept in (self._directory / HISTORY).glob("*.safetensors"):
            kept.unlink(missing_ok=True)


class SnapshotSource(Protocol):
    """An engine whose state is saved."""

    def snapshot(self, rng: torch.Generator, counters: Counters) -> Snapshot: ...


class Checkpoints:
    """Saves the state every `save_every` seconds.

    Use it as a context manager. Its exit waits until the last snapshot is on disk.

    Args:
        counters: Counters of the state on disk, or those of a new policy.
        bytes_per_day: Maximum number of bytes saved per day.
        on_end: Called in the saver's thread after each write, whether it succeeded or failed.
    """

    def __init__(
        self,
        directory: Path,
        save_every: float,
        source: SnapshotSource,
        rng: torch.Generator,
        counters: Counters,
        bytes_per_day: float = BYTES_PER_DAY,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        history_seconds = max(HISTORY_SECONDS, save_every)
        self._saver = Saver(directory, history_seconds, counters.step, on_end)
        self._save_every = save_every
        self._bytes_per_second = bytes_per_day / DAY
        self._source = source
        self._rng = rng
        self._counters = counters
        self._taken_at = self._next_complaint = float("-inf")
        self._began = self._last_call = time.monotonic()
        self._taken_sequence = counters.sequence
        self._reported = False

    def __enter__(self) -> Self:
        self._saver.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._saver.close()

    @property
    def saved_step(self) -> int:
        return self._saver.saved_step

    @property
    def due_at(self) -> float | None:
        """Unix time at which a save became due that is not on disk; None if none is due."""
        return self._saver.due_at

    @property
    def error(self) -> str:
        """Error of the last write; empty if it succeeded."""
        return self._saver.error or ""

    @property
    def idle(self) -> bool:
        """True if every submitted snapshot is on disk."""
        return self._saver.idle

    def finish(self, alive: Callable[[], None]) -> None:
        """Save the state and wait until it is on disk. `alive` is called regularly."""
        self._saver.wait(alive)
        self.save(last=True)
        self._saver.wait(alive)

    def save(self, last: bool = False) -> None:
        """Submit a snapshot if a save is due and the disk is idle.

        A save is due if

        * the next opportunity, one step from now, plus a write would be later than `save_every`
          seconds after the last snapshot, but not before half of `save_every`, and no more than
          `bytes_per_day` has been saved; or
        * half of the group numbers that a restart skips are used up.

        Args:
            last: True to save the state in any case.
        """
        now = time.monotonic()
        if last:
            self._saver.wait()
        ahead = min(now - self._last_call + self._saver.seconds, self._save_every / 2)
        self._last_call = now
        due = now - self._taken_at + ahead >= self._save_every and self._may_write(now)
        due = due or self._counters.sequence - self._taken_sequence > SEQUENCE_MARGIN // 2
        if (last or due) and self._saver.due_at is None:
            self._saver.due_at = time.time()
        if last or (due and self.idle):
            self._taken_at, self._taken_sequence = now, self._counters.sequence
            self._saver.submit(self._source.snapshot(self._rng, self._counters))
        if self._saver.error and now >= self._next_complaint:
            log.error("state not saved", error=self._saver.error, saved_step=self._saver.saved_step)
            self._next_complaint = now + COMPLAIN_SECONDS

    def _may_write(self, now: float) -> bool:
        """Return False while more has been written than `bytes_per_day` allows; log it once."""
        if self._saver.written <= (now - self._began + AT_ONCE) * self._bytes_per_second:
            return True
        if not self._reported:
            self._reported = True
            log.warning(
                "the state is large, saving it less often to spare the disk",
                save_every=self._save_every,
                terabytes_a_day=round(self._bytes_per_second * DAY / 1e12, 1),
            )
        return False
