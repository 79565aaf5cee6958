"""Checkpoints of stages: on the own disk, on neighbours' disks, and over state streams. Torch.

A member shares snapshots with its ring neighbours, serves what a lost stage asks for, and fetches
what its own stage lacks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import threading
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import torch
import trio
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from swarmnode.averaging.codecs import bfloat16_bits, bfloat16_values, to_bytes
from swarmnode.errors import (
    BadMessage,
    Incompatible,
    PeerError,
    PeerTimeout,
    Refused,
    StateError,
    Unavailable,
)
from swarmnode.files import held, sync_directory, write_atomically
from swarmnode.policy.model import base_model
from swarmnode.policy.quantised import MOST, Int8Matrix, quantise
from swarmnode.stages import wire
from swarmnode.stages.model import (
    LrScale,
    StageRuntime,
    adapt,
    batch_of,
    cut_ends,
    decode,
    encode,
    stage_config,
)
from swarmnode.stages.pipeline import Compute, Observer, StageWorker, in_thread
from swarmnode.stages.wire import (
    ABOUT_ITEM_BYTES,
    CHUNK_BYTES,
    NO_HASH,
    ActivationCodec,
    Edge,
    Fence,
    Form,
    FrameLimits,
    Have,
    MicroBatch,
    Place,
    Probe,
    Routes,
    StageSpec,
    Taken,
    activation_bytes,
    is_device_error,
    read_f32,
    read_micro_batch,
    root_of,
    state_bytes,
)
from swarmnode.weights.layout import Layout, TensorSpec, elements, make_layout
from swarmnode.wire import strict
from swarmnode.wire.tensors import pack_logprobs

if TYPE_CHECKING:
    from peft import LoraConfig

    from swarmnode.policy.model import Model

log = logging.getLogger(__name__)


# A stage's training state in host memory, as bytes, and back:
#
#     exact    weights ‖ first moments ‖ second moments ‖ counts, float32: 12 bytes/parameter
#     small    weights, bfloat16: 2 bytes/parameter, relative error 2⁻⁹; a new optimizer
#
# Under LoRA that is the adapter, otherwise every tensor of the stage.

Tensors = Mapping[str, torch.Tensor]
STREAM_CHUNK_BYTES: Final = CHUNK_BYTES
"""Length of a chunk of state on a stream."""
BLOCK: Final = 2**20
"""Values that are looked at at a time."""


@dataclass(frozen=True)
class StageState:
    """One stage after `step` committed steps. Tensors are float32 on the host, by the stage's own
    names."""

    step: int
    weights: Tensors
    first: Tensors = field(default_factory=dict)
    """AdamW's moments; empty where they are not kept. Likewise `second` and `counts`."""
    second: Tensors = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    """Steps that AdamW has taken for each tensor."""
    squared_norm: float = 0.0
    factor: float = 1.0
    """The stage's learning rate is the crew's times this."""
    hash: bytes = NO_HASH
    """The step hash."""


def layout_of(model: torch.nn.Module) -> Layout:
    return make_layout(
        (name, p.shape, "float32") for name, p in model.named_parameters() if p.requires_grad
    )


def stage_layouts(
    config: PretrainedConfig, specs: Sequence[StageSpec], lora: LoraConfig | None = None
) -> tuple[Layout, ...]:
    """What is trained of every stage of a model with transformers config `config`, under peft's
    settings `lora` where given.

    Shapes only: no weights are read, no memory is taken.
    """
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


def take(worker: StageWorker, only: str = "") -> StageState:
    """A copy on the host. Between two steps; writing or sending it needs the member no more. only:
    a name; else all that is trained."""
    weights, first, second, counts = {}, {}, {}, {}
    optimizer, adam = worker.optimizer, worker.optimizer.adam
    for name, parameter in trained(worker.runtime).items():
        if only not in ("", name):
            continue
        weights[name] = host_copy(parameter)
        moments = adam.state.get(parameter) if adam is not None else None
        if moments:
            first[name], second[name] = (
                host_copy(moments["exp_avg"]),
                host_copy(moments["exp_avg_sq"]),
            )
            counts[name] = float(moments["step"])
    return StageState(
        worker.participant.step,
        weights,
        first,
        second,
        counts,
        optimizer.squared_norm,
        optimizer.lr_scale.factor,
        worker.participant.hash,
    )


def take_small(worker: StageWorker) -> tuple[StageState, bytearray]:
    """Likewise, as bytes in form `small`, which are made of the live tensors: 2 for each weight.
    The state is without tensors."""
    optimizer, at, layout = worker.optimizer, worker.participant, layout_of(worker.runtime.model)
    said = StageState(
        at.step,
        {},
        squared_norm=optimizer.squared_norm,
        factor=optimizer.lr_scale.factor,
        hash=at.hash,
    )
    live = {name: parameter.detach() for name, parameter in trained(worker.runtime).items()}
    return said, encode_state(replace(said, weights=live), layout, "small")


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def trained(runtime: StageRuntime) -> dict[str, torch.Tensor]:
    """The live tensors."""
    return {name: p for name, p in runtime.model.named_parameters() if p.requires_grad}


def load_weights(runtime: StageRuntime, weights: Tensors) -> None:
    """Overwrites what is trained. Raises Incompatible for other names or shapes, or values that are
    not finite; nothing changed then."""
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
    """AdamW goes on where it was, for the tensors whose moments are there."""
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


def encode_state(state: StageState, layout: Layout, form: Form) -> bytearray:
    """`state_bytes(layout, form)` bytes."""
    if form == "small":
        # one that grows would be there twice at times
        body, at = bytearray(state_bytes(layout, form)), 0
        for spec in layout:  # each is there twice for a moment, and never all
            part = to_bytes(bfloat16_bits(state.weights[spec.name]), "<i2")
            body[at : at + len(part)] = part
            at += len(part)
        return body
    parts = []
    for tensors in (state.weights, state.first, state.second):
        for spec in layout:
            parts.append(
                to_bytes(tensors[spec.name], "<f4")
                if spec.name in tensors
                else bytes(4 * spec.elements)
            )
    return bytearray().join(
        [*parts, np.array([state.counts.get(spec.name, 0.0) for spec in layout], "<f4").tobytes()]
    )


def check_state(body: bytes | bytearray | memoryview, layout: Layout, form: Form) -> None:
    """Whether `decode_state` will take it, a block at a time: a neighbour keeps it as it came.
    Raises BadMessage as that does."""
    if len(body) != state_bytes(layout, form):
        raise BadMessage("size", f"{len(body)} bytes of a state of {state_bytes(layout, form)}")
    values = np.frombuffer(body, "<u2" if form == "small" else "<f4")
    weights = elements(layout)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        # bfloat16's exponent
        if (
            not ((block & 0x7F80) != 0x7F80).all()
            if form == "small"
            else not np.isfinite(block).all()
        ):
            raise BadMessage("not_finite", "a state")
        if form == "exact" and (block[max(0, 2 * weights - start) :] < 0).any():
            raise BadMessage("bounds", "a second moment or a count below zero")


def decode_state(
    body: bytes | bytearray | memoryview,
    layout: Layout,
    form: Form,
    step: int,
    squared_norm: float,
    factor: float,
) -> StageState:
    """Raises BadMessage: size, not_finite, bounds (a second moment or a count below zero)."""
    check_state(body, layout, form)
    if form == "small":
        values = bfloat16_values(torch.from_numpy(np.frombuffer(body, "<i2").copy()))
        return StageState(step, by_name(values, layout), squared_norm=squared_norm, factor=factor)
    flat, size = torch.from_numpy(np.frombuffer(body, "<f4").copy()), elements(layout)
    weights, first, second = (by_name(flat[i * size : (i + 1) * size], layout) for i in range(3))
    counts = {
        spec.name: steps
        for spec, steps in zip(layout, flat[3 * size :].tolist(), strict=True)
        if steps > 0
    }
    keep = lambda tensors: {name: tensors[name] for name in counts}
    return StageState(step, weights, keep(first), keep(second), counts, squared_norm, factor)


