"""The largest few of what was learnt, in two bits, with error feedback: SparseLoCo (arXiv
2508.15706), which no node runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import torch

from swarmnode.averaging.codecs import bfloat16_bits, bfloat16_values
from swarmnode.averaging.outer import Tensors

BLOCK: Final = 4096
ONE_OF: Final = 64
"""Values that travel: one of so many in a block."""
DECAY: Final = 0.95
INDEX_BITS, VALUE_BITS, SCALE_BITS = 12, 2, 2 * 16


def sparse(flat: torch.Tensor) -> torch.Tensor:
    """(elements,) as they arrive: of every block the largest, each as its sign and one of two
    magnitudes, the others 0.

    The magnitudes, a bfloat16 each, are the means of the larger and of the smaller half.
    """
    arrived = torch.zeros_like(flat)
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK]
        positions = block.abs().topk(_kept(block.numel())).indices  # the largest first
        for half in positions.tensor_split([-(-len(positions) // 2)]):
            if len(half):
                magnitude = bfloat16_values(bfloat16_bits(block[half].abs().mean()))
                arrived[start + half] = block[half].sign() * magnitude
    return arrived


def sparse_bytes(elements: int) -> float:
    """What `sparse` of so many takes, without the names of the tensors."""
    blocks = -(-elements // BLOCK)
    kept = (blocks - 1) * _kept(BLOCK) + _kept(elements - (blocks - 1) * BLOCK)
    return (kept * (INDEX_BITS + VALUE_BITS) + blocks * SCALE_BITS) / 8


def _kept(elements: int) -> int:
    return -(-elements // ONE_OF)


class ErrorFeedback:
    """What one replica has learnt and nobody was sent."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.left: Tensors = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def add(self, learnt: Mapping[str, torch.Tensor]) -> None:
        """What an outer step has to tell."""
        for name, tensor in learnt.items():
            self.left[name] = DECAY * self.left[name] + tensor

    def send(self, names: Collection[str]) -> Tensors:
        """What arrives of these tensors, all one vector; the rest is left."""
        flat = sparse(torch.cat([self.left[name].flatten() for name in names]))
        parts = flat.split([self.left[name].numel() for name in names])
        sent = {
            name: part.view_as(self.left[name]) for name, part in zip(names, parts, strict=True)
        }
        for name, tensor in sent.items():
            self.left[name] = self.left[name] - tensor
        return sent

    def clear(self, names: Collection[str]) -> None:
        """All of them was sent."""
        for name in names:
            self.left[name] = torch.zeros_like(self.left[name])
