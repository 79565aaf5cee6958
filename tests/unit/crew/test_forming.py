"""Plans of crews from offers."""

import time

from swarmnode.stages.crew_messages import HeldBlock, Offer, member_peers
from swarmnode.stages.network.crew_plan import newest_own_block, plan_crew
from swarmnode.stages.network.crew_state import MembershipSettings
from swarmnode.stages.specs import ModelCost, PartCost

MODEL, LINEAGE = b"m" * 32, b"l" * 32
COST = ModelCost(PartCost(0.0, 0.0), (PartCost(1.0, 1.0),) * 4, PartCost(0.0, 0.0))
WAITS = MembershipSettings(stages=4, discard_wait_seconds=10.0, base_wait_seconds=100.0)


def copy(stage, step, where="memory", *, lineage=LINEAGE, layers=(1, 1, 1, 1)) -> HeldBlock:
    return HeldBlock(lineage, layers, stage, step, where)


def offer(*copies, memory=1.0, speed=1.0) -> Offer:
    return Offer(MODEL, memory, speed, copies)


def plan(offers, waited=0.0, me="a", **more):
    return plan_crew(me, offers, COST, WAITS, waited, **more)


def four(*steps, where="memory"):
    return {
        name: offer(copy(stage, step, where))
        for stage, (name, step) in enumerate(zip("abcd", steps, strict=True))
    }


def without(offers, *names, **others):
    return {name: one for name, one in offers.items() if name not in names} | others


def members(found):
    return member_peers(found.record)


def test_untrained_nodes_begin_with_the_base():
    found = plan({name: offer() for name in "abcd"})
    assert found.record.step == 0
    assert sorted(members(found)) == list("abcd")
    assert plan({name: offer() for name in "abc"}) is None, "no room"


def test_crew_continues_at_its_newest_step_at_once():
    found = plan(four(9, 9, 9, 9))
    assert (found.record.step, found.record.lineage, found.lost) == (9, LINEAGE, ())
    assert members(found) == tuple("abcd")
    found = plan(four(9, 8, 9, 8))
    assert (found.record.step, found.lost) == (9, ()), "stages at n and n - 1 continue together"


def test_crew_returns_to_the_newest_step_that_copies_cover():
    offers = {
        name: offer(copy(stage, 9 if stage < 3 else 7), copy(stage, 7, "disk"))
        for stage, name in enumerate("abcd")
    }
    assert plan(offers, 9.0) is None, "the newer copy of `d` may be on its way"
    found = plan(offers, 10.0)
    assert (found.record.step, found.lost) == (7, ())


def test_lost_block_goes_to_the_spare_after_waiting():
    offers = without(four(9, 9, 9, 9), "d", spare=offer())
    assert plan(offers, 9.0) is None
    found = plan(offers, 10.0)
    assert (found.record.step, found.lost, members(found)) == (9, (3,), ("a", "b", "c", "spare"))
    assert plan(without(offers, "spare"), 99.0) is None, "no room"


def test_neighbours_checkpoints_serve_lost_blocks_only():
    offers = without(
        four(9, 9, 9, 9),
        "c",
        "d",
        c=offer(copy(2, 9), copy(3, 9, "neighbour")),
        e=offer(),
        f=offer(copy(3, 9, "neighbour")),
    )
    found = plan(offers, 10.0)
    assert (found.lost, members(found)) == ((3,), ("a", "b", "c", "f"))


def test_crew_cut_off_for_long_brings_everything_back():
    """150 seconds without network lost 340 steps once."""
    offers = four(340, 340, 340, 340)
    assert all(plan(without(offers, "d"), waited) is None for waited in (0.0, 11.0, 99.0))
    assert plan(offers, 150.0).record.step == 340