def by_name(flat: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """Tensor after tensor: parts of `flat`, which has all their values."""
    pieces = flat.split([spec.elements for spec in layout])
    return {spec.name: piece.view(spec.shape) for spec, piece in zip(layout, pieces, strict=True)}


# The order of sources for a lost stage, and the next source when the gate refuses one:
#
#     R0  journal    this node's own disk              R4  synthesis  from the neighbours' layers
#     R1  replica    the same stage of another crew    R5  copy       an end from its neighbour
#     R2  snapshot   a snapshot at a ring neighbour    R6  none       the crew dissolves
#     R3  base       the stage that training began with
#
# Expected harm rises from first to last. A journal that lacks as many steps as lie between two
# snapshots goes after a younger snapshot.

Method = Literal["checkfree", "uniform", "identity", "copy"]
PaperMode = Literal["off", "checkfree", "checkfree+"]
"""As `stages.paper_mode`."""
LEARNING_RATE_FACTOR: Final = 1.1
"""Algorithm 1, line 4; once, not for each recovery."""


class SourceKind(IntEnum):
    JOURNAL = 0
    REPLICA = 1
    SNAPSHOT = 2
    BASE = 3
    SYNTHESIS = 4
    COPY = 5
    NONE = 6


@dataclass(frozen=True)
class Run:
    """What decides whether a synthesis would harm."""

    swapped: bool = False
    """Half of the micro-batches run in `swapped_order` since the start: then second and last but
    one have learnt the ends' job."""
    pretrained: bool = False
    """A base was published: its stage is a better source than any neighbour."""
    adapter: bool = False
    """Only a LoRA adapter is trained."""


@dataclass(frozen=True)
class RecoverySettings:
    """What a person may choose; all stages of a crew agree on `mode`."""

    snapshot_every: int = 20
    """Committed steps between two snapshots of a stage."""
    keep_policy: bool = False
    """A copy of every stage is kept on this node's disk, and not of its ring neighbours' alone."""
    synthesis: Literal["checkfree", "uniform", "identity", "copy", "none"] = "checkfree"
    """How an inner stage is made of its neighbours'. `copy` is for the ends, `none` for neither."""
    mode: PaperMode = "off"
    """The papers as they are written, for inner stages (CheckFree) or for all (CheckFree+): no
    snapshot, journal or base; synthesis without healing; learning rate × 1.1. CheckFree+ trains in
    swapped order. CheckFree cannot make an end: it comes back from copies."""
    probes: int = 8
    """Committed micro-batches that a recovered stage is judged by: the last ones."""
    memory: int = 24
    """Committed micro-batches that are remembered; the ones before the last `probes` are what a
    stage is healed with, so that it is judged by others."""
    gate_kl: float = 0.02
    """Nats per token of KL(before ‖ recovered)."""
    gate_nll: float = 0.05
    """Nats per token."""
    copy_factor: float = 10.0
    """A copy of the crew's own stage has so many times the room in both: it lacks some steps, and
    anything else lacks all."""
    healings: int = 2
    """Distillations before a source is given up."""
    healing_steps: int = 120
    healing_rate: float = 0.04
    """AdamW moves a weight by this share of its tensor's root mean square in a step, at first."""
    warmup_steps: int = 10
    """Steps over which the learning rate of a stage with a fresh optimizer rises to what it is
    elsewhere."""
    exact_bytes: int = 256 * 1024 * 1024
    """A snapshot up to this size is float32 with Adam's moments; a larger one bfloat16 without."""
    pair_bytes: int = 256 * 1024 * 1024
    """Activations that a stage keeps for healing its neighbours."""
    seconds: float = 120.0
    """A transfer fails when not a byte of it came for so long. Reading and hashing a stage of 7 B
    at its holder takes a part of this."""
    neighbour_seconds: float = 3600.0
    """Waiting for a neighbour that is being restored as well, and says so: half of 7 B in two bytes
    each takes 19 minutes at 50 Mbit/s."""

    def keeps_copies(self, spec: StageSpec) -> bool:
        """Whether this stage is copied to others and comes back from copies; else it is made of its
        neighbours."""
        return self.mode == "off" or (
            self.mode == "checkfree" and (spec.has_embedding or spec.has_head)
        )

    def synthesises(self, stage: int, stages: int) -> bool:
        """Whether `stage`, of so many, may ever be made of its neighbours' layers; an end needs a
        copy of what is no layer besides."""
        return self.synthesis != "none" and (0 < stage < stages - 1 or self.mode == "checkfree+")


@dataclass(frozen=True)
class Source:
    """One way to get the stage back."""

    kind: SourceKind
    step: int | None = None
    """Committed steps that are in it; None where that cannot be said."""
    holder: int | None = None
    """Stage that has it; None: this machine, or a replica."""
    method: Method | None = None
    """How R4 and R5 make it."""
    exact: bool = False
    """It is this stage as it was: the crew's last step, from our own disk, or from two neighbours
    that agree."""
    disputed: bool = False
    """The other ring neighbour has other bytes of the same step. Only the gate can say which of
    them is right."""
    vouched: bool = False
    """It is this stage as it was at some step: from our own disk, or from two neighbours that
    agree."""
    last: bool = False
    """Taken as it is, since nothing else serves."""


@dataclass(frozen=True)
class Found:
    """What there is after everybody was asked."""

    journal: int | None = None
    """Steps in this node's journal of this stage of this crew."""
    replica: bool = False
    snapshots: Mapping[int, int] = field(default_factory=dict)
    """Holder's stage → steps; of ring neighbours, nobody else is given any."""
    roots: Mapping[int, bytes] = field(default_factory=dict)
    """Holder's stage → the snapshot's hash."""
    base: bool = False
    alive: frozenset[int] = frozenset()
    """Other stages that have their weights."""
    ends: frozenset[int] = frozenset()
    """Stages that keep a true copy of this end's embedding, or norm and head."""


@dataclass(frozen=True)
class Verdict:
    """What a probe says of a recovered stage, nats per token; see `recovery.judge`."""

    kl: float
    nll_rise: float
    tokens: int
    finite: bool = True


class RecoveryOrder:
    """The sources of one recovery, in order. `step`: committed steps of the crew."""

    def __init__(
        self, found: Found, spec: StageSpec, step: int, run: Run, settings: RecoverySettings
    ) -> None:
        self._settings = settings
        self._paper = not settings.keeps_copies(spec)
        self._step = step
        self.tried: list[tuple[SourceKind, str]] = []
        """(kind, why it did not serve), in order."""
        self.excluded: list[tuple[SourceKind, str]] = []
        """(kind, why it was not even tried)."""
        self._failed: list[tuple[float, Source]] = []
        """(damage, source), in order, of what failed the gate and is finite."""
        self._left = list(self._sources(found, spec, run))
        self._compared = False

    def next(self) -> Source:
        """The best source that was not refused. Raises Refused, with every source's reason, when
        there is none (R6)."""
        if self._left:
            return self._left[0]
        reasons = "; ".join(
            f"R{int(kind)} {kind.name.lower()}: {why}" for kind, why in self.tried + self.excluded
        )
        raise Refused(f"no source is left for this stage: {reasons or 'nobody has a copy'}")

    def refuse(self, source: Source, why: str) -> None:
        """`source` was not there, was not what it said, or failed its gate."""
        if source in self._left:
            self._left.remove(source)
        self.tried.append((source.kind, why))

    def failed(self, source: Source, verdict: Verdict | None, why: str) -> None:
        """`source` failed its gate. verdict: before it was healed."""
        if verdict is not None and verdict.finite:
            self._failed.append((self.damage(verdict), source))
        self.refuse(source, why)

    def last_resort(self) -> Source | None:
        """What is taken although it failed the gate; None where there is nothing. Without it the
        crew would lose all its steps.

        The policy may have moved further in one step than the gate allows: then nothing passes, a
        perfect copy neither. So the base, which is nobody's word, says how far off a stage is of
        which nothing is left, and what is no worse by more than the gate's width may be taken, as
        may true copies, which lack a few steps. Of these the first that is not worse than the best
        by more than that.
        """
        base = min(
            (damage for damage, source in self._failed if source.kind == SourceKind.BASE),
            default=-math.inf,
        )
        may = [
            (damage, source)
            for damage, source in self._failed
            if source.vouched or damage <= base + 1
        ]
        self._failed.clear()
        best = min((damage for damage, _ in may), default=math.inf)
        return next(
            (replace(source, last=True) for damage, source in may if damage <= best + 1), None
        )

    def rivals(self) -> tuple[Source, ...]:
        """The best source and the other one, where two neighbours have different bytes of one step
        and `prefer` was not called."""
        best = self._left[0] if self._left else None
        if best is None or not best.disputed or self._compared:
            return ()
        return tuple(
            source for source in self._left if source.disputed and source.step == best.step
        )

    def prefer(self, source: Source | None) -> None:
        """It goes before all others: of the `rivals`, it was judged better."""
        self._compared = True
        if source in self._left:
            self._left.remove(source)
            self._left.insert(0, source)

    def damage(self, verdict: Verdict) -> float:
        """How bad a verdict is, in units of the gate: the better one's is less."""
        s = self._settings
        return (
            max(verdict.kl / s.gate_kl, verdict.nll_rise / s.gate_nll)
            if verdict.finite
            else math.inf
        )

    def judge(
        self, source: Source, verdict: Verdict | None, healings: int
    ) -> Literal["rejoin", "heal", "next"]:
        """What to do with a stage that was restored from `source` and healed `healings` times.

        Without a probe a true copy that nobody disputes is trusted, and nothing else. What is
        exact, and everything in paper mode, has to be finite and no more: the probe is of before
        the last step, so that even the very same stage is as far from it as that step went. For the
        same reason an older copy of the crew's own is given room: to refuse it is to lose every
        step that was taken, not the few that it lacks.
        """
        s = self._settings
        room = s.copy_factor if source.kind in (SourceKind.JOURNAL, SourceKind.SNAPSHOT) else 1.0
        if verdict is None:
            return (
                "rejoin"
                if (source.kind <= SourceKind.BASE and not source.disputed) or self._paper
                else "next"
            )
        if not verdict.finite:
            return "next"
        as_it_is = self._paper or source.last or (source.exact and not healings)
        if as_it_is or (verdict.kl < room * s.gate_kl and verdict.nll_rise < room * s.gate_nll):
            return "rejoin"
        return "heal" if healings < s.healings else "next"

    def _sources(self, found: Found, spec: StageSpec, run: Run) -> Iterable[Source]:
        own_copy = Source(
            SourceKind.JOURNAL, found.journal, exact=found.journal == self._step, vouched=True
        )
        copies = [] if found.journal is None else [own_copy]
        for holder, step in found.snapshots.items():
            roots = [root for i, root in found.roots.items() if found.snapshots[i] == step]
            disputed = len(set(roots)) > 1
            vouched = len(roots) > 1 and not disputed
            exact = step == self._step and vouched
            copies.append(
                Source(
                    SourceKind.SNAPSHOT,
                    step,
                    holder,
                    exact=exact,
                    disputed=disputed,
                    vouched=vouched,
                )
            )
        if self._paper:
            self.excluded += [(source.kind, "paper mode") for source in copies] + (
                [(SourceKind.BASE, "paper mode")] if found.base else []
            )
            copies = []
        for source in [c for c in copies if c.step is not None and c.step > self._step]:
            copies.remove(source)
            self.excluded.append(
                (source.kind, f"it is of step {source.step}, and the crew's is {self._step}")
            )
        copies.sort(
            key=lambda c: (
                -(c.step or 0),
                c.kind,
                not c.exact,
                -1 if c.holder is None else c.holder,
            )
        )
        most = 1 if any(c.exact for c in copies) else self._settings.snapshot_every
        own = [
            c
            for c in copies
            if c.kind == SourceKind.JOURNAL and c.step is not None and self._step - c.step < most
        ]
        yield from own
        if found.replica:
            yield Source(SourceKind.REPLICA)
        yield from (c for c in copies if c not in own)
        if found.base and not self._paper:
            yield Source(SourceKind.BASE)
        yield from self._synthesis(found, spec, run)

    def _synthesis(self, found: Found, spec: StageSpec, run: Run) -> Iterable[Source]:
        at_end = spec.has_embedding or spec.has_head
        kind = SourceKind.COPY if at_end else SourceKind.SYNTHESIS
        method = self._settings.synthesis
        if method == "none":
            self.excluded.append((kind, "synthesis is switched off"))
            return
        if at_end and method != "identity":
            method = "copy"
        elif method == "copy":
            method = "checkfree"
        needed = {i for i in (spec.index - 1, spec.index + 1) if 0 <= i < spec.stages}
        try:
            check(method, spec, run)
            if found.base and run.pretrained:
                raise Refused(
                    "the base's stage is closer than anything that is made of the neighbours'"
                )
            if not needed <= found.alive:
                raise Refused("a neighbour is lost too")
            if at_end and not found.ends:
                raise Refused("nobody keeps a copy of this end's embedding or head")
        except Refused as error:
            self.excluded.append((kind, str(error)))
            return
        yield Source(kind, method=method)


def check(method: Method, spec: StageSpec, run: Run) -> None:
    """Raises Refused where `method` would harm this stage of this run."""
    at_end = spec.has_embedding or spec.has_head
    if run.adapter:
        raise Refused(
            "an adapter is not averaged with another layer's: the base with its last known adapter,"
            " or none, is closer"
        )
    if method in ("checkfree", "uniform") and at_end:
        raise Refused(
            f"{method} needs a neighbour on both sides, and stage {spec.index} of {spec.stages}"
            " has one"
        )
    if method == "copy":
        if not at_end:
            raise Refused(
                f"copy is for the first and the last stage, and stage {spec.index} of {spec.stages}"
                " is neither"
            )
        if run.pretrained:
            raise Refused(
                "copy needs a run trained with swapped stages, which costs a pretrained policy 2"
                " nats: restore the base's stage"
            )
        if not run.swapped:
            raise Refused(
                "copy needs a run trained with swapped stages; without that the copy costs 3 nats"
            )


def check_paper(mode: PaperMode, stages: int, run: Run) -> None:
    """Raises Refused where a crew must not restore its stages as the papers do.

    stages: as configured, 0 for any number.
    """
    if mode == "off":
        return
    if run.pretrained and mode == "checkfree+":
        raise Refused(
            "checkfree+ trains with swapped stages, which costs a pretrained policy 2 nats: set"
            " stages.paper_mode to off"
        )
    if run.pretrained:
        raise Refused(
            "checkfree averages neighbours, and of a base that was trained its own stage is closer:"
            " set stages.paper_mode to off"
        )
    if run.adapter:
        raise Refused(f"{mode} is for whole weights, and only an adapter is trained here")
    if mode == "checkfree" and stages < 3:
        raise Refused(
            f"checkfree makes inner stages of their neighbours: stages.stages is {stages}, it needs"
            " three or more"
        )
    if mode == "checkfree+" and stages < 4:
        raise Refused(
            "checkfree+ exchanges the first two and the last two stages: stages.stages is"
            f" {stages}, it needs four or more"
        )


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

BRANCH_ENDS: Final = ("self_attn.o_proj.", "mlp.down_proj.")


@dataclass(frozen=True)
class Neighbour:
    """What a stage next to the lost one gives."""

    layers: Mapping[str, torch.Tensor]
    """Its layers' tensors by their local names, `model.layers.0.…`; others are ignored."""
    squared_norm: float
    """‖∇W‖² over those layers at the last step, before clipping."""


@dataclass(frozen=True)
class Synthesis:
    state: dict[str, torch.Tensor]
    """Every tensor of the stage, by local name; new memory."""
    learning_rate_factor: float


def synthesise(
    method: Method,
    spec: StageSpec,
    before: Neighbour | None,
    after: Neighbour | None,
    run: Run,
    *,
    ends: Mapping[str, torch.Tensor] | None = None,
    paper: bool = True,
) -> Synthesis:
    """Weights for the lost stage `spec` from the stages `before` and `after` it.

    `ends` are true copies of embedding, or norm and head, by local name. `paper` raises the
    learning rate as algorithm 1 does; we measured no gain. Raises Refused, saying why, where the
    method would harm, and Incompatible where the neighbours' layers are not this stage's.
    """
    check(method, spec, run)
    if method == "copy":
        source = after if spec.has_embedding else before
        state = {name: tensor.clone() for name, tensor in layers_of(source, spec).items()}
    elif method == "identity":
        source = before if before is not None else after
        blocked = layers_of(source, spec).items()
        state = {
            n: torch.zeros_like(t) if any(end in n for end in BRANCH_ENDS) else t.clone()
            for n, t in blocked
        }
    else:
        state = average(before, after, spec, uniform=method == "uniform")
    for name in end_names(spec):
        if ends is None or name not in ends:
            raise Refused(f"{name} can only be restored from a true copy, and none is left")
        state[name] = ends[name].clone()
    return Synthesis(state, LEARNING_RATE_FACTOR if paper else 1.0)


def average(
    before: Neighbour | None, after: Neighbour | None, spec: StageSpec, uniform: bool
) -> dict[str, torch.Tensor]:
    """Algorithm 1, line 3, in float64. Two zero gradients say nothing of either side, and weigh
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
    """A neighbour's layers, as many as this stage has. Raises Refused without the neighbour,
    Incompatible for other layers."""
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
    """Local names of what an end stage holds beside its layers."""
    names = ["model.embed_tokens.weight"] if spec.has_embedding else []
    tied_here = spec.tied and spec.stages == 1
    return names + (
        ["model.norm.weight"] + ([] if tied_here else ["lm_head.weight"]) if spec.has_head else []
    )


# Bodies of state transfers: bytes and back, and the length of each part of a stage.


def layers_layout(layout: Layout) -> Layout:
    """What CheckFree takes from a neighbour."""
    return tuple(spec for spec in layout if ".layers." in spec.name)


def ends_layout(spec: StageSpec, layout: Layout) -> Layout:
    """Embedding, or norm and head."""
    names = set(end_names(spec))
    return tuple(tensor for tensor in layout if tensor.name in names)


def tied_layout(spec: StageSpec, layout: Layout) -> Layout:
    """The tied embedding by this end's name for it; empty where it is not trained."""
    name = "model.embed_tokens.weight" if spec.has_embedding else "lm_head.weight"
    return tuple(tensor for tensor in layout if tensor.name == name)


def pack_floats(tensors: Tensors, layout: Layout) -> bytearray:
    """It takes 4 bytes per weight, and a tensor more."""
    body = bytearray(4 * elements(layout))
    flat, at = np.frombuffer(body, "<f4"), 0
    for spec in layout:
        flat[at : at + spec.elements] = (
            tensors[spec.name].detach().to("cpu", torch.float32).reshape(-1).numpy()
        )
        at += spec.elements
    return body


def read_floats(body: bytes | bytearray, layout: Layout) -> dict[str, torch.Tensor]:
    """float32 on the host; the length was checked. Raises BadMessage: not_finite."""
    flat = torch.from_numpy(np.frombuffer(body, "<f4").copy())
    if not bool(torch.isfinite(flat).all()):
        raise BadMessage("not_finite", "weights")
    return by_name(flat, layout)


def run_one(runtime: StageRuntime, work: MicroBatch, x: bytes, codec: ActivationCodec) -> bytes:
    """One micro-batch through one stage, without gradient: activations in the crew's codec in (none
    on stage 0), the same out; at the tail log-probabilities of the completion tokens, f32.

    Raises BadMessage for activations that are none, ValueError where the stage's own numbers are
    not finite.
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


# The queue to one peer: messages first, then bodies chunk by chunk in turn, snapshots last.


@dataclass(eq=False)  # two of one request are two
class Outgoing:
    """One transfer on its way out."""

    request: int
    what: wire.What
    head: bytes
    """What goes before the first chunk; empty from then on."""
    body: memoryview
    later: bool
    at: int


class Outbox:
    def __init__(self) -> None:
        self.messages: deque[tuple[int, bytes]] = deque()
        """(number of the request of ours that it is, 0 for none; bytes)."""
        self.transfers: deque[Outgoing] = deque()
        self._wake = trio.Event()

    def add(self, message: bytes, request: int) -> None:
        self.messages.append((request, message))
        self._wake.set()

    def transfer(self, have: wire.Have, body: bytes | memoryview, later: bool, at: int) -> None:
        """`body` from byte `at` on."""
        self.transfers.append(
            Outgoing(have.request, have.what, wire.pack_state(have), memoryview(body), later, at)
        )
        self._wake.set()

    def clear(self) -> None:
        self.messages.clear()
        self.transfers.clear()
        self._wake.set()

    def next(self, place: Place) -> tuple[int, bytes] | None:
        """What to write next, and of which request of ours it is; None where there is nothing."""
        if self.messages:
            return self.messages.popleft()
        if not self.transfers:
            return None
        out = next((out for out in self.transfers if not out.later), self.transfers[0])
        self.transfers.remove(out)
        head, out.head = out.head, b""
        part = out.body[out.at : out.at + CHUNK_BYTES]
        chunk = wire.pack_state(wire.Chunk(place, out.request, out.at, len(part)), part)
        out.at += len(part)
        if out.at < len(out.body):
            self.transfers.append(out)  # in turn
        return 0, head + chunk

    async def wait(self) -> None:
        """Until there may be something to write."""
        self._wake = trio.Event()
        await self._wake.wait()


# Requests and bodies over state streams: one duplex stream to each other member.
#
# A request fails when nothing arrives or leaves for `seconds`. Restoration goes before snapshots,
# chunk by chunk, within its share of the uplink. Refused input is counted; after MISBEHAVED
# refusals the stream closes.

SERVED: Final = 5
"""Requests of one peer at a time; answers that it has not read yet are among them. A stage that is
restored wants two parts of a snapshot beside what is new of ours: snapshot, ends, probes."""
MISBEHAVED: Final = 16
LATER_SECONDS: Final = 1800.0
"""Given to what is kept for later, between two parts of it: all that somebody waits for goes
before."""
REDIAL_SECONDS: Final = (1.0, 30.0)
"""Between the end of a stream and a new one, doubling from one to the next of the same stage."""
BACK_SECONDS: Final = 60.0
"""A lost stream is waited for so long. Whether its member is there at all, others find out
sooner."""
STREAM_LOOK_SECONDS: Final = 0.25
INTERRUPTED: Final = ("closed", "truncated")
"""How a stream ends through nobody's fault: its connection did."""
QUEUED: Final = 1024
"""Messages to one peer; who lets so many wait is gone."""


class Loading(Incompatible):
    """Raised when the stage that was asked is still being restored."""


Body = tuple[wire.Have, bytearray]
Answer = wire.Holds | Body


@dataclass(eq=False)
class Part:
    """Bytes `at` … `until` − 1 of a body, and where they go; `at` moves as they come."""

    body: bytearray | memoryview
    at: int
    until: int


@dataclass
class _Call:
    """Somebody waits for the answer to a request. Nobody is shown progress by what is kept for
    later."""

    seconds: float
    """At most, between two signs that it is being worked at."""
    scope: trio.CancelScope
    size: Callable[[wire.Have], int]
    """How long the answer must be. Raises BadMessage for one that was not asked for."""
    part: Part | None
    """What was asked for; None: all, and it goes into `body`."""
    body: bytearray = field(default_factory=bytearray)
    have: wire.Have | None = None
    done: trio.Event = field(default_factory=trio.Event)
    answer: Answer | Exception | None = None

    def progressed(self) -> None:
        self.scope.deadline = trio.current_time() + self.seconds


class _Calls:
    """Our requests that wait for an answer, by (stage, number)."""

    def __init__(self) -> None:
        self.progress = 0
        """Grows with each part of an answer to us that arrives, and with each part of a request of
        ours that leaves."""
        self._last = 0
        self._open: dict[tuple[int, int], _Call] = {}

    def number(self) -> int:
        self._last += 1
        return self._last

    @contextlib.contextmanager
    def open(
        self,
        stage: int,
        number: int,
        seconds: float,
        size: Callable[[wire.Have], int],
        part: Part | None,
    ) -> Iterator[_Call]:
        call = self._open[stage, number] = _Call(seconds, trio.CancelScope(), size, part)
        call.progressed()
        try:
            yield call
        finally:
            del self._open[stage, number]

    def get(self, stage: int, number: int) -> _Call | None:
        return self._open.get((stage, number))

    def progressed(self, stage: int, number: int) -> None:
        call = self.get(stage, number)
        if call is not None:
            call.progressed()
            self.progress += call.seconds < LATER_SECONDS

    def answered(self, stage: int, number: int, answer: Answer | Exception) -> None:
        call = self.get(stage, number)
        if call is not None and not call.done.is_set():
            self.progress += call.seconds < LATER_SECONDS
            call.answer = answer
            call.done.set()

    def lost(self, stage: int, error: Exception) -> None:
        """Nothing of `stage` comes any more."""
        for of, number in list(self._open):
            if of == stage:
                self.answered(stage, number, error)


class Channel:
    """`run` it in a nursery; it ends by cancellation. step: committed steps. again: a new stream to
    a stage whose last one was interrupted, which may be many times in the hour that a stage of 7 B
    takes on a home's line; raises PeerError where there can be none."""

    def __init__(
        self,
        fence: Fence,
        streams: Mapping[int, trio.abc.Stream],
        limits: FrameLimits,
        seconds: float,
        compute: Compute,
        step: Callable[[], int],
        again: Callable[[int], Awaitable[trio.abc.Stream]] | None = None,
    ) -> None:
        self.compute = compute
        self._again = again
        self.gone: dict[int, str] = {}
        """Stage → why its stream ended."""
        self.streams = dict(streams)
        self.outboxes = {stage: Outbox() for stage in streams}
        self._fence = fence
        self._limits = limits
        self._seconds = seconds
        self._step = step
        self._calls = _Calls()
        self._serving: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()
        """What peers sent that is not what it has to be, and what they asked for and did not get,
        by reason of STATE_REFUSALS."""
        self._blame: Counter[int] = Counter()
        """Stage → how much of that was what it sent."""
        self._nursery: trio.Nursery | None = None

    @property
    def progress(self) -> int:
        """Grows with each part of an answer to us that arrives, and with each part of a request of
        ours that leaves."""
        return self._calls.progress

    @property
    def step(self) -> int:
        return self._step()

    @property
    def place(self) -> Place:
        p = self._fence.place
        return Place(p.crew, p.stage, self.step)

    async def run(self, server: Server, sharing: Sharing) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for stage, stream in self.streams.items():
                    nursery.start_soon(self._speak, stage, stream, server, sharing)
                await trio.sleep_forever()  # answers come and go
        finally:
            self._nursery = None

    async def _speak(
        self, stage: int, stream: trio.abc.Stream, server: Server, sharing: Sharing
    ) -> None:
        """With one member, over one stream after another."""
        pause, most = REDIAL_SECONDS
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stage, stream)
                try:
                    await self._read(stage, stream, server, sharing)
                finally:
                    await trio.aclose_forcefully(stream)  # and wakes who writes
            if self._again is None or self.gone[stage] not in INTERRUPTED:
                return
            await trio.sleep(pause)
            pause = min(2 * pause, most)
            try:
                stream = await self._again(stage)
            except PeerError:
                return
            del self.gone[stage]

    async def returns(self, stage: int) -> bool:
        """Waits for a stream to `stage` in the place of one that was interrupted. Whether there is
        one; False at once if none was."""
        if self._again is None or self.gone.get(stage) not in INTERRUPTED:
            return False
        until = trio.current_time() + BACK_SECONDS
        while True:
            await trio.sleep(STREAM_LOOK_SECONDS)
            if stage not in self.gone or trio.current_time() >= until:
                return stage not in self.gone

    # Sending.

    async def answer(
        self,
        stage: int,
        request: int,
        what: wire.What,
        step: int,
        body: bytes | bytearray | memoryview,
        *,
        later: bool = False,
        part: tuple[int, int | None] = (0, None),
        **more: Any,  # noqa: ANN401
    ) -> None:
        root = more.pop("root", b"") or await self.compute(lambda: wire.root_of(body))
        if stage not in self.gone:
            have = wire.Have(self.place, request, what, step, len(body), root, **more)
            self.outboxes[stage].transfer(have, memoryview(body)[: part[1]], later, part[0])

    def lack(self, stage: int, request: int, reason: wire.LackReason) -> None:
        self.send(stage, wire.Lack(self.place, request, reason))

    def send(
        self, stage: int, message: wire.AnyStateMessage, body: bytes = b"", call: int = 0
    ) -> None:
        """call: the number of the request of ours that it is."""
        if stage in self.gone:
            return
        outbox = self.outboxes[stage]
        outbox.add(wire.pack_state(message, body), call)
        if len(outbox.messages) > QUEUED:
            self._lose(stage, "does not read")

    def spawn(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Begin `work` in the background. False where `run` is over, or has not begun: then it is
        not begun."""
        if self._nursery is None:
            return False
        self._nursery.start_soon(work)
        return True

    async def _write(self, stage: int, stream: trio.abc.Stream) -> None:
        outbox = self.outboxes[stage]
        try:
            while stage not in self.gone:
                if (ready := outbox.next(self.place)) is None:
                    await outbox.wait()
                    continue
                call, data = ready
                # a chunk with its header is written as one
                for at in range(0, len(data), 2 * STREAM_CHUNK_BYTES):
                    await stream.send_all(data[at : at + 2 * STREAM_CHUNK_BYTES])
                    self._calls.progressed(stage, call)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lose(stage, "closed")

    # Asking.

    async def call(
        self,
        stage: int,
        message: wire.AnyStateMessage,
        size: Callable[[wire.Have], int],
        body: bytes = b"",
        seconds: float | None = None,
        part: Part | None = None,
    ) -> Answer:
        """Holds, or (Have, body) with the hash that was promised. `size` says how long all of the
        answer must be, or raises BadMessage. seconds: other than those of the channel;
        LATER_SECONDS for what nobody waits for. part: as the message asks for; it is filled as it
        comes, and no hash is of it alone.

        Raises PeerError: BadMessage for what was not what it said, PeerTimeout, Loading, and for a
        stage that is gone or has nothing.
        """
        if stage in self.gone or stage not in self.outboxes:
            raise PeerError(f"stage {stage} is gone: {self.gone.get(stage, 'no stream')}")
        message = msgspec.structs.replace(message, request=self._calls.number())
        within = self._seconds if seconds is None else seconds
        with self._calls.open(stage, message.request, within, size, part) as call:
            self.send(stage, message, body, message.request)
            with call.scope:  # around waiting only
                await call.done.wait()
        if not call.done.is_set():
            raise PeerTimeout(f"nothing came of a request to stage {stage} for {within:.0f} s")
        if isinstance(call.answer, BadMessage):
            self.refuse(stage, call.answer)
        if isinstance(call.answer, Exception):
            raise call.answer
        assert call.answer is not None
        return call.answer

    async def call_for_body(
        self,
        stage: int,
        message: wire.AnyStateMessage,
        size: Callable[[wire.Have], int],
        body: bytes = b"",
        seconds: float | None = None,
        part: Part | None = None,
    ) -> Body:
        """As `call`, of something that has a body."""
        answer = await self.call(stage, message, size, body, seconds, part)
        if not isinstance(answer, tuple):
            raise BadMessage("schema", "an answer to another question")
        return answer

    # Receiving.

    async def _read(
        self, stage: int, stream: trio.abc.Stream, server: Server, sharing: Sharing
    ) -> None:
        reason = "closed"
        try:
            while (
                stage not in self.gone
                and (got := await wire.read_state(stream, self._limits)) is not None
            ):
                if self._fence.check(got[0].place, stage, None):
                    continue
                self._arrived(stage, *got, server, sharing)
                if self._blame[stage] >= MISBEHAVED:
                    reason = "misbehaved"
                    break
        except BadMessage as error:
            reason = error.reason
            self.refused[reason] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # whoever waits is told by `_lose`
        self._lose(stage, reason)

    def refuse(self, stage: int, error: BadMessage) -> None:
        """What `stage` sent is not what it has to be."""
        self.refused[error.reason if error.reason in wire.STATE_REASONS else "schema"] += 1
        self._blame[stage] += 1

    def _lose(self, stage: int, reason: str) -> None:
        if stage in self.gone:
            return
        self.gone[stage] = reason
        self._calls.lost(stage, PeerError(f"stage {stage} is gone: {reason}"))
        self.outboxes[stage].clear()

    def _arrived(
        self,
        stage: int,
        message: wire.AnyStateMessage,
        body: bytes,
        server: Server,
        sharing: Sharing,
    ) -> None:
        match message:
            case wire.Chunk():
                self._chunk(stage, message, body)
            case wire.Have():
                self._begins(stage, message)
            case wire.Kept():
                sharing.kept(stage, message)
            case wire.Made():
                sharing.made(stage, message)
            case wire.Holds():
                self._calls.answered(stage, message.request, message)
            case wire.Lack():
                loading = message.reason == "loading"
                why = f"stage {stage}: {message.reason}"
                error = (
                    Loading(why)
                    if loading
                    else Incompatible(why)
                    if message.reason == "failed"
                    else PeerError(why)
                )
                self._calls.answered(stage, message.request, error)
            case wire.Ask():
                self.send(stage, server.holds(stage, message.request))
            case wire.Want():
                self._soon(stage, message.request, lambda: server.serve(stage, message))
            case wire.Run():
                self._soon(stage, message.request, lambda: server.run(stage, message, body))

    def _begins(self, stage: int, have: wire.Have) -> None:
        call = self._calls.get(stage, have.request)
        if call is None or call.have is not None:
            return  # too late: its chunks are dropped
        try:
            size = call.size(have)
            if have.size != size or size < 1:
                raise BadMessage("size", f"{have.size} bytes of {have.what}, which has {size}")
            call.have, call.part = have, call.part or Part(call.body, 0, size)
        except BadMessage as error:
            self._calls.answered(stage, have.request, error)

    def _chunk(self, stage: int, chunk: wire.Chunk, data: bytes) -> None:
        call = self._calls.get(stage, chunk.request)
        if call is None or call.have is None or call.part is None or call.done.is_set():
            return  # of something that was refused, or that nobody waits for
        have, part = call.have, call.part
        if chunk.at != part.at or chunk.length != min(STREAM_CHUNK_BYTES, part.until - part.at):
            self._calls.answered(stage, chunk.request, BadMessage("size", "a chunk out of place"))
            return
        part.body[part.at : part.at + chunk.length] = data
        part.at += chunk.length
        self._calls.progressed(stage, chunk.request)
        if part.at == part.until and part.body is not call.body:
            self._calls.answered(stage, chunk.request, (have, call.body))
        elif part.at == part.until:
            self.spawn(lambda: self._complete(stage, have, call.body))

    async def _complete(self, stage: int, have: wire.Have, body: bytearray) -> None:
        right = await self.compute(lambda: wire.root_of(body)) == have.root
        self._calls.answered(
            stage,
            have.request,
            (have, body) if right else BadMessage("hash", f"{have.what} from stage {stage}"),
        )

    # Serving.

    def _soon(self, stage: int, number: int, work: Callable[[], Awaitable[None]]) -> None:
        # who asks and does not read gets no more of them
        unread = len(self.outboxes[stage].transfers)
        if self._serving[stage] + unread >= SERVED:
            self.refused["busy"] += 1
            self.lack(stage, number, "busy")
            return
        self._serving[stage] += 1
        self.spawn(lambda: self._guarded(stage, number, work))

    async def _guarded(self, stage: int, number: int, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except BadMessage as error:
            self.refuse(stage, error)
            self.lack(stage, number, "refused")
        except (StateError, Unavailable, OSError, ValueError):
            self.refused["failed"] += 1
            self.lack(stage, number, "failed")
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            self.refused["failed"] += 1
            self.lack(stage, number, "failed")
        finally:
            self._serving[stage] -= 1


# A stage's weights for nodes that sample from a whole copy of the policy:
#
#     adapter         bfloat16, tensor after tensor: 2 bytes per weight
#     whole weights   int8 codes of each matrix with their scales, else float32; XOR the base
#                     model's, deflated: a value within half a step of its row's scale
#                     costs almost nothing
#
# Each body is complete, not a difference to an earlier one, so a lost body spoils no later one.

LEVEL: Final = 1
"""zlib takes several times as long at higher ones, and where most is zero that brings a few
percent."""
OVERHEAD: Final = 1024
"""Bytes by which what does not deflate may be longer than it was, and a thousandth of it."""

Base = Callable[[str], torch.Tensor]
"""Name in the whole model → tensor of the base model."""
Parts = dict[str, tuple[torch.Tensor, ...]]
"""Name in the whole model → (codes, scales) of a matrix, else (tensor,)."""


def copied(spec: StageSpec, layout: Layout) -> Layout:
    """What a stage gives: all that is trained, but a tied embedding only at its first end."""
    twice = spec.shares_embedding and spec.has_head
    return tuple(
        tensor for tensor in layout if not (twice and tensor.name.endswith("lm_head.weight"))
    )


def copy_bytes(layout: Layout, adapter: bool) -> int:
    """How long an adapter's copy is, and how long another may be."""
    if adapter:
        return 2 * elements(layout)
    plain = sum(_size(tensor) for tensor in layout)
    return plain + plain // 1000 + OVERHEAD


def _size(tensor: TensorSpec) -> int:
    return tensor.elements + 4 * tensor.shape[0] if len(tensor.shape) == 2 else 4 * tensor.elements


@torch.no_grad()
def encode_copy(spec: StageSpec, weights: Tensors, layout: Layout, base: Base | None) -> bytes:
    """`weights`, by the stage's names. base: None for an adapter."""
    if base is None:
        return b"".join(
            to_bytes(bfloat16_bits(weights[tensor.name].float()), "<i2") for tensor in layout
        )
    deflate = zlib.compressobj(LEVEL)
    out = []
    for tensor in layout:
        before, scales = _base_bytes(base(spec.whole(tensor.name)))
        now, _ = _bytes(weights[tensor.name], scales)
        out.append(deflate.compress(np.bitwise_xor(now, before).tobytes()))
    return b"".join([*out, deflate.flush()])


def _base_bytes(tensor: torch.Tensor) -> tuple[np.ndarray, torch.Tensor | None]:
    return _bytes(tensor, None)


def _bytes(
    tensor: torch.Tensor, scales: torch.Tensor | None
) -> tuple[np.ndarray, torch.Tensor | None]:
    """As uint8; with a matrix's scales."""
    if tensor.ndim != 2:
        return np.frombuffer(to_bytes(tensor.float(), "<f4"), np.uint8), None
    codes, chosen = quantise(tensor, None if scales is None else scales.to(tensor.device))
    return np.frombuffer(to_bytes(codes, "i1") + to_bytes(chosen, "<f4"), np.uint8), chosen


def decode_copy(
    spec: StageSpec, body: bytes | bytearray, layout: Layout, base: Base | None
) -> Parts:
    """What `encode_copy` was given, on the host. Raises BadMessage: size, malformed, not_finite,
    bounds."""
    pieces: Iterator[bytes | memoryview] = (
        _split(body, layout) if base is None else _inflate(body, layout)
    )
    found: Parts = {}
    for tensor, piece in zip(layout, pieces, strict=True):
        name = spec.whole(tensor.name)
        if base is None:
            found[name] = (
                _finite(
                    bfloat16_values(torch.from_numpy(np.frombuffer(piece, "<i2").copy())).view(
                        tensor.shape
                    )
                ),
            )
            continue
        raw = np.bitwise_xor(np.frombuffer(piece, np.uint8), _base_bytes(base(name))[0])
        if len(tensor.shape) != 2:
            found[name] = (_finite(torch.from_numpy(raw.view("<f4").copy()).view(tensor.shape)),)
            continue
        codes = torch.from_numpy(raw[: tensor.elements].view("i1")).view(tensor.shape)
        scales = _finite(torch.from_numpy(raw[tensor.elements :].copy().view("<f4")))
        if bool((codes < -MOST).any()) or bool((scales < 0).any()):
            raise BadMessage("bounds", "not a quantised matrix")
        found[name] = (codes, scales)
    return found


def _split(body: bytes | bytearray, layout: Layout) -> Iterator[bytes | memoryview]:
    if len(body) != copy_bytes(layout, adapter=True):
        raise BadMessage(
            "size", f"{len(body)} bytes of an adapter of {copy_bytes(layout, adapter=True)}"
        )
    at = 0
    for tensor in layout:
        yield memoryview(body)[at : at + 2 * tensor.elements]
        at += 2 * tensor.elements


def _inflate(body: bytes | bytearray, layout: Layout) -> Iterator[bytes | memoryview]:
    """A piece for each tensor, of its length and no longer, whatever `body` says."""
    stream, rest = zlib.decompressobj(), bytes(body)
    try:
        for tensor in layout:
            piece = stream.decompress(rest, _size(tensor))
            rest = stream.unconsumed_tail
            if len(piece) != _size(tensor):
                raise BadMessage(
                    "size", f"{len(piece)} bytes of {tensor.name}, which has {_size(tensor)}"
                )
            yield piece
        if stream.decompress(rest, 1) or not stream.eof or stream.unused_data:
            raise BadMessage("size", "more than a stage")
    except zlib.error as error:
        raise BadMessage("malformed", f"does not inflate: {error}") from None


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise BadMessage("not_finite", "weights")
    return tensor


@torch.no_grad()
def install(model: Model, parts: Parts) -> None:
    """Into the copy that `policy.quantised.build_quantised` made of the same model."""
    matrices = {
        name.replace(".base_layer", ""): m
        for name, m in base_model(model).named_modules()
        if isinstance(m, Int8Matrix)
    }
    others = {name.replace(".base_layer", ""): p for name, p in model.named_parameters()}
    for name, tensors in parts.items():
        owner, _, last = name.rpartition(".")
        if len(tensors) == 2:
            matrices[owner].codes.copy_(tensors[0])
            matrices[owner].scales.copy_(tensors[1])
        elif last == "bias" and owner in matrices:
            bias = matrices[owner].bias
            assert bias is not None
            bias.copy_(tensors[0])
        else:
            others[name].copy_(tensors[0])


# One state as one safetensors file, replaced atomically.

About = Mapping[str, object]
"""What is said with the tensors: JSON."""


@dataclass(frozen=True)
class OnDisk:
    """What is here of some layers of a lineage, whoever's stage they are."""

    lineage: bytes
    first: int
    last: int
    """Layers first … last − 1."""
    step: int
    hash: bytes
    taken: Taken = field(default_factory=Taken)
    """How that step was taken, where it was taken here."""


def save(path: Path, tensors: Mapping[str, torch.Tensor], about: About) -> None:
    """Temporary name, sync, rename. The directory is made (0700) if need be. Raises OSError; the
    old file is then untouched."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(temporary(path.name))
    try:
        save_file(dict(tensors), unfinished, metadata={"about": json.dumps(about)})
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (SafetensorError, OSError) as error:
        # on a full disk, half a state would take the room of what is small
        unfinished.unlink(missing_ok=True)
        raise OSError(str(error)) from None
    sync_directory(path.parent)


def temporary(name: str) -> str:
    """What a file is called until it is whole; a process that was killed leaves it."""
    return f".{name}.tmp"


def read_about(path: Path) -> About | None:
    """What was said with the tensors; None without a file. Raises StateError for one that is
    damaged."""
    return None if not path.exists() else _open(path, lambda file: {})[1]


def load(path: Path) -> tuple[dict[str, torch.Tensor], About]:
    """(tensors, what was said with them). Raises StateError for a file that is damaged or not
    there."""
    return _open(path, lambda file: {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a mapping


def _open(
    path: Path, read: Callable[[safe_open], dict[str, torch.Tensor]]
) -> tuple[dict[str, torch.Tensor], About]:
    try:
        with held(path) as name, safe_open(name, "pt", device="cpu") as file:
            about = json.loads((file.metadata() or {})["about"])
            if not isinstance(about, dict):
                raise ValueError("no description")
            return read(file), about
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise StateError(f"{path} is damaged: {error}") from None


# One snapshot from all its keepers: an idle keeper is asked for the next piece, so each gives what
# its line carries. A failed or silent keeper's missing pieces go to others; a slow keeper's rest
# does once nothing else is left. Arrived pieces stay after the crew ends.

PIECE_BYTES: Final = 16 * CHUNK_BYTES
"""At most: of a small snapshot everybody is asked for some, in whole chunks."""
ROUNDS: Final = 4
"""Pieces for each lane, at least, where there are as many chunks."""
LANES: Final = 2
"""Pieces that one holder is asked for at a time: while the request for the next is on its way, it
sends the other."""
SLOW: Final = 3.0
"""A piece is taken over from a holder after so many times the time that who takes it over would
need for it, and SLOW_SECONDS."""
SLOW_SECONDS: Final = 5.0
GATHERING_LOOK_SECONDS: Final = 1.0


@dataclass
class Begun:
    """What has come of a snapshot, from whomever."""

    body: memoryview
    gaps: list[tuple[int, int]]
    """(from, to): what has not come, and nobody is asked for now."""


def nothing_of(size: int) -> Begun:
    return Begun(np.empty(size, np.uint8).data, [(0, size)])  # memory is taken as it comes


@dataclass(eq=False)
class _Piece(Part):
    holder: int
    since: float
    first: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    taken: bool = False
    """Another holder is asked for its rest."""


class Gathering:
    """ask: fills a part from a holder; raises PeerError."""

    def __init__(
        self, begun: Begun, holders: Sequence[int], ask: Callable[[int, Part], Awaitable[wire.Have]]
    ) -> None:
        size = len(begun.body)
        # it was all there when the crew ended: what is said of it comes with its end
        if not begun.gaps:
            begun.gaps.append((max(0, size - CHUNK_BYTES), size))
        self._begun = begun
        self._holders = holders
        self._ask = ask
        self._fresh = begun.gaps == [(0, size)]
        self._most = min(
            PIECE_BYTES, CHUNK_BYTES * -(-size // (ROUNDS * LANES * len(holders) * CHUNK_BYTES))
        )
        self._asked: list[_Piece] = []
        self._came: Counter[int] = Counter()
        """Holder → bytes of it."""
        self._haves: dict[int, wire.Have] = {}
        self._since = trio.current_time()
        self._changed = trio.Event()
        self._error = PeerError("nobody has it")

    @property
    def alone(self) -> int | None:
        """Who has given all of it; None where nobody has."""
        gave = list(self._came)
        return gave[0] if self._fresh and len(gave) == 1 else None

    async def run(self) -> wire.Have:
        """All of it is there: what the first of the holders that gave any says of it. Raises
        PeerError, of the last one that failed."""
        async with trio.open_nursery() as nursery:
            for holder in self._holders:
                for lane in range(LANES):
                    nursery.start_soon(self._lane, holder, lane)
        if self._begun.gaps:
            raise self._error
        return self._haves[min(self._haves, key=self._holders.index)]

    async def _lane(self, holder: int, lane: int) -> None:
        # two that ended together would leave the line idle together
        most = max(CHUNK_BYTES, self._most // (lane + 1))
        while (piece := await self._next(holder, most)) is not None:
            most = self._most
            try:
                with piece.scope:
                    self._haves[holder] = await self._ask(holder, piece)
            except PeerError as error:
                self._error = error
                return
            finally:
                self._over(piece)

    async def _next(self, holder: int, most: int) -> _Piece | None:
        """What to ask `holder` for; None where all has come."""
        gaps = self._begun.gaps
        while gaps or self._asked:
            if gaps:
                at, until = gaps.pop()
                if until - at > most:
                    gaps.append((at + most, until))
                    until = at + most
            elif (slow := self._slow(holder)) is not None:
                slow.taken = True
                slow.scope.cancel()
                at, until = slow.at, slow.until
            else:
                with trio.move_on_after(GATHERING_LOOK_SECONDS):  # around waiting only
                    await self._changed.wait()
                continue
            piece = _Piece(self._begun.body, at, until, holder, trio.current_time(), at)
            self._asked.append(piece)
            return piece
        return None

    def _slow(self, holder: int) -> _Piece | None:
        """What another one should have sent long ago, by what `holder` sends."""
        now = trio.current_time()
        rate = self._came[holder] / max(now - self._since, 1e-3)
        late = lambda piece: (
            now - piece.since > SLOW_SECONDS
            and (now - piece.since) * rate > SLOW * (piece.until - piece.first)
        )
        return next(
            (
                piece
                for piece in self._asked
                if piece.holder != holder and not piece.taken and late(piece)
            ),
            None,
        )

    def _over(self, piece: _Piece) -> None:
        self._asked.remove(piece)
        if piece.at > piece.first:
            self._came[piece.holder] += piece.at - piece.first
        if piece.at < piece.until and not piece.taken:
            self._begun.gaps.append((piece.at, piece.until))
        self._changed.set()
        self._changed = trio.Event()


# The record of the last committed micro-batches, for the gate and for healing:
#
#     probes    at the tail: token ids and log-probabilities of then; ring neighbours hold copies
#     edges     at every stage: activations as they arrived and left, as the bytes that travelled


@dataclass
class _Pending:
    about: bytes
    source: int
    arrived: bytes
    target: int | None = None
    sent: bytes = b""
    logprobs: bytes = b""


@dataclass
class Recorder(Observer):
    """Remembers for stage `spec`. Swapped micro-batches are left out: they are not run as the
    policy is."""

    spec: StageSpec
    settings: RecoverySettings
    probes: list[Probe] = field(default_factory=list)
    """The newest, oldest first: own ones at the tail, the tail's elsewhere."""
    edges: deque[Edge] = field(default_factory=deque)
    ends: dict[int, tuple[int, dict[str, torch.Tensor]]] = field(default_factory=dict)
    """Paper mode: end stage, our own or the one beside us → (step, true copies of its embedding, or
    norm and head)."""
    copy: tuple[int, bytes, bytes] | None = None
    """(steps, step hash, bytes) of `LocalStage.copy`, if anybody has asked since the last step."""
    _pending: dict[int, _Pending] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._routes = Routes(self.spec.stages, self.settings.mode == "checkfree+")

    def received(self, micro_batch: int, about: bytes, sender: int, body: bytes) -> None:
        if self._routes.of(micro_batch) == self._routes.of(0):
            self._pending[micro_batch] = _Pending(about, sender, body)
            self._trim()

    def sent(self, micro_batch: int, receiver: int, body: bytes) -> None:
        if micro_batch in self._pending:
            self._pending[micro_batch].target, self._pending[micro_batch].sent = receiver, body
            self._trim()

    def _trim(self) -> None:
        """A step may have a thousand micro-batches: no more of them is kept while it lasts than
        afterwards."""
        while len(self._pending) > self.settings.memory:
            del self._pending[next(iter(self._pending))]
        size = sum(len(seen.arrived) + len(seen.sent) for seen in self._pending.values())
        for seen in self._pending.values():
            if size <= self.settings.pair_bytes:
                return
            size -= len(seen.arrived) + len(seen.sent)
            seen.arrived, seen.sent, seen.target = b"", b"", None

    def learnt(self, micro_batch: int, logprobs: torch.Tensor) -> None:
        if micro_batch in self._pending:
            self._pending[micro_batch].logprobs = pack_logprobs(logprobs.numpy())

    def committed(self, worker: StageWorker) -> None:
        self.copy = None
        step = worker.participant.step - 1
        for number, seen in sorted(self._pending.items()):
            rows = strict.decode(seen.about, MicroBatch).rows
            if seen.logprobs:
                self.probes.append(Probe(number, step, rows, seen.about, seen.logprobs))
            if seen.arrived:
                self.edges.append(
                    Edge(number, step, seen.source, self.spec.index, rows, seen.about, seen.arrived)
                )
            if seen.target is not None:
                self.edges.append(
                    Edge(number, step, self.spec.index, seen.target, rows, seen.about, seen.sent)
                )
        self._pending.clear()
        del self.probes[: -self.settings.memory]
        while (
            len(self.edges) > 2 * self.settings.memory
            or sum(len(edge.body) for edge in self.edges) > self.settings.pair_bytes
        ):
            self.edges.popleft()

    def dropped(self) -> None:
        self._pending.clear()


def work_of(item: Probe | Edge, limits: FrameLimits) -> MicroBatch:
    """The micro-batch that a peer's probe or edge is of. Raises BadMessage as
    `work.read_micro_batch` does."""
    return read_micro_batch(item.about, item.rows, limits, "learn")


# R0: a stage's own state on its own disk.
#
#     weights.<name>   first.<name>   second.<name>   counts.<name>   rng
#                      with lineage, layers, step, norm and rate
#     outer.<name>     the state of averaging with other crews (φ, δ, clocks) of the same moment
#
# A thread writes the newest state after a committed step; training waits for a copy in memory,
# never for the disk. Large stages of whole weights are written every few steps only
# (`journal_every`), to spare the disk.

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
            about = read_about(self.path)
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
        tensors, about = load(self.path)
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
    def coming(self) -> list[OnDisk]:
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
                save(self.path, tensors, msgspec.to_builtins(about))
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
                for name in (FILE, temporary(FILE))
                for path in self.path.parent.parent.glob(f"*/{name}")
            ]
            for other in {path.with_name(FILE) for path in written}:
                if other == self.path:
                    continue
                other.with_name(temporary(FILE)).unlink(missing_ok=True)
                if max((one.step for one in _read_journal(other)), default=0) <= step:
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


