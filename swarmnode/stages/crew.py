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

import enum
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import msgspec
from msgspec.structs import replace

from swarmnode.stages import wire
from swarmnode.stages.wire import (
    HASH_BYTES,
    MAX_MEMBERS,
    NONCE_BYTES,
    CrewMember,
    CrewRecord,
    HeldBlock,
    MemberStatus,
    ModelCost,
    Offer,
    PartCost,
    crew_id,
    member_peers,
    stage_memory,
)


def advance(
    state: State, event: Event, now: float, dependencies: CrewDependencies
) -> tuple[State, list[Action]]:
    """Return the state after `event`, and the actions, in order."""
    transition = _Transition(state, now, dependencies)
    transition.handle(event)
    return transition.state, transition.actions


# ---- settings, events and actions ----------------------------------------------------------------
#
# Each RequestReceived gets exactly one SendAnswer. Actions run in order.


class MembershipSettings(msgspec.Struct, frozen=True):
    """Constants of crew membership, and the operator's setting `stages`."""

    base_wait_seconds: float = 600.0
    """A node that has taken steps starts from the base after this time without a crew."""
    stages: int = 0
    """Number of stages of a crew that starts from the base; 0 for the fewest that hold the
    model."""
    tick_seconds: float = 0.5
    """Interval between ClockTick events."""
    heartbeat_seconds: float = 1.0
    """Interval between heartbeats to a member."""
    offer_seconds: float = 10.0
    """Interval between equal offers to a peer. An offer expires after three times this."""
    gather_seconds: float = 3.0
    """A crew that starts from the base is proposed this time after it became possible, because
    more nodes may be starting."""
    turn_seconds: float = 3.0
    """The member of rank r proposes after r times this."""
    discard_wait_seconds: float = 12.0
    """A crew that discards steps is proposed after this time, because the node that has those steps
    may be restarting."""
    join_seconds: float = 6.0
    """Deadline for the first heartbeat of every member of a crew that forms."""
    gone_seconds: float = 13.0
    """The crew ends when a member is silent for this time."""
    progress_seconds: float = 300.0
    """The crew ends when a member that restores its stage or has pending work makes no progress for
    this time."""
    step_seconds: float = 7200.0
    """The crew ends when it has taken no step for this time, restoration included."""
    strike_seconds: float = 10.0
    """Plans exclude a peer with n strikes for this time × 2^n, at most an hour."""
    most_peers: int = 64
    """Most peers whose state is stored."""


class ClockTick(msgspec.Struct, frozen=True):
    """Event that occurs every `tick_seconds`. Its lateness measures the lag of this process."""

    heard: Mapping[str, float] = {}
    """Member → time when bytes of any kind last came from it."""


class RequestReceived(msgspec.Struct, frozen=True):
    """Event: a request of an authenticated peer arrived. `decode_request` has checked it."""

    peer: str
    message: wire.CrewRequest


class RequestFinished(msgspec.Struct, frozen=True):
    """Event: a SendRequest has an outcome."""

    peer: str
    request: wire.CrewRequest
    answer: wire.CrewAnswer | None
    """None after a timeout, a refused dial or an invalid answer."""
    seconds: float = 0.0
    """Time from the request to its outcome."""


class GarbageReceived(msgspec.Struct, frozen=True):
    """Event: `peer` sent bytes that are not a crew message."""

    peer: str


class StreamLost(msgspec.Struct, frozen=True):
    """Event: a stage stream to `peer` in this crew broke, or the peer reset it."""

    peer: str
    crew: bytes


class PeerDisconnected(msgspec.Struct, frozen=True):
    """Event: the last connection to `peer` is down."""

    peer: str


class PeerConnected(msgspec.Struct, frozen=True):
    """Event: `peer` is connected. At the start it occurs for each connected peer."""

    peer: str


class TrainerDisconnected(msgspec.Struct, frozen=True):
    """Event: the trainer's connection ended."""


