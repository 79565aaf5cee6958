"""What another node's completions may weigh, and when they are not believed at all.

A peer's text was sampled by a peer's policy. How far that policy is from ours is measured by one ratio per sequence,
which only ever lowers the weight: a peer that lies about its log-probabilities can at best be treated as honest. Bounds on
the token ratio during several optimizer steps on one batch are `policy_loss(epsilon, epsilon_high, delta)`.
"""

from __future__ import annotations

import math

import torch

BURST_DRIFT = 2.0
"""Nats per token above the entropy that a policy trained apart from ours may be everywhere; `benchmarks.tolerance` has the numbers."""
BURST_SCALE = 8.0
LEAST_WEIGHT = 0.05
FLOOR = 0.8
"""Lowest weight of an external sequence. Source: HACPO (arXiv 2603.02604) §4, clip of the sequence-level ratio."""


def sequence_correction(local_sum: torch.Tensor, sender_sum: torch.Tensor, tokens: torch.Tensor, floor: float = FLOOR) -> torch.Tensor:
    """Weights (N,) in [floor, 1]: s = exp((lp_local − lp_sender) / tokens), clipped.

    `local_sum`, `sender_sum` (N,): log-probabilities summed over the completion, nats; `tokens` (N,): its length. The
    length-normalised sequence ratio is GSPO's (arXiv 2507.18071 §4.1); never above 1 is ours, see the module's docstring.
    A pair that is not finite gets the floor. No gradient flows through the weight.
    """
    log_ratio = (local_sum.detach().float() - sender_sum.float()) / tokens.float().clamp(min=1.0)
    weight = torch.exp(log_ratio.clamp(max=0.0)).clamp(floor, 1.0)
    return torch.where(torch.isfinite(log_ratio), weight, torch.full_like(weight, floor))


def spot_check(local: torch.Tensor, sender: torch.Tensor, tolerance: float) -> bool:
    """Whether a peer of the same model may have sampled this: median |Δ log-probability| per token within `tolerance`, nats.

    `local`, `sender` (T,), one or several completions end to end. The median, because one token on which two policies truly
    differ is ordinary, and half the tokens is not. False for different lengths, nothing at all, and numbers that are not finite.
    """
    if local.shape != sender.shape or local.numel() == 0:
        return False
    gap = (local.detach().float() - sender.float()).abs()
    return bool(torch.isfinite(gap).all()) and float(gap.median()) <= tolerance


def excess_surprise(local: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """How much more surprising each token was than what our policy samples there: −log-probability − entropy, (T,) nats.

    Whatever a policy samples has on average just its entropy's surprise, so the mean is near 0 for samples of a near policy, whoever says
    what about them. The spot check asks whether the sender tells the truth about a text; a sender that computes the truth about a text
    that it made up passes it, and fails here.
    """
    return -local.detach().float() - entropy.detach().float()


def surprise_check(excess: torch.Tensor, tolerance: float) -> bool:
    """Whether our policy, or one near it, may have *sampled* these tokens: mean `excess` (T,) within `tolerance`, nats.

    One-sided: colder sampling than ours is less surprising, and no harm. False for nothing at all, and numbers that are not finite.
    """
    return excess.numel() > 0 and bool(torch.isfinite(excess).all()) and float(excess.mean()) <= tolerance


def burst_weight(excess: torch.Tensor, slack: float) -> float:
    """What one completion weighs, 0 to 1, by its worst stretch of tokens: the largest sum of (`excess` − BURST_DRIFT) over any run of them.

    A lucky right answer is one or two unlikely choices, worth up to `slack` nats; a text that something was put into has a stretch that
    our policy would not have written, however long the rest is. Beyond the slack the weight falls by e for every BURST_SCALE nats, and
    below LEAST_WEIGHT it is 0.
    """
    if excess.numel() == 0 or not bool(torch.isfinite(excess).all()):
        return 0.0
    summed = torch.cat([excess.new_zeros(1), (excess.double() - BURST_DRIFT).cumsum(0)])
    worst = float((summed - summed.cummin(0).values).max())
    weight = math.exp(-max(0.0, worst - slack) / BURST_SCALE)
    return weight if weight >= LEAST_WEIGHT else 0.0


def burst_slack(vocab_size: int) -> float:
    """How surprising a single choice may be: e⁻⁸ of all of them, and any one word of the vocabulary."""
    return 8.0 + math.log(vocab_size)
