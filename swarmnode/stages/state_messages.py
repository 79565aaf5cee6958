"""Checkpoints and other bodies between trainers: messages and their bounds. No torch."""

from __future__ import annotations

import hashlib
from typing import Final, Literal

from swarmnode.errors import BadMessage
from swarmnode.stages.stage_frames import (
    ActivationCodec,
    FrameHeader,
    FrameLimits,
    activation_bytes,
    check_header,
    read_message,
)
from swarmnode.weights.layout import Layout, elements
from swarmnode.wire import headed
from swarmnode.wire.fields import check_length

# State messages between trainers:
#
#     u32be header length ‖ header (canonical msgpack, tagged by `type`) ‖ body of a Chunk or a Run
#
#     Ask ──▶ Inventory                bodies that the receiver has for the sender's stage
#     Want ──▶ Have, Chunk … | Lack    a body of a stage, from a given byte on
#     Run ──▶ Have, Chunk … | Lack     activations in, activations or log-probabilities out
#     Announce ──▶                     the sender has a new checkpoint. A member that stores it
#                                      answers with Want, and sends Stored when it is on disk
#
# A body arrives only on request. Its length follows from the model or has a cap, and a different
# `size` is refused before allocation. A chunk has at most 1 MiB. A body is used only after its hash
# matches. A class is named after its `type` on the wire.

STATE_REASONS: Final = (
    "oversize",
    "malformed",
    "schema",
    "bounds",
    "size",
    "hash",
    "not_finite",
    "shape",
    "truncated",
)
"""Every reason with which a state stream's messages and bodies raise BadMessage."""
STATE_REFUSALS: Final = (*STATE_REASONS, "busy", "failed", "timeout", "lacking")
"""STATE_REASONS, and four more. `busy`: a member sent too many requests at a time. `failed`: this
node's disk or device failed at a request. `timeout`, `lacking`: an announced body did not arrive in
time, or its stage did not send it."""
ROOT_BYTES: Final = 32
StateForm = Literal["full", "small", "plain"]
"""full: float32 weights with AdamW's moments and counts. small: bfloat16 weights. plain: float32
weights."""
StatePhase = Literal["starting", "restoring", "ready"]
"""starting: it is not known yet whether the stage has weights. restoring: it has none. ready: it
has its weights."""
BodyKind = Literal["checkpoint", "layers", "tied", "ends", "copy", "output"]
SharedBody = Literal["checkpoint", "ends"]
"""Bodies of a stage that other members store."""
RequestedBody = Literal["checkpoint", "layers", "tied", "ends", "copy"]
LackReason = Literal["none", "loading", "refused", "busy", "failed"]


class StateMessage(FrameHeader, frozen=True):
    """Fields that every state message has."""

    request: int
    """Number that the requester chose; answers repeat it. 0 in messages without an answer."""


class AskMessage(StateMessage, frozen=True, tag="ask"):
    """Query for the bodies that the receiver has for the sender's stage."""


class InventoryMessage(StateMessage, frozen=True, tag="inventory"):
    """Answer to AskMessage. A field is None if the sender has no such body."""

    phase: StatePhase
    """Phase of the sender's stage."""
    checkpoint: int | None
    """Committed steps in the stored checkpoint of the asking stage."""
    ends: int | None
    """Committed steps in the stored embedding, or norm and head, of the asking stage."""


class WantMessage(StateMessage, frozen=True, tag="want"):
    """Request for a body."""

    what: RequestedBody
    of: int
    """Stage that the body belongs to: the sender's or the receiver's."""
    at: int
    """First byte to send. Above 0 only for a checkpoint, to resume a transfer."""
    root: bytes
    """Hash of the body that is resumed, 32 bytes; empty if `at` is 0. If the receiver has another
    body by now, it sends that one from its first byte."""


class RunMessage(StateMessage, frozen=True, tag="run"):
    """Request to run a micro-batch. Body: a description (`MicroBatch`) ‖ activations."""

    codec: ActivationCodec | None
    """None for the first stage, which takes no activations."""
    rows: int
    about: int
    """Length of the description in bytes."""


class HaveMessage(StateMessage, frozen=True, tag="have"):
    """Answer to WantMessage and RunMessage. Chunks with the requested bytes of the body follow."""

    what: BodyKind
    step: int
    """Committed steps in the body."""
    size: int
    """Length of the whole body in bytes."""
    root: bytes
    """32 bytes: blake2b of the whole body."""
    squared_norm: float = 0.0
    """Squared norm of the last gradient of the stage's layers before clipping: CheckFree's
    weight."""


class ChunkMessage(StateMessage, frozen=True, tag="chunk"):
    """Bytes `at` … `at + length − 1` of a body."""

    at: int
    length: int


class LackMessage(StateMessage, frozen=True, tag="lack"):
    """Answer to WantMessage and RunMessage: the sender sends no body."""

    reason: LackReason


class AnnounceMessage(StateMessage, frozen=True, tag="announce"):
    """Announcement of a new body that other members store."""

    what: SharedBody
    step: int
    """Committed steps in the body."""


class StoredMessage(StateMessage, frozen=True, tag="stored"):
    """Report that the receiver's checkpoint of this step is on the sender's disk."""

    step: int


StateAnswer = InventoryMessage | HaveMessage | ChunkMessage | LackMessage
AnyStateMessage = (
    AskMessage | WantMessage | RunMessage | AnnounceMessage | StoredMessage | StateAnswer
)


def hash_body(body: bytes | bytearray | memoryview) -> bytes:
    """Return the hash of a body, 32 bytes."""
    return hashlib.blake2b(body, digest_size=ROOT_BYTES).digest()


def state_bytes(layout: Layout, form: StateForm) -> int:
    """Return the length of a state in bytes. The full form has a float32 count for each tensor."""
    per_value = {"full": 12, "small": 2, "plain": 4}[form]
    return per_value * elements(layout) + (4 * len(layout) if form == "full" else 0)


async def read_state(
    stream: headed.Reader, limits: FrameLimits
) -> tuple[AnyStateMessage, bytes] | None:
    """Return the next state message and its body; None at the end of the stream.

    Raises:
        BadMessage: The reason is `oversize`, `malformed`, `schema`, `bounds`, `not_finite` or
            `truncated`.
    """
    return await read_message(
        stream, AnyStateMessage, lambda message: _state_body_bytes(message, limits)
    )


def _state_body_bytes(message: AnyStateMessage, limits: FrameLimits) -> int:
    """Return the exact length of the body after this header.

    Raises:
        BadMessage: The reason is `bounds` or `not_finite`.
    """
    check_header(message, limits)
    match message:
        case WantMessage():
            if message.at and message.what != "checkpoint":
                raise BadMessage("bounds", f"a part of {message.what}")
            check_length("root", message.root, ROOT_BYTES if message.at else 0)
        case HaveMessage():
            check_length("root", message.root, ROOT_BYTES)
        case ChunkMessage():
            return message.length
        case RunMessage():
            codec, rows = message.codec, message.rows
            return message.about + (activation_bytes(codec, rows, limits.hidden) if codec else 0)
    return 0
