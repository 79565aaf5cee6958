"""What the trainer and the network process tell each other about a crew. Tensors go through
`stream_proxy.py`. No torch.

    trainer                                        network process
    Offering      this much fits, these copies are here ─▶ control: offers it
                  build the stage, restore it     ◀─ Assigned      a crew with us in it was founded
    StageStatus   loading, probation, active, …   ─▶ control, heartbeats
                  drop what is under way, wait    ◀─ Suspended     somebody is suspected
                  begin, or go on                 ◀─ Resumed       all stages are active
    Blames        no step comes of these stages   ─▶ control: without its holder, then
                  stop; weights stay in memory    ◀─ Released      the crew is over
    Offering      with what was in memory and on disk then ─▶ control: offers that

Either side may be replaced at any moment. A trainer that (re)connects says Offering where it is in
no crew, and StageStatus where it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from swarmnode.crew.plan import Capacity, ModelCost
from swarmnode.crew.record import Copy, Taken

StagePhase = Literal["loading", "probation", "active", "failed"]
RUNGS = ("", "R0", "R1", "R2", "R3", "R4", "R5", "R6")
"""Where a stage's weights came from; empty for a founding member, who has the base model's."""


def socket_file(data_dir: Path) -> Path:
    """The Unix socket that `stream_proxy.StreamProxy` listens on."""
    return data_dir / "run" / "stages.sock"


# ---- trainer → network ---------------------------------------------------------------------------


class Offering(msgspec.Struct, frozen=True, tag="stages_offering"):
    """Sent by a trainer that works in no crew: at every connection, once it has stopped after
    Released, and whenever a number changes."""

    model: bytes
    """32 bytes: which weights, and what a crew that trains them must have alike
    (`trainer.crew.model.crew_terms`)."""
    capacity: Capacity
    cost: ModelCost
    """What the model's parts cost, so that whoever founds a crew can plan it."""
    copies: tuple[Copy, ...] = ()


class StageStatus(msgspec.Struct, frozen=True, tag="stages_status"):
    """At every change, and each second while there is a stage. None means not measured (yet)."""

    crew: bytes
    """32 bytes."""
    stage: int
    phase: StagePhase
    step: int = 0
    """Committed steps."""
    progress: int = 0
    """Counts anything that was done: frames handled, micro-batches, steps. One that stands still is
    a trainer that hangs."""
    rung: str = ""
    """One of RUNGS."""
    rung_seconds: float | None = None
    """From Assigned to the stage being loaded by that rung."""
    shadow_step: int | None = None
    """The step of the newest copy that a neighbour has of this stage."""
    shadow_age_steps: int | None = None
    """Steps that its loss would cost where only shadows are left: all of them while nobody has a
    copy. None in a crew of one."""
    copy_age_steps: int | None = None
    """Steps by which the whole copy that this node samples from is behind its crew; None where
    there is none."""
    copy_bytes: int | None = None
    """What came for its last refresh."""
    probe_kl: float | None = None
    """Nats per token, of the gate after the last recovery."""
    bubble_share: float | None = None
    """The share of the last step in which this stage waited."""
    tokens_per_second: float | None = None
    reason: str = ""
    """Why it failed, for people."""
    load: int = 0
    """Pieces of work in hand: nothing done while there are some is a trainer that hangs."""
    dropped: dict[str, int] = {}
    """Frames that counted for nothing, by reason of `fence` and `frames`; of this trainer
    process."""
    state_refused: dict[str, int] = {}
    """What others sent on state streams that is not what it has to be, and what they asked for and
    did not get, by reason; in this crew."""


class Blames(msgspec.Struct, frozen=True, tag="stages_blames"):
    """The head's trainer: steps fail again and again, and always because of this stage, or of one
    of these that contradict each other."""

    crew: bytes
    stages: tuple[int, ...]
    reason: str
    seconds: float = 0.0
    """For how long it has been spoiling steps, among others that were taken."""
    beside: tuple[int, ...] = ()
    """Stages that contradict these: all of them are bad, if these are not."""


# ---- network → trainer ---------------------------------------------------------------------------


class Assigned(msgspec.Struct, frozen=True, tag="stages_assigned"):
    """A crew with this node in it: hold this stage. A later one replaces an earlier one, and its
    streams are others."""

    crew: bytes
    """32 bytes. Frames carry the first 16."""
    lineage: bytes
    """32 bytes."""
    stage: int
    layers: tuple[int, ...]
    """The layers of every stage: what `spec.stage_specs` wants."""
    members: tuple[str, ...]
    """Peer id that holds each stage."""
    step: int
    """Committed steps that the crew goes on from; 0 is the base model."""
    hash: bytes
    """32 bytes: the step hash of these."""
    taken: Taken
    """How the last of them was taken: a stage in memory that has prepared for it takes it now."""
    socket: str
    """Path of the Unix socket for streams to the other stages."""
    step_seconds: float = 900.0
    """So long the crew may take no step until its other members give up its head."""


class Suspended(msgspec.Struct, frozen=True, tag="stages_suspended"):
    """Pause: begin nothing. Weights, optimizer and streams stay."""

    reason: str


class Resumed(msgspec.Struct, frozen=True, tag="stages_resumed"):
    crew: bytes


class Released(msgspec.Struct, frozen=True, tag="stages_released"):
    """The crew is over. What is in memory and on disk stays, for the next one."""

    reason: str


# ---- over the Unix socket of stream_proxy.py -----------------------------------------------------

Kind = Literal["frames", "state"]
"""What a stream is for."""


class Open(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trainer → network, the first and only message of a connection: `u32be length ‖ msgpack`. What
    follows is the stream itself, both ways, to the trainer of `stage`; until that has opened its
    own end, what is written waits. The network process closes the connection when the stream is
    lost, when there is a newer crew, and when somebody opens the same again."""

    crew: bytes
    stage: int
    """The other one's."""
    kind: Kind


FromTrainer = Offering | StageStatus | Blames
ToTrainer = Assigned | Suspended | Resumed | Released
