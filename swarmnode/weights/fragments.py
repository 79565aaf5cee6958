"""Cuts the averaged tensors into fragments, so that an exchange moves a part of the policy. No torch.

Strided layers, as in Streaming DiLoCo (arXiv 2501.18512): fragment f has layers f, f + P, f + 2P, …, so that each holds early and late
ones. What belongs to no layer (embedding, head, final norm) goes, largest first, to the fragment that is smallest so far. Everything
follows from names and shapes, so nodes with one fingerprint cut alike.
"""

from __future__ import annotations

import re

from swarmnode.weights.layout import Layout, TensorSpec, elements

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def layer_of(name: str) -> int | None:
    """Number of the layer that a parameter belongs to: the first number in its dotted name; None for the rest."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def count(layout: Layout, wanted: int) -> int:
    """How many fragments a policy is cut into: `wanted`, but never more than it has layers."""
    layers = {layer for spec in layout if (layer := layer_of(spec.name)) is not None}
    return max(1, min(wanted, len(layers)))


def cut(layout: Layout, fragments: int) -> tuple[Layout, ...]:
    """`fragments` layouts that together are `layout`, each sorted by name.

    Raises ValueError when there are fewer layers and single tensors than fragments.
    """
    if fragments < 1:
        raise ValueError("there is at least one fragment")
    layers = sorted({layer for spec in layout if (layer := layer_of(spec.name)) is not None})
    place = {layer: i % fragments for i, layer in enumerate(layers)}
    parts: list[list[TensorSpec]] = [[] for _ in range(fragments)]
    single: list[TensorSpec] = []
    for spec in layout:
        layer = layer_of(spec.name)
        (single if layer is None else parts[place[layer]]).append(spec)
    for spec in sorted(single, key=lambda s: (-s.elements, s.name)):
        min(parts, key=elements).append(spec)
    if not all(parts):
        raise ValueError(f"{len(layers)} layers and {len(single)} other tensors do not make {fragments} fragments")
    return tuple(tuple(sorted(part, key=lambda s: s.name)) for part in parts)


def check_schedule(sync_every: int, fragments: int) -> None:
    """Raises ValueError when some step would have to exchange two fragments."""
    if not 1 <= fragments <= sync_every:
        raise ValueError(f"{fragments} fragments do not fit into sync_every = {sync_every} steps")


def due(step: int, sync_every: int, fragments: int) -> int | None:
    """The fragment whose outer step is due after inner step `step` (1, 2, …), or None.

    Each comes up once in `sync_every` steps, evenly staggered, the last one at the multiples of `sync_every`: bandwidth is used all
    the time instead of in bursts, and no step is stalled by more than a fragment.
    """
    phase = (step - 1) % sync_every + 1  # 1 … sync_every
    fragment = -(-phase * fragments // sync_every) - 1
    return fragment if (fragment + 1) * sync_every // fragments == phase else None
