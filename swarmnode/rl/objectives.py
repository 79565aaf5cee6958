"""The loss of a batch, from log-probabilities and advantages.

Token-level clipped policy gradient with asymmetric bounds and a hard bound on the ratio, three ways of averaging, an optional KL
penalty, and one weight per sequence for what came from elsewhere. The normalizer is a number that the caller computes once over the whole
batch (`Objective.normalizer`): then micro-batches of any size add up to the loss of the whole.

    logprobs, old_logprobs, ref_logprobs, mask  (N, T)
    advantages, weights                         (N,)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from swarmnode.config import TrainingConfig

LossType = Literal["dapo", "grpo", "dr_grpo"]
MAX_GRAD_NORM = 1.0
"""Norm that the gradient of a step is clipped to, TRL's: bounds what one bad batch does to AdamW's moments."""
WEIGHT_DECAY = 0.0
"""AdamW's: a policy that was trained before is not drawn to zero; `training.beta` draws it to where it started."""
EPSILON = 0.2
"""Lower clip of the importance ratio: PPO's."""
EPSILON_HIGH = 0.28
"""Upper clip: unlikely tokens may become likelier than a symmetric clip lets them (DAPO, arXiv 2503.14476 §3.1)."""
DELTA = 4.0
"""Hard upper bound of the ratio for negative advantages too (INTELLECT-2, arXiv 2505.07291 §3.4)."""


@dataclass(frozen=True)
class Objective:
    """What is minimised. Names and meanings are TRL's."""

    loss_type: LossType = "dapo"
    beta: float = 0.0
    max_completion_length: int = 1
    """Only dr_grpo asks for it."""
    epsilon: float = EPSILON
    epsilon_high: float = EPSILON_HIGH
    delta: float | None = DELTA

    @classmethod
    def of(cls, cfg: TrainingConfig) -> Objective:
        return cls(cfg.loss_type, cfg.beta, cfg.max_completion_length)

    def normalizer(self, lengths: Sequence[int]) -> float:
        """The number that the loss of a whole batch, of completions of `lengths` tokens, is divided by.

        dapo: tokens (arXiv 2503.14476 §3.3) · grpo: sequences · dr_grpo: N × max_completion_length (arXiv 2503.20783 §3.2).
        """
        if self.loss_type == "dapo":
            return float(max(1, sum(lengths)))
        if self.loss_type == "grpo":
            return float(max(1, len(lengths)))
        return float(max(1, len(lengths)) * self.max_completion_length)


class LossOutput(NamedTuple):
    """`loss` carries the gradient; the rest is detached and describes these sequences only."""

    loss: torch.Tensor
    """Scalar: the share of the batch's loss that these sequences contribute."""
    clip_fraction: torch.Tensor
    """Share of tokens whose gradient the clip removed, 0 to 1."""
    kl: torch.Tensor
    """Mean k3 estimate of KL(policy ‖ reference) per token as it enters the loss, nats; 0 without a reference."""
    tokens: torch.Tensor
    """Tokens trained on: the weight of the two means when micro-batches are averaged."""


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    objective: Objective,
    normalizer: float,
    *,
    weights: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
) -> LossOutput:
    """−min(r·A, clip(r, 1−ε, 1+ε_high)·A) + β·k3, summed over tokens as `loss_type` says and divided by `normalizer`.

    r = exp(logprobs − old_logprobs). `delta` caps r in the unclipped term too: with A < 0 the minimum picks the larger ratio, so without it
    one token that the policy has since made likely gives an unbounded loss (INTELLECT-2, arXiv 2505.07291 §3.4).
    The k3 term is multiplied by r (TRL's `use_bias_correction_kl`): its gradient is then that of the reverse KL, also where r is 1
    (DeepSeek-V3.2, arXiv 2512.02556). `weights` scale the policy term of a sequence, not its KL.
    Padding may hold anything, infinities included. Raises ValueError when β > 0 has no reference.
    """
    mask = mask.to(logprobs.dtype)
    inside = mask.bool()
    logprobs = logprobs.masked_fill(~inside, 0.0)
    old = old_logprobs.masked_fill(~inside, 0.0)
    advantage = advantages.to(logprobs.dtype).unsqueeze(1)  # (N, 1)
    epsilon, epsilon_high, delta = objective.epsilon, objective.epsilon_high, objective.delta

    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    per_token = -torch.min(bounded * advantage, clipped * advantage)  # (N, T)
    if weights is not None:
        per_token = per_token * weights.to(logprobs.dtype).unsqueeze(1)

    tokens = mask.sum()
    kl_mean = logprobs.new_zeros(())
    if objective.beta > 0.0:
        if ref_logprobs is None:
            raise ValueError("beta > 0 needs ref_logprobs")
        gap = ref_logprobs.masked_fill(~inside, 0.0) - logprobs
        kl = (torch.exp(gap) - gap - 1.0) * ratio  # k3: never negative
        per_token = per_token + objective.beta * kl
        kl_mean = (kl.detach() * mask).sum() / tokens.clamp(min=1.0)

    if objective.loss_type == "grpo":
        lengths = mask.sum(1).clamp(min=1.0)
        loss = ((per_token * mask).sum(1) / lengths).sum() / normalizer
    else:
        loss = (per_token * mask).sum() / normalizer

    with torch.no_grad():
        removed = ((ratio < 1.0 - epsilon) & (advantage < 0)) | ((ratio > 1.0 + epsilon_high) & (advantage > 0))
        if delta is not None:
            removed |= (ratio > delta) & (advantage < 0)
        clip_fraction = (removed.to(mask.dtype) * mask).sum() / tokens.clamp(min=1.0)
    return LossOutput(loss, clip_fraction, kl_mean, tokens)
