"""What two nodes must have in common before their weights may be averaged, as 32 bytes. No torch.

Equal shapes are not enough: two models with the same shapes, or two LoRA adapters with other seeds, average to nonsense. Nodes with another
fingerprint still share rollouts. Device, learning rate and outer rule are left out: replicas may differ in them.
"""

from __future__ import annotations

import hashlib

import msgspec

from swarmnode.weights.layout import Codec, Layout

WEIGHTS_VERSION = 1
"""Ordinal of the exchange's protocol."""

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
    swarm: bytes, base: bytes, tokenizer: bytes, layout: Layout, codec: Codec, fragments: int, lora: LoraShape | None = None
) -> bytes:
    """SHA-256 over the msgpack array of everything that must agree.

    swarm, base, tokenizer: 32 bytes each; `base` is `Policy.fingerprint`, which covers architecture, configuration and base weights.
    layout: of the averaged tensors only. Raises ValueError for a hash of another length.
    """
    for name, value in (("swarm", swarm), ("base", base), ("tokenizer", tokenizer)):
        if len(value) != 32:
            raise ValueError(f"{name} has 32 bytes, not {len(value)}")
    content = ["swarmnode/weights", WEIGHTS_VERSION, swarm, base, tokenizer, sorted(layout, key=lambda s: s.name), codec, fragments, lora]
    return hashlib.sha256(_encoder.encode(content)).digest()
