"""The stage plane at work: carries what crew control decides to peers, trainer, disk and streams, and decides nothing. No torch.

    peers ─ /swarmnode/crews/1 ─▶ Received ─┐                           ┌─▶ Answer, Send ─▶ peers
    connections ─▶ PeerGone, PeerBack ──────┤                           ├─▶ TellTrainer ─▶ link ─▶ trainer
    trainer ─ link ─▶ TrainerOffers, … ─────┼─▶ CrewControl (one at a   ├─▶ Persist ─▶ disk, before what follows
    pipes ─▶ StreamLost ────────────────────┤   time, in order) ────────┼─▶ OpenStreams, CloseStreams ─▶ pipes
    clock ─▶ Tick ──────────────────────────┘                           └─▶ RestartTrainer, Note

Heartbeats are requests of their own: they wait for no slot, and for no more of a connection than the frame that is being written. Nothing a
peer says ends a task here; what is no message costs its standing.
"""

from __future__ import annotations

import bisect
import logging
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.config import StagesConfig
from swarmnode.crew import events as ev
from swarmnode.crew import local, messages
from swarmnode.crew.control import CrewControl
from swarmnode.crew.stream_handshake import Circle
from swarmnode.crew.stream_proxy import StreamProxy, StreamProxyStatistics
from swarmnode.errors import BadMessage, Incompatible, PeerError
from swarmnode.files import write_atomically
from swarmnode.p2p.api import Network
from swarmnode.wire import ids
from swarmnode.wire.envelope import signed_by

log = logging.getLogger(__name__)

MEMORY: Final = "crew.bin"
"""Below the data directory: what this node has promised, voted for and adopted."""
MEMORY_BYTES: Final = 4 * 2**20
SAY_SECONDS: Final = 10.0
"""For an answer. The next heartbeat does not wait for that of the last: over a slow line that tensors fill it takes seconds."""
LEAVE_SECONDS: Final = 3.0
"""For others to hear that this node is going."""
SAVE_SECONDS: Final = 1.0
"""Between two tries to write."""
LOOK_SECONDS: Final = 5.0
"""Between two looks who is connected, whatever the network says."""
QUEUE: Final = 1024
"""Messages that wait for control; our trainer's and peers' beyond that are not taken."""
PROOF: Final = 10.0
"""Standing that bytes cost which are no message, and signatures or chains of records that prove nothing."""
BOUNDS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
"""Of `StagesStatistics.recovery_counts`, seconds."""


class StagesStatistics(msgspec.Struct, frozen=True):
    """Counts are since the process started."""

    enabled: bool
    control: ev.ControlStatistics
    """The crew and its slots; `control.notes` has suspicions, those that were refuted, evictions, dissolutions."""
    layers: tuple[int, ...]
    """Per stage; empty outside a crew."""
    own: local.StageStatus | None
    """What our trainer said last of the stage that it holds."""
    trainer: bool
    """It is there, and has offered to hold a stage."""
    recoveries: int
    """Times that the crew ran again after it had stood still."""
    recovery_seconds_total: float
    recovery_counts: tuple[int, ...]
    """By BOUNDS, not cumulated, those above every bound last."""
    rungs: dict[str, int]
    """How often our stage came from where; of `local.RUNGS`."""
    last_reason: str
    """Why the last crew was left, or why our stage failed."""
    heartbeat_seconds: float | None
    """From the last heartbeat that was answered to its answer."""
    unanswered: dict[str, int]
    """Requests of ours by message, where no answer came in time or what came was none."""
    malformed: int
    """Of theirs: bytes that are no message."""
    unsaved: int
    """Tries to write down what was voted for that failed: until it is written, this node says nothing to anybody."""
    trainer_restarts: int
    """Times that our trainer was ended because it had work and did none."""
    pipes: StreamProxyStatistics


