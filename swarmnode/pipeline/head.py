"""The head of a crew: to whoever trains, a policy that generates, scores and learns; to the crew, who says what is next.

    generate   at least S waves in flight, a token per wave and round; rollouts are text and ids, and survive any stage
    score      log-probabilities without gradient
    update     micro-batches through 1F1B, then propose, acknowledge, commit

A crew of one is the same code with a stream to nobody.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarmnode.config import TrainingConfig
from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.pipeline import frames
from swarmnode.pipeline.blame import Blame
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
from swarmnode.pipeline.work import MicroBatch, read_scores
from swarmnode.pipeline.worker import StageWorker
from swarmnode.policy.micro import micro_batches
from swarmnode.rl.corrections import effective_share, rate_factor
from swarmnode.rl.objectives import MAX_GRAD_NORM
from swarmnode.wire import strict

SCORES: Final = 2
"""Micro-batches that are scored at a time, for each stage: one that is computed, one that is on its way."""

TOO_MUCH: Final = "frame"
"""The reason of a stage whose device cannot do a piece of work, as when memory runs out."""


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
    """What has come of the micro-batches of the present `score` or `update`; each call has one of its own."""

    tokens: dict[int, int] = field(default_factory=dict)
    """Micro-batch → completion tokens."""
    finished: set[int] = field(default_factory=set)
    learnt: dict[int, frames.Learnt] = field(default_factory=dict)
    scores: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)
    failed: RefusalReason | None = None
    divisible: bool = False
    """Whether there can be smaller ones, in which a device with little memory may do."""


class CannotScore(PeerError):
    """Raised when a stage refuses to score. `too_much`: with fewer tokens at a time it may be able to."""

    def __init__(self, reason: RefusalReason) -> None:
        super().__init__(f"the crew cannot score: {reason}")
        self.too_much = reason == TOO_MUCH


class Head(StageWorker):
    """Stage 0. One of `generate`, `score` and `update` at a time. `seconds` bounds the time in which nothing arrives."""

    def __init__(
        self, runtime: StageRuntime, links: Links, fence: Fence, settings: CrewSettings, compute: Compute = in_thread,
        optimizer: StageOptimizer | None = None, *, seconds: float = 600.0,
    ) -> None:  # fmt: skip
        super().__init__(runtime, links, fence, settings, compute, optimizer)
        self.coordinator = Coordinator(self.stages)
        self.waiting = Waiting(seconds)
        self.generation = Generation(self.context, numbers := Numbers())
        self.blamed: tuple[int, str] | None = None
        """(stage, why): no step comes of this crew because of it."""
        self._blame = Blame(self.stages)
        self._numbers = numbers
        self._batch = BatchState()
        self._learning_rate = 0.0
        """What the present step, or the last one, is taken with."""

    @property
    def usable(self) -> bool:
        """Whether no stage of this crew is known to be gone."""
        return self.waiting.gone is None

    async def generate(
        self, prompts: Sequence[list[int]], num_generations: int, max_tokens: int, temperature: float, top_p: float, ends: frozenset[int],
        rng: random.Random,
    ) -> list[Wave]:  # fmt: skip
        """Completions for each prompt, in waves that in their order hold the prompts in theirs. Temperature 0 is greedy. A wave of fewer
        than `num_generations` completions has some of its prompt's, and the others are in those beside it.

        Raises PeerError when a stage is gone, PeerTimeout, and ValueError for a completion that no wave can hold.
        """
        name = self._numbers.session
        pieces = cut(prompts, num_generations, max_tokens, self.stages, self.links.limits.tokens)
        waves = [
            Wave(name(), [prompts[i] for i in piece], each, max_tokens, temperature, top_p, rng.getrandbits(63), ends)
            for piece, each in pieces
        ]
        later, open_now = list(reversed(waves)), self.generation.open
        try:
            with self.waiting.deadline():
                while later or open_now:
                    while later and len(open_now) < max(self.stages, 1):
                        self.generation.begin(later.pop())
                    before = len(open_now)
                    await self.waiting.until(lambda before=before: len(open_now) < before)  # type: ignore[misc]
        finally:
            for session in list(open_now):
                self.generation.end(session)
        return waves

    async def score(
        self, rows: Sequence[tuple[list[int], list[int]]], temperature: float, tokens: int | None = None
    ) -> list[tuple[list[float], list[float]]]:
        """(log-probabilities, entropies) at the completion tokens of each (prompt, completion). tokens: of a micro-batch, padded; as many
        as the crew allows. Raises PeerError, CannotScore, PeerTimeout."""
        lengths, most = [len(p) + len(c) for p, c in rows], self.links.limits.tokens
        pieces = {self._numbers.next(): piece for piece in micro_batches(lengths, most if tokens is None else min(tokens, most))}
        tokens_of = {number: sum(len(rows[i][1]) for i in piece) for number, piece in pieces.items()}
        batch = self._batch = BatchState(tokens_of, divisible=_half(pieces.values(), lengths) is not None)
        with self.waiting.deadline():
            for begun, (number, piece) in enumerate(pieces.items()):
                room = begun - SCORES * self.stages
                await self.waiting.until(lambda room=room: len(batch.scores) > room or batch.failed is not None)  # type: ignore[misc]
                if batch.failed is not None:
                    break
                self._submit(number, "score", describe([rows[i] for i in piece], temperature))
            await self.waiting.until(lambda: batch.scores.keys() >= pieces.keys() or batch.failed is not None)
        if batch.failed is not None:
            raise CannotScore(batch.failed)
        out: list[tuple[list[float], list[float]]] = [([], [])] * len(rows)
        for number, piece in pieces.items():
            (logprobs, entropies), at = batch.scores[number], 0
            for i in piece:
                size = len(rows[i][1])
                out[i] = (logprobs[at : at + size], entropies[at : at + size])
                at += size
        return out

    async def update(self, rows: Sequence[LearnRow], cfg: TrainingConfig, normalizer: float, learning_rate: float) -> StepResult:
        """One optimizer step of all stages, or of none. `normalizer` is the whole batch's, rows that are not here included.

        Raises PeerError when a stage is gone (what was accumulated is dropped then too, unless the step was decided), PeerTimeout when
        the step was decided and a stage does not say that it took it, ValueError for too many micro-batches.
        """
        lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
        tokens = min(cfg.per_device_train_tokens, self.links.limits.tokens)
        groups = [row.group for row in rows]
        cuts = micro_batches(lengths, tokens, groups)
        pieces = {self._numbers.next_of_turn(): [rows[i] for i in piece] for piece in cuts}
        if len(pieces) > frames.MICRO_BATCHES:
            raise ValueError(f"{len(pieces)} micro-batches in one step, at most {frames.MICRO_BATCHES}")
        tokens_of = {number: sum(len(row.completion_ids) for row in piece) for number, piece in pieces.items()}
        halves = _half(cuts, lengths, groups)
        batch = self._batch = BatchState(tokens_of, divisible=halves is not None and len(halves) <= frames.MICRO_BATCHES)
        attempt = self.coordinator.begin()
        try:
            with self.waiting.deadline():
                for number, piece in pieces.items():
                    work = [(row.prompt_ids, row.completion_ids) for row in piece]
                    self._submit(number, "learn", describe(work, cfg.temperature, describe_loss(piece, cfg, normalizer)))
                through = lambda: batch.finished >= pieces.keys() and batch.learnt.keys() >= pieces.keys()
                await self.waiting.until(lambda: through() or batch.failed is not None)
                sums = [batch.learnt[number] for number in pieces if number in batch.learnt]
                count = sum(s.tokens for s in sums)
                effective = effective_share(sum(s.weights for s in sums), sum(s.squares for s in sums), count)
                factor = rate_factor(cfg.options, effective)
                self._learning_rate = learning_rate * factor
                if batch.failed is not None:
                    self._send_decision(self.coordinator.give_up(batch.failed))
                else:
                    for stage in range(self.stages):
                        self.links.send(stage, frames.Propose(self.place, attempt, tuple(sorted(pieces))))
                await self.waiting.until(lambda: self.coordinator.over)
        except PeerError as error:
            if isinstance(error, PeerTimeout):
                self._judge(self._blame.silent(self.coordinator.silent))
            self._send_decision(self.coordinator.give_up("timeout" if isinstance(error, PeerTimeout) else "gone"))
            if not isinstance(error, PeerTimeout):
                raise
        decided = self.coordinator.decision
        if decided is not None and decided.refused is None and self.coordinator.unfinished:
            raise PeerTimeout("a stage has not said that it took the step which was decided")
        if decided is None or decided.refused is not None:
            return StepResult(refused=decided.refused if decided else "timeout", divisible=batch.divisible)
        self._judge(self._blame.taken(self.coordinator.norms))
        count = max(count, 1.0)
        return StepResult(
            loss=sum(s.loss for s in sums),
            clip_fraction=sum(s.clipped for s in sums) / count,
            entropy=sum(s.entropy for s in sums) / count,
            grad_norm=math.sqrt(decided.squared_norm),
            effective=effective,
            rate_factor=factor,
        )

    async def handle(self, sender: int, frame: Frame, body: bytes) -> None:
        tail, batch = self.stages - 1, self._batch
        if self._is_progress(sender, frame):
            self.waiting.extend()
        match frame:
            case frames.Tokens() if sender == tail:
                self.generation.take(frame, body)
            case frames.Learnt() | frames.Scores() | frames.Failed() if frame.micro_batch not in batch.tokens:
                return  # of an attempt that is over
            case frames.Learnt() if sender == tail:
                batch.learnt[frame.micro_batch] = frame
            case frames.Scores() if sender == tail:
                if frame.rows != batch.tokens[frame.micro_batch]:
                    raise BadMessage("shape", "not a score for each token")
                batch.scores[frame.micro_batch] = read_scores(body, frame.rows)
            case frames.Lost():
                if (why := self.generation.lost(frame.session, frame.reason)) is not None:
                    self.waiting.gone = why
            case frames.Failed():
                batch.failed = frame.reason
                if frame.reason != TOO_MUCH or not batch.divisible:
                    self._judge(self._blame.refused(sender, frame.reason))
            case frames.Acknowledge():
                step_is_ours = frame.place.step == self.participant.step
                if step_is_ours and frame.refused is not None and frame.attempt == self.coordinator.attempt:
                    self._judge(self._blame.refused(sender, frame.refused))
                decided = self.coordinator.acknowledged(sender, frame.attempt, frame.refused, frame.squared_norm) if step_is_ours else None
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
        self.waiting.gone = f"stage {stage} is gone: {reason}"
        self.waiting.wake()

    def _is_progress(self, sender: int, frame: Frame) -> bool:
        """Whether `frame` is more than a stage's question, asked once more, what was decided: that comes as long as nothing is."""
        match frame:
            case frames.Acknowledge():
                return sender in self.coordinator.silent
            case frames.Done():
                return sender in self.coordinator.unfinished
            case _:
                return True

    def _judge(self, verdict: tuple[int, str] | None) -> None:
        self.blamed = self.blamed or verdict

    def _submit(self, number: int, purpose: frames.Purpose, work: MicroBatch) -> None:
        about = strict.encode(work)
        self.links.send(0, frames.Forward(self.place, number, purpose, self.context.settings.codec, work.rows, len(about)), about)

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
        self.links.send(stage, frames.Commit(self.place, decided.attempt, norm, clip, float(self._learning_rate)))


def _half(batches: Iterable[Sequence[int]], lengths: Sequence[int], groups: Sequence[int] | None = None) -> list[list[int]] | None:
    """The micro-batches where the largest has half the tokens; None when it is one row, which cannot be halved."""
    largest = max((len(rows) * max(lengths[row] for row in rows) for rows in batches), default=0)
    return micro_batches(lengths, largest // 2, groups) if largest > max(lengths, default=0) else None
