"""Streams between the trainers of a crew, through both network processes: bytes, not looked at;
bounded, back-pressured, of one crew. No torch.

    trainer ─ Unix socket ─ pipe ─ libp2p ═ /swarmnode/stage-stream/9 ═ libp2p ─ pipe ─ Unix socket
    ─ trainer
        Open{stage, kind} ─▶            StreamOpen ─▶ is that peer this stage's holder? park
                                        ◀─ StreamReady   once its trainer has opened its end too
                                        ◀─ Open{stage, kind}

The lower stage dials, again and again while its trainer's connection is open and the crew is the
same. A pipe holds two chunks of 256 KiB each way; a trainer that does not read fills Yamux's window
(8 MiB at most) and holds up who sends to it, and nobody else. When one end of a pipe ends, so does
the other. What was in flight arrives first, unless the stream was broken.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import trio

from swarmnode.crew.local import Kind, Open, socket_file
from swarmnode.crew.stream_handshake import (
    StreamOpen,
    StreamPeers,
    StreamReady,
    read_first,
    read_open,
    refusal,
)
from swarmnode.crew.uplink import Uplink
from swarmnode.errors import BadMessage, PeerError
from swarmnode.files import listening
from swarmnode.p2p.api import PeerStream, Streams
from swarmnode.wire import headed, ids

log = logging.getLogger(__name__)

READ_BYTES: Final = 256 * 1024
OPEN_SECONDS: Final = 10.0
"""A connection or a stream has so long to say what it is to be."""
DIAL_SECONDS: Final = 10.0
PARK_SECONDS: Final = 60.0
"""A stream waits so long for its trainer to open the other end; then its dialler tries again."""
RETRY_SECONDS: Final = (0.1, 2.0)
"""Between two tries, doubling."""
LINGER_SECONDS: Final = 10.0
"""After our trainer has ended its half, the other half has so long to end."""
ORDERLY_SECONDS: Final = 1.0
"""A stream that ends in order may end because of a founding that we hear of in a moment; only after
this long is it called lost. One that breaks is, at once."""
BUDGET_SECONDS: Final = 0.25
"""Between two looks whether there is budget again."""
CONNECTIONS: Final = 64
"""The trainer may have so many at a time: twice what eight stages and two kinds need."""
STREAMS: Final = 32
STREAMS_PER_PEER: Final = 6
"""Incoming ones, at a time: two kinds, those of the crew before, and as many on their way."""
Key = tuple[int, Kind]
"""The other stage, and what the stream is for."""


class StreamProxyStatistics(msgspec.Struct, frozen=True):
    """Streams between stages, by kind where nothing else is said. Counts are since the process
    started."""

    open: dict[str, int] = {}
    """Streams with both ends."""
    waiting: int = 0
    """Connections of our trainer whose other end is not there."""
    parked: int = 0
    """Streams of others whose trainer here is not there."""
    opened: dict[str, int] = {}
    lost: dict[str, int] = {}
    """Ended by the other side, or broken, while the crew was the same."""
    refused: dict[str, int] = {}
    """Streams of others, by REFUSALS."""
    sent: dict[str, int] = {}
    """Bytes."""
    received: dict[str, int] = {}
    """Bytes."""
    throttled_seconds: float = 0.0
    """How long streams waited for the node's byte budget."""


