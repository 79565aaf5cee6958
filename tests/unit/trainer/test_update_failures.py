"""A failure that a peer's group causes excludes that group; an own row that is too large is
excluded alone; a shortage of memory changes only the micro-batch."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from swarmnode.config import TrainingConfig
from swarmnode.errors import DeviceError
from swarmnode.policy.micro import MicroBatcher
from swarmnode.policy.ways import Row
from swarmnode.rollouts.trainer.batch import TrainingGroup, assemble
from swarmnode.trainer import update as module
from swarmnode.trainer.update import Updater
from tests.support.updates import GCD_PROMPT, sampled_groups, small_device, weights

PROMPTS = ["What is 3 + 4?", "What is 5 + 6?", "What is 7 + 8?", "What is 9 + 1?"]


@pytest.fixture(scope="module")
def groups(embedded):
    """An own group and three of peers."""
    return sampled_groups(embedded, PROMPTS, own=1)


def updated(embedded, groups, **keys):
    """The policy, its updater and the statistics after one update."""
    policy = embedded.clone()
    cfg = TrainingConfig(**keys)
    updater = Updater(policy, cfg, MicroBatcher(10_000))
    statistics = updater.update(assemble(groups, "grpo"))
    return policy, updater, statistics


def moments(updater):
    return [copy.deepcopy(state) for state in updater.optimizer.state_dict()["state"].values()]


def same_state(one, other):
    assert torch.equal(weights(one[0]), weights(other[0]))
    for a, b in zip(moments(one[1]), moments(other[1]), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


class Backward(torch.autograd.Function):
    """Raises an error or returns NaN in the backward pass."""

    @staticmethod
    def forward(ctx, x, what):
        ctx.what = what
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if isinstance(ctx.what, BaseException):
            raise ctx.what
        return gradient * ctx.what, None


def poison(monkeypatch, prompts, forward=None, backward=None):
    """The model fails on these prompts."""
    real = module.completion_logprobs

    def fragile(policy, batch, temperature):
        logprobs, entropy = real(policy, batch, temperature)
        there = {
            tuple(ids[mask.bool()].tolist())
            for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)
        }
        if there & {tuple(policy.encode_prompt(prompt)) for prompt in prompts}:
            if forward is not None:
                raise forward
            return Backward.apply(logprobs, backward), entropy
        return logprobs, entropy

    monkeypatch.setattr(module, "completion_logprobs", fragile)


class Panic(BaseException):
    """A panic of a Rust library."""


FAILURES = {
    "forward": ({"forward": IndexError("index 99 is out of range")}, "failed"),
    "backward": ({"backward": RuntimeError("a kernel says no")}, "failed"),
    "panic": ({"forward": Panic("x")}, "failed"),
    "nan": ({"backward": math.nan}, "no_gradient"),
}


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("bad", [[2], [1, 2, 3]])
def test_a_failing_group_leaves_the_update_of_the_others(embedded, groups, monkeypatch, kind, bad):
    failure, outcome = FAILURES[kind]
    expected = updated(embedded, [g for n, g in enumerate(groups) if n not in bad])
    poison(monkeypatch, [PROMPTS[n] for n in bad], **failure)
    found = updated(embedded, groups)
    assert found[2].stepped
    assert found[2].refused == dict.fromkeys(bad, outcome)
    assert found[2].details[outcome]
    assert torch.allclose(weights(found[0]), weights(expected[0]), atol=1e-4)
    assert float((weights(found[0]) - weights(expected[0])).abs().mean()) < 1e-6


def test_single_failing_group_does_not_change_the_optimizer(embedded, groups, monkeypatch):
    expected = updated(embedded, groups[:1])
    poison(monkeypatch, PROMPTS[1:2], backward=RuntimeError("a kernel says no"))
    same_state(updated(embedded, groups[:2]), expected)


def test_only_peers_groups_that_fail_move_nothing(embedded, groups, monkeypatch):
    poison(monkeypatch, PROMPTS[1:3], backward=math.nan)
    found = updated(embedded, groups[1:3])
    assert not found[2].stepped
    assert found[2].refused == {0: "no_gradient", 1: "no_gradient"}
    assert torch.equal(weights(found[0]), weights(embedded))
    assert not moments(found[1])


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_peers_are_not_blamed_for_our_own_gradient(embedded, groups, monkeypatch, number):
    poison(monkeypatch, PROMPTS[:1], backward=number)
    found = updated(embedded, groups)
    done = found[2]
    assert (done.stepped, done.skipped, done.grad_norm) == (False, "not_finite", None)
    assert not done.refused
    assert torch.equal(weights(found[0]), weights(embedded))


def test_a_batch_without_a_signal_moves_nothing(embedded, groups):
    silent = [replace(group, rewards=[1.0] * 4) for group in groups]
    policy, _, done = updated(embedded, silent)
    assert (done.stepped, done.skipped) == (False, "no_signal")
    assert torch.equal(weights(policy), weights(embedded))


@pytest.mark.parametrize("long", [0, 1])
def test_out_of_memory_halves_the_micro_batch(embedded, monkeypatch, long):
    """The own group or the peer's does not fit in one piece."""
    prompts = [GCD_PROMPT, PROMPTS[0]] if long == 0 else [PROMPTS[0], GCD_PROMPT]
    batch = assemble(sampled_groups(embedded, prompts, own=1), "grpo")
    found = []
    for small in (False, True):
        if small:
            small_device(monkeypatch, 110, 110)
        policy, batchers = embedded.clone(), [MicroBatcher(10_000), MicroBatcher(10_000)]
        Updater(policy, TrainingConfig(), batchers[0], external=batchers[1]).update(batch)
        assert [each.statistics().oom_retries > 0 for each in batchers] == [
            small and source == long for source in (0, 1)
        ]
        found.append(weights(policy))
    # where a gradient is almost 0, the direction of Adam's first step of 3e-4 is random
    assert float((found[0] - found[1]).abs().mean()) < 1e-6


