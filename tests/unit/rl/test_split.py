"""The batch split: the rule, its fixed point, and that it never starves the swarm."""

import random
import subprocess
import sys

import pytest

from swarmnode.rl.split import AdaptiveSplit, floor_groups


@pytest.mark.parametrize(
    ("smoothed", "used", "own"),
    [(0.0, 0, 8), (0.0, 6, 2), (20.0, 0, 8)],
    ids=["alone", "at the floor", "no more rewards"],
)
def test_own_groups_follow_the_used_ones(smoothed, used, own):
    split = AdaptiveSplit(8, smoothed)
    for _ in range(50):
        split.observe(used)
    assert (split.own_groups, split.external_room) == (own, 6)


def test_the_average_moves_by_four_tenths():
    split = AdaptiveSplit(8)
    split.observe(5)
    assert split.smoothed == pytest.approx(2.0)
    split.observe(5)
    assert split.smoothed == pytest.approx(3.2)
    assert split.own_groups == 5


@pytest.mark.parametrize(("q", "nodes"), [(0.03, 8), (0.1, 8), (0.16, 8), (0.4, 8), (0.1, 3)])
def test_the_fixed_point_is_the_split_with_most_useful_groups(q, nodes):
    # all nodes follow the rule; each own group is useful with probability q
    batch, rng = 8, random.Random(0)
    splits, pools = [AdaptiveSplit(batch) for _ in range(nodes)], [0] * nodes
    own = []
    for step in range(3000):
        useful = [sum(rng.random() < q for _ in range(s.own_groups)) for s in splits]
        for i, split in enumerate(splits):
            there = pools[i] + sum(useful) - useful[i]
            split.observe(used := min(there, split.external_room))
            pools[i] = there - used
        if step > 100:
            own.append(sum(s.own_groups for s in splits) / nodes)
    best = max(2.0, batch / (1 + (nodes - 1) * q))
    assert sum(own) / len(own) == pytest.approx(best, abs=0.4)


def test_floor_is_a_share_rounded_up_and_at_least_one():
    assert [floor_groups(1), floor_groups(2), floor_groups(5), floor_groups(8)] == [1, 1, 2, 2]


def test_a_node_that_shares_nothing_samples_the_whole_batch():
    split = AdaptiveSplit(8, smoothed=20.0, shares=False)
    assert (split.own_groups, split.external_room) == (8, 0)


def test_the_split_needs_no_torch():
    code = "import sys, swarmnode.rl.split; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
