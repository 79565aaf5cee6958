"""Settings, events, actions and state of crew membership, and a crew's statistics. No torch."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from swarmnode.stages.crew_messages import (
    BASE_WAIT_SECONDS,
    CrewAnswer,
    CrewRecord,
    CrewRequest,
    FromTrainer,
    MemberStatus,
    Offer,
    StagePhase,
    ToTrainer,
    TrainerOffer,
)

# ---- settings, events and actions ----------------------------------------------------------------
#
# Each RequestReceived gets exactly one SendAnswer. Actions run in order.


class MembershipSettings(msgspec.Struct, frozen=True):
    """Constants of crew membership, and the operator's setting `stages`."""

    base_wait_seconds: float = BASE_WAIT_SECONDS
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
    """Maximum number of peers whose state is stored."""


class ClockTick(msgspec.Struct, frozen=True):
    """Event that occurs every `tick_seconds`. Its lateness measures the lag of this process."""

    heard: Mapping[str, float] = {}
    """Member → time when bytes of any kind last came from it."""


class RequestReceived(msgspec.Struct, frozen=True):
    """Event: a request of an authenticated peer arrived. `decode_request` has checked it."""

    peer: str
    message: CrewRequest


class RequestFinished(msgspec.Struct, frozen=True):
    """Event: a SendRequest has an outcome."""

    peer: str
    request: CrewRequest
    answer: CrewAnswer | None
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


Event = (
    ClockTick
    | RequestReceived
    | RequestFinished
    | GarbageReceived
    | StreamLost
    | PeerDisconnected
    | PeerConnected
    | FromTrainer
    | TrainerDisconnected
    | DrainStarted
)


class SendAnswer(msgspec.Struct, frozen=True):
    """Action: send the answer to the RequestReceived that was just handled."""

    message: CrewAnswer


class SendRequest(msgspec.Struct, frozen=True):
    """Action: send this request. Its outcome is a RequestFinished event. Requests do not wait for
    each other."""

    peer: str
    message: CrewRequest


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

Action = SendAnswer | SendRequest | ToTrainer | Note
"""Stage streams belong to the crew of the last StageAssignment, and end with CrewEnd. The service
fills in the assignment's `socket`."""


# ---- state ---------------------------------------------------------------------------------------

LONG_AGO: Final = -1e18


class Phase(enum.Enum):
    """Phase of a node's membership; see the diagram in `crew.py`. In PREPARING, stages are
    restored: a heartbeat names them `loading`, and state messages name them `restoring`."""

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
    trainer_offer: TrainerOffer | None = None
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


# ---- statistics for status page and metrics ------------------------------------------------------


class MemberStatistics(msgspec.Struct, frozen=True):
    """State of one member and its stage, from the crew's record and heartbeats."""

    stage: int
    """Number of the stage."""
    peer: str
    """Peer id of its holder."""
    state: StagePhase
    """Phase of the stage."""
    step: int
    """Number of committed steps."""
    layers: int
    """Number of layers."""


class CrewStatistics(msgspec.Struct, frozen=True):
    """State of this node's crew, if it has one."""

    state: str = Phase.FREE.value
    """Phase of the crew: none, forming, preparing or running."""
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


def statistics(state: State, now: float, settings: MembershipSettings) -> CrewStatistics:
    """Return the state of this node's crew for status page and metrics."""
    crew = state.crew
    shown = CrewStatistics(
        state=state.phase.value,
        offers=len(current_offers(state, now, settings)),
        recovery_seconds=state.recovery_seconds,
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
