"""The bucket that a curriculum chooses."""

import random
from collections import Counter

import pytest

from swarmnode.rl.curricula import EXPLORE, MEMORY, Bucket, Curriculum

EASY, GOOD, HARD = Bucket("rg/gcd", 0), Bucket("rg/gcd", 1), Bucket("rg/lcm", 5)


def drawn(curriculum, count=2000, seed=0):
    rng = random.Random(seed)
    return Counter(curriculum.choose(rng) for _ in range(count))


def weight(curriculum, bucket):
    alpha, beta = curriculum.posterior(bucket)
    return alpha + beta - 2.0


def test_buckets_without_evidence_are_drawn_uniformly():
    counts = drawn(Curriculum([EASY, GOOD, HARD, GOOD]))
    assert set(counts) == {EASY, GOOD, HARD}
    assert max(counts.values()) < 1.2 * min(counts.values())


def test_prefers_informative_buckets_and_explores_others():
    curriculum = Curriculum([EASY, GOOD, HARD])
    for _ in range(20):
        for bucket in (EASY, GOOD, HARD):
            curriculum.own(bucket, bucket == GOOD)
    counts = drawn(curriculum)
    assert counts[GOOD] > 0.8 * 2000
    assert min(counts[EASY], counts[HARD]) > 0.7 * 2000 * EXPLORE / 3


def test_prior_of_an_untried_bucket_is_the_mean_of_all():
    buckets = [Bucket("rg/gcd", difficulty) for difficulty in range(16)]
    curriculum = Curriculum(buckets)
    assert curriculum.posterior(buckets[-1]) == (1.0, 1.0)
    for bucket in buckets[:8]:
        curriculum.own(bucket, bucket == buckets[0])
    assert curriculum.expected()[buckets[-1]] == pytest.approx((1 + 1) / (2 + 8))
    assert drawn(curriculum)[buckets[0]] > 0.2 * 2000, (
        "a useful bucket is preferred before all others were tried"
    )


def test_the_same_generator_makes_the_same_choices():
    one, other = Curriculum([EASY, GOOD, HARD]), Curriculum([HARD, GOOD, EASY])
    first, second = random.Random(7), random.Random(7)
    assert [one.choose(first) for _ in range(50)] == [other.choose(second) for _ in range(50)]


def test_old_evidence_decays():
    curriculum = Curriculum([EASY, GOOD])
    for _ in range(100):
        curriculum.own(EASY, True)
    assert weight(curriculum, EASY) < 1.0 / (1.0 - MEMORY) + 1e-6
    for _ in range(30):
        curriculum.own(EASY, False)
    assert curriculum.expected()[EASY] < 0.2


def test_evidence_is_the_number_of_own_groups_that_count():
    curriculum = Curriculum([EASY, GOOD])
    curriculum.own(GOOD, True)
    curriculum.own(HARD, True)
    assert curriculum.evidence() == {EASY: 0.0, GOOD: 1.0}


def test_curriculum_without_buckets_is_refused():
    with pytest.raises(ValueError, match="no bucket"):
        Curriculum([])