class DrainStarted(msgspec.Struct, frozen=True):
    """Event: this node stops in an orderly way. It leaves its crew and offers nothing more."""

    reason: str


TrainerEvent = wire.FromTrainer | TrainerDisconnected
PeerEvent = (
    RequestReceived
    | RequestFinished
    | GarbageReceived
    | StreamLost
    | PeerDisconnected
    | PeerConnected
)
Event = ClockTick | PeerEvent | TrainerEvent | DrainStarted


class SendAnswer(msgspec.Struct, frozen=True):
    """Action: send the answer to the RequestReceived that was just handled."""

    message: wire.CrewAnswer


class SendRequest(msgspec.Struct, frozen=True):
    """Action: send this request. Its outcome is a RequestFinished event. Requests do not wait for
    each other."""

    peer: str
    message: wire.CrewRequest


class Note(msgspec.Struct, frozen=True):
    """Action: log and count an event of the crew. `what` is one of NOTES."""

    what: str
    detail: str = ""


NOTES = (
    "proposed",
    "formed",
    "running",
    "broken",
    "declined",
    "unformed",
    "struck",
)
"""`broken`: the end of a crew. `declined`: this node refused a proposal. `unformed`: an attempt of
which this node was a member formed no crew. `struck`: a peer got a strike."""

Action = SendAnswer | SendRequest | wire.ToTrainer | Note
"""Stage streams belong to the crew of the last StageAssignment, and end with CrewEnd. The service
fills in the assignment's `socket`."""


# ---- state ---------------------------------------------------------------------------------------

LONG_AGO: Final = -1e18


class Phase(enum.Enum):
    """Phase of a node's membership; see the diagram above. In PREPARING, stages are restored: a
    heartbeat names them `loading`, and state messages name them `restoring`."""

    FREE = "none"
    FORMING = "forming"
    PREPARING = "preparing"
    RUNNING = "running"


@dataclass(frozen=True)
class CrewDependencies:
    """Settings and functions that decisions depend on, beside state and time."""

    settings: MembershipSettings
    rng: random.Random
    trusts: Callable[[str], bool] = lambda peer: True
    """Returns True if the operator allows this peer in a crew."""


class PeerState(msgspec.Struct, frozen=True):
    """State of another node, in or outside this node's crew."""

    connected: bool = False
    offer: Offer | None = None
    """Its last offer."""
    offered_at: float = LONG_AGO
    """Time of the offer's arrival."""
    seconds: float | None = None
    """One-way time of a message: half of the fastest round trip on this connection."""
    strikes: int = 0
    struck_until: float = LONG_AGO
    """Plans exclude the peer until this time."""
    steps: int = 0
    """Steps committed together since the last strike."""
    failures: int = 0
    """Number of crews that the peer declined, or ended before their first step, since the last step
    together."""


class MemberState(msgspec.Struct, frozen=True):
    """State of another member of this node's crew."""

    heard_at: float
    """Time of the last heartbeat, or answer to a heartbeat."""
    progressed_at: float
    """Time of the last change of phase or progress, or of the last status without pending work."""
    status: MemberStatus = MemberStatus()
    joined_at: float | None = None
    """Time of the first heartbeat with this crew's id."""

    @property
    def has_work(self) -> bool:
        """True if its stage is being restored or has pending work."""
        return self.status.phase == "loading" or self.status.load > 0


class Crew(msgspec.Struct, frozen=True):
    """The crew of this node, formed or forming."""

    record: CrewRecord
    id: bytes
    stage: int
    """The stage that this node holds."""
    proposer: str
    """Peer id of the member that proposed the crew."""
    since: float
    """Time at which this node became a member."""
    waited: float
    """Seconds that this node had been free before."""
    members: Mapping[str, MemberState]
    """The other members."""
    own: MemberStatus = MemberStatus()
    """Status of this node's own stage."""
    phase: Phase = Phase.FORMING
    stepped_at: float = 0.0
    """Time of this node's last step, or of its start to run; `since` before."""
    stepped: bool = False
    """True if the crew has taken a step."""

    @property
    def formed(self) -> bool:
        """True if every member has sent a heartbeat."""
        return self.phase != Phase.FORMING


