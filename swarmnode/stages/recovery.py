"""Checkpoints of stages, and how a stage is restored from them. Torch.

Each stage writes its own checkpoint after every step (every 2, 4, 8, … steps above 2 GB,
`checkpoint_interval`). Its neighbours on the ring of stages store a replica of it every
`checkpoint_every` steps. In a new crew the trainer first continues with the stage in memory
(`Stage.continue_at`). Otherwise `restore` tries these sources in order, and takes the first that
can be read and has finite values:

    usable own checkpoint    of the crew's step or the one before
    any checkpoint           on this node or another member, the nearest in step first
    base                     the base model; with LoRA an untrained adapter

With `checkfree` and `checkfree+` the average of both neighbouring stages takes the place of any
checkpoint that is not usable.

These terms have a fixed meaning here. An *own checkpoint* is a stage on the disk of the node that
trained it. A *replica checkpoint* is one that another member trained and sent. A *neighbour* is the
holder of the stage before or after, on a ring. A *held block* is a block of layers that a node
offers to crews. The *policy copy* is the int8 model that a node samples from.

The file reads from the top: `restore` tries the sources (`checkfree.py` averages the neighbours),
and the trainer calls `StageRecovery`. Then follow a stage's state as bytes, checkpoints on disk,
the recorder that makes them, and the exchange between trainers (`StateExchange`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import structlog
import torch
import trio
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from swarmnode.averaging.lora import A_MARK
from swarmnode.errors import (
    BadMessage,
    Incompatible,
    PeerError,
    PeerTimeout,
    Refused,
    StateError,
    Unavailable,
)
from swarmnode.files import pinned, sync_directory
from swarmnode.policy.load import lora_settings
from swarmnode.policy.micro import free_memory, is_oom
from swarmnode.stages import wire
from swarmnode.stages.checkfree import LEARNING_RATE_FACTOR, NeighbourLayers, end_names, synthesise
from swarmnode.stages.model import (
    LrScale,
    StageRuntime,
    add_adapter,
    cut_ends,
    decode,
    encode,
    load_stage,
    make_batch,
    stage_config,
    tensor_reader,
)
from swarmnode.stages.pipeline import Observer, StageWorker, WorkRunner, run_in_thread
from swarmnode.stages.policy_copy import (
    BaseTensors,
    CopyTensors,
    copied_layout,
    copy_bytes,
    decode_copy,
    encode_copy,
)
from swarmnode.stages.wire import (
    CHUNK_BYTES,
    ActivationCodec,
    Fence,
    FrameLimits,
    HaveMessage,
    InventoryMessage,
    MicroBatch,
    Place,
    Routes,
    StageSpec,
    StateForm,
    activation_bytes,
    close_streams,
    hash_body,
    is_device_error,
    read_micro_batch,
    state_bytes,
)
from swarmnode.weights.layout import Layout, elements, make_layout
from swarmnode.wire import strict
from swarmnode.wire.tensors import pack_logprobs

if TYPE_CHECKING:
    from peft import LoraConfig

    from swarmnode.config import StagesConfig
    from swarmnode.stages.trainer import CrewModel, Stage, StageAveraging

log = structlog.get_logger("swarmnode.crew")

Tensors = Mapping[str, torch.Tensor]
RecoveryMode = Literal["checkpoints", "checkfree", "checkfree+"]
"""Values of `stages.recovery`. `checkpoints`: stages are restored from checkpoints."""
SourceName = Literal["checkpoint", "neighbour", "base", "checkfree", "checkfree+"]
"""Names in `wire.SOURCES` from which a stage can be restored. `neighbour`: a replica checkpoint, on
any member's disk or on this node's."""
ReportSource = Callable[[Literal["loading"], str], None]
"""Function that reports the source that is tried next."""


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
    """Most bytes of received activations in these micro-batches."""
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


def check_checkfree(mode: RecoveryMode, stages: int, adapter: bool) -> None:
    """Check that a crew may rebuild stages by CheckFree or CheckFree+.

    Args:
        stages: Configured number of stages; 0 for any number.
        adapter: True if only a LoRA adapter is trained.

    Raises:
        Refused: An adapter is trained, or there are too few stages.
    """
    if mode == "checkpoints":
        return
    if adapter:
        raise Refused(
            f"{mode} averages whole weights, and only an adapter is trained here: set"
            " stages.recovery to checkpoints"
        )
    least = 3 if mode == "checkfree" else 4
    if stages < least:
        raise Refused(
            f"{mode} needs {least} or more stages, and stages.stages is {stages}: raise it, or set"
            " stages.recovery to checkpoints"
        )


# Restore one stage: load the first source that can be loaded.

ASK_SECONDS: Final = 10.0
"""Deadline of the query for other members' checkpoints of this stage."""
RETRY_SECONDS: Final = (0.25, 5.0)
"""Interval between requests to a stage that is being restored: first, and at most."""
BaseWeights = Callable[[], Tensors]
"""Reads the weights that training began with, by the stage's names. Raises LocalError."""


@dataclass(frozen=True)
class RestoreSource:
    """A source from which the stage can be restored."""

    name: SourceName
    step: int | None = None
    """Committed steps in a checkpoint; None for other sources."""
    holder: int | None = None
    """Stage whose holder has the checkpoint; None for this node."""
    usable: bool = False
    """True for an own checkpoint of the crew's step or the one before, with which the crew
    continues. Any other checkpoint has lost steps."""


@dataclass(frozen=True)
class LoadedStage:
    """State of a stage that was loaded from a source, and of what belongs to it."""

    state: StageState
    lr_scale: LrScale
    outer: Tensors = field(default_factory=dict)
    """State of averaging at the same step, by name."""
    rng: torch.Tensor | None = None


@dataclass(frozen=True)
class RestoredStage:
    """Outcome of `restore`."""

    source: RestoreSource
    tried: tuple[tuple[SourceName, str], ...]
    """Sources that failed before, with reasons."""
    loaded: LoadedStage

    def install(self, worker: StageWorker) -> None:
        """Load moments, norm, learning rate and random generator into the worker. The runtime has
        the weights already."""
        load_moments(worker, self.loaded.state)
        worker.optimizer.squared_norm = self.loaded.state.squared_norm
        worker.optimizer.lr_scale = replace(self.loaded.lr_scale)
        if self.loaded.rng is not None:
            torch.set_rng_state(self.loaded.rng)


async def restore(
    exchange: StateExchange,
    *,
    step: int,
    base: BaseWeights | None,
    notify: Callable[[str], None] = lambda source: None,
) -> RestoredStage:
    """Restore `exchange.stage.runtime` for a crew that has committed `step` steps.

    Args:
        base: Reader of the base model's weights; None if the base must not be a source.
        notify: Called with the name of each source before it is tried.

    Raises:
        Refused: No source can be used; the message has each source's reason.
    """
    stage = exchange.stage
    stage.phase, stage.restored = "restoring", None
    inventories = await exchange.fetch.ask()
    tried: list[tuple[SourceName, str]] = []
    for source in _sources(stage, inventories, step, base is not None):
        notify(source.name)
        try:
            loaded = await _load(exchange, source, inventories, base)
        except (PeerError, StateError, Unavailable, Refused, OSError) as error:
            reason = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            reason = "out of memory" if is_oom(error) else f"device: {error}"
            free_memory()
        else:
            stage.phase, stage.restored = "ready", loaded.state
            return RestoredStage(source, tuple(tried), loaded)
        tried.append((source.name, reason))
    reasons = "; ".join(f"{name}: {why}" for name, why in tried) or "no member has a checkpoint"
    raise Refused(f"no source is left for this stage: {reasons}")


