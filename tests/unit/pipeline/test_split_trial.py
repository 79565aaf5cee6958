"""The trial accepts models whose stages equal the whole model, and names the difference of
others."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.models.llama import modeling_llama

from swarmnode.errors import ConfigError
from swarmnode.policy.quantised import build_quantised
from swarmnode.stages import model as stages
from swarmnode.stages.model import check_split, tiny_config

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 5}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PASS = {
    "llama": LlamaConfig(),
    "llama, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama, biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama 3 rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "mistral": MistralConfig(),
    "mistral, no window": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(),
    "qwen2, tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2, windows": Qwen2Config(**SHAPE, **WINDOW),
    "qwen3": Qwen3Config(),
    "qwen3, tied": Qwen3Config(**SHAPE, head_dim=64, tie_word_embeddings=True),
    "qwen3, biases": Qwen3Config(**SHAPE, attention_bias=True),
    "qwen3, windows": Qwen3Config(**SHAPE, **WINDOW),
    "phi3": Phi3Config(),
    "olmo2": Olmo2Config(),
    "smollm3": SmolLM3Config(),
    "glm4": Glm4Config(),
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
}
COUNT = r"a layer has [\d,]+ parameters, and the plan counts [\d,]+"
PARTS = "does not consist of embed_tokens, layers, norm and lm_head, but of"
BUFFER = "value of model.embed_tokens.embed_scale is in no weights file"
REFUSED = {
    "bloom": (BloomConfig(), PARTS),
    "cohere2": (Cohere2Config(), "in 2 stages logits differ"),
    "deepseek_v3": (DeepseekV3Config(), "layer 3 has other parameters than layer 0"),
    "falcon": (FalconConfig(), PARTS),
    "gemma": (GemmaConfig(), BUFFER),
    "gemma2": (Gemma2Config(), BUFFER),
    "gemma3_text": (Gemma3TextConfig(), BUFFER),
    "gpt2": (GPT2Config(), PARTS),
    "gpt_neox": (GPTNeoXConfig(), PARTS),
    "granite": (GraniteConfig(**GRANITE), "in 2 stages logits differ"),
    "mamba": (MambaConfig(), PARTS),
    "mixtral": (MixtralConfig(), COUNT),
    "qwen2_moe": (Qwen2MoeConfig(), COUNT),
    "qwen3_moe": (Qwen3MoeConfig(), COUNT),
    "starcoder2": (Starcoder2Config(), COUNT),
}


@pytest.fixture
def untried(monkeypatch):
    """No trial was made in this process yet."""
    monkeypatch.setattr(stages, "_refusals", {})


@pytest.mark.parametrize("kind", PASS)
def test_a_model_whose_stages_equal_it_passes(kind):
    check_split(PASS[kind])


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_model_is_refused_with_the_remedy(kind):
    config, why = REFUSED[kind]
    with pytest.raises(ConfigError, match=why) as refused:
        check_split(config)
    line = str(refused.value)
    assert line.startswith(f"a {kind!r} model cannot be trained in stages: ")
    assert "set stages.mode to off, or choose a model of type llama, mistral, qwen2" in line
    assert "\n" not in line


def test_trial_runs_once_and_keeps_the_random_state(untried, monkeypatch):
    tried = []
    compare = stages._compare
    monkeypatch.setattr(
        stages, "_compare", lambda *given, **more: tried.append(given) or compare(*given, **more)
    )
    before = torch.get_rng_state()
    for _ in range(3):
        check_split(LlamaConfig(**SHAPE))
    assert len(tried) == 2, "one in two stages, one in three"
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tiny_config_keeps_all_but_sizes():
    config = SmolLM3Config(num_hidden_layers=24, sliding_window=4096, use_sliding_window=True)
    before = copy.deepcopy(config.to_dict())
    tiny = tiny_config(config)
    assert config.to_dict() == before
    changed = {name for name, value in tiny.to_dict().items() if value != before[name]}
    assert changed == {
        "num_hidden_layers",
        "layer_types",
        "no_rope_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "pad_token_id",
        "sliding_window",
    }
    kinds = list(zip(tiny.layer_types, tiny.no_rope_layers, strict=True))
    half = len(kinds) // 2
    assert set(kinds[:half]) == set(kinds[half:])
    assert set(kinds) == set(zip(config.layer_types, config.no_rope_layers, strict=True))
    assert kinds[half] != kinds[0], "a stage that took the model's first layers would show"


# faults that a trial must see, put into a Llama


def refusal(monkeypatch, config=None):
    monkeypatch.setattr(stages, "_refusals", {})
    with pytest.raises(ConfigError) as refused:
        check_split(config or LlamaConfig(**{**SHAPE, "num_hidden_layers": 32}))
    return str(refused.value)


def test_dependence_on_a_layers_number_is_found_at_any_depth(monkeypatch):
    create = modeling_llama.LlamaDecoderLayer.__init__

    def deeper(self, config, layer_idx):
        create(self, config, layer_idx)
        self.scale = 0.5 if layer_idx > 20 else 1.0

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", deeper)
    assert "scale of layer 21 depends on the layer's number" in refusal(monkeypatch)


def test_a_list_by_layer_that_is_not_cut_is_seen(monkeypatch):
    def uncut(config, spec):
        own = copy.deepcopy(config)
        own.num_hidden_layers = spec.layers
        own.tie_word_embeddings = False
        return own

    monkeypatch.setattr(stages, "stage_config", uncut)
    assert "layer" in refusal(monkeypatch, Qwen2Config(**SHAPE, **WINDOW))


def test_layer_that_computes_with_its_number_is_refused(monkeypatch):
    forward = modeling_llama.LlamaDecoderLayer.forward

    def every_other(self, hidden_states, **more):
        return forward(self, hidden_states * (1 + self.self_attn.layer_idx % 2), **more)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", every_other)
    assert "in 3 stages logits differ" in refusal(monkeypatch)


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("learn", "log-probabilities"),
        ("backward", "gradients of"),
        ("decode", "logits from caches"),
    ],
)
def test_each_thing_that_a_stage_does_is_compared(monkeypatch, method, what):
    right = getattr(stages.StageRuntime, method)

    def wrong(self, *given):
        batch, x, third, *rest = given
        if method == "decode":
            return 1.001 * right(self, *given)
        return right(self, batch, x, 1.001 * third, *rest)  # temperature, or gradient

    monkeypatch.setattr(stages.StageRuntime, method, wrong)
    assert f"in 2 stages {what}" in refusal(monkeypatch)


def test_an_exception_in_the_models_code_is_a_refusal(monkeypatch):
    def fail(self, *given, **more):
        raise ZeroDivisionError("no\nlayers")

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", fail)
    assert "in stages: ZeroDivisionError: no; set" in refusal(monkeypatch)


@pytest.mark.parametrize("kind", PASS)
def test_what_passes_can_be_copied_in_8_bits(kind):
    """The head samples from such a copy."""
    torch.manual_seed(0)
    config = tiny_config(PASS[kind])
    whole = AutoModelForCausalLM.from_config(config).eval()
    copied = build_quantised(config, whole.state_dict().__getitem__, torch.float32, "cpu")
    ids = torch.tensor([[5, 9, 3, 33, 7, 12, 8]])
    with torch.no_grad():
        want, have = whole(input_ids=ids).logits, copied(input_ids=ids).logits
    assert 0 < (have - want).abs().max() < 0.05 * want.abs().max()
