"""What others ask a stage for. Torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from swarmnode.errors import BadMessage
from swarmnode.pipeline.work import read_micro_batch
from swarmnode.recovery import messages as m
from swarmnode.recovery.bodies import ends_layout, layers_layout, pack_floats, run_one, tied_layout
from swarmnode.recovery.channel import Channel
from swarmnode.recovery.local import LocalStage
from swarmnode.recovery.state import StageState, encode_state, host_copy, take, trained
from swarmnode.weights.layout import Layout
from swarmnode.wire import strict

Read = tuple[bytes | bytearray | memoryview, dict[str, Any]]
"""(bytes, fields of `Have`)."""
Found = tuple[int, Callable[[], Read]]
"""(committed steps, what reads it)."""
TIMES: Final[Mapping[m.What, int]] = {
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
        self._sent: dict[tuple[int, m.What, int], tuple[int, int]] = {}
        """(stage, what, of) → (committed steps in it, how much of it)."""

    def take(
        self, stage: int, what: m.What, of: int, step: int, part: int = 1, whole: int = 1
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
        self._making: set[tuple[int, m.What]] = set()
        """(stage, what) that is being put together for it."""
        self._lent: dict[int, tuple[int, Read]] = {}
        """Stage → (committed steps, our snapshot) that it is being sent, to be kept for later. That
        may take longer than until we have the next; the file of the one before is not on the disk
        any more then, and can still be read."""

    def holds(self, stage: int, number: int) -> m.Holds:
        """What there is here of `stage`, asked as `number`."""
        snapshot = self._stage.store.get(stage) if self._stage.store is not None else None
        ends, probes = self._stage.recorder.ends.get(stage), self._stage.recorder.probes
        kind = None if self._stage.kind is None else int(self._stage.kind)
        return m.Holds(
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

    async def serve(self, stage: int, want: m.Want) -> None:
        """What it raises (BadMessage, StateError, OSError, ValueError, `faults.of_device`) is
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

    def _gives(self, stage: int, what: m.What) -> bool:
        """Whether it has not read all of one that it wanted before: what is not sent from a file
        takes memory until then."""
        return (stage, what) in self._making or any(
            out.what == what for out in self._channel.outboxes[stage].transfers
        )

    async def _give(self, stage: int, want: m.Want) -> None:
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

    def _part(self, want: m.Want) -> tuple[int, int]:
        """(how much is wanted, of how much). Bytes of a snapshot, LEAST at least; of anything else
        all, once. Raises BadMessage: bounds."""
        store = self._stage.store
        if want.what != "shadow" or store is None or (kept := store.get(want.of)) is None:
            return 1, 1
        size = m.state_bytes(self._stage.layouts[want.of], kept.form)
        until = size if want.until is None else want.until
        if not want.at < until <= size:
            raise BadMessage("bounds", f"bytes {want.at} to {until} of {size}")
        return min(size, max(LEAST, until - want.at)), size

    async def _copy(self) -> Found:
        step, digest, body = await self._stage.copy(self._channel.compute)
        return step, lambda: (body, {"form": "small", "hash": digest})

    def find(self, stage: int, what: str, of: int) -> Found | None:
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

    async def run(self, stage: int, asked: m.Run, body: bytes) -> None:
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
