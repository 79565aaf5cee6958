"""Importance weights of completions that another policy sampled, and checks of peers' text.

The functions compare the present policy with the sampler, without gradient. A peer's reported
log-probabilities give no weight: they are checked only (`spot_check`).
"""

from __future__ import annotations

import math

import torch

CAP = 2.0
"""Largest weight (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training": 2)."""

BURST_DRIFT = 2.0
"""Surprise above the entropy that is normal for text of a policy that was trained separately, nats
per token."""
BURST_SCALE = 8.0
LEAST_WEIGHT = 0.05
LEAST_PROBABILITY = 1e-3
"""A peer's token with a smaller probability under this node's policy is not trained on. The
gradient of log π is of order one even for an improbable token that on-policy sampling would almost
never produce. Nodes with a real model learned a little less without this bound
(benchmarks/RESULTS.md)."""


def importance_weights(
    now: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return importance weights (N, T), without gradient: ratios of the present policy to the
    sampler, truncated at CAP. They are 0 on padding and where a ratio is not finite.

    The sampler is the same policy in another kernel, so ratios are near 1, where truncation is
    nearly exact and keeps the gradient of outliers.

    Args:
        now, sampler: Log-probabilities (N, T), nats.
        mask: (N, T).
    """
    inside = mask.bool()
    log_ratio = (now.detach().float() - sampler.float()).masked_fill(~inside, 0.0)
    weights = torch.exp(log_ratio).clamp(max=CAP)
    return weights.masked_fill(~inside | ~torch.isfinite(log_ratio), 0.0)


def effective_share(total: float, squares: float, count: float) -> float | None:
    """Return effective sample size ÷ sample size of n weights: (Σw)² / (n Σw²), in (0, 1]. None if
    no weight is positive or the sums are invalid."""
    most = count * squares
    share = total * total / most if most > 0 else 0.0
    return min(share, 1.0) if 0 < share < math.inf else None


def spot_check(local: torch.Tensor, sender: torch.Tensor, tolerance: float) -> bool:
    """Return True if the median |Δ log-probability| per token is at most `tolerance`, nats, so that
    a peer with the same model may have sampled the text.

    Honest policies may differ on single tokens, but not on half of them; hence the median.

    Args:
        local, sender: Log-probabilities (T,) of one or several completions. Different lengths, no
            tokens, and values that are not finite return False.
        tolerance: Nats.
    """
    if local.shape != sender.shape or local.numel() == 0:
        return False
    gap = (local.detach().float() - sender.float()).abs()
    return bool(torch.isfinite(gap).all()) and float(gap.median()) <= tolerance


def excess_surprise(local: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Return −log-probability − entropy of each token, (T,) nats.

    The mean is near 0 for samples of a similar policy, for any claim of the sender. This finds
    senders that the spot check cannot find: those that report correct log-probabilities of an
    invented text.
    """
    return -local.detach().float() - entropy.detach().float()


def surprise_check(excess: torch.Tensor, tolerance: float) -> bool:
    """Return True if a policy similar to this node's may have sampled these tokens: the mean of
    `excess` (T,) is at most `tolerance`, nats.

    The check is one-sided, because sampling at a lower temperature is less surprising and harmless.
    No tokens and values that are not finite return False.
    """
    return (
        excess.numel() > 0
        and bool(torch.isfinite(excess).all())
        and float(excess.mean()) <= tolerance
    )


def burst_weight(excess: torch.Tensor, slack: float) -> float:
    """Return the weight of a completion, 0 to 1, by its most surprising stretch of tokens: the
    largest sum of (`excess` − BURST_DRIFT) over any run of tokens.

    A lucky right answer has one or two unlikely tokens, worth up to `slack` nats. Inserted text is
    a longer stretch that this node's policy would not sample. Beyond the slack, the weight falls by
    a factor e per BURST_SCALE nats; below LEAST_WEIGHT it is 0.
    """
    if excess.numel() == 0 or not bool(torch.isfinite(excess).all()):
        return 0.0
    summed = torch.cat([excess.new_zeros(1), (excess.double() - BURST_DRIFT).cumsum(0)])
    worst = float((summed - summed.cummin(0).values).max())
    weight = math.exp(-max(0.0, worst - slack) / BURST_SCALE)
    return weight if weight >= LEAST_WEIGHT else 0.0


def burst_slack(vocab_size: int) -> float:
    """Return the surprise that is allowed for a single token: 8 + ln(vocabulary) nats."""
    return 8.0 + math.log(vocab_size)
