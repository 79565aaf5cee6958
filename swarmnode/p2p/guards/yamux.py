"""Guards around libp2p/stream_muxer/yamux/yamux.py: whole frames, no lost bytes, bounded buffers, patient writers.

`Yamux` is one connection, `YamuxStream` one stream of it. Upstream keeps what arrived in `Yamux.stream_buffers[id]`, a plain
bytearray, and writes frames from whichever task happens to call; both are what the guards below replace.
"""

import struct
import weakref
from collections.abc import Callable

import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux import yamux as upstream

from swarmnode.p2p.guards.counting import fired

WRITE_STALL_SECONDS = 15.0
"""One frame (at most FRAME_BYTES) must leave within this time, i.e. a peer must read at least 17 kB/s; else its connection is dropped."""
WINDOW_STALL_SECONDS = 60.0
"""A writer waits this long for credit before its stream fails; upstream waits 5 s."""
OPEN_STREAM_SECONDS = 10.0
"""`open_stream` waits this long for one of the 256 outbound slots; upstream waits for ever."""
ABANDONED_SECONDS = 30.0
"""A stream that we closed is forgotten after this time even if the peer never closes its half."""
FRAME_BYTES = 256 * 1024
"""Payload and header of the frames we send. 64 KiB upstream; 256 KiB is 1.7 times as fast and every receiver takes up to 16 MiB."""
WINDOW_BYTES = 8 * 1024 * 1024
"""Receive window that auto-tuning may reach, and the largest frame accepted. 16 MiB upstream."""
CONNECTION_BYTES = 32 * 1024 * 1024
"""Unread bytes over all streams of one connection."""
PROCESS_BYTES = 256 * 1024 * 1024
"""Unread bytes over all connections of this process."""
CONNECTION_STREAMS = 512
"""Streams that one peer may hold open towards us."""
PROCESS_STREAMS = 8192
"""Streams that all peers together may hold open towards us."""


class Violation(trio.TooSlowError):
    """Raised inside `Yamux.handle_incoming`. Of all exceptions only a `TooSlowError` makes that loop close its connection; any other is
    logged and the peer may go on."""


class Total:
    """A sum that is cheap to keep: additions are counted, removals are only seen when the estimate passes the limit and is recounted.

    Buffers shrink in a dozen places upstream, so counting removals would mean patching each of them.
    """

    def __init__(self, limit: Callable[[], int], exact: Callable[[], int]) -> None:
        self.limit, self.exact, self.estimate = limit, exact, 0

    def passes(self, more: int) -> bool:
        """Whether the sum is above its limit with `more` added."""
        self.estimate += more
        if self.estimate > self.limit():
            self.estimate = self.exact() + more
        return self.estimate > self.limit()


_connections: "weakref.WeakSet[upstream.Yamux]" = weakref.WeakSet()


def unread(connection: upstream.Yamux) -> int:
    """Bytes received on `connection` that nobody has read yet."""
    return sum(map(len, connection.stream_buffers.values()))


def _open_inbound(connection: upstream.Yamux) -> int:
    return sum(not stream.is_initiator for stream in connection.streams.values())


_process_bytes = Total(lambda: PROCESS_BYTES, lambda: sum(map(unread, _connections)))
_process_streams = Total(lambda: PROCESS_STREAMS, lambda: sum(map(_open_inbound, _connections)))


class Inbox(bytearray):
    """The unread bytes of one stream; refuses what the peer had no credit for.

    Defect: `handle_incoming` adds whatever arrives and merely logs "peer exceeded receive window": 1 GB pushed is 1.2 GB resident, and
    nothing bounds the sum over streams and connections. Here: a byte beyond the stream's credit closes the connection (go-yamux does the
    same); `CONNECTION_BYTES` bounds a connection that stays within its credits; when `PROCESS_BYTES` is passed, the connection that holds
    most is dropped, so that many small hoarders cannot starve an honest peer. Cost: two comparisons per frame.
    Not needed any more when upstream closes a connection whose peer passes `recv_window`, and has a bound above streams.
    """

    __slots__ = ("connection", "discards", "stream_id")
    connection: upstream.Yamux
    stream_id: int
    discards: bool

    def extend(self, data: bytes) -> None:  # type: ignore[override]
        connection = self.connection
        if len(data) > connection.streams[self.stream_id].recv_window:
            fired("window_overrun", connection.peer_id)
            raise Violation("the peer sent more than its window")
        if self.discards:
            return
        if connection.unread_total.passes(len(data)):
            fired("connection_full", connection.peer_id)
            raise Violation("too many unread bytes on this connection")
        if _process_bytes.passes(len(data)):
            largest = max(_connections, key=unread)
            fired("process_full", largest.peer_id)
            if largest is connection:
                raise Violation("too many unread bytes in this process")
            _drop(largest)
        bytearray.extend(self, data)


