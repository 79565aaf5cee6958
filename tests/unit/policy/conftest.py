"""Tiny random models of several architectures, as directories for `policy.model`."""

import pytest
import torch
from transformers import AutoTokenizer

from swarmnode.config import PolicyConfig
from swarmnode.policy import load
from swarmnode.policy.load import load_policy
from tests.support.model_zoo import build

torch.set_num_threads(1)
KINDS = ("llama", "qwen2", "qwen3", "mistral", "gpt2")


@pytest.fixture(scope="session")
def embedded():
    return load_policy(PolicyConfig(devices="cpu"))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, embedded):
    """kind → directory."""
    return lambda kind: build(kind, tmp_path_factory.mktemp(kind), embedded.tokenizer)


@pytest.fixture(scope="session")
def policies(model_dir):
    """kind → loaded policy, float32 on CPU."""
    return {
        kind: load_policy(PolicyConfig(model=str(model_dir(kind)), devices="cpu")) for kind in KINDS
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
def precision_restored():
    """accelerate's precision and device are global: leave float32 on a CPU behind."""
    yield
    load_policy(PolicyConfig(devices="cpu"))


@pytest.fixture
def offline(monkeypatch):
    """Keep tests from reaching the Hub on any machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return load
