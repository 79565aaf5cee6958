"""The stage service of the network process: it carries out what `crew.py` decides. No torch.

    peers          requests, answers, connections ─▶ ┐
    trainer        offers, status, faults ─────────▶ ├─▶ `crew.advance`, one event at a time
    stream proxy   lost streams ───────────────────▶ │
    clock          ticks ──────────────────────────▶ ┘

    ─▶ requests and answers to peers; assignment, start and end to the trainer; log notes

`StageService` is the entry point. `StreamProxy` joins the trainers of a crew byte by byte. A
malformed message lowers the sender's score and ends no task here.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import msgspec
import trio

from swarmnode.config import StagesConfig
from swarmnode.errors import BadMessage, PeerError
from swarmnode.files import unix_listener, write_atomically
from swarmnode.histogram import Histogram, HistogramCounter
from swarmnode.p2p.api import Network, PeerStream, Streams
from swarmnode.stages import wire
from swarmnode.stages.crew import (
    NOTES,
    ClockTick,
    CrewDependencies,
    CrewStatistics,
    DrainStarted,
    Event,
    GarbageReceived,
    MembershipSettings,
    Note,
    PeerConnected,
    PeerDisconnected,
    Phase,
    RequestFinished,
    RequestReceived,
    SendAnswer,
    SendRequest,
    State,
    StreamLost,
    TrainerDisconnected,
    advance,
    newest_own_block,
    statistics,
)
from swarmnode.stages.wire import (
    StreamKind,
    StreamOpen,
    StreamPeers,
    StreamReady,
    read_first,
    read_open,
    socket_file,
    stream_refusal,
)
from swarmnode.wire import headed, ids

log = logging.getLogger(__name__)

REQUEST_TIMEOUT: Final = 10.0
"""Deadline of a request, in seconds. Heartbeats do not wait for each other's answers, because an
answer takes seconds on a line that tensors fill."""
LEAVE_TIMEOUT: Final = 3.0
"""Seconds in which `leave` notifies the other members."""
POLL_INTERVAL: Final = 5.0
"""Longest interval between two reads of the connections, in seconds."""
RECOVERY_BOUNDS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
"""Upper bounds of `StagesStatistics.recoveries`, in seconds."""
NOTE_WORDS: Final = {
    "struck": "peer struck",
    "broken": "crew ended",
    "declined": "proposal declined",
    "unformed": "no crew formed",
}

MESSAGE_WORDS: Final = {
    wire.StageAssignment: "assignment of a stage",
    wire.CrewStart: "start of its crew",
    wire.CrewEnd: "end of its crew",
}


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
    """Refused streams of peers, by `wire.STREAM_REFUSALS`."""
    sent: dict[str, int] = {}
    """Bytes sent."""
    received: dict[str, int] = {}
    """Bytes received."""
    throttled_seconds: float = 0.0
    """Seconds that streams waited for the node's byte budget."""


class StagesStatistics(msgspec.Struct, frozen=True):
    """State of this node's crew for status page and metrics. Counts are since the process
    started."""

    enabled: bool = False
    """True if this node holds a stage or offers to. False if it trains a whole policy."""
    crew: CrewStatistics = CrewStatistics()
    own: wire.StageStatus | None = None
    """Last status of this node's trainer in the present crew."""
    streams: StreamProxyStatistics = StreamProxyStatistics()
    events: dict[str, int] = {}
    """Events of this node's crews, by `crew.NOTES`."""
    recoveries: Histogram | None = None
    """Seconds from the end of a crew to a running one."""
    sources: dict[str, int] = {}
    """Restorations of this node's stages, by `wire.SOURCES`."""
    last_reason: str = ""
    """Reason for which the last crew ended or this node's stage failed."""


@dataclass(frozen=True)
class NodeCallbacks:
    """Functions of the node that the service calls."""

    send_to_trainer: Callable[[wire.ToTrainer], bool]
    """Send a message to the trainer. Returns False if no trainer is connected."""
    paused: Callable[[], str] = lambda: ""
    """Return the reason why this node must not take part now (quiet hours, a month's bytes), or
    ""."""
    allows: Callable[[str], bool] = lambda choice: True
    """Return True if bytes may be sent ("serve") or received ("fetch") now."""