class Inboxes(dict):  # type: ignore[type-arg]
    """`Yamux.stream_buffers`: turns each new buffer into an `Inbox`, and refuses streams that the peer should not open.

    Defect: a peer may open any number of streams, also with ids of our own parity, which our next `open_stream` would then overwrite.
    Here: at most `CONNECTION_STREAMS` and `PROCESS_STREAMS`, ids of the peer's parity only (yamux specification, "StreamID").
    Cost: one comparison per new stream. Not needed any more when `handle_incoming` checks parity and a limit at SYN.
    """

    def __init__(self, connection: upstream.Yamux) -> None:
        super().__init__()
        self.connection = connection
        self.open = Total(lambda: CONNECTION_STREAMS, lambda: _open_inbound(self.connection) - 1)

    def __setitem__(self, stream_id: int, buffer: bytearray) -> None:
        connection = self.connection
        if not connection.streams[stream_id].is_initiator:
            ours = stream_id % 2 == (1 if connection.is_initiator else 0)
            if ours or self.open.passes(1) or _process_streams.passes(1):
                fired("streams_overrun", connection.peer_id)
                raise Violation("the peer opened a stream that it may not open")
        inbox = Inbox(buffer)
        inbox.connection, inbox.stream_id, inbox.discards = connection, stream_id, False
        super().__setitem__(stream_id, inbox)


def discard(stream: upstream.YamuxStream) -> None:
    """Forget what `stream` has not read, and what it may still receive: its handler is gone."""
    inbox = stream.conn.stream_buffers.get(stream.stream_id)
    if inbox is not None:
        inbox.clear()
        inbox.discards = True


def _drop(connection: upstream.Yamux) -> None:
    """Free the buffers of `connection` at once and close its socket; `handle_incoming` then cleans up as for any lost peer."""
    for stream in connection.streams.values():
        stream.closed = stream.reset_received = True  # readers get a reset, not a premature end
    connection.stream_buffers.clear()
    for event in connection.stream_events.values():
        event.set()

    async def close() -> None:
        try:
            await connection.secured_conn.close()
        except Exception as error:
            fired("service_failed", error)

    trio.lowlevel.spawn_system_task(close)


async def write_frame(self: upstream.Yamux, data: bytes) -> None:
    """Whole frames or a closed connection; replaces `Yamux._write_frame`.

    Defect: a cancel scope of the application that fires during this await leaves half a frame, or a used Noise nonce without its frame, on
    the wire; every stream of the connection is then lost, while it stays listed as connected. And a peer that stops reading its socket
    blocks every writer for ever. Here: the write is shielded; after `WRITE_STALL_SECONDS` without room the socket is closed.
    Cost: two cancel scopes per frame (about 3 µs). Cancellation may take effect that much later.
    Not needed any more when `secured_conn.write` is shielded upstream and yamux has go-yamux's ConnectionWriteTimeout.
    """
    with trio.CancelScope(shield=True):
        async with self._write_lock:
            with trio.move_on_after(WRITE_STALL_SECONDS) as patience:
                await self.secured_conn.write(data)
            if patience.cancelled_caught:
                fired("write_stalled", self.peer_id)
                await self.secured_conn.close()
    if patience.cancelled_caught:
        raise ConnectionClosedError("the peer read nothing for too long", transport="tcp")
    await trio.lowlevel.cancel_shielded_checkpoint()


class Credit:
    """`YamuxStream.send_window` as a property, so that a writer without credit can sleep until there is some.

    Upstream polls every 10 ms. Cost: a property call per frame.
    """

    def __get__(self, stream: upstream.YamuxStream, owner: type | None = None) -> int:
        return stream.__dict__["send_window"]

    def __set__(self, stream: upstream.YamuxStream, value: int) -> None:
        stream.__dict__["send_window"] = value
        waiting = stream.__dict__.get("credit_event")
        if waiting is not None and value > 0:
            waiting.set()


async def write(self: upstream.YamuxStream, data: bytes) -> None:
    """Send `data` as the peer grants credit; replaces `YamuxStream.write`. A cancelled call may have sent part of `data`.

    Defect: a reader that pauses for 5 s costs the sender its stream ("Timed out waiting for window update after 5 seconds").
    Here: the writer waits `WINDOW_STALL_SECONDS`, asleep; the caller's own watchdog decides earlier if it wants to.
    Cost: none, less polling. Not needed any more when upstream makes that timeout a setting.
    """
    view = memoryview(data)
    while True:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.send_closed or self.closed:
            raise MuxedStreamError("the stream is closed for sending")
        if not view:
            return
        if self.send_window <= 0:
            await _wait_for_credit(self)
            continue
        size = min(self.send_window, upstream.MAX_MESSAGE_SIZE - upstream.HEADER_SIZE, len(view))
        self.send_window -= size
        header = struct.pack(upstream.YAMUX_HEADER_FORMAT, 0, upstream.TYPE_DATA, 0, self.stream_id, size)
        await self.conn._write_frame(b"".join((header, view[:size])))
        view = view[size:]


