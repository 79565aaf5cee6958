"""Who holds which stage: one node's part in a crew, (event, now) → actions. Pure: no clock, no I/O, no torch.

    crew:  none ──offers──▶ FORMING ──▶ RUNNING ⇄ PAUSED ──new record──▶ RECOVERING ──▶ RUNNING
                                          any of them ──record that ends it, or nobody left to agree──▶ none, with a reason
    slot:  VACANT → CLAIMED → LOADING → PROBATION → ACTIVE → SUSPECT → ACTIVE, or evicted → VACANT ;  ACTIVE → DRAINING → VACANT

Whatever happens, the answer is a new record (`succession` says which, `roster` how it is agreed), and a new record is a new roster epoch
for all: streams and fences anew, weights stay where they are. Under each roster

    every stage that was kept stops and says its step  →  all know where the crew stands (`settling`)  →  those who restore a stage
    finish, pass their gate  →  all are active: go on

A suspicion only pauses. Everything that is waited for has a bound, and a crew that stands still for `wait_seconds` ends.
"""

from __future__ import annotations

from typing import Final

import msgspec

from swarmnode.crew import events as ev
from swarmnode.crew import local, messages
from swarmnode.crew.messages import Adopt, Certificate, Leave, Offer, Record, Refuse, Status, Voter, crew_id, voters_of
from swarmnode.crew.standing import DOUBLINGS, Standing
from swarmnode.crew.succession import Wish
from swarmnode.crew.view import View
from swarmnode.errors import BadMessage

LAST_WORD_SECONDS: Final = 10.0
"""For those who stay to agree on an end; after that a member that has to go goes alone."""


