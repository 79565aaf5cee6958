"""The gate: broken partners are refused by reason, honest ones are averaged with."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from swarmnode.policy.micro import RowTooLarge
from swarmnode.policy.ways import Row
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.gate import (
    LEAST_PROBE,
    MAX_INCREASE,
    Losses,
    LossProbe,
    compare,
    examine,
    norm,
    passes_probe,
)
from tests.support.outer_rules import judge


def weights(seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(40, 5, generator=rng), "b": torch.randn(30, generator=rng)}


def near(mine, distance, seed=1):
    """Tensors at `distance` from `mine`."""
    d = weights(seed)
    factor = distance / norm(d)
    return {n: t + factor * d[n] for n, t in mine.items()}


def distance_from(ideal):
    """A probe with a loss that grows with the distance from `ideal`."""
    return lambda tensors: 1.0 + norm(tensors, minus=ideal)


@pytest.mark.parametrize("weight", [0.5, 0.1])
def test_an_honest_partner_is_averaged_with_its_weight(weight):
    mine = weights()
    theirs = near(mine, 0.1)
    outcome, mean = judge(mine, theirs, weight=weight, probe=distance_from(mine))
    assert outcome == "accepted"
    for n in mine:
        torch.testing.assert_close(mean[n], mine[n] + weight * (theirs[n] - mine[n]))
    relative = examine(mine, theirs, weight=weight).relative_distance
    assert relative == pytest.approx(0.1 / norm(mine), rel=1e-3)


BROKEN = {
    "nan": (lambda m: {**m, "b": torch.full_like(m["b"], math.nan)}, "not_finite"),
    "one nan": (
        lambda m: {**m, "b": torch.where(torch.arange(30) == 29, torch.tensor(math.nan), m["b"])},
        "not_finite",
    ),
    "inf": (lambda m: {n: torch.full_like(t, -math.inf) for n, t in m.items()}, "not_finite"),
    "times a million": (lambda m: {n: 1e6 * t for n, t in m.items()}, "bounds"),
    "huge": (lambda m: {n: torch.full_like(t, 1e38) for n, t in m.items()}, "bounds"),
    "times three": (lambda m: {n: 3 * t for n, t in m.items()}, "norm_ratio"),
    "zero": (lambda m: {n: torch.zeros_like(t) for n, t in m.items()}, "norm_ratio"),
    "sign-flipped": (lambda m: {n: -t for n, t in m.items()}, "probe"),
    "noise": (lambda m: weights(99), "probe"),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("adapter", [False, True])
def test_a_broken_partner_is_refused_by_cause_and_changes_nothing(fault, adapter):
    mine = weights()
    before = {n: t.clone() for n, t in mine.items()}
    make, outcome = BROKEN[fault]
    if adapter and outcome == "norm_ratio":
        outcome = "probe"
    probe = distance_from(before)
    assert judge(mine, make(mine), adapter=adapter, probe=probe) == (outcome, None)
    assert all(torch.equal(mine[n], before[n]) for n in mine)


def test_an_untrained_adapter_averages_with_a_trained_one():
    """B of LoRA starts at zero, so the ratio of norms means nothing."""
    outcome, mean = judge({"b": torch.zeros(10)}, {"b": torch.ones(10)}, adapter=True)
    assert outcome == "accepted"
    assert torch.equal(mean["b"], torch.full((10,), 0.5))
    found = examine({"b": torch.zeros(10)}, {"b": torch.ones(10)}, adapter=True)
    assert found.relative_distance is None


@pytest.mark.parametrize(
    ("before", "error", "most"),
    [(3.0, 0.0, MAX_INCREASE), (0.3, 0.0, 0.03), (0.3, 0.01, 0.07), (0.3, 1.0, MAX_INCREASE)],
)
def test_tolerance_follows_entropy_and_error_up_to_its_maximum(before, error, most):
    assert passes_probe(Losses(before, before + 0.99 * most, error))
    assert not passes_probe(Losses(before, before + 1.01 * most, error))


def test_own_broken_weights_are_no_fault_of_the_partner():
    mine = weights()
    mine["a"][0, 0] = math.nan
    assert judge(mine, weights(1)) == ("own_not_finite", None)


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])


class Scores:
    """Log-probabilities of a policy that has one distribution for every token."""

    def score(self, policy, rows, temperature):
        return [
            torch.log_softmax(policy.w.detach(), 0)[completion].tolist()
            for _, completion, _ in rows
        ]


@pytest.fixture
def probe():
    policy = SimpleNamespace(w=torch.nn.Parameter(LOGITS.clone()))
    return LossProbe(policy, Scores(), 1.0, AveragedTensors({"w": policy.w}, 1, threading.Lock()))


def rows(*tokens, count=16):
    return [Row([0], list(tokens))] * count


def drawn(seed=0):
    """Completions of the own policy."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Row([0], torch.multinomial(LOGITS.softmax(0), 50, True, generator=generator).tolist())
        for _ in range(16)
    ]


