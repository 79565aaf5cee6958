"""Long-lived bidirectional streams whose users may be cancelled, wait or leave at any time.

    send ─▶ chunk ─▶ task: stream.write        task: stream.read ─▶ chunk ─▶ receive

A cancel scope must not enclose libp2p I/O (see library/streams.py), so two tasks of the network do
it and hand over one chunk at a time. A user that does not receive blocks only its peer, by Yamux's
window of at most 8 MiB, and no other stream of the connection. Such a pause has no timeout. The
stream is reset when a peer neither reads nor sends for STALL_SECONDS while this node writes.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable

import msgspec
import trio

from swarmnode.errors import PeerError
from swarmnode.p2p.api import StreamHandler
from swarmnode.p2p.library.errors import StreamEnd
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.slots import PeerCap
from swarmnode.p2p.stream_calls import run_on_new_stream

log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
"""Maximum size of one read."""
STALL_SECONDS = 300.0
"""The stream is reset after this time without progress in either direction while this node writes.
Heartbeats detect a vanished peer much earlier."""
WATCH_SECONDS = 1.0


class StreamStatistics(msgspec.Struct, frozen=True):
    open: int = 0
    opened: dict[str, int] = {}
    """Streams opened by this node, by protocol."""
    accepted: dict[str, int] = {}
    """Accepted streams of peers, by protocol."""
    refused: dict[str, int] = {}
    """Streams of peers that were reset at once, by reason: unwelcome, busy."""
    stalled: int = 0


class Libp2pStream:
    """`api.PeerStream` on a libp2p stream. One task sends, one receives."""

    def __init__(self, stream: Stream, nursery: trio.Nursery) -> None:
        self.peer = stream.peer
        self.sent = 0
        self.received = 0
        self.stalled = False
        self.broken = trio.Event()
        self.closed = trio.Event()
        self._stream = stream
        self._nursery = nursery
        self._why = ""
        self._unread = b""
        self._running = 2
        self._writing = False
        arrive, self._in = trio.open_memory_channel[bytes](0)
        self._out, leave = trio.open_memory_channel[bytes | memoryview](0)
        stream.wait_for_credit_unlimited()  # `_watch` detects stalls instead
        nursery.start_soon(self._read, arrive)
        nursery.start_soon(self._write, leave)
        nursery.start_soon(self._watch)

    async def receive(self) -> bytes:
        """See `api.PeerStream.receive`. Returns at most READ_BYTES."""
        if self._unread:
            data, self._unread = self._unread, b""
            return data
        try:
            return await self._in.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            if self._why:
                raise PeerError(self._why) from None
            return b""

    def unread(self, data: bytes) -> None:
        """See `api.PeerStream.unread`."""
        self._unread = data + self._unread

    async def send(self, data: bytes | memoryview) -> None:
        """See `api.PeerStream.send`."""
        try:
            await self._out.send(data)
        except trio.BrokenResourceError:
            raise PeerError(self._why or "the stream ended") from None
        except trio.ClosedResourceError:
            raise (
                ValueError("sent after the end") if not self._why else PeerError(self._why)
            ) from None

    def finish(self) -> None:
        """See `api.PeerStream.finish`."""
        self._out.close()

    def reset(self, why: str = "reset here") -> None:
        """See `api.PeerStream.reset`."""
        if self.closed.is_set() or self._why:
            return
        self._why = why
        self.broken.set()
        self._out.close()
        self._in.close()
        self._nursery.start_soon(self._stream.reset)

    async def _read(self, arrive: trio.MemorySendChannel[bytes]) -> None:
        try:
            while data := await self._stream.read(READ_BYTES):
                self.received += len(data)
                await arrive.send(data)
        except StreamEnd as error:
            if self._stream.is_gone:  # the library reports a lost connection as an end, too
                self._fail(error)
        except PeerError as error:
            self._fail(error)
        except trio.BrokenResourceError:
            pass  # the receiver has left
        arrive.close()
        await self._task_done()

    async def _write(self, leave: trio.MemoryReceiveChannel[bytes | memoryview]) -> None:
        try:
            async for data in leave:
                self._writing = True
                await self._stream.write(data)
                self.sent += len(data)
                self._writing = False
            if not self._why:
                self._writing = True
                await self._stream.finish()
        except PeerError as error:
            self._fail(error)
        self._writing = False
        leave.close()
        await self._task_done()

    def _fail(self, error: PeerError) -> None:
        log.debug("stream of %s failed: %r", self.peer, error)
        self.reset(f"broken: {error}"[:200])

    async def _task_done(self) -> None:
        """End the stream when the second of the two tasks finishes."""
        self._running -= 1
        if not self._running:
            await (self._stream.reset() if self._why else self._stream.close())
            self.closed.set()

    async def _watch(self) -> None:
        moved, since = -1, trio.current_time()
        while self._running:
            now, current = trio.current_time(), self.sent + self.received
            if self._stream.is_gone:  # without a reader no other task notices
                self.reset("broken")
            if current != moved or not self._writing:
                moved, since = current, now
            elif now - since >= STALL_SECONDS:
                self.stalled = True
                self.reset(f"nothing moved for {STALL_SECONDS:g} s")
                return
            with trio.move_on_after(WATCH_SECONDS):
                await self.closed.wait()


class Libp2pStreams:
    """`api.Streams` on libp2p. `is_allowed(peer)` returns False for peers whose streams are
    refused."""

    def __init__(self, host: Host, is_allowed: Callable[[str], bool] = lambda peer: True) -> None:
        self._host = host
        self._is_allowed = is_allowed
        self._open: set[Libp2pStream] = set()
        self._opened: collections.Counter[str] = collections.Counter()
        self._accepted: collections.Counter[str] = collections.Counter()
        self._refused: collections.Counter[str] = collections.Counter()
        self._stalled = 0

    async def open(self, peer: str, protocol: str, *, deadline: float) -> Libp2pStream:
        """See `api.Streams.open`."""
        _, stream = await run_on_new_stream(
            self._host, peer, protocol, _do_nothing, deadline=deadline, keep=True
        )
        self._opened[protocol] += 1
        return self._track(stream)

    def serve(
        self, protocol: str, accept: StreamHandler, *, concurrent: int, per_peer: int
    ) -> None:
        """See `api.Streams.serve`."""
        cap = PeerCap(per_peer, concurrent)

        async def on_stream(stream: Stream) -> None:  # the stream lives as long as this task
            with cap.slot(stream.peer) as room:
                if not room or not self._is_allowed(stream.peer):
                    self._refused["unwelcome" if room else "busy"] += 1
                    await stream.reset()
                    return
                self._accepted[protocol] += 1
                made = self._track(stream)
                accept(made)
                await made.closed.wait()

        self._host.set_handler(protocol, on_stream)

    def statistics(self) -> StreamStatistics:
        return StreamStatistics(
            len(self._open),
            dict(self._opened),
            dict(self._accepted),
            dict(self._refused),
            self._stalled,
        )

    def _track(self, stream: Stream) -> Libp2pStream:
        made = Libp2pStream(stream, self._host.nursery)
        self._open.add(made)
        self._host.nursery.start_soon(self._untrack, made)
        return made

    async def _untrack(self, made: Libp2pStream) -> None:
        await made.closed.wait()
        self._open.discard(made)
        self._stalled += made.stalled


async def _do_nothing(stream: Stream) -> None:
    """Return at once, because the caller only opens the stream."""
