"""Two runs with one seed are equal: nothing in a step depends on the clock."""

import torch

from swarmnode.config import Config, PolicyConfig, TrainingConfig, WeightsConfig
from swarmnode.policy.load import load_policy
from swarmnode.rollouts.trainer.batch import assemble
from swarmnode.tasks.client import Scored
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters

TRAINING = TrainingConfig(
    num_generations=4, groups_per_step=2, max_completion_length=40, learning_rate=1e-3
)


class Even:
    """A scorer that rewards texts of even length."""

    def score_many(self, items):
        return [Scored("Calculate 3 + 4. ", [1.0 - len(t) % 2 for t in ts]) for _, ts in items]


def run():
    """Take six steps. Return the sampled ids, the weights and the engine's kind."""
    policy = load_policy(PolicyConfig(devices="cpu", threads=1))
    counters = Counters(peer="12D3KooWme", swarm="00" * 32)
    config = Config(training=TRAINING, weights=WeightsConfig(rule="off"))
    engine = make_whole_policy(config, policy, counters, send=lambda message: None)
    questions = Questions(["rg/gcd"], counters)
    sampler = Sampler(TRAINING, questions, engine, Even(), policy.random_generator(7), counters)
    ids = []
    for _ in range(6):
        groups = sampler(TRAINING.groups_per_step).groups
        ids.append([row.completion for group in groups for row in group.rows])
        counters.policy_version += engine.update(assemble(groups, "grpo")).stepped
    return ids, policy.trainable_parameters(), engine.statistics().engine


def test_two_runs_with_one_seed_are_equal():
    (ids, weights, engine), (others, other_weights, _) = run(), run()
    assert engine == "continuous"
    assert ids == others
    assert all(map(torch.equal, weights, other_weights))
