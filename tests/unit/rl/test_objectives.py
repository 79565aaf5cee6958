"""The loss of a batch with padding, or without tokens."""

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


def loss_of(logprobs, advantages, mask):
    """The loss of a whole batch."""
    objective = Objective()
    normalizer = objective.normalizer(mask.sum(1).tolist())
    return policy_loss(logprobs, advantages, mask, objective, normalizer)


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
