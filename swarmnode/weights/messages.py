"""What two nodes say before tensors move. Each fits into one small frame; none is ever queued or waited for with a lock held."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.wire.limits import INTEGER_BITS

MESSAGE_BYTES: Final = 256
NONCE_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 32
FRAGMENTS: Final = 1024
RETRY_SECONDS: Final = 3600


class Propose(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="propose"):
    """Average fragment `fragment` with me."""

    nonce: bytes
    """16 random bytes, never used before; becomes the session's name."""
    fingerprint: bytes
    """32 bytes."""
    fragment: int
    outer_step: int
    """The sender's outer step counter: a claim, used for lag only."""


class Accept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accept"):
    nonce: bytes
    """Of the proposal that this answers."""
    session: bytes
    """The nonce of that proposal; of the lower peer id's where both proposed."""
    fragment: int
    outer_step: int


class Busy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="busy"):
    nonce: bytes
    reason: Literal["busy", "other_policy"]
    retry_seconds: int = 0


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="release"):
    """I am not, or no longer, in this session. Never answered."""

    session: bytes


Message = Propose | Accept | Busy | Release

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """Raises BadMessage: oversize, malformed, schema or bounds."""
    if len(data) > MESSAGE_BYTES:
        raise BadMessage("oversize", f"{len(data)} bytes, at most {MESSAGE_BYTES}")
    try:
        message = _decoder.decode(data)
    except msgspec.ValidationError as error:
        raise BadMessage("schema", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise BadMessage("malformed", str(error)) from None
    if _encoder.encode(message) != data:
        raise BadMessage("malformed", "not the canonical encoding")
    if any(len(getattr(message, name, b"\0" * NONCE_BYTES)) != NONCE_BYTES for name in ("nonce", "session")):
        raise BadMessage("bounds", "a nonce has 16 bytes")
    if isinstance(message, Propose) and len(message.fingerprint) != FINGERPRINT_BYTES:
        raise BadMessage("bounds", "a fingerprint has 32 bytes")
    if isinstance(message, (Propose, Accept)) and not (0 <= message.fragment < FRAGMENTS and 0 <= message.outer_step < 2**INTEGER_BITS):
        raise BadMessage("bounds", "counter")
    if isinstance(message, Busy) and not 0 <= message.retry_seconds <= RETRY_SECONDS:
        raise BadMessage("bounds", "retry_seconds")
    return message
