"""The head of a crew: the policy that the training loop drives, and the crew's scheduler.

    generate   at least S waves in flight, one token per wave and round
    score      log-probabilities without gradient
    update     propose, micro-batches through 1F1B, acknowledge, commit

A crew of one runs the same code with a stream to no peer.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import trio

from swarmnode.config import TrainingConfig
from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.policy.micro import micro_batches
from swarmnode.rl.corrections import effective_share, rate_factor
from swarmnode.rl.objectives import MAX_GRAD_NORM
from swarmnode.stages import wire
from swarmnode.stages.model import LearnRow, StageOptimizer, StageRuntime, describe, describe_loss
from swarmnode.stages.wire import (
    Coordinator,
    Decided,
    Fence,
    Frame,
    MicroBatch,
    Questions,
    RefusalReason,
    read_scores,
    read_tokens,
)
from swarmnode.stages.worker import (
    Compute,
    CrewSettings,
    Links,
    Search,
    StageContext,
    StageWorker,
    in_thread,
    name_of,
    parties,
    path_of_wave,
)
from swarmnode.wire import strict
from swarmnode.wire.tensors import pack_ids

# The head's account of refusals: which stage keeps a crew from learning.
#
# A step that is taken makes up for a third of one that the same stage spoilt: a stage that spoils
# more than a quarter is found. A norm far above what the stage reported before counts like a
# refusal. In a contradiction both stages are blamed; a middle stage that contradicts both
# neighbours is bad, or both neighbours are, and the verdict names them.

PATIENCE: Final = 5
"""Steps that one stage spoils, one less for each `REDEEMED` that are taken meanwhile."""
REDEEMED: Final = 3
IMPATIENCE: Final = 2
"""Deadlines in a row that one stage lets pass before the first step: a crew that has never worked
is given up sooner."""
SLOWNESS: Final = 3
"""The same of one that says that it computes, while there can be less to compute."""
REMEMBERED: Final = 32
"""Norms of a stage."""
LEAST: Final = 8
"""Norms that must be known before one can be absurd."""
ABSURD: Final = 1e4
"""Times the median of a stage's squared norm."""
ALONE: Final = 1e8
"""Times the median of the other stages' squared norms: hardly anything of theirs is left where the
step is clipped by that. A stage with a head or an embedding may have some hundred times the norm of
one without."""


class Verdict(NamedTuple):
    stages: tuple[int, ...]
    """One of them is to blame."""
    reason: str
    seconds: float
    """Since one of them began to spoil steps: of these it has spoilt more than a quarter."""
    beside: tuple[int, ...] = ()
    """Others that contradict them: if these are right, all of those are bad."""


class Blame:
    """Counts for a crew of `stages`, at its head. Each call returns a verdict where there is one
    because of it."""

    def __init__(self, stages: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.verdict: Verdict | None = None
        """The first one."""
        self._clock = clock
        self._spoilt = [0] * stages
        """Steps, each counted as `REDEEMED`."""
        self._clean_at = [clock()] * stages
        """When a stage last had none to make up for."""
        self._beside: list[set[int]] = [set() for _ in range(stages)]
        """Whom each was blamed with, for those."""
        self._worked = False
        self._norms: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in range(stages)]

    def refused(self, stages: Collection[int], reason: str) -> Verdict | None:
        """One of `stages` has refused a step, or made the other refuse it."""
        return self._spoils(stages, f"refused step after step: {reason}", PATIENCE)

    def silent(self, stages: Collection[int]) -> Verdict | None:
        """Work was given up that did not come back in time, and one of these has it."""
        return self._spoils(
            stages, "no answer again and again", PATIENCE if self._worked else IMPATIENCE
        )

    def slow(self, stages: Collection[int], *, smallest: bool) -> Verdict | None:
        """As `silent`, of those who say that they compute. smallest: what cannot be cut further,
        and was waited for that much longer."""
        return self._spoils(stages, "too slow again and again", 1 if smallest else SLOWNESS)

    def ended(self, stages: Collection[int], why: str) -> Verdict | None:
        """Nothing can come of this crew any more, because of one of these."""
        return self._spoils(stages, why, 1)

    def taken(self, norms: Mapping[int, float]) -> Verdict | None:
        """A step was taken; `norms` are the squared norms by stage."""
        self._worked = True
        absurd = [
            stage
            for stage, norm in norms.items()
            if self._is_absurd(stage, norm) or _is_alone(stage, norms)
        ]
        for stage, norm in norms.items():
            if stage not in absurd:
                self._norms[stage].append(norm)
        if len(absurd) != 1:  # none, or all of them: a batch that is hard for everybody
            self._spoilt = [max(0, count - 1) for count in self._spoilt]
            for stage, count in enumerate(self._spoilt):
                if not count:
                    self._clean_at[stage] = self._clock()
                    self._beside[stage].clear()
            return None
        return self._spoils(absurd, "an absurd norm step after step", PATIENCE)

    def _spoils(self, stages: Collection[int], why: str, patience: int) -> Verdict | None:
        if not stages:
            return None
        for stage in stages:
            self._spoilt[stage] += REDEEMED
            self._beside[stage].update(stages)
        guilty = tuple(
            stage for stage in sorted(stages) if self._spoilt[stage] >= REDEEMED * patience
        )
        if not guilty:
            return None
        beside = set().union(*(self._beside[stage] for stage in guilty)) - set(guilty)
        verdict = Verdict(
            guilty,
            why,
            self._clock() - min(self._clean_at[stage] for stage in guilty),
            tuple(sorted(beside)),
        )
        self.verdict = self.verdict or verdict
        return verdict

    def _is_absurd(self, stage: int, norm: float) -> bool:
        known = self._norms[stage]
        return len(known) >= LEAST and norm > ABSURD * max(statistics.median(known), 1e-30)


