"""Bytes to messages and back, for bytes that a stranger wrote.

Order of work, each step bounded by the one before it: length against the caller's cap → strict
typed decoding (`strict.py`) → values within their bounds (`bounds.py`). What fails raises
`BadMessage` and nothing else. As every message has exactly one encoding, nobody but the signer can
make a second frame, with a second content id, of the same group.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import zstandard

from swarmnode.errors import BadMessage
from swarmnode.wire import limits, strict
from swarmnode.wire.bounds import check_group, check_message
from swarmnode.wire.messages import Envelope, RolloutGroup
from swarmnode.wire.strict import encode

__all__ = [
    "DECODE_REASONS",
    "check_group",
    "compress",
    "decode",
    "decode_payload",
    "decompress",
    "encode",
]

DECODE_REASONS = ("oversize", "malformed", "schema", "not_finite", "bounds", "compression")
"""Every reason that this module gives, in the order in which the checks are made. `envelope.verify`
adds `signature`."""

M = TypeVar("M", bound=msgspec.Struct)


def decode(data: bytes, type: type[M], limit: int) -> M:
    """The `type` that `data` encodes; `limit` is the most bytes that `data` may have.

    Raises BadMessage with a reason of DECODE_REASONS.
    """
    return _decode(data, type, limit)


def decode_payload(envelope: Envelope, limit: int = limits.GROUP_BYTES) -> RolloutGroup:
    """Return the group in an envelope. `limit` caps the payload as sent and decompressed, bytes.

    The signature is not looked at: verify first, so that the signer can be held to what this
    raises. Raises BadMessage with a reason of DECODE_REASONS.
    """
    data = envelope.payload
    if len(data) > limit:
        raise BadMessage("oversize", f"{len(data)} bytes of payload, at most {limit}")
    if envelope.codec == "zstd":
        data = decompress(data, limit)
    group: RolloutGroup = _decode(data, RolloutGroup, limit)
    return group


def _decode(data: bytes, type: Any, limit: int) -> Any:  # noqa: ANN401
    message = strict.decode(data, type, limit)
    check_message(message)
    return message


def compress(data: bytes) -> bytes:
    """One zstd frame that declares its size."""
    return zstandard.ZstdCompressor(
        level=3, write_content_size=True, write_checksum=False
    ).compress(data)


def decompress(data: bytes, limit: int) -> bytes:
    """The content of `data`, which must be exactly one zstd frame that declares its size; `limit`
    caps that size, bytes.

    Raises BadMessage("oversize") when the declared size is above `limit` and
    BadMessage("compression") for everything else.
    """
    try:
        declared = zstandard.frame_content_size(data)
        if declared < 0:
            raise BadMessage("compression", "the frame does not declare its size")
        if declared > limit:
            raise BadMessage("oversize", f"the frame declares {declared} bytes, at most {limit}")
        if zstandard.get_frame_parameters(data).window_size > limits.ZSTD_WINDOW_BYTES:
            raise BadMessage("compression", "the frame asks for too much history")
        # `max_output_size` would be ignored here, because the frame declares a size: read one byte
        # more than that and no further.
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
