"""What two nodes send each other before tensors move: small frames, a state's manifest excepted."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from swarmnode.weights.fragments import BLOCKS
from swarmnode.wire import strict
from swarmnode.wire.fields import ANY_COUNTER, COUNTER, check_between, check_fields

MESSAGE_BYTES: Final = 256
NONCE_BYTES: Final = 16
STATE_REQUEST_BYTES: Final = 128
STATE_BYTES: Final = 4 * 2**20
"""A manifest of a state names every tensor."""
HASH_BYTES: Final = 32
FRAGMENTS: Final = 1024
RETRY_SECONDS: Final = 3600
BLOCK_BYTES: Final = BLOCKS // 8


class Propose(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="propose"):
    """Average fragment `fragment` with me."""

    nonce: bytes
    """16 random bytes, never used before; becomes the session's name."""
    fingerprint: bytes
    """32 bytes."""
    fragment: int
    outer_step: int
    """The sender's outer step counter: a claim, used for lag only."""
    blocks: bytes = b""
    """What the sender holds, as `fragments.pack` makes it, of 1 to 128 bytes; here and below."""


class Accept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accept"):
    nonce: bytes
    """Nonce of the proposal that this answers."""
    session: bytes
    """The nonce of that proposal; of the lower peer id's where both proposed."""
    fragment: int
    outer_step: int
    blocks: bytes = b""


class Busy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="busy"):
    nonce: bytes
    reason: Literal["busy", "other_policy"]
    retry_seconds: int = 0


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="release"):
    """I am not, or no longer, in this session. Never answered."""

    session: bytes


class Here(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="here"):
    """What I average, and how far I am; answered by the same."""

    fingerprint: bytes
    outer_step: int
    blocks: bytes = b""


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """My weights of `session` can be fetched, as protocol/05-bulk.md says. Not answered. Also the
    answer to `latest`."""

    session: bytes
    """All zero in an answer to `latest`."""
    transfer: bytes
    """32 bytes."""
    root: bytes
    """32 bytes."""
    size: int
    outer_step: int
    """Outer steps that the fragment had taken when the weights were copied."""


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="latest"):
    """Which weights of `fragment` can be had without you taking part? Answered by `ready`, or not
    at all."""

    fingerprint: bytes
    fragment: int
    blocks: bytes = b""
    """What both of us hold, as far as I know. Of a copy of anything else I could make nothing."""


PairingMessage = Propose | Accept | Busy | Release
Message = PairingMessage | Here | Ready | Latest


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
    "nonce": NONCE_BYTES,
    "session": NONCE_BYTES,
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
    if isinstance(message, Here | Propose | Accept | Latest):
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
