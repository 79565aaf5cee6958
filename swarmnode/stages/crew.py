"""One node's part in crews: `advance(state, event, now, means) → (state, actions)`. No clock, I/O
or torch.

    FREE ── propose or accept ──▶ FORMING ── every member sent a heartbeat ──▶ PREPARING
      ▲                                                                            │ all active
      └── a member left, was silent, lost a stream or missed a deadline ─── RUNNING ⇄ PAUSED

Free nodes send offers: memory, speed, the layers and steps that they hold. The candidate with the
newest step plans and proposes first, the next candidate `turn_seconds` later. A member accepts on
its authenticated connection and proves it by heartbeats with the crew's id. Any lost member, lost
stream or expired deadline ends the crew for all its members; they keep their state in memory and
are free. A deadline that a peer missed is a strike: plans leave the peer out for a while, unless no
crew is possible without it. Strikes are this node's own observations and are sent to nobody.
"""

from __future__ import annotations

import enum
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import median
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import msgspec
from msgspec.structs import replace

from swarmnode.stages import wire
from swarmnode.stages.wire import (
    HASH_BYTES,
    MEMBERS,
    NONCE_BYTES,
    Capacity,
    Copy,
    Member,
    ModelCost,
    Offer,
    Record,
    Settings,
    Status,
    crew_id,
    peers_of,
    stage_memory,
    stage_parts,
)

LONGEST_STRIKE_SECONDS: Final = 3600.0
MOST_STRIKES: Final = 32
CLEARING_STEPS: Final = 10
"""Committed steps together that clear a peer's strikes."""
FAILURES: Final = 5
"""Crews in a row that a peer refused or ended before their first step: a strike."""
GRACE_SECONDS: Final = 2.0
"""A member waits so much longer for a crew to form than its proposer, who may be about to leave."""
HEARD_SECONDS: Final = 60.0
"""Other bytes of a member count as signs of life for so long after its last heartbeat: tensors on a
full line delay heartbeats."""
LAG_DECAY: Final = 0.7
"""The share of the process's lag that is left after a punctual tick."""
RETRY_SECONDS: Final = 1.0
"""Wait after the first failed proposal; it doubles, up to sixteen times this."""
SLOWER_THAN_PLANNED: Final = 10.0
SLOWER_THAN_MEASURED: Final = 4.0
STEP_TIMES: Final = 20
"""Measured steps whose median counts."""
HEAD_DEADLINES: Final = 3.0
"""Step deadlines without a step after which the head itself has failed."""
FARTHER: Final = 1 / 32
"""Weight of a slower answer than the fastest in a peer's distance."""
LONG_AGO: Final = -1e18
LOADING: Final = Status()


class Phase(enum.Enum):
    FREE = "free"
    FORMING = "forming"
    PREPARING = "preparing"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True)
class Means:
    """Inputs of a decision beside state and time."""

    settings: Settings
    rng: random.Random
    trusts: Callable[[str], bool] = lambda peer: True
    """Return True if the operator allows this peer in a crew."""
    uplink: Callable[[], float] = lambda: math.inf
    """Return the measured bytes per second of this node's line."""


class Peer(msgspec.Struct, frozen=True):
    """A peer outside any crew."""

    connected: bool = False
    offer: Offer | None = None
    offered_at: float = LONG_AGO
    foreign_until: float = LONG_AGO
    """It does not speak this protocol."""
    seconds: float | None = None
    """One-way time of a message: half of the fastest answer."""
    strikes: int = 0
    struck_until: float = LONG_AGO
    steps: int = 0
    """Committed steps together since the last strike."""
    failures: int = 0
    """Crews that it refused or ended before their first step, since the last step together."""


class MemberState(msgspec.Struct, frozen=True):
    """Another member of our crew."""

    status: Status
    heard_at: float
    """Its last heartbeat, or answer to ours."""
    status_since: float
    """When phase or progress last changed."""
    joined_at: float | None = None
    """Its first heartbeat with this crew's id."""
    bytes_at: float = -math.inf
    """When bytes of any kind last came."""
    suspected: bool = False

    def silent_seconds(self, now: float, lag: float) -> float:
        """Seconds since the last sign of life, by this process's own slow clock."""
        last = max(self.heard_at, min(self.bytes_at, self.heard_at + HEARD_SECONDS))
        return (now - last) / lag


class Crew(msgspec.Struct, frozen=True):
    record: Record
    id: bytes
    stage: int
    """Ours."""
    proposer: str
    since: float
    waited: float
    """Seconds that this node was free before."""
    members: Mapping[str, MemberState]
    """Without this node."""
    own: Status = LOADING
    founded: bool = False
    """Every member has sent a heartbeat."""
    stepped_at: float = 0.0
    """When we last took a step, or began to run."""
    stepped: bool = False
    """It has taken a step."""
    step_seconds: float = math.inf


class State(msgspec.Struct, frozen=True):
    """Everything that one node knows of crews. `me`: its peer id."""

    me: str
    phase: Phase = Phase.FREE
    offering: wire.Offering | None = None
    """Our trainer's offer, while it could work in a crew; None otherwise."""
    draining: str = ""
    peers: Mapping[str, Peer] = {}
    crew: Crew | None = None
    free_since: float | None = None
    """The moment since which it has been in no crew, less the time in crews that took no step; None
    before the first event."""
    new_offer_at: float = 0.0
    """When an offer that changes plans last came."""
    plan_since: float = math.inf
    """The moment since which there has always been a crew to propose; infinite without one."""
    retry_at: float = 0.0
    lapses: int = 0
    """Proposals of ours in a row that failed."""
    offered_at: float = LONG_AGO
    hop_offered: float = 0.0
    """`hop_seconds` of our last offer."""
    beat_at: float = LONG_AGO
    last_tick: float | None = None
    lag: float = 1.0
    """How many times longer than they should our ticks take; our timeouts are multiplied by it."""
    stood_since: float | None = None
    """The moment since which a crew that ran does not."""
    recovery_seconds: float | None = None
    """From the last pause or end of a running crew to one that runs."""
    former: tuple[str, ...] = ()
    """Other members of the last crew that took a step."""
    timed: bytes = b""
    """The lineage of `step_times`."""
    step_times: tuple[float, ...] = ()
    """Seconds of the last committed steps."""


