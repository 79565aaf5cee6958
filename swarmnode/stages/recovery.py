"""Checkpoints of stages, and how a lost stage comes back. Torch.

    own checkpoint         written after a step; used if it has the crew's step or the one before
    neighbour's checkpoint every `checkpoint_every` steps, on both ring neighbours' disks
    base                   the weights that training began with; with LoRA the untrained adapter
    checkfree, checkfree+  the papers' average or copy of the neighbours, in place of a checkpoint

`StageRecovery` is what the trainer calls. `restore` tries the sources in order, and `judge` is the
gate: the last committed micro-batches run again through all stages. `StatePeer` is this member's
end of the state streams, over which checkpoints and probes travel.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import numpy as np
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
from swarmnode.files import held, sync_directory
from swarmnode.policy.load import lora_settings
from swarmnode.policy.micro import free_memory, is_oom
from swarmnode.stages import wire
from swarmnode.stages.model import (
    LrScale,
    StageRuntime,
    adapt,
    batch_of,
    cut_ends,
    decode,
    encode,
    load_stage,
    stage_config,
    tensors_of,
)
from swarmnode.stages.pipeline import Compute, Observer, StageWorker, in_thread
from swarmnode.stages.policy_copy import (
    BaseTensors,
    Parts,
    copied,
    copy_bytes,
    decode_copy,
    encode_copy,
)
from swarmnode.stages.wire import (
    ABOUT_ITEM_BYTES,
    CHUNK_BYTES,
    ActivationCodec,
    Fence,
    Form,
    FrameLimits,
    Have,
    Holds,
    MicroBatch,
    Place,
    Probe,
    Routes,
    StageSpec,
    activation_bytes,
    is_device_error,
    read_f32,
    read_micro_batch,
    root_of,
    state_bytes,
)
from swarmnode.weights.layout import Layout, elements, make_layout
from swarmnode.wire import strict
from swarmnode.wire.tensors import pack_logprobs, unpack_logprobs

if TYPE_CHECKING:
    from peft import LoraConfig

    from swarmnode.config import StagesConfig
    from swarmnode.stages.trainer import CrewModel, Stage, StageAveraging

log = structlog.get_logger("swarmnode.crew")

Tensors = Mapping[str, torch.Tensor]
RecoveryMode = Literal["copies", "checkfree", "checkfree+"]
"""As `stages.recovery`."""
SourceName = Literal["checkpoint", "neighbour", "base", "checkfree", "checkfree+"]
"""Of `wire.SOURCES`."""
Notify = Callable[[Literal["loading"], str], None]
"""Called with the source that is tried next."""


@dataclass(frozen=True)
class RecoverySettings:
    """Constants of recovery, and what the operator chooses. A crew agrees on `mode`."""

    checkpoint_every: int = 20
    """Committed steps between two checkpoints on the neighbours' disks."""
    keep_policy: bool = False
    """This node keeps a checkpoint of every stage, not of its ring neighbours' alone."""
    mode: RecoveryMode = "copies"
    """`checkfree` makes inner stages of their neighbours, and the ends still come from checkpoints.
    `checkfree+` makes all stages of their neighbours and trains in swapped order."""
    probes: int = 8
    """Committed micro-batches that are remembered for the gate."""
    gate_kl: float = 0.02
    """Nats per token of KL(before ‖ restored)."""
    gate_nll: float = 0.05
    """Nats per token."""
    copy_factor: float = 10.0
    """An old copy of the stage itself has this multiple of both bounds: it lacks some steps, and
    every other source lacks all."""
    warmup_steps: int = 10
    """Steps over which the learning rate of a stage with a fresh optimizer rises."""
    exact_bytes: int = 256 * 1024 * 1024
    """A checkpoint up to this size goes to neighbours in float32 with Adam's moments; a larger one
    in bfloat16 without."""
    edge_bytes: int = 256 * 1024 * 1024
    """Received activations that are remembered for the probe of an average."""
    seconds: float = 120.0
    """A transfer fails after this time without a byte."""
    neighbour_seconds: float = 3600.0
    """How long a stage waits for another stage that is being restored. Half of a 7 B model in
    bfloat16 takes 19 minutes at 50 Mbit/s."""

    def keeps_copies(self, spec: StageSpec) -> bool:
        """Return True if this stage comes back from checkpoints, not from its neighbours."""
        return self.mode == "copies" or (
            self.mode == "checkfree" and (spec.has_embedding or spec.has_head)
        )


@dataclass(frozen=True)
class Run:
    """What decides whether a synthesis would harm."""

    swapped: bool = False
    """Half of the micro-batches run in `swapped_order` from the start, so the second and the last
    stage but one have learnt the ends' job."""
    pretrained: bool = False
    """Training began with a published base."""
    adapter: bool = False
    """Only a LoRA adapter is trained."""


def recovery_settings(cfg: StagesConfig) -> RecoverySettings:
    return RecoverySettings(
        cfg.checkpoint_every, cfg.policy_copy in ("disk", "both"), mode=cfg.recovery
    )


def check_paper(mode: RecoveryMode, stages: int, run: Run) -> None:
    """Check that a crew may restore its stages as the papers do.

    Args:
        stages: As configured, 0 for any number.

    Raises:
        Refused: An adapter is trained, or there are too few stages.
    """
    if mode == "copies":
        return
    if run.adapter:
        raise Refused(
            f"{mode} averages whole weights, and only an adapter is trained here: set"
            " stages.recovery to copies"
        )
    least = 3 if mode == "checkfree" else 4
    if stages < least:
        raise Refused(
            f"{mode} needs {least} or more stages, and stages.stages is {stages}: raise it, or set"
            " stages.recovery to copies"
        )
    if run.pretrained:
        log.warning(
            "a published base's own stage is usually closer than its neighbours' average",
            recovery=mode,
            remedy="set stages.recovery to copies",
        )


# The trainer's view of recovery, across crews.

CHECKPOINTS: Final = "stages"
"""Directory of checkpoints below the trainer's."""
STEP_BYTES: Final = 2 * 10**9
"""Mean bytes that own checkpoints may write per step: 1.4 TB a day at a step in two minutes. A disk
is made for about 600 TB."""


class StageRecovery:
    """Keeps this node's checkpoints and restores its stage.

    Args:
        directory: The trainer's.
        averaging: Returns the averaging of the stage that is held now.
        more: Returns other fields of `facts` for a step of the crew.
        connect: Opens a state stream to each other stage; raises PeerError.
        owner: `trainer.state.owner` of the policy, for exports.
    """

    def __init__(
        self,
        directory: Path,
        settings: RecoverySettings,
        model: CrewModel,
        averaging: Callable[[], StageAveraging | None] = lambda: None,
        more: Callable[[int], dict[str, int]] = lambda step: {},
        *,
        connect: Callable[[wire.Assigned], Awaitable[dict[int, trio.abc.Stream]]],
        owner: str,
    ) -> None:
        self.outer: Tensors = {}
        """State of averaging that came with the own checkpoint; empty from any other source."""
        self.peer: StatePeer | None = None
        """Our end of the state streams, while there is a crew."""
        self._store = CheckpointStore(directory / CHECKPOINTS)
        self._settings = settings
        self._model = model
        self._averaging = averaging
        self._more = more
        self._connect = connect
        self._owner = owner
        self._layouts: tuple[Layout, ...] = ()
        self._arrivals: dict[int, Arrival] = {}
        self._recorder: Recorder | None = None
        self._taken_anyway = 0

    def copies(self) -> tuple[wire.Copy, ...]:
        """Return the newest checkpoints on this node's disk. In a thread."""
        coming = self._store.coming  # read before the files, since it may become one meanwhile
        found = {about.path: about for about in self._store.find()}
        if coming is not None:
            found[coming.path] = coming
        newest = sorted(found.values(), key=lambda about: -about.step)[: wire.COPIES - 1]
        return tuple(
            wire.Copy(
                lineage=bytes.fromhex(about.identity.lineage),
                first=about.identity.block(about.stage)[0],
                last=about.identity.block(about.stage)[1],
                step=about.step,
                where="disk" if about.own else "neighbour",
            )
            for about in newest
        )

    def prepare(self, assigned: wire.Assigned) -> None:
        """Open what this node has on disk for the assigned stage. In a thread."""
        self._recorder = None  # it holds a checkpoint of the stage before
        self._store.flush()
        model = self._model
        lora = lora_settings(model.policy) if model.terms.lora.r else None
        specs = wire.stage_specs(model.config, assigned.layers)
        layouts = stage_layouts(model.config, specs, lora)
        if model.terms.frozen_a:  # every node derives the same A
            layouts = tuple(
                tuple(tensor for tensor in layout if A_MARK not in tensor.name)
                for layout in layouts
            )
        identity = CheckpointIdentity(assigned.lineage.hex(), assigned.layers, self._owner)
        if layouts != self._layouts:
            self._arrivals.clear()
        self._layouts = layouts
        kept = kept_stages(assigned.stage, len(specs), self._settings)
        self._store.begin(identity, kept)

    def built(self, stage: Stage) -> None:
        """A stage with the base model's weights is in memory."""
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
    async def open(self, assigned: wire.Assigned, stage: Stage) -> AsyncIterator[None]:
        """Ask and answer the other members while the context is open. Raises PeerError."""
        assert self._recorder is not None
        averaging = self._averaging()
        streams = await self._connect(assigned)
        try:
            local = LocalStage(
                stage.runtime,
                stage.runtime.spec,
                self._model.limits(),
                self._layouts,
                self._settings,
                self._model.terms.codec,
                self._recorder,
                self._store,
                base=None if self._model.terms.lora.r else tensors_of(self._model.directory),
                arrivals=self._arrivals,
            )
            place = Place(assigned.crew[: wire.CREW_BYTES], assigned.stage, assigned.step)
            fence = Fence(place, len(assigned.layers))
            self.peer = peer = StatePeer(local, fence, streams, stage.meter)
            async with trio.open_nursery() as nursery:
                await nursery.start(peer.run)
                if averaging is not None:
                    averaging.probe.open(peer)
                yield
                nursery.cancel_scope.cancel()
        finally:
            self.peer = self._recorder.sharing = None
            if averaging is not None:
                averaging.probe.close()
            with trio.CancelScope(shield=True):
                for stream in streams.values():
                    await trio.aclose_forcefully(stream)

    async def restore(
        self, stage: Stage, assigned: wire.Assigned, notify: Notify
    ) -> tuple[str, float | None]:
        """Fill `stage` and return (source, KL of the gate).

        Raises:
            Refused: No source is left.
            PeerError: A member that is needed is gone.
        """
        assert self.peer is not None
        restored = await restore(
            self.peer,
            step=assigned.step,
            run=self._model.run,
            base=self._base(stage),
            notify=lambda source: notify("loading", source),
        )
        self._arrivals.pop(assigned.stage, None)
        restored.install(stage.worker)
        self.outer = restored.candidate.outer
        self._taken_anyway += not restored.passed
        for source, why in restored.tried:
            log.info("source refused", source=source, reason=why)
        log.info(
            "weights restored",
            source=restored.source.name,
            step=assigned.step,
            source_step=restored.source.step,
        )
        return restored.source.name, None if restored.verdict is None else restored.verdict.kl

    def _base(self, stage: Stage) -> BaseWeights:
        """Return a reader of the weights that training began with. Before anything is restored."""
        if self._model.terms.lora.r > 0:
            return base_adapter(stage.runtime)
        return base_stage(self._model.directory, stage.runtime.spec)

    def attach(self, assigned: wire.Assigned, worker: StageWorker) -> None:
        """The stage has its weights; `worker` has not begun."""
        assert self.peer is not None
        self.peer.attach(worker, assigned.step)

    def progress(self) -> int:
        """Return a number that grows while weights arrive or the disk is written: such a stage is
        not stuck."""
        writing = int(time.monotonic()) if self._store.busy else 0
        return writing + (self.peer.channel.progress if self.peer is not None else 0)

    def facts(self, step: int) -> dict[str, int]:
        """Return fields of StageStatus: checkpoint_step, checkpoint_age_steps, and `more`."""
        kept = self.peer.sharing.kept if self.peer is not None else {}
        if kept:
            newest = max(kept.values())
            ages = {"checkpoint_step": newest, "checkpoint_age_steps": max(0, step - newest)}
        elif self.peer is not None and self.peer.channel.streams:
            ages = {"checkpoint_age_steps": step}  # the loss of this stage would cost all steps
        else:
            ages = {}
        return {**ages, **self._more(step)}

    def refused(self) -> dict[str, int]:
        """Return counts of `wire.STATE_REFUSALS`."""
        counts = Counter(self.peer.channel.refused if self.peer is not None else {})
        if self._taken_anyway:
            counts["gate"] = self._taken_anyway
        return dict(counts)

    def fault(self) -> tuple[int, str] | None:
        """Return the stage that sent garbage on a state stream, and the reason."""
        return self.peer.channel.fault if self.peer is not None else None

    def forget(self) -> None:
        """The weights in memory are not a stage any more: never write them."""
        if self._recorder is not None:
            self._recorder.unwritten = None

    def close(self) -> None:
        """Write the last step of the stage and stop: the trainer ends."""
        if self._recorder is not None:
            self._recorder.write_last()
            self._recorder = None
        self._store.close()


