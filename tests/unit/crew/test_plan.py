"""Blocks of layers for members: within memory, in proportion to speed, no further than it pays."""

import math
from itertools import combinations, pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.stages.crew import make_plan, plan_crew
from swarmnode.stages.wire import (
    Capacity,
    MembershipSettings,
    ModelCost,
    Offer,
    PartCost,
    stage_memory,
    stage_parts,
)

NEAR = ((0.0,) * 8,) * 8


def model(layers, **more):
    return ModelCost(PartCost(0, 0), (PartCost(1, 1),) * layers, PartCost(0, 0), **more)


def near(count):
    return ((0.0,) * count,) * count


def test_faster_member_gets_more_layers():
    members = (Capacity(9, 1.0), Capacity(9, 2.0))
    plan = make_plan(model(6), members, near(2))
    assert dict(zip(plan.members, plan.layers, strict=True)) == {0: 2, 1: 4}


def test_memory_bounds_a_block_however_fast_its_member_is():
    plan = make_plan(model(6), (Capacity(2, 100.0), Capacity(9, 1.0)), near(2))
    assert dict(zip(plan.members, plan.layers, strict=True)) == {0: 2, 1: 4}


def test_ends_hold_embedding_and_head():
    cost = ModelCost(PartCost(3, 0), (PartCost(1, 1),) * 4, PartCost(3, 0))
    members = (Capacity(1, 1.0), Capacity(4, 1.0), Capacity(1, 1.0), Capacity(4, 1.0))
    plan = make_plan(cost, members, near(4))
    assert {plan.members[0], plan.members[-1]} == {1, 3}


def test_no_plan_without_memory():
    assert make_plan(model(6), (Capacity(2, 1.0), Capacity(3, 1.0)), near(2)) is None
    assert make_plan(model(6), (Capacity(9, 1.0),), near(1), 2) is None


def test_number_of_stages_is_as_asked_or_as_fast_as_can_be():
    eight = (Capacity(4.0, 1.0),) * 8
    cost = model(8, crossings=100.0)
    everywhere = tuple(tuple(0.05 * (a != b) for b in range(8)) for a in range(8))
    assert len(make_plan(cost, eight, NEAR).layers) == 8
    assert make_plan(cost, eight, everywhere).layers == (4, 4), "the fewest that hold it"
    assert len(make_plan(cost, eight, everywhere, 5).layers) == 5
    shorter = tuple(tuple(seconds / 16 for seconds in row) for row in everywhere)
    assert 2 < len(make_plan(cost, eight, shorter).layers) < 8


def test_member_alone_is_a_crew_of_one_where_lines_are_slow():
    everything = Capacity(1e9, 1e6, hop_seconds=1e3)
    plan = make_plan(model(4, crossings=1.0), (everything, everything), ((0.0, 9.0), (9.0, 0.0)))
    assert (plan.members, plan.layers) == ((0,), (4,))


capacities = st.lists(
    st.builds(Capacity, st.sampled_from([2.0, 4.0, 8.0]), st.sampled_from([0.5, 1.0, 3.0])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 12), capacities, st.integers(0, 3))
def test_every_plan_holds_all_layers_within_memory(layers, members, stages):
    cost = ModelCost(PartCost(1, 0), (PartCost(1, 1),) * layers, PartCost(1, 1))
    plan = make_plan(cost, tuple(members), near(len(members)), stages)
    if plan is None:
        return
    assert sum(plan.layers) == layers
    assert min(plan.layers) >= 1
    assert len(set(plan.members)) == len(plan.members) == (stages or len(plan.members))
    slowest = 0.0
    for stage, index in enumerate(plan.members):
        assert stage_memory(cost, plan.layers, stage) <= members[index].memory
        work = sum(part.work for part in stage_parts(cost, plan.layers, stage))
        slowest = max(slowest, work / members[index].speed)
    assert plan.seconds == slowest


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 6))
def test_equal_members_get_equal_blocks(layers, count):
    count = min(layers, count)
    plan = make_plan(model(layers), (Capacity(99, 1.0),) * count, near(count), count)
    assert max(plan.layers) == -(-layers // count)


def best_seconds(cost, members):
    """The slowest stage of the fastest plan there is; infinite without one."""
    best = math.inf
    for order in (o for size in range(1, 4) for o in permutations(members, size)):
        for cuts in combinations(range(1, len(cost.layers)), len(order) - 1):
            blocks = [b - a for a, b in pairwise((0, *cuts, len(cost.layers)))]
            stages = range(len(order))
            if all(stage_memory(cost, blocks, n) <= order[n].memory for n in stages):
                work = [sum(part.work for part in stage_parts(cost, blocks, n)) for n in stages]
                best = min(best, max(w / one.speed for w, one in zip(work, order, strict=True)))
    return best


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(3, 6), capacities.filter(lambda members: len(members) <= 3))
def test_crew_is_found_where_one_is_possible_and_is_at_most_twice_as_slow(layers, members):
    cost = ModelCost(PartCost(1, 0), (PartCost(1, 1),) * layers, PartCost(1, 1))
    best = best_seconds(cost, members)
    offers = {
        f"p{number}": Offer(b"m" * 32, one.memory, one.speed, 0.0)
        for number, one in enumerate(members)
    }
    found = [
        plan_crew(me, offers, cost, MembershipSettings(lost_seconds=120.0), 0.0) for me in offers
    ]
    slowest = math.inf
    for record in (plan.record for plan in found if plan is not None):
        blocks = [member.layers for member in record.members]
        seconds = [
            sum(part.work for part in stage_parts(cost, blocks, stage)) / offers[one.peer].speed
            for stage, one in enumerate(record.members)
        ]
        slowest = min(slowest, max(seconds))
    assert (best == math.inf) == (slowest == math.inf)
    assert best == math.inf or slowest <= 2 * best