def advance(
    state: State, event: wire.Event, now: float, means: Means
) -> tuple[State, list[wire.Action]]:
    """Return the state after `event`, and the actions, in order."""
    turn = _Turn(state, now, means)
    turn.handle(event)
    return turn.state, turn.actions


class _Turn:
    """One call of `advance`: the state as it becomes, and the actions so far."""

    def __init__(self, state: State, now: float, means: Means) -> None:
        self.state, self.now, self.means, self.settings = state, now, means, means.settings
        self.actions: list[wire.Action] = []

    def handle(self, event: wire.Event) -> None:
        crew = self.state.crew
        if self.state.free_since is None:
            self._set(free_since=self.now, new_offer_at=self.now)
        match event:
            case wire.Tick():
                self._tick(event.heard)
            case wire.Received():
                self._do(wire.SendAnswer(self._received(event.peer, event.message)))
            case wire.Answered():
                self._answered(event)
            case wire.Garbage():
                if crew is not None and event.peer in crew.members:
                    self._strike(event.peer, "sent garbage")
                    self._end("sent garbage", event.peer)
            case wire.Offering():
                if crew is None or not crew.founded:  # else sent before it was in this crew
                    self._set(offering=event)
                    self._send_offers()
                    self._consider()
            case wire.StageStatus():
                self._trainer_status(event)
            case wire.StageFault():
                self._fault(event)
            case wire.TrainerLeft():
                self._set(offering=None)
                self._end("its trainer is gone")
                self._send_offers()
            case wire.StreamLost():
                if crew is not None and event.crew == crew.id and event.peer in crew.members:
                    self._end("lost a stream to it", event.peer)
            case wire.PeerGone():
                if event.peer in self.state.peers:
                    self._set_peer(event.peer, connected=False, offer=None)
                if crew is not None and event.peer in crew.members:
                    self._end("lost its connection", event.peer)
            case wire.PeerBack():
                if self._has_room(event.peer):
                    self._set_peer(event.peer, connected=True)
                    if self._offers_itself:
                        self._send_offer(event.peer)
            case wire.Drain():
                self._set(draining=event.reason)
                self._end(event.reason)
                self._send_offers()

    def _set(self, **changes: Any) -> None:  # noqa: ANN401
        self.state = replace(self.state, **changes)

    def _set_peer(self, peer: str, **changes: Any) -> None:  # noqa: ANN401
        self._set(peers={**self.state.peers, peer: replace(self._peer(peer), **changes)})

    def _peer(self, peer: str) -> Peer:
        return self.state.peers.get(peer, Peer())

    def _do(self, action: wire.Action) -> None:
        self.actions.append(action)

    def _note(self, what: str, detail: str = "") -> None:
        self._do(wire.Note(what, detail))

    @property
    def _waited(self) -> float:
        """Seconds without a crew."""
        return self.now - (self.now if self.state.free_since is None else self.state.free_since)

    # ---- time ------------------------------------------------------------------------------------

    def _tick(self, heard: Mapping[str, float]) -> None:
        state, settings = self.state, self.settings
        late = (self.now - state.last_tick) / settings.tick_seconds if state.last_tick else 1.0
        self._set(lag=max(1.0, late, state.lag * LAG_DECAY), last_tick=self.now)
        if state.crew is not None:
            self._watch(state.crew, heard)
        slack = 0.25 * settings.tick_seconds
        if self.now - self.state.beat_at >= settings.heartbeat_seconds - slack:
            self._send_heartbeats()
        hop, offered = self._hop_seconds(), self.state.hop_offered
        moved = self._offers_itself and abs(hop - offered) > 0.5 * max(hop, offered, LEAST_SECONDS)
        if moved or self.now - self.state.offered_at >= settings.offer_seconds - slack:
            self._send_offers()
        self._consider()

    def _watch(self, crew: Crew, heard: Mapping[str, float]) -> None:
        """End the crew when a deadline has expired; pause it while a member is suspected."""
        lag, settings = self.state.lag, self.settings
        if not crew.founded:
            grace = 0.0 if crew.proposer == self.state.me else GRACE_SECONDS
            if self.now - crew.since >= (settings.join_seconds + grace) * lag:
                missing = [p for p, member in crew.members.items() if member.joined_at is None]
                # a proposer that is alive has left by now, or has not proposed it to all
                for peer in dict.fromkeys([*missing, *([crew.proposer] if grace else [])]):
                    self._strike(peer, "did not join the crew")
                self._end("did not join the crew", missing[0])
            return
        members = dict(crew.members)
        for peer, member in crew.members.items():
            member = replace(member, bytes_at=max(member.bytes_at, heard.get(peer, -math.inf)))
            silent = member.silent_seconds(self.now, lag)
            if silent >= settings.gone_seconds:
                self._strike(peer, f"was silent for {silent:.0f} s")
                self._end("was silent", peer)
                return
            suspected = silent >= settings.suspect_seconds
            if suspected != member.suspected:
                self._note("suspected" if suspected else "refuted", peer)
            members[peer] = replace(member, suspected=suspected)
        crew = replace(crew, members=members)
        self._set(crew=crew)
        if self.state.phase == Phase.PREPARING:
            self._watch_preparing(crew)
        elif self.now - crew.stepped_at >= HEAD_DEADLINES * crew.step_seconds:
            self._step_overdue(crew, "has taken no step")
        self._run_or_pause()

    def _watch_preparing(self, crew: Crew) -> None:
        """A stage may take long without progress, and its memory's time in all, whatever progress
        it reports."""
        sizes, offering = [member.layers for member in crew.record.members], self.state.offering
        for stage, peer in enumerate(peers_of(crew.record)):
            memory = stage_memory(offering.cost, sizes, stage) if offering is not None else 0.0
            most = self.settings.prepare_seconds + memory / self.settings.restore_bytes_per_second
            member = crew.members.get(peer)
            phase, since = (
                (crew.own.phase, crew.since)
                if member is None
                else (member.status.phase, member.status_since)
            )
            idle = member is not None and self.now - since >= self.settings.prepare_seconds
            if phase != "active" and (idle or self.now - crew.since >= most):
                if member is not None:
                    self._strike(peer, "did not restore its stage")
                self._end("did not restore its stage", peer)
                return

    # ---- strikes ---------------------------------------------------------------------------------

    def _strike(self, peer: str, reason: str) -> None:
        known = self._peer(peer)
        if peer == self.state.me:
            return
        strikes = min(known.strikes + 1, MOST_STRIKES)
        seconds = min(LONGEST_STRIKE_SECONDS, self.settings.strike_seconds * 2.0**strikes)
        self._set_peer(peer, strikes=strikes, struck_until=self.now + seconds, steps=0, failures=0)
        self._note("struck", f"{peer}: {reason}; left out of plans for {seconds:.0f} s")

    def _stepped_with(self, peer: str) -> None:
        """A committed step together."""
        known = self._peer(peer)
        if known.strikes or known.failures:
            steps = known.steps + 1
            strikes = known.strikes if steps < CLEARING_STEPS else 0
            self._set_peer(peer, steps=steps, strikes=strikes, failures=0)

    def _is_struck(self, peer: str) -> bool:
        known = self._peer(peer)
        return known.strikes > 0 and self.now < known.struck_until

    # ---- the own trainer -------------------------------------------------------------------------

    def _trainer_status(self, status: wire.StageStatus) -> None:
        crew = self.state.crew
        if crew is None or (status.crew, status.stage) != (crew.id, crew.stage):
            if crew is None:  # its connection was down when the crew ended
                self._do(wire.Released("that crew is over"))
            return
        before = crew.own
        own = Status(status.phase, status.step, status.progress, status.load)
        if own.phase == "active" and own.step > max(before.step, crew.record.step):
            for peer in crew.members:
                self._stepped_with(peer)
            times = (*self.state.step_times, self.now - crew.stepped_at)[-STEP_TIMES:]
            self._set(step_times=times, former=tuple(crew.members))
            crew = replace(crew, stepped_at=self.now, stepped=True)
        self._set(crew=replace(crew, own=own))
        if own.phase == "failed":
            self._end(status.reason or "its stage failed")
            return
        self._run_or_pause()
        if own.phase != before.phase:
            self._send_heartbeats()

    def _fault(self, fault: wire.StageFault) -> None:
        crew = self.state.crew
        if crew is None or fault.crew != crew.id:
            return
        peers = peers_of(crew.record)
        if fault.stage is None and crew.stage == 0:
            self._step_overdue(crew, fault.reason)
        elif fault.stage is None or not 0 <= fault.stage < len(peers) or fault.stage == crew.stage:
            self._end(fault.reason)
        else:
            self._strike(peers[fault.stage], fault.reason)
            self._end(fault.reason, peers[fault.stage])

    def _step_overdue(self, crew: Crew, reason: str) -> None:
        """A deadline of the head expired. The head strikes the members that report work in hand,
        all where none does; the other members strike the head."""
        peers = [peers_of(crew.record)[0]]
        if crew.stage == 0:
            loaded = [peer for peer, member in crew.members.items() if member.status.load > 0]
            peers = loaded or list(crew.members)
        for peer in peers:
            self._strike(peer, reason)
        self._end(reason, peers[0] if peers else "")

    # ---- peers -----------------------------------------------------------------------------------

    def _has_room(self, peer: str) -> bool:
        """Return True if `peer` is known, or may be: beyond `most_peers` a peer that is neither
        connected nor struck is forgotten."""
        if peer in self.state.peers or len(self.state.peers) < self.settings.most_peers:
            return True
        for other, known in self.state.peers.items():
            if not known.connected and not self._is_struck(other):
                self._set(peers={p: one for p, one in self.state.peers.items() if p != other})
                return True
        return False

    def _received(self, peer: str, message: wire.Request) -> wire.CrewAnswer:
        crew = self.state.crew
        match message:
            case wire.Heartbeat():
                if crew is None or message.crew != crew.id or peer not in crew.members:
                    return wire.Refuse("crew", message.crew)
                self._heard(peer, message.status)
                return wire.Alive(message.crew, (self.state.crew or crew).own)
            case wire.Propose():
                return self._accept(peer, message.record)
            case wire.Leave():
                if crew is not None and message.crew == crew.id and peer in crew.members:
                    self._end(f"left: {message.reason}", peer)
            case Offer():
                self._take_offer(peer, message)
        return wire.Noted()

    def _answered(self, event: wire.Answered) -> None:
        peer, request, answer, crew = event.peer, event.request, event.answer, self.state.crew
        if answer is not None and peer in self.state.peers:
            took, known = event.seconds / 2, self._peer(peer).seconds
            before = took if known is None else known
            self._set_peer(peer, seconds=min(took, before + FARTHER * (took - before)))
        if event.foreign and peer in self.state.peers:
            self._set_peer(peer, foreign_until=self.now + self.settings.foreign_seconds)
        if crew is None or peer not in crew.members:
            return
        if isinstance(answer, wire.Alive) and answer.crew == crew.id:
            self._heard(peer, answer.status)
        elif isinstance(answer, wire.Refuse) and answer.crew == crew.id:
            joined, sent_at = crew.members[peer].joined_at, self.now - event.seconds
            if isinstance(request, wire.Propose):
                if answer.reason == "busy":
                    self._set_peer(peer, offer=None)  # until it offers again
                self._end(f"refused the crew: {answer.reason}", peer)
            elif joined is not None and sent_at > joined:  # else it had not accepted yet
                self._end("is not in this crew any more", peer)

    # ---- heartbeats ------------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        crew = self.state.crew
        if crew is not None:
            self._set(beat_at=self.now)
            for peer in crew.members:
                self._do(wire.Send(peer, wire.Heartbeat(crew.id, crew.own)))

    def _heard(self, peer: str, status: Status) -> None:
        """A sign of life of a member of our crew."""
        crew = self.state.crew
        assert crew is not None
        member = crew.members[peer]
        if member.suspected:
            self._note("refuted", peer)
        if member.status.phase == "active" and status.phase == "loading":
            status = member.status  # each message has its own stream: sent before, received later
        moved = (status.phase, status.progress) != (member.status.phase, member.status.progress)
        member = replace(
            member,
            status=status,
            heard_at=self.now,
            status_since=self.now if moved else member.status_since,
            joined_at=self.now if member.joined_at is None else member.joined_at,
            suspected=False,
        )
        self._set(crew=replace(crew, members={**crew.members, peer: member}))
        if status.phase == "failed":
            self._end("its stage failed", peer)
        elif not crew.founded:
            self._found()
        else:
            self._run_or_pause()

    def _run_or_pause(self) -> None:
        crew, phase = self.state.crew, self.state.phase
        if crew is None or not crew.founded:
            return
        calm = not any(member.suspected for member in crew.members.values())
        active = crew.own.phase == "active" and all(
            member.status.phase == "active" for member in crew.members.values()
        )
        if calm and active and phase != Phase.RUNNING:
            stood = self.state.stood_since
            recovered = None if stood is None else self.now - stood
            if phase == Phase.PREPARING:  # a pause moves no deadline
                self._set(crew=replace(crew, stepped_at=self.now))
            self._set(
                phase=Phase.RUNNING,
                stood_since=None,
                recovery_seconds=self.state.recovery_seconds if recovered is None else recovered,
            )
            self._note("running", "" if recovered is None else f"{recovered:.3f}")
            self._do(wire.Resumed(crew.id))
        elif not calm and phase == Phase.RUNNING:
            self._set(phase=Phase.PAUSED, stood_since=self.now)
            self._note("paused")
            self._do(wire.Suspended("a member is suspected"))

    def _end(self, why: str, peer: str = "") -> None:
        """Leave the crew, if there is one: founded or forming. `peer`: the cause, if it is another
        member."""
        crew = self.state.crew
        if crew is None:
            return
        cause = f"{peer} {why}" if peer else why
        for other in crew.members:
            self._do(wire.Send(other, wire.Leave(crew.id, _printable(cause))))
        if peer in crew.members and not crew.stepped:
            failures = self._peer(peer).failures + 1
            self._set_peer(peer, failures=failures)
            if failures >= FAILURES:
                self._strike(peer, f"{FAILURES} crews without a step: {why}")
        running = self.state.phase == Phase.RUNNING
        self._set(
            phase=Phase.FREE,
            crew=None,
            free_since=self.now - (0.0 if crew.stepped else crew.waited),
            stood_since=self.now if running else self.state.stood_since,
            plan_since=math.inf,
        )
        if crew.founded:
            self._set(offering=None)  # the trainer offers anew when it has stopped
            self._note("broken", cause)
            self._do(wire.Released(cause))
        else:
            if crew.proposer == self.state.me:
                pause = RETRY_SECONDS * 2.0 ** min(self.state.lapses, 4)
                retry_at = self.now + pause * self.means.rng.uniform(0.5, 1.5)
                self._set(retry_at=retry_at, lapses=self.state.lapses + 1)
            self._note("refused", cause)
            self._send_offers()

    # ---- offers ----------------------------------------------------------------------------------

    @property
    def _offers_itself(self) -> bool:
        state = self.state
        return state.crew is None and state.offering is not None and not state.draining

    def _own_offer(self) -> Offer:
        offering = self.state.offering
        if offering is None or self.state.draining:
            return Offer(bytes(HASH_BYTES), 0.0, 0.0, 0.0)
        capacity, hop = offering.capacity, self._hop_seconds()
        return Offer(offering.model, capacity.memory, capacity.speed, hop, offering.copies)

    def _hop_seconds(self) -> float:
        """Seconds of one micro-batch on our line and to the usual peer."""
        offering = self.state.offering
        line = offering.cost.batch_bytes / self.means.uplink() if offering is not None else 0.0
        return min(MOST_SECONDS, line + usual_seconds(self.state))

    def _send_offers(self) -> None:
        """Send our offer to all connected peers; its withdrawal once."""
        if not self._offers_itself and self.state.offered_at == LONG_AGO:
            return
        offered_at = self.now if self._offers_itself else LONG_AGO
        self._set(offered_at=offered_at, hop_offered=self._hop_seconds())
        for peer, known in self.state.peers.items():
            if known.connected:
                self._send_offer(peer)

    def _send_offer(self, peer: str) -> None:
        if self.now >= self._peer(peer).foreign_until:
            own = self._own_offer()
            self._do(wire.Send(peer, own if self._offers_itself else replace(own, memory=0.0)))

    def _take_offer(self, peer: str, offer: Offer) -> None:
        if not self._has_room(peer):
            return
        known, own = self._peer(peer), self.state.offering
        same = known.offer is not None and (known.offer.model, known.offer.copies) == (
            offer.model,
            offer.copies,
        )
        recent = known.offer is not None and (
            self.now - known.offered_at < self.settings.gather_seconds
        )
        was_foreign = self.now < known.foreign_until
        self._set_peer(peer, offer=offer, offered_at=self.now, foreign_until=LONG_AGO)
        if was_foreign and self._offers_itself:
            self._send_offer(peer)
        useful = offer.memory > 0 and (own is None or offer.model == own.model)
        if useful and not same and not recent:  # a peer that changes all the time delays nobody
            self._set(new_offer_at=self.now)
            self._consider()

    # ---- forming ---------------------------------------------------------------------------------

    def _consider(self) -> None:
        """Propose a crew when one is possible and it is this node's turn."""
        state, settings = self.state, self.settings
        if not self._offers_itself or self.now < state.retry_at:
            return
        plan = self._plan(self._usable(), self._waited)
        if plan is None or state.me not in peers_of(plan.record):
            self._set(plan_since=math.inf)
            return
        since = min(state.plan_since, self.now)
        self._set(plan_since=since)
        gathered = min(
            max(state.new_offer_at, state.free_since or 0.0) + settings.gather_seconds,
            since + 3 * settings.gather_seconds,
        )
        if plan.record.step == 0 and self.now < gathered:
            return
        candidates = sorted(peers_of(plan.record), key=self._precedence)
        if self.now - since >= candidates.index(state.me) * settings.turn_seconds:
            self._propose(plan)

    def _precedence(self, peer: str) -> tuple[int, str]:
        """Candidates propose in this order: the newest step first."""
        offer = self._own_offer() if peer == self.state.me else self._peer(peer).offer
        own = newest(offer.copies) if offer is not None else None
        return (-own.step if own is not None else 0, peer)

    def _offers(self) -> dict[str, Offer]:
        """Our offer and those of the peers that the operator trusts."""
        others = current_offers(self.state, self.now, self.settings)
        trusted = {peer: offer for peer, offer in others.items() if self.means.trusts(peer)}
        return {self.state.me: self._own_offer(), **trusted}

    def _usable(self) -> dict[str, Offer]:
        """The offers to plan with: without struck peers, unless no crew is possible without
        them."""
        offers = self._offers()
        struck = [peer for peer in offers if self._is_struck(peer)]
        struck.sort(key=lambda peer: self._peer(peer).struck_until)
        while struck and not self._is_possible_without(struck, offers):
            del struck[0]
        return {peer: offer for peer, offer in offers.items() if peer not in struck}

    def _is_possible_without(self, peers: Collection[str], offers: Mapping[str, Offer]) -> bool:
        """Return True if a crew without `peers` is possible, sooner or later: one that begins with
        the base only where no steps would be discarded."""
        plan = self._plan({p: offer for p, offer in offers.items() if p not in peers}, math.inf)
        stepped = any(newest(offer.copies) for offer in offers.values())
        return plan is not None and (plan.record.step > 0 or not stepped)

    def _plan(self, offers: Mapping[str, Offer], waited: float) -> CrewPlan | None:
        offering = self.state.offering
        assert offering is not None
        near = {p: known.seconds for p, known in self.state.peers.items() if known.seconds}
        return plan_crew(self.state.me, offers, offering.cost, self.settings, waited, near)

    def _propose(self, plan: CrewPlan) -> None:
        record, rng = plan.record, self.means.rng
        record = replace(
            record,
            lineage=record.lineage if record.step else rng.randbytes(HASH_BYTES),
            nonce=rng.randbytes(NONCE_BYTES),
        )
        lost = ", ".join(f"{first} to {last - 1}" for first, last in plan.lost)
        self._note(
            "proposed",
            f"step {record.step}, {len(record.members)} stages"
            + (f", nobody has layers {lost}" if lost and record.step else ""),
        )
        self._form(self.state.me, record)
        for peer in peers_of(record):
            if peer != self.state.me:
                self._do(wire.Send(peer, wire.Propose(record)))
        self._found()

    def _accept(self, proposer: str, record: Record) -> wire.CrewAnswer:
        crew = crew_id(record)
        if self.state.crew is not None and self.state.crew.id == crew:
            return wire.Accept(crew)
        why = self._why_not(proposer, record)
        if why is not None:
            self._note("refused", f"a crew of {proposer}: {why}")
            return wire.Refuse(why, crew)
        self._end(f"{proposer} proposes too")
        self._form(proposer, record)
        self._send_heartbeats()
        return wire.Accept(crew)

    def _why_not(self, proposer: str, record: Record) -> wire.Refusal | None:
        """Return why `record` is refused; None where it is accepted."""
        state, offering, peers = self.state, self.state.offering, peers_of(record)
        if state.me not in peers or proposer not in peers or proposer == state.me:
            return "record"
        if offering is None or state.draining:
            return "busy"
        if state.crew is not None and not (
            # of two that propose to each other, the candidate that comes first
            state.crew.proposer == state.me
            and not state.crew.founded
            and self._precedence(proposer) < self._precedence(state.me)
        ):
            return "busy"
        sizes = [member.layers for member in record.members]
        if record.model != offering.model or sum(sizes) != len(offering.cost.layers):
            return "model"
        if stage_memory(offering.cost, sizes, peers.index(state.me)) > offering.capacity.memory:
            return "room"
        if not all(peer == state.me or self.means.trusts(peer) for peer in peers):
            return "trust"
        if self._waited < discard_seconds(offering.copies, record, self.settings):
            return "newer"
        struck = [peer for peer in peers if self._is_struck(peer)]
        if struck and self._is_possible_without(struck, self._offers()):
            return "struck"
        return None

    def _form(self, proposer: str, record: Record) -> None:
        """Be a member: heartbeats carry this crew's id from now on."""
        peers = peers_of(record)
        members = {
            peer: MemberState(LOADING, heard_at=self.now, status_since=self.now)
            for peer in peers
            if peer != self.state.me
        }
        crew = Crew(
            record,
            crew_id(record),
            peers.index(self.state.me),
            proposer,
            since=self.now,
            waited=self._waited,
            members=members,
            step_seconds=self._step_seconds(record),
        )
        self._set(phase=Phase.FORMING, crew=crew, plan_since=math.inf)

    def _found(self) -> None:
        """Begin, once every member has sent a heartbeat."""
        crew, state = self.state.crew, self.state
        assert crew is not None
        if any(member.joined_at is None for member in crew.members.values()):
            return
        record = crew.record
        for peer in state.former:
            if peer not in crew.members:
                self._note("behind", f"{peer}: {self._why_behind(peer)}")
        if state.timed != record.lineage:
            self._set(timed=record.lineage, step_times=())
        crew = replace(crew, founded=True)
        self._set(phase=Phase.PREPARING, crew=crew, lapses=0, former=())
        self._send_offers()  # withdraws ours
        self._note("founded", f"step {record.step}, stage {crew.stage} of {len(record.members)}")
        layers = tuple(member.layers for member in record.members)
        self._do(
            wire.Assigned(
                crew.id,
                record.lineage,
                crew.stage,
                layers,
                peers_of(record),
                record.step,
                "",
                crew.step_seconds,
            )
        )

    def _why_behind(self, peer: str) -> str:
        """Return why a former member is not in the next crew, for the log."""
        known = self._peer(peer)
        if not known.connected:
            return "not connected"
        if not self.means.trusts(peer):
            return "excluded by stages.trust"
        if self._is_struck(peer):
            return f"{known.strikes} strikes, for {known.struck_until - self.now:.0f} s more"
        return "offers no stage" if known.offer is None else "another node holds its stage"

    def _step_seconds(self, record: Record) -> float:
        """Return the deadline of a step. Measured steps extend it at most fourfold: slow steps must
        not extend their own deadline without bound."""
        offering = self.state.offering
        assert offering is not None
        cost, sizes = offering.cost, [member.layers for member in record.members]
        offers = self._offers()
        speeds = [
            offers[peer].speed if peer in offers else offering.capacity.speed
            for peer in peers_of(record)
        ]
        slowest = max(
            sum(part.work for part in stage_parts(cost, sizes, stage)) / similar(speed, speeds)
            for stage, speed in enumerate(speeds)
        )
        way = 2 * len(sizes) * self._hop_seconds()
        planned = cost.batches * (slowest + (1 + cost.crossings) * way)
        least = max(self.settings.step_seconds, SLOWER_THAN_PLANNED * planned)
        times = self.state.step_times if self.state.timed == record.lineage else ()
        measured = SLOWER_THAN_MEASURED * median(times) if times else 0.0
        return min(max(least, measured), SLOWER_THAN_MEASURED * least)