def kept_stages(stage: int, stages: int, settings: RecoverySettings) -> tuple[int, ...]:
    """Return the stages whose checkpoints the holder of `stage` keeps, its own first."""
    if settings.keep_policy:
        return (stage, *(other for other in range(stages) if other != stage))
    return (stage, *ring(stage, stages))


def ring(stage: int, stages: int) -> tuple[int, ...]:
    """Return both neighbours of `stage` on the ring of all stages, each once."""
    return tuple(
        dict.fromkeys(n for n in ((stage - 1) % stages, (stage + 1) % stages) if n != stage)
    )


def checkpoint_interval(layouts: Iterable[Layout]) -> int:
    """Return the steps between two own checkpoints: the least power of two at which the largest
    stage writes at most STEP_BYTES per step.

    All stages of a crew count, so all members write after the same steps, and a crew that ends
    everywhere at once finds one step on all disks.
    """
    largest = max((state_bytes(layout, "exact") for layout in layouts), default=0)
    return 2 ** max(0, math.ceil(math.log2(max(1, largest) / STEP_BYTES)))


# Restore one stage: each source in turn, through the gate, until one passes. Stages that are
# restored at the same time answer each other's micro-batches with the candidate that they have in
# place, so each is judged once all of them have one.

ASK_SECONDS: Final = 10.0
RETRY_SECONDS: Final = (0.25, 5.0)
"""Between two requests to a stage that is being restored: first, and at most."""
BaseWeights = Callable[[], Tensors]
"""Reads the weights that training began with, by the stage's names. Raises LocalError."""


@dataclass(frozen=True)
class Source:
    """One way to get the stage back."""

    name: SourceName
    step: int | None = None
    """Committed steps in it; None where it is no copy."""
    holder: int | None = None
    """Stage that has it; None for this machine."""
    current: bool = False
    """An own checkpoint of the crew's step or the one before: the gate asks for finite numbers
    only. The probes are older than the last step, so even the exact stage differs from them."""


@dataclass(frozen=True)
class Candidate:
    """A stage as a source gave it."""

    state: StageState
    lr_scale: LrScale
    outer: Tensors = field(default_factory=dict)
    """State of averaging, of the same moment."""
    rng: torch.Tensor | None = None


@dataclass(frozen=True)
class Restored:
    source: Source
    verdict: Verdict | None
    """None where no member had a probe."""
    passed: bool
    """False if no source passed the gate and this one was taken anyway."""
    tried: tuple[tuple[SourceName, str], ...]
    """Sources that were refused before, and why."""
    candidate: Candidate

    def install(self, worker: StageWorker) -> None:
        """Give the worker its moments, norm, learning rate and random generator. The weights are
        in the runtime already."""
        load_moments(worker, self.candidate.state)
        worker.optimizer.squared_norm = self.candidate.state.squared_norm
        worker.optimizer.lr_scale = replace(self.candidate.lr_scale)
        if self.candidate.rng is not None:
            torch.set_rng_state(self.candidate.rng)


async def restore(
    peer: StatePeer,
    *,
    step: int,
    run: Run,
    base: BaseWeights | None,
    notify: Callable[[str], None] = lambda source: None,
) -> Restored:
    """Restore `peer.stage.runtime` for a crew that has committed `step` steps.

    Where no source passes the gate, the newest finite copy is taken.

    Raises:
        Refused: No source is left, with every source's reason.
        PeerError: A stage that is needed for judging is gone.
    """
    stage = peer.stage
    stage.phase, stage.restored = "restoring", None
    holds = await peer.fetch.ask()
    probes = await _newest_probes(peer, holds, step)
    tried: list[tuple[SourceName, str]] = []
    fallback: tuple[Source, Candidate, Verdict] | None = None
    for source in _sources(stage, holds, step, run, base, tried):
        notify(source.name)
        candidate: Candidate | None = None
        try:
            candidate = await _put_in_place(peer, source, holds, base)
            verdict = await judge(peer, probes) if probes else None
        except PeerError as error:
            if candidate is not None:
                raise  # a stage that judges is gone, and the crew with it
            reason = str(error)
        except (StateError, Unavailable, Refused, OSError) as error:
            reason = str(error)
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            reason = "out of memory" if is_oom(error) else f"device: {error}"
            free_memory()
        else:
            if passes(source, verdict, stage.settings):
                stage.phase = "ready"
                return Restored(source, verdict, True, tuple(tried), candidate)
            assert verdict is not None
            reason = f"KL {verdict.kl:.3g}, NLL {verdict.nll_rise:+.3g} nats per token"
            if fallback is None and verdict.finite:
                fallback = source, candidate, verdict
        tried.append((source.name, reason))
        stage.phase, stage.restored = "restoring", None
    reasons = "; ".join(f"{name}: {why}" for name, why in tried) or "no member has a copy"
    if fallback is None:
        raise Refused(f"no source is left for this stage: {reasons}")
    source, candidate, verdict = fallback
    log.warning("no source passed the gate", taken=source.name, reason=reasons)
    await peer.channel.compute(partial(load_weights, stage.runtime, candidate.state.weights))
    stage.phase, stage.restored = "ready", candidate.state
    return Restored(source, verdict, False, tuple(tried), candidate)


def _sources(
    stage: LocalStage,
    holds: Mapping[int, Holds],
    step: int,
    run: Run,
    base: BaseWeights | None,
    tried: list[tuple[SourceName, str]],
) -> list[Source]:
    """Return the sources of this stage, the best first; append those that are ruled out to
    `tried`."""
    spec, settings = stage.spec, stage.settings
    copies = [
        Source("neighbour", held.checkpoint, holder)
        for holder, held in holds.items()
        if held.checkpoint is not None
    ]
    if (own := stage.stored(spec.index)) is not None:
        current = own.own and step - 1 <= own.step <= step
        copies.append(Source("checkpoint" if own.own else "neighbour", own.step, None, current))
    age = lambda copy: abs(step - (copy.step or 0))
    copies.sort(key=lambda copy: (not copy.current, age(copy), copy.holder is not None))
    found = copies
    if settings.mode != "copies" and not settings.keeps_copies(spec):
        found = [copy for copy in copies if copy.current]
        try:
            _check_synthesis(spec, holds, run)
            found.append(Source(settings.mode))
        except Refused as error:
            tried.append((settings.mode, str(error)))
    return [*found, *([Source("base")] if base is not None else [])]


def _check_synthesis(spec: StageSpec, holds: Mapping[int, Holds], run: Run) -> None:
    """Raise Refused if the stage cannot be made of its neighbours now."""
    at_end = spec.has_embedding or spec.has_head
    check("copy" if at_end else "checkfree", spec, run)
    for near in (spec.index - 1, spec.index + 1):
        if 0 <= near < spec.stages and (near not in holds or holds[near].phase != "ready"):
            raise Refused(f"neighbour stage {near} is lost too")
    if at_end and all(held.ends is None for held in holds.values()):
        raise Refused("no member keeps a copy of this end's embedding or head")


async def _put_in_place(
    peer: StatePeer, source: Source, holds: Mapping[int, Holds], base: BaseWeights | None
) -> Candidate:
    """Load the stage from `source`. Raises PeerError, StateError, Unavailable, Refused, OSError."""
    stage = peer.stage
    candidate = await _load(peer, source, holds, base)
    await peer.channel.compute(partial(load_weights, stage.runtime, candidate.state.weights))
    stage.phase, stage.restored = "candidate", candidate.state
    if stage.runtime.embedding() is not None:
        candidate = await _tie(peer, candidate, holds)
    return candidate


async def _load(
    peer: StatePeer, source: Source, holds: Mapping[int, Holds], base: BaseWeights | None
) -> Candidate:
    stage, spec, settings = peer.stage, peer.stage.spec, peer.stage.settings
    fresh = LrScale(warmup=settings.warmup_steps)
    if source.name in ("checkpoint", "neighbour"):
        if source.holder is None:
            return await peer.channel.compute(stage.read_checkpoint)
        state = await peer.fetch.checkpoint(source.holder)
        return Candidate(state, LrScale() if state.counts else fresh)
    if source.name == "base":
        assert base is not None
        return Candidate(StageState(0, await peer.channel.compute(base)), fresh)
    before = None if spec.has_embedding else await peer.fetch.layers(spec.index - 1)
    after = None if spec.has_head else await peer.fetch.layers(spec.index + 1)
    method: Method = "checkfree"
    ends = None
    if before is None or after is None:
        _, holder = max((held.ends, near) for near, held in holds.items() if held.ends is not None)
        method, ends = "copy", await peer.fetch.ends(holder)
    run = Run(swapped=settings.mode == "checkfree+")
    made = await peer.channel.compute(
        lambda: synthesise(method, spec, before, after, run, ends=ends)
    )
    return Candidate(StageState(0, made), LrScale(LEARNING_RATE_FACTOR))


