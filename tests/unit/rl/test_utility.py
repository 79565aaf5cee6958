"""Whether others' groups help: the probe, and the guard on synthetic histories."""

import random

import pytest
import torch

from swarmnode.rl.utility import AgreementProbe, UtilityGuard


def step(parameters, own_target, external_target, probe):
    for p in parameters:
        p.grad = None
    sum((p * own_target).sum() for p in parameters).backward()
    probe.mark()
    sum((p * external_target).sum() for p in parameters).backward()
    return probe.read()


@pytest.mark.parametrize(("external", "cosine"), [(3.0, 1.0), (-0.5, -1.0)])
def test_the_probe_sees_whether_gradients_point_the_same_way(external, cosine):
    parameters = [torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(5))]
    assert step(parameters, 1.0, external, AgreementProbe(parameters)) == pytest.approx(
        cosine, abs=1e-5
    )


def test_the_probe_equals_a_cosine_of_two_separate_passes():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6, 4))
    x, y = torch.randn(3, 6), torch.randn(2, 6)
    probe = AgreementProbe([weight])
    (x @ weight).square().sum().backward()
    probe.mark()
    (y @ weight).relu().sum().backward()
    (a,) = torch.autograd.grad((x @ weight).square().sum(), weight)
    (b,) = torch.autograd.grad((y @ weight).relu().sum(), weight)
    assert probe.read() == pytest.approx(
        torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item(), abs=1e-5
    )


def test_the_probe_looks_at_the_last_tensors_that_fit():
    first, last = torch.nn.Parameter(torch.zeros(100)), torch.nn.Parameter(torch.zeros(10))
    probe = AgreementProbe([first, last], limit=50)
    (first.sum() + last.sum()).backward()
    probe.mark()
    (first.sum() - last.sum()).backward()  # only `first` agrees, and is too large to look at
    assert probe.read() == pytest.approx(-1.0, abs=1e-5)


def test_without_external_groups_there_is_no_agreement():
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    probe = AgreementProbe(parameters)
    assert probe.read() is None
    parameters[0].sum().backward()
    probe.mark()
    assert probe.read() is None


def history(guard, rewards, share=0.6, agreement=0.3):
    return [guard.observe(r, agreement, share) for r in rewards]


def noisy(values, seed=0, noise=0.05):
    rng = random.Random(seed)
    return [v + rng.gauss(0, noise) for v in values]


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.15])
@pytest.mark.parametrize("seed", range(5))
def test_learning_noisily_hardly_ever_costs_external_groups(seed, noise):
    guard = UtilityGuard()
    rising = [0.02 + 0.48 * min(1.0, i / 100) for i in range(300)]
    scales = history(guard, noisy(rising, seed, noise))
    assert sum(scales) / len(scales) > 0.95


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_while_most_of_the_batch_is_external_cuts_them(seed):
    guard = UtilityGuard()
    history(guard, noisy([0.5] * 60, seed))
    falling = history(guard, noisy([0.5 - 0.02 * i for i in range(20)], seed + 100))
    assert falling[-1] <= 0.4


def test_the_same_fall_with_few_external_groups_is_not_their_fault():
    guard = UtilityGuard()
    history(guard, noisy([0.5] * 60), share=0.1)
    assert history(guard, noisy([0.5 - 0.02 * i for i in range(20)], 1), share=0.1)[-1] == 1.0


def test_lasting_disagreement_cuts_and_a_passing_one_does_not():
    guard = UtilityGuard()
    history(guard, [0.3] * 20, agreement=0.4)
    history(guard, [0.3] * 2, agreement=-0.6)
    assert guard.external_scale == 1.0
    history(guard, [0.3] * 40, agreement=-0.6)
    assert guard.external_scale < 0.1


def test_disagreement_for_ever_ends_at_zero_and_calm_gives_back_slowly():
    guard = UtilityGuard()
    history(guard, [0.3] * 60, agreement=-0.5)
    assert guard.external_scale == 0.0
    # without external groups nothing can be measured: agreement is None
    back = [guard.observe(0.3, None, 0.0) for _ in range(150)]
    assert back[30] < 0.4
    assert back[-1] == 1.0


def test_a_fall_of_the_held_out_reward_cuts_once():
    guard = UtilityGuard()
    for i in range(40):
        guard.observe(0.4, 0.3, 0.6, reward_held_out=0.45 if i % 10 == 0 else None)
    assert guard.external_scale == 1.0
    guard.observe(0.4, 0.3, 0.6, reward_held_out=0.30)
    assert guard.external_scale == pytest.approx(0.6)
    for i in range(20):  # stays at the new level: no further alarm
        guard.observe(0.4, 0.3, 0.6, reward_held_out=0.30 if i % 5 == 4 else None)
    assert guard.external_scale > 0.6


def test_nothing_measured_changes_nothing():
    guard = UtilityGuard(external_scale=0.5)
    for _ in range(3):
        guard.observe(None)
    assert guard.external_scale == pytest.approx(0.53)
