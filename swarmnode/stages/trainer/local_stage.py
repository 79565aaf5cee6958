"""This member's stage, as the exchange of state between trainers sees it. Torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import trio

from swarmnode.errors import BadMessage, StateError
from swarmnode.stages.specs import StageSpec
from swarmnode.stages.stage_frames import ActivationCodec, FrameLimits, MicroBatch
from swarmnode.stages.state_messages import HaveMessage, StateForm, StatePhase, state_bytes
from swarmnode.stages.trainer.checkfree import end_names
from swarmnode.stages.trainer.copy_codec import BaseTensors, copied_layout, copy_bytes, encode_copy
from swarmnode.stages.trainer.pipeline import StageWorker, WorkRunner
from swarmnode.stages.trainer.stage_batches import decode, encode, make_batch
from swarmnode.stages.trainer.stage_checkpoints import (
    CheckpointStore,
    LoadedStage,
    Recorder,
    RecoverySettings,
    StageState,
    decode_state,
    replica_form,
    trained,
)
from swarmnode.stages.trainer.stage_model import LrScale, StageRuntime
from swarmnode.weights.layout import Layout
from swarmnode.wire.tensors import pack_logprobs

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
    store: CheckpointStore
    worker: StageWorker | None = None
    phase: StatePhase = "starting"
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

    def read_checkpoint(self) -> LoadedStage:
        """Read the checkpoint of the own stage.

        Raises:
            StateError: The file is damaged.
            BadMessage: Its body is not a state of this stage.
        """
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


# A micro-batch through one stage, for the probe of an average (`stage_averaging.AverageProbe`).


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
