"""The exchange of checkpoints and other bodies between the trainers of a crew. Torch.

One duplex stream leads to each other member, with a reader and a writer. `StateExchange` is this
member. `StateFetcher` sends requests, `StageStateServer` answers them, `CheckpointSharing`
announces and fetches new checkpoints, and `StateChannel` has the streams. A request returns a body,
in chunks. Chunks of several bodies alternate. A request fails when nothing arrives for `seconds`.
Invalid input is counted. After MAX_BAD_MESSAGES invalid messages of a stage its stream is closed,
and a closed stream ends the crew.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec
import structlog
import trio

from swarmnode.errors import (
    BadMessage,
    Incompatible,
    PeerError,
    PeerTimeout,
    StateError,
    Unavailable,
)
from swarmnode.stages.specs import StageSpec
from swarmnode.stages.stage_frames import (
    CHUNK_BYTES,
    Fence,
    FrameLimits,
    Place,
    activation_bytes,
    is_device_error,
    read_micro_batch,
)
from swarmnode.stages.state_messages import (
    STATE_REASONS,
    AnnounceMessage,
    AnyStateMessage,
    AskMessage,
    BodyKind,
    ChunkMessage,
    HaveMessage,
    InventoryMessage,
    LackMessage,
    LackReason,
    RequestedBody,
    RunMessage,
    SharedBody,
    StateAnswer,
    StoredMessage,
    WantMessage,
    hash_body,
    read_state,
)
from swarmnode.stages.trainer.copy_codec import CopyTensors, copied_layout, decode_copy
from swarmnode.stages.trainer.local_stage import LocalStage, PartialBody, StateBody, run_one
from swarmnode.stages.trainer.pipeline import StageWorker, WorkRunner, run_in_thread
from swarmnode.stages.trainer.stage_checkpoints import (
    Checkpoint,
    StageInput,
    StageState,
    as_tensor,
    check_state,
    decode_state,
    encode_state,
    live_state,
    stored_stages,
    trained,
)
from swarmnode.wire import headed

log = structlog.get_logger("swarmnode.crew")


ASK_SECONDS: Final = 10.0
"""Deadline of the query for other members' checkpoints of this stage."""
RETRY_SECONDS: Final = (0.25, 5.0)
"""Interval between requests to a stage that is being restored: first, and at most."""
SERVED_AT_ONCE: Final = 5
"""Most requests of one peer that are served at a time."""
MAX_BAD_MESSAGES: Final = 16
BACKGROUND_PAUSE: Final = (7.0, 30.0)
"""(factor, seconds): after each chunk of a checkpoint for a neighbour's disk, the sender pauses for
`min(factor × duration of the chunk, seconds)`. Two neighbours together use a quarter of a line."""
WRITE_BYTES: Final = 2 * CHUNK_BYTES
"""A stream must accept this many bytes within `seconds`."""
NO_FAULT: Final = ("closed", "truncated", "does not read", "the crew is over")
"""Reasons of a stream's end for which no stage gets a strike."""

Incoming = tuple[AnyStateMessage, bytes]
Handler = Callable[[int, AnyStateMessage, bytes], None]


