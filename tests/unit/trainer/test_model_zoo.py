"""Every architecture of the zoo is tried and trained for two steps, or refused in one line."""

import math

import pytest
import torch

from swarmnode.config import Config, LoraSettings, PolicyConfig, TrainingConfig, WeightsConfig
from swarmnode.errors import Unavailable
from swarmnode.policy.engine.protocol import Request
from swarmnode.policy.generate import GroupSample, SampledCompletion, Sampling
from swarmnode.policy.load import load_policy
from swarmnode.policy.logprobs import score
from swarmnode.policy.text import silent_ids
from swarmnode.policy.trial import QUESTIONS, try_loaded
from swarmnode.rollouts.trainer.batch import assemble, own_group
from swarmnode.rollouts.trainer.judge import judge
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.state import Counters
from tests.support.groups import sampled_group
from tests.support.model_zoo import CONFIGS, build

REFUSED = {"mamba"}
TOKENS = 24


@pytest.fixture(scope="module")
def embedded():
    torch.set_num_threads(1)
    return load_policy(PolicyConfig(devices="cpu"))


@pytest.fixture
def directory(tmp_path, embedded):
    return lambda kind: build(kind, tmp_path / kind, embedded.tokenizer)


def opened(directory, lora=0):
    return PolicyConfig(model=str(directory), devices="cpu", lora=LoraSettings(r=lora))


def steps(cfg, policy, option, external=()):
    """Return the statistics of two steps on groups sampled by the engine `option`, and on the
    groups `external`."""
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
        results.append(engine.update(assemble([*own, *external], "grpo")))
    return results


@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - REFUSED))
def test_a_model_is_tried_and_trained(directory, kind):
    cfg = opened(directory(kind))
    policy = load_policy(cfg)
    trial = try_loaded(cfg, policy, TrainingConfig(max_completion_length=TOKENS))
    assert trial.tokens > 0
    for result in steps(cfg, policy, "continuous"):
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


def from_peer(policy, prompt):
    """A group of ordinary tokens that a peer with the same policy may have sampled."""
    head, generator = policy.encode_prompt(prompt), torch.Generator().manual_seed(3)
    silent = silent_ids(policy.tokenizer, policy.eos_ids)
    ordinary = [i for i in range(policy.vocab_size) if i not in silent]
    draws = [torch.randint(len(ordinary), (n,), generator=generator) for n in (5, 9, 14, 7)]
    answers = [[*(ordinary[i] for i in draw.tolist()), policy.eos_id] for draw in draws]
    logprobs = score(policy, [(head, ids) for ids in answers], 1.0)
    completions = [
        SampledCompletion(ids, chosen, policy.decode(ids), "eos")
        for ids, chosen in zip(answers, logprobs, strict=True)
    ]
    return sampled_group(policy, GroupSample(head, completions), prompt, [1.0, 0.0, 0.0, 1.0])


@pytest.mark.long
@pytest.mark.parametrize(("option", "lora"), [("lockstep", 4), ("continuous", 0)])
@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - REFUSED))
def test_trains_on_peer_and_own_groups(directory, kind, option, lora):
    cfg = opened(directory(kind), lora)
    policy = load_policy(cfg)
    try_loaded(cfg, policy, TrainingConfig(max_completion_length=TOKENS))
    config = Config(policy=cfg, weights=WeightsConfig(rule="off"))
    peer = make_whole_policy(config, policy, Counters(), lambda message: None)
    judgement = judge([from_peer(policy, QUESTIONS[0])], policy, peer.score, 1.0)
    assert [outcome for _, outcome in judgement.outcomes] == ["used"]
    for result in steps(cfg, policy, option, judgement.accepted):
        assert result.stepped
        assert result.effective_external is not None