def find_journals(directory: Path) -> list[OnDisk]:
    """What can be read, of every lineage."""
    return [one for path in sorted(directory.glob(f"*/{FILE}")) for one in _read_journal(path)]


def _read_journal(path: Path) -> list[OnDisk]:
    """What is said of the file; nothing where there is none, or it is damaged."""
    try:
        about = read_about(path)
        return [] if about is None else [_on_disk(_understand(path, about))]
    except (StateError, ValueError) as error:
        log.warning("a journal that cannot be read: %s", error)
        return []


def _on_disk(a: _About) -> OnDisk:
    taken = Taken(a.attempt, a.clip, a.learning_rate)
    return OnDisk(
        bytes.fromhex(a.lineage), a.spec.first, a.spec.last, a.step, bytes.fromhex(a.hash), taken
    )


def _understand(path: Path, about: About) -> _About:
    """Raises StateError."""
    try:
        return msgspec.convert(about, _About)
    except msgspec.ValidationError as error:
        raise StateError(f"{path} lacks something: {error}") from None


# R2: a stage's state at both ring neighbours, as of every K-th committed step.
#
#     SnapshotRecorder   copies a worker's state between two steps and gives it to the `StatePeer`
#     SnapshotStore      neighbours' states on this disk with their hashes, and the own; on a node
#                        that keeps the whole policy every stage's, for `swarmnode export`
#
# All stages copy after the same steps. Any two stages of four may be lost at once.

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
        about: About = MappingProxyType({}),
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
        kept, later = self._snapshots.get(stage), _read_snapshot(aside)
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
            save(self._path(stage), {"body": torch.frombuffer(body, dtype=torch.uint8)}, about)
            self._snapshots[stage] = snapshot
            aside = aside_file(self._directory, stage)
            later = _read_snapshot(aside)
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
            about = read_about(self._path(stage))
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
    tensors, about = load(copy_file(directory, stage))
    snapshot = _snapshot(about)
    body = memoryview(tensors["body"].numpy().data if "body" in tensors else b"")
    if not hashed and root_of(body) != snapshot.root:
        raise StateError(f"{copy_file(directory, stage)} is damaged")
    return snapshot, body


