"""One member of a crew: frames in, one stage's work, frames out.

StageContext      stage, links, place in the crew's life
MicroBatches      forward, backward, scores
Decoding          prefill, decode
TiedEmbedding     the two halves of a tied embedding
StageWorker       the loop; one task handles one frame or one piece of work at a time
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal, Protocol, TypeVar

import torch
import trio

from swarmnode.errors import BadMessage, Refused
from swarmnode.policy.generate import sample
from swarmnode.policy.logprobs import Batch
from swarmnode.stages import wire
from swarmnode.stages.model import (
    StageOptimizer,
    StageRuntime,
    batch_of,
    decode,
    encode,
    loss_of,
    prompts_of,
)
from swarmnode.stages.wire import (
    CHUNK_BYTES,
    DEVICE_REASON,
    ActivationCodec,
    Fence,
    Frame,
    FrameLimits,
    Located,
    MicroBatch,
    Next,
    Participant,
    Place,
    Questions,
    Route,
    Routes,
    StagePart,
    StepAnswer,
    Taken,
    arriving,
    is_device_error,
    read_frame,
    read_micro_batch,
    read_questions,
    returning,
)
from swarmnode.wire import headed, limits
from swarmnode.wire.tensors import pack_ids, pack_logprobs, unpack_ids

# The thread in which a stage computes.

T = TypeVar("T")


class Compute(Protocol):
    """How a piece of work is computed: beside the event loop, in it, or measured."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def in_thread(work: Callable[[], T]) -> T:
    """Computes beside the event loop: heartbeats and other streams go on."""
    return await trio.to_thread.run_sync(work)


async def inline(work: Callable[[], T]) -> T:
    """Computes here and now: deterministic, for tests and for a crew in one process."""
    return work()


# The search for lost work: members count arrivals and departures, and the head finds the holder.
#
#     path             0 → 1 → … → the tail, and back to the head
#     holder           the first on the path that has the piece and has not sent it on
#     contradiction    one reports that it sent the piece, the next that it never came
#
# A member's report can shift the blame only to a neighbour on the path.

REMEMBERED: Final = 2 * wire.MICRO_BATCHES
"""Pieces of each neighbour that are counted, the latest: a step's, and what an aborted attempt has
left."""
GROWN: Final = 5
"""Questions for which it counts that a stage has done more."""
MOST_PATIENCE_SHARE: Final = 0.3
"""Share of the patience with a step for which a stage must have had the work to be named for it."""


class Passages:
    """How often each piece of work came from a neighbour, or went to it."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, OrderedDict[bytes, int]] = defaultdict(OrderedDict)
        """By neighbour, so that one that sends many of its own making makes us forget nobody
        else's."""

    def count(self, neighbour: int, frame: Frame) -> None:
        piece = piece_of(frame)
        if piece is None:
            return
        known = self._counts[neighbour]
        known[piece] = known.get(piece, 0) + 1
        if len(known) > REMEMBERED:
            known.popitem(last=False)

    def of(self, piece: bytes) -> int:
        return sum(known.get(piece, 0) for known in self._counts.values())


class Passed:
    """What one member counts."""

    def __init__(self) -> None:
        self.arrived, self.sent = Passages(), Passages()
        self.chunks = 0
        """Sent, whole ones: what takes a slow line long."""


def name_of(micro_batch: int) -> bytes:
    """A micro-batch's name among the pieces; a wave's is its session."""
    return micro_batch.to_bytes(wire.SESSION_BYTES, "big")


def piece_of(frame: Frame) -> bytes | None:
    """The piece of work that `frame` takes from one stage to the next; None for any other frame."""
    match frame:
        case wire.Forward() | wire.Backward() | wire.Scores():
            return name_of(frame.micro_batch)
        case wire.Prefill() | wire.Decode() | wire.Tokens():
            return frame.session
    return None


def path_of(route: Route, *, returns: bool) -> tuple[int, ...]:
    """The stages that a micro-batch visits. returns: as its gradient does, on the way that it came;
    else from the tail to the head."""
    there = tuple(hop.stage for hop in route)
    return there + (there[-2::-1] if returns else there[:1])


def path_of_wave(stages: int, tokens: int) -> tuple[int, ...]:
    """The stages that a wave visits for so many tokens."""
    return (*tokens * tuple(range(stages)), 0)


def holders(path: Sequence[int], said: Mapping[int, Located]) -> tuple[int, ...]:
    """Whose fault it may be that a piece has not come to the end of its path, which is the head:
    one stage, two that contradict each other, or nobody. said: what each stage has counted, the
    head too, which is idle; whoever said nothing has it."""
    came, went = Counter[int](), Counter[int]()
    for at, stage in enumerate(path[:-1]):
        following = path[at + 1]
        went[stage] += 1
        came[following] += 1
        mine, theirs = said.get(stage), said.get(following)
        if mine is None:
            return _without_head(stage)
        if mine.sent < went[stage]:
            if mine.full:  # whoever comes next does not read
                return _without_head(stage, following)
            return (path[at - 1],) if stage == 0 and at else _without_head(stage)
        if at + 2 == len(path) or theirs is None or theirs.arrived < came[following]:
            return _without_head(stage, following) if theirs is not None else (following,)
    return ()


def _without_head(*stages: int) -> tuple[int, ...]:
    return tuple(sorted({*stages} - {0}))


