"""The continuous engine through whole steps: sampling, scoring, updates."""

import pytest

from swarmnode.config import Config, PolicyConfig, TrainingConfig, WeightsConfig
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy
from swarmnode.policy.logprobs import score
from swarmnode.rollouts.trainer.batch import assemble
from swarmnode.tasks.client import Scored
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.sampler import MAX_LAG, Sampler
from swarmnode.trainer.state import Counters

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
    """Return (engine, policy, experiences, updates) after some steps with few concurrent rows, so
    that many requests are unfinished at each update."""
    training = TrainingConfig(
        num_generations=4,
        groups_per_step=2,
        options=["continuous"],
        per_device_train_tokens=64,
        learning_rate=1e-4,
    )
    counters = Counters(peer="12D3KooWme", swarm="00" * 32)
    policy = load_policy(PolicyConfig(devices="cpu"))
    engine = make_whole_policy(
        Config(training=training, weights=WeightsConfig(rule="off")),
        policy,
        counters,
        lambda message: None,
    )
    sampler = Sampler(
        training,
        ["rg/gcd"],
        engine,
        EverySecond(),
        policy.random_generator(0),
        counters,
    )
    experiences, updates = [], []
    for _ in range(STEPS):
        experiences.append(sampler(2))
        updates.append(engine.update(assemble(experiences[-1].trained, "grpo")))
        counters.policy_version += updates[-1].stepped
    return engine, policy, experiences, updates


def test_unfinished_rows_continue_under_the_next_version(trained):
    _, _, experiences, updates = trained
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
    engine, policy, *_ = trained
    prompts = ["What is 3 + 4?", "Calculate 10 + 8."]
    first, again = (
        engine.generate(prompts, Sampling(4, 8), engine.random_generator(5)) for _ in range(2)
    )
    assert first == again
    recorded = [x for sample in first for c in sample.completions for x in c.logprobs]
    rows = [(sample.prompt_ids, c.ids) for sample in first for c in sample.completions]
    assert recorded == pytest.approx([x for row in score(policy, rows, 1.0) for x in row], abs=1e-4)
