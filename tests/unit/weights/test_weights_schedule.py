"""The schedule of outer steps, in training steps and tensor names."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.weights.fragments import due
from swarmnode.weights.schedule import LEAST_GAP, OuterSchedule

HELD = [["a0", "b0", "c0"], ["a1", "b1", "c1"]]
EVERY = 16


def took(schedule, fragment, names, step):
    """Take an outer step with a partner that has `names`. Return the names that took it."""
    taken = schedule.takes(fragment, names)
    taken = taken if schedule.leaves(fragment, taken) else HELD[fragment]
    schedule.stepped(fragment, taken, HELD[fragment], step)
    return taken


def test_complete_partners_leave_only_regular_fragments_due():
    schedule, seen = OuterSchedule(EVERY, 2), []
    for step in range(1, 65):
        if (fragment := schedule.due(step)) is not None:
            seen.append((step, fragment))
            took(schedule, fragment, HELD[fragment], step)
    assert seen == [(step, due(step, EVERY, 2)) for step in range(8, 65, 8)]


def test_missing_blocks_are_due_again_midway():
    schedule = OuterSchedule(24, 3)
    assert schedule.due(8) == 0
    took(schedule, 0, ["a0"], 9)
    assert schedule.left(0) == {"b0", "c0"}
    assert [schedule.due(step) for step in range(9, 13)] == [None, None, None, 0]
    assert took(schedule, 0, ["a0", "b0"], 13) == ["b0"], "what was averaged is not averaged again"
    assert schedule.left(0) == {"c0"}
    assert [schedule.due(step) for step in (14, 15)] == [None, None]
    assert schedule.due(16) == 1
    took(schedule, 1, HELD[1], 17)
    assert schedule.due(20) == 0, "and a third"
    assert took(schedule, 0, HELD[0], 21) == ["c0"]
    assert schedule.left(0) == frozenset()
    assert schedule.due(32) == 0, "the rest that came late makes the next outer step no later"


def test_blocks_without_a_partner_step_alone_next_time():
    schedule = OuterSchedule(EVERY, 2)
    took(schedule, 0, ["a0"], 9)
    assert not schedule.is_rest(0, ["a0"])
    assert took(schedule, 0, ["a0"], 14) == HELD[0]
    assert schedule.left(0) == frozenset()
    assert schedule.due(24) == 0


def test_leftover_blocks_rejoin_their_fragment():
    schedule = OuterSchedule(EVERY, 2)
    took(schedule, 0, ["a0"], 9)
    assert schedule.due(24) == 0
    assert schedule.left(0) == frozenset()
    assert schedule.takes(0, HELD[0]) == HELD[0]
    assert took(schedule, 0, ["a0"], 25) == HELD[0]
    assert took(schedule, 0, ["a0"], 40) == ["a0"]


def test_rest_of_the_next_fragment_is_not_due_alone():
    schedule = OuterSchedule(EVERY, 2)
    assert schedule.due(8) == 0
    took(schedule, 0, HELD[0], 9)
    took(schedule, 1, ["a1"], 10)
    # 1 was stepped a moment ago
    assert [schedule.due(step) for step in range(10, 17)] == [None] * 7
    assert schedule.due(20) == 1
    assert schedule.left(1) == {"b1", "c1"}


def test_of_a_policy_in_one_fragment_nothing_is_left():
    assert not OuterSchedule(EVERY, 1).leaves(0, ["a0"])


def test_seeks_one_partner_at_a_time():
    schedule = OuterSchedule(EVERY, 2)
    took(schedule, 0, ["a0"], 9)
    assert schedule.due(16) == 1
    assert schedule.due(20) is None
    took(schedule, 1, HELD[1], 20)
    assert schedule.due(24) == 0


@pytest.mark.parametrize(
    ("every", "leaves"), [(2 * LEAST_GAP, True), (2 * LEAST_GAP - 1, False), (1, False)]
)
def test_close_outer_steps_leave_no_rest(every, leaves):
    assert OuterSchedule(every, 2).leaves(0, ["a0"]) is leaves


DRAWS = st.lists(
    st.tuples(st.integers(0, 1), st.sets(st.sampled_from("abc"), min_size=1), st.booleans()),
    min_size=200,
    max_size=200,
)
"""At each step: who proposes, or has what is due, which fragment and what of it, and whether it
comes to anything."""


@given(st.integers(2 * LEAST_GAP, 60), DRAWS)
def test_at_most_one_extra_exchange_per_outer_step(every, draws):
    schedule, times = OuterSchedule(every, 2), []
    for step, (proposed, parts, comes) in enumerate(draws, 1):
        fragment = schedule.due(step)
        if fragment is not None:
            times.append((step, due(step, every, 2) is not None))
        if comes:  # a partner for what is due, or one that proposes by itself
            fragment = proposed if fragment is None else fragment
            took(schedule, fragment, [f"{part}{fragment}" for part in sorted(parts)], step)
    extra = [step for step, regular in times if not regular]
    assert all(later - earlier >= every // 2 for earlier, later in pairwise(extra))
    assert all(due(step - (every // 2 + 1) // 2, every, 2) is not None for step in extra)


@given(st.integers(2 * LEAST_GAP, 60), DRAWS)
def test_no_tensor_is_stepped_twice_or_skipped_twice(every, draws):
    # of each fragment: what took which outer step
    schedule, steps = OuterSchedule(every, 2), ([], [])
    for step, (fragment, parts, comes) in enumerate(draws, 1):
        schedule.due(step)
        if comes:
            names = [f"{part}{fragment}" for part in sorted(parts)]
            rest = schedule.is_rest(fragment, schedule.takes(fragment, names))
            taken = set(took(schedule, fragment, names, step))
            if rest:
                assert steps[fragment][-1].isdisjoint(taken)
                steps[fragment][-1] |= taken
            else:
                steps[fragment].append(taken)
    for fragment, outer_steps in enumerate(steps):
        assert all(one | next_one == set(HELD[fragment]) for one, next_one in pairwise(outer_steps))
