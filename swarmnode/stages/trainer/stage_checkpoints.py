"""Checkpoints of stages: training state as bytes, files, and the recorder that makes them. Torch.

Each stage writes its own checkpoint after every step (every 2, 4, 8, … steps above 2 GB,
`checkpoint_interval`). Its neighbours on the ring of stages store a replica of it every
`checkpoint_every` steps. An *own checkpoint* is a stage on the disk of the node that trained it. A
*replica checkpoint* is one that another member trained and sent.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig

from swarmnode.errors import BadMessage, Incompatible, StateError
from swarmnode.files import pinned, sync_directory
from swarmnode.stages.specs import Routes, StageSpec
from swarmnode.stages.stage_frames import FrameLimits, MicroBatch, read_micro_batch
from swarmnode.stages.state_messages import SharedBody, StateForm, hash_body, state_bytes
from swarmnode.stages.trainer.checkfree import RecoveryMode, end_names
from swarmnode.stages.trainer.pipeline import Observer, StageWorker
from swarmnode.stages.trainer.stage_model import LrScale, StageRuntime, add_adapter, empty_stage
from swarmnode.weights.layout import Layout, elements, make_layout
from swarmnode.weights.trainer.lora import A_MARK
from swarmnode.wire import strict

if TYPE_CHECKING:
    from peft import LoraConfig

    from swarmnode.config import StagesConfig


log = structlog.get_logger("swarmnode.crew")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class RecoverySettings:
    """Constants of recovery, and settings of the operator. All members have the same `mode`."""

    checkpoint_every: int = 20
    """Interval between replica checkpoints on the neighbours' disks, in committed steps."""
    stores_all_stages: bool = False
    """True if this node stores checkpoints of all stages, not only of its ring neighbours."""
    mode: RecoveryMode = "checkpoints"
    """`checkfree` rebuilds inner stages from their neighbours, and restores the two ends from
    checkpoints. `checkfree+` rebuilds all stages and trains in swapped order."""
    warmup_steps: int = 10
    """Steps over which the learning rate of a stage with a fresh optimizer rises."""
    full_bytes: int = 256 * 1024 * 1024
    """A replica checkpoint up to this size has float32 weights and AdamW's moments. A larger one
    has bfloat16 weights and no moments."""
    inputs: int = 4
    """Number of committed micro-batches that are stored for the probe of an average."""
    input_bytes: int = 256 * 1024 * 1024
    """Maximum number of bytes of received activations in these micro-batches."""
    seconds: float = 120.0
    """A transfer fails after this time without a byte."""
    neighbour_seconds: float = 3600.0
    """A stage waits this long for another stage that is being restored. Half of a 7 B model in
    bfloat16 takes 19 minutes at 50 Mbit/s."""

    def uses_checkpoints(self, spec: StageSpec) -> bool:
        """Return True if this stage is restored from checkpoints. Otherwise it is rebuilt from its
        neighbours."""
        return self.mode == "checkpoints" or (
            self.mode == "checkfree" and (spec.has_embedding or spec.has_head)
        )


def recovery_settings(cfg: StagesConfig) -> RecoverySettings:
    """Return the recovery settings of a configuration."""
    return RecoverySettings(
        cfg.checkpoint_every, cfg.policy_copy in ("disk", "both"), mode=cfg.recovery
    )


# A stage's training state in host memory, as bytes, and back:
#
#     full     weights ‖ first moments ‖ second moments ‖ counts, float32: 12 bytes/parameter
#     small    weights, bfloat16: 2 bytes/parameter, relative error 2⁻⁹; the optimizer starts new
#     plain    weights, float32: for parts of a stage that CheckFree needs
#
# With LoRA these are the tensors of the adapter, otherwise all tensors of the stage.

BLOCK_VALUES: Final = 2**20
"""Number of values that are checked at a time."""
LARGEST_WEIGHT: Final = 65504.0
"""Largest |weight| of a checkpoint: the largest float16, far above any trained model."""


@dataclass(frozen=True)
class StageState:
    """Training state of a stage after `step` committed steps. Tensors have the stage's local
    names."""

    step: int
    weights: Tensors
    first: Tensors = field(default_factory=dict)
    """AdamW's first moments; empty if they were not saved, like `second` and `counts`."""
    second: Tensors = field(default_factory=dict)
    """AdamW's second moments."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Number of steps that AdamW has taken for each tensor."""
    squared_norm: float = 0.0
    """Squared norm of the layers' last gradient before clipping."""


