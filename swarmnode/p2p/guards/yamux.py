"""Guards around libp2p/stream_muxer/yamux/yamux.py: whole frames, no lost bytes, patient writers.
What it keeps is in inbox.py.

`Yamux` is one connection, `YamuxStream` one stream of it. Upstream writes frames from whichever
task happens to call, and the cancel scopes of that task then decide whether a frame is whole.
"""

# mypy: disable-error-code="method-assign,assignment,attr-defined,arg-type,type-arg,override"

import collections
import struct

import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux import yamux as upstream

from swarmnode.p2p.guards.counting import contained, fired

WRITE_STALL_SECONDS = 15.0
"""One frame must leave within this time, the shortest if need be: a peer reads at least 273 B/s, or
its connection is dropped."""
WINDOW_STALL_SECONDS = 60.0
"""A writer waits this long for credit before its stream fails; upstream waits 5 s."""
OPEN_STREAM_SECONDS = 10.0
"""`open_stream` waits this long for one of the 256 outbound slots; upstream waits for ever."""
FRAME_BYTES = 256 * 1024
"""Payload and header of the frames we send. 64 KiB upstream; 256 KiB is 1.7 times as fast and every
receiver takes up to 16 MiB."""
SHORTEST_FRAME_BYTES, FIRST_FRAME_BYTES = 4 * 1024, 64 * 1024
FRAME_SECONDS = 0.1
"""A stream waits for the frames of others, several times while it is opened: on a line that takes
longer for one, frames are shorter."""
WINDOW_BYTES = 8 * 1024 * 1024
"""Receive window that auto-tuning may reach, and the largest frame accepted. 16 MiB upstream."""


OWED = 1024
"""Frames that the reading loop has to answer with and that are not written yet, at most."""


async def write_frame(self: upstream.Yamux, data: bytes) -> None:
    """Write a whole frame or close the connection; replaces `Yamux._write_frame`.

    Defect: A cancelled write leaves half a frame, or a used Noise nonce without its frame, so every
        stream of the connection is lost. A peer that does not read its socket blocks writers
        without end. The loop that reads a connection also writes its answers to SYN and ping: if
        both directions are full, the loops of both ends wait for each other.
    Upstream: stream_muxer/yamux/yamux.py `_write_frame`, `handle_incoming`
    Guard: The write is shielded, and after `WRITE_STALL_SECONDS` (15 s) the socket is closed. The
        reading loop leaves its answers to the next writer or to a task. A peer that causes more
        than `OWED` (1024) answers without reading is dropped.
    Cost: Two cancel scopes per frame (3 µs) and a task per answer. A cancellation takes effect
        after the frame. Peers below 273 B/s are dropped.
    Remove when: Upstream shields `secured_conn.write`, has go-yamux's ConnectionWriteTimeout, and
        `handle_incoming` writes nothing.
    Tests: test_guards_yamux.py
    """
    owed: collections.deque[bytes] = self.__dict__.setdefault("owed", collections.deque())
    if data and self.__dict__.get("reader") is trio.lowlevel.current_task():
        if len(owed) >= OWED:
            fired("answers_full", self.peer_id)
            await self.secured_conn.close()
            raise ConnectionClosedError(
                "the peer asked for too many answers and read none", transport="tcp"
            )
        owed.append(data)
        if len(owed) == 1:
            trio.lowlevel.spawn_system_task(_answer, self)
        return
    with trio.CancelScope(shield=True):
        async with self._write_lock:
            began, whole = trio.current_time(), b"".join((*owed, data))
            owed.clear()
            with trio.move_on_after(WRITE_STALL_SECONDS) as patience:
                # what was owed may have gone while we waited, and a packet of nothing would be
                # taken for the end
                if whole:
                    await self.secured_conn.write(whole)
            longest = longest_frame(self)
            self.__dict__["longest_frame"] = fitting(
                longest, len(whole), trio.current_time() - began
            )
            if patience.cancelled_caught:
                fired("write_stalled", self.peer_id)
                await self.secured_conn.close()
    if patience.cancelled_caught:
        raise ConnectionClosedError("the peer read nothing for too long", transport="tcp")
    await trio.lowlevel.cancel_shielded_checkpoint()


async def _answer(connection: upstream.Yamux) -> None:
    """Writes what the reading loop of a connection owes, unless somebody else has."""
    with contained("service_failed", connection.peer_id):
        if connection.__dict__["owed"]:
            await write_frame(connection, b"")


def longest_frame(connection: upstream.Yamux) -> int:
    """Bytes with the header, of what is written next."""
    length: int = connection.__dict__.get("longest_frame", FIRST_FRAME_BYTES)
    return length