def parties(path: Sequence[int], stage: int, source: int) -> tuple[int, ...]:
    """Whose fault it may be that `stage` refuses what `source`, its neighbour on `path`, has sent
    it."""
    beside = any({a, b} == {stage, source} for a, b in pairwise(path))
    return _without_head(stage, source) or (stage,) if beside else (stage,)


class Search:
    """The head's, for the oldest piece that has not come back, asked about again and again while a
    call waits."""

    def __init__(self) -> None:
        self.piece = b""
        self.patience = math.inf
        """Seconds without a step, after which whoever had the work for most of them is named."""
        self.idle = True
        """Whether the head itself waited for others when it last asked: what it computes is with
        nobody else."""
        self._path: tuple[int, ...] = ()
        self._asked = -math.inf
        self._questions = 0
        self._said: dict[int, Located] = {}
        self._grew: dict[int, int] = {}
        """Stage → the question to which it last answered that it had done more."""
        self._stepped: float | None = None
        self._held: defaultdict[int, float] = defaultdict(float)
        """Seconds since the last step that each stage was found to have the work, or to be one of
        two."""

    def begins(self, piece: bytes, path: tuple[int, ...], now: float, seconds: float) -> bool:
        """Whether all are to be asked now, which is every so many seconds: until then the work was
        with whom it was found."""
        if now - self._asked < seconds:
            return False
        for stage in self.holders() if self._said else ():
            self._held[stage] += min(now - self._asked, 2 * seconds)
        if (piece, path) != (self.piece, self._path):
            self._said.clear()
            self._grew.clear()
        self.piece, self._path, self._asked = piece, path, now
        self._questions += 1
        return True

    def said(self, stage: int, located: Located) -> bool:
        """Takes an answer. Whether the piece is with `stage`, which computes; the head knows of
        itself whether it does."""
        if located.piece != self.piece:
            return False
        before = self._said.get(stage)
        self._said[stage] = located
        if before is None or located.worked <= before.worked:
            return False
        self._grew[stage] = self._questions
        return stage == 0 or stage in self.holders()

    def holders(self) -> tuple[int, ...]:
        return holders(self._path, self._said) if self.idle else ()

    def computes(self, stages: Sequence[int]) -> bool:
        """Whether one of them says so, at one of the last questions: a layer may take longer than
        is between two."""
        return any(self._questions - self._grew.get(stage, -GROWN) < GROWN for stage in stages)

    def stepped(self, now: float) -> None:
        self._stepped = now
        self._held.clear()

    def slowest(self, now: float) -> tuple[int, ...]:
        """The one, or the two, that had the work for most of the time, once patience is at its end:
        deadlines can be just kept."""
        self._stepped = now if self._stepped is None else self._stepped
        most = max(self._held.values(), default=0.0)
        if now - self._stepped <= self.patience or most < MOST_PATIENCE_SHARE * self.patience:
            return ()
        return tuple(stage for stage, seconds in self._held.items() if seconds == most)


# Frames over streams: one duplex stream to each other member, read at once, written in order.
#
# A send never waits for a slow neighbour: frames queue, and one task per neighbour writes. While a
# link is `full`, its member starts no forward, score or wave over it and sends no part of an
# embedding; gradients, tokens and the commit always pass. So two stages never wait for each other.
# A stream is not read while enough of its frames wait to be handled.

INBOX: Final = 64
"""Frames received and not yet handled, all neighbours together."""
INBOX_BYTES: Final = 64 * 2**20
"""Their bodies, at most; one frame of each neighbour may be on its way beyond that."""
OUTBOX: Final = 4096
"""Frames to one neighbour, queued: far more than a crew has in flight. The stream of a neighbour
that lets it fill up is ended."""
OUTBOX_BYTES: Final = 64 * 2**20
"""From here on the link to a neighbour is full. A frame that is begun before may be queued beyond
it, and gradients: no more of them than there are micro-batches in flight."""


@dataclass(frozen=True)
class Arrival:
    sender: int
    """Stage."""
    frame: Frame | None
    """None: the stream ended, or what came was no frame."""
    body: bytes
    reason: str = ""


class Inbox:
    """What arrived and was not handled yet, in order; bodies from others are counted. own: our
    stage."""

    def __init__(self, own: int) -> None:
        self._own = own
        self._send, self._receive = trio.open_memory_channel[Arrival | None](INBOX)
        self._unhandled = 0
        """Bytes of others' bodies in it."""
        self._handled = trio.Event()
        self.awaited = False
        """Its reader waits for something to arrive, and does nothing else."""

    async def room(self) -> None:
        """Returns once another stream may be read."""
        while self._unhandled >= INBOX_BYTES:
            await self._handled.wait()

    async def put(self, arrival: Arrival) -> None:
        if arrival.sender != self._own:
            self._unhandled += len(arrival.body)
        await self._send.send(arrival)

    def put_room(self) -> None:
        """There is room again on a link that was full."""
        # a member that has arrivals to take looks for room after them anyway
        with contextlib.suppress(trio.WouldBlock):
            self._send.send_nowait(None)

    def take_nowait(self) -> Arrival | None:
        """The next arrival; None: there is room again on a link that was full. Raises
        trio.WouldBlock."""
        return self._taken(self._receive.receive_nowait())

    async def take(self) -> Arrival | None:
        """As `take_nowait`, once there is something."""
        self.awaited = True
        try:
            return self._taken(await self._receive.receive())
        finally:
            self.awaited = False

    def _taken(self, arrival: Arrival | None) -> Arrival | None:
        if arrival is not None and arrival.sender != self._own:
            self._unhandled -= len(arrival.body)
            self._handled.set()
            self._handled = trio.Event()
        return arrival


