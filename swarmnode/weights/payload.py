"""The encoding of a fragment: a header, then one body per tensor. All checks that need no
arithmetic on tensors are here.

    u32be header length ‖ Header (canonical msgpack) ‖ body of tensor 0 ‖ body of tensor 1 ‖ …

No torch and no copies: bodies are views into the received bytes. Names, shapes and sizes are
compared with this node's layout, so no field of a peer decides how much is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.weights.layout import Codec, Layout, body_bytes, header_limit, payload_limit
from swarmnode.wire import strict


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    codec: Codec
    fragment: int
    anchor: bytes
    """32 bytes: hash of what the values are differences to; empty where they are weights."""
    tensors: Layout
    """The encoded tensors, in order."""


def build(header: Header, bodies: Sequence[bytes]) -> bytes:
    """Return the payload of `header` and `bodies`."""
    head = strict.encode(header)
    return b"".join((len(head).to_bytes(4, "big"), head, *bodies))


def parse(
    data: bytes | memoryview,
    layout: Layout,
    codec: Codec | None = None,
    *,
    fragment: int = 0,
    anchor: bytes = b"",
) -> tuple[Codec, list[memoryview]]:
    """Return a payload's codec, and its bodies in the order of `layout`. The transfer has verified
    the bytes.

    Args:
        codec: The expected codec; None if the sender may choose.

    Raises:
        BadMessage: oversize, malformed, schema, codec, fragment, anchor, shape (other names,
            shapes or dtypes), size or bounds.
    """
    data = memoryview(data)
    if len(data) > payload_limit(layout, codec):
        raise BadMessage(
            "oversize", f"{len(data)} bytes of payload, at most {payload_limit(layout, codec)}"
        )
    header, start = _header(data, layout)
    if codec is not None and header.codec != codec:
        raise BadMessage("codec", header.codec)
    if header.fragment != fragment:
        raise BadMessage("fragment")
    if header.anchor != anchor:
        raise BadMessage("anchor")
    if header.tensors != layout:
        raise BadMessage("shape", "other tensors")
    bodies = []
    for spec in layout:
        length = body_bytes(spec, header.codec)
        bodies.append(data[start : start + length])
        start += length
    if start != len(data):
        raise BadMessage("size", "bodies and payload end at different places")
    return header.codec, bodies


def _header(data: memoryview, layout: Layout) -> tuple[Header, int]:
    length = int.from_bytes(data[:4], "big")
    if length > header_limit(layout):
        raise BadMessage("oversize", "header")
    head = bytes(data[4 : 4 + length])
    if len(data) < 4 or len(head) != length:
        raise BadMessage("malformed", "ends within its header")
    return strict.decode(head, Header), 4 + length
