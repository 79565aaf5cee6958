"""Who holds which stage: one node's part in a crew, (event, now) → actions. Pure: no clock, no I/O, no torch.

    crew:  none ──offers──▶ FORMING ──▶ RUNNING ⇄ PAUSED ──new record──▶ RECOVERING ──▶ RUNNING
                                          any of them ──record that ends it, or nobody left to agree──▶ none, with a reason
    slot:  VACANT → CLAIMED → LOADING → PROBATION → ACTIVE → SUSPECT → ACTIVE, or evicted → VACANT ;  ACTIVE → DRAINING → VACANT

Whatever happens, the answer is a new record (`succession.next_record` says which, `roster` how it is agreed), and a new record is a new
roster epoch for all: streams and fences anew, weights stay where they are. Under each roster

    every stage that was kept stops and says its step  →  all know where the crew stands (`settling`)  →  those who restore a stage
    finish, pass their gate  →  all are active: go on

A suspicion only pauses. Everything that is waited for has a bound, and a crew that stands still for `wait_seconds` ends.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Final

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.stages import events as ev
from swarmnode.stages import local, messages
from swarmnode.stages.detector import Detector, Progress
from swarmnode.stages.events import ControlStatistics, CrewState, Settings, SlotState, SlotStatistics
from swarmnode.stages.forming import founding_record
from swarmnode.stages.messages import Adopt, Certificate, Leave, Offer, Record, Refuse, Seat, Status, Voter, crew_id, voters_of
from swarmnode.stages.roster import Acceptor, Founding, Lease, Proposal, Sign, Verify, next_ballot, remembered_incarnation
from swarmnode.stages.settling import KEPT, settle
from swarmnode.stages.succession import Facts, Wish, next_record

ENDED: Final = 32
"""Crews that this node has left, so that late messages of theirs bring nobody back."""
SENT: Final = 64
"""Heartbeats whose answers may still come."""
VERSION_BITS: Final = 40
"""Of a status' number; the process' own start is above them."""
LAST_WORD_SECONDS: Final = 10.0
"""For those who stay to agree on an end; after that a member that has to go goes alone."""


class CrewControl:
    """See `events` for what goes in and what comes out."""

    def __init__(self, me: str, sign: Sign, verify: Verify, settings: Settings, rng: random.Random, memory: bytes = b"") -> None:
        self.me, self.settings = me, settings
        self._verify, self._rng = verify, rng
        incarnation = remembered_incarnation(memory) or rng.randbytes(messages.INCARNATION_BYTES)
        self.acceptor = Acceptor(Voter(me, incarnation), sign, verify)
        if memory and remembered_incarnation(memory):
            self.acceptor.remember(memory)
        self._detector = Detector(settings.heartbeat_seconds, settings.tick_seconds, settings.phi, settings.sigma_floor_seconds)
        self._lease = Lease(settings.lease_seconds)
        self._progress = Progress(settings.slow_steps)
        self._notes = Counter(dict.fromkeys(ev.NOTES, 0))
        self._now = 0.0
        self._out: list[ev.Action] = []
        self._changed = False
        """Whether an event may have consequences beyond its own answer; most heartbeats have none."""
        # the neighbourhood
        self._connected: dict[str, None] = {}
        self._gone: dict[str, float] = {}
        self._offers: dict[str, tuple[Offer, float]] = {}
        self._newest_offer = 0.0
        self._offered = -1e9
        self._founding: Founding | None = None
        self._reserved: tuple[Record, float] | None = None
        self._refused_until: dict[str, float] = {}
        self._ended: deque[bytes] = deque(maxlen=ENDED)
        # the own trainer
        self._trainer: ev.TrainerOffers | None = None
        self._holding: tuple[bytes, int, int] | None = None
        """(crew, stage, stage epoch) that the trainer process has in memory."""
        self._claimed: tuple[bytes, int, int] | None = None
        """(crew, stage, stage epoch) that were held by a trainer before this one."""
        self._draining: tuple[str, float] | None = None
        # under the present record
        self._status = Status()
        self._statuses: dict[str, Status] = {}
        self._absent: dict[str, float] = {}
        self._left: set[str] = set()
        self._strangers: set[str] = set()
        """Members that have forgotten the crew: their process is new."""
        self._settled: local.Settled | None = None
        self._running = False
        self._ran = False
        """Whether this roster ever ran."""
        self._ever_ran = False
        self._standing: float | None = None
        self._recovery_seconds: float | None = None
        self._fenced = False
        self._heard_crew = 0.0
        # heartbeats and proposals
        self._sequence = self._version = 0
        self._sent: dict[int, float] = {}
        self._beat = -1e9
        self._announce = False
        self._proposal: Proposal | None = None
        self._wished: float | None = None
        self._retry = 0.0
        self._ballot = 0
        self._started = False

    # ---- what others may read -----------------------------------------------------------------------------------------------

    @property
    def roster(self) -> Record | None:
        return self.acceptor.record

    @property
    def stage(self) -> int | None:
        """That we hold by the present record."""
        mine = self.acceptor.me
        if self.roster is None:
            return None
        return next((i for i, seat in enumerate(self.roster.seats) if (seat.peer, seat.incarnation) == (mine.peer, mine.incarnation)), None)

    @property
    def running(self) -> bool:
        """Whether steps are to be taken, as far as this node knows."""
        return self._running

    @property
    def may_average(self) -> bool:
        """Whether the own stage may be averaged with other crews' and rollouts be published: never in PROBATION, fenced, or in doubt."""
        return self._running and not self._fenced and self._status.phase == "active"

    @property
    def state(self) -> CrewState:
        if self.roster is None:
            return "none"
        if self._running:
            return "running"
        if not self._ever_ran and self.roster.epoch == 1:
            return "forming"
        return "paused" if self._ran else "recovering"

    def statistics(self) -> ControlStatistics:
        roster = self.roster
        slots = () if roster is None else tuple(self._slot(i, seat) for i, seat in enumerate(roster.seats))
        return ControlStatistics(
            state=self.state,
            crew=self.acceptor.crew.hex() if roster else "",
            roster_epoch=roster.epoch if roster else 0,
            stage=self.stage,
            slots=slots,
            fenced=self._fenced,
            offers=len(self._alive_offers()),
            notes=dict(self._notes),
            standing_seconds=0.0 if self._standing is None or roster is None else self._now - self._standing,
            recovery_seconds=self._recovery_seconds,
        )

    def _slot(self, stage: int, seat: Seat) -> SlotStatistics:
        status = self._status_of(seat.peer)
        state: SlotState
        if not seat.peer:
            state = "vacant"
        elif self._detector.suspects(seat.peer) or (status is not None and status.phase in ("absent", "failed")):
            state = "suspect"
        elif seat.peer in self._left:
            state = "draining"
        elif status is None or status.phase == "claiming":
            state = "claimed"
        elif status.phase in ("loading", "probation", "active"):
            state = status.phase
        else:
            state = "active" if status.phase == "ready" else "claimed"
        return SlotStatistics(stage, seat.peer, seat.stage_epoch, state, 0 if status is None else status.step)

    # ---- events -------------------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """What is to be done about `event`, in order."""
        self._now, self._out, self._changed = now, [], True
        if not self._started:
            self._start()
        match event:
            case ev.Tick():
                self._tick()
            case ev.Received():
                self._received(event.peer, event.message)
            case ev.Answered():
                self._answered(event.peer, event.request, event.answer)
            case ev.TrainerStatus():
                self._trainer_status(event.status)
            case ev.StreamLost():
                self._stream_lost(event)
            case ev.PeerGone():
                self._connected.pop(event.peer, None)
                self._offers.pop(event.peer, None)
                if event.peer in self._members():
                    self._gone.setdefault(event.peer, now)
                    self._suspect(event.peer, "no connection")
            case ev.PeerBack():
                self._gone.pop(event.peer, None)
                if len(self._connected) < self.settings.most_peers or event.peer in self._members():
                    self._connected[event.peer] = None
                self._greet(event.peer)
            case ev.TrainerOffers():
                self._trainer_offers(event)
            case ev.TrainerLeft():
                self._trainer_left()
            case ev.Drain():
                self._drain(event.reason)
        if self._changed:
            self._review()
        if self._announce:
            self._send_heartbeats()
        return self._out

    def _start(self) -> None:
        self._started = True
        self._version = self.acceptor.begin() << VERSION_BITS
        self._persist()
        self._newest_offer = self._heard_crew = self._now
        if self.roster is not None:  # from memory
            self._begin_roster()

    def _do(self, action: ev.Action) -> None:
        self._out.append(action)

    def _note(self, what: str, detail: str = "") -> None:
        self._notes[what] += 1
        self._do(ev.Note(what, detail))

    def _persist(self) -> None:
        self._do(ev.Persist(self.acceptor.memory()))

    def _tell(self, message: local.ToTrainer) -> None:
        if self._trainer is not None:
            self._do(ev.TellTrainer(message))

    def _tick(self) -> None:
        self._detector.tick(self._now)
        if self.roster is None:
            self._found()
        elif self._now - self._beat >= self.settings.heartbeat_seconds - 0.25 * self.settings.tick_seconds:
            self._announce = True
        if self.stage is None and self._trainer is not None and self._draining is None and self._due(self._offered):
            self._offered = self._now
            for peer in self._connected:
                self._do(ev.Send(peer, self._offer()))

    def _due(self, last: float) -> bool:
        return self._now - last >= self.settings.offer_seconds - 0.25 * self.settings.tick_seconds

    # ---- the own trainer ----------------------------------------------------------------------------------------------------

    def _trainer_offers(self, event: ev.TrainerOffers) -> None:
        again = self._trainer is not None or self._holding is not None
        self._trainer = event
        if event.fresh:
            self._holding = None
            self._progress.restart()
        if self.stage is None:
            for peer in self._connected:
                self._do(ev.Send(peer, self._offer()))
            self._offered = self._now
        elif event.fresh:
            roster = self.roster
            assert roster is not None
            self._claimed = (self.acceptor.crew, self.stage, roster.seats[self.stage].stage_epoch)
            self._set_status(Status("claiming"))
        elif again:  # the same process, whose link broke: its streams may have, too
            self._set_status(msgspec.structs.replace(self._status, phase="stopping", broken=True))

    def _trainer_left(self) -> None:
        self._trainer = None
        self._set_status(Status("absent", step=self._status.step))

    def _trainer_status(self, said: local.StageStatus) -> None:
        roster, stage = self.roster, self.stage
        ours = roster is not None and (said.crew, said.roster_epoch, said.stage) == (self.acceptor.crew, roster.epoch, stage)
        if not ours or self._trainer is None or stage is None or said.phase == "idle" or self._status.phase in ("absent", "claiming"):
            return
        phase = said.phase
        if self._status.phase == "stopping" and phase in ("active", "probation"):
            return  # said before it heard of this roster
        if phase == "active" and (self._settled is None or said.step < self._settled.step):
            phase = "probation"  # nobody is active before it is known where the crew stands
        if phase in KEPT:
            self._holding = (self.acceptor.crew, stage, roster.seats[stage].stage_epoch)  # type: ignore[union-attr]
        status = Status(
            phase, said.step, said.prepared, said.attempt, said.clip, said.learning_rate, said.progress, said.load,
            journal=said.rung == "R0" and phase not in KEPT, broken=self._status.broken,
        )  # fmt: skip
        self._set_status(status)
        if self._running:
            self._progress.report(said.step, said.progress, said.load, self._now)

    def _set_status(self, status: Status) -> None:
        self._version += 1
        before, self._status = self._status, msgspec.structs.replace(status, version=self._version)
        if self.stage is None:
            return
        changed = (before.phase, before.broken) != (status.phase, status.broken)
        if changed or (not self._running and (before.step, before.journal) != (status.step, status.journal)):
            self._announce = True

    def _drain(self, reason: str) -> None:
        if self._draining is not None:
            return
        self._draining = (reason, self._now)
        roster = self.roster
        if roster is None:
            return
        if self.stage is None or self._members() == {self.me}:
            self._leave_crew(reason, tell=True)
            return
        for peer in self._members():
            if peer != self.me:
                self._do(ev.Send(peer, Leave(self.acceptor.crew, roster.epoch, reason)))
        self._left.add(self.me)

    # ---- peers --------------------------------------------------------------------------------------------------------------

    def _members(self) -> set[str]:
        """All voters."""
        return set() if self.roster is None else {voter.peer for voter in voters_of(self.roster)}

    def _greet(self, peer: str) -> None:
        if self.stage is None and self._trainer is not None and self._draining is None:
            self._do(ev.Send(peer, self._offer()))
        elif peer in self._members():
            self._send_heartbeat(peer)

    def _suspect(self, peer: str, why: str) -> None:
        if self._detector.broke(peer, self._now):
            self._note("suspected", f"{peer}: {why}")

    def _stream_lost(self, event: ev.StreamLost) -> None:
        roster = self.roster
        if roster is None or event.roster_epoch != roster.epoch or self.stage is None:
            return
        self._suspect(event.peer, "a stream broke")
        if not self._status.broken:
            self._set_status(msgspec.structs.replace(self._status, broken=True))
            self._announce = True

    def _heard(self, peer: str) -> None:
        self._heard_crew = self._now
        if self._detector.heard(peer, self._now):
            self._changed = True
            self._note("refuted", peer)

    def _received(self, peer: str, message: messages.Request) -> None:
        match message:
            case messages.Heartbeat():
                self._changed = False
                self._do(ev.Answer(self._heartbeat(peer, message)))
            case Offer():
                self._do(ev.Answer(self._offer_came(peer, message)))
            case messages.Prepare():
                answer = self._protect(message) or self.acceptor.prepare(message)
                if isinstance(answer, messages.Promise):
                    self._persist()
                self._do(ev.Answer(answer))
            case messages.Propose():
                vote = self._sign_founding(peer, message.record) if message.record.epoch == 1 else self.acceptor.propose(message)
                if isinstance(vote, messages.Vote) and message.record.epoch > 1:
                    self._persist()
                self._do(ev.Answer(vote))
            case Adopt():
                self._do(ev.Answer(self._adopt_came(message.certificates)))
            case Leave():
                if self.roster is not None and (message.crew, message.roster_epoch) == (self.acceptor.crew, self.roster.epoch):
                    self._left.add(peer)
                self._do(ev.Answer(messages.Noted()))

    def _answered(self, peer: str, request: messages.Request, answer: messages.Answer | None) -> None:
        match answer:
            case None:
                return
            case messages.Alive():
                self._changed = self._fenced
                self._alive(peer, answer)
            case Adopt():
                reply = self._adopt_came(answer.certificates)
                if isinstance(reply, Leave):
                    self._do(ev.Send(peer, reply))
            case messages.Promise():
                self._promised(peer, answer)
            case messages.Vote():
                self._voted(peer, answer)
            case Refuse():
                self._refused(peer, request, answer)
            case Leave():
                if answer.crew == self.acceptor.crew and self.roster is not None:
                    self._left.add(peer)

    # ---- heartbeats ---------------------------------------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        self._announce = False
        if self.roster is None:
            return
        self._beat = self._now
        self._sequence += 1
        self._sent[self._sequence] = self._now
        self._sent.pop(self._sequence - SENT, None)
        for voter in voters_of(self.roster):
            if voter.peer != self.me:
                self._send_heartbeat(voter.peer)

    def _send_heartbeat(self, peer: str) -> None:
        assert self.roster is not None
        self._do(ev.Send(peer, messages.Heartbeat(self.acceptor.crew, self.roster.epoch, self._sequence, self._status)))

    def _heartbeat(self, peer: str, message: messages.Heartbeat) -> messages.Answer:
        roster = self.roster
        if roster is None or message.crew != self.acceptor.crew:
            return Leave(message.crew, message.roster_epoch) if message.crew in self._ended else Refuse("unknown")
        if message.roster_epoch < roster.epoch:
            self._heard(peer)
            return self.acceptor.newer_than(message.roster_epoch)
        if peer not in self._members():
            return Refuse("unknown")
        self._heard(peer)
        self._take_status(peer, message.roster_epoch, message.status)
        return messages.Alive(self.acceptor.crew, roster.epoch, message.sequence, self._status)

    def _alive(self, peer: str, answer: messages.Alive) -> None:
        roster = self.roster
        if roster is None or answer.crew != self.acceptor.crew:
            return
        self._heard(peer)
        sent = self._sent.get(answer.sequence)
        if sent is not None:
            self._lease.renewed(peer, sent)
        if answer.roster_epoch < roster.epoch:
            self._do(ev.Send(peer, self.acceptor.newer_than(answer.roster_epoch)))
        else:
            self._take_status(peer, answer.roster_epoch, answer.status)

    def _take_status(self, peer: str, epoch: int, status: Status) -> None:
        if self.roster is None or epoch != self.roster.epoch:
            return
        known = self._statuses.get(peer)
        if known is not None and known.version > status.version:
            return  # overtaken on its way
        self._statuses[peer] = status
        self._strangers.discard(peer)
        if not self._running or known is None or (known.phase, known.broken) != (status.phase, status.broken):
            self._changed = True
        if status.phase == "absent":
            self._absent.setdefault(peer, self._now)
        else:
            self._absent.pop(peer, None)

    def _status_of(self, peer: str) -> Status | None:
        return self._status if peer == self.me else self._statuses.get(peer)

    # ---- records ------------------------------------------------------------------------------------------------------------

    def _adopt_came(self, certificates: tuple[Certificate, ...]) -> messages.Noted | Leave:
        last = certificates[-1].record
        crew = crew_id(last)
        member = self.acceptor.me in voters_of(last)
        if self.roster is None or crew != self.acceptor.crew:
            if not member or last.dissolved:
                return messages.Noted()
            if crew in self._ended or self.roster is not None or self._trainer is None or self._draining is not None:
                return Leave(crew, last.epoch, "not here")
        elif last.epoch <= self.roster.epoch:
            return messages.Noted()
        try:
            new = self.acceptor.check_chain(certificates)
        except BadMessage as error:
            self._note("refused", str(error))
            if self.roster is not None and certificates[0].record.epoch > self.roster.epoch + 1:
                self._leave_crew("too many rosters were missed", tell=False)
            return messages.Noted()
        self._learn(new)
        return messages.Noted()

    def _learn(self, new: tuple[Certificate, ...]) -> None:
        """Go over to the newest of these records."""
        if not new:
            return
        self.acceptor.learn(new)
        self._persist()
        roster = new[-1].record
        self._note("adopted", f"roster {roster.epoch}")
        if roster.dissolved:
            self._note("dissolved", roster.dissolved)
            self._leave_crew(roster.dissolved, tell=False)
        elif not self.acceptor.is_voter:
            self._note("evicted")
            self._leave_crew("another one holds the stage", tell=False)
        else:
            self._begin_roster()

    def _begin_roster(self) -> None:
        roster, stage = self.roster, self.stage
        assert roster is not None
        crew = self.acceptor.crew
        self._founding = self._reserved = self._proposal = self._settled = self._wished = None
        self._ballot = 0
        self._statuses.clear()
        self._left.clear()
        voters = self._members()
        self._absent = {peer: since for peer, since in self._absent.items() if peer in voters}
        self._gone = {peer: since for peer, since in self._gone.items() if peer in voters}
        self._detector.watch(voters - {self.me}, self._now)
        self._lease.begin(voters, self._now)
        self._running = self._ran = False
        if self._standing is None:
            self._standing = self._now
        self._progress.restart()
        self._announce = True
        if stage is None:
            return
        seat = roster.seats[stage]
        held = self._holding == (crew, stage, seat.stage_epoch)
        if self._trainer is None:
            self._set_status(Status("absent", step=self._status.step))
        elif self._claimed is not None and self._claimed == (crew, stage, seat.stage_epoch):
            self._set_status(Status("claiming"))  # this record was made before our claim was heard
        else:
            self._claimed = None
            self._set_status(Status("stopping" if held else "loading", step=self._status.step if held else 0))
            epochs, members = tuple(s.stage_epoch for s in roster.seats), tuple(s.peer for s in roster.seats)
            founding = seat.stage_epoch == 1 and roster.step == 0 and not held
            assigned = local.Assigned(crew, roster.epoch, stage, epochs, roster.layers, members, roster.step, founding, held, "")
            self._tell(assigned)
            self._do(ev.OpenStreams(roster))

    def _leave_crew(self, reason: str, *, tell: bool) -> None:
        roster = self.roster
        if roster is not None:
            if tell:
                for peer in self._members() - {self.me}:
                    self._do(ev.Send(peer, Leave(self.acceptor.crew, roster.epoch, reason[: messages.REASON_BYTES])))
            if roster.dissolved or tell:
                self._ended.append(self.acceptor.crew)
            if self.stage is not None or self._holding is not None:
                self._tell(local.Released(reason))
                self._note("released", reason)
        self._do(ev.CloseStreams())
        self.acceptor.forget()
        self._persist()
        self._holding = self._standing = self._proposal = self._settled = self._wished = None
        self._running = self._ran = self._ever_ran = self._fenced = False
        self._status = Status()
        self._statuses.clear()
        self._absent.clear()
        self._strangers.clear()
        self._detector.watch(set(), self._now)
        self._newest_offer, self._offered = self._now, -1e9

    # ---- offers and founding ------------------------------------------------------------------------------------------------

    def _offer(self) -> Offer:
        assert self._trainer is not None
        offering, disk = self._trainer.offering, self._trainer
        capacity = offering.capacity
        return Offer(
            offering.model, self.acceptor.me.incarnation, capacity.memory, capacity.speed, capacity.hop_seconds, disk.crew, disk.stage,
            disk.step,
        )  # fmt: skip

    def _offer_came(self, peer: str, offer: Offer) -> messages.Noted | Adopt:
        known = self._offers.get(peer)
        if known is None or known[0].incarnation != offer.incarnation:
            if known is None and len(self._offers) >= self.settings.most_peers:
                return messages.Noted()
            self._newest_offer = self._now
        self._offers[peer] = (offer, self._now)
        roster = self.roster
        if roster is not None and peer in self._members():
            self._heard(peer)
            if Voter(peer, offer.incarnation) in voters_of(roster):
                # it has not heard that it is one of us, or has left; a witness goes on offering itself
                seated = any(seat.peer == peer for seat in roster.seats)
                return self.acceptor.newer_than(0) if seated else messages.Noted()
            self._strangers.add(peer)
        return messages.Noted()

    def _alive_offers(self) -> dict[str, Offer]:
        oldest = self._now - 3 * self.settings.offer_seconds
        return {peer: offer for peer, (offer, heard) in self._offers.items() if heard >= oldest}

    def _found(self) -> None:
        """Propose a crew, where everybody is quiet and it is our turn."""
        now, settings = self._now, self.settings
        if self._founding is not None and now < self._founding.deadline:
            return
        if self._reserved is not None and now >= self._reserved[1]:
            self._reserved = None
        if self._trainer is None or self._draining is not None or self._reserved is not None:
            return
        if now < self._retry or now - self._newest_offer < settings.gather_seconds:
            return
        free = {peer: offer for peer, offer in self._alive_offers().items() if now >= self._refused_until.get(peer, 0.0)}
        record = founding_record({**free, self.me: self._offer()}, self._trainer.offering, settings.stages, settings.lease_seconds)
        if record is None:
            return
        turn = sorted(voter.peer for voter in record.voters)
        if self.me not in turn or now - self._newest_offer < settings.gather_seconds + turn.index(self.me) * 2 * settings.request_seconds:
            return
        self._founding = Founding(record, now + settings.request_seconds)
        self._retry = now + settings.request_seconds * (1 + self._rng.random())
        self._reserved = (record, self._retry)
        for peer in turn:
            if peer != self.me:
                self._do(ev.Send(peer, messages.Propose(record, 0)))
        self._voted(self.me, self.acceptor.sign_founding(record))

    def _sign_founding(self, peer: str, record: Record) -> messages.Vote | Refuse:
        reserved = self._reserved is not None and self._now < self._reserved[1] and self._reserved[0] != record
        if self.roster is not None or reserved or self._draining is not None or self._trainer is None:
            return Refuse("busy")
        if self.acceptor.me not in record.voters or record.model != self._trainer.offering.model or not record.seats:
            return Refuse("record")
        self._reserved = (record, self._now + 2 * self.settings.request_seconds)
        return self.acceptor.sign_founding(record)

    # ---- proposals ----------------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Facts]:
        roster, now = self.roster, self._now
        assert roster is not None
        facts = {}
        for seat in roster.seats:
            peer = seat.peer
            if not peer:
                continue
            status = self._status_of(peer)
            offered = self._offers.get(peer)
            claims = b""
            if status is not None and status.phase == "claiming":
                claims = seat.incarnation
            elif offered is not None and offered[0].incarnation != seat.incarnation and peer != self.me:
                claims = offered[0].incarnation
            facts[peer] = Facts(
                claims=claims,
                left=peer in self._left,
                failed=status is not None and status.phase == "failed",
                broken=status is not None and status.broken,
                suspected=self._detector.suspects(peer),
                silent_seconds=self._detector.silent_seconds(peer, now),
                gone_seconds=now - self._gone[peer] if peer in self._gone and self._detector.suspects(peer) else 0.0,
                absent_seconds=now - self._absent[peer] if peer in self._absent else 0.0,
            )
        return facts

    def _wish(self) -> Wish | None:
        roster = self.roster
        assert roster is not None
        seated = {seat.peer for seat in roster.seats}
        witnesses = {voter.peer for voter in roster.witnesses}
        spares = {
            peer: offer for peer, offer in self._alive_offers().items()
            if peer not in seated and not (peer in witnesses and self._detector.suspects(peer))
        }  # fmt: skip
        standing = 0.0 if self._standing is None else self._now - self._standing
        why = self._why_standing() if standing >= self.settings.wait_seconds else ""
        cost = self._trainer.offering.cost if self._trainer is not None else None
        return next_record(roster, self._facts(), spares, cost, self._steps_of_all(), self.settings, dissolve=why)

    def _steps_of_all(self) -> int:
        """That every stage has taken, by what was heard under this record."""
        assert self.roster is not None
        if self._settled is None:
            return 0
        return max(self._settled.step, min((s.step for s in map(self._status_of, self._seated()) if s is not None), default=0))

    def _seated(self) -> list[str]:
        return [] if self.roster is None else [seat.peer for seat in self.roster.seats if seat.peer]

    def _why_standing(self) -> str:
        assert self.roster is not None
        stands = [slot for slot in self.statistics().slots if slot.state != "active"]
        what = ", ".join(f"stage {slot.stage} {slot.state}" for slot in stands[:3]) or "streams"
        return f"the crew stood still for {self.settings.wait_seconds:.0f} s: {what}"[: messages.REASON_BYTES]

    def _my_turn(self) -> bool:
        """The lowest stage that is left proposes; if nothing comes of it, the next one does."""
        order = [p for p in self._seated() if p == self.me or not (self._detector.suspects(p) or p in self._left or p in self._strangers)]
        if self.stage is None or not self.acceptor.is_voter or self.me not in order or self._wished is None:
            return False
        return self._now - self._wished >= order.index(self.me) * 1.5 * self.settings.request_seconds

    def _propose(self, wish: Wish) -> None:
        roster = self.roster
        assert roster is not None
        place = voters_of(roster).index(self.acceptor.me)
        self._ballot = next_ballot(max(self._ballot, self.acceptor.promised), place)
        proposal = Proposal(roster, self._ballot, wish.evicting, self._now + self.settings.request_seconds)
        promise = self.acceptor.prepare(proposal.prepare)
        if not isinstance(promise, messages.Promise):
            return
        self._proposal = proposal
        self._persist()
        for peer in proposal.voters:
            if peer != self.me:
                self._do(ev.Send(peer, proposal.prepare))
        self._promised(self.me, promise)

    def _protect(self, message: messages.Prepare) -> Refuse | None:
        """Whoever we hear well is not to be evicted, unless the crew has stood still for long: maybe others do not hear it."""
        standing = 0.0 if self._standing is None else self._now - self._standing
        ours = self.roster is not None and message.crew == self.acceptor.crew and message.epoch == self.roster.epoch + 1
        if not ours or standing >= self.settings.stuck_seconds:
            return None
        return Refuse("alive") if any(peer == self.me or self._is_well(peer) for peer in message.evicting) else None

    def _is_well(self, peer: str) -> bool:
        silent = self._detector.silent_seconds(peer, self._now)
        return peer in self._members() and not self._detector.suspects(peer) and silent < self.settings.gone_seconds

    def _promised(self, peer: str, promise: messages.Promise) -> None:
        proposal = self._proposal
        if proposal is None or not proposal.promised(peer, promise):
            return
        wish = self._wish()
        propose = proposal.choose(None if wish is None else wish.record)
        if propose is None:
            self._proposal = None
            return
        vote = self.acceptor.propose(propose)
        if not isinstance(vote, messages.Vote):
            self._proposal = None
            return
        self._persist()
        for voter in proposal.voters:
            if voter != self.me:
                self._do(ev.Send(voter, propose))
        self._voted(self.me, vote)

    def _voted(self, peer: str, vote: messages.Vote) -> None:
        certificate = None
        if self._founding is not None and vote.epoch == 1:
            certificate = self._founding.voted(peer, vote, self._verify)
            if certificate is not None:
                self._note("founded", f"{len(certificate.record.seats)} stages")
        elif self._proposal is not None:
            certificate = self._proposal.voted(peer, vote, self._verify)
            if certificate is not None:
                self._note("claimed", f"roster {certificate.record.epoch}")
        if certificate is None or (self.roster is not None and certificate.record.epoch <= self.roster.epoch):
            return
        told = ({v.peer for v in voters_of(certificate.record)} | self._members()) - {self.me}
        self._learn((certificate,))
        for other in sorted(told):
            chain = self.acceptor.newer_than(max(0, certificate.record.epoch - 2)) if self.roster is not None else Adopt((certificate,))
            self._do(ev.Send(other, chain))

    def _refused(self, peer: str, request: messages.Request, refusal: Refuse) -> None:
        if isinstance(request, messages.Heartbeat) and refusal.reason == "unknown" and request.crew == self.acceptor.crew:
            self._strangers.add(peer)
            self._statuses.pop(peer, None)
            self._absent.setdefault(peer, self._now)
            self._heard(peer)
        elif isinstance(request, messages.Propose) and request.record.epoch == 1:
            if self._founding is not None and self._founding.record == request.record:
                self._refused_until[peer] = self._now + 3 * self.settings.offer_seconds
                self._founding = self._reserved = None
        elif self._proposal is not None and isinstance(request, messages.Prepare | messages.Propose):
            ballot = request.ballot
            if ballot != self._proposal.ballot:
                return
            if refusal.reason == "ballot":
                self._ballot = max(self._ballot, refusal.ballot)
                self._proposal = None
                self._retry = self._now + self._rng.uniform(0.05, 0.5) * self.settings.request_seconds
            elif refusal.reason == "alive":
                self._proposal = None
                self._retry = self._now + self.settings.heartbeat_seconds
            elif refusal.reason == "epoch" and self.acceptor.chain:
                self._do(ev.Send(peer, self.acceptor.newer_than(0)))

    # ---- what follows from all that -----------------------------------------------------------------------------------------

    def _review(self) -> None:
        roster = self.roster
        if roster is None:
            return
        if self.stage is None:
            if self._now - self._heard_crew >= self.settings.wait_seconds:  # a witness of nothing
                self._leave_crew("nobody is heard", tell=False)
            return
        for peer in self._detector.newly_suspected(self._now):
            self._note("suspected", f"{peer}: silent")
        self._check_lease()
        if self._running and self._progress.stalled(self._now):
            self._note("stalled")
            self._do(ev.RestartTrainer("work in hand, and nothing done"))
            self._trainer_left()
        self._settle()
        self._run_or_pause()
        if self._end_alone():
            return
        if self._proposal is not None and self._now >= self._proposal.deadline:
            self._proposal = None
            self._retry = self._now + self._rng.uniform(0.0, 0.5) * self.settings.request_seconds
        if self._proposal is None:
            wish = self._wish()
            if wish is None:
                self._wished = None
                return
            if self._wished is None:
                self._wished = self._now
            if self._now >= self._retry and self._my_turn():
                self._propose(wish)

    def _check_lease(self) -> None:
        late = self._now >= self._lease.ends(self.me, self._now)
        if late and not self._fenced:
            self._fenced = True
            self._note("fenced")
            self._do(ev.CloseStreams())
            self._tell(local.Suspended("no majority of the crew is heard"))
            self._set_status(msgspec.structs.replace(self._status, broken=True))
        elif self._fenced and not late:
            self._fenced = False

    def _settle(self) -> None:
        roster = self.roster
        assert roster is not None
        if self._settled is not None or not all(seat.peer for seat in roster.seats):
            return
        settled = settle(roster.epoch, roster.step, [self._status_of(seat.peer) for seat in roster.seats])
        if settled is None:
            return
        self._settled = settled
        self._note("settled", f"step {settled.step}")
        self._tell(settled)

    def _run_or_pause(self) -> None:
        roster, settled = self.roster, self._settled
        assert roster is not None
        well = settled is not None and not self._fenced and not self._left
        for seat in roster.seats:
            status = self._status_of(seat.peer)
            well = well and status is not None and status.phase == "active" and status.step >= settled.step and not status.broken  # type: ignore[union-attr]
            well = well and not self._detector.suspects(seat.peer)
        if well and not self._running:
            self._running = self._ran = self._ever_ran = True
            if self._standing is not None:
                self._recovery_seconds = self._now - self._standing
            self._standing = None
            self._note("running", f"roster {roster.epoch}")
            self._tell(local.Resumed(roster.epoch))
        elif self._running and not well:
            self._running = False
            self._standing = self._now
            self._progress.restart()
            self._note("paused")
            self._tell(local.Suspended("a member is in doubt"))

    def _end_alone(self) -> bool:
        """Go where nobody can be waited for any longer. Returns whether we did."""
        now, settings = self._now, self.settings
        standing = 0.0 if self._standing is None else now - self._standing
        others = self._members() - {self.me}
        gone = {peer for peer in others if peer in self._left or peer in self._strangers}
        needed = len(others) + 1 - (len(others) + 1) // 2  # of those who are gone, so many make a majority impossible
        if self._draining is not None and now - self._draining[1] >= LAST_WORD_SECONDS:
            self._leave_crew(self._draining[0], tell=True)
        elif standing >= settings.wait_seconds + LAST_WORD_SECONDS:
            why = self._why_standing()
            self._note("dissolved", why)
            self._leave_crew(why, tell=True)
        elif others and len(gone) >= needed and not any(peer in self._strangers for peer in gone - self._left):
            self._note("dissolved", "most members have left")
            self._leave_crew("most members have left", tell=True)
        else:
            return False
        return True