class Links:
    """`streams`: stage → stream. Frames to our own stage come back without a stream."""

    def __init__(
        self, stage: int, streams: Mapping[int, trio.abc.Stream], limits: FrameLimits
    ) -> None:
        self.stage = stage
        self.limits = limits
        self._streams = dict(streams)
        self.inbox = Inbox(stage)
        self._to_self, self._from_self = trio.open_memory_channel[Arrival](OUTBOX)
        self._out = {peer: trio.open_memory_channel[bytes](OUTBOX) for peer in self._streams}
        self.queued = dict.fromkeys(self._streams, 0)
        """Bytes not sent yet, of those whose stream takes any."""
        self.frames_received = 0
        self.passed = Passed()
        self.at_once: Callable[[int, Frame], bool] = lambda sender, frame: False
        """Whether it has dealt with a frame of stage `sender`, which goes to no inbox then: what
        cannot wait for computing."""
        self.counts: Callable[[int, Frame], bool] = lambda sender, frame: True
        """Whether a frame of stage `sender` is among what `passed` counts: what is made up for that
        shall not be."""
        self.refused: Counter[str] = Counter()
        """What was no frame, by FRAME_REASONS, and `unsent`: queues that were full."""
        self._nursery: trio.Nursery | None = None

    def full(self, stage: int) -> bool:
        """Whether nothing new is to be begun that goes to `stage`. Never of a stream that is gone:
        its end arrives as such."""
        return self.queued.get(stage, 0) >= OUTBOX_BYTES

    @property
    def any_full(self) -> bool:
        return any(self.full(stage) for stage in self.queued)

    def send(self, stage: int, frame: Frame, body: bytes = b"") -> None:
        """Queues. To a stage whose stream is gone it does nothing; one whose queue has too many
        frames loses its stream."""
        if stage == self.stage:
            self._to_self.send_nowait(Arrival(stage, frame, body))
            return
        if stage not in self.queued:
            return
        data = headed.pack(frame, body)
        try:
            self._out[stage][0].send_nowait(data)
        except trio.WouldBlock:
            self.refused["unsent"] += 1
            self._give_up(stage)
        else:
            self.queued[stage] += len(data)
            self.passed.sent.count(stage, frame)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._loop_back)
            for peer, stream in self._streams.items():
                nursery.start_soon(self._read, peer, stream)
                nursery.start_soon(self._write, peer, stream)

    def _give_up(self, peer: int) -> None:
        """Frames to it cannot be kept, and none is dropped while others go on: this stream ends,
        and the crew gets new ones."""
        self._no_more(peer)
        if self._nursery is not None:
            self._nursery.start_soon(trio.aclose_forcefully, self._streams[peer])

    def _no_more(self, peer: int) -> None:
        """What was held back for it waits for nothing any more."""
        self.queued.pop(peer, None)
        self.inbox.put_room()

    async def _loop_back(self) -> None:
        async for arrival in self._from_self:
            await self.inbox.put(arrival)

    async def _read(self, peer: int, stream: trio.abc.Stream) -> None:
        reason = "closed"
        try:
            while True:
                await self.inbox.room()
                got = await read_frame(stream, self.limits)
                if got is None:
                    break
                self.frames_received += 1
                if self.counts(peer, got[0]):
                    self.passed.arrived.count(peer, got[0])
                if not self.at_once(peer, got[0]):
                    await self.inbox.put(Arrival(peer, *got))
        except BadMessage as error:
            reason = error.reason
            self.refused[reason] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the arrival below says it
        await self.inbox.put(Arrival(peer, None, b"", reason))

    async def _write(self, peer: int, stream: trio.abc.Stream) -> None:
        try:
            async for data in self._out[peer][1]:
                for at in range(0, len(data), CHUNK_BYTES):
                    part = data[at : at + CHUNK_BYTES]
                    await stream.send_all(part)
                    if peer not in self.queued:
                        return
                    self.passed.chunks += len(part) == CHUNK_BYTES
                    was_full = self.full(peer)
                    self.queued[peer] -= len(part)
                    if was_full and not self.full(peer):
                        self.inbox.put_room()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._no_more(peer)


# The interface through which a member reports its training to recorders, probes and averaging.


class Observer:
    """This one listens to nothing. All but `committed` are called between two computations."""

    def received(self, micro_batch: int, about: bytes, sender: int, body: bytes) -> None:
        """A micro-batch to learn from came. about: `work.MicroBatch`; body: activations in the
        crew's codec, empty at the start."""

    def sent(self, micro_batch: int, receiver: int, body: bytes) -> None:
        """Its activations went on."""

    def learnt(self, micro_batch: int, logprobs: torch.Tensor) -> None:
        """Tail: log-probabilities (tokens,) of what it is learnt from, before the step."""

    def committed(self, worker: StageWorker) -> None:
        """The step is taken: `worker.participant.step` of them now. Where the member computes;
        nothing else does meanwhile. What the device cannot do of it (`is_device_error`) is
        counted, and left out."""

    def stepped(self) -> None:
        """After `committed`, in the member's task."""

    def dropped(self) -> None:
        """Everything that was received since the last step will be in none."""


