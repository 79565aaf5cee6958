"""A quantised base without a GPU: the request to bitsandbytes, and errors if it is missing."""

import importlib.machinery
import importlib.util

import pytest
import torch

from swarmnode import settings
from swarmnode.config import PolicyConfig
from swarmnode.errors import ConfigError, Unavailable
from swarmnode.policy import load
from swarmnode.policy.device import Placement, needed_bytes

CUDA = Placement(torch.device("cuda", 0), torch.bfloat16, "cuda:0")


@pytest.fixture
def installed(monkeypatch):
    spec = importlib.machinery.ModuleSpec("bitsandbytes", None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: spec if name == "bitsandbytes" else None
    )


def policy(kind):
    return PolicyConfig.model_validate({"quantization": kind, "lora": {"r": 8}})


def test_without_an_adapter_it_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"policy.quantization needs an adapter"):
        settings.load(None, {}, ["policy.quantization=4bit"])


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(Unavailable, match="pip install 'bitsandbytes>="):
        load.quantization(policy("4bit"), CUDA)


def test_quantisation_on_a_cpu_fails_before_loading(installed):
    with pytest.raises(Unavailable, match="needs a CUDA device, not cpu"):
        load.load_policy(policy("8bit").model_copy(update={"devices": "cpu"}))


def test_quantisation_settings_of_bitsandbytes(installed):
    eight, four = load.quantization(policy("8bit"), CUDA), load.quantization(policy("4bit"), CUDA)
    assert (eight.load_in_8bit, eight.load_in_4bit) == (True, False)
    assert (four.load_in_4bit, four.bnb_4bit_quant_type, four.bnb_4bit_compute_dtype) == (
        True,
        "nf4",
        torch.bfloat16,
    )


def test_a_smaller_base_needs_less_memory():
    sizes = [needed_bytes(10**9, 10**6, torch.bfloat16, bits) for bits in (None, 8, 4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[0] / 3
