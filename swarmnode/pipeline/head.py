"""The head of a crew: to whoever trains, a policy that generates, scores and learns; to the crew,
who says what is next.

    generate   at least S waves in flight, a token per wave and round; rollouts are text and ids,
    and survive any stage
    score      log-probabilities without gradient
    update     propose, micro-batches through 1F1B, acknowledge, commit

A crew of one is the same code with a stream to nobody.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from swarmnode.config import TrainingConfig
from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.pipeline import frames
from swarmnode.pipeline.blame import Blame, Verdict
from swarmnode.pipeline.commit import Coordinator, Decided
from swarmnode.pipeline.compute import Compute, in_thread
from swarmnode.pipeline.context import CrewSettings
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import Frame, RefusalReason
from swarmnode.pipeline.generation import Generation, Numbers
from swarmnode.pipeline.learning import LearnRow, describe, describe_loss
from swarmnode.pipeline.links import Links
from swarmnode.pipeline.optimizer import StageOptimizer
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.pipeline.waiting import Waiting
from swarmnode.pipeline.waves import Wave, cut
from swarmnode.pipeline.whereabouts import Search, name_of, parties
from swarmnode.pipeline.work import MicroBatch, read_scores
from swarmnode.pipeline.worker import StageWorker
from swarmnode.policy.micro import micro_batches
from swarmnode.rl.corrections import effective_share, rate_factor
from swarmnode.rl.objectives import MAX_GRAD_NORM
from swarmnode.wire import strict

SCORES: Final = 2
"""Micro-batches that are scored at a time, for each stage: one that is computed, one that is on its
way."""

TOO_MUCH: Final = "device"
"""The reason of a stage whose device cannot do a piece of work, as when memory runs out."""
ASKED: Final = 0.1
"""Share of the time in which work has to arrive, between two questions where the oldest piece of it
is."""


@dataclass(frozen=True)
class StepResult:
    """Means per trained token; None where no step was taken."""

    refused: RefusalReason | None = None
    """Why the step was dropped by all; None where it was taken by all."""
    divisible: bool = False
    """Where it was dropped: whether it can be taken in smaller micro-batches."""
    loss: float | None = None
    clip_fraction: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    effective: float | None = None
    """Effective sample size ÷ sample size of the tokens' weights, in (0, 1]."""
    rate_factor: float = 1.0
    """See `rl.corrections`."""


@dataclass
class BatchState:
    """What has come of the micro-batches of the present `score` or `update`; each call has one of
    its own."""

    tokens: dict[int, int] = field(default_factory=dict)
    """Micro-batch → completion tokens."""
    purpose: frames.Purpose = "score"
    finished: set[int] = field(default_factory=set)
    learnt: dict[int, frames.Learnt] = field(default_factory=dict)
    scores: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)
    failed: RefusalReason | None = None
    divisible: bool = False
    """Whether there can be smaller ones, in which a device with little memory may do."""

    rate: Callable[[float | None], float] = lambda effective: 0.0
    """The learning rate of a step of which so large a share is effective."""

    def sums(self) -> tuple[float, float | None]:
        """(trained tokens, their effective share): of what has been learnt."""
        count = sum(s.tokens for s in self.learnt.values())
        return count, effective_share(
            sum(s.weights for s in self.learnt.values()),
            sum(s.squares for s in self.learnt.values()),
            count,
        )

    def through(self) -> bool:
        return self.oldest() is None

    def oldest(self) -> int | None:
        """The first micro-batch of which not everything has come back."""
        return next((number for number in self.tokens if not self._is_through(number)), None)

    def _is_through(self, number: int) -> bool:
        return (
            number in self.scores
            if self.purpose == "score"
            else number in self.finished and number in self.learnt
        )


class CannotScore(PeerError):
    """Raised when a stage refuses to score. `too_much`: its device cannot; `divisible`: with fewer
    tokens at a time it may be able to."""

    def __init__(self, reason: RefusalReason, divisible: bool) -> None:
        super().__init__(f"the crew cannot score: {reason}")
        self.too_much = reason == TOO_MUCH
        self.divisible = self.too_much and divisible