class StageService:
    """Crew membership of one node, as a part of the network process.

    Start it with `await nursery.start(service.run)`. The process link calls `hello`, `receive` and
    `trainer_left`.

    Args:
        data_dir: The node's. It has `partners.json` and the Unix socket for the trainer.
        node: Functions of the node.
        settings: By default those that follow from `cfg`.
        rng: By default the system's random source.
    """

    def __init__(
        self,
        network: Network,
        cfg: StagesConfig,
        data_dir: Path,
        node: NodeCallbacks,
        *,
        settings: MembershipSettings | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.cfg = cfg
        self.settings = settings or MembershipSettings(stages=cfg.stages)
        self.proxy = StreamProxy(
            network.streams,
            data_dir,
            lambda peer, crew: self._handle(StreamLost(peer, crew)),
            allows=node.allows,
            rejected=network.rejected,
        )
        self._network = network
        self._node = node
        self._dependencies = CrewDependencies(
            self.settings,
            rng or random.SystemRandom(),
            self._trusts,
        )
        self._state = State(network.peer_id)
        self._nursery: trio.Nursery | None = None
        self._pause_reason = ""
        self._connected: set[str] = set()
        self._kept_connections = frozenset[str]()
        """Members whose connections the network does not close."""
        self._partners = _PartnerFile(data_dir / "partners.json")
        # this node's trainer
        self._trainer_pid: int | None = None
        self._trainer_offer: wire.TrainerOffer | None = None
        self._status: wire.StageStatus | None = None
        self._restored_crew = b""
        # counts
        self._notes = Counter(dict.fromkeys(NOTES, 0))
        self._recoveries = HistogramCounter(RECOVERY_BOUNDS)
        self._sources = Counter(dict.fromkeys(filter(None, wire.SOURCES), 0))
        self._last_reason = ""

    # ---- for the node ----------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        """Run until cancelled. With `stages.mode = "off"`, only wait.

        Raises:
            Unavailable: the Unix socket cannot be made.
        """
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
        """True if this node's stage may be averaged with other crews, or if it has no crew."""
        return self._state.phase in (Phase.FREE, Phase.RUNNING)

    async def leave(self, reason: str) -> None:
        """Notify the other members that this node stops. Return after at most LEAVE_TIMEOUT."""
        crew = self._state.crew
        if self._nursery is None or crew is None:
            return
        with trio.move_on_after(LEAVE_TIMEOUT):
            async with trio.open_nursery() as nursery:
                for peer in crew.members:
                    nursery.start_soon(self._send, peer, wire.LeaveRequest(crew.id, reason))
        self._handle(DrainStarted(reason))

    def statistics(self) -> StagesStatistics:
        """Return the state for status page and metrics."""
        crew, own = self._state.crew, self._status
        if crew is None or own is None or (own.crew, own.stage) != (crew.id, crew.stage):
            own = None
        return StagesStatistics(
            enabled=self.cfg.mode != "off"
            and (self._trainer_offer is not None or crew is not None),
            crew=statistics(self._state, _now(), self.settings),
            own=own,
            streams=self.proxy.statistics(),
            events=dict(self._notes),
            recoveries=self._recoveries.statistics(),
            sources=dict(self._sources),
            last_reason=self._last_reason,
        )

    def _trusts(self, peer: str) -> bool:
        """Return True if `stages.trust` allows `peer` in a crew."""
        trust = self.cfg.trust
        if "anyone" in trust or peer in trust:
            return True
        if "known" not in trust:
            return False
        score = self._network.score(peer)
        # an untrained node has no steps that a bad member could spoil
        is_untrained = (
            self._trainer_offer is None or newest_own_block(self._trainer_offer.held_blocks) is None
        )
        return score > 0 or peer in self._partners or (score >= 0 and is_untrained)

    # ---- for the trainer -------------------------------------------------------------------------

    def hello(self, pid: int) -> None:
        """Record that the trainer with this process id has connected."""
        if pid != self._trainer_pid:
            self.trainer_left()
            self._trainer_pid, self._status = pid, None

    def receive(self, message: wire.FromTrainer) -> None:
        """Handle a message of this node's trainer."""
        match message:
            case wire.TrainerOffer():
                self._trainer_offer = message
            case wire.StageStatus():
                self._status = message
                self._last_reason = message.reason or self._last_reason
                is_restored = message.phase == "active" and message.source
                if is_restored and self._restored_crew != message.crew:
                    self._restored_crew = message.crew
                    known = message.source in wire.SOURCES
                    self._sources[message.source if known else "other"] += 1
        self._handle(message)

    def trainer_left(self) -> None:
        """Record that the trainer's connection has ended."""
        if self._trainer_pid is not None:
            self._trainer_offer = None
            self._handle(TrainerDisconnected())

    # ---- one event at a time ---------------------------------------------------------------------

    def _handle(self, event: Event) -> wire.CrewAnswer | None:
        """Advance the state by `event` and start the actions. Return the answer to a
        RequestReceived."""
        if self.cfg.mode == "off":
            return None
        self._state, actions = advance(self._state, event, _now(), self._dependencies)
        answer: wire.CrewAnswer | None = None
        for action in actions:
            match action:
                case SendAnswer():
                    answer = action.message
                case SendRequest():
                    if self._nursery is not None:
                        self._nursery.start_soon(self._send, action.peer, action.message)
                case Note():
                    self._note(action.what, action.detail)
                case _:
                    self._notify_trainer(action)
        crew = self._state.crew
        members = frozenset[str]() if crew is None else frozenset(crew.members)
        if crew is not None and crew.stepped:
            self._partners.add(members)
        if members != self._kept_connections:
            self._kept_connections = members
            self._network.pin(members)
        return answer

    def _notify_trainer(self, message: wire.ToTrainer) -> None:
        match message:
            case wire.StageAssignment():
                self.proxy.assign(StreamPeers(message.crew, message.stage, message.members))
                message = msgspec.structs.replace(message, socket=str(self.proxy.path))
            case wire.CrewEnd():
                self.proxy.release()
                self._status = None
        if not self._node.send_to_trainer(message):
            log.warning(
                "the trainer is not connected and did not get the %s; when it reconnects, it sends"
                " its state and the crew continues from there",
                MESSAGE_WORDS[type(message)],
            )

    def _note(self, what: str, detail: str) -> None:
        level = logging.WARNING if what == "struck" else logging.INFO
        words = NOTE_WORDS.get(what, f"crew {what}")
        log.log(level, "%s%s", words, f": {detail}" if detail else "")
        self._notes[what] += 1
        if what == "broken":
            self._last_reason = detail
        if what == "running" and detail:
            self._recoveries.observe(float(detail))

    async def _tick(self) -> None:
        while True:
            self._pause_or_resume()
            heard = {peer: self._network.last_received(peer) for peer in self._kept_connections}
            self._handle(ClockTick({peer: at for peer, at in heard.items() if at is not None}))
            await trio.sleep(self.settings.tick_seconds)

    def _pause_or_resume(self) -> None:
        """Leave the crew when this node must not take part. Start from an empty state when it may
        again."""
        reason = self._node.paused()
        if reason and not self._pause_reason:
            log.info("leaving crews: %s", reason)
            self._handle(DrainStarted(reason))
        elif self._pause_reason and not reason:
            self._state = State(self._network.peer_id)
            for peer in self._connected:
                self._handle(PeerConnected(peer))
            if self._trainer_offer is not None:
                self._handle(self._trainer_offer)
        self._pause_reason = reason

    async def _watch_connections(self) -> None:
        while True:
            before, self._connected = self._connected, set(self._network.connected())
            for peer in sorted(before - self._connected):
                self._handle(PeerDisconnected(peer))
            for peer in sorted(self._connected - before):
                self._handle(PeerConnected(peer))
            with trio.move_on_after(POLL_INTERVAL):
                await self._network.changed()

    # ---- peers -----------------------------------------------------------------------------------

    async def _send(self, peer: str, message: wire.CrewRequest) -> None:
        """Send a request, and handle its outcome as an event."""
        began = _now()
        answer: wire.CrewAnswer | None = None
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
            log.info("invalid answer of %s: %s", peer, error)
        except PeerError as error:
            log.debug("%s: %s", peer, error)
        self._handle(RequestFinished(peer, message, answer, _now() - began))

    async def _serve(self, peer: str, data: bytes) -> bytes:
        """Return the answer to a peer's request.

        Raises:
            PeerError: the stream is to be reset.
        """
        try:
            message = wire.decode_request(data)
        except BadMessage:
            self._garbage(peer)
            raise
        answer = self._handle(RequestReceived(peer, message))
        if answer is None:
            raise PeerError("no answer")
        return wire.encode_message(answer)

    def _garbage(self, peer: str) -> None:
        self._network.rejected(peer, "stages_malformed")
        self._handle(GarbageReceived(peer))


def _now() -> float:
    try:
        return trio.current_time()
    except RuntimeError:  # statistics are read outside the loop
        return 0.0


# ---- peers that are known from former crews ------------------------------------------------------

MAX_PARTNERS: Final = 256
"""Most peers in `partners.json`."""


class _PartnerFile:
    """File with the last MAX_PARTNERS peers with which this node has taken steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._peers: dict[str, None] = {}
        try:
            self._peers = dict.fromkeys(msgspec.json.decode(path.read_bytes(), type=list[str]))
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError) as error:
            log.warning("cannot read %s, peers of former crews are unknown: %s", path, error)

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def add(self, peers: Iterable[str]) -> None:
        new = [peer for peer in peers if peer not in self._peers]
        if new:
            self._peers = dict.fromkeys([*self._peers, *new][-MAX_PARTNERS:])
            try:
                write_atomically(self._path, msgspec.json.encode(list(self._peers)))
            except OSError as error:
                log.error("cannot write %s: %s", self._path, error)


# ---- the byte proxy between the trainers of a crew -----------------------------------------------
#
#     trainer ─ socket ─ pipe ─ libp2p ═ stage stream ═ libp2p ─ pipe ─ socket ─ trainer
#         Open{stage, kind} ─▶   StreamOpen ─▶ from the holder of that stage? park
#                                ◀─ StreamReady   once its trainer has opened its end too
#                                                                   ◀─ Open{stage, kind}
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
        self._refused = Counter(dict.fromkeys(wire.STREAM_REFUSALS, 0))
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
                opened = await read_open(unix)
        except BadMessage as error:
            log.error("invalid first message of this node's trainer on the stage socket: %s", error)
        except _SOCKET_ERRORS:
            return
        crew = self._crew
        if opened is None or crew is None or opened.crew != crew.crew:
            return  # the trainer's crew is not the present one
        if opened.stage == crew.stage or not 0 <= opened.stage < len(crew.members):
            return
        key = (opened.stage, opened.kind)
        if key in self._pipes:
            self._pipes[key].scope.cancel()
        pipe = self._pipes[key] = _Pipe(trio.CancelScope())
        peer_ended = False
        try:
            with pipe.scope:
                dials = crew.stage < opened.stage
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
