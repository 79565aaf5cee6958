"""What crew control is notified of and what it wants done: between `control.py`, which is pure, and
whoever carries it out. No torch.

A Received is answered by exactly one Answer among its actions. Actions are carried out in order.
Send a Tick every `tick_seconds`, also when other things happen: how late it comes is how slow this
process is.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from swarmnode.crew import local, messages

NOTES = (
    "proposed",
    "founded",
    "running",
    "paused",
    "suspected",
    "refuted",
    "broken",
    "refused",
    "blamed",
    "left",
)


class Settings(msgspec.Struct, frozen=True):
    """Seconds, unless it says otherwise."""

    stages: int = 0
    """The number of stages of a crew that begins with the base; 0 is what the planner finds
    best."""
    lost_seconds: float = 120.0
    """A node that has learnt something begins anew after so long without a crew."""
    tick_seconds: float = 0.5
    heartbeat_seconds: float = 1.0
    offer_seconds: float = 10.0
    """Between two offers to the same peer where nothing has changed; an offer counts for three
    times as long."""
    foreign_seconds: float = 300.0
    """No offer to a peer that does not speak of crews, for so long."""
    gather_seconds: float = 3.0
    """A crew that begins with the base is proposed when no new offer came for so long, or after
    three times that."""
    turn_seconds: float = 3.0
    """A proposal lives so long, and who is next in turn waits so long."""
    exact_seconds: float = 12.0
    """An older copy of a stage will do after so long: its holder's own is exact, and may be on its
    way back."""
    join_seconds: float = 6.0
    """A member that has not been heard in a new crew after so long has not joined."""
    gone_seconds: float = 5.0
    """A member without a connection is given up after so long."""
    evict_seconds: float = 13.0
    """Any other silent member."""
    prepare_seconds: float = 300.0
    """A stage that is being restored, and shows no sign of progress."""
    restore_bytes_per_second: float = 1e6
    """It may take prepare_seconds and its memory by this rate in all, whatever progress it
    reports."""
    step_seconds: float = 900.0
    """A crew that runs and takes no step for so long is left."""
    slow_steps: float = 10.0
    """Or for so many times what its training takes, by the plan: completions and evaluations are
    computed besides, token by token."""
    slow_lines: float = 2.0
    """And for so many times what the way of all tokens through all stages takes messages, whose
    time it has measured."""
    bar_seconds: float = 10.0
    """How long a peer is left out because of which a crew ended or was not founded, at least: as
    long as it cost, doubled each time. The time that it works with us is taken off."""
    most_peers: int = 64
    """Whose offers are remembered."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""

    heard: Mapping[str, float] = {}
    """Member → when bytes of whatever kind last came from it."""


class Received(msgspec.Struct, frozen=True):
    """A request of an authenticated peer, decoded by `messages.decode_request`."""

    peer: str
    message: messages.Request


class Answered(msgspec.Struct, frozen=True):
    """What came back for a Send: None for a timeout, a refused dial, or an answer that was no
    message."""

    peer: str
    request: messages.Request
    answer: messages.Answer | None
    foreign: bool = False
    """It does not speak this protocol at all."""
    seconds: float | None = None
    """What a message takes to it, one way, by how long this answer took; None without one."""


class StreamLost(msgspec.Struct, frozen=True):
    """A stage stream to `peer` in this crew broke or was reset. Not for those that the end of the
    crew or a newer one ended."""

    peer: str
    crew: bytes


class PeerGone(msgspec.Struct, frozen=True):
    """The last connection to `peer` is down."""

    peer: str


class PeerBack(msgspec.Struct, frozen=True):
    """`peer` is connected; also said of everybody connected at the start."""

    peer: str


class TrainerLeft(msgspec.Struct, frozen=True):
    """The trainer's connection ended, or its process did."""


class Drain(msgspec.Struct, frozen=True):
    """This node wants to stop politely: hold nothing more, offer nothing more."""

    reason: str


Event = (
    Tick
    | Received
    | Answered
    | StreamLost
    | PeerGone
    | PeerBack
    | local.FromTrainer
    | TrainerLeft
    | Drain
)
"""What our trainer says is an event as it is."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to the Received just handled."""

    message: messages.Answer


class Send(msgspec.Struct, frozen=True):
    """Ask `peer`; tell what came of it as Answered. Later ones need not wait for earlier ones."""

    peer: str
    message: messages.Request


class Note(msgspec.Struct, frozen=True):
    """For logs and metrics: `what` is one of NOTES."""

    what: str
    detail: str = ""


Action = Answer | Send | local.ToTrainer | Note
"""What our trainer is to be told is an action as it is, and says what becomes of stage streams:
from an Assigned on (its `socket` is empty, whoever owns the socket fills it in) they are welcome of
this crew and of no other, after a Released of none."""
