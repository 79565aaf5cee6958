"""Useful groups of the last steps, and when they are trained on again."""

import pytest

from swarmnode.rl.split import AdaptiveSplit
from swarmnode.trainer import replay
from swarmnode.trainer.batch import TrainingGroup
from swarmnode.trainer.replay import RARE, SMOOTHING, STEPS, USES, ReplayBuffer, lacking


def group(name, *rewards, tokens=4, peer=""):
    rewards = rewards or (0.0, 1.0)
    rows = [([1, 2], [name] * tokens) for _ in rewards]
    return TrainingGroup(rows, [[-1.0] * tokens for _ in rewards], list(rewards), [1.0] * len(rewards), peer)


def names(groups):
    return [one.rows[0][1][0] for one in groups]


def test_what_taught_nothing_is_not_kept():
    kept = ReplayBuffer()
    kept.keep([group(1), group(2, 0.5, 0.5), group(3, 1.0, 0.0, peer="a")], step=0)
    assert sorted(names(kept.take(8))) == [1, 3]


def test_a_group_is_trained_on_so_often_again_and_no_more():
    kept = ReplayBuffer()
    kept.keep([group(1)], step=0)
    taken = []
    for step in range(1, STEPS):
        taken += kept.take(8)
        kept.keep([], step)
    assert names(taken) == [1] * USES
    assert len(kept) == 0


@pytest.mark.parametrize("late", [0, 1])
def test_a_group_is_kept_for_so_many_steps(late):
    kept = ReplayBuffer()
    kept.keep([group(1)], step=3)
    for step in range(4, 3 + STEPS + late):
        kept.keep([], step)
    assert len(kept) == 1 - late


def test_those_used_least_come_first_and_of_those_the_newest():
    kept = ReplayBuffer()
    kept.keep([group(1)], step=0)
    kept.keep([group(2)], step=1)
    assert names(kept.take(1)) == [2]
    kept.keep([group(3)], step=2)
    assert names(kept.take(3)) == [3, 1, 2]
    assert kept.take(0) == kept.take(-1) == []


def test_the_oldest_go_where_answers_are_long(monkeypatch):
    monkeypatch.setattr(replay, "TOKENS", 40)
    kept = ReplayBuffer()
    kept.keep([group(1, tokens=8), group(2, tokens=8)], step=0)  # of two completions each
    kept.keep([group(3, tokens=12)], step=1)
    assert names(kept.take(8)) == [3, 2]
    kept.keep([group(4, tokens=400)], step=2)
    assert len(kept) == 0, "what is longer than all that is kept is not kept either"


def test_a_buffer_of_no_uses_keeps_nothing():
    kept = ReplayBuffer(0)
    kept.keep([group(1)], step=0)
    assert len(kept) == 0


def test_once_useful_groups_are_not_rare_nothing_is_trained_on_again():
    kept = ReplayBuffer()
    useful, useless = [group(1)], [group(2, 0.0, 0.0)]
    for _ in range(100):
        kept.sampled(9 * useless + useful)
        kept.keep(useful, step=0)
    assert len(kept) == 100, "one in ten is rare"
    for _ in range(100):
        kept.sampled(2 * useless + useful)
    assert len(kept) == 0
    kept.sampled(100 * useless)
    kept.keep(useful, step=1)
    assert kept.take(8) == [], "nor where everything fails, or succeeds, later on"


def test_one_lucky_group_at_the_start_is_rare():
    kept = ReplayBuffer()
    kept.sampled([group(1)])
    kept.keep([group(1)], step=0)
    assert len(kept) == 1
    assert SMOOTHING < RARE


def test_a_batch_lacks_what_is_not_useful():
    assert lacking(4, [group(1), group(2, 0.0, 0.0)]) == 3
    assert lacking(1, [group(1), group(2)]) == 0


def test_what_can_be_trained_on_again_is_sampled_less_and_never_all():
    split = AdaptiveSplit(8, smoothed=2.0)
    seen = []
    for split.replayable in (0, 1, 3, 20):
        seen.append(split.own_groups)
    assert seen == [6, 5, 3, 2]
    split.external_scale = 0.0
    assert split.own_groups == 8, "the guard's verdict on peers' groups goes for those that were kept, too"
