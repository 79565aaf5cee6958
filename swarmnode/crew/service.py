"""The stage service: carries what crew control decides to peers, trainer and streams, and decides
nothing. No torch.

    peers ─ /swarmnode/crews/9 ─▶ Received ─┐                           ┌─▶ Answer, Send ─▶ peers
    connections ─▶ PeerGone, PeerBack ──────┤                           ├─▶ Assigned, Released ─▶
    stream proxy ─┐
    trainer ─ link ─▶ Offering, … ──────────┼─▶ control.advance (one at ├─▶ Suspended, Resumed
    ─────────────────┴─▶ link ─▶ trainer
    stream proxy ─▶ StreamLost ─────────────┤   a time, in order) ──────┴─▶ Note
    clock ─▶ Tick ──────────────────────────┘

Heartbeats are requests of their own: they wait for no slot, and for no more of a connection than
the frame that is being written. Nothing a peer says ends a task here; what is no message costs its
standing. Kept on disk is with whom steps were taken, and nothing else.
"""

from __future__ import annotations

import bisect
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.config import StagesConfig
from swarmnode.crew import events as ev
from swarmnode.crew import local, messages
from swarmnode.crew.control import CrewStatistics, Means, Phase, State, advance, statistics
from swarmnode.crew.detector import Progress
from swarmnode.crew.record import Founded, check_founded
from swarmnode.crew.stream_handshake import StreamPeers
from swarmnode.crew.stream_proxy import StreamProxy, StreamProxyStatistics
from swarmnode.errors import BadMessage, Incompatible, PeerError
from swarmnode.files import write_atomically
from swarmnode.p2p.api import Network
from swarmnode.wire import ids
from swarmnode.wire.envelope import signed_by

log = logging.getLogger(__name__)

REQUEST_TIMEOUT: Final = 10.0
"""The next heartbeat does not wait for the answer to the last: over a slow line that tensors fill
it takes seconds."""
LEAVE_SECONDS: Final = 3.0
"""For others to be told that this node is going."""
POLL_INTERVAL: Final = 5.0
"""Between two looks who is connected, whatever the network says."""
PARTNERS: Final = "partners.json"
"""Below the data directory."""
PARTNERS_KEPT: Final = 256
SLOW_STEPS: Final = 4.0
"""A trainer that has work and does none for so many times its slow step (99th percentile) hangs."""
BOUNDS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
"""Upper bounds of `StagesStatistics.recovery_counts`, in seconds."""


class StagesStatistics(msgspec.Struct, frozen=True):
    """What this node shows of its crew. Counts are since the process started."""

    enabled: bool = False
    """This node holds a stage, or would. False where it holds its policy alone."""
    crew: CrewStatistics = CrewStatistics()
    own: local.StageStatus | None = None
    """What our trainer says of the stage that it holds in this crew; None until it has said
    something."""
    streams: StreamProxyStatistics = StreamProxyStatistics()
    events: dict[str, int] = {}
    """What happened in our crews, by `events.NOTES`: suspicions, those that were refuted, ends of
    crews."""
    recovery_counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    """How often a crew that stood still ran again, by BOUNDS of the seconds that it took; not
    cumulated, those above every bound last."""
    recovery_seconds_total: float = 0.0
    rungs: dict[str, int] = {}
    """How often our stage came from where; of `local.RUNGS`."""
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

    send_to_trainer: Callable[[local.ToTrainer], bool]
    """False if there is none."""
    restart_trainer: Callable[[str], None]
    """Ends the trainer's process for this reason; the supervisor starts it again."""
    paused: Callable[[], str] = lambda: ""
    """Why this node may not take part now (quiet hours, a month's bytes), "" while it may."""
    allows: Callable[[str], bool] = lambda choice: True
    """As `Meter.has_room`."""


