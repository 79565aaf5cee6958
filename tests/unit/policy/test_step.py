"""The written-out decoding step gives the logits of transformers' forward pass for all variants of
real models."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from swarmnode.config import PolicyConfig
from swarmnode.policy import slots
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import load_policy
from swarmnode.policy.ways import plain_logprobs
from tests.support import model_zoo

# more rows than the tokenizer has tokens
SHAPE = model_zoo.SHAPE | {"vocab_size": 128, "num_key_value_heads": 2}
SHAPE["max_position_embeddings"] = 64
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
YARN = DYNAMIC | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
COVERED = {
    "llama 3, tied": LlamaConfig(rope_parameters=LLAMA3, tie_word_embeddings=True, **SHAPE),
    "llama, biases everywhere": LlamaConfig(attention_bias=True, mlp_bias=True, **SHAPE),
    "llama, another head size": LlamaConfig(head_dim=12, **SHAPE),
    "llama, gelu, dynamic": LlamaConfig(hidden_act="gelu", rope_parameters=DYNAMIC, **SHAPE),
    "qwen 2": Qwen2Config(**SHAPE),
    "qwen 2, yarn": Qwen2Config(rope_parameters=YARN, **SHAPE),
    "qwen 3": Qwen3Config(head_dim=16, **SHAPE),
    "mistral without a window": MistralConfig(sliding_window=None, **SHAPE),
}


@pytest.fixture
def loaded(tmp_path, embedded):
    """configuration → its policy, with random weights."""

    def load(config):
        torch.manual_seed(5)
        config.eos_token_id, config.pad_token_id = embedded.eos_id, embedded.pad_id
        config.bos_token_id = None
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(0.3 * torch.randn_like(parameter))
                else:
                    parameter.mul_(6)
        model.save_pretrained(tmp_path)
        embedded.tokenizer.save_pretrained(tmp_path)
        return load_policy(PolicyConfig(model=str(tmp_path), devices="cpu"))

    return load


@pytest.mark.parametrize("name", COVERED)
def test_sampled_logprobs_are_those_of_transformers(loaded, name, monkeypatch):
    policy = loaded(COVERED[name])
    assert slots.writes_out(policy)
    used, real = [], slots.written_step
    monkeypatch.setattr(slots, "written_step", lambda *given: (used.append(1), real(*given))[1])
    groups = generate(
        policy, ["Calculate 10 + 8.", "12"], Sampling(3, 40), policy.random_generator(1)
    )
    assert len(used) >= 39
    assert_plain_logprobs(policy, groups)
    for completion in groups[0].completions:
        assert max(completion.logprobs) - min(completion.logprobs) > 0.1


def assert_plain_logprobs(policy, groups):
    for group in groups:
        for completion in group.completions:
            expected = plain_logprobs(policy, (group.prompt_ids, completion.ids))
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_other_models_decode_by_transformers(policies, kind):
    assert not slots.writes_out(policies[kind])
    assert ("sliding" in slots.unsuited(policies[kind])) == (kind == "mistral")


def test_a_model_of_another_kind_is_not_tried(loaded):
    policy = loaded(Gemma2Config(head_dim=8, sliding_window=64, **SHAPE))
    assert not slots.writes_out(policy)
    assert "gemma2" in policy.obstacles["written-out step"]


def test_a_model_that_computes_something_else_fails_the_trial(policies, monkeypatch):
    policy = policies["llama"].clone()
    object.__setattr__(policy, "obstacles", {})
    layer = policy.base.model.layers[0]
    real = layer.mlp.forward
    monkeypatch.setattr(layer.mlp, "forward", lambda states: 1.1 * real(states))
    assert not slots.writes_out(policy)
    assert "differ" in policy.obstacles["written-out step"]
    assert not slots.unsuited(policy)
    generate(policy, ["12"], Sampling(2, 8), policy.random_generator(1))


def test_an_adapter_is_part_of_the_step(model_dir):
    policy = load_policy(PolicyConfig(model=str(model_dir("qwen2")), devices="cpu", lora={"r": 4}))
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert slots.writes_out(policy)
    for some in (policy, replace(policy, adapter_off=True)):
        sampled = generate(some, ["12"], Sampling(3, 12), policy.random_generator(1))
        assert_plain_logprobs(some, sampled)
