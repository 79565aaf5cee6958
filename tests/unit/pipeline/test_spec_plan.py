"""Specs name every tensor once (a tied embedding twice); plans are the best there are, within
memory."""

from itertools import pairwise, permutations, product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import ConfigError, Refused
from swarmnode.stages import wire
from swarmnode.stages.wire import (
    Capacity,
    ModelCost,
    Part,
    Plan,
    make_plan,
    model_cost,
    plan_apart,
    stage_specs,
)

CONFIG = SimpleNamespace(
    num_hidden_layers=4,
    tie_word_embeddings=True,
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=16,
    vocab_size=32,
)


def holders(specs, name):
    return [spec.index for spec in specs if spec.local(name) is not None]


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_names_go_there_and_back(prefix):
    names = [f"{prefix}model.layers.{i}.mlp.up_proj.weight" for i in range(4)] + [
        f"{prefix}model.norm.weight"
    ]
    specs = stage_specs(CONFIG, [1, 2, 1])
    for name in names:
        (holder,) = holders(specs, name)
        assert specs[holder].whole(specs[holder].local(name)) == name
    assert specs[1].local(names[2]) == f"{prefix}model.layers.1.mlp.up_proj.weight"


def test_a_tied_embedding_is_at_both_ends_and_an_untied_one_is_not():
    name = "model.embed_tokens.weight"
    specs = stage_specs(CONFIG, [1, 2, 1])
    assert holders(specs, name) == [0, 2]
    assert specs[2].local(name) == "lm_head.weight"
    assert specs[2].whole("lm_head.weight") == name
    untied = stage_specs(SimpleNamespace(**{**vars(CONFIG), "tie_word_embeddings": False}), [2, 2])
    assert holders(untied, name) == [0]
    assert holders(untied, "lm_head.weight") == [1]


@pytest.mark.parametrize("layers", [[], [4, 0], [2, 3], [5, -1]])
def test_layers_that_are_not_the_models_are_refused(layers):
    with pytest.raises(ConfigError, match="layers"):
        stage_specs(CONFIG, layers)


part = st.builds(Part, memory=st.integers(0, 6).map(float), work=st.integers(0, 6).map(float))
models = st.builds(
    ModelCost, embedding=part, layers=st.lists(part, min_size=1, max_size=4).map(tuple), head=part
)
capacity = st.builds(
    Capacity,
    st.integers(0, 20).map(float),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 1.0]),
)
capacities = st.lists(capacity, min_size=1, max_size=3)


def cost(model: ModelCost, members, order, blocks) -> float | None:
    """Seconds of the slowest stage, or None where it does not fit: written without the planner's
    tricks."""
    slowest, start = 0.0, 0
    for position, (index, block) in enumerate(zip(order, blocks, strict=True)):
        last = position == len(order) - 1
        parts = (
            list(model.layers[start : start + block])
            + [model.embedding] * (position == 0)
            + [model.head] * last
        )
        start += block
        if sum(p.memory for p in parts) > members[index].memory:
            return None
        slowest = max(
            slowest,
            sum(p.work for p in parts) / members[index].speed
            + (0 if last else members[index].hop_seconds),
        )
    return slowest


@settings(max_examples=150, deadline=None, derandomize=True)
@given(models, capacities)
def test_no_plan_is_faster_than_the_planners(model, members):
    count = len(model.layers)
    possible = [
        (seconds, len(order))
        for size in range(1, len(members) + 1)
        for order in permutations(range(len(members)), size)
        for blocks in product(range(1, count + 1), repeat=size)
        if sum(blocks) == count and (seconds := cost(model, members, order, blocks)) is not None
    ]
    if not possible:
        with pytest.raises(Refused):
            make_plan(model, members)
        return
    plan = make_plan(model, members)
    assert plan.slowest_seconds == cost(model, members, plan.members, plan.layers)
    assert (plan.slowest_seconds, len(plan.members)) == min(possible)


def test_a_member_that_holds_everything_alone_is_a_crew_of_one_when_hops_are_slow():
    model = model_cost(CONFIG, batch_tokens=16, cached_tokens=64)
    everything = Capacity(1e9, 1e6, hop_seconds=1e3)
    assert make_plan(model, [everything, everything]) == Plan(
        (0,), (4,), pytest.approx(make_plan(model, [everything]).slowest_seconds)
    )


