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

WEIGHTS_NAME = "swarmnode/weights"
"""First item of the hashed array of a swap's fingerprint."""
STATE_NAME = "swarmnode/weights-state"
"""First item of the hashed array of a state's fingerprint."""
ORDINAL = 1
"""Second item of both arrays: the ordinal of the protocols."""

_encoder = msgspec.msgpack.Encoder()


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
    """Return the fingerprint for swaps: SHA-256 of a msgpack array of all properties in which
    partners must agree.

    Args:
        swarm, tokenizer: Hashes of 32 bytes.
        base: `Policy.fingerprint`, 32 bytes: architecture, configuration and base weights.
        layout: Averaged tensors, of which only the dtypes count.
        fragments: Number of fragments.
        lora: The adapter; None if whole weights are averaged.

    Raises:
        ValueError: A hash has another length.
    """
    return _hashed(
        WEIGHTS_NAME,
        (swarm, base, tokenizer),
        sorted({spec.dtype for spec in layout}),
        (fragments, lora),
    )


def state_fingerprint(
    swarm: bytes,
    base: bytes,
    tokenizer: bytes,
    layout: Layout,
    fragments: int,
    lora: LoraShape | None = None,
) -> bytes:
    """Return the fingerprint for states. It covers the whole layout, because the source of a state
    must hold the same layers. Arguments and errors as for `fingerprint`."""
    return _hashed(
        STATE_NAME,
        (swarm, base, tokenizer),
        sorted(layout, key=lambda s: s.name),
        (fragments, lora),
    )


def _hashed(
    name: str, hashes: tuple[bytes, bytes, bytes], what: object, how: tuple[object, ...]
) -> bytes:
    for field, value in zip(("swarm", "base", "tokenizer"), hashes, strict=True):
        if len(value) != 32:
            raise ValueError(f"{field} has 32 bytes, not {len(value)}")
    return hashlib.sha256(_encoder.encode([name, ORDINAL, *hashes, what, *how])).digest()