def _snapshot(about: About) -> PeerSnapshot:
    try:
        hashes = {name: bytes.fromhex(str(about[name])) for name in ("root", "hash")}
        return msgspec.convert({**about, **hashes}, PeerSnapshot)
    except (KeyError, ValueError, msgspec.ValidationError) as error:
        raise StateError(f"not a snapshot: {error}") from None


def find_snapshots(directory: Path) -> list[OnDisk]:
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
                    OnDisk(
                        lineage, sum(layers[:stage]), sum(layers[: stage + 1]), kept.step, kept.hash
                    )
                )
    return found


def _copies_in(directory: Path) -> Iterator[tuple[int, PeerSnapshot]]:
    for path in sorted(directory.glob("*-*.safetensors")):
        snapshot, stage = _read_snapshot(path), path.stem.partition("-")[2]
        if snapshot is not None and stage.isdecimal():
            yield int(stage), snapshot


def _read_snapshot(path: Path) -> PeerSnapshot | None:
    """What is said of the file; None where there is none, or it is damaged."""
    try:
        about = read_about(path)
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


# The local stage as its state peer sees it: identity, quality of its weights, others' snapshots.

Phase = Literal["empty", "candidate", "whole"]
"""The weights here are none; or being judged, and run so that others can be judged; or good."""


