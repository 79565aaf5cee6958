"""Rewards to advantages."""

import math

import pytest
import torch

from swarmnode.rl.advantages import ESTIMATORS, advantages, overlong_penalty, zero_advantage


def test_grpo_divides_by_the_sample_deviation():
    result = advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), "grpo")
    assert torch.allclose(result, torch.tensor([[0.75, -0.25, -0.25, -0.25]]) / (0.5 + 1e-4))


def test_dr_grpo_only_subtracts_the_mean():
    result = advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), "dr_grpo")
    assert torch.allclose(result, torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


def test_gdpo_tells_apart_what_a_sum_makes_equal():
    # correctness and format; the sum of both is 1 for the first two completions
    rewards = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]])
    summed = advantages(rewards, "grpo")
    apart = advantages(rewards, "gdpo")
    assert summed[0, 0] == summed[0, 1]
    assert apart[0, 0] > apart[0, 1]


def test_gdpo_does_not_depend_on_a_rewards_scale():
    rewards = torch.rand(4, 6, 2, generator=torch.Generator().manual_seed(0))
    scaled = rewards * torch.tensor([1.0, 1000.0])
    assert torch.allclose(advantages(rewards, "gdpo"), advantages(scaled, "gdpo"), atol=2e-3)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_equal_rewards_give_exact_zeros(estimator):
    # 0.1 has no exact float: a mean of eight of them differs from it
    rewards = torch.tensor([[0.1] * 8, [0.1] * 7 + [0.9]])
    result = advantages(rewards, estimator)
    assert (result[0] == 0).all()
    assert result[1].abs().max() > 0.5


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_no_groups_is_no_error(estimator):
    assert advantages(torch.zeros(0, 8), estimator).shape == (0, 8)


def test_zero_advantage_looks_at_every_reward_function():
    rewards = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.5], [1.0, 0.5]]])
    assert zero_advantage(rewards).tolist() == [False, True]
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


@pytest.mark.parametrize("longest", [1, 7, 20, 100, 4096])
def test_overlong_penalty_equals_trls(longest):
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_soft_overlong_punishment(longest, max(1, longest // 5))
    lengths = sorted(
        {1, longest // 2, longest * 4 // 5, longest * 9 // 10, longest - 1, longest, longest + 5}
        - {0}
    )
    assert [-overlong_penalty(n, False, longest) for n in lengths] == pytest.approx(
        theirs([[0] * n for n in lengths])
    )


def test_truncated_completion_has_the_whole_penalty():
    assert overlong_penalty(3, True, 100) == 1.0
    assert overlong_penalty(3, False, 100) == 0.0
