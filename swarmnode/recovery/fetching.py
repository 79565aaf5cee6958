"""What a lost stage asks the others for. Everything raises PeerError as `Channel.call` does.
Torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import torch
import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.pipeline.activations import decode
from swarmnode.pipeline.frames import CHUNK_BYTES, activation_bytes
from swarmnode.pipeline.spec import StageSpec
from swarmnode.recovery import messages as m
from swarmnode.recovery.bodies import layers_layout, read_floats, tied_layout
from swarmnode.recovery.channel import LATER_SECONDS, Body, Channel, Loading, Part
from swarmnode.recovery.copies import Parts, copied, copy_bytes, decode_copy
from swarmnode.recovery.gathering import Gathering, nothing_of
from swarmnode.recovery.local import LocalStage
from swarmnode.recovery.probes import work_of
from swarmnode.recovery.snapshots import form_of
from swarmnode.recovery.state import StageState, decode_state
from swarmnode.recovery.synthesis import Neighbour
from swarmnode.weights.layout import elements
from swarmnode.wire import strict

ASK_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 0.25
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

    async def ask(self) -> dict[int, m.Holds]:
        """What every stage that answers has of ours."""
        found: dict[int, m.Holds] = {}
        seconds = min(ASK_SECONDS, self._stage.settings.seconds)

        async def one(stage: int) -> None:
            try:
                answer = await self._channel.call(
                    stage, m.Ask(self._channel.place, 0), _no_body, seconds=seconds
                )
            except PeerError:
                return  # it counts as one that has nothing
            if isinstance(answer, m.Holds):
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
        size = m.state_bytes(layout, form_of(layout, self._stage.settings))
        had, of = arriving.get(own, (b"", nothing_of(size)))
        if had != root or len(of.body) != size:  # whoever names one of before may lie
            of = nothing_of(size)
        arriving[own] = root, of

        def checked(have: m.Have) -> int:
            if (have.step, have.root) != (step, root):
                raise BadMessage("hash", "another snapshot than was named")
            return self._stage.size(own, have)

        async def ask(holder: int, part: Part) -> m.Have:
            return (await self._fetch(holder, "shadow", checked, own, part=part))[0]

        gathering = Gathering(of, holders, ask)
        have = await gathering.run()
        if await self._channel.compute(lambda: m.root_of(of.body)) != root:
            if (liar := gathering.alone) is not None:
                self._channel.refuse(liar, BadMessage("hash", f"a snapshot from stage {liar}"))
            return liar
        return await self._channel.compute(
            lambda: decode_state(of.body, layout, have.form, step, have.squared_norm, 1.0)
        )

    async def theirs(self, stage: int) -> tuple[m.Have, memoryview]:
        """The snapshot of itself that `stage` has, to be kept here. Nobody waits for it, and at 7 B
        a home's line is busy with it for ten minutes, so it is asked for in parts, with pauses.
        What has come of it is not sent again, in another crew neither."""
        layout, arriving = self._stage.layouts[stage], self._stage.arriving
        size = m.state_bytes(layout, form_of(layout, self._stage.settings))
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
            or await self._channel.compute(lambda: m.root_of(of.body)) != root
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
        size = m.state_bytes(layout, "exact")
        have, body = await self._patiently(
            other, lambda: self._fetch(other, "tied", lambda have: size)
        )
        return await self._channel.compute(
            lambda: decode_state(body, layout, "exact", have.step, 0.0, 1.0)
        )

    async def copy(self, spec: StageSpec) -> tuple[int, tuple[int, bytes], Parts]:
        """(bytes that came, (steps, step hash), weights) of a stage as it is now, for a copy of the
        whole policy. Ours go through the bytes that others would get: what `LocalStage.copy` raises
        is raised."""
        layout, base = copied(spec, self._stage.layouts[spec.index]), self._stage.base

        def size(have: m.Have) -> int:
            most = copy_bytes(layout, adapter=base is None)
            if have.size > most or (base is None and have.size != most):
                raise BadMessage("size", f"{have.size} bytes of a copy, which has {most}")
            return have.size

        decoded = lambda body: self._channel.compute(lambda: decode_copy(spec, body, layout, base))
        if spec.index == self._stage.spec.index:
            step, digest, ours = await self._stage.copy(self._channel.compute)
            return 0, (step, digest), await decoded(ours)
        have, body = await self._fetch(spec.index, "copy", size)
        return have.size, (have.step, have.hash), await decoded(body)

    async def probes(self, holder: int) -> list[m.Probe]:
        """At most `settings.memory`, oldest first, every one a micro-batch that this model can have
        been given."""
        _, body = await self.given(holder, "probes", holder)
        return self._stage.read_probes(body)

    async def edges(self, holder: int) -> list[m.Edge]:
        """Activations that came to us or went from us, as that neighbour kept them."""
        _, body = await self._fetch(holder, "edges", self._stage.edge_bytes)
        edges: list[m.Edge] = strict.decode(bytes(body), list[m.Edge])
        if len(edges) > 2 * self._stage.settings.memory:
            raise BadMessage("bounds", f"{len(edges)} edges")
        for edge in edges:
            work_of(edge, self._stage.limits)
            if self._stage.spec.index not in (edge.source, edge.target):
                raise BadMessage("bounds", "activations of other stages")
            decode(edge.body, edge.rows, self._stage.runtime.hidden_size, self._stage.codec)
        return edges

    async def run_at(self, stage: int, probe: m.Probe | m.Edge, tokens: int, x: bytes) -> bytes:
        """One micro-batch through `stage` as it is now: as `bodies.run_one`. Waits for one that is
        being restored.

        Raises Incompatible where its numbers are not finite.
        """
        last = stage == self._stage.spec.stages - 1

        def size(have: m.Have) -> int:
            if have.what != "ran":
                raise BadMessage("schema", "not what was asked for")
            return (
                4 * tokens
                if last
                else activation_bytes(
                    self._stage.codec, probe.rows, self._stage.runtime.hidden_size
                )
            )

        run = m.Run(
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
        self, holder: int, what: m.Given, of: int, seconds: float | None = None
    ) -> Body:
        """What `holder` keeps of stage `of`, which is ours or its own, as it came. seconds: as of
        `Channel.call`."""
        return await self._fetch(holder, what, lambda have: self._given_size(of, have), of, seconds)

    def _given_size(self, of: int, have: m.Have) -> int:
        if have.step > self._channel.step + 1:  # stages are at most one apart
            raise BadMessage(
                "bounds", f"{have.what} of step {have.step}, which the crew has not taken"
            )
        return self._stage.size(of, have)

    async def _fetch(
        self,
        stage: int,
        what: m.Wanted,
        size: Callable[[m.Have], int],
        of: int | None = None,
        seconds: float | None = None,
        part: Part | None = None,
    ) -> Body:
        def checked(have: m.Have) -> int:
            if have.what != what:
                raise BadMessage("schema", f"{have.what} is not {what}")
            return size(have)

        async def ask() -> Body:
            # what had come is not sent again
            at, until = (part.at, part.until) if part is not None else (0, None)
            want = m.Want(self._channel.place, 0, what, stage if of is None else of, at, until)
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
                await trio.sleep(AGAIN_SECONDS)


def _no_body(have: m.Have) -> int:
    raise BadMessage("schema", "no body was asked for")
