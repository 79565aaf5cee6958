"""The loss of a batch, from log-probabilities and advantages.

Token-level clipped policy gradient with asymmetric bounds and a hard bound on the ratio, three ways of averaging, an optional KL
penalty, and one weight per sequence for what came from elsewhere. The normaliser is a number that the caller computes
once over the whole batch (`loss_normalizer`): then micro-batches of any size add up to the loss of the whole.

    logprobs, old_logprobs, ref_logprobs, mask  (N, T)
    advantages, weights                         (N,)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LOSS_TYPES = ("dapo", "grpo", "dr_grpo")
EPSILON = 0.2
"""Lower clip of the importance ratio: PPO's."""
EPSILON_HIGH = 0.28
"""Upper clip: unlikely tokens may become likelier than a symmetric clip lets them (DAPO, arXiv 2503.14476 §3.1)."""
DELTA = 4.0
"""Hard upper bound of the ratio for negative advantages too (INTELLECT-2, arXiv 2505.07291 §3.4)."""


class LossOutput(NamedTuple):
    """`loss` carries the gradient; the rest is detached and describes these sequences only."""

    loss: torch.Tensor
    """Scalar: the share of the batch's loss that these sequences contribute."""
    clip_fraction: torch.Tensor
    """Share of tokens whose gradient the clip removed, 0 to 1."""
    kl: torch.Tensor
    """Mean k3 estimate of KL(policy ‖ reference) per token as it enters the loss, nats; 0 without a reference."""
    ratio: torch.Tensor
    """Mean importance ratio per token."""
    tokens: torch.Tensor
    """Tokens trained on: the weight of the three means when micro-batches are averaged."""


def loss_normalizer(mask: torch.Tensor, loss_type: str, max_completion_length: int | None = None) -> float:
    """What the loss of a whole batch is divided by, for `policy_loss` of its parts. `mask` (N, T) is the whole batch's.

    dapo: tokens (arXiv 2503.14476 §3.3) · grpo: sequences · dr_grpo: N × max_completion_length (arXiv 2503.20783 §3.2).
    Raises ValueError for an unknown loss type, or dr_grpo without a length.
    """
    if loss_type == "dapo":
        return max(float(mask.sum()), 1.0)
    if loss_type == "grpo":
        return float(max(mask.shape[0], 1))
    if loss_type == "dr_grpo":
        if not max_completion_length:
            raise ValueError("dr_grpo needs max_completion_length")
        return float(max(mask.shape[0], 1) * max_completion_length)
    raise ValueError(f"unknown loss_type {loss_type!r}; one of {', '.join(LOSS_TYPES)}")


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    epsilon: float = EPSILON,
    epsilon_high: float = EPSILON_HIGH,
    delta: float | None = None,
    loss_type: str = "dapo",
    beta: float = 0.0,
    ref_logprobs: torch.Tensor | None = None,
    use_bias_correction_kl: bool = True,
    weights: torch.Tensor | None = None,
    normalizer: float | None = None,
    max_completion_length: int | None = None,
) -> LossOutput:
    """−min(r·A, clip(r, 1−ε, 1+ε_high)·A) + β·k3, summed over tokens as `loss_type` says and divided by `normalizer`.

    r = exp(logprobs − old_logprobs); `old_logprobs=None` means the policy that sampled is the policy now (r = 1, gradient kept).
    `delta` caps r in the unclipped term too: with A < 0 the minimum picks the larger ratio, so without it one token that the
    policy has since made likely gives an unbounded loss (INTELLECT-2, arXiv 2505.07291 §3.4).
    The k3 term is multiplied by r (`use_bias_correction_kl`, TRL's key and default): its gradient is then that of the reverse KL,
    also where r is 1 (DeepSeek-V3.2, arXiv 2512.02556).
    `weights` scale the policy term of a sequence, not its KL. `normalizer=None` takes it from `mask`: right for a whole batch only.
    Padding may hold anything, infinities included. Raises ValueError when β > 0 has no reference.
    """
    mask = mask.to(logprobs.dtype)
    inside = mask.bool()
    logprobs = logprobs.masked_fill(~inside, 0.0)
    old = logprobs.detach() if old_logprobs is None else old_logprobs.masked_fill(~inside, 0.0)
    advantage = advantages.to(logprobs.dtype).unsqueeze(1)  # (N, 1)

    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    per_token = -torch.min(bounded * advantage, clipped * advantage)  # (N, T)
    if weights is not None:
        per_token = per_token * weights.to(logprobs.dtype).unsqueeze(1)

    tokens = mask.sum()
    kl_mean = logprobs.new_zeros(())
    if beta > 0.0:
        if ref_logprobs is None:
            raise ValueError("beta > 0 needs ref_logprobs")
        gap = ref_logprobs.masked_fill(~inside, 0.0) - logprobs
        kl = torch.exp(gap) - gap - 1.0  # k3: never negative
        if use_bias_correction_kl:
            kl = kl * ratio
        per_token = per_token + beta * kl
        kl_mean = (kl.detach() * mask).sum() / tokens.clamp(min=1.0)

    if normalizer is None:
        normalizer = loss_normalizer(mask, loss_type, max_completion_length)
    if loss_type == "grpo":
        lengths = mask.sum(1).clamp(min=1.0)
        loss = ((per_token * mask).sum(1) / lengths).sum() / normalizer
    else:
        loss = (per_token * mask).sum() / normalizer

    with torch.no_grad():
        removed = ((ratio < 1.0 - epsilon) & (advantage < 0)) | ((ratio > 1.0 + epsilon_high) & (advantage > 0))
        if delta is not None:
            removed |= (ratio > delta) & (advantage < 0)
        count = tokens.clamp(min=1.0)
        clip_fraction = (removed.to(mask.dtype) * mask).sum() / count
        ratio_mean = (ratio * mask).sum() / count
    return LossOutput(loss, clip_fraction, kl_mean, ratio_mean, tokens)