class State(msgspec.Struct, frozen=True):
    """Membership state of one node."""

    me: str
    """Peer id of this node."""
    trainer_offer: wire.TrainerOffer | None = None
    """Last offer of this node's trainer; None while the trainer cannot work in a crew."""
    draining: bool = False
    """True if this node stops and takes part in no further crew."""
    peers: Mapping[str, PeerState] = {}
    crew: Crew | None = None
    free_since: float = math.inf
    """`now - free_since` is the time without a crew since the last committed step. The time in a
    crew that took no step does not count."""
    plan_since: float = math.inf
    """Time since which this node has had a plan without interruption; infinite without a plan."""
    retry_at: float = 0.0
    """This node proposes nothing before this time."""
    failed_proposals: int = 0
    """Number of own proposals in a row that failed."""
    offered_at: float = LONG_AGO
    """Time of this node's last sent offer; LONG_AGO after it was withdrawn."""
    heartbeat_at: float = LONG_AGO
    """Time of this node's last heartbeats."""
    last_tick: float | None = None
    lag: float = 1.0
    """Measured interval between ticks ÷ planned interval, at least 1. Multiplies
    `join_seconds` and `gone_seconds`; the longer deadlines do not need it."""
    stopped_at: float | None = None
    """Time at which the last running crew ended; None while one runs."""
    recovery_seconds: float | None = None
    """Seconds from the last end of a running crew to a crew that runs."""

    @property
    def phase(self) -> Phase:
        """Phase of the crew; FREE without a crew."""
        return Phase.FREE if self.crew is None else self.crew.phase