def judged(probe, averaged):
    """Losses, and the gate's decision on them."""
    answers = []
    assert probe.measure({"w": LOGITS.clone()}, {"w": averaged}, answers.append)
    return answers[0], passes_probe(answers[0])


def test_probe_needs_own_completions(probe):
    probe.remember([], rows(count=LEAST_PROBE))  # without tokens
    probe.remember([], rows(1, count=LEAST_PROBE - 1))
    assert not probe.measure({"w": LOGITS}, {"w": LOGITS}, pytest.fail)


@pytest.mark.parametrize(
    "broken", [-LOGITS, torch.zeros(4), LOGITS[[3, 2, 0, 1]], torch.tensor([9.0, 0.0, 0.0, 0.0])]
)
def test_unrewarded_completions_detect_broken_weights(probe, broken):
    probe.remember([], drawn())
    losses, passed = judged(probe, LOGITS + torch.tensor([0.1, -0.1, 0.1, -0.1]))
    assert abs(losses.after - losses.before) < 0.02
    assert passed
    losses, passed = judged(probe, broken)
    kl = float((LOGITS.softmax(0) * (LOGITS.log_softmax(0) - broken.log_softmax(0))).sum())
    assert losses.after - losses.before == pytest.approx(kl, rel=0.15)
    assert not passed


def test_enough_rewarded_completions_are_all_that_counts(probe):
    probe.remember(rows(0, count=LEAST_PROBE), rows(3))
    losses, passed = judged(probe, LOGITS + torch.tensor([3.0, 0.0, 0.0, -3.0]))
    assert losses.after < losses.before
    assert passed


def test_tolerance_depends_on_the_probes_tokens():
    """Honest averages change few tokens: over 40 tokens of 0.3 nats one may lose 2 nats."""
    few = compare([-0.3] * 40, [-2.3, *[-0.3] * 39])
    many = compare([-0.3] * 16_000, [-0.35] * 16_000)
    assert few.after - few.before == pytest.approx(0.05)
    assert many.after - many.before == pytest.approx(0.05)
    assert few.error == pytest.approx(0.05, rel=0.05)
    assert many.error < 1e-9
    assert passes_probe(few)
    assert not passes_probe(many)


@pytest.mark.parametrize("after", [[-math.inf, -1.0], [math.nan, -1.0], [-80.0, -1.0]])
def test_infinite_loss_is_never_tolerated(after):
    assert not passes_probe(compare([-1.0, -1.0], after))


def test_probe_skips_rows_that_are_too_large(probe, monkeypatch):
    probe.remember([], [*drawn()[:8], *rows(*[1] * 60, count=2), *drawn()[8:14]])
    real = Scores.score

    def limited(self, policy, some, temperature):
        for number, (_, completion, _) in enumerate(some):
            if len(completion) > 50:
                raise RowTooLarge(number, len(completion))
        return real(self, policy, some, temperature)

    monkeypatch.setattr(Scores, "score", limited)
    _, passed = judged(probe, LOGITS + torch.tensor([0.1, -0.1, 0.1, -0.1]))
    assert passed
    too_long = LossProbe(probe._policy, Scores(), 1.0, probe._tensors)
    too_long.remember([], rows(*[1] * 60))
    assert not too_long.measure({"w": LOGITS}, {"w": LOGITS}, pytest.fail)
    assert torch.equal(probe._tensors.parameters["w"].detach(), LOGITS)
