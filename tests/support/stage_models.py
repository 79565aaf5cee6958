"""Tiny random models of architectures that can be split, and the embedded policy."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from swarmnode.config import PolicyConfig
from swarmnode.policy.load import load_policy

torch.set_num_threads(1)
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(num_key_value_heads=4, tie_word_embeddings=False, **SHAPE),
    "llama-tied": lambda: LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **SHAPE),
    # A sliding window in the last two layers only: a stage must use the right layer indices.
    "qwen2": lambda: Qwen2Config(
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=2,
        **SHAPE,
    ),
    "qwen3": lambda: Qwen3Config(
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, **SHAPE
    ),
    "mistral": lambda: MistralConfig(num_key_value_heads=2, sliding_window=5, **SHAPE),
    "phi3": lambda: Phi3Config(num_key_value_heads=2, pad_token_id=0, **SHAPE),
    # rotary embeddings in three of four layers
    "smollm3": lambda: SmolLM3Config(num_key_value_heads=2, pad_token_id=0, **SHAPE),
}


def build(kind: str, layers: int = 4):
    config = CONFIGS[kind]()
    config.num_hidden_layers = layers
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)  # so that the next token is neither certain nor uniform
    return model


@pytest.fixture(scope="session")
def models():
    """Return kind → whole model, float32. Read only."""
    return {kind: build(kind) for kind in CONFIGS}


@pytest.fixture(scope="session")
def embedded():
    return load_policy(PolicyConfig(devices="cpu"))