class StagePlane:
    """key: the node's. tell(message): to the trainer, False if there is none. restart(reason): ends the trainer's process. paused(): why
    this node may not take part now (quiet hours, a month's bytes), "" while it may. allows: as `Meter.has_room`.

    Start it with `await nursery.start(plane.run)`; `hello`, `receive` and `trainer_left` are for the process link.
    """

    def __init__(
        self, network: Network, key: Ed25519PrivateKey, cfg: StagesConfig, data_dir: Path, tell: Callable[[local.ToTrainer], bool], *,
        restart: Callable[[str], None] = lambda reason: None, paused: Callable[[], str] = lambda: "",
        allows: Callable[[str], bool] = lambda choice: True, settings: ev.Settings | None = None, rng: random.Random | None = None,
    ) -> None:  # fmt: skip
        self.cfg = cfg
        self.settings = settings or ev.Settings(stages=cfg.stages, wait_seconds=cfg.wait_seconds)
        self._network = network
        self._key = key
        self._tell = tell
        self._restart = restart
        self._paused = paused
        self._rng = rng or random.SystemRandom()  # incarnations: a process that forgot its votes must not draw the same again
        self._path = data_dir / MEMORY
        self.pipes = StreamProxy(network.streams, data_dir, self._lost, allows=allows, rejected=network.rejected)
        self._control = self._new_control(b"")
        self._say, self._said = trio.open_memory_channel[_Event](math.inf)  # bounded by who may say something: see _tell_control
        self._nursery: trio.Nursery | None = None
        self._resting = ""
        self._pid: int | None = None
        self._fresh = True
        self._introduced = False
        self._offering: local.Offering | None = None
        self._known: set[str] = set()
        self._held: frozenset[str] = frozenset()
        self._own: local.StageStatus | None = None
        self._restored: tuple[bytes, int] | None = None
        self._ran = ""
        self._recovery_counts = [0] * (len(BOUNDS) + 1)
        self._recovery_seconds = 0.0
        self._rungs: Counter[str] = Counter()
        self._unanswered: Counter[str] = Counter()
        self._last_reason = ""
        self._heartbeat_seconds: float | None = None
        self._malformed = self._unsaved = self._restarts = 0

    # -- for the node

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        """Until cancelled. With stages off it only waits. Raises Unavailable when its socket cannot be made."""
        if self.cfg.mode == "off":
            task_status.started()
            await trio.sleep_forever()
        self._control = self._new_control(await trio.to_thread.run_sync(self._remembered))
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(self.pipes.run)
            self._nursery.start_soon(self._work)
            self._network.requests.serve(
                ids.CREWS_PROTOCOL, self._serve, max_request_bytes=messages.MESSAGE_BYTES, max_response_bytes=messages.MESSAGE_BYTES,
                concurrent=64, per_peer=8, deadline=SAY_SECONDS,
            )  # fmt: skip
            self._nursery.start_soon(self._tick)
            self._nursery.start_soon(self._watch)
            task_status.started()

    @property
    def may_average(self) -> bool:
        """See `CrewControl.may_average`, by the clock of this moment; also true while this node is in no crew at all."""
        control = self._control
        return control.roster is None or (control.may_average and control.within_lease(trio.current_time()))

    async def leave(self, reason: str) -> None:
        """This node is about to stop: say so to the crew, and return when it has heard it, or after LEAVE_SECONDS."""
        if self._nursery is None or self._control.roster is None:
            return
        with trio.move_on_after(LEAVE_SECONDS):
            await self._ask(ev.Drain(reason))
            while self._control.roster is not None:  # noqa: ASYNC110 - the others agree on a roster without us
                await trio.sleep(0.05)

    def statistics(self) -> StagesStatistics:
        control, roster = self._control.statistics(), self._control.roster
        return StagesStatistics(
            enabled=self.cfg.mode != "off", control=control, layers=roster.layers if roster is not None else (), own=self._own,
            trainer=self._offering is not None, recoveries=sum(self._recovery_counts), recovery_seconds_total=self._recovery_seconds, 
            recovery_counts=tuple(self._recovery_counts), rungs=dict(self._rungs), last_reason=self._last_reason,
            heartbeat_seconds=self._heartbeat_seconds, unanswered=dict(self._unanswered), malformed=self._malformed, unsaved=self._unsaved,
            trainer_restarts=self._restarts, pipes=self.pipes.statistics(),
        )  # fmt: skip

    # -- for the trainer

    def hello(self, pid: int) -> None:
        """A trainer has connected, again or for the first time. Whether it can hold a stage, it says next."""
        if pid != self._pid:
            self.trainer_left()
            self._own, self._pid, self._fresh = None, pid, True
        self._introduced = False

    def receive(self, message: local.FromTrainer) -> None:
        """What the trainer says."""
        if isinstance(message, local.Offering):
            self._offering = message
            if not self._introduced or self._control.roster is None:  # while it holds a stage, other numbers can wait
                self._tell_control(ev.TrainerOffers(message, fresh=self._fresh))
            self._introduced, self._fresh = True, False
            return
        self._own = message
        self._last_reason = message.reason or self._last_reason
        if message.rung and message.phase == "active" and self._restored != (message.crew, message.roster_epoch):
            self._restored = (message.crew, message.roster_epoch)
            self._rungs[message.rung if message.rung in local.RUNGS else "other"] += 1
        if self._said.statistics().current_buffer_used < QUEUE:  # it says it again in a second
            self._tell_control(ev.TrainerStatus(message))

    def trainer_left(self) -> None:
        """Its connection has ended."""
        if self._offering is not None:
            self._offering = None
            self._tell_control(ev.TrainerLeft())

    # -- control, one event at a time

    def _new_control(self, memory: bytes) -> CrewControl:
        return CrewControl(self._network.peer_id, self._key.sign, signed_by, self.settings, self._rng, memory)

    def _remembered(self) -> bytes:
        try:
            with open(self._path, "rb") as file:
                return file.read(MEMORY_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.error("what this node voted for cannot be read, it takes part as a new voter: %s", error)
            return b""

    def _tell_control(self, event: ev.Event) -> None:
        """Queues. Peers and the trainer can have QUEUE waiting, our own requests their answers; the rest is rare."""
        if self.cfg.mode != "off":
            self._say.send_nowait(_Event(event))

    async def _ask(self, event: ev.Event) -> messages.Answer | None:
        """Queues, and waits until everything that follows from it is under way. The answer, to a Received. Raises what control raised."""
        asked = _Event(event)
        self._say.send_nowait(asked)
        await asked.done.wait()
        if asked.error is not None:
            raise asked.error
        return asked.answer

    async def _work(self) -> None:
        async for said in self._said:
            try:
                actions = self._control.handle(said.event, trio.current_time())
            except Exception as error:
                if not isinstance(said.event, ev.Received | ev.Answered):
                    raise
                log.exception("control failed on what a peer said")  # so that a peer can never end this process
                said.error = error
                said.done.set()
                continue
            for action in actions:
                await self._carry_out(action, said)
            self._hold()
            said.done.set()

    async def _carry_out(self, action: ev.Action, said: _Event) -> None:
        match action:
            case ev.Answer():
                said.answer = action.message
            case ev.Send():
                assert self._nursery is not None
                self._nursery.start_soon(self._send, action.peer, action.message)
            case ev.Persist():
                await self._persist(action.memory)
            case ev.TellTrainer(local.Assigned() as assigned):
                self._say_to_trainer(msgspec.structs.replace(assigned, socket=str(self.pipes.path)))
            case ev.TellTrainer():
                self._say_to_trainer(action.message)
            case ev.OpenStreams():
                self.pipes.assign(_circle(action.roster, self._control.stage))
            case ev.CloseStreams():
                self.pipes.release()
            case ev.RestartTrainer():
                log.error("the trainer is ended: %s", action.reason)
                self._restarts += 1
                self._restart(action.reason)
            case ev.Note():
                self._note(action.what, action.detail)
                if action.what == "refused":
                    self._blame(said.event)

    def _say_to_trainer(self, message: local.ToTrainer) -> None:
        if isinstance(message, local.Released):
            self._own = None
        if not self._tell(message):
            log.warning("the trainer was not told %s: it will ask when it is back", type(message).__name__)

    async def _persist(self, memory: bytes) -> None:
        """Until it is on disk: what was voted for and is forgotten could be voted against. Meanwhile this node is silent, which is safe."""
        while True:
            try:
                await trio.to_thread.run_sync(write_atomically, self._path, memory)
                return
            except OSError as error:
                self._unsaved += 1
                log.error("what this node votes for cannot be saved, so it does not vote: %s", error)
                await trio.sleep(SAVE_SECONDS)

    def _note(self, what: str, detail: str) -> None:
        log.info("crew: %s%s", what, f" ({detail})" if detail else "")
        if what in ("dissolved", "evicted", "released"):
            self._last_reason = detail or what
        if what == "running":
            said = self._control.statistics()
            if self._ran == said.crew and said.recovery_seconds is not None:
                seconds = said.recovery_seconds
                self._recovery_counts[bisect.bisect_left(BOUNDS, seconds)] += 1
                self._recovery_seconds += seconds
            self._ran = said.crew

    def _blame(self, event: ev.Event) -> None:
        """Control did not take over a chain of records. One that proves nothing by itself is the sender's fault, once for each message; one
        that does not follow what we know may come from somebody who is late, or was deceived."""
        chain = event.message if isinstance(event, ev.Received) else event.answer if isinstance(event, ev.Answered) else None
        if isinstance(event, ev.Received | ev.Answered) and isinstance(chain, messages.Adopt):
            try:
                messages.check_chain(chain.certificates, signed_by)
            except BadMessage as error:
                self._network.rejected(event.peer, f"stages_{error.reason}", PROOF)

    def _hold(self) -> None:
        """Members stay connected."""
        roster = self._control.roster
        held = frozenset(voter.peer for voter in messages.voters_of(roster)) if roster is not None else frozenset()
        if held != self._held:
            self._held = held
            self._network.hold(held)

    # -- the clock, the connections, the streams

    async def _tick(self) -> None:
        while True:
            await self._rest()
            await self._ask(ev.Tick())
            await trio.sleep(self.settings.tick_seconds)

    async def _rest(self) -> None:
        """Leave while this node may not take part; begin anew when it may."""
        reason = self._paused()
        if reason and not self._resting:
            self._resting = reason
            log.info("no crew for now: %s", reason)
            await self._ask(ev.Drain(reason))
        elif self._resting and not reason and self._control.roster is None:
            self._resting = ""
            self._control = self._new_control(await trio.to_thread.run_sync(self._remembered))
            for peer in self._known:
                self._tell_control(ev.PeerBack(peer))
            if self._offering is not None:
                self._tell_control(ev.TrainerOffers(self._offering))

    async def _watch(self) -> None:
        while True:
            now = set(self._network.connected())
            for peer in sorted(self._known - now):
                self._tell_control(ev.PeerGone(peer))
            for peer in sorted(now - self._known):
                self._tell_control(ev.PeerBack(peer))
            self._known = now
            with trio.move_on_after(LOOK_SECONDS):
                await self._network.changed()

    def _lost(self, peer: str, roster_epoch: int) -> None:
        self._tell_control(ev.StreamLost(peer, roster_epoch))

    # -- peers

    async def _send(self, peer: str, message: messages.Request) -> None:
        beat = isinstance(message, messages.Heartbeat)
        began = trio.current_time()
        answer: messages.Answer | None = None
        foreign = False
        try:
            messages.check_message(message)
        except BadMessage as error:  # somebody has counted to the end, and it would cost us our standing to go on
            log.warning("not said to %s: %s", peer, error)
            self._tell_control(ev.Answered(peer, message, None))
            return
        try:
            data = await self._network.requests.request(
                peer, ids.CREWS_PROTOCOL, messages.encode_message(message), deadline=SAY_SECONDS,
                max_response_bytes=messages.MESSAGE_BYTES, urgent=not isinstance(message, messages.Offer),
            )  # fmt: skip
            said = messages.decode_answer(data)
            if isinstance(message, messages.Propose) and isinstance(said, messages.Vote):
                messages.check_vote(message.record, peer, said, signed_by)
            answer = said
        except BadMessage as error:
            self._network.rejected(peer, "stages_signature" if error.reason == "signature" else "stages_malformed", PROOF)
            log.info("%s answered with no message: %s", peer, error)
        except PeerError as error:
            foreign = isinstance(error, Incompatible)
            log.debug("%s: %s", peer, error)
        if answer is None:
            self._unanswered[type(message).__name__.lower()] += 1
        elif beat:
            self._heartbeat_seconds = trio.current_time() - began
        self._tell_control(ev.Answered(peer, message, answer, foreign))

    async def _serve(self, peer: str, data: bytes) -> bytes:
        """What a peer says. Raises PeerError to reset the stream."""
        try:
            message = messages.decode_request(data)
        except BadMessage:
            self._malformed += 1
            self._network.rejected(peer, "stages_malformed", PROOF)
            raise
        if self._said.statistics().current_buffer_used >= QUEUE:  # a disk that takes nothing holds up control, and peers ask again
            raise PeerError("busy")
        answer = no_say(self._control.roster, peer, message) or await self._ask(ev.Received(peer, message))
        if answer is None:
            raise PeerError("no answer")
        return messages.encode_message(answer)


class _Event:
    """Something for control, and what came of it."""

    def __init__(self, event: ev.Event) -> None:
        self.event = event
        self.answer: messages.Answer | None = None
        self.error: Exception | None = None
        self.done = trio.Event()


def no_say(roster: messages.Record | None, peer: str, message: messages.Request) -> messages.Answer | None:
    """What to answer to `peer` who is no voter and speaks as if it were one, under our roster or of a crew to be founded; else None."""
    match message:
        case messages.Prepare(crew, epoch) | messages.Propose(messages.Record(crew, epoch)) if epoch > 1:
            ours = roster is not None and crew == messages.crew_id(roster) and epoch == roster.epoch + 1
            return messages.Refuse("unknown") if ours and not _votes(roster, peer) else None
        case messages.Propose(record):
            return None if any(voter.peer == peer for voter in record.voters) else messages.Refuse("record")
        case messages.Leave(crew):
            ours = roster is not None and crew == messages.crew_id(roster)
            return messages.Noted() if ours and not _votes(roster, peer) else None
    return None


def _votes(roster: messages.Record | None, peer: str) -> bool:
    return roster is not None and any(voter.peer == peer for voter in messages.voters_of(roster))


def _circle(roster: messages.Record, stage: int | None) -> Circle:
    assert stage is not None
    members = tuple(seat.peer for seat in roster.seats)
    return Circle(messages.crew_id(roster), roster.epoch, stage, members, tuple(seat.stage_epoch for seat in roster.seats))
