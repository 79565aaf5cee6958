"""Bytes to messages and back, for bytes that a stranger wrote.

Order of work, each step bounded by the one before it: length against the caller's cap → typed decoding (an unknown field, a wrong type
or a wrong tag stops it where it stands; nothing untyped is ever built, because 4 MiB of empty maps are 290 MiB of dicts) → the message
encodes to the very same bytes → values within their bounds (`bounds.py`). What fails raises `BadMessage` and nothing else.

The third step gives every message exactly one encoding: duplicate keys, missing defaults, integers longer than needed or in place of
floats are all gone by one comparison, and nobody but the signer can make a second frame, with a second content id, of the same group.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import msgspec
import zstandard

from swarmnode.errors import BadMessage
from swarmnode.wire import limits
from swarmnode.wire.bounds import check_group, check_message
from swarmnode.wire.messages import Announce, Envelope, Payload, RolloutGroup

__all__ = ["DECODE_REASONS", "check_group", "compress", "decode", "decode_payload", "decompress", "encode"]

DECODE_REASONS = ("oversize", "malformed", "schema", "not_finite", "bounds", "compression")
"""Every reason that this module gives, in the order in which the checks are made. `envelope.verify` adds `signature`."""

_TAG = b"\xa4type"
"""msgpack of the string `type`: the first key of every payload."""

M = TypeVar("M", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """The one encoding of `message`: msgpack, fields in declared order, every field present, shortest headers."""
    return _encoder.encode(message)


def decode(data: bytes, type: type[M], limit: int) -> M:
    """The `type` that `data` encodes; `limit` is the most bytes that `data` may have.

    Raises BadMessage with a reason of DECODE_REASONS.
    """
    return _decode(data, type, limit)


def decode_payload(envelope: Envelope, limit: int = limits.GROUP_BYTES) -> RolloutGroup | Announce:
    """What a signer signed; `limit` caps the payload both as sent and once decompressed, bytes.

    The signature is not looked at: verify first, so that the signer can be held to what this raises. Raises BadMessage with a reason of
    DECODE_REASONS.
    """
    data = envelope.payload
    if len(data) > limit:
        raise BadMessage("oversize", f"{len(data)} bytes of payload, at most {limit}")
    if envelope.codec == "zstd":
        data = decompress(data, limit)
    return _decode(data, Payload, limit)


def _decode(data: bytes, type: Any, limit: int) -> Any:
    if len(data) > limit:
        raise BadMessage("oversize", f"{len(data)} bytes, at most {limit}")
    if type is Payload and len(data) > len(_TAG) and data[1 : 1 + len(_TAG)] != _TAG:
        # Otherwise the decoder would look for the tag by skipping over whatever comes before it.
        raise BadMessage("schema", "the first field must be `type`")
    try:
        message = _decoder(type).decode(data)
    except msgspec.ValidationError as error:
        raise BadMessage("schema", str(error)) from None
    except (ValueError, RecursionError) as error:  # every other msgspec error is a ValueError, and so is bad UTF-8
        raise BadMessage("malformed", str(error)) from None
    if _encoder.encode(message) != data:
        raise BadMessage("malformed", "not the canonical encoding")
    check_message(message)
    return message


@functools.cache
def _decoder(type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type)


def compress(data: bytes) -> bytes:
    """One zstd frame that declares its size."""
    return zstandard.ZstdCompressor(level=3, write_content_size=True, write_checksum=False).compress(data)


def decompress(data: bytes, limit: int) -> bytes:
    """The content of `data`, which must be exactly one zstd frame that declares its size; `limit` caps that size, bytes.

    Raises BadMessage("oversize") when the declared size is above `limit` and BadMessage("compression") for everything else.
    """
    try:
        declared = zstandard.frame_content_size(data)
        if declared < 0:
            raise BadMessage("compression", "the frame does not declare its size")
        if declared > limit:
            raise BadMessage("oversize", f"the frame declares {declared} bytes, at most {limit}")
        if zstandard.get_frame_parameters(data).window_size > limits.ZSTD_WINDOW_BYTES:
            raise BadMessage("compression", "the frame asks for too much history")
        # `max_output_size` would be ignored here, because the frame declares a size: read one byte more than that and no further.
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            content = reader.read(declared + 1)
        if len(content) != declared:
            raise BadMessage("compression", "the content is not as long as declared")
        # Only now, with the output known to be small, ask where the frame ended.
        frame = zstandard.ZstdDecompressor().decompressobj()
        frame.decompress(data)
        if not frame.eof or frame.unused_data:
            raise BadMessage("compression", "not exactly one whole frame")
    except zstandard.ZstdError as error:
        raise BadMessage("compression", str(error)) from None
    return content
