"""Advantages from rewards.

Each estimator is a pure function of the rewards of whole groups. A group with equal rewards has no
signal: its advantages are zero, and `zero_advantage` finds it before any forward pass.

    rewards     (groups, G)   float
    advantages  (groups, G)   float32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

STD_EPS = 1e-4
"""Added to every standard deviation. TRL's value, so that results are equal."""


def grpo(rewards: torch.Tensor) -> torch.Tensor:
    """Return (r − mean) / (std + 1e-4) per group; std with Bessel's correction.

    Source: DeepSeekMath (arXiv 2402.03300) §4.1.2, outcome supervision. Equals TRL's
    `scale_rewards="group"`.
    """
    return dr_grpo(rewards) / (rewards.std(1, keepdim=True) + STD_EPS)


def dr_grpo(rewards: torch.Tensor) -> torch.Tensor:
    """Return r − mean per group.

    Without the division, very easy and very hard questions do not weigh more than others. Source:
    "Understanding R1-Zero-Like Training" (arXiv 2503.20783) §3.2. Equals TRL's
    `scale_rewards="none"`.
    """
    return rewards - rewards.mean(1, keepdim=True)


ESTIMATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
}


def advantages(rewards: torch.Tensor, estimator: str = "grpo") -> torch.Tensor:
    """Return the advantages (groups, G).

    Args:
        rewards: (groups, G).
        estimator: A key of ESTIMATORS.

    Raises:
        ValueError: The estimator is unknown, the shape is wrong, or a reward is not finite. NaN
            would spread to the whole group and then to the weights.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"unknown advantage estimator {estimator!r}; one of {', '.join(ESTIMATORS)}"
        )
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be (groups, G) with G >= 2, not {tuple(rewards.shape)}")
    rewards = rewards.float()
    if not rewards.isfinite().all():
        raise ValueError("rewards must be finite")
    return ESTIMATORS[estimator](rewards).masked_fill(zero_advantage(rewards).unsqueeze(1), 0.0)


def zero_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """Return the groups without signal, (groups,) bool: all completions have equal rewards.

    Rewards are compared exactly. The advantage cannot decide: the mean of equal floats may differ
    from them by 1e-8, and divided by a deviation of 1e-8 this looks like a signal.
    """
    return (rewards == rewards[:, :1]).all(1)