def _printable(text: str) -> str:
    shown = "".join(character if " " <= character <= "~" else "?" for character in text)
    return shown[: wire.REASON_BYTES]


# The plan of a crew from offers. A crew continues at step n of a lineage where each block of layers
# has a copy in memory or an own checkpoint of step n or n − 1. A block without one is lost: its
# holder restores a neighbour's checkpoint of any age, or the base.
#
#     the newest exact step, if no offer is more than one step newer    at once
#     an older exact step                                               after exact_seconds
#     a step with lost blocks, as few as possible, and copies of half   after exact_seconds
#     the base, although steps were taken                               after lost_seconds

CONSIDERED: Final = 8
"""Lineages, and steps of a lineage, that a plan considers: those that most peers hold, and its
own."""
LEAST_SECONDS: Final = 0.001
MOST_SECONDS: Final = 10.0
"""Distances below and above count as 0 and as this."""
SPREAD: Final = 8.0
"""A claimed speed counts as at most so many times the median, and as at least its inverse."""
SLOW_LINE: Final = 4.0
USUAL_SECONDS: Final = 0.01
"""A node gets a smaller block for its line if that takes SLOW_LINE times what the usual line does,
or this. All others are planned alike: crews with the same blocks can average."""
_WHERE: Final = {"memory": 0, "disk": 1}

