"""Messages about crews, with their bounds. No torch.

From top to bottom: the record of a crew and the blocks that a node holds; messages between this
node's trainer and its network process; requests and answers between network processes; the first
messages of a stream between trainers. Protocol/04 describes the bytes between nodes.
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.stages.specs import ModelCost
from swarmnode.stages.stage_frames import MAX_STAGES
from swarmnode.wire import strict
from swarmnode.wire.fields import ANY_COUNTER, check_between, check_fields, check_name
from swarmnode.wire.limits import PEER_ID_BYTES

# The crew record: immutable. Its hash is the crew's id.
#
#     lineage      32 random bytes, drawn when training leaves the base; later crews keep them
#     step         (lineage, number): steps that were committed since the base
#     held block   the layers of one stage of (lineage, step), in a node's memory or on its disk

BASE_WAIT_SECONDS: Final = 600.0
"""A node that has taken steps starts from the base after this time without a crew."""
HASH_BYTES: Final = 32
NONCE_BYTES: Final = 8
MAX_LAYERS: Final = 1024
MAX_HELD_BLOCKS: Final = 4 * MAX_STAGES
"""Maximum number of held blocks in one offer."""
RECORD_DOMAIN: Final = b"swarmnode/crew-record/1"
MAX_AMOUNT: Final = 1e30
"""The largest memory or speed that a peer may claim."""

BlockLocation = Literal["memory", "disk", "neighbour"]
"""Where a held block is: in the trainer's memory (`memory`), or in the node's own checkpoint
(`disk`). `neighbour`: a block that this node did not train, either a checkpoint that another member
sent, or a stage in memory that was restored from another source than its own checkpoint and has
taken no step here."""


class CrewMember(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Holder of a stage."""

    peer: str
    """Peer id."""
    layers: int
    """Number of layers of its stage."""


class CrewRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a crew. Records with equal hashes describe the same crew."""

    lineage: bytes
    """32 bytes."""
    model: bytes
    """32 bytes: hash of the base weights and of the settings that all members share
    (`crew_model.crew_terms`)."""
    step: int
    """Number of committed steps that the crew continues from; 0 is the base."""
    members: tuple[CrewMember, ...]
    """Members in the order of their stages."""
    nonce: bytes
    """8 random bytes, because the same members may form another crew at the same step."""


class HeldBlock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stage's block of layers, at one step of a lineage, that a node has in memory or on disk."""

    lineage: bytes
    layers: tuple[int, ...]
    """Number of layers of each stage of the crew that trained it."""
    stage: int
    step: int
    where: BlockLocation


def crew_id(record: CrewRecord) -> bytes:
    """Return the crew's id, 32 bytes. Frames carry the first 16."""
    return hashlib.blake2b(RECORD_DOMAIN + strict.encode(record), digest_size=HASH_BYTES).digest()


def member_peers(record: CrewRecord) -> tuple[str, ...]:
    """Return the members' peer ids by stage."""
    return tuple(member.peer for member in record.members)


# Messages between trainer and network process:
#
#     trainer                                           network process
#     TrainerOffer   free memory and blocks held     ─▶ offered to peers
#                    build and restore the stage     ◀─ StageAssignment  a crew has formed
#     StageStatus    loading, active, failed         ─▶ heartbeats
#                    start work                      ◀─ CrewStart        all stages are active
#     StageFault     this crew cannot continue       ─▶ the crew ends; strike for the stage's holder
#                    stop; weights stay in memory    ◀─ CrewEnd          the crew has ended
#
# Either side may restart at any moment. A trainer that connects sends TrainerOffer if it is in no
# crew, and StageStatus if it is.

StagePhase = Literal["loading", "active", "failed"]
"""`active`: the stage can take the next step. `failed`: its weights cannot be restored from any
source, or its device failed."""
SOURCES: Final = ("", "memory", "checkpoint", "neighbour", "base", "checkfree", "checkfree+")
"""Sources of a stage's weights. `neighbour`: a checkpoint that another node trained, from any
node's disk. Empty while the stage loads, and for a crew that starts at step 0."""


class TrainerOffer(msgspec.Struct, frozen=True, tag="stages_offering"):
    """Offer of a trainer that works in no crew. It is sent at every connection, after CrewEnd once
    the trainer has stopped, and whenever a value changes."""

    model: bytes
    """32 bytes, as in `CrewRecord`."""
    memory: float
    """Bytes for a stage."""
    speed: float
    """Floating-point operations per second, > 0. Only ratios count."""
    cost: ModelCost
    """Costs of the whole model, from which the node plans crews."""
    held_blocks: tuple[HeldBlock, ...] = ()
    """Blocks that the node has in memory and on disk."""


