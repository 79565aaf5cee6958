"""Guards for libp2p/stream_muxer/yamux/yamux.py: whole frames, no lost bytes, longer timeouts of
writers. inbox.py guards the receive buffers.

`Yamux` is one connection, `YamuxStream` one stream. Upstream writes a frame in the task that calls
it, so a cancellation of that task can cut the frame.
"""

# mypy: disable-error-code="method-assign,assignment,attr-defined,arg-type,type-arg,override"

import collections
import struct

import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux import yamux as upstream

from swarmnode.p2p.guards.counting import contain_errors, count_firing

WRITE_STALL_SECONDS = 15.0
"""Timeout for one frame, at the shortest length if necessary. A peer must read at least 273 B/s, or
its connection is dropped."""
WINDOW_STALL_SECONDS = 60.0
"""Timeout of a writer that waits for credit; 5 s upstream."""
OPEN_STREAM_SECONDS = 10.0
"""Timeout of `open_stream` for one of the 256 outbound slots; unlimited upstream."""
FRAME_BYTES = 256 * 1024
"""Maximum size of a sent frame with header; 64 KiB upstream. 256 KiB is 1.7 times as fast, and
every receiver accepts up to 16 MiB."""
MIN_FRAME_BYTES, FIRST_FRAME_BYTES = 4 * 1024, 64 * 1024
FRAME_SECONDS = 0.1
"""Target time per frame. A stream waits for the frames of other streams, several times while it is
opened, so frames are shortened on a line that needs longer."""
WINDOW_BYTES = 8 * 1024 * 1024
"""Maximum receive window of auto-tuning, and maximum size of an accepted frame; 16 MiB upstream."""
MAX_OWED_ANSWERS = 1024
"""Maximum number of unwritten answer frames of the reading loop."""


async def write_frame(self: upstream.Yamux, data: bytes) -> None:
    """Write a whole frame or close the connection; replaces `Yamux._write_frame`.

    Defect: A cancelled write leaves half a frame, or a used Noise nonce without its frame, so every
        stream of the connection is lost. A peer that does not read its socket blocks writers
        without end. The loop that reads a connection also writes its answers to SYN and ping: if
        both directions are full, the loops of both ends wait for each other.
    Upstream: stream_muxer/yamux/yamux.py `_write_frame`, `handle_incoming`
    Guard: The write is shielded, and after `WRITE_STALL_SECONDS` (15 s) the socket is closed. The
        reading loop leaves its answers to the next writer or to a task. A peer that causes more
        than `MAX_OWED_ANSWERS` (1024) answers without reading is dropped.
    Cost: Two cancel scopes per frame (3 µs) and a task per answer. A cancellation takes effect
        after the frame. Peers below 273 B/s are dropped.
    Remove when: Upstream shields `secured_conn.write`, has go-yamux's ConnectionWriteTimeout, and
        `handle_incoming` writes nothing.
    Tests: test_guards_yamux.py
    """
    answers: collections.deque[bytes] = self.__dict__.setdefault("owed", collections.deque())
    if data and self.__dict__.get("reader") is trio.lowlevel.current_task():
        if len(answers) >= MAX_OWED_ANSWERS:
            count_firing("answers_full", self.peer_id)
            await self.secured_conn.close()
            raise ConnectionClosedError(
                "the peer asked for too many answers and read none", transport="tcp"
            )
        answers.append(data)
        if len(answers) == 1:
            trio.lowlevel.spawn_system_task(_write_answers, self)
        return
    with trio.CancelScope(shield=True):
        async with self._write_lock:
            began, whole = trio.current_time(), b"".join((*answers, data))
            answers.clear()
            with trio.move_on_after(WRITE_STALL_SECONDS) as patience:
                # Another task may have written the queue meanwhile; an empty packet would look like
                # the end of the connection.
                if whole:
                    await self.secured_conn.write(whole)
            longest = max_frame_bytes(self)
            self.__dict__["longest_frame"] = adapt_frame_size(
                longest, len(whole), trio.current_time() - began
            )
            if patience.cancelled_caught:
                count_firing("write_stalled", self.peer_id)
                await self.secured_conn.close()
    if patience.cancelled_caught:
        raise ConnectionClosedError("the peer read nothing for too long", transport="tcp")
    await trio.lowlevel.cancel_shielded_checkpoint()


async def _write_answers(connection: upstream.Yamux) -> None:
    """Write the queued answers of a reading loop, unless another task has."""
    with contain_errors("service_failed", connection.peer_id):
        if connection.__dict__["owed"]:
            await write_frame(connection, b"")


def max_frame_bytes(connection: upstream.Yamux) -> int:
    """Return the maximum size of the next frame, with header."""
    length: int = connection.__dict__.get("longest_frame", FIRST_FRAME_BYTES)
    return length


def adapt_frame_size(longest: int, length: int, seconds: float) -> int:
    """Return the new maximum frame size after a frame of `length` bytes took `seconds`.

    A slow frame halves the size. A fast frame of maximum size increases it by MIN_FRAME_BYTES.
    The increase is small because kernel buffers absorb megabytes at once, which does not reflect
    the line.
    """
    if seconds > FRAME_SECONDS:
        return min(longest, max(MIN_FRAME_BYTES, length // 2))
    return (
        min(FRAME_BYTES, longest + MIN_FRAME_BYTES)
        if length >= longest and seconds < FRAME_SECONDS / 4
        else longest
    )


class SendWindow:
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
        size = min(self.send_window, max_frame_bytes(self.conn) - upstream.HEADER_SIZE, len(view))
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
            count_firing("window_stalled", stream.conn.peer_id)
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
    self.recv_window += free  # no holder of `window_lock` awaits meanwhile
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
        count_firing("stream_slots_exhausted", self.peer_id)
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
        with contain_errors("stream_unopened", self.peer_id) as failure:
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
    upstream.YamuxStream.send_window = SendWindow()
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
