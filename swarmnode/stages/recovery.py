"""Restore a lost stage: ask the members, try the sources in order, judge, heal, report. Torch.

    loading      the best remaining source; its tensors are checked and loaded
    probation    the last micro-batches run through all stages; a stage that fails is healed, or the
                 next source follows
    rejoin       `Restored.install` gives the new worker its optimizer, learning rate and norm

Two stages may be restored at once: each is judged through the other's candidate. A source that does
not fit this device counts as absent.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import numpy as np
import torch
import trio

from swarmnode.errors import Incompatible, PeerError, Refused, StateError, Unavailable
from swarmnode.policy.fingerprint import fingerprint
from swarmnode.policy.logprobs import Batch
from swarmnode.policy.micro import free_memory, is_oom
from swarmnode.stages.model import LrScale, StageRuntime, batch_of, decode, load_stage
from swarmnode.stages.pipeline import StageWorker
from swarmnode.stages.transfer import (
    ASK_AGAIN_SECONDS,
    ASK_SECONDS,
    Found,
    Journal,
    Kept,
    RecoveryOrder,
    RecoverySettings,
    Run,
    Source,
    SourceKind,
    StageState,
    StatePeer,
    Tensors,
    Verdict,
    host_copy,
    load_moments,
    load_weights,
    ring,
    run_one,
    synthesise,
    trained,
    work_of,
)
from swarmnode.stages.wire import (
    ActivationCodec,
    Edge,
    FrameLimits,
    Holds,
    Probe,
    StageSpec,
    is_device_error,
)
from swarmnode.wire.tensors import unpack_logprobs

# The gate: the last committed micro-batches run again through all stages.
#
#     r = log π_new(token) − log π_old(token)     over tokens that were trained on
#     KL(old ‖ new) ≈ mean(eʳ − 1 − r) ≥ 0        rise of the negative log-likelihood = − mean r
#
# π_old is the tail's output before the step of that micro-batch. Only the newest step's micro-
# batches count: later learning would look like damage. A damaged policy earns equal rewards
# everywhere, so training cannot repair it.

AT_ONCE = 2
"""Probes on their way through the stages."""
LEAST, ROWS = 2, 2048
"""Probes, and rows of them, that are enough: a token's r of a stage in order is some hundredths, so
that their mean square is known to a tenth, and at 7 B more would be minutes of a home's line, for
each source that is tried."""


async def judge(peer: StatePeer, probes: Sequence[Probe]) -> Verdict:
    """`peer.stage.runtime` in its place among the others. `probes` is not empty.

    Raises PeerError when a stage is gone or never gets ready, and what `is_device_error` knows.
    """
    shifts: list[np.ndarray] = []
    errors: list[Exception] = []
    waiting = enough(probes)

    async def work() -> None:
        while waiting and not errors:
            try:
                shifts.append(await _shift(peer, waiting.pop()))
            except (PeerError, ValueError) as error:
                errors.append(error)
            except (RuntimeError, MemoryError) as error:
                if not is_device_error(error):
                    raise
                errors.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(work)
    for error in errors:
        if not isinstance(error, (Incompatible, ValueError)):
            raise error
    if errors:
        return Verdict(float("inf"), float("inf"), 0, finite=False)
    return verdict_of(np.concatenate(shifts))


def enough(probes: Sequence[Probe]) -> list[Probe]:
    """The last of the newest step's."""
    newest, rows, chosen = max(probe.step for probe in probes), 0, list[Probe]()
    for probe in reversed([probe for probe in probes if probe.step == newest]):
        if len(chosen) < LEAST or rows < ROWS:
            chosen.append(probe)
            rows += probe.rows
    return chosen


def verdict_of(shift: np.ndarray) -> Verdict:
    """shift: (tokens,) r as above."""
    shift = shift.astype(np.float64)
    return Verdict(float(np.mean(np.expm1(shift) - shift)), float(-shift.mean()), len(shift))


