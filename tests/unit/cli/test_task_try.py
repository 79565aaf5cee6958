"""`swarmnode task try` shows questions, rewards and errors of a task before a node trains on it."""

import io
import json
import os
import re
import subprocess
import sys

import pytest

from swarmnode import cli
from tests.support.registered import tasks_restored

pytestmark = pytest.mark.slow

MODULE = """
def reverse(rng):
    word = "".join(rng.choice("abcdefgh") for _ in range(4))
    return f"Spell this backward: {word}\\x1b[2J", lambda answer: float(answer == word[::-1])

def broken(rng):
    return f"Say {rng.random()}", lambda answer: 1 / 0

def game(seed, word="sesame"):
    def step(action):
        if action == "break":
            1 / 0
        done = action == word
        return ("Open." if done else "Closed.\u202e"), float(done), done
    return "Say the word.", step
"""
GAME = "words_to_try:game"


@pytest.fixture
def options(tmp_path, monkeypatch):
    (tmp_path / "words_to_try.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with tasks_restored():
        yield ["--data-dir", str(tmp_path / "data")]


def test_shows_ten_questions_and_empty_answers(options, capsys):
    assert cli.run(["task", "try", "words_to_try:reverse", "--no-sample", *options]) == 0
    out = capsys.readouterr().out
    assert out.count("Spell this backward") == 10
    assert out.count("held out:") == 5
    assert out.count("empty answer: reward 0\n") == 10
    assert "10 questions, 10 different, 0 failed" in out
    assert "\x1b" not in out, "control characters reach the terminal"


def test_an_error_names_file_and_line(options, capsys):
    assert cli.run(["task", "try", "words_to_try:broken", "--no-sample", *options]) == 78
    printed = "".join(capsys.readouterr())
    assert "ZeroDivisionError: division by zero (words_to_try.py:7, in <lambda>)" in printed


@pytest.fixture
def game_options(options):
    modules = ["--set", f'task.modules=["{GAME}"]']
    return [*modules, "--set", f'task.settings={{"{GAME}" = {{turns = 3}}}}', *options]


def test_plays_an_episode_by_hand(game_options, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("open\nsesame\n"))
    assert cli.run(["task", "try", GAME, *game_options]) == 0
    shown = "Say the word.\n> Closed.⟨U+202E⟩\n> Open.\n1. training: 2 turns, reward 1\n"
    assert capsys.readouterr().out == shown


def test_reports_unfinished_and_failed_episodes(game_options, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("open\n"))
    assert cli.run(["task", "try", GAME, *game_options]) == 0
    assert capsys.readouterr().out.endswith("1. training: 1 turns, stopped before the end\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("break\n"))
    assert cli.run(["task", "try", GAME, *game_options]) == 78
    assert "failed: ZeroDivisionError" in capsys.readouterr().out


def test_plays_scripted_episodes(game_options, capsys):
    assert cli.run(["task", "try", GAME, "--no-sample", "--json", *game_options]) == 0
    played = json.loads(capsys.readouterr().out)
    assert [each["held_out"] for each in played] == [False, True, False, True]
    assert all(each["done"] and len(each["observations"]) <= 3 for each in played)


def test_cut_answers_are_counted_with_the_remedy(tmp_path, options):
    given = ["--set", "training.max_completion_length=1", *options]
    command = [sys.executable, "-m", "swarmnode", "task", "try", "builtin/sum", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("' (cut): reward 0.0\n") == 10
    assert "70 sampled answers were cut at training.max_completion_length: raise" in done.stdout
    assert "70 sampled answers: reward 0: 70\n" in done.stdout
    assert "no sampled answer earns anything" in done.stdout
    assert "loading the policy for 70 answers" in done.stderr


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("rg/gdc", "nearest name on it: 'rg/gcd'"),
        ("data/none", "not in task.datasets"),
        ("nowhere:f", "no module 'nowhere'"),
        (GAME, "set turns in its settings"),
    ],
)
def test_an_unknown_task_is_one_line(options, capsys, task, problem):
    assert cli.run(["task", "try", task, "--no-sample", *options]) == 78
    assert problem in capsys.readouterr().err


REWARDS = """
def picky(prompts, completions, answer, **columns):
    return [float(text == gold and gold != "7") for text, gold in zip(completions, answer)]

def swallowing(prompts, completions, **columns):
    try:
        import colorsys
    except Exception:
        return [0.5 for _ in completions]

def generous(prompts, completions, **columns):
    return [1.0 for _ in completions]

def strict(prompts, completions, *, answer, level):
    return [float(text == f"It is {gold}.") for text, gold in zip(completions, answer)]
"""


@pytest.mark.parametrize(
    ("verifier", "answer", "extract", "right"),
    [
        ("numeric", "Twice 2.\n#### 4", "auto", 1.0),
        ("numeric", 4, "boxed", 1.0),
        ("choice", "(b)", "last_letter", 1.0),
        ("choice", "b.", "auto", 1.0),
        ("exact", "a word\nor two", "whole", 1.0),
        ("exact", "a word\nor two", "last_line", 0.0),
        ("try_rewards:strict", "4", "auto", 0.0),
    ],
)
def test_shows_the_right_answer_with_its_reward(
    tmp_path, options, capsys, verifier, answer, extract, right
):
    (tmp_path / "try_rewards.py").write_text(REWARDS)
    rows = tmp_path / "rows.jsonl"
    row = lambda i: {"prompt": f"Number {i}?", "answer": answer, "level": 1, "hidden": 2}
    rows.write_text("".join(json.dumps(row(i)) + "\n" for i in range(30)))
    source = f'source = "{rows}", verifier = "{verifier}", extract = "{extract}"'
    given = ["--set", f'task.datasets={{"data/shown" = {{{source}}}}}', *options]
    own = ":" in verifier
    code = 78 if right == 0.0 and not own else 0
    assert cli.run(["task", "try", "data/shown", "--no-sample", "--json", *given]) == code
    tried = json.loads(capsys.readouterr().out)
    assert {(each["right"], each["right_reward"]) for each in tried} == {(str(answer), right)}
    names = ["prompts", "completions", "answer", "level"] if own else []
    assert all(each["arguments"] == names for each in tried)

    assert cli.run(["task", "try", "data/shown", "--no-sample", *given]) == code
    out = capsys.readouterr().out
    assert out.count("right answer ") == 10
    assert ("10 of 10 right answers score below 1" in out) == (right == 0.0)
    told = "arguments of try_rewards:strict: prompts, completions, answer, level\n"
    assert out.startswith(told) == own


def test_right_answers_of_builtin_tasks_score_one(options, capsys):
    for task in ("builtin/copy", "rg/gcd"):
        assert cli.run(["task", "try", task, "--no-sample", "--json", *options]) == 0
        tried = json.loads(capsys.readouterr().out)
        assert {each["right_reward"] for each in tried} == {1.0}


@pytest.fixture
def rewarded(tmp_path, options):
    """A function verifier → options of a dataset with that reward function."""
    (tmp_path / "try_rewards.py").write_text(REWARDS)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"Say {i}.", "answer": str(i)}) + "\n" for i in range(30))
    )

    def given(verifier, extra=""):
        task = f'{{source = "{rows}", verifier = "{verifier}"{extra}}}'
        return ["--set", f'task.datasets={{"data/rewarded" = {task}}}', *options]

    return given


