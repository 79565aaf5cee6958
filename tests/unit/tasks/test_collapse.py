"""`reporting.WinningAnswers`: one answer to every question is detected in majority votes."""

import json

import pytest

from swarmnode.config import DatasetConfig
from swarmnode.rollouts.groups import OwnGroup
from swarmnode.tasks import registry
from swarmnode.trainer.reporting import FEWEST, WINDOW, WinningAnswers
from swarmnode.wire.messages import Completion, SamplingParams, TaskRef

NAME = "data/open"

pytestmark = pytest.mark.usefixtures("tasks_as_before")


@pytest.fixture
def ask(tmp_path):
    """A function that makes an own group of a dataset with the verifier `majority`."""
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(20)))
    dataset = DatasetConfig(source=str(source), verifier="majority")
    registry.install_datasets({NAME: dataset}, tmp_path / "datasets")

    def group(winner, name=NAME, rewards=(1.0, 0.0)):
        texts = [f"I say {winner}", "I say 1001"]
        done = [Completion(text, 3, -1.0, "eos", b"", b"") for text in texts]
        ref = TaskRef(name, registry.task_version(name), 0, 0)
        return OwnGroup(ref, 0, 0, SamplingParams(1.0, 1.0, 8), done, list(rewards))

    return group


def test_one_answer_to_every_question_is_seen(ask):
    winning = WinningAnswers()
    winning.sampled([ask(i) for i in range(WINDOW)])
    assert winning.top_share == pytest.approx(1 / WINDOW)
    winning.sampled([ask(f"{7}.0") for _ in range(WINDOW // 2)] + [ask(7)] * (WINDOW // 2))
    assert winning.top_share == 1.0


def test_only_groups_with_a_majority_count(ask):
    winning = WinningAnswers()
    winning.sampled([ask(7, rewards=(0.0, 0.0)), ask(7, name="rg/gcd")] * FEWEST)
    assert winning.top_share is None
    winning.sampled([ask(7)] * (FEWEST - 1))
    assert winning.top_share is None
    winning.sampled([ask(7)])
    assert winning.top_share == 1.0
