"""The stage service of the network process: it carries out what `crew.py` decides. No torch.

    peers          requests, answers, connections ─▶ ┐
    trainer        offers, status, faults ─────────▶ ├─▶ `crew.advance`, one event at a time
    stream proxy   lost streams ───────────────────▶ │
    clock          ticks ──────────────────────────▶ ┘

    ─▶ requests and answers to peers; assignment, start and end to the trainer; log notes

`StageService` is the entry point. `stream_proxy.py` joins the trainers of a crew byte by byte. A
malformed message lowers the sender's score and ends no task here.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import trio

from swarmnode.config import StagesConfig
from swarmnode.errors import BadMessage, PeerError
from swarmnode.histogram import Histogram, HistogramCounter
from swarmnode.p2p.api import Network
from swarmnode.stages.crew_messages import (
    MESSAGE_BYTES,
    SOURCES,
    CrewAnswer,
    CrewEnd,
    CrewRequest,
    CrewStart,
    FromTrainer,
    LeaveRequest,
    Offer,
    StageAssignment,
    StageStatus,
    ToTrainer,
    TrainerOffer,
    decode_answer,
    decode_request,
)
from swarmnode.stages.network.crew import advance
from swarmnode.stages.network.crew_state import (
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
    statistics,
)
from swarmnode.stages.network.stream_proxy import StreamPeers, StreamProxy, StreamProxyStatistics
from swarmnode.swarm.known import KnownPeers
from swarmnode.wire import ids, strict

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
    StageAssignment: "assignment of a stage",
    CrewStart: "start of its crew",
    CrewEnd: "end of its crew",
}


class StagesStatistics(msgspec.Struct, frozen=True):
    """State of this node's crew for status page and metrics. Counts are since the process
    started."""

    enabled: bool = False
    """True if this node holds a stage or offers to. False if it trains a whole policy."""
    crew: CrewStatistics = CrewStatistics()
    own: StageStatus | None = None
    """Last status of this node's trainer in the present crew."""
    streams: StreamProxyStatistics = StreamProxyStatistics()
    events: dict[str, int] = {}
    """Events of this node's crews, by `crew_state.NOTES`."""
    recoveries: Histogram | None = None
    """Seconds from the end of a crew to a running one."""
    sources: dict[str, int] = {}
    """Restorations of this node's stages, by `SOURCES`."""
    last_reason: str = ""
    """Reason for which the last crew ended or this node's stage failed."""


@dataclass(frozen=True)
class NodeCallbacks:
    """Functions of the node that the service calls."""

    send_to_trainer: Callable[[ToTrainer], bool]
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
        known: Peers that may be in a crew with this node.
        data_dir: The node's. It has the Unix socket for the trainer.
        node: Functions of the node.
        settings: By default those that follow from `cfg`.
        rng: By default the system's random source.
    """

    def __init__(
        self,
        network: Network,
        cfg: StagesConfig,
        known: KnownPeers,
        data_dir: Path,
        node: NodeCallbacks,
        *,
        settings: MembershipSettings | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.cfg = cfg
        self._known = known
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
            known.__contains__,
        )
        self._state = State(network.peer_id)
        self._nursery: trio.Nursery | None = None
        self._pause_reason = ""
        self._connected: set[str] = set()
        self._kept_connections = frozenset[str]()
        """Members whose connections the network does not close."""
        # this node's trainer
        self._trainer_pid: int | None = None
        self._trainer_offer: TrainerOffer | None = None
        self._status: StageStatus | None = None
        self._restored_crew = b""
        # counts
        self._notes = Counter(dict.fromkeys(NOTES, 0))
        self._recoveries = HistogramCounter(RECOVERY_BOUNDS)
        self._sources = Counter(dict.fromkeys(filter(None, SOURCES), 0))
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
                max_request_bytes=MESSAGE_BYTES,
                max_response_bytes=MESSAGE_BYTES,
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
                    nursery.start_soon(self._send, peer, LeaveRequest(crew.id, reason))
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

    # ---- for the trainer -------------------------------------------------------------------------

    def hello(self, pid: int) -> None:
        """Record that the trainer with this process id has connected."""
        if pid != self._trainer_pid:
            self.trainer_left()
            self._trainer_pid, self._status = pid, None

    def receive(self, message: FromTrainer) -> None:
        """Handle a message of this node's trainer."""
        match message:
            case TrainerOffer():
                if self._trainer_offer is None and not self._known:
                    log.warning(
                        "the policy is split over several nodes, and no peer may hold a part: set"
                        " stages.trust to the peer ids of your other nodes (`swarmnode key show`)"
                    )
                self._trainer_offer = message
            case StageStatus():
                self._status = message
                self._last_reason = message.reason or self._last_reason
                is_restored = message.phase == "active" and message.source
                if is_restored and self._restored_crew != message.crew:
                    self._restored_crew = message.crew
                    known = message.source in SOURCES
                    self._sources[message.source if known else "other"] += 1
        self._handle(message)

    def trainer_left(self) -> None:
        """Record that the trainer's connection has ended."""
        if self._trainer_pid is not None:
            self._trainer_offer = None
            self._handle(TrainerDisconnected())

    # ---- one event at a time ---------------------------------------------------------------------

    def _handle(self, event: Event) -> CrewAnswer | None:
        """Advance the state by `event` and start the actions. Return the answer to a
        RequestReceived."""
        if self.cfg.mode == "off":
            return None
        self._state, actions = advance(self._state, event, _now(), self._dependencies)
        answer: CrewAnswer | None = None
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
        if members != self._kept_connections:
            self._kept_connections = members
            self._network.pin(members)
        return answer

    def _notify_trainer(self, message: ToTrainer) -> None:
        match message:
            case StageAssignment():
                self.proxy.assign(StreamPeers(message.crew, message.stage, message.members))
                message = msgspec.structs.replace(message, socket=str(self.proxy.path))
            case CrewEnd():
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

    async def _send(self, peer: str, message: CrewRequest) -> None:
        """Send a request, and handle its outcome as an event."""
        began = _now()
        answer: CrewAnswer | None = None
        try:
            data = await self._network.requests.request(
                peer,
                ids.CREWS_PROTOCOL,
                strict.encode(message),
                deadline=REQUEST_TIMEOUT,
                max_response_bytes=MESSAGE_BYTES,
                urgent=not isinstance(message, Offer),
            )
            answer = decode_answer(data)
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
            message = decode_request(data)
        except BadMessage:
            self._garbage(peer)
            raise
        answer = self._handle(RequestReceived(peer, message))
        if answer is None:
            raise PeerError("no answer")
        return strict.encode(answer)

    def _garbage(self, peer: str) -> None:
        self._network.rejected(peer, "stages_malformed")
        self._handle(GarbageReceived(peer))


def _now() -> float:
    try:
        return trio.current_time()
    except RuntimeError:  # statistics are read outside the loop
        return 0.0
