"""One node's part in crews: `advance(state, event, now, means) → (state, actions)`. Pure: no clock,
no I/O, no torch.

    FREE ──all members signed a record──▶ PREPARING ──every stage active──▶ RUNNING ⇄ PAUSED
    (somebody is suspected)
      ▲                                        │                               │
      └───────────── broken, as this node sees it itself: its copies of the policy are offered again
      ─────────────┘

A node signs only while it is FREE, for one proposer at a time, with peers that its person trusts,
and nothing that would throw away what it has learnt. It is free again when a member leaves, is
silent for `evict_seconds`, lost a stream to us, prepares or steps without end, or forgot the crew.
Nobody else has a say: what a stranger sends changes nothing here but what is known of its offer.

Who proposes: everybody free plans alike from the same offers (`founding`); the holder of the first
stage proposes at once, the next one if nothing came of it for `turn_seconds`. All named sign, or it
lapses. Several that propose one another do not make each other wait.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Literal, cast, get_args

import msgspec
from msgspec.structs import replace

from swarmnode.crew import events as ev
from swarmnode.crew import local, messages
from swarmnode.crew.detector import Signs, slowness_at
from swarmnode.crew.events import Settings
from swarmnode.crew.founding import LEAST_SECONDS, MOST_SECONDS, Point, is_behind, plan_crew
from swarmnode.crew.messages import WITHOUT, Offer, Refuse, Status
from swarmnode.crew.plan import MEMBERS, stage_memory, stage_work
from swarmnode.crew.record import (
    HASH_BYTES,
    NO_HASH,
    NONCE_BYTES,
    Founded,
    Record,
    Signed,
    Verify,
    check_founded,
    crew_id,
    member_bytes,
    peers_of,
    stage_of,
)
from swarmnode.errors import BadMessage

LONGEST_BAR_SECONDS: Final = 3600.0
GATHERS: Final = 3
"""Times that a plan waits for further offers, at most, and for a plan that stays."""
LAPSES: Final = 10
"""A proposer waits up to 1,024 turns: many strangers hold nobody for long, and who failed for long
waits about as long."""
DOUBTS: Final = 8
"""Bars' worth of debt from which on a peer is left out on doubt alone."""
LONG_AGO: Final = -1e18
FARTHER: Final = 1 / 32
"""The share by which a slower answer than the fastest makes a peer farther away."""
LOADING: Final = Status("loading")
_PHASES: Final = (*get_args(local.StagePhase), "absent")
"""In the order in which a stage goes through them in one crew."""


class Phase(enum.Enum):
    FREE = "free"
    PREPARING = "preparing"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True)
class Means:
    """What a decision needs beside state and time. `trusts(peer)`: whether our person would be in a
    crew with it."""

    settings: Settings
    sign: Callable[[bytes], bytes]
    verify: Verify
    rng: random.Random
    trusts: Callable[[str], bool] = lambda peer: True
    uplink: Callable[[], float] = lambda: math.inf
    """Bytes per second that our line takes, as far as that was seen."""


class Peer(msgspec.Struct, frozen=True):
    """What is known of a peer outside any crew."""

    connected: bool = False
    offer: Offer | None = None
    offered_at: float = LONG_AGO
    foreign_until: float = LONG_AGO
    """It does not speak of crews."""
    worked: bool = False
    """A crew with it has taken a step."""
    debt: float = 0.0
    """Seconds that it is left out for, twice as long with each further failure; steps with us make
    it less."""
    barred_until: float = LONG_AGO
    """It is in none of our crews before."""
    uninformed: bool = False
    """It got no offer of ours while it was left out, and has answered none since: it would not know
    what we propose to go on from."""
    blamed: int = 0
    """Crews that our trainer led and that came to nothing because of it, or of it or another: the
    bad one is there each time."""
    lapses: int = 0
    """Proposals of its own that we signed and that came to nothing, since we last worked
    together."""
    deaf_until: float = LONG_AGO
    """What it proposes is not signed before: others have their turn."""
    seconds: float | None = None
    """What a message takes to it, one way: the fastest, nearly, of what was measured."""


class Member(msgspec.Struct, frozen=True):
    """Another member of our crew, as we see it."""

    signs: Signs
    status: Status
    status_since: float
    """When phase or progress last changed."""
    joined: bool = False
    """We have received something from it in this crew."""
    refused_at: float | None = None
    """When it said that it is in another crew or none, and nothing else since."""
    owed: float = 0.0
    """Its debt when the crew was founded."""


class Crew(msgspec.Struct, frozen=True):
    founded: Founded
    id: bytes
    stage: int
    """Ours."""
    since: float
    members: Mapping[str, Member]
    own: Status
    stepped_at: float = 0.0
    """When we last took a step, or began to run."""
    stepped: bool = False
    """We have taken a step in it."""

    @property
    def record(self) -> Record:
        return self.founded.record


class Proposal(msgspec.Struct, frozen=True):
    """A record that we have proposed, until all have signed it or it lapses."""

    record: Record
    crew: bytes
    signatures: Mapping[str, bytes]
    until: float


