"""The loss: means, weights, and sums over micro-batches."""

import math

import pytest
import torch

from swarmnode.rl.objectives import Objective, policy_loss


def a_batch(rows=6, length=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, length, generator=generator) * 3
    mask = (
        torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    ).float()
    return logprobs.requires_grad_(), torch.randn(rows, generator=generator), mask


def loss_of(logprobs, advantages, mask, *, weights=None, **settings):
    """The loss of a whole batch."""
    objective = Objective(**settings)
    normalizer = objective.normalizer(mask.sum(1).tolist())
    return policy_loss(
        logprobs,
        advantages,
        mask,
        objective,
        normalizer,
        weights=weights,
    )


def test_the_gradient_is_the_advantage():
    logprobs, advantages, mask = a_batch()
    loss_of(logprobs, advantages, mask).backward()
    assert torch.allclose(logprobs.grad, -advantages.unsqueeze(1) * mask / mask.sum(), atol=1e-6)


def test_weights_scale_a_sequence():
    logprobs, advantages, mask = a_batch()
    whole = loss_of(logprobs, advantages, mask)
    half = loss_of(logprobs, advantages, mask, weights=torch.full((6, 1), 0.5))
    assert half.item() == pytest.approx(whole.item() / 2)


def test_token_mean_weighs_long_completions_more():
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    logprobs = torch.full((2, 4), -1.0, requires_grad=True)
    loss_of(logprobs, torch.tensor([1.0, 1.0]), mask, loss_type="dapo").backward()
    by_token = logprobs.grad.sum(1)
    logprobs.grad = None
    loss_of(logprobs, torch.tensor([1.0, 1.0]), mask, loss_type="grpo").backward()
    by_sequence = logprobs.grad.sum(1)
    assert by_token[0] == pytest.approx(4 * by_token[1].item())
    assert by_sequence[0] == pytest.approx(by_sequence[1].item())


def test_padding_may_hold_anything():
    logprobs, advantages, mask = a_batch()
    expected = loss_of(logprobs, advantages, mask)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    dirty = logprobs.detach().masked_fill(mask == 0, -math.inf).requires_grad_()
    result = loss_of(dirty, advantages, mask)
    result.backward()
    assert result.item() == pytest.approx(expected.item())
    assert torch.allclose(dirty.grad, expected_gradient)


def test_a_batch_without_tokens_is_zero_not_nan():
    logprobs = torch.zeros(2, 3, requires_grad=True)
    result = loss_of(logprobs, torch.ones(2), torch.zeros(2, 3))
    result.backward()
    assert result.item() == 0
    assert (logprobs.grad == 0).all()