# The state that all parts of a member share: stage, links, place in the crew's life, refusals.


@dataclass(frozen=True)
class CrewSettings:
    """What all members of a crew agree on."""

    base: bytes
    """32 bytes: fingerprint of the policy that training began with."""
    codec: ActivationCodec = "bfloat16"
    gradient_codec: ActivationCodec = "bfloat16"
    swapped: bool = False
    """CheckFree+: half of the micro-batches of a step with the first two and the last two stages
    exchanged."""
    learning_rate: float = math.inf
    """This node's own bound: no stage here takes a step with more, whatever the head says."""


@dataclass
class StageContext:
    runtime: StageRuntime
    links: Links
    fence: Fence
    settings: CrewSettings
    compute: Compute
    participant: Participant
    observers: list[Observer] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Frames that passed their header and then were not what they said, by reason."""

    @property
    def index(self) -> int:
        return self.runtime.spec.index

    @property
    def stages(self) -> int:
        return self.runtime.spec.stages

    @property
    def place(self) -> Place:
        p = self.fence.place
        return Place(p.crew, p.stage, self.participant.step)

    @property
    def fingerprint(self) -> bytes:
        """32 bytes: the fingerprint of the policy that all stages together are at this step."""
        return wire.policy_fingerprint(self.settings.base, self.place, self.settings.codec)

    def activations(self, body: bytes, rows: int, codec: ActivationCodec) -> torch.Tensor:
        """(rows, H) on the device. Raises BadMessage, also for another codec than the crew's."""
        if codec != self.settings.codec:
            raise BadMessage(
                "schema", f"activations in {codec}, and the crew's are {self.settings.codec}"
            )
        return decode(body, rows, self.runtime.hidden_size, codec).to(self.runtime.device)

    @contextlib.contextmanager
    def caught(self, cannot: Callable[[wire.RefusalReason], None]) -> Iterator[None]:
        """What work may fail by is counted, and passed on with its reason by `cannot`."""
        try:
            yield
        except BadMessage as error:
            self.refused[error.reason] += 1
            cannot(_reason_of(error))
        except ValueError:  # `encode`: our own numbers are not finite
            self.refused["not_finite"] += 1
            cannot("not_finite")
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            self.refused[DEVICE_REASON] += 1
            cannot("device")


def _reason_of(error: BadMessage) -> wire.RefusalReason:
    match error.reason:
        case "session" | "fingerprint" | "rows" as reason:
            return reason
    return "frame"


# The stage's part in generation: open waves, a prefill, then one token at a time. The tail samples.


class Decoding:
    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._waves: dict[bytes, Questions] = {}
        self._drawn: dict[bytes, int] = {}
        """Session → tokens that each completion has."""

    async def prefill(self, frame: wire.Prefill, body: bytes) -> None:
        """Raises BadMessage, ValueError."""
        at, runtime = self._context, self._context.runtime
        about = body[: frame.about]
        questions = read_questions(about, frame.rows, at.links.limits)
        if frame.fingerprint != at.fingerprint:
            raise BadMessage("fingerprint", "a wave of another policy")
        if frame.session not in self._waves and len(self._waves) >= at.links.limits.sessions:
            raise BadMessage("session", "too many waves")
        x = None if at.index == 0 else at.activations(body[frame.about :], frame.rows, frame.codec)
        prompts = prompts_of(questions, runtime.device)
        self._waves[frame.session] = questions
        self._drawn[frame.session] = questions.position
        y = await at.compute(lambda: runtime.prefill(frame.session, frame.fingerprint, prompts, x))
        if runtime.spec.has_head:
            self._draw(
                frame.session,
                list(questions.names),
                y.repeat_interleave(questions.num_generations, 0),
            )
            return
        passed = wire.Prefill(
            at.place, frame.session, frame.fingerprint, at.settings.codec, frame.rows, frame.about
        )
        at.links.send(at.index + 1, passed, about + encode(y, at.settings.codec))

    async def decode(self, frame: wire.Decode, body: bytes) -> None:
        """Raises BadMessage, ValueError."""
        at, runtime = self._context, self._context.runtime
        names = unpack_ids(body[: 4 * frame.rows]).tolist()
        rest = body[4 * frame.rows :]
        wave = self._waves.get(frame.session)
        if wave is None:
            raise BadMessage("session", "not open here")
        if self._drawn[frame.session] + 1 >= wave.max_tokens:
            raise BadMessage("rows", "the wave has all its tokens")
        ids = lambda: torch.tensor(unpack_ids(rest), device=runtime.device).long()
        x = ids() if at.index == 0 else at.activations(rest, frame.rows, frame.codec)
        y = await at.compute(lambda: runtime.decode(frame.session, frame.fingerprint, names, x))
        self._drawn[frame.session] += 1
        if runtime.spec.has_head:
            self._draw(frame.session, names, y)
            return
        passed = wire.Decode(
            at.place, frame.session, frame.fingerprint, at.settings.codec, frame.rows
        )
        at.links.send(at.index + 1, passed, body[: 4 * frame.rows] + encode(y, at.settings.codec))

    def _draw(self, session: bytes, names: list[int], logits: torch.Tensor) -> None:
        """Tail: a token for each of `names` from logits (n, V). A completion's draw at a position
        is the same whoever else is left."""
        wave, position = self._waves[session], self._drawn[session]
        key = hashlib.blake2b(
            wave.seed.to_bytes(8, "big") + position.to_bytes(8, "big"), digest_size=8
        ).digest()
        generator = torch.Generator(logits.device).manual_seed(int.from_bytes(key, "big") >> 1)
        every = logits.new_zeros(wave.total, logits.shape[1])
        every[names] = logits
        token, logprob = sample(every, wave.temperature, wave.top_p, generator)
        body = pack_ids(token[names].tolist()) + pack_logprobs(logprob[names].cpu().numpy())
        self._context.links.send(0, wire.Tokens(self._context.place, session, len(names)), body)

    def forget(self, session: bytes) -> None:
        self._waves.pop(session, None)
        self._drawn.pop(session, None)
        self._context.runtime.sessions.drop(session)

    def clear(self) -> None:
        self._waves.clear()
        self._drawn.clear()
        self._context.runtime.sessions.clear()


