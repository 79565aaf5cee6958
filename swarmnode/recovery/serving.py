"""What others ask a stage for. Torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swarmnode.errors import BadMessage
from swarmnode.pipeline.work import read_micro_batch
from swarmnode.recovery import messages as m
from swarmnode.recovery.bodies import ends_layout, layers_layout, pack_floats, run_one, tied_layout
from swarmnode.recovery.channel import Channel
from swarmnode.recovery.local import LocalStage
from swarmnode.recovery.state import StageState, encode_state, host_copy, take, trained
from swarmnode.weights.layout import Layout
from swarmnode.wire import strict

Found = tuple[int, bytes | memoryview, dict[str, Any]]
"""(committed steps, bytes, fields of `Have`)."""


class Server:
    """Answers what others ask for. A snapshot is sent from its file: it takes no memory, however many ask, and however slow they are."""

    def __init__(self, channel: Channel, stage: LocalStage) -> None:
        self._channel = channel
        self._stage = stage

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
            at, digest, copied = await self._stage.copy(self._channel.compute)
            found: Found = at, copied, {"form": "small", "hash": digest}
        else:
            found = await self._channel.compute(lambda: self._body(stage, want.what, want.of))
        step, body, more = found
        if not body:
            self._channel.lack(stage, want.request, "none")
            return
        if want.at >= len(body):
            raise BadMessage("bounds", f"{want.what} from byte {want.at} of {len(body)}")
        paced = want.what == "shadow" and want.of != stage  # kept for later
        await self._channel.answer(stage, want.request, want.what, step, body, paced=paced, at=want.at, **more)

    def _body(self, stage: int, what: str, of: int) -> Found:
        """What `stage` wants; no bytes where it is not here. Raises StateError and OSError."""
        own, store = self._stage.layouts[self._stage.spec.index], self._stage.store
        if of not in (stage, self._stage.spec.index):
            return 0, b"", {}
        if what == "shadow" and store is not None and store.get(of) is not None:
            kept, body = store.read(of)
            more = {"root": kept.root, "form": kept.form, "squared_norm": kept.squared_norm, "factor": kept.factor, "hash": kept.hash}
            return kept.step, body, more
        if what == "ends" and of in self._stage.recorder.ends:
            step, tensors = self._stage.recorder.ends[of]
            return step, pack_floats(tensors, ends_layout(self._stage.end(of), self._stage.layouts[of])), {}
        if what == "probes" and self._stage.recorder.probes:
            return self._stage.recorder.probes[-1].step, strict.encode(list(self._stage.recorder.probes)), {}
        if what == "edges":
            edges = [edge for edge in list(self._stage.recorder.edges) if stage in (edge.source, edge.target)]  # a step may end meanwhile
            return self._channel.step, strict.encode(edges) if edges else b"", {}
        if what == "layers":
            norm = 0.0 if self._stage.worker is None else self._stage.worker.optimizer.squared_norm
            return self._channel.step, pack_floats(trained(self._stage.runtime), layers_layout(own)), {"squared_norm": norm}
        if what == "tied" and self._stage.spec.shares_embedding and tied_layout(self._stage.spec, own):
            return self._channel.step, self._tied(tied_layout(self._stage.spec, own)), {}
        return 0, b"", {}

    def _tied(self, layout: Layout) -> bytes:
        name = layout[0].name
        if self._stage.worker is not None:
            return encode_state(take(self._stage.worker, name), layout, "exact")
        restored = self._stage.restored or StageState(self._channel.step, {})
        return encode_state(replace(restored, weights={name: host_copy(trained(self._stage.runtime)[name])}), layout, "exact")

    async def run(self, stage: int, asked: m.Run, body: bytes) -> None:
        """A micro-batch through our stage as it is. Raises as `serve` does."""
        at = self._stage
        if asked.codec != (None if at.spec.has_embedding else at.codec):
            raise BadMessage("schema", "not activations of this crew")
        if at.phase == "empty":
            self._channel.lack(stage, asked.request, "loading")
            return
        work = read_micro_batch(body[: asked.about], asked.rows, at.limits, "learn")
        out = await self._channel.compute(lambda: run_one(at.runtime, work, body[asked.about :], at.codec))
        await self._channel.answer(stage, asked.request, "ran", self._channel.step, out)
