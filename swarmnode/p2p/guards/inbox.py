"""Guards for the receive buffers of Yamux, in libp2p/stream_muxer/yamux/yamux.py.

Upstream stores received bytes in `Yamux.stream_buffers[id]`, a plain bytearray per stream, and
drops a stream when both sides have closed it.
"""

# mypy: disable-error-code="method-assign,assignment,attr-defined,arg-type,type-arg,override"

import weakref
from collections.abc import Callable

import trio
from libp2p.stream_muxer.yamux import yamux as upstream

from swarmnode.p2p.guards.counting import contain_errors, count_firing

CONNECTION_BYTES = 32 * 1024 * 1024
"""Limit for the unread bytes of all streams of one connection."""
PROCESS_BYTES = 256 * 1024 * 1024
"""Limit for the unread bytes of all connections of this process."""
CONNECTION_STREAMS = 512
"""Limit for the open streams of one peer towards this node."""
PROCESS_STREAMS = 8192
"""Limit for the open streams of all peers towards this node."""
ABANDONED_SECONDS = 30.0
"""A stream closed by this node is dropped after this time, even if the peer never closes its
half."""


class ProtocolViolation(trio.TooSlowError):
    """Raised inside `Yamux.handle_incoming`. Only a `TooSlowError` makes that loop close its
    connection; any other exception is logged and the peer may continue."""


class ApproximateSum:
    """An approximate sum with a limit: additions are counted; removals are only seen by the exact
    recount when the estimate exceeds the limit.

    Counting removals would require patches in a dozen places upstream where buffers shrink.
    """

    def __init__(self, limit: Callable[[], int], exact: Callable[[], int]) -> None:
        self.limit, self.exact, self.estimate = limit, exact, 0

    def add(self, more: int) -> bool:
        """Add `more`; returns True if the sum exceeds its limit."""
        self.estimate += more
        if self.estimate > self.limit():
            self.estimate = self.exact() + more
        return self.estimate > self.limit()


_connections: "weakref.WeakSet[upstream.Yamux]" = weakref.WeakSet()


def unread(connection: upstream.Yamux) -> int:
    """Return the number of received bytes on `connection` that are still unread."""
    return sum(map(len, connection.stream_buffers.values()))


def _open_inbound(connection: upstream.Yamux) -> int:
    return sum(not stream.is_initiator for stream in connection.streams.values())


_process_bytes = ApproximateSum(lambda: PROCESS_BYTES, lambda: sum(map(unread, _connections)))
_process_streams = ApproximateSum(
    lambda: PROCESS_STREAMS, lambda: sum(map(_open_inbound, _connections))
)


class Inbox(bytearray):
    """The unread bytes of one stream, with limits per stream, connection and process.

    Defect: The receive window is not enforced: 1 GB pushed into one stream is 1.2 GB resident.
        There is no limit over the streams of a connection, nor over connections.
    Upstream: stream_muxer/yamux/yamux.py `handle_incoming`
    Guard: A byte beyond the stream's credit closes the connection, as in go-yamux. One connection
        holds at most `CONNECTION_BYTES` (32 MiB). Beyond `PROCESS_BYTES` (256 MiB) in all, the
        connection that holds most is dropped, so that many small hoarders cannot starve an honest
        peer.
    Cost: Two comparisons per frame.
    Remove when: Upstream closes a connection whose peer exceeds `recv_window`, and has limits above
        streams.
    Tests: test_guards_yamux.py
    """

    __slots__ = ("connection", "discards", "stream_id")
    connection: upstream.Yamux
    stream_id: int
    discards: bool

    def extend(self, data: bytes) -> None:
        connection = self.connection
        if len(data) > connection.streams[self.stream_id].recv_window:
            count_firing("window_overrun", connection.peer_id)
            raise ProtocolViolation("the peer sent more than its window")
        if self.discards:
            return
        if connection.unread_total.add(len(data)):
            count_firing("connection_full", connection.peer_id)
            raise ProtocolViolation("too many unread bytes on this connection")
        if _process_bytes.add(len(data)):
            largest = max(_connections, key=unread)
            count_firing("process_full", largest.peer_id)
            if largest is connection:
                raise ProtocolViolation("too many unread bytes in this process")
            _drop(largest)
        bytearray.extend(self, data)


