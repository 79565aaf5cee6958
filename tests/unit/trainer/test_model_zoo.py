"""Every architecture of the zoo is tried and trained for two steps, or refused in one line."""

import math

import pytest

from swarmnode.config import Config, LoraSettings, PolicyConfig, TrainingConfig, WeightsConfig
from swarmnode.errors import Unavailable
from swarmnode.policy.engine.protocol import Request
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy
from swarmnode.policy.trial import QUESTIONS, try_loaded
from swarmnode.rollouts.trainer.batch import assemble, own_group
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.state import Counters
from tests.support.model_zoo import CONFIGS, build

REFUSED = {"mamba"}
TOKENS = 24


@pytest.fixture
def directory(tmp_path, embedded):
    return lambda kind: build(kind, tmp_path / kind, embedded.tokenizer)


def opened(directory, lora=0):
    return PolicyConfig(model=str(directory), devices="cpu", lora=LoraSettings(r=lora))


def steps(cfg, policy, option):
    """Return the statistics of two steps on groups sampled by the engine `option`."""
    training = TrainingConfig(
        max_completion_length=TOKENS, learning_rate=1e-3, num_generations=4, options=[option]
    )
    config = Config(policy=cfg, training=training, weights=WeightsConfig(rule="off"))
    engine = make_whole_policy(config, policy, Counters(), lambda message: None)
    generation = engine.generation(Sampling(4, TOKENS), policy.random_generator(0))
    results = []
    for step in range(2):
        for number, prompt in enumerate(QUESTIONS):
            generation.submit(Request(2 * step + number, prompt))
        done = []
        while len(done) < len(QUESTIONS):
            done += generation.finished(step)
        own = [own_group(one.sample, [1.0, 0.0, 0.0, 1.0]) for one in done]
        results.append(engine.update(assemble(own, "grpo")))
    return results


@pytest.mark.parametrize(
    ("option", "lora"),
    [("continuous", 0), pytest.param("lockstep", 4, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - REFUSED))
def test_a_model_is_tried_and_trained(directory, kind, option, lora):
    cfg = opened(directory(kind), lora)
    policy = load_policy(cfg)
    trial = try_loaded(cfg, policy, TrainingConfig(max_completion_length=TOKENS))
    assert trial.tokens > 0
    for result in steps(cfg, policy, option):
        assert result.stepped
        assert math.isfinite(result.loss)
        assert 0 < result.grad_norm < math.inf
        assert result.effective_own == pytest.approx(1.0, abs=0.01), "sampling is what is trained"


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_model_that_cannot_train_is_one_line(directory, kind):
    cfg = opened(directory(kind))
    with pytest.raises(Unavailable, match="cannot be") as refused:
        try_loaded(cfg, load_policy(cfg), TrainingConfig())
    assert "\n" not in str(refused.value)
