"""Strict msgpack decoding of a stranger's bytes.

Three steps: length against the caller's limit → typed decoding → comparison with the message's own
encoding. Typed decoding stops at an unknown field, a wrong type or a wrong tag and never builds
untyped objects, because 4 MiB of empty maps become 290 MiB of dicts. The comparison gives every
message exactly one encoding: it rejects duplicate keys, missing defaults, integers longer than
needed and integers in place of floats.
"""

from __future__ import annotations

import functools
import types
from typing import Any, get_args

import msgspec

from swarmnode.errors import BadMessage

_TAG = b"\xa4type"
"""msgpack of the string `type`."""

_TOO_LONG = "Expected `array` of length"
"""Prefix of msgspec's error for a list beyond its `Meta(max_length=…)`."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:  # noqa: ANN401
    """Return the canonical encoding of `message`: msgpack, every field in declared order, shortest
    headers."""
    return _encoder.encode(message)


def decode(data: bytes, kind: Any, limit: int | None = None) -> Any:  # noqa: ANN401
    """Decode a message from its canonical encoding.

    Args:
        data: the bytes.
        kind: a struct, a list of structs, or a union of tagged structs.
        limit: maximum number of bytes; None if the caller has checked.

    Raises:
        BadMessage: `oversize`, `malformed`, `schema`, or `bounds` for a list beyond its maximum
            length.
    """
    if limit is not None and len(data) > limit:
        raise BadMessage("oversize", f"{len(data)} bytes, at most {limit}")
    decoder, tagged = _decoder(kind)
    if tagged and len(data) > len(_TAG) and data[1 : 1 + len(_TAG)] != _TAG:
        # otherwise the decoder searches for the tag by skipping everything before it
        raise BadMessage("schema", "the first field must be `type`")
    try:
        message = decoder.decode(data)
    except msgspec.ValidationError as error:
        # a list beyond its maximum length fails here, before its items are built
        reason = "bounds" if str(error).startswith(_TOO_LONG) else "schema"
        raise BadMessage(reason, str(error)) from None
    except (ValueError, RecursionError) as error:
        # every other msgspec error is a ValueError, and so is invalid UTF-8
        raise BadMessage("malformed", str(error)) from None
    if _encoder.encode(message) != data:
        raise BadMessage("malformed", "not the canonical encoding")
    return message


@functools.cache
def _decoder(kind: Any) -> tuple[msgspec.msgpack.Decoder[Any], bool]:  # noqa: ANN401
    """Return a decoder, and whether the first field of a `kind` is its `type`."""
    parts = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    tagged = all(hasattr(one, "__struct_config__") and one.__struct_config__.tag for one in parts)
    return msgspec.msgpack.Decoder(kind), tagged
