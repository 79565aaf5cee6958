"""A quantised base without a GPU: the request to bitsandbytes, and errors if it is missing."""

import importlib.machinery
import importlib.util

import pytest
import torch

from swarmnode import settings
from swarmnode.config import PolicyConfig
from swarmnode.errors import ConfigError
from swarmnode.policy import load
from swarmnode.policy.device import Placement, needed_bytes

CUDA = Placement(torch.device("cuda", 0), torch.bfloat16, "cuda:0")


@pytest.fixture
def installed(monkeypatch):
    spec = importlib.machinery.ModuleSpec("bitsandbytes", None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: spec if name == "bitsandbytes" else None
    )


def requested(kind):
    wanted = PolicyConfig.model_validate({"quantization": kind, "lora": {"r": 8}})
    return load.quantization(wanted, CUDA)


def test_without_an_adapter_it_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"policy.quantization needs an adapter"):
        settings.load(None, {}, ["policy.quantization=4bit"])


def test_quantisation_settings_of_bitsandbytes(installed):
    eight, four = requested("8bit"), requested("4bit")
    assert (eight.load_in_8bit, eight.load_in_4bit, four.load_in_4bit) == (True, False, True)
    assert (four.bnb_4bit_quant_type, four.bnb_4bit_compute_dtype) == ("nf4", torch.bfloat16)


def test_a_smaller_base_needs_less_memory():
    sizes = [needed_bytes(10**9, 10**6, torch.bfloat16, bits) for bits in (None, 8, 4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[0] / 3