async def _tie(peer: StatePeer, candidate: Candidate, holds: Mapping[int, Holds]) -> Candidate:
    """Return the candidate with the other end's embedding and its moments: a tied embedding is one
    tensor with one optimizer. If both ends are lost, it is that of stage 0."""
    stage, spec = peer.stage, peer.stage.spec
    other = holds.get(spec.stages - 1 if spec.has_embedding else 0)
    if spec.has_embedding and (other is None or other.phase != "ready"):
        return candidate
    theirs, state = await peer.fetch.tied(), candidate.state
    (name,) = theirs.weights
    merge = lambda mine, new: {**{n: t for n, t in mine.items() if n != name}, **new}
    state = replace(
        state,
        weights=merge(state.weights, theirs.weights),
        first=merge(state.first, theirs.first),
        second=merge(state.second, theirs.second),
        counts=merge(state.counts, theirs.counts),
    )
    await peer.channel.compute(partial(load_weights, stage.runtime, state.weights))
    stage.restored = state
    return replace(candidate, state=state)


async def _newest_probes(peer: StatePeer, holds: Mapping[int, Holds], step: int) -> list[Probe]:
    """Return the probes of the newest committed step that a member has, the tail first."""
    own, tail = peer.stage.spec.index, peer.stage.spec.stages - 1
    found = {own: list(peer.stage.recorder.probes)}
    for holder, there in holds.items():
        if there.probes is not None:
            with contextlib.suppress(PeerError):
                found[holder] = await peer.fetch.probes(holder)
    committed = [
        (max(probe.step for probe in known), holder == tail, -holder, known)
        for holder, probes in found.items()
        if (known := [probe for probe in probes if probe.step < step])
    ]
    return max(committed)[3] if committed else []


def base_stage(directory: Path, spec: StageSpec) -> BaseWeights:
    """Return a reader of the stage's weights in a model's directory."""
    return lambda: {n: host_copy(p) for n, p in load_stage(directory, spec).named_parameters()}


def base_adapter(runtime: StageRuntime) -> BaseWeights:
    """Return a reader of the untrained adapter, which is in `runtime` before anything is
    restored."""
    untrained = {name: host_copy(tensor) for name, tensor in trained(runtime).items()}
    return lambda: untrained


# The gate: the last committed micro-batches run again through all stages.
#
#     r = log π_new(token) − log π_old(token)     over tokens that were trained on
#     KL(old ‖ new) ≈ mean(eʳ − 1 − r) ≥ 0        rise of the negative log-likelihood = − mean r
#
# π_old is the tail's output before the step of that micro-batch. Only the newest step's micro-
# batches count: later learning would look like damage. A damaged policy earns equal rewards
# everywhere, so training cannot repair it.

PROBES_AT_ONCE: Final = 2
LEAST_PROBES, PROBE_ROWS = 2, 2048
"""Probes, and rows of them, that are enough: r of a restored stage has a spread of hundredths, so
its mean square is known to a tenth. More would take minutes of a home's line at 7 B."""


@dataclass(frozen=True)
class Verdict:
    """Nats per token by which the policy changed; not finite if a number was not."""

    kl: float
    nll_rise: float
    tokens: int

    @property
    def finite(self) -> bool:
        return math.isfinite(self.kl) and math.isfinite(self.nll_rise)


def passes(source: Source, verdict: Verdict | None, settings: RecoverySettings) -> bool:
    """Return True if the gate lets a stage from `source` train.

    Without a probe every source passes. In the papers' modes and for a current own checkpoint the
    numbers have to be finite. Otherwise both bounds hold, `copy_factor` wider for an old copy.
    """
    if verdict is None:
        return True
    if source.current or settings.mode != "copies":
        return verdict.finite
    room = settings.copy_factor if source.name in ("checkpoint", "neighbour") else 1.0
    return verdict.kl < room * settings.gate_kl and verdict.nll_rise < room * settings.gate_nll


async def judge(peer: StatePeer, probes: Sequence[Probe]) -> Verdict:
    """Run the newest of `probes`, which is not empty, through all stages.

    Raises:
        PeerError: A stage is gone, or is not restored in time.
        RuntimeError: As `is_device_error` knows.
    """
    shifts: list[np.ndarray] = []
    errors: list[Exception] = []
    limiter = trio.CapacityLimiter(PROBES_AT_ONCE)

    async def one(probe: Probe) -> None:
        async with limiter:
            if errors:
                return
            try:
                shifts.append(await _shift(peer, probe))
            except (PeerError, ValueError, RuntimeError, MemoryError) as error:
                if not isinstance(error, PeerError | ValueError) and not is_device_error(error):
                    raise
                errors.append(error)

    async with trio.open_nursery() as nursery:
        for probe in enough(probes):
            nursery.start_soon(one, probe)
    for error in errors:
        if not isinstance(error, Incompatible | ValueError):
            raise error
    return verdict_of(np.concatenate(shifts)) if not errors else Verdict(math.inf, math.inf, 0)


def enough(probes: Sequence[Probe]) -> list[Probe]:
    """Return the last probes of the newest step, as many as the gate needs."""
    newest, rows, chosen = max(probe.step for probe in probes), 0, list[Probe]()
    for probe in reversed([probe for probe in probes if probe.step == newest]):
        if len(chosen) < LEAST_PROBES or rows < PROBE_ROWS:
            chosen.append(probe)
            rows += probe.rows
    return chosen


def verdict_of(shift: np.ndarray) -> Verdict:
    """Args: shift: (tokens,) r as above."""
    shift = shift.astype(np.float64)
    return Verdict(float(np.mean(np.expm1(shift) - shift)), float(-shift.mean()), len(shift))


async def _shift(peer: StatePeer, probe: Probe) -> np.ndarray:
    """Return (tokens,) r. Raises ValueError or Incompatible if a number of any stage is not
    finite."""
    work, old = work_of(probe, peer.stage.limits), unpack_logprobs(probe.logprobs)
    x = b""
    for stage in range(peer.stage.spec.stages):
        if stage == peer.stage.spec.index:
            x = await peer.channel.compute(
                partial(run_one, peer.stage.runtime, work, x, peer.stage.codec)
            )
        else:
            x = await peer.fetch.run_at(stage, probe, len(old), x)
    new = unpack_logprobs(x)
    if not np.isfinite(new).all():
        raise ValueError("a log-probability is not finite")
    return new - old


def run_one(runtime: StageRuntime, work: MicroBatch, x: bytes, codec: ActivationCodec) -> bytes:
    """Run one micro-batch through one stage, without gradient.

    Args:
        x: Activations in the crew's codec; empty at stage 0.

    Returns:
        Activations; at the tail log-probabilities of the completion tokens, float32.

    Raises:
        BadMessage: `x` is not activations of this micro-batch.
        ValueError: The stage's own numbers are not finite.
    """
    batch = batch_of(work, runtime.device)
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


# Synthesis of a stage without a copy: CheckFree, CheckFree+ (arXiv 2506.15461 §3) and two
# baselines.
#
#     checkfree   W_i ← (ω_{i−1} W_{i−1} + ω_{i+1} W_{i+1}) / (ω_{i−1} + ω_{i+1}),  ω_j = ‖∇W_j‖²,
#                 then lr_i ← 1.1 lr_i   (algorithm 1)
#     copy        first ← second, last ← last but one; embedding, norm and head from
#                 neighbours' copies (CheckFree+)
#     uniform     checkfree with ω_{i−1} = ω_{i+1}
#     identity    the residual branches end in zero: the stage passes its input on
#
# ω is the squared norm of the last raw gradient. The authors' code takes it after clipping to a
# common norm, which makes both weights equal as soon as both clip.

Method = Literal["checkfree", "copy", "uniform", "identity"]
LEARNING_RATE_FACTOR: Final = 1.1
"""Algorithm 1, line 4; once, not for each recovery."""
BRANCH_ENDS: Final = ("self_attn.o_proj.", "mlp.down_proj.")


@dataclass(frozen=True)
class Neighbour:
    """What a stage next to the lost one gives."""

    layers: Mapping[str, torch.Tensor]
    """Its layers' tensors by their local names, `model.layers.0.…`; others are ignored."""
    squared_norm: float
    """‖∇W‖² over those layers at the last step, before clipping."""


def synthesise(
    method: Method,
    spec: StageSpec,
    before: Neighbour | None,
    after: Neighbour | None,
    run: Run,
    *,
    ends: Tensors | None = None,
) -> dict[str, torch.Tensor]:
    """Return weights for the lost stage `spec`, by local name, in new memory.

    Args:
        before: Stage `spec.index - 1`.
        after: Stage `spec.index + 1`.
        ends: True copies of the embedding, or of norm and head, by local name.

    Raises:
        Refused: The method would harm this stage of this run.
        Incompatible: The neighbours' layers are not this stage's.
    """
    check(method, spec, run)
    if method == "copy":
        source = after if spec.has_embedding else before
        state = {name: tensor.clone() for name, tensor in layers_of(source, spec).items()}
    elif method == "identity":
        source = before if before is not None else after
        state = {
            name: torch.zeros_like(t) if any(end in name for end in BRANCH_ENDS) else t.clone()
            for name, t in layers_of(source, spec).items()
        }
    else:
        state = average(before, after, spec, uniform=method == "uniform")
    for name in end_names(spec):
        if ends is None or name not in ends:
            raise Refused(f"{name} can only be restored from a true copy, and none is left")
        state[name] = ends[name].clone()
    return state


def average(
    before: Neighbour | None, after: Neighbour | None, spec: StageSpec, uniform: bool
) -> dict[str, torch.Tensor]:
    """Return the average of algorithm 1, line 3, computed in float64. Two zero gradients weigh
    alike."""
    left, right = layers_of(before, spec), layers_of(after, spec)
    assert before is not None
    assert after is not None
    weights = (1.0, 1.0) if uniform else (before.squared_norm, after.squared_norm)
    if left.keys() != right.keys() or any(left[n].shape != right[n].shape for n in left):
        raise Incompatible("the neighbours' layers are not alike")
    if not all(math.isfinite(w) and w >= 0 for w in weights):
        raise Incompatible(f"squared gradient norms of {weights[0]} and {weights[1]}")
    if sum(weights) == 0:
        weights = (1.0, 1.0)
    share = weights[0] / sum(weights)
    return {
        n: (share * left[n].double() + (1.0 - share) * right[n].double()).to(left[n].dtype)
        for n in left
    }


