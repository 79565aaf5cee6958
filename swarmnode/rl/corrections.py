"""Off-policy corrections: weights of completions that another policy sampled, and checks of peers'
log-probabilities.

There are three policies: the sampler; the old policy, at the beginning of the step; and the new
policy, which has the gradient. The ratio and the clip in `rl.objectives` compare new with old. The
functions here compare old with sampler, without gradient.

    own completions    sampled by another kernel or number format: `importance_weights`
    peers' completions sampled by another node: `sequence_correction`. It only lowers weights, so a
                       peer gains nothing by false log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

import torch

Correction = Literal["tis", "mis", "icepop"]
Level = Literal["token", "sequence"]
CAP = 2.0
"""Largest weight of `tis`, and the ratio above which `mis` gives weight 0 (Yao et al. 2025, "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training": 2)."""
BAND = (0.5, 5.0)
"""Range of ratios outside of which `icepop` gives weight 0 (Ling Team, "Every Step Evolves", arXiv
2510.18855 §3.2)."""

BURST_DRIFT = 2.0
"""Surprise above the entropy that is normal for text of a policy that was trained separately, nats
per token."""
BURST_SCALE = 8.0
LEAST_WEIGHT = 0.05
OWN_CORRECTION: tuple[Correction, Level] = ("tis", "token")
"""Correction for own completions. The sampler is the same policy in another kernel, so ratios are
near 1, where all corrections are nearly exact. Truncation keeps the gradient of outliers, and the
variance of a token's ratio does not grow with the length."""
NAMED: dict[str, tuple[Correction, Level]] = {
    "tis": ("tis", "token"),
    "mis": ("mis", "token"),
    "icepop": ("icepop", "token"),
    "sequence_tis": ("tis", "sequence"),
    "sequence_mis": ("mis", "sequence"),
    "sequence_icepop": ("icepop", "sequence"),
}
"""Corrections by their names in `training.options`."""
FLOOR = 0.1
"""Ratio per token below which a peer's completion has weight 0. A higher floor adds bias: it would
exclude answers that a peer's policy has learnt and this node's policy has not."""


LEAST_PROBABILITY = 1e-3
"""A peer's completion is trained on up to its first token with a smaller probability under this
node's policy. The gradient of log π is of order one even for an improbable token that on-policy
sampling would almost never produce. Without this bound a peer could teach a mark that no verifier
checks. With 1e-2, learning from rare successes is a third slower (benchmarks/RESULTS.md)."""


def own_correction(options: Collection[str]) -> tuple[Correction, Level]:
    """Return the correction for own completions that `training.options` names."""
    return next((NAMED[option] for option in options if option in NAMED), OWN_CORRECTION)


def importance_weights(
    old: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor, kind: Correction, level: Level
) -> torch.Tensor:
    """Return importance weights (N, T): bounded ratios of the old policy to the sampler, without
    gradient; 0 on padding and where a ratio is not finite.

    Args:
        old, sampler: Log-probabilities (N, T), nats.
        mask: (N, T).
        kind: `tis` truncates at CAP, `mis` masks above CAP, `icepop` masks outside BAND.
        level: With `sequence`, all tokens have the product of the completion's ratios.
    """
    inside = mask.bool()
    log_ratio = (old.detach().float() - sampler.float()).masked_fill(~inside, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    ratio = torch.exp(log_ratio)
    low, high = BAND if kind == "icepop" else (0.0, CAP)
    weights = (
        ratio.clamp(max=CAP)
        if kind == "tis"
        else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    )
    return weights.masked_fill(~inside | ~torch.isfinite(log_ratio), 0.0)


def against_sampler(
    now: torch.Tensor,
    recorded: torch.Tensor,
    sampled: torch.Tensor,
    weights: torch.Tensor,
    mask: torch.Tensor,
    kind: Correction,
    level: Level,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the old policy's log-probabilities (N, T) for the objective, and the weight of each
    token (N, T); 0 on padding.

    If `recorded` holds the sampler's log-probabilities, the old policy is the present one and the
    weight includes the correction. Otherwise `recorded` is the old policy.

    Args:
        now: Log-probabilities of the present policy (N, T).
        recorded: Recorded log-probabilities (N, T).
        sampled: (N,) True if `recorded` is the sampler's.
        weights: (N,).
        mask: (N, T).
        kind, level: See `importance_weights`.
    """
    now, sampled = now.detach().float(), sampled.unsqueeze(1)
    correction = torch.where(
        sampled, importance_weights(now, recorded, mask, kind, level), mask.float()
    )
    return torch.where(sampled, now, recorded), weights.unsqueeze(1) * correction


def effective_share(total: float, squares: float, count: float) -> float | None:
    """Return effective sample size ÷ sample size of n weights: (Σw)² / (n Σw²), in (0, 1]. None if
    no weight is positive or the sums are invalid."""
    most = count * squares
    share = total * total / most if most > 0 else 0.0
    return min(share, 1.0) if 0 < share < math.inf else None


def rate_factor(options: Collection[str], effective: float | None) -> float:
    """Return the factor of the learning rate: √(effective share) with the option `effective_rate`,
    otherwise 1.

    The variance of an update depends on the effective sample size (VCPO, arXiv 2602.17616), and
    Adam's rate scales with the root of the batch size (arXiv 2205.10287).
    """
    return math.sqrt(effective) if "effective_rate" in options and effective is not None else 1.0


def sequence_correction(
    local_sum: torch.Tensor, sender_sum: torch.Tensor, tokens: torch.Tensor, floor: float = FLOOR
) -> torch.Tensor:
    """Return the weights (N,) of peers' completions: `min(1, exp((lp_local − lp_sender) /
    tokens))`, or 0 below `floor` or if it is not finite. Without gradient.

    The length-normalised sequence ratio is GSPO's (arXiv 2507.18071 §4.1). The bound of 1
    is an addition; see the module's docstring.

    Args:
        local_sum, sender_sum: Log-probabilities summed over each completion (N,), nats.
        tokens: Lengths (N,).
        floor: Least ratio.
    """
    log_ratio = (local_sum.detach().float() - sender_sum.float()) / tokens.float().clamp(min=1.0)
    weight = torch.exp(log_ratio.clamp(max=0.0))
    return torch.where(
        torch.isfinite(log_ratio) & (weight >= floor), weight, torch.zeros_like(weight)
    )


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


def learnt_tokens(local: Sequence[float], least: float = LEAST_PROBABILITY) -> int:
    """Return the number of a peer's tokens that are trained on: those before the first one whose
    probability under this node's policy is below `least`.

    Args:
        local: (T,) log-probabilities under this node's policy and temperature, nats.
        least: Probability.
    """
    floor = math.log(least)
    return next((i for i, logprob in enumerate(local) if logprob < floor), len(local))


def burst_slack(vocab_size: int) -> float:
    """Return the surprise that is allowed for a single token: 8 + ln(vocabulary) nats."""
    return 8.0 + math.log(vocab_size)
