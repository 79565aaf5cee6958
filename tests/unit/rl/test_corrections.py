"""Weights and checks of external groups, and corrections of own ones."""

import math

import pytest
import torch

from swarmnode.rl.corrections import (
    burst_slack,
    burst_weight,
    effective_share,
    excess_surprise,
    importance_weights,
    spot_check,
    surprise_check,
)


def test_spot_check_takes_ordinary_drift_and_one_surprise():
    local = torch.tensor([-0.2, -0.4, -9.0, -0.1, -0.3])
    sender = torch.tensor([-0.3, -0.2, -0.1, -0.1, -0.9])
    assert spot_check(local, sender, tolerance=1.0)


def test_spot_check_refuses_text_that_the_policy_would_not_write():
    sender = torch.full((6,), -0.1)  # claims to be sure
    local = torch.tensor([-7.0, -8.0, -0.1, -6.0, -9.0, -0.2])
    assert not spot_check(local, sender, tolerance=1.0)


@pytest.mark.parametrize("sender", [[], [-0.1], [-0.1, math.nan], [-0.1, -math.inf]])
def test_spot_check_refuses_what_cannot_be_compared(sender):
    local = torch.tensor([-0.1, -0.1]) if sender else torch.tensor([])
    assert not spot_check(local, torch.tensor(sender), tolerance=1.0)


def sampled(policy, reader, count=40, seed=0):
    """Draw `count` tokens from `policy` (V,). Return their log-probabilities and entropies under
    `reader` (V,)."""
    drawn = torch.multinomial(
        policy.softmax(0), count, replacement=True, generator=torch.Generator().manual_seed(seed)
    )
    logs = reader.log_softmax(0)
    return logs[drawn], torch.full((count,), float(-(logs.exp() * logs).sum()))


def surprise(*pair):
    return surprise_check(excess_surprise(*pair), 1.0)


@pytest.mark.parametrize("seed", range(8))
def test_surprise_check_accepts_own_and_similar_policies(seed):
    generator = torch.Generator().manual_seed(seed)
    policy = torch.randn(50, generator=generator) * 3
    near = policy + torch.randn(50, generator=generator) * 0.5
    assert surprise(*sampled(policy, policy, seed=seed))
    assert surprise(*sampled(near, policy, seed=seed))
    assert surprise(*sampled(policy * 5, policy, seed=seed))  # colder


def test_surprise_check_rejects_unsampled_text():
    policy = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 3
    logs = policy.log_softmax(0)
    made_up = logs[policy.argsort()[:40]]  # tokens that the policy almost never samples
    assert spot_check(made_up, made_up, tolerance=1.0)
    assert not surprise(made_up, torch.full((40,), float(-(logs.exp() * logs).sum())))


def test_surprise_check_takes_a_group_with_one_lucky_completion():
    excess = torch.zeros(32)
    excess[:3] = 7.0  # a success that the policy finds one time in a thousand
    assert surprise_check(excess, 1.0)


@pytest.mark.parametrize("excess", [[], [1.0, math.inf], [math.nan]])
def test_excess_that_is_not_finite_is_refused(excess):
    assert not surprise_check(torch.tensor(excess), 1e9)
    assert burst_weight(torch.tensor(excess), 1e9) == 0.0


SLACK = burst_slack(50)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [5, 500])
def test_samples_of_any_length_have_full_weight(seed, count):
    policy = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 3
    assert burst_weight(excess_surprise(*sampled(policy, policy, count, seed)), SLACK) == 1.0


def test_burst_of_improbable_tokens_has_no_weight():
    lucky = torch.tensor([8.0, 0.1, -0.2])  # one time in three thousand
    made_up = torch.full((12,), 9.0)
    assert burst_weight(lucky, SLACK) == 1.0
    assert burst_weight(made_up, SLACK) == 0.0
    between = [burst_weight(torch.full((n,), 9.0), SLACK) for n in range(1, 7)]
    assert between == sorted(between, reverse=True)
    assert 0 < between[2] < between[1] <= 1


def test_payload_is_found_within_honest_text():
    honest = torch.zeros(2000)
    honest[1000:1008] = 9.0
    assert float(honest.mean()) < 0.04, "no mean shows it"
    assert burst_weight(honest, SLACK) == 0.0


def test_weights_that_are_not_finite_are_0():
    old = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    for wrong in (math.nan, math.inf, -math.inf):
        found = importance_weights(old, torch.tensor([[wrong, -1.0]]), torch.ones(1, 2))
        assert not found.requires_grad
        assert found[0, 0] == 0
        assert torch.isfinite(found).all()


def test_effective_share_of_equal_and_single_weights():
    assert effective_share(5.0, 5.0, 5) == 1.0
    assert effective_share(0.5 * 8, 0.25 * 8, 8) == 1.0
    assert effective_share(1.0, 1.0, 10) == pytest.approx(0.1)
    assert effective_share(0.0, 0.0, 10) is None
    assert effective_share(0.0, 0.0, 0) is None
