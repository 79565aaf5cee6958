"""Which crew is founded from which offers: the newest step that copies cover, never the base while
something newer can be had."""

from types import MappingProxyType

import msgspec
import pytest
from msgspec.structs import replace

from swarmnode.stages import crew
from swarmnode.stages.crew import PLAUSIBLE, Point, is_behind, newest, plan_crew
from swarmnode.stages.wire import NO_HASH, Copy, ModelCost, Offer, Part, Settings, Taken, peers_of

MODEL, LINEAGE = b"m" * 32, b"l" * 32
COST = ModelCost(Part(0.0, 0.0), (Part(1.0, 1.0),) * 4, Part(0.0, 0.0))
WAITS = Settings(exact_seconds=10.0, lost_seconds=100.0)
TAKEN = Taken(1, 0.5, 1e-3)


def point(step, fork=b"") -> bytes:
    return (fork + step.to_bytes(8, "big")).rjust(32, b"h")


def copy(stage, step, where="memory", *, fork=b"", ready=b"", lineage=LINEAGE) -> Copy:
    return Copy(lineage, stage, stage + 1, step, point(step, fork), where, TAKEN, ready)


def offer(*copies, memory=1.0, speed=1.0) -> Offer:
    return Offer(MODEL, memory, speed, 0.0, copies)


def plan(offers, waited=0.0, me="a", **more):
    return plan_crew(me, offers, COST, replace(WAITS, stages=4), waited, **more)


def four(*steps, where="memory"):
    return {
        name: offer(copy(stage, step, where))
        for stage, (name, step) in enumerate(zip("abcd", steps, strict=True))
    }


def test_who_has_learnt_nothing_begins_with_the_base():
    found = plan({name: offer() for name in "abcd"})
    assert (found.record.step, found.record.previous, sorted(peers_of(found.record))) == (
        0,
        NO_HASH,
        list("abcd"),
    )
    assert not found.exact
    assert plan({name: offer() for name in "abc"}) is None


def test_everybody_at_one_step_goes_on_there_at_once():
    found = plan(four(9, 9, 9, 9))
    assert (found.record.step, found.record.previous, found.record.lineage, found.record.taken) == (
        9,
        point(9),
        LINEAGE,
        TAKEN,
    )
    assert peers_of(found.record) == tuple("abcd")
    assert found.exact


def test_a_step_that_some_took_is_taken_by_all_who_prepared_it():
    offers = four(9, 9, 9, 9)
    offers["d"] = offer(copy(3, 8, ready=point(9)))
    assert plan(offers).record.step == 9
    offers["d"] = offer(copy(3, 8, ready=point(9, b"x")))  # for another attempt of it
    assert plan(offers) is None


def test_an_older_copy_will_do_when_its_holder_s_own_does_not_come():
    offers = four(9, 9, 9, 9)
    del offers["d"]
    offers |= {"c": offer(copy(2, 9), copy(3, 5, "neighbour")), "spare": offer()}
    assert plan(offers, 9.0) is None, "its holder may be on its way back with all of it"
    found = plan(offers, 11.0)
    assert (found.record.step, peers_of(found.record), found.exact) == (
        9,
        ("a", "b", "c", "spare"),
        False,
    )


def test_all_go_back_together_rather_than_to_the_base():
    offers = {
        name: offer(copy(stage, 9 if stage < 2 else 7, "disk"), copy(stage, 5, "neighbour"))
        for stage, name in enumerate("abcd")
    }
    del offers["d"]
    offers["e"] = offer(copy(3, 5, "neighbour"))
    assert plan(offers, 11.0).record.step == 9  # the gate judges what is older
    alone = {
        name: offer(copy(stage, step, "disk"), *(copy(i, 4, "neighbour") for i in range(4)))
        for stage, (name, step) in enumerate(zip("abcd", (9, 8, 7, 6), strict=True))
    }
    assert plan(alone, 11.0) is None, "what is newer may yet be completed"
    assert plan(alone, 21.0).record.step == 4


def test_a_block_that_nobody_has_is_fetched_from_another_crew_or_made_anew_in_the_end():
    offers = four(9, 9, 9, 9)
    offers["c"] = offer()  # it came back without its disk, and its neighbours have no copy yet
    assert plan(offers, 39.0) is None
    found = plan(offers, 41.0)
    assert (found.record.step, peers_of(found.record), found.exact) == (9, tuple("abcd"), False)