class StageStatus(msgspec.Struct, frozen=True, tag="stages_status"):
    """State of the trainer's stage, sent at every change and each second. None means not
    measured."""

    crew: bytes
    stage: int
    phase: StagePhase
    step: int = 0
    """Committed steps."""
    progress: int = 0
    """Number that grows with each frame, micro-batch and step. If it is constant while the trainer
    has work, the trainer hangs."""
    source: str = ""
    """One of SOURCES."""
    source_seconds: float | None = None
    """Seconds from StageAssignment until the stage had weights from that source."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint of this stage that a neighbour stores."""
    checkpoint_age_steps: int | None = None
    """Steps of this stage that the loss of its node and disk would cost: all of them while no
    neighbour stores a checkpoint. None in a crew of one."""
    copy_age_steps: int | None = None
    """Steps by which the policy copy that this node samples from is behind its crew."""
    copy_bytes: int | None = None
    """Bytes received for the last refresh of the policy copy."""
    bubble_share: float | None = None
    """Share of the last step in which this stage waited."""
    tokens_per_second: float | None = None
    reason: str = ""
    """Cause of the stage's failure, as text for the operator."""
    load: int = 0
    """Number of pieces of work that the stage has received and not finished."""
    dropped: dict[str, int] = {}
    """Frames that this trainer process dropped, by FENCE_REASONS and FRAME_REASONS."""
    state_refused: dict[str, int] = {}
    """Bad messages and refused requests on state streams in this crew, by reason."""


class StageFault(msgspec.Struct, frozen=True, tag="stages_fault"):
    """Report that this crew cannot continue. Every trainer sends it from its own observation."""

    crew: bytes
    stage: int | None
    """Stage that failed. None if a deadline of the head expired and the head does not know which
    stage missed it."""
    reason: str


class StageAssignment(msgspec.Struct, frozen=True, tag="stages_assigned"):
    """Stage that the trainer is to hold in a new crew. It replaces an earlier assignment."""

    crew: bytes
    """32 bytes. Frames carry the first 16."""
    lineage: bytes
    stage: int
    layers: tuple[int, ...]
    """Number of layers of each stage: the input of `stage_specs`."""
    members: tuple[str, ...]
    """Peer id of each stage's holder."""
    step: int
    """Number of committed steps that the crew continues from; 0 is the base model."""
    socket: str
    """Path of the Unix socket for streams to the other stages."""


class CrewStart(msgspec.Struct, frozen=True, tag="stages_started"):
    """Order to start work: all stages are active."""

    crew: bytes


class CrewEnd(msgspec.Struct, frozen=True, tag="stages_released"):
    """End of the crew. Weights stay in memory and on disk, for the next crew."""

    reason: str


FromTrainer = TrainerOffer | StageStatus | StageFault
ToTrainer = StageAssignment | CrewStart | CrewEnd


# Crew messages between network processes:
#
#     request      answer
#     Offer        Noted                  free memory, and the blocks held
#     Propose      Accept | Refuse        an invitation to a crew
#     Heartbeat    Alive | Refuse         every second; proves that the sender is in that crew
#     Leave        Noted
#
# One message is one frame of the request protocol, canonical msgpack with the tag `type` first, at
# most MESSAGE_BYTES. Every value is checked before use. The connection authenticates the sender.

MESSAGE_BYTES: Final = 16 * 1024
REASON_BYTES: Final = 128

CrewRefusal = Literal["busy", "crew", "model", "room", "newer", "trust", "struck", "record"]
"""Reason of a node that refuses a proposal or a heartbeat:

    busy     it has no trainer, is in a crew, or forms one
    crew     it is not in that crew
    model    it trains another model
    room     the stage does not fit its memory
    newer    the record would discard its steps, and it has not waited long enough for another crew
    trust    its operator excludes a member
    struck   a member is excluded by a strike, and a crew is possible without that member
    record   the record does not name this node, or not the proposer
"""


