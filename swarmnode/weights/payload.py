"""One fragment as bytes: a typed header, then one body per tensor. Everything that can be checked without arithmetic is checked here.

    u32be header length ‖ Header (canonical msgpack) ‖ body of tensor 0 ‖ body of tensor 1 ‖ …

No torch and no copy: bodies are views into what was received. Names, shapes and sizes are compared with our own layout; nothing that a peer
says decides how much is allocated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from swarmnode.errors import BadMessage
from swarmnode.weights.layout import Codec, Layout, body_bytes, header_limit, payload_limit
from swarmnode.wire import strict

PAYLOAD_REASONS: Final = (
    "oversize", "malformed", "schema", "codec", "fragment", "names", "shape", "dtype", "size", "checksum", "anchor", "bounds", "not_finite",
    "compression",
)  # fmt: skip
"""Every reason with which payload, codecs and patches raise BadMessage."""
CHECKSUM_BYTES: Final = 16
HASH_BYTES: Final = 32


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    length: int
    """Of the body, bytes."""
    checksum: bytes
    """16 bytes, blake2b: of the body; in a patch of the bfloat16 tensor that the patch results in."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    codec: Codec
    fragment: int
    sequence: int
    """0 for a payload that stands by itself, 1 to 9 for the patches after it."""
    anchor: bytes
    """32 bytes: hash of what the values are relative to; empty for absolute ones."""
    tensors: list[TensorHeader]


class Parsed(msgspec.Struct, frozen=True):
    header: Header
    bodies: list[memoryview]
    """In the order of the layout."""



def checksum(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def build(header: Header, bodies: Sequence[bytes]) -> bytes:
    """The payload of `header` and `bodies`."""
    head = strict.encode(header)
    return b"".join((len(head).to_bytes(4, "big"), head, *bodies))


def parse(
    data: bytes | memoryview, layout: Layout, codec: Codec, *, fragment: int = 0, anchor: bytes = b"", sequence: int = 0
) -> Parsed:
    """Header and bodies of a payload of `layout`, every length and, except in patches, every checksum verified.

    Raises BadMessage with a reason of PAYLOAD_REASONS.
    """
    data = memoryview(data)
    if len(data) > payload_limit(layout, codec):
        raise BadMessage("oversize", f"{len(data)} bytes of payload, at most {payload_limit(layout, codec)}")
    header, start = _header(data, layout)
    if header.codec != codec:
        raise BadMessage("codec", header.codec)
    if header.fragment != fragment:
        raise BadMessage("fragment")
    if header.sequence != sequence or header.anchor != anchor:
        raise BadMessage("anchor")
    if [t.name for t in header.tensors] != [s.name for s in layout]:
        raise BadMessage("names")
    bodies = []
    for tensor, spec in zip(header.tensors, layout, strict=True):
        if tensor.shape != spec.shape:
            raise BadMessage("shape", spec.name)
        if tensor.dtype != spec.dtype:
            raise BadMessage("dtype", spec.name)
        most = body_bytes(spec, codec)
        if not (0 <= tensor.length <= most if codec == "patch" else tensor.length == most) or len(tensor.checksum) != CHECKSUM_BYTES:
            raise BadMessage("size", spec.name)
        body = data[start : start + tensor.length]
        start += tensor.length
        if codec != "patch" and checksum(body) != tensor.checksum:
            raise BadMessage("size" if len(body) != tensor.length else "checksum", spec.name)
        bodies.append(body)
    if start != len(data):
        raise BadMessage("size", "bodies and payload end at different places")
    return Parsed(header, bodies)


def peek(data: bytes | memoryview, layout: Layout) -> Header:
    """Only the header, before the codec or anchor is known. Raises BadMessage."""
    return _header(memoryview(data), layout)[0]


def _header(data: memoryview, layout: Layout) -> tuple[Header, int]:
    length = int.from_bytes(data[:4], "big")
    if length > header_limit(layout):
        raise BadMessage("oversize", "header")
    head = bytes(data[4 : 4 + length])
    if len(data) < 4 or len(head) != length:
        raise BadMessage("malformed", "ends within its header")
    return strict.decode(head, Header), 4 + length
