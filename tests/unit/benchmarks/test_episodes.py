"""The games of the benchmark of episodes, and what it prints."""

import random
from statistics import fmean

import pytest

from benchmarks import episodes, episodes_policy
from benchmarks.episodes_policy import GAMES, play


@pytest.mark.parametrize(("name", "most"), [("frozen_lake", 0.05), ("guess", 0.25)])
def test_random_play_rarely_wins(name, most):
    rng = random.Random(0)
    played = [play(GAMES[name], rng) for _ in range(500)]
    assert 0 < fmean(reward for _, reward in played) < most
    assert max(len(turns) for turns, _ in played) == 1 + 2 * GAMES[name].turns


def test_the_shortest_way_across_the_lake_wins():
    _, step = GAMES["frozen_lake"].begin(0)
    for action in ("down", "down", "right", "right", "down"):
        shown, reward, done = step(action)
        assert not done
        assert "Y" in shown
        assert reward == 0.0
    assert step("right") == ("the goal", 1.0, True)


def test_a_line_of_the_lake_is_a_token_or_two():
    tokenizer = episodes_policy.build_tokenizer()
    first, _ = GAMES["frozen_lake"].begin(0)
    assert len(tokenizer(first, add_special_tokens=False)["input_ids"]) < 20


def test_a_table_has_a_line_for_each_arm():
    held_out = [
        {episodes.LAKE: 0.01, episodes.GUESS: 0.2},
        {episodes.LAKE: 0.7, episodes.GUESS: 0.5},
    ]
    node = {"held_out": held_out, "tokens": 9000, "environment_seconds": 2.0}
    row = {
        "nodes": [node],
        "seconds": {"generation": 10.0, "prefill": 4.0, "decode": 5.0},
        "sampling_wall_seconds": 20.0,
        "episodes_per_second": 30.0,
    }
    engine = {"arm": "engine", "seed": 0, "engine": {"x": {"kept": [2.0]}}, "factor": {"x": 2.0}}
    shown = episodes.show(
        [{"arm": "alone", "seed": 0, **row}, {"arm": "two nodes", "seed": 0, **row}, engine]
    )
    assert shown.count("| 0.70") + shown.count(" 0.70 |") >= 2
    assert "2.0 times" in shown
