"""The policy loss, from log-probabilities and advantages.

A batch gives one step, so there is no earlier policy to compare with: the loss is the policy
gradient, without a ratio and without a clip. `dapo`, `grpo` and `dr_grpo` differ in the normalizer
only. Completions of another policy have weights. The caller computes the normalizer once over the
whole batch (`Objective.normalizer`), so that the losses of micro-batches of any size add up to the
loss of the batch.

    logprobs, mask   (N, T)
    advantages       (N,)
    weights          (N, T) or (N, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from swarmnode.config import TrainingConfig

LossType = Literal["dapo", "grpo", "dr_grpo"]
MAX_GRAD_NORM = 1.0
"""Norm to which the gradient of a step is clipped, as in TRL. It limits the effect of one bad batch
on AdamW's moments."""
WEIGHT_DECAY = 0.0
"""AdamW's weight decay. A pre-trained policy should not decay to zero."""


@dataclass(frozen=True)
class Objective:
    """Parameters of the loss. Names and meanings are TRL's."""

    loss_type: LossType = "dapo"
    max_completion_length: int = 1
    """Normaliser of dr_grpo, tokens; other losses ignore it."""

    @classmethod
    def of(cls, cfg: TrainingConfig) -> Objective:
        """Return the objective that the configuration names."""
        return cls(cfg.loss_type, cfg.max_completion_length)

    def normalizer(self, lengths: Sequence[int]) -> float:
        """Return the divisor of the loss of a batch with completions of `lengths` tokens.

        dapo: tokens (arXiv 2503.14476 §3.3) · grpo: sequences · dr_grpo: N × max_completion_length
        (arXiv 2503.20783 §3.2).
        """
        if self.loss_type == "dapo":
            return float(max(1, sum(lengths)))
        if self.loss_type == "grpo":
            return float(max(1, len(lengths)))
        return float(max(1, len(lengths)) * self.max_completion_length)


def policy_loss(
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    objective: Objective,
    normalizer: float,
    *,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return −w·A·logprobs, summed over tokens as `loss_type` requires and divided by `normalizer`:
    the contribution of these sequences to the loss of the batch, a scalar with gradient.

    Its gradient is that of PPO's clipped loss at the ratio 1.

    Args:
        weights: Factors of the policy term, w.
        mask: Padding may contain any values, including infinities.
    """
    mask = mask.to(logprobs.dtype)
    logprobs = logprobs.masked_fill(~mask.bool(), 0.0)
    signal = advantages.to(logprobs.dtype).unsqueeze(1)  # (N, 1)
    if weights is not None:
        signal = signal * weights.to(logprobs.dtype)
    per_token = -signal * logprobs  # (N, T)
    if objective.loss_type == "grpo":
        return (per_token.sum(1) / mask.sum(1).clamp(min=1.0)).sum() / normalizer
    return per_token.sum() / normalizer