Block = tuple[int, int]
"""(first, last) layer, the last one not included."""


@dataclass(frozen=True)
class CrewPlan:
    record: Record
    """Its nonce is all zero, and so is its lineage where training begins."""
    lost: tuple[Block, ...]


def newest(copies: Collection[Copy]) -> Copy | None:
    """Return the newest copy of a node's own training; None for an untrained node."""
    own = [copy for copy in copies if copy.where != "neighbour" and copy.step > 0]
    return max(own, key=lambda copy: copy.step, default=None)


def discard_seconds(copies: Collection[Copy], record: Record, settings: Settings) -> float:
    """Return how long a node without a crew keeps `copies` rather than join `record`."""
    own = newest(copies)
    if own is None:
        return 0.0
    if record.lineage == own.lineage and record.step > 0:
        return 0.0 if abs(record.step - own.step) <= 1 else settings.exact_seconds
    return settings.exact_seconds if record.step > own.step else settings.lost_seconds


def plan_crew(
    me: str,
    offers: Mapping[str, Offer],
    cost: ModelCost,
    settings: Settings,
    waited: float,
    distances: Mapping[str, float] = MappingProxyType({}),
) -> CrewPlan | None:
    """Plan the crew to propose now; None where none is possible yet.

    Args:
        offers: by peer, our own included.
        waited: seconds since this node has been free.
        distances: one-way seconds to a peer, as measured by this node.
    """
    model = offers[me].model
    able = {
        peer: offer
        for peer, offer in sorted(offers.items())
        if offer.model == model and offer.memory > 0 and offer.speed > 0
    }
    if me not in able:
        return None
    own = newest(able[me].copies)
    best: CrewPlan | None = None
    lineages = Counter(
        lineage
        for offer in able.values()
        for lineage in {copy.lineage for copy in offer.copies if copy.step > 0}
    )
    considered = {lineage for lineage, _ in lineages.most_common(CONSIDERED)}
    plans = [
        plan
        for lineage in sorted(considered | ({own.lineage} if own is not None else set()))
        if (plan := _continue(me, able, cost, lineage, distances))
    ]
    for plan, wait in ((plan, _wait(plan, able, me, settings)) for plan in plans):
        if waited >= wait and (best is None or _rank(plan, own) > _rank(best, own)):
            best = plan
    if best is not None and (me in peers_of(best.record) or waited < settings.lost_seconds):
        return best
    if waited < settings.lost_seconds:
        if lineages and (own is not None or plans):
            return None  # soon there is something better than the base
        able = {peer: offer for peer, offer in able.items() if newest(offer.copies) is None}
    return _begin(me, able, cost, settings.stages, distances)


