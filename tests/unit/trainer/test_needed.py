"""Tokens that a reward does not need are not trained on."""

from types import SimpleNamespace

import pytest

from swarmnode.policy.ways import Row
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.rollouts.trainer import needed
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.rollouts.trainer.needed import needed_only
from swarmnode.rollouts.trainer.rescore import ScoringBudget
from swarmnode.tasks.frames import Scored, ScorerFailed
from swarmnode.wire.messages import Completion, RolloutGroup, SamplingParams, TaskRef, Turn

END = 0
TEXT = SimpleNamespace(eos_ids={END}, decode=lambda ids: "".join(map(chr, ids)))
"""A tokenizer with one token per character."""


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    """Install an ordinary task and an environment."""
    known = {
        "t": SimpleNamespace(generator="sum", environment=None),
        "game": SimpleNamespace(generator="sum", environment=object()),
    }
    monkeypatch.setattr(needed, "TASKS", known)


def group_of(texts, rewards, *, learnt=None, task="t", turns=None):
    """A group as it was admitted, and as `judge` accepted it."""
    completions = [
        Completion(text, len(text) + 1, -1.0, "eos", b"", b"", turns=turns or []) for text in texts
    ]
    group = RolloutGroup(
        TaskRef(task, "v", 0, 0), b"", b"", 0, 0, 0, SamplingParams(1.0, 1.0, 64), completions
    )
    external = ExternalGroup(b"c" * 32, "peer", group, "?", list(rewards), 0)
    rows = [Row([1], [*map(ord, text), END]) for text in texts]
    counts = learnt or [len(row.completion) for row in rows]
    logprobs = [[-1.0] * len(row.completion) for row in rows]
    accepted = TrainingGroup(
        rows, logprobs, list(rewards), [1.0] * len(rows), "peer", learnt=counts
    )
    return external, accepted


class Verifier:
    """A scorer that rewards a text with the answer in it, and counts the texts."""

    def __init__(self, answer):
        self.answer, self.texts = answer, 0

    def __call__(self, items):
        self.texts += sum(len(texts) for _, texts in items)
        return [Scored("?", [float(self.answer in t) for t in texts]) for _, texts in items]


def learnt(text, verifier):
    """The number of tokens of an answer that are trained on, and the text of its row."""
    external, accepted = group_of([text, "?"], [1.0, 0.0])
    after = needed_only(external, accepted, TEXT, verifier)
    row = after.rows[0]
    assert after.learnt[1] == 2, "an answer without a reward is not shortened"
    return after.learnt[0], "".join(map(chr, row.completion[: after.learnt[0]]))


@pytest.mark.parametrize("mark", [".", " ", "..", " !", "...", "x" * 7, "y" * 40])
def test_mark_after_the_answer_is_not_learnt(mark):
    count, taught = learnt("12" + mark, Verifier("12"))
    assert count >= 1
    assert not set(taught) & set(mark)


@pytest.mark.parametrize(
    ("text", "answer", "taught"),
    [
        ("12345.", "12345", (5, "12345")),
        ("12", "12", (3, "12\0")),
        ("7", "7", (2, "7\0")),
        ("7.", "7", (1, "7")),
    ],
)
def test_needed_answer_is_learnt_with_its_end_token(text, answer, taught):
    assert learnt(text, Verifier(answer)) == taught


def test_reasoning_before_an_answer_is_learnt():
    text = "4+8=12, so it is " + "12"
    read = lambda items: [Scored("?", [float(t.endswith("12")) for t in ts]) for _, ts in items]
    external, accepted = group_of([text, "?"], [1.0, 0.0])
    after = needed_only(external, accepted, TEXT, read)
    assert after.learnt == accepted.learnt


def test_a_shorter_cut_of_the_judge_stays():
    external, accepted = group_of(["1234..", "?"], [1.0, 0.0], learnt=[1, 2])
    assert needed_only(external, accepted, TEXT, Verifier("1234")).learnt[0] == 1


def test_rescored_texts_grow_with_the_log_of_the_length():
    for text, answer, most in (("1" + "a" * 1000, "1", 1 + 10), ("12", "12", 1)):
        verifier = Verifier(answer)
        learnt(text, verifier)
        assert verifier.texts <= most


def test_a_reward_that_is_lower_without_the_ending_needs_it():
    def partial(items):
        return [Scored("?", [0.5] * len(texts)) for _, texts in items]

    assert learnt("12!", partial)[0] == 4


def test_episodes_and_environments_are_not_scored_in_part():
    verifier = Verifier("12")
    for external, accepted in (
        group_of(["12.", "?"], [1.0, 0.0], task="game"),
        group_of(["12.", "?"], [1.0, 0.0], task="unknown"),
        group_of(["12.", "?"], [1.0, 0.0], turns=[Turn(3, 4)]),
    ):
        assert needed_only(external, accepted, TEXT, verifier) is accepted
    assert verifier.texts == 0


def test_failing_scorer_refuses_the_group():
    external, accepted = group_of(["12.", "?"], [1.0, 0.0])
    with pytest.raises(ScorerFailed):
        needed_only(external, accepted, TEXT, lambda items: [ScorerFailed("gone")])


class SlowVerifier(Verifier):
    """A verifier that takes `seconds` for each text."""

    now, seconds = 0.0, 1.0

    def __call__(self, items, *, reveal=False):
        found = super().__call__(items)
        self.now += self.seconds * sum(len(texts) for _, texts in items)
        return found


def shorten(budget, verifier, peer, groups):
    """Shorten answers of groups of a peer, and return how many were refused."""
    refused = 0
    for _ in range(groups):
        external, accepted = group_of(["12."] * 4 + ["?"], [1.0] * 4 + [0.0])
        try:
            needed_only(external, accepted, TEXT, budget.of(peer, verifier))
        except ScorerFailed:
            refused += 1
    return refused


def test_a_slow_verifier_costs_a_bounded_time_per_peer():
    verifier = SlowVerifier("12")
    budget = ScoringBudget(lambda: verifier.now)
    assert shorten(budget, verifier, "a", 20) == 19
    cost = verifier.now
    assert shorten(budget, verifier, "b", 1) == 0
    verifier.now += 3600
    before = verifier.now
    assert shorten(budget, verifier, "a", 20) == 19
    assert verifier.now <= before + cost


def test_a_fast_verifier_shortens_every_answer():
    verifier = SlowVerifier("12")
    verifier.seconds = 1e-3
    assert shorten(ScoringBudget(lambda: verifier.now), verifier, "a", 100) == 0