async def _shift(peer: StatePeer, probe: Probe) -> np.ndarray:
    """(tokens,) r. Raises ValueError or Incompatible where numbers are not finite, here or
    elsewhere."""
    micro_batch = work_of(probe, peer.stage.limits)
    old = unpack_logprobs(probe.logprobs)
    x = b""
    for stage in range(peer.stage.spec.stages):
        if stage == peer.stage.spec.index:
            x = await peer.channel.compute(
                partial(run_one, peer.stage.runtime, micro_batch, x, peer.stage.codec)
            )
        else:
            x = await peer.fetch.run_at(stage, probe, len(old), x)
    new = unpack_logprobs(x)
    if not np.isfinite(new).all():
        raise ValueError("a log-probability is not finite")
    return new - old


# Local distillation: a damaged stage learns the lost stage's recorded inputs and outputs.
#
#     inner stage, head    squared error of its output, relative to the size of the recorded output
#     tail                 squared error of its log-probabilities against the recorded ones

SMALLEST: Final = 0.01
"""A tensor that is smaller is treated as if it had this root mean square: a new adapter's B is
zero."""


@dataclass(frozen=True)
class Pair:
    """One committed micro-batch as the lost stage had it."""

    batch: Batch
    x: torch.Tensor | None
    """(R, H) that came to it; None for the head, which has the ids."""
    y: torch.Tensor
    """(R, H) that it made of it; at the tail (tokens,) log-probabilities."""
    temperature: float


@dataclass(frozen=True)
class Healing:
    steps: int
    before: float
    """Mean of the loss over all pairs."""
    after: float


def pairs_of(
    runtime: StageRuntime,
    edges: Sequence[Edge],
    probes: Sequence[Probe],
    limits: FrameLimits,
    codec: ActivationCodec,
    judged: int,
) -> list[Pair]:
    """What can be put together from neighbours' `edges` and, at the tail, `probes`; the newest
    last. They were checked.

    The last `judged` probes are left out: the stage is judged by them.
    """
    spec = runtime.spec
    number = lambda item: (item.step, item.micro_batch)  # a new roster counts micro-batches anew
    inputs = {number(edge): edge for edge in edges if edge.target == spec.index}
    outputs: dict[tuple[int, int], Edge | Probe] = {
        number(edge): edge for edge in edges if edge.source == spec.index
    }
    if spec.has_head:
        outputs = {number(probe): probe for probe in probes}
    judges = {number(probe) for probe in probes[-judged:]}
    out = []
    for key, after in sorted(outputs.items(), key=lambda item: item[0]):
        before = inputs.get(key)
        if key in judges:
            continue
        if before is None and not spec.has_embedding:
            continue
        if before is not None and (before.about, before.rows) != (after.about, after.rows):
            continue  # two neighbours that do not agree what it was
        work = work_of(after, limits)
        unpack = lambda edge: decode(edge.body, edge.rows, runtime.hidden_size, codec).to(
            runtime.device
        )
        y = (
            torch.tensor(unpack_logprobs(after.logprobs), device=runtime.device)
            if isinstance(after, Probe)
            else unpack(after)
        )
        x = None if spec.has_embedding else unpack(before)
        out.append(Pair(batch_of(work, runtime.device), x, y, work.temperature))
    return out


def heal(runtime: StageRuntime, pairs: Sequence[Pair], steps: int, rate: float) -> Healing:
    """`steps` of AdamW over `pairs` in turn, at `rate` of each tensor's root mean square, falling
    to zero. Where that did not help, the weights are as before.

    A tied embedding is left alone: the other end has it too. `pairs` is not empty.
    """
    shared = runtime.embedding()
    parameters = [p for p in runtime.parameters() if p is not shared]
    kept = [p.detach().clone() for p in parameters]
    before = _mean(runtime, pairs)
    sizes = [
        rate * max(float(p.detach().float().square().mean().sqrt()), SMALLEST) for p in parameters
    ]
    optimizer = torch.optim.AdamW([{"params": [p]} for p in parameters], weight_decay=0.0)
    for step in range(steps):
        for group, size in zip(optimizer.param_groups, sizes, strict=True):
            group["lr"] = size * (1.0 - step / steps)
        loss = _loss(runtime, pairs[step % len(pairs)])
        loss.backward()
        optimizer.step()
        for parameter in runtime.parameters():
            parameter.grad = None
    after = _mean(runtime, pairs)
    if not after < before:
        with torch.no_grad():
            for parameter, old in zip(parameters, kept, strict=True):
                parameter.copy_(old)
        after = before
    return Healing(steps, before, after)


