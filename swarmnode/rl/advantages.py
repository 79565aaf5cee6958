"""Rewards to advantages: which completion of a group was better than the others, and by how much.

Every estimator is a pure function of the rewards of whole groups. A group whose completions all
earned the same says nothing; every estimator gives it zeros, and `zero_advantage` names it before
any forward pass is spent on it.

    rewards     (groups, G)  or (groups, G, R) for several reward functions    float
                NaN in the latter: this function does not apply to this completion
    advantages  (groups, G)                                                    float32
    train_mask  (groups, G)                                                    bool, False = not
    trained on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

STD_EPS = 1e-4
"""Added to every standard deviation. TRL's value, so that both give the same number."""


def _total(rewards: torch.Tensor, weights: Sequence[float] | None) -> torch.Tensor:
    """(groups, G[, R]) → (groups, G): the weighted sum over reward functions."""
    if rewards.ndim == 2:
        return rewards
    scale = (
        torch.ones(rewards.shape[-1])
        if weights is None
        else torch.tensor(weights, dtype=torch.float32)
    )
    return (rewards * scale.to(rewards)).nansum(-1)


def grpo(rewards: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """A = (r − mean) / (std + 1e-4) in each group, std with Bessel's correction.

    Source: DeepSeekMath (arXiv 2402.03300) §4.1.2, outcome supervision. Equals TRL's
    `scale_rewards="group"`.
    """
    total = _total(rewards, weights)
    centred = total - total.mean(1, keepdim=True)
    return centred / (total.std(1, keepdim=True) + STD_EPS)


def dr_grpo(rewards: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """A = r − mean in each group.

    Not dividing by the deviation keeps very easy and very hard questions from weighing more than
    the rest. Source: "Understanding R1-Zero-Like Training" (arXiv 2503.20783) §3.2. Equals TRL's
    `scale_rewards="none"`.
    """
    total = _total(rewards, weights)
    return total - total.mean(1, keepdim=True)


def mc_grpo(rewards: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """A = (r − median) / (deviation + 1e-4) in each group of G + 1; `train_mask` leaves the median
    completion (the pivot) out.

    A mean over few completions is dragged by one outlier and flips the sign of those near it; the
    median is not. Source: "MC-GRPO: Median-Centered Group Relative Policy Optimization for
    Small-Rollout RL" (arXiv 2601.22582). One departure: the deviation is the root mean square about
    the median, where the paper takes the median absolute deviation. A verifier's rewards are 0 or
    1, and then the latter is 0 in every group with a majority, which is nearly
    every group: the advantage would be 1/eps. The root mean square keeps |A| ≤ sqrt(G + 1).
    """
    total = _total(rewards, weights)
    centred = total - total.median(1, keepdim=True).values
    return centred / (centred.square().mean(1, keepdim=True).sqrt() + STD_EPS)


def gdpo(rewards: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """Each reward is normalised in its group before the weighted sum; the sum is then normalised
    over the batch.

    Summing first lets one reward's scale hide the others, and gives different combinations the same
    advantage. Source: "GDPO: Group reward-Decoupled Normalization Policy Optimization" (arXiv
    2601.05242) §3. Equals TRL's `multi_objective_aggregation="normalize_then_sum"`.
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
    "mc_grpo": mc_grpo,
    "gdpo": gdpo,
}


def advantages(
    rewards: torch.Tensor, estimator: str = "grpo", weights: Sequence[float] | None = None
) -> torch.Tensor:
    """Advantages (groups, G) of rewards (groups, G) or (groups, G, R); `weights` has R numbers, 1
    each by default.

    Raises ValueError for an unknown estimator, another shape, or a reward that is not finite: NaN
    would spread to the whole group and from there to the weights.
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
"""One part in so many of the longest completion is where length begins to cost: 4,096 of 20,480
tokens in the paper."""


def overlong_penalty(length: int, was_cut: bool, max_length: int) -> float:
    """What a completion of `length` tokens loses of its reward: 0 up to four fifths of
    `max_length`, then evenly more, 1 at all of it.

    A completion that was cut loses 1 at any length: a peer's bound may be below ours. Source: DAPO
    (arXiv 2503.14476) eq. 13. Equals TRL's `get_soft_overlong_punishment` where nothing was cut.
    """
    cache = max(1, max_length // OVERLONG_SHARE)
    return 1.0 if was_cut else min(1.0, max(0.0, (length - (max_length - cache)) / cache))


def train_mask(
    rewards: torch.Tensor, estimator: str = "grpo", weights: Sequence[float] | None = None
) -> torch.Tensor:
    """Which completions are trained on, (groups, G) bool: all, but for `mc_grpo` one pivot per
    group.

    The pivot is the first completion whose reward is the group's median, so that every node leaves
    out the same one.
    """
    keep = torch.ones(rewards.shape[:2], dtype=torch.bool, device=rewards.device)
    if estimator == "mc_grpo" and rewards.shape[0]:
        total = _total(rewards.float(), weights)
        is_median = total == total.median(1, keepdim=True).values
        keep.scatter_(1, is_median.int().argmax(1, keepdim=True), False)
    return keep


def zero_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups say nothing, (groups,) bool: every reward function gave all completions the
    same.

    Compared exactly, not through the advantage: a mean of equal floats need not be that float, and
    noise of 1e-8 divided by a deviation of 1e-8 would look like a signal.
    """
    rewards = rewards.nan_to_num(0.0)  # what does not apply adds nothing
    same = rewards == rewards[:, :1]
    return same.flatten(1).all(1)
