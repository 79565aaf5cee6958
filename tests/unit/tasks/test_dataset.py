"""Datasets as tasks: reading with one-line errors, questions by seed, judging in the sandbox."""

import datetime
import decimal
import functools
import json
import os

import pytest

from swarmnode import cli
from swarmnode.config import DatasetConfig
from swarmnode.errors import ConfigError
from swarmnode.swarm import manifest, requirements
from swarmnode.tasks import dataset, fetch, registry
from swarmnode.tasks.client import Scorer, ScorerLimits
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.wire.messages import TaskEntry
from tests.support import registered

NAME = "data/sums"
ROWS = [
    {"prompt": f"What is {i} + {i}?", "answer": f"Twice {i}.\n#### {2 * i}", "note": i}
    for i in range(40)
]


pytestmark = pytest.mark.usefixtures("tasks_as_before")


def written(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def installed(tmp_path, rows=ROWS, name=NAME, **settings):
    config = DatasetConfig(
        **{"source": str(written(tmp_path / "rows.jsonl", rows)), "verifier": "numeric"} | settings
    )
    registry.install_datasets({name: config}, tmp_path / "datasets")
    return registry.TASKS[name]


ref = functools.partial(registered.ref, NAME)


def number_of(prompt):
    return int(prompt.split()[2])


def held_out_prompts(scorer, count):
    refs = [ref(index, evaluation_seed(NAME)) for index in range(count)]
    return {scorer.score(each, []).prompt for each in refs}


def test_every_row_is_asked_before_one_repeats(tmp_path):
    spec = installed(tmp_path)
    assert (spec.rows.rows, spec.rows.held_out) == (40, 4)
    with Scorer() as scorer:
        prompts = [scorer.score(ref(index=index), []).prompt for index in range(36)]
        held_out = held_out_prompts(scorer, 40)
        twice = 2 * number_of(prompts[0])
        right = [
            f"I add.\nSo it is {twice}.",
            f"\\boxed{{{twice}}}",
            f"<answer>{twice}</answer> or 7",
        ]
        wrong = [f"{twice} or rather 1000", ""]
        assert scorer.score(ref(), right + wrong).rewards == [1.0, 1.0, 1.0, 0.0, 0.0]
        assert scorer.statistics().failures == 0
    assert len(set(prompts)) == 36, "each row is met once before one is met twice"
    assert len(held_out) == 4
    assert not held_out & set(prompts)


def test_equal_rows_have_equal_versions(tmp_path):
    installed(tmp_path)
    version = registry.task_version(NAME)
    first = registry.TASKS[NAME].rows
    (tmp_path / "other").mkdir()
    shuffled = [dict(reversed(row.items())) for row in reversed(ROWS)] + ROWS[:3]
    installed(tmp_path / "other", shuffled)
    assert registry.task_version(NAME) == version
    assert registry.TASKS[NAME].rows.content == first.content
    changes = {"verifier": "exact", "template": "{prompt} Think.", "extract": "whole"}
    for key, value in (changes | {"held_out": 0.2}).items():
        installed(tmp_path, **{key: value})
        assert registry.task_version(NAME) != version, key
    installed(tmp_path, [*ROWS, {"prompt": "What is 50 + 50?", "answer": "100"}])
    assert registry.task_version(NAME) != version


def test_parquet_gives_the_same_rows_as_json_lines(tmp_path):
    datasets = pytest.importorskip("datasets")
    installed(tmp_path)
    version = registry.task_version(NAME)
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    config = DatasetConfig(source=str(tmp_path / "rows.parquet"), verifier="numeric")
    registry.install_datasets({NAME: config}, tmp_path / "datasets")
    assert registry.task_version(NAME) == version


def test_rows_file_is_reused_until_the_source_changes(tmp_path, monkeypatch):
    installed(tmp_path)
    reads, read = [], dataset._read_rows
    monkeypatch.setattr(dataset, "_read_rows", lambda *given: reads.append(1) or read(*given))
    config = DatasetConfig(source=str(tmp_path / "rows.jsonl"), verifier="numeric")
    registry.install_datasets({NAME: config}, tmp_path / "datasets")
    assert reads == []
    written(tmp_path / "rows.jsonl", ROWS[:30])
    registry.install_datasets({NAME: config}, tmp_path / "datasets")
    assert reads == [1]
    assert registry.TASKS[NAME].rows.rows == 30
    assert len(list((tmp_path / "datasets").iterdir())) == 1, "the rows of before are not kept"


def test_repeated_question_is_on_one_side(tmp_path):
    rows = [{"prompt": f"Name a number: {i % 10}", "answer": str(i)} for i in range(60)]
    # a quarter of the rows ends within a question, three tenths would end between two
    spec = installed(tmp_path, rows, held_out=0.25)
    with Scorer() as scorer:
        trained = {scorer.score(ref(index=index), []).prompt for index in range(60)}
        held_out = held_out_prompts(scorer, 60)
    assert len(trained | held_out) == 10
    assert not trained & held_out
    assert spec.rows.held_out % 6 == 0


def test_only_right_answers_of_the_dataset_are_choices(tmp_path):
    rows = [{"prompt": f"Question {i}?", "answer": "ABCD"[i % 4]} for i in range(40)]
    spec = installed(tmp_path, rows, verifier="choice")
    assert spec.rows.choices == "ABCD"
    texts = ["The answer is {}. I am sure", "{}. Thanks to U", "A or B or C or D", "I", ""]
    with Scorer() as scorer:
        (question,) = scorer.score_many([(ref(), [])], reveal=True)
        rewards = scorer.score(ref(), [text.format(question.answer) for text in texts]).rewards
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "value", "problem"),
    [
        ("1 000", "1000", None),
        ("\\frac{3}{4}", "0.75", None),
        ("10^5", "100000", None),
        ("3,14", None, "a decimal comma .* write it as 3.14"),
        ("2024-05-17", None, "a date.* use the verifier exact"),
    ],
)
def test_answers_are_read_as_what_they_mean_or_refused(tmp_path, answer, value, problem):
    rows = [{"prompt": f"Question {i}?", "answer": answer} for i in range(4)]
    if problem is not None:
        with pytest.raises(ConfigError, match=f"row 1: verifier 'numeric' .*{problem}"):
            installed(tmp_path, rows)
        return
    installed(tmp_path, rows)
    with Scorer() as scorer:
        texts = [f"It is {value}.", f"It is {answer}.", "It is 5.", "It is 0.", "It is 4."]
        assert scorer.score(ref(), texts).rewards == [1.0, 1.0, 0.0, 0.0, 0.0]


