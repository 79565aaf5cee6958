"""One update: micro-batches add up, external weights count, and a shortage of memory changes only
the micro-batch."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.ways import Row
from swarmnode.rollouts.trainer.batch import TrainingGroup, assemble, own_group
from swarmnode.trainer.update import Updater, normalizer, trained
from tests.support.updates import small_device

PROMPTS = [
    "What is 3 + 4?",
    (
        "Find the greatest common divisor (GCD) of these numbers: 4, 6. Return only the GCD as your"
        " answer."
    ),
]


@pytest.fixture(scope="module")
def base():
    torch.set_num_threads(1)
    return load_policy(PolicyConfig())


@pytest.fixture(scope="module")
def rows(base):
    first, second = generate(base, PROMPTS, Sampling(4, 8), base.random_generator(1))
    own = own_group(first, [1.0, 0.0, 0.0, 1.0])
    theirs = own_group(second, [0.0, 1.0, 0.0, 0.0])
    return assemble([own, replace(theirs, weights=[0.9] * 4, peer="p")], "grpo")


def flat(policy):
    return torch.cat([p.detach().flatten() for p in policy.trainable_parameters()])


def after(base, rows, tokens=10_000, **keys):
    policy = base.clone()
    cfg = TrainingConfig(**keys)
    updater = Updater(policy, cfg, MicroBatcher(tokens))
    statistics = updater.update(rows)
    return flat(policy), statistics


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_micro_batches_add_up_to_the_whole_batch(base, rows, loss_type):
    whole, one = after(base, rows, loss_type=loss_type)
    pieces, many = after(base, rows, tokens=64, loss_type=loss_type)
    # Adam's first step is 3e-4 for every weight and any size of its gradient
    assert torch.allclose(whole, pieces, atol=1e-4)
    assert one.loss == pytest.approx(many.loss, abs=1e-6)
    assert one.entropy == pytest.approx(many.entropy, abs=1e-4)


def test_an_update_moves_the_policy_towards_what_was_rewarded(base, rows):
    from swarmnode.policy.logprobs import score

    policy = base.clone()
    before = torch.tensor([sum(row) for row in score(policy, rows.rows, 1.0)])
    updater = Updater(policy, TrainingConfig(learning_rate=1e-3), MicroBatcher(10_000))
    for _ in range(3):
        updater.update(rows)
    gain = torch.tensor([sum(row) for row in score(policy, rows.rows, 1.0)]) - before
    assert float((gain * rows.advantages)[:4].sum()) > 0.01
    assert float((gain * rows.advantages)[4:].sum()) > 0.01


def test_a_batch_without_a_signal_moves_nothing(base, rows):
    start = flat(base)
    silent = copy.copy(rows)
    object.__setattr__(silent, "advantages", torch.zeros_like(rows.advantages))
    end, done = after(base, silent)
    assert (done.stepped, done.skipped) == (False, "no_signal")
    assert torch.equal(start, end)


@pytest.mark.parametrize("peers", [("", "p"), ("p", "")])
def test_out_of_memory_halves_the_micro_batch(base, rows, monkeypatch, peers):
    """The second group, an own or a peer's, does not fit in one piece."""
    groups = [
        TrainingGroup(
            rows.rows[at : at + 4],
            rows.sampler_logprobs[at : at + 4],
            [1.0, 0.0, 0.0, 1.0],
            [1.0] * 4,
            peer,
        )
        for at, peer in zip((0, 4), peers, strict=True)
    ]
    batch = assemble(sorted(groups, key=lambda group: group.peer), "grpo")
    whole, _ = after(base, batch)
    small_device(monkeypatch, 110, 110)
    policy = base.clone()
    own, external = MicroBatcher(10_000), MicroBatcher(10_000)
    Updater(policy, TrainingConfig(), own, external=external).update(batch)
    small = flat(policy)
    assert (own.statistics().oom_retries > 0) == (peers[1] == "")
    assert (external.statistics().oom_retries > 0) == (peers[1] == "p")
    # where a gradient is almost 0, the direction of Adam's first step of 3e-4 is random
    assert float((whole - small).abs().mean()) < 1e-6


def test_too_large_peer_group_costs_only_itself(base, rows, monkeypatch):
    """Admission accepts rows of up to four times the own length."""
    third = TrainingGroup(
        [
            Row(prompt, completion[:-1] * 90 + completion[-1:])
            for prompt, completion, *_ in rows.rows[4:]
        ],
        [old[:-1] * 90 + old[-1:] for old in rows.sampler_logprobs[4:]],
        [0.0, 1.0, 0.0, 1.0],
        [1.0] * 4,
        peer="q",
    )
    ours, theirs = (
        TrainingGroup(
            rows.rows[at : at + 4], rows.sampler_logprobs[at : at + 4], rewards, [1.0] * 4, peer
        )
        for at, rewards, peer in ((0, [1.0, 0.0, 0.0, 1.0], ""), (4, [0.0, 1.0, 0.0, 0.0], "p"))
    )
    expected, _ = after(base, assemble([ours, theirs], "grpo"))
    most = 4 * max(len(p) + len(c) for p, c, *_ in rows.rows)
    small_device(monkeypatch, most, most)
    policy = base.clone()
    batcher = MicroBatcher(10_000)
    updater = Updater(policy, TrainingConfig(), batcher)
    done = updater.update(assemble([ours, third, theirs], "grpo"))
    assert done.stepped
    assert done.refused == {1: "too_large"}
    got = flat(policy)
    assert float((got - expected).abs().mean()) < 1e-6
    assert batcher.tokens == 10_000


def test_masked_completions_are_neither_trained_on_nor_counted(base, rows):
    """The cut row still counts in the divisor, so a batch without it has another gradient."""
    cut = replace(
        rows,
        masked=frozenset({0, 5}),
        weights=rows.weights * torch.tensor([0.0, 1, 1, 1, 1, 0.0, 1, 1]),
    )
    own, external = trained(cut)
    assert {0, 5}.isdisjoint(own + external)
    assert own
    assert external
    tokens = [len(completion) for _, completion, *_ in rows.rows]
    assert normalizer(cut, TrainingConfig()) == sum(tokens) - tokens[0] - tokens[5]
    assert normalizer(cut, TrainingConfig(loss_type="grpo")) == 8


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_a_reason(base, rows, number):
    policy = base.clone()
    parameter = policy.trainable_parameters()[0]
    parameter.register_hook(lambda gradient: torch.full_like(gradient, number))
    before = flat(policy)
    done = Updater(policy, TrainingConfig(), MicroBatcher(10_000)).update(rows)
    assert (done.stepped, done.skipped, done.grad_norm) == (False, "not_finite", None)
    assert not done.refused, "the own gradient is not finite either"
    assert torch.equal(flat(policy), before)