class Head(StageWorker):
    """Stage 0. One of `generate`, `score` and `update` at a time. `seconds` bounds the time in
    which nothing arrives."""

    def __init__(
        self,
        runtime: StageRuntime,
        links: Links,
        fence: Fence,
        settings: CrewSettings,
        compute: Compute = in_thread,
        optimizer: StageOptimizer | None = None,
        *,
        seconds: float = 600.0,
    ) -> None:
        super().__init__(runtime, links, fence, settings, compute, optimizer)
        self.coordinator = Coordinator(self.stages)
        self.waiting = Waiting(seconds)
        self.generation = Generation(self.context, numbers := Numbers())
        self._blame = Blame(self.stages, time.monotonic)
        self.search = Search()
        self._numbers = numbers
        self._batch = BatchState()
        self._learning_rate = 0.0
        """What the present step, or the last one, is taken with."""

    @property
    def blamed(self) -> Verdict | None:
        """Because of whom no step comes of this crew."""
        return self._blame.verdict

    @property
    def usable(self) -> bool:
        """Whether something may come of this crew: no stage is known to be gone, or to keep it from
        working."""
        return self.waiting.gone is None and self.blamed is None

    async def generate(
        self,
        prompts: Sequence[list[int]],
        num_generations: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        ends: frozenset[int],
        rng: random.Random,
    ) -> list[Wave]:
        """Completions for each prompt, in waves that in their order hold the prompts in theirs.
        Temperature 0 is greedy. A wave of fewer than `num_generations` completions has some of its
        prompt's, and the others are in those beside it.

        Raises PeerError when a stage is gone, PeerTimeout, and ValueError for a completion that no
        wave can hold.
        """
        name = self._numbers.session
        self._batch = BatchState()
        pieces = cut(prompts, num_generations, max_tokens, self.stages, self.links.limits.tokens)
        waves = [
            Wave(
                name(),
                [prompts[i] for i in piece],
                each,
                max_tokens,
                temperature,
                top_p,
                rng.getrandbits(63),
                ends,
            )
            for piece, each in pieces
        ]
        later, open_now = list(reversed(waves)), self.generation.open
        try:
            with self.waiting.deadline(believing=True):
                while later or open_now:
                    while later and len(open_now) < max(self.stages, 1):
                        self.generation.begin(later.pop())
                    before = len(open_now)
                    await self.waiting.until(lambda before=before: len(open_now) < before)  # type: ignore[misc]
        except PeerTimeout:
            self._blame_late()
            raise
        finally:
            for session in list(open_now):
                self.generation.end(session)
        return waves

    async def score(
        self,
        rows: Sequence[tuple[list[int], list[int]]],
        temperature: float,
        tokens: int | None = None,
    ) -> list[tuple[list[float], list[float]]]:
        """(log-probabilities, entropies) at the completion tokens of each (prompt, completion).
        tokens: of a micro-batch, padded; as many as the crew allows. Raises PeerError, CannotScore,
        PeerTimeout."""
        lengths, most = [len(p) + len(c) for p, c in rows], self.links.limits.tokens
        pieces = {
            self._numbers.next(): piece
            for piece in micro_batches(lengths, most if tokens is None else min(tokens, most))
        }
        tokens_of = {
            number: sum(len(rows[i][1]) for i in piece) for number, piece in pieces.items()
        }
        batch = self._batch = BatchState(
            tokens_of, divisible=_half(pieces.values(), lengths) is not None
        )
        try:
            with self.waiting.deadline(believing=not batch.divisible):
                for begun, (number, piece) in enumerate(pieces.items()):
                    room = begun - SCORES * self.stages
                    await self.waiting.until(
                        lambda room=room: (  # type: ignore[misc]
                            len(batch.scores) > room or batch.failed is not None
                        )
                    )
                    if batch.failed is not None:
                        break
                    work = describe([rows[i] for i in piece], temperature)
                    self._submit(number, "score", work.rows, strict.encode(work))
                await self.waiting.until(lambda: batch.through() or batch.failed is not None)
        except PeerTimeout:
            self._blame_late()
            raise
        if batch.failed is not None:
            raise CannotScore(batch.failed, batch.divisible)
        out: list[tuple[list[float], list[float]]] = [([], [])] * len(rows)
        for number, piece in pieces.items():
            (logprobs, entropies), at = batch.scores[number], 0
            for i in piece:
                size = len(rows[i][1])
                out[i] = (logprobs[at : at + size], entropies[at : at + size])
                at += size
        return out

    async def update(
        self, rows: Sequence[LearnRow], cfg: TrainingConfig, normalizer: float, learning_rate: float
    ) -> StepResult:
        """One optimizer step of all stages, or of none. `normalizer` is the whole batch's, rows
        that are not here included.

        Raises PeerError when a stage is gone (what was accumulated is dropped then too, unless the
        step was decided), PeerTimeout when the step was decided and a stage does not say that it
        took it, ValueError for too many micro-batches.
        """
        lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
        tokens = min(cfg.per_device_train_tokens, self.links.limits.tokens)
        groups = [row.group for row in rows]
        cuts = micro_batches(lengths, tokens, groups)
        pieces = {self._numbers.next_of_turn(): [rows[i] for i in piece] for piece in cuts}
        if len(pieces) > frames.MICRO_BATCHES:
            raise ValueError(
                f"{len(pieces)} micro-batches in one step, at most {frames.MICRO_BATCHES}"
            )
        tokens_of = {
            number: sum(len(row.completion_ids) for row in piece)
            for number, piece in pieces.items()
        }
        halves = _half(cuts, lengths, groups)
        batch = self._batch = BatchState(
            tokens_of, "learn", divisible=halves is not None and len(halves) <= frames.MICRO_BATCHES
        )
        batch.rate = lambda effective: learning_rate * rate_factor(cfg.options, effective)
        attempt = self.coordinator.begin()
        try:
            with self.waiting.deadline(believing=not batch.divisible):
                self._begin(
                    attempt,
                    {
                        number: _described(piece, cfg, normalizer)
                        for number, piece in pieces.items()
                    },
                )
                await self.waiting.until(
                    lambda: self.coordinator.over or batch.through() or batch.failed is not None
                )
                if batch.failed is not None:
                    self._send_decision(self.coordinator.give_up(batch.failed))
                await self.waiting.until(lambda: self.coordinator.over)
        except PeerError as error:
            if isinstance(error, PeerTimeout):
                self._blame_late()
            self._send_decision(
                self.coordinator.give_up("timeout" if isinstance(error, PeerTimeout) else "gone")
            )
            if not isinstance(error, PeerTimeout):
                raise
        decided = self.coordinator.decision
        # judged above
        if decided is not None and decided.refused is None and self.coordinator.unfinished:
            raise PeerTimeout("a stage has not said that it took the step which was decided")
        if decided is None or decided.refused is not None:
            return StepResult(
                refused=decided.refused if decided else "timeout", divisible=batch.divisible
            )
        self._blame.taken(self.coordinator.norms)
        self.search.stepped(trio.current_time())
        (count, effective), learnt = batch.sums(), batch.learnt.values()
        return StepResult(
            loss=sum(s.loss for s in learnt),
            clip_fraction=sum(s.clipped for s in learnt) / max(count, 1.0),
            entropy=sum(s.entropy for s in learnt) / max(count, 1.0),
            grad_norm=math.sqrt(decided.squared_norm),
            effective=effective,
            rate_factor=rate_factor(cfg.options, effective),
        )

    def _begin(self, attempt: int, work: dict[int, MicroBatch]) -> None:
        """What the step is made of, to all stages; then the work itself, which goes from one to the
        next."""
        described = {number: strict.encode(each) for number, each in work.items()}
        numbers, hashes = (
            tuple(sorted(described)),
            [frames.description_hash(described[number]) for number in sorted(described)],
        )
        for stage in range(self.stages):
            self.links.send(stage, frames.Propose(self.place, attempt, numbers), b"".join(hashes))
        for number, about in described.items():
            self._submit(number, "learn", work[number].rows, about)

    async def handle(self, sender: int, frame: Frame, body: bytes) -> None:
        progress = self._is_progress(sender, frame)
        await self._take(sender, frame, body)
        if progress:
            self.waiting.extend()

    async def _take(self, sender: int, frame: Frame, body: bytes) -> None:
        batch = self._batch
        match frame:
            case frames.Tokens():
                self.generation.take(frame, body)
            case frames.Learnt() | frames.Scores() | frames.Failed() if (
                frame.micro_batch not in batch.tokens
            ):
                return  # of an attempt that is over
            case frames.Learnt():
                batch.learnt[frame.micro_batch] = frame
            case frames.Scores():
                if frame.rows != batch.tokens[frame.micro_batch]:
                    raise BadMessage("shape", "not a score for each token")
                batch.scores[frame.micro_batch] = read_scores(body, frame.rows)
            case frames.Lost():
                if (why := self.generation.lost(frame.session, frame.reason)) is not None:
                    self.waiting.gone = why
                    self._blame.ended(parties(range(self.stages), sender, frame.source), why)
            case frames.Failed() if batch.failed is not None or (
                batch.purpose == "learn" and self.coordinator.decision is not None
            ):
                return  # one step is spoilt once, in however many pieces it was cut
            case frames.Failed():
                batch.failed = frame.reason
                if frame.reason != TOO_MUCH or not batch.divisible:
                    path = self.micro_batches.path(frame.micro_batch, batch.purpose)
                    self._blame.refused(parties(path, sender, frame.source), frame.reason)
            case frames.Acknowledge():
                step_is_ours = frame.place.step == self.participant.step
                undecided = (
                    frame.attempt == self.coordinator.attempt and self.coordinator.decision is None
                )
                if step_is_ours and frame.refused is not None and undecided:
                    self._blame.refused(self._who_spoilt(sender, frame.refused), frame.refused)
                if undecided and frame.refused is None and self._keeps_the_loss(sender):
                    return
                decided = (
                    self.coordinator.acknowledged(
                        sender, frame.attempt, frame.refused, frame.squared_norm
                    )
                    if step_is_ours
                    else None
                )
                if undecided and decided is not None and decided.refused is None:
                    self._learning_rate = batch.rate(batch.sums()[1])
                self._send_decision(decided)
            case frames.Done():
                if self.coordinator.done(sender, frame.attempt):
                    self._send_commit(0)
            case _:
                await super().handle(sender, frame, body)
        self.waiting.wake()

    def finished(self, micro_batch: int) -> None:
        self._batch.finished.add(micro_batch)
        self.waiting.wake()

    def gone(self, stage: int, reason: str) -> None:
        super().gone(stage, reason)
        # where its next frame begins nobody knows, so that nothing can come of this crew
        if reason in frames.FRAME_REASONS:
            self._blame.ended({stage}, f"what it sent is no frame: {reason}")
        self.waiting.gone = f"stage {stage} is gone: {reason}"
        self.waiting.wake()

    def tick(self) -> None:
        super().tick()
        now = trio.current_time()
        if self.waiting.open:
            self._locate(now)
            if slowest := self.search.slowest(now):  # soon the others give us up for this step
                self._blame.ended(slowest, "has the work for most of the time")

    def _locate(self, now: float) -> None:
        """Ask where the oldest piece of work is that has not come back, not too often."""
        piece, path = self._oldest() or (b"", ())
        if piece and self.search.begins(piece, path, now, ASKED * self.waiting.seconds):
            self.search.idle = self.links.inbox.awaited
            for stage in range(1, self.stages):
                self.links.send(stage, frames.Locate(self.place, piece))
            self._hear(0, self.located(piece))

    def _oldest(self) -> tuple[bytes, tuple[int, ...]] | None:
        number = self._batch.oldest()
        if number is None:
            return self.generation.oldest()
        return name_of(number), self.micro_batches.path(number, self._batch.purpose)

    def _at_once(self, sender: int, frame: Frame) -> bool:
        if not isinstance(frame, frames.Located):
            return super()._at_once(sender, frame)
        if self.context.fence.check(frame.place, sender, None) is None:
            self._hear(sender, frame)
        return True

    def _hear(self, stage: int, said: frames.Located) -> None:
        if self.search.said(stage, said):
            self.waiting.believe()

    def _blame_late(self) -> None:
        """The present call was given up: because of whom?"""
        found, batch, coordinator = self.search, self._batch, self.coordinator
        oldest, tail = self._oldest(), self.stages - 1
        if not self.links.inbox.awaited:
            return  # of us
        found.idle = True
        # everything has come back, and the step was proposed; the ends need each other's part of a
        # tied embedding
        if oldest is None:
            late = coordinator.silent if coordinator.decision is None else coordinator.unfinished
            self._blame.silent(late - {0} or {tail})
        elif batch.oldest() in batch.finished:  # only what it did to the loss has not
            self._blame.silent({tail})
        elif oldest[0] == found.piece:
            whose, slow = found.holders(), found.computes(found.holders())
            self._blame.slow(
                whose, smallest=self.waiting.believing
            ) if slow else self._blame.silent(whose)

    def _is_progress(self, sender: int, frame: Frame) -> bool:
        """Whether `frame`, if it is what it has to be, brings the present call further: what was
        said before is said again as long as nothing comes, and what belongs to no call at all would
        keep us waiting for ever."""
        batch, coordinator = self._batch, self.coordinator
        match frame:
            case frames.Tokens() | frames.Lost():
                return frame.session in self.generation.open
            case frames.Failed():
                return frame.micro_batch in batch.tokens
            case frames.Learnt():
                return frame.micro_batch in batch.tokens and frame.micro_batch not in batch.learnt
            case frames.Scores():
                return frame.micro_batch in batch.tokens and frame.micro_batch not in batch.scores
            case frames.Acknowledge():
                return (
                    frame.attempt == coordinator.attempt
                    and sender in coordinator.silent
                    and not self._keeps_the_loss(sender)
                )
            case frames.Done():
                return frame.attempt == coordinator.attempt and sender in coordinator.unfinished
            case frames.Embedding():
                return frame.attempt == coordinator.attempt
            case _:
                return isinstance(frame, frames.Backward)

    def _who_spoilt(self, stage: int, refused: RefusalReason) -> set[int]:
        """Who may have made `stage` refuse what is proposed: gradients that are not finite may be
        so by what came from the next stage, and the only frame that the head could not use is the
        tail's part of a tied embedding."""
        tail = self.stages - 1
        if refused == "not_finite":
            return {stage, min(stage + 1, tail)} - {0} or {stage}
        return {tail} if stage == 0 and refused == "frame" else {stage}

    def _keeps_the_loss(self, stage: int) -> bool:
        """Whether it is the tail, and has not said what the micro-batches did to the loss: it says
        so before it acknowledges them."""
        return stage == self.stages - 1 and len(self._batch.learnt) < len(self._batch.tokens)

    def _submit(self, number: int, purpose: frames.Purpose, rows: int, about: bytes) -> None:
        self.links.send(
            0,
            frames.Forward(
                self.place, number, purpose, self.context.settings.codec, rows, len(about)
            ),
            about,
        )

    def _send_decision(self, decided: Decided | None) -> None:
        if decided is None:
            return
        for stage in decided.stages:
            if decided.refused is not None:
                self.links.send(stage, frames.Abort(self.place, decided.attempt, decided.refused))
            elif stage > 0 or self.stages == 1:
                self._send_commit(stage)

    def _send_commit(self, stage: int) -> None:
        decided = self.coordinator.decision
        assert decided is not None
        norm = math.sqrt(decided.squared_norm)
        clip = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self.links.send(
            stage,
            frames.Commit(self.place, decided.attempt, norm, clip, float(self._learning_rate)),
        )


def _described(piece: Sequence[LearnRow], cfg: TrainingConfig, normalizer: float) -> MicroBatch:
    return describe(
        [(row.prompt_ids, row.completion_ids) for row in piece],
        cfg.temperature,
        describe_loss(piece, cfg, normalizer),
    )


def _half(
    batches: Iterable[Sequence[int]], lengths: Sequence[int], groups: Sequence[int] | None = None
) -> list[list[int]] | None:
    """The micro-batches where the largest has half the tokens; None when it is one row, which
    cannot be halved."""
    largest = max((len(rows) * max(lengths[row] for row in rows) for rows in batches), default=0)
    return (
        micro_batches(lengths, largest // 2, groups) if largest > max(lengths, default=0) else None
    )