@dataclass(frozen=True)
class LoadedStage:
    """State of a stage that was loaded from a source, and of what belongs to it."""

    state: StageState
    lr_scale: LrScale
    outer: Tensors = field(default_factory=dict)
    """State of averaging at the same step, by name."""
    rng: torch.Tensor | None = None


def trained_layout(model: torch.nn.Module) -> Layout:
    """Return names and shapes of the trained tensors."""
    return make_layout(
        (name, p.shape, "float32") for name, p in model.named_parameters() if p.requires_grad
    )


def stage_layouts(
    config: PretrainedConfig,
    specs: Sequence[StageSpec],
    lora: LoraConfig | None = None,
) -> tuple[Layout, ...]:
    """Return the layout of the trained tensors of each stage. This reads no weights.

    Args:
        specs: All stages.
        lora: Settings of the adapter; None if all weights are trained.
    """
    layouts = []
    for spec in specs:
        with torch.device("meta"):
            model = empty_stage(config, spec, torch.float32)
            model.tie_weights()
            model = model if lora is None else add_adapter(model, lora)
        layouts.append(tuple(t for t in trained_layout(model) if A_MARK not in t.name))
    return tuple(layouts)


def replica_form(layout: Layout, settings: RecoverySettings) -> StateForm:
    """Return the form of a stage's replica checkpoints."""
    return "full" if state_bytes(layout, "full") <= settings.full_bytes else "small"


def trained(runtime: StageRuntime) -> dict[str, torch.Tensor]:
    """Return the trained parameters themselves, by local name."""
    return {name: p for name, p in runtime.model.named_parameters() if p.requires_grad}


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in new host memory, as float32."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def live_state(worker: StageWorker) -> StageState:
    """Return the worker's state. Call it between two steps: the tensors are the worker's own, and
    the next step changes them."""
    adam = worker.optimizer.adam
    weights, first, second, counts = trained(worker.runtime), {}, {}, {}
    for name, parameter in weights.items():
        if moments := adam.state.get(parameter) if adam is not None else None:
            first[name], second[name] = moments["exp_avg"], moments["exp_avg_sq"]
            counts[name] = float(moments["step"])
    return StageState(
        worker.participant.step, weights, first, second, counts, worker.optimizer.squared_norm
    )


