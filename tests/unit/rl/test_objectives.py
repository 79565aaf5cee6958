"""The loss: clips, means, and sums over micro-batches."""

import math
from typing import get_args

import pytest
import torch

from swarmnode.rl.objectives import LossType, Objective, policy_loss


def a_batch(rows=6, length=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(rows, length, generator=generator) * 3
    old = logprobs + torch.randn(rows, length, generator=generator) * 0.4
    reference = logprobs + torch.randn(rows, length, generator=generator) * 0.3
    mask = (
        torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    ).float()
    return logprobs.requires_grad_(), old, torch.randn(rows, generator=generator), mask, reference


def loss_of(logprobs, old, advantages, mask, *, weights=None, ref_logprobs=None, **settings):
    """The loss of a whole batch."""
    objective = Objective(**settings)
    normalizer = objective.normalizer(mask.sum(1).tolist())
    return policy_loss(
        logprobs,
        old,
        advantages,
        mask,
        objective,
        normalizer,
        weights=weights,
        ref_logprobs=ref_logprobs,
    )


def gradient_at_ratio(ratio, advantage, **settings):
    """d loss / d logprob of one token whose importance ratio is `ratio`."""
    logprob = torch.tensor([[math.log(0.5)]], requires_grad=True)
    old = logprob.detach() - math.log(ratio)
    loss_of(logprob, old, torch.tensor([advantage]), torch.ones(1, 1), **settings).loss.backward()
    return logprob.grad.item()


def test_inside_the_clip_the_gradient_is_ratio_times_advantage():
    assert gradient_at_ratio(1.1, 2.0) == pytest.approx(-2.2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.3, 1.0, True),
        (1.25, 1.0, False),
        (0.7, -1.0, True),
        (0.7, 1.0, False),
        (1.5, -1.0, False),
    ],
)
def test_the_clip_is_asymmetric_and_one_sided(ratio, advantage, clipped):
    gradient = gradient_at_ratio(ratio, advantage, epsilon=0.2, epsilon_high=0.28)
    assert (gradient == 0) == clipped


def test_delta_bounds_what_a_negative_advantage_can_do():
    assert gradient_at_ratio(50.0, -1.0, delta=None) == pytest.approx(50.0, rel=1e-4)
    assert gradient_at_ratio(50.0, -1.0, delta=4.0) == 0
    assert gradient_at_ratio(3.0, -1.0, delta=4.0) == pytest.approx(3.0, rel=1e-4)


def test_gradient_at_ratio_1_is_the_advantage():
    logprobs, _, advantages, mask, _ = a_batch()
    loss_of(logprobs, logprobs.detach(), advantages, mask).loss.backward()
    assert torch.allclose(logprobs.grad, -advantages.unsqueeze(1) * mask / mask.sum(), atol=1e-6)


def test_clip_fraction_counts_tokens_without_gradient():
    logprobs, old, advantages, mask, _ = a_batch(rows=40)
    result = loss_of(logprobs, old, advantages, mask, delta=1.4, epsilon_high=0.28)
    result.loss.backward()
    dead = ((logprobs.grad == 0) & mask.bool()).sum() / mask.sum()
    assert 0.05 < dead < 0.9
    assert result.clip_fraction == pytest.approx(dead.item())


def test_kl_pulls_back_to_the_reference_and_is_never_negative():
    logprobs, old, advantages, mask, reference = a_batch()
    result = loss_of(
        logprobs, old, torch.zeros_like(advantages), mask, beta=0.5, ref_logprobs=reference
    )
    result.loss.backward()
    assert result.kl > 0
    assert result.loss.item() == pytest.approx(0.5 * result.kl.item(), rel=1e-5)
    inside = mask.bool()
    # a token likelier than under the reference is pushed down: positive gradient of the loss
    assert (torch.sign(logprobs.grad[inside]) == torch.sign((logprobs - reference)[inside])).all()


