"""The head of a crew: stage 0, which the training loop drives.

Head.update     propose, micro-batches through 1F1B, acknowledge, commit
Head.generate   waves of completions, one token per wave and round
Head.score      log-probabilities and entropies without gradient
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from swarmnode.config import TrainingConfig
from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.policy.micro import micro_batches
from swarmnode.rl.corrections import effective_share
from swarmnode.rl.objectives import MAX_GRAD_NORM
from swarmnode.stages.stage_frames import (
    DEVICE_REASON,
    MAX_MICRO_BATCHES,
    AbortFrame,
    AcknowledgeFrame,
    CommitFrame,
    DecodeFrame,
    DoneFrame,
    DropFrame,
    FailedFrame,
    Fence,
    ForwardFrame,
    Frame,
    LearntFrame,
    MicroBatch,
    PrefillFrame,
    ProposeFrame,
    Purpose,
    RefusalReason,
    ScoresFrame,
    TokensFrame,
    WaveDescription,
    read_scores,
    read_tokens,
)
from swarmnode.stages.trainer.links import Links
from swarmnode.stages.trainer.pipeline import StageWorker, WorkerSettings, WorkRunner, run_in_thread
from swarmnode.stages.trainer.stage_batches import LearnRow, describe, describe_loss
from swarmnode.stages.trainer.stage_model import StageOptimizer, StageRuntime
from swarmnode.wire import strict
from swarmnode.wire.tensors import pack_ids

SCORES_PER_STAGE: Final = 2
"""Micro-batches per stage that are in flight in `score`: one is computed, one is in transit."""
MAX_REFUSALS: Final = 3
"""The crew ends when one stage refuses this many calls in a row."""
SILENCE_FACTOR: Final = 4
"""A call fails after this factor × the longest time between two arrivals, see `Head`."""
CALL_SECONDS: Final = 120.0
"""Shortest silence after which a call fails."""


@dataclass(frozen=True)
class CrewStepResult:
    """Outcome of one update. `loss` to `effective` are None if no step was taken."""

    refused: RefusalReason | None = None
    """Reason for which all stages dropped the step; None if all took it."""
    divisible: bool = False
    """True if a dropped step can be repeated with smaller micro-batches."""
    loss: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    effective: float | None = None
    """Effective sample size ÷ sample size of the tokens' weights, in (0, 1]."""


@dataclass
class CallState:
    """State of the head's present call: its micro-batches or waves, and their results."""

    tokens: dict[int, int] = field(default_factory=dict)
    """Micro-batch → number of completion tokens; empty in `generate`."""
    divisible: bool = False
    """True if smaller micro-batches or waves are possible."""
    attempt: int = 0
    """Number of the update's attempt; 0 in other calls."""
    scores: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)
    """Micro-batch → (log-probabilities, entropies)."""
    learnt: dict[int, LearntFrame] = field(default_factory=dict)
    """Micro-batch → sums of its loss."""
    norms: dict[int, float] = field(default_factory=dict)
    """Stage → squared norm in its acknowledgement."""
    done: set[int] = field(default_factory=set)
    """Stages that have taken the step."""
    failed: RefusalReason | None = None
    """Reason of a stage that refused; None while no stage has."""
    failed_stage: int = 0
    """Stage that refused."""


class WorkRefused(PeerError):
    """Raised when a stage refuses a micro-batch or wave.

    Attributes:
        stage: The stage that refused.
        device: True if the stage's device cannot compute it.
        divisible: True if smaller pieces may help.
    """

    def __init__(self, stage: int, reason: RefusalReason, divisible: bool) -> None:
        super().__init__(f"stage {stage} refused: {reason}")
        self.stage = stage
        self.device = reason == DEVICE_REASON
        self.divisible = self.device and divisible


