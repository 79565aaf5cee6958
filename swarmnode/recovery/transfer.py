"""A member's end of the state streams: what a lost stage fetches, what a stage in good order pushes and serves. Torch.

pushed    snapshots to both ring neighbours, and to whoever keeps the whole policy; the tail's probes to its own; in paper mode embedding
          and head to the second and last but one
served    snapshots, the stage's layers and ω, a tied embedding, copies of an end, probes, activations, and running a micro-batch
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec
import torch
import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.pipeline.activations import decode
from swarmnode.pipeline.compute import Compute, in_thread
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import ABOUT_ITEM_BYTES, ActivationCodec, FrameLimits, activation_bytes
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.pipeline.spec import StageSpec
from swarmnode.pipeline.work import read_f32, read_micro_batch
from swarmnode.pipeline.worker import StageWorker
from swarmnode.recovery import messages as m
from swarmnode.recovery.bodies import ends_layout, layers_layout, pack_floats, read_floats, run_one, tied_layout
from swarmnode.recovery.channel import Body, Channel, ChannelStatistics, Loading
from swarmnode.recovery.probes import Recorder, work_of
from swarmnode.recovery.snapshots import SnapshotStore, form_of, ring
from swarmnode.recovery.sources import RecoverySettings, SourceKind
from swarmnode.recovery.state import StageState, check_state, decode_state, encode_state, host_copy, trained
from swarmnode.recovery.synthesis import Neighbour
from swarmnode.weights.layout import Layout, elements
from swarmnode.wire import strict

Phase = Literal["empty", "candidate", "whole"]
"""The weights here are none; or being judged, and run so that others can be judged; or good."""
ASK_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 0.25
"""A stage that is still being restored is asked again so often."""


@dataclass(frozen=True)
class StatePeerStatistics:
    channel: ChannelStatistics
    kept: dict[int, int]
    """Stage → committed steps in our snapshot there."""
    skipped: int
    """Snapshots that were not sent because an earlier one was still on its way."""


class StatePeer(Channel):
    """streams: stage → stream. layouts: what is trained of every stage (`state.stage_layouts`). recorder: the member's observer.

    `attach` the worker once it runs; until then `phase` says what the weights in `runtime` are worth.
    """

    def __init__(
        self, runtime: StageRuntime, fence: Fence, streams: Mapping[int, trio.abc.Stream], limits: FrameLimits, layouts: Sequence[Layout],
        settings: RecoverySettings, *, store: SnapshotStore | None = None, recorder: Recorder | None = None,
        codec: ActivationCodec = "bfloat16", compute: Compute = in_thread,
    ) -> None:  # fmt: skip
        super().__init__(fence, streams, settings.seconds, settings.uplink * settings.uplink_share / 2, compute)  # two neighbours
        self.runtime = runtime
        self.spec = runtime.spec
        self.settings = settings
        self.codec = codec
        self.limits = limits
        self.layouts = tuple(layouts)
        self.recorder = recorder if recorder is not None else Recorder(runtime.spec, settings)
        self.phase: Phase = "empty"
        self.kind: SourceKind | None = None
        """The candidate's; NONE while there is none yet; None where nothing is being restored."""
        self.exhausted = False
        """There is no other candidate left."""
        self.restored: StageState | None = None
        """What the weights here were restored from, until there is a member: its moments are those of a tied embedding."""
        self._store = store
        self._worker: StageWorker | None = None
        self._kept: dict[int, int] = {}
        self._keepers: set[int] = set()
        """Stages that asked for our next snapshot."""
        self._skipped = 0

    def statistics(self) -> StatePeerStatistics:
        return StatePeerStatistics(self.channel_statistics(), dict(self._kept), self._skipped)

    def attach(self, worker: StageWorker) -> None:
        """The stage is in order: `member` runs it."""
        self._worker = worker
        self.phase, self.kind = "whole", None

    @property
    def step(self) -> int:
        return self._worker.participant.step if self._worker is not None else super().step

    # What a lost stage asks for. Everything raises PeerError as `call` does.

    async def ask(self) -> dict[int, m.Holds]:
        """What every stage that answers has of ours."""
        found: dict[int, m.Holds] = {}

        async def one(stage: int) -> None:
            try:
                answer = await self.call(stage, m.Ask(self.place, 0), _no_body, seconds=min(ASK_SECONDS, self.settings.seconds))
            except PeerError:
                return  # it counts as one that has nothing
            if isinstance(answer, m.Holds):
                found[stage] = answer

        async with trio.open_nursery() as nursery:
            for stage in self.streams:
                nursery.start_soon(one, stage)
        return found

    async def fetch_snapshot(self, holder: int, root: bytes) -> StageState:
        """The one that it said it has."""
        layout = self.layouts[self.spec.index]
        have, body = await self._fetch(holder, "shadow", lambda have: m.state_bytes(layout, have.form))
        if have.root != root:
            raise BadMessage("hash", f"another snapshot than stage {holder} named")
        return await self.compute(lambda: decode_state(body, layout, have.form, have.step, have.squared_norm, have.factor))

    async def fetch_layers(self, stage: int) -> Neighbour:
        """A neighbour's layers as they are now, and ω."""
        layout = layers_layout(self.layouts[stage])
        have, body = await self._fetch(stage, "layers", lambda have: 4 * elements(layout))
        return Neighbour(await self.compute(lambda: read_floats(body, layout)), have.squared_norm)

    async def fetch_ends(self, holder: int) -> dict[str, torch.Tensor]:
        """True copies of our embedding, or norm and head."""
        layout = ends_layout(self.spec, self.layouts[self.spec.index])
        _, body = await self._fetch(holder, "ends", lambda have: 4 * elements(layout))
        return await self.compute(lambda: read_floats(body, layout))

    async def fetch_tied(self) -> StageState:
        """The tied embedding as the other end has it now, with its moments, by our own name for it. Waits for one that is restored."""
        other = self.spec.stages - 1 if self.spec.has_embedding else 0
        layout = tied_layout(self.spec, self.layouts[self.spec.index])
        size = m.state_bytes(layout, "exact")
        have, body = await self._patiently(other, lambda: self._fetch(other, "tied", lambda have: size))
        return await self.compute(lambda: decode_state(body, layout, "exact", have.step, 0.0, 1.0))

    async def fetch_probes(self, holder: int) -> list[m.Probe]:
        """At most `settings.memory`, oldest first, every one a micro-batch that this model can have been given."""
        _, body = await self._fetch(holder, "probes", self._probe_bytes)
        return self._read_probes(body)

    async def fetch_edges(self, holder: int) -> list[m.Edge]:
        """Activations that came to us or went from us, as that neighbour kept them."""
        _, body = await self._fetch(holder, "edges", self._edge_bytes)
        edges: list[m.Edge] = strict.decode(bytes(body), list[m.Edge])
        if len(edges) > 2 * self.settings.memory:
            raise BadMessage("bounds", f"{len(edges)} edges")
        for edge in edges:
            work_of(edge, self.limits)
            if self.spec.index not in (edge.source, edge.target):
                raise BadMessage("bounds", "activations of other stages")
            decode(edge.body, edge.rows, self.runtime.hidden_size, self.codec)
        return edges

    async def run_at(self, stage: int, probe: m.Probe | m.Edge, tokens: int, x: bytes) -> bytes:
        """One micro-batch through `stage` as it is now: as `bodies.run_one`. Waits for one that is being restored.

        Raises Incompatible where its numbers are not finite.
        """
        last = stage == self.spec.stages - 1

        def size(have: m.Have) -> int:
            if have.what != "ran" or have.codec != self.codec:
                raise BadMessage("schema", "not what was asked for")
            return 4 * tokens if last else activation_bytes(self.codec, probe.rows, self.runtime.hidden_size)

        upload = probe.about + x
        have = self.have("run", self.step, upload, codec=self.codec, rows=probe.rows, about=len(probe.about))
        _, body = await self._patiently(stage, lambda: self.call_for_body(stage, have, size, upload))
        return bytes(body)

    async def _fetch(self, stage: int, what: m.Wanted, size: Callable[[m.Have], int]) -> tuple[m.Have, bytearray]:
        def checked(have: m.Have) -> int:
            if have.what != what:
                raise BadMessage("schema", f"{have.what} is not {what}")
            return size(have)

        return await self.call_for_body(stage, m.Want(self.place, 0, what), checked)

    async def _patiently(self, stage: int, ask: Callable[[], Awaitable[Body]]) -> Body:
        until = trio.current_time() + self.settings.neighbour_seconds
        while True:
            try:
                return await ask()
            except Loading:
                if trio.current_time() >= until:
                    raise PeerTimeout(f"stage {stage} was not restored within {self.settings.neighbour_seconds:.0f} s") from None
                await trio.sleep(AGAIN_SECONDS)

    # What a stage in good order gives away unasked.

    def push_snapshot(self, state: StageState) -> None:
        """To both ring neighbours, and who asked for it, from now on in the background; skipped where the last one is still on its way."""
        self.spawn(lambda: self._push_state(state))

    def push_ends(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Paper mode: the embedding to the second stage, norm and head to the last but one."""
        body = pack_floats(tensors, ends_layout(self.spec, self.layouts[self.spec.index]))
        self.push(1 if self.spec.has_embedding else self.spec.stages - 2, self.have("ends", step, body), body)

    def push_probes(self) -> None:
        body = _pack(self.recorder.probes)
        for stage in ring(self.spec.index, self.spec.stages):
            self.push(stage, self.have("probes", self.recorder.probes[-1].step, body), body)

    async def _push_state(self, state: StageState) -> None:
        layout = self.layouts[self.spec.index]
        form = form_of(layout, self.settings)
        more = {"form": form, "squared_norm": state.squared_norm, "factor": state.factor, "hash": state.hash}
        body = await self.compute(lambda: encode_state(state, layout, form))
        have = await self.compute(lambda: self.have("shadow", state.step, body, **more))
        receivers, self._keepers = {*ring(self.spec.index, self.spec.stages), *self._keepers}, set()
        for stage in sorted(receivers):
            if self.pushing(stage, "shadow"):
                self._skipped += 1
            else:
                self.push(stage, have, body)
        if self._store is not None:
            await self._keep_policy(self._store, have, body)

    async def _keep_policy(self, store: SnapshotStore, have: m.Have, body: bytes) -> None:
        """Our own snapshot on our disk; and those of stages that push them to others are asked for, where they are to be kept here: who is
        furthest behind first, and only as many as may be in memory together."""
        ours = self.spec.index
        if ours in store.stages:
            try:
                await self.compute(lambda: store.put(ours, have, bytearray(body)))
            except OSError:
                self._counts.failed += 1
        others = store.stages - {ours, *ring(ours, self.spec.stages)}
        steps = {stage: snapshot.step if (snapshot := store.get(stage)) else -1 for stage in others}
        room = 0 if self.snapshots_coming() & others else max(self.settings.exact_bytes, 1)
        for stage in sorted(steps, key=lambda stage: (steps[stage], stage)):
            if room > 0 and steps[stage] < have.step:
                self.send(stage, m.Keep(self.place, 0))
                room -= m.state_bytes(self.layouts[stage], form_of(self.layouts[stage], self.settings))

    def keeps(self, stage: int) -> None:
        self._keepers.add(stage)

    def kept(self, stage: int, message: m.Kept) -> None:
        if message.what == "shadow":
            self._kept[stage] = max(message.step, self._kept.get(stage, 0))

    # What others ask for, and what they push.

    def holds(self, stage: int, number: int) -> m.Holds:
        snapshot = self._store.get(stage) if self._store is not None else None
        ends, probes = self.recorder.ends.get(stage), self.recorder.probes
        kind = None if self.kind is None else int(self.kind)
        return m.Holds(
            self.place, number, self.phase == "whole", kind, self.exhausted, snapshot.step if snapshot else None,
            snapshot.root if snapshot else b"", snapshot.hash if snapshot else b"", ends[0] if ends else None,
            probes[-1].step if probes else None,
        )  # fmt: skip

    async def serve(self, stage: int, want: m.Want) -> None:
        if want.what in ("layers", "tied") and self.phase != "whole":
            self.lack(stage, want.request, "loading")
            return
        step, body, more = await self.compute(lambda: self._body(stage, want.what))
        if not body:
            self.lack(stage, want.request, "none")
            return
        have = await self.compute(lambda: self.have(want.what, step, body, **more))
        self.answer(stage, want.request, have, body)

    def _body(self, stage: int, what: str) -> tuple[int, bytes, dict[str, Any]]:
        """(committed steps, bytes, fields of `Have`) of what `stage` wants; no bytes where it is not here. Raises StateError, OSError."""
        own = self.layouts[self.spec.index]
        if what == "shadow" and self._store is not None and (snapshot := self._store.get(stage)) is not None:
            more = {"form": snapshot.form, "squared_norm": snapshot.squared_norm, "factor": snapshot.factor, "hash": snapshot.hash}
            return snapshot.step, self._store.read(stage), more
        if what == "ends" and stage in self.recorder.ends:
            step, tensors = self.recorder.ends[stage]
            return step, pack_floats(tensors, ends_layout(self._end(stage), self.layouts[stage])), {}
        if what == "probes" and self.recorder.probes:
            return self.recorder.probes[-1].step, _pack(self.recorder.probes), {}
        if what == "edges":
            edges = [edge for edge in self.recorder.edges if stage in (edge.source, edge.target)]
            return self.step, _pack(edges) if edges else b"", {"codec": self.codec}
        if what == "layers":
            norm = 0.0 if self._worker is None else self._worker.optimizer.squared_norm
            return self.step, pack_floats(trained(self.runtime), layers_layout(own)), {"squared_norm": norm}
        if what == "tied" and self.spec.shares_embedding and tied_layout(self.spec, own):
            return self.step, self._tied(tied_layout(self.spec, own)), {}
        return 0, b"", {}

    def _tied(self, layout: Layout) -> bytes:
        name = layout[0].name
        weight = trained(self.runtime)[name]
        kept = {name: host_copy(weight)}
        if self._worker is None:
            state = StageState(self.step, kept) if self.restored is None else replace(self.restored, weights=kept)
            return encode_state(state, layout, "exact")
        adam = self._worker.optimizer.adam
        moments = adam.state.get(weight) if adam is not None else None
        if not moments:
            return encode_state(StageState(self.step, kept), layout, "exact")
        first, second = {name: host_copy(moments["exp_avg"])}, {name: host_copy(moments["exp_avg_sq"])}
        return encode_state(StageState(self.step, kept, first, second, {name: float(moments["step"])}), layout, "exact")

    def expected(self, stage: int, have: m.Have) -> int:
        ours, stages = self.spec.index, self.spec.stages
        kept = self._store.stages if self._store is not None else frozenset()
        if have.what == "shadow" and (stage in ring(ours, stages) or stage in kept):
            if have.form != form_of(self.layouts[stage], self.settings):
                raise BadMessage("bounds", f"a snapshot in form {have.form}")
            return m.state_bytes(self.layouts[stage], have.form)
        if have.what == "ends" and (stage, ours) in ((0, 1), (stages - 1, stages - 2)):
            return 4 * elements(ends_layout(self._end(stage), self.layouts[stage]))
        if have.what == "probes" and stage == stages - 1 and stage in ring(ours, stages):
            return self._probe_bytes(have)
        if have.what == "run":
            most = ABOUT_ITEM_BYTES * (self.limits.tokens + 16)
            if have.codec != self.codec or not 1 <= have.rows <= self.limits.tokens or not 1 <= have.about <= most:
                raise BadMessage("bounds", "not a micro-batch of this crew")
            return have.about + (0 if ours == 0 else activation_bytes(self.codec, have.rows, self.runtime.hidden_size))
        raise BadMessage("bounds", f"{have.what} from stage {stage}")

    async def pushed(self, stage: int, have: m.Have, body: bytearray) -> None:
        if have.what == "run":
            await self._run(stage, have, bytes(body))
            return
        if have.what == "shadow" and self._store is not None:
            await self.compute(lambda: self._keep_snapshot(stage, have, body))
        elif have.what == "ends":
            self.recorder.ends[stage] = have.step, read_floats(body, ends_layout(self._end(stage), self.layouts[stage]))
        elif have.what == "probes":
            self.recorder.probes[:] = self._read_probes(body)
        self.send(stage, m.Kept(self.place, have.request, have.what, have.step))

    def _keep_snapshot(self, stage: int, have: m.Have, body: bytearray) -> None:
        assert self._store is not None
        check_state(body, self.layouts[stage], have.form)
        self._store.put(stage, have, body)

    async def _run(self, stage: int, have: m.Have, body: bytes) -> None:
        if self.phase == "empty":
            self.lack(stage, have.request, "loading")
            return
        work = read_micro_batch(body[: have.about], have.rows, self.limits, "learn")
        out = await self.compute(lambda: run_one(self.runtime, work, body[have.about :], self.codec))
        self.answer(stage, have.request, self.have("ran", self.step, out, codec=self.codec, rows=have.rows), out)

    # Bounds.

    def _probe_bytes(self, have: m.Have) -> int:
        """What they say, up to a cap: a description is as long as its tokens need."""
        each = ABOUT_ITEM_BYTES * (self.limits.tokens + 16) + 4 * self.limits.tokens + 256
        return _at_most(have, self.settings.memory * each + 16)

    def _edge_bytes(self, have: m.Have) -> int:
        about = ABOUT_ITEM_BYTES * (self.limits.tokens + 16) + 256
        bodies = 2 * self.settings.memory * activation_bytes("float32", self.limits.tokens, self.limits.hidden)
        return _at_most(have, 2 * self.settings.memory * about + min(bodies, self.settings.pair_bytes) + 16)

    def _read_probes(self, body: bytearray) -> list[m.Probe]:
        probes: list[m.Probe] = strict.decode(bytes(body), list[m.Probe])
        if not 1 <= len(probes) <= self.settings.memory:
            raise BadMessage("bounds", f"{len(probes)} probes")
        for probe in probes:
            read_f32("logprobs", probe.logprobs, sum(work_of(probe, self.limits).completion_lengths))
        return probes

    def _end(self, stage: int) -> StageSpec:
        """Another stage's spec; its layers do not matter here, only which end it is."""
        return StageSpec(stage, self.spec.stages, 0, 0, self.spec.tied)


def _pack(items: Sequence[msgspec.Struct]) -> bytes:
    return strict.encode(list(items))


def _at_most(have: m.Have, most: int) -> int:
    if have.size > most:
        raise BadMessage("size", f"{have.size} bytes of {have.what}, at most {most}")
    return have.size


def _no_body(have: m.Have) -> int:
    raise BadMessage("schema", "no body was asked for")