def _rank(plan: CrewPlan, own: Copy | None) -> tuple[bool, int, int, bytes]:
    same = own is not None and own.lineage == plan.record.lineage
    return same, -len(plan.lost), plan.record.step, plan.record.lineage


def _wait(plan: CrewPlan, able: Mapping[str, Offer], me: str, settings: Settings) -> float:
    """Seconds without a crew after which this node proposes `plan`."""
    record = plan.record
    ahead = any(
        copy.lineage == record.lineage and copy.step > record.step + 1 and copy.where != "neighbour"
        for offer in able.values()
        for copy in offer.copies
    )
    wait = settings.exact_seconds if plan.lost or ahead else 0.0
    return max(wait, discard_seconds(able[me].copies, record, settings))


def _continue(
    me: str,
    able: Mapping[str, Offer],
    cost: ModelCost,
    lineage: bytes,
    distances: Mapping[str, float],
) -> CrewPlan | None:
    """Plan a crew that continues `lineage`: at its newest exact step, else with as few lost blocks
    as possible."""
    copies = [
        (peer, copy)
        for peer, offer in able.items()
        for copy in offer.copies
        if copy.lineage == lineage and copy.step > 0 and copy.last <= len(cost.layers)
    ]
    points = Counter(step for _, step in {(p, c.step) for p, c in copies if c.where != "neighbour"})
    common = sorted(points, key=lambda step: (-points[step], -step))[:CONSIDERED]
    mine = [c.step for p, c in copies if p == me and c.where != "neighbour"]
    considered = {*common, *mine, *(step + 1 for step in mine if step + 1 in points)}
    best: CrewPlan | None = None
    for step in sorted(considered, reverse=True):
        blocks = _blocks(step, copies, len(cost.layers))
        placed = _place(me, step, blocks, copies, able, cost, distances)
        if placed is None:
            continue
        holders, lost = placed
        if len(blocks) == 1 and holders[0] != me:
            continue  # a node that would hold all layers alone needs nobody's proposal
        members = tuple(
            Member(peer, last - first) for peer, (first, last) in zip(holders, blocks, strict=True)
        )
        record = Record(lineage, able[me].model, step, members, bytes(NONCE_BYTES))
        if not lost:
            return CrewPlan(record, ())
        if best is None or len(lost) < len(best.lost):
            best = CrewPlan(record, lost)
    return best


