"""Messages between two nodes that precede a transfer of weights (protocol/03-weights.md, sections 2
and 7)."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from swarmnode.weights.fragments import BLOCKS
from swarmnode.wire import strict
from swarmnode.wire.fields import ANY_COUNTER, COUNTER, check_between, check_fields

MESSAGE_BYTES: Final = 256
ID_BYTES: Final = 16
HASH_BYTES: Final = 32
FRAGMENTS: Final = 1024
BLOCK_BYTES: Final = BLOCKS // 8


class Here(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="here"):
    """The sender's claim: its policy, outer step and blocks. Answered by a `Here`."""

    fingerprint: bytes
    """32 bytes."""
    outer_step: int
    """The sender's outer step counter. Used only to compute lag."""
    blocks: bytes = b""
    """All blocks of the sender, packed by `fragments.pack`, 1 to 128 bytes."""


class Swap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="swap"):
    """Request to average some blocks of a fragment with the sender. Answered at once by Accepted,
    Busy or Refused."""

    id: bytes
    """Id of the swap: 16 random bytes, never used before."""
    fingerprint: bytes
    fragment: int
    outer_step: int
    blocks: bytes = b""
    """Blocks that are due, packed as above."""


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accepted"):
    """Answer to a Swap: the sender takes part and copies its weights now."""

    id: bytes
    outer_step: int
    blocks: bytes = b""
    """The subset of the requested blocks that is swapped."""


class Busy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="busy"):
    """Answer to a Swap: another swap is under way, or a limit is reached. Answer to a Payload: the
    sender is still writing the payload."""

    id: bytes


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refused"):
    """Answer to a Swap or a Payload: the sender does not take part."""

    id: bytes
    reason: Literal["other_policy", "over", "stranger"]
    """`other_policy`: another fingerprint, or no common block of the fragment. `over`: the id was
    used before, or the swap has ended. `stranger`: the sender averages with known peers only."""


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="payload"):
    """Request for the receiver's payload of a swap. Answered by Ready, Busy or Refused."""

    id: bytes


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """Answer to a Payload: the payload can be fetched by bulk transfer (protocol/05-bulk.md)."""

    id: bytes
    transfer: bytes
    """32 bytes."""
    root: bytes
    """32 bytes."""
    size: int
    outer_step: int
    """Outer steps that the fragment had taken when the weights were copied."""


Message = Here | Swap | Accepted | Busy | Refused | Payload | Ready


class StateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="state_request"):
    """Request for the receiver's outer state. The connection is reset unless the receiver has the
    same fingerprint and blocks, so that it holds the same tensors."""

    fingerprint: bytes
    blocks: bytes = b""
    """All blocks of the sender, packed as above."""


class StateResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="state_response"):
    """Answer to a StateRequest: the state can be fetched by bulk transfer."""

    outer_step: int
    transfer: bytes
    root: bytes
    size: int


_LENGTHS: Final = {
    "id": ID_BYTES,
    "fingerprint": HASH_BYTES,
    "transfer": HASH_BYTES,
    "root": HASH_BYTES,
}
_RANGES: Final = {
    "outer_step": ANY_COUNTER,
    "size": (1, COUNTER),
    "fragment": (0, FRAGMENTS - 1),
}


def decode_message(data: bytes) -> Message:
    """Decode and check a message of the swap protocol.

    Raises:
        BadMessage: The reason is `oversize`, `malformed`, `schema` or `bounds`.
    """
    message: Message = _decode(data, Message)
    return message


def decode_state(data: bytes) -> StateRequest | StateResponse:
    """Decode and check a message of the state protocol.

    Raises:
        BadMessage: As `decode_message`.
    """
    message: StateRequest | StateResponse = _decode(data, StateRequest | StateResponse)
    return message


def _decode(data: bytes, kind: Any) -> Any:  # noqa: ANN401
    message = strict.decode(data, kind, MESSAGE_BYTES)
    check_fields(message, _LENGTHS, _RANGES)
    if isinstance(message, Here | Swap | Accepted | StateRequest):
        check_between("blocks", len(message.blocks), 1, BLOCK_BYTES)
        check_between("blocks' last byte", message.blocks[-1], 1, 255)
    return message
