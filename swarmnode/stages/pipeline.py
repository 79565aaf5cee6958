"""The pipeline of a crew: the worker of one stage, and the head that the training loop drives.

    Head.update     propose, micro-batches through 1F1B, acknowledge, commit
    Head.generate   waves of completions, one token per wave and round
    Head.score      log-probabilities and entropies without gradient

A step passes through these calls:

    main thread       `trainer.loop.Loop` → `CrewPolicy.update` → `_learn` → `_call`
                      → `StageRunner.call_head`
    crew's thread     `Head.update` → `Links.send`
    of each stage     `Links` reads a frame → `Inbox` → `StageWorker._serve` → `handle`
                      → `MicroBatchRunner` → `Links.send`
    commit            `StageWorker._take_step` → `StageOptimizer.step` → observers → `DoneFrame`

`StageWorker` handles one frame, or one piece of work, at a time. Its *fence* drops the frames of
earlier crews, steps and attempts (`wire.Fence`). `Head` is stage 0 and also the crew's scheduler. A
crew of one stage runs the same code without a stream.

Each failure has one of three outcomes:

    refusal      a stage's memory is too small, or its own result is not finite: the head aborts
                 the call, and the crew continues. After a memory refusal `CrewPolicy` repeats the
                 call with smaller pieces
    fault        a stage sends garbage or refuses three times in a row, or a deadline expires: the
                 crew ends. A step without a commit leaves the weights as they were
    stream end   the crew ends

The parts of a worker follow the head: `Schedule` and `MicroBatchRunner` train and score,
`WaveDecoder` generates, `TiedEmbedding` exchanges a gradient, `Links` has the streams.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeVar

import torch
import trio

from swarmnode.config import TrainingConfig
from swarmnode.errors import BadMessage, PeerError, PeerTimeout, Refused
from swarmnode.policy.generate import sample
from swarmnode.policy.logprobs import Batch
from swarmnode.policy.micro import micro_batches
from swarmnode.rl.corrections import effective_share, rate_factor
from swarmnode.rl.objectives import MAX_GRAD_NORM
from swarmnode.stages import wire
from swarmnode.stages.model import (
    LearnRow,
    StageOptimizer,
    StageRuntime,
    compute_loss,
    decode,
    describe,
    describe_loss,
    encode,
    make_batch,
    make_prompts,
)
from swarmnode.stages.wire import (
    CHUNK_BYTES,
    DEVICE_REASON,
    ActivationCodec,
    Fence,
    Frame,
    FrameLimits,
    MicroBatch,
    Participant,
    Place,
    RefusalReason,
    Route,
    Routes,
    WaveDescription,
    backward_hop,
    forward_hop,
    is_device_error,
    read_frame,
    read_micro_batch,
    read_scores,
    read_tokens,
    read_wave,
)
from swarmnode.wire import headed, limits, strict
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_ids

log = logging.getLogger(__name__)

T = TypeVar("T")


class WorkRunner(Protocol):
    """Function that runs a piece of work: in a thread, in the event loop, or with a measurement."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Return the result of `work()`."""
        ...


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread, so that heartbeats and streams continue."""
    return await trio.to_thread.run_sync(work)


# The worker of one stage.


@dataclass(frozen=True)
class WorkerSettings:
    """Settings that all members of a crew share, and this node's bound on the learning rate."""

    codec: ActivationCodec = "bfloat16"
    swapped: bool = False
    """True for CheckFree+: half of the micro-batches of a step visit the first two stages, and the
    last two, in exchanged order."""
    learning_rate: float = math.inf
    """Highest learning rate with which a stage of this node takes a step."""


def gradient_codec(codec: ActivationCodec) -> ActivationCodec:
    """Return the codec of gradients in a crew whose activations are in `codec`."""
    return "float32" if codec == "float32" else "bfloat16"


class Observer:
    """Interface through which a worker reports its training to recorder, meter and averaging.

    `on_step_in_thread` is called in the compute thread, all other methods in the event loop between
    two computations.
    """

    def on_micro_batch(self, micro_batch: int, about: bytes, body: bytes) -> None:
        """Handle the arrival of a micro-batch of the next step.

        Args:
            about: Encoded `MicroBatch`.
            body: Activations in the crew's codec; empty at the first hop.
        """

    def on_step_in_thread(self, worker: StageWorker) -> None:
        """Handle a step. Called in the compute thread, after the weights moved and before the step
        counts as done; `worker.participant.step` includes it. A device error that is raised here
        is only counted and logged."""

    def after_step(self) -> None:
        """Handle a step. Called in the event loop, after `on_step_in_thread`."""

    def on_step_dropped(self) -> None:
        """Handle the end of a step or attempt: no later step contains its micro-batches."""


