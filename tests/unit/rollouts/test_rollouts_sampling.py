import random
from collections import Counter

import pytest

from swarmnode.rollouts import sampling


def test_freshness_halves_every_half_life():
    assert sampling.freshness(0, 4) == 1
    assert sampling.freshness(4, 4) == pytest.approx(0.5)
    assert sampling.freshness(8, 4) == pytest.approx(0.25)


def test_new_peer_is_on_probation():
    assert sampling.trust(1.0, 0) == 0.25
    assert sampling.trust(1.0, 8) == pytest.approx(0.625)
    assert sampling.trust(1.0, 16) == sampling.trust(1.0, 10_000) == 1


def test_weight_ignores_the_level_of_the_reward():
    assert sampling.weight([0, 1], 8, 4, 0.5) == pytest.approx(0.5 * 0.25 * 0.5)
    assert sampling.weight([0, 0, 0, 1], 0, 4, 1) == pytest.approx(
        sampling.weight([1, 1, 1, 0], 0, 4, 1)
    )


def test_items_come_first_in_proportion_to_their_weight():
    rng = random.Random(0)
    first = Counter(sampling.shuffle_weighted("abc", [1, 2, 5], rng)[0] for _ in range(8000))
    assert first["a"] / 8000 == pytest.approx(1 / 8, abs=0.02)
    assert first["c"] / 8000 == pytest.approx(5 / 8, abs=0.02)


def test_what_is_already_chosen_counts_towards_a_peers_half():
    assert sampling.spread_over_peers(["a3", "b1"], 4, lambda x: x[0], 2, already=["a1", "a2"]) == [
        "a1",
        "a2",
        "b1",
    ]
