"""Rewards to advantages."""

import math

import pytest
import torch

from swarmnode.rl.advantages import ESTIMATORS, advantages, zero_advantage


def test_grpo_divides_by_the_sample_deviation():
    result = advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), "grpo")
    assert torch.allclose(result, torch.tensor([[0.75, -0.25, -0.25, -0.25]]) / (0.5 + 1e-4))


def test_dr_grpo_only_subtracts_the_mean():
    result = advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), "dr_grpo")
    assert torch.allclose(result, torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_equal_rewards_give_exact_zeros(estimator):
    # 0.1 has no exact float: a mean of eight of them differs from it
    rewards = torch.tensor([[0.1] * 8, [0.1] * 7 + [0.9]])
    result = advantages(rewards, estimator)
    assert (result[0] == 0).all()
    assert result[1].abs().max() > 0.5


def test_zero_advantage_finds_equal_rewards():
    assert zero_advantage(torch.tensor([[0.0, 0.0], [0.0, 1.0]])).tolist() == [True, False]


@pytest.mark.parametrize(
    "rewards",
    [
        torch.zeros(8),
        torch.zeros(2, 1),
        torch.tensor([[0.0, math.nan]]),
        torch.tensor([[math.inf, 0.0]]),
    ],
)
def test_refuses_other_shapes_and_what_is_not_finite(rewards):
    with pytest.raises(ValueError):
        advantages(rewards, "grpo")


def test_refuses_an_unknown_estimator_and_names_the_known():
    with pytest.raises(ValueError, match="dr_grpo"):
        advantages(torch.zeros(1, 2), "ppo")
