"""The gate: refusals by reason, and the bound on the change by accepted weights."""

import math
import random
import threading
from types import SimpleNamespace

import pytest
import torch

from swarmnode.policy.micro import RowTooLarge
from swarmnode.policy.ways import Row
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.gate import (
    EPSILON,
    FAR,
    FIRST,
    LEAST_PROBE,
    AveragingGate,
    Losses,
    LossProbe,
    compare,
    norm,
    threshold,
)
from tests.support.outer_rules import judge

W = 0.5


def weights(seed=0, scale=1.0):
    rng = torch.Generator().manual_seed(seed)
    return {
        "a": scale * torch.randn(40, 5, generator=rng),
        "b": scale * torch.randn(30, generator=rng),
    }


def near(mine, distance, seed=1):
    """Tensors at `distance` from `mine`."""
    d = weights(seed)
    factor = distance / norm(d)
    return {n: t + factor * d[n] for n, t in mine.items()}


def trained_gate(mine, distance=1.0):
    """A gate that has accepted honest partners at `distance`: τ is twice that."""
    gate = AveragingGate()
    for i in range(FIRST):
        assert (
            judge(gate, f"honest{i}", mine, near(mine, distance, seed=i + 1), moved=distance).mean
            is not None
        )
    return gate


def tau_of(gate, tensors, own, moved):
    return threshold(gate.medians(tensors), own, moved)


def test_an_honest_partner_is_averaged_with_whole():
    mine = weights()
    theirs = near(mine, 1.0)
    judged = judge(trained_gate(mine), "p", mine, theirs)
    assert judged.outcome == "accepted"
    for n in mine:
        torch.testing.assert_close(judged.mean[n], (mine[n] + theirs[n]) / 2)


def test_a_far_partner_is_clipped_to_tau():
    mine = weights()
    judged = judge(trained_gate(mine), "p", mine, near(mine, 8.0))
    assert judged.outcome == "clipped"
    assert norm(judged.mean, minus=mine) == pytest.approx(W * 2.0, rel=1e-4)


