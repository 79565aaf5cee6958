"""The owner's tasks: found and hashed without being run, run in the sandbox only, errors in one
line.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from swarmnode import cli
from swarmnode.config import Config
from swarmnode.errors import ConfigError
from swarmnode.swarm import manifest, requirements
from swarmnode.tasks import owner_code, registry
from swarmnode.tasks.client import Scorer, ScorerFailed, ScorerLimits, TaskUnknown
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.wire.messages import TaskEntry
from tests.support.manifests import founded
from tests.support.registered import ref

WORDS = """
import pathlib
import letters_of_mine.alphabet

TRACE = pathlib.Path(__file__).with_name("imported.txt")

def reverse(rng, length=4):
    word = "".join(rng.choice(letters_of_mine.alphabet.LETTERS) for _ in range(length))
    return f"Spell this backward: {word}", lambda answer: float(answer == word[::-1])

def snoop(rng):
    return "Snoop", lambda answer: float(len(open("/etc/passwd").read()) > 0)

def forgetful(rng, calls=[]):
    calls.append(1)
    return f"{len(calls)}", lambda answer: 1.0

def boast(rng):
    return "Boast", lambda answer: 2.0

def crash(rng):
    raise RuntimeError("no question today")

def moody(rng):
    number = rng.randrange(1000)
    if number % 10 == 3:
        raise AssertionError(f"not {number}")
    def reward(answer):
        if answer == "leave":
            raise SystemExit(3)
        if answer == "much":
            return 7.0
        if answer:
            raise UnicodeError("no letter that I know")
        return 0.0
    return f"Say {number}", reward

def few(rng):
    return f"Say {rng.randrange(60)}", lambda answer: 0.0

def apart(rng, split):
    return f"{split} {rng.randrange(10)}", lambda answer: 0.0