def test_one_who_was_cut_off_for_long_brings_everything_back():
    """150 seconds without network lost 340 steps once."""
    offers = four(340, 340, 340, 340)
    last = offers.pop("d")
    for waited in (0.0, 11.0, 21.0, 99.0):
        assert plan(offers, waited) is None, "three of four, and nobody who has room"
    assert plan({**offers, "d": last}, 150.0).record.step == 340


def test_the_base_comes_last():
    offers = {name: offer(copy(0, 9), memory=4.0) for name in "ab"}
    assert plan_crew("a", offers, COST, replace(WAITS, stages=1), 99.0) is None
    assert plan_crew("a", offers, COST, replace(WAITS, stages=1), 101.0).record.step == 0


def test_nobody_believes_a_single_other_node():
    absurd = offer(*(copy(stage, 10**15, fork=b"x") for stage in range(4)), memory=1e30, speed=1e30)
    assert plan({**four(9, 9, 9, 9), "x": absurd}).record.step == 9
    other = offer(*(copy(stage, 10**15, lineage=b"x" * 32) for stage in range(4)), memory=1e30)
    assert plan({**four(9, 9, 9, 9), "x": other}).record.lineage == LINEAGE
    ours = four(9, 9, 9, 9)
    del ours["d"]
    assert plan({**ours, "x": absurd}, 50.0) is None


def claims(memory):
    """Of one that has been everywhere: old copies of everything, and many newer points."""
    newer = (copy(0, 10 + number, fork=b"x") for number in range(24))
    return offer(*(copy(stage, 5, fork=b"x") for stage in range(4)), *newer, memory=memory)


@pytest.mark.parametrize("me", ["a", "e"])
@pytest.mark.parametrize("memory", [1e-9, 1.0])
def test_a_stranger_s_many_claims_cost_little_to_look_at(monkeypatch, me, memory):
    asked = []
    monkeypatch.setattr(crew, "is_behind", lambda *about: asked.append(about) or is_behind(*about))
    offers = {**four(9, 9, 9, 9), "e": offer(), "x": claims(memory)}
    del offers["d"]
    for waited in (0.0, 20.0, 60.0):
        plan(offers, waited, me=me)
    assert len(asked) < 60


def test_who_has_no_room_keeps_nobody_from_a_crew_by_what_it_claims_to_have():
    offers = {**four(9, 9, 9, 9), "e": offer()}
    del offers["d"]
    assert plan({**offers, "x": claims(1e-9)}, 41.0).record == plan(offers, 41.0).record


def test_forks_do_not_mix():
    offers = {
        name: offer(copy(stage, 9, fork=b"x" if stage < 2 else b"y"))
        for stage, name in enumerate("abcd")
    }
    assert plan(offers, 99.0) is None


def test_a_stage_goes_where_it_fits_and_where_it_can_be_had():
    offers = four(9, 9, 9, 9)
    offers["d"] = offer(copy(3, 9), memory=0.5)
    offers["e"] = offer()
    assert plan(offers) is None, (
        "whoever has it has no room for it, and is in no crew that it could be fetched in"
    )
    offers["e"] = offer(copy(3, 9, "neighbour"))
    assert peers_of(plan(offers).record) == ("a", "b", "c", "e")
    offers["f"] = offer(copy(3, 9, "disk"))
    assert peers_of(plan(offers).record)[3] == "f", "its own goes before what was kept for somebody"


def test_of_two_that_would_do_equally_well_the_one_that_has_worked_with_us_is_taken():
    assert "a" in peers_of(plan({name: offer() for name in "abcdx"}, ranks={"x": 1}).record)
    for rank in (0, 1):
        offers = {**four(9, 9, 9, 9), "e": offer(copy(3, 9))}
        assert peers_of(plan(offers, ranks={"d": rank, "e": 1 - rank}).record)[3] == (
            "e" if rank else "d"
        )
        assert "x" not in peers_of(
            plan({name: offer() for name in "abcdx"}, ranks={"x": 1 + rank}).record
        )


