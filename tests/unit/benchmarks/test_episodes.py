"""The games of benchmarks.episodes, and its printed table."""

import random
from statistics import fmean

import pytest

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


def test_the_start_policys_template_shows_the_tools():
    tokenizer = games_policy.build_tokenizer(GAMES["guess"])
    assert shows_tools(tokenizer)
    conversation = play(GAMES["guess"], random.Random(0))
    text = tokenizer.apply_chat_template(
        conversation.turns, tools=conversation.tools, tokenize=False
    )
    first, _ = GAMES["guess"].begin(0)
    assert text.startswith(tokenizer.decode(encode_prompt(tokenizer, first)))