class CrewControl(Standing):
    """See `events` for what goes in and what comes out."""

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
                self._answered(event)
            case ev.TrainerStatus():
                self._trainer_status(event.status)
            case ev.StreamLost():
                self._stream_lost(event)
            case ev.PeerGone():
                self._peer_gone(event.peer)
            case ev.PeerBack():
                self._peer_back(event.peer)
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
        self._own.begin(self.acceptor.begin())
        self._persist()
        self._forming.begin(self._now)
        self._heard_crew = self._now
        if self.roster is not None:  # from memory
            self._signers = self._others_of(self.acceptor.chain[-1])
            self._begin_roster()

    def _tick(self) -> None:
        self._detector.tick(self._now)
        settings, slack = self.settings, 0.25 * self.settings.tick_seconds
        if self._view is not None and self._now - self._beat >= settings.heartbeat_seconds - slack:
            self._announce = True
        if self._now - self._offered >= settings.offer_seconds - slack:
            self._send_offers()
        self._repeat_offers()
        self._foreign = {peer: until for peer, until in self._foreign.items() if self._now < until}
        trainer = self._own.trainer
        if self.is_free and trainer is not None and self._draining is None:
            own, waits = self._own.offer(self.acceptor.me.incarnation), lambda peer: self._patience.waits(peer, self._now)
            record = self._forming.propose(own, trainer.offering, self._now, waits, witness=self._view is not None)
            if record is not None:
                self._send_founding(record)

    # ---- the own trainer ----------------------------------------------------------------------------------------------------

    def _trainer_offers(self, event: ev.TrainerOffers) -> None:
        status, view = self._own.came(event, self._view), self._view
        if view is not None and view.stage is not None and not self._own.knows(view.record):
            self._leave_crew("the trainer has another model", tell=True)
        if self._view is None or status is None:
            if not self._offers_itself or self._own.offer(self.acceptor.me.incarnation) != self._said:
                self._send_offers()
        else:
            self._set_status(status)

    def _trainer_left(self) -> None:
        self._set_status(self._own.left())
        self._take_back_offer()

    def _trainer_status(self, said: local.StageStatus) -> None:
        status = self._own.said(said, self._view)
        if status is not None:
            self._set_status(status)
            if self._running:
                self._own.progress.report(said.step, said.progress, said.load, self._now)
            self._see_work(said)

    def _see_work(self, said: local.StageStatus) -> None:
        """What tells a crew from one that was founded to keep us busy."""
        view = self._view
        if view is None or view.settled is None:
            return
        if self._idle is not None and said.progress != self._idle[1]:
            self._worked, self._idle = True, None
        if not self._stepped and said.phase == "active" and said.step > view.settled.step:
            self._stepped = self._worked = True
            self._idle = None
            self._patience.took_a_step(view.others)

    def _drain(self, reason: str) -> None:
        view = self._view
        if self._draining is not None:
            return
        self._draining = (reason, self._now)
        self._take_back_offer()
        if view is not None and (view.stage is None or not view.others):
            self._leave_crew(reason, tell=True)
        elif view is not None:
            self._send_leave(reason)
            view.left.add(self.me)

    # ---- peers --------------------------------------------------------------------------------------------------------------

    def _peer_back(self, peer: str) -> None:
        self._gone.pop(peer, None)
        if len(self._connected) < self.settings.most_peers or self._is_member(peer):
            self._connected[peer] = None
        if self._offers_itself:
            self._send_offer(peer)
        elif self._is_member(peer):
            self._send_heartbeat(peer)

    def _peer_gone(self, peer: str) -> None:
        self._connected.pop(peer, None)
        self._forming.gone(peer)
        self._again.pop(peer, None)
        if self._is_member(peer):
            self._gone.setdefault(peer, self._now)
            self._suspect(peer, "no connection")

    def _suspect(self, peer: str, why: str) -> None:
        if self._detector.broke(peer):
            self._note("suspected", f"{peer}: {why}")

    def _stream_lost(self, event: ev.StreamLost) -> None:
        view = self._view
        if view is None or view.stage is None or event.roster_epoch != view.record.epoch:
            return
        self._suspect(event.peer, "a stream broke")
        if not self._own.status.broken:
            self._set_status(msgspec.structs.replace(self._own.status, broken=True))

    def _heard(self, peer: str) -> None:
        if self._detector.heard(peer, self._now):
            self._changed = True
            self._note("refuted", peer)

    def _received(self, peer: str, message: messages.Request) -> None:
        answer: messages.Answer = messages.Noted()
        if self._foreign.pop(peer, None) is not None and self._offers_itself:
            self._send_offer(peer)  # it speaks of crews after all: it is another process than the one that did not
        match message:
            case messages.Heartbeat():
                self._changed = False
                answer = self._heartbeat(peer, message)
            case Offer():
                answer = self._offer_came(peer, message)
            case messages.Prepare():
                answer = self._protect(message) or self.acceptor.prepare(message)
            case messages.Propose():
                answer = self._sign_founding(peer, message.record) if message.record.epoch == 1 else self.acceptor.propose(message)
            case Adopt():
                answer = self._adopt_came(peer, message.certificates)
            case Leave():
                if self._view is not None and (message.crew, message.roster_epoch) == (self._view.crew, self._view.record.epoch):
                    self._member_left(self._view, peer)
        if isinstance(answer, messages.Promise | messages.Vote):
            self._persist()
        self._do(ev.Answer(answer))

    def _answered(self, event: ev.Answered) -> None:
        peer, request, answer = event.peer, event.request, event.answer
        if isinstance(request, Offer):
            self._offer_answered(peer, answer, event.foreign)
        match answer:
            case messages.Alive():
                self._changed = self._fenced
                self._alive(peer, answer)
            case Adopt():
                reply = self._adopt_came(peer, answer.certificates)
                if isinstance(reply, Leave):
                    self._do(ev.Send(peer, reply))
            case messages.Promise():
                self._promised(peer, answer)
            case messages.Vote():
                self._voted(peer, answer)
            case Refuse():
                self._refused(peer, request, answer)
            case Leave():
                if self._view is not None and answer.crew == self._view.crew:
                    self._member_left(self._view, peer)

    def _member_left(self, view: View, peer: str) -> None:
        view.left.add(peer)
        for voter in view.voters:
            if voter.peer == peer:
                self._forming.left(voter)
        self._parted.extend(voter for voter in view.record.witnesses if voter.peer == peer and voter not in self._parted)

    # ---- heartbeats ---------------------------------------------------------------------------------------------------------

    def _heartbeat(self, peer: str, message: messages.Heartbeat) -> messages.Answer:
        view = self._view
        if view is None or message.crew != view.crew:
            if message.crew in self._ended:
                return Leave(message.crew, message.roster_epoch)
            return Refuse("unknown", incarnation=self.acceptor.me.incarnation)
        epoch = view.record.epoch
        if message.roster_epoch < epoch:
            self._heard(peer)
            return self.acceptor.newer_than(message.roster_epoch)
        if peer not in view.members:
            return self.acceptor.newer_than(0)
        self._heard(peer)
        self._heard_crew = self._now
        if message.roster_epoch == epoch:
            self._take_status(view, peer, message.status)
        return messages.Alive(view.crew, epoch, message.sequence, self._own.status)

    def _alive(self, peer: str, answer: messages.Alive) -> None:
        view = self._view
        if view is None or answer.crew != view.crew:
            return
        self._heard(peer)
        self._heard_crew = self._now
        sent = self._sent.get(answer.sequence)
        if sent is not None:
            self._lease.renewed(peer, sent)
        if answer.roster_epoch < view.record.epoch:
            self._do(ev.Send(peer, self.acceptor.newer_than(answer.roster_epoch)))
        elif answer.roster_epoch == view.record.epoch:
            self._take_status(view, peer, answer.status)

    def _take_status(self, view: View, peer: str, status: Status) -> None:
        known = view.statuses.get(peer)
        if view.take(peer, status, self._now) and (
            not self._running or known is None or (known.phase, known.broken) != (status.phase, status.broken)
        ):
            self._changed = True

    # ---- records ------------------------------------------------------------------------------------------------------------

    def _adopt_came(self, peer: str, certificates: tuple[Certificate, ...]) -> messages.Noted | Leave:
        last, view = certificates[-1].record, self._view
        crew = crew_id(last)
        if view is None or crew != view.crew:
            if self.acceptor.me not in voters_of(last) or last.dissolved:
                return messages.Noted()
            if crew in self._ended or not self._may_go(last) or not self._own.knows(last) or self._draining is not None:
                return Leave(crew, last.epoch, "not here")
        elif last.epoch <= view.record.epoch:
            return messages.Noted()
        try:
            new = self.acceptor.check_chain(certificates, elsewhere=view is None or crew != view.crew)
        except BadMessage as error:
            self._note("refused", str(error))
            missed = error.reason != "signature" and view is not None and certificates[0].record.epoch > view.record.epoch + 1
            if missed and view is not None and crew == view.crew and peer in view.members:  # anybody can sign one without a beginning
                self._leave_crew("too many rosters were missed", tell=False)
            return messages.Noted()
        if view is None or crew != view.crew:
            signers = tuple(dict.fromkeys(peer for certificate in new for peer in self._others_of(certificate)))
            if any(self._patience.waits(peer, self._now) for peer in signers):
                return Leave(crew, last.epoch, "not now")
            self._move()
            self._came_by(signers)
        self._learn(new)
        return messages.Noted()

    def _may_go(self, record: Record) -> bool:
        """To the crew of `record`, which names us: from none, or as a witness to a seat; a founding record we have signed."""
        seated = self.acceptor.me in (Voter(seat.peer, seat.incarnation) for seat in record.seats)
        view = self._view
        return view is None or (view.stage is None and seated and (record.epoch == 1 or self.is_free))

    def _move(self) -> None:
        """Out of the crew whose witness we are, as the voter that we are: another one has a seat for it."""
        if self._view is not None:
            self._note("moved", f"no witness any more of {self._view.crew.hex()[:16]}")
            self._let_go("a seat elsewhere", tell=True)

    def _others_of(self, certificate: Certificate) -> tuple[str, ...]:
        return tuple(vote.peer for vote in certificate.votes if vote.peer != self.me)

    def _came_by(self, signers: tuple[str, ...]) -> None:
        self._signers, self._stepped, self._worked, self._idle = signers, False, False, None

    def _learn(self, new: tuple[Certificate, ...]) -> None:
        """Go over to the newest of these records."""
        if not new:
            return
        self.acceptor.learn(new)
        self._persist()
        record = new[-1].record
        self._note("adopted", f"roster {record.epoch}")
        if record.dissolved:
            self._note("dissolved", record.dissolved)
            self._leave_crew(record.dissolved, tell=False, ended=True)
        elif not self.acceptor.is_voter:
            self._note("evicted")
            self._leave_crew("another one holds the stage", tell=False)
        else:
            self._begin_roster()

    def _begin_roster(self) -> None:
        record = self.roster
        assert record is not None
        view, before = View(record, self.acceptor.me, self._view), self._view
        self._view = view
        if before is not None and record.seats == before.record.seats and not set(record.witnesses) <= set(before.record.witnesses):
            self._seconded += 1
        if before is None or view.stage is not None:  # a witness that stays one is as free as before
            self._forming.joined()
        if view.stage is not None:
            self._take_back_offer()
        if self._trouble is None:  # until all are heard to be well
            self._trouble = self._now
        self._proposing.restart()
        self._gone = {peer: since for peer, since in self._gone.items() if peer in view.members}
        self._detector.watch(view.others, self._now)
        self._lease.begin(view.members, self._now, record.lease_seconds)
        self._own.progress.restart()
        self._running, self._announce = False, True
        self._heard_crew = self._now
        if self._standing is None:
            self._standing = self._now
        if view.stage is None:
            return
        status, assigned = self._own.under(view)
        self._set_status(status)
        if assigned is not None:
            self._tell(assigned)
            self._do(ev.OpenStreams(record))

    def _leave_crew(self, reason: str, *, tell: bool, ended: bool = False) -> None:
        """`tell` the others; `ended` where nobody may bring us back."""
        self._let_go(reason, tell=tell, ended=ended)
        self.acceptor.forget(self._rng.randbytes(messages.INCARNATION_BYTES))
        self._persist()
        self._forming.begin(self._now)
        self._offered = -1e9

    def _let_go(self, reason: str, *, tell: bool, ended: bool = False) -> None:
        view = self._view
        if view is not None:
            if tell:
                self._send_leave(reason)
            if ended or tell:
                self._ended.append(view.crew)
            if view.stage is not None and not self._stepped and self._draining is None:
                self._patience.never_ran(self._signers, self._now)
            if view.stage is not None or self._own.holds:
                self._tell(local.Released(reason))
                self._note("released", reason)
        self._do(ev.CloseStreams())
        self._proposing.restart()
        self._view = self._standing = self._trouble = None
        self._seconded = 0
        self._own.release()
        self._running = self._ever_ran = self._fenced = False
        self._came_by(())
        self._gone.clear()
        self._detector.watch((), self._now)

    # ---- offers and founding ------------------------------------------------------------------------------------------------

    def _offer_came(self, peer: str, offer: Offer) -> messages.Noted | Adopt:
        self._forming.heard(peer, offer, self._now)
        view = self._view
        if view is None or peer not in view.members:
            return messages.Noted()
        self._heard(peer)
        if Voter(peer, offer.incarnation) not in view.voters:
            view.forgot(peer, self._now)
        elif peer in view.seated:  # it has not heard that it is one of us, or has left
            return self.acceptor.newer_than(0)
        return messages.Noted()

    def _send_founding(self, record: Record) -> None:
        vote = self.acceptor.sign_founding(record)
        for voter in record.voters:
            if voter.peer != self.me:
                self._do(ev.Send(voter.peer, messages.Propose(record, 0)))
        self._voted(self.me, vote)

    def _sign_founding(self, peer: str, record: Record) -> messages.Vote | Refuse:
        if not self.is_free or not self._may_go(record) or self._draining is not None or not self._own.knows(record):
            return Refuse("record")  # not soon, either: the founder does without us
        others = (voter.peer for voter in record.voters if voter.peer != self.me)
        if self.acceptor.me not in record.voters or any(self._patience.waits(peer, self._now) for peer in others):
            return Refuse("record")
        return self.acceptor.sign_founding(record) if self._forming.may_sign(peer, self._now) else Refuse("busy")

    # ---- proposals ----------------------------------------------------------------------------------------------------------

    def _wish(self, view: View) -> Wish | None:
        """The record that ought to be next, if any."""
        patience = self.settings.witness_seconds * 2.0 ** min(self._seconded, DOUBLINGS)
        lone = self._running and self._now - self._ran_from >= patience
        lone = lone and view.lacks_witness(self._detector, self.settings.evict_seconds, self._now)
        if self._running and not view.strangers and not lone:
            return None
        trainer, offers = self._own.trainer, self._forming.offers(self._now)
        offers.pop(self.me, None)
        why = view.why_standing(self._detector, self._stood()) if self._stood() >= self.settings.wait_seconds else ""
        cost = None if trainer is None else trainer.offering.cost
        return view.wish(
            self._detector, self._gone, offers, cost, self.settings, self._now, parted=self._parted, for_witness=lone, dissolve=why
        )  # fmt: skip

    def _propose(self, wish: Wish) -> None:
        promise = self._proposing.begin(wish, self._now)
        proposal = self._proposing.proposal
        if promise is None or proposal is None:
            return
        self._persist()
        for peer in proposal.voters:
            if peer != self.me:
                self._do(ev.Send(peer, proposal.prepare))
        self._promised(self.me, promise)

    def _protect(self, message: messages.Prepare) -> Refuse | None:
        """Whoever we hear well is not to be evicted, unless the crew has stood still for long: maybe others do not hear it."""
        view = self._view
        if view is None or (message.crew, message.epoch) != (view.crew, view.record.epoch + 1):
            return None
        if self._stood() >= self.settings.stuck_seconds:
            return None
        well = (peer == self.me or view.hears(peer, self._detector, self.settings.gone_seconds, self._now) for peer in message.evicting)
        return Refuse("alive") if any(well) else None

    def _promised(self, peer: str, promise: messages.Promise) -> None:
        view = self._view
        if view is None or not self._proposing.promised(peer, promise):
            return
        wish = self._wish(view)
        chosen = self._proposing.choose(None if wish is None else wish.record)
        if chosen is None:
            return
        propose, vote = chosen
        self._persist()
        for other in view.others:
            self._do(ev.Send(other, propose))
        self._voted(self.me, vote)

    def _voted(self, peer: str, vote: messages.Vote) -> None:
        founding = vote.epoch == 1
        certificate = (self._forming if founding else self._proposing).voted(peer, vote, self._verify)
        if certificate is None:
            return
        record, view = certificate.record, self._view
        if view is not None and (not self.is_free if founding else record.epoch <= view.record.epoch):
            return
        self._note("founded" if founding else "claimed", f"roster {record.epoch} of {len(record.seats)} stages")
        told = {voter.peer for voter in (*record.voters, *voters_of(record))} - {self.me}
        before = () if founding else self.acceptor.chain[-1:]
        if founding:
            self._move()
            self._came_by(self._others_of(certificate))
        self._learn((certificate,))
        for other in sorted(told):
            self._do(ev.Send(other, Adopt((*before, certificate))))

    def _refused(self, peer: str, request: messages.Request, refusal: Refuse) -> None:
        view = self._view
        if isinstance(request, messages.Heartbeat):
            if view is not None and refusal.reason == "unknown" and (request.crew, request.roster_epoch) == (view.crew, view.record.epoch):
                self._heard(peer)
                if Voter(peer, refusal.incarnation) in view.voters:
                    self._do(ev.Send(peer, self.acceptor.newer_than(0)))
                else:
                    view.forgot(peer, self._now)
        elif isinstance(request, messages.Propose) and request.record.epoch == 1:
            self._forming.refused(peer, request.record, refusal.reason, self._now)
        elif isinstance(request, messages.Prepare | messages.Propose):
            self._proposing.refused(request.ballot, refusal, self._now)
            if refusal.reason == "epoch" and view is not None:
                self._do(ev.Send(peer, self.acceptor.newer_than(0)))

    # ---- what follows from all that -----------------------------------------------------------------------------------------

    def _review(self) -> None:
        view = self._view
        if view is None:
            return
        for peer in self._detector.newly_suspected(self._now):
            self._note("suspected", f"{peer}: silent")
        if view.stage is None:
            calm = view.is_calm(self._detector)
            self._trouble = None if calm else self._now if self._trouble is None else self._trouble
            self._end_alone(view)
            return
        self._check_lease()
        if self._running and self._own.progress.stalled(self._now):
            self._note("stalled")
            self._do(ev.RestartTrainer("work in hand, and nothing done"))
            self._trainer_left()
        settled = view.settle()
        if settled is not None:
            self._note("settled", f"step {settled.step}")
            self._tell(settled)
        self._run_or_pause(view)
        if self._end_alone(view):
            return
        wish = self._wish(view)
        place = None if wish is None else view.place(self._detector)
        if self._proposing.due(wish is not None, place, self._now) and wish is not None:
            self._propose(wish)

    def _check_lease(self) -> None:
        late = self._now >= self._lease.ends(self.me, self._now)
        if late and not self._fenced:
            self._fenced = True
            self._note("fenced")
            self._do(ev.CloseStreams())
            self._tell(local.Suspended("no majority of the crew is heard"))
            self._set_status(msgspec.structs.replace(self._own.status, broken=True))
        elif self._fenced and not late:
            self._fenced = False

    def _run_or_pause(self, view: View) -> None:
        well = not self._fenced and view.is_well(self._detector)
        if well and not self._running:
            self._running = view.ran = self._ever_ran = True
            self._recovery_seconds = self._stood() if view.record.epoch > 1 else None
            self._standing, self._ran_from = None, self._now
            if not self._worked and self._idle is None:
                self._idle = (self._now, self._own.status.progress)
            self._note("running", f"roster {view.record.epoch}")
            self._tell(local.Resumed(view.record.epoch))
        elif self._running and not well:
            self._running = False
            self._standing = self._now
            self._own.progress.restart()
            self._note("paused")
            self._tell(local.Suspended("a member is in doubt"))

    def _end_alone(self, view: View) -> bool:
        """Go where nobody can be waited for any longer. Returns whether we did."""
        if self._draining is not None and self._now - self._draining[1] >= LAST_WORD_SECONDS:
            self._leave_crew(self._draining[0], tell=True)
            return True
        why = ""
        if view.stage is None:
            why = "a witness of nothing" if self._now - self._heard_crew >= self.settings.wait_seconds else ""
        elif self._stood() >= self.settings.wait_seconds + LAST_WORD_SECONDS:
            why = view.why_standing(self._detector, self._stood())
        elif self._running and view.stage > 0 and self._idle is not None and self._now - self._idle[0] >= self.settings.idle_seconds:
            why = "the crew has nothing to do"
        if len(view.members - view.left - view.strangers) < messages.majority(len(view.members)):
            why = "most members have left, or have forgotten the crew"
        if not why:
            return False
        self._note("dissolved", why)
        self._leave_crew(why, tell=True)
        return True
