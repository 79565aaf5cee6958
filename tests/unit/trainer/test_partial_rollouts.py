"""The continuous engine through whole steps: sampling, scoring, updates."""

import pytest

from swarmnode.config import Config, PolicyConfig, TaskConfig, TrainingConfig, WeightsConfig
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy
from swarmnode.policy.ways import Row
from swarmnode.tasks.client import Scored
from swarmnode.trainer.sampler import MAX_LAG
from tests.unit.trainer.test_episode_engines import Node

STEPS = 6


class EverySecond:
    """A scorer for which every second completion is right."""

    def score_many(self, items):
        return [
            Scored("Calculate 10 + 8.", [float(i % 2) for i in range(len(texts))])
            for _, texts in items
        ]


@pytest.fixture(scope="module")
def trained():
    """Return (engine, experiences, updates) after some steps with few concurrent rows, so
    that many requests are unfinished at each update."""
    training = TrainingConfig(
        num_generations=4,
        groups_per_step=2,
        options=["continuous"],
        per_device_train_tokens=64,
        learning_rate=1e-4,
    )
    config = Config(
        training=training,
        policy=PolicyConfig(devices="cpu"),
        task=TaskConfig(names=["rg/gcd"]),
        weights=WeightsConfig(rule="off"),
    )
    node = Node(config, load_policy(config.policy), EverySecond())
    experiences, updates = zip(*(node.step() for _ in range(STEPS)), strict=True)
    return node.engine, experiences, updates


def test_unfinished_rows_continue_under_the_next_version(trained):
    _, experiences, updates = trained
    lags = [lag for experience in experiences for lag in experience.lags]
    assert all(update.stepped for update in updates)
    assert max(experiences[0].lags) == 0 < max(lags) <= MAX_LAG


def test_the_correction_covers_tokens_of_earlier_versions(trained):
    """The effective share is 1 if the present policy sampled all tokens, and lower if an older one
    sampled some; at this learning rate, only a little lower."""
    *_, updates = trained
    assert all(0.9 < update.effective_own < 1.0 + 1e-5 for update in updates)
    assert updates[0].effective_own == pytest.approx(1.0, abs=1e-6)
    assert min(update.effective_own for update in updates) < 1.0 - 1e-7


def test_evaluations_are_answered_by_the_engine_that_samples(trained):
    engine, *_ = trained
    prompts = ["What is 3 + 4?", "Calculate 10 + 8."]
    first, again = (
        engine.generate(prompts, Sampling(4, 8), engine.random_generator(5)) for _ in range(2)
    )
    assert first == again
    recorded = [x for sample in first for c in sample.completions for x in c.logprobs]
    rows = [Row(sample.prompt_ids, c.ids) for sample in first for c in sample.completions]
    scored = [x for row, _ in engine.score(rows, 1.0) for x in row]
    assert recorded == pytest.approx(scored, abs=1e-4)