class Head(StageWorker):
    """Stage 0 and scheduler of a crew. One of `generate`, `score` and `update` runs at a time. A
    call fails if nothing arrives for `max(CALL_SECONDS, SILENCE_FACTOR × the longest time between
    two arrivals)`.
    """

    def __init__(
        self,
        runtime: StageRuntime,
        links: Links,
        fence: Fence,
        settings: WorkerSettings,
        compute: WorkRunner = run_in_thread,
        optimizer: StageOptimizer | None = None,
    ) -> None:
        super().__init__(runtime, links, fence, settings, compute, optimizer)
        self.open_waves: dict[int, Wave] = {}
        self._longest = 0.0
        """Longest time between two arrivals in a call."""
        self._last = -math.inf
        """Time of the call's last arrival, or of its start; -inf between two calls."""
        self._end_reason: str | None = None
        """Reason for which the crew has ended; None while it works."""
        self._changed = trio.Event()
        self._number = 0
        """Number of the newest micro-batch or wave. Each number is used once."""
        self._parity = 0
        """Parity of the last micro-batch's number in `update`, which alternates it."""
        self._call_state = CallState()
        self._attempt = 0
        self._refusals: Counter[int] = Counter()
        """Stage → number of calls that it refused since the last committed step."""

    @property
    def usable(self) -> bool:
        """True until the crew ends."""
        return self._end_reason is None

    async def update(
        self, rows: Sequence[LearnRow], cfg: TrainingConfig, normalizer: float, learning_rate: float
    ) -> CrewStepResult:
        """Take one optimizer step in all stages, or in none.

        Args:
            normalizer: Normaliser of the whole batch, which may have more rows than `rows`.

        Raises:
            PeerError: the crew has ended. If the commit was sent, some stages may have taken the
                step.
            PeerTimeout: a deadline expired. The crew ends, as above.
            ValueError: the step has too many micro-batches.
        """
        lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
        tokens = min(cfg.per_device_train_tokens, self.links.limits.tokens)
        groups = [row.group for row in rows]
        cuts = micro_batches(lengths, tokens, groups)
        if len(cuts) > MAX_MICRO_BATCHES:
            raise ValueError(f"{len(cuts)} micro-batches in one step, at most {MAX_MICRO_BATCHES}")
        pieces = {self._next_alternating(): [rows[i] for i in piece] for piece in cuts}
        tokens_of = {
            number: sum(len(row.completion_ids) for row in piece)
            for number, piece in pieces.items()
        }
        halves = _halve(cuts, lengths, groups)
        divisible = halves is not None and len(halves) <= MAX_MICRO_BATCHES
        self._attempt += 1
        call = self._call_state = CallState(tokens_of, divisible, self._attempt)
        with self._call():
            try:
                self._broadcast(ProposeFrame(self.place, call.attempt, tuple(sorted(pieces))))
                for number, piece in pieces.items():
                    texts = [(row.prompt_ids, row.completion_ids) for row in piece]
                    loss = describe_loss(piece, cfg, normalizer)
                    self._submit(number, "learn", describe(texts, cfg.temperature, loss))
                await self._wait_until(lambda: len(call.norms) == self.stages)
            finally:
                if call.failed is not None or len(call.norms) < self.stages:
                    self._broadcast(AbortFrame(self.place, call.attempt))
            if call.failed is not None:
                return CrewStepResult(refused=call.failed, divisible=call.divisible)
            sums = list(call.learnt.values())
            count = sum(one.tokens for one in sums)
            effective = effective_share(
                sum(one.weights for one in sums), sum(one.squares for one in sums), count
            )
            norm = math.sqrt(sum(call.norms.values()))
            clip = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            self._broadcast(CommitFrame(self.place, call.attempt, clip, float(learning_rate)))
            await self._wait_until(lambda: len(call.done) == self.stages)
        self._refusals.clear()
        return CrewStepResult(
            loss=sum(one.loss for one in sums),
            entropy=sum(one.entropy for one in sums) / max(count, 1.0),
            grad_norm=norm,
            effective=effective,
        )

    def _next_alternating(self) -> int:
        """Return the next number of the other parity than before, also across steps. In a swapped
        crew, odd micro-batches take the swapped route."""
        self._parity ^= 1
        while self._next_number() % 2 != self._parity:
            pass
        return self._number

    async def generate(
        self,
        prompts: Sequence[list[int]],
        num_generations: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        ends: frozenset[int],
        rng: random.Random,
        tokens: int | None = None,
    ) -> list[Wave]:
        """Sample `num_generations` completions for each prompt.

        Args:
            prompts: Token ids.
            ends: Token ids that end a completion.
            rng: Source of the waves' seeds.
            tokens: Most padded tokens of a wave; by default the crew's limit.

        Returns:
            Waves that together have the prompts in their order. If the completions of a prompt
            exceed one wave, consecutive waves have it.

        Raises:
            WorkRefused: a stage refused.
            PeerError: the crew has ended.
            PeerTimeout: a deadline expired.
            ValueError: one completion exceeds a wave.
        """
        most = self.links.limits.tokens
        pieces = cut_waves(
            prompts,
            num_generations,
            max_tokens,
            self.stages,
            most if tokens is None else min(tokens, most),
        )
        call = self._call_state = CallState(
            divisible=any(len(piece) * each > 1 for piece, each in pieces)
        )
        draw = rng.getrandbits
        waves = [
            Wave([prompts[i] for i in piece], each, max_tokens, temperature, top_p, draw(63), ends)
            for piece, each in pieces
        ]
        later, open_now = list(reversed(waves)), self.open_waves
        try:
            with self._call():
                while (later or open_now) and call.failed is None:
                    while later and len(open_now) < self.stages:
                        self._begin(later.pop())
                    before = len(open_now)
                    await self._wait_until(lambda before=before: len(open_now) < before)  # type: ignore[misc]
        finally:
            for number in list(open_now):
                self._end_wave(number)
        if call.failed is not None:
            raise WorkRefused(call.failed_stage, call.failed, call.divisible)
        return waves

    def _begin(self, wave: Wave) -> None:
        """Start a wave."""
        description, number = wave.description(), self._next_number()
        about = strict.encode(description)
        self.open_waves[number] = wave
        rows, codec = sum(description.lengths), self.settings.codec
        frame = PrefillFrame(self.place, number, codec, rows, len(about))
        self.links.send(0, frame, about)

    def _take_tokens(self, frame: TokensFrame, body: bytes) -> None:
        """Append the next token of each completion, and request the token after it."""
        wave = self.open_waves.get(frame.wave)
        if wave is None:
            return
        if frame.rows != len(wave.live):
            raise BadMessage("shape", "not a token for each completion that is left")
        wave.append_tokens(*read_tokens(body, frame.rows, self.links.limits))
        if not wave.live:
            self._end_wave(frame.wave)
            return
        codec, rows = self.settings.codec, len(wave.live)
        request = DecodeFrame(self.place, frame.wave, codec, rows)
        self.links.send(0, request, pack_ids(wave.live) + pack_ids(wave.last_tokens()))

    def _end_wave(self, number: int) -> None:
        self.open_waves.pop(number, None)
        self._broadcast(DropFrame(self.place, number))

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    async def score(
        self,
        rows: Sequence[tuple[list[int], list[int]]],
        temperature: float,
        tokens: int | None = None,
    ) -> list[tuple[list[float], list[float]]]:
        """Score the completion tokens of each (prompt ids, completion ids).

        Args:
            tokens: Most padded tokens of a micro-batch; by default the crew's limit.

        Returns:
            (log-probabilities, entropies) for each row.

        Raises:
            WorkRefused: a stage refused.
            PeerError: the crew has ended.
            PeerTimeout: a deadline expired.
        """
        lengths, most = [len(p) + len(c) for p, c in rows], self.links.limits.tokens
        pieces = {
            self._next_number(): piece
            for piece in micro_batches(lengths, most if tokens is None else min(tokens, most))
        }
        tokens_of = {
            number: sum(len(rows[i][1]) for i in piece) for number, piece in pieces.items()
        }
        divisible = _halve(pieces.values(), lengths) is not None
        call = self._call_state = CallState(tokens_of, divisible)
        with self._call():
            for started, (number, piece) in enumerate(pieces.items()):
                room = started - SCORES_PER_STAGE * self.stages
                await self._wait_until(lambda room=room: len(call.scores) > room)  # type: ignore[misc]
                if call.failed is not None:
                    break
                self._submit(number, "score", describe([rows[i] for i in piece], temperature))
            await self._wait_until(lambda: len(call.scores) == len(pieces))
        if call.failed is not None:
            raise WorkRefused(call.failed_stage, call.failed, call.divisible)
        out: list[tuple[list[float], list[float]]] = [([], [])] * len(rows)
        for number, piece in pieces.items():
            (logprobs, entropies), at = call.scores[number], 0
            for i in piece:
                size = len(rows[i][1])
                out[i] = (logprobs[at : at + size], entropies[at : at + size])
                at += size
        return out

    def _submit(self, number: int, purpose: Purpose, work: MicroBatch) -> None:
        about, codec = strict.encode(work), self.settings.codec
        frame = ForwardFrame(self.place, number, purpose, codec, work.rows, len(about))
        self.links.send(0, frame, about)

    def _broadcast(self, frame: Frame) -> None:
        for stage in range(self.stages):
            self.links.send(stage, frame)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Run one call of the training loop. An expired deadline ends the crew."""
        self._last = trio.current_time()
        try:
            yield
        except PeerTimeout as error:
            self.set_fault(None, str(error))
            raise
        finally:
            self._last = -math.inf

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()`, or until a stage refuses the call.

        Silence counts from the last arrival, or from the time when this stage became idle.

        Raises:
            PeerError: the crew has ended.
            PeerTimeout: a deadline expired.
        """
        while self._call_state.failed is None and not condition():
            if self._end_reason is not None:
                raise PeerError(self._end_reason)
            silence = max(CALL_SECONDS, SILENCE_FACTOR * self._longest)
            self._changed = trio.Event()
            with trio.move_on_at(self._last + silence) as scope:
                await self._changed.wait()
            if not scope.cancelled_caught:
                continue
            now = trio.current_time()
            self._last = max(self._last, min(self.links.inbox.idle_since, now))
            if now >= self._last + silence:
                raise PeerTimeout(f"nothing arrived for {silence:.0f} s")

    async def handle(self, sender: int, frame: Frame, body: bytes) -> None:
        now, call = trio.current_time(), self._call_state
        if self._last > -math.inf:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        match frame:
            case TokensFrame():
                self._take_tokens(frame, body)
            case PrefillFrame() | DecodeFrame() if frame.wave not in self.open_waves:
                return  # of a call that has ended
            case LearntFrame() | ScoresFrame() if frame.micro_batch not in call.tokens:
                return  # of a call that has ended
            case FailedFrame() if (
                frame.number not in call.tokens and frame.number not in self.open_waves
            ):
                return  # of a call that has ended
            case LearntFrame():
                call.learnt[frame.micro_batch] = frame
            case ScoresFrame():
                if frame.rows != call.tokens[frame.micro_batch]:
                    raise BadMessage("shape", "not a score for each token")
                call.scores[frame.micro_batch] = read_scores(body, frame.rows)
            case FailedFrame():
                self._refused(sender, frame.reason)
            case AcknowledgeFrame() | DoneFrame() if frame.attempt != call.attempt:
                return  # of an attempt that has ended
            case AcknowledgeFrame() if frame.refused is not None:
                self._refused(sender, frame.refused)
            case AcknowledgeFrame():
                if sender == self.stages - 1 and len(call.learnt) < len(call.tokens):
                    raise BadMessage("bounds", "acknowledged before all losses were sent")
                call.norms[sender] = frame.squared_norm
            case DoneFrame():
                call.done.add(sender)
            case _:
                await super().handle(sender, frame, body)
        self._changed.set()

    def _refused(self, stage: int, reason: RefusalReason) -> None:
        """Record that `stage` refused the current call.

        The first refusal of a call counts, unless the caller can retry with smaller micro-batches.
        A refusal is ignored once all stages have acknowledged.
        """
        call = self._call_state
        if call.failed is not None or len(call.norms) == self.stages:
            return
        call.failed, call.failed_stage = reason, stage
        if reason == DEVICE_REASON and call.divisible:
            return
        self._refusals[stage] += 1
        if self._refusals[stage] >= MAX_REFUSALS:
            self.set_fault(stage, f"refused {MAX_REFUSALS} times in a row: {reason}")

    def set_fault(self, stage: int | None, reason: str) -> None:
        super().set_fault(stage, reason)
        self._end(f"stage {stage}: {reason}" if stage is not None else reason)

    def handle_stream_end(self, stage: int, reason: str) -> None:
        super().handle_stream_end(stage, reason)
        self._end(f"stage {stage} is gone: {reason}")

    def _end(self, why: str) -> None:
        self._end_reason = self._end_reason or why
        self._changed.set()


