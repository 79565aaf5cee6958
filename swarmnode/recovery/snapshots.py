"""R2: a stage's state at both its ring neighbours, as of every K-th committed step. Torch.

    SnapshotRecorder   observes a worker: copies its state between two steps, gives it to the
    `StatePeer`, which stores it and says so
    SnapshotStore      the neighbours' states here, on disk, each with the hash it was sent with;
    our own, too, and on a node that keeps
                       the whole policy every stage's: what `swarmnode export` writes a policy from

All stages copy after the same steps, so that snapshots of two that are lost together are of one
policy. With both neighbours of a ring holding one, any two stages of four may be lost at once.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from swarmnode.errors import BadMessage, StateError
from swarmnode.files import write_atomically
from swarmnode.pipeline.spec import StageSpec
from swarmnode.pipeline.worker import StageWorker
from swarmnode.recovery import disk
from swarmnode.recovery.journal import Journal
from swarmnode.recovery.messages import Form, Have, root_of, state_bytes
from swarmnode.recovery.probes import Recorder
from swarmnode.recovery.sources import RecoverySettings
from swarmnode.recovery.state import (
    StageState,
    Tensors,
    check_state,
    host_copy,
    layout_of,
    take,
    take_small,
)
from swarmnode.recovery.synthesis import end_names
from swarmnode.weights.layout import Layout

if TYPE_CHECKING:
    from swarmnode.recovery.sharing import Sharing

log = logging.getLogger(__name__)

SNAPSHOTS: Final = "shadows"
"""Below the trainer's directory: a directory for each crew."""
OTHERS_EVERY: Final = 20
"""Steps between two looks at what is kept of other lineages."""
RAN: Final = "ran"
"""A file in the directory of a crew that has taken a step with this node; in it, as JSON, what the
crew trains."""


def ring(stage: int, stages: int) -> tuple[int, ...]:
    """Both neighbours of `stage` on the ring of all, each once."""
    return tuple(
        dict.fromkeys(n for n in ((stage - 1) % stages, (stage + 1) % stages) if n != stage)
    )


def form_of(layout: Layout, settings: RecoverySettings) -> Form:
    """Exact where that is cheap: adapters, and whole weights of small models."""
    return "exact" if state_bytes(layout, "exact") <= settings.exact_bytes else "small"


@dataclass(frozen=True)
class Copied:
    """A stage between two steps, for its snapshot. body: it is encoded already, and `state` has no
    tensors."""

    state: StageState
    body: bytearray | None = None


def copy_stage(worker: StageWorker, settings: RecoverySettings) -> Copied:
    """In any thread, while the weights stand still. A journal's copy may lie beside it: what is
    small is encoded at once, and never there with its moments."""
    if form_of(layout_of(worker.runtime.model), settings) == "small":
        return Copied(*take_small(worker))
    return Copied(take(worker))


@dataclass(frozen=True)
class PeerSnapshot:
    """Without its bytes, which are on disk."""

    step: int
    form: Form
    root: bytes
    squared_norm: float
    factor: float
    hash: bytes
    """The step hash."""