LONG = [*ROWS[:5], {"prompt": "x" * 70_000, "answer": "1"}]


@pytest.mark.parametrize(
    ("rows", "settings", "problem"),
    [
        (ROWS, {"prompt": "question"}, "row 1 has no column 'question', only answer, note, prompt"),
        (LONG, {}, "row 6: its prompt has 70000 characters, more than 65536"),
        ([{"prompt": "a", "answer": "none"}], {}, "cannot use the answer 'none': there is no"),
        ([ROWS[0]], {}, "1 different rows are too few"),
        (ROWS, {"verifier": "nummeric"}, "verifier is 'nummeric', not one of exact, numeric"),
        (ROWS, {"template": "Answer!"}, "template does not contain {prompt}"),
        (ROWS, {"source": "openai/gsm8k"}, "openai/gsm8k is a name on the Hub: set revision"),
    ],
)
def test_dataset_error_is_one_line_with_a_remedy(tmp_path, rows, settings, problem):
    with pytest.raises(ConfigError, match=problem) as raised:
        installed(tmp_path, rows, **settings)
    assert "\n" not in str(raised.value)
    assert NAME in str(raised.value)
    assert not list(tmp_path.glob("datasets/*")), "nothing is kept of what cannot be used"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "row 3 is not JSON"),
        ("x" * 2**20, "row 3 is longer than 1 MiB"),
        ('{"prompt": "a", "prompt": "b", "answer": "1"}', "row 3: column 'prompt' occurs twice"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, problem):
    file = written(tmp_path / "rows.jsonl", ROWS[:1])
    with open(file, "a") as rows:
        rows.write("\n" + line + "\n")
    with pytest.raises(ConfigError, match=problem):
        registry.install_datasets({NAME: DatasetConfig(source=str(file))}, tmp_path / "datasets")


HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("null", r"is null: give it a value"),
        ("NaN", r"is NaN, which is not a number"),
        ("1e999", r"is Infinity, which is not a number"),
        (HUGE, r"is an integer of more than 4300 digits: write it as a text"),
        ('"\\ud800"', r"is not valid Unicode"),
        ("[" * 40 + "]" * 40, r"is nested more than 32 deep"),
        ('{"a": 1, "a": 2}', r"'a' occurs twice"),
    ],
)
@pytest.mark.parametrize("column", ["answer", "note"])
@pytest.mark.parametrize("row", [1, 7])
def test_a_value_that_nothing_can_use_is_one_line(tmp_path, row, column, value, problem):
    fields = {"prompt": '"What is 4 ?"', "answer": '"4"', "note": "1", column: value}
    lines = [json.dumps(each) + "\n" for each in ROWS[: row - 1]]
    text = "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}\n"
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(lines) + text)
    verifier = "exact" if column == "answer" else "rewards_of_mine:graded"
    config = DatasetConfig(source=str(file), verifier=verifier)
    with pytest.raises(ConfigError, match=f"row {row}: column .*{problem}") as raised:
        registry.install_datasets({NAME: config}, tmp_path / "datasets")
    assert "\n" not in str(raised.value)
    assert str(raised.value).isascii()
    assert value.startswith("{") or repr(column) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"note": 2**64}, r"row 2: column 'note' is an integer of more than 64 bits: write it as"),
        ({"note": "two"}, r"row 2: column 'note' is a text, but a number in the first row"),
        ({"more": 1}, r"row 2 has a column 'more', which the first row lacks"),
        ({"completions": 1}, r"row 2: column 'completions' has the name of an argument"),
        ({"\ud800": 1}, r"row 2: the name of column '\\ud800' is not valid Unicode"),
    ],
)
def test_a_column_that_functions_cannot_have_is_one_line(tmp_path, change, problem):
    rows = [ROWS[0], ROWS[1] | change, *ROWS[2:]]
    with pytest.raises(ConfigError, match=problem) as raised:
        installed(tmp_path, rows, verifier="rewards_of_mine:graded")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (None, "is null"),
        ("", "is empty"),
        ([{"role": "user", "content": ""}], "is not one user message of text"),
        ([{"role": "user", "content": "4 ?"}, {"role": "assistant", "content": "4"}], "is not one"),
    ],
)
def test_a_prompt_that_cannot_be_asked_is_one_line(tmp_path, prompt, problem):
    with pytest.raises(ConfigError, match=f"row 1: column 'prompt' {problem}|row 1: .*{problem}"):
        installed(tmp_path, [{"prompt": prompt, "answer": "4"}])


@pytest.mark.parametrize("verifier", ["numeric", "rewards_of_mine:lengths"])
def test_chat_messages_are_read_as_their_text(tmp_path, rewards, verifier):
    def content(with_messages):
        rows = []
        for i, row in enumerate(ROWS):
            user = {"role": "user", "content": row["prompt"]}
            system = {"role": "system", "content": "Be brief."}
            messages = [system, user] if i % 2 else [user]
            text = "\n\n".join(message["content"] for message in messages)
            rows.append(row | {"prompt": messages if with_messages else text})
        return installed(tmp_path, rows, verifier=verifier).rows.content

    assert content(with_messages=True) == content(with_messages=False), "they are the same task"
    with Scorer() as scorer:
        prompts = {scorer.score(ref(index=index), []).prompt for index in range(36)}
    assert {prompt.partition("\n\n")[0] for prompt in prompts if "\n" in prompt} == {"Be brief."}


@pytest.mark.parametrize(
    ("answer", "verifier", "problem"),
    [
        ("", "exact", "is empty, so that an empty answer would be right"),
        ("x" * 4097, "exact", "has more than 4096 bytes, and longer answers are not judged"),
        (10**120, "numeric", "its number is too long"),
    ],
)
def test_an_answer_that_nobody_could_give_is_one_line(tmp_path, answer, verifier, problem):
    rows = [*ROWS[:3], {"prompt": "What is 4 ?", "answer": answer}]
    with pytest.raises(ConfigError, match=f"row 4: .*{problem}"):
        installed(tmp_path, rows, verifier=verifier)


