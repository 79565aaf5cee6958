"""Which block a tensor belongs to, and which blocks are averaged together. No torch.

A *block* is a layer, or what comes before or after all layers. Its number follows from a tensor's
name in the whole model, so whoever holds it means the same by it, however its crew is cut. A
fragment is a set of blocks: strided layers, as in Streaming DiLoCo (arXiv 2501.18512): fragment f
has layers f, f + P, f + 2P, …, so that each holds early and late ones. Two partners average what of
a fragment both hold.
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
"""No block has a higher number; the last one has every layer that would."""


def layer_of(name: str) -> int | None:
    """Number of the layer that a parameter belongs to: the first number in its dotted name; None
    for the rest."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def block_of(name: str) -> int:
    """Block of the whole model's tensor `name`."""
    layer = layer_of(name)
    if layer is None:
        return EMBEDDING if "embed" in name else END
    return min(END + 1 + layer, BLOCKS - 1)


def fragment_of(block: int, fragments: int) -> int:
    if block <= END:
        return 0 if block == EMBEDDING else fragments - 1
    return (block - END - 1) % fragments


def pack(blocks: Iterable[int]) -> bytes:
    """A set of blocks as it travels: block b is bit b mod 8 of byte b // 8, and the last byte is
    not 0; empty for none."""
    return _shortest(sum(1 << block for block in set(blocks)))


def _shortest(bits: int) -> bytes:
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def unpack(packed: bytes) -> frozenset[int]:
    return frozenset(
        block for block in range(8 * len(packed)) if packed[block // 8] >> block % 8 & 1
    )


def blocks_of(names: Iterable[str]) -> bytes:
    """The blocks, packed, of these tensors."""
    return pack(map(block_of, names))


def common(one: bytes, other: bytes) -> bytes:
    """What two packed sets have in common, packed."""
    return _shortest(int.from_bytes(one, "little") & int.from_bytes(other, "little"))


def within(blocks: bytes, fragment: int, fragments: int) -> bytes:
    """Those of a packed set that are in `fragment`, packed."""
    return pack(block for block in unpack(blocks) if fragment_of(block, fragments) == fragment)


def count(layout: Layout, wanted: int, layers: int | None = None) -> int:
    """How many fragments a policy is cut into: `wanted`, but never more than it has layers. layers:
    of the whole model, where not all of them are in `layout`."""
    if layers is None:
        layers = len({layer for spec in layout if (layer := layer_of(spec.name)) is not None})
    return max(1, min(wanted, layers))


def cut(layout: Layout, fragments: int) -> tuple[Layout, ...]:
    """`fragments` layouts that together are `layout`, each sorted by name; of a stage, one without
    any of its layers is empty."""
    if fragments < 1:
        raise ValueError("there is at least one fragment")
    parts: list[list[TensorSpec]] = [[] for _ in range(fragments)]
    for spec in layout:
        parts[fragment_of(block_of(spec.name), fragments)].append(spec)
    return tuple(tuple(sorted(part, key=lambda s: s.name)) for part in parts)


def check_schedule(sync_every: int, fragments: int) -> None:
    """Raises ValueError when some step would have to exchange two fragments."""
    if not 1 <= fragments <= sync_every:
        raise ValueError(f"{fragments} fragments do not fit into sync_every = {sync_every} steps")


def due(step: int, sync_every: int, fragments: int) -> int | None:
    """The fragment whose outer step is due after inner step `step` (1, 2, …), or None.

    Each comes up once in `sync_every` steps, evenly staggered, the last one at the multiples of
    `sync_every`: bandwidth is used all the time instead of in bursts, and no step is stalled by
    more than a fragment.
    """
    phase = (step - 1) % sync_every + 1  # 1 … sync_every
    fragment = -(-phase * fragments // sync_every) - 1
    return fragment if (fragment + 1) * sync_every // fragments == phase else None
