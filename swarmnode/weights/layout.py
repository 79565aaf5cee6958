"""Which tensors are averaged: name, shape, dtype, in one order that everybody derives alike. No
torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Literal, get_args

import msgspec

Codec = Literal["int4", "int8", "bfloat16", "float32"]
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)
"""Smallest payload first."""
BLOCK: Final = 256
"""Elements that share one scale in the int8 codec."""
SMALL_BLOCK: Final = 64
"""Likewise in int4, whose steps are coarser: a block's largest element decides them for fewer
others."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    """As the trainer holds it, e.g. `float32`. What travels is the codec's business."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


Layout = tuple[TensorSpec, ...]
"""Sorted by name."""


def make_layout(tensors: Iterable[tuple[str, Iterable[int], str]]) -> Layout:
    """(name, shape, dtype) of every averaged tensor → their layout. Raises ValueError when a name
    is there twice or a tensor is empty."""
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
    """Length of one encoded tensor, bytes."""
    if codec == "float32":
        return 4 * spec.elements
    if codec == "bfloat16":
        return 2 * spec.elements
    if codec == "int4":
        return 2 * -(-spec.elements // SMALL_BLOCK) + -(-spec.elements // 2)
    return spec.elements + 4 * -(-spec.elements // BLOCK)


def header_limit(layout: Layout) -> int:
    """No honest payload header of `layout` is longer, bytes."""
    return 256 + sum(len(spec.name.encode()) + 9 * len(spec.shape) + 96 for spec in layout)


def payload_limit(layout: Layout, codec: Codec | None = None) -> int:
    """No honest payload of `layout` is longer, bytes: what may be received before anything is
    looked at. codec: None where the sender chooses."""
    codecs = CODECS if codec is None else (codec,)
    longest = sum(max(body_bytes(spec, codec) for codec in codecs) for spec in layout)
    return 4 + header_limit(layout) + longest
