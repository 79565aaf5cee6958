"""The matrix A of an adapter: equal on all nodes, frozen and derived from the parameter's name, as
in FFA-LoRA (arXiv 2403.12313). Averaging B is then exact, at half the bytes. The mean of products
is not the product of means:

    ½ (B₁A₁ + B₂A₂) − ½ (B₁ + B₂) · ½ (A₁ + A₂) = ¼ (B₁ − B₂)(A₁ − A₂)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch

A_MARK = ".lora_A."


def shared_a(name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Return the frozen A of adapter `name`, (r, in), float32: uniform in ±1/√in like peft's
    initial values.

    The values come from SHAKE-256, because nodes with different versions of torch and numpy must
    agree, and these do not keep their random streams between versions.

    Args:
        name: Name of the parameter.
        shape: (r, in).
    """
    count = math.prod(shape)
    stream = hashlib.shake_256(b"swarmnode/lora-a/1" + name.encode()).digest(4 * count)
    uniform = np.frombuffer(stream, "<u4").astype(np.float64) / 2**31 - 1  # [−1, 1)
    return torch.from_numpy((uniform / math.sqrt(shape[1])).astype(np.float32)).reshape(shape)


@torch.no_grad()
def freeze_a(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Set each A of an adapter to its shared value and freeze it. Only B is trained and averaged.

    Call this before the first step and before the optimizer is created: while B is zero, a change
    of A does not change the policy.
    """
    for name, parameter in parameters.items():
        if A_MARK in name:
            parameter.copy_(shared_a(name, (parameter.shape[0], parameter.shape[1])))
            parameter.requires_grad_(False)
