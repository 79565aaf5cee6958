"""What others ask a stage for, and what they push to it. Torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swarmnode.errors import BadMessage
from swarmnode.pipeline.frames import ABOUT_ITEM_BYTES, activation_bytes
from swarmnode.pipeline.work import read_micro_batch
from swarmnode.recovery import messages as m
from swarmnode.recovery.bodies import ends_layout, layers_layout, pack_floats, read_floats, run_one, tied_layout
from swarmnode.recovery.channel import Channel
from swarmnode.recovery.local import LocalStage
from swarmnode.recovery.pushing import Pusher, pack_items
from swarmnode.recovery.snapshots import form_of, ring
from swarmnode.recovery.state import StageState, check_state, encode_state, host_copy, trained
from swarmnode.weights.layout import Layout, elements

Found = tuple[int, bytes, dict[str, Any]]
"""(committed steps, bytes, fields of `Have`)."""


class Server:
    """Answers what others ask for, and keeps what they push; what is said of our own snapshots elsewhere is `pusher`'s to know."""

    def __init__(self, channel: Channel, stage: LocalStage, pusher: Pusher) -> None:
        self._channel = channel
        self._stage = stage
        self.pusher = pusher

    def holds(self, stage: int, number: int) -> m.Holds:
        """What there is here of `stage`, asked as `number`."""
        snapshot = self._stage.store.get(stage) if self._stage.store is not None else None
        ends, probes = self._stage.recorder.ends.get(stage), self._stage.recorder.probes
        kind = None if self._stage.kind is None else int(self._stage.kind)
        return m.Holds(
            self._channel.place, number, self._stage.phase == "whole", kind, self._stage.exhausted, snapshot.step if snapshot else None,
            snapshot.root if snapshot else b"", snapshot.hash if snapshot else b"", ends[0] if ends else None,
            probes[-1].step if probes else None,
        )  # fmt: skip

    async def serve(self, stage: int, want: m.Want) -> None:
        """What it raises (BadMessage, StateError, OSError, ValueError, `faults.of_device`) is answered and counted by the channel."""
        if want.what in ("layers", "tied", "copy") and self._stage.phase != "whole":
            self._channel.lack(stage, want.request, "loading")
            return
        if want.what == "copy":
            step, digest, body = await self._stage.copy(self._channel.compute)
            found: Found = step, body, {"form": "small", "hash": digest}
        else:
            found = await self._channel.compute(lambda: self._body(stage, want.what))
        step, body, more = found
        if not body:
            self._channel.lack(stage, want.request, "none")
            return
        have = await self._channel.compute(lambda: self._channel.have(want.what, step, body, **more))
        self._channel.answer(stage, want.request, have, body)

    def _body(self, stage: int, what: str) -> Found:
        """What `stage` wants; no bytes where it is not here. Raises StateError and OSError."""
        own = self._stage.layouts[self._stage.spec.index]
        if what == "shadow" and self._stage.store is not None and (snapshot := self._stage.store.get(stage)) is not None:
            more = {"form": snapshot.form, "squared_norm": snapshot.squared_norm, "factor": snapshot.factor, "hash": snapshot.hash}
            return snapshot.step, self._stage.store.read(stage), more
        if what == "ends" and stage in self._stage.recorder.ends:
            step, tensors = self._stage.recorder.ends[stage]
            return step, pack_floats(tensors, ends_layout(self._stage.end(stage), self._stage.layouts[stage])), {}
        if what == "probes" and self._stage.recorder.probes:
            return self._stage.recorder.probes[-1].step, pack_items(self._stage.recorder.probes), {}
        if what == "edges":
            edges = [edge for edge in self._stage.recorder.edges if stage in (edge.source, edge.target)]
            return self._channel.step, pack_items(edges) if edges else b"", {"codec": self._stage.codec}
        if what == "layers":
            norm = 0.0 if self._stage.worker is None else self._stage.worker.optimizer.squared_norm
            return self._channel.step, pack_floats(trained(self._stage.runtime), layers_layout(own)), {"squared_norm": norm}
        if what == "tied" and self._stage.spec.shares_embedding and tied_layout(self._stage.spec, own):
            return self._channel.step, self._tied(tied_layout(self._stage.spec, own)), {}
        return 0, b"", {}

    def _tied(self, layout: Layout) -> bytes:
        name = layout[0].name
        weight = trained(self._stage.runtime)[name]
        kept = {name: host_copy(weight)}
        if self._stage.worker is None:
            state = StageState(self._channel.step, kept) if self._stage.restored is None else replace(self._stage.restored, weights=kept)
            return encode_state(state, layout, "exact")
        adam = self._stage.worker.optimizer.adam
        moments = adam.state.get(weight) if adam is not None else None
        if not moments:
            return encode_state(StageState(self._channel.step, kept), layout, "exact")
        first, second = {name: host_copy(moments["exp_avg"])}, {name: host_copy(moments["exp_avg_sq"])}
        return encode_state(StageState(self._channel.step, kept, first, second, {name: float(moments["step"])}), layout, "exact")

    def expected(self, stage: int, have: m.Have) -> int:
        """How long what `stage` begins to send must be. Raises BadMessage for what it has no business to send."""
        ours, stages = self._stage.spec.index, self._stage.spec.stages
        kept = self._stage.store.stages if self._stage.store is not None else frozenset()
        if have.what == "shadow" and (stage in ring(ours, stages) or stage in kept):
            if have.form != form_of(self._stage.layouts[stage], self._stage.settings):
                raise BadMessage("bounds", f"a snapshot in form {have.form}")
            return m.state_bytes(self._stage.layouts[stage], have.form)
        if have.what == "ends" and (stage, ours) in ((0, 1), (stages - 1, stages - 2)):
            return 4 * elements(ends_layout(self._stage.end(stage), self._stage.layouts[stage]))
        if have.what == "probes" and stage == stages - 1 and stage in ring(ours, stages):
            return self._stage.probe_bytes(have)
        if have.what == "run":
            most = ABOUT_ITEM_BYTES * (self._stage.limits.tokens + 16)
            if have.codec != self._stage.codec or not 1 <= have.rows <= self._stage.limits.tokens or not 1 <= have.about <= most:
                raise BadMessage("bounds", "not a micro-batch of this crew")
            return have.about + (0 if ours == 0 else activation_bytes(self._stage.codec, have.rows, self._stage.runtime.hidden_size))
        raise BadMessage("bounds", f"{have.what} from stage {stage}")

    async def pushed(self, stage: int, have: m.Have, body: bytearray) -> None:
        """It arrived, with the hash that was promised. Raises as `serve` does."""
        if have.what == "run":
            await self._run(stage, have, bytes(body))
            return
        if have.what == "shadow" and self._stage.store is not None:
            await self._channel.compute(lambda: self._keep_snapshot(stage, have, body))
        elif have.what == "ends":
            self._stage.recorder.ends[stage] = have.step, read_floats(body, ends_layout(self._stage.end(stage), self._stage.layouts[stage]))
        elif have.what == "probes":
            self._stage.recorder.probes[:] = self._stage.read_probes(body)
        self._channel.send(stage, m.Kept(self._channel.place, have.request, have.what, have.step))

    def _keep_snapshot(self, stage: int, have: m.Have, body: bytearray) -> None:
        assert self._stage.store is not None
        check_state(body, self._stage.layouts[stage], have.form)
        self._stage.store.put(stage, have, body)

    async def _run(self, stage: int, have: m.Have, body: bytes) -> None:
        if self._stage.phase == "empty":
            self._channel.lack(stage, have.request, "loading")
            return
        work = read_micro_batch(body[: have.about], have.rows, self._stage.limits, "learn")
        out = await self._channel.compute(lambda: run_one(self._stage.runtime, work, body[have.about :], self._stage.codec))
        ran = self._channel.have("ran", self._channel.step, out, codec=self._stage.codec, rows=have.rows)
        self._channel.answer(stage, have.request, ran, out)