def test_a_faster_member_gets_more_layers():
    model = ModelCost(Part(0, 0), (Part(1, 1),) * 6, Part(0, 0))
    assert make_plan(model, [Capacity(9, 1.0), Capacity(9, 2.0)]).layers == (2, 4)


def test_a_big_model_and_a_full_crew_are_planned_in_few_looks(monkeypatch):
    looks = []
    seconds = wire._Search.seconds
    monkeypatch.setattr(wire._Search, "seconds", lambda *args: looks.append(1) or seconds(*args))
    model = ModelCost(Part(1, 0), (Part(1.0, 1.0),) * 80, Part(1, 0.5))
    members = [Capacity(15.0 + 3 * i, 1.0 + i / 4, 0.01 * i) for i in range(8)]
    plan = make_plan(model, members)
    assert len(looks) < 100_000  # placing every block with every set of members is forty times that
    assert plan.slowest_seconds == cost(model, members, plan.members, plan.layers)
    assert sum(plan.layers) == 80
    # as fast as all together, but for one layer
    assert plan.slowest_seconds < 80.5 / sum(member.speed for member in members) + 1.0


def apart_by(places):
    """Seconds between members that stand at these seconds of a line."""
    return tuple(tuple(abs(one - other) for other in places) for one in places)


def test_as_many_stages_as_make_a_step_fastest_and_no_more_where_members_are_far_apart():
    model = ModelCost(Part(0, 0), (Part(1, 1),) * 8, Part(0, 0), crossings=100.0)
    eight = (Capacity(4.0, 1.0),) * 8
    everywhere = tuple(tuple(0.05 * (one != other) for other in range(8)) for one in range(8))
    assert len(plan_apart(model, eight, ((0.0,) * 8,) * 8).layers) == 8
    assert plan_apart(model, eight, everywhere).layers == (4, 4), "the fewest that hold it"
    near = tuple(tuple(seconds / 16 for seconds in row) for row in everywhere)
    stages = len(plan_apart(model, eight, near).layers)
    assert 2 < stages < 8, "a shorter way is worth some"
    times = {
        n: make_plan(model, eight[:n]).slowest_seconds + 100 * n * 0.05 / 16 for n in range(2, 9)
    }
    assert times[stages] == min(times.values())


def test_neighbours_in_the_crew_are_near_each_other():
    model = ModelCost(Part(0, 0), (Part(1, 1),) * 4, Part(0, 0), crossings=1.0)
    places = [0.0, 0.25, 0.001, 0.251]  # two here, two far away, as they come
    plan = plan_apart(model, (Capacity(1.0, 1.0),) * 4, apart_by(places), 4)
    assert plan.members in (
        (0, 2, 1, 3),
        (2, 0, 1, 3),
        (0, 2, 3, 1),
        (2, 0, 3, 1),
        (1, 3, 2, 0),
        (3, 1, 0, 2),
        (1, 3, 0, 2),
        (3, 1, 2, 0),
    )
    assert sum(abs(places[a] - places[b]) for a, b in pairwise(plan.members)) <= 0.252


@settings(max_examples=100, deadline=None, derandomize=True)
@given(models, capacities, st.lists(st.sampled_from([0.0, 0.1, 2.0]), min_size=3, max_size=3))
def test_an_order_for_the_way_s_sake_is_no_slower_and_has_the_shortest_way(model, members, places):
    apart = apart_by(places[: len(members)])
    try:
        fastest = make_plan(model, members, len(members))
    except Refused:
        return
    plan = plan_apart(model, tuple(members), apart, len(members))
    seconds = lambda order: cost(model, members, order, fastest.layers)
    way = lambda order: sum(apart[a][b] for a, b in pairwise(order))
    possible = [
        order
        for order in permutations(fastest.members)
        if (s := seconds(order)) is not None and s <= fastest.slowest_seconds
    ]
    assert plan.layers == fastest.layers, "crews that are cut alike can average"
    assert way(plan.members) == pytest.approx(min(map(way, possible)))
    assert seconds(plan.members) <= fastest.slowest_seconds
