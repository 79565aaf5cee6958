"""Strict msgpack: what a stranger's bytes must be before anybody looks at a value.

Length against the caller's cap → typed decoding (an unknown field, a wrong type or a wrong tag
stops it where it stands; nothing untyped is ever built, because 4 MiB of empty maps are 290 MiB of
dicts) → the message encodes to the very same bytes. The last step gives every message exactly one
encoding: duplicate keys, missing defaults, integers longer than needed or in place of floats are
all gone by one comparison.
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
"""How msgspec's message begins for a list beyond its `Meta(max_length=…)`."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:  # noqa: ANN401
    """The one encoding of `message`: msgpack, fields in declared order, every field present,
    shortest headers."""
    return _encoder.encode(message)


def decode(data: bytes, kind: Any, limit: int | None = None) -> Any:  # noqa: ANN401
    """The `kind`, a struct, a list of structs or a union of tagged ones, that `data` is the one
    encoding of.

    limit: the most bytes that `data` may have; None where the caller has looked. Raises BadMessage:
    oversize, malformed, schema, and bounds for a list that is longer than its type allows.
    """
    if limit is not None and len(data) > limit:
        raise BadMessage("oversize", f"{len(data)} bytes, at most {limit}")
    decoder, tagged = _decoder(kind)
    if tagged and len(data) > len(_TAG) and data[1 : 1 + len(_TAG)] != _TAG:
        # Otherwise the decoder would look for the tag by skipping over whatever comes before it.
        raise BadMessage("schema", "the first field must be `type`")
    try:
        message = decoder.decode(data)
    except msgspec.ValidationError as error:
        # a list that is longer than its type allows: stopped here, before its items are built
        reason = "bounds" if str(error).startswith(_TOO_LONG) else "schema"
        raise BadMessage(reason, str(error)) from None
    except (ValueError, RecursionError) as error:
        # every other msgspec error is a ValueError, and so is bad UTF-8
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