class StateExchange:
    """This member's end of the state streams in one crew.

    Args:
        stage: The local stage.
        fence: Fence of the crew.
        streams: Stream to each other stage.
        compute: Runs computations.
    """

    def __init__(
        self,
        stage: LocalStage,
        fence: Fence,
        streams: Mapping[int, trio.abc.Stream],
        compute: WorkRunner = run_in_thread,
    ) -> None:
        step = lambda: (
            stage.worker.participant.step if stage.worker is not None else fence.place.step
        )
        self.stage = stage
        self.channel = StateChannel(
            fence, streams, stage.limits, stage.settings.seconds, compute, step
        )
        self.fetch = StateFetcher(self.channel, stage)
        self.sharing = CheckpointSharing(self.channel, stage, self.fetch)
        self._server = StageStateServer(self.channel, stage)
        stage.recorder.announce = self.sharing.announce

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Handle messages until cancelled."""
        await self.channel.run(self._received, task_status)

    def attach(self, worker: StageWorker, step: int) -> None:
        """Serve the weights of `worker`, which runs the stage from `step` on."""
        self.stage.worker, self.stage.restored = worker, None
        self.stage.phase = "ready"
        self.sharing.offer_checkpoint(step)

    def _received(self, stage: int, message: AnyStateMessage, body: bytes) -> None:
        match message:
            case AnnounceMessage():
                self.sharing.handle_announcement(stage, message)
            case StoredMessage():
                self.sharing.stored_steps[stage] = message.step
            case AskMessage() | WantMessage() | RunMessage():
                self._server.serve(stage, message, body)


class StateFetcher:
    """Sends requests to other members. Each method raises PeerError as `StateChannel.fetch`
    does."""

    def __init__(self, channel: StateChannel, stage: LocalStage) -> None:
        self._channel = channel
        self._stage = stage

    async def ask(self) -> dict[int, InventoryMessage]:
        """Return the answer of each other stage: which bodies of this stage it has stored. Stages
        that do not answer are missing.

        The query is repeated, for at most ASK_SECONDS, while a stage does not know yet whether it
        must be restored.
        """
        found: dict[int, InventoryMessage] = {}

        async def one(stage: int) -> None:
            with contextlib.suppress(PeerError):  # it counts as a stage that has stored nothing
                found[stage] = await self._channel.ask(stage)

        until = trio.current_time() + ASK_SECONDS
        while True:
            async with trio.open_nursery() as nursery:
                for stage in self._channel.streams:
                    nursery.start_soon(one, stage)
            starting = any(held.phase == "starting" for held in found.values())
            if not starting or trio.current_time() >= until:
                return found
            await trio.sleep(RETRY_SECONDS[0])

    async def body(
        self, holder: int, what: RequestedBody, of: int
    ) -> tuple[HaveMessage, bytearray]:
        """Return a body of stage `of` from the holder of stage `holder`."""

        def size(have: HaveMessage) -> int:
            if have.step > self._channel.step + 1:  # stages are at most one step apart
                raise BadMessage("bounds", f"{have.what} of step {have.step}, which is to come")
            return self._stage.expected_bytes(of, have)

        partial_bodies = self._stage.partial_bodies
        partial_body = (
            partial_bodies.setdefault(of, PartialBody()) if what == "checkpoint" else PartialBody()
        )
        want = WantMessage(self._channel.place, 0, what, of, 0, b"")
        found = await self._channel.fetch(holder, want, size, partial_body=partial_body)
        if what == "checkpoint":
            partial_bodies.pop(of, None)
        return found

    async def state(self, holder: int, what: StateBody, of: int) -> StageState:
        """Return stage `of`, or a part of it, from the holder of stage `holder`. Wait while that
        stage is being restored."""
        have, body = await self._retry_while_loading(holder, lambda: self.body(holder, what, of))
        layout, form = self._stage.expected_body(what, of)
        decode = lambda: decode_state(as_tensor(body), layout, form, have.step, have.squared_norm)
        with self._channel.counting_bad_messages(holder):
            return await self._channel.compute(decode)

    async def policy_copy(self, spec: StageSpec) -> tuple[int, int, CopyTensors]:
        """Return (bytes received, step, weights) of a stage, for a policy copy.

        The own stage is encoded and decoded too, so that its weights are rounded like all others.

        Raises:
            PeerError: As `StateChannel.fetch`.
            StateError, Unavailable: As `LocalStage.policy_copy`, for the own stage.
        """
        layout, base = copied_layout(spec, self._stage.layouts[spec.index]), self._stage.base
        body: bytes | bytearray
        if spec.index == self._stage.spec.index:
            came, (step, body) = 0, await self._stage.policy_copy(self._channel.compute)
        else:
            have, body = await self.body(spec.index, "copy", spec.index)
            came, step = have.size, have.step
        with self._channel.counting_bad_messages(spec.index):
            parts = await self._channel.compute(lambda: decode_copy(spec, body, layout, base))
        return came, step, parts

    async def run_at(self, stage: int, edge: StageInput, tokens: int, x: bytes) -> bytes:
        """Run one micro-batch through another stage, as `run_one` does. Wait while that stage is
        being restored.

        Args:
            edge: The micro-batch.
            tokens: Number of completion tokens of the micro-batch.
            x: Activations in the crew's codec; empty for stage 0.

        Raises:
            Incompatible: The stage's numbers are not finite.
        """
        local = self._stage
        size = (
            4 * tokens
            if stage == local.spec.stages - 1
            else activation_bytes(local.codec, edge.rows, local.runtime.hidden_size)
        )
        codec = local.codec if stage else None
        run = RunMessage(self._channel.place, 0, codec, edge.rows, len(edge.about))
        ask = lambda: self._channel.fetch(stage, run, lambda have: size, edge.about + x)
        _, body = await self._retry_while_loading(stage, ask)
        return bytes(body)

    async def _retry_while_loading(
        self, stage: int, ask: Callable[[], Awaitable[tuple[HaveMessage, bytearray]]]
    ) -> tuple[HaveMessage, bytearray]:
        """Repeat a request while the stage is being restored."""
        until = trio.current_time() + self._stage.settings.neighbour_seconds
        pause, most = RETRY_SECONDS
        while True:
            try:
                return await ask()
            except StageLoading:
                if trio.current_time() >= until:
                    raise PeerTimeout(f"stage {stage} was not restored in time") from None
            await trio.sleep(pause)
            pause = min(2 * pause, most)


@dataclass(frozen=True)
class ServedBody:
    """A body that can be sent, and its fields of `HaveMessage`."""

    step: int
    read: Callable[[], bytes | bytearray | memoryview]
    """Returns the body."""
    squared_norm: float = 0.0


class StageStateServer:
    """Answers requests of other members."""

    def __init__(self, channel: StateChannel, stage: LocalStage) -> None:
        self._channel = channel
        self._stage = stage
        self._serving: Counter[int] = Counter()

    def serve(
        self, stage: int, message: AskMessage | WantMessage | RunMessage, body: bytes
    ) -> None:
        """Answer one request in the background."""
        if self._serving[stage] >= SERVED_AT_ONCE:
            self._channel.refused["busy"] += 1
            self._channel.post(stage, LackMessage(self._channel.place, message.request, "busy"))
            return
        self._serving[stage] += 1
        self._channel.spawn(partial(self._serve, stage, message, body))

    async def _serve(
        self, stage: int, message: AskMessage | WantMessage | RunMessage, body: bytes
    ) -> None:
        """Answer one request. A failure is counted, and answered with LackMessage."""
        lack: LackReason | None = "failed"
        try:
            with self._channel.counting_failures(), self._channel.counting_bad_messages(stage):
                if isinstance(message, AskMessage):
                    await self._channel.send(stage, self._inventory(stage, message.request))
                    lack = None
                else:
                    lack = await self._send_requested(stage, message, body)
        except BadMessage:
            lack = "refused"
        except PeerError:
            return  # the stage is gone
        finally:
            self._serving[stage] -= 1
        if lack is not None:
            self._channel.post(stage, LackMessage(self._channel.place, message.request, lack))

    def _inventory(self, stage: int, request: int) -> InventoryMessage:
        checkpoint, recorder = self._stage.store.metadata(stage), self._stage.recorder
        ends = recorder.ends.get(stage)
        return InventoryMessage(
            self._channel.place,
            request,
            self._stage.phase,
            checkpoint.step if checkpoint is not None else None,
            ends[0] if ends is not None else None,
        )

    async def _send_requested(
        self, stage: int, asked: WantMessage | RunMessage, body: bytes
    ) -> LackReason | None:
        """Send the requested body, or return why there is none.

        Raises:
            BadMessage: The request is invalid.
            PeerError: The stage is gone.
        """
        want = asked if isinstance(asked, WantMessage) else None
        what: BodyKind = "output" if want is None else want.what
        phase, own, channel = self._stage.phase, self._stage.spec.index, self._channel
        if what in ("layers", "tied", "copy", "output") and phase != "ready":
            return "loading"
        found = await self._find_body(stage, asked, body)
        if found is None:
            return "none"
        data = memoryview(await channel.compute(found.read))
        root = await channel.compute(lambda: hash_body(data))
        have = HaveMessage(
            channel.place, asked.request, what, found.step, len(data), root, found.squared_norm
        )
        at = want.at if want is not None and want.root == root else 0
        if at >= len(data):
            raise BadMessage("bounds", f"byte {at} of {len(data)}")
        is_replica = want is not None and (want.what, want.of) == ("checkpoint", own)
        await channel.send_body(stage, have, data, at, background=is_replica)
        return None

    async def _find_body(
        self, stage: int, asked: WantMessage | RunMessage, body: bytes
    ) -> ServedBody | None:
        """Return the body that `stage` requests; None if this member does not have it.

        Raises:
            BadMessage: The request is invalid.
        """
        local, recorder, step = self._stage, self._stage.recorder, self._channel.step
        spec, worker = local.spec, local.worker
        if isinstance(asked, RunMessage):
            if asked.codec != (None if spec.has_embedding else local.codec):
                raise BadMessage("schema", "not activations of this crew")
            work = read_micro_batch(body[: asked.about], asked.rows, local.limits, "learn")
            x = body[asked.about :]
            return ServedBody(step, lambda: run_one(local.runtime, work, x, local.codec))
        of = asked.of
        if of not in (stage, spec.index):
            return None
        match asked.what:
            case "checkpoint" if of == spec.index and recorder.replica is not None:
                replica = recorder.replica
                return ServedBody(replica.step, lambda: replica.body, replica.squared_norm)
            case "checkpoint" if of != spec.index and (stored := local.store.metadata(of)):
                read = lambda: local.store.read(of).body.numpy().data
                return ServedBody(stored.step, read, stored.squared_norm)
            case "ends" if of in recorder.ends:
                ends_step, tensors = recorder.ends[of]
                state = StageState(ends_step, tensors)
                return ServedBody(
                    ends_step, lambda: encode_state(state, *local.expected_body("ends", of))
                )
            case "copy":
                copy_step, copy = await local.policy_copy(self._channel.compute)
                return ServedBody(copy_step, lambda: copy)
            case "layers" if abs(stage - spec.index) == 1 and local.settings.mode != "checkpoints":
                norm = 0.0 if worker is None else worker.optimizer.squared_norm
                return ServedBody(step, lambda: self._encode_now("layers"), norm)
            case "tied" if stage in (0, spec.stages - 1) and spec.shares_embedding:
                if local.expected_body("tied", of)[0]:
                    return ServedBody(step, lambda: self._encode_now("tied"))
        return None

    def _encode_now(self, what: StateBody) -> bytearray:
        """Encode a part of this stage's present weights."""
        local = self._stage
        if local.worker is not None:
            state = live_state(local.worker)
        else:
            state = local.restored or StageState(self._channel.step, {})
            state = replace(state, weights=trained(local.runtime))
        return encode_state(state, *local.expected_body(what, local.spec.index))


