"""The outer rule against the paper's algebra, and the steps of one replica."""

import math

import pytest
import torch

from swarmnode.errors import StateError
from swarmnode.weights.rule import MAX_LAG, Rule, mixing_weight, next_outer_step, too_far_behind
from swarmnode.weights.trainer.outer import OuterState, host_copy, prepare
from tests.support.outer_rules import average, blend, outer_step, outer_step_of_two_tensors


def replica(seed, size=50):
    rng = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(size, generator=rng),
        "b.weight": torch.randn(3, 4, generator=rng),
    }


def inner_steps(parameters, rng):
    for p in parameters.values():
        p.add_(0.1 * torch.randn(p.shape, generator=rng))


def pairs(count, rng):
    order = torch.randperm(count, generator=rng).tolist()
    return list(zip(order[::2], order[1::2], strict=True))


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.7), (0.3, 0.5), (0.0, 1.0)])
def test_one_tensor_gives_what_the_paper_gets_from_two(alpha, beta):
    one, two = [replica(i) for i in range(4)], [replica(i) for i in range(4)]
    states_one = [OuterState(r, Rule(alpha, beta)) for r in one]
    states_two = [OuterState(r, Rule(alpha, beta)) for r in two]
    rng_one, rng_two = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    for round_ in range(10):
        for a, b in zip(one, two, strict=True):
            inner_steps(a, rng_one)
            inner_steps(b, rng_two)
        for i, j in pairs(4, torch.Generator().manual_seed(round_)):
            thetas, phis = (
                [host_copy(two[k]) for k in (i, j)],
                [dict(states_two[k].phi) for k in (i, j)],
            )
            ours = [host_copy(one[k]) for k in (i, j)]
            for k in (i, j):
                outer_step(states_one[k], average(ours))
                states_one[k].merge_parameters(one[k], host_copy(one[k]))
                outer_step_of_two_tensors(states_two[k], average(thetas), average(phis))
                states_two[k].merge_parameters(two[k], host_copy(two[k]))
    for a, b in zip(one, two, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-5)


def test_unshared_tensor_keeps_its_momentum():
    mine = replica(1)
    state = OuterState(mine)
    outer_step(state, blend(host_copy(mine), replica(2)))
    state.merge_parameters(mine, host_copy(mine))
    momentum, phi = state.delta["b.weight"], dict(state.phi)
    assert bool(momentum.any())
    inner_steps(mine, torch.Generator().manual_seed(0))
    theta = host_copy(mine)
    mean = {"a.weight": blend(theta, replica(3))["a.weight"]}
    assert state.take(prepare(state.rule, state.slow(list(mine)), mean, theta))
    assert torch.equal(state.phi["b.weight"], theta["b.weight"])
    assert state.delta["b.weight"] is momentum
    expected = 0.7 * (mean["a.weight"] - phi["a.weight"]) + 0.5 * (
        phi["a.weight"] - replica(1)["a.weight"]
    )
    torch.testing.assert_close(state.delta["a.weight"], expected, rtol=0, atol=1e-5)
    state.merge_parameters(mine, theta)
    assert torch.equal(mine["b.weight"], theta["b.weight"])
    assert torch.equal(mine["a.weight"], state.phi["a.weight"])


def test_steps_taken_while_the_bytes_travelled_are_kept():
    mine = replica(1)
    state = OuterState(mine)
    snapshot = host_copy(mine)
    moved = {"a.weight": torch.zeros(50), "b.weight": torch.zeros(3, 4)}
    moved["a.weight"][:10] = 0.25
    for n, p in mine.items():
        p.add_(moved[n])
    outer_step(state, blend(snapshot, replica(2)))
    state.merge_parameters(mine, snapshot)
    torch.testing.assert_close(mine["a.weight"][:10], state.phi["a.weight"][:10] + 0.25)
    # bit by bit where nothing moved
    assert torch.equal(mine["a.weight"][10:], state.phi["a.weight"][10:])
    assert torch.equal(mine["b.weight"], state.phi["b.weight"])


def test_unmoved_weights_become_phi():
    mine = {"a": 1e-3 * torch.randn(50)}
    state = OuterState(mine)
    mine["a"].add_(1000.0 * torch.randn(50))
    snapshot = host_copy(mine)
    outer_step(state, {"a": 1e-3 * torch.randn(50)})
    phi = state.phi["a"]
    assert not torch.equal(snapshot["a"] + (phi - snapshot["a"]), phi)  # which is why
    state.merge_parameters(mine, snapshot)
    assert torch.equal(mine["a"], phi)


def test_outer_step_repairs_a_nan():
    mine = replica(1)
    state = OuterState(mine)
    snapshot = host_copy(mine)
    mine["a.weight"][3] = math.nan
    mine["b.weight"][0, 0] = math.inf
    outer_step(state, snapshot)
    state.merge_parameters(mine, snapshot)
    assert all(bool(torch.isfinite(p).all()) for p in mine.values())
    assert mine["a.weight"][3] == state.phi["a.weight"][3]


def test_a_step_that_would_not_be_finite_changes_nothing():
    mine = replica(1)
    state = OuterState(mine)
    before = {n: t.clone() for n, t in state.tensors().items()}
    bad = host_copy(mine)
    # the second tensor: the first must not have been stepped either
    bad["b.weight"][0, 0] = math.inf
    with pytest.raises(ValueError, match="finite"):
        outer_step(state, bad)
    with pytest.raises(ValueError, match="no tensor"):
        outer_step(state, {"a.weight": torch.zeros(7)})
    assert all(torch.equal(t, before[n]) for n, t in state.tensors().items())


def test_bfloat16_weights_have_float32_slow_weights():
    mine = {"a": torch.randn(20, dtype=torch.bfloat16)}
    state = OuterState(mine)
    assert state.phi["a"].dtype == torch.float32
    start = host_copy(mine)
    for _ in range(40):  # each step is far below what bfloat16 can show; their sum is not
        outer_step(state, {"a": state.phi["a"] + 1e-4 * start["a"].sign()})
        state.merge_parameters(mine, host_copy(mine))
    assert mine["a"].dtype == torch.bfloat16
    assert bool(((state.phi["a"] - start["a"]).abs() > 2e-3).all())


def test_a_state_of_another_policy_is_refused():
    state = OuterState(replica(1))
    with pytest.raises(StateError, match="another policy"):
        state.load({**state.tensors(), "phi.a.weight": torch.zeros(3)})


def test_lagging_partner_weighs_less_and_leading_no_more():
    assert [mixing_weight(lag) for lag in (-3.0, 0.0, 1.0, 3.0)] == [0.5, 0.5, 0.25, 0.125]
    assert not too_far_behind(MAX_LAG)
    assert too_far_behind(MAX_LAG + 0.5)


def test_counters_meet_and_a_liar_moves_one_by_one():
    assert [next_outer_step(5, theirs) for theirs in (None, 5, 2, 2**60)] == [6, 6, 6, 7]
