"""R0: a stage's own state on its own disk, for a node that comes back. Torch.

    weights.<name>   first.<name>   second.<name>   counts.<name>   rng      and the lineage,
    layers, step, norm and rate they are of
    outer.<name>     what averaging with other crews keeps (φ, δ, clocks), as of the same moment;
    none where nothing is averaged

Written after a committed step by a thread of its own, the newest state only: training waits for a
copy in memory, never for the disk. A disk that is slower than a step costs steps on a crash; while
one state is being written no other is copied. A stage of whole weights of a large policy is written
every few steps only (`journal_every`), or it would wear a disk out in weeks.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import torch

from swarmnode.errors import StateError
from swarmnode.pipeline.commit import Taken
from swarmnode.pipeline.optimizer import LrScale
from swarmnode.pipeline.spec import StageSpec
from swarmnode.pipeline.worker import StageWorker
from swarmnode.recovery import disk
from swarmnode.recovery.messages import state_bytes
from swarmnode.recovery.state import StageState, Tensors, take
from swarmnode.weights.layout import Layout

log = logging.getLogger(__name__)

FILE: Final = "stage.safetensors"
STEP_BYTES: Final = 2 * 10**9
"""What a stage may write after a step, in the mean: at a step in two minutes 1.4 TB a day. A disk
is made for some 600 TB in all."""


def journal_every(layouts: Iterable[Layout]) -> int:
    """Steps between two states that are written: the least power of two at which the largest stage
    writes no more than STEP_BYTES a step.

    layouts: of all stages of a crew, so that its members write after the same steps, and their
    journals fit together when all end at once.
    """
    largest = max((state_bytes(layout, "exact") for layout in layouts), default=0)
    return 2 ** max(0, math.ceil(math.log2(max(1, largest) / STEP_BYTES)))


class _About(msgspec.Struct, frozen=True):
    """What is said with the tensors."""

    lineage: str
    """Hex."""
    spec: StageSpec
    step: int
    hash: str
    """The step hash, in hex."""
    attempt: int
    clip: float
    learning_rate: float
    """How that step was taken."""
    squared_norm: float
    pace: LrScale


@dataclass
class Kept:
    """A stage as a journal gives it back, or as it was had elsewhere: what its member goes on
    with."""

    state: StageState
    lr_scale: LrScale
    outer: Tensors = field(default_factory=dict)
    """What averaging kept with these very weights; empty where they are others."""
    rng: torch.Tensor | None = None


class Journal:
    """One stage of one lineage, in a directory of the lineage below `directory`. A file of other
    layers counts as none, and is overwritten; so does one that is damaged, and `error` says so:
    there are other sources. every: steps between two that are written. after: one that was told to
    `leave`, of another file; nothing is copied while it writes.

    Those of other lineages are deleted once this one has as many steps behind it as they have."""

    def __init__(
        self,
        directory: Path,
        lineage: bytes,
        spec: StageSpec,
        every: int = 1,
        after: Journal | None = None,
    ) -> None:
        self.path = journal_file(directory, lineage)
        self.every = every
        self._after = after
        self._lineage, self._spec = lineage.hex(), spec
        self.error: str | None = None
        """Why the last write failed, or what is wrong with the file that was there; None after a
        write that succeeded."""
        self.step: int | None = None
        """Committed steps in the file; None without one."""
        self.hash = b""
        try:
            about = disk.read_about(self.path)
            known = None if about is None else _understand(self.path, about)
            if known is not None and self._is_ours(known):
                self.step, self.hash = known.step, bytes.fromhex(known.hash)
        except StateError as error:
            self._failed(error)
        self.skipped = 0
        """Steps after which the disk was still busy with an earlier one."""
        self._missed: tuple[StageWorker, Tensors, _About] | None = None
        """Whose last step was not written, and which it is: it is none of every few, or the disk
        was busy."""
        self._condition = threading.Condition()
        self._pending: tuple[dict[str, torch.Tensor], _About] | None = None
        """What is being written, or about to be."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="stage journal", daemon=True)
        self._thread.start()

    def note(self, worker: StageWorker, outer: Tensors = MappingProxyType({})) -> None:
        """Between two steps, in any thread. Copies the state if its step is one of every few, and
        the disk not busy. `outer`, which must never change, is not copied."""
        about = self._about(worker)
        with self._condition:
            self._missed = worker, outer, about
            busy = self._busy
            if busy or about.step % self.every:
                self.skipped += busy
                return
        self._write(worker, outer, about)

    def _about(self, worker: StageWorker) -> _About:
        optimizer, participant = worker.optimizer, worker.participant
        taken = optimizer.last_commit
        return _About(
            self._lineage,
            self._spec,
            participant.step,
            participant.hash.hex(),
            taken.attempt,
            taken.clip,
            taken.learning_rate,
            optimizer.squared_norm,
            replace(optimizer.lr_scale),
        )

    def _write(self, worker: StageWorker, outer: Tensors, about: _About) -> None:
        state = take(worker)
        tensors = {"rng": torch.get_rng_state().clone()}
        for part in ("weights", "first", "second"):
            tensors |= {f"{part}.{name}": tensor for name, tensor in getattr(state, part).items()}
        tensors |= {f"counts.{name}": torch.tensor([steps]) for name, steps in state.counts.items()}
        tensors |= {f"outer.{name}": tensor for name, tensor in outer.items()}
        with self._condition:
            self._pending, self._missed = (tensors, about), None
            self._condition.notify_all()

    def read(self) -> Kept:
        """Raises StateError where the file is damaged, or of another crew, stage or model."""
        tensors, about = disk.load(self.path)
        known = _understand(self.path, about)
        if not self._is_ours(known):
            raise StateError(f"{self.path} is of another stage")
        part = lambda kind: {
            n.removeprefix(f"{kind}."): t for n, t in tensors.items() if n.startswith(f"{kind}.")
        }
        outer = part("outer")
        # the gate looks at weights only
        if not all(bool(torch.isfinite(tensor).all()) for tensor in outer.values()):
            raise StateError(f"{self.path}: slow weights are not finite")
        try:
            counts = {name: float(steps) for name, steps in part("counts").items()}
            weights, norm, lr_scale = part("weights"), known.squared_norm, known.pace
            state = StageState(
                known.step, weights, part("first"), part("second"), counts, norm, lr_scale.factor
            )
            return Kept(state, lr_scale, outer, tensors["rng"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{self.path} lacks something: {error}") from None

    def _is_ours(self, about: _About) -> bool:
        return (about.lineage, about.spec) == (self._lineage, self._spec)

    @property
    def _busy(self) -> bool:
        return self._pending is not None or self._after is not None

    @property
    def coming(self) -> list[disk.OnDisk]:
        """What is being written, here and by whom we wait for: it takes the place of what is on
        disk of the same lineage."""
        after, pending = self._after, self._pending
        return [
            *(after.coming if after is not None else ()),
            *([_on_disk(pending[1])] if pending is not None else ()),
        ]

    def writes(self, path: Path) -> bool:
        """Whether it, or whom it waits for, may still write there."""
        after = self._after
        return self.path == path or (after is not None and after.writes(path))

    @property
    def leaving(self) -> bool:
        return self._closing

    def leave(self) -> None:
        """Writes what is pending, then stops; does not wait for it."""
        with self._condition:
            self._closing, self._missed = True, None
            self._condition.notify_all()

    def ended(self, seconds: float | None = None) -> bool:
        """Whether all is written. Waits for it."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Writes what is pending, then stops."""
        self.leave()
        self.ended()

    def finish(self) -> None:
        """Writes the worker's last step too, whichever it is, and stops: when a trainer ends in
        good order. Not where the weights have begun to move since: a step may be under way, and
        half of one is nobody's."""
        self.flush()
        if self._missed is not None:
            worker, _, about = self._missed
            with worker.optimizer.lock:
                if worker.optimizer.lr_scale == about.pace:  # it counts each step as it begins
                    self._write(*self._missed)
        self.close()

    def forget(self) -> None:
        """What the weights in memory are, nobody knows any more."""
        self._missed = None

    def flush(self) -> None:
        """Returns once nothing is pending: when a node leaves in good order."""
        with self._condition:
            self._condition.wait_for(lambda: not self._busy)

    def _run(self) -> None:
        if self._after is not None:
            self._after.ended()
        with self._condition:
            self._after = None
            self._condition.notify_all()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._pending is not None or self._closing)
                if self._pending is None:
                    return
                tensors, about = self._pending
            try:
                disk.save(self.path, tensors, msgspec.to_builtins(about))
                self.step, self.hash, self.error = about.step, bytes.fromhex(about.hash), None
                self._clear_away(about.step)
            except Exception as error:  # whatever it is, who waits for us must not wait for ever  # noqa: BLE001
                self._failed(error)
            del tensors
            with self._condition:
                self._pending = None
                self._condition.notify_all()

    def _clear_away(self, step: int) -> None:
        """Deletes what other lineages, which nobody writes now, have no further than `step`, and
        what was not written to its end."""
        try:
            written = [
                path
                for name in (FILE, disk.temporary(FILE))
                for path in self.path.parent.parent.glob(f"*/{name}")
            ]
            for other in {path.with_name(FILE) for path in written}:
                if other == self.path:
                    continue
                other.with_name(disk.temporary(FILE)).unlink(missing_ok=True)
                if max((one.step for one in _read(other)), default=0) <= step:
                    other.unlink(missing_ok=True)
                    other.parent.rmdir()
        except OSError as error:
            log.warning("the journal of another lineage stays: %s", error)

    def _failed(self, error: Exception) -> None:
        if str(error) != self.error:  # once, not after each step
            log.warning("the journal of our stage: %s", error)
        self.error = str(error)


def journal_file(directory: Path, lineage: bytes) -> Path:
    return directory / lineage.hex() / FILE


def find_journals(directory: Path) -> list[disk.OnDisk]:
    """What can be read, of every lineage."""
    return [one for path in sorted(directory.glob(f"*/{FILE}")) for one in _read(path)]


def _read(path: Path) -> list[disk.OnDisk]:
    """What is said of the file; nothing where there is none, or it is damaged."""
    try:
        about = disk.read_about(path)
        return [] if about is None else [_on_disk(_understand(path, about))]
    except (StateError, ValueError) as error:
        log.warning("a journal that cannot be read: %s", error)
        return []


def _on_disk(a: _About) -> disk.OnDisk:
    taken = Taken(a.attempt, a.clip, a.learning_rate)
    return disk.OnDisk(
        bytes.fromhex(a.lineage), a.spec.first, a.spec.last, a.step, bytes.fromhex(a.hash), taken
    )


def _understand(path: Path, about: disk.About) -> _About:
    """Raises StateError."""
    try:
        return msgspec.convert(about, _About)
    except msgspec.ValidationError as error:
        raise StateError(f"{path} lacks something: {error}") from None
