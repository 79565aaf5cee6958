"""One update: micro-batches add up, external weight counts, memory that runs out changes nothing but the micro-batch."""

import copy

import pytest
import torch

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.micro import MicroBatcher
from swarmnode.trainer import update as module
from swarmnode.trainer.batch import TrainingGroup, assemble, own_group
from swarmnode.trainer.update import Updater, learning_rate

PROMPTS = ["What is 3 + 4?", "Find the greatest common divisor (GCD) of these numbers: 4, 6. Return only the GCD as your answer."]


@pytest.fixture(scope="module")
def base():
    torch.set_num_threads(1)
    return load_policy(PolicyConfig())


@pytest.fixture(scope="module")
def rows(base):
    first, second = generate(base, PROMPTS, Sampling(4, 8), base.random_generator(1))
    own = own_group(first, [1.0, 0.0, 0.0, 1.0])
    theirs = own_group(second, [0.0, 1.0, 0.0, 0.0])
    return assemble([own, TrainingGroup(theirs.rows, theirs.old_logprobs, theirs.rewards, [0.9] * 4, peer="p")], "grpo")


def after(base, rows, tokens=10_000, **keys):
    policy = base.clone()
    cfg = TrainingConfig(**keys)
    updater = Updater(policy, cfg, MicroBatcher(tokens), policy.reference() if cfg.beta else None)
    statistics = updater.update(rows, 0)
    return torch.cat([p.detach().flatten() for p in policy.trainable_parameters()]), statistics


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_micro_batches_add_up_to_the_whole_batch(base, rows, loss_type):
    whole, one = after(base, rows, loss_type=loss_type)
    pieces, many = after(base, rows, tokens=64, loss_type=loss_type)
    assert torch.allclose(whole, pieces, atol=1e-4)  # a first Adam step is 3e-4 for every weight, however small its gradient
    assert one.loss == pytest.approx(many.loss, abs=1e-6)
    assert one.entropy == pytest.approx(many.entropy, abs=1e-4)


def test_an_update_moves_the_policy_towards_what_was_rewarded(base, rows):
    from swarmnode.policy.logprobs import score

    policy = base.clone()
    before = torch.tensor([sum(row) for row in score(policy, rows.rows, 1.0)])
    updater = Updater(policy, TrainingConfig(learning_rate=1e-3), MicroBatcher(10_000))
    for step in range(3):
        updater.update(rows, step)
    gain = torch.tensor([sum(row) for row in score(policy, rows.rows, 1.0)]) - before
    assert float((gain * rows.advantages)[:4].sum()) > 0.01
    assert float((gain * rows.advantages)[4:].sum()) > 0.01


def test_a_batch_without_a_signal_moves_nothing(base, rows):
    start = torch.cat([p.detach().flatten() for p in base.trainable_parameters()])
    silent = copy.copy(rows)
    object.__setattr__(silent, "advantages", torch.zeros_like(rows.advantages))
    end, statistics = after(base, silent)
    assert not statistics.stepped
    assert torch.equal(start, end)


def test_running_out_of_memory_halves_the_micro_batch_and_gives_the_same_update(base, rows, monkeypatch):
    whole, _ = after(base, rows)
    real = module.completion_logprobs

    def limited(policy, batch, temperature):
        if batch.padded_tokens > 128:
            raise torch.OutOfMemoryError("simulated")
        return real(policy, batch, temperature)

    monkeypatch.setattr(module, "completion_logprobs", limited)
    policy = base.clone()
    batcher = MicroBatcher(10_000)
    Updater(policy, TrainingConfig(), batcher).update(rows, 0)
    small = torch.cat([p.detach().flatten() for p in policy.trainable_parameters()])
    assert batcher.statistics().oom_retries > 0
    assert torch.allclose(whole, small, atol=1e-4)


def test_a_kl_penalty_holds_the_policy_back(base, rows):
    policy = base.clone()
    updater = Updater(policy, TrainingConfig(beta=0.1, learning_rate=1e-3), MicroBatcher(10_000), policy.reference())
    kl = [updater.update(rows, step).kl for step in range(3)]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[2] > kl[0]
    with pytest.raises(ValueError, match="reference"):
        Updater(policy, TrainingConfig(beta=0.1), MicroBatcher(10_000))


def test_a_gradient_that_is_not_finite_is_not_applied(base, rows, monkeypatch):
    start = torch.cat([p.detach().flatten() for p in base.trainable_parameters()])
    monkeypatch.setattr(module, "policy_loss", lambda *a, **k: _poisoned(*a, **k))
    end, statistics = after(base, rows)
    assert not statistics.stepped
    assert torch.equal(start, end)


def _poisoned(*arguments, **keys):
    from swarmnode.rl.objectives import policy_loss

    out = policy_loss(*arguments, **keys)
    return out._replace(loss=out.loss * float("nan"))


def test_learning_rate_warms_up():
    cfg = TrainingConfig(learning_rate=1.0, warmup_steps=3)
    assert [learning_rate(cfg, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
