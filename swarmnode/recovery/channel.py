"""Requests and bodies over state streams: one duplex stream to every other member, beside those that carry activations. No torch.

A request fails when nothing comes of it for `seconds`: what arrives or leaves of it chunk by chunk may take as long as the link makes it.
A fetch goes before a push, chunk by chunk, and pushes take no more of the uplink than they are allowed. Whatever a peer sends is refused
and counted before it is kept; after MISBEHAVED refusals its stream is closed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout, StateError, Unavailable
from swarmnode.pipeline import faults
from swarmnode.pipeline.compute import Compute
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import CHUNK_BYTES, Place
from swarmnode.recovery import messages as m
from swarmnode.recovery.outbox import Outbox

if TYPE_CHECKING:
    from swarmnode.recovery.serving import Server

SERVED: Final = 4
"""Requests and transfers of one peer at a time; answers that it has not read yet are among them."""
MISBEHAVED: Final = 16
QUEUED: Final = 1024
"""Messages to one peer; who lets so many wait is gone."""


class Loading(Incompatible):
    """Raised when the stage that was asked is still being restored."""


Body = tuple[m.Have, bytearray]
Answer = m.Holds | Body


@dataclass
class _Incoming:
    have: m.Have
    body: bytearray = field(default_factory=bytearray)


@dataclass
class _Call:
    """Somebody waits for the answer to a request."""

    seconds: float
    """At most, between two signs that it is being worked at."""
    scope: trio.CancelScope
    size: Callable[[m.Have], int]
    """How long the answer must be. Raises BadMessage for one that was not asked for."""
    done: trio.Event = field(default_factory=trio.Event)
    answer: Answer | Exception | None = None

    def progressed(self) -> None:
        self.scope.deadline = trio.current_time() + self.seconds


class _Calls:
    """Our requests that wait for an answer, by (stage, number)."""

    def __init__(self) -> None:
        self.progress = 0
        """Grows with each part of an answer to us that arrives, and with each part of a request of ours that leaves."""
        self._last = 0
        self._open: dict[tuple[int, int], _Call] = {}

    def number(self) -> int:
        self._last += 1
        return self._last

    @contextlib.contextmanager
    def open(self, stage: int, number: int, seconds: float, size: Callable[[m.Have], int]) -> Iterator[_Call]:
        call = self._open[stage, number] = _Call(seconds, trio.CancelScope(), size)
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
            self.progress += 1

    def answered(self, stage: int, number: int, answer: Answer | Exception) -> None:
        call = self.get(stage, number)
        if call is not None and not call.done.is_set():
            self.progress += 1
            call.answer = answer
            call.done.set()

    def lost(self, stage: int, error: Exception) -> None:
        """Nothing of `stage` comes any more."""
        for of, number in list(self._open):
            if of == stage:
                self.answered(stage, number, error)


@dataclass
class Counts:
    failed: int = 0
    """What was not done for our own disk's, device's or numbers' sake."""
    refused: Counter[str] = field(default_factory=Counter)
    """What peers sent, by reason of STATE_REASONS."""
    blame: Counter[int] = field(default_factory=Counter)
    """Stage → refusals."""