def _is_alone(stage: int, norms: Mapping[int, float]) -> bool:
    """Whether one stage's norm leaves nothing of the others', from the first step on: it would be
    its own median."""
    others = [norm for other, norm in norms.items() if other != stage]
    return len(others) > 1 and norms[stage] > ALONE * statistics.median_low(others) > 0


# A wave of generation as its head keeps it: token ids, which no lost stage can take away.


@dataclass
class Wave:
    """`num_generations` completions for each prompt; completion i answers prompt i //
    num_generations."""

    session: bytes
    prompts: list[list[int]]
    num_generations: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    ends: frozenset[int]
    """Token ids that end a completion."""
    ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    """Completions that go on, ascending. All have equally many tokens."""
    begun_again: int = 0
    began_at: int = 0
    """Tokens that each completion had when it was begun, or begun again."""

    def __post_init__(self) -> None:
        total = len(self.prompts) * self.num_generations
        self.ids, self.logprobs, self.live = (
            [[] for _ in range(total)],
            [[] for _ in range(total)],
            list(range(total)),
        )

    def took(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """One more token for each of `live`. Raises ValueError when there are not as many."""
        for name, token, logprob in zip(self.live, ids, logprobs, strict=True):
            self.ids[name].append(token)
            self.logprobs[name].append(logprob)
        self.live = [
            n
            for n in self.live
            if self.ids[n][-1] not in self.ends and len(self.ids[n]) < self.max_tokens
        ]

    def latest(self) -> list[int]:
        """(live,) the tokens that the next step runs."""
        return [self.ids[name][-1] for name in self.live]

    def questions(self) -> Questions:
        """How it begins, or begins again from the tokens there are: then every completion is a
        prompt of its own."""
        position = len(self.ids[self.live[0]])
        so_far = [self.prompts[name // self.num_generations] + self.ids[name] for name in self.live]
        prompts = so_far if position else self.prompts
        return Questions(
            lengths=tuple(map(len, prompts)),
            ids=pack_ids([i for prompt in prompts for i in prompt]),
            num_generations=1 if position else self.num_generations,
            names=tuple(self.live),
            total=len(self.ids),
            position=position,
            max_tokens=self.max_tokens,
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            seed=self.seed,
        )


def cut(
    prompts: Sequence[list[int]], num_generations: int, max_tokens: int, waves: int, tokens: int
) -> list[tuple[list[int], int]]:
    """(indices of `prompts`, completions of each) for at least `waves` waves where there are so
    many prompts, each of at most `tokens` padded tokens. The completions of a prompt for which one
    wave is too small are in several, one behind the other.

    Raises ValueError when one completion alone is more.
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
            longest = tokens  # nobody else's completions go there
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


# The head's side of generation: one token per wave and round, restarted from token ids after a
# loss.

BEGIN_AGAIN: Final = 4
"""Times that one wave is begun again before its generation fails."""


class Numbers:
    """Names of micro-batches and waves, never used twice under one head."""

    def __init__(self) -> None:
        self._last = self._turn = 0

    def next(self) -> int:
        self._last += 1
        return self._last

    def next_of_turn(self) -> int:
        """Even and odd in turn, across steps: of a swapped run's micro-batches every other one is
        swapped."""
        self._turn += 1
        while self.next() % 2 != self._turn % 2:
            pass
        return self._last

    def session(self) -> bytes:
        return self.next().to_bytes(wire.SESSION_BYTES, "big")


class Generation:
    def __init__(self, context: StageContext, numbers: Numbers) -> None:
        self.open: dict[bytes, Wave] = {}
        self._context = context
        self._numbers = numbers

    def begin(self, wave: Wave) -> None:
        at, questions = self._context, wave.questions()
        about = strict.encode(questions)
        wave.began_at = questions.position
        self.open[wave.session] = wave
        frame = wire.Prefill(
            at.place,
            wave.session,
            at.fingerprint,
            at.settings.codec,
            sum(questions.lengths),
            len(about),
        )
        at.links.send(0, frame, about)

    def take(self, frame: wire.Tokens, body: bytes) -> None:
        """The next token of each completion; then the one after it is asked for. Raises
        BadMessage."""
        at, wave = self._context, self.open.get(frame.session)
        if wave is None:
            return
        if frame.rows != len(wave.live):
            raise BadMessage("shape", "not a token for each completion that is left")
        wave.took(*read_tokens(body, frame.rows, at.links.limits))
        if not wave.live:
            self.end(frame.session)
            return
        step = wire.Decode(
            at.place, wave.session, at.fingerprint, at.settings.codec, len(wave.live)
        )
        at.links.send(0, step, pack_ids(wave.live) + pack_ids(wave.latest()))

    def lost(self, session: bytes, reason: str) -> str | None:
        """Begin again from token ids, under another name, so that nothing of the old one can be
        mistaken for it. Why not, where it was lost too often."""
        wave = self.open.get(session)
        if wave is None:
            return None
        self.end(session)
        wave.begun_again += 1
        if wave.begun_again > BEGIN_AGAIN:
            return f"a wave was lost {BEGIN_AGAIN + 1} times, last: {reason}"
        wave.session = self._numbers.session()
        self.begin(wave)
        return None

    def oldest(self) -> tuple[bytes, tuple[int, ...]] | None:
        """A wave that is under way, and the stages that it has to visit for its next token."""
        for session, wave in self.open.items():
            return session, path_of_wave(
                self._context.stages, len(wave.ids[wave.live[0]]) - wave.began_at + 1
            )
        return None

    def end(self, session: bytes) -> None:
        self.open.pop(session, None)
        at = self._context
        for stage in range(at.stages):
            at.links.send(stage, wire.Drop(at.place, session))


# Wait until a condition holds; a gone stage or a time without arriving work ends the wait.

BELIEVED: Final = 3.5
"""Times as long is waited for a stage that says that it computes what cannot be cut smaller. What
it says is not proved, so no longer."""


class Waiting:
    """`seconds` bounds the time in which no work arrives."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.gone: str | None = None
        """Why nothing can become true any more."""
        self.believing = False
        """Whether words count in the present call."""
        self._wake = trio.Event()
        self._scope: trio.CancelScope | None = None
        """It bounds the present call; work that arrives moves its deadline."""
        self._arrived = 0.0

    async def until(self, true: Callable[[], bool]) -> None:
        """Raises PeerError when a stage is gone."""
        while not true():
            if self.gone is not None:
                raise PeerError(self.gone)
            self._wake = trio.Event()
            await self._wake.wait()

    def wake(self) -> None:
        self._wake.set()

    @contextlib.contextmanager
    def deadline(self, *, believing: bool = False) -> Iterator[None]:
        """Around waiting only, never around a stream. Raises PeerTimeout."""
        self.believing, self._arrived = believing, trio.current_time()
        try:
            with trio.CancelScope(deadline=self._arrived + self.seconds) as scope:
                self._scope = scope
                yield
        finally:
            self._scope = None
        if scope.cancelled_caught:
            raise PeerTimeout("the crew did not answer in time")

    def extend(self) -> None:
        """Work arrived: a slow crew is waited for, a silent one is not."""
        self._arrived = trio.current_time()
        if self._scope is not None:
            self._scope.deadline = self._arrived + self.seconds

    def believe(self) -> None:
        """Who has the work says that it computes."""
        if self._scope is not None and self.believing:
            self._scope.deadline = min(
                trio.current_time() + self.seconds, self._arrived + BELIEVED * self.seconds
            )

    @property
    def open(self) -> bool:
        """Whether there is a call."""
        return self._scope is not None


# The head.

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
    purpose: wire.Purpose = "score"
    finished: set[int] = field(default_factory=set)
    learnt: dict[int, wire.Learnt] = field(default_factory=dict)
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
        return self.waiting.gone is None and self.blamed is None and self.fault is None

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
        if len(pieces) > wire.MICRO_BATCHES:
            raise ValueError(
                f"{len(pieces)} micro-batches in one step, at most {wire.MICRO_BATCHES}"
            )
        tokens_of = {
            number: sum(len(row.completion_ids) for row in piece)
            for number, piece in pieces.items()
        }
        halves = _half(cuts, lengths, groups)
        batch = self._batch = BatchState(
            tokens_of, "learn", divisible=halves is not None and len(halves) <= wire.MICRO_BATCHES
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
            [wire.description_hash(described[number]) for number in sorted(described)],
        )
        for stage in range(self.stages):
            self.links.send(stage, wire.ProposeStep(self.place, attempt, numbers), b"".join(hashes))
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
            case wire.Tokens():
                self.generation.take(frame, body)
            case wire.Learnt() | wire.Scores() | wire.Failed() if (
                frame.micro_batch not in batch.tokens
            ):
                return  # of an attempt that is over
            case wire.Learnt():
                batch.learnt[frame.micro_batch] = frame
            case wire.Scores():
                if frame.rows != batch.tokens[frame.micro_batch]:
                    raise BadMessage("shape", "not a score for each token")
                batch.scores[frame.micro_batch] = read_scores(body, frame.rows)
            case wire.Lost():
                if (why := self.generation.lost(frame.session, frame.reason)) is not None:
                    self.waiting.gone = why
                    self._blame.ended(parties(range(self.stages), sender, frame.source), why)
            case wire.Failed() if batch.failed is not None or (
                batch.purpose == "learn" and self.coordinator.decision is not None
            ):
                return  # one step is spoilt once, in however many pieces it was cut
            case wire.Failed():
                batch.failed = frame.reason
                if frame.reason != TOO_MUCH or not batch.divisible:
                    path = self.micro_batches.path(frame.micro_batch, batch.purpose)
                    self._blame.refused(parties(path, sender, frame.source), frame.reason)
            case wire.Acknowledge():
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
            case wire.Done():
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
        if reason in wire.FRAME_REASONS:
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
                self.links.send(stage, wire.Locate(self.place, piece))
            self._hear(0, self.located(piece))

    def _oldest(self) -> tuple[bytes, tuple[int, ...]] | None:
        number = self._batch.oldest()
        if number is None:
            return self.generation.oldest()
        return name_of(number), self.micro_batches.path(number, self._batch.purpose)

    def _at_once(self, sender: int, frame: Frame) -> bool:
        if not isinstance(frame, wire.Located):
            return super()._at_once(sender, frame)
        if self.context.fence.check(frame.place, sender, None) is None:
            self._hear(sender, frame)
        return True

    def _hear(self, stage: int, said: wire.Located) -> None:
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
            case wire.Tokens() | wire.Lost():
                return frame.session in self.generation.open
            case wire.Failed():
                return frame.micro_batch in batch.tokens
            case wire.Learnt():
                return frame.micro_batch in batch.tokens and frame.micro_batch not in batch.learnt
            case wire.Scores():
                return frame.micro_batch in batch.tokens and frame.micro_batch not in batch.scores
            case wire.Acknowledge():
                return (
                    frame.attempt == coordinator.attempt
                    and sender in coordinator.silent
                    and not self._keeps_the_loss(sender)
                )
            case wire.Done():
                return frame.attempt == coordinator.attempt and sender in coordinator.unfinished
            case wire.Embedding():
                return frame.attempt == coordinator.attempt
            case _:
                return isinstance(frame, wire.Backward)

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

    def _submit(self, number: int, purpose: wire.Purpose, rows: int, about: bytes) -> None:
        self.links.send(
            0,
            wire.Forward(
                self.place, number, purpose, self.context.settings.codec, rows, len(about)
            ),
            about,
        )

    def _send_decision(self, decided: Decided | None) -> None:
        if decided is None:
            return
        for stage in decided.stages:
            if decided.refused is not None:
                self.links.send(stage, wire.Abort(self.place, decided.attempt, decided.refused))
            elif stage > 0 or self.stages == 1:
                self._send_commit(stage)

    def _send_commit(self, stage: int) -> None:
        decided = self.coordinator.decision
        assert decided is not None
        norm = math.sqrt(decided.squared_norm)
        clip = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        self.links.send(
            stage,
            wire.Commit(self.place, decided.attempt, norm, clip, float(self._learning_rate)),
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