class StageWorker:
    """Worker of stage `runtime.spec.index` in one crew. `run` ends by cancellation.

    Args:
        runtime: The stage's model.
        links: Streams to the other stages.
        fence: Fence of this crew.
        settings: Settings of the crew.
        compute: Runs computations.
        optimizer: The stage's optimizer; by default a new one.

    Raises:
        Refused: swapped stages with fewer than four stages, or with an adapter.
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
        self.runtime, self.links, self.fence = runtime, links, fence
        self.settings, self.compute = settings, compute
        self.index, self.stages = runtime.spec.index, runtime.spec.stages
        self.participant = Participant(fence.place.step)
        self.optimizer = optimizer or StageOptimizer(runtime, settings.learning_rate)
        self.observers: list[Observer] = []
        self.refusals: Counter[str] = Counter()
        """Number of pieces of work that this stage refused, and of invalid frames, by reason."""
        self.micro_batches = MicroBatchRunner(self)
        self.waves = WaveDecoder(self)
        self.tied = TiedEmbedding(self)
        self.fault: tuple[int | None, str] | None = None
        """First fault: (stage that caused it or None if unknown, reason). After it the worker
        handles nothing, and the crew ends."""
        self._deferred: deque[ReceivedFrame] = deque()
        """Scoring and generation frames that wait until the next link is not full."""

    @property
    def place(self) -> Place:
        """Crew, own stage and committed steps, for the frames that this stage sends now."""
        p = self.fence.place
        return Place(p.crew, p.stage, self.participant.step)

    @property
    def ignored_frames(self) -> Counter[str]:
        """Number of frames without effect, by reason. Callable from any thread."""
        counts = (self.fence.dropped, self.links.closed_streams, self.refusals)
        return sum((counter.copy() for counter in counts), Counter())

    def ready(self) -> int:
        """Return the number of pieces of work that could be done now. Callable from any thread."""
        return self.micro_batches.ready()

    async def run(self) -> None:
        """Handle frames and work until cancelled. After a fault, only wait."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.links.run)
                await self._serve()
                self._drop_all()
                await trio.sleep_forever()  # until the network process ends the crew
        finally:
            self._drop_all()

    async def _serve(self) -> None:
        """Handle frames and work until there is a fault.

        Frames come before work, so that a gradient that has arrived comes before the next forward.
        Frames are handled even while links are full, see `Links`.
        """
        while self.fault is None:
            await trio.lowlevel.checkpoint()
            if (arrival := self.links.inbox.take()) is not None:
                await self._handle_arrival(arrival)
            elif not await self._work():
                await self.links.inbox.wait()

    def set_fault(self, stage: int | None, reason: str) -> None:
        """Record why this crew must end.

        Args:
            stage: The stage that caused it; None if unknown.
        """
        if self.fault is None:
            self.fault = (stage, reason)
            log.warning("crew cannot continue: stage %s: %s", stage, reason)
            self.links.inbox.wake()

    async def _work(self) -> bool:
        """Do one piece of work whose result has room on its link. Return False if there is none."""
        if self._deferred and not self.links.full(self.index + 1):
            await self._handle(self._deferred.popleft())
        elif self.tied.can_send:
            with self.refusing(self._refuse_step):
                self.tied.send_part()
        elif (work := self.micro_batches.next()) is not None:
            await self.micro_batches.run(work)
            with self.refusing(self._refuse_step):
                self._finish_gradients()
        else:
            return False
        return True

    async def _handle_arrival(self, arrival: ReceivedFrame) -> None:
        frame = arrival.frame
        if frame is None:
            self.handle_stream_end(arrival.sender, arrival.reason)
        elif not self._is_deferrable(frame) or not (
            self._deferred or self.links.full(self.index + 1)
        ):
            await self._handle(arrival)
        elif len(self._deferred) < self.links.limits.waves:
            self._deferred.append(arrival)
        else:
            self._garbage(arrival.sender, BadMessage("bounds", "more scores and waves than open"))

    def _is_deferrable(self, frame: Frame) -> bool:
        """Return True if the frame makes this stage send scoring or generation work to the next
        stage. Such a frame may wait, because no gradient and no commit depends on it."""
        asks = isinstance(frame, (wire.PrefillFrame, wire.DecodeFrame)) or (
            isinstance(frame, wire.ForwardFrame) and frame.purpose == "score"
        )
        return asks and not self.runtime.spec.has_head

    async def _handle(self, arrival: ReceivedFrame) -> None:
        """Handle a frame unless the fence drops it. An invalid frame is a fault of its sender."""
        frame, sender = arrival.frame, arrival.sender
        assert frame is not None
        step = None if isinstance(frame, wire.ControlFrame) else self.participant.step
        if self.fence.check(frame.place, sender, step):
            return
        try:
            if not may_send(frame, sender, self.index, self.stages, self.micro_batches.routes):
                raise BadMessage("bounds", f"stage {sender} sends no {type(frame).__name__} here")
            with self.refusing(lambda reason: self._refuse(frame, reason)):
                await self.handle(sender, frame, arrival.body)
        except BadMessage as error:
            self._garbage(sender, error)

    @contextlib.contextmanager
    def refusing(self, refuse: Callable[[RefusalReason], None]) -> Iterator[None]:
        """Run the block, and call `refuse` with the reason if this stage cannot do its work
        although the frame is correct. Other errors are raised."""
        try:
            yield
        except ValueError:  # `encode`: this stage's own result is not finite
            reason: RefusalReason = "not_finite"
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            reason = DEVICE_REASON
        else:
            return
        self.refusals[reason] += 1
        refuse(reason)

    def _garbage(self, sender: int, error: BadMessage) -> None:
        self.refusals[error.reason] += 1
        self.set_fault(sender, f"garbage: {error}")

    def _refuse(self, frame: Frame, reason: RefusalReason) -> None:
        if isinstance(frame, (wire.PrefillFrame, wire.DecodeFrame)):
            self.waves.forget(frame.wave)
            self.links.send(0, wire.FailedFrame(self.place, frame.wave, reason))
        elif isinstance(frame, (wire.ForwardFrame, wire.BackwardFrame)):
            self.links.send(0, wire.FailedFrame(self.place, frame.micro_batch, reason))
        else:
            self._refuse_step(reason)

    def _refuse_step(self, reason: RefusalReason) -> None:
        self.links.send(0, wire.AcknowledgeFrame(self.place, self.participant.attempt, reason, 0.0))

    def handle_stream_end(self, stage: int, reason: str) -> None:
        """Handle the end of the stream to another stage. It is a fault only if the stage sent
        garbage. In any case the network process ends the crew."""
        if reason in STREAM_FAULTS:
            self.set_fault(stage, f"its stream was closed: {reason}")

    async def handle(self, sender: int, frame: Frame, body: bytes) -> None:
        """Handle one frame that passed the fence.

        Raises:
            BadMessage: the frame is invalid.
            ValueError: this stage's own result is not finite.
        """
        match frame:
            case wire.ForwardFrame():
                await self.micro_batches.forward(sender, frame, body)
            case wire.BackwardFrame():
                self.micro_batches.backward(sender, frame, body)
            case wire.PrefillFrame():
                await self.waves.prefill(frame, body)
            case wire.DecodeFrame():
                await self.waves.decode(frame, body)
            case wire.DropFrame():
                self.waves.forget(frame.wave)
            case wire.EmbeddingFrame() if self.runtime.embedding() is not None:
                if self.participant.accumulating and frame.attempt == self.participant.attempt:
                    self.tied.take_part(frame, body)
                    self._acknowledge()
            case wire.ProposeFrame():
                self.participant.propose(frame.attempt, frame.micro_batches)
                for early in self.micro_batches.take_early_frames():
                    await self._handle(early)
            case wire.CommitFrame():
                async with self.optimizer.moving:
                    self.participant.commit(frame.attempt)
                    await self._take_step(frame.clip, frame.learning_rate)
                self.links.send(0, wire.DoneFrame(self.place, frame.attempt))
            case wire.AbortFrame():
                self.participant.abort(frame.attempt)
                self._drop_step()
            case _:
                raise BadMessage("bounds", f"{type(frame).__name__} from stage {sender}")

    # Taking a step.

    def _finish_gradients(self) -> None:
        """If the gradients of all micro-batches are there, exchange a tied embedding's gradient and
        acknowledge the step."""
        if not self.participant.complete or self.tied.started:
            return
        if (shared := self.runtime.embedding()) is not None:
            self.tied.begin(self.participant.attempt, shared)
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Acknowledge the step with the gradient's norm, if the gradients are final. Only stage 0
        counts a tied embedding in the norm, which both ends hold."""
        participant, shared = self.participant, self.runtime.embedding()
        if not participant.complete or (shared is not None and not self.tied.add(shared)):
            return
        squared_norm = self.optimizer.measure()
        if squared_norm is None:
            raise ValueError("the gradient is not finite")
        participant.acknowledged = True
        self.links.send(
            0, wire.AcknowledgeFrame(self.place, participant.attempt, None, squared_norm)
        )

    async def _take_step(self, clip: float, learning_rate: float) -> None:
        """Take the step that `participant` has just counted. A cancelled worker ends only after it.

        Raises:
            DeviceError: the device failed during the step, so the weights are undefined.
        """
        with trio.CancelScope(shield=True):  # bounded: only the computation is inside
            try:
                await self.compute(lambda: self._step(clip, learning_rate))
                for observer in self.observers:
                    observer.after_step()
            finally:
                self._drop_all()

    def _step(self, clip: float, learning_rate: float) -> None:
        if not self.optimizer.step(clip, learning_rate):
            self.refusals["bounds"] += 1
        for observer in self.observers:
            try:
                observer.on_step_in_thread(self)
            except (RuntimeError, MemoryError) as error:
                if not is_device_error(error):
                    raise
                self.refusals[DEVICE_REASON] += 1
                log.warning(
                    "%s after step %d: %s", type(observer).__name__, self.participant.step, error
                )

    def activations(self, body: bytes, rows: int, codec: ActivationCodec) -> torch.Tensor:
        """Return activations (rows, hidden) on the device.

        Raises:
            BadMessage: schema, if `codec` is not the crew's; size, bounds or not_finite.
        """
        if codec != self.settings.codec:
            raise BadMessage("schema", f"activations in {codec}, not in {self.settings.codec}")
        return decode(body, rows, self.runtime.hidden_size, codec).to(self.runtime.device)

    def _drop_all(self) -> None:
        """Drop the step, and the generation caches, which belong to the weights before it."""
        self._drop_step()
        self.waves.clear()

    def _drop_step(self) -> None:
        """Drop the gradients and inputs of a step that was taken or aborted."""
        for parameter in self.runtime.parameters():
            parameter.grad = None
        self.participant.clear()
        self.micro_batches.clear()
        self.tied.clear()
        for observer in self.observers:
            observer.on_step_dropped()


def may_send(frame: Frame, sender: int, stage: int, stages: int, routes: Routes) -> bool:
    """Return True if `sender` may send this frame to `stage` (protocol/04, section 4). The head
    also sends work to itself."""
    last = stages - 1
    match frame:
        case wire.ForwardFrame():
            return (
                forward_hop(routes.route(frame.micro_batch, frame.purpose), sender, stage)
                is not None
            )
        case wire.BackwardFrame():
            return backward_hop(routes.route(frame.micro_batch), sender, stage) is not None
        case wire.PrefillFrame() | wire.DecodeFrame():
            return sender == stage - 1 or sender == stage == 0
        case wire.LearntFrame() | wire.ScoresFrame() | wire.TokensFrame():
            return (sender, stage) == (last, 0)
        case wire.EmbeddingFrame():
            return {sender, stage} == {0, last}
        case wire.FailedFrame() | wire.AcknowledgeFrame() | wire.DoneFrame():
            return stage == 0
        case _:
            return sender == 0


# The head.

SCORES_PER_STAGE: Final = 2
"""Micro-batches per stage that are in flight in `score`: one is computed, one is in transit."""
MAX_REFUSALS: Final = 3
"""The crew ends when one stage refuses this many calls in a row."""
SILENCE_FACTOR: Final = 4
"""A call fails after this factor × the longest time between two arrivals, see `Head`."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of one update. `loss` to `effective` are None if no step was taken."""

    refused: RefusalReason | None = None
    """Reason for which all stages dropped the step; None if all took it."""
    divisible: bool = False
    """True if a dropped step can be repeated with smaller micro-batches."""
    loss: float | None = None
    clip_fraction: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    effective: float | None = None
    """Effective sample size ÷ sample size of the tokens' weights, in (0, 1]."""
    rate_factor: float = 1.0
    """Factor of the learning rate, see `rl.corrections`."""


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
    learnt: dict[int, wire.LearntFrame] = field(default_factory=dict)
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
    """Stage 0 and scheduler of a crew. One of `generate`, `score` and `update` runs at a time.

    Args:
        seconds: A call fails if nothing arrives for `max(seconds, SILENCE_FACTOR × the longest time
            between two arrivals)`.
    """

    def __init__(
        self,
        runtime: StageRuntime,
        links: Links,
        fence: Fence,
        settings: WorkerSettings,
        compute: WorkRunner = run_in_thread,
        optimizer: StageOptimizer | None = None,
        *,
        seconds: float = 120.0,
    ) -> None:
        super().__init__(runtime, links, fence, settings, compute, optimizer)
        self.open_waves: dict[int, Wave] = {}
        self._seconds = seconds
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
    ) -> StepResult:
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
        if len(cuts) > wire.MAX_MICRO_BATCHES:
            raise ValueError(
                f"{len(cuts)} micro-batches in one step, at most {wire.MAX_MICRO_BATCHES}"
            )
        pieces = {self._next_alternating(): [rows[i] for i in piece] for piece in cuts}
        tokens_of = {
            number: sum(len(row.completion_ids) for row in piece)
            for number, piece in pieces.items()
        }
        halves = _halve(cuts, lengths, groups)
        divisible = halves is not None and len(halves) <= wire.MAX_MICRO_BATCHES
        self._attempt += 1
        call = self._call_state = CallState(tokens_of, divisible, self._attempt)
        with self._call():
            try:
                self._broadcast(wire.ProposeFrame(self.place, call.attempt, tuple(sorted(pieces))))
                for number, piece in pieces.items():
                    texts = [(row.prompt_ids, row.completion_ids) for row in piece]
                    loss = describe_loss(piece, cfg, normalizer)
                    self._submit(number, "learn", describe(texts, cfg.temperature, loss))
                await self._wait_until(lambda: len(call.norms) == self.stages)
            finally:
                if call.failed is not None or len(call.norms) < self.stages:
                    self._broadcast(wire.AbortFrame(self.place, call.attempt))
            if call.failed is not None:
                return StepResult(refused=call.failed, divisible=call.divisible)
            sums = list(call.learnt.values())
            count = sum(one.tokens for one in sums)
            effective = effective_share(
                sum(one.weights for one in sums), sum(one.squares for one in sums), count
            )
            factor = rate_factor(cfg.options, effective)
            norm = math.sqrt(sum(call.norms.values()))
            clip = min(1.0, MAX_GRAD_NORM / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            rate = float(learning_rate * factor)
            self._broadcast(wire.CommitFrame(self.place, call.attempt, clip, rate))
            await self._wait_until(lambda: len(call.done) == self.stages)
        self._refusals.clear()
        return StepResult(
            loss=sum(one.loss for one in sums),
            clip_fraction=sum(one.clipped for one in sums) / max(count, 1.0),
            entropy=sum(one.entropy for one in sums) / max(count, 1.0),
            grad_norm=norm,
            effective=effective,
            rate_factor=factor,
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
        frame = wire.PrefillFrame(self.place, number, codec, rows, len(about))
        self.links.send(0, frame, about)

    def _take_tokens(self, frame: wire.TokensFrame, body: bytes) -> None:
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
        request = wire.DecodeFrame(self.place, frame.wave, codec, rows)
        self.links.send(0, request, pack_ids(wave.live) + pack_ids(wave.last_tokens()))

    def _end_wave(self, number: int) -> None:
        self.open_waves.pop(number, None)
        self._broadcast(wire.DropFrame(self.place, number))

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

    def _submit(self, number: int, purpose: wire.Purpose, work: MicroBatch) -> None:
        about, codec = strict.encode(work), self.settings.codec
        frame = wire.ForwardFrame(self.place, number, purpose, codec, work.rows, len(about))
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
            silence = max(self._seconds, SILENCE_FACTOR * self._longest)
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
            case wire.TokensFrame():
                self._take_tokens(frame, body)
            case wire.PrefillFrame() | wire.DecodeFrame() if frame.wave not in self.open_waves:
                return  # of a call that has ended
            case wire.LearntFrame() | wire.ScoresFrame() if frame.micro_batch not in call.tokens:
                return  # of a call that has ended
            case wire.FailedFrame() if (
                frame.number not in call.tokens and frame.number not in self.open_waves
            ):
                return  # of a call that has ended
            case wire.LearntFrame():
                call.learnt[frame.micro_batch] = frame
            case wire.ScoresFrame():
                if frame.rows != call.tokens[frame.micro_batch]:
                    raise BadMessage("shape", "not a score for each token")
                call.scores[frame.micro_batch] = read_scores(body, frame.rows)
            case wire.FailedFrame():
                self._refused(sender, frame.reason)
            case wire.AcknowledgeFrame() | wire.DoneFrame() if frame.attempt != call.attempt:
                return  # of an attempt that has ended
            case wire.AcknowledgeFrame() if frame.refused is not None:
                self._refused(sender, frame.refused)
            case wire.AcknowledgeFrame():
                if sender == self.stages - 1 and len(call.learnt) < len(call.tokens):
                    raise BadMessage("bounds", "acknowledged before all losses were sent")
                call.norms[sender] = frame.squared_norm
            case wire.DoneFrame():
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


# 1F1B (PipeDream-Flush, arXiv 2104.04473 §2.2.1) with twice the paper's limit of micro-batches in
# flight. A stage runs a backward whenever it can. It runs a forward only while fewer than
# 2 × (stages − its index) of its micro-batches wait for their gradient. Transfers between homes
# take about as long as the computation, so with the paper's limit a stage would idle until
# gradients arrive. In a swapped crew only stage 0 has the limit: limits at both ends would
# deadlock.

Visit = tuple[int, int]
"""(micro-batch, index of the hop in its route)."""
WorkItem = tuple[Literal["forward", "backward", "learn"], Visit]
"""`learn` is the last stage's forward, loss and backward in one."""
LimitRule = Literal["limited", "exempt", "last"]
"""Relation of a forward to the limit of micro-batches in flight. `limited`: the forward waits for
the limit and counts towards it. `exempt`: it does neither. `last`: it is the route's last forward,
which has no gradient to wait for."""

IN_FLIGHT_FACTOR: Final = 2
"""Factor of the paper's limit of micro-batches in flight."""
MAX_IN_FLIGHT: Final = 32
"""Upper bound of the limit. The next stage stores at most `limits.STAGE_WAITING` micro-batches,
including those of an aborted attempt."""


class Schedule:
    """Order of one stage's forwards and backwards. A micro-batch that visits a stage twice is two
    visits."""

    def __init__(self, stage: int, stages: int) -> None:
        self.waiting: deque[tuple[Visit, LimitRule]] = deque()
        """Forwards that have arrived and have not run."""
        self.in_flight: dict[Visit, LimitRule] = {}
        """Visits that wait for their gradient."""
        self._max_in_flight = max(
            stages - stage, min(IN_FLIGHT_FACTOR * (stages - stage), MAX_IN_FLIGHT)
        )
        self._backwards: deque[Visit] = deque()
        self._seen: set[Visit] = set()

    def forward_arrived(self, micro_batch: Visit, limit: LimitRule) -> bool:
        """Add a forward. Return False if it was added before in this step."""
        if micro_batch in self._seen:
            return False
        self._seen.add(micro_batch)
        self.waiting.append((micro_batch, limit))
        return True

    def backward_arrived(self, micro_batch: Visit) -> bool:
        """Add a backward. Return False if no such visit waits for its gradient."""
        if micro_batch not in self.in_flight or micro_batch in self._backwards:
            return False
        self._backwards.append(micro_batch)
        return True

    def next(self, blocked: Callable[[Visit], bool] = lambda micro_batch: False) -> WorkItem | None:
        """Remove and return the next piece of work; None if there is none.

        Args:
            blocked: Returns True if the next link of a visit is full. It delays forwards only.
        """
        if self._backwards:
            micro_batch = self._backwards.popleft()
            del self.in_flight[micro_batch]
            return "backward", micro_batch
        ready = next(self._may_begin(blocked), None)
        if ready is None:
            return None
        self.waiting.remove(ready)
        micro_batch, limit = ready
        if limit == "last":
            return "learn", micro_batch
        self.in_flight[micro_batch] = limit
        return "forward", micro_batch

    def ready(self, blocked: Callable[[Visit], bool] = lambda micro_batch: False) -> int:
        """Return the number of pieces of work that `next` could return. Callable from any
        thread."""
        return len(self._backwards) + sum(1 for _ in self._may_begin(blocked))

    def _may_begin(self, blocked: Callable[[Visit], bool]) -> Iterator[tuple[Visit, LimitRule]]:
        full = (
            sum(limit == "limited" for limit in list(self.in_flight.values()))
            >= self._max_in_flight
        )
        for micro_batch, limit in list(self.waiting):
            if limit == "last" or not ((full and limit == "limited") or blocked(micro_batch)):
                yield micro_batch, limit

    def clear(self) -> None:
        """Forget the step."""
        self.waiting.clear()
        self._backwards.clear()
        self.in_flight.clear()
        self._seen.clear()


MAX_PENDING = limits.STAGE_WAITING
"""Most micro-batches from other stages that are stored at a time, including those of an aborted
attempt. A schedule has at most `max(MAX_IN_FLIGHT, stages)` in flight."""


@dataclass
class PendingMicroBatch:
    """Input of one visit, stored until its gradient arrives. The backward recomputes the forward
    (activation checkpointing)."""

    route: Route
    hop: int
    """Index of this visit in the route."""
    work: MicroBatch
    about: bytes
    batch: Batch
    x: torch.Tensor | None
    gradient: torch.Tensor | None = None


class MicroBatchRunner:
    """Part of a worker that trains and scores: it runs forwards and backwards, and sends the
    results to the next or the previous stage.

    Raises:
        Refused: swapped stages with fewer than four stages, or with an adapter.
    """

    def __init__(self, worker: StageWorker) -> None:
        if worker.settings.swapped and hasattr(worker.runtime.model, "peft_config"):
            raise Refused(
                "swapped stages cannot train an adapter: set stages.recovery to checkpoints"
            )
        self.schedule = Schedule(worker.index, worker.stages)
        self.pending: dict[tuple[int, int], PendingMicroBatch] = {}
        self._early: list[ReceivedFrame] = []
        """Forwards that arrived before their proposal, which comes on another stream."""
        self._worker = worker
        self.routes = Routes(worker.stages, worker.settings.swapped)

    def take_early_frames(self) -> list[ReceivedFrame]:
        """Remove and return the forwards that arrived before their proposal."""
        early, self._early = self._early, []
        return early

    async def forward(self, sender: int, frame: wire.ForwardFrame, body: bytes) -> None:
        """Schedule a forward to learn from, or run one to score.

        Raises:
            BadMessage: the frame is invalid.
            ValueError: this stage's own result is not finite.
        """
        worker = self._worker
        about = body[: frame.about]
        waiting = sum(pending.x is not None for pending in self.pending.values()) + len(self._early)
        if sender != worker.index and waiting >= MAX_PENDING:
            raise BadMessage("bounds", "more micro-batches than are ever in flight")
        if frame.purpose == "learn" and not worker.participant.may_accumulate(frame.micro_batch):
            if frame.micro_batch > worker.participant.newest:
                self._early.append(ReceivedFrame(sender, frame, body))
            return  # otherwise it is of an attempt that has ended
        work = read_micro_batch(about, frame.rows, worker.links.limits, frame.purpose)
        route = self.routes.route(frame.micro_batch, frame.purpose)
        hop = forward_hop(route, sender, worker.index)
        assert hop is not None, "see `may_send`"
        x = None if hop == 0 else worker.activations(body[frame.about :], frame.rows, frame.codec)
        pending = PendingMicroBatch(
            route, hop, work, about, make_batch(work, worker.runtime.device), x
        )
        if frame.purpose == "score":
            await self._score(frame.micro_batch, pending)
        elif self.schedule.forward_arrived((frame.micro_batch, hop), self._limit(pending)):
            self.pending[frame.micro_batch, hop] = pending
            for observer in worker.observers:
                observer.on_micro_batch(frame.micro_batch, about, body[frame.about :])

    def backward(self, sender: int, frame: wire.BackwardFrame, body: bytes) -> None:
        """Schedule a backward with the gradient of activations that this stage sent.

        Raises:
            BadMessage: the frame is invalid.
        """
        worker = self._worker
        hop = backward_hop(self.routes.route(frame.micro_batch), sender, worker.index)
        assert hop is not None, "see `may_send`"
        pending = self.pending.get((frame.micro_batch, hop))
        if pending is None:
            return  # of an attempt that has ended
        if pending.work.rows != frame.rows:
            raise BadMessage("shape", f"a gradient of {frame.rows} rows for {pending.work.rows}")
        if frame.codec != gradient_codec(worker.settings.codec):
            raise BadMessage("schema", f"a gradient in {frame.codec}")
        gradient = decode(body, frame.rows, worker.runtime.hidden_size, frame.codec)
        if self.schedule.backward_arrived((frame.micro_batch, hop)):
            pending.gradient = gradient.to(worker.runtime.device)

    def next(self) -> WorkItem | None:
        """Remove and return the next work whose result has room on its link; None if there is
        none."""
        return self.schedule.next(self._blocked)

    def ready(self) -> int:
        """Return the number of pieces of work that could be done now. Callable from any thread."""
        return self.schedule.ready(self._blocked)

    def _blocked(self, key: tuple[int, int]) -> bool:
        pending = self.pending.get(key)
        return pending is not None and self._worker.links.full(pending.route[pending.hop + 1].stage)

    def _limit(self, pending: PendingMicroBatch) -> LimitRule:
        if pending.hop == len(pending.route) - 1:
            return "last"
        return "exempt" if self._worker.settings.swapped and pending.hop > 0 else "limited"

    async def run(self, work: WorkItem) -> None:
        """Do one piece of work, and send its result."""
        kind, (micro_batch, hop) = work
        worker, pending = self._worker, self.pending[micro_batch, hop]
        part = pending.route[hop].part
        refuse = lambda reason: worker.links.send(
            0, wire.FailedFrame(worker.place, micro_batch, reason)
        )
        with worker.refusing(refuse):
            if kind == "forward":
                y = await worker.compute(
                    lambda: worker.runtime.forward(pending.batch, pending.x, part)
                )
                self._send_forward(micro_batch, pending, "learn", y)
                return
            if kind == "learn":
                sums: list[float] = []
                gradient = await worker.compute(lambda: self._learn(pending, sums))
            else:
                entering = pending.gradient
                assert entering is not None, "see `Schedule`"
                gradient = await worker.compute(
                    lambda: worker.runtime.backward(pending.batch, pending.x, entering, part)
                )
            del self.pending[micro_batch, hop]
            # the first hop is the last to run backward; now this stage's gradient is complete
            if hop == min(
                i for i, visit in enumerate(pending.route) if visit.stage == worker.index
            ):
                worker.participant.record_gradient(micro_batch)
            if kind == "learn":  # the head needs it before the acknowledgement
                worker.links.send(0, wire.LearntFrame(worker.place, micro_batch, *sums))
            if hop > 0:
                assert gradient is not None
                codec = gradient_codec(worker.settings.codec)
                frame = wire.BackwardFrame(worker.place, micro_batch, codec, pending.work.rows)
                worker.links.send(pending.route[hop - 1].stage, frame, encode(gradient, codec))

    def _learn(self, pending: PendingMicroBatch, sums: list[float]) -> torch.Tensor | None:
        worker = self._worker

        def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            value, parts = compute_loss(pending.work, pending.batch, logprobs, entropy)
            sums.extend(parts)
            return value

        return worker.runtime.learn(
            pending.batch,
            pending.x,
            pending.work.temperature,
            loss,
            pending.route[pending.hop].part,
        )

    async def _score(self, micro_batch: int, pending: PendingMicroBatch) -> None:
        worker = self._worker
        if not worker.runtime.spec.has_head:
            y = await worker.compute(lambda: worker.runtime.forward(pending.batch, pending.x))
            self._send_forward(micro_batch, pending, "score", y)
            return
        scores = await worker.compute(
            lambda: worker.runtime.score(pending.batch, pending.x, pending.work.temperature)
        )
        mask = pending.batch.completion_mask
        body = b"".join(pack_logprobs(values[mask].cpu().numpy()) for values in scores)
        worker.links.send(0, wire.ScoresFrame(worker.place, micro_batch, int(mask.sum())), body)

    def _send_forward(
        self, micro_batch: int, pending: PendingMicroBatch, purpose: wire.Purpose, y: torch.Tensor
    ) -> None:
        worker = self._worker
        frame = wire.ForwardFrame(
            worker.place,
            micro_batch,
            purpose,
            worker.settings.codec,
            pending.work.rows,
            len(pending.about),
        )
        body, receiver = encode(y, worker.settings.codec), pending.route[pending.hop + 1].stage
        worker.links.send(receiver, frame, pending.about + body)

    def clear(self) -> None:
        self.schedule.clear()
        self.pending.clear()


class WaveDecoder:
    """Part of a worker that generates: a prefill per wave, then one token at a time. The last stage
    samples."""

    def __init__(self, worker: StageWorker) -> None:
        self._worker = worker
        self._waves: dict[int, WaveDescription] = {}
        self._drawn: dict[int, int] = {}
        """Wave → number of tokens that each completion has."""

    async def prefill(self, frame: wire.PrefillFrame, body: bytes) -> None:
        """Open a wave, and run its prompts.

        Raises:
            BadMessage: the frame is invalid.
            ValueError: this stage's own result is not finite.
        """
        worker, runtime = self._worker, self._worker.runtime
        about = body[: frame.about]
        description = read_wave(about, frame.rows, worker.links.limits)
        if len(self._waves) >= worker.links.limits.waves:
            raise BadMessage("bounds", "more waves than are open at a time")
        x = (
            None
            if worker.index == 0
            else worker.activations(body[frame.about :], frame.rows, frame.codec)
        )
        prompts = make_prompts(description, runtime.device)
        self._waves[frame.wave], self._drawn[frame.wave] = description, 0
        y = await worker.compute(lambda: runtime.prefill(frame.wave, prompts, x))
        if runtime.spec.has_head:
            each = y.repeat_interleave(description.num_generations, 0)
            self._draw(frame.wave, list(range(description.total)), each)
            return
        passed = wire.PrefillFrame(
            worker.place, frame.wave, worker.settings.codec, frame.rows, frame.about
        )
        worker.links.send(worker.index + 1, passed, about + encode(y, worker.settings.codec))

    async def decode(self, frame: wire.DecodeFrame, body: bytes) -> None:
        """Run one more token of each completion that the frame names.

        Raises:
            BadMessage: the frame is invalid.
            ValueError: this stage's own result is not finite.
        """
        worker, runtime = self._worker, self._worker.runtime
        indices = unpack_ids(body[: 4 * frame.rows]).tolist()
        rest = body[4 * frame.rows :]
        wave = self._waves.get(frame.wave)
        if wave is None:
            return  # the head has dropped it
        if self._drawn[frame.wave] + 1 >= wave.max_tokens:
            raise BadMessage("rows", "the wave has all its tokens")
        ids = lambda: torch.tensor(unpack_ids(rest), device=runtime.device).long()
        x = ids() if worker.index == 0 else worker.activations(rest, frame.rows, frame.codec)
        y = await worker.compute(lambda: runtime.decode(frame.wave, indices, x))
        self._drawn[frame.wave] += 1
        if runtime.spec.has_head:
            self._draw(frame.wave, indices, y)
            return
        passed = wire.DecodeFrame(worker.place, frame.wave, worker.settings.codec, frame.rows)
        worker.links.send(
            worker.index + 1, passed, body[: 4 * frame.rows] + encode(y, worker.settings.codec)
        )

    def _draw(self, number: int, indices: list[int], logits: torch.Tensor) -> None:
        """Draw a token for each of the n completions `indices`, and send the tokens to the head.

        The draw of a completion at a position does not depend on the other completions.

        Args:
            number: Number of the wave.
            logits: (n, V).
        """
        wave, position = self._waves[number], self._drawn[number]
        key = hashlib.blake2b(
            wave.seed.to_bytes(8, "big") + position.to_bytes(8, "big"), digest_size=8
        ).digest()
        generator = torch.Generator(logits.device).manual_seed(int.from_bytes(key, "big") >> 1)
        every = logits.new_zeros(wave.total, logits.shape[1])
        every[indices] = logits
        token, logprob = sample(every, wave.temperature, wave.top_p, generator)
        body = pack_ids(token[indices].tolist()) + pack_logprobs(logprob[indices].cpu().numpy())
        self._worker.links.send(0, wire.TokensFrame(self._worker.place, number, len(indices)), body)

    def forget(self, wave: int) -> None:
        """Close a wave, and free its cache."""
        self._waves.pop(wave, None)
        self._drawn.pop(wave, None)
        self._worker.runtime.caches.drop(wave)

    def clear(self) -> None:
        self._waves.clear()
        self._drawn.clear()
        self._worker.runtime.caches.clear()


class TiedEmbedding:
    """Exchange of a tied embedding's gradient, for one attempt at a time.

    The gradient is the sum of a term from the first stage and a term from the last stage. Each of
    both ends sends its term to the other in float32.
    """

    def __init__(self, worker: StageWorker) -> None:
        self._worker = worker
        self._received_gradient: torch.Tensor | None = None
        """Received part of the other end's term."""
        self._rows = 0
        """Number of rows that have arrived."""
        self._unsent: tuple[int, torch.Tensor, int] | None = None
        """(attempt, own term, next row to send); None if there is nothing to send."""
        self.started = False
        """True if sending the own term has started."""

    @property
    def other_end(self) -> int:
        """Stage at the other end."""
        return self._worker.stages - 1 if self._worker.index == 0 else 0

    @property
    def can_send(self) -> bool:
        """True if a part of the own term is left to send and the link is not full."""
        return self._unsent is not None and not self._worker.links.full(self.other_end)

    def begin(self, attempt: int, shared: torch.nn.Parameter) -> None:
        """Start to send the own term, one part at a time.

        Raises:
            ValueError: the gradient is not finite.
        """
        gradient = torch.zeros_like(shared) if shared.grad is None else shared.grad
        if not bool(torch.isfinite(gradient).all()):
            raise ValueError("the embedding's gradient is not finite")
        self._unsent, self.started = (attempt, gradient, 0), True

    def send_part(self) -> None:
        """Send the next rows of the own term."""
        assert self._unsent is not None
        attempt, gradient, first = self._unsent
        self._unsent = None
        worker = self._worker
        part = gradient[first : first + worker.links.limits.tokens].float()
        body, after = encode(part, "float32"), first + len(part)
        worker.links.send(
            self.other_end, wire.EmbeddingFrame(worker.place, attempt, first, len(part)), body
        )
        self._unsent = (attempt, gradient, after) if after < len(gradient) else None

    def take_part(self, frame: wire.EmbeddingFrame, body: bytes) -> None:
        """Store the next rows of the other end's term.

        Raises:
            BadMessage: The reason is `bounds`, `size` or `not_finite`.
        """
        shared = self._worker.runtime.embedding()
        assert shared is not None
        if frame.first != self._rows:
            raise BadMessage("bounds", f"row {frame.first} of an embedding after {self._rows}")
        if self._received_gradient is None:
            self._received_gradient = torch.zeros(shared.shape)
        self._rows += frame.rows
        self._received_gradient[frame.first : self._rows] = decode(
            body, frame.rows, self._worker.runtime.hidden_size, "float32"
        )

    def add(self, shared: torch.nn.Parameter) -> bool:
        """Add the other end's term to the own gradient, once. Return False until all rows have
        arrived."""
        if not self.started or self._received_gradient is None or self._rows < len(shared):
            return False
        theirs = self._received_gradient.to(shared.device, shared.dtype)
        shared.grad = theirs if shared.grad is None else shared.grad + theirs
        self._received_gradient = None
        return True

    def clear(self) -> None:
        self._received_gradient = self._unsent = None
        self._rows, self.started = 0, False


# Frames over streams: one duplex stream to each other stage.
#
# A link is the stream to one other stage and its queue. `send` queues the frame without waiting,
# and one task per link writes. While a link is `full`, no forward, score or wave starts over it,
# and no part of an embedding is sent. Gradients, tokens and the commit are always queued, so two
# stages cannot wait for each other. Streams are not read while too many frames wait.

MAX_INBOX_FRAMES: Final = 64
"""Most frames of other stages that wait to be handled."""
MAX_INBOX_BYTES: Final = 64 * 2**20
"""Streams are not read while the bodies of these frames have at least this many bytes."""
MAX_OUTBOX_FRAMES: Final = 4096
"""Most frames queued for one stage, far more than a crew has in flight. The stream to a stage whose
queue is full is closed."""
FULL_LINK_BYTES: Final = 64 * 2**20
"""A link is full while at least this many bytes are queued. Frames that are always queued may
exceed it."""
STREAM_FAULTS: Final = frozenset({*wire.FRAME_REASONS, "unread"} - {"truncated"})
"""Reasons of a stream's end that are the other stage's fault. `truncated` is excluded, because a
process that dies inside a frame causes it."""


@dataclass(frozen=True)
class ReceivedFrame:
    """A frame that arrived from a stage, or the end of its stream."""

    sender: int
    """Stage that sent it."""
    frame: Frame | None
    """None if the stream ended, for `reason`."""
    body: bytes
    reason: str = ""


class Inbox:
    """Frames that the worker has not handled yet, in order of arrival.

    Args:
        own: This node's stage. Its frames do not count towards the limits.
    """

    def __init__(self, own: int) -> None:
        self.idle_since = math.inf
        """Time since which the worker waits; infinite while it works."""
        self._own = own
        self._arrivals: deque[ReceivedFrame] = deque()
        self._frames = self._bytes = 0
        """Numbers of waiting frames, and of bytes in them, from other stages."""
        self._woken = trio.Event()
        self._has_room = trio.Event()

    async def wait_for_room(self) -> None:
        """Wait until another frame may be read."""
        while self._frames >= MAX_INBOX_FRAMES or self._bytes >= MAX_INBOX_BYTES:
            await self._has_room.wait()

    def put(self, arrival: ReceivedFrame) -> None:
        """Append a frame."""
        self._count(arrival, 1)
        self._arrivals.append(arrival)
        self.wake()

    def take(self) -> ReceivedFrame | None:
        """Remove and return the oldest frame; None if there is none."""
        if not self._arrivals:
            return None
        arrival = self._arrivals.popleft()
        self._count(arrival, -1)
        self._wake_readers()
        return arrival

    def wake(self) -> None:
        """End `wait`: a frame arrived, a link has room again, or there is a fault."""
        self._woken.set()

    async def wait(self) -> None:
        """Wait until `wake` is called."""
        self.idle_since = trio.current_time()
        try:
            await self._woken.wait()
        finally:
            self.idle_since = math.inf
        self._woken = trio.Event()

    def _wake_readers(self) -> None:
        self._has_room.set()
        self._has_room = trio.Event()

    def _count(self, arrival: ReceivedFrame, sign: int) -> None:
        if arrival.sender != self._own:
            self._frames += sign
            self._bytes += sign * len(arrival.body)


class Links:
    """Frames to and from all stages. Frames to the own stage need no stream.

    Args:
        stage: This node's stage.
        streams: Other stage → stream.
        limits: Bounds of the frames.
    """

    def __init__(
        self, stage: int, streams: Mapping[int, trio.abc.Stream], limits: FrameLimits
    ) -> None:
        self.stage = stage
        self.limits = limits
        self._streams = dict(streams)
        self.inbox = Inbox(stage)
        self._out = {
            peer: trio.open_memory_channel[bytes](MAX_OUTBOX_FRAMES) for peer in self._streams
        }
        self.queued = dict.fromkeys(self._streams, 0)
        """Stage with an open stream → bytes that are queued."""
        self.frames_received = 0
        self.closed_streams: Counter[str] = Counter()
        """Streams that were closed, by reason: of FRAME_REASONS, or `unread`."""

    def full(self, stage: int) -> bool:
        """Return True if no new work for `stage` may start. The result is False after the end of
        the stream, which the inbox reports."""
        return self.queued.get(stage, 0) >= FULL_LINK_BYTES

    def send(self, stage: int, frame: Frame, body: bytes = b"") -> None:
        """Queue a frame. If the queue is at its limit, close the stream. After the end of the
        stream, discard the frame."""
        if stage == self.stage:
            self.inbox.put(ReceivedFrame(stage, frame, body))
            return
        if stage not in self.queued:
            return
        data = headed.pack(frame, body)
        try:
            self._out[stage][0].send_nowait(data)
        except trio.WouldBlock:
            self._end(stage, "unread")
        else:
            self.queued[stage] += len(data)

    async def run(self) -> None:
        """Read and write all streams until they end."""
        async with trio.open_nursery() as nursery:
            for peer, stream in self._streams.items():
                nursery.start_soon(self._read, peer, stream)
                nursery.start_soon(self._write, peer, stream)

    async def _read(self, peer: int, stream: trio.abc.Stream) -> None:
        reason = "closed"
        try:
            while True:
                await self.inbox.wait_for_room()
                got = await read_frame(stream, self.limits)
                if got is None:
                    break
                self.frames_received += 1
                self.inbox.put(ReceivedFrame(peer, *got))
        except BadMessage as error:
            reason = error.reason
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._end(peer, reason)

    def _end(self, peer: int, reason: str) -> None:
        """Report the end of the stream to stage `peer`, and forget its queue."""
        self.queued.pop(peer, None)
        if reason != "closed":
            self.closed_streams[reason] += 1
        self.inbox.put(ReceivedFrame(peer, None, b"", reason))

    async def _write(self, peer: int, stream: trio.abc.Stream) -> None:
        try:
            async for data in self._out[peer][1]:
                for at in range(0, len(data), CHUNK_BYTES):
                    part = data[at : at + CHUNK_BYTES]
                    await stream.send_all(part)
                    if peer not in self.queued:
                        return
                    was_full = self.full(peer)
                    self.queued[peer] -= len(part)
                    if was_full and not self.full(peer):
                        self.inbox.wake()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._end(peer, "closed")
