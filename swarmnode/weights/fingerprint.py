"""Fingerprints: 32 bytes that are equal on two nodes that may average their weights. No torch.

Equal shapes are not enough: the mean of two different models, or of two LoRA adapters with
another scale, is useless. Nodes with different fingerprints still share rollouts. A fingerprint
does not cover device, learning rate, outer rule and codec, in which replicas may differ. It does
not cover the layers that a node holds either: partners average the blocks that both hold.
"""

from __future__ import annotations

import hashlib

import msgspec

from swarmnode.weights.layout import Layout

NAME, ORDINAL = "swarmnode/weights", 1
"""First items of the hashed array: the name and the ordinal of the protocol."""


class LoraShape(msgspec.Struct, frozen=True, array_like=True):
    """Properties that make two adapters the same linear map of their parameters."""

    r: int
    alpha: int
    target_modules: tuple[str, ...]
    """Sorted."""


def fingerprint(
    swarm: bytes,
    base: bytes,
    tokenizer: bytes,
    layout: Layout,
    fragments: int,
    lora: LoraShape | None = None,
) -> bytes:
    """Return SHA-256 of a msgpack array of all properties in which partners must agree.

    Args:
        swarm, tokenizer: Hashes of 32 bytes.
        base: `Policy.fingerprint`, 32 bytes: architecture, configuration and base weights.
        layout: Averaged tensors, of which only the dtypes count.
        fragments: Number of fragments.
        lora: The adapter; None if whole weights are averaged.

    Raises:
        ValueError: A hash has another length.
    """
    for field, value in (("swarm", swarm), ("base", base), ("tokenizer", tokenizer)):
        if len(value) != 32:
            raise ValueError(f"{field} has 32 bytes, not {len(value)}")
    dtypes = sorted({spec.dtype for spec in layout})
    hashed = [NAME, ORDINAL, swarm, base, tokenizer, dtypes, fragments, lora]
    return hashlib.sha256(msgspec.msgpack.encode(hashed)).digest()
