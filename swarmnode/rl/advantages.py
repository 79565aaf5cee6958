"""Advantages from rewards.

Each estimator is a pure function of the rewards of whole groups. A group with equal rewards has no
signal: its advantages are zero, and `zero_advantage` finds it before any forward pass.

    rewards     (groups, G)  or (groups, G, R) for several reward functions    float
                NaN with R: the reward function does not apply to the completion
    advantages  (groups, G)                                                    float32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

STD_EPS = 1e-4
"""Added to every standard deviation. TRL's value, so that results are equal."""


def _total(rewards: torch.Tensor, weights: Sequence[float] | None) -> torch.Tensor:
    """Return the weighted sum over reward functions: (groups, G[, R]) → (groups, G)."""
    if rewards.ndim == 2:
        return rewards
    scale = (
        torch.ones(rewards.shape[-1])
        if weights is None
        else torch.tensor(weights, dtype=torch.float32)
    )
    return (rewards * scale.to(rewards)).nansum(-1)


def grpo(rewards: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """Return (r − mean) / (std + 1e-4) per group; std with Bessel's correction.

    Source: DeepSeekMath (arXiv 2402.03300) §4.1.2, outcome supervision. Equals TRL's
    `scale_rewards="group"`.
    """
    total = _total(rewards, weights)
    centred = total - total.mean(1, keepdim=True)
    return centred / (total.std(1, keepdim=True) + STD_EPS)


def dr_grpo(rewards: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """Return r − mean per group.

    Without the division, very easy and very hard questions do not weigh more than others. Source:
    "Understanding R1-Zero-Like Training" (arXiv 2503.20783) §3.2. Equals TRL's
    `scale_rewards="none"`.
    """
    total = _total(rewards, weights)
    return total - total.mean(1, keepdim=True)


def gdpo(rewards: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """Normalise each reward per group, sum with weights, and normalise the sum over the batch.

    If rewards were summed first, the scale of one would hide the others. Source: "GDPO: Group
    reward-Decoupled Normalization Policy Optimization" (arXiv 2601.05242) §3. Equals TRL's
    `multi_objective_aggregation="normalize_then_sum"`.
    """
    each = rewards.unsqueeze(-1) if rewards.ndim == 2 else rewards
    mean = each.nanmean(1, keepdim=True)
    count = (~each.isnan()).sum(1, keepdim=True)
    squares = (each - mean).square().nansum(1, keepdim=True)
    deviation = (squares / (count - 1).clamp(min=1)).sqrt()
    normal = (each - mean) / (deviation + STD_EPS)
    total = _total(normal, weights)
    return (total - total.mean()) / (total.std() + STD_EPS)


ESTIMATORS: Mapping[str, Callable[[torch.Tensor, Sequence[float] | None], torch.Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gdpo": gdpo,
}


def advantages(
    rewards: torch.Tensor, estimator: str = "grpo", weights: Sequence[float] | None = None
) -> torch.Tensor:
    """Return the advantages (groups, G).

    Args:
        rewards: (groups, G) or (groups, G, R).
        estimator: A key of ESTIMATORS.
        weights: R weights of the reward functions; 1 each by default.

    Raises:
        ValueError: The estimator is unknown, the shape is wrong, or a reward is not finite. NaN
            would spread to the whole group and then to the weights.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"unknown advantage estimator {estimator!r}; one of {', '.join(ESTIMATORS)}"
        )
    if rewards.ndim not in (2, 3) or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards must be (groups, G) or (groups, G, R) with G >= 2, not {tuple(rewards.shape)}"
        )
    rewards = rewards.float()
    if rewards.isinf().any() or (rewards.ndim == 2 and rewards.isnan().any()):
        raise ValueError("rewards must be finite")
    if rewards.shape[0] == 0:
        return rewards.new_zeros(rewards.shape[:2])
    values = ESTIMATORS[estimator](rewards, weights)
    return values.masked_fill(zero_advantage(rewards).unsqueeze(1), 0.0)


OVERLONG_SHARE = 5
"""The penalty applies to the last 1 / OVERLONG_SHARE of the largest length: 4,096 of 20,480 tokens
in the paper."""


def overlong_penalty(length: int, was_cut: bool, max_length: int) -> float:
    """Return the penalty of a completion of `length` tokens: 0 up to four fifths of `max_length`,
    then rising linearly to 1.

    A truncated completion has penalty 1 at any length, because a peer's limit may be smaller.
    Source: DAPO (arXiv 2503.14476) eq. 13. Equals TRL's `get_soft_overlong_punishment` for
    completions that were not truncated.
    """
    cache = max(1, max_length // OVERLONG_SHARE)
    return 1.0 if was_cut else min(1.0, max(0.0, (length - (max_length - cache)) / cache))


def zero_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """Return the groups without signal, (groups,) bool: all completions have equal rewards from
    every reward function.

    Rewards are compared exactly. The advantage cannot decide: the mean of equal floats may differ
    from them by 1e-8, and divided by a deviation of 1e-8 this looks like a signal.
    """
    rewards = rewards.nan_to_num(0.0)  # a function that does not apply adds nothing
    same = rewards == rewards[:, :1]
    return same.flatten(1).all(1)