def test_weights_scale_a_sequence_but_not_its_kl():
    logprobs, old, advantages, mask, reference = a_batch()
    whole = loss_of(logprobs, old, advantages, mask).loss
    half = loss_of(logprobs, old, advantages, mask, weights=torch.full((6,), 0.5)).loss
    assert half.item() == pytest.approx(whole.item() / 2)
    kl_only = loss_of(
        logprobs, old, advantages, mask, weights=torch.zeros(6), beta=1.0, ref_logprobs=reference
    )
    assert kl_only.loss.item() == pytest.approx(kl_only.kl.item(), rel=1e-5)


@pytest.mark.parametrize("loss_type", get_args(LossType))
@pytest.mark.parametrize("cuts", [[6], [2, 4], [1, 3, 2]])
def test_micro_batches_add_up_to_the_whole_batch(loss_type, cuts):
    logprobs, old, advantages, mask, reference = a_batch()
    weights = torch.linspace(0.8, 1.0, 6)
    settings = dict(loss_type=loss_type, delta=4.0, beta=0.1, max_completion_length=7)
    whole = loss_of(
        logprobs, old, advantages, mask, ref_logprobs=reference, weights=weights, **settings
    )
    (expected,) = torch.autograd.grad(whole.loss, logprobs)

    objective = Objective(**settings)
    normalizer = objective.normalizer(mask.sum(1).tolist())
    start = total = 0
    for size in cuts:
        rows = slice(start, start + size)
        part = policy_loss(
            logprobs[rows],
            old[rows],
            advantages[rows],
            mask[rows],
            objective,
            normalizer,
            ref_logprobs=reference[rows],
            weights=weights[rows],
        )
        part.loss.backward()
        total += part.loss.item()
        start += size
    assert total == pytest.approx(whole.loss.item(), abs=1e-6)
    assert torch.allclose(logprobs.grad, expected, atol=1e-7)


def test_token_mean_weighs_long_completions_more():
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    logprobs = torch.full((2, 4), -1.0, requires_grad=True)
    loss_of(
        logprobs, logprobs.detach(), torch.tensor([1.0, 1.0]), mask, loss_type="dapo"
    ).loss.backward()
    by_token = logprobs.grad.sum(1)
    logprobs.grad = None
    loss_of(
        logprobs, logprobs.detach(), torch.tensor([1.0, 1.0]), mask, loss_type="grpo"
    ).loss.backward()
    by_sequence = logprobs.grad.sum(1)
    assert by_token[0] == pytest.approx(4 * by_token[1].item())
    assert by_sequence[0] == pytest.approx(by_sequence[1].item())


def test_padding_may_hold_anything():
    logprobs, old, advantages, mask, reference = a_batch()
    expected = loss_of(logprobs, old, advantages, mask, beta=0.1, ref_logprobs=reference)
    (expected_gradient,) = torch.autograd.grad(expected.loss, logprobs)
    dirty = logprobs.detach().masked_fill(mask == 0, -math.inf).requires_grad_()
    result = loss_of(
        dirty,
        old.masked_fill(mask == 0, math.nan),
        advantages,
        mask,
        beta=0.1,
        ref_logprobs=reference.masked_fill(mask == 0, math.nan),
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(expected.loss.item())
    assert torch.allclose(dirty.grad, expected_gradient)


def test_a_batch_without_tokens_is_zero_not_nan():
    logprobs = torch.zeros(2, 3, requires_grad=True)
    result = loss_of(logprobs, logprobs.detach(), torch.ones(2), torch.zeros(2, 3))
    result.loss.backward()
    assert result.loss.item() == 0
    assert (logprobs.grad == 0).all()


def test_a_penalty_without_a_reference_is_refused():
    logprobs, old, advantages, mask, _ = a_batch()
    with pytest.raises(ValueError, match="ref_logprobs"):
        loss_of(logprobs, old, advantages, mask, beta=0.1)