def _sources(
    stage: LocalStage, inventories: Mapping[int, InventoryMessage], step: int, has_base: bool
) -> list[RestoreSource]:
    """Return the sources of this stage, the best first."""
    checkpoints = [
        RestoreSource("neighbour", held.checkpoint, holder)
        for holder, held in inventories.items()
        if held.checkpoint is not None
    ]
    if (own := stage.stored(stage.spec.index)) is not None:
        usable = own.own and step - 1 <= own.step <= step
        checkpoints.append(
            RestoreSource("checkpoint" if own.own else "neighbour", own.step, None, usable)
        )
    age = lambda checkpoint: abs(step - (checkpoint.step or 0))
    checkpoints.sort(
        key=lambda checkpoint: (
            not checkpoint.usable,
            age(checkpoint),
            checkpoint.holder is not None,
        )
    )
    mode = stage.settings.mode
    if mode != "checkpoints" and not stage.settings.uses_checkpoints(stage.spec):
        checkpoints = [
            *(checkpoint for checkpoint in checkpoints if checkpoint.usable),
            RestoreSource(mode),
        ]
    return [*checkpoints, RestoreSource("base")] if has_base else checkpoints


async def _load(
    exchange: StateExchange,
    source: RestoreSource,
    inventories: Mapping[int, InventoryMessage],
    base: BaseWeights | None,
) -> LoadedStage:
    """Load the stage from `source` into the runtime.

    Raises:
        PeerError: Another member is gone or sent an invalid body.
        StateError, Unavailable, OSError: A file is damaged or missing.
        Refused: A neighbour that is needed is lost too.
    """
    stage = exchange.stage
    loaded = await _read(exchange, source, inventories, base)
    if stage.runtime.embedding() is not None:
        loaded = await _take_tied_embedding(exchange, loaded, inventories)
    await exchange.channel.compute(partial(load_weights, stage.runtime, loaded.state.weights))
    return loaded


async def _read(
    exchange: StateExchange,
    source: RestoreSource,
    inventories: Mapping[int, InventoryMessage],
    base: BaseWeights | None,
) -> LoadedStage:
    stage, spec = exchange.stage, exchange.stage.spec
    if source.name in ("checkpoint", "neighbour"):
        if source.holder is None:
            return await exchange.channel.compute(stage.read_checkpoint)
        return stage.warming_up(await exchange.fetch.state(source.holder, "checkpoint", spec.index))
    if source.name == "base":
        assert base is not None
        return stage.warming_up(StageState(0, await exchange.channel.compute(base)))
    weights = await _synthesise(exchange, inventories)
    return LoadedStage(StageState(0, weights), LrScale(LEARNING_RATE_FACTOR))


async def _synthesise(
    exchange: StateExchange, inventories: Mapping[int, InventoryMessage]
) -> dict[str, torch.Tensor]:
    """Return weights that are rebuilt from the neighbours.

    Raises:
        Refused: A neighbour, or the stored end tensors, are lost too.
        PeerError: A neighbour is gone or sent an invalid body.
    """
    spec = exchange.stage.spec
    for near in (spec.index - 1, spec.index + 1):
        if 0 <= near < spec.stages and (
            near not in inventories or inventories[near].phase != "ready"
        ):
            raise Refused(f"neighbour stage {near} is lost too")
    ends = None
    if end_names(spec):
        holders = [(held.ends, near) for near, held in inventories.items() if held.ends is not None]
        if not holders:
            raise Refused("no member has stored this end's embedding or head")
        ends = (await exchange.fetch.state(max(holders)[1], "ends", spec.index)).weights

    async def neighbour(stage: int) -> NeighbourLayers:
        layers = await exchange.fetch.state(stage, "layers", stage)
        return NeighbourLayers(layers.weights, layers.squared_norm)

    before = None if spec.has_embedding else await neighbour(spec.index - 1)
    after = None if spec.has_head else await neighbour(spec.index + 1)
    return await exchange.channel.compute(lambda: synthesise(spec, before, after, ends=ends))


async def _take_tied_embedding(
    exchange: StateExchange, loaded: LoadedStage, inventories: Mapping[int, InventoryMessage]
) -> LoadedStage:
    """Return the loaded stage with the tied embedding and its moments of the other end.

    Both ends must have the same tied embedding. If both ends are lost, they use that of stage 0.
    """
    spec = exchange.stage.spec
    other = spec.stages - 1 if spec.has_embedding else 0
    if spec.has_embedding and (other not in inventories or inventories[other].phase != "ready"):
        return loaded
    theirs, state = await exchange.fetch.state(other, "tied", other), loaded.state
    (name,) = theirs.weights
    merge = lambda mine, new: {**{n: t for n, t in mine.items() if n != name}, **new}
    state = replace(
        state,
        weights=merge(state.weights, theirs.weights),
        first=merge(state.first, theirs.first),
        second=merge(state.second, theirs.second),
        counts=merge(state.counts, theirs.counts),
    )
    return replace(loaded, state=state)


def base_stage_reader(directory: Path, spec: StageSpec) -> BaseWeights:
    """Return a function that reads the stage's weights in a model's directory."""
    return lambda: {n: host_copy(p) for n, p in load_stage(directory, spec).named_parameters()}


def base_adapter_reader(runtime: StageRuntime) -> BaseWeights:
    """Return a function that returns the untrained adapter. Before the stage is restored, `runtime`
    has the untrained adapter."""
    untrained = {name: host_copy(tensor) for name, tensor in trained(runtime).items()}
    return lambda: untrained


# A micro-batch through one stage, for the probe of an average (`trainer.AverageProbe`).


def run_one(runtime: StageRuntime, work: MicroBatch, x: bytes, codec: ActivationCodec) -> bytes:
    """Run one micro-batch through one stage, without gradient.

    Args:
        x: Activations in the crew's codec; empty at stage 0.

    Returns:
        Activations in the codec; at the last stage log-probabilities of the completion tokens,
        float32.

    Raises:
        BadMessage: `x` are not activations of this micro-batch.
        ValueError: The stage's own results are not finite.
    """
    batch = make_batch(work, runtime.device)
    entered = (
        None
        if runtime.spec.has_embedding
        else decode(x, work.rows, runtime.hidden_size, codec).to(runtime.device)
    )
    if not runtime.spec.has_head:
        return encode(runtime.forward(batch, entered), codec)
    logprobs = (
        runtime.score(batch, entered, work.temperature)[0][batch.completion_mask].float().cpu()
    )
    if not bool(torch.isfinite(logprobs).all()):
        raise ValueError("a log-probability is not finite")
    return pack_logprobs(logprobs.numpy())


# The interface for the trainer, across crews.


