"""What a state peer knows of its own stage: what it is, what its weights are worth, and what is
kept here of others. Torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import trio

from swarmnode.errors import BadMessage, StateError
from swarmnode.pipeline.compute import Compute
from swarmnode.pipeline.frames import (
    ABOUT_ITEM_BYTES,
    ActivationCodec,
    FrameLimits,
    activation_bytes,
)
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.pipeline.spec import StageSpec
from swarmnode.pipeline.work import read_f32
from swarmnode.pipeline.worker import StageWorker
from swarmnode.recovery import messages as m
from swarmnode.recovery.bodies import ends_layout, read_floats
from swarmnode.recovery.copies import Base, copied, encode_copy
from swarmnode.recovery.gathering import Begun
from swarmnode.recovery.probes import Recorder, work_of
from swarmnode.recovery.snapshots import SnapshotStore, form_of
from swarmnode.recovery.sources import RecoverySettings, SourceKind
from swarmnode.recovery.state import StageState, trained
from swarmnode.weights.layout import Layout, elements
from swarmnode.wire import strict

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

    def size(self, of: int, have: m.Have) -> int:
        """How long what one stage keeps of another, `of`, is. Raises BadMessage for what it cannot
        be."""
        if have.what == "shadow":
            if have.form != form_of(self.layouts[of], self.settings):
                raise BadMessage("bounds", f"a snapshot in form {have.form}")
            return m.state_bytes(self.layouts[of], have.form)
        if have.what == "ends":
            return 4 * elements(ends_layout(self.end(of), self.layouts[of]))
        # probes: what they say, up to a cap: a description is as long as its tokens need
        each = ABOUT_ITEM_BYTES * (self.limits.tokens + 16) + 4 * self.limits.tokens + 256
        return _at_most(have, self.settings.memory * each + 16)

    def edge_bytes(self, have: m.Have) -> int:
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

    def read_probes(self, body: bytearray) -> list[m.Probe]:
        probes: list[m.Probe] = strict.decode(bytes(body), list[m.Probe])
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


def _at_most(have: m.Have, most: int) -> int:
    if have.size > most:
        raise BadMessage("size", f"{have.size} bytes of {have.what}, at most {most}")
    return have.size
