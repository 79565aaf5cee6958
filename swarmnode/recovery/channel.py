"""Requests and bodies over state streams: one duplex stream to every other member, beside those
that carry activations. No torch.

A request fails when nothing comes of it for `seconds`: what arrives or leaves of it chunk by chunk
may take as long as the link makes it. What a restored stage waits for goes before what is kept for
later, chunk by chunk, and that takes no more of the uplink than it may. Whatever a peer sends is
refused and counted before it is kept; after MISBEHAVED refusals its stream is closed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from swarmnode.errors import (
    BadMessage,
    Incompatible,
    PeerError,
    PeerTimeout,
    StateError,
    Unavailable,
)
from swarmnode.pipeline import faults
from swarmnode.pipeline.compute import Compute
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import CHUNK_BYTES, FrameLimits, Place
from swarmnode.recovery import messages as m
from swarmnode.recovery.outbox import Outbox

if TYPE_CHECKING:
    from swarmnode.recovery.serving import Server
    from swarmnode.recovery.sharing import Sharing

SERVED: Final = 5
"""Requests of one peer at a time; answers that it has not read yet are among them. A stage that is
restored wants two parts of a snapshot beside what is new of ours: snapshot, ends, probes."""
MISBEHAVED: Final = 16
LATER_SECONDS: Final = 1800.0
"""Given to what is kept for later, between two parts of it: all that somebody waits for goes
before."""
AGAIN_SECONDS: Final = (1.0, 30.0)
"""Between the end of a stream and a new one, doubling from one to the next of the same stage."""
BACK_SECONDS: Final = 60.0
"""A lost stream is waited for so long. Whether its member is there at all, others find out
sooner."""
LOOK_SECONDS: Final = 0.25
INTERRUPTED: Final = ("closed", "truncated")
"""How a stream ends through nobody's fault: its connection did."""
QUEUED: Final = 1024
"""Messages to one peer; who lets so many wait is gone."""


class Loading(Incompatible):
    """Raised when the stage that was asked is still being restored."""


Body = tuple[m.Have, bytearray]
Answer = m.Holds | Body


@dataclass(eq=False)
class Part:
    """Bytes `at` … `until` − 1 of a body, and where they go; `at` moves as they come."""

    body: bytearray | memoryview
    at: int
    until: int


@dataclass
class _Call:
    """Somebody waits for the answer to a request. Nobody is shown progress by what is kept for
    later."""

    seconds: float
    """At most, between two signs that it is being worked at."""
    scope: trio.CancelScope
    size: Callable[[m.Have], int]
    """How long the answer must be. Raises BadMessage for one that was not asked for."""
    part: Part | None
    """What was asked for; None: all, and it goes into `body`."""
    body: bytearray = field(default_factory=bytearray)
    have: m.Have | None = None
    done: trio.Event = field(default_factory=trio.Event)
    answer: Answer | Exception | None = None

    def progressed(self) -> None:
        self.scope.deadline = trio.current_time() + self.seconds


class _Calls:
    """Our requests that wait for an answer, by (stage, number)."""

    def __init__(self) -> None:
        self.progress = 0
        """Grows with each part of an answer to us that arrives, and with each part of a request of
        ours that leaves."""
        self._last = 0
        self._open: dict[tuple[int, int], _Call] = {}

    def number(self) -> int:
        self._last += 1
        return self._last

    @contextlib.contextmanager
    def open(
        self,
        stage: int,
        number: int,
        seconds: float,
        size: Callable[[m.Have], int],
        part: Part | None,
    ) -> Iterator[_Call]:
        call = self._open[stage, number] = _Call(seconds, trio.CancelScope(), size, part)
        call.progressed()
        try:
            yield call
        finally:
            del self._open[stage, number]

    def get(self, stage: int, number: int) -> _Call | None:
        return self._open.get((stage, number))

    def progressed(self, stage: int, number: int) -> None:
        call = self.get(stage, number)
        if call is not None:
            call.progressed()
            self.progress += call.seconds < LATER_SECONDS

    def answered(self, stage: int, number: int, answer: Answer | Exception) -> None:
        call = self.get(stage, number)
        if call is not None and not call.done.is_set():
            self.progress += call.seconds < LATER_SECONDS
            call.answer = answer
            call.done.set()

    def lost(self, stage: int, error: Exception) -> None:
        """Nothing of `stage` comes any more."""
        for of, number in list(self._open):
            if of == stage:
                self.answered(stage, number, error)


