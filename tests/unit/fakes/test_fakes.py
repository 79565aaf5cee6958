"""The in-process scorer and the tiny policy behave like the real ones. tests/unit/p2p/test_api.py
checks the in-memory network."""

import sys

import pytest

from swarmnode.config import PolicyConfig
from swarmnode.policy.load import load_policy
from swarmnode.tasks import registry
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.frames import ScorerFailed, TaskUnknown
from swarmnode.wire.messages import TaskRef
from tests.support.fakes.policy import tiny_policy, write_tiny_policy
from tests.support.fakes.scorer import InProcessScorer

WORDS = """
def reverse(rng, letters=4):
    word = "".join(rng.choice("abcdefgh") for _ in range(letters))
    def reward(answer):
        if answer == "raise":
            raise ValueError("no word")
        return float(answer == word[::-1])
    return f"Write {word} backwards.", reward
"""
ANSWERS = ["12", "<answer>12</answer>", "raise", "x" * 5000, "0", "dcba"]


@pytest.fixture
def words(tmp_path, monkeypatch):
    (tmp_path / "words_of_a_test.py").write_text(WORDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = "words_of_a_test:reverse"
    registry.install([task], {})
    yield task
    sys.modules.pop("words_of_a_test", None)


async def test_scores_equal_those_of_the_child(words):
    refs = [
        TaskRef(task, registry.task_version(task), 2**20, 5)
        for task in ("builtin/copy", "builtin/sum", "rg/gcd", words)
    ]
    results = await InProcessScorer().score_many([(ref, ANSWERS) for ref in refs])
    with Scorer() as scorer:
        assert results == scorer.score_many([(ref, ANSWERS) for ref in refs])


async def test_failed_item_is_an_error_in_its_place():
    scorer = InProcessScorer(poison="bad")
    good = TaskRef("builtin/sum", registry.task_version("builtin/sum"), 0, 0)
    unknown = TaskRef("builtin/none", "0", 0, 0)
    results = await scorer.score_many([(good, ["1"]), (unknown, ["1"]), (good, ["1", "so bad"])])
    assert [type(one) for one in results[1:]] == [TaskUnknown, ScorerFailed]
    assert results[0].prompt
    assert scorer.calls == 1


def test_equal_arguments_make_equal_policies(tmp_path):
    one, other = (
        load_policy(PolicyConfig(model=str(write_tiny_policy(tmp_path / name)), devices="cpu"))
        for name in "ab"
    )
    third = tiny_policy(tmp_path / "c", seed=1)
    assert one.fingerprint == other.fingerprint != third.fingerprint
    assert one.tokenizer_hash == third.tokenizer_hash
    assert one.statistics().parameters < 200_000