class StageService:
    """Part of the network process. `key` is the node's.

    Start it with `await nursery.start(service.run)`; `hello`, `receive` and `trainer_left` are for
    the process link.
    """

    def __init__(
        self,
        network: Network,
        key: Ed25519PrivateKey,
        cfg: StagesConfig,
        data_dir: Path,
        node: NodeCallbacks,
        *,
        settings: ev.Settings | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.cfg = cfg
        self.settings = settings or ev.Settings(stages=cfg.stages, lost_seconds=cfg.wait_seconds)
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
            self.settings,
            key.sign,
            signed_by,
            rng or random.SystemRandom(),
            self._trusts,
            self.proxy.uplink,
        )
        self._state = State(network.peer_id)
        self._nursery: trio.Nursery | None = None
        self._resting = ""
        self._trainer = _Trainer()
        self._partners = _Partners(data_dir / PARTNERS)
        self._connections = _Connections(network)
        self._counts = _Counts()

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
                max_request_bytes=messages.MESSAGE_BYTES,
                max_response_bytes=messages.MESSAGE_BYTES,
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
                    nursery.start_soon(self._send, peer, messages.Leave(crew.id, reason))
        self._handle(ev.Drain(reason))

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
            rungs=dict(counts.rungs),
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

    def receive(self, message: local.FromTrainer) -> None:
        """What the trainer says."""
        trainer = self._trainer
        match message:
            case local.Offering():
                trainer.offering = message
            case local.StageStatus():
                trainer.status = message
                self._counts.last_reason = message.reason or self._counts.last_reason
                if message.rung and message.phase == "active" and trainer.restored != message.crew:
                    trainer.restored = message.crew
                    self._counts.rungs[
                        message.rung if message.rung in local.RUNGS else "other"
                    ] += 1
                if self._state.phase == Phase.RUNNING:
                    trainer.progress.report(message.step, message.progress, message.load, _now())
        self._handle(message)

    def trainer_left(self) -> None:
        """Its connection has ended."""
        if self._trainer.pid is not None:
            self._trainer.offering = None
            self._handle(ev.TrainerLeft())

    # -- control, one event at a time

    def _handle(self, event: ev.Event) -> messages.Answer | None:
        """What is to be done about `event` is under way when this returns. The answer, to a
        Received."""
        if self.cfg.mode == "off":
            return None
        before = self._state.crew
        self._state, actions = advance(self._state, event, _now(), self._means)
        crew = self._state.crew
        if crew is not None and crew.stepped and (before is None or not before.stepped):
            self._partners.add(crew.members)
        answer: messages.Answer | None = None
        for action in actions:
            match action:
                case ev.Answer():
                    answer = action.message
                case ev.Send():
                    if self._nursery is not None:
                        self._nursery.start_soon(self._send, action.peer, action.message)
                case ev.Note():
                    self._note(action.what, action.detail)
                case _:
                    self._notify_trainer(action)
        crew = self._state.crew
        self._connections.hold(frozenset() if crew is None else frozenset(crew.members))
        return answer

    def _notify_trainer(self, message: local.ToTrainer) -> None:
        match message:
            case local.Assigned():
                self.proxy.assign(StreamPeers(message.crew, message.stage, message.members))
                message = msgspec.structs.replace(message, socket=str(self.proxy.path))
            case local.Released():
                self.proxy.release()
                self._trainer.status = None
                self._trainer.progress.restart()
            case local.Suspended():
                self._trainer.progress.restart()
        if not self._node.send_to_trainer(message):
            log.warning(
                "the trainer was not told %s: it will say where it is when it is back",
                type(message).__name__,
            )

    def _note(self, what: str, detail: str) -> None:
        log.info("crew: %s%s", what, f" ({detail})" if detail else "")
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
            self._handle(ev.Tick({peer: at for peer, at in heard.items() if at is not None}))
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
            self._handle(ev.Drain(reason))
        elif self._resting and not reason:
            self._resting = ""
            self._state = State(self._network.peer_id)
            for peer in self._connections.known:
                self._handle(ev.PeerBack(peer))
            if self._trainer.offering is not None:
                self._handle(self._trainer.offering)

    async def _watch_connections(self) -> None:
        while True:
            for event in self._connections.look():
                self._handle(event)
            with trio.move_on_after(POLL_INTERVAL):
                await self._network.changed()

    def _stream_lost(self, peer: str, crew: bytes) -> None:
        self._handle(ev.StreamLost(peer, crew))

    # -- peers

    async def _send(self, peer: str, message: messages.Request) -> None:
        began = _now()
        answer: messages.Answer | None = None
        foreign = False
        try:
            messages.check_message(message)
        except BadMessage as error:
            # somebody has counted to the end, and it would cost us our standing to go on
            log.warning("not said to %s: %s", peer, error)
            self._handle(ev.Answered(peer, message, None))
            return
        try:
            data = await self._network.requests.request(
                peer,
                ids.CREWS_PROTOCOL,
                messages.encode_message(message),
                deadline=REQUEST_TIMEOUT,
                max_response_bytes=messages.MESSAGE_BYTES,
                urgent=not isinstance(message, messages.Offer),
            )
            received = messages.decode_answer(data)
            if isinstance(message, messages.Propose) and isinstance(received, messages.Signature):
                messages.check_signature(message.record, peer, received, signed_by)
            answer = received
        except BadMessage as error:
            self._network.rejected(
                peer, "stages_signature" if error.reason == "signature" else "stages_malformed"
            )
            log.info("%s answered with no message: %s", peer, error)
        except PeerError as error:
            foreign = isinstance(error, Incompatible)
            log.debug("%s: %s", peer, error)
        if answer is None:
            self._counts.unanswered[type(message).__name__.lower()] += 1
        elif isinstance(message, messages.Heartbeat):
            self._counts.heartbeat_seconds = _now() - began
        seconds = (_now() - began) / 2  # one round trip: `library.streams`
        self._handle(
            ev.Answered(peer, message, answer, foreign, seconds if answer is not None else None)
        )

    async def _serve(self, peer: str, data: bytes) -> bytes:
        """The answer to a peer. Raises PeerError to reset the stream."""
        try:
            message = messages.decode_request(data)
        except BadMessage:
            self._counts.malformed += 1
            self._network.rejected(peer, "stages_malformed")
            raise
        if isinstance(message, Founded):
            try:
                check_founded(message, signed_by)
            except BadMessage:
                self._network.rejected(peer, "stages_signature")
                raise
        answer = self._handle(ev.Received(peer, message))
        if answer is None:
            raise PeerError("no answer")
        return messages.encode_message(answer)