def test_base_comes_last():
    offers = {name: offer(copy(0, 9, layers=(1,)), memory=9.0) for name in "ab"}
    cost = ModelCost(PartCost(0.0, 0.0), (PartCost(1.0, 1.0),), PartCost(0.0, 0.0))
    waits = MembershipSettings(stages=1, base_wait_seconds=100.0)
    found = plan_crew("a", offers, cost, waits, 0.0)
    assert (found.record.step, members(found)) == (9, ("a",))
    lone = {"a": offer(copy(0, 9))}
    assert plan(lone, 99.0) is None
    assert plan({name: offer(copy(0, 9)) for name in "abcd"}, 101.0).record.step == 0


def test_untrained_nodes_wait_for_a_crew_that_can_continue():
    offers = without(four(9, 9, 9, 9), "d", **{name: offer() for name in "defg"})
    assert plan(offers, 0.0, me="g") is None
    found = plan(offers, 10.0, me="d")
    assert found.record.step == 9
    elsewhere = {name: offer() for name in "defg"} | {"a": offer(copy(0, 9), memory=0.5)}
    assert plan(elsewhere, me="g").record.step == 0, "no room for what `a` has"


def test_free_node_joins_the_newest_lineage():
    other = b"x" * 32
    newer = {name: offer(copy(stage, 20, lineage=other)) for stage, name in enumerate("efgh")}
    offers = without(newer, "h", **four(9, 9, 9, 9), z=offer())
    assert plan(without(offers, "z"), 0.0).record.lineage == LINEAGE, "its own crew is complete"
    found = plan(without(offers, "a", "b", "c"), 10.0, me="d")
    assert (found.record.lineage, found.record.step) == (other, 20)
    assert plan(without(offers, "a", "b", "c"), 9.0, me="d") is None


def test_claims_of_one_peer_move_no_crew():
    liar = offer(*(copy(stage, 10**15) for stage in range(4)), memory=1e30, speed=1e30)
    offers = {**four(9, 9, 9, 9), "x": liar}
    assert plan(offers, 9.0) is None
    found = plan(offers, 10.0)
    assert (found.record.step, members(found)) == (9, tuple("abcd"))
    foreign = offer(*(copy(stage, 10**15, lineage=b"x" * 32) for stage in range(4)), memory=1e30)
    assert plan({**four(9, 9, 9, 9), "x": foreign}).record.lineage == LINEAGE


def test_many_claims_cost_little_to_plan():
    claims = [
        offer(*(copy(number % 4, 10 + number + 40 * peer) for number in range(32)))
        for peer in range(60)
    ]
    offers = {**four(9, 9, 9, 9), **{f"x{n}": one for n, one in enumerate(claims)}}
    began = time.process_time()
    plan(offers, 10.0)
    assert time.process_time() - began < 2.0


def test_plan_does_not_wait_for_a_peer_that_claims_all_memory():
    offers = {name: offer() for name in "abcd"} | {"x": offer(memory=1e30, speed=1e30)}
    found = plan_crew("a", offers, COST, MembershipSettings(base_wait_seconds=120.0), 0.0)
    assert "a" in members(found)


def test_holder_keeps_its_block_and_memory_precedes_disk():
    offers = {**four(9, 9, 9, 9, where="disk"), "e": offer(copy(3, 9))}
    assert members(plan(offers)) == ("a", "b", "c", "e")
    offers["e"] = offer(copy(3, 9), memory=0.5)
    assert members(plan(offers)) == tuple("abcd"), "it has no room"


def test_nearest_spare_is_taken_then_the_largest():
    offers = without(four(9, 9, 9, 9), "d", e=offer(speed=9.0), f=offer(), g=offer(speed=2.0))
    assert members(plan(offers, 10.0))[3] == "e"
    assert members(plan(offers, 10.0, distances={"e": 0.5, "g": 0.004}))[3] == "f"


def test_newest_copy_is_of_the_node_itself():
    assert newest_own_block([copy(0, 3, "disk"), copy(0, 4), copy(1, 9, "neighbour")]).step == 4
    assert newest_own_block([copy(1, 9, "neighbour")]) is None
