"""What the trainer and the network process tell each other about a crew. Tensors go through `pipes.py`, never through these. No torch.

    trainer                                        network process
    Offering      this much of a stage I can hold ─▶ control: offers it, or keeps it for the next vacancy
                  build the stage, restore it     ◀─ Assigned      a roster with us in it was adopted
    StageStatus   loading, probation, active, …   ─▶ control, heartbeats
                  take or drop a last step        ◀─ Settled       everybody who kept a stage has said where it stopped
                  drop what is under way, wait    ◀─ Suspended     somebody is suspected
                  go on                           ◀─ Resumed       he was there after all
                  links and fences anew           ◀─ Assigned      a new roster; `held`: the stage in memory stays
                  forget the stage                ◀─ Released      dissolved, or evicted

Either side may be replaced at any moment. A trainer that (re)connects says Offering and, if it has a stage, StageStatus; the network
process answers the first with Assigned where this node still has a slot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from swarmnode.crew.plan import Capacity, ModelCost

StagePhase = Literal["loading", "ready", "probation", "active", "failed", "idle"]
"""`ready`: a stage that was in memory has stopped under a new roster, says its step and waits for Settled. After that, and after a gate
where there was one, it is `active`."""
RUNGS = ("", "R0", "R1", "R2", "R3", "R4", "R5", "R6")
"""Where a stage's weights came from; empty for a founding member, who has the base model's."""


def socket_file(data_dir: Path) -> Path:
    """Of the Unix socket that `pipes.Pipes` listens on."""
    return data_dir / "run" / "stages.sock"


# ---- trainer → network ----------------------------------------------------------------------------------------------------------


class Offering(msgspec.Struct, frozen=True, tag="stages_offering"):
    """Sent at every connection and whenever a number changes."""

    model: bytes
    """32 bytes: which weights, and what a crew that trains them must have alike (`crew_model.crew_terms`)."""
    capacity: Capacity
    cost: ModelCost
    """Of the model's parts, so that whoever founds a crew can plan it."""


class StageStatus(msgspec.Struct, frozen=True, tag="stages_status"):
    """At every change, and each second while there is a stage. None means not measured (yet)."""

    crew: bytes
    """32 bytes."""
    roster_epoch: int
    stage: int
    phase: StagePhase
    step: int = 0
    """Committed steps."""
    progress: int = 0
    """Counts anything that was done: frames handled, micro-batches, steps. One that stands still is a trainer that hangs."""
    rung: str = ""
    """Of RUNGS."""
    rung_seconds: float | None = None
    """From Assigned to the stage being loaded by that rung."""
    squared_norm: float = 0.0
    """Of its last raw gradient: what CheckFree weights this stage by."""
    shadow_step: int | None = None
    """Of the newest copy that a neighbour has of this stage."""
    shadow_age_steps: int | None = None
    probe_kl: float | None = None
    """Nats per token, of the gate after the last recovery."""
    bubble_share: float | None = None
    """Of the last step's time in which this stage waited."""
    tokens_per_second: float | None = None
    reason: str = ""
    """Why it failed, for people."""
    prepared: bool = False
    """It has acknowledged the next step (`commit.Participant.phase`) and would take it."""
    attempt: int = 0
    """Of the step it is prepared for, or else of the last one taken."""
    clip: float = 1.0
    """Of the last step taken: what a stage that missed the commit needs to take it too."""
    learning_rate: float = 0.0
    """Of the last step taken."""
    load: int = 0
    """Pieces of work in hand: nothing done while there are some is a trainer that hangs."""
    dropped: dict[str, int] = {}
    """Frames that counted for nothing, by reason of `fence` and `frames`; of this trainer process."""


# ---- network → trainer ----------------------------------------------------------------------------------------------------------


class Assigned(msgspec.Struct, frozen=True, tag="stages_assigned"):
    """A roster with this node in it: hold this stage. A later one replaces an earlier one, and its streams are others."""

    crew: bytes
    """32 bytes. Frames carry the first 16."""
    roster_epoch: int
    stage: int
    stage_epochs: tuple[int, ...]
    """Of all stages: what `fence.Fence` wants."""
    layers: tuple[int, ...]
    """Of all stages: what `spec.stage_specs` wants."""
    members: tuple[str, ...]
    """Peer id that holds each stage; empty while it is vacant."""
    step: int
    """Committed steps, as far as the roster knows."""
    founding: bool
    """Everybody begins with the base model."""
    held: bool
    """This trainer process holds this stage in memory already, as far as the network process knows."""
    socket: str
    """Path of the Unix socket for streams to the other stages."""


class Suspended(msgspec.Struct, frozen=True, tag="stages_suspended"):
    """Pause: begin nothing. Weights, optimizer and streams stay."""

    reason: str


class Resumed(msgspec.Struct, frozen=True, tag="stages_resumed"):
    roster_epoch: int


class Settled(msgspec.Struct, frozen=True, tag="stages_settled"):
    """All stages that were kept have stopped under this roster, and this is how many steps the crew has taken (`settling`).

    A stage with one step less is prepared for it and takes it, with these numbers; one with as many drops its gradients. Then it is
    `active`. A stage that is restored counts as having taken as many.
    """

    roster_epoch: int
    step: int
    attempt: int = 0
    clip: float = 1.0
    learning_rate: float = 0.0


class Released(msgspec.Struct, frozen=True, tag="stages_released"):
    """This node holds no stage any more; the stage's memory may go."""

    reason: str


# ---- over the Unix socket of pipes.py -------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer → network, the first and only message of a connection: `u32be length ‖ msgpack`. What follows is the stream itself, both
    ways, to the trainer of `stage`; until that has opened its own end, what is written waits. The network process closes the connection
    when the stream is lost, when there is a newer roster, and when somebody opens the same again."""

    crew: bytes
    roster_epoch: int
    stage: int
    """The other one's."""
    kind: Literal["frames", "state"]


FromTrainer = Offering | StageStatus
ToTrainer = Assigned | Settled | Suspended | Resumed | Released
