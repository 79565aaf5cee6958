"""Guards around what Yamux keeps for streams that nobody has read yet: the receive side of
libp2p/stream_muxer/yamux/yamux.py.

Upstream keeps what arrived in `Yamux.stream_buffers[id]`, a plain bytearray per stream, and forgets
a stream when both sides closed it.
"""

# mypy: disable-error-code="method-assign,assignment,attr-defined,arg-type,type-arg,override"

import weakref
from collections.abc import Callable

import trio
from libp2p.stream_muxer.yamux import yamux as upstream

from swarmnode.p2p.guards.counting import contained, fired

CONNECTION_BYTES = 32 * 1024 * 1024
"""Unread bytes over all streams of one connection."""
PROCESS_BYTES = 256 * 1024 * 1024
"""Unread bytes over all connections of this process."""
CONNECTION_STREAMS = 512
"""Streams that one peer may hold open towards us."""
PROCESS_STREAMS = 8192
"""Streams that all peers together may hold open towards us."""
ABANDONED_SECONDS = 30.0
"""A stream that we closed is forgotten after this time even if the peer never closes its half."""


class Violation(trio.TooSlowError):
    """Raised inside `Yamux.handle_incoming`. Of all exceptions only a `TooSlowError` makes that
    loop close its connection; any other is logged and the peer may go on."""


class Total:
    """A sum that is cheap to keep: additions are counted, removals are only seen when the estimate
    passes the limit and is recounted.

    Buffers shrink in a dozen places upstream, so counting removals would mean patching each of
    them.
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

    Defect: `handle_incoming` adds whatever arrives and merely logs "peer exceeded receive window":
    1 GB pushed is 1.2 GB resident, and nothing bounds the sum over streams and connections. Here: a
    byte beyond the stream's credit closes the connection (go-yamux does the same);
    `CONNECTION_BYTES` bounds a connection that stays within its credits; when `PROCESS_BYTES` is
    passed, the connection that holds most is dropped, so that many small hoarders cannot starve an
    honest peer. Cost: two comparisons per frame. Not needed any more when upstream closes a
    connection whose peer passes `recv_window`, and has a bound above streams.
    """

    __slots__ = ("connection", "discards", "stream_id")
    connection: upstream.Yamux
    stream_id: int
    discards: bool

    def extend(self, data: bytes) -> None:
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


class Inboxes(dict):
    """`Yamux.stream_buffers`: turns each new buffer into an `Inbox`, and refuses streams that the
    peer should not open.

    Defect: a peer may open any number of streams, also with ids of our own parity, which our next
    `open_stream` would then overwrite. Here: at most `CONNECTION_STREAMS` and `PROCESS_STREAMS`,
    ids of the peer's parity only (yamux specification, "StreamID"). Cost: one comparison per new
    stream. Not needed any more when `handle_incoming` checks parity and a limit at SYN.
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
    """Free the buffers of `connection` at once and close its socket; `handle_incoming` then cleans
    up as for any lost peer."""
    for stream in connection.streams.values():
        stream.closed = stream.reset_received = True  # readers get a reset, not a premature end
    connection.stream_buffers.clear()
    for event in connection.stream_events.values():
        event.set()

    async def close() -> None:
        with contained("service_failed"):
            await connection.secured_conn.close()

    trio.lowlevel.spawn_system_task(close)


def abandon(stream: upstream.YamuxStream) -> None:
    """Mark a stream that nobody will read any more; `_install_sweep` drops it when the peer never
    closes its half."""
    if not stream.recv_closed:
        stream.abandoned_at = trio.current_time()


def _install_buffers() -> None:
    original = upstream.Yamux.__init__

    def __init__(self: upstream.Yamux, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        self.stream_buffers = Inboxes(self)
        self.unread_total = Total(lambda: CONNECTION_BYTES, lambda: unread(self))
        _connections.add(self)

    upstream.Yamux.__init__ = __init__


def _install_sweep() -> None:
    """Streams that we closed are forgotten even if the peer never closes its half.

    Defect: only fully closed streams are swept, so a peer that never sends FIN leaves an entry, and
    up to a window of unread bytes, for every stream. Here: the sweeper (every 30 s) also takes
    streams marked by `abandon` that are older than `ABANDONED_SECONDS`; later frames for them are
    ignored upstream. Cost: none. Not needed any more when upstream sweeps half-closed streams.
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


def _install_resets() -> None:
    """What was not read of a stream is forgotten when either side resets it, and whoever waits for
    more is told.

    Defect: `_finalize_stream_locked` keeps a stream with unread bytes, megabytes of them where its
    window has grown, for 60 to 90 s for its reader, also after a reset, when reading raises or
    nobody reads any more. A few transfers given up in a minute, by us or by the peer, and
    `CONNECTION_BYTES` closes the connection. Here: they are dropped at once, as in go-yamux; what
    came before an end in order (FIN) is still there for its reader. A stream that we reset is taken
    off the connection without waking our own reader, which waits for ever; and one that was just
    woken waits again, if the reset has not got as far. Here: it is marked and its reader woken
    before anything is awaited. Cost: none. Not needed any more when upstream drops them, and a
    stock reader hears of a reset of its own side.
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
    """For every connection of this process made from now on."""
    _install_buffers()
    _install_sweep()
    _install_resets()