# ---- transitions ---------------------------------------------------------------------------------

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
            case wire.TrainerOffer() if self.state.phase in (Phase.FREE, Phase.FORMING):
                self._set(trainer_offer=event)  # a later one was sent before the assignment
                self._send_offers()
                self._propose_if_due()
            case wire.StageStatus():
                self._handle_own_status(event)
            case wire.StageFault():
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

    def _send(self, peer: str, message: wire.CrewRequest) -> None:
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
        capacity = trainer_offer.capacity
        return Offer(
            trainer_offer.model, capacity.memory, capacity.speed, trainer_offer.held_blocks
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
                self._send(peer, wire.ProposeRequest(record))
        self._finish_forming()

    def _accept(self, proposer: str, record: CrewRecord) -> wire.CrewAnswer:
        crew = crew_id(record)
        if self.state.crew is not None and self.state.crew.id == crew:
            return wire.AcceptAnswer(crew)
        why = self._refusal_reason(proposer, record)
        if why is not None:
            self._note("declined", f"the proposal of {proposer}: {why}")
            return wire.RefuseAnswer(why, crew)
        self._join(proposer, record)
        self._send_heartbeats()
        return wire.AcceptAnswer(crew)

    def _refusal_reason(self, proposer: str, record: CrewRecord) -> wire.CrewRefusal | None:
        """Return the reason for refusing `record`; None if it is accepted."""
        state, trainer_offer, peers = self.state, self.state.trainer_offer, member_peers(record)
        if state.me not in peers or proposer not in peers or proposer == state.me:
            return "record"
        if trainer_offer is None or not self._is_offering:
            return "busy"
        sizes = [member.layers for member in record.members]
        if record.model != trainer_offer.model or sum(sizes) != len(trainer_offer.cost.layers):
            return "model"
        if (
            stage_memory(trainer_offer.cost, sizes, peers.index(state.me))
            > trainer_offer.capacity.memory
        ):
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
            wire.StageAssignment(
                crew.id, record.lineage, crew.stage, layers, peers, record.step, ""
            )
        )

    # ---- messages of peers -----------------------------------------------------------------------

    def _answer_request(self, peer: str, message: wire.CrewRequest) -> wire.CrewAnswer:
        crew = self.state.crew
        match message:
            case wire.Heartbeat():
                if crew is None or message.crew != crew.id or peer not in crew.members:
                    return wire.RefuseAnswer("crew", message.crew)
                self._handle_heartbeat(peer, message.status)
                return wire.AliveAnswer(message.crew, (self.state.crew or crew).own)
            case wire.ProposeRequest():
                return self._accept(peer, message.record)
            case wire.LeaveRequest() if self._is_member(peer, message.crew):
                self._end_crew(f"left: {message.reason}", peer)
            case Offer():
                self._handle_offer(peer, message)
        return wire.NotedAnswer()

    def _handle_outcome(self, event: RequestFinished) -> None:
        peer, answer, crew = event.peer, event.answer, self.state.crew
        if answer is not None and peer in self.state.peers:
            before = self._peer(peer).seconds
            self._set_peer(peer, seconds=min(event.seconds / 2, before or math.inf))
        if crew is None or peer not in crew.members:
            return
        if isinstance(answer, wire.AliveAnswer) and answer.crew == crew.id:
            self._handle_heartbeat(peer, answer.status)
        elif isinstance(answer, wire.RefuseAnswer) and answer.crew == crew.id:
            joined, sent_at = crew.members[peer].joined_at, self.now - event.seconds
            if isinstance(event.request, wire.ProposeRequest):
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
                self._send(peer, wire.Heartbeat(crew.id, crew.own))

    # ---- messages of the trainer -----------------------------------------------------------------

    def _handle_own_status(self, status: wire.StageStatus) -> None:
        crew = self.state.crew
        if crew is None:  # the trainer was not connected when its crew ended
            self.actions.append(wire.CrewEnd("that crew is over"))
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

    def _handle_fault(self, fault: wire.StageFault) -> None:
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
        self.actions.append(wire.CrewStart(crew.id))

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
            self._send(other, wire.LeaveRequest(crew.id, _printable_ascii(cause)))
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
            self.actions.append(wire.CrewEnd(cause))
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
    return shown[: wire.REASON_BYTES]


# ---- the plan of a crew from offers --------------------------------------------------------------

MAX_PLANNED_STEPS: Final = 16
"""A node plans with the steps that most peers hold, this many of all lineages, and with the steps
that it holds itself."""
MIN_DISTANCE_SECONDS: Final = 0.001
"""A distance below this counts as 0."""


@dataclass(frozen=True)
class CrewPlan:
    """Crew that a node may propose."""

    record: CrewRecord
    """Record with a zero nonce, and with a zero lineage if training starts from the base."""
    lost: tuple[int, ...] = ()
    """Stages of which no node has a usable block."""


