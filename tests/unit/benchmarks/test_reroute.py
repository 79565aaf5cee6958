"""benchmarks.reroute: a stage that is replaced is replaced whole and given back, and what is called
a difference is one."""

import copy
import random

import pytest
import torch

from benchmarks.reroute import (
    PER,
    STAGES,
    Text,
    average,
    compare,
    costs,
    follow,
    gains,
    gradient,
    layers_of,
    still,
    through,
)
from benchmarks.staged import Corpus, build, tasks
from swarmnode.averaging.outer import OuterState
from swarmnode.weights.rule import make_rule

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus():
    torch.set_num_threads(1)
    found = tasks(8, 10)
    return Corpus(found.train, found.held_out[:8])


@pytest.fixture
def crews(corpus):
    start = build(0)
    return [Text(copy.deepcopy(start), 1e-3, corpus, seed) for seed in range(4)]


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_its_own_stage_is_no_difference_and_another_s_is_what_a_policy_with_those_weights_has(
    crews,
):
    one, other = crews[:2]
    for crew in (one, other):
        for step in range(3):
            crew.train(step)
    before, probe = flat(one.model), one.probe(0)
    same = compare(one, 1, layers_of(one.model, 1), probe)
    assert same == {
        "kl": pytest.approx(0.0, abs=1e-6),
        "nll": 0.0,
        "outside": 0.0,
        "cosine": pytest.approx(1.0, abs=1e-4),
    }
    found = compare(one, 1, layers_of(other.model, 1), probe)
    assert found["kl"] > 1e-5
    assert found["cosine"] < 1.0 - 1e-4
    assert torch.equal(flat(one.model), before)
    mixed = copy.deepcopy(one.model)
    for mine, theirs in zip(layers_of(mixed, 1), layers_of(other.model, 1), strict=True):
        mine.load_state_dict(theirs.state_dict())
    now = one.distribution(probe)[0]
    one.model.load_state_dict(mixed.state_dict())
    after, tokens = one.distribution(probe)
    assert found["nll"] == pytest.approx(
        float((now - after).gather(1, tokens[:, None]).mean()), abs=1e-6
    )


def test_a_stage_is_two_layers_and_the_gradient_is_that_of_everything_else(crews):
    one, probe = crews[0], crews[0].probe(0)
    assert [layer for stage in range(STAGES) for layer in layers_of(one.model, stage)] == list(
        one.model.model.layers
    )
    own = sum(p.numel() for layer in layers_of(one.model, 2) for p in layer.parameters())
    assert len(gradient(one, 2, layers_of(one.model, 2), probe)) == len(flat(one.model)) - own
    with through(one.model, 2, []):
        assert len(one.model.model.layers) == PER * (STAGES - 1)
    assert len(one.model.model.layers) == PER * STAGES


def test_partners_that_began_alike_are_equal_after_an_average_and_others_are_not(crews):
    for step, crew in enumerate(crews):
        crew.train(step)
    named = [dict(crew.model.named_parameters()) for crew in crews]
    start = dict(build(0).named_parameters())
    average(named, [OuterState(start, make_rule("noloco")) for _ in crews], [2, 0, 3, 1])
    apart = lambda i, j: float((flat(crews[i].model) - flat(crews[j].model)).abs().max())
    assert max(apart(2, 0), apart(3, 1)) < 1e-6
    assert min(apart(0, 1), apart(2, 3)) > 1e-5


def test_a_run_measures_every_moment_but_those_before_the_first_average(crews):
    rows = follow(crews[:4], 4, 2, random.Random(1))
    assert {r["what"].rsplit(",", 1)[-1].strip() for r in rows if "after" in r["what"]} == {
        f"{n} steps after averaging" for n in (0, 2, 3)
    }
    assert len(rows) == 3 * 2 * 6
    table = costs([{"run": "text", "seed": seed} | r for seed in (1, 2) for r in rows])
    assert len(table.splitlines()) == 2 + 3 * 3 + 3
    assert "–" in next(line for line in table.splitlines() if "another batch" in line)


def test_a_crew_stands_still_for_as_long_as_any_of_its_stages_is_lost():
    assert still(0.16, 7.0) == pytest.approx(4 * 0.16 * 7 / 3600, rel=2e-3)
    assert still(3600.0, 1.0) == pytest.approx(0.8)
    assert "0.12%" in gains()
