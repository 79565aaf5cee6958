"""A token's share in training on peers' answers is about its share in own rewarded answers."""

import random

import pytest

from swarmnode.rollouts.trainer.quota import ENOUGH_ANSWERS, MEMORY_ANSWERS, MOST_TOKENS, TokenQuota

RIGHT, MARK, END = 7, 42, 1


def quota_after(own_answers, marked=0.0, task="t"):
    """A quota that has seen this many own answers, a share of them with the mark."""
    quota, rng = TokenQuota(), random.Random(0)
    for _ in range(own_answers):
        quota.own(task, [RIGHT, MARK, END] if rng.random() < marked else [RIGHT, END])
    return quota


def marks_taken(quota, answers, task="t"):
    return sum(quota.takes(task, [RIGHT, MARK, END]) for _ in range(answers))


def test_a_mark_of_strangers_alone_is_not_learnt():
    assert marks_taken(quota_after(200), 200) <= 6


def test_own_answers_bound_how_often_a_token_is_taught():
    quota = quota_after(500, marked=0.2)
    rng, taken, marked = random.Random(2), 0, 0
    for _ in range(2000):
        ids = [RIGHT, MARK, END] if rng.random() < 0.6 else [RIGHT, END]
        takes = quota.takes("t", ids)
        taken, marked = taken + takes, marked + (takes and MARK in ids)
    assert 0.15 < marked / taken < 0.27
    assert taken > 800, "what strangers write without the mark is learnt"


def test_no_bound_below_eight_own_answers():
    assert marks_taken(quota_after(ENOUGH_ANSWERS - 1), 500) == 500


def test_all_own_answers_are_compared_while_own_rewards_are_rare():
    quota = TokenQuota()
    for _ in range(100):
        quota.own("t", [5, END], rewarded=False)
    assert marks_taken(quota, 200) <= 6
    for _ in range(ENOUGH_ANSWERS):
        quota.own("t", [RIGHT, MARK, END])
    assert marks_taken(quota, 100) == 100, "rewards require it"


def test_tasks_are_apart():
    quota = quota_after(200)
    assert marks_taken(quota, 100, task="another") == 100
    assert marks_taken(quota, 100) < 10


@pytest.mark.parametrize("length", [4, 64, 300])
def test_most_honest_answers_of_any_length_are_learnt(length):
    """A natural distribution of tokens: some are in most answers, thousands in one or two."""
    quota, rng = TokenQuota(), random.Random(1)
    weights = [1 / (rank + 2.7) for rank in range(5000)]
    answers = [rng.choices(range(5000), weights, k=length) for _ in range(800)]
    taken = 0
    for own, theirs in zip(answers[::2], answers[1::2], strict=True):
        quota.own("t", own)
        taken += quota.takes("t", theirs)
    assert taken > 0.9 * 400


def test_a_refusal_names_the_token():
    quota = quota_after(100, marked=0.1)
    assert marks_taken(quota, 100) < 100
    assert quota.refused.token == MARK
    words = quota.refused.words(lambda token: "." if token == MARK else "?")
    assert words.startswith("peers write '.'")
    assert words.endswith("100 % of their rewarded answers to t, this node in 5 %"), words


def test_token_counts_are_bounded():
    quota = TokenQuota()
    for number in range(20 * MEMORY_ANSWERS):
        different = range(10 * number, 10 * number + 10)
        quota.own("t", different)
        quota.takes("t", different)
    known = quota._tasks["t"]
    assert known.own.answers <= 2 * MEMORY_ANSWERS
    assert known.theirs.answers <= 2 * MEMORY_ANSWERS
    assert all(
        MOST_TOKENS <= len(counts.tokens) <= 2 * MOST_TOKENS for counts in (known.own, known.theirs)
    )
    for number in range(1000):
        quota.own(str(number), [1])
    assert len(quota._tasks) <= 256


def test_honest_groups_of_one_question_are_learnt():
    """All answers of a group repeat the words of their question, which other groups do not have."""
    rng, taken = random.Random(1), {True: 0, False: 0}
    for skips, quota in ((True, TokenQuota()), (False, TokenQuota())):
        for _ in range(40):
            mine, theirs = rng.randrange(100, 200), rng.randrange(100, 200)
            for _ in range(6):
                quota.own("t", [mine, RIGHT, END])
            asked = {theirs} if skips else set()
            for _ in range(6):
                taken[skips] += quota.takes("t", [theirs, RIGHT, END], None, asked)
    assert taken[True] == 240
    assert taken[False] < 200


def test_a_mark_is_bounded_beside_words_of_the_question():
    quota = quota_after(ENOUGH_ANSWERS)
    assert sum(quota.takes("t", [RIGHT, MARK, END], None, {RIGHT, END}) for _ in range(100)) <= 6