def plan_crew(
    me: str,
    offers: Mapping[str, Offer],
    cost: ModelCost,
    settings: MembershipSettings,
    waited: float,
    distances: Mapping[str, float] = MappingProxyType({}),
) -> CrewPlan | None:
    """Return the crew to propose now; None if no crew is possible yet.

    Args:
        me: Peer id of this node.
        offers: Offers by peer, including this node's.
        waited: Seconds that this node has been free.
        distances: One-way seconds to a peer, measured by this node.
    """
    model = offers[me].model
    candidates = {
        peer: offer
        for peer, offer in sorted(offers.items())
        if offer.model == model and offer.memory > 0 and offer.speed > 0
    }
    if me not in candidates:
        return None
    own = newest_own_block(candidates[me].held_blocks)
    held_blocks = [
        (peer, held_block)
        for peer, offer in candidates.items()
        for held_block in offer.held_blocks
        if held_block.step
    ]
    points = {
        (peer, (held_block.lineage, held_block.step))
        for peer, held_block in held_blocks
        if is_own_block(held_block)
    }
    peers_at = Counter(point for _, point in points)
    common = sorted(peers_at, key=lambda point: (-peers_at[point], -point[1], point))[
        :MAX_PLANNED_STEPS
    ]
    ours = {point for peer, point in points if peer == me}
    plans = [
        plan
        for lineage, step in sorted(ours.union(common))
        if (plan := _plan_continuation(me, candidates, cost, lineage, step, held_blocks, distances))
    ]

    def required_wait(plan: CrewPlan) -> float:
        record = plan.record
        ahead = any(
            lineage == record.lineage and step > record.step + 1 for lineage, step in peers_at
        )
        seconds = settings.discard_wait_seconds if plan.lost or ahead else 0.0
        return max(seconds, refusal_seconds(candidates[me].held_blocks, record, settings))

    def rank(plan: CrewPlan) -> tuple[bool, int, int, bytes]:
        is_ours = own is not None and own.lineage == plan.record.lineage
        return is_ours, -len(plan.lost), plan.record.step, plan.record.lineage

    best = max((plan for plan in plans if waited >= required_wait(plan)), key=rank, default=None)
    if best is not None and (
        me in member_peers(best.record) or waited < settings.base_wait_seconds
    ):
        return best
    if waited < settings.base_wait_seconds:
        if own is not None or plans:
            return None  # a crew that keeps trained steps may become possible
        candidates = {
            peer: offer
            for peer, offer in candidates.items()
            if newest_own_block(offer.held_blocks) is None
        }
    return _plan_from_base(me, candidates, cost, settings.stages, distances)


def is_own_block(held_block: HeldBlock) -> bool:
    """Return True if the node that offers this block has trained it."""
    return held_block.where != "neighbour" and held_block.step > 0


def is_usable_block(held_block: HeldBlock, step: int) -> bool:
    """Return True if a crew at `step` can continue with this block: its node trained it, and it is
    at `step` or one step behind."""
    return held_block.where != "neighbour" and step - 1 <= held_block.step <= step


def newest_own_block(held_blocks: Collection[HeldBlock]) -> HeldBlock | None:
    """Return the newest block that the node has trained; None for an untrained node."""
    return max(
        filter(is_own_block, held_blocks), key=lambda held_block: held_block.step, default=None
    )


def refusal_seconds(
    held_blocks: Collection[HeldBlock], record: CrewRecord, settings: MembershipSettings
) -> float:
    """Return for how many seconds without a crew a node refuses `record`, because it would discard
    steps of its `held_blocks`."""
    own = newest_own_block(held_blocks)
    if own is None:
        return 0.0
    if record.lineage == own.lineage and record.step > 0:
        return 0.0 if abs(record.step - own.step) <= 1 else settings.discard_wait_seconds
    return settings.discard_wait_seconds if record.step > own.step else settings.base_wait_seconds


