"""What completions weigh that another policy than the one being trained has sampled, and when they
are not believed at all.

Three log-probabilities are kept apart: of the sampler, when it sampled; of the old policy, at the
beginning of the step; of the new one, which has the gradient. Ratio and clip of the objective are
new against old (`rl.objectives`); what is here is old against sampler, without gradient.
`benchmarks.corrections` has bias and variance of each of these against the exact gradient.

    own       another kernel or number format has sampled: `importance_weights`
    a peer's  another node's policy has, and says so itself: `sequence_correction`, which only ever
    lowers the weight, so that a peer that
              lies about its log-probabilities can at best be treated as honest
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

import torch

Correction = Literal["tis", "mis", "icepop"]
Level = Literal["token", "sequence"]
CAP = 2.0
"""Most that `tis` lets a token or sequence weigh, and above which `mis` leaves it out (Yao et al.
2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training": 2)."""
BAND = (0.5, 5.0)
"""Ratios outside of which `icepop` leaves a token or sequence out (Ling Team, "Every Step Evolves",
arXiv 2510.18855 §3.2)."""

BURST_DRIFT = 2.0
"""Nats per token above the entropy that a policy trained apart from ours may be everywhere;
`benchmarks.tolerance` has the numbers."""
BURST_SCALE = 8.0
LEAST_WEIGHT = 0.05
OWN_CORRECTION: tuple[Correction, Level] = ("tis", "token")
"""For what this node sampled itself. The sampler is the policy of the same step in another kernel,
so that ratios are near 1, where each of them is nearly exact; truncating keeps the gradient of what
lies beyond, and a token's ratio varies no more in a longer answer."""
NAMED: dict[str, tuple[Correction, Level]] = {
    "tis": ("tis", "token"),
    "mis": ("mis", "token"),
    "icepop": ("icepop", "token"),
    "sequence_tis": ("tis", "sequence"),
    "sequence_mis": ("mis", "sequence"),
    "sequence_icepop": ("icepop", "sequence"),
}
"""As `training.options` has them."""
FLOOR = 0.1
"""Ratio per token below which a peer's completion weighs nothing. The exact gradient has no use for
a higher one: what lies there is what a peer has learnt and we have not, and leaving it out adds
more bias than its weight does."""


LEAST_PROBABILITY = 1e-3
"""A peer's completion teaches nothing from its first token on that our policy gives less than this.
The gradient of log π is of order one however improbable a token is, and on-policy learning would
nearly never sample it; so without a bound a peer can teach a mark that no verifier looks at. At
1e-2 learning from rare successes is a third slower (benchmarks/RESULTS.md)."""


def own_correction(options: Collection[str]) -> tuple[Correction, Level]:
    """The correction that `training.options` names for own completions."""
    return next((NAMED[option] for option in options if option in NAMED), OWN_CORRECTION)


def importance_weights(
    old: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor, kind: Correction, level: Level
) -> torch.Tensor:
    """Weights (N, T) of what the sampler has sampled, for a gradient of the old policy: their
    ratio, kept from growing without bound.

    old, sampler, mask (N, T). tis: truncated at CAP · mis: masked above CAP · icepop: masked
    outside BAND. At level `sequence` the ratio is the product over the completion's tokens, for all
    of them. A ratio that is not finite weighs nothing. Without gradient; 0 on padding.
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
    """(N, T) what the objective's ratio is against, and what each token weighs; 0 on padding.

    A completion whose `recorded` log-probabilities (N, T) are its sampler's (`sampled` (N,)) has
    the policy as it is `now` for its old one, and `weights` (N,) times the correction for the
    sampler's. Any other has `recorded`, and `weights`.
    """
    now, sampled = now.detach().float(), sampled.unsqueeze(1)
    correction = torch.where(
        sampled, importance_weights(now, recorded, mask, kind, level), mask.float()
    )
    return torch.where(sampled, now, recorded), weights.unsqueeze(1) * correction


def effective_share(total: float, squares: float, count: float) -> float | None:
    """Effective sample size ÷ sample size, in (0, 1]: (Σw)² / (n Σw²) of n weights; None of
    nothing, where nothing has weight, and of sums that are of no weights."""
    most = count * squares
    share = total * total / most if most > 0 else 0.0
    return min(share, 1.0) if 0 < share < math.inf else None


def rate_factor(options: Collection[str], effective: float | None) -> float:
    """What the learning rate is multiplied by where few samples carry the weight: √(effective
    share); 1 without the option.

    An update varies as if it were of so many samples only (VCPO, arXiv 2602.17616), and Adam's rate
    goes with the root of the batch (arXiv 2205.10287).
    """
    return math.sqrt(effective) if "effective_rate" in options and effective is not None else 1.0


def sequence_correction(
    local_sum: torch.Tensor, sender_sum: torch.Tensor, tokens: torch.Tensor, floor: float = FLOOR
) -> torch.Tensor:
    """Weights (N,), each 0 or in [floor, 1]: s = exp((lp_local − lp_sender) / tokens), at most 1,
    and nothing below the floor.

    `local_sum`, `sender_sum` (N,): log-probabilities summed over the completion, nats; `tokens`
    (N,): its length. The length-normalised sequence ratio is GSPO's (arXiv 2507.18071 §4.1); never
    above 1 is ours, see the module's docstring. A pair that is not finite weighs nothing. No
    gradient flows through the weight.
    """
    log_ratio = (local_sum.detach().float() - sender_sum.float()) / tokens.float().clamp(min=1.0)
    weight = torch.exp(log_ratio.clamp(max=0.0))
    return torch.where(
        torch.isfinite(log_ratio) & (weight >= floor), weight, torch.zeros_like(weight)
    )


def spot_check(local: torch.Tensor, sender: torch.Tensor, tolerance: float) -> bool:
    """Whether a peer of the same model may have sampled this: median |Δ log-probability| per token
    within `tolerance`, nats.

    `local`, `sender` (T,), one or several completions end to end. The median, because one token on
    which two policies truly differ is ordinary, and half the tokens is not. False for different
    lengths, nothing at all, and numbers that are not finite.
    """
    if local.shape != sender.shape or local.numel() == 0:
        return False
    gap = (local.detach().float() - sender.float()).abs()
    return bool(torch.isfinite(gap).all()) and float(gap.median()) <= tolerance


def excess_surprise(local: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """How much more surprising each token was than what our policy samples there: −log-probability
    − entropy, (T,) nats.

    Whatever a policy samples has on average just its entropy's surprise, so the mean is near 0 for
    samples of a near policy, whoever says what about them. The spot check asks whether the sender
    tells the truth about a text; a sender that computes the truth about a text that it made up
    passes it, and fails here.
    """
    return -local.detach().float() - entropy.detach().float()


def surprise_check(excess: torch.Tensor, tolerance: float) -> bool:
    """Whether our policy, or one near it, may have *sampled* these tokens: mean `excess` (T,)
    within `tolerance`, nats.

    One-sided: colder sampling than ours is less surprising, and no harm. False for nothing at all,
    and numbers that are not finite.
    """
    return (
        excess.numel() > 0
        and bool(torch.isfinite(excess).all())
        and float(excess.mean()) <= tolerance
    )


def burst_weight(excess: torch.Tensor, slack: float) -> float:
    """What one completion weighs, 0 to 1, by its worst stretch of tokens: the largest sum of
    (`excess` − BURST_DRIFT) over any run of them.

    A lucky right answer is one or two unlikely choices, worth up to `slack` nats; a text that
    something was put into has a stretch that our policy would not have written, however long the
    rest is. Beyond the slack the weight falls by e for every BURST_SCALE nats, and below
    LEAST_WEIGHT it is 0.
    """
    if excess.numel() == 0 or not bool(torch.isfinite(excess).all()):
        return 0.0
    summed = torch.cat([excess.new_zeros(1), (excess.double() - BURST_DRIFT).cumsum(0)])
    worst = float((summed - summed.cummin(0).values).max())
    weight = math.exp(-max(0.0, worst - slack) / BURST_SCALE)
    return weight if weight >= LEAST_WEIGHT else 0.0


def learnt_tokens(local: Sequence[float], least: float = LEAST_PROBABILITY) -> int:
    """Return how many of a peer's tokens are learnt: those before the first that our policy gives
    a probability below `least`.

    Args:
        local: (T,) our log-probabilities at our temperature, nats.
        least: Probability.
    """
    floor = math.log(least)
    return next((i for i, logprob in enumerate(local) if logprob < floor), len(local))


def burst_slack(vocab_size: int) -> float:
    """How surprising a single choice may be: e⁻⁸ of all of them, and any one word of the
    vocabulary."""
    return 8.0 + math.log(vocab_size)
