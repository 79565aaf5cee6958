"""Tiny random models of several architectures, as directories for `policy.model`."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from swarmnode.config import PolicyConfig
from swarmnode.policy import load
from swarmnode.policy.load import load_policy

torch.set_num_threads(1)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": lambda v: LlamaConfig(
        vocab_size=v, num_key_value_heads=4, tie_word_embeddings=True, **SHAPE
    ),
    # grouped-query attention, biases
    "qwen2": lambda v: Qwen2Config(vocab_size=v, num_key_value_heads=2, **SHAPE),
    # query and key norms
    "qwen3": lambda v: Qwen3Config(vocab_size=v, num_key_value_heads=1, head_dim=16, **SHAPE),
    # shorter than a prompt
    "mistral": lambda v: MistralConfig(
        vocab_size=v, num_key_value_heads=2, sliding_window=6, **SHAPE
    ),
    # absolute positions, Conv1D
    "gpt2": lambda v: GPT2Config(vocab_size=v, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


@pytest.fixture(scope="session")
def embedded():
    return load_policy(PolicyConfig(devices="cpu"))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, embedded):
    """kind → directory. Weights are scaled up, so that the next token is neither certain nor
    uniform."""

    def build(kind: str):
        directory = tmp_path_factory.mktemp(kind)
        torch.manual_seed(5)
        config = CONFIGS[kind](len(embedded.tokenizer))
        config.eos_token_id, config.pad_token_id, config.bos_token_id = (
            embedded.eos_id,
            embedded.pad_id,
            None,
        )
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(6)
        model.save_pretrained(directory)
        embedded.tokenizer.save_pretrained(directory)
        return directory

    return build


@pytest.fixture(scope="session")
def policies(model_dir):
    """kind → loaded policy, float32 on CPU."""
    return {
        kind: load_policy(PolicyConfig(model=str(model_dir(kind)), devices="cpu"))
        for kind in CONFIGS
    }


@pytest.fixture
def plain_tokenizer_dir(tmp_path, model_dir):
    """A model whose tokenizer has no chat template, as base models'."""
    # for qwen2, transformers replaces the pre-tokenizer that tokenizer.json names
    directory = model_dir("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = None
    (directory / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def offline(monkeypatch):
    """Keep tests from reaching the Hub on any machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return load
