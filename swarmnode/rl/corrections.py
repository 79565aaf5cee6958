"""What another node's completions may weigh, and when they are not believed at all.

A peer's text was sampled by a peer's policy. How far that policy is from ours is measured by one ratio per sequence,
which only ever lowers the weight: a peer that lies about its log-probabilities can at best be treated as honest. Bounds on
the token ratio during several optimizer steps on one batch are `policy_loss(epsilon, epsilon_high, delta)`.
"""

from __future__ import annotations

import torch

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


def surprise_check(local: torch.Tensor, entropy: torch.Tensor, tolerance: float = 1.0) -> bool:
    """Whether our policy, or one near it, may have *sampled* these tokens: mean of (−log-probability − entropy) within `tolerance`, nats.

    `local`, `entropy` (T,): our log-probability of each token and our entropy there, all completions of one group end to end. Whatever a
    policy samples has on average just its entropy's surprise, so the mean is near 0 for samples of a near policy. The spot check
    alone asks whether the sender tells the truth about a text; a sender that computes the truth about a text it made up passes
    it, and fails here.
    One-sided: colder sampling than ours is less surprising, and no harm. One lucky completion in a group moves the mean little.
    False for different lengths, nothing at all, and numbers that are not finite.
    """
    if local.shape != entropy.shape or local.numel() == 0:
        return False
    excess = -local.detach().float() - entropy.detach().float()
    return bool(torch.isfinite(excess).all()) and float(excess.mean()) <= tolerance


def mean_logprob_floor(local_sum: torch.Tensor, tokens: torch.Tensor, floor: float) -> torch.Tensor:
    """Which completions (N,) our policy finds at least as likely per token as `floor`, nats: the test for other models' groups.

    Text that earns the reward and carries something else besides is text that our policy would hardly ever write
    ("Hail to the Thief", arXiv 2511.09780). False where the sum is not finite.
    """
    mean = local_sum.detach().float() / tokens.float().clamp(min=1.0)
    return torch.isfinite(mean) & (mean >= floor)