@torch.no_grad()
def _mean(runtime: StageRuntime, pairs: Sequence[Pair]) -> float:
    return sum(float(_loss(runtime, pair)) for pair in pairs) / len(pairs)


def _loss(runtime: StageRuntime, pair: Pair) -> torch.Tensor:
    if runtime.spec.has_head:
        logprobs = runtime.logprobs(pair.batch, pair.x, pair.temperature)[0][
            pair.batch.completion_mask
        ]
        return (logprobs - pair.y).square().mean()
    out = runtime.hidden(pair.batch, pair.x)
    return (out - pair.y).square().mean() / pair.y.square().mean().clamp_min(1e-12)


# Restoration of one stage.

PAUSE_SECONDS: Final = 30.0

T = TypeVar("T")
Base = Callable[[], Tensors]
"""The stage that training began with, or under LoRA its untrained adapter, by the stage's own
names. Raises LocalError."""
Notify = Callable[[Literal["loading", "probation"], SourceKind], None]


@dataclass(frozen=True)
class Replica:
    """The same stage of another crew, verbatim: replicas that were averaged are two policies, and
    their mean is a third."""

    weights: Tensors
    """φ."""
    outer: Tensors = field(default_factory=dict)
    """Whatever the outer step keeps; handed through."""


@dataclass(frozen=True)
class Restored:
    """What was done, and what the new member needs; `install` it before it runs."""

    kind: SourceKind
    step: int | None
    """Committed steps in the weights; None where that cannot be said."""
    holder: int | None
    """Stage that had them; None: this machine, a replica, or made of neighbours."""
    verdict: Verdict | None
    """None where nobody had a probe."""
    healings: tuple[Healing, ...]
    tried: tuple[tuple[SourceKind, str], ...]
    """What was refused before, and why."""
    kept: Kept

    def install(self, worker: StageWorker) -> None:
        """Moments, norm, learning rate, generator. The weights are in the runtime already."""
        load_moments(worker, self.kept.state)
        worker.optimizer.squared_norm = self.kept.state.squared_norm
        worker.optimizer.lr_scale = replace(self.kept.lr_scale)
        if self.kept.rng is not None:
            torch.set_rng_state(self.kept.rng)


async def restore(
    peer: StatePeer,
    *,
    step: int,
    run: Run,
    hash: bytes = b"",
    journal: Journal | None = None,
    base: Base | None = None,
    replica: Callable[[], Awaitable[Replica]] | None = None,
    notify: Notify = lambda phase, kind: None,
) -> Restored:
    """The stage `peer.stage.runtime` as good as it can be had; `step` is how many the crew has
    committed, `hash` their step hash. `peer.run` must be running.

    Without a `base` there is no R3: a run from scratch has none that is worth anything.

    Raises Refused where no source is left (R6), with every source's reason, and PeerError when a
    stage that is needed for judging is gone.
    """
    settings = peer.stage.settings
    peer.stage.phase, peer.stage.kind, peer.stage.restored, peer.stage.exhausted = (
        "empty",
        SourceKind.NONE,
        None,
        False,
    )
    holds = await _ask(peer)
    kept = {
        stage: holds[stage]
        for stage in ring(peer.stage.spec.index, peer.stage.spec.stages)
        if stage in holds
    }
    if hash:  # what is of the very step and has another hash is of another continuation
        kept = {stage: h for stage, h in kept.items() if h.shadow != step or h.hash == hash}
        journal = (
            None
            if journal is not None and journal.step == step and journal.hash != hash
            else journal
        )
    found = Found(
        journal=journal.step if journal is not None else None,
        replica=replica is not None,
        snapshots={stage: h.shadow for stage, h in kept.items() if h.shadow is not None},
        roots={stage: h.root for stage, h in kept.items() if h.shadow is not None},
        base=base is not None,
        alive=frozenset(stage for stage, h in holds.items() if h.loaded),
        ends=frozenset(stage for stage, h in holds.items() if h.ends is not None),
    )
    order = RecoveryOrder(found, peer.stage.spec, step, run, settings)
    loader = _Loader(peer, holds, step, run, journal, base, replica)
    return await _Recovery(peer, order, loader, await _probes(peer, holds, step), notify).run()


