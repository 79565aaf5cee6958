"""What a curriculum asks next, and what peers' word can and cannot do to that. pytest
tests/unit/rl/test_curricula.py"""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.rl.curricula import (
    EXPLORE,
    HINTS_MOST,
    MEMORY,
    PEER_MOST,
    PEERS,
    Bucket,
    Curriculum,
    useful_chance,
)

EASY, GOOD, HARD = Bucket("rg/gcd", 0), Bucket("rg/gcd", 1), Bucket("rg/lcm", 5)
HALF, RARE = (1.0, 0.0) * 4, (1.0,) + (0.0,) * 7


def drawn(curriculum, count=2000, seed=0):
    rng = random.Random(seed)
    return Counter(curriculum.choose(rng) for _ in range(count))


def weight(curriculum, bucket):
    alpha, beta = curriculum.posterior(bucket)
    return alpha + beta - 2.0


def test_of_nothing_known_all_buckets_are_asked_alike():
    counts = drawn(Curriculum([EASY, GOOD, HARD, GOOD]))
    assert set(counts) == {EASY, GOOD, HARD}
    assert max(counts.values()) < 1.2 * min(counts.values())


def test_the_bucket_with_signals_is_asked_most_and_the_others_go_on_being_asked():
    curriculum = Curriculum([EASY, GOOD, HARD])
    for _ in range(20):
        for bucket in (EASY, GOOD, HARD):
            curriculum.own(bucket, bucket == GOOD)
    counts = drawn(curriculum)
    assert counts[GOOD] > 0.8 * 2000
    assert min(counts[EASY], counts[HARD]) > 0.7 * 2000 * EXPLORE / 3


def test_where_most_buckets_are_too_hard_another_one_is_expected_to_be():
    buckets = [Bucket("rg/gcd", difficulty) for difficulty in range(16)]
    curriculum = Curriculum(buckets)
    assert curriculum.posterior(buckets[-1]) == (1.0, 1.0)
    for bucket in buckets[:8]:
        curriculum.own(bucket, bucket == buckets[0])
    assert curriculum.expected()[buckets[-1]] == pytest.approx((1 + 1) / (2 + 8))
    assert drawn(curriculum)[buckets[0]] > 0.2 * 2000, (
        "one that taught is asked again before all others were tried"
    )


def test_the_same_generator_makes_the_same_choices():
    one, other = Curriculum([EASY, GOOD, HARD]), Curriculum([HARD, GOOD, EASY])
    first, second = random.Random(7), random.Random(7)
    assert [one.choose(first) for _ in range(50)] == [other.choose(second) for _ in range(50)]


def test_what_was_mastered_long_ago_is_forgotten():
    curriculum = Curriculum([EASY, GOOD])
    for _ in range(100):
        curriculum.own(EASY, True)
    assert weight(curriculum, EASY) < 1.0 / (1.0 - MEMORY) + 1e-6
    for _ in range(30):
        curriculum.own(EASY, False)
    assert curriculum.expected()[EASY] < 0.2


def test_peers_groups_say_where_signals_are():
    curriculum = Curriculum([EASY, GOOD, HARD])
    for peer in "abcd":
        curriculum.hint(peer, GOOD, HALF)
        # a thousandth of partial credit: hardly ever a signal
        curriculum.hint(peer, HARD, (0.01,) + (0.0,) * 7)
    expected = curriculum.expected()
    assert expected[GOOD] > expected[EASY] == 0.5 > expected[HARD]
    curriculum.own(GOOD, True)
    evidence = curriculum.evidence()
    assert evidence[GOOD] == pytest.approx((1.0, 1.0)), (
        "one of its own, and four peers' at a quarter each"
    )
    assert evidence[EASY] == (0.0, 0.0)


def test_one_peer_counts_a_quarter_of_two_own_groups_whatever_it_sends():
    curriculum = Curriculum([GOOD, HARD])
    for _ in range(10_000):
        curriculum.hint("liar", HARD, HALF)
    assert weight(curriculum, HARD) == pytest.approx(PEER_MOST)
    curriculum.own(HARD, False)
    curriculum.own(HARD, False)
    assert curriculum.expected()[HARD] < 0.5


def test_a_peer_whose_word_was_tried_and_came_to_nothing_is_heeded_less():
    buckets = [Bucket("rg/gcd", difficulty) for difficulty in range(16)]
    curriculum = Curriculum(buckets)
    for bucket in buckets[:8]:
        curriculum.hint("liar", bucket, HALF)
        curriculum.own(bucket, False)
    for bucket in buckets[8:12]:
        curriculum.hint("honest", bucket, HALF)
        curriculum.own(bucket, True)
    before = curriculum.expected()[buckets[15]]
    curriculum.hint("liar", buckets[13], HALF)
    curriculum.hint("honest", buckets[14], HALF)
    said_by_liar, said_by_honest = (
        curriculum.posterior(buckets[13])[0],
        curriculum.posterior(buckets[14])[0],
    )
    untold = curriculum.posterior(buckets[15])[0]
    assert 0 < said_by_liar - untold < 0.5 * (said_by_honest - untold)
    assert curriculum.expected()[buckets[15]] == before, "nobody spoke of it"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 500), st.sampled_from([EASY, GOOD, HARD]), st.sampled_from([HALF, RARE])
        ),
        max_size=300,
    )
)
def test_any_number_of_peers_count_two_own_groups_at_most(hints):
    curriculum = Curriculum([EASY, GOOD, HARD])
    for peer, bucket, rewards in hints:
        curriculum.hint(f"peer {peer}", bucket, rewards)
    assert all(weight(curriculum, bucket) <= HINTS_MOST + 1e-9 for bucket in (EASY, GOOD, HARD))


def test_whatever_liars_say_every_bucket_keeps_its_share_of_exploration():
    curriculum = Curriculum([EASY, GOOD, HARD])
    for _ in range(10):
        curriculum.own(GOOD, True)
        curriculum.own(HARD, False)
        for liar in range(50):
            curriculum.hint(f"liar {liar}", HARD, HALF)
    counts = drawn(curriculum)
    assert counts[GOOD] > 3 * counts[HARD]  # own evidence outweighs fifty of them
    assert counts[EASY] > 0.7 * 2000 * EXPLORE / 3


def test_hints_fade_and_peers_that_are_not_heard_are_forgotten():
    curriculum = Curriculum([GOOD])
    curriculum.hint("old", GOOD, HALF)
    for _ in range(50):
        curriculum.step()
    assert weight(curriculum, GOOD) < 0.01
    for peer in range(PEERS):
        # of a bucket that is none of ours: nobody is remembered for it
        curriculum.hint(f"peer {peer}", HARD, HALF)
    curriculum.hint("new", GOOD, HALF)
    assert weight(curriculum, GOOD) > 0.2


@pytest.mark.parametrize(
    ("rewards", "chance"),
    [((1.0,) * 8, 0.0), ((0.0,) * 8, 0.0), (HALF, 1 - 2 * 0.5**8), (RARE, 1 - 0.875**8 - 0.125**8)],
)
def test_the_chance_of_a_signal_follows_from_the_mean_reward(rewards, chance):
    assert useful_chance(rewards) == pytest.approx(chance)


def test_a_curriculum_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no bucket"):
        Curriculum([])
