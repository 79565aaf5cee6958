"""What an external group may weigh."""

import math

import pytest
import torch

from swarmnode.rl.corrections import mean_logprob_floor, sequence_correction, spot_check


def correction(local, sender, tokens=4):
    return sequence_correction(torch.tensor([float(local)]), torch.tensor([float(sender)]), torch.tensor([tokens])).item()


def test_the_same_policy_weighs_one():
    assert correction(-3.0, -3.0) == 1.0


def test_the_ratio_is_per_token():
    assert correction(-3.4, -3.0, tokens=4) == pytest.approx(math.exp(-0.1))
    assert correction(-3.4, -3.0, tokens=1) == pytest.approx(0.8)  # exp(-0.4) is below the floor


@pytest.mark.parametrize("sender", [-4.0, -1e6, -math.inf])
def test_a_liar_never_weighs_more_than_an_honest_peer(sender):
    assert correction(-3.0, sender) <= 1.0


@pytest.mark.parametrize("sender", [0.0, math.nan, math.inf, 1e30])
def test_the_worst_a_sender_can_do_to_itself_is_the_floor(sender):
    assert correction(-300.0, sender) == pytest.approx(0.8)


def test_no_gradient_flows_through_the_weight():
    local = torch.tensor([-3.2], requires_grad=True)
    assert not sequence_correction(local, torch.tensor([-3.0]), torch.tensor([4])).requires_grad


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


def test_mean_logprob_floor_is_per_token():
    keep = mean_logprob_floor(torch.tensor([-10.0, -10.0, -math.inf]), torch.tensor([10, 2, 3]), floor=-2.0)
    assert keep.tolist() == [True, False, False]
