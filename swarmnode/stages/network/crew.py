"""Membership of one node in crews: `advance(state, event, now, dependencies) → (state,
actions)`. A pure function: no clock, no I/O, no torch.

    FREE ── propose or accept ──▶ FORMING ── every member sent a heartbeat ──▶ PREPARING
      ▲                                                    (stages load)           │ all active
      └── from every phase: a member left, was silent, lost a stream               ▼
          or missed a deadline ─────────────────────────────────────────────── RUNNING

A free node is in no crew. Free nodes send offers: memory, speed, and the layers and steps that they
hold. Each node plans a crew from these offers. The member with the newest step proposes its plan
first, the next member `turn_seconds` later. A member accepts on its authenticated connection and
proves it by heartbeats with the crew's id. The crew has formed when every member has sent one. A
lost member, a lost stream or an expired deadline ends the crew for all its members. They keep their
state in memory and are free again.

A crew that starts from the base has the fewest nodes that hold the model, the nearest first. A
crew that continues at step n of a lineage has the stages of the former one. A block is *usable* at
step n if its node trained it, and it is at step n or n − 1. A stage at n − 1 continues without that
update: it is renumbered, and skips the update for good. A stage without a usable block is *lost*:
its new holder restores it from another member's checkpoint of any age, or from the base.

    plan                                                                      proposed after
    the newest step without lost stages, if no candidate has a step above     no wait
    n + 1 of this lineage
    an older step without lost stages                                         12 s free
    the step with the fewest lost stages, if at least half of the stages      12 s free
    are held at some step
    the base, if no candidate has taken steps                                 3 s after it became
                                                                              possible
    the base, although steps were taken                                       600 s free

At most half of the stages may come from the base in a plan that continues, because such a mixture
is worse than the base. A crew ends after 13 s of a member's silence, 300 s of a member's work
without progress, or 7,200 s without a step. `MembershipSettings` has all these times.

A peer that is silent, makes no progress with pending work or sends garbage gets a strike. A struck
peer is excluded from plans for a while, unless no crew is possible without it. Each node counts
strikes from its own observation only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from msgspec.structs import replace

from swarmnode.stages.crew_messages import (
    HASH_BYTES,
    NONCE_BYTES,
    REASON_BYTES,
    AcceptAnswer,
    AliveAnswer,
    CrewAnswer,
    CrewEnd,
    CrewRecord,
    CrewRefusal,
    CrewRequest,
    CrewStart,
    Heartbeat,
    LeaveRequest,
    MemberStatus,
    NotedAnswer,
    Offer,
    ProposeRequest,
    RefuseAnswer,
    StageAssignment,
    StageFault,
    StageStatus,
    TrainerOffer,
    crew_id,
    member_peers,
)
from swarmnode.stages.network.crew_plan import (
    CrewPlan,
    newest_own_block,
    plan_crew,
    refusal_seconds,
)
from swarmnode.stages.network.crew_state import (
    LONG_AGO,
    Action,
    ClockTick,
    Crew,
    CrewDependencies,
    DrainStarted,
    Event,
    GarbageReceived,
    MemberState,
    Note,
    PeerConnected,
    PeerDisconnected,
    PeerState,
    Phase,
    RequestFinished,
    RequestReceived,
    SendAnswer,
    SendRequest,
    State,
    StreamLost,
    TrainerDisconnected,
    current_offers,
)
from swarmnode.stages.specs import stage_memory


def advance(
    state: State, event: Event, now: float, dependencies: CrewDependencies
) -> tuple[State, list[Action]]:
    """Return the state after `event`, and the actions, in order."""
    transition = _Transition(state, now, dependencies)
    transition.handle(event)
    return transition.state, transition.actions


GRACE_SECONDS: Final = 2.0
"""A member waits this much longer than the proposer for a crew to form, so that the proposer ends
the attempt."""
OTHER_BYTES_SECONDS: Final = 60.0
"""For this time after its last heartbeat, any bytes of a member count as a sign of life, because
queued tensors delay heartbeats."""
LAG_DECAY: Final = 0.7
"""Factor of the process's lag at each punctual tick."""
FIRST_RETRY_SECONDS: Final = 1.0
"""Wait after the first failed proposal. It doubles with each further one, up to 16 times this."""
MAX_STRIKE_SECONDS: Final = 3600.0
MAX_STRIKES: Final = 32
CLEARING_STEPS: Final = 10
"""A peer's strikes are cleared after this many steps committed together."""
MAX_FAILED_CREWS: Final = 5
"""A peer gets a strike when it has refused or ended this many crews in a row before their first
step. Otherwise a node that runs out of memory at each load of its stage would block its crew
without bound."""