class CheckpointSharing:
    """Exchange of checkpoints and ends between members that store them for each other.

    A stage announces each new body. The members that store it fetch one body of each stage and kind
    at a time, and skip a body that is superseded meanwhile.
    """

    def __init__(self, channel: StateChannel, stage: LocalStage, fetch: StateFetcher) -> None:
        self.stored_steps: dict[int, int] = {}
        """Stage → committed steps in this stage's checkpoint on the disk of its holder."""
        self._channel = channel
        self._stage = stage
        self._fetch = fetch
        self._newest: dict[tuple[int, SharedBody], AnnounceMessage] = {}
        """(stage, kind) of a running fetch → newest announcement."""
        self._memory_lock = trio.Lock()
        """Held while a checkpoint is fetched: memory may hold only one at a time."""

    def announce(self, what: SharedBody, step: int) -> None:
        """Announce a new body to all members."""
        for stage in self._channel.streams:
            self._channel.post(stage, AnnounceMessage(self._channel.place, 0, what, step))

    def offer_checkpoint(self, step: int) -> None:
        """Announce this stage's replica checkpoint to a new crew. Make one if it is not recent
        enough."""
        recorder, settings = self._stage.recorder, self._stage.settings
        if not settings.uses_checkpoints(self._stage.spec) or not step:
            return
        replica = recorder.replica
        if replica is not None and step - settings.checkpoint_every < replica.step <= step:
            self.announce("checkpoint", replica.step)
        elif self._channel.streams:
            self._channel.spawn(self._make_replica)

    async def _make_replica(self) -> None:
        worker, recorder = self._stage.worker, self._stage.recorder
        assert worker is not None
        with self._channel.counting_failures():
            async with worker.optimizer.moving:  # not during a step
                await self._channel.compute(partial(recorder.make_replica, worker))
            assert recorder.replica is not None
            self.announce("checkpoint", recorder.replica.step)

    def handle_announcement(self, stage: int, new: AnnounceMessage) -> None:
        """Start to fetch a new body of another member, if this member stores it."""
        own, stages = self._stage.spec.index, self._stage.spec.stages
        if new.what == "checkpoint":
            is_stored = stage in stored_stages(own, stages, self._stage.settings)
        else:
            is_stored = (stage, own) in ((0, 1), (stages - 1, stages - 2))
        if not is_stored:
            return
        is_fetching = (stage, new.what) in self._newest
        self._newest[stage, new.what] = new
        if not is_fetching:
            self._channel.spawn(partial(self._fetch_announced, stage, new.what))

    async def _fetch_announced(self, stage: int, what: SharedBody) -> None:
        """Fetch and store bodies of one kind until the newest announced one is stored."""
        tried: AnnounceMessage | None = None
        while (new := self._newest[stage, what]) is not tried:
            tried = new
            try:
                async with self._memory_lock if what == "checkpoint" else contextlib.nullcontext():
                    step = await self._store_newest(stage, new)
                if what == "checkpoint":
                    self._channel.post(stage, StoredMessage(self._channel.place, 0, step))
            except PeerError as error:  # the next body is announced again
                if not isinstance(error, BadMessage):  # counted by `counting_bad_messages`
                    reason = "timeout" if isinstance(error, PeerTimeout) else "lacking"
                    self._channel.refused[reason] += 1
            except OSError as error:
                log.warning("replica checkpoint not stored", stage=stage, error=str(error))
                self._channel.refused["failed"] += 1
        del self._newest[stage, what]

    async def _store_newest(self, stage: int, new: AnnounceMessage) -> int:
        """Fetch and store the announced body, or a newer one. Return its step."""
        stored = self._stage.store.metadata(stage) if new.what == "checkpoint" else None
        if stored is not None and not stored.own and stored.step == new.step:
            return new.step
        have, body = await self._fetch.body(stage, new.what, stage)
        with self._channel.counting_bad_messages(stage):
            await self._channel.compute(lambda: self._store(stage, have, body))
        return have.step

    def _store(self, stage: int, have: HaveMessage, body: bytearray) -> None:
        """Store a body of `stage`.

        Raises:
            BadMessage: The body is invalid.
            OSError: It cannot be written.
        """
        local, recorder = self._stage, self._stage.recorder
        if have.what == "ends":
            state = decode_state(
                as_tensor(body), *local.expected_body("ends", stage), have.step, 0.0
            )
            recorder.ends[stage] = have.step, dict(state.weights)
        else:
            layout, form = local.expected_body("checkpoint", stage)
            check_state(as_tensor(body), layout, form)
            metadata = local.store.describe(stage, form, have.step, have.squared_norm)
            local.store.write(Checkpoint(metadata, as_tensor(body)))