class Reserved(msgspec.Struct, frozen=True):
    """We have signed `record`, and sign nothing else before `until`, but for its members that
    propose one another anew: whoever has proposed signs nothing, so of all these records one is
    founded."""

    proposer: str
    """Who proposed `record`."""
    record: Record
    signed: Mapping[str, bytes]
    """Proposer → crew, which may still be founded."""
    since: float
    """When we signed the first one: nobody takes its place after what that one had of time."""
    until: float

    def keeps_from(self, proposer: str, record: Record, late: bool) -> bool:
        """Whether `record` is not to be signed now. If one whose proposal we signed were not in it,
        `proposer` could sign both, and we would not be where that one expects us."""
        known = proposer in self.signed or (
            not late and proposer in peers_of(self.record) and len(self.signed) < MEMBERS
        )
        return not known or not self.signed.keys() - {proposer} <= {*peers_of(record)}


class State(msgspec.Struct, frozen=True):
    """Everything that one node knows of crews. `me`: its peer id."""

    me: str
    phase: Phase = Phase.FREE
    offering: local.Offering | None = None
    """What our trainer offers, while it could work in a crew; None otherwise."""
    draining: str = ""
    peers: Mapping[str, Peer] = {}
    crew: Crew | None = None
    proposal: Proposal | None = None
    reserved: Reserved | None = None
    free_since: float | None = None
    """The moment since which it has been in no crew, less the time in those that took no step; None
    before the first event."""
    new_offer_at: float = 0.0
    """When something new was offered that may be planned with."""
    plan_since: float = math.inf
    """The moment since which there has always been a plan, whichever; infinite while there is
    none."""
    turn_from: float = 0.0
    """The moment since which our place in the present plan counts."""
    planned: tuple[str, ...] = ()
    """Members of that plan, as it is their turn."""
    retry_at: float = 0.0
    lapses: int = 0
    """Proposals of ours in a row that came to nothing."""
    offered_at: float = LONG_AGO
    hop_offered: float = 0.0
    """What our last offer says of our line."""
    beat_at: float = LONG_AGO
    last_tick: float | None = None
    slowness: float = 1.0
    stood_since: float | None = None
    """The moment since which a crew that ran does not."""
    recovery_seconds: float | None = None
    """From the last pause or end of a crew that ran to one that runs."""


CrewState = Literal["none", "preparing", "running", "paused"]
SlotState = Literal["absent", "loading", "probation", "active", "failed", "suspect"]


class SlotStatistics(msgspec.Struct, frozen=True):
    """One stage of the crew, as its record and the heartbeats have it."""

    stage: int
    peer: str
    """Its holder."""
    state: SlotState
    """Phase of the stage, or that its holder is suspected."""
    step: int
    """Steps that it has taken."""
    layers: int


class CrewStatistics(msgspec.Struct, frozen=True):
    """The crew of which this node holds a stage, if it does."""

    state: CrewState = "none"
    id: str = ""
    """Hex; empty outside a crew."""
    stage: int | None = None
    """Held by us."""
    slots: tuple[SlotStatistics, ...] = ()
    offers: int = 0
    """Other nodes that would hold a stage."""
    standing_seconds: float | None = None
    """Seconds since a crew of ours last ran; 0 while it does, or where none ever did. None outside
    a crew."""
    recovery_seconds: float | None = None
    """From the last crew's standing still to its running again."""
    peer_seconds: float = 0.0
    """What a message takes to the usual peer, one way."""


def statistics(state: State, now: float, settings: Settings) -> CrewStatistics:
    crew, offers = state.crew, len(_offers(state, now, settings))
    if crew is None:
        return CrewStatistics(
            offers=offers,
            recovery_seconds=state.recovery_seconds,
            peer_seconds=usual_seconds(state),
        )
    slots = []
    for stage, (peer, layers) in enumerate(
        (member.peer, member.layers) for member in crew.record.members
    ):
        member = crew.members.get(peer)
        status = crew.own if member is None else member.status
        suspected = member is not None and member.signs.suspected
        slots.append(
            SlotStatistics(
                stage, peer, "suspect" if suspected else status.phase, status.step, layers
            )
        )
    return CrewStatistics(
        state=cast("CrewState", state.phase.value),  # of one in a crew
        id=crew.id.hex(),
        stage=crew.stage,
        slots=tuple(slots),
        offers=offers,
        standing_seconds=0.0 if state.stood_since is None else now - state.stood_since,
        recovery_seconds=state.recovery_seconds,
        peer_seconds=usual_seconds(state),
    )


def advance(
    state: State, event: ev.Event, now: float, means: Means
) -> tuple[State, list[ev.Action]]:
    """The state after `event`, and what is to be done about it, in order."""
    turn = _Turn(state, now, means)
    turn.handle(event)
    return turn.state, turn.actions


def usual_seconds(state: State) -> float:
    """What a message takes to a peer, one way: the median of those connected, whom a few that
    answer early or late do not move far."""
    near = [
        known.seconds
        for known in state.peers.values()
        if known.connected and known.seconds is not None
    ]
    return min(MOST_SECONDS, median(near)) if near else 0.0


def _offers(state: State, now: float, settings: Settings) -> dict[str, Offer]:
    """The others' offers that count."""
    oldest = now - 3 * settings.offer_seconds
    return {
        peer: known.offer
        for peer, known in state.peers.items()
        if known.offer is not None
        and known.offer.memory > 0
        and known.offered_at >= oldest
        and now >= known.barred_until
        and not known.uninformed
    }