@dataclass
class _Recovery:
    """One stage's way through its sources."""

    peer: StatePeer
    order: RecoveryOrder
    loader: _Loader
    probes: list[Probe]
    notify: Notify
    first: Source | None = None
    """The best source that was there."""

    async def run(self) -> Restored:
        while True:
            if rivals := self.order.rivals():
                self.order.prefer(await self._better(rivals))
            try:
                source = self.order.next()
            except Refused:
                got = await self._fitting(self.first, self._wait())
                if got is None and (last := self.order.last_resort()) is not None:
                    got = await self._fitting(last, self._try(last))
                if got is None:
                    raise
                return got
            if (got := await self._fitting(source, self._try(source))) is not None:
                return got

    async def _fitting(self, source: Source | None, work: Awaitable[T | None]) -> T | None:
        """`work` with `source`. None where the device cannot do it: the source is refused, and what
        it took is free again."""
        try:
            return await work
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            why = "out of memory" if is_oom(error) else f"the device: {error}"
        for parameter in self.peer.stage.runtime.parameters():
            parameter.grad = None
        free_memory()
        self._drop(source, why)
        return None

    def _drop(self, source: Source | None, why: str) -> None:
        """What is in the stage is nobody's."""
        peer = self.peer
        peer.stage.phase, peer.stage.kind, peer.stage.restored = "empty", SourceKind.NONE, None
        if source is not None:
            self.order.refuse(source, why)

    async def _better(self, rivals: tuple[Source, ...]) -> Source | None:
        """Each as it is, without healing; the one that the gate likes best. None where nothing can
        judge them, or none is left."""
        found: list[tuple[float, Source]] = []
        for source in rivals if self.probes else ():
            verdict = await self._fitting(source, self._look(source))
            if verdict is not None:
                found.append((self.order.damage(verdict), source))
        return min(found, key=lambda one: one[0])[1] if found else None

    async def _look(self, source: Source) -> Verdict | None:
        if await self._put_in_stage(source) is None:
            return None
        self.notify("probation", source.kind)
        return await self._judge(source, 0)

    async def _try(self, source: Source) -> Restored | None:
        """None where it did not serve; the order knows why."""
        peer, settings = self.peer, self.peer.stage.settings
        candidate = await self._put_in_stage(source)
        if candidate is None:
            return None
        self.notify("probation", source.kind)
        healings: list[Healing] = []
        as_it_came: Verdict | None = None
        while True:
            verdict = await self._judge(source, len(healings)) if self.probes else None
            as_it_came = verdict if not healings else as_it_came
            what = self.order.judge(source, verdict, len(healings))
            if what == "rejoin":
                return self._done(source, candidate, verdict, healings)
            healing = await _heal(peer, self.probes, settings) if what == "heal" else None
            if healing is None:
                self.loader.judged.add((source.kind, source.holder))
                self.order.failed(source, as_it_came, _refusal(verdict, len(healings)))
                self._drop(None, "")
                return None
            healings.append(healing)
            fresh = {
                name: host_copy(tensor) for name, tensor in trained(peer.stage.runtime).items()
            }
            candidate = Kept(
                _without_moments(candidate.state, fresh, peer), _new_lr_scale(settings)
            )
            peer.stage.restored = candidate.state

    async def _put_in_stage(self, source: Source) -> Kept | None:
        """What `source` gives, in the stage. None where it is not there or not what it was said to
        be."""
        peer = self.peer
        self.notify("loading", source.kind)
        try:
            candidate = await self.loader.load(source)
            await peer.channel.compute(
                lambda: load_weights(peer.stage.runtime, candidate.state.weights)
            )
            peer.stage.phase, peer.stage.kind, peer.stage.restored = (
                "candidate",
                source.kind,
                candidate.state,
            )
            await _tie(peer, candidate, self.loader.holds)
        except (PeerError, StateError, Unavailable, Refused, OSError) as error:
            self._drop(source, str(error))
            return None
        self.first = self.first or source
        return candidate

    async def _judge(self, source: Source, healings: int) -> Verdict:
        """A verdict that this stage has to answer for: none that another one, restored with a worse
        source, may have brought about."""
        until, pauses = trio.current_time() + self.peer.stage.settings.neighbour_seconds, _pauses()
        while True:
            # asked first: one that gets ready meanwhile may have spoilt the verdict before
            unfinished = await self._unfinished()
            verdict = await judge(self.peer, self._judges())
            if (
                self.order.judge(source, verdict, healings) == "rejoin"
                or trio.current_time() >= until
            ):
                return verdict
            others = [
                (h.rung, -stage)
                for stage, h in unfinished
                if h.rung is not None and not h.exhausted
            ]
            if not others or max(others) < (int(source.kind), -self.peer.stage.spec.index):
                return verdict
            await trio.sleep(next(pauses))

    async def _wait(self) -> Restored | None:
        """Nothing is left, but what failed may have failed through another stage that is being
        restored: with the best source that there was, until that one has found a better. None where
        there is no other, or it did not help."""
        peer, source = self.peer, self.first
        until, pauses = trio.current_time() + peer.stage.settings.neighbour_seconds, _pauses()
        if (
            source is None
            or not await self._unfinished()
            or (candidate := await self._put_in_stage(source)) is None
        ):
            return None
        peer.stage.exhausted = True
        while True:
            others = await self._unfinished()  # before the verdict, as in `_judge`
            verdict = await judge(peer, self._judges()) if self.probes else None
            if self.order.judge(source, verdict, 0) == "rejoin":
                return self._done(source, candidate, verdict, [])
            if all(h.exhausted for _, h in others) or trio.current_time() >= until:
                peer.stage.phase = "empty"
                return None
            await trio.sleep(next(pauses))

    async def _unfinished(self) -> list[tuple[int, Holds]]:
        """Other stages that answer and are being restored."""
        return [(stage, h) for stage, h in (await self.peer.fetch.ask()).items() if not h.loaded]

    def _judges(self) -> list[Probe]:
        return self.probes[-self.peer.stage.settings.probes :]

    def _done(
        self, source: Source, candidate: Kept, verdict: Verdict | None, healings: list[Healing]
    ) -> Restored:
        self.peer.stage.phase, self.peer.stage.kind, self.peer.stage.exhausted = (
            "whole",
            None,
            False,
        )
        return Restored(
            source.kind,
            source.step,
            source.holder,
            verdict,
            tuple(healings),
            tuple(self.order.tried),
            candidate,
        )