def test_a_stranger_that_claims_everything_is_no_head_where_somebody_else_has_it():
    stranger = offer(*(copy(stage, 9) for stage in range(4)))
    ours = {
        name: offer(copy(stage, 9), copy((stage - 1) % 4, 9, "neighbour"))
        for stage, name in enumerate("abc")
    }
    assert peers_of(plan({**ours, "x": stranger}, ranks={"x": 1}).record) == ("a", "b", "c", "x")
    del ours["c"]
    ours["d"] = offer(copy(0, 9, "disk"))
    del ours["a"]
    assert peers_of(
        plan({**ours, "c": offer(copy(2, 9)), "x": stranger}, me="b", ranks={"x": 1}).record
    ) == ("d", "b", "c", "x")


def test_however_many_strangers_claim_copies_in_memory_those_who_are_known_are_considered():
    offers = {
        **four(9, 9, 9, 9, where="disk"),
        **{f"x{number}": offer(*(copy(stage, 9) for stage in range(4))) for number in range(16)},
    }
    ranks = {peer: int(peer.startswith("x")) for peer in offers}
    assert peers_of(plan(offers, ranks=ranks).record) == tuple("abcd")


def test_who_would_hold_all_layers_alone_may_and_nobody_waits_for_it():
    """Its claims would be the fastest crew for ever, and one that it never founds."""
    big = offer(memory=1e30, speed=1e30)
    assert peers_of(begins({}, more={"x": big}).record) == peers_of(begins({}).record)
    learnt = {"a": offer(copy(0, 9, "disk"), memory=4.0), "x": offer(copy(0, 9), memory=4.0)}
    cost = ModelCost(Part(0.0, 0.0), (Part(1.0, 1.0),), Part(0.0, 0.0))
    assert peers_of(
        plan_crew("a", learnt, cost, replace(WAITS, stages=1), 0.0, ranks={"a": 1}).record
    ) == ("a",)


def test_members_keep_stages_and_a_newcomer_gets_the_free_one():
    """A stage that moves is a stage that has to be restored."""
    for lost in range(4):
        for where in ("memory", "disk"):
            kept = {
                stage: [copy((stage + i) % 4, 9, "neighbour") for i in (1, 3)] for stage in range(4)
            }
            offers = {
                name: offer(copy(stage, 9, where), *kept[stage])
                for stage, name in enumerate("abcd")
                if stage != lost
            }
            offers["spare"] = offer()
            members = tuple("spare" if stage == lost else name for stage, name in enumerate("abcd"))
            for me in offers:  # each knows those that it has worked with, and itself
                others = [peer for peer in offers if peer != me]
                ranks = {peer: 1 if "spare" in (me, peer) else 0 for peer in others}
                assert peers_of(plan(offers, me=me, ranks=ranks).record) == members
                assert (
                    peers_of(plan(offers, me=me, ranks={**ranks, others[0]: 30}).record) == members
                ), "also one that is in debt"


def test_an_older_copy_is_worth_nothing_where_an_exact_one_can_be_fetched():
    """A stranger claims old steps of every stage, for nothing; who has worked with us has lost its
    disk."""
    ours = {
        name: offer(copy(stage, 9), copy((stage + 1) % 4, 9, "neighbour"))
        for stage, name in enumerate("abc")
    }
    stranger = offer(*(copy(stage, 7, fork=b"x") for stage in range(4)), speed=1e9)
    found = plan({**ours, "d": offer(), "x": stranger}, ranks={"x": 1})
    assert peers_of(found.record) == tuple("abcd")


def test_what_one_node_alone_still_has_is_gone_on_from_by_those_who_have_nothing():
    offers = {
        "a": offer(copy(0, 9), *(copy(stage, 9, "neighbour") for stage in (1, 2, 3))),
        **{name: offer() for name in "bcd"},
    }
    assert plan(offers, 39.0) is None, "it may be a claim: others who were there may come"
    assert plan(offers, 41.0).record.step == 9
    assert is_behind([], as_point(9), 1, 4, 39.0, WAITS)
    assert not is_behind([], as_point(9), 1, 4, 41.0, WAITS)
    assert is_behind([], as_point(9), 0, 4, 41.0, WAITS)
    mine = copy(0, 5)
    assert is_behind([mine], as_point(9), 1, 4, 39.0, WAITS), "who has learnt something wants two"
    assert not is_behind([mine], as_point(5 + PLAUSIBLE), 1, 4, 41.0, WAITS), (
        "and has little to lose with one"
    )
    assert is_behind([mine], as_point(5 + PLAUSIBLE + 1), 1, 4, 41.0, WAITS)
    assert is_behind([copy(0, 5, lineage=b"x" * 32)], as_point(9), 1, 4, 41.0, WAITS)


