"""One member of a crew: frames in, one stage's work, frames out. Its part in generation, in training and in taking a step.

Everything happens in one task, one frame or one piece of work after the other; only the computing itself may be elsewhere (`compute`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import trio

from swarmnode.errors import BadMessage, DeviceError, Refused
from swarmnode.pipeline import faults, frames
from swarmnode.pipeline.activations import decode, encode
from swarmnode.pipeline.commit import Answer, Confirm, Discard, Participant, Prepare, Take
from swarmnode.pipeline.compute import Compute, in_thread
from swarmnode.pipeline.fence import Fence, FenceStatistics
from swarmnode.pipeline.frames import ActivationCodec, Frame, Place
from swarmnode.pipeline.learning import batch_of, loss_of, prompts_of
from swarmnode.pipeline.links import Arrival, Links, LinkStatistics
from swarmnode.pipeline.observer import Observer
from swarmnode.pipeline.routes import Part, Route, Routes, arriving, returning
from swarmnode.pipeline.runtime import RuntimeStatistics, StageRuntime
from swarmnode.pipeline.schedule import Limit, Schedule, ScheduleStatistics, Work
from swarmnode.pipeline.work import MicroBatch, Questions, read_micro_batch, read_questions
from swarmnode.policy.generate import sample
from swarmnode.policy.logprobs import Batch
from swarmnode.rl.objectives import WEIGHT_DECAY
from swarmnode.wire import limits
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_ids

TICK_SECONDS = 1.0
KEPT = limits.STAGE_WAITING
"""Micro-batches of others whose gradient is awaited, with what an aborted attempt has left: 1F1B has no more than twice as many in flight
as there are stages."""


@dataclass(frozen=True)
class CrewSettings:
    """What all members of a crew agree on."""

    base: bytes
    """32 bytes: fingerprint of the policy that training began with."""
    codec: ActivationCodec = "bfloat16"
    gradient_codec: ActivationCodec = "bfloat16"
    swapped: bool = False
    """CheckFree+: half of the micro-batches of a step with the first two and the last two stages exchanged."""
    learning_rate: float = math.inf
    """This node's own bound: no stage here takes a step with more, whatever the head says."""


@dataclass(frozen=True)
class StepTaken:
    """What another stage needs to take the same step."""

    attempt: int = 0
    clip: float = 1.0
    learning_rate: float = 0.0


@dataclass
class LrScale:
    """Learning rate of one stage relative to the crew's."""

    factor: float = 1.0
    warmup: int = 0
    """Steps over which it rises to the factor, because the optimizer is new."""
    taken: int = 0

    def next(self) -> float:
        self.taken += 1
        return self.factor * (1.0 if self.taken >= self.warmup else self.taken / self.warmup)


@dataclass
class Kept:
    """A micro-batch whose gradient has not come: its input, and nothing of its graph."""

    route: Route
    hop: int
    """Which visit of the route this is."""
    work: MicroBatch
    about: bytes
    batch: Batch
    x: torch.Tensor | None
    gradient: torch.Tensor | None = None


@dataclass(frozen=True)
class WorkerStatistics:
    step: int
    runtime: RuntimeStatistics
    links: LinkStatistics
    fence: FenceStatistics
    schedule: ScheduleStatistics
    refused: dict[str, int]
    """Frames that passed their header and then were not what they said, by reason."""
    squared_norm: float
    """Its layers' last raw gradient's, before clipping: CheckFree weights this stage by it."""