class Channel:
    """`run` it in a nursery; it ends by cancellation. push_rate: bytes per second to one peer, 0 is no limit. step: committed steps."""

    def __init__(
        self, fence: Fence, streams: Mapping[int, trio.abc.Stream], seconds: float, push_rate: float, compute: Compute,
        step: Callable[[], int],
    ) -> None:  # fmt: skip
        self.compute = compute
        self.gone: dict[int, str] = {}
        """Stage → why its stream ended."""
        self.streams = dict(streams)
        self.outboxes = {stage: Outbox(push_rate) for stage in streams}
        self._fence = fence
        self._seconds = seconds
        self._step = step
        self._calls = _Calls()
        self._incoming: dict[tuple[int, bool, int], _Incoming] = {}
        self._serving: Counter[int] = Counter()
        self._storing: set[int] = set()
        """Stages whose snapshot has arrived and is being stored."""
        self.counts = Counts()
        self._server: Server | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def progress(self) -> int:
        """Grows with each part of an answer to us that arrives, and with each part of a request of ours that leaves."""
        return self._calls.progress

    @property
    def step(self) -> int:
        return self._step()

    @property
    def place(self) -> Place:
        p = self._fence.place
        return Place(p.crew, p.stage, self.step)

    async def run(self, server: Server) -> None:
        self._server = server
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for stage, stream in self.streams.items():
                    nursery.start_soon(self._read, stage, stream)
                    nursery.start_soon(self._write, stage, stream)
                await trio.sleep_forever()  # answers and pushes come and go
        finally:
            self._nursery = None

    # Sending.

    def have(self, what: m.What, step: int, body: bytes, **more: Any) -> m.Have:
        return m.Have(self.place, 0, False, what, step, len(body), m.root_of(body), **more)

    def answer(self, stage: int, request: int, have: m.Have, body: bytes) -> None:
        self._transfer(stage, msgspec.structs.replace(have, request=request, answer=True), body)

    def lack(self, stage: int, request: int, reason: m.LackReason) -> None:
        self.send(stage, m.Lack(self.place, request, True, reason))

    def pushing(self, stage: int, what: m.What) -> bool:
        return stage in self.outboxes and self.outboxes[stage].pushing(what)

    def incoming(self) -> list[tuple[int, bool, int]]:
        """(stage, whether it is an answer, number) of each transfer on its way to us."""
        return list(self._incoming)

    def snapshots_coming(self) -> set[int]:
        """Stages whose snapshot is on its way to us."""
        return {stage for (stage, answer, _), incoming in self._incoming.items() if not answer and incoming.have.what == "shadow"}

    def push(self, stage: int, have: m.Have, body: bytes) -> None:
        """In the background. One of its kind that has not begun is replaced. To a stage that is gone it does nothing."""
        if stage in self.outboxes:
            self._transfer(stage, msgspec.structs.replace(have, request=self._calls.number()), body, push=True)

    def send(self, stage: int, message: m.Message) -> None:
        if stage in self.gone:
            return
        outbox = self.outboxes[stage]
        outbox.add(m.pack(message))
        if len(outbox.messages) > QUEUED:
            self._lose(stage, "does not read")

    def spawn(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Begin `work` in the background. False where `run` is over, or has not begun: then it is not begun."""
        if self._nursery is None:
            return False
        self._nursery.start_soon(work)
        return True

    def _transfer(self, stage: int, have: m.Have, body: bytes, push: bool = False) -> None:
        if stage not in self.gone:
            self.outboxes[stage].transfer(have, body, push)

    async def _write(self, stage: int, stream: trio.abc.Stream) -> None:
        outbox = self.outboxes[stage]
        try:
            while stage not in self.gone:
                out, data = outbox.next(self.place)
                if data is None:
                    await outbox.wait()
                    continue
                await stream.send_all(data)
                if out is not None and not out.push and not out.have.answer:
                    self._calls.progressed(stage, out.have.request)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lose(stage, "closed")

    # Asking.

    async def call(
        self, stage: int, message: m.Message, size: Callable[[m.Have], int], upload: bytes | None = None, seconds: float | None = None
    ) -> Answer:
        """Holds, or (Have, body) with the hash that was promised. `size` says how long the answer must be, or raises BadMessage.

        Raises PeerError: BadMessage for what was not what it said, PeerTimeout, Loading, and for a stage that is gone or has nothing.
        """
        if stage in self.gone or stage not in self.outboxes:
            raise PeerError(f"stage {stage} is gone: {self.gone.get(stage, 'no stream')}")
        message = msgspec.structs.replace(message, request=self._calls.number())
        within = self._seconds if seconds is None else seconds
        with self._calls.open(stage, message.request, within, size) as call:
            if isinstance(message, m.Have):
                self._transfer(stage, message, upload or b"")
            else:
                self.send(stage, message)
            with call.scope:  # around waiting only
                await call.done.wait()
        if not call.done.is_set():
            raise PeerTimeout(f"nothing came of a request to stage {stage} for {within:.0f} s")
        if isinstance(call.answer, Exception):
            raise call.answer
        assert call.answer is not None
        return call.answer

    async def call_for_body(self, stage: int, message: m.Message, size: Callable[[m.Have], int], upload: bytes | None = None) -> Body:
        """As `call`, of something that has a body."""
        answer = await self.call(stage, message, size, upload)
        if not isinstance(answer, tuple):
            raise BadMessage("schema", "an answer to another question")
        return answer

    # Receiving.

    async def _read(self, stage: int, stream: trio.abc.Stream) -> None:
        reason = "closed"
        try:
            while stage not in self.gone and (got := await m.read(stream)) is not None:
                if self._fence.check(got[0].place, stage, None):
                    continue
                try:
                    self._arrived(stage, *got)
                except BadMessage as error:
                    self._refuse(stage, error)
                if self.counts.blame[stage] >= MISBEHAVED:
                    reason = "misbehaved"
                    break
        except BadMessage as error:
            reason = error.reason
            self.counts.refused[reason] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # whoever waits is told by `_lose`
        self._lose(stage, reason)
        await trio.aclose_forcefully(stream)

    def _refuse(self, stage: int, error: BadMessage) -> None:
        self.counts.refused[error.reason if error.reason in m.STATE_REASONS else "schema"] += 1
        self.counts.blame[stage] += 1

    def _lose(self, stage: int, reason: str) -> None:
        if stage in self.gone:
            return
        self.gone[stage] = reason
        self._calls.lost(stage, PeerError(f"stage {stage} is gone: {reason}"))
        self.outboxes[stage].clear()
        for key in [key for key in self._incoming if key[0] == stage]:
            del self._incoming[key]

    def _arrived(self, stage: int, message: m.Message, body: bytes) -> None:
        server = self._server
        assert server is not None
        match message:
            case m.Chunk():
                self._chunk(stage, message, body, server)
            case m.Have():
                self._begins(stage, message, server)
            case m.Kept():
                server.pusher.kept(stage, message)
            case m.Keep():
                server.pusher.keeps(stage)
            case m.Holds():
                self._calls.answered(stage, message.request, message)
            case m.Lack():
                loading = message.reason == "loading"
                why = f"stage {stage}: {message.reason}"
                error = Loading(why) if loading else Incompatible(why) if message.reason == "failed" else PeerError(why)
                self._calls.answered(stage, message.request, error)
            case m.Ask():
                self.send(stage, server.holds(stage, message.request))
            case m.Want():
                self._soon(stage, message.request, lambda: server.serve(stage, message))

    def _begins(self, stage: int, have: m.Have, server: Server) -> None:
        call = self._calls.get(stage, have.request) if have.answer else None
        if have.answer and call is None:
            return  # too late: its chunks are dropped
        key = (stage, have.answer, have.request)
        try:
            size = call.size(have) if call is not None else server.expected(stage, have)
            if have.size != size or size < 1:
                raise BadMessage("size", f"{have.size} bytes of {have.what}, which has {size}")
            if key in self._incoming or sum(k[0] == stage for k in self._incoming) >= SERVED:
                raise BadMessage("bounds", "too many transfers at once")
            if call is None and have.what == "shadow":  # as large as a stage: there is room for one of each neighbour
                if stage in self.snapshots_coming():
                    raise BadMessage("bounds", "two snapshots at once")
                if stage in self._storing:
                    self.lack(stage, have.request, "busy")
                    return
        except BadMessage as error:
            self._reject(stage, have, error)
            raise
        self._incoming[key] = _Incoming(have)

    def _chunk(self, stage: int, chunk: m.Chunk, body: bytes, server: Server) -> None:
        key = (stage, chunk.answer, chunk.request)
        incoming = self._incoming.get(key)
        if incoming is None:
            return  # of something that was refused
        have = incoming.have
        if chunk.at != len(incoming.body) or chunk.length != min(CHUNK_BYTES, have.size - chunk.at):
            del self._incoming[key]
            error = BadMessage("size", "a chunk out of place")
            self._reject(stage, have, error)
            raise error
        incoming.body += body
        if chunk.answer:
            self._calls.progressed(stage, chunk.request)
        if len(incoming.body) == have.size:
            del self._incoming[key]
            if have.answer:
                self.spawn(lambda: self._complete(stage, have, incoming.body, server))
            elif have.what == "shadow":
                self._storing.add(stage)
                if not self._soon(stage, have.request, lambda: self._store_snapshot(stage, have, incoming.body, server)):
                    self._storing.discard(stage)
            else:
                self._soon(stage, have.request, lambda: self._complete(stage, have, incoming.body, server))

    async def _store_snapshot(self, stage: int, have: m.Have, body: bytearray, server: Server) -> None:
        try:
            await self._complete(stage, have, body, server)
        finally:
            self._storing.discard(stage)

    def _reject(self, stage: int, have: m.Have, error: BadMessage) -> None:
        """Tells whoever waits for it: here, or there."""
        if have.answer:
            self._calls.answered(stage, have.request, error)
        else:
            self.lack(stage, have.request, "refused")

    async def _complete(self, stage: int, have: m.Have, body: bytearray, server: Server) -> None:
        if await self.compute(lambda: m.root_of(body)) != have.root:
            error = BadMessage("hash", f"{have.what} from stage {stage}")
            if not have.answer:
                raise error
            self._refuse(stage, error)
            self._calls.answered(stage, have.request, error)
        elif have.answer:
            self._calls.answered(stage, have.request, (have, body))
        else:
            await server.pushed(stage, have, body)

    # Serving.

    def _soon(self, stage: int, number: int, work: Callable[[], Awaitable[None]]) -> bool:
        """Whether it will be done."""
        unread = self.outboxes[stage].unread  # who asks and does not read gets no more of them
        if self._serving[stage] + unread >= SERVED:
            self.lack(stage, number, "busy")
            return False
        self._serving[stage] += 1
        self.spawn(lambda: self._guarded(stage, number, work))
        return True

    async def _guarded(self, stage: int, number: int, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except BadMessage as error:
            self._refuse(stage, error)
            self.lack(stage, number, "refused")
        except (StateError, Unavailable, OSError, ValueError):
            self.counts.failed += 1
            self.lack(stage, number, "failed")
        except (RuntimeError, MemoryError) as error:
            if not faults.of_device(error):
                raise
            self.counts.failed += 1
            self.lack(stage, number, "failed")
        finally:
            self._serving[stage] -= 1
