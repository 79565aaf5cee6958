"""The head of a crew: to whoever trains, a policy that generates, scores and learns; to the crew, who says what is next.

    generate   at least S waves in flight, a token per wave and round; rollouts are text and ids, and survive any stage
    score      log-probabilities without gradient
    update     micro-batches through 1F1B, then propose, acknowledge, commit

A crew of one is the same code with a stream to nobody.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import trio

from swarmnode.config import TrainingConfig
from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.pipeline import frames
from swarmnode.pipeline.blame import Blame
from swarmnode.pipeline.commit import Coordinator, CoordinatorStatistics, Decided
from swarmnode.pipeline.compute import Compute, in_thread
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import Frame, RefusalReason
from swarmnode.pipeline.learning import LearnRow, describe, describe_loss
from swarmnode.pipeline.links import Links
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.pipeline.waves import Wave, cut
from swarmnode.pipeline.work import MicroBatch, read_scores, read_tokens
from swarmnode.pipeline.worker import CrewSettings, StageWorker
from swarmnode.policy.micro import micro_batches
from swarmnode.rl.objectives import MAX_GRAD_NORM
from swarmnode.wire import strict
from swarmnode.wire.tensors import pack_ids

BEGIN_AGAIN: Final = 4
"""Times that one wave is begun again before its generation fails."""
SCORES: Final = 2
"""Micro-batches that are scored at a time, for each stage: one that is computed, one that is on its way."""


@dataclass(frozen=True)
class StepResult:
    """Means per trained token; None where no step was taken."""

    refused: RefusalReason | None = None
    """Why the step was dropped by all; None where it was taken by all."""
    loss: float | None = None
    clip_fraction: float | None = None
    kl: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None


@dataclass(frozen=True)
class HeadStatistics:
    coordinator: CoordinatorStatistics
    waves: int
    """In flight."""
    begun_again: int


class Head(StageWorker):
    """Stage 0. One of `generate`, `score` and `update` at a time. `seconds` bounds the time in which nothing arrives."""

    def __init__(
        self, runtime: StageRuntime, links: Links, fence: Fence, settings: CrewSettings, compute: Compute = in_thread, *,
        seconds: float = 600.0,
    ) -> None:  # fmt: skip
        super().__init__(runtime, links, fence, settings, compute)
        self.coordinator = Coordinator(self.stages)
        self.seconds = seconds
        self._wake = trio.Event()
        self._next_id = self._turn = 0
        self._current: dict[int, int] = {}  # what is under way: micro-batch → completion tokens
        self._finished: set[int] = set()
        self._learnt: dict[int, frames.Learnt] = {}
        self._scores: dict[int, tuple[list[float], list[float]]] = {}
        self._open: dict[bytes, Wave] = {}
        self._begun_again = 0
        self._failed: RefusalReason | None = None
        self._gone: str | None = None
        self._decided: Decided | None = None
        self._learning_rate = 0.0
        self._blame = Blame(self.stages)
        self.blamed: tuple[int, str] | None = None
        """(stage, why): no step comes of this crew because of it."""
        self._patience: trio.CancelScope | None = None
        """What bounds the present call; anything that arrives moves its deadline."""

    def head_statistics(self) -> HeadStatistics:
        return HeadStatistics(self.coordinator.statistics(), len(self._open), self._begun_again)

    @property
    def usable(self) -> bool:
        """Whether no stage of this crew is known to be gone."""
        return self._gone is None

    async def generate(
        self, prompts: Sequence[list[int]], num_generations: int, max_tokens: int, temperature: float, top_p: float, ends: frozenset[int],
        rng: random.Random,
    ) -> list[Wave]:  # fmt: skip
        """Completions for each prompt, in waves that in their order hold the prompts in theirs. Temperature 0 is greedy.

        Raises PeerError when a stage is gone, PeerTimeout, and ValueError for a prompt that no wave can hold.
        """
        pieces = cut(prompts, num_generations, max_tokens, self.stages, self.links.limits.tokens)
        waves = [
            Wave(self._session(), [prompts[i] for i in piece], num_generations, max_tokens, temperature, top_p, rng.getrandbits(63), ends)
            for piece in pieces
        ]
        waiting = list(reversed(waves))
        try:
            with self._deadline():
                while waiting or self._open:
                    while waiting and len(self._open) < max(self.stages, 1):
                        self._begin(waiting.pop())
                    before = len(self._open)
                    await self._until(lambda before=before: len(self._open) < before)  # type: ignore[misc]
        finally:
            for session in list(self._open):
                self._end(session)
        return waves

    async def score(self, rows: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[tuple[list[float], list[float]]]:
        """(log-probabilities, entropies) at the completion tokens of each (prompt, completion). Raises PeerError, PeerTimeout."""
        lengths = [len(p) + len(c) for p, c in rows]
        pieces = {self._id(): piece for piece in micro_batches(lengths, self.links.limits.tokens)}
        self._scores.clear()
        self._current = {number: sum(len(rows[i][1]) for i in piece) for number, piece in pieces.items()}
        self._failed = None
        with self._deadline():
            for begun, (number, piece) in enumerate(pieces.items()):
                room = begun - SCORES * self.stages
                await self._until(lambda room=room: len(self._scores) > room or self._failed is not None)  # type: ignore[misc]
                if self._failed is not None:
                    break
                self._submit(number, "score", describe([rows[i] for i in piece], temperature))
            await self._until(lambda: self._scores.keys() >= pieces.keys() or self._failed is not None)
        if self._failed is not None:
            raise PeerError(f"the crew cannot score: {self._failed}")
        out: list[tuple[list[float], list[float]]] = [([], [])] * len(rows)
        for number, piece in pieces.items():
            (logprobs, entropies), at = self._scores[number], 0
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
        pieces = {self._learn_id(): [rows[i] for i in piece] for piece in micro_batches(lengths, tokens, [row.group for row in rows])}
        if len(pieces) > frames.MICRO_BATCHES:
            raise ValueError(f"{len(pieces)} micro-batches in one step, at most {frames.MICRO_BATCHES}")
        self._finished.clear()
        self._learnt.clear()
        self._failed = self._decided = None
        self._current = {number: sum(len(row.completion_ids) for row in piece) for number, piece in pieces.items()}
        self._learning_rate = learning_rate
        attempt = self.coordinator.begin(trio.current_time() + self.seconds)
        try:
            with self._deadline():
                for number, piece in pieces.items():
                    work = [(row.prompt_ids, row.completion_ids) for row in piece]
                    self._submit(number, "learn", describe(work, cfg.temperature, describe_loss(piece, cfg, normalizer)))
                through = lambda: self._finished >= pieces.keys() and self._learnt.keys() >= pieces.keys()
                await self._until(lambda: through() or self._failed is not None)
                if self._failed is not None:
                    self._send_decision(self.coordinator.give_up(self._failed))
                else:
                    for stage in range(self.stages):
                        self.links.send(stage, frames.Propose(self.place, attempt, tuple(sorted(pieces))))
                await self._until(lambda: self._decided is not None and (self._decided.refused is not None or self.coordinator.resolved))
        except PeerError as error:
            if isinstance(error, PeerTimeout):
                self._judge(self._blame.silent(self.coordinator.silent))
            self._send_decision(self.coordinator.give_up("timeout" if isinstance(error, PeerTimeout) else "gone"))
            if not isinstance(error, PeerTimeout):
                raise
        decided = self._decided
        if decided is not None and decided.refused is None and not self.coordinator.resolved:
            raise PeerTimeout("a stage has not said that it took the step which was decided")
        if decided is None or decided.refused is not None:
            return StepResult(refused=decided.refused if decided else "timeout")
        self._judge(self._blame.taken(self.coordinator.norms))
        sums = [self._learnt[number] for number in pieces]
        count = max(sum(s.tokens for s in sums), 1.0)
        return StepResult(
            loss=sum(s.loss for s in sums),
            clip_fraction=sum(s.clipped for s in sums) / count,
            kl=sum(s.kl for s in sums) / count if cfg.beta > 0 else None,
            entropy=sum(s.entropy for s in sums) / count,
            grad_norm=math.sqrt(decided.squared_norm),
        )

    async def handle(self, sender: int, frame: Frame, body: bytes) -> None:
        tail = self.stages - 1
        if self._is_progress(sender, frame):
            self._extend()
        match frame:
            case frames.Tokens() if sender == tail:
                self._tokens(frame, body)
            case frames.Learnt() | frames.Scores() | frames.Failed() if frame.micro_batch not in self._current:
                return  # of an attempt that is over
            case frames.Learnt() if sender == tail:
                self._learnt[frame.micro_batch] = frame
            case frames.Scores() if sender == tail:
                if frame.rows != self._current[frame.micro_batch]:
                    raise BadMessage("shape", "not a score for each token")
                self._scores[frame.micro_batch] = read_scores(body, frame.rows)
            case frames.Lost():
                self._lost(frame.session, frame.reason)
            case frames.Failed():
                self._failed = frame.reason
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
        self._wake.set()

    def finished(self, micro_batch: int) -> None:
        self._finished.add(micro_batch)
        self._wake.set()

    def gone(self, stage: int, reason: str) -> None:
        super().gone(stage, reason)
        self._gone = f"stage {stage} is gone: {reason}"
        self._wake.set()

    # Waiting: for something to become true, the deadline, or a stage that is gone.

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            if self._gone is not None:
                raise PeerError(self._gone)
            self._wake = trio.Event()
            await self._wake.wait()

    def _deadline(self) -> _Deadline:
        deadline = _Deadline(self.seconds)
        self._patience = deadline.scope
        return deadline

    def _is_progress(self, sender: int, frame: Frame) -> bool:
        """Whether `frame` is more than a stage's question, asked once more, what was decided: that comes as long as nothing is."""
        match frame:
            case frames.Acknowledge():
                return sender in self.coordinator.silent
            case frames.Done():
                return sender in self.coordinator.unfinished
            case _:
                return True

    def _extend(self) -> None:
        """Work arrived: a slow crew is waited for, one that says nothing is not."""
        until = trio.current_time() + self.seconds
        if self._patience is not None:
            self._patience.deadline = until
        self.coordinator.extend(until)

    def _judge(self, verdict: tuple[int, str] | None) -> None:
        self.blamed = self.blamed or verdict

    # Generation.

    def _begin(self, wave: Wave) -> None:
        questions = wave.questions()
        about = strict.encode(questions)
        self._open[wave.session] = wave
        frame = frames.Prefill(self.place, wave.session, self.fingerprint, self.settings.codec, sum(questions.lengths), len(about))
        self.links.send(0, frame, about)

    def _tokens(self, frame: frames.Tokens, body: bytes) -> None:
        wave = self._open.get(frame.session)
        if wave is None:
            return
        if frame.rows != len(wave.live):
            raise BadMessage("shape", "not a token for each completion that is left")
        wave.took(*read_tokens(body, frame.rows, self.links.limits))
        if not wave.live:
            self._end(frame.session)
            return
        step = frames.Decode(self.place, wave.session, self.fingerprint, self.settings.codec, len(wave.live))
        self.links.send(0, step, pack_ids(wave.live) + pack_ids(wave.latest()))

    def _lost(self, session: bytes, reason: str) -> None:
        """Begin again from token ids, under another name, so that nothing of the old one can be mistaken for it."""
        wave = self._open.get(session)
        if wave is None:
            return
        self._end(session)
        self._begun_again += 1
        wave.begun_again += 1
        if wave.begun_again > BEGIN_AGAIN:
            self._gone = f"a wave was lost {BEGIN_AGAIN + 1} times, last: {reason}"
            return
        wave.session = self._session()
        self._begin(wave)

    def _end(self, session: bytes) -> None:
        self._open.pop(session, None)
        for stage in range(self.stages):
            self.links.send(stage, frames.Drop(self.place, session))

    # Training.

    def _submit(self, number: int, purpose: frames.Purpose, work: MicroBatch) -> None:
        about = strict.encode(work)
        self.links.send(0, frames.Forward(self.place, number, purpose, self.settings.codec, work.rows, len(about)), about)

    def _send_decision(self, decided: Decided | None) -> None:
        if decided is None:
            return
        self._decided = decided
        for stage in decided.stages:
            if decided.refused is not None:
                self.links.send(stage, frames.Abort(self.place, decided.attempt, decided.refused))
            elif stage > 0 or self.coordinator.commits_alone:
                self._send_commit(stage)

    def _send_commit(self, stage: int) -> None:
        assert self._decided is not None
        norm = math.sqrt(self._decided.squared_norm)
        clip = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self.links.send(stage, frames.Commit(self.place, self._decided.attempt, norm, clip, float(self._learning_rate)))

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _learn_id(self) -> int:
        """Even and odd in turn, across steps: of a swapped run's micro-batches every other one is swapped."""
        self._turn += 1
        while self._id() % 2 != self._turn % 2:
            pass
        return self._next_id

    def _session(self) -> bytes:
        return self._id().to_bytes(frames.SESSION_BYTES, "big")


class _Deadline:
    """A cancel scope around waiting only, never around a stream; it raises PeerTimeout."""

    def __init__(self, seconds: float) -> None:
        self.scope = trio.CancelScope(deadline=trio.current_time() + seconds)

    def __enter__(self) -> None:
        self.scope.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        suppressed = self.scope.__exit__(kind, error, trace)
        if self.scope.cancelled_caught:
            raise PeerTimeout("the crew did not answer in time")
        return suppressed