def _is_exact(copy: Copy, step: int) -> bool:
    return copy.where != "neighbour" and step - 1 <= copy.step <= step


def _blocks(step: int, copies: Sequence[tuple[str, Copy]], layers: int) -> tuple[Block, ...]:
    """Cut the model as it was cut: consecutive blocks of which there are copies, with as few lost
    layers as possible. Layers of which nobody has a copy are cut into blocks of at most the largest
    known size."""
    known: dict[Block, int] = {}
    for _, copy in copies:
        lost = 0 if _is_exact(copy, step) else copy.last - copy.first
        known[copy.layers] = min(lost, known.get(copy.layers, lost))
    edges = sorted({0, layers, *(edge for block in known for edge in block)})
    largest = max(last - first for first, last in known)
    edges = sorted({cut for a, b in pairwise(edges) for cut in (*range(a, b, largest), b)})
    # first layer → (lost layers, blocks) of the best way to it
    ways: dict[int, tuple[int, int, tuple[Block, ...]]] = {0: (0, 0, ())}
    for start, following in pairwise(edges):
        if start not in ways:
            continue
        lost, _, blocks = ways[start]
        options = {block: cost for block, cost in known.items() if block[0] == start}
        for block, cost in (options or {(start, following): following - start}).items():
            way = (lost + cost, len(blocks) + 1, (*blocks, block))
            if len(way[2]) <= MEMBERS and way < ways.get(block[1], (layers + 1, 0, ())):
                ways[block[1]] = way
    return ways[layers][2] if layers in ways else ((0, layers),)