class StageRecovery:
    """Stores checkpoints on this node, and restores its stage.

    Args:
        directory: Directory of the trainer.
        settings: Settings of recovery.
        model: The model.
        averaging: Returns the averaging of the present stage; None without averaging.
        extra_status: Returns further fields of `status_fields` for a step of the crew.
        connect: Opens a state stream to each other stage. Raises PeerError.
        owner: `trainer.state.owner` of the policy, for exports.
    """

    def __init__(
        self,
        directory: Path,
        settings: RecoverySettings,
        model: CrewModel,
        averaging: Callable[[], StageAveraging | None] = lambda: None,
        extra_status: Callable[[int], dict[str, int]] = lambda step: {},
        *,
        connect: Callable[[wire.StageAssignment], Awaitable[dict[int, trio.abc.Stream]]],
        owner: str,
    ) -> None:
        self.outer: Tensors = {}
        """State of averaging from the own checkpoint; empty after any other source."""
        self.exchange: StateExchange | None = None
        """This node's end of the state streams; None without a crew."""
        self._directory = directory / CHECKPOINTS
        self._store = CheckpointStore(self._directory)
        self._settings = settings
        self._model = model
        self._averaging = averaging
        self._extra_status = extra_status
        self._connect = connect
        self._owner = owner
        self._layouts: tuple[Layout, ...] = ()
        self._partial_bodies: dict[int, PartialBody] = {}
        self._recorder: Recorder | None = None

    def held_blocks(self) -> tuple[wire.HeldBlock, ...]:
        """Return the newest checkpoints on this node's disk, for its offer. Call it in a thread."""
        coming = (
            self._store.writing_metadata
        )  # read before the files, since it may become one meanwhile
        found = {metadata.path: metadata for metadata in find_checkpoints(self._directory)}
        if coming is not None:
            found[coming.path] = coming
        newest = sorted(found.values(), key=lambda metadata: -metadata.step)[
            : wire.MAX_HELD_BLOCKS - 1
        ]
        return tuple(
            wire.HeldBlock(
                lineage=bytes.fromhex(metadata.identity.lineage),
                layers=metadata.identity.layers,
                stage=metadata.stage,
                step=metadata.step,
                where="disk" if metadata.own else "neighbour",
            )
            for metadata in newest
        )

    def prepare(self, assignment: wire.StageAssignment) -> None:
        """Find the checkpoints on this node's disk for the assigned crew. Call it in a thread."""
        self._recorder = None  # its checkpoint is of the former stage
        self._store.flush()
        model = self._model
        lora = lora_settings(model.policy) if model.terms.lora.r else None
        specs = wire.stage_specs(model.config, assignment.layers)
        layouts = stage_layouts(model.config, specs, lora, model.terms.frozen_a)
        identity = CheckpointIdentity(assignment.lineage.hex(), assignment.layers, self._owner)
        if layouts != self._layouts:
            self._partial_bodies.clear()
        self._layouts = layouts
        stored = stored_stages(assignment.stage, len(specs), self._settings)
        self._store.begin(identity, stored)

    def stage_built(self, stage: Stage) -> None:
        """Start to record a stage that has just been built with the base model's weights."""
        averaging = self._averaging()
        self.outer = {}
        self._recorder = Recorder(
            stage.runtime.spec,
            self._settings,
            self._layouts,
            self._store,
            averaging.tensors if averaging is not None else dict,
        )
        stage.observers.append(self._recorder)

    @contextlib.asynccontextmanager
    async def open(self, assignment: wire.StageAssignment, stage: Stage) -> AsyncIterator[None]:
        """Open the state streams, over which members exchange checkpoints, for the time of the
        context.

        Raises:
            PeerError: A stream cannot be opened.
        """
        assert self._recorder is not None
        averaging = self._averaging()
        streams = await self._connect(assignment)
        try:
            local = LocalStage(
                stage.runtime,
                self._model.limits(),
                self._layouts,
                self._model.terms.codec,
                self._recorder,
                self._store,
                base=None if self._model.terms.lora.r else tensor_reader(self._model.directory),
                partial_bodies=self._partial_bodies,
            )
            place = Place(assignment.crew[: wire.CREW_BYTES], assignment.stage, assignment.step)
            fence = Fence(place, len(assignment.layers))
            self.exchange = exchange = StateExchange(local, fence, streams, stage.meter)
            async with trio.open_nursery() as nursery:
                await nursery.start(exchange.run)
                if averaging is not None:
                    averaging.probe.open(exchange)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self.exchange = self._recorder.sharing = None
            if averaging is not None:
                averaging.probe.close()
            await close_streams(streams)

    async def restore(
        self, stage: Stage, assignment: wire.StageAssignment, notify: ReportSource
    ) -> str:
        """Restore `stage` and return the name of its source.

        Args:
            notify: Called with "loading" and the source that is tried next.

        Raises:
            Refused: No source can be used.
        """
        assert self.exchange is not None
        restored = await restore(
            self.exchange,
            step=assignment.step,
            base=self._base(stage),
            notify=lambda source: notify("loading", source),
        )
        self._partial_bodies.pop(assignment.stage, None)
        restored.install(stage.worker)
        self.outer = restored.loaded.outer
        for source, why in restored.tried:
            log.info("source failed", source=source, reason=why)
        log.info(
            "weights restored",
            source=restored.source.name,
            step=assignment.step,
            source_step=restored.source.step,
        )
        return restored.source.name

    def _base(self, stage: Stage) -> BaseWeights:
        """Return a reader of the base model's weights. Call it before the stage is restored."""
        if self._model.terms.lora.r > 0:
            return base_adapter_reader(stage.runtime)
        return base_stage_reader(self._model.directory, stage.runtime.spec)

    def attach(self, assignment: wire.StageAssignment, worker: StageWorker) -> None:
        """Serve the weights of `worker`, which has not started, to other members."""
        assert self.exchange is not None
        self.exchange.attach(worker, assignment.step)

    def progress(self) -> int:
        """Return a number that grows while weights arrive or a checkpoint is written, as a sign of
        progress."""
        writing = int(time.monotonic()) if self._store.busy else 0
        return writing + (self.exchange.channel.progress if self.exchange is not None else 0)

    def status_fields(self, step: int) -> dict[str, int]:
        """Return fields of StageStatus: checkpoint_step, checkpoint_age_steps, and those of
        `extra_status`."""
        stored = self.exchange.sharing.stored_steps if self.exchange is not None else {}
        if stored:
            newest = max(stored.values())
            ages = {"checkpoint_step": newest, "checkpoint_age_steps": max(0, step - newest)}
        elif self.exchange is not None and self.exchange.channel.streams:
            ages = {"checkpoint_age_steps": step}  # without a checkpoint all steps would be lost
        else:
            ages = {}
        return {**ages, **self._extra_status(step)}

    def refused(self) -> dict[str, int]:
        """Return counts of `wire.STATE_REFUSALS`."""
        return dict(self.exchange.channel.refused) if self.exchange is not None else {}

    def fault(self) -> tuple[int, str] | None:
        """Return the stage that sent garbage on a state stream, and the reason."""
        return self.exchange.channel.fault if self.exchange is not None else None

    def forget(self) -> None:
        """Do not write the weights in memory: they are undefined."""
        if self._recorder is not None:
            self._recorder.unwritten = None

    def close(self) -> None:
        """Write the last step of the stage, at the end of the trainer."""
        if self._recorder is not None:
            self._recorder.write_last()
            self._recorder = None
        self._store.close()


# A stage's training state in host memory, as bytes, and back:
#
#     full     weights ‖ first moments ‖ second moments ‖ counts, float32: 12 bytes/parameter
#     small    weights, bfloat16: 2 bytes/parameter, relative error 2⁻⁹; the optimizer starts new
#     plain    weights, float32: for parts of a stage that CheckFree needs
#
# With LoRA these are the tensors of the adapter, otherwise all tensors of the stage.

BLOCK_VALUES: Final = 2**20
"""Number of values that are checked at a time."""


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


def trained_layout(model: torch.nn.Module) -> Layout:
    """Return names and shapes of the trained tensors."""
    return make_layout(
        (name, p.shape, "float32") for name, p in model.named_parameters() if p.requires_grad
    )


