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

WEIGHTS_NAME = "swarmnode/weights"
"""First item of what a swap's fingerprint hashes."""
STATE_NAME = "swarmnode/weights-state"
"""First item of what a state's fingerprint hashes."""
ORDINAL = 1
"""Second item of both: the ordinal of the protocols that carry them."""

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
    """The same of everything that a node and the one whose state it takes must have in common: they
    hold the same layers."""
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