# 1F1B (PipeDream-Flush, arXiv 2104.04473 §2.2.1) with twice the room: a stage goes backward
# whenever it can, and forward only while fewer than 2 × (stages − its index) of its micro-batches
# wait for their gradient. A line takes as long as the computation, and with the paper's room a
# stage would wait for gradients in flight. In a swapped run only the head limits, because limits at
# both ends would deadlock.

Visit = tuple[int, int]
"""(micro-batch, which hop of its route)."""
Work = tuple[Literal["forward", "backward", "learn"], Visit]
"""What to do with which micro-batch. `learn` is the tail's forward, loss and backward in one."""
Limit = Literal["counted", "free", "learn"]
"""Whether a forward waits for room. What is learnt at once needs none."""


ROOM: Final = 2
"""Times what 1F1B needs among stages that are not apart."""
MOST_FORWARDS: Final = 32
"""Where there is more room than 1F1B needs: at the next stage what a step that failed has left
counts too (`limits.STAGE_WAITING`)."""


class Schedule:
    """A micro-batch that visits a stage twice has two names."""

    def __init__(self, stage: int, stages: int) -> None:
        self.waiting: deque[tuple[Visit, Limit]] = deque()
        """Forwards that came and were not yet run."""
        self.in_flight: dict[Visit, Limit] = {}
        """Micro-batches whose gradient is awaited: inputs kept."""
        self._room = max(stages - stage, min(ROOM * (stages - stage), MOST_FORWARDS))
        self._backwards: deque[Visit] = deque()
        self._seen: set[Visit] = set()

    def forward_arrived(self, micro_batch: Visit, limit: Limit) -> bool:
        """False, and nothing changes, where it came before in this step."""
        if micro_batch in self._seen:
            return False
        self._seen.add(micro_batch)
        self.waiting.append((micro_batch, limit))
        return True

    def backward_arrived(self, micro_batch: Visit) -> bool:
        """False, and nothing changes, where no such micro-batch waits for its gradient."""
        if micro_batch not in self.in_flight or micro_batch in self._backwards:
            return False
        self._backwards.append(micro_batch)
        return True

    def next(self, blocked: Callable[[Visit], bool] = lambda micro_batch: False) -> Work | None:
        """What to do now, and it counts as done; None while there is nothing but to wait. No
        forward of a micro-batch that is `blocked`, because there is no room where its activations
        would go; what is learnt at once and every backward are never held up by that.
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
        if limit == "learn":
            return "learn", micro_batch
        self.in_flight[micro_batch] = limit
        return "forward", micro_batch

    def ready(self, blocked: Callable[[Visit], bool] = lambda micro_batch: False) -> int:
        """Pieces of work that `next` would give: what waits for others is none. From any thread."""
        return len(self._backwards) + sum(1 for _ in self._may_begin(blocked))

    def _may_begin(self, blocked: Callable[[Visit], bool]) -> Iterator[tuple[Visit, Limit]]:
        full = sum(limit == "counted" for limit in list(self.in_flight.values())) >= self._room
        for micro_batch, limit in list(self.waiting):
            if limit == "learn" or not ((full and limit == "counted") or blocked(micro_batch)):
                yield micro_batch, limit

    def clear(self) -> None:
        """The step is over, one way or the other."""
        self.waiting.clear()
        self._backwards.clear()
        self.in_flight.clear()
        self._seen.clear()


# The stage's part in training and scoring: forward, backward, and on to the next stage.

KEPT = limits.STAGE_WAITING
"""Micro-batches of others whose gradient is awaited, with what an aborted attempt has left: a
schedule has no more than 32 in flight, or as many as there are stages."""


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


class MicroBatches:
    """finished: called on stage 0 with the number of a micro-batch whose gradient went all the way
    through.

    Raises Refused for swapped stages where there are fewer than four, or under an adapter.
    """

    def __init__(self, context: StageContext, finished: Callable[[int], None]) -> None:
        if context.settings.swapped and hasattr(context.runtime.model, "peft_config"):
            raise Refused(
                "swapped stages are for whole weights, and only an adapter is trained here"
            )
        self.schedule = Schedule(context.index, context.stages)
        self.kept: dict[tuple[int, int], Kept] = {}
        self._proposed: dict[int, bytes] | None = None
        """Micro-batch → hash of its description, of the present attempt; None until the head has
        said."""
        self._early: list[tuple[int, wire.Forward, bytes]] = []
        """What came before the proposal: of this attempt, if it came another way sooner, or left of
        the one before."""
        self._context = context
        self._finished = finished
        self.routes = Routes(context.stages, context.settings.swapped)

    async def propose(self, hashes: dict[int, bytes]) -> None:
        """The step is made of these micro-batches, whose descriptions have these hashes. What came
        before is taken up, if it is one."""
        early, self._early, self._proposed = self._early, [], hashes
        at = self._context
        for sender, frame, body in early:
            failed = lambda reason, n=frame.micro_batch, source=sender: at.links.send(
                0, wire.Failed(at.place, n, reason, source)
            )
            with at.caught(failed):
                await self.forward(sender, frame, body)

    async def forward(self, sender: int, frame: wire.Forward, body: bytes) -> None:
        """Takes it up, or scores it at once. Raises BadMessage, ValueError."""
        at = self._context
        about = body[: frame.about]
        if (
            sender != at.index
            and sum(kept.x is not None for kept in self.kept.values()) + len(self._early) >= KEPT
        ):
            raise BadMessage("bounds", "more micro-batches than are ever in flight")
        if frame.purpose == "learn":
            if self._proposed is None:
                self._early.append((sender, frame, body))
                return
            if frame.micro_batch not in self._proposed:
                return  # of an attempt that is over
            if wire.description_hash(about) != self._proposed[frame.micro_batch]:
                raise BadMessage("shape", "not the description that the head has proposed")
        work = read_micro_batch(about, frame.rows, at.links.limits, frame.purpose)
        route = self.routes.of(frame.micro_batch, frame.purpose)
        hop = arriving(route, sender, at.index)
        assert hop is not None, "see `sends`"
        x = None if hop == 0 else at.activations(body[frame.about :], frame.rows, frame.codec)
        kept = Kept(route, hop, work, about, batch_of(work, at.runtime.device), x)
        if frame.purpose == "score":
            await self._score(frame.micro_batch, kept)
        elif at.participant.may_accumulate(frame.micro_batch) and self.schedule.forward_arrived(
            (frame.micro_batch, hop), self._limit(kept)
        ):
            self.kept[frame.micro_batch, hop] = kept
            for observer in at.observers:
                observer.received(frame.micro_batch, about, sender, body[frame.about :])

    def backward(self, sender: int, frame: wire.Backward, body: bytes) -> None:
        """The gradient of what was sent on. Raises BadMessage."""
        at = self._context
        hop = returning(self.routes.of(frame.micro_batch), sender, at.index)
        assert hop is not None, "see `sends`"
        kept = self.kept.get((frame.micro_batch, hop))
        if kept is None or kept.work.rows != frame.rows:
            raise BadMessage("shape", "not a gradient that is waited for")
        gradient = decode(body, frame.rows, at.runtime.hidden_size, frame.codec)
        if self.schedule.backward_arrived((frame.micro_batch, hop)):
            kept.gradient = gradient.to(at.runtime.device)

    def path(self, micro_batch: int, purpose: wire.Purpose) -> tuple[int, ...]:
        """The stages that it visits, from the head and back to it."""
        return path_of(self.routes.of(micro_batch, purpose), returns=purpose == "learn")

    def next(self) -> Work | None:
        """What to `do` next, where there is room for what comes of it."""
        return self.schedule.next(self._blocked)

    def ready(self) -> int:
        """Pieces of work that could be done now. From any thread."""
        return self.schedule.ready(self._blocked)

    def _blocked(self, key: tuple[int, int]) -> bool:
        kept = self.kept.get(key)
        return kept is not None and self._context.links.full(kept.route[kept.hop + 1].stage)

    def _limit(self, kept: Kept) -> Limit:
        if kept.hop == len(kept.route) - 1:
            return "learn"
        return "free" if self._context.settings.swapped and kept.hop > 0 else "counted"

    async def do(self, work: Work) -> None:
        kind, (micro_batch, hop) = work
        at, kept = self._context, self.kept[micro_batch, hop]
        part = kept.route[hop].part
        before = kept.route[hop + (1 if kind == "backward" else -1 if hop else 0)].stage
        failed = lambda reason: at.links.send(
            0,
            wire.Failed(at.place, micro_batch, reason, at.index if reason == "device" else before),
        )
        with at.caught(failed):
            if kind == "forward":
                self._pass_on(
                    micro_batch,
                    kept,
                    "learn",
                    await at.compute(lambda: at.runtime.forward(kept.batch, kept.x, part)),
                )
                return
            if kind == "learn":
                sums: list[float] = []
                gradient = await at.compute(lambda: self._learn(micro_batch, kept, sums))
            else:
                gradient = await at.compute(lambda: self._backward(kept, part))
            del self.kept[micro_batch, hop]
            if hop == min(i for i, visit in enumerate(kept.route) if visit.stage == at.index):
                at.participant.accumulated(micro_batch)
            if hop > 0:
                assert gradient is not None
                codec = at.settings.gradient_codec
                frame = wire.Backward(at.place, micro_batch, codec, kept.work.rows)
                at.links.send(kept.route[hop - 1].stage, frame, encode(gradient, codec))
            else:
                self._finished(micro_batch)
            if kind == "learn":
                at.links.send(0, wire.Learnt(at.place, micro_batch, *sums))

    def _backward(self, kept: Kept, part: StagePart) -> torch.Tensor | None:
        assert kept.gradient is not None
        return self._context.runtime.backward(kept.batch, kept.x, kept.gradient, part)

    def _learn(self, micro_batch: int, kept: Kept, sums: list[float]) -> torch.Tensor | None:
        at = self._context

        def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            value, parts = loss_of(kept.work, kept.batch, logprobs, entropy)
            sums.extend(parts)
            for observer in at.observers:
                observer.learnt(
                    micro_batch, logprobs.detach()[kept.batch.completion_mask].float().cpu()
                )
            return value

        return at.runtime.learn(
            kept.batch, kept.x, kept.work.temperature, loss, kept.route[kept.hop].part
        )

    async def _score(self, micro_batch: int, kept: Kept) -> None:
        at = self._context
        if not at.runtime.spec.has_head:
            self._pass_on(
                micro_batch,
                kept,
                "score",
                await at.compute(lambda: at.runtime.forward(kept.batch, kept.x)),
            )
            return
        scores = await at.compute(
            lambda: at.runtime.score(kept.batch, kept.x, kept.work.temperature)
        )
        mask = kept.batch.completion_mask
        body = b"".join(pack_logprobs(values[mask].cpu().numpy()) for values in scores)
        at.links.send(0, wire.Scores(at.place, micro_batch, int(mask.sum())), body)

    def _pass_on(
        self, micro_batch: int, kept: Kept, purpose: wire.Purpose, y: torch.Tensor
    ) -> None:
        at = self._context
        frame = wire.Forward(
            at.place, micro_batch, purpose, at.settings.codec, kept.work.rows, len(kept.about)
        )
        body, receiver = encode(y, at.settings.codec), kept.route[kept.hop + 1].stage
        at.links.send(receiver, frame, kept.about + body)
        for observer in at.observers if purpose == "learn" else ():
            observer.sent(micro_batch, receiver, body)

    def clear(self) -> None:
        self.schedule.clear()
        self.kept.clear()
        self._proposed = None
        self._early.clear()


# The table of senders: which stage sends which frame to which stage (protocol/04, 2.1). Any other
# frame is ignored without an answer.


def sends(frame: Frame, sender: int, stage: int, stages: int, routes: Routes) -> bool:
    """Whether `sender` has such a frame for `stage` (protocol/04, 2.1). What the head is to do
    itself it sends to itself."""
    tail = stages - 1
    match frame:
        case wire.Forward():
            return arriving(routes.of(frame.micro_batch, frame.purpose), sender, stage) is not None
        case wire.Backward():
            return returning(routes.of(frame.micro_batch), sender, stage) is not None
        case wire.Prefill() | wire.Decode():
            return sender == stage - 1 or sender == stage == 0
        case wire.Learnt() | wire.Scores() | wire.Tokens():
            return (sender, stage) == (tail, 0)
        case wire.Embedding():
            return {sender, stage} == {0, tail}
        case wire.Lost() | wire.Failed() | wire.Acknowledge() | wire.Done() | wire.Located():
            return stage == 0
        case _:
            return sender == 0


# A tied embedding's gradient: each end has one half and sends it to the other, exactly.


class TiedEmbedding:
    """One end's share in the sum, for one attempt at a step at a time."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._theirs: tuple[int, torch.Tensor, int] | None = None
        """(attempt, the other half, its rows so far)."""
        self._left: tuple[int, torch.Tensor, int] | None = None
        """(attempt, our half, the next row to send)."""

    @property
    def other_end(self) -> int:
        return self._context.stages - 1 if self._context.index == 0 else 0

    @property
    def sends(self) -> bool:
        """Whether a part of our half is left to send, and there is room for it."""
        return self._left is not None and not self._context.links.full(self.other_end)

    def begin(self, attempt: int, shared: torch.nn.Parameter) -> None:
        """Our half is to be sent, part by part, when there is room; it stays as it is, whatever
        `shared.grad` is by then.

        Raises ValueError for a gradient that is not finite.
        """
        gradient = torch.zeros_like(shared) if shared.grad is None else shared.grad
        if not bool(torch.isfinite(gradient).all()):
            raise ValueError("the embedding's gradient is not finite")
        self._left = (attempt, gradient, 0)

    def send_part(self) -> None:
        assert self._left is not None
        attempt, gradient, first = self._left
        self._left = None
        at = self._context
        with at.caught(
            lambda reason: at.links.send(0, wire.Acknowledge(at.place, attempt, reason, 0.0))
        ):
            part = gradient[first : first + at.links.limits.tokens].float()
            body, after = encode(part, "float32"), first + len(part)
            at.links.send(self.other_end, wire.Embedding(at.place, attempt, first, len(part)), body)
            self._left = (attempt, gradient, after) if after < len(gradient) else None

    def take_part(self, frame: wire.Embedding, body: bytes) -> bool:
        """Whether it is the next part of the other half. Raises BadMessage."""
        participant, shared = self._context.participant, self._context.runtime.embedding()
        if frame.place.step != participant.step or frame.attempt < participant.attempt:
            return False
        assert shared is not None
        if self._theirs is None or self._theirs[0] != frame.attempt:
            self._theirs = (frame.attempt, torch.zeros(shared.shape), 0)
        attempt, half, rows = self._theirs
        if frame.first != rows:  # streams keep order, so anything else is a repetition
            return False
        half[rows : rows + frame.rows] = decode(
            body, frame.rows, self._context.runtime.hidden_size, "float32"
        )
        self._theirs = (attempt, half, rows + frame.rows)
        return True

    def add(self, attempt: int, shared: torch.nn.Parameter) -> bool:
        """Add the other half to our gradient. False where it is not all there."""
        if self._theirs is None or self._theirs[0] != attempt or self._theirs[2] < len(shared):
            return False
        theirs = self._theirs[1].to(shared.device, shared.dtype)
        shared.grad = theirs if shared.grad is None else shared.grad + theirs
        self._theirs = None
        return True

    def clear(self) -> None:
        self._theirs = self._left = None


