"""Blocks and fragments: the sets of tensors that are held together and averaged together. No torch.

A *block* is one layer, the tensors before all layers, or the tensors after them. Its number follows
from the names of its tensors in the whole model, so it is the same in every crew, whatever stages
the crew has. A block is the unit of averaging, and has its own outer steps. A *fragment* is a set
of blocks that are due together, with strided layers, as in Streaming DiLoCo (arXiv 2501.18512).
With P fragments, fragment f has the layers f, f + P, f + 2P, …. A stage averages the blocks that it
holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from swarmnode.weights.layout import Layout, TensorSpec

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
EMBEDDING: Final = 0
"""Block of the tensors without a layer whose name contains `embed`."""
END: Final = 1
"""Block of the other tensors without a layer: the last norm and the head."""
BLOCKS: Final = 1024
"""Number of blocks. The last one contains all further layers."""


def layer_of(name: str) -> int | None:
    """Return the layer of a parameter: the first number in its dotted name, or None."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def block_of(name: str) -> int:
    """Return the block of the whole model's tensor `name`."""
    layer = layer_of(name)
    if layer is None:
        return EMBEDDING if "embed" in name else END
    return min(END + 1 + layer, BLOCKS - 1)


def fragment_of(block: int, fragments: int) -> int:
    """Return the fragment of a block."""
    if block <= END:
        return 0 if block == EMBEDDING else fragments - 1
    return (block - END - 1) % fragments


def pack(blocks: Iterable[int]) -> bytes:
    """Encode a set of blocks: block b is bit b mod 8 of byte b // 8. The last byte is not 0; the
    empty set is the empty string."""
    return _shortest(sum(1 << block for block in set(blocks)))


def _shortest(bits: int) -> bytes:
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def unpack(packed: bytes) -> frozenset[int]:
    """Decode a packed set of blocks."""
    return frozenset(
        block for block in range(8 * len(packed)) if packed[block // 8] >> block % 8 & 1
    )


def blocks_of(names: Iterable[str]) -> bytes:
    """Return the blocks of these tensors, packed."""
    return pack(map(block_of, names))


def common(one: bytes, other: bytes) -> bytes:
    """Return the intersection of two packed sets, packed."""
    return _shortest(int.from_bytes(one, "little") & int.from_bytes(other, "little"))


def within(blocks: bytes, fragment: int, fragments: int) -> bytes:
    """Return the subset of a packed set that is in `fragment`, packed."""
    return pack(block for block in unpack(blocks) if fragment_of(block, fragments) == fragment)


def count(layout: Layout, wanted: int, layers: int | None = None) -> int:
    """Return the number of a policy's fragments: `wanted`, at most the number of layers.

    Args:
        layout: Tensors of the policy or stage.
        wanted: The configured number.
        layers: Layers of the whole model if `layout` is that of a stage.
    """
    if layers is None:
        layers = len({layer for spec in layout if (layer := layer_of(spec.name)) is not None})
    return max(1, min(wanted, layers))


def cut(layout: Layout, fragments: int) -> tuple[Layout, ...]:
    """Split a layout into fragments, each sorted by name. A fragment of a stage may be empty."""
    if fragments < 1:
        raise ValueError(f"fragments must be at least 1, not {fragments}")
    parts: list[list[TensorSpec]] = [[] for _ in range(fragments)]
    for spec in layout:
        parts[fragment_of(block_of(spec.name), fragments)].append(spec)
    return tuple(tuple(sorted(part, key=lambda s: s.name)) for part in parts)


def due(step: int, sync_every: int, fragments: int) -> int | None:
    """Return the fragment whose outer step is due after inner step `step` (1, 2, …), or None.

    Each fragment is due once in `sync_every` steps, at even distances; the last one is due at the
    multiples of `sync_every`. This spreads the traffic, and one step waits for one fragment at
    most.
    """
    phase = (step - 1) % sync_every + 1  # 1 … sync_every
    fragment = -(-phase * fragments // sync_every) - 1
    return fragment if (fragment + 1) * sync_every // fragments == phase else None
