"""The stage service of the network process: it carries out what `crew.py` decides. No torch.

    peers ─ /swarmnode/crews/10 ─▶ Received ┐                       ┌─▶ SendAnswer, Send ─▶ peers
    connections ─▶ PeerGone, PeerBack ──────┤                       ├─▶ Assigned, Released
    trainer ─ link ─▶ Offering, … ──────────┼─▶ advance (one event  ├─▶ Suspended, Resumed
    stream proxy ─▶ StreamLost ─────────────┤   at a time) ─────────┴─▶ Note
    clock ─▶ Tick ──────────────────────────┘

A malformed message costs the peer's standing and ends no task here. `partners.json` lists the peers
with which this node took steps.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import trio

from swarmnode.config import StagesConfig
from swarmnode.errors import BadMessage, PeerError
from swarmnode.files import listening, write_atomically
from swarmnode.p2p.api import Network, PeerStream, Streams
from swarmnode.stages import wire
from swarmnode.stages.crew import CrewStatistics, Means, Phase, State, advance, statistics
from swarmnode.stages.wire import (
    Kind,
    Open,
    StreamOpen,
    StreamPeers,
    StreamReady,
    read_first,
    read_open,
    refusal,
    socket_file,
)
from swarmnode.wire import headed, ids

log = logging.getLogger(__name__)


# The measured speed of this node's line. Times are this machine's monotonic seconds.

WINDOW_SECONDS: Final = 1.0
BUSY: Final = 0.5
"""A line that sends waited for in this share of a window was full; else it is not known how fast it
is."""
WINDOWS: Final = 32
LEAST: Final = 64 * 1024.0
"""Bytes per second: no line is taken to be slower."""


class Uplink:
    """The upper quartile of the last windows in which the line was full: neither what buffers
    swallow at first, nor a member that reads slowly, is taken for the line."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=WINDOWS)
        self._since: float | None = None
        self._bytes, self._waited = 0, 0.0

    @property
    def bytes_per_second(self) -> float:
        """Infinite while it was never full."""
        return (
            max(LEAST, sorted(self._rates)[len(self._rates) * 3 // 4]) if self._rates else math.inf
        )

    def sent(self, count: int, seconds: float, now: float) -> None:
        """`count` bytes were taken `now`, after `seconds`."""
        if self._since is None:
            self._since = now - seconds
        self._bytes, self._waited = self._bytes + count, self._waited + seconds
        elapsed = now - self._since
        if elapsed >= WINDOW_SECONDS:
            if self._waited >= BUSY * elapsed:
                self._rates.append(self._bytes / elapsed)
            self._since, self._bytes, self._waited = None, 0, 0.0


# The byte proxy between the trainers of a crew, bounded and back-pressured:
#
#     trainer ─ socket ─ pipe ─ libp2p ═ stage stream ═ libp2p ─ pipe ─ socket ─ trainer
#         Open{stage, kind} ─▶   StreamOpen ─▶ held by that peer? park
#                                ◀─ StreamReady   once its trainer has opened its end too
#                                                                   ◀─ Open{stage, kind}
#
# The lower stage dials, again and again while its trainer's connection is open and the crew is the
# same. A pipe holds two chunks of 256 KiB each way. When one end of a pipe ends, the other ends
# too.

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
    """`streams`: of the network. lost(peer, crew): a stream with a member of the present crew
    ended, not by our doing. allows("serve" | "fetch"): whether bytes may go out, come in.
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
        self._counts = _ProxyCounts()
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
class _ProxyCounts:
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


# The service. Heartbeats are requests of their own: they wait for no slot.

REQUEST_TIMEOUT: Final = 10.0
"""The next heartbeat does not wait for the answer to the last: over a slow line that tensors fill
it takes seconds."""
NOTE_WORDS: Final = {
    "struck": "peer struck",
    "behind": "former member left behind",
    "suspected": "member suspected",
    "refuted": "member heard again",
    "broken": "crew ended",
    "refused": "no crew",
}
LEAVE_SECONDS: Final = 3.0
"""For others to be told that this node is going."""
POLL_INTERVAL: Final = 5.0
"""Between two looks who is connected, whatever the network says."""
PARTNERS: Final = "partners.json"
"""Below the data directory."""
PARTNERS_KEPT: Final = 256
STEPS: Final = 100
"""Recent steps that count."""
LEAST_STEPS: Final = 5
"""Nothing is known of a trainer's pace from fewer."""
HANG_STEPS: Final = 4.0
"""A trainer with work in hand and no progress for so many times its longest recent step hangs."""
HANG_SECONDS: Final = 15.0
"""A shorter pause is no hang, however short steps are: the device or the disk may have stalled."""
BOUNDS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
"""Upper bounds of `StagesStatistics.recovery_counts`, in seconds."""


class StagesStatistics(msgspec.Struct, frozen=True):
    """What this node shows of its crew. Counts are since the process started."""

    enabled: bool = False
    """This node holds a stage, or would. False where it holds its policy alone."""
    crew: CrewStatistics = CrewStatistics()
    own: wire.StageStatus | None = None
    """What our trainer says of the stage that it holds in this crew; None until it has said
    something."""
    streams: StreamProxyStatistics = StreamProxyStatistics()
    events: dict[str, int] = {}
    """What happened in our crews, by `wire.NOTES`."""
    recovery_counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    """How often a crew that stood still ran again, by BOUNDS of the seconds that it took; not
    cumulated, those above every bound last."""
    recovery_seconds_total: float = 0.0
    sources: dict[str, int] = {}
    """Restorations of our stages, by `wire.SOURCES`."""
    last_reason: str = ""
    """Why the last crew was left, or why our stage failed."""
    heartbeat_seconds: float | None = None
    """From the last heartbeat that was answered to its answer."""
    unanswered: dict[str, int] = {}
    """Requests of ours by message, where no answer came in time or what came was none."""
    malformed: int = 0
    """Requests of others that were no message."""
    trainer_restarts: int = 0
    """Times that our trainer was ended because it had work and did none."""


@dataclass(frozen=True)
class NodeCallbacks:
    """What the service asks of the node that it is a part of."""

    send_to_trainer: Callable[[wire.ToTrainer], bool]
    """False if there is none."""
    restart_trainer: Callable[[str], None]
    """Ends the trainer's process for this reason; the supervisor starts it again."""
    paused: Callable[[], str] = lambda: ""
    """Why this node may not take part now (quiet hours, a month's bytes), "" while it may."""
    allows: Callable[[str], bool] = lambda choice: True
    """As `Meter.has_room`."""


class StageService:
    """Part of the network process.

    Start it with `await nursery.start(service.run)`; `hello`, `receive` and `trainer_left` are for
    the process link.
    """

    def __init__(
        self,
        network: Network,
        cfg: StagesConfig,
        data_dir: Path,
        node: NodeCallbacks,
        *,
        settings: wire.Settings | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.cfg = cfg
        self.settings = settings or wire.Settings(stages=cfg.stages, lost_seconds=cfg.wait_seconds)
        self.proxy = StreamProxy(
            network.streams,
            data_dir,
            self._stream_lost,
            allows=node.allows,
            rejected=network.rejected,
        )
        self._network = network
        self._node = node
        self._means = Means(
            self.settings, rng or random.SystemRandom(), self._trusts, self.proxy.uplink
        )
        self._state = State(network.peer_id)
        self._nursery: trio.Nursery | None = None
        self._resting = ""
        self._trainer = _Trainer()
        self._partners = _Partners(data_dir / PARTNERS)
        self._connections = _Connections(network)
        self._counts = _ServiceCounts()

    # -- for the node

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        """Until cancelled. With stages off it only waits. Raises Unavailable when its socket cannot
        be made."""
        if self.cfg.mode == "off":
            task_status.started()
            await trio.sleep_forever()
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(self.proxy.run)
            self._network.requests.serve(
                ids.CREWS_PROTOCOL,
                self._serve,
                max_request_bytes=wire.MESSAGE_BYTES,
                max_response_bytes=wire.MESSAGE_BYTES,
                concurrent=64,
                per_peer=8,
                deadline=REQUEST_TIMEOUT,
            )
            self._nursery.start_soon(self._tick)
            self._nursery.start_soon(self._watch_connections)
            task_status.started()

    @property
    def may_average(self) -> bool:
        """Whether the own stage may be averaged with other crews': not while somebody is in doubt.
        True where this node is in no crew."""
        return self._state.crew is None or self._state.phase == Phase.RUNNING

    async def leave(self, reason: str) -> None:
        """This node is about to stop: tells its crew, and returns when it has been told, or after
        LEAVE_SECONDS."""
        crew = self._state.crew
        if self._nursery is None or crew is None:
            return
        with trio.move_on_after(LEAVE_SECONDS):
            async with trio.open_nursery() as nursery:
                for peer in crew.members:
                    nursery.start_soon(self._send, peer, wire.Leave(crew.id, reason))
        self._handle(wire.Drain(reason))

    def statistics(self) -> StagesStatistics:
        crew, counts, status = self._state.crew, self._counts, self._trainer.status
        held = (
            crew is not None
            and status is not None
            and (status.crew, status.stage) == (crew.id, crew.stage)
        )
        return StagesStatistics(
            enabled=self.cfg.mode != "off"
            and (self._trainer.offering is not None or crew is not None),
            crew=statistics(self._state, _now(), self.settings),
            own=status if held else None,
            streams=self.proxy.statistics(),
            events=dict(counts.notes),
            recovery_counts=tuple(counts.recoveries),
            recovery_seconds_total=counts.recovery_seconds,
            sources=dict(counts.sources),
            last_reason=counts.last_reason,
            heartbeat_seconds=counts.heartbeat_seconds,
            unanswered=dict(counts.unanswered),
            malformed=counts.malformed,
            trainer_restarts=counts.restarts,
        )

    def _trusts(self, peer: str) -> bool:
        """Whether this node's person would be in a crew with `peer`: see `stages.trust`."""
        match self.cfg.trust:
            case "anyone":
                return True
            case "allowed":
                return peer in self.cfg.allowed
        score = self._network.score(peer)
        return score > 0 or peer in self._partners or (score >= 0 and not self._trainer.has_learnt)

    # -- for the trainer

    def hello(self, pid: int) -> None:
        """A trainer has connected, again or for the first time. Whether it can hold a stage, it
        says next."""
        if pid != self._trainer.pid:
            self.trainer_left()
            self._trainer.pid, self._trainer.status = pid, None

    def receive(self, message: wire.FromTrainer) -> None:
        """What the trainer says."""
        trainer = self._trainer
        match message:
            case wire.Offering():
                trainer.offering = message
            case wire.StageStatus():
                trainer.status = message
                self._counts.last_reason = message.reason or self._counts.last_reason
                if (
                    message.source
                    and message.phase == "active"
                    and (trainer.restored != message.crew)
                ):
                    trainer.restored = message.crew
                    known = message.source in wire.SOURCES
                    self._counts.sources[message.source if known else "other"] += 1
                if self._state.phase == Phase.RUNNING:
                    trainer.progress.report(message.step, message.progress, message.load, _now())
        self._handle(message)

    def trainer_left(self) -> None:
        """Its connection has ended."""
        if self._trainer.pid is not None:
            self._trainer.offering = None
            self._handle(wire.TrainerLeft())

    # -- control, one event at a time

    def _handle(self, event: wire.Event) -> wire.CrewAnswer | None:
        """What is to be done about `event` is under way when this returns. The answer, to a
        Received."""
        if self.cfg.mode == "off":
            return None
        before = self._state.crew
        self._state, actions = advance(self._state, event, _now(), self._means)
        crew = self._state.crew
        if crew is not None and crew.stepped and (before is None or not before.stepped):
            self._partners.add(crew.members)
        answer: wire.CrewAnswer | None = None
        for action in actions:
            match action:
                case wire.SendAnswer():
                    answer = action.message
                case wire.Send():
                    if self._nursery is not None:
                        self._nursery.start_soon(self._send, action.peer, action.message)
                case wire.Note():
                    self._note(action.what, action.detail)
                case _:
                    self._notify_trainer(action)
        crew = self._state.crew
        self._connections.hold(frozenset() if crew is None else frozenset(crew.members))
        return answer

    def _notify_trainer(self, message: wire.ToTrainer) -> None:
        match message:
            case wire.Assigned():
                self.proxy.assign(StreamPeers(message.crew, message.stage, message.members))
                message = msgspec.structs.replace(message, socket=str(self.proxy.path))
            case wire.Released():
                self.proxy.release()
                self._trainer.status = None
                self._trainer.progress.restart()
            case wire.Suspended():
                self._trainer.progress.restart()
        if not self._node.send_to_trainer(message):
            log.warning(
                "the trainer was not told %s: it will say where it is when it is back",
                type(message).__name__,
            )

    def _note(self, what: str, detail: str) -> None:
        log.log(
            logging.WARNING if what in ("struck", "behind") else logging.INFO,
            "%s%s",
            NOTE_WORDS.get(what, f"crew {what}"),
            f": {detail}" if detail else "",
        )
        counts = self._counts
        counts.notes[what] += 1
        if what == "broken":
            counts.last_reason = detail
        if what == "running" and detail:
            counts.recoveries[bisect.bisect_left(BOUNDS, float(detail))] += 1
            counts.recovery_seconds += float(detail)

    # -- the clock, the connections, the streams

    async def _tick(self) -> None:
        while True:
            self._rest()
            crew = self._state.crew
            heard = (
                {peer: self._network.heard(peer) for peer in crew.members}
                if crew is not None
                else {}
            )
            self._handle(wire.Tick({peer: at for peer, at in heard.items() if at is not None}))
            if self._state.phase == Phase.RUNNING and self._trainer.progress.stalled(_now()):
                log.error("the trainer is ended: it has work in hand, and does none")
                self._counts.restarts += 1
                self._trainer.progress.restart()
                self._node.restart_trainer("work in hand, and nothing done")
            await trio.sleep(self.settings.tick_seconds)

    def _rest(self) -> None:
        """Leaves while this node may not take part; begins anew when it may."""
        reason = self._node.paused()
        if reason and not self._resting:
            self._resting = reason
            log.info("no crew for now: %s", reason)
            self._handle(wire.Drain(reason))
        elif self._resting and not reason:
            self._resting = ""
            self._state = State(self._network.peer_id)
            for peer in self._connections.known:
                self._handle(wire.PeerBack(peer))
            if self._trainer.offering is not None:
                self._handle(self._trainer.offering)

    async def _watch_connections(self) -> None:
        while True:
            for event in self._connections.look():
                self._handle(event)
            with trio.move_on_after(POLL_INTERVAL):
                await self._network.changed()

    def _stream_lost(self, peer: str, crew: bytes) -> None:
        self._handle(wire.StreamLost(peer, crew))

    # -- peers

    async def _send(self, peer: str, message: wire.Request) -> None:
        began = _now()
        answer: wire.CrewAnswer | None = None
        try:
            wire.check_message(message)
        except BadMessage as error:
            # somebody has counted to the end, and it would cost us our standing to go on
            log.warning("not said to %s: %s", peer, error)
            self._handle(wire.Answered(peer, message, None))
            return
        try:
            data = await self._network.requests.request(
                peer,
                ids.CREWS_PROTOCOL,
                wire.encode_message(message),
                deadline=REQUEST_TIMEOUT,
                max_response_bytes=wire.MESSAGE_BYTES,
                urgent=not isinstance(message, wire.Offer),
            )
            answer = wire.decode_answer(data)
        except BadMessage as error:
            self._garbage(peer)
            log.info("%s answered with no message: %s", peer, error)
        except PeerError as error:
            log.debug("%s: %s", peer, error)
        seconds = _now() - began
        if answer is None:
            self._counts.unanswered[type(message).__name__.lower()] += 1
        elif isinstance(message, wire.Heartbeat):
            self._counts.heartbeat_seconds = seconds
        self._handle(wire.Answered(peer, message, answer, seconds))

    def _garbage(self, peer: str) -> None:
        self._network.rejected(peer, "stages_malformed")
        self._handle(wire.Garbage(peer))

    async def _serve(self, peer: str, data: bytes) -> bytes:
        """The answer to a peer. Raises PeerError to reset the stream."""
        try:
            message = wire.decode_request(data)
        except BadMessage:
            self._counts.malformed += 1
            self._garbage(peer)
            raise
        answer = self._handle(wire.Received(peer, message))
        if answer is None:
            raise PeerError("no answer")
        return wire.encode_message(answer)


class _Connections:
    """Who is connected with this node, and who is kept so: the members of its crew."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._held: frozenset[str] = frozenset()
        self.known: set[str] = set()

    def look(self) -> list[wire.PeerGone | wire.PeerBack]:
        """What has changed since the last look."""
        now = set(self._network.connected())
        gone = [wire.PeerGone(peer) for peer in sorted(self.known - now)]
        back = [wire.PeerBack(peer) for peer in sorted(now - self.known)]
        self.known = now
        return [*gone, *back]

    def hold(self, members: frozenset[str]) -> None:
        if members != self._held:
            self._held = members
            self._network.hold(members)


class Progress:
    """Whether a trainer with work in hand makes progress."""

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=STEPS)
        self._step: tuple[int, float] | None = None
        self._progress: tuple[int, float] | None = None

    def restart(self) -> None:
        """The time until now belongs to no step."""
        self._step = self._progress = None

    def report(self, step: int, progress: int, load: int, now: float) -> None:
        if self._step is None or step < self._step[0]:
            self._step = (step, now)
        elif step > self._step[0]:
            self._durations.append((now - self._step[1]) / (step - self._step[0]))
            self._step = (step, now)
        if self._progress is None or progress != self._progress[0] or load == 0:
            self._progress = (progress, now)

    def stalled(self, now: float) -> bool:
        if self._progress is None or len(self._durations) < LEAST_STEPS:
            return False
        longest = HANG_STEPS * max(self._durations)
        return now - self._progress[1] > max(HANG_SECONDS, longest)


class _Trainer:
    """What is known of our trainer."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.offering: wire.Offering | None = None
        self.status: wire.StageStatus | None = None
        self.restored = b""
        """The crew in which its stage was counted as restored."""
        self.progress = Progress()

    @property
    def has_learnt(self) -> bool:
        """Whether it has anything to lose."""
        return self.offering is not None and any(copy.step > 0 for copy in self.offering.copies)


class _Partners:
    """Peers that this node has taken a step with, those of longest ago forgotten."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._peers: dict[str, None] = {}
        try:
            self._peers = dict.fromkeys(msgspec.json.decode(path.read_bytes(), type=list[str]))
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError) as error:
            log.warning("with whom steps were taken cannot be read: %s", error)

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def add(self, peers: Iterable[str]) -> None:
        new = [peer for peer in peers if peer not in self._peers]
        if new:
            self._peers = dict.fromkeys([*self._peers, *new][-PARTNERS_KEPT:])
            try:
                write_atomically(self._path, msgspec.json.encode(list(self._peers)))
            except OSError as error:
                log.error("with whom steps were taken cannot be saved: %s", error)


class _ServiceCounts:
    def __init__(self) -> None:
        self.notes: Counter[str] = Counter(dict.fromkeys(wire.NOTES, 0))
        self.recoveries = [0] * (len(BOUNDS) + 1)
        self.recovery_seconds = 0.0
        self.sources: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.last_reason = ""
        self.heartbeat_seconds: float | None = None
        self.malformed = self.restarts = 0


def _now() -> float:
    try:
        return trio.current_time()
    except RuntimeError:  # asked from outside the loop, by whoever watches
        return 0.0