@pytest.mark.parametrize(
    ("answer", "verifier", "text"),
    [
        (2**70, "numeric", str(2**70)),
        (1.5, "numeric", "1.50"),
        ({"b": None, "a": [1]}, "json", '{"a": [1], "b": null}'),
        ("null", "exact", "null"),
    ],
)
def test_answer_column_may_be_json(tmp_path, answer, verifier, text):
    rows = [{"prompt": f"What is {i} ?", "answer": answer, "unused": None} for i in range(3)]
    installed(tmp_path, rows, verifier=verifier)
    with Scorer() as scorer:
        assert scorer.score(ref(), [text, "?"]).rewards == [1.0, 0.0]


PARQUET = {
    "day": [datetime.date(2024, 2, 29)] * 4,
    "at": [datetime.datetime(2024, 2, 29, 12, 30)] * 4,
    "took": [datetime.timedelta(seconds=90)] * 4,
    "price": [decimal.Decimal("1.50")] * 4,
    "big": [2**63 + i for i in range(4)],
    "tests": [[{"in": 1, "out": None}]] * 4,
    "fine": [True] * 4,
}


def parquet(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    if "big" in columns:
        columns["big"] = pyarrow.array(columns["big"], pyarrow.uint64())
    whole = {"prompt": [f"What is {i} ?" for i in range(4)], "answer": ["4"] * 4} | columns
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(whole), path)
    return str(path)


def test_columns_of_parquet_reach_a_reward_function(tmp_path, rewards):
    source, out = parquet(tmp_path / "rows.parquet", **PARQUET), str(tmp_path / "out.jsonl")
    asked = {"source": source, "local": True, "columns": None, "out": out, "bytes": 10**6}
    assert fetch.main(json.dumps(asked)) == 0
    installed(tmp_path, source=out, verifier="rewards_of_mine:typed")
    with Scorer() as scorer:
        assert scorer.score(ref(), [""]).rewards == [1.0]


@pytest.mark.parametrize(("used", "status"), [(None, 1), (["prompt", "answer"], 0)])
def test_used_bytes_of_parquet_are_one_line(tmp_path, capsys, used, status):
    source = parquet(tmp_path / "rows.parquet", image=[b"\x00\xff"] * 4)
    out = str(tmp_path / "out.jsonl")
    asked = {"source": source, "local": True, "columns": used, "out": out, "bytes": 10**6}
    assert fetch.main(json.dumps(asked)) == status
    said = capsys.readouterr().err
    assert ("row 1: column 'image' contains bytes, not text" in said) == bool(status)
    assert said.count("\n") == status


@pytest.mark.parametrize("name", ["sums", "data/../x", "rg/gcd"])
def test_a_dataset_cannot_take_another_task_s_name(tmp_path, name):
    with pytest.raises(ConfigError, match="is not data/<name>"):
        installed(tmp_path, name=name)


def test_changed_rows_file_stops_the_scorer(tmp_path):
    spec = installed(tmp_path)
    with open(spec.rows.path, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"???")
    with pytest.raises(Exception, match="has changed since this node started"), Scorer() as scorer:
        scorer.score(ref(), [])


def test_member_without_the_dataset_gets_an_error(tmp_path):
    installed(tmp_path, source=str(written(tmp_path / "swarm.jsonl")))
    entry = TaskEntry(NAME, registry.task_version(NAME), manifest.settings_text(NAME))
    assert "swarm.jsonl" in entry.settings
    assert requirements.task_problems(entry) == []
    installed(tmp_path, ROWS[:20])
    (problem,) = requirements.task_problems(entry)
    assert "a dataset with other rows or settings" in problem
    assert "rows.jsonl" in problem
    registry._TASKS.pop(NAME)
    (problem,) = requirements.task_problems(entry)
    assert "this node does not have: get it and name it in task.datasets" in problem