def stage_layouts(
    config: PretrainedConfig,
    specs: Sequence[StageSpec],
    lora: LoraConfig | None = None,
    frozen_a: bool = False,
) -> tuple[Layout, ...]:
    """Return the layout of the trained tensors of each stage. This reads no weights.

    Args:
        specs: All stages.
        lora: Settings of the adapter; None if all weights are trained.
        frozen_a: True if the adapter's A is not trained.
    """
    layouts = []
    for spec in specs:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                stage_config(config, spec), dtype=torch.float32
            )
            cut_ends(model, spec)
            model.tie_weights()
            model = model if lora is None else add_adapter(model, lora)
        layout = trained_layout(model)
        layouts.append(tuple(t for t in layout if not (frozen_a and A_MARK in t.name)))
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
        BadMessage: size, not_finite, or bounds (a second moment or a count below zero).
    """
    if len(body) != state_bytes(layout, form):
        raise BadMessage("size", f"{len(body)} bytes of a state of {state_bytes(layout, form)}")
    values = body.view(torch.bfloat16 if form == "small" else torch.float32)
    weights = elements(layout)
    for start in range(0, len(values), BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES]
        if not bool(torch.isfinite(block).all()):
            raise BadMessage("not_finite", "a state")
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
        store: Store of checkpoints; None to make none.
        outer: Returns the state of averaging. Its tensors must not change afterwards.
    """

    def __init__(
        self,
        spec: StageSpec,
        settings: RecoverySettings,
        layouts: Sequence[Layout] = (),
        store: CheckpointStore | None = None,
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
        self.sharing: CheckpointSharing | None = None
        """Exchange of checkpoints; None without state streams."""
        self._layout = layouts[spec.index] if layouts else ()
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
        if self._store is not None:
            self._checkpoint(worker, self._store)
        if self.settings.mode == "checkfree+" and (self.spec.has_embedding or self.spec.has_head):
            state = dict(worker.runtime.model.named_parameters())
            copies = {name: host_copy(state[name]) for name in end_names(self.spec)}
            self.ends[self.spec.index] = worker.participant.step, copies

    def after_step(self) -> None:
        if self.sharing is None:
            return
        if self.replica is not None and self.replica.step != self._announced:
            self._announced = self.replica.step
            self.sharing.announce("checkpoint", self.replica.step)
        if self.spec.index in self.ends:
            self.sharing.announce("ends", self.ends[self.spec.index][0])

    def _append(self, inputs: deque[StageInput], new: StageInput) -> None:
        inputs.append(new)
        while sum(len(one.body) for one in inputs) > self.settings.input_bytes:
            inputs.popleft()

    def _checkpoint(self, worker: StageWorker, store: CheckpointStore) -> None:
        """Write the own checkpoint, and make the neighbours' replica, if either is due."""
        optimizer, step, body = worker.optimizer, worker.participant.step, None
        metadata = store.describe(
            self.spec.index, "full", step, optimizer.squared_norm, optimizer.lr_scale
        )
        self.unwritten = worker, metadata
        if step % self._every == 0 and not store.busy:
            body = self._write(worker, metadata, store)
        if self.settings.uses_checkpoints(self.spec) and step % self.settings.checkpoint_every == 0:
            self.make_replica(worker, body)

    def _write(
        self, worker: StageWorker, metadata: CheckpointMetadata, store: CheckpointStore
    ) -> bytearray:
        body = encode_state(live_state(worker), self._layout, "full")
        more = {f"outer.{name}": tensor for name, tensor in self._outer().items()}
        more["rng"] = torch.get_rng_state()
        if store.write_soon(Checkpoint(metadata, as_tensor(body), more)):
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
        if self._store is None or self.unwritten is None:
            return
        self._store.flush()
        worker, metadata = self.unwritten
        with worker.optimizer.lock:
            if worker.optimizer.lr_scale == metadata.lr_scale:  # counts each step as it begins
                self._write(worker, metadata, self._store)


def read_work(item: StageInput, limits: FrameLimits) -> MicroBatch:
    """Decode and check the micro-batch of a stage input.

    Raises:
        BadMessage: The reason is `malformed`, `schema`, `bounds`, `shape` or `not_finite`.
    """
    return read_micro_batch(item.about, item.rows, limits, "learn")


# The local stage, for the exchange below.

StateBody = Literal["checkpoint", "layers", "ends", "tied"]
"""Bodies that are the state of a stage or of a part of it. checkpoint: all trained tensors. layers:
the layers. ends: the embedding, or norm and head. tied: the tied embedding with its moments."""


@dataclass
class PartialBody:
    """A body that has partly arrived. It outlives its crew, so that the next crew can resume the
    transfer."""

    root: bytes = b""
    """Hash of the whole body; empty before the first byte."""
    body: bytearray = field(default_factory=bytearray)
    at: int = 0
    """Number of bytes that have arrived."""

    def begin(self, root: bytes, size: int) -> None:
        """Continue with the same body, or start with another one."""
        if (root, size) != (self.root, len(self.body)):
            self.root, self.body, self.at = root, bytearray(size), 0


@dataclass
class LocalStage:
    """This member's stage, its checkpoints and its phase.

    Attributes:
        layouts: Trained tensors of each stage (`stage_layouts`).
        worker: Worker of the stage; None until it is attached.
        base: Reads a tensor of the base model; None if an adapter is trained.
        restored: State that the weights were restored from, until there is a worker.
        partial_bodies: Checkpoints that have partly arrived, by stage.
    """

    runtime: StageRuntime
    limits: FrameLimits
    layouts: Sequence[Layout]
    codec: ActivationCodec
    recorder: Recorder
    store: CheckpointStore | None = None
    worker: StageWorker | None = None
    phase: wire.StatePhase = "starting"
    base: BaseTensors | None = None
    restored: StageState | None = None
    partial_bodies: dict[int, PartialBody] = field(default_factory=dict)
    _encoding: trio.Lock = field(default_factory=trio.Lock)

    @property
    def spec(self) -> StageSpec:
        return self.recorder.spec

    @property
    def settings(self) -> RecoverySettings:
        return self.recorder.settings

    def stored(self, stage: int) -> CheckpointMetadata | None:
        """Return the metadata of the checkpoint of `stage` on this node's disk; None without
        one."""
        return None if self.store is None else self.store.metadata(stage)

    def read_checkpoint(self) -> LoadedStage:
        """Read the checkpoint of the own stage.

        Raises:
            StateError: The file is damaged.
            BadMessage: Its body is not a state of this stage.
        """
        assert self.store is not None
        found = self.store.read(self.spec.index)
        metadata, layout = found.metadata, self.layouts[self.spec.index]
        state = decode_state(
            found.body, layout, metadata.form, metadata.step, metadata.squared_norm
        )
        if not metadata.own:
            return self.warming_up(state)
        outer = {
            name.removeprefix("outer."): tensor
            for name, tensor in found.extra_tensors.items()
            if name.startswith("outer.")
        }
        if not all(bool(torch.isfinite(tensor).all()) for tensor in outer.values()):
            raise StateError("the state of averaging in the own checkpoint is not finite")
        return LoadedStage(state, metadata.lr_scale, outer, found.extra_tensors.get("rng"))

    def warming_up(self, state: StageState) -> LoadedStage:
        """Return a loaded stage. Its learning rate warms up if its optimizer is new."""
        return LoadedStage(state, LrScale(warmup=0 if state.counts else self.settings.warmup_steps))

    def spec_of(self, stage: int) -> StageSpec:
        """Return a spec that shows which end `stage` is. It has no layers."""
        return StageSpec(stage, self.spec.stages, 0, 0, self.spec.tied)

    def expected_body(self, kind: StateBody, owner: int) -> tuple[Layout, StateForm]:
        """Return the tensors and the form of a body of stage `owner`.

        A tied embedding has the name that it has at this end, also if the other end sent it.
        """
        layout = self.layouts[owner]
        if kind == "checkpoint":
            return layout, replica_form(layout, self.settings)
        if kind == "layers":
            return tuple(spec for spec in layout if ".layers." in spec.name), "plain"
        if kind == "ends":
            names = end_names(self.spec_of(owner))
            return tuple(spec for spec in layout if spec.name in names), "plain"
        name = "model.embed_tokens.weight" if self.spec.has_embedding else "lm_head.weight"
        return tuple(s for s in self.layouts[self.spec.index] if s.name == name), "full"

    def expected_bytes(self, owner: int, have: HaveMessage) -> int:
        """Return the length that a body of stage `owner` must have.

        Raises:
            BadMessage: The reason is `size` or `schema`.
        """
        match have.what:
            case "copy":
                layout = copied_layout(self.spec_of(owner), self.layouts[owner])
                most = copy_bytes(layout, adapter=self.base is None)
                least = most if self.base is None else 0
                if not least <= have.size <= most:
                    raise BadMessage("size", f"{have.size} bytes of a copy, at most {most}")
                return have.size
            case "output":
                raise BadMessage("schema", "an output that is part of a stage")
            case kind:
                return state_bytes(*self.expected_body(kind, owner))

    async def policy_copy(self, compute: WorkRunner) -> tuple[int, bytes]:
        """Return (step, weights encoded for a policy copy). They are encoded once per step.

        Raises:
            StateError: The stage has no worker, or a step was taken meanwhile.
            Unavailable: The base model cannot be read.
        """
        if self.worker is None:
            raise StateError("the stage has no weights yet")
        layout = copied_layout(self.spec, self.layouts[self.spec.index])
        participant = self.worker.participant
        async with self._encoding:
            async with self.worker.optimizer.moving:  # not during a step
                step = participant.step
            if self.recorder.policy_copy is None or self.recorder.policy_copy[0] != step:
                self.recorder.policy_copy = None
                body = await compute(
                    lambda: encode_copy(self.spec, trained(self.runtime), layout, self.base)
                )
                if participant.step != step:
                    raise StateError("a step was taken while the weights were encoded")
                self.recorder.policy_copy = step, body
            return self.recorder.policy_copy


# The exchange between trainers: one duplex stream to each other member, with a reader and a writer.
#
# `StateExchange` is this member. `StateFetcher` sends requests, `StateServer` answers them,
# `CheckpointSharing` announces and fetches new checkpoints, and `StateChannel` has the streams. A
# request returns a body, in chunks. Chunks of several bodies alternate. A request fails when
# nothing arrives for `seconds`. Invalid input is counted. After MAX_BAD_MESSAGES invalid messages
# of a stage its stream is closed, and a closed stream ends the crew.

SERVED_AT_ONCE: Final = 5
"""Most requests of one peer that are served at a time."""
MAX_BAD_MESSAGES: Final = 16
BACKGROUND_PAUSE: Final = (7.0, 30.0)
"""(factor, seconds): after each chunk of a checkpoint for a neighbour's disk, the sender pauses for
`min(factor × duration of the chunk, seconds)`. Two neighbours together use a quarter of a line."""
WRITE_BYTES: Final = 2 * CHUNK_BYTES
"""A stream must accept this many bytes within `seconds`."""
NO_FAULT: Final = ("closed", "truncated", "does not read", "the crew is over")
"""Reasons of a stream's end for which no stage gets a strike."""

Incoming = tuple[wire.AnyStateMessage, bytes]
Handler = Callable[[int, wire.AnyStateMessage, bytes], None]


class StateExchange:
    """This member's end of the state streams in one crew.

    Args:
        stage: The local stage.
        fence: Fence of the crew.
        streams: Stream to each other stage.
        compute: Runs computations.
    """

    def __init__(
        self,
        stage: LocalStage,
        fence: Fence,
        streams: Mapping[int, trio.abc.Stream],
        compute: WorkRunner = run_in_thread,
    ) -> None:
        step = lambda: (
            stage.worker.participant.step if stage.worker is not None else fence.place.step
        )
        self.stage = stage
        self.channel = StateChannel(
            fence, streams, stage.limits, stage.settings.seconds, compute, step
        )
        self.fetch = StateFetcher(self.channel, stage)
        self.sharing = CheckpointSharing(self.channel, stage, self.fetch)
        self._server = StateServer(self.channel, stage)
        stage.recorder.sharing = self.sharing

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Handle messages until cancelled."""
        await self.channel.run(self._received, task_status)

    def attach(self, worker: StageWorker, step: int) -> None:
        """Serve the weights of `worker`, which runs the stage from `step` on."""
        self.stage.worker, self.stage.restored = worker, None
        self.stage.phase = "ready"
        self.sharing.offer_checkpoint(step)

    def _received(self, stage: int, message: wire.AnyStateMessage, body: bytes) -> None:
        match message:
            case wire.AnnounceMessage():
                self.sharing.handle_announcement(stage, message)
            case wire.StoredMessage():
                self.sharing.stored_steps[stage] = message.step
            case wire.AskMessage() | wire.WantMessage() | wire.RunMessage():
                self._server.serve(stage, message, body)


class StateFetcher:
    """Sends requests to other members. Each method raises PeerError as `StateChannel.fetch`
    does."""

    def __init__(self, channel: StateChannel, stage: LocalStage) -> None:
        self._channel = channel
        self._stage = stage

    async def ask(self) -> dict[int, InventoryMessage]:
        """Return the answer of each other stage: which bodies of this stage it has stored. Stages
        that do not answer are missing.

        The query is repeated, for at most ASK_SECONDS, while a stage does not know yet whether it
        must be restored.
        """
        found: dict[int, InventoryMessage] = {}

        async def one(stage: int) -> None:
            with contextlib.suppress(PeerError):  # it counts as a stage that has stored nothing
                found[stage] = await self._channel.ask(stage, ASK_SECONDS)

        until = trio.current_time() + ASK_SECONDS
        while True:
            async with trio.open_nursery() as nursery:
                for stage in self._channel.streams:
                    nursery.start_soon(one, stage)
            starting = any(held.phase == "starting" for held in found.values())
            if not starting or trio.current_time() >= until:
                return found
            await trio.sleep(RETRY_SECONDS[0])

    async def body(
        self, holder: int, what: wire.RequestedBody, of: int
    ) -> tuple[HaveMessage, bytearray]:
        """Return a body of stage `of` from the holder of stage `holder`."""

        def size(have: HaveMessage) -> int:
            if have.step > self._channel.step + 1:  # stages are at most one step apart
                raise BadMessage("bounds", f"{have.what} of step {have.step}, which is to come")
            return self._stage.expected_bytes(of, have)

        partial_bodies = self._stage.partial_bodies
        partial_body = (
            partial_bodies.setdefault(of, PartialBody()) if what == "checkpoint" else PartialBody()
        )
        want = wire.WantMessage(self._channel.place, 0, what, of, 0, b"")
        found = await self._channel.fetch(holder, want, size, partial_body=partial_body)
        if what == "checkpoint":
            partial_bodies.pop(of, None)
        return found

    async def state(self, holder: int, what: StateBody, of: int) -> StageState:
        """Return stage `of`, or a part of it, from the holder of stage `holder`. Wait while that
        stage is being restored."""
        have, body = await self._retry_while_loading(holder, lambda: self.body(holder, what, of))
        layout, form = self._stage.expected_body(what, of)
        decode = lambda: decode_state(as_tensor(body), layout, form, have.step, have.squared_norm)
        with self._channel.counting_bad_messages(holder):
            return await self._channel.compute(decode)

    async def policy_copy(self, spec: StageSpec) -> tuple[int, int, CopyTensors]:
        """Return (bytes received, step, weights) of a stage, for a policy copy.

        The own stage is encoded and decoded too, so that its weights are rounded like all others.

        Raises:
            PeerError: As `StateChannel.fetch`.
            StateError, Unavailable: As `LocalStage.policy_copy`, for the own stage.
        """
        layout, base = copied_layout(spec, self._stage.layouts[spec.index]), self._stage.base
        body: bytes | bytearray
        if spec.index == self._stage.spec.index:
            came, (step, body) = 0, await self._stage.policy_copy(self._channel.compute)
        else:
            have, body = await self.body(spec.index, "copy", spec.index)
            came, step = have.size, have.step
        with self._channel.counting_bad_messages(spec.index):
            parts = await self._channel.compute(lambda: decode_copy(spec, body, layout, base))
        return came, step, parts

    async def run_at(self, stage: int, edge: StageInput, tokens: int, x: bytes) -> bytes:
        """Run one micro-batch through another stage, as `run_one` does. Wait while that stage is
        being restored.

        Args:
            edge: The micro-batch.
            tokens: Number of completion tokens of the micro-batch.
            x: Activations in the crew's codec; empty for stage 0.

        Raises:
            Incompatible: The stage's numbers are not finite.
        """
        local = self._stage
        size = (
            4 * tokens
            if stage == local.spec.stages - 1
            else activation_bytes(local.codec, edge.rows, local.runtime.hidden_size)
        )
        codec = local.codec if stage else None
        run = wire.RunMessage(self._channel.place, 0, codec, edge.rows, len(edge.about))
        ask = lambda: self._channel.fetch(stage, run, lambda have: size, edge.about + x)
        _, body = await self._retry_while_loading(stage, ask)
        return bytes(body)

    async def _retry_while_loading(
        self, stage: int, ask: Callable[[], Awaitable[tuple[HaveMessage, bytearray]]]
    ) -> tuple[HaveMessage, bytearray]:
        """Repeat a request while the stage is being restored."""
        until = trio.current_time() + self._stage.settings.neighbour_seconds
        pause, most = RETRY_SECONDS
        while True:
            try:
                return await ask()
            except StageLoading:
                if trio.current_time() >= until:
                    raise PeerTimeout(f"stage {stage} was not restored in time") from None
            await trio.sleep(pause)
            pause = min(2 * pause, most)


@dataclass(frozen=True)
class ServedBody:
    """A body that can be sent, and its fields of `HaveMessage`."""

    step: int
    read: Callable[[], bytes | bytearray | memoryview]
    """Returns the body."""
    squared_norm: float = 0.0


class StateServer:
    """Answers requests of other members."""

    def __init__(self, channel: StateChannel, stage: LocalStage) -> None:
        self._channel = channel
        self._stage = stage
        self._serving: Counter[int] = Counter()

    def serve(
        self, stage: int, message: wire.AskMessage | wire.WantMessage | wire.RunMessage, body: bytes
    ) -> None:
        """Answer one request in the background."""
        if self._serving[stage] >= SERVED_AT_ONCE:
            self._channel.refused["busy"] += 1
            self._channel.post(
                stage, wire.LackMessage(self._channel.place, message.request, "busy")
            )
            return
        self._serving[stage] += 1
        self._channel.spawn(partial(self._serve, stage, message, body))

    async def _serve(
        self, stage: int, message: wire.AskMessage | wire.WantMessage | wire.RunMessage, body: bytes
    ) -> None:
        """Answer one request. A failure is counted, and answered with LackMessage."""
        lack: wire.LackReason | None = "failed"
        try:
            with self._channel.counting_failures(), self._channel.counting_bad_messages(stage):
                if isinstance(message, wire.AskMessage):
                    await self._channel.send(stage, self._inventory(stage, message.request))
                    lack = None
                else:
                    lack = await self._send_requested(stage, message, body)
        except BadMessage:
            lack = "refused"
        except PeerError:
            return  # the stage is gone
        finally:
            self._serving[stage] -= 1
        if lack is not None:
            self._channel.post(stage, wire.LackMessage(self._channel.place, message.request, lack))

    def _inventory(self, stage: int, request: int) -> InventoryMessage:
        checkpoint, recorder = self._stage.stored(stage), self._stage.recorder
        ends = recorder.ends.get(stage)
        return InventoryMessage(
            self._channel.place,
            request,
            self._stage.phase,
            checkpoint.step if checkpoint is not None else None,
            ends[0] if ends is not None else None,
        )

    async def _send_requested(
        self, stage: int, asked: wire.WantMessage | wire.RunMessage, body: bytes
    ) -> wire.LackReason | None:
        """Send the requested body, or return why there is none.

        Raises:
            BadMessage: The request is invalid.
            PeerError: The stage is gone.
        """
        want = asked if isinstance(asked, wire.WantMessage) else None
        what: wire.BodyKind = "output" if want is None else want.what
        phase, own, channel = self._stage.phase, self._stage.spec.index, self._channel
        if what in ("layers", "tied", "copy", "output") and phase != "ready":
            return "loading"
        found = await self._find_body(stage, asked, body)
        if found is None:
            return "none"
        data = memoryview(await channel.compute(found.read))
        root = await channel.compute(lambda: hash_body(data))
        have = HaveMessage(
            channel.place, asked.request, what, found.step, len(data), root, found.squared_norm
        )
        at = want.at if want is not None and want.root == root else 0
        if at >= len(data):
            raise BadMessage("bounds", f"byte {at} of {len(data)}")
        is_replica = want is not None and (want.what, want.of) == ("checkpoint", own)
        await channel.send_body(stage, have, data, at, background=is_replica)
        return None

    async def _find_body(
        self, stage: int, asked: wire.WantMessage | wire.RunMessage, body: bytes
    ) -> ServedBody | None:
        """Return the body that `stage` requests; None if this member does not have it.

        Raises:
            BadMessage: The request is invalid.
        """
        local, recorder, step = self._stage, self._stage.recorder, self._channel.step
        spec, worker = local.spec, local.worker
        if isinstance(asked, wire.RunMessage):
            if asked.codec != (None if spec.has_embedding else local.codec):
                raise BadMessage("schema", "not activations of this crew")
            work = read_micro_batch(body[: asked.about], asked.rows, local.limits, "learn")
            x = body[asked.about :]
            return ServedBody(step, lambda: run_one(local.runtime, work, x, local.codec))
        of = asked.of
        if of not in (stage, spec.index):
            return None
        match asked.what:
            case "checkpoint" if of == spec.index and recorder.replica is not None:
                replica = recorder.replica
                return ServedBody(replica.step, lambda: replica.body, replica.squared_norm)
            case "checkpoint" if of != spec.index and (store := local.store) is not None:
                if (stored := store.metadata(of)) is not None:
                    read = lambda: store.read(of).body.numpy().data
                    return ServedBody(stored.step, read, stored.squared_norm)
            case "ends" if of in recorder.ends:
                ends_step, tensors = recorder.ends[of]
                state = StageState(ends_step, tensors)
                return ServedBody(
                    ends_step, lambda: encode_state(state, *local.expected_body("ends", of))
                )
            case "copy":
                copy_step, copy = await local.policy_copy(self._channel.compute)
                return ServedBody(copy_step, lambda: copy)
            case "layers" if abs(stage - spec.index) == 1 and local.settings.mode != "checkpoints":
                norm = 0.0 if worker is None else worker.optimizer.squared_norm
                return ServedBody(step, lambda: self._encode_now("layers"), norm)
            case "tied" if stage in (0, spec.stages - 1) and spec.shares_embedding:
                if local.expected_body("tied", of)[0]:
                    return ServedBody(step, lambda: self._encode_now("tied"))
        return None

    def _encode_now(self, what: StateBody) -> bytearray:
        """Encode a part of this stage's present weights."""
        local = self._stage
        if local.worker is not None:
            state = live_state(local.worker)
        else:
            state = local.restored or StageState(self._channel.step, {})
            state = replace(state, weights=trained(local.runtime))
        return encode_state(state, *local.expected_body(what, local.spec.index))


class CheckpointSharing:
    """Exchange of checkpoints and ends between members that store them for each other.

    A stage announces each new body. The members that store it fetch one body of each stage and kind
    at a time, and skip a body that is superseded meanwhile.
    """

    def __init__(self, channel: StateChannel, stage: LocalStage, fetch: StateFetcher) -> None:
        self.stored_steps: dict[int, int] = {}
        """Stage → committed steps in this stage's checkpoint on the disk of its holder."""
        self._channel = channel
        self._stage = stage
        self._fetch = fetch
        self._newest: dict[tuple[int, wire.SharedBody], wire.AnnounceMessage] = {}
        """(stage, kind) of a running fetch → newest announcement."""
        self._memory_lock = trio.Lock()
        """Held while a checkpoint is fetched: memory may hold only one at a time."""

    def announce(self, what: wire.SharedBody, step: int) -> None:
        """Announce a new body to all members."""
        for stage in self._channel.streams:
            self._channel.post(stage, wire.AnnounceMessage(self._channel.place, 0, what, step))

    def offer_checkpoint(self, step: int) -> None:
        """Announce this stage's replica checkpoint to a new crew. Make one if it is not recent
        enough."""
        recorder, settings = self._stage.recorder, self._stage.settings
        if self._stage.store is None or not settings.uses_checkpoints(self._stage.spec) or not step:
            return
        replica = recorder.replica
        if replica is not None and step - settings.checkpoint_every < replica.step <= step:
            self.announce("checkpoint", replica.step)
        elif self._channel.streams:
            self._channel.spawn(self._make_replica)

    async def _make_replica(self) -> None:
        worker, recorder = self._stage.worker, self._stage.recorder
        assert worker is not None
        with self._channel.counting_failures():
            async with worker.optimizer.moving:  # not during a step
                await self._channel.compute(partial(recorder.make_replica, worker))
            assert recorder.replica is not None
            self.announce("checkpoint", recorder.replica.step)

    def handle_announcement(self, stage: int, new: wire.AnnounceMessage) -> None:
        """Start to fetch a new body of another member, if this member stores it."""
        own, stages = self._stage.spec.index, self._stage.spec.stages
        if new.what == "checkpoint":
            stored = stored_stages(own, stages, self._stage.settings)
            is_stored = self._stage.store is not None and stage in stored
        else:
            is_stored = (stage, own) in ((0, 1), (stages - 1, stages - 2))
        if not is_stored:
            return
        is_fetching = (stage, new.what) in self._newest
        self._newest[stage, new.what] = new
        if not is_fetching:
            self._channel.spawn(partial(self._fetch_announced, stage, new.what))

    async def _fetch_announced(self, stage: int, what: wire.SharedBody) -> None:
        """Fetch and store bodies of one kind until the newest announced one is stored."""
        tried: wire.AnnounceMessage | None = None
        while (new := self._newest[stage, what]) is not tried:
            tried = new
            try:
                async with self._memory_lock if what == "checkpoint" else contextlib.nullcontext():
                    step = await self._store_newest(stage, new)
                if what == "checkpoint":
                    self._channel.post(stage, wire.StoredMessage(self._channel.place, 0, step))
            except PeerError:
                pass  # the next body is announced again
            except OSError as error:
                log.warning("replica checkpoint not stored", stage=stage, error=str(error))
                self._channel.refused["failed"] += 1
        del self._newest[stage, what]

    async def _store_newest(self, stage: int, new: wire.AnnounceMessage) -> int:
        """Fetch and store the announced body, or a newer one. Return its step."""
        stored = self._stage.stored(stage) if new.what == "checkpoint" else None
        if stored is not None and not stored.own and stored.step == new.step:
            return new.step
        have, body = await self._fetch.body(stage, new.what, stage)
        with self._channel.counting_bad_messages(stage):
            await self._channel.compute(lambda: self._store(stage, have, body))
        return have.step

    def _store(self, stage: int, have: HaveMessage, body: bytearray) -> None:
        """Store a body of `stage`.

        Raises:
            BadMessage: The body is invalid.
            OSError: It cannot be written.
        """
        local, recorder = self._stage, self._stage.recorder
        if have.what == "ends":
            state = decode_state(
                as_tensor(body), *local.expected_body("ends", stage), have.step, 0.0
            )
            recorder.ends[stage] = have.step, dict(state.weights)
        else:
            assert local.store is not None
            layout, form = local.expected_body("checkpoint", stage)
            check_state(as_tensor(body), layout, form)
            metadata = local.store.describe(stage, form, have.step, have.squared_norm)
            local.store.write(Checkpoint(metadata, as_tensor(body)))


class StageLoading(PeerError):
    """Raised when the requested stage is still being restored."""


class StateChannel:
    """State streams of one member in one crew: messages, requests and bodies.

    Args:
        fence: Fence of the crew.
        streams: Stream to each other stage.
        limits: Bounds of messages.
        seconds: Deadline for each part of a transfer.
        compute: Runs computations.
        step: Returns the number of committed steps.
    """

    def __init__(
        self,
        fence: Fence,
        streams: Mapping[int, trio.abc.Stream],
        limits: FrameLimits,
        seconds: float,
        compute: WorkRunner,
        step: Callable[[], int],
    ) -> None:
        self.compute = compute
        self.streams = dict(streams)
        self.ended: dict[int, str] = {}
        """Stage → why its stream ended."""
        self.refused: Counter[str] = Counter()
        """Number of refused messages and requests, by `wire.STATE_REFUSALS`."""
        self.fault: tuple[int, str] | None = None
        """(stage that sent garbage, reason); None without a fault."""
        self.progress = 0
        """Number of chunks that have arrived."""
        self._fence = fence
        self._limits = limits
        self._seconds = seconds
        self._step = step
        self._outboxes = {stage: trio.open_memory_channel[bytes](0) for stage in streams}
        self._readers = {stage: trio.CancelScope() for stage in streams}
        self._requests: dict[tuple[int, int], trio.MemorySendChannel[Incoming]] = {}
        """(stage, request number) → channel for its answers."""
        self._last_request = 0
        self._bad: Counter[int] = Counter()
        self._nursery: trio.Nursery | None = None

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self._step()

    @property
    def place(self) -> Place:
        """Place of the messages that this member sends now."""
        return Place(self._fence.place.crew, self._fence.place.stage, self.step)

    async def run(
        self, handle: Handler, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Read and write the streams until cancelled. Requests are passed to `handle`."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for stage in self.streams:
                    nursery.start_soon(self._read, stage, handle)
                    nursery.start_soon(self._write, stage)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for stage in self.streams:
                self._end_stream(stage, "the crew is over")

    def spawn(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Start `work` in the background. Return False if `run` has ended or has not started."""
        if self._nursery is None:
            return False
        self._nursery.start_soon(work)
        return True

    async def ask(self, stage: int, seconds: float) -> InventoryMessage:
        """Return the answer of `stage`: which bodies of this stage it has stored.

        Raises:
            PeerError: The stage is gone, sent an invalid answer, or none within `seconds`.
        """
        with self.counting_bad_messages(stage), self._request(stage) as (number, answers):
            await self.send(stage, wire.AskMessage(self.place, number))
            answer, _ = await self._receive(stage, answers, seconds)
            if not isinstance(answer, InventoryMessage):
                raise BadMessage("schema", f"{type(answer).__name__} as answer to AskMessage")
            return answer

    async def fetch(
        self,
        stage: int,
        message: wire.WantMessage | wire.RunMessage,
        size: Callable[[HaveMessage], int],
        body: bytes = b"",
        partial_body: PartialBody | None = None,
    ) -> tuple[HaveMessage, bytearray]:
        """Send a request for a body, and return the body after its hash was checked.

        Args:
            size: Returns the length that the body must have. Raises BadMessage for another body.
            body: Body of the request.
            partial_body: Part that has arrived already. Only the rest is requested.

        Raises:
            BadMessage: The body is invalid.
            PeerTimeout: Nothing arrived in time.
            StageLoading: The stage is being restored.
            Incompatible: The stage could not compute the body.
            PeerError: The stage is gone, or has no such body.
        """
        partial_body = partial_body or PartialBody()
        if isinstance(message, wire.WantMessage) and partial_body.at:
            # a request cannot start behind the last byte
            partial_body.at = min(partial_body.at, len(partial_body.body) - 1)
            message = msgspec.structs.replace(message, at=partial_body.at, root=partial_body.root)
        what = message.what if isinstance(message, wire.WantMessage) else "output"
        with self.counting_bad_messages(stage):
            with self._request(stage) as (number, answers):
                message = msgspec.structs.replace(message, request=number)
                await self.send(stage, message, body)
                have, _ = await self._receive(stage, answers, self._seconds)
                if not isinstance(have, HaveMessage) or have.what != what:
                    raise BadMessage("schema", f"no {what}")
                if have.size < 1 or have.size != size(have):
                    raise BadMessage("size", f"{have.size} bytes of {what}")
                partial_body.begin(have.root, have.size)
                while partial_body.at < have.size:
                    chunk, data = await self._receive(stage, answers, self._seconds)
                    length = min(CHUNK_BYTES, have.size - partial_body.at)
                    if not isinstance(chunk, wire.ChunkMessage) or (
                        (chunk.at, chunk.length) != (partial_body.at, length)
                    ):
                        raise BadMessage("size", "a chunk out of place")
                    partial_body.body[partial_body.at : partial_body.at + length] = data
                    partial_body.at += length
                    self.progress += 1
            if await self.compute(lambda: hash_body(partial_body.body)) != have.root:
                partial_body.begin(b"", 0)
                raise BadMessage("hash", f"{what} from stage {stage}")
        return have, partial_body.body

    @contextlib.contextmanager
    def _request(self, stage: int) -> Iterator[tuple[int, trio.MemoryReceiveChannel[Incoming]]]:
        """Yield the number of a new request, and a channel for its answers."""
        self._last_request += 1
        key = stage, self._last_request
        self._requests[key], answers = trio.open_memory_channel[Incoming](0)
        try:
            yield key[1], answers
        finally:
            del self._requests[key]
            answers.close()

    async def _receive(
        self, stage: int, answers: trio.MemoryReceiveChannel[Incoming], seconds: float
    ) -> Incoming:
        """Return the next answer to a request, with its body.

        Raises:
            PeerError: The stage is gone, sent nothing for `seconds`, or sent LackMessage.
        """
        try:
            with trio.fail_after(seconds):
                message, body = await answers.receive()
        except trio.TooSlowError:
            raise PeerTimeout(f"stage {stage} sent nothing for {seconds:.0f} s") from None
        except trio.EndOfChannel:
            raise self._gone_error(stage) from None
        if isinstance(message, wire.LackMessage):
            kind = {"loading": StageLoading, "failed": Incompatible}.get(message.reason, PeerError)
            raise kind(f"stage {stage}: {message.reason}")
        return message, body

    def post(self, stage: int, message: wire.AnyStateMessage) -> None:
        """Send a message without waiting."""

        async def send() -> None:
            with contextlib.suppress(PeerError):
                await self.send(stage, message)

        self.spawn(send)

    async def send(
        self, stage: int, message: wire.AnyStateMessage, body: bytes | memoryview = b""
    ) -> None:
        """Send a message when the stream has room.

        Raises:
            PeerError: The stage is gone.
        """
        if stage in self.ended or stage not in self.streams:
            raise self._gone_error(stage)
        try:
            await self._outboxes[stage][0].send(wire.pack_state(message, body))
        except trio.BrokenResourceError:
            raise self._gone_error(stage) from None

    async def send_body(
        self, stage: int, have: HaveMessage, body: memoryview, at: int, background: bool
    ) -> None:
        """Send a body from byte `at` on, in chunks.

        Args:
            background: True to pause after each chunk, see BACKGROUND_PAUSE.

        Raises:
            PeerError: The stage is gone.
        """
        await self.send(stage, have)
        pause, most = BACKGROUND_PAUSE
        for start in range(at, len(body), CHUNK_BYTES):
            began, part = trio.current_time(), body[start : start + CHUNK_BYTES]
            await self.send(
                stage, wire.ChunkMessage(self.place, have.request, start, len(part)), part
            )
            if background:
                await trio.sleep(min(most, pause * (trio.current_time() - began)))

    async def _write(self, stage: int) -> None:
        stream, outbox = self.streams[stage], self._outboxes[stage][1]
        try:
            async for data in outbox:
                for at in range(0, len(data), WRITE_BYTES):
                    with trio.fail_after(self._seconds):
                        await stream.send_all(data[at : at + WRITE_BYTES])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._end_stream(stage, "closed")
        except trio.TooSlowError:
            self._end_stream(stage, "does not read")

    async def _read(self, stage: int, handle: Handler) -> None:
        reason, stream = "closed", self.streams[stage]
        try:
            with self._readers[stage]:
                while (got := await wire.read_state(stream, self._limits)) is not None:
                    message, body = got
                    if self._fence.check(message.place, stage, None):
                        continue
                    if not isinstance(message, wire.StateAnswer):
                        handle(stage, message, body)
                    elif (asked := self._requests.get((stage, message.request))) is not None:
                        with contextlib.suppress(trio.BrokenResourceError):  # the request ended
                            await asked.send(got)
        except BadMessage as error:
            reason = error.reason
            self.refused[reason] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._end_stream(stage, reason)
        await trio.aclose_forcefully(stream)

    @contextlib.contextmanager
    def counting_bad_messages(self, stage: int) -> Iterator[None]:
        """Count a BadMessage in the block against `stage`, and raise it."""
        try:
            yield
        except BadMessage as error:
            self.count_bad_message(stage, error)
            raise

    @contextlib.contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Count an error of this node's disk or device in the block, and suppress it."""
        try:
            yield
        except (StateError, Unavailable, OSError, ValueError):
            self.refused["failed"] += 1
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            self.refused["failed"] += 1

    def count_bad_message(self, stage: int, error: BadMessage) -> None:
        """Count an invalid message of `stage`. Close its stream after MAX_BAD_MESSAGES."""
        self.refused[error.reason if error.reason in wire.STATE_REASONS else "schema"] += 1
        self._bad[stage] += 1
        if self._bad[stage] >= MAX_BAD_MESSAGES:
            self._end_stream(stage, "misbehaved")

    def _end_stream(self, stage: int, reason: str) -> None:
        """Close the stream of `stage`, and end all requests to it."""
        if stage in self.ended or stage not in self.streams:
            return
        self.ended[stage] = reason
        if reason not in NO_FAULT:
            self.fault = self.fault or (stage, reason)
        self._readers[stage].cancel()
        self._outboxes[stage][1].close()
        for (of, _), answers in self._requests.items():
            if of == stage:
                answers.close()

    def _gone_error(self, stage: int) -> PeerError:
        return PeerError(f"stage {stage} is gone: {self.ended.get(stage, 'no stream')}")