def _place(
    me: str,
    step: int,
    blocks: Sequence[Block],
    copies: Sequence[tuple[str, Copy]],
    able: Mapping[str, Offer],
    cost: ModelCost,
    distances: Mapping[str, float],
) -> tuple[tuple[str, ...], tuple[Block, ...]] | None:
    """Return a holder for each block, and the blocks that are lost: a peer that has a block keeps
    it, the other blocks go to the spares that fit, first to those with an older copy of it. None
    where a block has no holder, or where nobody has any copy of more than half of the blocks."""
    sizes = [last - first for first, last in blocks]
    needs = {block: stage_memory(cost, sizes, stage) for stage, block in enumerate(blocks)}
    exact: dict[Block, dict[str, int]] = {block: {} for block in blocks}
    older: dict[tuple[str, Block], int] = {}
    for peer, copy in copies:
        if copy.layers not in needs:
            continue
        if _is_exact(copy, step) and able[peer].memory >= needs[copy.layers]:
            where = _WHERE[copy.where]
            exact[copy.layers][peer] = min(where, exact[copy.layers].get(peer, where))
        if copy.step <= step:
            older[peer, copy.layers] = max(copy.step, older.get((peer, copy.layers), 0))
    choices = {peer: sum(peer in holders for holders in exact.values()) for peer in able}
    worth = {
        peer: (rough(distances.get(peer, 0.0)), -offer.memory * offer.speed, peer)
        for peer, offer in able.items()
    }
    chosen: dict[Block, str] = {}
    for block in sorted(blocks, key=lambda block: (len(exact[block]), block)):
        free = {peer: where for peer, where in exact[block].items() if peer not in chosen.values()}
        if free:
            chosen[block] = min(
                free, key=lambda peer: (peer != me, choices[peer], free[peer], worth[peer])
            )
    lost = tuple(block for block in blocks if block not in chosen)
    copied = {block for _, block in older}
    if 2 * sum(block not in copied for block in lost) > len(blocks):
        return None  # too little is left to continue from
    for block in sorted(lost, key=lambda block: -needs[block]):
        spares = [
            peer
            for peer, offer in able.items()
            if peer not in chosen.values() and offer.memory >= needs[block]
        ]
        if not spares:
            return None
        chosen[block] = min(spares, key=lambda peer: (-older.get((peer, block), 0), worth[peer]))
    return tuple(chosen[block] for block in blocks), lost


def _begin(
    me: str,
    able: Mapping[str, Offer],
    cost: ModelCost,
    stages: int,
    distances: Mapping[str, float],
) -> CrewPlan | None:
    """Plan a crew that begins with the base, of the nearest nodes or of the largest."""
    near = {peer: 0.0 if peer == me else rough(distances.get(peer, 0.0)) for peer in able}
    size = {peer: able[peer].memory * able[peer].speed for peer in able}
    # this node's own plan has this node in it
    orders = (
        sorted(able, key=lambda peer: (peer != me, near[peer], -size[peer], peer))[:MEMBERS],
        sorted(able, key=lambda peer: (peer != me, -able[peer].memory, peer))[:MEMBERS],
    )
    best: tuple[float, tuple[Member, ...]] | None = None
    for peers in orders:
        speeds = [able[peer].speed for peer in peers]
        usual = max(USUAL_SECONDS, median(able[peer].hop_seconds for peer in peers))
        capacities = tuple(
            Capacity(
                able[peer].memory,
                similar(able[peer].speed, speeds),
                min(hop, MOST_SECONDS) if hop > SLOW_LINE * usual else 0.0,
            )
            for peer, hop in ((peer, able[peer].hop_seconds) for peer in peers)
        )
        apart = tuple(
            tuple(_apart(near[a], near[b], me in (a, b)) if a != b else 0.0 for b in peers)
            for a in peers
        )
        found = make_plan(cost, capacities, apart, stages)
        if found is not None and (best is None or found.seconds < best[0]):
            members = zip(found.members, found.layers, strict=True)
            best = found.seconds, tuple(Member(peers[index], count) for index, count in members)
    if best is None:
        return None
    # a node that would hold all layers alone may do so; the others do not wait for it
    if len(best[1]) == 1 and (alone := best[1][0].peer) != me:
        rest = {peer: offer for peer, offer in able.items() if peer != alone}
        return _begin(me, rest, cost, stages, distances)
    record = Record(bytes(HASH_BYTES), able[me].model, 0, best[1], bytes(NONCE_BYTES))
    return CrewPlan(record, ())


def rough(seconds: float) -> float:
    """Round a distance to a power of two: a new measurement changes no plan."""
    return 0.0 if seconds < LEAST_SECONDS else 2.0 ** round(math.log2(min(seconds, MOST_SECONDS)))


def similar(speed: float, speeds: Collection[float]) -> float:
    """Round a claimed speed to the median times a power of two, at most SPREAD from it."""
    usual = median(speeds)
    return usual * min(SPREAD, max(1 / SPREAD, 2.0 ** round(math.log2(speed / usual))))