class StageWorker:
    """Stage `runtime.spec.index` of a crew. `run` it in a nursery; it ends by cancellation.

    Raises Refused for swapped stages where there are fewer than four, or under an adapter.
    """

    def __init__(self, runtime: StageRuntime, links: Links, fence: Fence, settings: CrewSettings, compute: Compute = in_thread) -> None:
        spec = runtime.spec
        self.runtime = runtime
        self.links = links
        self.settings = settings
        self.index, self.stages = spec.index, spec.stages
        self.participant = Participant(fence.place.step, crew=fence.place.crew)
        self.squared_norm = 0.0
        self.optimizer = optimizer_of(runtime)
        self.lr_scale = LrScale()
        self.lock = threading.Lock()
        """Held while the optimizer moves the weights."""
        self.last_commit = StepTaken()
        self.observer = Observer()
        if settings.swapped and hasattr(runtime.model, "peft_config"):
            raise Refused("swapped stages are for whole weights, and only an adapter is trained here")
        self._routes = Routes(spec.stages, settings.swapped)
        self._fence = fence
        self._compute = compute
        self._schedule = Schedule(spec.index, spec.stages)
        self._kept: dict[tuple[int, int], Kept] = {}
        self._waves: dict[bytes, Questions] = {}
        self._drawn: dict[bytes, int] = {}
        self._half: tuple[int, torch.Tensor, int] | None = None
        self._half_left: tuple[int, torch.Tensor, int] | None = None
        """(attempt, our half of the embedding's gradient, the next row to send)."""
        self._held: deque[Arrival] = deque()
        """Scores and tokens for which there was no room yet."""
        self._refused: Counter[str] = Counter()

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(
            step=self.participant.step,
            runtime=self.runtime.statistics(),
            links=self.links.statistics(),
            fence=self._fence.statistics(),
            schedule=self._schedule.statistics(),
            refused=dict(self._refused),
            squared_norm=self.squared_norm,
        )

    @property
    def place(self) -> Place:
        p = self._fence.place
        return Place(p.crew, p.stage, self.participant.step)

    @property
    def fingerprint(self) -> bytes:
        """32 bytes: of the policy that all stages together are at this step."""
        return frames.policy_fingerprint(self.settings.base, self.place, self.settings.codec)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.links.run)
            nursery.start_soon(self._tick)
            await self._serve()

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_SECONDS)
            self._answer(self.participant.tick(trio.current_time()))

    async def _serve(self) -> None:
        """Frames first: a gradient that has arrived goes before the next forward. What arrives is always taken; see `links`."""
        while True:
            try:
                arrival = self.links.take_nowait()
            except trio.WouldBlock:
                if await self._go_on():
                    continue
                arrival = await self.links.take()
            if arrival is not None:
                await self._arrived(arrival)

    async def _go_on(self) -> bool:
        """A piece of what waits, where there is room for what comes of it. False where there is none."""
        if self._held and not self.links.full(self.index + 1):
            await self._handle(self._held.popleft())
        elif self._half_left is not None and not self.links.full(self._other_end):
            self._send_part(*self._half_left)
        elif (work := self._schedule.next(self._blocked)) is not None:
            await self._do(work)
        else:
            return False
        await trio.lowlevel.checkpoint()
        return True

    def _blocked(self, key: tuple[int, int]) -> bool:
        kept = self._kept.get(key)
        return kept is not None and self.links.full(kept.route[kept.hop + 1].stage)

    def ready(self) -> int:
        """Pieces of work that could be done now. From any thread."""
        return self._schedule.ready(self._blocked)

    async def _arrived(self, arrival: Arrival) -> None:
        frame = arrival.frame
        if frame is None:
            self.gone(arrival.sender, arrival.reason)
        elif not self._passes_on(frame) or not (self._held or self.links.full(self.index + 1)):
            await self._handle(arrival)
        elif len(self._held) < self.links.limits.sessions:
            self._held.append(arrival)
        else:
            self._refused["bounds"] += 1
            self._cannot(frame, "frame")

    def _passes_on(self, frame: Frame) -> bool:
        """Whether it is a score or a token for the next stage, and so nothing that anybody's gradient or step waits for."""
        asks = isinstance(frame, (frames.Prefill, frames.Decode)) or (isinstance(frame, frames.Forward) and frame.purpose == "score")
        return asks and not self.runtime.spec.has_head

    async def _handle(self, arrival: Arrival) -> None:
        frame = arrival.frame
        assert frame is not None
        control = isinstance(frame, frames.Control)
        if self._fence.check(frame.place, arrival.sender, None if control else self.participant.step):
            return
        with self._caught(lambda reason: self._cannot(frame, reason)):
            await self.handle(arrival.sender, frame, arrival.body)

    @contextlib.contextmanager
    def _caught(self, cannot: Callable[[frames.RefusalReason], None]) -> Iterator[None]:
        """What work may fail by is counted, and said with its reason by `cannot`."""
        try:
            yield
        except BadMessage as error:
            self._refused[error.reason] += 1
            cannot(_reason_of(error))
        except ValueError:  # `encode`: our own numbers are not finite
            self._refused["not_finite"] += 1
            cannot("not_finite")
        except (RuntimeError, MemoryError) as error:
            if not faults.of_device(error):
                raise
            self._refused[faults.DEVICE] += 1
            cannot("frame")

    def _cannot(self, frame: Frame, reason: frames.RefusalReason) -> None:
        """Tells the head at once: without it the deadline would."""
        if isinstance(frame, (frames.Prefill, frames.Decode)):
            self._forget(frame.session)
            self.links.send(0, frames.Lost(self.place, frame.session, reason))
        elif isinstance(frame, (frames.Forward, frames.Backward)):
            self.links.send(0, frames.Failed(self.place, frame.micro_batch, reason))
        elif isinstance(frame, (frames.Propose, frames.Embedding)):
            self.links.send(0, frames.Acknowledge(self.place, frame.attempt, reason, 0.0))

    def gone(self, stage: int, reason: str) -> None:
        """The stream of another stage ended. Nothing of what was begun with it can end well, but for a step that was promised."""
        if self.participant.lose():
            self._drop_all()
        else:
            self._drop_waves()

    async def handle(self, sender: int, frame: Frame, body: bytes) -> None:
        """One frame that passed the fence. Raises BadMessage, ValueError."""
        before = sender == self.index - 1 or (sender == 0 == self.index)
        match frame:
            case frames.Forward():
                await self._forward(sender, frame, body)
            case frames.Backward():
                hop = returning(self._routes.of(frame.micro_batch), sender, self.index)
                if hop is None:
                    raise BadMessage("bounds", f"a gradient from stage {sender}")
                kept = self._kept.get((frame.micro_batch, hop))
                if kept is None or kept.work.rows != frame.rows:
                    raise BadMessage("shape", "not a gradient that is waited for")
                gradient = decode(body, frame.rows, self.runtime.hidden_size, frame.codec)
                if self._schedule.backward_arrived((frame.micro_batch, hop)):
                    kept.gradient = gradient.to(self.runtime.device)
            case frames.Prefill() if before:
                await self._prefill(frame, body)
            case frames.Decode() if before:
                await self._decode(frame, body)
            case frames.Drop() if sender == 0:
                self._forget(frame.session)
            case frames.Embedding() if self.runtime.embedding() is not None and sender in (0, self.stages - 1):
                self._other_half(frame, body)
            case frames.Propose() if sender == 0:
                self._proposed(self.participant.propose(frame.place.step, frame.attempt, frame.micro_batches))
            case frames.Commit() if sender == 0:
                action = self.participant.commit(frame.place.step, frame.attempt)
                if isinstance(action, Take):
                    await self.take(frame.clip, frame.learning_rate)
                if action is not None:
                    self._confirm(frame.attempt)
            case frames.Abort() if sender == 0:
                if isinstance(self.participant.abort(frame.place.step, frame.attempt), Discard):
                    self._drop_all()
            case _:
                raise BadMessage("bounds", f"{type(frame).__name__} from stage {sender}")

    # Training.

    async def _forward(self, sender: int, frame: frames.Forward, body: bytes) -> None:
        about = body[: frame.about]
        work = read_micro_batch(about, frame.rows, self.links.limits, frame.purpose)
        route = self._routes.of(frame.micro_batch, frame.purpose)
        hop = arriving(route, sender, self.index)
        if hop is None:
            raise BadMessage("bounds", f"a forward from stage {sender}")
        if sender != self.index and sum(kept.x is not None for kept in self._kept.values()) >= KEPT:
            raise BadMessage("bounds", "more micro-batches than are ever in flight")
        x = None if hop == 0 else self._received(body[frame.about :], frame.rows, frame.codec)
        kept = Kept(route, hop, work, about, batch_of(work, self.runtime.device), x)
        if frame.purpose == "score":
            await self._score(frame.micro_batch, kept)
        elif self.participant.may_accumulate(frame.micro_batch) and self._schedule.forward_arrived(
            (frame.micro_batch, hop), self._limit(kept)
        ):
            self._kept[frame.micro_batch, hop] = kept
            self.observer.received(frame.micro_batch, about, sender, body[frame.about :])

    def _limit(self, kept: Kept) -> Limit:
        if kept.hop == len(kept.route) - 1:
            return "learn"
        return "free" if self.settings.swapped and kept.hop > 0 else "counted"

    async def _do(self, work: Work) -> None:
        kind, (micro_batch, hop) = work
        kept = self._kept[micro_batch, hop]
        part = kept.route[hop].part
        with self._caught(lambda reason: self.links.send(0, frames.Failed(self.place, micro_batch, reason))):
            if kind == "forward":
                self._pass_on(micro_batch, kept, "learn", await self._compute(lambda: self.runtime.forward(kept.batch, kept.x, part)))
                return
            if kind == "learn":
                sums: list[float] = []
                gradient = await self._compute(lambda: self._learn(micro_batch, kept, sums))
            else:
                gradient = await self._compute(lambda: self._backward(kept, part))
            del self._kept[micro_batch, hop]
            if hop == min(i for i, visit in enumerate(kept.route) if visit.stage == self.index):
                self.participant.accumulated(micro_batch)
            if hop > 0:
                assert gradient is not None
                codec = self.settings.gradient_codec
                frame = frames.Backward(self.place, micro_batch, codec, kept.work.rows)
                self.links.send(kept.route[hop - 1].stage, frame, encode(gradient, codec))
            else:
                self.finished(micro_batch)
            if kind == "learn":
                self.links.send(0, frames.Learnt(self.place, micro_batch, *sums))

    def _backward(self, kept: Kept, part: Part) -> torch.Tensor | None:
        assert kept.gradient is not None
        return self.runtime.backward(kept.batch, kept.x, kept.gradient, part)

    def finished(self, micro_batch: int) -> None:
        """Stage 0: the gradient went all the way through."""

    def _learn(self, micro_batch: int, kept: Kept, sums: list[float]) -> torch.Tensor | None:
        def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            value, parts = loss_of(kept.work, kept.batch, logprobs, entropy)
            sums.extend(parts)
            self.observer.learnt(micro_batch, logprobs.detach()[kept.batch.completion_mask].float().cpu())
            return value

        return self.runtime.learn(kept.batch, kept.x, kept.work.temperature, loss, kept.route[kept.hop].part)

    async def _score(self, micro_batch: int, kept: Kept) -> None:
        if not self.runtime.spec.has_head:
            self._pass_on(micro_batch, kept, "score", await self._compute(lambda: self.runtime.forward(kept.batch, kept.x)))
            return
        scores = await self._compute(lambda: self.runtime.score(kept.batch, kept.x, kept.work.temperature))
        mask = kept.batch.completion_mask
        body = b"".join(pack_logprobs(values[mask].cpu().numpy()) for values in scores)
        self.links.send(0, frames.Scores(self.place, micro_batch, int(mask.sum())), body)

    def _pass_on(self, micro_batch: int, kept: Kept, purpose: frames.Purpose, y: torch.Tensor) -> None:
        frame = frames.Forward(self.place, micro_batch, purpose, self.settings.codec, kept.work.rows, len(kept.about))
        body, receiver = encode(y, self.settings.codec), kept.route[kept.hop + 1].stage
        self.links.send(receiver, frame, kept.about + body)
        if purpose == "learn":
            self.observer.sent(micro_batch, receiver, body)

    def _received(self, body: bytes, rows: int, codec: ActivationCodec) -> torch.Tensor:
        if codec != self.settings.codec:
            raise BadMessage("schema", f"activations in {codec}, and the crew's are {self.settings.codec}")
        return decode(body, rows, self.runtime.hidden_size, codec).to(self.runtime.device)

    # Generation.

    async def _prefill(self, frame: frames.Prefill, body: bytes) -> None:
        about = body[: frame.about]
        questions = read_questions(about, frame.rows, self.links.limits)
        if frame.fingerprint != self.fingerprint:
            raise BadMessage("fingerprint", "a wave of another policy")
        if frame.session not in self._waves and len(self._waves) >= self.links.limits.sessions:
            raise BadMessage("session", "too many waves")
        x = None if self.index == 0 else self._received(body[frame.about :], frame.rows, frame.codec)
        prompts = prompts_of(questions, self.runtime.device)
        self._waves[frame.session] = questions
        self._drawn[frame.session] = questions.position
        y = await self._compute(lambda: self.runtime.prefill(frame.session, frame.fingerprint, prompts, x))
        if self.runtime.spec.has_head:
            self._draw(frame.session, list(questions.names), y.repeat_interleave(questions.num_generations, 0))
            return
        passed = frames.Prefill(self.place, frame.session, frame.fingerprint, self.settings.codec, frame.rows, frame.about)
        self.links.send(self.index + 1, passed, about + encode(y, self.settings.codec))

    async def _decode(self, frame: frames.Decode, body: bytes) -> None:
        names = unpack_ids(body[: 4 * frame.rows]).tolist()
        rest = body[4 * frame.rows :]
        wave = self._waves.get(frame.session)
        if wave is None:
            raise BadMessage("session", "not open here")
        if self._drawn[frame.session] + 1 >= wave.max_tokens:
            raise BadMessage("rows", "the wave has all its tokens")
        if self.index == 0:
            x = torch.tensor(unpack_ids(rest), device=self.runtime.device).long()
        else:
            x = self._received(rest, frame.rows, frame.codec)
        y = await self._compute(lambda: self.runtime.decode(frame.session, frame.fingerprint, names, x))
        self._drawn[frame.session] += 1
        if self.runtime.spec.has_head:
            self._draw(frame.session, names, y)
            return
        passed = frames.Decode(self.place, frame.session, frame.fingerprint, self.settings.codec, frame.rows)
        self.links.send(self.index + 1, passed, body[: 4 * frame.rows] + encode(y, self.settings.codec))

    def _draw(self, session: bytes, names: list[int], logits: torch.Tensor) -> None:
        """Tail: a token for each of `names` from logits (n, V). A completion's draw at a position is the same whoever else is left."""
        wave, position = self._waves[session], self._drawn[session]
        key = hashlib.blake2b(wave.seed.to_bytes(8, "big") + position.to_bytes(8, "big"), digest_size=8).digest()
        generator = torch.Generator(logits.device).manual_seed(int.from_bytes(key, "big") >> 1)
        every = logits.new_zeros(wave.total, logits.shape[1])
        every[names] = logits
        token, logprob = sample(every, wave.temperature, wave.top_p, generator)
        body = pack_ids(token[names].tolist()) + pack_logprobs(logprob[names].cpu().numpy())
        self.links.send(0, frames.Tokens(self.place, session, len(names)), body)

    def _forget(self, session: bytes) -> None:
        self._waves.pop(session, None)
        self._drawn.pop(session, None)
        self.runtime.sessions.drop(session)

    # Taking a step.

    def _proposed(self, action: Prepare | Answer | Confirm | None) -> None:
        if isinstance(action, Confirm):
            self._confirm(action.attempt)
        elif isinstance(action, Answer):
            self._answer(action)
        elif isinstance(action, Prepare):
            shared = self.runtime.embedding()
            if shared is not None:
                self._send_half(action.attempt, shared)
            self._prepared()

    def _send_half(self, attempt: int, shared: torch.nn.Parameter) -> None:
        """Our half of a tied embedding's gradient to the other end, exactly: both ends must stay one tensor. Part by part, when there is
        room; the tensor stays as it is, whatever `shared.grad` is by then. Raises ValueError."""
        gradient = torch.zeros_like(shared) if shared.grad is None else shared.grad
        if not bool(torch.isfinite(gradient).all()):
            raise ValueError("the embedding's gradient is not finite")
        self._half_left = (attempt, gradient, 0)

    def _send_part(self, attempt: int, gradient: torch.Tensor, first: int) -> None:
        self._half_left = None
        with self._caught(lambda reason: self.links.send(0, frames.Acknowledge(self.place, attempt, reason, 0.0))):
            part = gradient[first : first + self.links.limits.tokens].float()
            body, after = encode(part, "float32"), first + len(part)
            self.links.send(self._other_end, frames.Embedding(self.place, attempt, first, len(part)), body)
            self._half_left = (attempt, gradient, after) if after < len(gradient) else None

    @property
    def _other_end(self) -> int:
        """The stage that holds the tied embedding, too."""
        return self.stages - 1 if self.index == 0 else 0

    def _other_half(self, frame: frames.Embedding, body: bytes) -> None:
        if frame.place.step != self.participant.step or frame.attempt < self.participant.attempt:
            return
        shared = self.runtime.embedding()
        assert shared is not None
        if self._half is None or self._half[0] != frame.attempt:
            self._half = (frame.attempt, torch.zeros(shared.shape), 0)
        attempt, half, rows = self._half
        if frame.first != rows:  # streams keep order, so anything else is a repetition
            return
        half[rows : rows + frame.rows] = decode(body, frame.rows, self.runtime.hidden_size, "float32")
        self._half = (attempt, half, rows + frame.rows)
        self._prepared()

    def _prepared(self) -> None:
        """Once the gradients are final: acknowledge with their norm."""
        attempt = self.participant.attempt
        shared = self.runtime.embedding()
        if self.participant.phase != "preparing":
            return
        if shared is not None:
            if self._half is None or self._half[0] != attempt or self._half[2] < len(shared):
                return
            theirs = self._half[1].to(shared.device, shared.dtype)
            shared.grad = theirs if shared.grad is None else shared.grad + theirs
            self._half = None
        squared = layers = 0.0
        for name, parameter in self.runtime.model.named_parameters():
            if parameter.grad is not None and not (parameter is shared and self.index > 0):
                part = float(parameter.grad.double().square().sum())
                squared += part
                layers += part if ".layers." in name else 0.0
        if math.isfinite(squared):
            self.squared_norm = layers
        self._answer(self.participant.prepared(attempt, squared if math.isfinite(squared) else None, trio.current_time()))

    def _answer(self, answer: Answer | None) -> None:
        if answer is not None:
            self.links.send(0, frames.Acknowledge(self.place, answer.attempt, answer.refused, answer.squared_norm))

    def _confirm(self, attempt: int) -> None:
        self.links.send(0, frames.Done(self.place, attempt))

    async def take(self, clip: float, learning_rate: float) -> None:
        """The optimizer's part of a step that `participant` has just counted. It is never cancelled in between.

        Raises DeviceError where the device fails in the middle of it: what these weights are then, nobody knows.
        """
        self.last_commit = StepTaken(self.participant.attempt, clip, learning_rate)
        with trio.CancelScope(shield=True):  # around computing only
            await self._compute(lambda: self._step(clip, learning_rate))
            self.observer.stepped()
            self._drop_all()

    def _step(self, clip: float, learning_rate: float) -> None:
        if self.optimizer is not None:
            try:
                with self.lock:
                    self._move(self.optimizer, clip, learning_rate)
            except (RuntimeError, MemoryError) as error:
                if not faults.of_device(error):
                    raise
                raise DeviceError(f"half of a step: {error}") from error
        self.observer.committed(self)

    def _move(self, optimizer: torch.optim.AdamW, clip: float, learning_rate: float) -> None:
        for parameter in self.runtime.parameters():
            if parameter.grad is not None and clip < 1.0:
                parameter.grad.mul_(clip)
        own = self.lr_scale.next()
        rates = [learning_rate * (1.0 if group["shared"] else own) for group in optimizer.param_groups]
        if max(rates) > self.settings.learning_rate:
            self._refused["bounds"] += 1
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = min(rate, self.settings.learning_rate)
        optimizer.step()

    def _drop_all(self) -> None:
        """Gradients, inputs and caches: they belong to weights that have moved, or to a step that will not be."""
        for parameter in self.runtime.parameters():
            parameter.grad = None
        self._schedule.clear()
        self._kept.clear()
        self._half = self._half_left = None
        self.observer.dropped()
        self._drop_waves()

    def _drop_waves(self) -> None:
        self._waves.clear()
        self._drawn.clear()
        self.runtime.sessions.clear()


def _reason_of(error: BadMessage) -> frames.RefusalReason:
    match error.reason:
        case "session" | "fingerprint" | "rows" as reason:
            return reason
    return "frame"


def optimizer_of(runtime: StageRuntime) -> torch.optim.AdamW | None:
    """The optimizer of what is trained here; None where that is nothing.

    A tied embedding goes at the crew's learning rate alone, or its two copies would part.
    """
    shared = runtime.embedding()
    own = [p for p in runtime.parameters() if p is not shared]
    groups = [{"params": params, "shared": ends} for params, ends in ((own, False), ([] if shared is None else [shared], True)) if params]
    return torch.optim.AdamW(groups, weight_decay=WEIGHT_DECAY) if groups else None