"""
NAME = "letters_of_mine.words:reverse"


@pytest.fixture
def package(tmp_path, monkeypatch, tasks_as_before):
    """A package with a task, on the path of this process only."""
    folder = tmp_path / "site" / "letters_of_mine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "alphabet.py").write_text("LETTERS = 'abcdef'\n")
    (folder / "words.py").write_text(WORDS)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def installed(*tasks, **settings):
    registry.install(tasks, settings)
    return [registry.task_version(task) for task in tasks]


def test_question_and_reward_come_from_the_owners_code(package):
    installed(NAME)
    with Scorer() as scorer:
        prompts = [scorer.score(ref(NAME, index), []).prompt for index in range(20)]
        word = prompts[0].rpartition(" ")[2]
        answers = [word[::-1], f"{word}?", f"so: <answer> {word[::-1]} </answer>"]
        assert scorer.score(ref(NAME), answers).rewards == [1.0, 0.0, 1.0]
        assert scorer.statistics().failures == 0
    assert len(set(prompts)) > 10
    with Scorer() as again:
        assert [again.score(ref(NAME, index), []).prompt for index in range(20)] == prompts


def test_settings_reach_the_function_and_the_version(package):
    (plain,) = installed(NAME)
    registry.install([NAME], {NAME: {"length": 9}})
    assert registry.task_version(NAME) != plain
    with Scorer() as scorer:
        assert len(scorer.score(ref(NAME), []).prompt.rpartition(" ")[2]) == 9
        with pytest.raises(TaskUnknown, match="version"):
            scorer.score(ref(NAME, version=plain), [])


@pytest.mark.parametrize("file", ["words.py", "alphabet.py", "list.txt"])
def test_the_version_follows_every_file_of_the_package(package, file):
    (before,) = installed(NAME)
    with open(package / file, "a") as changed:
        changed.write("# another byte\n")
    assert installed(NAME) != [before]


def test_version_ignores_location_and_bytecode(package, tmp_path, monkeypatch):
    (before,) = installed(NAME)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "words.cpython-311.pyc").write_bytes(b"x")
    elsewhere = tmp_path / "elsewhere"
    package.parent.rename(elsewhere)
    monkeypatch.syspath_prepend(str(elsewhere))
    assert installed(NAME) == [before]


def test_no_process_but_the_scorer_runs_it(package):
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "words.py").write_text("raise SystemExit('imported')\n")
    installed(NAME)
    registry.check_names([NAME])
    config = Config.model_validate({"task": {"names": [NAME]}})
    assert manifest.draft(config, bytes(32), [], manifest.Terms(1)).tasks[0].id == NAME
    assert not any(name.startswith("letters_of_mine") for name in sys.modules)


def test_the_sandbox_holds_for_it(package):
    task = "letters_of_mine.words:snoop"
    installed(task)
    with pytest.raises(ScorerFailed, match="PermissionError"), Scorer():
        pass


def test_changed_code_is_not_run(package):
    installed(NAME)
    with Scorer() as scorer:
        scorer.score(ref(NAME), [])
        (package / "words.py").write_text(WORDS + "\n")
        scorer.close()
        with pytest.raises(ScorerFailed, match=r"has changed in .* restart"):
            scorer.score(ref(NAME), [])


def test_stale_bytecode_beside_the_source_is_not_run(package):
    """The bytecode was compiled from another source with the same time and size."""
    source = package / "words.py"
    honest = source.read_text()
    source.write_text(honest.replace("backward", "sideways"))
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(package)], check=True)
    stat = source.stat()
    source.write_text(honest)
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    installed(NAME)
    with Scorer() as scorer:
        assert "backward" in scorer.score(ref(NAME), []).prompt


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("forgetful", "the same seed gave two questions"),
        ("boast", "not in 0 to 1"),
        ("crash", "no question today"),
        ("missing", "missing"),
    ],
)
def test_broken_task_is_one_line_at_start(package, tmp_path, capsys, function, says):
    task = f"letters_of_mine.words:{function}"
    named = (f"--set=task.{key}=[{json.dumps(task)}]" for key in ("modules", "names"))
    options = ["--data-dir", str(tmp_path / "data"), *named]
    assert cli.run(["run", *options]) == 78
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
    assert cli.run(["doctor", *options]) == 78
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("../words:reverse", "is not <module>:<function>"),
        ("json:loads", "of Python itself"),
        ("nowhere_installed:task", "pip install"),
    ],
)
def test_unknown_or_ambiguous_module_is_refused(package, task, says):
    with pytest.raises(ConfigError, match=says):
        owner_code.find(task)


def test_manifest_names_load_no_module(package):
    with pytest.raises(ConfigError, match=r"not in task\.modules"):
        registry.check_names([NAME])
    (problem,) = requirements.can_honour(
        founded(tasks=[TaskEntry(NAME, "0" * 16, "{}")]).manifest, Config()
    )
    assert "name it in task.modules" in problem


def test_members_with_other_code_cannot_honour_the_manifest(package):
    (version,) = installed(NAME)
    theirs = founded(tasks=[TaskEntry(NAME, version, "{}")]).manifest
    assert requirements.can_honour(theirs, Config()) == []
    (package / "alphabet.py").write_text("LETTERS = 'abcdeg'\n")
    installed(NAME)
    (problem,) = requirements.can_honour(theirs, Config())
    assert version in problem
    assert "exact files" in problem


def test_missing_module_does_not_stop_key_commands(package, tmp_path, capsys):
    given = ["--data-dir", str(tmp_path), f'--set=task.modules=["{NAME}"]']
    given += [f'--set=task.settings={{"{NAME}" = {{length = 3}}}}']
    assert cli.run(["config", "show", "--json", *given]) == 0
    assert json.loads(capsys.readouterr().out)["task.settings"]["value"] == {NAME: {"length": 3}}
    (tmp_path / "c.toml").write_text('[task]\nmodules = ["nowhere_installed:task"]\n')
    given = ["--config", str(tmp_path / "c.toml"), "--data-dir", str(tmp_path)]
    assert cli.run(["key", "show", *given]) == 0
    assert cli.run(["config", "show", *given]) == 78


MOODY, FEW, APART = (f"letters_of_mine.words:{name}" for name in ("moody", "few", "apart"))


def test_reward_exception_counts_as_zero(package):
    installed(MOODY)
    with Scorer() as scorer:
        for index in range(40):
            (scored,) = scorer.score_many([(ref(MOODY, index), ["", "x", "leave", "much"])])
            if isinstance(scored, ScorerFailed):
                assert re.search(r"AssertionError: not \d+ \(words.py:\d+, in moody\)", str(scored))
                continue
            assert scored.rewards == [0.0, 0.0, 0.0, 0.0]
            assert scored.errors == 3
            assert scored.error == "ValueError: a reward of 7.0, not in 0 to 1"
        told = scorer.statistics()
    assert (told.starts, told.failures) == (1, 0)
    assert told.reward_errors[MOODY] >= 3 * 30
    assert told.last_reward_error.startswith(f"{MOODY}: ")


@pytest.mark.parametrize("task", [FEW, APART])
def test_held_out_questions_are_never_met_in_training(package, task):
    installed(task)
    with Scorer() as scorer:
        results = scorer.score_many([(ref(task, index), []) for index in range(400)])
        trained = {result.prompt for result in results}
        held_out = {
            scorer.score(ref(task, index, seed=evaluation_seed(task)), []).prompt
            for index in range(16)
        }
    assert not trained & held_out
    assert len(trained) > 9
    assert len(held_out) > 1


def test_module_that_starts_threads_is_refused(package):
    pytest.importorskip("datasets")
    thread = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    (package / "words.py").write_text(
        f"import pyarrow, datasets, threading, time\n{thread}\n{WORDS}"
    )
    installed(NAME)
    with (
        pytest.raises(ScorerFailed, match=r"name the dataset in task\.datasets instead"),
        Scorer(ScorerLimits(startup=60)),
    ):
        pass