def load_weights(runtime: StageRuntime, weights: Tensors) -> None:
    """Overwrite the trained parameters.

    Raises:
        Incompatible: Names or shapes differ, or a value is not finite. No parameter is changed
        then.
    """
    own = trained(runtime)
    if weights.keys() != own.keys():
        raise Incompatible(f"weights for another stage: {sorted(weights.keys() ^ own.keys())[:3]}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise Incompatible(f"{name} is {tuple(tensor.shape)}, not {tuple(own[name].shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise Incompatible(f"{name} is not finite")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def load_moments(worker: StageWorker, state: StageState) -> None:
    """Load AdamW's moments, for the tensors that have them."""
    adam = worker.optimizer.adam
    if adam is None:
        return
    for name, parameter in trained(worker.runtime).items():
        if state.counts.get(name, 0.0) > 0:
            adam.state[parameter] = {
                "step": torch.tensor(state.counts[name], dtype=torch.float32),
                "exp_avg": state.first[name].to(parameter.device, parameter.dtype, copy=True),
                "exp_avg_sq": state.second[name].to(parameter.device, parameter.dtype, copy=True),
            }


@torch.no_grad()
def encode_state(state: StageState, layout: Layout, form: StateForm) -> bytearray:
    """Return the state as `state_bytes(layout, form)` bytes. Missing tensors are zero."""
    body = bytearray(state_bytes(layout, form))
    if not body:
        return body
    flat = as_tensor(body).view(torch.bfloat16 if form == "small" else torch.float32)
    at = 0
    for tensors in (state.weights, state.first, state.second)[: 3 if form == "full" else 1]:
        for spec in layout:
            if spec.name in tensors:
                flat[at : at + spec.elements].copy_(tensors[spec.name].reshape(-1))
            at += spec.elements
    if form == "full":
        flat[at:] = torch.tensor([state.counts.get(spec.name, 0.0) for spec in layout])
    return body


def check_state(body: torch.Tensor, layout: Layout, form: StateForm) -> None:
    """Check the body of a checkpoint, one block at a time.

    Args:
        body: (bytes,) uint8.

    Raises:
        BadMessage: size, not_finite, or bounds (a weight above LARGEST_WEIGHT, a second moment or
            a count below zero).
    """
    if len(body) != state_bytes(layout, form):
        raise BadMessage("size", f"{len(body)} bytes of a state of {state_bytes(layout, form)}")
    values = body.view(torch.bfloat16 if form == "small" else torch.float32)
    weights = elements(layout)
    for start in range(0, len(values), BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES]
        if not bool(torch.isfinite(block).all()):
            raise BadMessage("not_finite", "a state")
        if bool((block[: max(0, weights - start)].abs() > LARGEST_WEIGHT).any()):
            raise BadMessage("bounds", "a weight")
        if form == "full" and bool((block[max(0, 2 * weights - start) :] < 0).any()):
            raise BadMessage("bounds", "a second moment or a count below zero")


def decode_state(
    body: torch.Tensor, layout: Layout, form: StateForm, step: int, squared_norm: float
) -> StageState:
    """Check a body and return the state that it encodes.

    Args:
        body: (bytes,) uint8.

    Raises:
        BadMessage: The reason is `size`, `not_finite` or `bounds`.
    """
    check_state(body, layout, form)
    flat = body.view(torch.bfloat16).float() if form == "small" else body.view(torch.float32)
    size = elements(layout)
    if form != "full":
        return StageState(step, _by_name(flat, layout), squared_norm=squared_norm)
    weights, first, second = (_by_name(flat[i * size : (i + 1) * size], layout) for i in range(3))
    counts = {
        spec.name: steps
        for spec, steps in zip(layout, flat[3 * size :].tolist(), strict=True)
        if steps > 0
    }
    keep = lambda tensors: {name: tensors[name] for name in counts}
    return StageState(step, weights, keep(first), keep(second), counts, squared_norm)


def _by_name(flat: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """Split `flat` into the tensors of `layout`, without copying."""
    pieces = flat.split([spec.elements for spec in layout])
    return {spec.name: piece.view(spec.shape) for spec, piece in zip(layout, pieces, strict=True)}


def as_tensor(body: bytearray) -> torch.Tensor:
    """Return a (bytes,) uint8 view of `body`."""
    return torch.frombuffer(body, dtype=torch.uint8)


# Checkpoints on this node's disk: `directory`/<lineage>/<first layer>-<last layer>.safetensors
#
#     body       the state as above, uint8: an own checkpoint in full form, a replica as it arrived
#     outer.*    own checkpoint: state of averaging with other crews, of the same moment
#     rng        own checkpoint: torch's random generator
#     about      metadata, JSON: `CheckpointMetadata`
#
# A new checkpoint of a block of layers replaces the old one. A file that the present crew does not
# use is deleted once this crew has taken as many steps as the file has.

CHECKPOINTS: Final = "stages"
"""Name of the directory of checkpoints in the trainer's directory."""
STEP_BYTES: Final = 2 * 10**9
"""Own checkpoints write at most this many bytes per step on average. At one step every two minutes
this is 1.4 TB a day; a typical disk endures about 600 TB."""


def stored_stages(stage: int, stages: int, settings: RecoverySettings) -> tuple[int, ...]:
    """Return the stages whose checkpoints the holder of `stage` stores, its own first."""
    if settings.stores_all_stages:
        return (stage, *(other for other in range(stages) if other != stage))
    return (stage, *ring(stage, stages))


def ring(stage: int, stages: int) -> tuple[int, ...]:
    """Return both neighbours of `stage` on the ring of all stages, each once."""
    return tuple(
        dict.fromkeys(n for n in ((stage - 1) % stages, (stage + 1) % stages) if n != stage)
    )


def checkpoint_interval(layouts: Iterable[Layout]) -> int:
    """Return the interval between own checkpoints in steps: the smallest power of two with which
    the largest stage writes at most STEP_BYTES per step.

    The largest stage of the crew decides for all, so that all members write after the same steps.
    After a power cut at all members, all disks have one common step.
    """
    largest = max((state_bytes(layout, "full") for layout in layouts), default=0)
    return 2 ** max(0, math.ceil(math.log2(max(1, largest) / STEP_BYTES)))


@dataclass(frozen=True)
class CheckpointIdentity:
    """Identity that the checkpoints of one crew share."""

    lineage: str
    """Lineage, hex."""
    layers: tuple[int, ...]
    """Number of layers of each stage."""
    owner: str = ""
    """`trainer.state.owner` of the policy."""

    def block(self, stage: int) -> tuple[int, int]:
        """Return (first layer of `stage`, layer after its last)."""
        first = sum(self.layers[:stage])
        return first, first + self.layers[stage]

    def path(self, stage: int) -> Path:
        """Return the file of `stage`, relative to the store's directory."""
        first, last = self.block(stage)
        return Path(self.lineage, f"{first}-{last}.safetensors")


class CheckpointMetadata(msgspec.Struct, frozen=True):
    """Metadata of a checkpoint."""

    identity: CheckpointIdentity
    stage: int
    own: bool
    """True for an own checkpoint, False for a replica."""
    form: StateForm
    step: int
    squared_norm: float
    lr_scale: LrScale = msgspec.field(default_factory=LrScale)
    root: str = ""
    """Hash of the body, hex."""

    @property
    def path(self) -> Path:
        """File, relative to the store's directory."""
        return self.identity.path(self.stage)


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint file."""

    metadata: CheckpointMetadata
    body: torch.Tensor
    """(bytes,) uint8."""
    extra_tensors: Tensors = field(default_factory=dict)
    """`outer.*` and `rng`."""


class CheckpointStore:
    """Reads and writes checkpoint files. A thread writes those of the own stage.

    Args:
        directory: Directory of all lineages.
    """

    def __init__(self, directory: Path) -> None:
        self.writing_metadata: CheckpointMetadata | None = None
        """Metadata of the own checkpoint that is being written; None if none is."""
        self.error: str | None = None
        """Error of the last write of the own stage; None if it succeeded."""
        self._directory = directory
        self._identity: CheckpointIdentity | None = None
        self._files: dict[Path, CheckpointMetadata | None] = {}
        """Path → metadata of the files of the present crew; None for a missing file."""
        self._lock = threading.Lock()
        """Held while a file is written or read."""
        self._thread = ThreadPoolExecutor(1, "stage checkpoint")
        self._writing: Future[None] | None = None

    def begin(self, identity: CheckpointIdentity, stages: Iterable[int]) -> None:
        """Store checkpoints of these stages of a crew from now on."""
        with self._lock:
            self._identity = identity
            self._files = {
                path: _read_metadata(self._directory / path) for path in map(identity.path, stages)
            }

    def metadata(self, stage: int) -> CheckpointMetadata | None:
        """Return the metadata of the checkpoint of `stage`; None if there is none."""
        return None if self._identity is None else self._files.get(self._identity.path(stage))

    def read(self, stage: int) -> Checkpoint:
        """Return the checkpoint of `stage`.

        Raises:
            StateError: The file is missing or damaged. It is deleted.
        """
        assert self._identity is not None
        path = self._identity.path(stage)
        with self._lock:
            try:
                return read_checkpoint(self._directory, path)
            except StateError:
                self._files[path] = None
                with contextlib.suppress(OSError):
                    (self._directory / path).unlink(missing_ok=True)
                raise

    def describe(
        self,
        stage: int,
        form: StateForm,
        step: int,
        squared_norm: float,
        own: LrScale | None = None,
    ) -> CheckpointMetadata:
        """Return metadata for a checkpoint of the present crew.

        Args:
            own: Learning rate of the stage, if this node trains it.
        """
        assert self._identity is not None
        scale = LrScale() if own is None else replace(own)
        return CheckpointMetadata(
            self._identity, stage, own is not None, form, step, squared_norm, scale
        )

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, and replace that of the same layers.

        Raises:
            OSError: The file cannot be written. The old file is unchanged.
        """
        metadata = msgspec.structs.replace(
            checkpoint.metadata, root=hash_body(checkpoint.body.numpy().data).hex()
        )
        path = self._directory / metadata.path
        tensors = {"body": checkpoint.body, **checkpoint.extra_tensors}
        unfinished = path.with_name(f".{path.name}.tmp")
        with self._lock:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                header = {"about": json.dumps(msgspec.to_builtins(metadata))}
                save_file(tensors, unfinished, metadata=header)
                with open(unfinished, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(unfinished, path)
            except (SafetensorError, OSError) as error:
                with contextlib.suppress(OSError):
                    unfinished.unlink(missing_ok=True)
                raise OSError(str(error)) from None
            sync_directory(path.parent)
            if metadata.path in self._files:
                self._files[metadata.path] = metadata
            if metadata.own:
                self._delete_superseded(metadata.step)

    @property
    def busy(self) -> bool:
        """True while the own stage is being written."""
        return self._writing is not None and not self._writing.done()

    def write_soon(self, checkpoint: Checkpoint) -> bool:
        """Start to write the own stage in the background. Return False if a write is running."""
        if self.busy:
            return False
        self.writing_metadata = checkpoint.metadata
        self._writing = self._thread.submit(self._write_own, checkpoint)
        return True

    def flush(self) -> None:
        """Wait until the own stage is written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None  # this frees the checkpoint's memory

    def close(self) -> None:
        """Wait until the own stage is written, and end the thread."""
        self.flush()
        self._thread.shutdown()

    def _write_own(self, checkpoint: Checkpoint) -> None:
        try:
            self.write(checkpoint)
            self.error = None
        except OSError as error:
            if str(error) != self.error:  # log it once, not after each step
                log.warning(
                    "own checkpoint not written, a restart would lose steps", error=str(error)
                )
            self.error = str(error)
        finally:
            self.writing_metadata = None

    def _delete_superseded(self, step: int) -> None:
        """Delete files that the present crew does not use and that have at most `step` steps."""
        try:
            for path in self._directory.glob("*/.*.tmp"):
                path.unlink(missing_ok=True)
            for path in self._directory.glob("*/*.safetensors"):
                relative = path.relative_to(self._directory)
                if relative in self._files:
                    continue
                metadata = _read_metadata(path)
                if metadata is None or metadata.step <= step:
                    path.unlink(missing_ok=True)
            for directory in self._directory.iterdir():
                if directory.is_dir() and not any(directory.iterdir()):
                    directory.rmdir()
        except OSError as error:
            log.warning("old checkpoints not deleted", error=str(error))


def find_checkpoints(directory: Path) -> list[CheckpointMetadata]:
    """Return the metadata of all readable checkpoints in a store's directory."""
    found = [_read_metadata(path) for path in sorted(directory.glob("*/*.safetensors"))]
    return [metadata for metadata in found if metadata is not None]


def read_checkpoint(directory: Path, path: Path) -> Checkpoint:
    """Read one file of a store's directory.

    Args:
        path: Relative to `directory`.

    Raises:
        StateError: The file is missing or damaged.
    """
    with _opened(directory / path) as (metadata, file):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        body = tensors.pop("body", torch.empty(0, dtype=torch.uint8))
        if metadata.path != path or hash_body(body.numpy().data).hex() != metadata.root:
            raise ValueError("another hash")
    return Checkpoint(metadata, body, tensors)


def _read_metadata(path: Path) -> CheckpointMetadata | None:
    """Return a file's metadata; None if it is missing or damaged."""
    if not path.exists():
        return None
    try:
        with _opened(path) as (metadata, _):
            return metadata
    except StateError as error:
        log.warning("ignoring a damaged checkpoint", error=str(error))
        return None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[CheckpointMetadata, safe_open]]:
    """Open a checkpoint file, and yield its metadata and tensors.

    Raises:
        StateError: The file is missing or damaged.
    """
    try:
        with pinned(path) as name, safe_open(name, "pt", device="cpu") as file:
            metadata = msgspec.json.decode(file.metadata()["about"], type=CheckpointMetadata)
            if not 0 <= metadata.stage < len(metadata.identity.layers):
                raise ValueError("no such stage")
            yield metadata, file
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path} is damaged: {error}") from None


# The recorder observes one worker. It stores the last committed micro-batches for the probe of an
# average. Between two steps it makes checkpoints.


@dataclass(frozen=True)
class StageInput:
    """A committed micro-batch with the activations that this stage received."""

    rows: int
    about: bytes
    """Encoded `MicroBatch`."""
    body: bytes
    """Activations in the crew's codec; empty at stage 0."""


@dataclass(frozen=True)
class ReplicaCheckpoint:
    """Last checkpoint of the own stage for its neighbours, encoded in memory."""

    step: int
    squared_norm: float
    body: bytearray


class Recorder(Observer):
    """Observer of one worker that records micro-batches and makes checkpoints.

    Swapped micro-batches are not recorded, because they pass the layers in another order than the
    policy.

    Args:
        layouts: Trained tensors of each stage.
        store: Store of checkpoints.
        outer: Returns the state of averaging. Its tensors must not change afterwards.
    """

    def __init__(
        self,
        spec: StageSpec,
        settings: RecoverySettings,
        layouts: Sequence[Layout],
        store: CheckpointStore,
        outer: Callable[[], Tensors] = dict,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.inputs: deque[StageInput] = deque(maxlen=settings.inputs)
        self.ends: dict[int, tuple[int, dict[str, torch.Tensor]]] = {}
        """With `checkfree+`: end stage → (step, its embedding, or norm and head)."""
        self.replica: ReplicaCheckpoint | None = None
        """Last checkpoint for the neighbours; None before the first."""
        self.policy_copy: tuple[int, bytes] | None = None
        """(step, encoded weights for policy copies) if a member asked since the last step."""
        self.unwritten: tuple[StageWorker, CheckpointMetadata] | None = None
        """(worker, metadata) of the last step, if it is not on disk."""
        self.announce: Callable[[SharedBody, int], None] | None = None
        """Announces a body of a step to the other members; None without state streams."""
        self._layout = layouts[spec.index]
        self._store = store
        self._outer = outer
        self._every = checkpoint_interval(layouts)
        self._announced = 0
        self._pending: deque[StageInput] = deque(maxlen=settings.inputs)
        """Last micro-batches of the present step."""
        self._routes = Routes(spec.stages, settings.mode == "checkfree+")

    def on_micro_batch(self, micro_batch: int, about: bytes, body: bytes) -> None:
        if self._routes.route(micro_batch) != self._routes.route(0):
            return
        rows = strict.decode(about, MicroBatch).rows
        self._append(self._pending, StageInput(rows, about, body))

    def on_step_dropped(self) -> None:
        self._pending.clear()

    def on_step_in_thread(self, worker: StageWorker) -> None:
        self.policy_copy = None
        for new in self._pending:
            self._append(self.inputs, new)
        self.on_step_dropped()
        self._checkpoint(worker)
        if self.settings.mode == "checkfree+" and (self.spec.has_embedding or self.spec.has_head):
            state = dict(worker.runtime.model.named_parameters())
            copies = {name: host_copy(state[name]) for name in end_names(self.spec)}
            self.ends[self.spec.index] = worker.participant.step, copies

    def after_step(self) -> None:
        if self.announce is None:
            return
        if self.replica is not None and self.replica.step != self._announced:
            self._announced = self.replica.step
            self.announce("checkpoint", self.replica.step)
        if self.spec.index in self.ends:
            self.announce("ends", self.ends[self.spec.index][0])

    def _append(self, inputs: deque[StageInput], new: StageInput) -> None:
        inputs.append(new)
        while sum(len(one.body) for one in inputs) > self.settings.input_bytes:
            inputs.popleft()

    def _checkpoint(self, worker: StageWorker) -> None:
        """Write the own checkpoint, and make the neighbours' replica, if either is due."""
        optimizer, step, body = worker.optimizer, worker.participant.step, None
        metadata = self._store.describe(
            self.spec.index, "full", step, optimizer.squared_norm, optimizer.lr_scale
        )
        self.unwritten = worker, metadata
        if step % self._every == 0 and not self._store.busy:
            body = self._write(worker, metadata)
        if self.settings.uses_checkpoints(self.spec) and step % self.settings.checkpoint_every == 0:
            self.make_replica(worker, body)

    def _write(self, worker: StageWorker, metadata: CheckpointMetadata) -> bytearray:
        body = encode_state(live_state(worker), self._layout, "full")
        more = {f"outer.{name}": tensor for name, tensor in self._outer().items()}
        more["rng"] = torch.get_rng_state()
        if self._store.write_soon(Checkpoint(metadata, as_tensor(body), more)):
            self.unwritten = None
        return body

    def make_replica(self, worker: StageWorker, full: bytearray | None = None) -> None:
        """Make the replica checkpoint for the neighbours. Call it between two steps.

        Args:
            full: The stage in full form, if it was encoded already.
        """
        state, form = live_state(worker), replica_form(self._layout, self.settings)
        body = full if form == "full" else None
        if body is None:
            self.replica = None  # memory may not hold two checkpoints
            body = encode_state(state, self._layout, form)
        self.replica = ReplicaCheckpoint(state.step, state.squared_norm, body)

    def write_last(self) -> None:
        """Write the worker's last step at the end of the trainer, if it is not on disk. If the next
        step has started to move the weights, nothing is written."""
        if self.unwritten is None:
            return
        self._store.flush()
        worker, metadata = self.unwritten
        with worker.optimizer.lock:
            if worker.optimizer.lr_scale == metadata.lr_scale:  # counts each step as it begins
                self._write(worker, metadata)


def read_work(item: StageInput, limits: FrameLimits) -> MicroBatch:
    """Decode and check the micro-batch of a stage input.

    Raises:
        BadMessage: The reason is `malformed`, `schema`, `bounds`, `shape` or `not_finite`.
    """
    return read_micro_batch(item.about, item.rows, limits, "learn")
