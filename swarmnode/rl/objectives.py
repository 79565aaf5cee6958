"""The policy loss, from log-probabilities and advantages.

    dapo, grpo, dr_grpo   clipped ratio per token, with asymmetric bounds and a hard bound; they
                          differ in the normalizer
    gspo                  one ratio per sequence (the geometric mean per token), with tight bounds
    cispo                 −log-probability times the bounded ratio: no token loses its gradient

A KL penalty is optional, and so are weights for completions of another policy. The caller computes
the normalizer once over the whole batch (`Objective.normalizer`), so that the losses of
micro-batches of any size add up to the loss of the batch.

    logprobs, old_logprobs, ref_logprobs, mask  (N, T)
    advantages                                  (N,)
    weights                                     (N,) or (N, T)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from swarmnode.config import TrainingConfig

LossType = Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"]
MAX_GRAD_NORM = 1.0
"""Norm to which the gradient of a step is clipped, as in TRL. It limits the effect of one bad batch
on AdamW's moments."""
WEIGHT_DECAY = 0.0
"""AdamW's weight decay. A pre-trained policy should not decay to zero; `training.beta` pulls it
towards its initial state."""
EPSILON = 0.2
"""Lower clip of the ratio, as in PPO."""
EPSILON_HIGH = 1.0
"""Upper clip of the ratio. DAPO (arXiv 2503.14476 §3.1) has 0.28. A step is taken once, so the clip
only affects replayed groups (`trainer.replay`), in which a rare success may become twice as likely.
With 0.28 the first replays teach less, and without a bound the later ones do
(benchmarks/RESULTS.md)."""
CLIPS_TOKENS = ("dapo", "grpo", "dr_grpo")
"""Objectives whose clip limits the effect of replay. The tight clip of `gspo` is reached within one
step, and `cispo` removes no gradient."""
DIVIDES_BY_LENGTH = ("grpo", "gspo")
"""Objectives that divide each completion by its length."""
DELTA = 4.0
"""Hard upper bound of the ratio, also for negative advantages (INTELLECT-2, arXiv 2505.07291
§3.4)."""


SEQUENCE_EPSILON, SEQUENCE_EPSILON_HIGH = 3e-4, 4e-4
"""Clips of a sequence's ratio. The mean over tokens changes much less than single tokens (GSPO,
arXiv 2507.18071 §5.1)."""
WEIGHT_EPSILON_HIGH = 4.0
"""The weight of `cispo` is at most 1 + this value, and has no lower bound (CISPO, arXiv 2506.13585
§3.1; the bound 5 is ScaleRL's, arXiv 2510.13786)."""


@dataclass(frozen=True)
class Objective:
    """Parameters of the loss. Names and meanings are TRL's."""

    loss_type: LossType = "dapo"
    beta: float = 0.0
    max_completion_length: int = 1
    """Normaliser of dr_grpo, tokens; other losses ignore it."""
    epsilon: float = EPSILON
    epsilon_high: float = EPSILON_HIGH
    delta: float | None = DELTA

    @classmethod
    def of(cls, cfg: TrainingConfig) -> Objective:
        """Return the objective that the configuration names."""
        named = cls(cfg.loss_type, cfg.beta, cfg.max_completion_length)
        if cfg.loss_type == "gspo":
            return replace(
                named, epsilon=SEQUENCE_EPSILON, epsilon_high=SEQUENCE_EPSILON_HIGH, delta=None
            )
        if cfg.loss_type == "cispo":
            return replace(named, epsilon_high=WEIGHT_EPSILON_HIGH)
        return named

    def normalizer(self, lengths: Sequence[int]) -> float:
        """Return the divisor of the loss of a batch with completions of `lengths` tokens.

        dapo, cispo: tokens (arXiv 2503.14476 §3.3) · grpo, gspo: sequences · dr_grpo: N ×
        max_completion_length (arXiv 2503.20783 §3.2).
        """
        if self.loss_type in ("dapo", "cispo"):
            return float(max(1, sum(lengths)))
        if self.loss_type in DIVIDES_BY_LENGTH:
            return float(max(1, len(lengths)))
        return float(max(1, len(lengths)) * self.max_completion_length)