def _plan_continuation(
    me: str,
    candidates: Mapping[str, Offer],
    cost: ModelCost,
    lineage: bytes,
    step: int,
    all_blocks: Sequence[tuple[str, HeldBlock]],
    distances: Mapping[str, float],
) -> CrewPlan | None:
    """Return a crew that continues `lineage` at `step`; None if it is not possible.

    It has the stages of the former crew; if peers disagree, those with the most usable blocks. A
    node with a usable block keeps its stage. A lost stage goes to another node with room, first to
    one that holds it at an older step.

    Args:
        all_blocks: (peer, held block) of all candidates.
    """
    held_blocks = [
        (peer, held)
        for peer, held in all_blocks
        if held.lineage == lineage and sum(held.layers) == len(cost.layers)
    ]
    claims = {(peer, held.layers) for peer, held in held_blocks if is_usable_block(held, step)}
    votes = Counter(layers for _, layers in claims)
    if not votes:
        return None
    layers = max(votes, key=lambda layers: (votes[layers], layers))
    stages = range(len(layers))
    needs = [stage_memory(cost, layers, stage) for stage in stages]
    usable: list[set[str]] = [set() for _ in stages]
    newest = Counter[tuple[str, int]]()  # rank of the newest block up to `step`; memory first
    for peer, held in held_blocks:
        if held.layers != layers:
            continue
        if is_usable_block(held, step):
            usable[held.stage].add(peer)
        if held.step <= step:
            rank = 2 * held.step + (held.where == "memory")
            newest[peer, held.stage] = max(rank, newest[peer, held.stage])
    chosen: dict[int, str] = {}

    def pick(stage: int, peers: Collection[str]) -> str | None:
        free = set(peers).difference(chosen.values())
        near = {peer: round_distance(distances.get(peer, 0.0)) for peer in free}
        size = {peer: candidates[peer].memory * candidates[peer].speed for peer in free}
        return min(
            (peer for peer in free if candidates[peer].memory >= needs[stage]),
            key=lambda peer: (-newest[peer, stage], near[peer], -size[peer], peer),
            default=None,
        )

    for stage in sorted(stages, key=lambda stage: len(usable[stage])):
        if (holder := pick(stage, usable[stage])) is not None:
            chosen[stage] = holder
    lost = tuple(stage for stage in stages if stage not in chosen)
    for stage in sorted(lost, key=lambda stage: -needs[stage]):
        if (spare := pick(stage, candidates)) is None:
            return None
        chosen[stage] = spare
    held_at_some_step = {stage for _, stage in newest}
    if 2 * len(set(lost) - held_at_some_step) > len(layers):
        return None  # more than half of the stages would come from the base
    if len(layers) == 1 and chosen[0] != me:
        return None  # only a node itself may propose a crew of one
    members = tuple(CrewMember(chosen[stage], layers[stage]) for stage in stages)
    return CrewPlan(
        CrewRecord(lineage, candidates[me].model, step, members, bytes(NONCE_BYTES)), lost
    )


def _plan_from_base(
    me: str,
    candidates: Mapping[str, Offer],
    cost: ModelCost,
    stages: int,
    distances: Mapping[str, float],
) -> CrewPlan | None:
    """Return a crew that starts from the base and contains this node; None if it is not possible.

    It has the fewest of the nearest nodes that hold the model, the nearest first, or of those with
    the most memory if the nearest cannot hold it. The other nodes are spares.

    Args:
        stages: Number of stages; 0 for the fewest.
    """
    near = {peer: round_distance(distances.get(peer, 0.0)) for peer in candidates}
    size = {peer: offer.memory * offer.speed for peer, offer in candidates.items()}
    by_distance = sorted(candidates, key=lambda peer: (peer != me, near[peer], -size[peer], peer))
    by_memory = sorted(candidates, key=lambda peer: (peer != me, -candidates[peer].memory, peer))
    for peers in (by_distance[:MAX_MEMBERS], by_memory[:MAX_MEMBERS]):
        for count in range(stages or 1, min(stages or len(peers), len(peers)) + 1):
            # second, the two members with the most memory at the ends, which also hold embedding
            # and head
            largest = sorted(peers[:count], key=lambda peer: -candidates[peer].memory)
            for order in (peers[:count], [*largest[:1], *largest[2:], *largest[1:2]]):
                layers = assign_layers(cost, [candidates[peer] for peer in order])
                if layers is not None:
                    return CrewPlan(
                        CrewRecord(
                            lineage=bytes(HASH_BYTES),
                            model=candidates[me].model,
                            step=0,
                            members=tuple(map(CrewMember, order, layers)),
                            nonce=bytes(NONCE_BYTES),
                        )
                    )
    return None


def round_distance(seconds: float) -> float:
    """Round a distance to a power of two, so that a new measurement rarely changes a plan."""
    return 0.0 if seconds < MIN_DISTANCE_SECONDS else 2.0 ** round(math.log2(seconds))


