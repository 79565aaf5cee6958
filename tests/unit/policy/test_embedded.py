"""Tokenizer of the embedded policy, and the tasks that it was built for."""

import json

import pytest

from swarmnode.config import TaskConfig
from swarmnode.tasks.registry import TASKS
from tools.build_tiny import SETTINGS, mine_phrases, questions


def test_tasks_are_those_of_the_registry():
    wanted = {
        t: json.loads(json.dumps(dict(s.settings)))
        for t, s in TASKS.items()
        if t in TaskConfig().names
    }
    assert json.loads(json.dumps(SETTINGS)) == wanted


@pytest.mark.parametrize("task", SETTINGS)
def test_prompts_round_trip_and_are_short(embedded, task):
    unknown = embedded.tokenizer.unk_token_id
    for question in questions({task: SETTINGS[task]}, 100, block=7):
        ids = embedded.encode_prompt(question.prompt)
        assert embedded.decode(ids).removesuffix("<reply>") == question.prompt
        assert unknown not in ids
        assert len(ids) <= 10


def test_operands_never_become_part_of_a_phrase():
    prompts = [f"How many 1 bits are in {n}, then {n * 7} + {n}?" for n in range(100)]
    assert mine_phrases(prompts) == {"How many 1 bits are in ", ", then "}
