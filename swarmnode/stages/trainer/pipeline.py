"""The pipeline of a crew: the worker of one stage.

A step passes through these calls:

    main thread       `trainer.loop.Loop` → `CrewPolicy.update` → `_learn` → `_call`
                      → `StageRunner.call_head`
    crew's thread     `Head.update` → `Links.send`
    of each stage     `Links` reads a frame → `FrameInbox` → `StageWorker._serve` → `handle`
                      → `MicroBatchRunner` → `Links.send`
    commit            `StageWorker._take_step` → `StageOptimizer.step` → observers → `DoneFrame`

`StageWorker` handles one frame, or one piece of work, at a time. Its *fence* drops the frames of
earlier crews, steps and attempts (`Fence`). `head.py` has the worker of stage 0, which is also the
crew's scheduler. A crew of one stage runs the same code without a stream.

Each failure has one of three outcomes:

    refusal      a stage's memory is too small, or its own result is not finite: the head aborts
                 the call, and the crew continues. After a memory refusal `CrewPolicy` repeats the
                 call with smaller pieces
    fault        a stage sends garbage or refuses three times in a row, or a deadline expires: the
                 crew ends. A step without a commit leaves the weights as they were
    stream end   the crew ends

The parts of a worker: `Schedule` and `MicroBatchRunner` train and score, `WaveDecoder` generates,
`TiedEmbedding` exchanges a gradient, `Links` has the streams.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import trio

from swarmnode.errors import BadMessage
from swarmnode.policy.generate import sample
from swarmnode.policy.logprobs import Batch
from swarmnode.stages.specs import Route, Routes, backward_hop, forward_hop
from swarmnode.stages.stage_frames import (
    DEVICE_REASON,
    AbortFrame,
    AcknowledgeFrame,
    ActivationCodec,
    BackwardFrame,
    CommitFrame,
    ControlFrame,
    DecodeFrame,
    DoneFrame,
    DropFrame,
    EmbeddingFrame,
    FailedFrame,
    Fence,
    ForwardFrame,
    Frame,
    LearntFrame,
    MicroBatch,
    Participant,
    Place,
    PrefillFrame,
    ProposeFrame,
    Purpose,
    RefusalReason,
    ScoresFrame,
    TokensFrame,
    WaveDescription,
    is_device_error,
    read_micro_batch,
    read_wave,
)
from swarmnode.stages.trainer.links import STREAM_FAULTS, Links, ReceivedFrame
from swarmnode.stages.trainer.schedule_1f1b import LimitRule, Schedule, WorkItem
from swarmnode.stages.trainer.stage_batches import (
    compute_loss,
    decode,
    encode,
    make_batch,
    make_prompts,
)
from swarmnode.stages.trainer.stage_model import StageOptimizer, StageRuntime
from swarmnode.wire import limits
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
        Refused: swapped stages with fewer than four stages.
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
        elif len(self._deferred) < MAX_PENDING:
            self._deferred.append(arrival)
        else:
            self._garbage(arrival.sender, BadMessage("bounds", "more scores and waves than open"))

    def _is_deferrable(self, frame: Frame) -> bool:
        """Return True if the frame makes this stage send scoring or generation work to the next
        stage. Such a frame may wait, because no gradient and no commit depends on it."""
        asks = isinstance(frame, (PrefillFrame, DecodeFrame)) or (
            isinstance(frame, ForwardFrame) and frame.purpose == "score"
        )
        return asks and not self.runtime.spec.has_head

    async def _handle(self, arrival: ReceivedFrame) -> None:
        """Handle a frame unless the fence drops it. An invalid frame is a fault of its sender."""
        frame, sender = arrival.frame, arrival.sender
        assert frame is not None
        step = None if isinstance(frame, ControlFrame) else self.participant.step
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
        if isinstance(frame, (PrefillFrame, DecodeFrame)):
            self.waves.forget(frame.wave)
            self.links.send(0, FailedFrame(self.place, frame.wave, reason))
        elif isinstance(frame, (ForwardFrame, BackwardFrame)):
            self.links.send(0, FailedFrame(self.place, frame.micro_batch, reason))
        else:
            self._refuse_step(reason)

    def _refuse_step(self, reason: RefusalReason) -> None:
        self.links.send(0, AcknowledgeFrame(self.place, self.participant.attempt, reason, 0.0))

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
            case ForwardFrame():
                await self.micro_batches.forward(sender, frame, body)
            case BackwardFrame():
                self.micro_batches.backward(sender, frame, body)
            case PrefillFrame():
                await self.waves.prefill(frame, body)
            case DecodeFrame():
                await self.waves.decode(frame, body)
            case DropFrame():
                self.waves.forget(frame.wave)
            case EmbeddingFrame() if self.runtime.embedding() is not None:
                if self.participant.accumulating and frame.attempt == self.participant.attempt:
                    self.tied.take_part(frame, body)
                    self._acknowledge()
            case ProposeFrame():
                self.participant.propose(frame.attempt, frame.micro_batches)
                for early in self.micro_batches.take_early_frames():
                    await self._handle(early)
            case CommitFrame():
                async with self.optimizer.moving:
                    self.participant.commit(frame.attempt)
                    await self._take_step(frame.clip, frame.learning_rate)
                self.links.send(0, DoneFrame(self.place, frame.attempt))
            case AbortFrame():
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
        self.links.send(0, AcknowledgeFrame(self.place, participant.attempt, None, squared_norm))

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
        case ForwardFrame():
            return (
                forward_hop(routes.route(frame.micro_batch, frame.purpose), sender, stage)
                is not None
            )
        case BackwardFrame():
            return backward_hop(routes.route(frame.micro_batch), sender, stage) is not None
        case PrefillFrame() | DecodeFrame():
            return sender == stage - 1 or sender == stage == 0
        case LearntFrame() | ScoresFrame() | TokensFrame():
            return (sender, stage) == (last, 0)
        case EmbeddingFrame():
            return {sender, stage} == {0, last}
        case FailedFrame() | AcknowledgeFrame() | DoneFrame():
            return stage == 0
        case _:
            return sender == 0


MAX_PENDING = limits.STAGE_WAITING
"""Maximum number of micro-batches from other stages that are stored at a time, including those of
an aborted attempt: far more than a schedule has in flight. Also that of open waves, and of scores
and waves that wait."""


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
        Refused: swapped stages with fewer than four stages.
    """

    def __init__(self, worker: StageWorker) -> None:
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

    async def forward(self, sender: int, frame: ForwardFrame, body: bytes) -> None:
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

    def backward(self, sender: int, frame: BackwardFrame, body: bytes) -> None:
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
        refuse = lambda reason: worker.links.send(0, FailedFrame(worker.place, micro_batch, reason))
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
                worker.links.send(0, LearntFrame(worker.place, micro_batch, *sums))
            if hop > 0:
                assert gradient is not None
                codec = gradient_codec(worker.settings.codec)
                frame = BackwardFrame(worker.place, micro_batch, codec, pending.work.rows)
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
        worker.links.send(0, ScoresFrame(worker.place, micro_batch, int(mask.sum())), body)

    def _send_forward(
        self, micro_batch: int, pending: PendingMicroBatch, purpose: Purpose, y: torch.Tensor
    ) -> None:
        worker = self._worker
        frame = ForwardFrame(
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

    async def prefill(self, frame: PrefillFrame, body: bytes) -> None:
        """Open a wave, and run its prompts.

        Raises:
            BadMessage: the frame is invalid.
            ValueError: this stage's own result is not finite.
        """
        worker, runtime = self._worker, self._worker.runtime
        about = body[: frame.about]
        description = read_wave(about, frame.rows, worker.links.limits)
        if len(self._waves) >= MAX_PENDING:
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
        passed = PrefillFrame(
            worker.place, frame.wave, worker.settings.codec, frame.rows, frame.about
        )
        worker.links.send(worker.index + 1, passed, about + encode(y, worker.settings.codec))

    async def decode(self, frame: DecodeFrame, body: bytes) -> None:
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
        passed = DecodeFrame(worker.place, frame.wave, worker.settings.codec, frame.rows)
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
        self._worker.links.send(0, TokensFrame(self._worker.place, number, len(indices)), body)

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
            self.other_end, EmbeddingFrame(worker.place, attempt, first, len(part)), body
        )
        self._unsent = (attempt, gradient, after) if after < len(gradient) else None

    def take_part(self, frame: EmbeddingFrame, body: bytes) -> None:
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
