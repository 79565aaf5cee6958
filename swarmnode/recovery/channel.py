"""Requests and bodies over state streams: one duplex stream to every other member, beside those that carry activations. No torch.

A request fails when nothing comes of it for `seconds`: what arrives or leaves of it chunk by chunk may take as long as the link makes it.
A fetch goes before a push, chunk by chunk, and pushes take no more of the uplink than they are allowed. Whatever a peer sends is refused
and counted before it is kept; after MISBEHAVED refusals its stream is closed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import trio

from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout, StateError
from swarmnode.pipeline import faults
from swarmnode.pipeline.compute import Compute
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import CHUNK_BYTES, Place
from swarmnode.recovery import messages as m

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
class _Outgoing:
    """One transfer on its way out."""

    have: m.Have
    body: memoryview
    push: bool
    at: int = 0


@dataclass
class _Outbox:
    """To one peer: messages first, then fetched bodies, chunk by chunk in turn, then pushed ones."""

    messages: deque[bytes] = field(default_factory=deque)
    transfers: deque[_Outgoing] = field(default_factory=deque)
    wake: trio.Event = field(default_factory=trio.Event)
    not_before: float = 0.0
    """The next chunk of a push."""


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


@dataclass(frozen=True)
class ChannelStatistics:
    bytes_sent: int
    bytes_received: int
    refused: dict[str, int]
    """What peers sent, by reason of STATE_REASONS."""
    fenced: dict[str, int]
    """Messages of the past, by reason of `fence.FENCE_REASONS`."""
    failed: int
    """Requests of peers that we could not answer: our disk, our device, or our numbers."""


@dataclass
class _Counts:
    """See `ChannelStatistics`, and `Channel.progress`."""

    sent: int = 0
    received: int = 0
    failed: int = 0
    progress: int = 0


class Channel(ABC):
    """Who serves what is up to a subclass: `holds`, `serve`, `expected`, `pushed`, `kept`. `run` it in a nursery; it ends by cancellation.

    push_rate: bytes per second to one peer; 0 is without limit.
    """

    def __init__(
        self, fence: Fence, streams: Mapping[int, trio.abc.Stream], seconds: float, push_rate: float, compute: Compute
    ) -> None:
        self.compute = compute
        self.gone: dict[int, str] = {}
        """Stage → why its stream ended."""
        self.streams = dict(streams)
        self._fence = fence
        self._seconds = seconds
        self._push_rate = push_rate
        self._outboxes = {stage: _Outbox() for stage in streams}
        self._calls: dict[tuple[int, int], _Call] = {}
        self._incoming: dict[tuple[int, bool, int], _Incoming] = {}
        self._serving: Counter[int] = Counter()
        self._storing: set[int] = set()
        """Stages whose snapshot has come and is being stored."""
        self._number = 0
        self._refused: Counter[str] = Counter()
        self._blame: Counter[int] = Counter()
        self._counts = _Counts()
        self._nursery: trio.Nursery | None = None

    def channel_statistics(self) -> ChannelStatistics:
        fenced = self._fence.statistics().dropped
        counts = self._counts
        return ChannelStatistics(counts.sent, counts.received, dict(self._refused), fenced, counts.failed)

    @property
    def progress(self) -> int:
        """Grows with each part of an answer to us that arrives, and with each part of a request of ours that leaves."""
        return self._counts.progress

    @property
    def step(self) -> int:
        return self._fence.place.step

    @property
    def place(self) -> Place:
        p = self._fence.place
        return Place(p.crew, p.stage, self.step)

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for stage, stream in self.streams.items():
                    nursery.start_soon(self._read, stage, stream)
                    nursery.start_soon(self._write, stage, stream)
                await trio.sleep_forever()  # answers and pushes come and go
        finally:
            self._nursery = None

    # A subclass's.

    @abstractmethod
    def holds(self, stage: int, number: int) -> m.Holds:
        """What there is here of `stage`, asked as `number`."""

    @abstractmethod
    async def serve(self, stage: int, want: m.Want) -> None:
        """Answers with `answer` or `lack`. What it raises (BadMessage, StateError, OSError, ValueError, `faults.of_device`) is answered and
        counted."""

    @abstractmethod
    def expected(self, stage: int, have: m.Have) -> int:
        """How long what `stage` begins to send must be. Raises BadMessage for what it has no business to send."""

    @abstractmethod
    async def pushed(self, stage: int, have: m.Have, body: bytearray) -> None:
        """It came, with the hash that was promised. Raises as `serve` does."""

    @abstractmethod
    def kept(self, stage: int, message: m.Kept) -> None:
        """What we pushed is stored there."""

    @abstractmethod
    def keeps(self, stage: int) -> None:
        """It wants our next snapshot."""

    # Sending.

    def have(self, what: m.What, step: int, body: bytes, **more: Any) -> m.Have:
        return m.Have(self.place, 0, False, what, step, len(body), m.root_of(body), **more)

    def answer(self, stage: int, request: int, have: m.Have, body: bytes) -> None:
        self._transfer(stage, msgspec.structs.replace(have, request=request, answer=True), body)

    def lack(self, stage: int, request: int, reason: m.LackReason) -> None:
        self.send(stage, m.Lack(self.place, request, True, reason))

    def pushing(self, stage: int, what: m.What) -> bool:
        return stage in self._outboxes and any(out.push and out.have.what == what for out in self._outboxes[stage].transfers)

    def snapshots_coming(self) -> set[int]:
        """Stages whose snapshot is on its way to us."""
        return {stage for (stage, answer, _), incoming in self._incoming.items() if not answer and incoming.have.what == "shadow"}

    def push(self, stage: int, have: m.Have, body: bytes) -> None:
        """In the background. One of its kind that has not begun is replaced. To a stage that is gone it does nothing."""
        if stage in self._outboxes:
            transfers = self._outboxes[stage].transfers
            for out in [out for out in transfers if out.push and out.at == 0 and out.have.what == have.what]:
                transfers.remove(out)
            self._transfer(stage, msgspec.structs.replace(have, request=self._next_number()), body, push=True)

    def send(self, stage: int, message: m.Message) -> None:
        if stage in self.gone:
            return
        outbox = self._outboxes[stage]
        outbox.messages.append(m.pack(message))
        outbox.wake.set()
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
            self._outboxes[stage].transfers.append(_Outgoing(have, memoryview(body), push))
            self._outboxes[stage].wake.set()

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    async def _write(self, stage: int, stream: trio.abc.Stream) -> None:
        outbox = self._outboxes[stage]
        try:
            while stage not in self.gone:
                out, data = self._next(outbox)
                if data is None:
                    outbox.wake = trio.Event()
                    later = outbox.not_before if any(out.push for out in outbox.transfers) else math.inf
                    with trio.move_on_at(later):  # around waiting only, never around the stream
                        await outbox.wake.wait()
                    continue
                self._counts.sent += len(data)
                await stream.send_all(data)
                if out is not None and not out.push and not out.have.answer:
                    self._progressed(stage, out.have.request)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lose(stage, "closed")

    def _progressed(self, stage: int, number: int) -> None:
        call = self._calls.get((stage, number))
        if call is not None:
            call.progressed()
            self._counts.progress += 1

    def _next(self, outbox: _Outbox) -> tuple[_Outgoing | None, bytes | None]:
        """What to write next, and of which transfer it is a part; no bytes where there is nothing, or nothing yet."""
        if outbox.messages:
            return None, outbox.messages.popleft()
        now = trio.current_time()
        begun = {out.have.what for out in outbox.transfers if out.push and out.at > 0}  # of each kind of push one after the other
        ready = [out for out in outbox.transfers if not out.push]
        if not ready and now >= outbox.not_before:
            ready = [out for out in outbox.transfers if out.at > 0 or out.have.what not in begun]
        if not ready:
            return None, None
        out = ready[0]
        outbox.transfers.remove(out)
        head = m.pack(out.have) if out.at == 0 else b""
        part = out.body[out.at : out.at + CHUNK_BYTES]
        chunk = m.pack(m.Chunk(self.place, out.have.request, out.have.answer, out.at, len(part)), part)
        out.at += len(part)
        if out.at < len(out.body):
            outbox.transfers.append(out)  # in turn
        if out.push and self._push_rate > 0:
            outbox.not_before = now + len(part) / self._push_rate
        return out, head + chunk

    # Asking.

    async def call(
        self, stage: int, message: m.Message, size: Callable[[m.Have], int], upload: bytes | None = None, seconds: float | None = None
    ) -> Answer:
        """Holds, or (Have, body) with the hash that was promised. `size` says how long the answer must be, or raises BadMessage.

        Raises PeerError: BadMessage for what was not what it said, PeerTimeout, Loading, and for a stage that is gone or has nothing.
        """
        if stage in self.gone or stage not in self._outboxes:
            raise PeerError(f"stage {stage} is gone: {self.gone.get(stage, 'no stream')}")
        message = msgspec.structs.replace(message, request=self._next_number())
        within = self._seconds if seconds is None else seconds
        call = self._calls[stage, message.request] = _Call(within, trio.CancelScope(), size)
        call.progressed()
        if isinstance(message, m.Have):
            self._transfer(stage, message, upload or b"")
        else:
            self.send(stage, message)
        try:
            with call.scope:  # around waiting only
                await call.done.wait()
        finally:
            del self._calls[stage, message.request]
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
                self._counts.received += len(got[1])
                if self._fence.check(got[0].place, stage, None):
                    continue
                try:
                    self._arrived(stage, *got)
                except BadMessage as error:
                    self._refuse(stage, error)
                if self._blame[stage] >= MISBEHAVED:
                    reason = "misbehaved"
                    break
        except BadMessage as error:
            reason = error.reason
            self._refused[reason] += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # whoever waits is told by `_lose`
        self._lose(stage, reason)
        await trio.aclose_forcefully(stream)

    def _refuse(self, stage: int, error: BadMessage) -> None:
        self._refused[error.reason if error.reason in m.STATE_REASONS else "schema"] += 1
        self._blame[stage] += 1

    def _lose(self, stage: int, reason: str) -> None:
        if stage in self.gone:
            return
        self.gone[stage] = reason
        for (of, number), call in self._calls.items():
            if of == stage and not call.done.is_set():
                self._answered(stage, number, PeerError(f"stage {stage} is gone: {reason}"))
        self._outboxes[stage].messages.clear()
        self._outboxes[stage].transfers.clear()
        self._outboxes[stage].wake.set()
        for key in [key for key in self._incoming if key[0] == stage]:
            del self._incoming[key]

    def _arrived(self, stage: int, message: m.Message, body: bytes) -> None:
        match message:
            case m.Chunk():
                self._chunk(stage, message, body)
            case m.Have():
                self._begins(stage, message)
            case m.Kept():
                self.kept(stage, message)
            case m.Keep():
                self.keeps(stage)
            case m.Holds():
                self._answered(stage, message.request, message)
            case m.Lack():
                loading = message.reason == "loading"
                why = f"stage {stage}: {message.reason}"
                error = Loading(why) if loading else Incompatible(why) if message.reason == "failed" else PeerError(why)
                self._answered(stage, message.request, error)
            case m.Ask():
                self.send(stage, self.holds(stage, message.request))
            case m.Want():
                self._soon(stage, message.request, lambda: self.serve(stage, message))

    def _answered(self, stage: int, number: int, answer: Answer | Exception) -> None:
        call = self._calls.get((stage, number))
        if call is not None and not call.done.is_set():
            self._counts.progress += 1
            call.answer = answer
            call.done.set()

    def _begins(self, stage: int, have: m.Have) -> None:
        call = self._calls.get((stage, have.request)) if have.answer else None
        if have.answer and call is None:
            return  # too late: its chunks are dropped
        key = (stage, have.answer, have.request)
        try:
            size = call.size(have) if call is not None else self.expected(stage, have)
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

    def _chunk(self, stage: int, chunk: m.Chunk, body: bytes) -> None:
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
            self._progressed(stage, chunk.request)
        if len(incoming.body) == have.size:
            del self._incoming[key]
            if have.answer:
                self.spawn(lambda: self._complete(stage, have, incoming.body))
            elif have.what == "shadow":
                self._storing.add(stage)
                if not self._soon(stage, have.request, lambda: self._store_snapshot(stage, have, incoming.body)):
                    self._storing.discard(stage)
            else:
                self._soon(stage, have.request, lambda: self._complete(stage, have, incoming.body))

    async def _store_snapshot(self, stage: int, have: m.Have, body: bytearray) -> None:
        try:
            await self._complete(stage, have, body)
        finally:
            self._storing.discard(stage)

    def _reject(self, stage: int, have: m.Have, error: BadMessage) -> None:
        """Tells whoever waits for it: here, or there."""
        if have.answer:
            self._answered(stage, have.request, error)
        else:
            self.lack(stage, have.request, "refused")

    async def _complete(self, stage: int, have: m.Have, body: bytearray) -> None:
        if await self.compute(lambda: m.root_of(body)) != have.root:
            error = BadMessage("hash", f"{have.what} from stage {stage}")
            if not have.answer:
                raise error
            self._refuse(stage, error)
            self._answered(stage, have.request, error)
        elif have.answer:
            self._answered(stage, have.request, (have, body))
        else:
            await self.pushed(stage, have, body)

    # Serving.

    def _soon(self, stage: int, number: int, work: Callable[[], Awaitable[None]]) -> bool:
        """Whether it will be done."""
        unread = sum(out.have.answer for out in self._outboxes[stage].transfers)  # who asks and does not read gets no more of them
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
        except (StateError, OSError, ValueError):
            self._counts.failed += 1
            self.lack(stage, number, "failed")
        except (RuntimeError, MemoryError) as error:
            if not faults.of_device(error):
                raise
            self._counts.failed += 1
            self.lack(stage, number, "failed")
        finally:
            self._serving[stage] -= 1
