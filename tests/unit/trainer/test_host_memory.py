"""Averaging and saving check the host memory before they use it, since the kernel kills a process
that exceeds it."""

import pytest
import torch

from swarmnode.config import Config
from swarmnode.errors import DeviceError
from swarmnode.trainer import engine

HALF_A_BILLION = 494_032_768
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def free(monkeypatch):
    return lambda gigabytes: monkeypatch.setattr(
        engine, "free_bytes", lambda device: None if gigabytes is None else gigabytes * 10**9
    )


@pytest.mark.parametrize(
    ("sections", "device", "enough"),
    [
        # 5.9 of gradients and moments, 5.9 of φ, δ and base, 5.9 of a state that is written
        ({}, CPU, 18),
        ({}, CUDA, 12),
        ({"weights": {"rule": "off"}}, CPU, 12),
        ({"weights": {"rule": "off"}}, CUDA, 6),
        ({"weights": {"fragments": 1}}, CUDA, 16),  # all of it is exchanged at once
        ({"policy": {"optim": "adamw_8bit"}}, CUDA, 9),
    ],
)
def test_low_memory_error_names_need_and_remedy(free, sections, device, enough):
    config = Config.model_validate(sections)
    free(enough)
    engine.check_host_memory(config.policy, config.weights, HALF_A_BILLION, device)
    free(enough - 1)
    with pytest.raises(
        DeviceError,
        match=r"494,032,768 trained weights need .* GB are free: set .*policy\.lora\.r to 16",
    ) as told:
        engine.check_host_memory(config.policy, config.weights, HALF_A_BILLION, device)
    assert ("weights.rule to off" in str(told.value)) == (config.weights.rule != "off")
    free(None)
    engine.check_host_memory(config.policy, config.weights, HALF_A_BILLION, device)


def test_an_adapter_fits_where_all_weights_do_not(free):
    free(2)
    config = Config.model_validate({"policy": {"lora": {"r": 16}}})
    engine.check_host_memory(config.policy, config.weights, 8_798_208, CPU)


def test_other_ranks_need_no_moments(free):
    config = Config.model_validate({"weights": {"rule": "off"}})
    free(12)
    engine.check_host_memory(config.policy, config.weights, HALF_A_BILLION, CPU)
    with pytest.raises(DeviceError, match=r"9\.9 GB to train"):
        engine.check_host_memory(config.policy, config.weights, HALF_A_BILLION, CPU, ranks=2)
    free(16)
    engine.check_host_memory(config.policy, config.weights, HALF_A_BILLION, CPU, ranks=2)
    free(12)
    engine.check_host_memory(config.policy, config.weights, HALF_A_BILLION, CUDA, ranks=2)
