"""Crews under a seeded nemesis: nothing is learnt twice or lost, and nobody outside a crew ends
it."""

from collections import Counter

import msgspec
import pytest
from msgspec.structs import replace

from swarmnode.stages.crew import advance
from swarmnode.stages.wire import Fence, Offering
from tests.support.crew_history import Violation
from tests.support.nemesis import World, check

SCHEDULES = 40
FOUND = {
    "faults": (
        46,
        65,
        76,
        90,
        92,
        104,
        108,
        168,
        199,
        209,
        235,
        238,
        269,
        283,
        308,
        365,
        371,
        373,
        377,
        460,
        695,
        883,
        2137,
        2164,
        2177,
        20391,
        20416,
        21776,
        31388,
        60328,
    ),
    "calm": (83, 98, 238, 2041),
    "losses": (4605, 5007),
    "member": (
        51,
        52,
        60,
        71,
        82,
        86,
        87,
        97,
        104,
        120,
        125,
        133,
        134,
        147,
        160,
        181,
        191,
        195,
        401,
    ),
    "members": (5, 16, 17, 20, 22, 25, 30, 62, 392),
}
"""Schedules that found something once."""


@pytest.mark.parametrize("kind", ["faults", "calm"])
def test_every_schedule_ends_and_keeps_every_invariant(kind):
    steps = sum(check(seed, kind).counts["steps"] for seed in (*range(SCHEDULES), *FOUND[kind]))
    assert steps > 3 * SCHEDULES


def test_a_crew_goes_on_without_a_member_that_lies():
    for seed in (*range(20), *FOUND["member"]):
        assert check(seed, "member").counts["steps"] > 0


def test_a_crew_goes_on_without_two_members_that_lie_in_turn_or_around_an_honest_one():
    """Or one of them leads, and is as slow as it may be. With the rules of before none of these had
    an end within half an hour."""
    for seed in FOUND["members"]:
        assert check(seed, "members").counts["steps"] > 0


def test_strangers_that_offer_most_and_sign_nothing_keep_nobody_from_a_crew():
    for kind in ("calm", "member"):
        assert sum(check(seed, kind, greedy=True).counts["steps"] for seed in range(15)) > 15


def test_whatever_goes_down_the_crew_afterwards_begins_at_the_newest_step_that_is_somewhere():
    """Some cut off for a second to an hour, everybody killed at once, one disk of them gone, all
    members replaced one by one."""
    outages = Counter()
    for seed in (*range(20), *FOUND["losses"]):
        outages += check(seed, "losses").counts
    assert all(outages[how] > 1 for how in ("cut", "everybody", "disk", "replace"))


def test_nodes_that_offer_nothing_of_what_is_on_their_disks_lose_what_was_learnt():
    def forgetful(state, event, now, means):
        if isinstance(event, Offering):
            kept = tuple(copy for copy in event.copies if copy.where == "memory")
            event = msgspec.structs.replace(event, copies=kept)
        return advance(state, event, now, means)

    assert "begins at step 0" in first_violation(range(20), kind="losses", advance=forgetful)


def test_a_schedule_is_the_same_each_time():
    def story(seed):
        world, told = World(seed), []
        world.history.note = lambda now, what, *details: told.append((now, what, *details))
        world.run()
        return told

    assert story(7) == story(7)
    assert story(7) != story(8)


def test_messages_survive_their_encoding():
    for seed in range(5):
        check(seed, encode=True)


class LetsThePastIn(Fence):
    def check(self, place, sender, step):
        return None


def first_violation(seeds, **options):
    for seed in seeds:
        try:
            check(seed, **options)
        except Violation as error:
            return str(error)
    return ""


def test_a_fence_that_lets_the_past_in_is_found():
    assert "computes for a crew" in first_violation(range(400), fence_check=LetsThePastIn.check)


def test_nodes_that_forgive_at_once_are_held_up_for_ever():
    def forgiving(state, event, now, means):
        peers = {
            peer: replace(known, debt=0.0, barred_until=now) for peer, known in state.peers.items()
        }
        return advance(replace(state, peers=peers), event, now, means)

    assert "no end" in first_violation(FOUND["member"], kind="member", advance=forgiving)


def test_a_node_that_signs_whatever_it_is_asked_to_loses_what_was_learnt():
    def careless(state, event, now, means):
        offering = state.offering
        if offering is not None and offering.copies:
            state = replace(state, offering=msgspec.structs.replace(offering, copies=()))
        return advance(state, event, now, means)

    assert "could have been gone on from" in first_violation(range(400), advance=careless)