class StreamProxy:
    """`streams`: of the network. lost(peer, crew): a stream of frames with a member of the present
    crew ended, not by our doing. allows("serve" | "fetch"): whether bytes may go out, come in.
    rejected: as of the network."""

    def __init__(
        self,
        streams: Streams,
        data_dir: Path,
        lost: Callable[[str, bytes], None],
        *,
        allows: Callable[[str], bool] = lambda choice: True,
        rejected: Callable[[str, str], None] = lambda peer, reason: None,
    ) -> None:
        self.path = socket_file(data_dir)
        self._streams = streams
        self._lost = lost
        self._allows = allows
        self._rejected = rejected
        self._peers: StreamPeers | None = None
        self._pipes: dict[Key, _Pipe] = {}
        self._parked: dict[Key, PeerStream] = {}
        self._moved = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._connections = 0
        self._counts = _Counts()
        self._line = Uplink()

    # -- for the service

    def uplink(self) -> float:
        """Bytes per second that this node's line takes; infinite until streams had to wait for
        it."""
        return self._line.bytes_per_second

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        """Serve until cancelled. Raises Unavailable when the socket cannot be made."""
        with listening(self.path, CONNECTIONS, f"stage socket {self.path}") as made:
            listener = trio.socket.from_stdlib_socket(made)
            self._streams.serve(
                ids.STAGE_STREAM_PROTOCOL,
                self._accept,
                concurrent=STREAMS,
                per_peer=STREAMS_PER_PEER,
            )
            try:
                async with trio.open_nursery() as self._nursery:
                    task_status.started()
                    while True:
                        connection = await _accepted(listener)
                        self._nursery.start_soon(self._connected, trio.SocketStream(connection))
            finally:
                self.release()

    def assign(self, peers: StreamPeers) -> None:
        """Streams are of this crew from now on; all others end."""
        self.release()
        self._peers = peers

    def release(self) -> None:
        """No crew: every stream ends, none is taken."""
        self._peers = None
        for pipe in list(self._pipes.values()):
            pipe.scope.cancel()
        self._pipes.clear()
        for stream in self._parked.values():
            stream.reset("another crew")
        self._parked.clear()

    def statistics(self) -> StreamProxyStatistics:
        whole = [kind for (_, kind), pipe in self._pipes.items() if pipe.stream is not None]
        counts, sent, received = (
            self._counts,
            Counter(self._counts.sent),
            Counter(self._counts.received),
        )
        for (_, kind), pipe in self._pipes.items():
            if pipe.stream is not None:
                sent[kind] += pipe.stream.sent
                received[kind] += pipe.stream.received
        return StreamProxyStatistics(
            open={kind: whole.count(kind) for kind in ("frames", "state")},
            waiting=len(self._pipes) - len(whole),
            parked=len(self._parked),
            opened=dict(counts.opened),
            lost=dict(counts.lost),
            refused=dict(counts.refused),
            sent=dict(sent),
            received=dict(received),
            throttled_seconds=counts.throttled_seconds,
        )

    # -- the trainer's side

    async def _connected(self, unix: trio.SocketStream) -> None:
        """One connection of our trainer. Never raises but LocalErrors; always closes."""
        async with unix:
            if self._connections >= CONNECTIONS:
                return
            self._connections += 1
            try:
                opened: Open | None = None
                with trio.move_on_after(OPEN_SECONDS):
                    opened = await read_open(unix)
                if opened is not None and (peers := self._peers_of(opened)) is not None:
                    await self._serve(unix, peers, (opened.stage, opened.kind))
            except BadMessage as error:
                log.error("our trainer opened no stream: %s", error)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # it has gone; it knows
            finally:
                self._connections -= 1

    def _peers_of(self, opened: Open) -> StreamPeers | None:
        peers = self._peers
        if peers is None or opened.crew != peers.crew:
            return None  # of a crew that is over, or that our trainer knows before we do
        fits = 0 <= opened.stage < len(peers.members) and opened.stage != peers.stage
        return peers if fits else None

    async def _serve(self, unix: trio.SocketStream, peers: StreamPeers, key: Key) -> None:
        before = self._pipes.pop(key, None)
        if before is not None:
            before.scope.cancel()
        pipe = self._pipes[key] = _Pipe(unix)
        lost = False
        try:
            with pipe.scope:
                if peers.stage < key[0]:
                    stream = await self._dial(peers, key)
                else:
                    stream = await self._take(peers, key)
                pipe.stream = stream
                self._counts.opened[key[1]] += 1
                lost = await self._pump(pipe, stream)
        finally:
            if self._pipes.get(key) is pipe:
                del self._pipes[key]
            if pipe.stream is not None:
                self._part(key[1], pipe.stream)
        if lost and pipe.stream is not None:
            assert self._nursery is not None
            self._nursery.start_soon(self._report, peers, key, pipe.stream)

    def _part(self, kind: Kind, stream: PeerStream) -> None:
        """Ends a stream in order, soon: the other side gets what is on its way."""
        self._counts.sent[kind] += stream.sent
        self._counts.received[kind] += stream.received
        stream.finish()
        if self._nursery is not None and not self._nursery.cancel_scope.cancel_called:
            self._nursery.start_soon(_farewell, stream)
        else:
            stream.reset("the pipe ended")

    async def _report(self, peers: StreamPeers, key: Key, stream: PeerStream) -> None:
        with trio.move_on_after(ORDERLY_SECONDS):
            await stream.broken.wait()
        if self._peers is peers:
            self._counts.lost[key[1]] += 1
            if key[1] == "frames":
                self._lost(peers.members[key[0]], peers.crew)

    # -- the other side

    async def _dial(self, peers: StreamPeers, key: Key) -> PeerStream:
        """Until it is there: whoever does not want it any more cancels."""
        stage, kind = key
        pause = RETRY_SECONDS[0]
        while True:
            stream: PeerStream | None = None
            try:
                stream = await self._streams.open(
                    peers.members[stage], ids.STAGE_STREAM_PROTOCOL, deadline=DIAL_SECONDS
                )
                await stream.send(headed.pack(StreamOpen(peers.crew, peers.stage, stage, kind)))
                with trio.move_on_after(PARK_SECONDS + DIAL_SECONDS):
                    ready = await read_first(stream, StreamReady)
                    if ready.crew == peers.crew:
                        ours, stream = stream, None
                        return ours
            except BadMessage as error:
                self._rejected(peers.members[stage], "stages_malformed")
                log.info("no stream to stage %d: %s", stage, error)
            except PeerError as error:
                log.debug("no stream to stage %d yet: %s", stage, error)
            finally:
                if stream is not None:
                    stream.reset("not wanted")
            await trio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    async def _take(self, peers: StreamPeers, key: Key) -> PeerStream:
        while True:
            stream = self._parked.pop(key, None)
            if stream is not None and not stream.closed.is_set():
                try:
                    await stream.send(headed.pack(StreamReady(peers.crew)))
                    return stream
                except PeerError:
                    continue  # given up meanwhile; it dials again
            await self._moved.wait()

    def _accept(self, stream: PeerStream) -> None:
        """A peer has opened a stream."""
        peers = self._peers
        # a stranger keeps no member waiting for a place
        if self._nursery is None or peers is None or stream.peer not in peers.members:
            self._counts.refused["crew" if peers is None else "peer"] += 1
            stream.reset("no crew here")
            return
        self._nursery.start_soon(self._greet, stream)

    async def _greet(self, stream: PeerStream) -> None:
        """Reads what it is to be, and parks it. Never raises."""
        reason = "timeout"
        try:
            with trio.move_on_after(OPEN_SECONDS):
                opened = await read_first(stream, StreamOpen)
                reason = refusal(self._peers, stream.peer, opened)
        except BadMessage as error:
            reason = "malformed"
            self._rejected(stream.peer, "stages_malformed")
            log.info("%s opened no stream: %s", stream.peer, error)
        except PeerError as error:
            log.debug("%s: %s", stream.peer, error)
        if reason:
            self._counts.refused[reason] += 1
            stream.reset(reason)
            return
        await self._park(stream, (opened.from_stage, opened.kind))

    async def _park(self, stream: PeerStream, key: Key) -> None:
        before = self._parked.pop(key, None)
        if before is not None:
            before.reset("replaced by a newer one")
        self._parked[key] = stream
        self._moved.set()
        self._moved = trio.Event()
        with trio.move_on_after(PARK_SECONDS):
            await stream.closed.wait()
        if self._parked.get(key) is stream:
            del self._parked[key]
            stream.reset("its trainer did not come")

    # -- both

    async def _pump(self, pipe: _Pipe, stream: PeerStream) -> bool:
        """Bytes both ways until one side ends. Whether that was the other side."""
        first = ""  # who ended first

        async def down() -> None:
            nonlocal first
            here = True
            with contextlib.suppress(PeerError):
                while data := await stream.receive():
                    await self._within("fetch")
                    try:
                        if here:
                            await pipe.unix.send_all(data)
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        # what else comes is for nobody; what we still have to send may go
                        here, first = False, first or "ours"
            first = first or "theirs"
            if first == "theirs":
                nursery.cancel_scope.cancel()

        async def watch() -> None:
            nonlocal first
            await stream.broken.wait()  # also while our trainer does not take what came before
            first = first or "theirs"
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(down)
            nursery.start_soon(watch)
            try:
                while data := await pipe.unix.receive_some(READ_BYTES):
                    await self._within("serve")
                    began = trio.current_time()
                    await stream.send(data)
                    self._line.sent(len(data), trio.current_time() - began, trio.current_time())
                first = first or "ours"
            except PeerError:
                first = first or "theirs"
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                first = first or "ours"
            if first == "ours":
                stream.finish()
                with trio.move_on_after(LINGER_SECONDS):
                    await stream.closed.wait()
            nursery.cancel_scope.cancel()
        return first == "theirs"

    async def _within(self, choice: str) -> None:
        """Returns once the node's byte budget allows more."""
        while not self._allows(choice):
            await trio.sleep(BUDGET_SECONDS)
            self._counts.throttled_seconds += BUDGET_SECONDS


@dataclass
class _Counts:
    """What `StreamProxyStatistics` says, without the streams that are open."""

    opened: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    throttled_seconds: float = 0.0


class _Pipe:
    """One connection of our trainer, and the stream it is joined with, once there is one."""

    def __init__(self, unix: trio.SocketStream) -> None:
        self.unix = unix
        self.stream: PeerStream | None = None
        self.scope = trio.CancelScope()


async def _farewell(stream: PeerStream) -> None:
    with trio.move_on_after(LINGER_SECONDS), contextlib.suppress(PeerError):
        while await stream.receive():
            pass
        await stream.closed.wait()
    stream.reset("the pipe ended")


async def _accepted(listener: trio.socket.SocketType) -> trio.socket.SocketType:
    while True:
        try:
            return (await listener.accept())[0]
        except OSError as error:  # out of descriptors: others are closed sooner or later
            log.error("a stream of our trainer was not taken: %s", error)
            await trio.sleep(RETRY_SECONDS[1])