class _Turn:
    """One call of `advance`: the state as it becomes, and the actions so far."""

    def __init__(self, state: State, now: float, means: Means) -> None:
        self.state, self.now, self.means, self.settings = state, now, means, means.settings
        self.actions: list[ev.Action] = []

    def handle(self, event: ev.Event) -> None:
        if self.state.free_since is None:
            self._set(free_since=self.now, new_offer_at=self.now)
        self._expire()
        match event:
            case ev.Tick(heard=heard):
                self._tick(heard)
            case ev.Received():
                self._do(ev.Answer(self._received(event.peer, event.message)))
            case ev.Answered():
                self._answered(event)
            case local.Offering():
                self._trainer_offers(event)
            case local.StageStatus():
                self._trainer_status(event)
            case local.Blames():
                self._blames(event)
            case ev.TrainerLeft():
                self._set(offering=None)
                self._break("our trainer is gone")
                self._send_offers()
            case ev.StreamLost():
                if self.state.crew is not None and event.crew == self.state.crew.id:
                    self._charge(event.peer)
                    self._break("lost a stream to it", event.peer)
            case ev.PeerGone():
                self._peer_gone(event.peer)
            case ev.PeerBack():
                self._peer_back(event.peer)
            case ev.Drain():
                self._drain(event.reason)

    # ---- small things ----------------------------------------------------------------------------

    def _set(self, **changes: Any) -> None:  # noqa: ANN401
        self.state = replace(self.state, **changes)

    def _set_crew(self, crew: Crew) -> None:
        self._set(crew=crew)

    def _set_member(self, crew: Crew, peer: str, member: Member) -> None:
        self._set_crew(replace(crew, members={**crew.members, peer: member}))

    def _set_peer(self, peer: str, known: Peer) -> None:
        self._set(peers={**self.state.peers, peer: known})

    def _peer(self, peer: str) -> Peer:
        return self.state.peers.get(peer, Peer())

    def _do(self, action: ev.Action) -> None:
        self.actions.append(action)

    def _note(self, what: str, detail: str = "") -> None:
        self._do(ev.Note(what, detail))

    @property
    def _waited(self) -> float:
        return self.now - (self.state.free_since or 0.0)

    def _is_out(self, peer: str) -> bool:
        return self.now < self._peer(peer).barred_until or not self.means.trusts(peer)

    def _charge(self, peer: str, cost: float | None = None, spoilt: float = 0.0) -> None:
        """`peer` kept us from working for `cost` seconds, as we saw ourselves: none of our crews
        has it for twice as long, and for longer with each further time. None for what happens to
        everybody (a process starts again): the first time is free, but for one with whom no step
        was ever taken and whose crew stood still. spoilt: for how long it has kept some of our
        steps from being taken; where that is most of the crew's time, those that were taken have
        repaid nothing."""
        known, crew = self._peer(peer), self.state.crew
        stood = (
            self.now - crew.stepped_at
            if crew is not None and self.state.phase != Phase.PREPARING
            else 0.0
        )
        if cost is None and not known.worked and stood > self.settings.bar_seconds:
            cost = stood
        before = known.debt
        if (
            crew is not None
            and 2 * spoilt > self.now - crew.since
            and (member := crew.members.get(peer)) is not None
        ):
            before = max(before, member.owed)
        cheapest, twice = self.settings.bar_seconds, 2 * (cost or 0.0)
        # of 7 B one step may have cost hours
        debt = min(max(LONGEST_BAR_SECONDS, twice), 2 * before + max(twice, cheapest))
        until = self.now + debt if cost is not None or known.debt else known.barred_until
        if peer != self.state.me:
            self._set_peer(peer, replace(known, debt=debt, barred_until=until))

    def _doubt(self, peer: str) -> None:
        """Nothing came of a crew with `peer`, and it or another one is to blame. It goes behind
        others from the second time on, and is left out once that was often."""
        known = self._peer(peer)
        debt = min(LONGEST_BAR_SECONDS, known.debt + self.settings.bar_seconds)
        until = (
            self.now + debt if debt >= DOUBTS * self.settings.bar_seconds else known.barred_until
        )
        if peer != self.state.me:
            self._set_peer(
                peer, replace(known, debt=debt, barred_until=max(until, known.barred_until))
            )

    def _repay(self, crew: Crew) -> None:
        """A step was taken: what its members owe us is less by the time that it took, and by an
        eighth at most, however long steps are: who fails in the middle of every other one is not
        even."""
        for peer in crew.members:
            known = self._peer(peer)
            repaid = min(
                self.now - crew.stepped_at, max(known.debt, 2 * self.settings.bar_seconds) / 8
            )
            self._set_peer(
                peer, replace(known, worked=True, lapses=0, debt=max(0.0, known.debt - repaid))
            )

    # ---- time ------------------------------------------------------------------------------------

    def _tick(self, heard: Mapping[str, float]) -> None:
        state, settings = self.state, self.settings
        slack = 0.25 * settings.tick_seconds
        self._set(
            slowness=slowness_at(state.slowness, state.last_tick, self.now, settings.tick_seconds),
            last_tick=self.now,
        )
        if state.crew is not None:
            self._watch(state.crew, heard)
        if (
            self.state.crew is not None
            and self.now - self.state.beat_at >= settings.heartbeat_seconds - slack
        ):
            self._send_heartbeats()
        hop, said = self._hop_seconds(), self.state.hop_offered
        news = self._offers_itself and abs(hop - said) > 0.5 * max(hop, said, LEAST_SECONDS)
        if news or self.now - self.state.offered_at >= settings.offer_seconds - slack:
            self._send_offers()
        self._consider()

    def _expire(self) -> None:
        """What has lapsed is over before anything else is heard; after somebody's proposal in vain
        it is our turn before another's."""
        if self.state.proposal is not None and self.now >= self.state.proposal.until:
            self._lapse(self.state.proposal)
        if self.state.reserved is not None and self.now >= self.state.reserved.until:
            self._release(self.state.reserved)
            self._consider()

    def _watch(self, crew: Crew, heard: Mapping[str, float]) -> None:
        """Whether the crew is what it was a moment ago."""
        settings, members = self.settings, dict(crew.members)
        for peer, member in crew.members.items():
            signs = member.signs.heard(heard.get(peer, -math.inf))
            overdue = signs.gone_since is not None or signs.overdue(self.now, self.state.slowness)
            if overdue != signs.suspected:
                signs = replace(signs, suspected=overdue)
                self._note(*(("suspected", f"{peer}: silent") if overdue else ("refuted", peer)))
            members[peer] = replace(member, signs=signs)
            gone = (
                signs.gone_since is not None
                and self.now - signs.gone_since >= settings.gone_seconds
            )
            if (
                gone
                or signs.silent_seconds(self.now, self.state.slowness) >= settings.evict_seconds
            ):
                self._charge(peer)
                self._break("is gone", peer)
                return
        awaited, why = self._awaited(crew)
        if awaited:
            for peer in awaited:
                self._charge(peer, self.now - crew.stepped_at)
            self._break(why, awaited[0])
            return
        self._set_crew(replace(crew, members=members))
        self._run_or_pause()

    def _awaited(self, crew: Crew, *, elsewhere: bool = False) -> tuple[list[str], str]:
        """For whom a crew that does not work has waited too long; why. Nothing that they say moves
        the bound. `elsewhere`: somebody else may have seen it a little earlier. Not much: a head
        finds out who keeps work back at four fifths of a step's bound."""
        settings, since, share = self.settings, self.now - crew.since, 0.9 if elsewhere else 1.0
        if since >= (0.5 if elsewhere else 1.0) * settings.join_seconds * self.state.slowness:
            absent = [peer for peer, member in crew.members.items() if not member.joined]
            if absent:
                return absent, "has not joined"
        if self.state.phase == Phase.PREPARING:
            late = [
                peer
                for peer, member in crew.members.items()
                if member.status.phase != "active"
                and (
                    self.now - member.status_since >= share * settings.prepare_seconds
                    or since >= share * self._ready_seconds(crew, peer)
                )
            ]
            if crew.own.phase != "active" and since >= self._ready_seconds(crew, self.state.me):
                late.append(self.state.me)
            return late, "does not get ready"
        stands = self.now - crew.stepped_at >= share * self._step_seconds(crew)
        return [crew.record.members[0].peer] if stands else [], "has taken no step for long"

    def _ready_seconds(self, crew: Crew, peer: str) -> float:
        """How long a member may get ready, whatever progress it reports: that grows with its stage,
        and with nothing that it says."""
        offering, sizes = self.state.offering, [member.layers for member in crew.record.members]
        stage = stage_of(crew.record, peer)
        memory = (
            stage_memory(offering.cost, sizes, stage)
            if offering is not None and stage is not None
            else 0.0
        )
        return self.settings.prepare_seconds + memory / self.settings.restore_bytes_per_second

    def _step_seconds(self, crew: Crew) -> float:
        """How long a crew may take no step: longer where our own stage is slow, since blocks are
        cut so that all take as long, and where peers are far: completions may go through all stages
        token by token, as many at a time as there are stages."""
        offering, settings = self.state.offering, self.settings
        if offering is None:
            return settings.step_seconds
        cost, sizes = offering.cost, [member.layers for member in crew.record.members]
        ways = cost.crossings * cost.batches * max(len(sizes), cost.batches)
        computing = (
            settings.slow_steps * stage_work(cost, sizes, crew.stage) / offering.capacity.speed
        )
        return max(settings.step_seconds, computing) + settings.slow_lines * ways * usual_seconds(
            self.state
        )

    # ---- the own trainer -------------------------------------------------------------------------

    def _trainer_offers(self, offering: local.Offering) -> None:
        if self.state.crew is not None:
            return  # said before it knew that it is in one, or numbers that can wait
        self._set(offering=offering)
        if not self.state.draining:
            self._send_offers()
            self._consider()

    def _trainer_status(self, status: local.StageStatus) -> None:
        crew = self.state.crew
        if crew is None or (status.crew, status.stage) != (crew.id, crew.stage):
            if crew is None:  # its connection was down when the crew ended
                self._do(local.Released("that crew is over"))
            return
        before = crew.own
        own = Status(status.phase, status.step, status.progress)
        stepped = own.phase == "active" and own.step > crew.record.step
        if stepped and own.step != before.step:
            self._repay(crew)
            crew = replace(crew, stepped_at=self.now, stepped=True)
        self._set_crew(replace(crew, own=own))
        if own.phase == "failed":
            self._break(status.reason or "our stage failed")
            return
        self._run_or_pause()
        if own.phase != before.phase:
            self._send_heartbeats()

    def _blames(self, blames: local.Blames) -> None:
        """Leave one out. Where it may be one of several it is who was blamed, or beside one that
        was, more often, in turn where that is no difference: the bad one, once it has been beside
        others; and of two around an honest one either, in the next crew. We are not it: if
        something here is broken, everybody else goes on together when we have left them out."""
        crew = self.state.crew
        if crew is None or blames.crew != crew.id:
            return
        stages = {stage: member.peer for stage, member in enumerate(crew.record.members)}
        blamed = {stages[stage] for stage in blames.stages if stage in stages}
        if not blamed:
            return
        peers = [peer for stage, peer in stages.items() if peer in blamed or stage in blames.beside]
        known = {peer: self._peer(peer) for peer in peers}
        others = [peer for peer in peers if peer != self.state.me] or peers
        out = max(
            others,
            key=lambda peer: (
                known[peer].blamed,
                peer in blamed,
                -known[peer].barred_until,
                self.means.rng.random(),
            ),
        )
        spoilt = min(blames.seconds, self.now - crew.since)
        self._charge(
            out, max(self.now - crew.stepped_at, spoilt if len(peers) == 1 else 0.0), spoilt
        )
        for peer in peers:
            self._set_peer(peer, replace(self._peer(peer), blamed=known[peer].blamed + 1))
            if peer in blamed:
                self._note("blamed", f"{peer}: {blames.reason}")
        self._break(f"no step comes of it: {blames.reason}", out)

    def _drain(self, reason: str) -> None:
        if not self.state.draining:
            self._set(draining=reason)
            self._break(reason)
            self._send_offers()

    # ---- peers -----------------------------------------------------------------------------------

    def _peer_back(self, peer: str) -> None:
        if not self._has_room(peer):
            return
        self._set_peer(peer, replace(self._peer(peer), connected=True))
        crew = self.state.crew
        if crew is not None and (member := crew.members.get(peer)) is not None:
            self._set_member(
                crew, peer, replace(member, signs=replace(member.signs, gone_since=None))
            )
            self._do(ev.Send(peer, messages.Heartbeat(crew.id, crew.own)))
        elif self._offers_itself:
            self._send_offer(peer)

    def _peer_gone(self, peer: str) -> None:
        if peer in self.state.peers:
            self._set_peer(peer, replace(self._peer(peer), connected=False, offer=None))
        crew = self.state.crew
        if (
            crew is not None
            and (member := crew.members.get(peer)) is not None
            and member.signs.gone_since is None
        ):
            self._note("suspected", f"{peer}: no connection")
            self._set_member(
                crew,
                peer,
                replace(member, signs=replace(member.signs, gone_since=self.now, suspected=True)),
            )
            self._run_or_pause()

    def _has_room(self, peer: str) -> bool:
        """Whether `peer` is known, or may be: where there are too many, one that is not connected,
        and not left out, is forgotten."""
        if peer in self.state.peers or len(self.state.peers) < self.settings.most_peers:
            return True
        for other, known in self.state.peers.items():
            if not known.connected and self.now >= known.barred_until:
                self._set(
                    peers={name: one for name, one in self.state.peers.items() if name != other}
                )
                return True
        return False

    def _received(self, peer: str, message: messages.Request) -> messages.Answer:
        match message:
            case messages.Heartbeat():
                return self._heartbeat(peer, message)
            case Offer():
                self._take_offer(peer, message)
            case messages.Propose():
                return self._sign(peer, message.record)
            case Founded():
                return self._join(message)
            case messages.Leave():
                self._left(peer, message)
        return messages.Noted()

    def _left(self, peer: str, message: messages.Leave) -> None:
        """A member is gone. Whose fault that is we judge by what we see ourselves: if we wait for
        somebody too, it is not its own. Else it is that of one of the two, whoever leaves and
        because of whom."""
        crew = self.state.crew
        if crew is not None and message.crew == crew.id and peer in crew.members:
            awaited = [
                one
                for one in self._awaited(crew, elsewhere=True)[0]
                if one not in (peer, self.state.me)
            ]
            for one in awaited:
                self._charge(one, self.now - crew.stepped_at)
            if not awaited and message.because:
                self._doubt(peer)
                if message.because in crew.members:
                    self._doubt(message.because)
            elif not awaited:
                self._charge(peer)
            self._break(f"left: {message.reason}", peer)

    def _answered(self, event: ev.Answered) -> None:
        peer, request, answer, crew = event.peer, event.request, event.answer, self.state.crew
        if event.seconds is not None and peer in self.state.peers:
            known, took = self._peer(peer), event.seconds
            before = took if known.seconds is None else known.seconds
            self._set_peer(
                peer, replace(known, seconds=min(took, before + FARTHER * (took - before)))
            )
        if isinstance(request, Offer) and event.foreign and peer in self.state.peers:
            self._set_peer(
                peer,
                replace(self._peer(peer), foreign_until=self.now + self.settings.foreign_seconds),
            )
        if (
            isinstance(request, Offer)
            and isinstance(answer, messages.Noted)
            and peer in self.state.peers
        ):
            self._set_peer(peer, replace(self._peer(peer), uninformed=False))
        if isinstance(answer, messages.Alive) and crew is not None and answer.crew == crew.id:
            self._seen(crew, peer, answer.status)
        elif isinstance(request, messages.Heartbeat) and isinstance(answer, Refuse):
            if crew is not None and peer in crew.members and answer.crew == crew.id:
                self._not_in(crew, peer)
        elif isinstance(request, messages.Propose) and isinstance(answer, messages.Signature):
            self._signed(peer, answer)
        elif isinstance(request, messages.Propose):
            self._not_signed(peer, request.record, answer)

    def _not_in(self, crew: Crew, peer: str) -> None:
        """A member says that it is not in our crew: it has not heard yet that it was founded, or
        has left it. What it said before it joined may come after what it said then: once is not
        enough."""
        member = crew.members[peer]
        if not member.joined:
            self._do(ev.Send(peer, crew.founded))
        elif member.refused_at is None:
            self._set_member(crew, peer, replace(member, refused_at=self.now))
        elif self.now - member.refused_at >= 0.5 * self.settings.heartbeat_seconds:
            self._charge(peer)
            self._break("is not in this crew any more", peer)

    # ---- heartbeats ------------------------------------------------------------------------------

    def _heartbeat(self, peer: str, message: messages.Heartbeat) -> messages.Answer:
        crew = self.state.crew
        if crew is None or message.crew != crew.id or peer not in crew.members:
            return Refuse("crew", message.crew)
        self._seen(crew, peer, message.status)
        own = self.state.crew.own if self.state.crew is not None else crew.own
        return messages.Alive(crew.id, own)

    def _seen(self, crew: Crew, peer: str, status: Status) -> None:
        member = crew.members.get(peer)
        if member is None:
            return
        if member.signs.suspected:
            self._note("refuted", peer)
        if _PHASES.index(status.phase) < _PHASES.index(member.status.phase):
            # said before and come later, as each message has a stream of its own: a sign of life
            status = member.status
        moved = (status.phase, status.progress) != (member.status.phase, member.status.progress)
        signs = replace(member.signs.seen(self.now), gone_since=None)
        changed = member.signs.suspected or status.phase != member.status.phase
        since = self.now if moved else member.status_since
        self._set_member(crew, peer, Member(signs, status, since, joined=True, owed=member.owed))
        if status.phase in ("absent", "failed"):
            self._charge(peer)
            self._break(f"its stage is {status.phase}", peer)
        elif changed:
            self._run_or_pause()

    def _send_heartbeats(self) -> None:
        crew = self.state.crew
        if crew is not None:
            self._set(beat_at=self.now)
            for peer in crew.members:
                self._do(ev.Send(peer, messages.Heartbeat(crew.id, crew.own)))

    def _run_or_pause(self) -> None:
        crew, phase = self.state.crew, self.state.phase
        if crew is None:
            return
        well = not any(member.signs.suspected for member in crew.members.values())
        active = crew.own.phase == "active" and all(
            member.status.phase == "active" for member in crew.members.values()
        )
        if well and active and phase != Phase.RUNNING:
            recovered = (
                self.now - self.state.stood_since if self.state.stood_since is not None else None
            )
            if phase == Phase.PREPARING:  # a pause is no reason to wait longer for a step
                self._set_crew(replace(crew, stepped_at=self.now))
            self._set(
                phase=Phase.RUNNING,
                stood_since=None,
                recovery_seconds=recovered or self.state.recovery_seconds,
            )
            self._note("running", "" if recovered is None else f"{recovered:.3f}")
            self._do(local.Resumed(crew.id))
        elif not well and phase == Phase.RUNNING:
            self._set(phase=Phase.PAUSED, stood_since=self.now)
            self._note("paused")
            self._do(local.Suspended("a member is in doubt"))

    def _break(self, why: str, because: str = "") -> None:
        """Out of the crew: what was learnt stays with its copies. `because` of whom, where it is
        another member."""
        crew = self.state.crew
        if crew is None:
            return
        for peer in crew.members:
            self._do(ev.Send(peer, messages.Leave(crew.id, _printable(why), because)))
        since = (
            self.now
            if crew.stepped or self.state.free_since is None
            else self.state.free_since + self.now - crew.since
        )
        stood = self.now if self.state.phase == Phase.RUNNING else self.state.stood_since
        self._set(
            phase=Phase.FREE,
            crew=None,
            offering=None,
            free_since=since,
            new_offer_at=self.now,
            stood_since=stood,
        )
        self._set(planned=(), plan_since=math.inf)
        self._note("broken", f"{because} {why}".strip())
        self._do(local.Released(why))

    # ---- offers ----------------------------------------------------------------------------------

    @property
    def _offers_itself(self) -> bool:
        return (
            self.state.phase == Phase.FREE
            and self.state.offering is not None
            and not self.state.draining
        )

    def _own_offer(self) -> Offer:
        offering = self.state.offering
        if offering is None or not self._offers_itself:
            return Offer(NO_HASH, 0.0, 0.0, 0.0)
        capacity = offering.capacity
        out = [peer for peer, known in self.state.peers.items() if self.now < known.barred_until]
        return Offer(
            offering.model,
            capacity.memory,
            capacity.speed,
            self._hop_seconds(),
            offering.copies,
            tuple(out[:WITHOUT]),
        )

    def _hop_seconds(self) -> float:
        """What a micro-batch takes from here to another stage: on our line, and from there to the
        usual one of our peers."""
        line = (
            self.state.offering.cost.batch_bytes / self.means.uplink()
            if self.state.offering is not None
            else 0.0
        )
        return min(MOST_SECONDS, line + usual_seconds(self.state))

    def _send_offers(self) -> None:
        """Send our offer to everybody connected; one that takes the last one back is sent once."""
        if not self._offers_itself and self.state.offered_at == LONG_AGO:
            return
        self._set(
            offered_at=self.now if self._offers_itself else LONG_AGO,
            hop_offered=self._hop_seconds(),
        )
        for peer, known in self.state.peers.items():
            if known.connected:
                self._send_offer(peer)

    def _send_offer(self, peer: str) -> None:
        if self.now < self._peer(peer).foreign_until:
            return
        if self._is_out(peer):
            self._set_peer(peer, replace(self._peer(peer), uninformed=True))
        else:
            self._do(ev.Send(peer, self._own_offer()))

    def _take_offer(self, peer: str, offer: Offer) -> None:
        known = self._peer(peer)
        if not self._has_room(peer):
            return
        own = self.state.offering
        new = (
            known.offer is None
            or known.offer.copies != offer.copies
            or known.offer.model != offer.model
        )
        news = new and offer.memory > 0 and (own is None or offer.model == own.model)
        fresh = known.foreign_until > self.now
        self._set_peer(
            peer, replace(known, offer=offer, offered_at=self.now, foreign_until=LONG_AGO)
        )
        if fresh and self._offers_itself:
            self._send_offer(peer)
        # who changes all the time
        again = (
            known.offer is not None and self.now - known.offered_at < self.settings.gather_seconds
        )
        if news and not again and not self._is_out(peer):
            self._set(new_offer_at=self.now)

    # ---- founding --------------------------------------------------------------------------------

    def _consider(self) -> None:
        """Propose, where there is something to found and it is our turn."""
        state, settings = self.state, self.settings
        if not self._offers_itself or state.proposal is not None or self.now < state.retry_at:
            return
        if state.reserved is not None:
            return
        offering = state.offering
        assert offering is not None
        offers = {
            peer: offer
            for peer, offer in _offers(state, self.now, settings).items()
            if self.means.trusts(peer)
        }
        offers[state.me] = self._own_offer()
        plan = plan_crew(
            state.me,
            offers,
            offering.cost,
            settings,
            self._waited,
            {
                peer: 1 - known.worked + math.ceil(max(0.0, known.debt - settings.bar_seconds))
                for peer, known in state.peers.items()
            },
            {
                peer: known.seconds
                for peer, known in state.peers.items()
                if known.seconds is not None
            },
        )
        if plan is None:
            self._set(planned=(), plan_since=math.inf)
            return
        turns, since = plan.turns, min(state.plan_since, self.now)
        settled = since + GATHERS * settings.gather_seconds
        if turns != state.planned:
            self._set(planned=turns, plan_since=since, turn_from=min(self.now, settled))
        if not plan.exact and self.now < min(state.new_offer_at + settings.gather_seconds, settled):
            return
        waited = self.now - self.state.turn_from
        if state.me not in turns:
            # of those whose turn it was nobody wanted this crew
            if waited >= 2 * len(turns) * settings.turn_seconds:
                for peer in turns:
                    self._doubt(peer)
                self._set(planned=(), plan_since=math.inf)
            return
        if waited < turns.index(state.me) * settings.turn_seconds:
            return
        lineage = plan.record.lineage if plan.record.step else self.means.rng.randbytes(HASH_BYTES)
        self._propose(
            msgspec.structs.replace(
                plan.record, lineage=lineage, nonce=self.means.rng.randbytes(NONCE_BYTES)
            )
        )

    def _propose(self, record: Record) -> None:
        crew = crew_id(record)
        until = self.now + self.settings.turn_seconds * (0.8 + 0.4 * self.means.rng.random())
        signature = self.means.sign(member_bytes(crew))
        self._set(proposal=Proposal(record, crew, {self.state.me: signature}, until))
        self._note("proposed", f"step {record.step}, {len(record.members)} stages")
        for peer in peers_of(record):
            if peer != self.state.me:
                self._do(ev.Send(peer, messages.Propose(record)))
        self._complete()

    def _lapse(self, proposal: Proposal) -> None:
        """Nothing came of it; who has not answered at all is left out of the next plans for a
        while."""
        silent = [peer for peer in peers_of(proposal.record) if peer not in proposal.signatures]
        for peer in silent if self.now >= proposal.until else ():
            self._charge(peer)
        lapses = self.state.lapses + 1
        pause = (
            self.settings.turn_seconds * self.means.rng.uniform(0.1, 0.5) * 2.0 ** min(lapses, 4)
        )
        self._set(proposal=None, retry_at=self.now + pause, lapses=lapses)

    def _release(self, reserved: Reserved) -> None:
        """What we signed came to nothing: others have their turn, and a longer one each time."""
        known = self._peer(reserved.proposer)
        lapses = min(known.lapses + 1, LAPSES)
        self._set(reserved=None)
        self._set_peer(
            reserved.proposer,
            replace(
                known, lapses=lapses, deaf_until=self.now + self.settings.turn_seconds * 2.0**lapses
            ),
        )

    def _signed(self, peer: str, answer: messages.Signature) -> None:
        proposal = self.state.proposal
        if (
            proposal is None
            or answer.crew != proposal.crew
            or peer not in peers_of(proposal.record)
        ):
            return
        if not self.means.verify(peer, member_bytes(proposal.crew), answer.signature):
            return
        self._set(
            proposal=replace(proposal, signatures={**proposal.signatures, peer: answer.signature})
        )
        self._complete()

    def _not_signed(self, peer: str, record: Record, answer: messages.Answer | None) -> None:
        """What we proposed comes to nothing because of `peer`, whatever it says: the honest have a
        reason now and then."""
        proposal = self.state.proposal
        ours = proposal is not None and record == proposal.record
        if ours or isinstance(answer, Refuse):  # who was silent has paid for it
            self._doubt(peer)
        if proposal is not None and ours:
            if isinstance(answer, Refuse) and answer.reason not in ("busy", "behind"):
                self._set_peer(peer, replace(self._peer(peer), offer=None))
            self._lapse(proposal)

    def _complete(self) -> None:
        proposal = self.state.proposal
        if proposal is None or not self._offers_itself:
            return
        peers = peers_of(proposal.record)
        if any(peer not in proposal.signatures for peer in peers):
            return
        founded = Founded(
            proposal.record, tuple(Signed(peer, proposal.signatures[peer]) for peer in peers)
        )
        for peer in peers:
            if peer != self.state.me:
                self._do(ev.Send(peer, founded))
        self._begin(founded, proposal.crew)

    def _why_not(self, proposer: str, record: Record) -> messages.Refusal | None:
        """Why `record` is not signed; None where it is."""
        state, offering = self.state, self.state.offering
        peers = peers_of(record)
        if state.me not in peers or proposer not in peers or proposer == state.me:
            return "record"
        if not self._offers_itself or offering is None:
            return "crew"
        sizes = [member.layers for member in record.members]
        if record.model != offering.model or sum(sizes) != len(offering.cost.layers):
            return "model"
        stage = peers.index(state.me)
        if stage_memory(offering.cost, sizes, stage) > offering.capacity.memory:
            return "model"
        if any(self._is_out(peer) for peer in peers if peer != state.me):
            return "trust"
        point = Point(record.lineage, record.step, record.previous, record.taken)
        others = [
            known.offer
            for peer in peers
            if peer != state.me and (known := self._peer(peer)).offer is not None
        ]
        vouchers = sum(point.is_of(offer.copies) for offer in others if offer is not None)
        if is_behind(offering.copies, point, vouchers, len(peers), self._waited, self.settings):
            return "behind"
        before = state.reserved
        late = before is not None and self.now >= before.since + 2 * self.settings.turn_seconds
        promised = state.proposal is not None or (
            before is not None and before.keeps_from(proposer, record, late)
        )
        if promised or self.now < self._peer(proposer).deaf_until:
            return "busy"
        return None

    def _sign(self, proposer: str, record: Record) -> messages.Answer:
        crew = crew_id(record)
        why = self._why_not(proposer, record)
        if why is not None:
            self._note("refused", f"{proposer}: {why}")
            return Refuse(why, crew)
        before = self.state.reserved
        signed, since = ({}, self.now) if before is None else (before.signed, before.since)
        until = (
            before.until
            if before is not None and proposer in signed
            else self.now + 2 * self.settings.turn_seconds
        )
        self._set(reserved=Reserved(proposer, record, {**signed, proposer: crew}, since, until))
        return messages.Signature(crew, self.means.sign(member_bytes(crew)))

    def _join(self, founded: Founded) -> messages.Answer:
        crew = crew_id(founded.record)
        if self.state.crew is not None and crew == self.state.crew.id:
            return messages.Noted()
        reserved = self.state.reserved
        # it lapsed, or we never signed it
        if reserved is None or crew not in reserved.signed.values() or not self._offers_itself:
            return Refuse("crew", crew)
        try:
            check_founded(founded, self.means.verify)
        except BadMessage as error:
            self._note("refused", str(error))
            return Refuse("record", crew)
        self._begin(founded, crew)
        return messages.Noted()

    def _begin(self, founded: Founded, crew: bytes) -> None:
        record, me = founded.record, self.state.me
        stage = stage_of(record, me)
        assert stage is not None
        others = [peer for peer in peers_of(record) if peer != me]
        members = {
            peer: Member(Signs(self.now), LOADING, self.now, owed=self._peer(peer).debt)
            for peer in others
        }
        self._set(
            phase=Phase.PREPARING,
            proposal=None,
            reserved=None,
            lapses=0,
            crew=Crew(founded, crew, stage, self.now, members, LOADING, stepped_at=self.now),
        )
        self._send_offers()  # takes ours back
        self._note("founded", f"step {record.step}, stage {stage} of {len(record.members)}")
        layers = tuple(member.layers for member in record.members)
        assert self.state.crew is not None
        patience = self._step_seconds(self.state.crew)
        peers = peers_of(record)
        self._do(
            local.Assigned(
                crew,
                record.lineage,
                stage,
                layers,
                peers,
                record.step,
                record.previous,
                record.taken,
                "",
                patience,
            )
        )
        self._send_heartbeats()


def _printable(text: str) -> str:
    return "".join(character if " " <= character <= "~" else "?" for character in text)[
        : messages.REASON_BYTES
    ]