class _Transition:
    """One call of `advance`: changes `state`, and collects `actions`."""

    def __init__(self, state: State, now: float, dependencies: CrewDependencies) -> None:
        self.state, self.now, self.dependencies, self.settings = (
            state,
            now,
            dependencies,
            dependencies.settings,
        )
        self.actions: list[Action] = []

    def handle(self, event: Event) -> None:
        if math.isinf(self.state.free_since):
            self._set(free_since=self.now)
        match event:
            case ClockTick():
                self._tick(event.heard)
            case RequestReceived():
                self.actions.append(SendAnswer(self._answer_request(event.peer, event.message)))
            case RequestFinished():
                self._handle_outcome(event)
            case TrainerOffer() if self.state.phase in (Phase.FREE, Phase.FORMING):
                self._set(trainer_offer=event)  # a later one was sent before the assignment
                self._send_offers()
                self._propose_if_due()
            case StageStatus():
                self._handle_own_status(event)
            case StageFault():
                self._handle_fault(event)
            case TrainerDisconnected():
                self._set(trainer_offer=None)
                self._end_crew("its trainer is gone")
                self._send_offers()
            case DrainStarted():
                self._set(draining=True)
                self._end_crew(event.reason)
                self._send_offers()
            case GarbageReceived() if self._is_member(event.peer):
                self._strike_and_end(event.peer, "sent garbage")
            case StreamLost() if self._is_member(event.peer, event.crew):
                self._end_crew("lost a stream to it", event.peer)
            case PeerDisconnected():
                if event.peer in self.state.peers:
                    self._set_peer(event.peer, connected=False, offer=None, seconds=None)
                if self._is_member(event.peer):
                    self._end_crew("lost its connection", event.peer)
            case PeerConnected() if self._make_room_for(event.peer):
                self._set_peer(event.peer, connected=True)
                if self._is_offering:
                    self._send(event.peer, self._make_offer())

    def _set(self, **changes: Any) -> None:  # noqa: ANN401
        self.state = replace(self.state, **changes)

    def _set_crew(self, **changes: Any) -> None:  # noqa: ANN401
        assert self.state.crew is not None
        self._set(crew=replace(self.state.crew, **changes))

    def _set_member(self, peer: str, member: MemberState) -> None:
        assert self.state.crew is not None
        self._set_crew(members={**self.state.crew.members, peer: member})

    def _set_peer(self, peer: str, **changes: Any) -> None:  # noqa: ANN401
        self._set(peers={**self.state.peers, peer: replace(self._peer(peer), **changes)})

    def _peer(self, peer: str) -> PeerState:
        return self.state.peers.get(peer, PeerState())

    def _is_member(self, peer: str, crew: bytes | None = None) -> bool:
        """Return True if `peer` is another member of this node's crew, and `crew` is that crew's id
        or None."""
        ours = self.state.crew
        return ours is not None and peer in ours.members and crew in (None, ours.id)

    def _make_room_for(self, peer: str) -> bool:
        """Return True if there is room for the state of `peer`. If `most_peers` are stored, forget
        a peer that is neither connected nor excluded."""
        peers = self.state.peers
        if peer in peers or len(peers) < self.settings.most_peers:
            return True
        idle = (p for p, one in peers.items() if not one.connected and not self._is_struck(p))
        forgotten = next(idle, None)
        self._set(peers={p: one for p, one in peers.items() if p != forgotten})
        return forgotten is not None

    def _send(self, peer: str, message: CrewRequest) -> None:
        self.actions.append(SendRequest(peer, message))

    def _note(self, what: str, detail: str = "") -> None:
        self.actions.append(Note(what, detail))

    # ---- offers of free nodes --------------------------------------------------------------------

    @property
    def _is_offering(self) -> bool:
        return (
            self.state.crew is None
            and self.state.trainer_offer is not None
            and not self.state.draining
        )

    def _make_offer(self) -> Offer:
        trainer_offer = self.state.trainer_offer
        if trainer_offer is None or not self._is_offering:
            return Offer(bytes(HASH_BYTES), 0.0, 0.0)
        return Offer(
            trainer_offer.model,
            trainer_offer.memory,
            trainer_offer.speed,
            trainer_offer.held_blocks,
        )

    def _send_offers(self) -> None:
        """Send this node's offer to all connected peers. If it has none any more, withdraw it
        once."""
        offers = self._is_offering
        if offers or self.state.offered_at != LONG_AGO:
            self._set(offered_at=self.now if offers else LONG_AGO)
            for peer, known in self.state.peers.items():
                if known.connected:
                    self._send(peer, self._make_offer())

    def _handle_offer(self, peer: str, offer: Offer) -> None:
        if not self._make_room_for(peer):
            return
        is_new = offer != self._peer(peer).offer
        self._set_peer(peer, offer=offer, offered_at=self.now)
        if is_new:
            self._propose_if_due()

    # ---- forming a crew --------------------------------------------------------------------------

    @property
    def _free_seconds(self) -> float:
        """Seconds that this node has waited for a crew."""
        return self.now - self.state.free_since

    def _propose_if_due(self) -> None:
        """Propose a crew when one is possible and it is this node's turn."""
        state, settings = self.state, self.settings
        if not self._is_offering or self.now < state.retry_at:
            return
        offers = self._usable_offers()
        plan = self._plan(offers, self._free_seconds)
        if plan is None or state.me not in member_peers(plan.record):
            self._set(plan_since=math.inf)
            return
        since = min(state.plan_since, self.now)
        self._set(plan_since=since)
        if plan.record.step == 0 and self.now - since < settings.gather_seconds:
            return
        turns = sorted(
            member_peers(plan.record), key=lambda peer: _proposal_order(peer, offers[peer])
        )
        if self.now - since >= turns.index(state.me) * settings.turn_seconds:
            self._propose(plan)

    def _offers(self) -> dict[str, Offer]:
        """Return this node's offer, and those of the peers that the operator trusts."""
        others = current_offers(self.state, self.now, self.settings)
        trusted = {peer: offer for peer, offer in others.items() if self.dependencies.trusts(peer)}
        return {self.state.me: self._make_offer(), **trusted}

    def _usable_offers(self) -> dict[str, Offer]:
        """Return the offers to plan with.

        Excluded peers are admitted only while no crew is possible without them. The peer whose
        exclusion ends first is admitted first.
        """
        offers = self._offers()
        struck = [peer for peer in offers if self._is_struck(peer)]
        struck.sort(key=lambda peer: self._peer(peer).struck_until)
        while struck and not self._is_possible_without(struck, offers):
            del struck[0]
        return {peer: offer for peer, offer in offers.items() if peer not in struck}

    def _is_possible_without(self, peers: Collection[str], offers: Mapping[str, Offer]) -> bool:
        """Return True if a crew without `peers` is possible now or after a wait.

        A crew that starts from the base counts only if no node has taken steps, since it would
        discard them.
        """
        plan = self._plan({p: offer for p, offer in offers.items() if p not in peers}, math.inf)
        stepped = any(newest_own_block(offer.held_blocks) for offer in offers.values())
        return plan is not None and (plan.record.step > 0 or not stepped)

    def _plan(self, offers: Mapping[str, Offer], waited: float) -> CrewPlan | None:
        assert self.state.trainer_offer is not None
        cost = self.state.trainer_offer.cost
        near = {p: known.seconds for p, known in self.state.peers.items() if known.seconds}
        return plan_crew(self.state.me, offers, cost, self.settings, waited, near)

    def _propose(self, plan: CrewPlan) -> None:
        rng, record = self.dependencies.rng, plan.record
        lineage = record.lineage if record.step else rng.randbytes(HASH_BYTES)
        record = replace(record, lineage=lineage, nonce=rng.randbytes(NONCE_BYTES))
        lost = ", ".join(map(str, plan.lost))
        self._note(
            "proposed",
            f"step {record.step}, {len(record.members)} stages"
            + (f", no node can continue {lost}" if lost else ""),
        )
        self._join(self.state.me, record)
        for peer in member_peers(record):
            if peer != self.state.me:
                self._send(peer, ProposeRequest(record))
        self._finish_forming()

    def _accept(self, proposer: str, record: CrewRecord) -> CrewAnswer:
        crew = crew_id(record)
        if self.state.crew is not None and self.state.crew.id == crew:
            return AcceptAnswer(crew)
        why = self._refusal_reason(proposer, record)
        if why is not None:
            self._note("declined", f"the proposal of {proposer}: {why}")
            return RefuseAnswer(why, crew)
        self._join(proposer, record)
        self._send_heartbeats()
        return AcceptAnswer(crew)

    def _refusal_reason(self, proposer: str, record: CrewRecord) -> CrewRefusal | None:
        """Return the reason for refusing `record`; None if it is accepted."""
        state, trainer_offer, peers = self.state, self.state.trainer_offer, member_peers(record)
        if state.me not in peers or proposer not in peers or proposer == state.me:
            return "record"
        if trainer_offer is None or not self._is_offering:
            return "busy"
        sizes = [member.layers for member in record.members]
        if record.model != trainer_offer.model or sum(sizes) != len(trainer_offer.cost.layers):
            return "model"
        if stage_memory(trainer_offer.cost, sizes, peers.index(state.me)) > trainer_offer.memory:
            return "room"
        if not all(peer == state.me or self.dependencies.trusts(peer) for peer in peers):
            return "trust"
        if self._free_seconds < refusal_seconds(trainer_offer.held_blocks, record, self.settings):
            return "newer"
        struck = [peer for peer in peers if self._is_struck(peer)]
        if struck and self._is_possible_without(struck, self._offers()):
            return "struck"
        return None

    def _join(self, proposer: str, record: CrewRecord) -> None:
        """Become a member of the crew: heartbeats carry its id from now on."""
        peers = member_peers(record)
        member = MemberState(heard_at=self.now, progressed_at=self.now)
        crew = Crew(
            record,
            crew_id(record),
            peers.index(self.state.me),
            proposer,
            since=self.now,
            waited=self._free_seconds,
            members={peer: member for peer in peers if peer != self.state.me},
            stepped_at=self.now,
        )
        self._set(crew=crew, plan_since=math.inf)

    def _finish_forming(self) -> None:
        """If every member has sent a heartbeat, the crew has formed: assign the stage to the
        trainer."""
        crew = self.state.crew
        assert crew is not None
        if any(member.joined_at is None for member in crew.members.values()):
            return
        self._set_crew(phase=Phase.PREPARING)
        self._set(failed_proposals=0)
        self._send_offers()  # withdraws the offer
        record = crew.record
        self._note("formed", f"step {record.step}, stage {crew.stage} of {len(record.members)}")
        layers, peers = tuple(member.layers for member in record.members), member_peers(record)
        self.actions.append(
            StageAssignment(crew.id, record.lineage, crew.stage, layers, peers, record.step, "")
        )

    # ---- messages of peers -----------------------------------------------------------------------

    def _answer_request(self, peer: str, message: CrewRequest) -> CrewAnswer:
        crew = self.state.crew
        match message:
            case Heartbeat():
                if crew is None or message.crew != crew.id or peer not in crew.members:
                    return RefuseAnswer("crew", message.crew)
                self._handle_heartbeat(peer, message.status)
                return AliveAnswer(message.crew, (self.state.crew or crew).own)
            case ProposeRequest():
                return self._accept(peer, message.record)
            case LeaveRequest() if self._is_member(peer, message.crew):
                self._end_crew(f"left: {message.reason}", peer)
            case Offer():
                self._handle_offer(peer, message)
        return NotedAnswer()

    def _handle_outcome(self, event: RequestFinished) -> None:
        peer, answer, crew = event.peer, event.answer, self.state.crew
        if answer is not None and peer in self.state.peers:
            before = self._peer(peer).seconds
            self._set_peer(peer, seconds=min(event.seconds / 2, before or math.inf))
        if crew is None or peer not in crew.members:
            return
        if isinstance(answer, AliveAnswer) and answer.crew == crew.id:
            self._handle_heartbeat(peer, answer.status)
        elif isinstance(answer, RefuseAnswer) and answer.crew == crew.id:
            joined, sent_at = crew.members[peer].joined_at, self.now - event.seconds
            if isinstance(event.request, ProposeRequest):
                if answer.reason == "busy":
                    self._set_peer(peer, offer=None)  # until its next offer
                self._end_crew(f"refused the crew: {answer.reason}", peer)
            elif (
                joined is not None and sent_at > joined
            ):  # a heartbeat sent before the member joined may be refused
                self._end_crew("is not in this crew any more", peer)

    def _handle_heartbeat(self, peer: str, status: MemberStatus) -> None:
        """Handle a heartbeat of a member, or its answer to one."""
        crew = self.state.crew
        assert crew is not None
        member = crew.members[peer]
        if member.status.phase == "active" and status.phase == "loading":
            status = member.status  # this message is older, and was overtaken
        moved = (status.phase, status.progress) != (member.status.phase, member.status.progress)
        member = MemberState(
            heard_at=self.now,
            progressed_at=member.progressed_at,
            status=status,
            joined_at=self.now if member.joined_at is None else member.joined_at,
        )
        if moved or not member.has_work:
            member = replace(member, progressed_at=self.now)
        self._set_member(peer, member)
        if status.phase == "failed":
            self._end_crew("its stage failed", peer)
        elif not crew.formed:
            self._finish_forming()
        else:
            self._run_if_ready()

    def _send_heartbeats(self) -> None:
        crew = self.state.crew
        if crew is not None:
            self._set(heartbeat_at=self.now)
            for peer in crew.members:
                self._send(peer, Heartbeat(crew.id, crew.own))

    # ---- messages of the trainer -----------------------------------------------------------------

    def _handle_own_status(self, status: StageStatus) -> None:
        crew = self.state.crew
        if crew is None:  # the trainer was not connected when its crew ended
            self.actions.append(CrewEnd("that crew is over"))
        if crew is None or (status.crew, status.stage) != (crew.id, crew.stage):
            return
        before, own = (
            crew.own,
            MemberStatus(status.phase, status.step, status.progress, status.load),
        )
        self._set_crew(own=own)
        if own.phase == "active" and own.step > max(before.step, crew.record.step):
            self._set_crew(stepped_at=self.now, stepped=True)
            for peer in crew.members:
                self._count_shared_step(peer)
        if own.phase == "failed":
            self._end_crew(status.reason or "its stage failed")
            return
        self._run_if_ready()
        if own.phase != before.phase:
            self._send_heartbeats()

    def _handle_fault(self, fault: StageFault) -> None:
        crew = self.state.crew
        if crew is None or fault.crew != crew.id:
            return
        others = {n: p for n, p in enumerate(member_peers(crew.record)) if n != crew.stage}
        if fault.stage is None and crew.stage == 0:
            self._handle_missed_step(crew, fault.reason)
        elif fault.stage in others:
            self._strike_and_end(others[fault.stage], fault.reason)
        else:
            self._end_crew(fault.reason)

    # ---- time ------------------------------------------------------------------------------------

    def _tick(self, heard: Mapping[str, float]) -> None:
        state, settings = self.state, self.settings
        late = (self.now - state.last_tick) / settings.tick_seconds if state.last_tick else 1.0
        self._set(lag=max(1.0, late, state.lag * LAG_DECAY), last_tick=self.now)
        if state.crew is not None and state.crew.formed:
            self._watch_members(state.crew, heard)
        elif state.crew is not None:
            self._watch_forming(state.crew)
        slack = 0.25 * settings.tick_seconds
        if self.now - self.state.heartbeat_at >= settings.heartbeat_seconds - slack:
            self._send_heartbeats()
        if self.now - self.state.offered_at >= settings.offer_seconds - slack:
            self._send_offers()
        self._propose_if_due()

    def _watch_forming(self, crew: Crew) -> None:
        grace = 0.0 if crew.proposer == self.state.me else GRACE_SECONDS
        if self.now - crew.since < (self.settings.join_seconds + grace) * self.state.lag:
            return
        missing = [p for p, member in crew.members.items() if member.joined_at is None]
        for peer in missing:
            self._strike(peer, "did not join the crew")
        self._end_crew("did not join the crew", missing[0])

    def _watch_members(self, crew: Crew, heard: Mapping[str, float]) -> None:
        """End the crew if a deadline has expired."""
        settings = self.settings
        for peer, member in crew.members.items():
            last = min(heard.get(peer, -math.inf), member.heard_at + OTHER_BYTES_SECONDS)
            silent = (self.now - max(member.heard_at, last)) / self.state.lag
            stalled = self.now - member.progressed_at
            if silent >= settings.gone_seconds:
                self._strike_and_end(peer, f"was silent for {silent:.0f} s")
                return
            if member.has_work and stalled >= settings.progress_seconds:
                self._strike_and_end(peer, f"made no progress for {stalled:.0f} s")
                return
        if self.now - crew.stepped_at >= settings.step_seconds:
            self._handle_missed_step(crew, "has taken no step")

    def _run_if_ready(self) -> None:
        """Start the crew's work when all stages are active."""
        crew = self.state.crew
        if crew is None or crew.phase != Phase.PREPARING:
            return
        members = crew.members.values()
        if {crew.own.phase, *(member.status.phase for member in members)} != {"active"}:
            return
        stopped_at = self.state.stopped_at
        if stopped_at is not None:
            self._set(recovery_seconds=self.now - stopped_at, stopped_at=None)
        self._set_crew(phase=Phase.RUNNING, stepped_at=self.now)
        self._note("running", "" if stopped_at is None else f"{self.now - stopped_at:.3f}")
        self.actions.append(CrewStart(crew.id))

    # ---- the end of a crew, and strikes ----------------------------------------------------------

    def _end_crew(self, why: str, peer: str = "") -> None:
        """Leave the crew, if there is one.

        Args:
            peer: The member that caused the end; empty if it was this node.
        """
        crew = self.state.crew
        if crew is None:
            return
        cause = f"{peer} {why}" if peer else why
        for other in crew.members:
            self._send(other, LeaveRequest(crew.id, _printable_ascii(cause)))
        if peer in crew.members and not crew.stepped:
            failures = self._peer(peer).failures + 1
            self._set_peer(peer, failures=failures)
            if failures >= MAX_FAILED_CREWS:
                self._strike(peer, f"{MAX_FAILED_CREWS} crews without a step: {why}")
        if crew.phase == Phase.RUNNING:
            self._set(stopped_at=self.now)
        waited = 0.0 if crew.stepped else crew.waited
        self._set(crew=None, free_since=self.now - waited, plan_since=math.inf)
        if crew.formed:
            self._set(trainer_offer=None)  # the trainer offers again when it has stopped
            self._note("broken", cause)
            self.actions.append(CrewEnd(cause))
            return
        if crew.proposer == self.state.me:
            pause = FIRST_RETRY_SECONDS * 2.0 ** min(self.state.failed_proposals, 4)
            retry_at = self.now + pause * self.dependencies.rng.uniform(0.5, 1.5)
            self._set(retry_at=retry_at, failed_proposals=self.state.failed_proposals + 1)
        self._note("unformed", cause)
        self._send_offers()

    def _strike_and_end(self, peer: str, reason: str) -> None:
        """Strike a member, and end the crew."""
        self._strike(peer, reason)
        self._end_crew(reason, peer)

    def _handle_missed_step(self, crew: Crew, reason: str) -> None:
        """Strike the members that may have missed the deadline of a step, and end the crew.

        While stages are restored, these are the members that restore one. Later the head strikes
        the members that have pending work, or all members if none has; other members strike the
        head.
        """
        head = member_peers(crew.record)[0]
        peers = [peer for peer, member in crew.members.items() if member.has_work]
        if crew.phase == Phase.RUNNING:
            peers = [head] if crew.stage > 0 else peers or list(crew.members)
        for peer in peers:
            self._strike(peer, reason)
        self._end_crew(reason, peers[0] if peers else "")

    def _strike(self, peer: str, reason: str) -> None:
        strikes = min(self._peer(peer).strikes + 1, MAX_STRIKES)
        seconds = min(MAX_STRIKE_SECONDS, self.settings.strike_seconds * 2.0**strikes)
        self._set_peer(peer, strikes=strikes, struck_until=self.now + seconds, steps=0, failures=0)
        self._note("struck", f"{peer}: {reason}; excluded from plans for {seconds:.0f} s")

    def _count_shared_step(self, peer: str) -> None:
        """Count a step committed together, and clear the peer's strikes after CLEARING_STEPS."""
        known = self._peer(peer)
        if known.strikes or known.failures:
            steps = known.steps + 1
            strikes = known.strikes if steps < CLEARING_STEPS else 0
            self._set_peer(peer, steps=steps, strikes=strikes, failures=0)

    def _is_struck(self, peer: str) -> bool:
        known = self._peer(peer)
        return known.strikes > 0 and self.now < known.struck_until


def _proposal_order(peer: str, offer: Offer) -> tuple[int, str]:
    """Return the sort key by which members propose: the newest step first, then the peer id."""
    own = newest_own_block(offer.held_blocks)
    return (-own.step if own is not None else 0, peer)


def _printable_ascii(text: str) -> str:
    shown = "".join(character if " " <= character <= "~" else "?" for character in text)
    return shown[:REASON_BYTES]