def assign_layers(model: ModelCost, members: Sequence[Offer]) -> tuple[int, ...] | None:
    """Return the number of layers of each member; None if the model does not fit.

    Each member gets one layer. Each further layer goes to the member that is the fastest with it.
    All layers count as the largest one.
    """
    layer = PartCost(max(p.memory for p in model.layers), max(p.work for p in model.layers))
    ends = [[model.embedding] * (member is members[0]) for member in members]
    ends[-1].append(model.head)
    sizes = [0] * len(members)

    def seconds(stage: int, size: int) -> float:
        member, parts = members[stage], [layer] * size + ends[stage]
        if model.stage + sum(part.memory for part in parts) > member.memory:
            return math.inf
        return sum(part.work for part in parts) / member.speed

    for _ in model.layers:
        fastest = min(range(len(members)), key=lambda n: (sizes[n] > 0, seconds(n, sizes[n] + 1)))
        sizes[fastest] += 1
    fits = all(seconds(stage, size) < math.inf for stage, size in enumerate(sizes))
    return tuple(sizes) if fits and min(sizes) > 0 else None


# ---- statistics for status page and metrics ------------------------------------------------------

CrewState = Literal["none", "forming", "preparing", "running"]


class MemberStatistics(msgspec.Struct, frozen=True):
    """State of one member and its stage, from the crew's record and heartbeats."""

    stage: int
    """Number of the stage."""
    peer: str
    """Peer id of its holder."""
    state: wire.StagePhase
    """Phase of the stage."""
    step: int
    """Number of committed steps."""
    layers: int
    """Number of layers."""


class CrewStatistics(msgspec.Struct, frozen=True):
    """State of this node's crew, if it has one."""

    state: CrewState = "none"
    id: str = ""
    """Id of the crew, hex; empty without a crew."""
    stage: int | None = None
    """Stage that this node holds."""
    slots: tuple[MemberStatistics, ...] = ()
    """State of each stage."""
    offers: int = 0
    """Number of other nodes that offer to hold a stage."""
    stopped_seconds: float | None = None
    """Seconds since a crew of this node last ran; 0 while one runs, or if none ever did. None
    without a crew."""
    recovery_seconds: float | None = None
    """Seconds from the last end of a running crew to a crew that runs."""
    peer_seconds: float = 0.0
    """One-way time of a message to a typical peer."""


def statistics(state: State, now: float, settings: MembershipSettings) -> CrewStatistics:
    """Return the state of this node's crew for status page and metrics."""
    crew = state.crew
    shown = CrewStatistics(
        state=cast("CrewState", state.phase.value),
        offers=len(current_offers(state, now, settings)),
        recovery_seconds=state.recovery_seconds,
        peer_seconds=typical_distance(state),
    )
    if crew is None or not crew.formed:
        return shown
    own = MemberState(now, now, crew.own)
    slots = []
    for stage, (peer, layers) in enumerate((one.peer, one.layers) for one in crew.record.members):
        member = crew.members.get(peer, own)
        slots.append(MemberStatistics(stage, peer, member.status.phase, member.status.step, layers))
    return replace(
        shown,
        id=crew.id.hex(),
        stage=crew.stage,
        slots=tuple(slots),
        stopped_seconds=0.0 if state.stopped_at is None else now - state.stopped_at,
    )


def current_offers(state: State, now: float, settings: MembershipSettings) -> dict[str, Offer]:
    """Return the other nodes' offers that have not expired."""
    oldest = now - 3 * settings.offer_seconds
    return {
        peer: known.offer
        for peer, known in state.peers.items()
        if known.offer is not None and known.offer.memory > 0 and known.offered_at >= oldest
    }


def typical_distance(state: State) -> float:
    """Return the median one-way time to connected peers, in seconds."""
    near = [one.seconds for one in state.peers.values() if one.connected and one.seconds]
    return median(near) if near else 0.0