class LossOutput(NamedTuple):
    """The loss, which has the gradient, and detached statistics of the same sequences."""

    loss: torch.Tensor
    """Scalar: the contribution of these sequences to the loss of the batch."""
    clip_fraction: torch.Tensor
    """Share of tokens whose gradient the clip removed, or with `cispo` bounded, 0 to 1."""
    kl: torch.Tensor
    """Mean k3 estimate of KL(policy ‖ reference) per token as it enters the loss, nats; 0 without a
    reference."""
    tokens: torch.Tensor
    """Number of tokens: the weight of the two means when micro-batches are averaged."""


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
    """Return −min(r·A, clip(r, 1−ε, 1+ε_high)·A) + β·k3, summed over tokens as `loss_type` requires
    and divided by `normalizer`.

    r = exp(logprobs − old_logprobs). With `gspo`, r is exp of the mean over the sequence, for all
    its tokens. With `cispo`, the first term is −min(r, 1+ε_high)·A·logprobs with no gradient
    through the ratio. `delta` bounds r in the unclipped term: for A < 0 the minimum selects the
    larger ratio, so a token that has become likely would give an unbounded loss (INTELLECT-2,
    arXiv 2505.07291 §3.4). The k3 term is multiplied by r (TRL's `use_bias_correction_kl`), which
    makes its gradient that of the reverse KL, also at r = 1 (DeepSeek-V3.2, arXiv 2512.02556).

    Args:
        weights: Factors of the policy term, (N,) or (N, T). They do not scale the KL term.
        mask: Padding may contain any values, including infinities.

    Raises:
        ValueError: β > 0 without `ref_logprobs`.
    """
    mask = mask.to(logprobs.dtype)
    inside = mask.bool()
    logprobs = logprobs.masked_fill(~inside, 0.0)
    old = old_logprobs.masked_fill(~inside, 0.0)
    advantage = advantages.to(logprobs.dtype).unsqueeze(1)  # (N, 1)
    epsilon, epsilon_high, delta = objective.epsilon, objective.epsilon_high, objective.delta

    lengths = mask.sum(1).clamp(min=1.0)
    log_ratio = logprobs - old
    if objective.loss_type == "gspo":
        log_ratio = (log_ratio.sum(1) / lengths).unsqueeze(1).expand_as(logprobs)
    ratio = torch.exp(log_ratio)
    if objective.loss_type == "cispo":
        per_token = -ratio.detach().clamp(max=1.0 + epsilon_high) * advantage * logprobs  # (N, T)
    else:
        clipped = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
        bounded = ratio if delta is None else ratio.clamp(max=delta)
        per_token = -torch.min(bounded * advantage, clipped * advantage)  # (N, T)
    if weights is not None:
        per_token = per_token * (weights if weights.ndim == 2 else weights.unsqueeze(1)).to(
            logprobs.dtype
        )

    tokens = mask.sum()
    kl_mean = logprobs.new_zeros(())
    if objective.beta > 0.0:
        if ref_logprobs is None:
            raise ValueError("beta > 0 needs ref_logprobs")
        gap = ref_logprobs.masked_fill(~inside, 0.0) - logprobs
        kl = (torch.exp(gap) - gap - 1.0) * ratio  # k3: never negative
        per_token = per_token + objective.beta * kl
        kl_mean = (kl.detach() * mask).sum() / tokens.clamp(min=1.0)

    if objective.loss_type in DIVIDES_BY_LENGTH:
        loss = ((per_token * mask).sum(1) / lengths).sum() / normalizer
    else:
        loss = (per_token * mask).sum() / normalizer

    with torch.no_grad():
        if objective.loss_type == "cispo":
            removed = ratio > 1.0 + epsilon_high
        else:
            removed = ((ratio < 1.0 - epsilon) & (advantage < 0)) | (
                (ratio > 1.0 + epsilon_high) & (advantage > 0)
            )
            if delta is not None:
                removed |= (ratio > delta) & (advantage < 0)
        clip_fraction = (removed.to(mask.dtype) * mask).sum() / tokens.clamp(min=1.0)
    return LossOutput(loss, clip_fraction, kl_mean, tokens)
