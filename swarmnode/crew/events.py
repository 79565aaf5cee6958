"""What crew control hears and what it wants done: the words between `control.py`, which is pure, and whoever carries it out. No torch.

`CrewControl(me, sign, verify, settings, rng, memory)` in `control.py`:

    me        own peer id
    sign      data → 64 bytes; verify: (peer, data, signature) → bool, False for a peer id without a key in it
    settings  Settings
    rng       random.Random; nothing else is random. Never the same twice: a start without memory draws its incarnation from it, and whoever
              draws that of a process before it votes again in its name
    memory    what the last Persist said, b"" after a start without it
    .handle(event, now) → list[Action], `now` any monotonic seconds of this machine; carry the actions out in order
    .roster, .statistics()

A Received is answered by exactly one Answer among its actions. A Persist must be on disk before the actions after it are carried out.
Send a Tick every `settings.tick_seconds`, also when other things happen: how late it comes is how slow this process is.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from swarmnode.crew import local, messages
from swarmnode.crew.messages import Record

CrewState = Literal["none", "forming", "running", "paused", "recovering"]
"""`none`: in no crew. `forming`: founded, and no step taken yet. DISSOLVED is an event, not a place to stay: it leads to `none`."""
SlotState = Literal["vacant", "claimed", "loading", "probation", "active", "suspect", "draining"]
NOTES = (
    "founded", "adopted", "running", "paused", "suspected", "refuted", "evicted", "claimed", "settled", "fenced", "dissolved", "released",
    "refused", "stalled", "moved",
)  # fmt: skip


class Settings(msgspec.Struct, frozen=True):
    """Seconds, unless it says otherwise."""

    stages: int = 0
    """Of a crew that this node founds; 0 is what the planner finds fastest."""
    tick_seconds: float = 0.5
    heartbeat_seconds: float = 1.0
    offer_seconds: float = 10.0
    """Between two offers to the same peer where nothing has changed; an offer counts for three times as long."""
    offer_retry_seconds: float = 2.0
    """Until one that was not answered is said again, OFFER_TRIES times."""
    foreign_seconds: float = 300.0
    """No offer to a peer that does not speak of crews, for so long."""
    left_out_seconds: float = 6.0
    """Who did not sign our founding record is in none of our plans for so long."""
    plan_seconds: float = 3.0
    """Between two plans, whatever others offer."""
    idle_seconds: float = 300.0
    """A crew that runs and has nothing for our stage to do from its start is left after so long."""
    gather_seconds: float = 3.0
    """A crew is founded when no new offer came for so long."""
    request_seconds: float = 2.0
    """Until a proposal without a majority is tried again."""
    lease_seconds: float = 30.0
    """Who is not heard by a majority for half of it stops by itself."""
    sigma_floor_seconds: float = 1.0
    phi: float = 8.0
    gone_seconds: float = 3.0
    """A member without a connection is replaced after so long where a spare is there."""
    evict_seconds: float = 13.0
    """Any other silent member loses its seat after so long."""
    restart_seconds: float = 20.0
    """A member whose process answers, but has no trainer, loses its seat to a spare after so long."""
    stuck_seconds: float = 25.0
    """Voters who hear a member well no longer protect it when the crew has stood still for so long."""
    wait_seconds: float = 120.0
    """A crew that stands still for so long dissolves."""
    witness_seconds: float = 30.0
    """An even crew without a witness takes a free node for one when it has run for so long: that is a new record, and a pause."""
    slow_steps: float = 4.0
    """No progress for so many times the slow step (99th percentile) is a failure."""
    most_peers: int = 64
    """That offers are sent to and remembered of."""


# ---- events ----------------------------------------------------------------------------------------------------------------------


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class Received(msgspec.Struct, frozen=True):
    """A request of an authenticated peer, decoded by `messages.decode_request`."""

    peer: str
    message: messages.Request


class Answered(msgspec.Struct, frozen=True):
    """What became of a Send: None for a timeout, a refused dial, or an answer that was no message."""

    peer: str
    request: messages.Request
    answer: messages.Answer | None
    foreign: bool = False
    """It does not speak this protocol at all."""


class StreamLost(msgspec.Struct, frozen=True):
    """A stage stream to `peer` of this roster broke or was reset. Not for those that CloseStreams or a newer roster ended."""

    peer: str
    roster_epoch: int


class PeerGone(msgspec.Struct, frozen=True):
    """The last connection to `peer` is down."""

    peer: str


class PeerBack(msgspec.Struct, frozen=True):
    """`peer` is connected; also said of everybody connected at the start."""

    peer: str


class TrainerOffers(msgspec.Struct, frozen=True):
    """Our trainer is there and can hold a stage. Said at each of its connections. A new trainer process holds nothing in memory, so
    `fresh` is whether it is another process than the last one."""

    offering: local.Offering
    fresh: bool = True
    crew: bytes = messages.NO_CREW
    """Whose stage it has on disk, if it said so."""
    stage: int = 0
    step: int = 0


class TrainerStatus(msgspec.Struct, frozen=True):
    status: local.StageStatus


class TrainerLeft(msgspec.Struct, frozen=True):
    """The trainer's connection ended, or its process did."""