def _halve(
    batches: Iterable[Sequence[int]], lengths: Sequence[int], groups: Sequence[int] | None = None
) -> list[list[int]] | None:
    """Return micro-batches of at most half the tokens of the largest in `batches`; None if the
    largest is a single row."""
    largest = max((len(rows) * max(lengths[row] for row in rows) for rows in batches), default=0)
    return (
        micro_batches(lengths, largest // 2, groups) if largest > max(lengths, default=0) else None
    )


# The head's record of generation.


@dataclass
class Wave:
    """`num_generations` completions for each prompt; completion i belongs to prompt
    i // num_generations."""

    prompts: list[list[int]]
    num_generations: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    ends: frozenset[int]
    """Token ids that end a completion."""

    def __post_init__(self) -> None:
        total = len(self.prompts) * self.num_generations
        self.ids: list[list[int]] = [[] for _ in range(total)]
        self.logprobs: list[list[float]] = [[] for _ in range(total)]
        self.live = list(range(total))
        """Indices of the unfinished completions, ascending. All have the same number of tokens."""

    def append_tokens(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append one token to each of `live`.

        Raises:
            ValueError: there are more or fewer tokens.
        """
        for index, token, logprob in zip(self.live, ids, logprobs, strict=True):
            self.ids[index].append(token)
            self.logprobs[index].append(logprob)
        self.live = [
            n
            for n in self.live
            if self.ids[n][-1] not in self.ends and len(self.ids[n]) < self.max_tokens
        ]

    def last_tokens(self) -> list[int]:
        """Return the last token of each of `live`."""
        return [self.ids[index][-1] for index in self.live]

    def description(self) -> WaveDescription:
        """Return the description that starts the wave."""
        return WaveDescription(
            lengths=tuple(map(len, self.prompts)),
            ids=pack_ids([i for prompt in self.prompts for i in prompt]),
            num_generations=self.num_generations,
            max_tokens=self.max_tokens,
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            seed=self.seed,
        )


def cut_waves(
    prompts: Sequence[list[int]], num_generations: int, max_tokens: int, waves: int, tokens: int
) -> list[tuple[list[int], int]]:
    """Cut prompts into at least `min(waves, len(prompts))` waves of at most `tokens` padded tokens.

    If the completions of a prompt exceed one wave, consecutive waves have them.

    Returns:
        (indices of `prompts`, number of completions of each) for each wave.

    Raises:
        ValueError: one completion exceeds a wave.
    """
    size = -(-len(prompts) // waves)
    out: list[tuple[list[int], int]] = []
    longest = 0
    for index, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        fits = tokens // (len(prompt) + max_tokens)
        if not fits:
            raise ValueError(
                f"a wave holds {tokens} tokens, and one completion needs {len(prompt) + max_tokens}"
            )
        if fits < num_generations:
            out += [
                ([index], min(fits, num_generations - done))
                for done in range(0, num_generations, fits)
            ]
            longest = tokens  # no other prompt joins this wave
        elif (
            out
            and len(out[-1][0]) < size
            and (len(out[-1][0]) + 1) * num_generations * (longest + max_tokens) <= tokens
        ):
            out[-1][0].append(index)
        else:
            out.append(([index], num_generations))
            longest = len(prompt)
    return out
