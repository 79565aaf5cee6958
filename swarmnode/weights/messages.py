"""What two nodes send each other before tensors move: small frames, except a state's manifest."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from swarmnode.weights.fragments import BLOCKS
from swarmnode.wire import strict
from swarmnode.wire.fields import ANY_COUNTER, COUNTER, check_between, check_fields

MESSAGE_BYTES: Final = 256
ID_BYTES: Final = 16
STATE_REQUEST_BYTES: Final = 128
STATE_BYTES: Final = 4 * 2**20
"""A manifest of a state names every tensor."""
HASH_BYTES: Final = 32
FRAGMENTS: Final = 1024
RETRY_SECONDS: Final = 3600
BLOCK_BYTES: Final = BLOCKS // 8


class Here(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="here"):
    """What the sender averages, and how far it is; answered by the same."""

    fingerprint: bytes
    """32 bytes."""
    outer_step: int
    """The sender's outer step counter: a claim, used for lag only."""
    blocks: bytes = b""
    """What the sender holds, as `fragments.pack` makes it, of 1 to 128 bytes; here and below."""


class Swap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="swap"):
    """Average a fragment with the sender. Answered at once by Accepted, Busy or Refused."""

    id: bytes
    """16 random bytes, never used before: the swap's name."""
    fingerprint: bytes
    fragment: int
    outer_step: int
    blocks: bytes = b""


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accepted"):
    """The sender takes part: it copies its weights now."""

    id: bytes
    outer_step: int
    blocks: bytes = b""


class Busy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="busy"):
    """Not now: to a Swap, another one is under way; to a Payload, it is not encoded yet."""

    id: bytes
    retry_seconds: int = 0


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refused"):
    id: bytes
    reason: Literal["other_policy", "over"]
    """`other_policy`: nothing in common. `over`: no swap of this id is under way any more."""


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="payload"):
    """Where is your payload of this swap? Answered by Ready, Busy or Refused."""

    id: bytes


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The payload can be fetched, as protocol/05-bulk.md says."""

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
    """What is your outer state?"""

    fingerprint: bytes


class StateResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="state_response"):
    manifest: bytes
    """An envelope around a StateManifest, signed by the responder."""
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
    "retry_seconds": (0, RETRY_SECONDS),
}


def encode_message(message: Message | StateRequest | StateResponse) -> bytes:
    return strict.encode(message)


def decode_message(data: bytes) -> Message:
    """Raises BadMessage: oversize, malformed, schema or bounds."""
    message: Message = strict.decode(data, Message, MESSAGE_BYTES)
    check_fields(message, _LENGTHS, _RANGES)
    if isinstance(message, Here | Swap | Accepted):
        check_between("blocks", len(message.blocks), 1, BLOCK_BYTES)
        check_between("blocks' last byte", message.blocks[-1], 1, 255)
    return message


def decode_state(data: bytes) -> StateRequest | StateResponse:
    """Raises BadMessage as `decode_message` does."""
    message: StateRequest | StateResponse = strict.decode(
        data, StateRequest | StateResponse, STATE_BYTES
    )
    check_fields(message, _LENGTHS, _RANGES)
    return message
