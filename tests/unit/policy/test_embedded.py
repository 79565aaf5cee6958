"""Files of the embedded policy, and the reward that it starts with in demo and documentation."""

import hashlib
import json
import string
from importlib import resources

import pytest

from swarmnode.config import TaskConfig
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.wire.messages import TaskRef
from tools.build_tiny import SETTINGS, mine_phrases, questions

from swarmnode.policy.generate import Sampling, generate  # isort: skip

FILES = resources.files("swarmnode.policy") / "embedded"
PROFILE = json.loads((FILES / "PROFILE.json").read_text())


def test_files_are_the_ones_that_were_measured():
    assert {
        n: hashlib.sha256((FILES / n).read_bytes()).hexdigest() for n in PROFILE["sha256"]
    } == PROFILE["sha256"]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(PROFILE["sha256"])


def test_weights_are_small():
    assert len((FILES / "model.safetensors").read_bytes()) < 500_000


def test_no_path_of_the_building_machine():
    for file in FILES.iterdir():
        if file.name.endswith((".json", ".jinja")):
            assert not any(s in file.read_text() for s in ("/home", "/root", "/tmp", "/work"))


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


def test_printable_ascii_round_trips(embedded):
    text = "".join(c for c in string.printable if c.isprintable()) + "\n"
    assert embedded.decode(embedded.tokenize_completion(text, "eos")) == text


def test_operands_never_become_part_of_a_phrase():
    prompts = [f"How many 1 bits are in {n}, then {n * 7} + {n}?" for n in range(100)]
    assert mine_phrases(prompts) == {"How many 1 bits are in ", ", then "}


def test_start_profile(embedded):
    """Sampled at temperature 1 and judged by training's scorer, few answers are accepted, but most
    are right in another format."""
    refs = [
        TaskRef(t, task_version(t), evaluation_seed(t, 3), i) for t in SETTINGS for i in range(24)
    ]
    with Scorer() as scorer:
        prompts = [scorer.prompt(ref) for ref in refs]
        groups = generate(embedded, prompts, Sampling(8, 8), embedded.random_generator(0))
        texts = [[c.text for c in g.completions] for g in groups]
        values = [
            [t.removeprefix("=").removeprefix(">").removesuffix(".") for t in g] for g in texts
        ]
        mean = lambda asked: (
            sum(sum(s.rewards) for s in scorer.score_many(list(zip(refs, asked, strict=True))))
            / (8 * len(refs))
        )
        accepted, right = mean(texts), mean(values)
    assert 0.005 < accepted < 0.03
    assert 0.5 < right < 0.7
    assert abs(accepted - PROFILE["start_profile"]["accepted"]) < 0.01
