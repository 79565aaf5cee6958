"""The averaged tensors: name, shape and dtype, in an order that is the same on all nodes. No
torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Literal, get_args

import msgspec

Codec = Literal["int8", "bfloat16", "float32"]
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)
"""Ordered by the size of a payload."""
BLOCK: Final = 256
"""Elements that share one scale in the int8 codec."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, shape and dtype of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The trainer's dtype, such as `float32`. The codec decides the dtype on the wire."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


Layout = tuple[TensorSpec, ...]
"""Sorted by name."""


def make_layout(tensors: Iterable[tuple[str, Iterable[int], str]]) -> Layout:
    """Return the layout of `(name, shape, dtype)` of all averaged tensors.

    Raises:
        ValueError: A name occurs twice, or a tensor is empty.
    """
    layout = tuple(
        sorted(
            (TensorSpec(name, tuple(map(int, shape)), dtype) for name, shape, dtype in tensors),
            key=lambda s: s.name,
        )
    )
    if len({spec.name for spec in layout}) != len(layout):
        raise ValueError("two tensors have one name")
    if any(spec.elements < 1 for spec in layout):
        raise ValueError("a tensor has no elements")
    return layout


def elements(layout: Iterable[TensorSpec]) -> int:
    return sum(spec.elements for spec in layout)


def body_bytes(spec: TensorSpec, codec: Codec) -> int:
    """Return the length of an encoded tensor, bytes."""
    if codec == "float32":
        return 4 * spec.elements
    if codec == "bfloat16":
        return 2 * spec.elements
    return spec.elements + 4 * -(-spec.elements // BLOCK)


def header_limit(layout: Layout) -> int:
    """Return the longest possible header of a payload of `layout`, bytes."""
    return 256 + sum(len(spec.name.encode()) + 9 * len(spec.shape) + 32 for spec in layout)


def payload_limit(layout: Layout, codec: Codec | None = None) -> int:
    """Return the longest possible payload of `layout`, bytes. No more is received before checks.

    Args:
        layout: Tensors of the payload.
        codec: None if the sender may choose.
    """
    codecs = CODECS if codec is None else (codec,)
    longest = sum(max(body_bytes(spec, codec) for codec in codecs) for spec in layout)
    return 4 + header_limit(layout) + longest