def test_too_large_peer_group_costs_only_itself(embedded, groups, monkeypatch):
    """Admission accepts rows of up to four times the own length."""
    large = replace(
        groups[2],
        rows=[Row(prompt, answer[:-1] * 90 + answer[-1:]) for prompt, answer, _ in groups[2].rows],
        sampler_logprobs=[old[:-1] * 90 + old[-1:] for old in groups[2].sampler_logprobs],
    )
    expected = updated(embedded, groups[:2])
    most = 4 * max(len(prompt) + len(answer) for g in groups for prompt, answer, _ in g.rows)
    small_device(monkeypatch, most, most)
    policy, batcher = embedded.clone(), MicroBatcher(10_000)
    rows = assemble([groups[0], large, groups[1]], "grpo")
    done = Updater(policy, TrainingConfig(), batcher).update(rows)
    assert done.stepped
    assert done.refused == {1: "too_large"}
    assert float((weights(policy) - weights(expected[0])).abs().mean()) < 1e-6
    assert batcher.tokens == 10_000


def test_an_exception_of_our_own_rows_is_raised(embedded, groups, monkeypatch):
    poison(monkeypatch, PROMPTS[:1], forward=RuntimeError("ours"))
    with pytest.raises(RuntimeError, match="ours"):
        updated(embedded, groups)


# ---- own rows ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long(embedded, groups):
    """Return an own group whose first answer is twice as long as the others."""
    group = groups[0]
    prompt, answer, _ = group.rows[0]
    first = (answer * 40)[: 2 * max(row.tokens for row in group.rows) + 4]
    logprobs = [[-1.0] * len(first), *group.sampler_logprobs[1:]]
    return TrainingGroup(
        [Row(prompt, first), *group.rows[1:]], logprobs, group.rewards, group.weights
    )


def test_row_that_does_not_fit_is_recomputed(embedded, long, monkeypatch):
    expected = updated(embedded, [long])
    sizes = sorted(len(prompt) + len(answer) for prompt, answer, _ in long.rows)
    small_device(monkeypatch, sizes[-1] - 1, sizes[-1])
    found = updated(embedded, [long])
    assert found[2].stepped
    assert found[2].dropped_rows == 0
    assert float((weights(found[0]) - weights(expected[0])).abs().mean()) < 1e-6


def test_row_that_never_fits_is_dropped_and_counted(embedded, long, groups, monkeypatch):
    sizes = sorted(len(prompt) + len(answer) for prompt, answer, _ in long.rows)
    small_device(monkeypatch, sizes[-1] - 1, sizes[-1] - 1)
    policy = embedded.clone()
    updater = Updater(policy, TrainingConfig(), MicroBatcher(10_000))
    for _ in range(2):
        done = updater.update(assemble([long, *groups[1:]], "grpo"))
        assert done.stepped
        assert done.dropped_rows == 1
        assert not done.refused
    assert not torch.equal(weights(policy), weights(embedded))


def test_rows_none_of_which_fits_end_the_trainer(embedded, long, monkeypatch):
    small_device(monkeypatch, 3, 3)
    with pytest.raises(DeviceError, match="out of memory"):
        updated(embedded, [long])