def layers_of(neighbour: Neighbour | None, spec: StageSpec) -> dict[str, torch.Tensor]:
    """Return a neighbour's layers.

    Raises:
        Refused: The neighbour is lost too.
        Incompatible: It has another number of layers, or numbers that are not finite.
    """
    if neighbour is None:
        raise Refused(f"stage {spec.index}'s neighbour is lost too")
    found = {name: tensor for name, tensor in neighbour.layers.items() if ".layers." in name}
    count = len({name.split(".layers.")[1].split(".")[0] for name in found})
    if count != spec.layers:
        raise Incompatible(f"a neighbour of {count} layers for a stage of {spec.layers}")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in found.values()):
        raise Incompatible("a neighbour's weights are not finite")
    return found


def end_names(spec: StageSpec) -> list[str]:
    """Return the local names of the tensors that an end stage has beside its layers."""
    names = ["model.embed_tokens.weight"] if spec.has_embedding else []
    tied_here = spec.tied and spec.stages == 1
    return names + (
        ["model.norm.weight"] + ([] if tied_here else ["lm_head.weight"]) if spec.has_head else []
    )


def check(method: Method, spec: StageSpec, run: Run) -> None:
    """Raise Refused if `method` would harm this stage of this run."""
    at_end = spec.has_embedding or spec.has_head
    if run.adapter:
        raise Refused(
            "an adapter is not averaged with another layer's: the untrained adapter is closer"
        )
    if method in ("checkfree", "uniform") and at_end:
        raise Refused(
            f"{method} needs a neighbour on both sides, and stage {spec.index} of {spec.stages}"
            " has one"
        )
    if method == "copy" and not at_end:
        raise Refused(
            f"copy is for the first and the last stage, and stage {spec.index} of {spec.stages}"
            " is neither"
        )
    if method == "copy" and not run.swapped:
        raise Refused(
            "copy needs a run trained with swapped stages; without that the copy costs 3 nats"
        )


# A stage's training state in host memory, as bytes, and back:
#
#     exact    weights ‖ first moments ‖ second moments ‖ counts, float32: 12 bytes/parameter
#     small    weights, bfloat16: 2 bytes/parameter, relative error 2⁻⁹; a new optimizer
#
# Under LoRA that is the adapter, otherwise every tensor of the stage.

BLOCK_VALUES: Final = 2**20
"""Values that are checked at a time."""


@dataclass(frozen=True)
class StageState:
    """One stage after `step` committed steps; tensors by the stage's own names."""

    step: int
    weights: Tensors
    first: Tensors = field(default_factory=dict)
    """AdamW's first moments; empty where they are not kept. Likewise `second` and `counts`."""
    second: Tensors = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    """Steps that AdamW has taken for each tensor."""
    squared_norm: float = 0.0


def layout_of(model: torch.nn.Module) -> Layout:
    return make_layout(
        (name, p.shape, "float32") for name, p in model.named_parameters() if p.requires_grad
    )


def stage_layouts(
    config: PretrainedConfig, specs: Sequence[StageSpec], lora: LoraConfig | None = None
) -> tuple[Layout, ...]:
    """Return the layout of what is trained in each stage, from shapes only."""
    layouts = []
    for spec in specs:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                stage_config(config, spec), dtype=torch.float32
            )
            cut_ends(model, spec)
            model.tie_weights()
            model = model if lora is None else adapt(model, lora)
        layouts.append(layout_of(model))
    return tuple(layouts)


def form_of(layout: Layout, settings: RecoverySettings) -> Form:
    """Return the form in which a stage goes to its neighbours."""
    return "exact" if state_bytes(layout, "exact") <= settings.exact_bytes else "small"


def trained(runtime: StageRuntime) -> dict[str, torch.Tensor]:
    """Return the live tensors that are trained."""
    return {name: p for name, p in runtime.model.named_parameters() if p.requires_grad}


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def live_state(worker: StageWorker) -> StageState:
    """Return the worker's state between two steps. Its tensors are the live ones, not copies."""
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
    """Overwrite what is trained.

    Raises:
        Incompatible: Names or shapes differ, or a value is not finite. Nothing has changed then.
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
    """Give AdamW the moments of the tensors that have them."""
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
def encode_state(state: StageState, layout: Layout, form: Form) -> bytearray:
    """Return `state_bytes(layout, form)` bytes. Tensors that are missing are zero."""
    body = bytearray(state_bytes(layout, form))
    if not body:
        return body
    flat = torch.frombuffer(body, dtype=torch.float32 if form == "exact" else torch.bfloat16)
    at = 0
    for tensors in (state.weights, state.first, state.second)[: 3 if form == "exact" else 1]:
        for spec in layout:
            if spec.name in tensors:
                flat[at : at + spec.elements].copy_(tensors[spec.name].reshape(-1))
            at += spec.elements
    if form == "exact":
        flat[at:] = torch.tensor([state.counts.get(spec.name, 0.0) for spec in layout])
    return body


def check_state(body: torch.Tensor, layout: Layout, form: Form) -> None:
    """Check the body (bytes,) of a checkpoint, a block at a time.

    Raises:
        BadMessage: size, not_finite, bounds (a second moment or a count below zero).
    """
    if len(body) != state_bytes(layout, form):
        raise BadMessage("size", f"{len(body)} bytes of a state of {state_bytes(layout, form)}")
    values = body.view(torch.float32 if form == "exact" else torch.bfloat16)
    weights = elements(layout)
    for start in range(0, len(values), BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES]
        if not bool(torch.isfinite(block).all()):
            raise BadMessage("not_finite", "a state")
        if form == "exact" and bool((block[max(0, 2 * weights - start) :] < 0).any()):
            raise BadMessage("bounds", "a second moment or a count below zero")


def decode_state(
    body: torch.Tensor, layout: Layout, form: Form, step: int, squared_norm: float
) -> StageState:
    """Return the state that `body` (bytes,) encodes. Raises BadMessage as `check_state` does."""
    check_state(body, layout, form)
    if form == "small":
        weights = _by_name(body.view(torch.bfloat16).float(), layout)
        return StageState(step, weights, squared_norm=squared_norm)
    flat, size = body.view(torch.float32), elements(layout)
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
    """Return a (bytes,) view."""
    return torch.frombuffer(body, dtype=torch.uint8)


# Checkpoints on this node's disk: `directory`/<lineage>/<first layer>-<last layer>.safetensors
#
#     body       the state as above, uint8: exact of the own stage; of a neighbour's as it arrived
#     outer.*    own stage: state of averaging with other crews, of the same moment
#     rng        own stage: torch's random generator
#     about      metadata, JSON: `CheckpointAbout`
#
# A new checkpoint of a block of layers replaces the old one. A file that the present crew does not
# keep is deleted once this crew has taken as many steps as are in it.


@dataclass(frozen=True)
class CheckpointIdentity:
    """What the checkpoints of one crew belong to."""

    lineage: str
    """Hex."""
    layers: tuple[int, ...]
    """Number of layers of each stage."""
    owner: str = ""
    """`trainer.state.owner` of the policy."""

    def block(self, stage: int) -> tuple[int, int]:
        """Return the first layer of `stage`, and the layer after its last."""
        first = sum(self.layers[:stage])
        return first, first + self.layers[stage]

    def path(self, stage: int) -> Path:
        """Return the file of `stage`, relative to the store's directory."""
        first, last = self.block(stage)
        return Path(self.lineage, f"{first}-{last}.safetensors")


class CheckpointAbout(msgspec.Struct, frozen=True):
    """Metadata of a checkpoint."""

    identity: CheckpointIdentity
    stage: int
    own: bool
    """This node trained it; otherwise its stage sent it."""
    form: Form
    step: int
    squared_norm: float
    lr_scale: LrScale = msgspec.field(default_factory=LrScale)
    root: str = ""
    """Hash of the body, hex."""

    @property
    def path(self) -> Path:
        return self.identity.path(self.stage)


@dataclass(frozen=True)
class Checkpoint:
    about: CheckpointAbout
    body: torch.Tensor
    """(bytes,)"""
    more: Tensors = field(default_factory=dict)
    """`outer.*` and `rng`."""


