"""Blocks of layers for the members of a new crew: within memory, in proportion to speed."""

from itertools import combinations, pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.stages.crew_messages import Offer, member_peers
from swarmnode.stages.network.crew_plan import assign_layers, plan_crew
from swarmnode.stages.network.crew_state import MembershipSettings
from swarmnode.stages.specs import ModelCost, PartCost, stage_memory

MODEL = b"m" * 32


def model(layers, ends=0.0):
    return ModelCost(PartCost(ends, 0), (PartCost(1, 1),) * layers, PartCost(ends, ends))


def offer(memory, speed=1.0):
    return Offer(MODEL, memory, speed)


def planned(offers, cost, stages=0, distances=None, me="a"):
    waits = MembershipSettings(base_wait_seconds=120.0, stages=stages)
    plan = plan_crew(me, offers, cost, waits, 0.0, distances or {})
    return None if plan is None else plan.record


def test_faster_member_gets_more_layers():
    assert assign_layers(model(6), [offer(9), offer(9, 2.0)]) == (2, 4)


def test_memory_bounds_a_block_however_fast_its_member_is():
    assert assign_layers(model(6), [offer(2, 100.0), offer(9)]) == (2, 4)


def test_model_that_does_not_fit_has_no_assignment():
    assert assign_layers(model(6), [offer(2), offer(3)]) is None
    assert assign_layers(model(2), [offer(9)] * 3) is None, "a member without a layer"


def test_ends_hold_embedding_and_head():
    offers = {name: offer(memory) for name, memory in zip("abcd", (4, 1, 1, 4), strict=True)}
    found = planned(offers, model(4, ends=3.0), stages=4)
    assert {member_peers(found)[0], member_peers(found)[-1]} == {"a", "d"}


def test_crew_has_the_fewest_stages_that_hold_the_model():
    offers = {name: offer(4) for name in "abcdefgh"}
    assert [member.layers for member in planned(offers, model(8)).members] == [4, 4]
    assert len(planned(offers, model(8), stages=5).members) == 5
    assert planned({"a": offer(4)}, model(8)) is None
    assert planned({"a": offer(9)}, model(8)).members[0].layers == 8


def test_crew_has_the_nearest_members_in_the_order_of_distance():
    offers = {name: offer(4) for name in "abcd"}
    distances = {"b": 0.3, "c": 0.001, "d": 0.05}
    assert member_peers(planned(offers, model(12), distances=distances)) == ("a", "c", "d")
    offers["c"] = offer(1)
    offers["d"] = offer(1)
    assert "b" in member_peers(planned(offers, model(8), distances=distances)), "it has the memory"


offers_of = st.lists(
    st.builds(offer, st.sampled_from([2.0, 4.0, 8.0]), st.sampled_from([0.5, 1.0, 3.0])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 12), offers_of)
def test_every_assignment_holds_all_layers_within_memory(layers, members):
    cost = model(layers, ends=1.0)
    assigned = assign_layers(cost, members)
    if assigned is None:
        return
    assert sum(assigned) == layers
    assert min(assigned) >= 1
    for stage, member in enumerate(members):
        assert stage_memory(cost, assigned, stage) <= member.memory


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 6))
def test_equal_members_get_equal_blocks(layers, count):
    count = min(layers, count)
    assert max(assign_layers(model(layers), [offer(99)] * count)) == -(-layers // count)


def is_possible(cost, members):
    """Return True if some order of some members can hold the model."""
    for order in (o for size in range(1, 4) for o in permutations(members, size)):
        for cuts in combinations(range(1, len(cost.layers)), len(order) - 1):
            ends = (0, *cuts, len(cost.layers))
            blocks = [b - a for a, b in pairwise(ends)]
            if all(
                stage_memory(cost, blocks, n) <= member.memory for n, member in enumerate(order)
            ):
                return True
    return False


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(3, 6), offers_of.filter(lambda members: len(members) <= 3))
def test_crew_is_found_where_one_is_possible(layers, members):
    cost = model(layers, ends=1.0)
    offers = {f"p{number}": one for number, one in enumerate(members)}
    found = [planned(offers, cost, me=me) for me in offers]
    assert is_possible(cost, members) == any(record is not None for record in found)
