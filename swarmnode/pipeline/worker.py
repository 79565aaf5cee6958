"""One member of a crew: frames in, one stage's work, frames out.

    context          stage, links, place                          what every part works with
    micro_batches    forward, backward, scores                    `MicroBatches`
    waves            prefill, decode                              `Decoding`
    tied             the two halves of a tied embedding           `TiedEmbedding`
    optimizer        the step itself; it outlives the member      `StageOptimizer`

Everything happens in one task, one frame or one piece of work after the other; only the computing
itself may be elsewhere (`compute`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque

import trio

from swarmnode.errors import BadMessage
from swarmnode.pipeline import faults, frames
from swarmnode.pipeline.commit import Answer, Next, Participant, Taken
from swarmnode.pipeline.compute import Compute, in_thread
from swarmnode.pipeline.context import CrewSettings, StageContext
from swarmnode.pipeline.decoding import Decoding
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import Frame, Place
from swarmnode.pipeline.links import Arrival, Links
from swarmnode.pipeline.micro_batches import MicroBatches
from swarmnode.pipeline.optimizer import StageOptimizer
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.pipeline.senders import sends
from swarmnode.pipeline.tied import TiedEmbedding

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0


class StageWorker:
    """Stage `runtime.spec.index` of a crew. `run` it in a nursery; it ends by cancellation.
    optimizer: the stage's, if it has one.

    Raises Refused for swapped stages where there are fewer than four, or under an adapter.
    """

    def __init__(
        self,
        runtime: StageRuntime,
        links: Links,
        fence: Fence,
        settings: CrewSettings,
        compute: Compute = in_thread,
        optimizer: StageOptimizer | None = None,
    ) -> None:
        participant = Participant(fence.place.step, crew=fence.place.crew)
        self.context = StageContext(runtime, links, fence, settings, compute, participant)
        self.optimizer = optimizer or StageOptimizer(runtime, settings.learning_rate)
        self.micro_batches = MicroBatches(self.context, self.finished)
        self.waves = Decoding(self.context)
        self.tied = TiedEmbedding(self.context)
        links.at_once = self._at_once
        links.counts = self._counts
        self._held: deque[Arrival] = deque()
        """Scores and tokens for which there was no room yet."""

    @property
    def runtime(self) -> StageRuntime:
        return self.context.runtime

    @property
    def links(self) -> Links:
        return self.context.links

    @property
    def participant(self) -> Participant:
        return self.context.participant

    @property
    def index(self) -> int:
        return self.context.index

    @property
    def stages(self) -> int:
        return self.context.stages

    @property
    def place(self) -> Place:
        return self.context.place

    @property
    def dropped(self) -> Counter[str]:
        """Frames that counted for nothing, by reason."""
        counts = (self.context.fence.dropped, self.links.refused, self.context.refused)
        # copies: another thread may count meanwhile
        return sum((counter.copy() for counter in counts), Counter())

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.links.run)
            nursery.start_soon(self._tick)
            await self._serve()

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_SECONDS)
            self.tick()

    def tick(self) -> None:
        self._answer(self.participant.tick(trio.current_time()))

    async def _serve(self) -> None:
        """Frames first: a gradient that has arrived goes before the next forward. What arrives is
        always taken; see `links`."""
        while True:
            try:
                arrival = self.links.inbox.take_nowait()
            except trio.WouldBlock:
                if await self._go_on():
                    continue
                arrival = await self.links.inbox.take()
            if arrival is not None:
                await self._arrived(arrival)

    async def _go_on(self) -> bool:
        """A piece of what waits, where there is room for what comes of it. False where there is
        none."""
        if self._held and not self.links.full(self.index + 1):
            await self._handle(self._held.popleft())
        elif self.tied.sends:
            self.tied.send_part()
        elif (work := self.micro_batches.next()) is not None:
            await self.micro_batches.do(work)
            attempt = self.participant.attempt
            with self.context.caught(
                lambda reason: self.links.send(
                    0, frames.Acknowledge(self.place, attempt, reason, 0.0)
                )
            ):
                self._proposed(attempt, self.participant.complete())
        else:
            return False
        await trio.lowlevel.checkpoint()
        return True

    def ready(self) -> int:
        """Pieces of work that could be done now. From any thread."""
        return self.micro_batches.ready()

    async def _arrived(self, arrival: Arrival) -> None:
        frame = arrival.frame
        if frame is None:
            self.gone(arrival.sender, arrival.reason)
        elif not self._passes_on(frame) or not (self._held or self.links.full(self.index + 1)):
            await self._handle(arrival)
        elif len(self._held) < self.links.limits.sessions:
            self._held.append(arrival)
        else:
            self.context.refused["bounds"] += 1
            self._cannot(arrival, frame, "frame")

    def _passes_on(self, frame: Frame) -> bool:
        """Whether it is a score or a token for the next stage, and so nothing that anybody's
        gradient or step waits for."""
        asks = isinstance(frame, (frames.Prefill, frames.Decode)) or (
            isinstance(frame, frames.Forward) and frame.purpose == "score"
        )
        return asks and not self.runtime.spec.has_head

    async def _handle(self, arrival: Arrival) -> None:
        frame = arrival.frame
        assert frame is not None
        control = isinstance(frame, frames.Control)
        if self.context.fence.check(
            frame.place, arrival.sender, None if control else self.participant.step
        ):
            return
        if not self._is_due(arrival.sender, frame):
            self.context.refused["bounds"] += 1
            return
        with self.context.caught(lambda reason: self._cannot(arrival, frame, reason)):
            await self.handle(arrival.sender, frame, arrival.body)

    def _is_due(self, sender: int, frame: Frame) -> bool:
        return sends(frame, sender, self.index, self.stages, self.micro_batches.routes)

    def _counts(self, sender: int, frame: Frame) -> bool:
        """Whether a piece of work that comes is one of the present step's, and comes from where it
        has to."""
        return self.context.fence.passes(
            frame.place, sender, self.participant.step
        ) and self._is_due(sender, frame)

    def _cannot(self, arrival: Arrival, frame: Frame, reason: frames.RefusalReason) -> None:
        """Notifies the head at once: without it the deadline would."""
        source = self.index if reason == "device" else arrival.sender
        if isinstance(frame, (frames.Prefill, frames.Decode)):
            self.waves.forget(frame.session)
            self.links.send(0, frames.Lost(self.place, frame.session, reason, source))
        elif isinstance(frame, (frames.Forward, frames.Backward)):
            self.links.send(0, frames.Failed(self.place, frame.micro_batch, reason, source))
        elif isinstance(frame, (frames.Propose, frames.Embedding)):
            self.links.send(0, frames.Acknowledge(self.place, frame.attempt, reason, 0.0))

    def _at_once(self, sender: int, frame: Frame) -> bool:
        """A question of the head, asked because nothing comes: it does not wait until something is
        computed."""
        if not isinstance(frame, frames.Locate):
            return False
        if sender != 0:
            self.context.refused["bounds"] += 1
        elif self.context.fence.check(frame.place, sender, None) is None:
            self.links.send(0, self.located(frame.piece))
        return True

    def located(self, piece: bytes) -> frames.Located:
        """How far it is, as far as this stage knows."""
        passed = self.links.passed
        worked = self.runtime.worked + passed.chunks
        return frames.Located(
            self.place,
            piece,
            passed.arrived.of(piece),
            passed.sent.of(piece),
            self.links.any_full,
            worked,
        )

    def gone(self, stage: int, reason: str) -> None:
        """The stream of another stage ended. Nothing of what was begun with it can end well, but
        for a step that was promised."""
        if self.participant.lose():
            self._drop_all()
            self._answer(
                Answer(self.participant.attempt, "micro_batches") if self.participant.lost else None
            )
        else:
            self.waves.clear()

    def finished(self, micro_batch: int) -> None:
        """Stage 0: the gradient went all the way through."""

    async def handle(self, sender: int, frame: Frame, body: bytes) -> None:
        """One frame that passed the fence. Raises BadMessage, ValueError."""
        match frame:
            case frames.Forward():
                await self.micro_batches.forward(sender, frame, body)
            case frames.Backward():
                self.micro_batches.backward(sender, frame, body)
            case frames.Prefill():
                await self.waves.prefill(frame, body)
            case frames.Decode():
                await self.waves.decode(frame, body)
            case frames.Drop():
                self.waves.forget(frame.session)
            case frames.Embedding() if self.runtime.embedding() is not None:
                if self.tied.take_part(frame, body):
                    self._prepared()
            case frames.Propose():
                await self._propose(frame, body)
            case frames.Commit():
                async with self.optimizer.moving:
                    action = self.participant.commit(frame.place.step, frame.attempt)
                    if action == "take":
                        await self.take(frame.clip, frame.learning_rate)
                if action is not None:
                    self._confirm(frame.attempt)
            case frames.Abort():
                if self.participant.abort(frame.place.step, frame.attempt):
                    self._drop_all()
            case _:
                raise BadMessage("bounds", f"{type(frame).__name__} from stage {sender}")

    # Taking a step.

    async def _propose(self, frame: frames.Propose, body: bytes) -> None:
        participant, size = self.participant, frames.DESCRIPTION_BYTES
        self._proposed(
            frame.attempt, participant.propose(frame.place.step, frame.attempt, frame.micro_batches)
        )
        if (participant.step, participant.attempt, participant.phase) == (
            frame.place.step,
            frame.attempt,
            "open",
        ):
            hashes = {
                number: body[size * i : size * (i + 1)]
                for i, number in enumerate(frame.micro_batches)
            }
            await self.micro_batches.propose(hashes)

    def _proposed(self, attempt: int, action: Next | Answer | None) -> None:
        if action == "confirm":
            self._confirm(attempt)
        elif isinstance(action, Answer):
            self._answer(action)
        elif action == "prepare":
            shared = self.runtime.embedding()
            if shared is not None:
                self.tied.begin(attempt, shared)
            self._prepared()

    def _prepared(self) -> None:
        """Once the gradients are final: acknowledge with their norm."""
        attempt, shared = self.participant.attempt, self.runtime.embedding()
        if self.participant.phase != "preparing" or (
            shared is not None and not self.tied.add(attempt, shared)
        ):
            return
        self._answer(
            self.participant.prepared(attempt, self.optimizer.measure(), trio.current_time())
        )

    def _answer(self, answer: Answer | None) -> None:
        if answer is not None:
            self.links.send(
                0,
                frames.Acknowledge(self.place, answer.attempt, answer.refused, answer.squared_norm),
            )

    def _confirm(self, attempt: int) -> None:
        self.links.send(0, frames.Done(self.place, attempt))

    async def take(self, clip: float, learning_rate: float) -> None:
        """The optimizer's part of a step that `participant` has just counted. It is never cancelled
        in between.

        Raises DeviceError where the device fails in the middle of it: what these weights are then,
        nobody knows.
        """
        self.optimizer.last_commit = Taken(self.participant.attempt, clip, learning_rate)
        with trio.CancelScope(shield=True):  # around computing only
            try:
                await self.context.compute(lambda: self.step(clip, learning_rate))
                for observer in self.context.observers:
                    observer.stepped()
            finally:
                self._drop_all()

    def step(self, clip: float, learning_rate: float) -> None:
        """What `take` computes. Raises DeviceError. The step is taken, whatever an observer has no
        room for."""
        if not self.optimizer.step(clip, learning_rate):
            self.context.refused["bounds"] += 1
        for observer in self.context.observers:
            try:
                observer.committed(self)
            except (RuntimeError, MemoryError) as error:
                if not faults.of_device(error):
                    raise
                self.context.refused[faults.DEVICE] += 1
                log.warning(
                    "%s after step %d: %s", type(observer).__name__, self.participant.step, error
                )

    def _drop_all(self) -> None:
        """Gradients, inputs and caches: they belong to weights that have moved, or to a step that
        will not be."""
        for parameter in self.runtime.parameters():
            parameter.grad = None
        self.micro_batches.clear()
        self.tied.clear()
        for observer in self.context.observers:
            observer.dropped()
        self.waves.clear()