class CheckpointStore:
    """Reads and writes checkpoints; a thread of its own writes those of the own stage."""

    def __init__(self, directory: Path) -> None:
        self.coming: CheckpointAbout | None = None
        """Own checkpoint that is being written."""
        self.skipped = 0
        """Own checkpoints that were not written because the disk was busy with an earlier one."""
        self.error: str | None = None
        """Why the last write of the own stage failed."""
        self._directory = directory
        self._identity: CheckpointIdentity | None = None
        self._kept: dict[Path, CheckpointAbout | None] = {}
        """Files of the present crew."""
        self._lock = threading.Lock()
        """One file is written or read at a time."""
        self._thread = ThreadPoolExecutor(1, "stage checkpoint")
        self._writing: Future[None] | None = None

    def begin(self, identity: CheckpointIdentity, stages: Iterable[int]) -> None:
        """Keep checkpoints of these stages of a crew from now on."""
        with self._lock:
            self._identity = identity
            self._kept = {
                path: _read_about(self._directory / path) for path in map(identity.path, stages)
            }

    def find(self) -> list[CheckpointAbout]:
        """Return what can be read, of every lineage."""
        return find_checkpoints(self._directory)

    def about(self, stage: int) -> CheckpointAbout | None:
        """Return the metadata of the checkpoint of `stage`; None if there is none."""
        return None if self._identity is None else self._kept.get(self._identity.path(stage))

    def read(self, stage: int) -> Checkpoint:
        """Return the checkpoint of `stage`. Raises StateError for a damaged file, which is
        deleted."""
        assert self._identity is not None
        path = self._identity.path(stage)
        with self._lock:
            try:
                return read_checkpoint(self._directory, path)
            except StateError:
                self._kept[path] = None
                with contextlib.suppress(OSError):
                    (self._directory / path).unlink(missing_ok=True)
                raise

    def describe(
        self, stage: int, form: Form, step: int, squared_norm: float, own: LrScale | None = None
    ) -> CheckpointAbout:
        """Return metadata for a checkpoint of the present crew; `own` of a stage that this node
        trains."""
        assert self._identity is not None
        scale = LrScale() if own is None else replace(own)
        return CheckpointAbout(
            self._identity, stage, own is not None, form, step, squared_norm, scale
        )

    def write(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint of the same layers. Raises OSError; the old file is untouched."""
        about = msgspec.structs.replace(
            checkpoint.about, root=root_of(checkpoint.body.numpy().data).hex()
        )
        path = self._directory / about.path
        tensors = {"body": checkpoint.body, **checkpoint.more}
        unfinished = path.with_name(f".{path.name}.tmp")
        with self._lock:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                metadata = {"about": json.dumps(msgspec.to_builtins(about))}
                save_file(tensors, unfinished, metadata=metadata)
                with open(unfinished, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(unfinished, path)
            except (SafetensorError, OSError) as error:
                with contextlib.suppress(OSError):
                    unfinished.unlink(missing_ok=True)
                raise OSError(str(error)) from None
            sync_directory(path.parent)
            if about.path in self._kept:
                self._kept[about.path] = about
            if about.own:
                self._clear_away(about.step)

    @property
    def busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def write_soon(self, checkpoint: Checkpoint) -> bool:
        """Write the own stage in the background. Return False if the disk is busy."""
        if self.busy:
            self.skipped += 1
            return False
        self.coming = checkpoint.about
        self._writing = self._thread.submit(self._write_own, checkpoint)
        return True

    def flush(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None  # and with it the checkpoint's memory

    def close(self) -> None:
        self.flush()
        self._thread.shutdown()

    def _write_own(self, checkpoint: Checkpoint) -> None:
        try:
            self.write(checkpoint)
            self.error = None
        except OSError as error:
            if str(error) != self.error:  # once, not after each step
                log.warning("own checkpoint not written", error=str(error))
            self.error = str(error)
        finally:
            self.coming = None

    def _clear_away(self, step: int) -> None:
        """Delete what the present crew does not keep and that has no more than `step` steps."""
        try:
            for path in self._directory.glob("*/.*.tmp"):
                path.unlink(missing_ok=True)
            for path in self._directory.glob("*/*.safetensors"):
                relative = path.relative_to(self._directory)
                if relative in self._kept:
                    continue
                about = _read_about(path)
                if about is None or about.step <= step:
                    path.unlink(missing_ok=True)
            for directory in self._directory.iterdir():
                if directory.is_dir() and not any(directory.iterdir()):
                    directory.rmdir()
        except OSError as error:
            log.warning("old checkpoints not deleted", error=str(error))


def find_checkpoints(directory: Path) -> list[CheckpointAbout]:
    """Return the metadata of all checkpoints in a store's directory that can be read."""
    found = [_read_about(path) for path in sorted(directory.glob("*/*.safetensors"))]
    return [about for about in found if about is not None]


def read_checkpoint(directory: Path, path: Path) -> Checkpoint:
    """Read one file of a store's directory. Raises StateError if it is missing or damaged."""
    try:
        with held(directory / path) as name, safe_open(name, "pt", device="cpu") as file:
            about = _decode_about(file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"{directory / path} is damaged: {error}") from None
    body = tensors.pop("body", torch.empty(0, dtype=torch.uint8))
    if about.path != path or root_of(body.numpy().data).hex() != about.root:
        raise StateError(f"{directory / path} is damaged: another hash")
    return Checkpoint(about, body, tensors)


def _read_about(path: Path) -> CheckpointAbout | None:
    """Return a file's metadata; None if it is missing or damaged."""
    try:
        with held(path) as name, safe_open(name, "pt", device="cpu") as file:
            return _decode_about(file.metadata())
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        log.warning("checkpoint not readable", path=str(path), error=str(error))
        return None


def _decode_about(metadata: Mapping[str, str]) -> CheckpointAbout:
    about = msgspec.json.decode(metadata["about"], type=CheckpointAbout)
    if not 0 <= about.stage < len(about.identity.layers):
        raise ValueError("no such stage")
    return about


# The recorder observes one worker: it remembers the last committed micro-batches and copies the
# stage between two steps.


@dataclass(frozen=True)
class Edge:
    """A committed micro-batch as it came to this stage."""

    micro_batch: int
    step: int
    rows: int
    about: bytes
    """`MicroBatch`."""
    body: bytes
    """Activations in the crew's codec; empty at stage 0."""


@dataclass
class PendingMicroBatch:
    """A micro-batch of the step that is under way."""

    about: bytes
    body: bytes
    logprobs: bytes = b""


@dataclass(frozen=True)
class SharedCheckpoint:
    """The last checkpoint of the own stage for its neighbours, in memory."""

    step: int
    squared_norm: float
    body: bytearray


class Recorder(Observer):
    """Observer of one worker; without a store it only remembers.

    Swapped micro-batches are not remembered: they do not run as the policy does.

    Args:
        outer: Returns the state of averaging, whose tensors never change.
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
        self.probes: list[Probe] = []
        """Oldest first: own ones at the tail, the tail's elsewhere."""
        self.edges: deque[Edge] = deque(maxlen=settings.probes)
        self.ends: dict[int, tuple[int, dict[str, torch.Tensor]]] = {}
        """checkfree+: end stage → (step, true copies of its embedding, or norm and head)."""
        self.shared: SharedCheckpoint | None = None
        self.copy: tuple[int, bytes] | None = None
        """(step, int8 copy) if a member has asked since the last step."""
        self.unwritten: tuple[StageWorker, CheckpointAbout] | None = None
        """Worker whose last step is not written, and that step."""
        self.sharing: Sharing | None = None
        """Set while there are state streams."""
        self._layout = layouts[spec.index] if layouts else ()
        self._store = store
        self._outer = outer
        self._every = checkpoint_interval(layouts)
        self._announced = 0
        self._pending: dict[int, PendingMicroBatch] = {}
        self._routes = Routes(spec.stages, settings.mode == "checkfree+")

    def received(self, micro_batch: int, about: bytes, sender: int, body: bytes) -> None:
        if self._routes.of(micro_batch) == self._routes.of(0):
            self._pending[micro_batch] = PendingMicroBatch(about, body)
            # a step may have a thousand micro-batches, and only the last are remembered
            size = lambda: sum(len(seen.body) for seen in self._pending.values())
            while len(self._pending) > self.settings.probes or (
                len(self._pending) > 1 and size() > self.settings.edge_bytes
            ):
                del self._pending[next(iter(self._pending))]

    def learnt(self, micro_batch: int, logprobs: torch.Tensor) -> None:
        if micro_batch in self._pending:
            self._pending[micro_batch].logprobs = pack_logprobs(logprobs.numpy())

    def dropped(self) -> None:
        self._pending.clear()

    def committed(self, worker: StageWorker) -> None:
        self.copy = None
        self._remember(worker.participant.step - 1)
        if self._store is not None:
            self._checkpoint(worker, self._store)
        if self.settings.mode == "checkfree+" and (self.spec.has_embedding or self.spec.has_head):
            state = dict(worker.runtime.model.named_parameters())
            copies = {name: host_copy(state[name]) for name in end_names(self.spec)}
            self.ends[self.spec.index] = worker.participant.step, copies

    def stepped(self) -> None:
        if self.sharing is None:
            return
        if self.shared is not None and self.shared.step != self._announced:
            self._announced = self.shared.step
            self.sharing.announce("checkpoint", self.shared.step)
        if self.spec.index in self.ends:
            self.sharing.announce("ends", self.ends[self.spec.index][0])
        if self.spec.has_head and self.probes:
            self.sharing.announce("probes", self.probes[-1].step)

    def _remember(self, step: int) -> None:
        for number, seen in sorted(self._pending.items()):
            rows = strict.decode(seen.about, MicroBatch).rows
            if seen.logprobs:
                self.probes.append(Probe(number, step, rows, seen.about, seen.logprobs))
            self.edges.append(Edge(number, step, rows, seen.about, seen.body))
        self._pending.clear()
        del self.probes[: -self.settings.probes]
        while sum(len(edge.body) for edge in self.edges) > self.settings.edge_bytes:
            self.edges.popleft()

    def _checkpoint(self, worker: StageWorker, store: CheckpointStore) -> None:
        """Copy the stage if it is to be written or shared after this step."""
        optimizer, step, body = worker.optimizer, worker.participant.step, None
        about = store.describe(
            self.spec.index, "exact", step, optimizer.squared_norm, optimizer.lr_scale
        )
        self.unwritten = worker, about
        if step % self._every == 0 and not store.busy:
            body = self._write(worker, about, store)
        if self.settings.keeps_copies(self.spec) and step % self.settings.checkpoint_every == 0:
            self.share(worker, body)

    def _write(
        self, worker: StageWorker, about: CheckpointAbout, store: CheckpointStore
    ) -> bytearray:
        body = encode_state(live_state(worker), self._layout, "exact")
        more = {f"outer.{name}": tensor for name, tensor in self._outer().items()}
        more["rng"] = torch.get_rng_state()
        if store.write_soon(Checkpoint(about, as_tensor(body), more)):
            self.unwritten = None
        return body

    def share(self, worker: StageWorker, exact: bytearray | None = None) -> None:
        """Copy the stage for its neighbours, between two steps. `exact` is its exact form."""
        state, form = live_state(worker), form_of(self._layout, self.settings)
        if exact is None or form != "exact":
            self.shared = None  # two of them may not fit
            exact = encode_state(state, self._layout, form)
        self.shared = SharedCheckpoint(state.step, state.squared_norm, exact)

    def write_last(self) -> None:
        """Write the worker's last step if that is not done: the trainer ends. A step that has begun
        to move the weights since is not written."""
        if self._store is None or self.unwritten is None:
            return
        self._store.flush()
        worker, about = self.unwritten
        with worker.optimizer.lock:
            if worker.optimizer.lr_scale == about.lr_scale:  # counts each step as it begins
                self._write(worker, about, self._store)


def work_of(item: Probe | Edge, limits: FrameLimits) -> MicroBatch:
    """Return a probe's or an edge's micro-batch. Raises BadMessage as `read_micro_batch` does."""
    return read_micro_batch(item.about, item.rows, limits, "learn")


# Bodies of state streams: which tensors, in which order.


def layers_layout(layout: Layout) -> Layout:
    """Return what CheckFree takes from a neighbour."""
    return tuple(spec for spec in layout if ".layers." in spec.name)


def ends_layout(spec: StageSpec, layout: Layout) -> Layout:
    """Return the embedding, or norm and head."""
    names = set(end_names(spec))
    return tuple(tensor for tensor in layout if tensor.name in names)


def tied_layout(spec: StageSpec, layout: Layout) -> Layout:
    """Return the tied embedding under this end's name; empty where it is not trained."""
    name = "model.embed_tokens.weight" if spec.has_embedding else "lm_head.weight"
    return tuple(tensor for tensor in layout if tensor.name == name)


@torch.no_grad()
def pack_floats(tensors: Tensors, layout: Layout) -> bytearray:
    body, at = bytearray(4 * elements(layout)), 0
    flat = torch.frombuffer(body, dtype=torch.float32)
    for spec in layout:
        flat[at : at + spec.elements].copy_(tensors[spec.name].reshape(-1))
        at += spec.elements
    return body


def read_floats(body: bytearray, layout: Layout) -> dict[str, torch.Tensor]:
    """Return float32 tensors of a body whose length was checked. Raises BadMessage: not_finite."""
    flat = torch.frombuffer(body, dtype=torch.float32)
    if not bool(torch.isfinite(flat).all()):
        raise BadMessage("not_finite", "weights")
    return _by_name(flat, layout)


# The local stage as its state streams see it.


@dataclass
class Arrival:
    """A body that has partly arrived. It outlives a crew, so a transfer is resumed."""

    root: bytes = b""
    """Hash of the whole body; empty before anything arrived."""
    body: bytearray = field(default_factory=bytearray)
    at: int = 0
    """Bytes before this one are there."""

    def begin(self, root: bytes, size: int) -> None:
        """Continue with a body, or start over if it is another one."""
        if (root, size) != (self.root, len(self.body)):
            self.root, self.body, self.at = root, bytearray(size), 0


@dataclass
class LocalStage:
    """This member's stage, its checkpoints and its phase.

    Attributes:
        layouts: What is trained in each stage (`stage_layouts`).
        worker: None until it runs.
        base: Reads the base model's tensors; None where an adapter is trained.
        restored: What the weights were restored from, until there is a worker.
        arrivals: Checkpoints that have partly arrived, by stage.
    """

    runtime: StageRuntime
    spec: StageSpec
    limits: FrameLimits
    layouts: Sequence[Layout]
    settings: RecoverySettings
    codec: ActivationCodec
    recorder: Recorder
    store: CheckpointStore | None = None
    worker: StageWorker | None = None
    phase: wire.StatePhase = "starting"
    base: BaseTensors | None = None
    restored: StageState | None = None
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    _encoding: trio.Lock = field(default_factory=trio.Lock)

    @property
    def layout(self) -> Layout:
        return self.layouts[self.spec.index]

    def stored(self, stage: int) -> CheckpointAbout | None:
        """Return the metadata of the checkpoint of `stage` on this disk."""
        return None if self.store is None else self.store.about(stage)

    def read_checkpoint(self) -> Candidate:
        """Read the checkpoint of the own stage. Raises StateError, BadMessage."""
        assert self.store is not None
        found = self.store.read(self.spec.index)
        about = found.about
        state = decode_state(found.body, self.layout, about.form, about.step, about.squared_norm)
        if not about.own:
            warmup = 0 if state.counts else self.settings.warmup_steps
            return Candidate(state, LrScale(warmup=warmup))
        outer = {
            name.removeprefix("outer."): tensor
            for name, tensor in found.more.items()
            if name.startswith("outer.")
        }
        if not all(bool(torch.isfinite(tensor).all()) for tensor in outer.values()):
            raise StateError("the state of averaging in our checkpoint is not finite")
        return Candidate(state, about.lr_scale, outer, found.more.get("rng"))

    def end(self, stage: int) -> StageSpec:
        """Return a spec that says which end `stage` is; its layers do not matter."""
        return StageSpec(stage, self.spec.stages, 0, 0, self.spec.tied)

    def size(self, of: int, have: Have) -> int:
        """Return the length of a body that members keep of stage `of`. Raises BadMessage."""
        if have.what == "checkpoint":
            layout = self.layouts[of]
            return state_bytes(layout, form_of(layout, self.settings))
        if have.what == "ends":
            return 4 * elements(ends_layout(self.end(of), self.layouts[of]))
        each = ABOUT_ITEM_BYTES * (self.limits.tokens + 16) + 4 * self.limits.tokens + 256
        most = self.settings.probes * each + 16
        if have.size > most:
            raise BadMessage("size", f"{have.size} bytes of {have.what}, at most {most}")
        return have.size

    def read_probes(self, body: bytearray) -> list[Probe]:
        """Raises BadMessage."""
        probes: list[Probe] = strict.decode(bytes(body), list[Probe])
        if not 1 <= len(probes) <= self.settings.probes:
            raise BadMessage("bounds", f"{len(probes)} probes")
        for probe in probes:
            tokens = sum(work_of(probe, self.limits).completion_lengths)
            read_f32("logprobs", probe.logprobs, tokens)
        return probes

    async def copy(self, compute: Compute) -> tuple[int, bytes]:
        """Return (step, int8 copy of the weights), encoded once between two steps.

        Raises:
            StateError: Nothing is trained here, or a step was taken meanwhile.
            Unavailable: The base model cannot be read.
        """
        if self.worker is None:
            raise StateError("nothing is trained here yet")
        layout, participant = copied(self.spec, self.layout), self.worker.participant
        async with self._encoding:
            async with self.worker.optimizer.moving:  # never in the middle of a step
                step = participant.step
            if self.recorder.copy is None or self.recorder.copy[0] != step:
                self.recorder.copy = None
                body = await compute(
                    lambda: encode_copy(self.spec, trained(self.runtime), layout, self.base)
                )
                if participant.step != step:
                    raise StateError("a step was taken while it was copied")
                self.recorder.copy = step, body
            return self.recorder.copy


# Requests and bodies over state streams: one duplex stream to each other member.
#
# Chunks of several bodies take turns on a stream; background bodies pause after each chunk. A
# request fails when nothing arrives for `seconds`. Refused input is counted; after MISBEHAVED
# refusals the stream closes. A stream that is lost ends the crew, so nothing is dialled again.

SERVED_AT_ONCE: Final = 5
"""Requests of one peer."""
SERVED_PER_STEP: Final = 64
"""Bodies of one kind for one peer between two steps. A stage that is restored asks for a few."""
MISBEHAVED: Final = 16
BACKGROUND_PAUSE: Final = (7.0, 30.0)
"""After a chunk for later, nothing of that body is sent for this multiple of what the chunk took,
and at most so many seconds: two neighbours together take a quarter of a line."""
SIZE_LIMITS = Callable[[Have], int]
"""Returns the length that a body must have. Raises BadMessage for another body."""


class StageLoading(PeerError):
    """Raised when the stage that was asked is still being restored."""


@dataclass(eq=False)
class Call:
    """A request that waits for its answer."""

    what: wire.What | None
    """Kind of body; None where none was asked for."""
    size: SIZE_LIMITS
    arrival: Arrival
    seconds: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    have: Have | None = None
    answer: Holds | Have | Exception | None = None

    def extend(self) -> None:
        self.scope.deadline = trio.current_time() + self.seconds

    def finish(self, answer: Holds | Have | Exception) -> None:
        if not self.done.is_set():
            self.answer = answer
            self.done.set()


class Channel:
    """The state streams of one member in one crew. `run` it in a nursery.

    Args:
        step: Returns the committed steps.
    """

    def __init__(
        self,
        fence: Fence,
        streams: Mapping[int, trio.abc.Stream],
        limits: FrameLimits,
        seconds: float,
        compute: Compute,
        step: Callable[[], int],
    ) -> None:
        self.compute = compute
        self.streams = dict(streams)
        self.gone: dict[int, str] = {}
        """Stage → why its stream ended."""
        self.refused: Counter[str] = Counter()
        """By `wire.STATE_REFUSALS`."""
        self.fault: tuple[int, str] | None = None
        """Stage that sent garbage, and the reason."""
        self.progress = 0
        """Grows with each part of a body that arrives."""
        self._fence = fence
        self._limits = limits
        self._seconds = seconds
        self._step = step
        self._turns = {stage: trio.Lock() for stage in streams}
        self._readers = {stage: trio.CancelScope() for stage in streams}
        self._calls: dict[tuple[int, int], Call] = {}
        self._last_request = 0
        self._serving: Counter[int] = Counter()
        self._bad: Counter[int] = Counter()
        self._nursery: trio.Nursery | None = None

    @property
    def step(self) -> int:
        return self._step()

    @property
    def place(self) -> Place:
        place = self._fence.place
        return Place(place.crew, place.stage, self.step)

    async def run(
        self,
        server: Server,
        sharing: Sharing,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for stage in self.streams:
                    nursery.start_soon(self._read, stage, server, sharing)
                task_status.started()
                await trio.sleep_forever()  # answers come and go
        finally:
            self._nursery = None

    def spawn(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Start `work` in the background. Return False if `run` is over or has not begun."""
        if self._nursery is None:
            return False
        self._nursery.start_soon(work)
        return True

    # Sending.

    def post(self, stage: int, message: wire.AnyStateMessage) -> None:
        """Send a message without waiting."""
        self.spawn(partial(self._write, stage, wire.pack_state(message), trio.Event()))

    async def send(
        self, stage: int, message: wire.AnyStateMessage, body: bytes | memoryview = b""
    ) -> None:
        """Send a message. A caller that is cancelled leaves no half of it on the stream.

        Raises:
            PeerError: The stage is gone.
        """
        written = trio.Event()
        if not self.spawn(partial(self._write, stage, wire.pack_state(message, body), written)):
            raise PeerError("the crew is over")
        await written.wait()
        self._check(stage)

    async def _write(self, stage: int, data: bytes, written: trio.Event) -> None:
        try:
            async with self._turns[stage]:
                for at in range(0, len(data), 2 * CHUNK_BYTES):
                    if stage in self.gone:
                        return
                    with trio.fail_after(self._seconds):
                        await self.streams[stage].send_all(data[at : at + 2 * CHUNK_BYTES])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lose(stage, "closed")
        except trio.TooSlowError:
            self._lose(stage, "does not read")
        finally:
            written.set()

    async def send_body(
        self, stage: int, have: Have, body: memoryview, at: int = 0, background: bool = False
    ) -> None:
        """Send a body from byte `at` on, in chunks. Raises PeerError."""
        await self.send(stage, have)
        pause, most = BACKGROUND_PAUSE
        for start in range(at, len(body), CHUNK_BYTES):
            began, part = trio.current_time(), body[start : start + CHUNK_BYTES]
            await self.send(stage, wire.Chunk(self.place, have.request, start, len(part)), part)
            if background:
                await trio.sleep(min(most, pause * (trio.current_time() - began)))

    # Asking.

    async def ask(self, stage: int, seconds: float) -> Holds:
        """Return what `stage` has of ours. Raises PeerError."""
        answer = await self._call(
            stage, wire.Ask(self.place, 0), lambda have: 0, Arrival(), seconds
        )
        if not isinstance(answer, Holds):
            raise BadMessage("schema", "an answer to another question")
        return answer

    async def fetch(
        self,
        stage: int,
        message: wire.Want | wire.Run,
        size: SIZE_LIMITS,
        body: bytes = b"",
        arrival: Arrival | None = None,
    ) -> tuple[Have, bytearray]:
        """Return a body with the hash that was promised.

        Raises:
            PeerError: BadMessage for a body that is not what it has to be, PeerTimeout,
                StageLoading, Incompatible if the peer could not compute it.
        """
        arrival = arrival or Arrival()
        if isinstance(message, wire.Want) and arrival.at:
            # if all have arrived, the last byte is sent again
            arrival.at = max(0, min(arrival.at, len(arrival.body) - 1))
            root = arrival.root if arrival.at else b""
            message = msgspec.structs.replace(message, at=arrival.at, root=root)
        have = await self._call(stage, message, size, arrival, self._seconds, body)
        if not isinstance(have, Have):
            raise BadMessage("schema", "an answer to another question")
        return have, arrival.body

    async def _call(
        self,
        stage: int,
        message: wire.Ask | wire.Want | wire.Run,
        size: SIZE_LIMITS,
        arrival: Arrival,
        seconds: float,
        body: bytes = b"",
    ) -> Holds | Have:
        self._check(stage)
        self._last_request += 1
        message = msgspec.structs.replace(message, request=self._last_request)
        what: wire.What | None = (
            message.what
            if isinstance(message, wire.Want)
            else "output"
            if isinstance(message, wire.Run)
            else None
        )
        call = self._calls[stage, message.request] = Call(what, size, arrival, seconds)
        try:
            await self.send(stage, message, body)
            call.extend()
            with call.scope:  # around waiting only
                await call.done.wait()
        finally:
            del self._calls[stage, message.request]
        if call.answer is None:
            raise PeerTimeout(f"stage {stage} sent nothing for {seconds:.0f} s")
        if isinstance(call.answer, BadMessage):
            self.refuse(stage, call.answer)
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def _check(self, stage: int) -> None:
        if stage in self.gone or stage not in self.streams:
            raise PeerError(f"stage {stage} is gone: {self.gone.get(stage, 'no stream')}")

    # Receiving.

    async def _read(self, stage: int, server: Server, sharing: Sharing) -> None:
        reason, stream = "closed", self.streams[stage]
        try:
            with self._readers[stage]:
                while (got := await wire.read_state(stream, self._limits)) is not None:
                    message, body = got
                    if self._fence.check(message.place, stage, None):
                        continue
                    self._arrived(stage, message, body, server, sharing)
        except BadMessage as error:
            reason = error.reason
            self.refused[reason] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._lose(stage, reason)
        await trio.aclose_forcefully(stream)

    def refuse(self, stage: int, error: BadMessage) -> None:
        """Count what `stage` sent and should not have."""
        self.refused[error.reason if error.reason in wire.STATE_REASONS else "schema"] += 1
        self._bad[stage] += 1
        if self._bad[stage] >= MISBEHAVED:
            self._lose(stage, "misbehaved")

    def _lose(self, stage: int, reason: str) -> None:
        if stage in self.gone:
            return
        self.gone[stage] = reason
        if reason not in ("closed", "truncated", "does not read"):
            self.fault = self.fault or (stage, reason)
        for (of, _), call in self._calls.items():
            if of == stage:
                call.finish(PeerError(f"stage {stage} is gone: {reason}"))
        self._readers[stage].cancel()

    def _arrived(
        self,
        stage: int,
        message: wire.AnyStateMessage,
        body: bytes,
        server: Server,
        sharing: Sharing,
    ) -> None:
        match message:
            case wire.Ask() | wire.Want() | wire.Run():
                self._serve(stage, message, body, server)
            case wire.Made():
                sharing.made(stage, message)
            case wire.Kept():
                sharing.kept[stage] = message.step
            case _:
                call = self._calls.get((stage, message.request))
                if call is not None and not call.done.is_set():
                    self._answer(stage, call, message, body)

    def _answer(self, stage: int, call: Call, message: wire.AnyStateMessage, body: bytes) -> None:
        call.extend()
        match message:
            case Holds():
                call.finish(message)
            case wire.Lack():
                call.finish(_lack_error(stage, message.reason))
            case Have() if call.have is None:
                try:
                    if message.what != call.what:
                        raise BadMessage("schema", f"{message.what} is not {call.what}")
                    size = call.size(message)
                    if message.size != size or size < 1:
                        raise BadMessage("size", f"{message.size} bytes of {message.what}")
                except BadMessage as error:
                    call.finish(error)
                    return
                call.have = message
                call.arrival.begin(message.root, size)
            case wire.Chunk() if call.have is not None:
                self._chunk(stage, call, call.have, message, body)

    def _chunk(self, stage: int, call: Call, have: Have, chunk: wire.Chunk, data: bytes) -> None:
        arrival = call.arrival
        if chunk.at != arrival.at or chunk.length != min(CHUNK_BYTES, have.size - arrival.at):
            call.finish(BadMessage("size", "a chunk out of place"))
            return
        arrival.body[arrival.at : arrival.at + chunk.length] = data
        arrival.at += chunk.length
        self.progress += 1
        if arrival.at == have.size:
            self.spawn(partial(self._complete, stage, call, have))

    async def _complete(self, stage: int, call: Call, have: Have) -> None:
        """Compare the hash of the whole body."""
        arrival = call.arrival
        if await self.compute(lambda: root_of(arrival.body)) == have.root:
            call.finish(have)
        else:
            arrival.begin(b"", 0)
            call.finish(BadMessage("hash", f"{have.what} from stage {stage}"))

    # Serving.

    def _serve(
        self, stage: int, message: wire.Ask | wire.Want | wire.Run, body: bytes, server: Server
    ) -> None:
        if self._serving[stage] >= SERVED_AT_ONCE:
            self.refused["busy"] += 1
            self.post(stage, wire.Lack(self.place, message.request, "busy"))
            return
        self._serving[stage] += 1
        self.spawn(partial(self._guarded, stage, message, body, server))

    async def _guarded(
        self, stage: int, message: wire.Ask | wire.Want | wire.Run, body: bytes, server: Server
    ) -> None:
        """Serve a request; what fails is counted and answered."""
        reason: wire.LackReason = "failed"
        try:
            await server.serve(stage, message, body)
            return
        except BadMessage as error:
            self.refuse(stage, error)
            reason = "refused"
        except PeerError:
            return  # the stage is gone
        except (StateError, Unavailable, OSError, ValueError):
            self.refused["failed"] += 1
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            self.refused["failed"] += 1
        finally:
            self._serving[stage] -= 1
        self.post(stage, wire.Lack(self.place, message.request, reason))


def _lack_error(stage: int, reason: wire.LackReason) -> PeerError:
    why = f"stage {stage}: {reason}"
    if reason == "loading":
        return StageLoading(why)
    return Incompatible(why) if reason == "failed" else PeerError(why)


# What a member asks of others. Every method raises PeerError as `Channel.fetch` does.


class Fetcher:
    def __init__(self, channel: Channel, stage: LocalStage) -> None:
        self._channel = channel
        self._stage = stage

    async def ask(self) -> dict[int, Holds]:
        """Return what every stage that answers has of ours, once all of them know whether they have
        their weights."""
        found: dict[int, Holds] = {}

        async def one(stage: int) -> None:
            with contextlib.suppress(PeerError):  # it counts as a stage that has nothing
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

    async def checkpoint(self, holder: int) -> StageState:
        """Return our stage from the checkpoint that `holder` keeps."""
        own, stage = self._stage.spec.index, self._stage
        have, body = await self.kept(holder, "checkpoint", own)
        form = form_of(stage.layout, stage.settings)
        return await self._channel.compute(
            lambda: decode_state(as_tensor(body), stage.layout, form, have.step, have.squared_norm)
        )

    async def kept(self, holder: int, what: wire.Given, of: int) -> tuple[Have, bytearray]:
        """Return what `holder` keeps of stage `of`, which is ours or its own."""
        arrival = None
        if what == "checkpoint":
            arrival = self._stage.arrivals.setdefault(of, Arrival())

        def size(have: Have) -> int:
            if have.step > self._channel.step + 1:  # stages are at most one step apart
                raise BadMessage("bounds", f"{have.what} of step {have.step}, which is to come")
            return self._stage.size(of, have)

        found = await self._want(holder, what, size, of, arrival)
        self._stage.arrivals.pop(of, None)
        return found

    async def layers(self, stage: int) -> Neighbour:
        """Return a neighbour's layers as they are now, and ω."""
        layout = layers_layout(self._stage.layouts[stage])
        have, body = await self._want(stage, "layers", lambda have: 4 * elements(layout))
        layers = await self._channel.compute(lambda: read_floats(body, layout))
        return Neighbour(layers, have.squared_norm)

    async def ends(self, holder: int) -> dict[str, torch.Tensor]:
        """Return true copies of our embedding, or of norm and head."""
        own = self._stage.spec.index
        _, body = await self.kept(holder, "ends", own)
        layout = ends_layout(self._stage.end(own), self._stage.layout)
        return await self._channel.compute(lambda: read_floats(body, layout))

    async def tied(self) -> StageState:
        """Return the tied embedding of the other end with its moments, under our name. Waits for an
        end that is being restored."""
        spec = self._stage.spec
        other = spec.stages - 1 if spec.has_embedding else 0
        layout = tied_layout(spec, self._stage.layout)
        size = state_bytes(layout, "exact")
        have, body = await self._patiently(
            other, lambda: self._want(other, "tied", lambda have: size)
        )
        return await self._channel.compute(
            lambda: decode_state(as_tensor(body), layout, "exact", have.step, 0.0)
        )

    async def copy(self, spec: StageSpec) -> tuple[int, int, Parts]:
        """Return (bytes that came, step, weights) of a stage as it is now. Ours takes the same way
        without a stream, and raises as `LocalStage.copy` does."""
        layout, base = copied(spec, self._stage.layouts[spec.index]), self._stage.base

        def size(have: Have) -> int:
            most = copy_bytes(layout, adapter=base is None)
            if have.size > most or (base is None and have.size != most):
                raise BadMessage("size", f"{have.size} bytes of a copy, which has {most}")
            return have.size

        decoded = lambda body: self._channel.compute(lambda: decode_copy(spec, body, layout, base))
        if spec.index == self._stage.spec.index:
            step, ours = await self._stage.copy(self._channel.compute)
            return 0, step, await decoded(ours)
        have, theirs = await self._want(spec.index, "copy", size)
        return have.size, have.step, await decoded(theirs)

    async def probes(self, holder: int) -> list[Probe]:
        """Return at most `settings.probes`, oldest first."""
        _, body = await self.kept(holder, "probes", holder)
        return self._stage.read_probes(body)

    async def run_at(self, stage: int, edge: Probe | Edge, tokens: int, x: bytes) -> bytes:
        """Run one micro-batch through `stage` as it is now, as `run_one` does. Waits for a stage
        that is being restored.

        Args:
            tokens: Completion tokens of the micro-batch.

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
        run = wire.Run(self._channel.place, 0, codec, edge.rows, len(edge.about))
        ask = lambda: self._channel.fetch(stage, run, lambda have: size, edge.about + x)
        _, body = await self._patiently(stage, ask)
        return bytes(body)

    async def _want(
        self,
        stage: int,
        what: wire.Wanted,
        size: SIZE_LIMITS,
        of: int | None = None,
        arrival: Arrival | None = None,
    ) -> tuple[Have, bytearray]:
        want = wire.Want(self._channel.place, 0, what, stage if of is None else of, 0, b"")
        return await self._channel.fetch(stage, want, size, arrival=arrival)

    async def _patiently(
        self, stage: int, ask: Callable[[], Awaitable[tuple[Have, bytearray]]]
    ) -> tuple[Have, bytearray]:
        """Ask again while the stage is being restored."""
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


# What a member answers.


@dataclass(frozen=True)
class Answer:
    """A body that is there: what reads it, and its fields of `Have`."""

    step: int
    read: Callable[[], bytes | bytearray | memoryview]
    squared_norm: float = 0.0


class Server:
    def __init__(self, channel: Channel, stage: LocalStage) -> None:
        self._channel = channel
        self._stage = stage
        self._served: Counter[tuple[int, str]] = Counter()
        """(stage, kind) → bodies since the last step."""
        self._served_step = -1

    async def serve(
        self, stage: int, message: wire.Ask | wire.Want | wire.Run, body: bytes
    ) -> None:
        """Answer one request. Raises BadMessage, StateError, Unavailable, OSError, ValueError and
        what `is_device_error` knows, which the channel answers."""
        match message:
            case wire.Ask():
                await self._channel.send(stage, self._holds(stage, message.request))
            case wire.Want():
                await self._give(stage, message)
            case wire.Run():
                await self._run(stage, message, body)

    def _holds(self, stage: int, request: int) -> Holds:
        checkpoint, recorder = self._stage.stored(stage), self._stage.recorder
        ends, probes = recorder.ends.get(stage), recorder.probes
        return Holds(
            self._channel.place,
            request,
            self._stage.phase,
            checkpoint.step if checkpoint is not None else None,
            ends[0] if ends is not None else None,
            probes[-1].step if probes else None,
        )

    async def _give(self, stage: int, want: wire.Want) -> None:
        own = self._stage.spec.index
        if want.what in ("layers", "tied", "copy") and self._stage.phase != "ready":
            await self._lack(stage, want.request, "loading")
            return
        found = await self._find(stage, want) if want.of in (stage, own) else None
        if found is None:
            await self._lack(stage, want.request, "none")
            return
        if self._too_often(stage, want.what):
            await self._lack(stage, want.request, "refused")
            return
        body = memoryview(await self._channel.compute(found.read))
        root = await self._channel.compute(lambda: root_of(body))
        have = Have(
            self._channel.place,
            want.request,
            want.what,
            found.step,
            len(body),
            root,
            found.squared_norm,
        )
        at = want.at if want.root == root else 0
        if at >= len(body):
            raise BadMessage("bounds", f"byte {at} of {len(body)}")
        background = want.what == "checkpoint" and want.of == own
        await self._channel.send_body(stage, have, body, at, background)

    async def _lack(self, stage: int, request: int, reason: wire.LackReason) -> None:
        await self._channel.send(stage, wire.Lack(self._channel.place, request, reason))

    def _too_often(self, stage: int, what: str) -> bool:
        if self._served_step != self._channel.step:
            self._served.clear()
            self._served_step = self._channel.step
        self._served[stage, what] += 1
        repeated = self._served[stage, what] > SERVED_PER_STEP
        self._channel.refused["repeated"] += repeated
        return repeated

    async def _find(self, stage: int, want: wire.Want) -> Answer | None:
        """Return what `stage` wants; None where it is not here."""
        local, recorder, step = self._stage, self._stage.recorder, self._channel.step
        of, spec, layout = want.of, local.spec, local.layout
        match want.what:
            case "checkpoint" if of == spec.index and recorder.shared is not None:
                shared = recorder.shared
                return Answer(shared.step, lambda: shared.body, shared.squared_norm)
            case "checkpoint" if of != spec.index and (store := local.store) is not None:
                if (stored := store.about(of)) is not None:
                    read = lambda: store.read(of).body.numpy().data
                    return Answer(stored.step, read, stored.squared_norm)
            case "ends" if of in recorder.ends:
                ends_step, tensors = recorder.ends[of]
                ends = ends_layout(local.end(of), local.layouts[of])
                return Answer(ends_step, lambda: pack_floats(tensors, ends))
            case "probes" if recorder.probes:
                probes = list(recorder.probes)
                return Answer(probes[-1].step, lambda: strict.encode(probes))
            case "copy":
                copy_step, body = await local.copy(self._channel.compute)
                return Answer(copy_step, lambda: body)
            case "layers" if abs(stage - spec.index) == 1 and local.settings.mode != "copies":
                layers, worker = layers_layout(layout), local.worker
                norm = 0.0 if worker is None else worker.optimizer.squared_norm
                return Answer(step, lambda: pack_floats(trained(local.runtime), layers), norm)
            case "tied" if stage in (0, spec.stages - 1) and spec.shares_embedding:
                if tied := tied_layout(spec, layout):
                    return Answer(step, lambda: self._tied(tied))
        return None

    def _tied(self, layout: Layout) -> bytearray:
        local = self._stage
        if local.worker is not None:
            state = live_state(local.worker)
        else:
            restored = local.restored or StageState(self._channel.step, {})
            state = replace(restored, weights=trained(local.runtime))
        return encode_state(state, layout, "exact")

    async def _run(self, stage: int, asked: wire.Run, body: bytes) -> None:
        """Run a micro-batch through our stage as it is."""
        local = self._stage
        if asked.codec != (None if local.spec.has_embedding else local.codec):
            raise BadMessage("schema", "not activations of this crew")
        if local.phase in ("starting", "restoring"):
            await self._lack(stage, asked.request, "loading")
            return
        work = read_micro_batch(body[: asked.about], asked.rows, local.limits, "learn")
        if self._too_often(stage, "output"):
            await self._lack(stage, asked.request, "refused")
            return
        out = await self._channel.compute(
            lambda: run_one(local.runtime, work, body[asked.about :], local.codec)
        )
        place = self._channel.place
        have = Have(place, asked.request, "output", place.step, len(out), root_of(out))
        await self._channel.send_body(stage, have, memoryview(out))


# What members keep of each other. A stage announces a new body; its keepers fetch it, one of each
# stage and kind at a time. A body that is superseded meanwhile is skipped.


class Sharing:
    def __init__(self, channel: Channel, stage: LocalStage, fetch: Fetcher) -> None:
        self.kept: dict[int, int] = {}
        """Stage → committed steps in our checkpoint on its disk."""
        self._channel = channel
        self._stage = stage
        self._fetch = fetch
        self._news: dict[tuple[int, wire.Given], wire.Made | None] = {}
        """(stage, kind) that is being fetched → a newer announcement."""
        self._room = trio.Lock()
        """There is memory for one checkpoint at a time."""

    def announce(self, what: wire.Given, step: int) -> None:
        for stage in self._channel.streams:
            self._channel.post(stage, wire.Made(self._channel.place, 0, what, step))

    def begin(self, step: int) -> None:
        """Offer our checkpoint to this crew's members; make one if there is none that is new
        enough."""
        recorder, settings = self._stage.recorder, self._stage.settings
        if self._stage.store is None or not settings.keeps_copies(self._stage.spec) or not step:
            return
        shared = recorder.shared
        if shared is not None and step - settings.checkpoint_every < shared.step <= step:
            self.announce("checkpoint", shared.step)
        elif self._channel.streams:
            self._channel.spawn(self._share)

    async def _share(self) -> None:
        worker, recorder = self._stage.worker, self._stage.recorder
        assert worker is not None
        try:
            async with worker.optimizer.moving:  # never in the middle of a step
                await self._channel.compute(partial(recorder.share, worker))
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            self._channel.refused["failed"] += 1
            return
        if recorder.shared is not None:
            self.announce("checkpoint", recorder.shared.step)

    def made(self, stage: int, made: wire.Made) -> None:
        """Another member has a new body: fetch it if it belongs here."""
        key = stage, made.what
        if not self._keeps(*key):
            return
        if key in self._news:
            self._news[key] = made
            return
        self._news[key] = None
        self._channel.spawn(partial(self._follow, stage, made))

    def _keeps(self, stage: int, what: wire.Given) -> bool:
        own, stages = self._stage.spec.index, self._stage.spec.stages
        if what == "checkpoint":
            kept = kept_stages(own, stages, self._stage.settings)
            return self._stage.store is not None and stage in kept
        if what == "ends":
            return (stage, own) in ((0, 1), (stages - 1, stages - 2))
        return stage == stages - 1 and stage in ring(own, stages)

    async def _follow(self, stage: int, made: wire.Made) -> None:
        latest: wire.Made | None = made
        key = stage, made.what
        while latest is not None:
            try:
                await self._take(stage, latest)
            except PeerError:
                pass  # the next body will be announced as well
            except OSError as error:
                log.warning("neighbour's checkpoint not stored", stage=stage, error=str(error))
                self._channel.refused["failed"] += 1
            latest, self._news[key] = self._news[key], None
        del self._news[key]

    async def _take(self, stage: int, made: wire.Made) -> None:
        step = made.step
        if made.what == "checkpoint":
            async with self._room:
                stored = self._stage.stored(stage)
                if stored is None or stored.own or stored.step != step:
                    have, body = await self._fetch.kept(stage, "checkpoint", stage)
                    await self._channel.compute(lambda: self._keep(stage, have, body))
                    step = have.step
            self._channel.post(stage, wire.Kept(self._channel.place, 0, step))
        else:
            have, body = await self._fetch.kept(stage, made.what, stage)
            await self._channel.compute(lambda: self._keep(stage, have, body))

    def _keep(self, stage: int, have: Have, body: bytearray) -> None:
        """Keep a body of `stage`. Raises BadMessage, which is counted, and OSError."""
        local, recorder, layout = self._stage, self._stage.recorder, self._stage.layouts[stage]
        try:
            if have.what == "probes":
                recorder.probes[:] = local.read_probes(body)
            elif have.what == "ends":
                ends = ends_layout(local.end(stage), layout)
                recorder.ends[stage] = have.step, read_floats(body, ends)
            else:
                assert local.store is not None
                form = form_of(layout, local.settings)
                check_state(as_tensor(body), layout, form)
                about = local.store.describe(stage, form, have.step, have.squared_norm)
                local.store.write(Checkpoint(about, as_tensor(body)))
        except BadMessage as error:
            self._channel.refuse(stage, error)
            raise


class StatePeer:
    """This member's end of the state streams in one crew."""

    def __init__(
        self,
        stage: LocalStage,
        fence: Fence,
        streams: Mapping[int, trio.abc.Stream],
        compute: Compute = in_thread,
    ) -> None:
        step = lambda: (
            stage.worker.participant.step if stage.worker is not None else fence.place.step
        )
        self.stage = stage
        self.channel = Channel(fence, streams, stage.limits, stage.settings.seconds, compute, step)
        self.fetch = Fetcher(self.channel, stage)
        self.sharing = Sharing(self.channel, stage, self.fetch)
        self.server = Server(self.channel, stage)
        stage.recorder.sharing = self.sharing

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self.channel.run(self.server, self.sharing, task_status)

    def attach(self, worker: StageWorker, step: int) -> None:
        """The stage has its weights, and `worker` runs it from `step` on."""
        self.stage.worker, self.stage.restored = worker, None
        self.stage.phase = "ready"
        self.sharing.begin(step)
