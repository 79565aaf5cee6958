"""When the state is saved, off the training's path, and which older states are kept to go back to.

    main thread      in time, between two steps: hold the optimizer's lock ─▶ go on with the next
    step
    saver's thread   copy to host memory, let go of the lock ─▶ write, sync, rename ─▶ now and then
    keep a former state

Generation and backward passes go on meanwhile; only an optimizer step waits for the copy, which is
as long as copying memory takes. A crash loses what came after the last state that is *on disk*, so
one is taken a step and a write before `save_every` seconds are over.

Whole states have a bound by the day, because they would wear a disk out within weeks: where one is
due and the bound is reached, weights and counters alone are saved, without the optimizer's moments.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
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
"""Between two complaints that the state cannot be saved."""
ALIVE_SECONDS = 1.0
LONGEST_WRITE_SECONDS = 1800.0
"""A state of a hundred gigabytes on a slow disk; what takes longer hangs."""
HISTORY_SECONDS = 900.0
"""Between two former states that are kept."""
SLOTS, SPACING = 3, 4
"""Former states that are kept at most, and how many times older each is than the one before: up to
15 minutes, an hour, four hours."""
BYTES_PER_DAY = 10**12
"""Of whole states. A disk is made for some 600 TB in all; 3 B weights with their moments, every
minute, are 52 TB a day."""
DAY, AT_ONCE = 86400.0, 3600.0
"""Seconds. What may be written in the latter may be written at once: a small state never notices
the bound."""


class Saver:
    """Writes one snapshot at a time in its own thread."""

    def __init__(self, directory: Path, history_seconds: float = HISTORY_SECONDS) -> None:
        self.saved_step = 0
        self.seconds = {True: 0.0, False: 0.0}
        """How long the last write took, with the copy: of a whole state, and of weights alone."""
        self.error: str | None = None
        """Why the last write failed; None after one that succeeded. Training goes on either way."""
        self.written = 0
        """Bytes, all whole states together."""
        self.weights_bytes = 0
        """Size of what was last written without moments."""
        self._directory = directory
        self._history_seconds = history_seconds
        self._kept = 0
        self._kept_at = time.monotonic()
        self._condition = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._whole = True
        self._outer: dict[str, weakref.ref[torch.Tensor]] = {}
        """Tensors of the outer step in the last whole state."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="state", daemon=True)

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether a snapshot submitted now would be written at once."""
        with self._condition:
            return self._snapshot is None

    def wait(self, alive: Callable[[], None] = lambda: None) -> None:
        """Wait until it is idle. `alive` is called now and then; not for ever, because a disk may
        hang."""
        late = time.monotonic() + LONGEST_WRITE_SECONDS
        with self._condition:
            while not self._condition.wait_for(lambda: self._snapshot is None, ALIVE_SECONDS):
                if time.monotonic() < late:
                    alive()

    def submit(self, snapshot: Snapshot, whole: bool = True) -> None:
        """Have `snapshot` written, while idle; with the optimizer's moments where it is `whole`."""
        with self._condition:
            self._snapshot, self._whole = snapshot, whole
            self._condition.notify_all()

    def close(self) -> None:
        """Stop, once what was submitted has been written."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._snapshot is not None or self._closing)
                snapshot, whole = self._snapshot, self._whole
            if snapshot is None:
                return
            began = time.monotonic()
            try:
                self._write(snapshot, whole)
                self.saved_step, self.error = snapshot.counters.step, None
            except (OSError, RuntimeError, MemoryError, StateError) as error:
                # torch raises RuntimeError and MemoryError for want of memory to copy into
                self.error = str(error)
                if "No space left" in self.error:
                    self._forget()
            self.seconds[whole] = time.monotonic() - began
            with self._condition:
                self._snapshot = None
                self._condition.notify_all()

    def _write(self, snapshot: Snapshot, whole: bool) -> None:
        if whole:
            state.write(self._directory, snapshot, self._keep)
            self._outer = {name: weakref.ref(tensor) for name, tensor in snapshot.outer.items()}
            self.written += (self._directory / state.FILE).stat().st_size
            return
        unchanged = self._outer.keys() == snapshot.outer.keys() and all(
            self._outer[name]() is tensor for name, tensor in snapshot.outer.items()
        )
        state.write_weights(self._directory, snapshot, with_outer=not unchanged)
        self.weights_bytes = (self._directory / state.WEIGHTS_FILE).stat().st_size

    def _keep(self) -> None:
        """Keep the state that is about to be replaced, if the last one kept is old enough. Costs a
        name, not a copy."""
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
            # a file system without a second name for a file, say: the state itself is saved all the
            # same
            log.warning("no former state kept", error=str(error))

    def _forget(self) -> None:
        """Give the room of former states to the next attempt: the present one counts for more than
        any of them."""
        (self._directory / DAMAGED).unlink(missing_ok=True)
        for kept in (self._directory / HISTORY).glob("*.safetensors"):
            kept.unlink(missing_ok=True)


class Snapshots(Protocol):
    """What a state is taken from: an engine."""

    def snapshot(self, rng: torch.Generator, counters: Counters) -> Snapshot: ...


class Checkpoints:
    """Saves by time. Use as a context manager: leaving it waits for the last one to be on disk."""

    def __init__(
        self,
        directory: Path,
        save_every: float,
        source: Snapshots,
        rng: torch.Generator,
        counters: Counters,
        bytes_per_day: float = BYTES_PER_DAY,
    ) -> None:
        self._saver = Saver(directory, max(HISTORY_SECONDS, save_every))
        self._save_every = save_every
        self._bytes_per_second = bytes_per_day / DAY
        self._source = source
        self._rng = rng
        self._counters = counters
        self._taken_at = self._complain_at = float("-inf")
        self._began = self._asked_at = time.monotonic()
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
    def idle(self) -> bool:
        """Whether everything that was to be saved is on disk."""
        return self._saver.idle

    def finish(self, alive: Callable[[], None]) -> None:
        """Save once more, and wait until that is on disk. `alive` is called now and then
        meanwhile."""
        self._saver.wait(alive)
        self.save(last=True)
        self._saver.wait(alive)

    def save(self, last: bool = False) -> None:
        """Have the state saved, if that is due and the disk is not busy with an earlier one. last:
        in any case.

        It is due by time, and before the numbers of groups that a restart skips are used up. By
        time: where the next chance, a step from now, and a write would make it too late; but not
        before half of `save_every`, however slow the disk is. Without moments while more has been
        written than `bytes_per_day` allows.
        """
        now = time.monotonic()
        if last:
            self._saver.wait()
        allowed = self._saver.written <= (now - self._began + AT_ONCE) * self._bytes_per_second
        whole = last or allowed
        ahead = min(now - self._asked_at + self._saver.seconds[whole], self._save_every / 2)
        self._asked_at = now
        due = now - self._taken_at + ahead >= self._save_every
        due = due or self._counters.sequence - self._taken_sequence > SEQUENCE_MARGIN // 2
        if last or (due and self.idle):
            self._taken_at, self._taken_sequence = now, self._counters.sequence
            self._saver.submit(self._source.snapshot(self._rng, self._counters), whole)
        self._report()
        if self._saver.error and now >= self._complain_at:
            log.error("state not saved", error=self._saver.error, saved_step=self._saver.saved_step)
            self._complain_at = now + COMPLAIN_SECONDS

    def _report(self) -> None:
        """Log once how a large state is saved."""
        size = self._saver.weights_bytes
        if not size or self._reported:
            return
        self._reported = True
        daily = size * DAY / max(self._save_every, 1.0)
        fields = {
            "save_every": self._save_every,
            "weights_gigabytes": round(size / 1e9, 1),
            "terabytes_a_day": round(daily / 1e12, 1),
        }
        if daily <= self._bytes_per_second * DAY:
            log.info("weights are saved more often than the optimizer's moments", **fields)
        else:
            log.warning(
                "saving the weights so often wears the disk out; set training.save_every higher",
                **fields,
            )
