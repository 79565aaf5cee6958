"""Rewards of several components: allowed values, their checks and their weights."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from swarmnode.errors import ConfigError
from swarmnode.tasks import frames, own
from swarmnode.tasks.builtin import Item
from swarmnode.tasks.measurement import pass_at_k
from swarmnode.tasks.scorer import judge


@pytest.mark.parametrize(
    ("value", "weights", "reward", "components"),
    [
        (0.5, {}, 0.5, {}),
        ({"a": 1.0, "b": 0.0}, {}, 0.5, {"a": 1.0, "b": 0.0}),
        ({"a": 1.0, "b": 0.0}, {"a": 3.0}, 0.75, {"a": 1.0, "b": 0.0}),
        ({"a": True, "b": 1}, {"c": 9.0}, 1.0, {"a": 1.0, "b": 1.0}),
        ({"a": 1.0, "b": 0.25}, {"a": 0.0}, 0.25, {"a": 1.0, "b": 0.25}),
        ({"a": 0.5, "b": None}, {}, 0.5, {"a": 0.5}),
        ({"a": 1.0, "b": None, "c": 0.0}, {"a": 3.0}, 0.75, {"a": 1.0, "c": 0.0}),
        ({"a": 1.0, "b": None}, {"a": 0.0}, 0.0, {"a": 1.0}),
        ({"b": None}, {}, 0.0, {}),
    ],
)
def test_reward_is_the_weighted_mean_of_components(value, weights, reward, components) -> None:
    assert own.total_reward(value, weights) == (reward, components)


@pytest.mark.parametrize(
    "value",
    [
        None,
        1.5,
        "text",
        {"a": math.nan},
        {str(number): 1.0 for number in range(9)},
        {"a": 1.0, "b": -1.0},
    ],
)
def test_nonsense_is_an_error_and_never_a_reward(value) -> None:
    with pytest.raises((ValueError, TypeError)):
        own.total_reward(value, {})
    question = frames.Question("own:task", 0, 0, ["an answer", None])
    scored = judge(question, lambda *_: Item("?", "", lambda text: value))
    assert (scored.rewards, scored.errors, scored.components) == ([0.0, 0.0], 1, [])
    assert scored.error


@pytest.mark.parametrize(
    ("said", "rewards", "errors", "components"),
    [
        ([{"a": 1.0}, {"b": 1.0}, {"a": 0.5}], [1.0, 0.0, 0.5], 1, [{"a": 1.0}, {}, {"a": 0.5}]),
        # a component may apply to some answers only
        (
            [{"a": 1.0, "b": None}, {"a": None, "b": None}, {"a": 0.0, "b": 0.5}],
            [1.0, 0.0, 0.25],
            0,
            [{"a": 1.0}, {}, {"a": 0.0, "b": 0.5}],
        ),
    ],
)
def test_all_answers_of_a_question_have_the_same_components(
    said, rewards, errors, components
) -> None:
    question = frames.Question("own:task", 0, 0, ["0", "1", "2"])
    scored = judge(question, lambda *_: Item("?", "", lambda text: said[int(text)]))
    assert (scored.rewards, scored.errors, scored.components) == (rewards, errors, components)


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan, "much"])
def test_a_weight_that_is_none_is_a_line(weight) -> None:
    with pytest.raises(ConfigError, match=r"weight\.a is .*; a weight is a number of at least 0"):
        own.check_weights("task.settings.x", {"weight.a": weight})


def test_pass_at_k_is_what_counting_all_draws_gives() -> None:
    for samples, right, k in [(5, 0, 2), (5, 2, 1), (5, 2, 3), (6, 3, 4), (4, 4, 2)]:
        draws = list(combinations(range(samples), k))
        assert pass_at_k(samples, right, k) == pytest.approx(
            sum(min(draw) < right for draw in draws) / len(draws)
        )
    for samples, k in [(4, 5), (4, 0)]:
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(samples, 1, k)
