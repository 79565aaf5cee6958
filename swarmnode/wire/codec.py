"""Codec for messages from strangers.

Each step is bounded by the previous one: length against the caller's limit → strict typed decoding
(`strict.py`) → bounds of the values (`bounds.py`). Every failure raises `BadMessage` and nothing
else. Every message has exactly one encoding, so only the signer can create a second frame, with a
second content id, of the same group.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import zstandard

from swarmnode.errors import BadMessage
from swarmnode.wire import limits, strict
from swarmnode.wire.bounds import check_message
from swarmnode.wire.messages import Envelope, RolloutGroup
from swarmnode.wire.strict import encode

__all__ = [
    "DECODE_REASONS",
    "check_message",
    "compress",
    "decode",
    "decode_payload",
    "decompress",
    "encode",
]

DECODE_REASONS = ("oversize", "malformed", "schema", "not_finite", "bounds", "compression")
"""Reasons of this module, in the order of the checks. `envelope.verify` adds `signature`."""

M = TypeVar("M", bound=msgspec.Struct)


def decode(data: bytes, type: type[M], limit: int) -> M:
    """Decode a message of at most `limit` bytes. Raises BadMessage with a reason of
    DECODE_REASONS."""
    message: M = strict.decode(data, type, limit)
    check_message(message)
    return message


def decode_payload(envelope: Envelope, limit: int = limits.GROUP_BYTES) -> RolloutGroup:
    """Return the group in an envelope. `limit` bounds the payload in bytes, before and after
    decompression.

    The signature is not checked: verify first, so that the signer is responsible for an error.
    Raises BadMessage with a reason of DECODE_REASONS.
    """
    data = envelope.payload
    if len(data) > limit:
        raise BadMessage("oversize", f"{len(data)} bytes of payload, at most {limit}")
    if envelope.codec == "zstd":
        data = decompress(data, limit)
    return decode(data, RolloutGroup, limit)


def compress(data: bytes) -> bytes:
    """Return one zstd frame that declares its size."""
    return zstandard.ZstdCompressor(
        level=3, write_content_size=True, write_checksum=False
    ).compress(data)


def decompress(data: bytes, limit: int) -> bytes:
    """Decompress exactly one zstd frame that declares its size. `limit` bounds that size in bytes.

    Raises:
        BadMessage: `oversize` if the declared size is above `limit`, else `compression`.
    """
    try:
        declared = zstandard.frame_content_size(data)
        if declared < 0:
            raise BadMessage("compression", "the frame does not declare its size")
        if declared > limit:
            raise BadMessage("oversize", f"the frame declares {declared} bytes, at most {limit}")
        if zstandard.get_frame_parameters(data).window_size > limits.ZSTD_WINDOW_BYTES:
            raise BadMessage("compression", "the frame requires too large a window")
        # zstandard ignores `max_output_size` for a frame with a declared size, so read at most one
        # byte more.
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            content = reader.read(declared + 1)
        if len(content) != declared:
            raise BadMessage("compression", "the content is not as long as declared")
        # The output is known to be small now, so it is safe to check where the frame ends.
        frame = zstandard.ZstdDecompressor().decompressobj()
        frame.decompress(data)
        if not frame.eof or frame.unused_data:
            raise BadMessage("compression", "not exactly one whole frame")
    except zstandard.ZstdError as error:
        raise BadMessage("compression", str(error)) from None
    return content
