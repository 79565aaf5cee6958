"""Several ranks compute the same as one: equal weights after equal steps, and equal answers at
temperature 0.

They run on CPUs through gloo; each module starts its ranks once.
"""

import functools

import pytest
import torch

from swarmnode.config import Config
from swarmnode.policy.engine.protocol import Request
from swarmnode.policy.generate import Sampling
from swarmnode.rollouts.trainer.batch import TrainingGroup, assemble
from swarmnode.trainer import state
from swarmnode.trainer.engine import make_whole_policy, open_policy
from swarmnode.trainer.rank_pool import RankPool, on_device
from swarmnode.trainer.ranks import DataParallelPolicy
from swarmnode.trainer.state import Counters
from tests.support.updates import PROMPTS

pytestmark = pytest.mark.slow
STEPS = 4
EPSILON = 1e-5
"""AdamW's epsilon. With 1e-8, rounding would decide the first step of a weight whose gradient is
2e-9, since ranks sum gradients in another order. Relevant gradients are about 3e-3."""


def configured(count, **sections):
    sections.setdefault("policy", {})
    return Config.model_validate(
        {
            **sections,
            "policy": {"devices": count, "threads": 1, **sections["policy"]},
            "weights": {"rule": "off", **sections.get("weights", {})},
            "training": {"learning_rate": 1e-4, **sections.get("training", {})},
        }
    )


class Fixture:
    """A pool of ranks, and engines with and without it that start with the same weights."""

    def __init__(self, config, pool=None):
        count = int(config.policy.devices)
        devices = [torch.device("cpu")] * count
        self.config = config
        self.pool = pool or RankPool(config, devices)
        self.policy = open_policy(on_device(config, devices, 0).policy, None, lambda line: None)
        self.start = [p.detach().clone() for p in self.policy.trainable_parameters()]
        self.alone = self.policy.clone()

    def engine(self, ranks=True):
        policy = self.policy if ranks else self.alone
        with torch.no_grad():
            for parameter, value in zip(policy.trainable_parameters(), self.start, strict=True):
                parameter.copy_(value)
        make = functools.partial(DataParallelPolicy, self.pool) if ranks else None
        send = lambda message: None
        engine = make_whole_policy(self.config, policy, Counters(), send, make=make)
        for group in engine._updater.optimizer.param_groups:
            group["eps"] = EPSILON
        return engine

    def weights(self, ranks=True):
        policy = self.policy if ranks else self.alone
        return torch.cat([p.detach().flatten() for p in policy.trainable_parameters()])


KINDS = {
    "all weights, 2 ranks": configured(2),
    "adapter, 4 ranks": configured(4, policy={"lora": {"r": 4}}),
}


@pytest.fixture(scope="module", params=KINDS)
def fixture(request):
    fixture = Fixture(KINDS[request.param])
    yield fixture
    fixture.pool.close()


def trained(fixture, groups, ranks):
    engine = fixture.engine(ranks)
    found = [engine.update(assemble(groups, "grpo")) for _ in range(STEPS)]
    return fixture.weights(ranks), found


@pytest.mark.parametrize("peers", [False, True])
def test_ranks_take_the_steps_of_one(fixture, groups, peers):
    chosen = groups if peers else [g for g in groups if not g.peer]
    one, expected = trained(fixture, chosen, ranks=False)
    all_, found = trained(fixture, chosen, ranks=True)
    assert float((one - torch.cat([p.flatten() for p in fixture.start])).abs().max()) > 1e-4
    assert float((one - all_).abs().max()) < 2e-6
    for a, b in zip(expected, found, strict=True):
        assert b.stepped
        assert b.loss == pytest.approx(a.loss, abs=1e-5)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-3)


def test_ranks_answer_and_score_as_one_does(fixture, groups):
    greedy = Sampling(2, 8, temperature=0.0)
    rows = [row for group in groups for row in group.rows]
    found, expected = [], []
    for ranks, out in ((True, found), (False, expected)):
        engine = fixture.engine(ranks)
        engine.update(assemble(groups, "grpo"))  # the other ranks must receive these weights
        answers = engine.generate(PROMPTS, greedy, engine.random_generator(0))
        out += [(a.prompt_ids, [c.ids for c in a.completions]) for a in answers]
        out += [chosen for chosen, _ in engine.score(rows, 1.0)]
    assert found[: len(PROMPTS)] == expected[: len(PROMPTS)]
    for a, b in zip(found[len(PROMPTS) :], expected[len(PROMPTS) :], strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_questions_go_to_every_rank_and_survive_an_update(fixture, groups):
    engine = fixture.engine()
    sampling = Sampling(2, 48, temperature=1.0)
    generation = engine.generation(sampling, engine.random_generator(3))
    for number in range(8):
        generation.submit(Request(number, PROMPTS[number % len(PROMPTS)]))
    generation.cancel(7)
    done = generation.finished(0)
    engine.update(assemble(groups, "grpo"))
    while generation.statistics().unfinished:
        done += generation.finished(1)
    assert sorted(one.number for one in done) == list(range(7))
    for one in done:
        assert one.sample.prompt_ids == fixture.policy.encode_prompt(PROMPTS[one.number % 6])
        assert len(one.sample.completions) == 2
    assert {rank for rank, tokens in generation._tokens.items() if tokens} == set(
        range(fixture.pool.count)
    )


def test_a_peers_bad_group_costs_that_group_only(fixture, groups):
    """Its second row is too large for any rank."""
    long = groups[-1].rows[0][0] * 100, groups[-1].rows[0][1]
    bad = TrainingGroup(
        [long, *groups[-1].rows[1:]],
        groups[-1].sampler_logprobs,
        groups[-1].rewards,
        groups[-1].weights,
        peer="bad",
    )
    one, expected = trained(fixture, [*groups[:-1], bad], ranks=False)
    all_, found = trained(fixture, [*groups[:-1], bad], ranks=True)
    assert float((one - all_).abs().max()) < 1e-5
    assert [f.refused for f in found] == [e.refused for e in expected]


class Averaging:
    """A fake replica whose averages change every weight."""

    def __init__(self, policy):
        self._policy = policy

    @torch.no_grad()
    def between_steps(self, connected, step_seconds, stepped):
        for parameter in self._policy.trainable_parameters():
            parameter.mul_(0.9)
        return True


def test_averaged_and_restored_weights_reach_every_rank(fixture, groups, tmp_path):
    found = []
    for ranks in (False, True):
        engine = fixture.engine(ranks)
        engine._replica = Averaging(engine._policy)
        for _ in range(STEPS):
            engine.update(assemble(groups, "grpo"))
            assert engine.average(True, 1.0, True)
        directory = tmp_path / str(ranks)
        directory.mkdir()
        state.write(directory, snapshot_of(engine))
        middle = fixture.weights(ranks)
        engine.update(assemble(groups, "grpo"))
        after = fixture.weights(ranks)
        restored = fixture.engine(ranks)
        assert restored.restore(directory, restored.random_generator(0)) is not None
        assert torch.equal(fixture.weights(ranks), middle)
        restored.update(assemble(groups, "grpo"))
        assert float((fixture.weights(ranks) - after).abs().max()) < 1e-6
        found.append(after)
    assert float((found[0] - found[1]).abs().max()) < 1e-5


def snapshot_of(engine):
    replica, engine._replica = engine._replica, None
    snapshot = engine.snapshot(engine.random_generator(0), Counters(model="embedded"))
    engine._replica = replica
    return snapshot