HOSTILE = {
    "nan": (lambda m: {**m, "b": torch.full_like(m["b"], math.nan)}, "not_finite"),
    "one nan": (
        lambda m: {**m, "b": torch.where(torch.arange(30) == 29, torch.tensor(math.nan), m["b"])},
        "not_finite",
    ),
    "inf": (lambda m: {n: torch.full_like(t, -math.inf) for n, t in m.items()}, "not_finite"),
    "times a million": (lambda m: {n: 1e6 * t for n, t in m.items()}, "bounds"),
    "times three": (lambda m: {n: 3 * t for n, t in m.items()}, "norm_ratio"),
    "huge": (lambda m: {n: torch.full_like(t, 3e38) for n, t in m.items()}, "bounds"),
    "zero": (lambda m: {n: torch.zeros_like(t) for n, t in m.items()}, "norm_ratio"),
    "sign-flipped": (lambda m: {n: -t for n, t in m.items()}, "too_far"),
    "noise": (lambda m: weights(99), "too_far"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_tensors_are_refused_by_cause_and_change_nothing(attack):
    mine = weights()
    before = {n: t.clone() for n, t in mine.items()}
    gate = trained_gate(mine, 0.5)
    make, outcome = HOSTILE[attack]
    judged = judge(gate, "p", mine, make(mine), probe=lambda _: 1.0)
    assert (judged.outcome, judged.mean) == (outcome, None)
    assert all(torch.equal(mine[n], before[n]) for n in mine)


def test_an_adapter_of_twice_the_norm_is_no_lie():
    mine, gate = weights(), AveragingGate(grows=True)
    for number in range(10):
        judged = judge(
            gate, "p", mine, {n: (3 if number % 2 else 0.3) * t for n, t in mine.items()}
        )
        assert (judged.outcome, judged.mean) == ("too_far", None)


def test_no_partner_moves_the_weights_further_than_the_bound():
    rng = random.Random(0)
    for trial in range(300):
        mine = weights(trial, scale=10 ** rng.uniform(-3, 1))
        gate = (
            trained_gate(mine, norm(mine) * 10 ** rng.uniform(-3, -1))
            if rng.random() < 0.7
            else AveragingGate()
        )
        moved = norm(mine) * 10 ** rng.uniform(-4, -1)
        for exchange in range(4):
            tau = tau_of(gate, mine, norm(mine), moved)
            theirs = near(mine, norm(mine) * 10 ** rng.uniform(-4, 2), seed=1000 * trial + exchange)
            if rng.random() < 0.3:
                make, _ = HOSTILE[rng.choice(list(HOSTILE))]
                theirs = make(theirs)
            weight = rng.choice((0.5, 0.1, 7.0, -1.0))
            judged = judge(gate, f"p{rng.randrange(3)}", mine, theirs, moved=moved, weight=weight)
            if judged.mean is not None:
                most = min(max(weight, 0.0), 0.5) * tau
                assert norm(judged.mean, minus=mine) <= most * 1.0001 + 1e-6 * norm(mine)
                assert all(bool(torch.isfinite(t).all()) for t in judged.mean.values())
                mine = judged.mean


def test_a_patient_attacker_cannot_raise_its_own_threshold():
    mine = weights()
    gate = trained_gate(mine, 0.1)
    for i in range(FIRST, 3 * FIRST):
        judge(gate, f"honest{i}", mine, near(mine, 0.1, seed=i))
    tau = tau_of(gate, mine, norm(mine), 0.0)
    for i in range(100):
        distance = 0.9 * FAR * tau_of(gate, mine, norm(mine), 0.0)
        judge(gate, "attacker", mine, near(mine, distance, seed=i))
    assert tau_of(gate, mine, norm(mine), 0.0) <= 1.01 * tau


def test_own_progress_sets_the_first_threshold():
    mine = weights()
    judged = judge(AveragingGate(), "p", mine, near(mine, 5.0), moved=0.5)
    assert judged.outcome == "clipped"
    assert norm(judged.mean, minus=mine) == pytest.approx(W * 2 * 0.5, rel=1e-3)
    gate = AveragingGate()
    for i in range(FIRST):
        judge(gate, f"p{i}", mine, near(mine, 5.0, seed=i), moved=0.5)
    # what others trained, and not what was taken of it
    assert tau_of(gate, mine, norm(mine), 0.5) == pytest.approx(10.0, rel=1e-3)
    assert gate.clip_ratio == pytest.approx(0.2, rel=1e-3)


def test_an_untrained_adapter_neither_moves_nor_blames():
    """B of LoRA starts at zero: no ratio, no threshold, nothing to hold against a partner that has
    trained."""
    mine = {"b": torch.zeros(10)}
    gate = AveragingGate()
    judged = judge(gate, "p", mine, {"b": torch.ones(10)})
    assert judged.mean is not None
    assert torch.equal(judged.mean["b"], mine["b"])


def test_what_hurts_on_private_sequences_is_refused():
    mine = weights()
    calls = []

    def probe(tensors):
        calls.append(tensors)
        return 2.0 if tensors is mine else worse

    worse = 2.0 + 1.01 * EPSILON
    judged = judge(trained_gate(mine), "p", mine, near(mine, 1.0), probe=probe)
    assert (judged.outcome, judged.mean) == ("probe", None)
    assert len(calls) == 2
    worse = 2.0 + 0.99 * EPSILON
    assert judge(trained_gate(mine), "p", mine, near(mine, 1.0), probe=probe).mean is not None


def test_probe_tolerance_grows_within_its_range():
    mine = weights()
    gate = trained_gate(mine)
    found = gate.examine("p", mine, near(mine, 1.0))
    passes = lambda worse: gate.conclude(found, Losses(2.0, 2.0 + worse)).mean is not None
    for i in range(8):
        judge(
            gate, f"p{i}", mine, near(mine, 1.0, seed=i), probe=lambda t: 2.0 if t is mine else 1.88
        )
    assert not passes(0.241)
    assert passes(0.239)
    for i in range(64):
        judge(
            gate, f"p{i}", mine, near(mine, 1.0, seed=i), probe=lambda t: 9.0 if t is mine else 1.0
        )
    assert not passes(4 * EPSILON + 1e-6)
    assert passes(4 * EPSILON - 1e-6)


@pytest.mark.parametrize(
    ("entropy", "epsilon"), [(3.0, EPSILON), (1.0, EPSILON), (0.3, 0.3 * EPSILON)]
)
def test_the_probes_tolerance_is_a_share_of_the_entropy(entropy, epsilon):
    mine = weights()
    theirs = near(mine, 1.0)
    judged = lambda worse: judge(
        trained_gate(mine),
        "p",
        mine,
        theirs,
        probe=lambda t: entropy if t is mine else entropy + worse,
    )
    assert judged(1.01 * epsilon).outcome == "probe"
    assert judged(0.99 * epsilon).mean is not None


def test_our_own_broken_weights_are_nobody_elses_fault():
    mine = weights()
    mine["a"][0, 0] = math.nan
    gate = AveragingGate()
    assert judge(gate, "p", mine, weights(1)).outcome == "own_not_finite"


def layered(distance, seed=0):
    """Two layers, each so far from those of seed 0 and distance 0."""
    mine = {f"layers.{i}.{name}": t for i in range(2) for name, t in weights().items()}
    each = {
        f"layers.{i}.{name}": t
        for i in range(2)
        for name, t in near(weights(), distance, seed).items()
    }
    return each if distance else mine


def test_blocks_have_thresholds_of_their_own():
    mine, gate = layered(0.0), AveragingGate()
    first = {n: t for n, t in mine.items() if n.startswith("layers.0")}
    for i in range(4):
        judge(gate, f"p{i}", first, {n: layered(0.1, i)[n] for n in first})
    assert tau_of(gate, first, norm(first), 3.0) == pytest.approx(0.2, rel=1e-3)
    assert tau_of(gate, mine, norm(mine), 3.0) == 6.0  # of the other layer nothing was accepted yet
    for i in range(4):
        judge(gate, f"p{i}", mine, layered(0.1, i))
    assert tau_of(gate, mine, norm(mine), 3.0) == pytest.approx(0.2 * math.sqrt(2), rel=1e-3)
    assert tau_of(gate, first, norm(first), 3.0) == pytest.approx(0.2, rel=1e-3)


def test_hostile_part_moves_no_more_than_an_honest_one():
    mine, gate = layered(0.0), AveragingGate()
    for i in range(8):
        judge(gate, f"p{i}", mine, layered(0.1, i))
    first = {n: t for n, t in mine.items() if n.startswith("layers.0")}
    far = {n: layered(1.5)[n] for n in first}
    assert (
        judge(gate, "q", mine, {**mine, **{n: layered(3.5)[n] for n in first}}).outcome == "too_far"
    )
    for _ in range(20):  # it holds one layer, and says so
        taken = judge(gate, "q", first, far)
        assert taken.outcome == "clipped"
        assert norm(taken.mean, minus=first) <= 0.5 * 0.2 * 1.01
    assert tau_of(gate, first, norm(first), 0.0) <= 0.2 * 1.01


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
    answers, mine = [], {"w": LOGITS.clone()}
    assert probe.measure(mine, {"w": averaged}, answers.append)
    gate = AveragingGate()
    found = gate.examine("peer", mine, {"w": averaged}, moved=100.0)
    return answers[0], gate.conclude(found, answers[0]).outcome


def test_probe_needs_own_completions(probe):
    probe.remember([], rows(count=LEAST_PROBE))  # none of which says anything
    probe.remember([], rows(1, count=LEAST_PROBE - 1))
    assert not probe.measure({"w": LOGITS}, {"w": LOGITS}, pytest.fail)


def test_unrewarded_completions_detect_opposite_weights(probe):
    probe.remember([], drawn())
    losses, outcome = judged(probe, LOGITS + torch.tensor([0.1, -0.1, 0.1, -0.1]))
    assert losses.change < 0.02
    assert outcome == "accepted"
    losses, outcome = judged(probe, -LOGITS)
    kl = float((LOGITS.softmax(0) * (LOGITS.log_softmax(0) - (-LOGITS).log_softmax(0))).sum())
    assert losses.after - losses.before == pytest.approx(kl, rel=0.15)
    assert outcome == "probe"


def test_a_policy_that_repeats_likely_tokens_is_refused(probe):
    probe.remember([], rows(1, 1, 1))
    losses, outcome = judged(probe, torch.tensor([0.0, 9.0, 0.0, -1.0]))
    assert losses.after < losses.before
    assert losses.drift > EPSILON
    assert outcome == "probe"


def test_enough_rewarded_completions_are_all_that_counts(probe):
    probe.remember(rows(0, count=LEAST_PROBE), rows(3))
    losses, outcome = judged(probe, LOGITS + torch.tensor([3.0, 0.0, 0.0, -3.0]))
    assert losses.after < losses.before
    assert losses.drift == 0.0
    assert outcome == "accepted"


@pytest.mark.parametrize("rewarded", [True, False])
def test_tolerance_depends_on_the_probes_tokens(rewarded):
    """Honest averages change few tokens: over 40 tokens of 0.3 nats one may lose 2 nats."""
    few = compare([-0.3] * 40, [-2.3, *[-0.3] * 39], rewarded)
    many = compare([-0.3] * 16_000, [-0.35] * 16_000, rewarded)
    gate = AveragingGate()
    found = gate.examine("peer", {"w": LOGITS}, {"w": LOGITS + 0.1}, moved=100.0)
    assert few.error == pytest.approx(0.05, rel=0.05) or not rewarded
    assert many.error < 1e-9
    assert many.change == pytest.approx(0.05)
    assert gate.conclude(found, few).mean is not None
    assert gate.conclude(found, many).outcome == "probe"


@pytest.mark.parametrize("after", [[-math.inf, -1.0], [math.nan, -1.0], [-80.0, -1.0]])
@pytest.mark.parametrize("rewarded", [True, False])
def test_infinite_loss_is_never_tolerated(after, rewarded):
    assert not compare([-1.0, -1.0], after, rewarded).change <= 4 * EPSILON


def test_probe_skips_rows_that_are_too_large(probe, monkeypatch):
    """They cost the judgement these completions, and not the trainer."""
    probe.remember([], [*drawn()[:8], *rows(*[1] * 60, count=2), *drawn()[8:14]])
    real = Scores.score

    def limited(self, policy, some, temperature):
        for number, (_, completion, _) in enumerate(some):
            if len(completion) > 50:
                raise RowTooLarge(number, len(completion))
        return real(self, policy, some, temperature)

    monkeypatch.setattr(Scores, "score", limited)
    losses, outcome = judged(probe, LOGITS + torch.tensor([0.1, -0.1, 0.1, -0.1]))
    assert losses.change < 0.02
    assert outcome == "accepted"
    too_long = LossProbe(probe._policy, Scores(), 1.0, probe._tensors)
    too_long.remember([], rows(*[1] * 60))
    assert not too_long.measure({"w": LOGITS}, {"w": LOGITS}, pytest.fail)
    assert torch.equal(probe._tensors.parameters["w"].detach(), LOGITS)
