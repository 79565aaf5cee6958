"""float16, the compute dtype of T4 and V100: the loss is scaled, and an overflow costs one step.

The tests run on a CPU with the code for GPUs: accelerate's optimizer, torch's scaler, autocast. One
runs on a GPU too.
"""

import math

import pytest
import torch

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.policy import load
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.micro import MicroBatcher
from swarmnode.rollouts.trainer.batch import assemble, own_group
from swarmnode.trainer.update import Updater
from tests.support.updates import weights

HALF = PolicyConfig(devices="cpu", dtype="float16")
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOO_LARGE = 2.0**40
"""A scale at which every gradient overflows."""


@pytest.fixture(autouse=True)
def _after():
    yield
    load_policy(PolicyConfig(devices="cpu"))  # accelerate's precision is global


@pytest.fixture
def policy():
    return load_policy(HALF)


@pytest.fixture
def rows(policy):
    (group,) = generate(policy, ["What is 3 + 4?"], Sampling(4, 8), policy.random_generator(1))
    return assemble([own_group(group, [1.0, 0.0, 0.0, 1.0])], "grpo")


def test_computes_in_float16_with_float32_weights(policy):
    assert {p.dtype for p in policy.trainable_parameters()} == {torch.float32}
    seen = []
    head = policy.base.get_output_embeddings()
    watch = head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    generate(policy, ["What is 3 + 4?"], Sampling(1, 1), policy.random_generator(1))
    watch.remove()
    assert set(seen) == {torch.float16}
    assert not any(policy.obstacles.values())


@pytest.mark.parametrize("devices", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_overflow_skips_the_step_and_lowers_the_scale(devices, rows):
    policy = load_policy(HALF.model_copy(update={"devices": devices}))
    updater, before = Updater(policy, TrainingConfig(), MicroBatcher(4096)), weights(policy)
    scaler = policy.accelerator.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": TOO_LARGE})
    done = updater.update(rows)
    assert (done.stepped, done.skipped, done.grad_norm) == (False, "overflow", None)
    assert scaler.get_scale() == TOO_LARGE / 2
    assert torch.equal(weights(policy), before)
    results = [updater.update(rows).stepped for _ in range(130)]
    assert results == sorted(results)
    assert results[-1]
    assert not torch.equal(weights(policy), before)


def test_the_scale_comes_back_after_steps_without_an_overflow(rows, monkeypatch):
    monkeypatch.setattr(load, "LOSS_SCALE_GROWTH_STEPS", 3)
    policy = load_policy(HALF)
    updater = Updater(policy, TrainingConfig(), MicroBatcher(4096))
    scaler = policy.accelerator.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 1024.0})
    scales = []
    for _ in range(6):
        assert updater.update(rows).stepped
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 1024.0, 2048.0, 2048.0, 2048.0, 4096.0]


def test_the_scaled_update_is_that_of_float32(rows, policy):
    """Adam's first step is the sign of the gradient, so weights are compared where the gradient is
    not close to zero."""
    plain = load_policy(PolicyConfig(devices="cpu"))
    cfg = TrainingConfig(learning_rate=1e-3)
    start = weights(plain)
    expected = Updater(plain, cfg, MicroBatcher(4096)).update(rows)
    half = load_policy(HALF)
    updater = Updater(half, cfg, MicroBatcher(4096))
    # an initial scale that is too large for these gradients is halved, and no weight changes
    results = (updater.update(rows) for _ in range(8))
    found = next(result for result in results if result.stepped)
    assert found.loss == pytest.approx(expected.loss, abs=1e-2)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=0.02)
    moved, wanted = weights(half) - start, weights(plain) - start
    assert torch.cosine_similarity(moved, wanted, dim=0) > 0.95


def test_infinite_loss_is_not_an_overflow(policy, rows):
    rows.advantages.fill_(math.nan)
    done = Updater(policy, TrainingConfig(), MicroBatcher(4096)).update(rows)
    assert (done.stepped, done.skipped) == (False, "not_finite")
