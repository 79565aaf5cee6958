"""What two nodes say before tensors move: small frames, a state's manifest excepted; nothing is queued or waited for with a lock held."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.wire.limits import INTEGER_BITS

MESSAGE_BYTES: Final = 256
NONCE_BYTES: Final = 16
STATE_REQUEST_BYTES: Final = 128
STATE_BYTES: Final = 4 * 2**20
"""A manifest of a state names every tensor."""
HASH_BYTES: Final = 32
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


class Here(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="here"):
    """What I average, and how far I am; answered by the same."""

    fingerprint: bytes
    outer_step: int


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """My weights of `session` can be fetched, as protocol/05-bulk.md says. Not answered. Also the answer to `latest`."""

    session: bytes
    """All zero in an answer to `latest`."""
    transfer: bytes
    """32 bytes."""
    root: bytes
    """32 bytes."""
    size: int
    outer_step: int
    """Of the fragment, when the weights were copied."""


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="latest"):
    """Which weights of `fragment` can be had without you taking part? Answered by `ready`, or not at all."""

    fingerprint: bytes
    fragment: int


Message = Propose | Accept | Busy | Release | Here | Ready | Latest


class StateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="state_request"):
    """What is your outer state?"""

    fingerprint: bytes


class StateResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="state_response"):
    manifest: bytes
    """An envelope around a StateManifest, signed by the responder."""
    transfer: bytes
    root: bytes
    size: int


_TAG: Final = b"\xa4type"
"""msgpack of the string `type`."""
_HASHES: Final = ("fingerprint", "transfer", "root")
_COUNTERS: Final = ("outer_step", "size")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_state_decoder = msgspec.msgpack.Decoder(StateRequest | StateResponse)


def encode_message(message: Message | StateRequest | StateResponse) -> bytes:
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """Raises BadMessage: oversize, malformed, schema or bounds."""
    return _decode(data, _decoder, MESSAGE_BYTES)


def decode_state(data: bytes) -> StateRequest | StateResponse:
    """Raises BadMessage as `decode_message` does."""
    return _decode(data, _state_decoder, STATE_BYTES)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder, limit: int):  # type: ignore[no-untyped-def]
    if len(data) > limit:
        raise BadMessage("oversize", f"{len(data)} bytes, at most {limit}")
    if len(data) > len(_TAG) and data[1 : 1 + len(_TAG)] != _TAG:
        raise BadMessage("schema", "the first field must be `type`")
    try:
        message = decoder.decode(data)
    except msgspec.ValidationError as error:
        raise BadMessage("schema", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise BadMessage("malformed", str(error)) from None
    if _encoder.encode(message) != data:
        raise BadMessage("malformed", "not the canonical encoding")
    if any(len(getattr(message, name, b"\0" * NONCE_BYTES)) != NONCE_BYTES for name in ("nonce", "session")):
        raise BadMessage("bounds", "a nonce has 16 bytes")
    if any(len(getattr(message, name, b"\0" * HASH_BYTES)) != HASH_BYTES for name in _HASHES):
        raise BadMessage("bounds", "a fingerprint, transfer or root has 32 bytes")
    counted = all(0 <= getattr(message, name, 0) < 2**INTEGER_BITS for name in _COUNTERS)
    if not counted or not 0 <= getattr(message, "fragment", 0) < FRAGMENTS:
        raise BadMessage("bounds", "counter")
    if isinstance(message, Busy) and not 0 <= message.retry_seconds <= RETRY_SECONDS:
        raise BadMessage("bounds", "retry_seconds")
    if isinstance(message, Ready | StateResponse) and message.size < 1:
        raise BadMessage("bounds", "size")
    return message