REWARDS = """
def lengths(prompts, completions, answer, note, **columns):
    return [1.0 if len(text) == n else None for text, n in zip(completions, note)]

def broken(prompts, completions, **columns):
    return [1.0, 1.0]

def both(prompts, completions, answer, **columns):
    return [{"correct": text == "right", "short": len(text) < 9} for text in completions]

def moody(prompts, completions, **columns):
    failing = 1 / 0 if completions == ["raise"] else 0
    rewards = {"raise": failing, "nan": [float("nan")], "much": [3], "two": [0.5, 0.5]}
    rewards["none"] = [None]
    return rewards.get(completions[0], [0.5])

def trls(completions, *, question, solution, level, tests, log_metric, log_extra, prompts):
    log_metric("mean", 0.5)
    log_extra("answer", completions)
    columns = zip(completions, question, solution, level, tests, prompts, strict=True)
    return [
        float((text, p, cases) == (s[0], f"Q: {q}", [{"in": n, "out": None}]) and type(n) is int)
        for text, q, s, n, cases, p in columns
    ]

def swallowing(completions, answer, **columns):
    try:
        import colorsys
    except Exception:
        return [0.0 for _ in completions]
    return [1.0 for _ in completions]

def looking(completions, **columns):
    import os, threading, time, traceback
    calls = {
        "os.stat": lambda: os.path.exists("/etc/passwd"),
        "time.sleep": lambda: time.sleep(0),
        "os.getcwd": os.getcwd,
        "threading.start_new_thread": threading.Thread(target=print).start,
        "traceback": lambda: traceback.format_stack(),
    }
    try:
        calls.get(completions[0], len)()
    except Exception:
        pass
    return [0.5]

def both_columns(completions, answer, solution):
    return [float(right == str(each)) for right, each in zip(answer, solution)]

async def awaited(completions, answer, **columns):
    return [float(text == gold) for text, gold in zip(completions, answer)]

class Never:
    def __await__(self):
        yield

async def waiting(completions, **columns):
    await Never()

def counted(completions, completion_ids, **columns):
    return [1.0]

def partly(completions, **columns):
    return [{"a": float(text == "right"), "b": None} for text in completions]

def typed(completions, day, at, took, price, big, tests, fine, **columns):
    assert (day, at) == (["2024-02-29"], ["2024-02-29T12:30:00"])
    assert (took, price, fine) == (["0:01:30"], ["1.50"], [True])
    assert 2**63 <= big[0] < 2**63 + 4
    return [float(tests == [[{"in": 1, "out": None}]])]

def unanswered(completions, **columns):
    return [float("answer" not in columns and columns["prompt"][0] in columns["note"][0])]

def looping(prompts, completions, **columns):
    while True:
        pass
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "rewards_of_mine.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(folder))
    return folder / "rewards_of_mine.py"


def case_of(number):
    return {"in": number, "out": None}


def test_reward_functions_get_what_trl_gives(tmp_path, rewards):
    rows = [
        {"question": f"What is {i} ?", "solution": [str(i)], "level": i, "tests": [case_of(i)]}
        for i in range(20)
    ]
    columns = {"prompt": "question", "answer": "solution", "template": "Q: {prompt}"}
    installed(tmp_path, rows, verifier="rewards_of_mine:trls", **columns)
    with Scorer() as scorer:
        number = scorer.score(ref(), []).prompt.split()[3]
        scored = scorer.score(ref(), [number, "?"])
    assert (scored.rewards, scored.errors) == ([1.0, 0.0], 0)


def test_the_right_answer_wins_over_a_column_named_answer(tmp_path, rewards):
    """The column `solution` is the right answer, and another column is called answer."""
    rows = [{"prompt": f"What is {i} ?", "solution": f"{i}", "answer": "no"} for i in range(20)]
    installed(tmp_path, rows, verifier="rewards_of_mine:awaited", answer="solution")
    with Scorer() as scorer:
        number = scorer.score(ref(), []).prompt.split()[2]
        assert scorer.score(ref(), [number, "no"]).rewards == [1.0, 0.0]
    rows = [{**row, "solution": [i]} for i, row in enumerate(rows)]
    installed(tmp_path, rows, verifier="rewards_of_mine:both_columns", answer="solution")
    with Scorer() as scorer:
        assert scorer.score(ref(), [""]).rewards == [1.0]


def test_a_reward_function_needs_no_column_of_answers(tmp_path, rewards):
    rows = [{"prompt": f"What is {i} ?", "note": f"What is {i} ? {i}"} for i in range(20)]
    installed(tmp_path, rows, verifier="rewards_of_mine:unanswered")
    with Scorer() as scorer:
        assert scorer.score(ref(), ["x"]).rewards == [1.0]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("counted", "requires completion_ids, which is not a column: there are prompts"),
        ("waiting", "the sandbox has no event loop"),
    ],
)
def test_broken_reward_function_is_one_line(tmp_path, rewards, function, problem):
    installed(tmp_path, verifier=f"rewards_of_mine:{function}")
    with pytest.raises(Exception, match=problem), Scorer():
        pass


def test_code_and_weights_of_a_reward_are_part_of_the_version(tmp_path, rewards):
    versions = set()
    for weights, code in (({}, ""), ({}, "# another byte\n"), ({"correct": 3.0}, "")):
        rewards.write_text(REWARDS + code)
        installed(tmp_path, verifier="rewards_of_mine:both", weights=weights)
        versions.add(registry.task_version(NAME))
    assert len(versions) == 3
    with Scorer() as scorer:
        scored = scorer.score(ref(), ["right", "much too long", "no", "x" * 90_000])
    assert scored.rewards == [1.0, 0.0, 0.25, 0.0]
    assert scored.components == [
        {"correct": 1.0, "short": 1.0},
        {"correct": 0.0, "short": 0.0},
        {"correct": 0.0, "short": 1.0},
        {},
    ]
    with pytest.raises(ConfigError, match="weights are for the components of a reward"):
        installed(tmp_path, weights={"correct": 2.0})


def test_failed_reward_costs_one_answer_and_is_named(tmp_path, rewards):
    installed(tmp_path, verifier="rewards_of_mine:moody")
    with Scorer() as scorer:
        for text, problem in (
            ("raise", "ZeroDivisionError: division by zero (rewards_of_mine.py:"),
            ("nan", "a reward of nan"),
            ("much", "3.0"),
            ("two", "returned 2 rewards"),
        ):
            scored = scorer.score(ref(), ["fine", text])
            assert (scored.rewards, scored.errors) == ([0.5, 0.0], 1)
            assert problem in scored.error
        scored = scorer.score(ref(), ["fine", "none"])
        assert (scored.rewards, scored.errors) == ([0.5, 0.0], 0)


def test_a_refusal_that_the_function_swallows_is_reported(tmp_path, rewards):
    installed(tmp_path, verifier="rewards_of_mine:swallowing")
    with Scorer() as scorer:
        scored = scorer.score(ref(), ["4", "5"])
        assert scored.errors == 0
        assert scored.refusals["import colorsys"] >= 2, "those of the check are reported too"
        assert scorer.score(ref(), ["4", "5"]).refusals == {"import colorsys": 2}
        told = scorer.statistics()
    assert told.refusals[NAME] == scored.refusals["import colorsys"] + 2
    assert told.last_refusal == f"{NAME}: import colorsys"


def test_refusals_without_an_audit_event_are_reported(tmp_path, rewards):
    installed(tmp_path, verifier="rewards_of_mine:looking")
    calls = ["os.stat", "time.sleep", "os.getcwd", "threading.start_new_thread"]
    with Scorer() as scorer:
        found = [scorer.score(ref(), [call]).refusals for call in calls]
        assert scorer.score(ref(), ["traceback"]).refusals == {}, "it changes no reward"
    assert found == [{call: 1} for call in calls]


def test_hanging_reward_function_costs_a_child(tmp_path, rewards):
    installed(tmp_path, verifier="rewards_of_mine:looping")
    with pytest.raises(Exception, match="scorer"), Scorer(ScorerLimits(startup=8.0)):
        pass


@pytest.mark.parametrize(
    ("rows", "verifier", "problem"),
    [
        ([{"prompt": "a", "solution": "1"}] * 3, "numeric", "row 1 has no column 'answer', only"),
        (ROWS, "rewards_of_mine:broken", "returned 2 rewards for one completion"),
    ],
)
def test_node_with_an_unusable_dataset_does_not_start(
    tmp_path, capsys, rewards, rows, verifier, problem
):
    file = written(tmp_path / "rows.jsonl", rows)
    source = f'{{source = "{file}", verifier = "{verifier}"}}'
    given = ['--set=task.names=["data/sums"]', f'--set=task.datasets={{"data/sums" = {source}}}']
    assert cli.run(["run", "--data-dir", str(tmp_path / "data"), *given]) == 78
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert problem in error