class MemberStatus(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """State of the sender's stage in the crew that the message names."""

    phase: StagePhase = "loading"
    step: int = 0
    """Committed steps."""
    progress: int = 0
    """Number that grows with each piece of work."""
    load: int = 0
    """Number of pieces of work that the stage has received and not finished."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="offer"):
    """Offer of a node without a crew to hold a stage. It is sent to all connected peers when it
    changes, and every `offer_seconds`."""

    model: bytes
    """32 bytes, as in `CrewRecord`."""
    memory: float
    """Bytes for a stage. 0 withdraws the offer: the sender is in a crew, or has no trainer."""
    speed: float
    """As in `TrainerOffer`."""
    held_blocks: tuple[HeldBlock, ...] = ()


class ProposeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="propose"):
    """Invitation to the crew of `record`."""

    record: CrewRecord


class AcceptAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accept"):
    """Answer to ProposeRequest: the sender is a member from now on, and sends heartbeats."""

    crew: bytes


class RefuseAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refuse"):
    """Answer to ProposeRequest or Heartbeat: the sender is not in that crew."""

    reason: CrewRefusal
    crew: bytes = bytes(HASH_BYTES)


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="heartbeat"):
    """Sign of life of a member, sent every second to each other member."""

    crew: bytes
    status: MemberStatus


class AliveAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="alive"):
    """Answer to Heartbeat, with the sender's own status."""

    crew: bytes
    status: MemberStatus


class LeaveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="leave"):
    """Report that the sender has left this crew."""

    crew: bytes
    reason: str = ""


class NotedAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="noted"):
    """Receipt for Offer and LeaveRequest."""


CrewRequest = Offer | ProposeRequest | Heartbeat | LeaveRequest
CrewAnswer = NotedAnswer | AcceptAnswer | RefuseAnswer | AliveAnswer
CrewMessage = CrewRequest | CrewAnswer


def decode_request(data: bytes) -> CrewRequest:
    """Decode and check a request.

    Raises:
        BadMessage: The reason is `oversize`, `malformed`, `schema`, `bounds` or `not_finite`.
    """
    message: CrewRequest = strict.decode(data, CrewRequest, MESSAGE_BYTES)
    check_message(message)
    return message


def decode_answer(data: bytes) -> CrewAnswer:
    """Decode and check an answer.

    Raises:
        BadMessage: The reason is `oversize`, `malformed`, `schema`, `bounds` or `not_finite`.
    """
    message: CrewAnswer = strict.decode(data, CrewAnswer, MESSAGE_BYTES)
    check_message(message)
    return message


_MESSAGE_LENGTHS: Final = {
    **dict.fromkeys(("crew", "model", "lineage"), HASH_BYTES),
    "nonce": NONCE_BYTES,
}
_MESSAGE_RANGES: Final = {
    **dict.fromkeys(("step", "progress", "load"), ANY_COUNTER),
    **dict.fromkeys(("memory", "speed"), (0.0, MAX_AMOUNT)),
}


def check_message(message: CrewMessage) -> None:
    """Check the values of a crew message.

    Raises:
        BadMessage: The reason is `bounds` or `not_finite`.
    """
    check_fields(message, _MESSAGE_LENGTHS, _MESSAGE_RANGES)
    match message:
        case Offer():
            check_between("held_blocks", len(message.held_blocks), 0, MAX_HELD_BLOCKS)
            for held in message.held_blocks:
                check_fields(held, _MESSAGE_LENGTHS, _MESSAGE_RANGES)
                check_between("layers", len(held.layers), 1, MAX_STAGES)
                check_between("stage", held.stage, 0, len(held.layers) - 1)
                for count in held.layers:
                    check_between("layers", count, 1, MAX_LAYERS)
        case ProposeRequest():
            record = message.record
            check_fields(record, _MESSAGE_LENGTHS, _MESSAGE_RANGES)
            check_between("members", len(record.members), 1, MAX_STAGES)
            for member in record.members:
                check_name("peer", member.peer, PEER_ID_BYTES)
                check_between("layers", member.layers, 1, MAX_LAYERS)
            if len(set(member_peers(record))) != len(record.members):
                raise BadMessage("bounds", "a peer twice")
        case Heartbeat() | AliveAnswer():
            check_fields(message.status, {}, _MESSAGE_RANGES)
        case LeaveRequest():
            check_between("reason", len(message.reason), 0, REASON_BYTES)
            if not all(" " <= character <= "~" for character in message.reason):
                raise BadMessage("bounds", "reason")


# The first messages of a stage stream, each `u32be length ‖ canonical msgpack`. The rest of the
# stream belongs to the trainers.

OPEN_BYTES: Final = 512
"""Maximum number of bytes of an encoded StreamOpen or StreamReady."""
StreamKind = Literal["frames", "state"]
"""`frames`: activations and the step commit. `state`: checkpoints."""


class StreamOpen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message of a stream: dialler → acceptor.

    Also trainer → network process, the first and only message of a connection on the Unix socket.
    The connection then carries the stream to the trainer of `to_stage`, both ways. The network
    process closes it when the stream is lost, when the crew ends, and when the trainer opens the
    same stream again.
    """

    crew: bytes
    from_stage: int
    to_stage: int
    kind: StreamKind


class StreamReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Acceptor → dialler: the acceptor's trainer has opened its end."""

    crew: bytes
