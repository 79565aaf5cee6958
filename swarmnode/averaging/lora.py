"""Averaging adapters. The mean of products is not the product of means:

    ½ (B₁A₁ + B₂A₂) − ½ (B₁ + B₂) · ½ (A₁ + A₂) = ¼ (B₁ − B₂)(A₁ − A₂)

There are two ways. In FFA-LoRA (arXiv 2403.12313), A is equal on all nodes, frozen and derived from
a seed; averaging B is then exact at half the bytes. Otherwise both are averaged while the residual
is below 1 % of the mean product. Norms need no product in full: ‖XY‖² = tr(XᵀX · YYᵀ), r × r.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from swarmnode.config import LoraSettings, WeightsConfig

RESIDUAL_LIMIT = 0.01
A_SEED = 0
"""Seed of the shared matrix A."""
A_MARK, B_MARK = ".lora_A.", ".lora_B."


def shares_a(lora: LoraSettings, weights: WeightsConfig) -> bool:
    """Return True if the configuration freezes A at the shared values."""
    return lora.r > 0 and weights.rule != "off" and weights.lora_a == "shared"


@dataclass(frozen=True)
class Residual:
    """Relative error of averaging A and B separately."""

    ratio: float
    """‖(B₁ − B₂)(A₁ − A₂)‖ / 4 over ‖½ (B₁A₁ + B₂A₂)‖, Frobenius, over all adapters together; 0
    where the A are equal."""

    @property
    def allowed(self) -> bool:
        """True if A and B may be averaged. Otherwise neither is: B is meaningless with another
        A."""
        return self.ratio < RESIDUAL_LIMIT


def pairs(names: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Return the pairs of names (A, B) of all adapters, in peft's naming."""
    return [
        (name, name.replace(A_MARK, B_MARK))
        for name in sorted(names)
        if A_MARK in name and name.replace(A_MARK, B_MARK) in names
    ]


def residual(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> Residual:
    """Return the error of averaging A, (r, in), and B, (out, r), separately."""
    wrong = product = 0.0
    for a, b in pairs(mine):
        a1, a2, b1, b2 = (t.double() for t in (mine[a], theirs[a], mine[b], theirs[b]))
        wrong += _inner(b1 - b2, a1 - a2, b1 - b2, a1 - a2) / 16
        product += (
            _inner(b1, a1, b1, a1) + 2 * _inner(b1, a1, b2, a2) + _inner(b2, a2, b2, a2)
        ) / 4
    if wrong <= 0:
        return Residual(0.0)
    return Residual(math.sqrt(wrong / product) if product > 0 else math.inf)


def _inner(b1: torch.Tensor, a1: torch.Tensor, b2: torch.Tensor, a2: torch.Tensor) -> float:
    """Return ⟨B₁A₁, B₂A₂⟩ of matrices (out, in)."""
    return float(((b1.T @ b2) * (a1 @ a2.T)).sum())


def shared_a(name: str, shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Return the frozen A of adapter `name`, (r, in), float32: uniform in ±1/√in like peft's
    initial values.

    The values come from SHAKE-256, because nodes with different versions of torch and numpy must
    agree, and these do not keep their random streams between versions.

    Args:
        name: Name of the parameter.
        shape: (r, in).
        seed: 0 to 2**63 − 1.
    """
    count = math.prod(shape)
    stream = hashlib.shake_256(
        b"swarmnode/lora-a/1" + seed.to_bytes(8, "big") + name.encode()
    ).digest(4 * count)
    uniform = np.frombuffer(stream, "<u4").astype(np.float64) / 2**31 - 1  # [−1, 1)
    return torch.from_numpy((uniform / math.sqrt(shape[1])).astype(np.float32)).reshape(shape)


@torch.no_grad()
def freeze_a(parameters: Mapping[str, torch.nn.Parameter], seed: int) -> list[str]:
    """Set each A to its shared value and freeze it. Only trainable parameters are averaged later.

    Call this before the first step and before the optimizer is created: while B is zero, a change
    of A does not change the policy.

    Returns:
        Names of the frozen parameters.
    """
    frozen = [a for a, _ in pairs(parameters)]
    for name in frozen:
        parameter = parameters[name]
        parameter.copy_(shared_a(name, (parameter.shape[0], parameter.shape[1]), seed))
        parameter.requires_grad_(False)
    return frozen