def test_what_one_node_alone_still_has_goes_before_what_one_has_that_is_a_step_behind():
    """All were killed at once; one lost its disk, and the last step was not yet on another's."""
    kept = lambda step, *stages: (copy(stage, step, "neighbour") for stage in stages)
    offers = {"a": offer(copy(0, 9, "disk"), *kept(9, 1, 2, 3)), "b": offer(), "c": offer()}
    offers["d"] = offer(copy(3, 8, "disk"), *kept(5, 0, 1, 2))
    assert {plan(offers, 41.0, me=me).record.step for me in offers} == {9}
    assert [plan(offers, 39.0, me=me) for me in offers] == [None] * 4


def test_who_was_cut_off_for_long_proposes_what_it_would_sign():
    """One of two went on without it, far beyond what a single node is believed, and is here alone
    now."""
    cost = ModelCost(Part(0.0, 0.0), (Part(1.0, 1.0),) * 2, Part(0.0, 0.0))
    far = 9 + PLAUSIBLE + 1
    offers = {
        "a": offer(copy(0, far, "disk"), copy(1, far, "neighbour")),
        "b": offer(copy(1, 9), copy(0, 9, "neighbour")),
    }
    step = lambda me, waited: (
        plan_crew(me, offers, cost, replace(WAITS, stages=2), waited).record.step
    )
    assert step("b", 99.0) == 9
    assert step("b", 101.0) == step("a", 101.0) == far


def test_who_would_not_be_together_is_not_put_together():
    offers = {**four(9, 9, 9, 9), "e": offer(copy(1, 9, "disk"))}
    assert peers_of(plan(offers).record) == tuple("abcd")
    offers["c"] = msgspec.structs.replace(offers["c"], without=("b",))
    assert peers_of(plan(offers).record) == ("a", "e", "c", "d")
    del offers["e"]
    assert plan(offers) is None
    fresh = {name: offer() for name in "abcde"}
    fresh["c"] = msgspec.structs.replace(fresh["c"], without=("e",))
    found = peers_of(plan(fresh).record)
    assert not {"c", "e"} <= set(found)


def test_nobody_is_named_who_would_have_to_refuse():
    """A newcomer wants the word of two; who has learnt more does not go back at once."""
    claims = {
        "a": offer(copy(0, 9)),
        "b": offer(copy(1, 7), copy(1, 9, "disk")),
        "c": offer(),
        "d": offer(copy(3, 7)),
    }
    assert plan({**claims, "a": offer(copy(0, 90)), "b": offer(copy(1, 8))}, 50.0) is None
    ahead = {
        **four(9, 9, 9, 9),
        "d": offer(copy(3, 11), copy(3, 9, "neighbour")),
        "e": offer(copy(3, 9, "neighbour")),
    }
    assert peers_of(plan(ahead).record) == ("a", "b", "c", "e")
    own = [copy(0, 9)]
    assert is_behind([], as_point(9), 1, 3, 0.0, WAITS)
    assert not is_behind([], as_point(9), 2, 3, 0.0, WAITS)
    assert not is_behind([], as_point(9), 1, 2, 0.0, WAITS)
    assert is_behind(own, as_point(9 + PLAUSIBLE + 1), 1, 2, 0.0, WAITS)
    assert not is_behind(own, as_point(9 + PLAUSIBLE), 1, 2, 0.0, WAITS)
    assert not is_behind(own, as_point(9), 0, 4, 0.0, WAITS)


def as_point(step):
    return Point(LINEAGE, step, point(step), TAKEN)