class SnapshotStore:
    """Snapshots of some stages of one lineage, in `directory`/<lineage>. One per stage, the newest.
    Those of another lineage are deleted once this one has as many steps behind it as they have
    (`ran`), those of lineages that never took a step at once: a crew that does nothing costs
    another one none of its copies. about: what the lineage trains, for who reads the copies without
    a crew.

    Where a crew goes on from an older step than a snapshot's, that one is of steps which may yet
    come back. It is set aside, and offered to whoever founds a crew, until this crew has gone as
    far; meanwhile the stage has a second snapshot.

    No more than the form's size of every stage's layout is ever kept: what a peer claims has no
    part in it.
    """

    def __init__(
        self,
        directory: Path,
        lineage: bytes,
        layouts: Mapping[int, Layout],
        about: disk.About = MappingProxyType({}),
    ) -> None:
        self._directory = directory / lineage.hex()
        self._about = dict(about)
        self._layouts = dict(layouts)
        self._snapshots: dict[int, PeerSnapshot] = {}
        self._right: dict[int, tuple[int, int, int]] = {}
        """Stage → its file as it was when it was hashed: who wants it in parts does not have it
        hashed for each."""
        self._lock = threading.Lock()
        """One file is written or read at a time, and `_snapshots` says what is in it."""
        self._ran = False
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in directory.iterdir():
            if other.is_dir() and other != self._directory and not (other / RAN).exists():
                shutil.rmtree(other)
        for stage in layouts:
            self._remember(stage)

    def ran(self, step: int) -> None:
        """The lineage has taken `step` steps."""
        if self._ran and step % OTHERS_EVERY:
            return
        self._ran = True
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            write_atomically(self._directory / RAN, json.dumps(self._about).encode())
            for other in self._directory.parent.iterdir():
                if (
                    other.is_dir()
                    and other != self._directory
                    and max((s.step for _, s in _copies_in(other)), default=0) <= step
                ):
                    shutil.rmtree(other)
        except OSError as error:
            log.warning("the snapshots of another lineage stay: %s", error)

    def begins(self, step: int) -> None:
        """A crew goes on from `step`. In a thread, before anything is given or taken."""
        with self._lock:
            for stage in self._layouts:
                try:
                    self._begins(stage, step)
                except OSError as error:
                    log.warning("a snapshot of stage %d stays where it is: %s", stage, error)

    def _begins(self, stage: int, step: int) -> None:
        path, aside = self._path(stage), aside_file(self._directory, stage)
        kept, later = self._snapshots.get(stage), _read(aside)
        # these steps have come back
        if later is not None and later.step <= step and (kept is None or kept.step < later.step):
            os.replace(aside, path)
            self._snapshots[stage] = kept = later
            later = None
        if kept is not None and kept.step > step:
            if later is None or later.step < kept.step:
                os.replace(path, aside)
            self._forget(stage)

    @property
    def stages(self) -> frozenset[int]:
        """Those that are kept here."""
        return frozenset(self._layouts)

    def get(self, stage: int) -> PeerSnapshot | None:
        return self._snapshots.get(stage)

    def put(self, stage: int, have: Have, body: bytearray | memoryview) -> bool:
        """Stores a snapshot of `stage` whose root was compared, unless this crew's newer one is
        here; says whether it did. In any thread.

        Raises BadMessage: bounds, size, not_finite; OSError for the disk.
        """
        layout = self._layouts.get(stage)
        if layout is None:
            raise BadMessage("bounds", f"no snapshot of stage {stage} belongs here")
        check_state(body, layout, have.form)
        snapshot = PeerSnapshot(
            have.step, have.form, have.root, have.squared_norm, have.factor, have.hash
        )
        about = {**asdict(snapshot), "root": have.root.hex(), "hash": have.hash.hex()}
        with self._lock:
            old = self._snapshots.get(stage)
            if old is not None and old.step > have.step:
                return False
            disk.save(self._path(stage), {"body": torch.frombuffer(body, dtype=torch.uint8)}, about)
            self._snapshots[stage] = snapshot
            aside = aside_file(self._directory, stage)
            later = _read(aside)
            if later is not None and later.step <= have.step:
                aside.unlink(missing_ok=True)
        return True

    def read(self, stage: int) -> tuple[PeerSnapshot, memoryview]:
        """`stage`'s snapshot and its bytes. Raises StateError where they are not those that were
        stored; the snapshot is gone then."""
        with self._lock:
            try:
                snapshot, file = self._snapshots[stage], self._path(stage).stat()
                state = file.st_ino, file.st_size, file.st_mtime_ns
                found, body = read_copy(
                    self._directory, stage, hashed=self._right.get(stage) == state
                )
                if found.root != snapshot.root:
                    raise StateError(f"{self._path(stage)} is damaged")
                self._right[stage] = state
                return found, body
            except (StateError, KeyError, FileNotFoundError) as error:
                self._forget(stage)
                raise StateError(str(error)) from None

    def _remember(self, stage: int) -> None:
        try:
            about = disk.read_about(self._path(stage))
            if about is not None:
                self._snapshots[stage] = _snapshot(about)
        except StateError:
            self._forget(stage)

    def _forget(self, stage: int) -> None:
        self._snapshots.pop(stage, None)
        self._path(stage).unlink(missing_ok=True)

    def _path(self, stage: int) -> Path:
        return copy_file(self._directory, stage)