class StageLoading(PeerError):
    """Raised when the requested stage is still being restored."""


class StateChannel:
    """State streams of one member in one crew: messages, requests and bodies.

    Args:
        fence: Fence of the crew.
        streams: Stream to each other stage.
        limits: Bounds of messages.
        seconds: Deadline for each part of a transfer.
        compute: Runs computations.
        step: Returns the number of committed steps.
    """

    def __init__(
        self,
        fence: Fence,
        streams: Mapping[int, trio.abc.Stream],
        limits: FrameLimits,
        seconds: float,
        compute: WorkRunner,
        step: Callable[[], int],
    ) -> None:
        self.compute = compute
        self.streams = dict(streams)
        self.ended: dict[int, str] = {}
        """Stage → why its stream ended."""
        self.refused: Counter[str] = Counter()
        """Number of refused messages and requests, by `STATE_REFUSALS`."""
        self.fault: tuple[int, str] | None = None
        """(stage that sent garbage, reason); None without a fault."""
        self.progress = 0
        """Number of chunks that have arrived."""
        self._fence = fence
        self._limits = limits
        self._seconds = seconds
        self._step = step
        self._outboxes = {stage: trio.open_memory_channel[bytes](0) for stage in streams}
        self._readers = {stage: trio.CancelScope() for stage in streams}
        self._requests: dict[tuple[int, int], trio.MemorySendChannel[Incoming]] = {}
        """(stage, request number) → channel for its answers."""
        self._last_request = 0
        self._bad: Counter[int] = Counter()
        self._nursery: trio.Nursery | None = None

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self._step()

    @property
    def place(self) -> Place:
        """Place of the messages that this member sends now."""
        return Place(self._fence.place.crew, self._fence.place.stage, self.step)

    async def run(
        self, handle: Handler, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Read and write the streams until cancelled. Requests are passed to `handle`."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for stage in self.streams:
                    nursery.start_soon(self._read, stage, handle)
                    nursery.start_soon(self._write, stage)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for stage in self.streams:
                self._end_stream(stage, "the crew is over")

    def spawn(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Start `work` in the background. Return False if `run` has ended or has not started."""
        if self._nursery is None:
            return False
        self._nursery.start_soon(work)
        return True

    async def ask(self, stage: int) -> InventoryMessage:
        """Return the answer of `stage`: which bodies of this stage it has stored.

        Raises:
            PeerError: The stage is gone, sent an invalid answer, or none within ASK_SECONDS.
        """
        with self.counting_bad_messages(stage), self._request(stage) as (number, answers):
            await self.send(stage, AskMessage(self.place, number))
            answer, _ = await self._receive(stage, answers, ASK_SECONDS)
            if not isinstance(answer, InventoryMessage):
                raise BadMessage("schema", f"{type(answer).__name__} as answer to AskMessage")
            return answer

    async def fetch(
        self,
        stage: int,
        message: WantMessage | RunMessage,
        size: Callable[[HaveMessage], int],
        body: bytes = b"",
        partial_body: PartialBody | None = None,
    ) -> tuple[HaveMessage, bytearray]:
        """Send a request for a body, and return the body after its hash was checked.

        Args:
            size: Returns the length that the body must have. Raises BadMessage for another body.
            body: Body of the request.
            partial_body: Part that has arrived already. Only the rest is requested.

        Raises:
            BadMessage: The body is invalid.
            PeerTimeout: Nothing arrived in time.
            StageLoading: The stage is being restored.
            Incompatible: The stage could not compute the body.
            PeerError: The stage is gone, or has no such body.
        """
        partial_body = partial_body or PartialBody()
        if isinstance(message, WantMessage) and partial_body.at:
            # a request cannot start behind the last byte
            partial_body.at = min(partial_body.at, len(partial_body.body) - 1)
            message = msgspec.structs.replace(message, at=partial_body.at, root=partial_body.root)
        what = message.what if isinstance(message, WantMessage) else "output"
        with self.counting_bad_messages(stage):
            with self._request(stage) as (number, answers):
                message = msgspec.structs.replace(message, request=number)
                await self.send(stage, message, body)
                have, _ = await self._receive(stage, answers, self._seconds)
                if not isinstance(have, HaveMessage) or have.what != what:
                    raise BadMessage("schema", f"no {what}")
                if have.size < 1 or have.size != size(have):
                    raise BadMessage("size", f"{have.size} bytes of {what}")
                partial_body.begin(have.root, have.size)
                while partial_body.at < have.size:
                    chunk, data = await self._receive(stage, answers, self._seconds)
                    length = min(CHUNK_BYTES, have.size - partial_body.at)
                    if not isinstance(chunk, ChunkMessage) or (
                        (chunk.at, chunk.length) != (partial_body.at, length)
                    ):
                        raise BadMessage("size", "a chunk out of place")
                    partial_body.body[partial_body.at : partial_body.at + length] = data
                    partial_body.at += length
                    self.progress += 1
            if await self.compute(lambda: hash_body(partial_body.body)) != have.root:
                partial_body.begin(b"", 0)
                raise BadMessage("hash", f"{what} from stage {stage}")
        return have, partial_body.body

    @contextlib.contextmanager
    def _request(self, stage: int) -> Iterator[tuple[int, trio.MemoryReceiveChannel[Incoming]]]:
        """Yield the number of a new request, and a channel for its answers."""
        self._last_request += 1
        key = stage, self._last_request
        self._requests[key], answers = trio.open_memory_channel[Incoming](0)
        try:
            yield key[1], answers
        finally:
            del self._requests[key]
            answers.close()

    async def _receive(
        self, stage: int, answers: trio.MemoryReceiveChannel[Incoming], seconds: float
    ) -> Incoming:
        """Return the next answer to a request, with its body.

        Raises:
            PeerError: The stage is gone, sent nothing for `seconds`, or sent LackMessage.
        """
        try:
            with trio.fail_after(seconds):
                message, body = await answers.receive()
        except trio.TooSlowError:
            raise PeerTimeout(f"stage {stage} sent nothing for {seconds:.0f} s") from None
        except trio.EndOfChannel:
            raise self._gone_error(stage) from None
        if isinstance(message, LackMessage):
            kind = {"loading": StageLoading, "failed": Incompatible}.get(message.reason, PeerError)
            raise kind(f"stage {stage}: {message.reason}")
        return message, body

    def post(self, stage: int, message: AnyStateMessage) -> None:
        """Send a message without waiting."""

        async def send() -> None:
            with contextlib.suppress(PeerError):
                await self.send(stage, message)

        self.spawn(send)

    async def send(
        self, stage: int, message: AnyStateMessage, body: bytes | memoryview = b""
    ) -> None:
        """Send a message when the stream has room.

        Raises:
            PeerError: The stage is gone.
        """
        if stage in self.ended or stage not in self.streams:
            raise self._gone_error(stage)
        try:
            await self._outboxes[stage][0].send(headed.pack(message, body))
        except trio.BrokenResourceError:
            raise self._gone_error(stage) from None

    async def send_body(
        self, stage: int, have: HaveMessage, body: memoryview, at: int, background: bool
    ) -> None:
        """Send a body from byte `at` on, in chunks.

        Args:
            background: True to pause after each chunk, see BACKGROUND_PAUSE.

        Raises:
            PeerError: The stage is gone.
        """
        await self.send(stage, have)
        pause, most = BACKGROUND_PAUSE
        for start in range(at, len(body), CHUNK_BYTES):
            began, part = trio.current_time(), body[start : start + CHUNK_BYTES]
            await self.send(stage, ChunkMessage(self.place, have.request, start, len(part)), part)
            if background:
                await trio.sleep(min(most, pause * (trio.current_time() - began)))

    async def _write(self, stage: int) -> None:
        stream, outbox = self.streams[stage], self._outboxes[stage][1]
        try:
            async for data in outbox:
                for at in range(0, len(data), WRITE_BYTES):
                    with trio.fail_after(self._seconds):
                        await stream.send_all(data[at : at + WRITE_BYTES])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._end_stream(stage, "closed")
        except trio.TooSlowError:
            self._end_stream(stage, "does not read")

    async def _read(self, stage: int, handle: Handler) -> None:
        reason, stream = "closed", self.streams[stage]
        try:
            with self._readers[stage]:
                while (got := await read_state(stream, self._limits)) is not None:
                    message, body = got
                    if self._fence.check(message.place, stage, None):
                        continue
                    if not isinstance(message, StateAnswer):
                        handle(stage, message, body)
                    elif (asked := self._requests.get((stage, message.request))) is not None:
                        with contextlib.suppress(trio.BrokenResourceError):  # the request ended
                            await asked.send(got)
        except BadMessage as error:
            reason = error.reason
            self.refused[reason] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._end_stream(stage, reason)
        await trio.aclose_forcefully(stream)

    @contextlib.contextmanager
    def counting_bad_messages(self, stage: int) -> Iterator[None]:
        """Count a BadMessage in the block against `stage`, and raise it."""
        try:
            yield
        except BadMessage as error:
            self.count_bad_message(stage, error)
            raise

    @contextlib.contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Count an error of this node's disk or device in the block, and suppress it."""
        try:
            yield
        except (StateError, Unavailable, OSError, ValueError):
            self.refused["failed"] += 1
        except (RuntimeError, MemoryError) as error:
            if not is_device_error(error):
                raise
            self.refused["failed"] += 1

    def count_bad_message(self, stage: int, error: BadMessage) -> None:
        """Count an invalid message of `stage`. Close its stream after MAX_BAD_MESSAGES."""
        self.refused[error.reason if error.reason in STATE_REASONS else "schema"] += 1
        self._bad[stage] += 1
        if self._bad[stage] >= MAX_BAD_MESSAGES:
            self._end_stream(stage, "misbehaved")

    def _end_stream(self, stage: int, reason: str) -> None:
        """Close the stream of `stage`, and end all requests to it."""
        if stage in self.ended or stage not in self.streams:
            return
        self.ended[stage] = reason
        if reason not in NO_FAULT:
            self.fault = self.fault or (stage, reason)
        self._readers[stage].cancel()
        self._outboxes[stage][1].close()
        for (of, _), answers in self._requests.items():
            if of == stage:
                answers.close()

    def _gone_error(self, stage: int) -> PeerError:
        return PeerError(f"stage {stage} is gone: {self.ended.get(stage, 'no stream')}")
