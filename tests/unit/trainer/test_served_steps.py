"""Whole steps with a sampling server: questions, updates, evaluations, and a server that fails
between them."""

import pytest
import torch

from swarmnode.config import (
    Config,
    LoraSettings,
    PolicyConfig,
    ServerSettings,
    TrainingConfig,
    WeightsConfig,
)
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy
from swarmnode.rollouts.trainer.batch import assemble
from swarmnode.tasks.client import Scored
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.questions import Questions
from swarmnode.trainer.sampler import MAX_LAG, Sampler
from swarmnode.trainer.state import Counters
from tests.support.served.standin import StandIn


class EverySecond:
    """A scorer for which every second completion is right."""

    def score_many(self, items):
        return [
            Scored("Calculate 10 + 8.", [float(i % 2) for i in range(len(texts))])
            for _, texts in items
        ]


@pytest.fixture(params=[0, 4])
def node(request, tmp_path):
    """(engine, sampler, a step, the server)."""
    torch.set_num_threads(1)
    lora = LoraSettings(r=request.param)
    policy = load_policy(PolicyConfig(devices="cpu", lora=lora))
    with StandIn(load_policy(PolicyConfig(devices="cpu", lora=lora))) as server:
        training = TrainingConfig(
            num_generations=4, groups_per_step=2, learning_rate=2e-4, options=["lockstep"]
        )
        config = Config(
            training=training,
            weights=WeightsConfig(rule="off"),
            policy=PolicyConfig(lora=lora, server=ServerSettings(url=server.url)),
        )
        config = config.model_copy(
            update={"node": config.node.model_copy(update={"data_dir": tmp_path})}
        )
        counters = Counters(peer="12D3KooWme", swarm="00" * 32)
        engine = make_whole_policy(config, policy, counters, lambda message: None)
        sampler = Sampler(
            training,
            Questions(["rg/gcd"], counters),
            engine,
            EverySecond(),
            policy.random_generator(0),
            counters,
        )

        def step():
            experience = sampler(2)
            update = engine.update(assemble(experience.trained, "grpo"))
            counters.policy_version += update.stepped
            return experience, update

        yield engine, step, server


def test_steps_train_on_samples_of_a_server(node):
    engine, step, _ = node
    for _ in range(4):
        experience, update = step()
        assert update.stepped
        assert max(experience.lags) <= MAX_LAG
        assert 0.7 < update.effective_own < 1.0 + 1e-5
    assert update.own_gap < 0.2
    told = engine.statistics()
    assert (told.engine, told.server.state) == ("served", "sampling")
    assert told.server.loads == 4, "once for each update, and at the start"
    assert told.server.gap < 1e-4


def test_the_first_step_is_on_policy_to_rounding(node):
    _, step, _ = node
    _, update = step()
    assert update.own_gap < 1e-4


def test_server_samples_evaluations_with_present_weights(node):
    engine, step, server = node
    step()
    groups = engine.generate(["12", "13"], Sampling(4, 8), engine.random_generator(5))
    assert [len(group.completions) for group in groups] == [4, 4]
    asked = [body for body in server.bodies if body["token_ids"] in [g.prompt_ids for g in groups]]
    assert asked[-1]["cache_salt"].split(".")[1] == "2", "of the present weights"


def test_training_continues_without_the_server(node):
    engine, step, server = node
    step()
    server.stop()
    for _ in range(2):
        _, update = step()
        assert update.stepped
    told = engine.statistics()
    assert (told.engine, told.server.state) == ("lockstep", "away")
    assert "unreachable" in told.server.failures
    assert engine.generate(["12"], Sampling(2, 8), engine.random_generator(5))
