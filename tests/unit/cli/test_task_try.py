"""`swarmnode task try`: what whoever writes a task sees of it before a node trains on it.

pytest tests/unit/cli/test_task_try.py
"""

import json
import subprocess
import sys

import pytest

from swarmnode import cli
from swarmnode.tasks import registry

pytestmark = pytest.mark.slow

WORDS = """
def reverse(rng):
    word = "".join(rng.choice("abcdefgh") for _ in range(4))
    return f"Spell this backward: {word}\\x1b[2J", lambda answer: float(answer == word[::-1])

def broken(rng):
    return f"Say {rng.random()}", lambda answer: 1 / 0
"""


@pytest.fixture
def words(tmp_path, monkeypatch):
    (tmp_path / "words_to_try.py").write_text(WORDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(registry.TASKS)
    yield ["--data-dir", str(tmp_path / "data")]
    registry._TASKS.clear()
    registry._TASKS.update(before)
    registry.task_version.cache_clear()


def test_ten_questions_and_what_an_empty_answer_is_worth(words, capsys):
    assert cli.run(["task", "try", "words_to_try:reverse", "--no-sample", *words]) == 0
    out = capsys.readouterr().out
    assert out.count("Spell this backward") == 10
    assert out.count("held out:") == 5
    assert out.count("empty answer: reward 0\n") == 10
    assert "10 questions, 10 different, 0 went wrong" in out
    assert "\x1b" not in out, "what a file holds does not reach the terminal as it is"


def test_what_goes_wrong_names_the_line_of_the_file(words, capsys):
    assert cli.run(["task", "try", "words_to_try:broken", "--no-sample", *words]) == 78
    printed = capsys.readouterr()
    assert (
        "ZeroDivisionError: division by zero (words_to_try.py:7, in <lambda>)"
        in printed.out + printed.err
    )


def test_a_dataset_is_tried_with_answers_of_the_policy(tmp_path, words):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"What is {i} + 1?", "answer": str(i + 1)}) + "\n"
            for i in range(50)
        )
    )
    given = [
        "--set",
        f'task.datasets={{"data/next" = {{source = "{rows}", verifier = "numeric"}}}}',
    ]
    command = [
        sys.executable,
        "-m",
        "swarmnode",
        "task",
        "try",
        "data/next",
        "--json",
        *given,
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    tried = json.loads(done.stdout)
    assert len(tried) == 10
    assert all(
        each["prompt"].startswith("What is ")
        and isinstance(each["sampled"], str)
        and each["reward"] in (0.0, 1.0)
        for each in tried
    )
    assert not any(each["error"] for each in tried)


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("rg/gdc", "nearest that is: 'rg/gcd'"),
        ("data/none", "not in task.datasets"),
        ("nowhere:f", "no module 'nowhere'"),
    ],
)
def test_what_cannot_be_tried_is_one_line(words, capsys, task, problem):
    assert cli.run(["task", "try", task, "--no-sample", *words]) == 78
    assert problem in capsys.readouterr().err