@dataclass
class LocalStage:
    """layouts: what is trained of every stage (`state.stage_layouts`). recorder: the member's
    observer."""

    runtime: StageRuntime
    spec: StageSpec
    limits: FrameLimits
    layouts: Sequence[Layout]
    settings: RecoverySettings
    codec: ActivationCodec
    recorder: Recorder
    store: SnapshotStore | None = None
    worker: StageWorker | None = None
    """None until it runs."""
    phase: Phase = "empty"
    kind: SourceKind | None = None
    """The candidate's; NONE while there is none yet; None where nothing is being restored."""
    exhausted: bool = False
    """There is no other candidate left."""
    base: Base | None = None
    """What reads the base model's tensors; None where an adapter is trained."""
    restored: StageState | None = None
    """What the weights here were restored from, until there is a member: its moments are those of a
    tied embedding."""
    arriving: dict[int, tuple[bytes, Begun]] = field(default_factory=dict)
    """Stage → (root, what has come) of its snapshot: ours to be restored from, others' to be kept
    here. It may outlive a crew."""
    _encoding: trio.Lock = field(default_factory=trio.Lock)

    def size(self, of: int, have: wire.Have) -> int:
        """How long what one stage keeps of another, `of`, is. Raises BadMessage for what it cannot
        be."""
        if have.what == "shadow":
            if have.form != form_of(self.layouts[of], self.settings):
                raise BadMessage("bounds", f"a snapshot in form {have.form}")
            return wire.state_bytes(self.layouts[of], have.form)
        if have.what == "ends":
            return 4 * elements(ends_layout(self.end(of), self.layouts[of]))
        # probes: what they say, up to a cap: a description is as long as its tokens need
        each = ABOUT_ITEM_BYTES * (self.limits.tokens + 16) + 4 * self.limits.tokens + 256
        return _at_most(have, self.settings.memory * each + 16)

    def edge_bytes(self, have: wire.Have) -> int:
        about = ABOUT_ITEM_BYTES * (self.limits.tokens + 16) + 256
        bodies = (
            2
            * self.settings.memory
            * activation_bytes("float32", self.limits.tokens, self.limits.hidden)
        )
        return _at_most(
            have, 2 * self.settings.memory * about + min(bodies, self.settings.pair_bytes) + 16
        )

    def read_ends(self, of: int, body: bytearray) -> dict[str, torch.Tensor]:
        """Raises BadMessage: not_finite."""
        return read_floats(body, ends_layout(self.end(of), self.layouts[of]))

    def read_probes(self, body: bytearray) -> list[wire.Probe]:
        probes: list[wire.Probe] = strict.decode(bytes(body), list[wire.Probe])
        if not 1 <= len(probes) <= self.settings.memory:
            raise BadMessage("bounds", f"{len(probes)} probes")
        for probe in probes:
            read_f32(
                "logprobs", probe.logprobs, sum(work_of(probe, self.limits).completion_lengths)
            )
        return probes

    async def copy(self, compute: Compute) -> tuple[int, bytes, bytes]:
        """(steps, step hash, bytes) of our weights, for who samples from the whole policy; encoded
        once for all who ask between two steps.

        Raises StateError where there is no worker or a step was taken meanwhile, since some tensors
        may be of before it; Unavailable where the base model cannot be read.
        """
        if self.worker is None:
            raise StateError("nothing is trained here yet")
        layout = copied(self.spec, self.layouts[self.spec.index])
        taken, recorder = self.worker.participant, self.recorder
        async with self._encoding:
            async with self.worker.optimizer.moving:  # never in the middle of a step
                at = taken.step, taken.hash
            if recorder.copy is None or recorder.copy[:2] != at:
                recorder.copy = None
                body = await compute(
                    lambda: encode_copy(self.spec, trained(self.runtime), layout, self.base)
                )
                if (taken.step, taken.hash) != at:
                    raise StateError("a step was taken while it was copied")
                recorder.copy = (*at, body)
            return recorder.copy

    def end(self, stage: int) -> StageSpec:
        """Another stage's spec; its layers do not matter here, only which end it is."""
        return StageSpec(stage, self.spec.stages, 0, 0, self.spec.tied)