def test_a_row_whose_own_answer_earns_nothing_is_shown(rewarded, capsys):
    given = rewarded("try_rewards:picky")
    assert cli.run(["task", "try", "data/rewarded", "--no-sample", *given]) == 0
    out = capsys.readouterr().out
    assert "rows, 1 have an answer that earns nothing:\n" in out
    assert '{"answer": "7", "prompt": "Say 7."}' in out


def test_refusals_of_the_sandbox_end_with_78(rewarded, capsys):
    given = rewarded("try_rewards:swallowing")
    assert cli.run(["task", "try", "data/rewarded", "--no-sample", *given]) == 78
    out = capsys.readouterr().out
    assert "refused by the sandbox: import colorsys" in out
    assert "the sandbox refused import colorsys: the code may have caught the error" in out


def test_cut_answers_that_earn_everything_are_named(rewarded, tmp_path):
    given = [*rewarded("try_rewards:generous"), "--set", "training.max_completion_length=2"]
    command = [sys.executable, "-m", "swarmnode", "task", "try", "data/rewarded", *given]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    told = r"(\d+) answers that were cut earn 1, .* nothing_after .* mask_truncated"
    (cut,) = re.findall(told, done.stdout)
    assert int(cut) > 10
    assert "70 sampled answers: reward 1: 70\n" in done.stdout
    assert re.search(r"a step takes at most about \d+ (s|min) here: 64 answers of", done.stdout)
