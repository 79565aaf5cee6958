"""How a stage is restored. Torch.

In a new crew the trainer first continues with the stage in memory (`Stage.continue_at`). Otherwise
`restore` tries these sources in order, and takes the first that can be read and has finite values:

    usable own checkpoint    of the crew's step or the one before
    own checkpoint           at most `checkpoint_every` steps away, because members may lie
    any checkpoint           on this node or another member, the nearest in step first
    base                     the base model; with LoRA an untrained adapter

With `checkfree` and `checkfree+` the average of both neighbouring stages takes the place of any
checkpoint that is not usable.

A *neighbour* is the holder of the stage before or after, on a ring. A *held block* is a block of
layers that a node offers to crews.

`restore` tries the sources, `checkfree.py` averages the neighbours, and the runner calls
`StageRecovery`. `stage_checkpoints.py` has the files, `state_exchange.py` fetches bodies from other
members.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import structlog
import torch
import trio

from swarmnode.errors import PeerError, Refused, StateError, Unavailable
from swarmnode.policy.load import lora_settings
from swarmnode.policy.micro import free_memory, is_oom
from swarmnode.stages.crew_messages import MAX_HELD_BLOCKS, HeldBlock, StageAssignment
from swarmnode.stages.specs import StageSpec, stage_specs
from swarmnode.stages.stage_frames import CREW_BYTES, Fence, Place, is_device_error
from swarmnode.stages.state_messages import InventoryMessage
from swarmnode.stages.trainer.checkfree import (
    LEARNING_RATE_FACTOR,
    NeighbourLayers,
    end_names,
    synthesise,
)
from swarmnode.stages.trainer.crew_model import CrewModel
from swarmnode.stages.trainer.links import close_streams, connect_all
from swarmnode.stages.trainer.local_stage import LocalStage, PartialBody
from swarmnode.stages.trainer.pipeline import StageWorker
from swarmnode.stages.trainer.stage import Stage
from swarmnode.stages.trainer.stage_averaging import StageAveraging
from swarmnode.stages.trainer.stage_checkpoints import (
    CHECKPOINTS,
    CheckpointIdentity,
    CheckpointStore,
    LoadedStage,
    Recorder,
    RecoverySettings,
    StageState,
    Tensors,
    find_checkpoints,
    host_copy,
    load_moments,
    load_weights,
    stage_layouts,
    stored_stages,
    trained,
)
from swarmnode.stages.trainer.stage_model import LrScale, StageRuntime, load_stage, tensor_reader
from swarmnode.stages.trainer.state_exchange import StateExchange
from swarmnode.weights.layout import Layout

log = structlog.get_logger("swarmnode.crew")
SourceName = Literal["checkpoint", "neighbour", "base", "checkfree", "checkfree+"]
"""Names in `SOURCES` from which a stage can be restored. `neighbour`: a replica checkpoint, on
any member's disk or on this node's."""
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
    base: BaseWeights,
    notify: Callable[[str], None],
) -> RestoredStage:
    """Restore `exchange.stage.runtime` for a crew that has committed `step` steps.

    Args:
        notify: Called with the name of each source before it is tried.

    Raises:
        Refused: No source can be used; the message has each source's reason.
    """
    stage = exchange.stage
    stage.phase, stage.restored = "restoring", None
    inventories = await exchange.fetch.ask()
    tried: list[tuple[SourceName, str]] = []
    for source in _sources(stage, inventories, step):
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
    reasons = "; ".join(f"{name}: {why}" for name, why in tried)
    raise Refused(f"no source is left for this stage: {reasons}")


def _sources(
    stage: LocalStage, inventories: Mapping[int, InventoryMessage], step: int
) -> list[RestoreSource]:
    """Return the sources of this stage, the best first."""
    checkpoints = [
        RestoreSource("neighbour", held.checkpoint, holder)
        for holder, held in inventories.items()
        if held.checkpoint is not None
    ]
    if (own := stage.store.metadata(stage.spec.index)) is not None:
        usable = own.own and step - 1 <= own.step <= step
        checkpoints.append(
            RestoreSource("checkpoint" if own.own else "neighbour", own.step, None, usable)
        )
    age = lambda checkpoint: abs(step - (checkpoint.step or 0))
    # A member may claim any step, so that a somewhat older stage of this node comes first.
    is_own = lambda checkpoint: (
        checkpoint.name == "checkpoint" and age(checkpoint) <= stage.settings.checkpoint_every
    )
    checkpoints.sort(
        key=lambda checkpoint: (
            not checkpoint.usable,
            not is_own(checkpoint),
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
    return [*checkpoints, RestoreSource("base")]


async def _load(
    exchange: StateExchange,
    source: RestoreSource,
    inventories: Mapping[int, InventoryMessage],
    base: BaseWeights,
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
    base: BaseWeights,
) -> LoadedStage:
    stage, spec = exchange.stage, exchange.stage.spec
    if source.name in ("checkpoint", "neighbour"):
        if source.holder is None:
            return await exchange.channel.compute(stage.read_checkpoint)
        return stage.warming_up(await exchange.fetch.state(source.holder, "checkpoint", spec.index))
    if source.name == "base":
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


# The interface for the trainer, across crews.


class StageRecovery:
    """Stores checkpoints on this node, and restores its stage.

    Args:
        directory: Directory of the trainer.
        settings: Settings of recovery.
        model: The model.
        averaging: Returns the averaging of the present stage; None without averaging.
        extra_status: Returns further fields of `status_fields` for a step of the crew.
    """

    def __init__(
        self,
        directory: Path,
        settings: RecoverySettings,
        model: CrewModel,
        averaging: Callable[[], StageAveraging | None] = lambda: None,
        extra_status: Callable[[int], dict[str, int]] = lambda step: {},
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
        self._layouts: tuple[Layout, ...] = ()
        self._partial_bodies: dict[int, PartialBody] = {}
        self._recorder: Recorder | None = None

    def held_blocks(self) -> tuple[HeldBlock, ...]:
        """Return the newest checkpoints on this node's disk, for its offer. Call it in a thread."""
        coming = (
            self._store.writing_metadata
        )  # read before the files, since it may become one meanwhile
        found = {metadata.path: metadata for metadata in find_checkpoints(self._directory)}
        if coming is not None:
            found[coming.path] = coming
        newest = sorted(found.values(), key=lambda metadata: -metadata.step)[: MAX_HELD_BLOCKS - 1]
        return tuple(
            HeldBlock(
                lineage=bytes.fromhex(metadata.identity.lineage),
                layers=metadata.identity.layers,
                stage=metadata.stage,
                step=metadata.step,
                where="disk" if metadata.own else "neighbour",
            )
            for metadata in newest
        )

    def prepare(self, assignment: StageAssignment) -> None:
        """Find the checkpoints on this node's disk for the assigned crew. Call it in a thread."""
        self._recorder = None  # its checkpoint is of the former stage
        self._store.flush()
        model = self._model
        lora = lora_settings(model.policy) if model.terms.lora.r else None
        specs = stage_specs(model.config, assignment.layers)
        layouts = stage_layouts(model.config, specs, lora)
        identity = CheckpointIdentity(assignment.lineage.hex(), assignment.layers, model.owner)
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
    async def open(self, assignment: StageAssignment, stage: Stage) -> AsyncIterator[None]:
        """Open the state streams, over which members exchange checkpoints, for the time of the
        context.

        Raises:
            PeerError: A stream cannot be opened.
        """
        assert self._recorder is not None
        averaging = self._averaging()
        streams = await connect_all(assignment, "state")
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
            place = Place(assignment.crew[:CREW_BYTES], assignment.stage, assignment.step)
            fence = Fence(place, len(assignment.layers))
            self.exchange = exchange = StateExchange(local, fence, streams, stage.meter)
            async with trio.open_nursery() as nursery:
                await nursery.start(exchange.run)
                if averaging is not None:
                    averaging.probe.open(exchange)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self.exchange = self._recorder.announce = None
            if averaging is not None:
                averaging.probe.close()
            await close_streams(streams)

    async def restore(
        self, stage: Stage, assignment: StageAssignment, notify: Callable[[str], None]
    ) -> str:
        """Restore `stage` and return the name of its source.

        Args:
            notify: Called with the source that is tried next.

        Raises:
            Refused: No source can be used.
        """
        assert self.exchange is not None
        restored = await restore(
            self.exchange,
            step=assignment.step,
            base=self._base(stage),
            notify=notify,
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

    def attach(self, assignment: StageAssignment, worker: StageWorker) -> None:
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
        """Return counts of `STATE_REFUSALS`."""
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