async def _wait_for_credit(stream: upstream.YamuxStream) -> None:
    deadline = trio.current_time() + WINDOW_STALL_SECONDS
    while stream.send_window <= 0 and not (stream.closed or stream.send_closed):
        if trio.current_time() >= deadline:
            fired("window_stalled", stream.conn.peer_id)
            raise MuxedStreamError("the peer granted no credit for too long")
        stream.__dict__["credit_event"] = trio.Event()
        with trio.move_on_after(0.25):  # a reset does not set the event
            await stream.__dict__["credit_event"].wait()


async def open_stream(self: upstream.Yamux) -> upstream.YamuxStream:
    """Open a stream, or fail in time; replaces `Yamux.open_stream`.

    Defect: with 256 streams not yet closed the semaphore is awaited for ever; and a cancellation between taking the slot and sending SYN
    loses the slot. Here: `OPEN_STREAM_SECONDS` for the slot, the rest shielded (it is one frame). Cost: two cancel scopes per stream.
    Not needed any more when upstream takes a timeout here and gives the slot back in a `finally`.
    """
    with trio.move_on_after(OPEN_STREAM_SECONDS) as patience:
        await self.stream_backlog_semaphore.acquire()
    if patience.cancelled_caught:
        fired("stream_slots_exhausted", self.peer_id)
        raise MuxedStreamError("too many streams to this peer are still open")
    with trio.CancelScope(shield=True):
        async with self.streams_lock:
            if self.event_shutting_down.is_set():
                self.stream_backlog_semaphore.release()
                raise MuxedStreamError("the connection is shutting down")
            stream = upstream.YamuxStream(self.next_stream_id, self, True)
            self.next_stream_id += 2
            stream._owns_backlog_slot = True
            self.streams[stream.stream_id] = stream
            self.stream_buffers[stream.stream_id] = bytearray()
            self.stream_events[stream.stream_id] = trio.Event()
        header = struct.pack(upstream.YAMUX_HEADER_FORMAT, 0, upstream.TYPE_WINDOW_UPDATE, upstream.FLAG_SYN, stream.stream_id, 0)
        try:
            await self._write_frame(header)
        except Exception as error:
            stream.closed = True
            await self._finalize_stream(stream, fully_closed=True)
            raise MuxedStreamError(f"could not open a stream: {error}") from error
    return stream


def install() -> None:
    """Replace the methods above on the upstream classes, for every connection of this process."""
    upstream.MAX_MESSAGE_SIZE = FRAME_BYTES
    upstream.MAX_WINDOW_SIZE = WINDOW_BYTES
    upstream.Yamux._write_frame = write_frame
    upstream.Yamux.open_stream = open_stream
    upstream.YamuxStream.write = write
    upstream.YamuxStream.send_window = Credit()
    _install_buffers()
    _install_shields()
    _install_sweep()


def _install_buffers() -> None:
    original = upstream.Yamux.__init__

    def __init__(self: upstream.Yamux, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        self.stream_buffers = Inboxes(self)
        self.unread_total = Total(lambda: CONNECTION_BYTES, lambda: unread(self))
        _connections.add(self)

    upstream.Yamux.__init__ = __init__


def _install_shields() -> None:
    """A cancelled read keeps its bytes.

    Defect: `YamuxStream.read` removes bytes from the buffer and then awaits twice (window update, bookkeeping); a cancellation there loses
    them. Here: both awaits are shielded. Cost: a cancel scope per read. Not needed any more when `read` returns right after removing.
    """
    update, finalize = upstream.YamuxStream._auto_tune_and_send_window_update, upstream.Yamux._finalize_stream

    async def _auto_tune_and_send_window_update(self: upstream.YamuxStream, *, bytes_read: int = 0) -> None:
        with trio.CancelScope(shield=True):
            await update(self, bytes_read=bytes_read)

    async def _finalize_stream(self: upstream.Yamux, stream: upstream.YamuxStream, *, fully_closed: bool) -> None:
        with trio.CancelScope(shield=True):
            await finalize(self, stream, fully_closed=fully_closed)

    upstream.YamuxStream._auto_tune_and_send_window_update = _auto_tune_and_send_window_update
    upstream.Yamux._finalize_stream = _finalize_stream


def _install_sweep() -> None:
    """Streams that we closed are forgotten even if the peer never closes its half.

    Defect: only fully closed streams are swept, so a peer that never sends FIN leaves an entry, and up to a window of unread bytes, for
    every stream. Here: the sweeper (every 30 s) also takes streams marked by `swarm.abandon` that are older than `ABANDONED_SECONDS`; later
    frames for them are ignored upstream. Cost: none. Not needed any more when upstream sweeps half-closed streams.
    """
    sweep = upstream.Yamux._sweep_stale_streams

    def _sweep_stale_streams(self: upstream.Yamux, now: float | None = None) -> int:
        now = trio.current_time() if now is None else now
        for stream in self.streams.values():
            since = getattr(stream, "abandoned_at", None)
            if since is not None and not stream.closed and now - since >= ABANDONED_SECONDS:
                fired("stream_abandoned", self.peer_id)
                stream.closed = stream.recv_closed = True
                discard(stream)
        return sweep(self, now)

    upstream.Yamux._sweep_stale_streams = _sweep_stale_streams
