"""The loss: means, weights, the penalty, and sums over micro-batches."""

import math

import pytest
import torch

from swarmnode.rl.objectives import Objective, policy_loss


def a_batch(rows=6, length=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, length, generator=generator) * 3
    reference = logprobs + torch.randn(rows, length, generator=generator) * 0.3
    mask = (
        torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    ).float()
    return logprobs.requires_grad_(), torch.randn(rows, generator=generator), mask, reference


def loss_of(logprobs, advantages, mask, *, weights=None, ref_logprobs=None, **settings):
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
        ref_logprobs=ref_logprobs,
    )


def test_the_gradient_is_the_advantage():
    logprobs, advantages, mask, _ = a_batch()
    loss_of(logprobs, advantages, mask).loss.backward()
    assert torch.allclose(logprobs.grad, -advantages.unsqueeze(1) * mask / mask.sum(), atol=1e-6)


def test_kl_pulls_back_to_the_reference_and_is_never_negative():
    logprobs, advantages, mask, reference = a_batch()
    result = loss_of(logprobs, torch.zeros_like(advantages), mask, beta=0.5, ref_logprobs=reference)
    result.loss.backward()
    assert result.kl > 0
    # a token likelier than under the reference is pushed down: positive gradient of the loss
    assert torch.allclose(logprobs.grad, 0.5 * (logprobs - reference) * mask / mask.sum())


def test_weights_scale_a_sequence_but_not_its_kl():
    logprobs, advantages, mask, reference = a_batch()
    whole = loss_of(logprobs, advantages, mask).loss
    half = loss_of(logprobs, advantages, mask, weights=torch.full((6, 1), 0.5)).loss
    assert half.item() == pytest.approx(whole.item() / 2)
    penalty = dict(beta=1.0, ref_logprobs=reference)
    unweighted = loss_of(logprobs, advantages, mask, weights=torch.zeros(6, 1), **penalty)
    silent = loss_of(logprobs, torch.zeros(6), mask, **penalty)
    assert unweighted.loss.item() == pytest.approx(silent.loss.item())
    assert silent.loss.item() != 0


def test_token_mean_weighs_long_completions_more():
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    logprobs = torch.full((2, 4), -1.0, requires_grad=True)
    loss_of(logprobs, torch.tensor([1.0, 1.0]), mask, loss_type="dapo").loss.backward()
    by_token = logprobs.grad.sum(1)
    logprobs.grad = None
    loss_of(logprobs, torch.tensor([1.0, 1.0]), mask, loss_type="grpo").loss.backward()
    by_sequence = logprobs.grad.sum(1)
    assert by_token[0] == pytest.approx(4 * by_token[1].item())
    assert by_sequence[0] == pytest.approx(by_sequence[1].item())


def test_padding_may_hold_anything():
    logprobs, advantages, mask, reference = a_batch()
    expected = loss_of(logprobs, advantages, mask, beta=0.1, ref_logprobs=reference)
    (expected_gradient,) = torch.autograd.grad(expected.loss, logprobs)
    dirty = logprobs.detach().masked_fill(mask == 0, -math.inf).requires_grad_()
    result = loss_of(
        dirty, advantages, mask, beta=0.1, ref_logprobs=reference.masked_fill(mask == 0, math.nan)
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(expected.loss.item())
    assert torch.allclose(dirty.grad, expected_gradient)


def test_a_batch_without_tokens_is_zero_not_nan():
    logprobs = torch.zeros(2, 3, requires_grad=True)
    result = loss_of(logprobs, torch.ones(2), torch.zeros(2, 3))
    result.loss.backward()
    assert result.loss.item() == 0
    assert (logprobs.grad == 0).all()


def test_a_penalty_without_a_reference_is_refused():
    logprobs, advantages, mask, _ = a_batch()
    with pytest.raises(ValueError, match="ref_logprobs"):
        loss_of(logprobs, advantages, mask, beta=0.1)