def test_who_has_learnt_nothing_waits_for_those_who_have_while_they_could_go_on():
    offers = four(9, 9, 9, 9)
    del offers["d"]
    offers |= {name: offer() for name in "defg"}
    offers["c"] = offer(copy(2, 9), copy(3, 5, "neighbour"))
    assert plan(offers, me="g") is None, (
        "among themselves they are four: then three would never get a fourth"
    )
    assert plan(offers, 11.0, me="g") is not None
    assert plan({name: offers[name] for name in "adefg"}, me="g").record.step == 0, (
        "of one alone nothing can be gone on from"
    )


def test_the_newest_of_a_node_is_its_own():
    assert newest([copy(0, 3, "disk"), copy(0, 4), copy(1, 9, "neighbour")]).step == 4
    assert newest([copy(1, 9, "neighbour")]) is None


def begins(
    distances, *, me="a", names="abcdefgh", crossings=100.0, hops=(), more=MappingProxyType({})
):
    cost = ModelCost(Part(0.0, 0.0), (Part(1.0, 1.0),) * 8, Part(0.0, 0.0), crossings=crossings)
    offers = {name: Offer(MODEL, 4.0, 1.0, dict(hops).get(name, 0.0)) for name in names}
    return plan_crew(me, {**offers, **more}, cost, WAITS, 0.0, distances=distances)


def test_a_crew_is_begun_with_those_nearby_and_no_more_of_them_than_pays():
    assert len(peers_of(begins({}).record)) == 8
    far = dict.fromkeys("bcdefgh", 0.05)
    assert len(peers_of(begins(far).record)) == 2
    assert set(peers_of(begins(far | {"f": 0.002}).record)) == {"a", "f"}
    assert begins(far).turns == tuple(sorted(peers_of(begins(far).record))), (
        "whose turn it is does not hang on what each has measured"
    )


def test_one_that_answers_late_or_claims_a_slow_line_moves_nobody_but_itself():
    usual = dict.fromkeys("bcdefgh", 0.002)
    assert len(peers_of(begins(usual).record)) == 8
    assert begins(usual | {"h": 9.9}).record == begins(usual, names="abcdefg").record
    others = dict.fromkeys("abcdefg", 0.002)
    slow = begins(usual, hops=others | {"h": 1e30}).record
    assert slow == begins(usual, hops=others | {"h": 10.0}).record, (
        "a claim beyond all bounds is one of ten seconds"
    )
    assert set("abcdefg") <= set(peers_of(slow))


def test_those_in_one_place_are_neighbours():
    cost = ModelCost(Part(0.0, 0.0), (Part(1.0, 1.0),) * 4, Part(0.0, 0.0), crossings=1.0)
    offers = {name: offer() for name in "abcd"}
    found = plan_crew(
        "a",
        offers,
        cost,
        replace(WAITS, stages=4),
        0.0,
        distances={"b": 0.064, "c": 0.001, "d": 0.064},
    )
    order = peers_of(found.record)
    assert abs(order.index("a") - order.index("c")) == 1 == abs(order.index("b") - order.index("d"))


def test_of_two_spares_the_one_with_the_better_line_is_taken_and_all_members_plan_the_same():
    offers = four(9, 9, 9, 9)
    del offers["d"]
    offers |= {
        "c": offer(copy(2, 9), copy(3, 9, "neighbour")),
        "e": Offer(MODEL, 1.0, 9.0, 0.2),
        "f": Offer(MODEL, 1.0, 1.0, 0.01),
    }
    assert {
        peers_of(plan(offers, me=me, distances={"e": 0.001, "f": 0.5}).record) for me in "abc"
    } == {("a", "b", "c", "f")}


def test_crews_are_cut_alike_although_each_has_measured_something_else():
    cuts = set()
    for number in range(8):
        hops = {name: 0.004 * (1 + (number >> i & 1)) for i, name in enumerate("abc")}
        near = {name: 0.003 * (1 + (number >> i & 1) * 3) for i, name in enumerate("bc")}
        found = begins(near, names="abc", hops=hops, crossings=0.01).record
        cuts.add(tuple(member.layers for member in found.members))
    assert len(cuts) == 1
    slow = begins({}, names="abc", hops={"a": 0.01, "b": 0.01, "c": 4.0}).record
    assert peers_of(slow)[-1] == "c", "which sends nothing on"