def copy_file(directory: Path, stage: int) -> Path:
    """In the directory of a crew."""
    return directory / f"stage-{stage}.safetensors"


def aside_file(directory: Path, stage: int) -> Path:
    """What was set aside; `_copies_in` finds both."""
    return directory / f"later-{stage}.safetensors"


def read_copy(directory: Path, stage: int, hashed: bool = False) -> tuple[PeerSnapshot, memoryview]:
    """What a crew's directory has of `stage`, mapped. hashed: it was found right before. Raises
    StateError where there is nothing, or it is damaged."""
    tensors, about = disk.load(copy_file(directory, stage))
    snapshot = _snapshot(about)
    body = memoryview(tensors["body"].numpy().data if "body" in tensors else b"")
    if not hashed and root_of(body) != snapshot.root:
        raise StateError(f"{copy_file(directory, stage)} is damaged")
    return snapshot, body


def _snapshot(about: disk.About) -> PeerSnapshot:
    try:
        hashes = {name: bytes.fromhex(str(about[name])) for name in ("root", "hash")}
        return msgspec.convert({**about, **hashes}, PeerSnapshot)
    except (KeyError, ValueError, msgspec.ValidationError) as error:
        raise StateError(f"not a snapshot: {error}") from None


def find_snapshots(directory: Path) -> list[disk.OnDisk]:
    """Below the directory of all lineages; what cannot be read is none."""
    found = []
    for ran in sorted(directory.glob(f"*/{RAN}")):
        try:
            lineage, layers = (
                bytes.fromhex(ran.parent.name),
                list(json.loads(ran.read_bytes())["layers"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("snapshots that nobody can read: %s", error)
            continue
        for stage, kept in _copies_in(ran.parent):
            if stage < len(layers):
                found.append(
                    disk.OnDisk(
                        lineage, sum(layers[:stage]), sum(layers[: stage + 1]), kept.step, kept.hash
                    )
                )
    return found


def _copies_in(directory: Path) -> Iterator[tuple[int, PeerSnapshot]]:
    for path in sorted(directory.glob("*-*.safetensors")):
        snapshot, stage = _read(path), path.stem.partition("-")[2]
        if snapshot is not None and stage.isdecimal():
            yield int(stage), snapshot


def _read(path: Path) -> PeerSnapshot | None:
    """What is said of the file; None where there is none, or it is damaged."""
    try:
        about = disk.read_about(path)
        return None if about is None else _snapshot(about)
    except StateError:
        return None


class SnapshotRecorder(Recorder):
    """Observer of one member. Set `sharing` once there are state streams; without one, it only
    remembers.

    outer: what averaging keeps with the weights, for the journal."""

    def __init__(
        self,
        spec: StageSpec,
        settings: RecoverySettings,
        journal: Journal | None = None,
        store: SnapshotStore | None = None,
        outer: Callable[[], Tensors] = dict,
    ) -> None:
        super().__init__(spec, settings)
        self.sharing: Sharing | None = None
        self._journal = journal
        self._store = store
        self._outer = outer
        self._copied: Copied | None = None

    def committed(self, worker: StageWorker) -> None:
        super().committed(worker)
        step = worker.participant.step
        if self._journal is not None:
            self._journal.note(worker, self._outer())
        if self._store is not None:
            self._store.ran(step)
        if self.settings.keeps_copies(self.spec) and step % self.settings.snapshot_every == 0:
            self._copied = copy_stage(worker, self.settings)
        if self.settings.mode == "checkfree+" and (self.spec.has_embedding or self.spec.has_head):
            state = dict(worker.runtime.model.named_parameters())
            self.ends[self.spec.index] = (
                step,
                {name: host_copy(state[name]) for name in end_names(self.spec)},
            )

    def stepped(self) -> None:
        copied, self._copied = self._copied, None
        if self.sharing is None:
            return
        if copied is not None:
            self.sharing.snapshot(copied)
        if self.spec.index in self.ends:
            self.sharing.announce("ends")
        if self.spec.has_head and self.probes:
            self.sharing.announce("probes")