def _apart(one: float, other: float, exact: bool) -> float:
    """Estimate the seconds between two nodes from our own distances to them: between their
    difference and their sum, closer to the difference, since equally far nodes are often in one
    place. `exact`: one of the two is this node."""
    return max(one, other) if exact else 0.75 * abs(one - other) + 0.25 * (one + other)


# ---- blocks of layers for members ----------------------------------------------------------------


@dataclass(frozen=True)
class LayerPlan:
    members: tuple[int, ...]
    """The member that is stage 0, 1, …"""
    layers: tuple[int, ...]
    """Layers of each stage."""
    seconds: float
    """Seconds of a micro-batch: in the slowest stage, and on all its ways through the stages."""


@lru_cache(maxsize=64)
def make_plan(
    model: ModelCost,
    members: tuple[Capacity, ...],
    apart: tuple[tuple[float, ...], ...],
    stages: int = 0,
) -> LayerPlan | None:
    """Plan the fastest crew of the first one, two, … of `members`; the smaller crew where the
    larger one is no faster. None where no crew can hold the model.

    A further stage makes the slowest stage faster and the way through all stages longer. Stages are
    ordered from each possible first stage by always going to the nearest member.

    Args:
        apart: one-way seconds between each two members.
        stages: exactly so many; 0 for as many as is fastest.
    """
    best: LayerPlan | None = None
    for count in range(stages or 1, (stages or len(members)) + 1):
        for order in _orders(members, count, apart):
            split = _split(model, [members[index] for index in order])
            if split is None:
                continue
            layers, slowest = split
            way = sum(apart[a][b] for a, b in pairwise((*order, order[0])))
            seconds = slowest + model.crossings * way
            if best is None or seconds < best.seconds * (1 - 1e-6):
                best = LayerPlan(order, layers, seconds)
    return best


def _orders(
    members: Sequence[Capacity], count: int, apart: Sequence[Sequence[float]]
) -> list[tuple[int, ...]]:
    """Orders of the first `count` members to try."""
    if count > len(members):
        return []
    orders = []
    for first in range(count):
        order, left = [first], [index for index in range(count) if index != first]
        while left:
            order.append(min(left, key=lambda index: (apart[order[-1]][index], index)))
            left.remove(order[-1])
        orders.append(tuple(order))
    # the ends also hold embedding and head
    largest = sorted(range(count), key=lambda index: -members[index].memory)
    return [*orders, (*largest[:1], *largest[2:], *largest[1:2])]


def _split(model: ModelCost, members: Sequence[Capacity]) -> tuple[tuple[int, ...], float] | None:
    """Cut the layers into a block for each of `members`, in this order, such that the slowest stage
    is as fast as their memory allows: its time is found by halving. Returns (layers, seconds)."""
    count = len(model.layers)
    memory = [0.0, *accumulate(part.memory for part in model.layers)]
    work = [0.0, *accumulate(part.work for part in model.layers)]

    def seconds(index: int, start: int, end: int) -> float:
        """Infinite where layers [start, end) do not fit."""
        member, is_last = members[index], index == len(members) - 1
        ends = [model.embedding] * (index == 0) + [model.head] * is_last
        need = model.stage + memory[end] - memory[start] + sum(part.memory for part in ends)
        if need > member.memory:
            return math.inf
        took = (work[end] - work[start] + sum(part.work for part in ends)) / member.speed
        return took + (0.0 if is_last else member.hop_seconds)

    def fill(bound: float) -> tuple[tuple[int, ...], float] | None:
        """Each member takes layers while it stays within `bound` and leaves one for each later
        member."""
        layers, start, slowest = [], 0, 0.0
        for index in range(len(members)):
            later = len(members) - 1 - index
            end = start + 1 if later else count
            while later and end < count - later and seconds(index, start, end + 1) <= bound:
                end += 1
            took = seconds(index, start, end) if start < end <= count - later else math.inf
            if took > bound:
                return None
            layers.append(end - start)
            start, slowest = end, max(slowest, took)
        return tuple(layers), slowest

    best = fill(sys.float_info.max)
    low = 0.0
    while best is not None and best[1] - low > 1e-6 * best[1]:
        middle = (low + best[1]) / 2
        if (better := fill(middle)) is not None:
            best = better
        else:
            low = middle
    return best


# ---- what a node shows of its crew ---------------------------------------------------------------

CrewState = Literal["none", "forming", "preparing", "running", "paused"]
SlotState = Literal["loading", "active", "failed", "suspect"]


class SlotStatistics(msgspec.Struct, frozen=True):
    """One stage of the crew, from its record and heartbeats."""

    stage: int
    peer: str
    """Its holder."""
    state: SlotState
    """Phase of the stage, or that its holder is suspected."""
    step: int
    """Committed steps."""
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
    """From the end or pause of the last running crew to one that runs."""
    peer_seconds: float = 0.0
    """One-way time of a message to the usual peer."""


def statistics(state: State, now: float, settings: Settings) -> CrewStatistics:
    crew = state.crew
    shown = CrewStatistics(
        state="none" if crew is None else cast("CrewState", state.phase.value),
        offers=len(current_offers(state, now, settings)),
        recovery_seconds=state.recovery_seconds,
        peer_seconds=usual_seconds(state),
    )
    if crew is None or not crew.founded:
        return shown
    slots = []
    for stage, (peer, layers) in enumerate((one.peer, one.layers) for one in crew.record.members):
        member = crew.members.get(peer)
        status = crew.own if member is None else member.status
        suspected = member is not None and member.suspected
        slot = "suspect" if suspected else status.phase
        slots.append(SlotStatistics(stage, peer, cast("SlotState", slot), status.step, layers))
    return replace(
        shown,
        id=crew.id.hex(),
        stage=crew.stage,
        slots=tuple(slots),
        standing_seconds=0.0 if state.stood_since is None else now - state.stood_since,
    )


def current_offers(state: State, now: float, settings: Settings) -> dict[str, Offer]:
    """Return the other nodes' offers that have not expired."""
    oldest = now - 3 * settings.offer_seconds
    return {
        peer: known.offer
        for peer, known in state.peers.items()
        if known.offer is not None and known.offer.memory > 0 and known.offered_at >= oldest
    }


def usual_seconds(state: State) -> float:
    """Return the median one-way time to connected peers: a few that answer early or late do not
    move it far."""
    near = [
        known.seconds
        for known in state.peers.values()
        if known.connected and known.seconds is not None
    ]
    return min(MOST_SECONDS, median(near)) if near else 0.0