class _Connections:
    """Who is connected with this node, and who is kept so: the members of its crew."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._held: frozenset[str] = frozenset()
        self.known: set[str] = set()

    def look(self) -> list[ev.PeerGone | ev.PeerBack]:
        """What has changed since the last look."""
        now = set(self._network.connected())
        gone = [ev.PeerGone(peer) for peer in sorted(self.known - now)]
        back = [ev.PeerBack(peer) for peer in sorted(now - self.known)]
        self.known = now
        return [*gone, *back]

    def hold(self, members: frozenset[str]) -> None:
        if members != self._held:
            self._held = members
            self._network.hold(members)


class _Trainer:
    """What is known of our trainer."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.offering: local.Offering | None = None
        self.status: local.StageStatus | None = None
        self.restored = b""
        """The crew in which its stage was counted as restored."""
        self.progress = Progress(SLOW_STEPS)

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


class _Counts:
    def __init__(self) -> None:
        self.notes: Counter[str] = Counter(dict.fromkeys(ev.NOTES, 0))
        self.recoveries = [0] * (len(BOUNDS) + 1)
        self.recovery_seconds = 0.0
        self.rungs: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.last_reason = ""
        self.heartbeat_seconds: float | None = None
        self.malformed = self.restarts = 0


def _now() -> float:
    try:
        return trio.current_time()
    except RuntimeError:  # asked from outside the loop, by whoever watches
        return 0.0
