"""Built-in tasks with other numbers or another extraction: part of the version, tried in the
scorer, in the manifest."""

from __future__ import annotations

import json
import re

import pytest

from swarmnode.errors import ConfigError
from swarmnode.swarm import requirements
from swarmnode.swarm.manifest import settings_text
from swarmnode.tasks import registry
from swarmnode.tasks.client import Scorer, check_tasks
from swarmnode.wire.messages import TaskEntry, TaskRef

pytestmark = pytest.mark.usefixtures("tasks_as_before")


def test_generator_settings_change_the_version() -> None:
    plain = registry.task_version("rg/chain_sum")
    registry.install(
        [], {"rg/chain_sum": {"min_digits": 4, "max_digits": 4, "extract": "last_number"}}
    )
    version = registry.task_version("rg/chain_sum")
    assert version != plain
    told = json.loads(settings_text("rg/chain_sum"))
    assert (told["min_digits"], told["extract"]) == (4, "last_number")
    with Scorer() as scorer:
        ref = TaskRef("rg/chain_sum", version, 0, 0)
        prompt = scorer.score(ref, []).prompt
        terms = [int(text) for text in re.findall(r"\d+", prompt)]
        assert all(len(str(term)) == 4 for term in terms)
        right = sum(terms) if "+" in prompt else terms[0] - terms[1]
        assert scorer.score(
            ref, [f"Let me see. It is {right}.", "It is 1.", f"<answer>{right}</answer>"]
        ).rewards == [1.0, 0.0, 1.0]
    registry.install([], {"rg/chain_sum": {}})
    assert registry.task_version("rg/chain_sum") == plain


@pytest.mark.parametrize(
    ("task", "given", "problem"),
    [
        ("rg/basic_arithmetic", {"operators": "/"}, r"'operators' cannot be set; there are"),
        ("rg/gcd", {"max_value": -1}, r"max_value is -1, not a number from 0 to 1000000 such as"),
        ("rg/gcd", {"extract": "somewhere"}, r"extract is 'somewhere', not one of auto, tag"),
        ("data/x", {"extract": "tag"}, r"neither in task.modules nor a built-in task; a dataset"),
    ],
)
def test_unknown_setting_names_the_known_ones(task, given, problem) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        registry.install([], {task: given})
    assert "\n" not in str(raised.value)


def test_unknown_generator_settings_are_one_line_before_the_start() -> None:
    registry.install([], {"rg/gcd": {"min_value": 30}})  # above max_value
    with pytest.raises(ConfigError, match=r"task\.settings\.rg/gcd: "):
        check_tasks(["rg/gcd"])


def test_a_member_with_other_settings_is_told_which() -> None:
    theirs = TaskEntry("rg/gcd", "0" * 16, json.dumps({"max_value": 500, "min_value": 1}))
    (problem,) = requirements.task_problems(theirs)
    assert 'the swarm has {"max_value": 500' in problem
    assert problem.endswith("see task.settings")


def test_extraction_can_be_set_for_built_in_tasks() -> None:
    plain = registry.task_version("builtin/sum")
    registry.install([], {"builtin/sum": {"extract": "last_number"}})
    assert registry.task_version("builtin/sum") != plain
    with Scorer() as scorer:
        ref = TaskRef("builtin/sum", registry.task_version("builtin/sum"), 0, 0)
        left, right = map(int, scorer.score(ref, []).prompt.rstrip("=").split("+"))
        assert scorer.score(ref, [f"{left} + {right} = {left + right}", "no"]).rewards == [1.0, 0.0]
