"""The probe judges by own completions that earned something, by any own ones while there are none,
and by nothing else."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch

from swarmnode.policy.micro import RowTooLarge
from swarmnode.policy.ways import Row
from swarmnode.weights.trainer.averaged import AveragedTensors
from swarmnode.weights.trainer.gate import EPSILON, LEAST_PROBE, AveragingGate, LossProbe, compare

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
