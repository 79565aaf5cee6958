"""Tasksets of verifiers: rows from their data, rewards from their functions. With
verifiers where it is installed, else with a stand-in of the same signatures.

pytest tests/unit/tasks/test_tasksets.py
"""

import importlib
import sys

import pytest

from swarmnode.config import DatasetConfig
from swarmnode.errors import ConfigError
from swarmnode.tasks import dataset, registry, taskset
from swarmnode.tasks.frames import Question
from swarmnode.tasks.scorer import judge
from tests.support.tasksets import IS_REAL

NAME = "data/sums"
SOURCE = "verifiers:sums-of-mine"
SUMS = """
import verifiers.v1 as vf
from verifiers.v1 import Runtime

class Waiting:
    def __await__(self):
        yield

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def brief(self, task: SumData, trace: vf.Trace) -> dict[str, float]:
        return {"brief": float(len(trace.last_reply) < len(task.prompt_text))}

    @vf.reward
    async def tested(self, trace: vf.Trace, runtime: Runtime) -> float:
        raise AssertionError("nobody has a runtime here")

class Sums(vf.Taskset[SumTask]):
    def load(self):
        for number in range(20):
            question = SumData(
                prompt=f"What is {number} + 1?", system_prompt="Add.", answer=str(number + 1)
            )
            yield SumTask(question, self.config.task)

__all__ = ["Sums"]
"""


@pytest.fixture
def written(site):
    """Return a function that writes the taskset with some changes."""

    def write(was="", now=""):
        assert was in SUMS
        (site / "sums_of_mine.py").write_text(SUMS.replace(was, now) if was else SUMS)

    return write


def installed(tmp_path, **settings):
    registry.install_datasets(
        {NAME: DatasetConfig(source=SOURCE, **settings)}, tmp_path / "datasets"
    )
    return registry.TASKS[NAME]


def asked(spec, *answers):
    """Judge answers to the first question as the scorer child does."""
    settings = dataset.Settings.from_settings(spec.settings)
    task = dataset.DatasetTask(
        NAME, spec.rows, settings, taskset.reward_function(SOURCE, spec.source)
    )
    return judge(
        Question(NAME, 4 << 20, 0, list(answers)), lambda name, *address: task.item(*address)
    )


def right_of(prompt):
    return str(int(prompt.split()[3]) + 1)


def test_a_taskset_asks_its_prompts_and_its_rewards_judge(tmp_path, written):
    written()
    spec = installed(tmp_path)
    assert (spec.rows.rows, spec.rows.held_out, spec.rows.origin) == (20, 2, SOURCE)
    assert "verifiers" not in sys.modules, "the node's processes do not import it"
    prompt = asked(spec).prompt
    assert prompt.startswith("Add.\n\nWhat is ")
    scored = asked(spec, right_of(prompt), "0", "x" * 99)
    assert scored.rewards == pytest.approx([1.0, 0.2, 0.0]), (
        "its weights are 1 and 0.25; what needs a runtime is left out"
    )
    assert scored.errors == 0


def test_code_and_library_version_are_part_of_the_version(tmp_path, written, monkeypatch):
    versions = set()
    for code, rows in (("range(20)", 20), ("range(30)", 30), ("range(0, 20)", 20)):
        written("range(20)", code)
        assert installed(tmp_path).rows.rows == rows, "rows are made again"
        versions.add(registry.task_version(NAME))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.1")
    installed(tmp_path)
    assert registry.task_version(NAME) not in versions
    assert len(versions) == 3


@pytest.mark.parametrize(
    ("was", "now", "problem"),
    [
        ("[SumTask]):", "[SumTask]):\n    INFINITE = True", "is infinite: use a finite part"),
        ("[SumData]):", "[SumData]):\n    NEEDS_CONTAINER = True", "needs a container"),
        ("range(20)", "range(1)", "too few to train on"),
        ('__all__ = ["Sums"]', "1 / 0", "ZeroDivisionError"),
    ],
)
def test_unusable_taskset_is_one_line(tmp_path, written, was, now, problem):
    written(was, now)
    with pytest.raises(ConfigError, match=problem) as raised:
        installed(tmp_path)
    assert "\n" not in str(raised.value)
    assert NAME in str(raised.value)


@pytest.mark.parametrize(
    ("was", "now", "problem"),
    [
        (
            "return float(trace",
            "import asyncio; await asyncio.sleep(1); return float(trace",
            "no running event loop",
        ),
        ("return float(trace", "await Waiting(); return float(trace", "the coroutine waits"),
        ("return float(trace", "return float('nan') + (trace", "a reward of nan"),
        ("return float(trace", "return 5.0 * (trace", "a reward of 4.2, not in 0 to 1"),
        ("[SumData]):", "[SumData]):\n    plugged_judges = lambda task: ['gpt']", "a judge is"),
    ],
)
def test_unavailable_reward_is_0_and_named(tmp_path, written, was, now, problem):
    written(was, now)
    spec = installed(tmp_path)
    scored = asked(spec, right_of(asked(spec).prompt))
    assert (scored.rewards, scored.errors) == ([0.0], 1)
    assert problem in scored.error


def test_weights_below_one_together_are_left_as_they_are(tmp_path, written):
    written("@vf.reward\n    async def correct", "@vf.metric\n    async def correct")
    assert asked(installed(tmp_path), "1", "x" * 99).rewards == [0.25, 0.0]


def test_taskset_without_a_usable_reward_is_refused(tmp_path, written):
    written("trace: vf.Trace)", "trace: vf.Trace, runtime: Runtime)")
    assert "it has no reward that works without a runtime" in asked(installed(tmp_path), "1").error


@pytest.mark.parametrize(
    "settings", [{"verifier": "numeric"}, {"prompt": "question"}, {"revision": "main"}]
)
def test_values_of_a_taskset_cannot_be_overridden(tmp_path, written, settings):
    written()
    told = f"{next(iter(settings))}: a taskset of verifiers sets that itself"
    with pytest.raises(ConfigError, match=told):
        installed(tmp_path, **settings)


def test_a_taskset_that_is_not_installed_is_named(tmp_path, site):
    with pytest.raises(ConfigError, match="no module 'sums_of_mine' is installed"):
        installed(tmp_path)


@pytest.mark.skipif(IS_REAL, reason="verifiers is installed here")
def test_without_verifiers_the_remedy_is_named(tmp_path, site, written, monkeypatch):
    written()
    monkeypatch.setenv("PYTHONPATH", str(site))
    with pytest.raises(ConfigError, match="pip install 'verifiers>="):
        installed(tmp_path)