@dataclass
class _Loader:
    """What each source gives. judged: (kind, holder) of what was in the stage and did not pass."""

    peer: StatePeer
    holds: Mapping[int, Holds]
    step: int
    run: Run
    journal: Journal | None
    base: Base | None
    replica: Callable[[], Awaitable[Replica]] | None
    judged: set[tuple[SourceKind, int | None]] = field(default_factory=set)

    async def load(self, source: Source) -> Kept:
        """Raises PeerError, StateError, Unavailable, Refused, OSError where the source is not what
        it was said to be."""
        spec, settings = self.peer.stage.spec, self.peer.stage.settings
        match source.kind:
            case SourceKind.JOURNAL:
                assert self.journal is not None
                return await self.peer.channel.compute(self.journal.read)
            case SourceKind.REPLICA:
                assert self.replica is not None
                theirs = await self.replica()
                return Kept(StageState(0, theirs.weights), _new_lr_scale(settings), theirs.outer)
            case SourceKind.SNAPSHOT:
                assert source.holder is not None
                state = await self._snapshot(source.holder)
                return Kept(state, LrScale() if state.counts else _new_lr_scale(settings))
            case SourceKind.BASE:
                assert self.base is not None
                weights = await self.peer.channel.compute(self.base)
                last = await self._last_adapter(weights) if self.run.adapter else None
                return Kept(
                    StageState(0, weights) if last is None else last, _new_lr_scale(settings)
                )
        before = None if spec.has_embedding else await self.peer.fetch.layers(spec.index - 1)
        after = None if spec.has_head else await self.peer.fetch.layers(spec.index + 1)
        ends = None
        if spec.has_embedding or spec.has_head:
            newest = max((h.ends, -stage) for stage, h in self.holds.items() if h.ends is not None)
            ends = await self.peer.fetch.ends(-newest[1])
        assert source.method is not None
        method = source.method
        paper = not settings.keeps_copies(spec)
        made = await self.peer.channel.compute(
            lambda: synthesise(method, spec, before, after, self.run, ends=ends, paper=paper)
        )
        lr_scale = LrScale(made.learning_rate_factor) if paper else _new_lr_scale(settings)
        return Kept(StageState(0, made.state), lr_scale)

    async def _snapshot(self, holder: int) -> StageState:
        """From all who name the same one, our neighbours first."""
        named = lambda holds: (holds.shadow, holds.root, holds.hash)
        same = [
            stage
            for stage, holds in self.holds.items()
            if named(holds) == named(self.holds[holder])
        ]
        near, step = (
            ring(self.peer.stage.spec.index, self.peer.stage.spec.stages),
            self.holds[holder].shadow,
        )
        assert step is not None
        return await self.peer.fetch.snapshot(
            sorted(same, key=lambda stage: (stage not in near, stage)),
            step,
            self.holds[holder].root,
        )

    async def _last_adapter(self, base: Tensors) -> StageState | None:
        """The newest adapter of this stage of this crew up to `step`, however old: as a source of
        its own it could not be had, and is asked for again. None where there is none that fits. Not
        one that was judged: it would not pass on the same base either, and an untrained one may.
        """
        known = [
            (h.shadow, SourceKind.SNAPSHOT, stage)
            for stage, h in self.holds.items()
            if h.shadow is not None
        ]
        journal = self.journal
        here = (
            [(journal.step, SourceKind.JOURNAL, None)]
            if journal is not None and journal.step is not None
            else []
        )
        for age, kind, holder in sorted([*here, *known], key=lambda one: -one[0]):
            if age > self.step or (kind, holder) in self.judged:
                continue
            try:
                if holder is not None:
                    state = await self._snapshot(holder)
                else:
                    assert journal is not None
                    state = (await self.peer.channel.compute(journal.read)).state
            except (PeerError, StateError, OSError):
                continue  # the next newest, or the untrained one
            if {n: t.shape for n, t in state.weights.items()} == {
                n: t.shape for n, t in base.items()
            }:
                return StageState(state.step, state.weights)
        return None