class Inboxes(dict):
    """`Yamux.stream_buffers`, which wraps each new buffer in an `Inbox` and limits streams.

    Defect: A peer may open any number of streams, also with ids of this node's parity, which its
        next `open_stream` would overwrite.
    Upstream: stream_muxer/yamux/yamux.py `handle_incoming`
    Guard: At most `CONNECTION_STREAMS` (512) per peer and `PROCESS_STREAMS` (8192) in all, with ids
        of the peer's parity only (yamux specification, "StreamID").
    Cost: One comparison per new stream.
    Remove when: `handle_incoming` checks parity and a limit at SYN.
    Tests: test_guards_yamux.py
    """

    def __init__(self, connection: upstream.Yamux) -> None:
        super().__init__()
        self.connection = connection
        self.open = ApproximateSum(
            lambda: CONNECTION_STREAMS, lambda: _open_inbound(self.connection) - 1
        )

    def __setitem__(self, stream_id: int, buffer: bytearray) -> None:
        connection = self.connection
        if not connection.streams[stream_id].is_initiator:
            wrong_parity = stream_id % 2 == (1 if connection.is_initiator else 0)
            if wrong_parity or self.open.add(1) or _process_streams.add(1):
                count_firing("streams_overrun", connection.peer_id)
                raise ProtocolViolation("the peer opened a stream that it may not open")
        inbox = Inbox(buffer)
        inbox.connection, inbox.stream_id, inbox.discards = connection, stream_id, False
        super().__setitem__(stream_id, inbox)


def discard(stream: upstream.YamuxStream) -> None:
    """Drop the unread bytes of `stream` and everything that still arrives for it, because its
    handler has ended."""
    inbox = stream.conn.stream_buffers.get(stream.stream_id)
    if inbox is not None:
        inbox.clear()
        inbox.discards = True


def _drop(connection: upstream.Yamux) -> None:
    """Free the buffers of `connection` at once and close its socket; `handle_incoming` then cleans
    up as for any lost peer."""
    for stream in connection.streams.values():
        stream.closed = stream.reset_received = True  # readers get a reset, not an early end
    connection.stream_buffers.clear()
    for event in connection.stream_events.values():
        event.set()

    async def close() -> None:
        with contain_errors("service_failed"):
            await connection.secured_conn.close()

    trio.lowlevel.spawn_system_task(close)


def abandon(stream: upstream.YamuxStream) -> None:
    """Mark a stream that will not be read any more; `_install_sweep` drops it if the peer never
    closes its half."""
    if not stream.recv_closed:
        stream.abandoned_at = trio.current_time()


def _install_buffers() -> None:
    original = upstream.Yamux.__init__

    def __init__(self: upstream.Yamux, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        self.stream_buffers = Inboxes(self)
        self.unread_total = ApproximateSum(lambda: CONNECTION_BYTES, lambda: unread(self))
        _connections.add(self)

    upstream.Yamux.__init__ = __init__


def _install_sweep() -> None:
    """Forget streams that this node closed, even if the peer never closes its half.

    Defect: Only fully closed streams are swept. A peer that never sends FIN leaves an entry, and up
        to a window of unread bytes, for every stream.
    Upstream: stream_muxer/yamux/yamux.py `_sweep_stale_streams`
    Guard: The sweeper (every 30 s) also drops streams that were marked by `abandon` more than
        `ABANDONED_SECONDS` (30 s) ago. Upstream ignores later frames for them.
    Cost: None.
    Remove when: Upstream sweeps half-closed streams.
    Tests: test_guards_connections.py
    """
    sweep = upstream.Yamux._sweep_stale_streams

    def _sweep_stale_streams(self: upstream.Yamux, now: float | None = None) -> int:
        now = trio.current_time() if now is None else now
        for stream in self.streams.values():
            since = getattr(stream, "abandoned_at", None)
            if since is not None and not stream.closed and now - since >= ABANDONED_SECONDS:
                count_firing("stream_abandoned", self.peer_id)
                stream.closed = stream.recv_closed = True
                discard(stream)
        return sweep(self, now)

    upstream.Yamux._sweep_stale_streams = _sweep_stale_streams


def _install_resets() -> None:
    """Drop the unread bytes of a reset stream, and wake its reader.

    Defect: Unread bytes of a reset stream are kept for 60 to 90 s. A few transfers that are given
        up in a minute, by either side, fill the connection's limit. A stream that this node
        resets leaves its own reader waiting without bound.
    Upstream: stream_muxer/yamux/yamux.py `_finalize_stream_locked`, `reset`
    Guard: The bytes are dropped at once, as in go-yamux, and the reader is woken. Bytes before an
        orderly end (FIN) stay for the reader.
    Cost: None.
    Remove when: Upstream drops them, and a stock reader is woken by a reset of its own side.
    Tests: test_guards_yamux.py
    """
    reset, finalize = upstream.YamuxStream.reset, upstream.Yamux._finalize_stream_locked

    async def _reset(self: upstream.YamuxStream) -> None:
        discard(self)
        if not self.closed:
            self.reset_received = self.recv_closed = True
            if (event := self.conn.stream_events.get(self.stream_id)) is not None:
                event.set()
        await reset(self)

    def _finalize_stream_locked(
        self: upstream.Yamux, stream: upstream.YamuxStream, *, fully_closed: bool
    ) -> None:
        if stream.reset_received and not stream.recv_closed:
            discard(stream)
        finalize(self, stream, fully_closed=fully_closed)

    upstream.YamuxStream.reset = _reset
    upstream.Yamux._finalize_stream_locked = _finalize_stream_locked


def install() -> None:
    """Install the guards for every later connection of this process."""
    _install_buffers()
    _install_sweep()
    _install_resets()
