"""What two nodes must have in common before their weights may be averaged, as 32 bytes. No torch.

Equal shapes are not enough: two models with the same shapes, or two LoRA adapters with other seeds,
average to nonsense. Nodes with another fingerprint still share rollouts. Device, learning rate,
outer rule and codec are left out: replicas may differ in them. So is which layers are held here:
base and adapter say what a layer's tensors are, and partners average the blocks that both hold.
"""

from __future__ import annotations

import hashlib

import msgspec

from swarmnode.weights.layout import Layout

WEIGHTS_VERSION = 3
"""Ordinal of the exchange's protocol."""
STATE_VERSION = 2
"""The same number in a state's fingerprint."""

_encoder = msgspec.msgpack.Encoder()


class LoraShape(msgspec.Struct, frozen=True, array_like=True):
    """What makes two adapters the same linear map of their parameters."""

    r: int
    alpha: int
    target_modules: tuple[str, ...]
    """Sorted."""
    a_seed: int | None
    """Seed of the frozen A; None where A is trained and averaged too."""


def fingerprint(
    swarm: bytes,
    base: bytes,
    tokenizer: bytes,
    layout: Layout,
    fragments: int,
    lora: LoraShape | None = None,
) -> bytes:
    """SHA-256 over the msgpack array of everything that partners must have in common. Of `layout`
    these are the dtypes.

    swarm, base, tokenizer: 32 bytes each; `base` is `Policy.fingerprint`, which covers
    architecture, configuration and base weights. Raises ValueError for a hash of another length.
    """
    return _hashed(
        WEIGHTS_VERSION,
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
    """The same of everything that a node and the one whose state it takes must have in common: they
    hold the same layers."""
    return _hashed(
        STATE_VERSION,
        (swarm, base, tokenizer),
        sorted(layout, key=lambda s: s.name),
        (fragments, lora),
    )


def _hashed(
    version: int, hashes: tuple[bytes, bytes, bytes], what: object, how: tuple[object, ...]
) -> bytes:
    for name, value in zip(("swarm", "base", "tokenizer"), hashes, strict=True):
        if len(value) != 32:
            raise ValueError(f"{name} has 32 bytes, not {len(value)}")
    return hashlib.sha256(
        _encoder.encode(["swarmnode/weights", version, *hashes, what, *how])
    ).digest()
