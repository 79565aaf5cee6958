"""The games of benchmarks.episodes, and its printed table."""

import random
from statistics import fmean

import pytest

from benchmarks import episodes
from benchmarks.lib import games_policy
from benchmarks.lib.games_policy import GAMES, play
from swarmnode.policy.text import encode_prompt, shows_tools
from swarmnode.tool_prompt import split


@pytest.mark.parametrize(("name", "most"), [("lake", 0.05), ("guess", 0.15)])
def test_random_play_rarely_wins(name, most):
    rng = random.Random(0)
    played = [play(GAMES[name], rng) for _ in range(500)]
    assert 0 < fmean(each.reward for each in played) < most
    assert max(len(each.turns) for each in played) == 1 + 2 * GAMES[name].turns


def test_the_shortest_way_across_the_lake_wins():
    _, step = GAMES["lake"].begin(0)
    for action in ("down", "down", "right", "right", "down"):
        shown, reward, done = step(action)
        assert not done
        assert "Y" in shown
        assert reward == 0.0
    assert step("right") == ("the goal", 1.0, True)


def test_looking_first_wins_the_guessing_game():
    first, step = GAMES["guess"].begin(0)
    text = split(first)
    assert text.question == "Guess a number."
    assert [tool["function"]["name"] for tool in text.tools] == ["guess", "look"]
    call = lambda name, arguments: (
        f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
    )
    seen, reward, done = step(call("look", "{}"))
    assert (reward, done) == (0.0, False)
    assert step(call("guess", f'{{"number": {seen}}}')) == ("right", 0.0, False)
    assert step("done") == ("", 1.0, True)


def test_a_second_guess_does_not_count():
    _, step = GAMES["guess"].begin(0)
    call = '<tool_call>{{"name": "guess", "arguments": {{"number": {}}}}}</tool_call>'
    found = [n for n in range(10, 100) if GAMES["guess"].begin(0)[1](call.format(n))[0] == "right"]
    assert len(found) == 1
    assert step(call.format(109 - found[0]))[0] == "wrong"
    assert step(call.format(found[0])) == ("wrong", 0.0, False)
    assert step("done") == ("", 0.0, True)


def test_the_start_policys_template_shows_the_tools():
    tokenizer = games_policy.build_tokenizer(GAMES["guess"])
    assert shows_tools(tokenizer)
    conversation = play(GAMES["guess"], random.Random(0))
    text = tokenizer.apply_chat_template(
        conversation.turns, tools=conversation.tools, tokenize=False
    )
    first, _ = GAMES["guess"].begin(0)
    assert text.startswith(tokenizer.decode(encode_prompt(tokenizer, first)))


def test_a_line_of_the_lake_is_a_token_or_two():
    tokenizer = games_policy.build_tokenizer(GAMES["lake"])
    first, _ = GAMES["lake"].begin(0)
    assert len(tokenizer(first, add_special_tokens=False)["input_ids"]) < 20


def test_a_table_has_a_line_for_each_arm():
    node = {
        "held_out": [{"success": 0.01}, {"success": 0.7}],
        "tokens": 9000,
        "environment_seconds": 2.0,
    }
    row = {"nodes": [node], "sampling_wall_seconds": 20.0, "episodes_per_second": 30.0}
    shown = episodes.show(
        [
            {"arm": "alone", "seed": 0, "size": {"game": "lake"}, **row},
            {"arm": "two nodes", "seed": 0, "size": {"game": "guess"}, **row},
        ]
    )
    assert shown.count("0.70") == 2