def _at_most(have: wire.Have, most: int) -> int:
    if have.size > most:
        raise BadMessage("size", f"{have.size} bytes of {have.what}, at most {most}")
    return have.size


# Requests of a lost stage. Each raises PeerError as `Channel.call` does.

ASK_SECONDS: Final = 10.0
ASK_AGAIN_SECONDS: Final = 0.25
"""A stage that is still being restored is asked again so often."""
PART_BYTES: Final = (64 * 1024, CHUNK_BYTES)
PART_SECONDS: Final = (0.25, 1.0)
"""A part of what is kept for later is as long as the line takes in about that time: what the crew
is at waits for no more of it."""
PAUSES: Final = 7
"""After a part nothing is asked for, for so many times what it took: two neighbours together take a
quarter of a line."""
QUICK_SECONDS: Final = 0.05
"""What is here sooner was no burden to anybody."""


class Fetcher:
    def __init__(self, channel: Channel, stage: LocalStage) -> None:
        self._channel = channel
        self._stage = stage

    async def ask(self) -> dict[int, wire.Holds]:
        """What every stage that answers has of ours."""
        found: dict[int, wire.Holds] = {}
        seconds = min(ASK_SECONDS, self._stage.settings.seconds)

        async def one(stage: int) -> None:
            try:
                answer = await self._channel.call(
                    stage, wire.Ask(self._channel.place, 0), _no_body, seconds=seconds
                )
            except PeerError:
                return  # it counts as one that has nothing
            if isinstance(answer, wire.Holds):
                found[stage] = answer

        async with trio.open_nursery() as nursery:
            for stage in self._channel.streams:
                nursery.start_soon(one, stage)
        return found

    async def snapshot(self, holders: Sequence[int], step: int, root: bytes) -> StageState:
        """The one of ours that all `holders` said they have, from all of them at once; what came of
        it before, from whomever, is not sent again, nor is the whole where the crew ends before it
        was judged. Where the whole is not what they named, it is fetched from each alone, until one
        gives it. No holder's `factor` is taken: where there are snapshots it is 1, and no hash is
        of it."""
        crowd, left = holders, list(holders)
        while True:
            try:
                got = await self._gathered(crowd, step, root)
            except PeerError:
                if not left or crowd is holders:
                    raise
                got = None
            if isinstance(got, StageState):
                return got
            self._stage.arriving.pop(self._stage.spec.index, None)
            left = [holder for holder in left if holder != got]
            if not left:
                raise BadMessage("hash", f"a snapshot of step {step}, of all who named it")
            crowd, left = left[:1], left[1:]

    async def _gathered(
        self, holders: Sequence[int], step: int, root: bytes
    ) -> StageState | int | None:
        """The snapshot; or, where it has another root, who is to blame for it: None if more than
        one gave it."""
        own, arriving = self._stage.spec.index, self._stage.arriving
        layout = self._stage.layouts[own]
        size = wire.state_bytes(layout, form_of(layout, self._stage.settings))
        had, of = arriving.get(own, (b"", nothing_of(size)))
        if had != root or len(of.body) != size:  # whoever names one of before may lie
            of = nothing_of(size)
        arriving[own] = root, of

        def checked(have: wire.Have) -> int:
            if (have.step, have.root) != (step, root):
                raise BadMessage("hash", "another snapshot than was named")
            return self._stage.size(own, have)

        async def ask(holder: int, part: Part) -> wire.Have:
            return (await self._fetch(holder, "shadow", checked, own, part=part))[0]

        gathering = Gathering(of, holders, ask)
        have = await gathering.run()
        if await self._channel.compute(lambda: wire.root_of(of.body)) != root:
            if (liar := gathering.alone) is not None:
                self._channel.refuse(liar, BadMessage("hash", f"a snapshot from stage {liar}"))
            return liar
        return await self._channel.compute(
            lambda: decode_state(of.body, layout, have.form, step, have.squared_norm, 1.0)
        )

    async def theirs(self, stage: int) -> tuple[wire.Have, memoryview]:
        """The snapshot of itself that `stage` has, to be kept here. Nobody waits for it, and at 7 B
        a home's line is busy with it for ten minutes, so it is asked for in parts, with pauses.
        What has come of it is not sent again, in another crew neither."""
        layout, arriving = self._stage.layouts[stage], self._stage.arriving
        size = wire.state_bytes(layout, form_of(layout, self._stage.settings))
        root, of = arriving.get(stage, (b"", nothing_of(size)))
        if len(of.body) != size:  # of another stage, in another crew
            root, of = b"", nothing_of(size)
        checked = lambda have: self._given_size(stage, have)
        length, have = PART_BYTES[1] // 4, None
        while of.gaps:
            at = of.gaps[0][0]
            part, began = Part(of.body, at, min(size, at + length)), trio.current_time()
            before, (have, _) = (
                have,
                await self._fetch(stage, "shadow", checked, stage, LATER_SECONDS, part),
            )
            if have.root != root:  # another one than what has come is of
                root, of = have.root, of if at == 0 else nothing_of(size)
                if before is not None:
                    break  # it is not what it began with, and would not be for ever
            if of.body is part.body:
                of.gaps[:] = [(part.until, size)] if part.until < size else []
            arriving[stage] = root, of
            if (took := trio.current_time() - began) > QUICK_SECONDS and of.gaps:
                await trio.sleep(PAUSES * took)
            if took < PART_SECONDS[0]:
                length = min(PART_BYTES[1], 2 * length)
            elif took > PART_SECONDS[1]:
                length = max(PART_BYTES[0], length // 2)
        arriving.pop(stage, None)
        if (
            have is None
            or of.gaps
            or await self._channel.compute(lambda: wire.root_of(of.body)) != root
        ):
            error = BadMessage("hash", f"a snapshot of stage {stage}, from itself")
            self._channel.refuse(stage, error)
            raise error
        return have, of.body

    async def layers(self, stage: int) -> Neighbour:
        """A neighbour's layers as they are now, and ω."""
        layout = layers_layout(self._stage.layouts[stage])
        have, body = await self._fetch(stage, "layers", lambda have: 4 * elements(layout))
        return Neighbour(
            await self._channel.compute(lambda: read_floats(body, layout)), have.squared_norm
        )

    async def ends(self, holder: int) -> dict[str, torch.Tensor]:
        """True copies of our embedding, or norm and head."""
        own = self._stage.spec.index
        _, body = await self.given(holder, "ends", own)
        return await self._channel.compute(lambda: self._stage.read_ends(own, body))

    async def tied(self) -> StageState:
        """The tied embedding as the other end has it now, with its moments, by our own name for it.
        Waits for one that is restored."""
        other = self._stage.spec.stages - 1 if self._stage.spec.has_embedding else 0
        layout = tied_layout(self._stage.spec, self._stage.layouts[self._stage.spec.index])
        size = wire.state_bytes(layout, "exact")
        have, body = await self._patiently(
            other, lambda: self._fetch(other, "tied", lambda have: size)
        )
        return await self._channel.compute(
            lambda: decode_state(body, layout, "exact", have.step, 0.0, 1.0)
        )

    async def copy(self, spec: StageSpec) -> tuple[int, int, Parts]:
        """(bytes that came, (steps, step hash), weights) of a stage as it is now, for a copy of the
        whole policy. Ours go through the bytes that others would get: what `LocalStage.copy` raises
        is raised."""
        layout, base = copied(spec, self._stage.layouts[spec.index]), self._stage.base

        def size(have: wire.Have) -> int:
            most = copy_bytes(layout, adapter=base is None)
            if have.size > most or (base is None and have.size != most):
                raise BadMessage("size", f"{have.size} bytes of a copy, which has {most}")
            return have.size

        decoded = lambda body: self._channel.compute(lambda: decode_copy(spec, body, layout, base))
        if spec.index == self._stage.spec.index:
            step, _, ours = await self._stage.copy(self._channel.compute)
            return 0, step, await decoded(ours)
        have, body = await self._fetch(spec.index, "copy", size)
        return have.size, have.step, await decoded(body)

    async def probes(self, holder: int) -> list[wire.Probe]:
        """At most `settings.memory`, oldest first, every one a micro-batch that this model can have
        been given."""
        _, body = await self.given(holder, "probes", holder)
        return self._stage.read_probes(body)

    async def edges(self, holder: int) -> list[wire.Edge]:
        """Activations that came to us or went from us, as that neighbour kept them."""
        _, body = await self._fetch(holder, "edges", self._stage.edge_bytes)
        edges: list[wire.Edge] = strict.decode(bytes(body), list[wire.Edge])
        if len(edges) > 2 * self._stage.settings.memory:
            raise BadMessage("bounds", f"{len(edges)} edges")
        for edge in edges:
            work_of(edge, self._stage.limits)
            if self._stage.spec.index not in (edge.source, edge.target):
                raise BadMessage("bounds", "activations of other stages")
            decode(edge.body, edge.rows, self._stage.runtime.hidden_size, self._stage.codec)
        return edges

    async def run_at(
        self, stage: int, probe: wire.Probe | wire.Edge, tokens: int, x: bytes
    ) -> bytes:
        """One micro-batch through `stage` as it is now: as `run_one`. Waits for one that is
        being restored.

        Raises Incompatible where its numbers are not finite.
        """
        last = stage == self._stage.spec.stages - 1

        def size(have: wire.Have) -> int:
            if have.what != "ran":
                raise BadMessage("schema", "not what was asked for")
            return (
                4 * tokens
                if last
                else activation_bytes(
                    self._stage.codec, probe.rows, self._stage.runtime.hidden_size
                )
            )

        run = wire.Run(
            self._channel.place,
            0,
            self._stage.codec if stage else None,
            probe.rows,
            len(probe.about),
        )
        ask = lambda: self._channel.call_for_body(stage, run, size, probe.about + x)
        _, body = await self._patiently(stage, lambda: self._interrupted(stage, ask))
        return bytes(body)

    async def given(
        self, holder: int, what: wire.Given, of: int, seconds: float | None = None
    ) -> Body:
        """What `holder` keeps of stage `of`, which is ours or its own, as it came. seconds: as of
        `Channel.call`."""
        return await self._fetch(holder, what, lambda have: self._given_size(of, have), of, seconds)

    def _given_size(self, of: int, have: wire.Have) -> int:
        if have.step > self._channel.step + 1:  # stages are at most one apart
            raise BadMessage(
                "bounds", f"{have.what} of step {have.step}, which the crew has not taken"
            )
        return self._stage.size(of, have)

    async def _fetch(
        self,
        stage: int,
        what: wire.Wanted,
        size: Callable[[wire.Have], int],
        of: int | None = None,
        seconds: float | None = None,
        part: Part | None = None,
    ) -> Body:
        def checked(have: wire.Have) -> int:
            if have.what != what:
                raise BadMessage("schema", f"{have.what} is not {what}")
            return size(have)

        async def ask() -> Body:
            # what had come is not sent again
            at, until = (part.at, part.until) if part is not None else (0, None)
            want = wire.Want(self._channel.place, 0, what, stage if of is None else of, at, until)
            return await self._channel.call_for_body(
                stage, want, checked, seconds=seconds, part=part
            )

        return await self._interrupted(stage, ask)

    async def _interrupted(self, stage: int, ask: Callable[[], Awaitable[Body]]) -> Body:
        """The answer, however often the stream to `stage` ends meanwhile and is there again."""
        while True:
            try:
                return await ask()
            except PeerError:
                if not await self._channel.returns(stage):
                    raise

    async def _patiently(self, stage: int, ask: Callable[[], Awaitable[Body]]) -> Body:
        until = trio.current_time() + self._stage.settings.neighbour_seconds
        while True:
            try:
                return await ask()
            except Loading:
                if trio.current_time() >= until:
                    raise PeerTimeout(
                        f"stage {stage} was not restored within"
                        f" {self._stage.settings.neighbour_seconds:.0f} s"
                    ) from None
                await trio.sleep(ASK_AGAIN_SECONDS)


def _no_body(have: wire.Have) -> int:
    raise BadMessage("schema", "no body was asked for")


# Answers to what other stages ask for.

Read = tuple[bytes | bytearray | memoryview, dict[str, Any]]
"""(bytes, fields of `Have`)."""
FoundBody = tuple[int, Callable[[], Read]]
"""(committed steps, what reads it)."""
TIMES: Final[Mapping[wire.What, int]] = {
    "copy": 2,
    "layers": 4,
    "ends": 4,
    "probes": 4,
    "shadow": 8,
    "tied": 16,
    "edges": 16,
    "ran": 64,
}
"""So often a stage is sent one thing whole. A copy: it may not have fitted the others', which were
of a step before. What is run: as many rows as so many of the largest micro-batches have. The rest:
what a stage may want that is being restored: it tries every source, some of them twice, and heals
what it has of them."""
LEAST: Final = 64 * 1024
"""What a part of a snapshot counts for, however short: its file is opened for it."""


class Rations:
    """What a stage was sent, or gave, so that no one thing goes back and forth for ever."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, wire.What, int], tuple[int, int]] = {}
        """(stage, what, of) → (committed steps in it, how much of it)."""

    def take(
        self, stage: int, what: wire.What, of: int, step: int, part: int = 1, whole: int = 1
    ) -> bool:
        """Whether `stage` may have `part` of `whole` once more; it counts as sent."""
        before, sent = self._sent.get((stage, what, of), (step, 0))
        sent = (sent if before == step else 0) + part
        if allowed := sent <= TIMES[what] * whole:
            self._sent[stage, what, of] = step, sent
        return allowed


class Server:
    """Answers what others ask for. A snapshot is sent from its file: it takes no memory, however
    many ask, and however slow they are."""

    def __init__(self, channel: Channel, stage: LocalStage) -> None:
        self._channel = channel
        self._stage = stage
        self._rations = Rations()
        self._making: set[tuple[int, wire.What]] = set()
        """(stage, what) that is being put together for it."""
        self._lent: dict[int, tuple[int, Read]] = {}
        """Stage → (committed steps, our snapshot) that it is being sent, to be kept for later. That
        may take longer than until we have the next; the file of the one before is not on the disk
        any more then, and can still be read."""

    def holds(self, stage: int, number: int) -> wire.Holds:
        """What there is here of `stage`, asked as `number`."""
        snapshot = self._stage.store.get(stage) if self._stage.store is not None else None
        ends, probes = self._stage.recorder.ends.get(stage), self._stage.recorder.probes
        kind = None if self._stage.kind is None else int(self._stage.kind)
        return wire.Holds(
            self._channel.place,
            number,
            self._stage.phase == "whole",
            kind,
            self._stage.exhausted,
            snapshot.step if snapshot else None,
            snapshot.root if snapshot else b"",
            snapshot.hash if snapshot else b"",
            ends[0] if ends else None,
            probes[-1].step if probes else None,
        )

    async def serve(self, stage: int, want: wire.Want) -> None:
        """What it raises (BadMessage, StateError, OSError, ValueError, `is_device_error`) is
        answered and counted by the channel."""
        if want.what in ("layers", "tied", "copy") and self._stage.phase != "whole":
            self._channel.lack(stage, want.request, "loading")
            return
        if want.what != "shadow" and self._gives(stage, want.what):
            self._channel.refused["busy"] += 1
            self._channel.lack(stage, want.request, "busy")
            return
        self._making.add((stage, want.what))
        try:
            await self._give(stage, want)
        finally:
            self._making.discard((stage, want.what))

    def _gives(self, stage: int, what: wire.What) -> bool:
        """Whether it has not read all of one that it wanted before: what is not sent from a file
        takes memory until then."""
        return (stage, what) in self._making or any(
            out.what == what for out in self._channel.outboxes[stage].transfers
        )

    async def _give(self, stage: int, want: wire.Want) -> None:
        found = await self._copy() if want.what == "copy" else self.find(stage, want.what, want.of)
        if found is None:
            self._channel.lack(stage, want.request, "none")
            return
        step, read = found
        part, whole = self._part(want)
        # by who is restored: the crew has taken no step yet
        once = want.what in ("layers", "tied", "edges")
        if not self._rations.take(stage, want.what, want.of, 0 if once else step, part, whole):
            self._channel.refused["repeated"] += 1
            self._channel.lack(stage, want.request, "refused")
            return
        later = want.what == "shadow" and want.of != stage
        if later and want.at > 0 and stage in self._lent:
            step, (body, more) = self._lent[stage]
        else:
            body, more = await self._channel.compute(read)
        if later:
            self._lent[stage] = step, (body, more)
            if want.until in (None, len(body)):
                del self._lent[stage]
        await self._channel.answer(
            stage,
            want.request,
            want.what,
            step,
            body,
            later=later,
            part=(want.at, want.until),
            **more,
        )

    def _part(self, want: wire.Want) -> tuple[int, int]:
        """(how much is wanted, of how much). Bytes of a snapshot, LEAST at least; of anything else
        all, once. Raises BadMessage: bounds."""
        store = self._stage.store
        if want.what != "shadow" or store is None or (kept := store.get(want.of)) is None:
            return 1, 1
        size = wire.state_bytes(self._stage.layouts[want.of], kept.form)
        until = size if want.until is None else want.until
        if not want.at < until <= size:
            raise BadMessage("bounds", f"bytes {want.at} to {until} of {size}")
        return min(size, max(LEAST, until - want.at)), size

    async def _copy(self) -> FoundBody:
        step, digest, body = await self._stage.copy(self._channel.compute)
        return step, lambda: (body, {"form": "small", "hash": digest})

    def find(self, stage: int, what: str, of: int) -> FoundBody | None:
        """What `stage` wants; None where it is not here. Reading it raises StateError and
        OSError."""
        spec, store, recorder = self._stage.spec, self._stage.store, self._stage.recorder
        own = self._stage.layouts[spec.index]
        if of not in (stage, spec.index):
            return None
        if what == "shadow" and store is not None and (snapshot := store.get(of)) is not None:
            return snapshot.step, lambda: self._snapshot(of)
        if what == "ends" and of in recorder.ends:
            step, tensors = recorder.ends[of]
            return step, lambda: (
                pack_floats(tensors, ends_layout(self._stage.end(of), self._stage.layouts[of])),
                {},
            )
        if what == "probes" and (probes := list(recorder.probes)):
            return probes[-1].step, lambda: (strict.encode(probes), {})
        if what == "edges":
            # a step may end meanwhile
            edges = [edge for edge in list(recorder.edges) if stage in (edge.source, edge.target)]
            return (self._channel.step, lambda: (strict.encode(edges), {})) if edges else None
        made = self._stage.settings.synthesises(stage, spec.stages)
        if (
            what == "layers"
            and made
            and abs(stage - spec.index) == 1
            and (layout := layers_layout(own))
        ):
            norm = 0.0 if self._stage.worker is None else self._stage.worker.optimizer.squared_norm
            return self._channel.step, lambda: (
                pack_floats(trained(self._stage.runtime), layout),
                {"squared_norm": norm},
            )
        if (
            what == "tied"
            and stage in (0, spec.stages - 1)
            and spec.shares_embedding
            and (layout := tied_layout(spec, own))
        ):
            return self._channel.step, lambda: (self._tied(layout), {})
        return None

    def _snapshot(self, of: int) -> Read:
        assert self._stage.store is not None
        kept, body = self._stage.store.read(of)
        return body, {
            "root": kept.root,
            "form": kept.form,
            "squared_norm": kept.squared_norm,
            "factor": kept.factor,
            "hash": kept.hash,
        }

    def _tied(self, layout: Layout) -> bytearray:
        name = layout[0].name
        if self._stage.worker is not None:
            return encode_state(take(self._stage.worker, name), layout, "exact")
        restored = self._stage.restored or StageState(self._channel.step, {})
        return encode_state(
            replace(restored, weights={name: host_copy(trained(self._stage.runtime)[name])}),
            layout,
            "exact",
        )

    async def run(self, stage: int, asked: wire.Run, body: bytes) -> None:
        """A micro-batch through our stage as it is. Raises as `serve` does."""
        at = self._stage
        if asked.codec != (None if at.spec.has_embedding else at.codec):
            raise BadMessage("schema", "not activations of this crew")
        if at.phase == "empty":
            self._channel.lack(stage, asked.request, "loading")
            return
        work = read_micro_batch(body[: asked.about], asked.rows, at.limits, "learn")
        if not self._rations.take(
            stage, "ran", at.spec.index, self._channel.step, asked.rows, at.limits.tokens
        ):
            self._channel.refused["repeated"] += 1
            self._channel.lack(stage, asked.request, "refused")
            return
        out = await self._channel.compute(
            lambda: run_one(at.runtime, work, body[asked.about :], at.codec)
        )
        await self._channel.answer(stage, asked.request, "ran", self._channel.step, out)


# A healthy stage's snapshots, end copies and probes at others, and theirs here. A stage announces a
# new one; its keepers fetch it, one of each stage and kind at a time. A superseded one is skipped.


class Sharing:
    def __init__(self, channel: Channel, stage: LocalStage, fetch: Fetcher) -> None:
        self.stored: dict[int, int] = {}
        """Stage → committed steps in our snapshot there."""
        self._channel = channel
        self._stage = stage
        self._fetch = fetch
        self._news: dict[tuple[int, wire.Given], bool] = {}
        """(stage, what) that is being fetched → whether there is a newer one."""
        self._rations = Rations()
        """What is announced again and again is not written to our disk again and again."""
        self._room = trio.Lock()
        """There is memory for one snapshot at a time of the stages that are no neighbours."""

    # Ours.

    def snapshot(self, copied: Copied) -> None:
        """Stores it, and says so, in the background."""
        if (store := self._stage.store) is not None:
            self._channel.spawn(lambda: self._store(copied, store))

    def snapshot_of(self, worker: StageWorker) -> None:
        """Likewise of the weights as they are, which are copied in the background too."""
        if (store := self._stage.store) is not None:
            self._channel.spawn(lambda: self._copy(worker, store))

    def announce(self, what: wire.Given) -> None:
        for stage in self._channel.streams:
            self._channel.send(stage, wire.Made(self._channel.place, 0, what))

    def kept(self, stage: int, message: wire.Kept) -> None:
        """Our snapshot is stored there."""
        self.stored[stage] = max(message.step, self.stored.get(stage, 0))

    async def _copy(self, worker: StageWorker, store: SnapshotStore) -> None:
        try:
            async with worker.optimizer.moving:  # never in the middle of a step
                copied = await self._channel.compute(
                    lambda: copy_stage(worker, self._stage.settings)
                )
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            self._channel.refused["failed"] += 1
        else:
            await self._store(copied, store)

    async def _store(self, copied: Copied, store: SnapshotStore) -> None:
        own, state = self._stage.spec.index, copied.state
        layout = self._stage.layouts[own]
        form = form_of(layout, self._stage.settings)

        def put() -> bool:
            body = encode_state(state, layout, form) if copied.body is None else copied.body
            have = wire.Have(
                self._channel.place,
                0,
                "shadow",
                state.step,
                len(body),
                wire.root_of(body),
                state.hash,
                form,
                state.squared_norm,
                state.factor,
            )
            return store.put(own, have, body)

        try:
            stored = await self._channel.compute(put)
        except (BadMessage, OSError):
            self._channel.refused["failed"] += 1
            return
        if stored:
            self.announce("shadow")

    # Others'.

    def made(self, stage: int, made: wire.Made) -> None:
        """It has a new one, which is fetched if it is to be kept here."""
        key = stage, made.what
        if not self._keeps(*key):
            return
        begun = key in self._news
        self._news[key] = True
        if not begun:
            self._channel.spawn(lambda: self._follow(*key))

    def _keeps(self, stage: int, what: wire.Given) -> bool:
        own, stages = self._stage.spec.index, self._stage.spec.stages
        if what == "shadow":
            return self._stage.store is not None and stage in self._stage.store.stages
        if what == "ends":
            return (stage, own) in ((0, 1), (stages - 1, stages - 2))
        return stage == stages - 1 and stage in ring(own, stages)

    async def _follow(self, stage: int, what: wire.Given) -> None:
        key = stage, what
        while self._news[key]:
            self._news[key] = False
            if not self._rations.take(stage, what, stage, self._channel.step):
                self._channel.refused["repeated"] += 1
            elif what != "shadow":
                await self._take(stage, what)
            elif stage in ring(self._stage.spec.index, self._stage.spec.stages):
                await self._keep(stage)
            else:
                async with self._room:
                    await self._keep(stage)
        del self._news[key]

    async def _keep(self, stage: int) -> None:
        """Stores the snapshot that `stage` has."""
        store = self._stage.store
        assert store is not None
        try:
            have, body = await self._fetch.theirs(stage)
        except PeerError:
            return  # the next one will be announced as well
        try:
            if await self._channel.compute(lambda: store.put(stage, have, body)):
                self._channel.send(stage, wire.Kept(self._channel.place, 0, have.step))
        except BadMessage as error:
            self._channel.refuse(stage, error)
        except OSError:
            self._channel.refused["failed"] += 1

    async def _take(self, stage: int, what: wire.Given) -> None:
        recorder = self._stage.recorder
        try:
            have, body = await self._fetch.given(stage, what, stage, LATER_SECONDS)
        except PeerError:
            return  # the next one will be announced as well
        try:
            if what == "ends":
                recorder.ends[stage] = have.step, self._stage.read_ends(stage, body)
            else:
                recorder.probes[:] = self._stage.read_probes(body)
        except BadMessage as error:
            self._channel.refuse(stage, error)


# The member's end of the state streams:
#
#     shared    snapshots with both ring neighbours and keepers of the whole policy; the tail's
#               probes with its neighbours; in paper mode embedding and head with the second and
#               last but one
#     served    snapshots, the stage's layers and ω, a tied embedding, copies of an end, probes,
#               activations, and running a micro-batch


class StatePeer:
    """streams: stage → stream; again: as of `Channel`. `attach` the worker once it runs; until then
    `stage.phase` says what its weights are worth."""

    def __init__(
        self,
        stage: LocalStage,
        fence: Fence,
        streams: Mapping[int, trio.abc.Stream],
        compute: Compute = in_thread,
        again: Callable[[int], Awaitable[trio.abc.Stream]] | None = None,
    ) -> None:
        settings = stage.settings
        step = lambda: (
            stage.worker.participant.step if stage.worker is not None else fence.place.step
        )
        self.stage = stage
        self._begins_at = fence.place.step
        self.channel = Channel(fence, streams, stage.limits, settings.seconds, compute, step, again)
        self.fetch = Fetcher(self.channel, stage)
        self.sharing = Sharing(self.channel, stage, self.fetch)
        self.server = Server(self.channel, stage)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Started once what is kept here is what the crew can go on from."""
        if (store := self.stage.store) is not None:
            await self.channel.compute(lambda: store.begins(self._begins_at))
        task_status.started()
        await self.channel.run(self.server, self.sharing)

    def attach(self, worker: StageWorker) -> None:
        """The stage is in order: `worker` runs it."""
        self.stage.worker, self.stage.restored = worker, None
        self.stage.phase, self.stage.kind = "whole", None
