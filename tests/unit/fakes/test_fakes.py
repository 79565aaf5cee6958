"""The in-process scorer and the tiny policy behave like the real ones. tests/unit/p2p/test_api.py
checks the in-memory network."""

import sys

import pytest

from swarmnode.tasks import registry
from swarmnode.tasks.client import Scorer
from swarmnode.wire.messages import TaskRef
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