class Channel:
    """`run` it in a nursery; it ends by cancellation. step: committed steps. again: a new stream to
    a stage whose last one was interrupted, which may be many times in the hour that a stage of 7 B
    takes on a home's line; raises PeerError where there can be none."""

    def __init__(
        self,
        fence: Fence,
        streams: Mapping[int, trio.abc.Stream],
        limits: FrameLimits,
        seconds: float,
        compute: Compute,
        step: Callable[[], int],
        again: Callable[[int], Awaitable[trio.abc.Stream]] | None = None,
    ) -> None:
        self.compute = compute
        self._again = again
        self.gone: dict[int, str] = {}
        """Stage → why its stream ended."""
        self.streams = dict(streams)
        self.outboxes = {stage: Outbox() for stage in streams}
        self._fence = fence
        self._limits = limits
        self._seconds = seconds
        self._step = step
        self._calls = _Calls()
        self._serving: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()
        """What peers sent that is not what it has to be, and what they asked for and did not get,
        by reason of STATE_REFUSALS."""
        self._blame: Counter[int] = Counter()
        """Stage → how much of that was what it sent."""
        self._nursery: trio.Nursery | None = None

    @property
    def progress(self) -> int:
        """Grows with each part of an answer to us that arrives, and with each part of a request of
        ours that leaves."""
        return self._calls.progress

    @property
    def step(self) -> int:
        return self._step()

    @property
    def place(self) -> Place:
        p = self._fence.place
        return Place(p.crew, p.stage, self.step)

    async def run(self, server: Server, sharing: Sharing) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for stage, stream in self.streams.items():
                    nursery.start_soon(self._speak, stage, stream, server, sharing)
                await trio.sleep_forever()  # answers come and go
        finally:
            self._nursery = None

    async def _speak(
        self, stage: int, stream: trio.abc.Stream, server: Server, sharing: Sharing
    ) -> None:
        """With one member, over one stream after another."""
        pause, most = AGAIN_SECONDS
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stage, stream)
                try:
                    await self._read(stage, stream, server, sharing)
                finally:
                    await trio.aclose_forcefully(stream)  # and wakes who writes
            if self._again is None or self.gone[stage] not in INTERRUPTED:
                return
            await trio.sleep(pause)
            pause = min(2 * pause, most)
            try:
                stream = await self._again(stage)
            except PeerError:
                return
            del self.gone[stage]

    async def returns(self, stage: int) -> bool:
        """Waits for a stream to `stage` in the place of one that was interrupted. Whether there is
        one; False at once if none was."""
        if self._again is None or self.gone.get(stage) not in INTERRUPTED:
            return False
        until = trio.current_time() + BACK_SECONDS
        while True:
            await trio.sleep(LOOK_SECONDS)
            if stage not in self.gone or trio.current_time() >= until:
                return stage not in self.gone

    # Sending.

    async def answer(
        self,
        stage: int,
        request: int,
        what: m.What,
        step: int,
        body: bytes | bytearray | memoryview,
        *,
        later: bool = False,
        part: tuple[int, int | None] = (0, None),
        **more: Any,  # noqa: ANN401
    ) -> None:
        root = more.pop("root", b"") or await self.compute(lambda: m.root_of(body))
        if stage not in self.gone:
            have = m.Have(self.place, request, what, step, len(body), root, **more)
            self.outboxes[stage].transfer(have, memoryview(body)[: part[1]], later, part[0])

    def lack(self, stage: int, request: int, reason: m.LackReason) -> None:
        self.send(stage, m.Lack(self.place, request, reason))

    def send(self, stage: int, message: m.Message, body: bytes = b"", call: int = 0) -> None:
        """call: the number of the request of ours that it is."""
        if stage in self.gone:
            return
        outbox = self.outboxes[stage]
        outbox.add(m.pack(message, body), call)
        if len(outbox.messages) > QUEUED:
            self._lose(stage, "does not read")

    def spawn(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Begin `work` in the background. False where `run` is over, or has not begun: then it is
        not begun."""
        if self._nursery is None:
            return False
        self._nursery.start_soon(work)
        return True

    async def _write(self, stage: int, stream: trio.abc.Stream) -> None:
        outbox = self.outboxes[stage]
        try:
            while stage not in self.gone:
                if (ready := outbox.next(self.place)) is None:
                    await outbox.wait()
                    continue
                call, data = ready
                # a chunk with its header is written as one
                for at in range(0, len(data), 2 * CHUNK_BYTES):
                    await stream.send_all(data[at : at + 2 * CHUNK_BYTES])
                    self._calls.progressed(stage, call)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lose(stage, "closed")

    # Asking.

    async def call(
        self,
        stage: int,
        message: m.Message,
        size: Callable[[m.Have], int],
        body: bytes = b"",
        seconds: float | None = None,
        part: Part | None = None,
    ) -> Answer:
        """Holds, or (Have, body) with the hash that was promised. `size` says how long all of the
        answer must be, or raises BadMessage. seconds: other than those of the channel;
        LATER_SECONDS for what nobody waits for. part: as the message asks for; it is filled as it
        comes, and no hash is of it alone.

        Raises PeerError: BadMessage for what was not what it said, PeerTimeout, Loading, and for a
        stage that is gone or has nothing.
        """
        if stage in self.gone or stage not in self.outboxes:
            raise PeerError(f"stage {stage} is gone: {self.gone.get(stage, 'no stream')}")
        message = msgspec.structs.replace(message, request=self._calls.number())
        within = self._seconds if seconds is None else seconds
        with self._calls.open(stage, message.request, within, size, part) as call:
            self.send(stage, message, body, message.request)
            with call.scope:  # around waiting only
                await call.done.wait()
        if not call.done.is_set():
            raise PeerTimeout(f"nothing came of a request to stage {stage} for {within:.0f} s")
        if isinstance(call.answer, BadMessage):
            self.refuse(stage, call.answer)
        if isinstance(call.answer, Exception):
            raise call.answer
        assert call.answer is not None
        return call.answer

    async def call_for_body(
        self,
        stage: int,
        message: m.Message,
        size: Callable[[m.Have], int],
        body: bytes = b"",
        seconds: float | None = None,
        part: Part | None = None,
    ) -> Body:
        """As `call`, of something that has a body."""
        answer = await self.call(stage, message, size, body, seconds, part)
        if not isinstance(answer, tuple):
            raise BadMessage("schema", "an answer to another question")
        return answer

    # Receiving.

    async def _read(
        self, stage: int, stream: trio.abc.Stream, server: Server, sharing: Sharing
    ) -> None:
        reason = "closed"
        try:
            while (
                stage not in self.gone and (got := await m.read(stream, self._limits)) is not None
            ):
                if self._fence.check(got[0].place, stage, None):
                    continue
                self._arrived(stage, *got, server, sharing)
                if self._blame[stage] >= MISBEHAVED:
                    reason = "misbehaved"
                    break
        except BadMessage as error:
            reason = error.reason
            self.refused[reason] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # whoever waits is told by `_lose`
        self._lose(stage, reason)

    def refuse(self, stage: int, error: BadMessage) -> None:
        """What `stage` sent is not what it has to be."""
        self.refused[error.reason if error.reason in m.STATE_REASONS else "schema"] += 1
        self._blame[stage] += 1

    def _lose(self, stage: int, reason: str) -> None:
        if stage in self.gone:
            return
        self.gone[stage] = reason
        self._calls.lost(stage, PeerError(f"stage {stage} is gone: {reason}"))
        self.outboxes[stage].clear()

    def _arrived(
        self, stage: int, message: m.Message, body: bytes, server: Server, sharing: Sharing
    ) -> None:
        match message:
            case m.Chunk():
                self._chunk(stage, message, body)
            case m.Have():
                self._begins(stage, message)
            case m.Kept():
                sharing.kept(stage, message)
            case m.Made():
                sharing.made(stage, message)
            case m.Holds():
                self._calls.answered(stage, message.request, message)
            case m.Lack():
                loading = message.reason == "loading"
                why = f"stage {stage}: {message.reason}"
                error = (
                    Loading(why)
                    if loading
                    else Incompatible(why)
                    if message.reason == "failed"
                    else PeerError(why)
                )
                self._calls.answered(stage, message.request, error)
            case m.Ask():
                self.send(stage, server.holds(stage, message.request))
            case m.Want():
                self._soon(stage, message.request, lambda: server.serve(stage, message))
            case m.Run():
                self._soon(stage, message.request, lambda: server.run(stage, message, body))

    def _begins(self, stage: int, have: m.Have) -> None:
        call = self._calls.get(stage, have.request)
        if call is None or call.have is not None:
            return  # too late: its chunks are dropped
        try:
            size = call.size(have)
            if have.size != size or size < 1:
                raise BadMessage("size", f"{have.size} bytes of {have.what}, which has {size}")
            call.have, call.part = have, call.part or Part(call.body, 0, size)
        except BadMessage as error:
            self._calls.answered(stage, have.request, error)

    def _chunk(self, stage: int, chunk: m.Chunk, data: bytes) -> None:
        call = self._calls.get(stage, chunk.request)
        if call is None or call.have is None or call.part is None or call.done.is_set():
            return  # of something that was refused, or that nobody waits for
        have, part = call.have, call.part
        if chunk.at != part.at or chunk.length != min(CHUNK_BYTES, part.until - part.at):
            self._calls.answered(stage, chunk.request, BadMessage("size", "a chunk out of place"))
            return
        part.body[part.at : part.at + chunk.length] = data
        part.at += chunk.length
        self._calls.progressed(stage, chunk.request)
        if part.at == part.until and part.body is not call.body:
            self._calls.answered(stage, chunk.request, (have, call.body))
        elif part.at == part.until:
            self.spawn(lambda: self._complete(stage, have, call.body))

    async def _complete(self, stage: int, have: m.Have, body: bytearray) -> None:
        right = await self.compute(lambda: m.root_of(body)) == have.root
        self._calls.answered(
            stage,
            have.request,
            (have, body) if right else BadMessage("hash", f"{have.what} from stage {stage}"),
        )

    # Serving.

    def _soon(self, stage: int, number: int, work: Callable[[], Awaitable[None]]) -> None:
        # who asks and does not read gets no more of them
        unread = len(self.outboxes[stage].transfers)
        if self._serving[stage] + unread >= SERVED:
            self.refused["busy"] += 1
            self.lack(stage, number, "busy")
            return
        self._serving[stage] += 1
        self.spawn(lambda: self._guarded(stage, number, work))

    async def _guarded(self, stage: int, number: int, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except BadMessage as error:
            self.refuse(stage, error)
            self.lack(stage, number, "refused")
        except (StateError, Unavailable, OSError, ValueError):
            self.refused["failed"] += 1
            self.lack(stage, number, "failed")
        except (RuntimeError, MemoryError) as error:
            if not faults.of_device(error):
                raise
            self.refused["failed"] += 1
            self.lack(stage, number, "failed")
        finally:
            self._serving[stage] -= 1
