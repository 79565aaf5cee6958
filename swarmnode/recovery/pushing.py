"""What a stage in good order gives away unasked: its snapshots, an end's copy, probes. Torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from swarmnode.recovery import messages as m
from swarmnode.recovery.bodies import ends_layout, pack_floats
from swarmnode.recovery.channel import Channel
from swarmnode.recovery.local import LocalStage
from swarmnode.recovery.snapshots import SnapshotStore, form_of, ring
from swarmnode.recovery.state import StageState, encode_state
from swarmnode.wire import strict


class Pusher:
    def __init__(self, channel: Channel, stage: LocalStage) -> None:
        self.stored: dict[int, int] = {}
        """Stage → committed steps in our snapshot there."""
        self.skipped = 0
        """Snapshots that were not sent because an earlier one was still on its way."""
        self._channel = channel
        self._stage = stage
        self._keepers: set[int] = set()
        """Stages that asked for our next snapshot."""

    def snapshot(self, state: StageState) -> None:
        """To both ring neighbours, and who asked for it, from now on in the background; skipped where the last one is still on its way."""
        self._channel.spawn(lambda: self._push_state(state))

    def ends(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Paper mode: the embedding to the second stage, norm and head to the last but one."""
        body = pack_floats(tensors, ends_layout(self._stage.spec, self._stage.layouts[self._stage.spec.index]))
        receiver = 1 if self._stage.spec.has_embedding else self._stage.spec.stages - 2
        self._channel.push(receiver, self._channel.have("ends", step, body), body)

    def probes(self) -> None:
        body = pack_items(self._stage.recorder.probes)
        for stage in ring(self._stage.spec.index, self._stage.spec.stages):
            self._channel.push(stage, self._channel.have("probes", self._stage.recorder.probes[-1].step, body), body)

    async def _push_state(self, state: StageState) -> None:
        layout = self._stage.layouts[self._stage.spec.index]
        form = form_of(layout, self._stage.settings)
        more = {"form": form, "squared_norm": state.squared_norm, "factor": state.factor, "hash": state.hash}
        body = await self._channel.compute(lambda: encode_state(state, layout, form))
        have = await self._channel.compute(lambda: self._channel.have("shadow", state.step, body, **more))
        receivers, self._keepers = {*ring(self._stage.spec.index, self._stage.spec.stages), *self._keepers}, set()
        for stage in sorted(receivers):
            if self._channel.pushing(stage, "shadow"):
                self.skipped += 1
            else:
                self._channel.push(stage, have, body)
        if self._stage.store is not None:
            await self._keep_policy(self._stage.store, have, body)

    async def _keep_policy(self, store: SnapshotStore, have: m.Have, body: bytes) -> None:
        """Our own snapshot on our disk; and those of stages that push them to others are asked for, where they are to be kept here: who is
        furthest behind first, and only as many as may be in memory together."""
        ours = self._stage.spec.index
        if ours in store.stages:
            try:
                await self._channel.compute(lambda: store.put(ours, have, bytearray(body)))
            except OSError:
                self._channel.counts.failed += 1
        others = store.stages - {ours, *ring(ours, self._stage.spec.stages)}
        steps = {stage: snapshot.step if (snapshot := store.get(stage)) else -1 for stage in others}
        room = 0 if self._channel.snapshots_coming() & others else max(self._stage.settings.exact_bytes, 1)
        for stage in sorted(steps, key=lambda stage: (steps[stage], stage)):
            if room > 0 and steps[stage] < have.step:
                self._channel.send(stage, m.Keep(self._channel.place, 0))
                room -= m.state_bytes(self._stage.layouts[stage], form_of(self._stage.layouts[stage], self._stage.settings))

    def keeps(self, stage: int) -> None:
        """It wants our next snapshot."""
        self._keepers.add(stage)

    def kept(self, stage: int, message: m.Kept) -> None:
        """What we pushed is stored there."""
        if message.what == "shadow":
            self.stored[stage] = max(message.step, self.stored.get(stage, 0))


def pack_items(items: Sequence[msgspec.Struct]) -> bytes:
    return strict.encode(list(items))