class Drain(msgspec.Struct, frozen=True):
    """This node wants to stop politely: say so, hold nothing more, offer nothing more."""

    reason: str


Event = Tick | Received | Answered | StreamLost | PeerGone | PeerBack | TrainerOffers | TrainerStatus | TrainerLeft | Drain


# ---- actions ---------------------------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True):
    """To the Received just handled."""

    message: messages.Answer


class Send(msgspec.Struct, frozen=True):
    """Ask `peer`; tell what became of it as Answered. Later ones need not wait for earlier ones."""

    peer: str
    message: messages.Request


class Persist(msgspec.Struct, frozen=True):
    """Write this over what the last Persist said, durably, before the actions that follow."""

    memory: bytes


class TellTrainer(msgspec.Struct, frozen=True):
    """`Assigned.socket` is empty: whoever owns the socket fills it in."""

    message: local.ToTrainer


class OpenStreams(msgspec.Struct, frozen=True):
    """Streams of this roster are welcome and of no other; those of an earlier one end."""

    roster: Record


class CloseStreams(msgspec.Struct, frozen=True):
    """No stage stream is welcome."""


class RestartTrainer(msgspec.Struct, frozen=True):
    """Our trainer has work and does none of it: end its process, so that its supervisor starts another."""

    reason: str


class Note(msgspec.Struct, frozen=True):
    """For logs and metrics: `what` is one of NOTES."""

    what: str
    detail: str = ""


Action = Answer | Send | Persist | TellTrainer | OpenStreams | CloseStreams | RestartTrainer | Note


class SlotStatistics(msgspec.Struct, frozen=True):
    stage: int
    peer: str
    """Empty where vacant."""
    stage_epoch: int
    state: SlotState
    step: int


class ControlStatistics(msgspec.Struct, frozen=True):
    state: CrewState
    crew: str
    """Hex; empty outside a crew."""
    roster_epoch: int
    stage: int | None
    """Held by us."""
    slots: tuple[SlotStatistics, ...]
    fenced: bool
    """No majority heard us for half a lease."""
    offers: int
    """Of others, alive."""
    notes: dict[str, int]
    """Counts of what was noted, all of NOTES."""
    standing_seconds: float
    """Since the crew last took steps; 0 while it does."""
    recovery_seconds: float | None
    """From the last pause to running again."""


class Control(Protocol):
    """What `CrewControl` is to those who drive it."""

    @property
    def roster(self) -> Record | None: ...
    @property
    def may_average(self) -> bool: ...
    def within_lease(self, now: float) -> bool: ...
    def handle(self, event: Event, now: float) -> list[Action]: ...
    def statistics(self) -> ControlStatistics: ...