def fitting(longest: int, length: int, seconds: float) -> int:
    """How long frames may be after one of `length` bytes took so many seconds: half of it where
    that was too long, a little more where the longest that may be went fast. Kernel buffers swallow
    megabytes at once, which says nothing of the line."""
    if seconds > FRAME_SECONDS:
        return min(longest, max(SHORTEST_FRAME_BYTES, length // 2))
    return (
        min(FRAME_BYTES, longest + SHORTEST_FRAME_BYTES)
        if length >= longest and seconds < FRAME_SECONDS / 4
        else longest
    )


class Credit:
    """`YamuxStream.send_window` as a property, so that a writer without credit can sleep until
    there is some.

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
    """Send `data` as the peer grants credit; replaces `YamuxStream.write`.

    Defect: A reader that pauses for 5 s costs the sender its stream ("Timed out waiting for window
        update after 5 seconds").
    Upstream: stream_muxer/yamux/yamux.py `write`
    Guard: The writer waits `WINDOW_STALL_SECONDS` (60 s), or the stream's `patience_seconds`,
        without polling. A cancelled call may have sent part of `data`.
    Cost: None.
    Remove when: That timeout is a setting.
    Tests: test_guards_yamux.py, test_streams.py
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
        size = min(self.send_window, longest_frame(self.conn) - upstream.HEADER_SIZE, len(view))
        self.send_window -= size
        header = struct.pack(
            upstream.YAMUX_HEADER_FORMAT, 0, upstream.TYPE_DATA, 0, self.stream_id, size
        )
        await self.conn._write_frame(b"".join((header, view[:size])))
        view = view[size:]


async def _wait_for_credit(stream: upstream.YamuxStream) -> None:
    deadline = trio.current_time() + stream.__dict__.get("patience_seconds", WINDOW_STALL_SECONDS)
    while stream.send_window <= 0 and not (stream.closed or stream.send_closed):
        if trio.current_time() >= deadline:
            fired("window_stalled", stream.conn.peer_id)
            raise MuxedStreamError("the peer granted no credit for too long")
        stream.__dict__["credit_event"] = trio.Event()
        with trio.move_on_after(0.25):  # a reset does not set the event
            await stream.__dict__["credit_event"].wait()


async def grant_credit(self: upstream.YamuxStream, *, bytes_read: int = 0) -> None:
    """Grant credit once half of the window is free; replaces `_auto_tune_and_send_window_update`.

    Defect: Every read, also of one byte, sends a window update, a frame that is encrypted, written,
        read and handled. For small messages that is half of the work.
    Upstream: stream_muxer/yamux/yamux.py `_auto_tune_and_send_window_update`
    Guard: No update before half a window is free, as in go-yamux. The update is shielded, because
        upstream loses the bytes that `read` took if it is cancelled here.
    Cost: None.
    Remove when: A stock reader of many small messages sends no update for each.
    Tests: test_guards_yamux.py
    """
    buffered = len(self.conn.stream_buffers.get(self.stream_id, b""))
    free = self.target_recv_window - self.recv_window - buffered
    if free < max(1, self.target_recv_window // 2):
        return
    self.recv_window += free  # nobody who holds `window_lock` awaits meanwhile
    increment = free + self._apply_autotune_epoch(buffered)
    with trio.CancelScope(shield=True):
        await self.send_window_update(increment, skip_lock=True)


async def open_stream(self: upstream.Yamux) -> upstream.YamuxStream:
    """Open a stream, or fail in time; replaces `Yamux.open_stream`.

    Defect: With 256 open streams the call waits without end. A cancellation between taking the slot
        and sending SYN loses the slot.
    Upstream: stream_muxer/yamux/yamux.py `open_stream`
    Guard: At most `OPEN_STREAM_SECONDS` (10 s) for the slot; the rest, one frame, is shielded.
    Cost: Two cancel scopes per stream.
    Remove when: Upstream takes a timeout and releases the slot in a `finally`.
    Tests: test_guards_connections.py
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
        header = struct.pack(
            upstream.YAMUX_HEADER_FORMAT,
            0,
            upstream.TYPE_WINDOW_UPDATE,
            upstream.FLAG_SYN,
            stream.stream_id,
            0,
        )
        with contained("stream_unopened", self.peer_id) as failure:
            await self._write_frame(header)
        if failure.error is not None:
            stream.closed = True
            await self._finalize_stream(stream, fully_closed=True)
            raise MuxedStreamError(f"could not open a stream: {failure.error}") from failure.error
    return stream


def install() -> None:
    """Replace the methods above on the upstream classes, for every connection of this process."""
    upstream.MAX_MESSAGE_SIZE = FRAME_BYTES
    upstream.MAX_WINDOW_SIZE = WINDOW_BYTES
    upstream.Yamux._write_frame = write_frame
    reading = upstream.Yamux.handle_incoming

    async def handle_incoming(self: upstream.Yamux) -> None:
        self.__dict__["reader"] = trio.lowlevel.current_task()
        await reading(self)

    upstream.Yamux.handle_incoming = handle_incoming
    upstream.Yamux.open_stream = open_stream
    upstream.YamuxStream.write = write
    upstream.YamuxStream.send_window = Credit()
    upstream.YamuxStream._auto_tune_and_send_window_update = grant_credit
    _install_shields()


def _install_shields() -> None:
    """Keep the bytes of a cancelled read.

    Defect: A cancelled read loses the bytes that it has already taken from the buffer.
    Upstream: stream_muxer/yamux/yamux.py `read`
    Guard: Both awaits that follow are shielded.
    Cost: A cancel scope per read.
    Remove when: `read` returns right after it takes the bytes.
    Tests: test_guards_yamux.py
    """
    finalize = upstream.Yamux._finalize_stream

    async def _finalize_stream(
        self: upstream.Yamux, stream: upstream.YamuxStream, *, fully_closed: bool
    ) -> None:
        with trio.CancelScope(shield=True):
            await finalize(self, stream, fully_closed=fully_closed)

    upstream.Yamux._finalize_stream = _finalize_stream