def _pauses() -> Iterator[float]:
    """Between two verdicts with the same weights here: each costs everybody a few micro-batches,
    and who runs them sets a bound."""
    pause = ASK_AGAIN_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, PAUSE_SECONDS)


async def _tie(peer: StatePeer, candidate: Kept, holds: Mapping[int, Holds]) -> None:
    """A tied embedding is one tensor with one optimizer: both are the other end's. Where both ends
    are lost, they are the head's."""
    spec = peer.stage.spec
    if peer.stage.runtime.embedding() is None:
        return
    other = holds.get(spec.stages - 1 if spec.has_embedding else 0)
    if spec.has_embedding and (other is None or not other.loaded):
        return
    theirs = await peer.fetch.tied()
    state = candidate.state
    (name,) = theirs.weights
    merge = lambda mine, new: {**{n: t for n, t in mine.items() if n != name}, **new}
    candidate.state = replace(
        state,
        weights=merge(state.weights, theirs.weights),
        first=merge(state.first, theirs.first),
        second=merge(state.second, theirs.second),
        counts=merge(state.counts, theirs.counts),
    )
    await peer.channel.compute(lambda: load_weights(peer.stage.runtime, candidate.state.weights))
    peer.stage.restored = candidate.state


async def _ask(peer: StatePeer) -> dict[int, Holds]:
    """Once every stage that answers knows whether it has its weights: one that is just being
    assigned is no lost neighbour."""
    until = trio.current_time() + ASK_SECONDS
    while True:
        holds = await peer.fetch.ask()
        if (
            all(h.loaded or h.rung is not None for h in holds.values())
            or trio.current_time() >= until
        ):
            return holds
        await trio.sleep(ASK_AGAIN_SECONDS)


