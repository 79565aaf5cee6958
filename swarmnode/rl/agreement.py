"""Measures whether own and external groups change the weights in the same direction, without a
second backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

PROBE_PARAMETERS = 2**20
"""Largest number of parameters in the probe: 4 MiB and a few milliseconds for every model."""


class AgreementProbe:
    """Cosine between the gradients of own and of external groups in one accumulated step.

    Gradients of a step add up, so the external gradient is the difference of two states of the same
    buffer:

        optimizer.zero_grad(); for b in own: loss(b).backward()
        probe.mark()                                            # g_own
        for b in external: loss(b).backward()
        agreement = probe.read()                                # cos(g_own, g_total − g_own)

    The probe includes only the last trainable tensors, up to `limit` parameters: adapters or the
    final blocks, where the gradient is largest and a copy is cheap. This suffices for the sign.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], limit: int = PROBE_PARAMETERS
    ) -> None:
        chosen: list[torch.nn.Parameter] = []
        room = limit
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            if parameter.numel() <= room:
                chosen.append(parameter)
                room -= parameter.numel()
        self._parameters = chosen
        self.own: torch.Tensor | None = None
        """Flat own gradient since `mark`; those of other ranks are added to it."""

    def _flat(self) -> torch.Tensor:
        parts = [
            torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self._parameters
        ]
        # On one device, since layers may be on several.
        return torch.cat([p.flatten().float().cpu() for p in parts]) if parts else torch.zeros(0)

    def mark(self) -> None:
        """Store the own gradient. Call it after the own backward passes, before the first external
        one."""
        self.own = self._flat().clone()

    def read(self) -> float | None:
        """Return the cosine in [−1, 1]; None if a side has no gradient, or without `mark`."""
        if self.own is None:
            return None
        own, external = self.own, self._flat() - self.own
        self.own = None
        norms = float(own.norm()) * float(external.norm())
        if not math.isfinite(norms) or norms <= 1e-20:
            return None
        return max(-1.0, min(1.0, float(own @ external) / norms))
