"""The byte proxy between the trainers of a crew. No torch.

`StreamProxy` joins connections of this node's trainer with streams to the other members, byte by
byte.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, get_args

import msgspec
import trio

from swarmnode.errors import BadMessage, PeerError
from swarmnode.files import unix_listener
from swarmnode.p2p.api import PeerStream, Streams
from swarmnode.stages.crew_messages import (
    OPEN_BYTES,
    StreamKind,
    StreamOpen,
    StreamReady,
)
from swarmnode.wire import headed, ids, strict

log = logging.getLogger(__name__)


class StreamProxyStatistics(msgspec.Struct, frozen=True):
    """Streams between stages. Counts are by kind and since the process started."""

    open: dict[str, int] = {}
    """Streams whose both ends are open."""
    waiting: int = 0
    """Connections of this node's trainer that wait for the other end."""
    parked: int = 0
    """Streams of peers that wait for this node's trainer."""
    lost: dict[str, int] = {}
    """Streams that the peer ended, or that broke, before their crew ended."""
    refused: dict[str, int] = {}
    """Refused streams of peers, by `STREAM_REFUSALS`."""
    sent: dict[str, int] = {}
    """Bytes sent."""
    received: dict[str, int] = {}
    """Bytes received."""
    throttled_seconds: float = 0.0
    """Seconds that streams waited for the node's byte budget."""


STREAM_REFUSALS: Final = ("malformed", "timeout", "crew", "stage", "peer")
"""Reasons for which an incoming stream is reset."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


@dataclass(frozen=True)
class StreamPeers:
    """Peers between which the streams of a crew run."""

    crew: bytes
    stage: int
    """Stage of this node."""
    members: tuple[str, ...]
    """Peer id of each stage's holder."""


def socket_file(data_dir: Path) -> Path:
    """Return the Unix socket that `StreamProxy` listens on."""
    return data_dir / "run" / "stages.sock"


def stream_refusal(peers: StreamPeers | None, peer: str, opened: StreamOpen) -> str:
    """Return one of STREAM_REFUSALS for a stream that `peer` opened; empty if it is accepted.
    `peers` is None while this node is in no crew."""
    if peers is None or opened.crew != peers.crew:
        return "crew"
    if opened.to_stage != peers.stage or not 0 <= opened.from_stage < peers.stage:
        return "stage"
    return "" if peers.members[opened.from_stage] == peer else "peer"


class _Messages:
    """The bytes of a stream of the network, as `wire.headed` reads them."""

    def __init__(self, stream: PeerStream) -> None:
        self._stream = stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data = await self._stream.receive()
        self._stream.unread(data[max_bytes:])
        return data[:max_bytes]


async def read_first(stream: PeerStream, kind: type[StructT]) -> StructT:
    """Return the first message on a stream. Bytes behind it stay in the stream.

    Raises:
        BadMessage: The reason is `oversize`, `malformed` or `schema`.
        PeerError: the stream ended.
    """
    message = await read_open(_Messages(stream), kind)
    if message is None:
        raise PeerError("the stream ended before its first message")
    return message


async def read_open(stream: headed.Reader, kind: type[StructT]) -> StructT | None:
    """Return the first message on a stream; None if it ended before.

    Raises:
        BadMessage: The reason is `oversize`, `malformed`, `schema` or `truncated`.
        trio.BrokenResourceError, trio.ClosedResourceError: a trainer's socket failed.
    """
    return await headed.read_header(stream, lambda data: strict.decode(data, kind), OPEN_BYTES)


#     trainer ─ socket ─ pipe ─ libp2p ═ stage stream ═ libp2p ─ pipe ─ socket ─ trainer
#         StreamOpen ─▶          StreamOpen ─▶ from the holder of that stage? park
#                                ◀─ StreamReady   once its trainer has opened its end too
#                                                                   ◀─ StreamOpen
#
# The lower stage dials, and repeats this while its trainer's connection is open and the crew is the
# same. A pipe holds at most 256 KiB each way. When one end of a pipe ends, the other ends too.

READ_BYTES: Final = 256 * 1024
OPEN_SECONDS: Final = 10.0
"""Deadline for the first message of a connection or stream."""
DIAL_SECONDS: Final = 10.0
PARK_SECONDS: Final = 60.0
"""A stream waits this long for its trainer to open the other end; then its dialler tries again."""
RETRY_SECONDS: Final = (0.1, 2.0)
"""Wait before the next dial: first, and at most. It doubles."""
LINGER_SECONDS: Final = 10.0
"""After one half of a pipe has ended, the other half has this long to end."""
ORDERLY_SECONDS: Final = 1.0
"""An orderly end of a stream is often the end of its crew, which other members report within a
moment. Only after this time does it count as a lost stream. A stream that breaks is lost at
once."""
BUDGET_SECONDS: Final = 0.25
"""Interval between checks of the byte budget, in seconds."""
SOCKET_BACKLOG: Final = 64
MAX_INCOMING_STREAMS: Final = 32
MAX_STREAMS_PER_PEER: Final = 6
"""Incoming streams of one peer at a time: two kinds for the present crew, for the crew before, and
for a repeated dial."""

