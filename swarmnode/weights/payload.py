"""The encoding of a fragment: a header, then one body per tensor. All checks that need no
arithmetic on tensors are here.

    u32be header length ‖ Header (canonical msgpack) ‖ body of tensor 0 ‖ body of tensor 1 ‖ …

No torch and no copies: bodies are views into the received bytes. Names, shapes and sizes are
compared with this node's layout, so no field of a peer decides how much is allocated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.weights.layout import Codec, Layout, body_bytes, header_limit, payload_limit
from swarmnode.wire import strict

CHECKSUM_BYTES: Final = 16
HASH_BYTES: Final = 32


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    length: int
    """Length of the body, bytes."""
    checksum: bytes
    """16 bytes, blake2b of the body."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    codec: Codec
    fragment: int
    sequence: int
    """Always 0: a payload does not depend on another one."""
    anchor: bytes
    """32 bytes: hash of what the values are differences to; empty where they are weights."""
    tensors: list[TensorHeader]


def checksum(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


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
    """Return a payload's codec, and its bodies in the order of `layout`; every length and every
    checksum is verified.

    Args:
        codec: The expected codec; None if the sender may choose.

    Raises:
        BadMessage: oversize, malformed, schema, codec, fragment, names, shape, dtype, size,
            checksum, anchor or bounds.
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
    if header.sequence != 0 or header.anchor != anchor:
        raise BadMessage("anchor")
    if [t.name for t in header.tensors] != [s.name for s in layout]:
        raise BadMessage("names")
    bodies = []
    for tensor, spec in zip(header.tensors, layout, strict=True):
        if tensor.shape != spec.shape:
            raise BadMessage("shape", spec.name)
        if tensor.dtype != spec.dtype:
            raise BadMessage("dtype", spec.name)
        if (
            tensor.length != body_bytes(spec, header.codec)
            or len(tensor.checksum) != CHECKSUM_BYTES
        ):
            raise BadMessage("size", spec.name)
        body = data[start : start + tensor.length]
        start += tensor.length
        if checksum(body) != tensor.checksum:
            raise BadMessage("size" if len(body) != tensor.length else "checksum", spec.name)
        bodies.append(body)
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