# The worker's loop.

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
        self.fault: tuple[int | None, str] | None = None
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
        always taken; see `Links`."""
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
                    0, wire.Acknowledge(self.place, attempt, reason, 0.0)
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
        asks = isinstance(frame, (wire.Prefill, wire.Decode)) or (
            isinstance(frame, wire.Forward) and frame.purpose == "score"
        )
        return asks and not self.runtime.spec.has_head

    async def _handle(self, arrival: Arrival) -> None:
        frame = arrival.frame
        assert frame is not None
        control = isinstance(frame, wire.Control)
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

    def _cannot(self, arrival: Arrival, frame: Frame, reason: wire.RefusalReason) -> None:
        """Notifies the head at once: without it the deadline would."""
        source = self.index if reason == "device" else arrival.sender
        if isinstance(frame, (wire.Prefill, wire.Decode)):
            self.waves.forget(frame.session)
            self.links.send(0, wire.Lost(self.place, frame.session, reason, source))
        elif isinstance(frame, (wire.Forward, wire.Backward)):
            self.links.send(0, wire.Failed(self.place, frame.micro_batch, reason, source))
        elif isinstance(frame, (wire.ProposeStep, wire.Embedding)):
            self.links.send(0, wire.Acknowledge(self.place, frame.attempt, reason, 0.0))

    def _at_once(self, sender: int, frame: Frame) -> bool:
        """A question of the head, asked because nothing comes: it does not wait until something is
        computed."""
        if not isinstance(frame, wire.Locate):
            return False
        if sender != 0:
            self.context.refused["bounds"] += 1
        elif self.context.fence.check(frame.place, sender, None) is None:
            self.links.send(0, self.located(frame.piece))
        return True

    def located(self, piece: bytes) -> wire.Located:
        """How far it is, as far as this stage knows."""
        passed = self.links.passed
        worked = self.runtime.worked + passed.chunks
        return wire.Located(
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
                StepAnswer(self.participant.attempt, "micro_batches")
                if self.participant.lost
                else None
            )
        else:
            self.waves.clear()

    def finished(self, micro_batch: int) -> None:
        """Stage 0: the gradient went all the way through."""

    async def handle(self, sender: int, frame: Frame, body: bytes) -> None:
        """One frame that passed the fence. Raises BadMessage, ValueError."""
        match frame:
            case wire.Forward():
                await self.micro_batches.forward(sender, frame, body)
            case wire.Backward():
                self.micro_batches.backward(sender, frame, body)
            case wire.Prefill():
                await self.waves.prefill(frame, body)
            case wire.Decode():
                await self.waves.decode(frame, body)
            case wire.Drop():
                self.waves.forget(frame.session)
            case wire.Embedding() if self.runtime.embedding() is not None:
                if self.tied.take_part(frame, body):
                    self._prepared()
            case wire.ProposeStep():
                await self._propose(frame, body)
            case wire.Commit():
                async with self.optimizer.moving:
                    action = self.participant.commit(frame.place.step, frame.attempt)
                    if action == "take":
                        await self.take(frame.clip, frame.learning_rate)
                if action is not None:
                    self._confirm(frame.attempt)
            case wire.Abort():
                if self.participant.abort(frame.place.step, frame.attempt):
                    self._drop_all()
            case _:
                raise BadMessage("bounds", f"{type(frame).__name__} from stage {sender}")

    # Taking a step.

    async def _propose(self, frame: wire.ProposeStep, body: bytes) -> None:
        participant, size = self.participant, wire.DESCRIPTION_BYTES
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

    def _proposed(self, attempt: int, action: Next | StepAnswer | None) -> None:
        if action == "confirm":
            self._confirm(attempt)
        elif isinstance(action, StepAnswer):
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

    def _answer(self, answer: StepAnswer | None) -> None:
        if answer is not None:
            self.links.send(
                0,
                wire.Acknowledge(self.place, answer.attempt, answer.refused, answer.squared_norm),
            )

    def _confirm(self, attempt: int) -> None:
        self.links.send(0, wire.Done(self.place, attempt))

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
                if not is_device_error(error):
                    raise
                self.context.refused[DEVICE_REASON] += 1
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