PipeKey = tuple[int, StreamKind]
"""(other stage, kind of the stream)."""
_SOCKET_ERRORS: Final = (trio.BrokenResourceError, trio.ClosedResourceError)
_NO_BYTES: Final = dict.fromkeys(get_args(StreamKind), 0)


@dataclass(eq=False)
class _Pipe:
    """One connection of this node's trainer, and the stream that it is joined with."""

    scope: trio.CancelScope
    stream: PeerStream | None = None


class StreamProxy:
    """Joins connections of this node's trainer with streams to the other members.

    Args:
        streams: Streams of the network.
        lost: Called with (peer, crew) when the other side ended a stream of the present crew.
        allows: Returns True if bytes may be sent ("serve") or received ("fetch") now.
        rejected: Called with (peer, reason) for an invalid message.
    """

    def __init__(
        self,
        streams: Streams,
        data_dir: Path,
        lost: Callable[[str, bytes], object],
        *,
        allows: Callable[[str], bool] = lambda choice: True,
        rejected: Callable[[str, str], None] = lambda peer, reason: None,
    ) -> None:
        self.path = socket_file(data_dir)
        self._streams, self._report, self._allows, self._rejected = streams, lost, allows, rejected
        self._crew: StreamPeers | None = None
        self._pipes: dict[PipeKey, _Pipe] = {}
        self._parked: dict[PipeKey, PeerStream] = {}
        self._newly_parked = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._sent, self._received = Counter(_NO_BYTES), Counter(_NO_BYTES)
        self._lost = Counter(_NO_BYTES)
        self._refused = Counter(dict.fromkeys(STREAM_REFUSALS, 0))
        self._throttled_seconds = 0.0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        """Serve until cancelled.

        Raises:
            Unavailable: the Unix socket cannot be made.
        """
        with unix_listener(self.path, SOCKET_BACKLOG, f"stage socket {self.path}") as made:
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(made))
            self._streams.serve(
                ids.STAGE_STREAM_PROTOCOL,
                self._accept,
                concurrent=MAX_INCOMING_STREAMS,
                per_peer=MAX_STREAMS_PER_PEER,
            )
            try:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    task_status.started()
                    await trio.serve_listeners(
                        self._serve_trainer, [listener], handler_nursery=nursery
                    )
            finally:
                self.release()

    def assign(self, crew: StreamPeers) -> None:
        """Accept streams of this crew from now on. Streams of other crews end."""
        self.release()
        self._crew = crew

    def release(self) -> None:
        """End every stream, and accept none."""
        self._crew = None
        for pipe in self._pipes.values():
            pipe.scope.cancel()
        self._pipes.clear()
        for stream in self._parked.values():
            stream.reset("another crew")
        self._parked.clear()

    def statistics(self) -> StreamProxyStatistics:
        """Return counts for status page and metrics."""
        whole = Counter(kind for (_, kind), pipe in self._pipes.items() if pipe.stream is not None)
        return StreamProxyStatistics(
            open={kind: whole[kind] for kind in _NO_BYTES},
            waiting=len(self._pipes) - whole.total(),
            parked=len(self._parked),
            lost=dict(self._lost),
            refused=dict(self._refused),
            sent=dict(self._sent),
            received=dict(self._received),
            throttled_seconds=self._throttled_seconds,
        )

    async def _serve_trainer(self, unix: trio.SocketStream) -> None:
        """Serve one connection of the trainer: join it with a stream, and copy bytes."""
        opened = None
        try:
            with trio.move_on_after(OPEN_SECONDS):
                opened = await read_open(unix, StreamOpen)
        except BadMessage as error:
            log.error("invalid first message of this node's trainer on the stage socket: %s", error)
        except _SOCKET_ERRORS:
            return
        crew = self._crew
        if opened is None or crew is None or opened.crew != crew.crew:
            return  # the trainer's crew is not the present one
        stage = opened.to_stage
        if stage == crew.stage or not 0 <= stage < len(crew.members):
            return
        key = (stage, opened.kind)
        if key in self._pipes:
            self._pipes[key].scope.cancel()
        pipe = self._pipes[key] = _Pipe(trio.CancelScope())
        peer_ended = False
        try:
            with pipe.scope:
                dials = crew.stage < stage
                pipe.stream = await (
                    self._dial(crew, key) if dials else self._take_parked(crew, key)
                )
                peer_ended = await self._pump(unix, pipe.stream, opened.kind)
        finally:
            if self._pipes.get(key) is pipe:
                del self._pipes[key]
            if pipe.stream is not None:
                assert self._nursery is not None
                self._nursery.start_soon(self._close, pipe.stream, crew, key, peer_ended)

    async def _dial(self, crew: StreamPeers, key: PipeKey) -> PeerStream:
        """Return a stream to the peer's trainer. Dial until that trainer has opened its end."""
        stage, kind = key
        pause = RETRY_SECONDS[0]
        while True:
            stream, is_ready = None, False
            try:
                stream = await self._streams.open(
                    crew.members[stage], ids.STAGE_STREAM_PROTOCOL, deadline=DIAL_SECONDS
                )
                await stream.send(headed.pack(StreamOpen(crew.crew, crew.stage, stage, kind)))
                with trio.move_on_after(PARK_SECONDS + DIAL_SECONDS):
                    is_ready = (await read_first(stream, StreamReady)).crew == crew.crew
                if is_ready:
                    return stream
            except BadMessage as error:
                self._rejected(crew.members[stage], "stages_malformed")
                log.info("no stream to stage %d: %s", stage, error)
            except PeerError as error:
                log.debug("no stream to stage %d yet: %s", stage, error)
            finally:
                if stream is not None and not is_ready:
                    stream.reset("not wanted")
            await trio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    def _accept(self, stream: PeerStream) -> None:
        """Accept a stream that a peer opened, if the peer is a member of the crew. Other peers must
        not occupy the places of members."""
        crew = self._crew
        if self._nursery is None or crew is None or stream.peer not in crew.members:
            self._refuse(stream, "crew" if crew is None else "peer")
        else:
            self._nursery.start_soon(self._park, stream)

    async def _park(self, stream: PeerStream) -> None:
        """Store a peer's stream until this node's trainer opens the other end."""
        opened, reason = None, "timeout"
        try:
            with trio.move_on_after(OPEN_SECONDS):
                opened = await read_first(stream, StreamOpen)
                reason = stream_refusal(self._crew, stream.peer, opened)
        except BadMessage as error:
            reason = "malformed"
            self._rejected(stream.peer, "stages_malformed")
            log.info("invalid first message of %s on a stage stream: %s", stream.peer, error)
        except PeerError as error:
            log.debug("%s: %s", stream.peer, error)
        if opened is None or reason:
            self._refuse(stream, reason)
            return
        key = (opened.from_stage, opened.kind)
        if key in self._parked:
            self._parked[key].reset("replaced by a newer one")
        self._parked[key] = stream
        self._newly_parked.set()
        self._newly_parked = trio.Event()
        with trio.move_on_after(PARK_SECONDS):
            await stream.closed.wait()
        if self._parked.get(key) is stream:
            del self._parked[key]
            stream.reset("the trainer did not open its end in time")

    def _refuse(self, stream: PeerStream, reason: str) -> None:
        self._refused[reason] += 1
        stream.reset(reason)

    async def _take_parked(self, crew: StreamPeers, key: PipeKey) -> PeerStream:
        """Wait for the parked stream, confirm it to its dialler, and return it."""
        while True:
            stream = self._parked.pop(key, None)
            if stream is None:
                await self._newly_parked.wait()
                continue
            with suppress(PeerError):  # the peer closed it and dials again
                await stream.send(headed.pack(StreamReady(crew.crew)))
                return stream

    async def _pump(self, unix: trio.SocketStream, stream: PeerStream, kind: StreamKind) -> bool:
        """Copy bytes both ways until one side ends. Returns True if the peer ended first."""
        ends: list[str] = []

        async def download() -> None:
            with suppress(PeerError):
                while data := await stream.receive():
                    await self._wait_for_budget("fetch")
                    self._received[kind] += len(data)
                    if "trainer" not in ends:  # else no process reads the rest
                        try:
                            await unix.send_all(data)
                        except _SOCKET_ERRORS:
                            ends.append("trainer")
            ends.append("peer")
            if ends[0] == "peer":
                nursery.cancel_scope.cancel()

        async def watch() -> None:
            await stream.broken.wait()  # also while the trainer reads nothing
            ends.append("peer")
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(download)
            nursery.start_soon(watch)
            try:
                while data := await unix.receive_some(READ_BYTES):
                    await self._wait_for_budget("serve")
                    await stream.send(data)
                    self._sent[kind] += len(data)
                ends.append("trainer")
            except PeerError:
                ends.append("peer")
            except _SOCKET_ERRORS:
                ends.append("trainer")
            if ends[0] == "trainer":
                stream.finish()
                with trio.move_on_after(LINGER_SECONDS):
                    await stream.closed.wait()
            nursery.cancel_scope.cancel()
        return ends[0] == "peer"

    async def _close(
        self, stream: PeerStream, crew: StreamPeers, key: PipeKey, peer_ended: bool
    ) -> None:
        """End a stream in order, so that sent bytes arrive. Report it if the peer ended it and the
        crew continues."""
        try:
            stream.finish()
            if peer_ended:
                with trio.move_on_after(ORDERLY_SECONDS):
                    await stream.broken.wait()
                if self._crew is crew:
                    self._lost[key[1]] += 1
                    self._report(crew.members[key[0]], crew.crew)
            with trio.move_on_after(LINGER_SECONDS), suppress(PeerError):
                while await stream.receive():
                    pass
                await stream.closed.wait()
        finally:
            stream.reset("the pipe ended")

    async def _wait_for_budget(self, choice: str) -> None:
        while not self._allows(choice):
            await trio.sleep(BUDGET_SECONDS)
            self._throttled_seconds += BUDGET_SECONDS