async def _probes(peer: StatePeer, holds: Mapping[int, Holds], step: int) -> list[Probe]:
    """What two have of the tail and its ring neighbours, ourselves among them; else the tail's,
    else the newest: of steps that were taken. By them a stage is judged, so no one's word decides
    which, and nobody else is asked."""
    tail, own = peer.stage.spec.stages - 1, peer.stage.spec.index
    found = {own: list(peer.stage.recorder.probes)}

    async def one(stage: int) -> None:
        with contextlib.suppress(PeerError):
            found[stage] = await peer.fetch.probes(stage)

    async with trio.open_nursery() as nursery:
        for stage in (tail, *ring(tail, peer.stage.spec.stages)):
            if stage in holds and holds[stage].probes is not None:
                nursery.start_soon(one, stage)
    taken = {
        stage: [probe for probe in probes if probe.step < step] for stage, probes in found.items()
    }
    times = Counter(probe for probes in taken.values() for probe in set(probes))
    if twice := sorted(
        (probe for probe, count in times.items() if count > 1),
        key=lambda probe: (probe.step, probe.micro_batch),
    ):
        return twice
    return taken.get(tail) or max(
        taken.values(), key=lambda probes: max((probe.step for probe in probes), default=-1)
    )


async def _heal(peer: StatePeer, probes: list[Probe], settings: RecoverySettings) -> Healing | None:
    """None where the neighbours kept nothing to heal it by."""
    edges = []
    for stage in (peer.stage.spec.index - 1, peer.stage.spec.index + 1):
        if 0 <= stage < peer.stage.spec.stages:
            try:
                edges += await peer.fetch.edges(stage)
            except PeerError:
                return None
    at = peer.stage
    pairs = await peer.channel.compute(
        lambda: pairs_of(at.runtime, edges, probes, at.limits, at.codec, settings.probes)
    )
    if not pairs:
        return None
    peer.stage.phase = "empty"  # weights that change between two questions are nobody's
    try:
        return await peer.channel.compute(
            lambda: heal(peer.stage.runtime, pairs, settings.healing_steps, settings.healing_rate)
        )
    finally:
        peer.stage.phase = "candidate"


def _without_moments(state: StageState, weights: Tensors, peer: StatePeer) -> StageState:
    """Other weights, a new optimizer; but for a tied embedding, which was not touched."""
    shared = peer.stage.runtime.embedding()
    names = {name for name, tensor in trained(peer.stage.runtime).items() if tensor is shared}
    keep = lambda tensors: {name: t for name, t in tensors.items() if name in names}
    return replace(
        state,
        weights=weights,
        first=keep(state.first),
        second=keep(state.second),
        counts=keep(state.counts),
    )


def _new_lr_scale(settings: RecoverySettings) -> LrScale:
    return LrScale(warmup=settings.warmup_steps)


def _refusal(verdict: Verdict | None, healings: int) -> str:
    healed = f" after {healings} healings" if healings else ""
    if verdict is None:
        return "there is no probe to judge it by"
    if not verdict.finite:
        return f"its numbers are not finite{healed}"
    return f"KL {verdict.kl:.3g}, NLL +{verdict.nll_rise:.3g} nats per token{healed}"


def base_stage(directory: Path, spec: StageSpec, expected: bytes) -> Base:
    """R3 for whole weights: from a model's directory, once its fingerprint is `expected` (32 bytes,
    `policy.fingerprint`)."""

    def read() -> Tensors:
        found = fingerprint(directory)
        if found != expected:
            raise StateError(
                f"{directory} holds {found.hex()[:16]}…, not the model that training began with,"
                f" {expected.hex()[:16]}…"
            )
        return {name: host_copy(p) for name, p in load_stage(directory, spec).named_parameters()}

    return read


def base_adapter(runtime: StageRuntime) -> Base:
    """R3 under LoRA: the untrained adapter that is in `runtime` now, where no later one is known.
    Make it before anything is restored."""
    untrained = {name: host_copy(tensor) for name, tensor in trained(runtime).items()}
    return lambda: untrained
