"""The trainer on a CUDA device: learning, restart, and memory limits. Skipped without a device."""

import pytest
import torch

from swarmnode.errors import DeviceError
from tests.support.network_side import run_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LARGE = {
    "groups_per_step": 128,
    "num_generations": 64,
    "max_completion_length": 64,
    "per_device_train_tokens": 10_000_000,
}


async def train(data_dir, *, policy, **training):
    settings = {
        "node": {"data_dir": data_dir},
        "policy": policy,
        "training": {"eval_every": 100, **training},
        "task": {"held_out_per_task": 4},
        "weights": {"rule": "off"},
    }
    return (await run_trainer(settings)).reports


async def test_it_learns_in_bfloat16_and_is_restored(tmp_path):
    first = await train(
        tmp_path, policy={"devices": "cuda"}, max_steps=60, eval_every=60, learning_rate=1e-3
    )
    assert (first[-1].device, first[-1].dtype) == ("cuda:0", "bfloat16")
    assert first[-1].reward_held_out > first[-1].reward_held_out_start + 0.1
    second = await train(tmp_path, policy={"devices": "cuda"}, max_steps=62)
    assert second[-1].step == 62
    assert second[-1].reward_held_out == first[-1].reward_held_out
    # and again on a CPU: another kind of random generator, the same optimizer
    third = await train(tmp_path, policy={"devices": "cpu"}, max_steps=64)
    assert (third[-1].step, third[-1].device) == (64, "cpu")
    fourth = await train(tmp_path, policy={"devices": "cuda"}, max_steps=65)
    assert (fourth[-1].step, fourth[-1].device) == (65, "cuda:0")


async def test_learns_in_float16(tmp_path):
    place = {"devices": "cuda", "dtype": "float16"}
    first = await train(tmp_path, policy=place, max_steps=60, eval_every=60, learning_rate=1e-3)
    assert (first[-1].device, first[-1].dtype) == ("cuda:0", "float16")
    assert first[-1].reward_held_out > first[-1].reward_held_out_start + 0.1
    assert first[-1].drops["update"].dropped.keys() <= {"no_signal", "overflow"}
    second = await train(tmp_path, policy=place, max_steps=62)
    assert second[-1].step == 62


@pytest.fixture
def allow():
    """Return a function that makes the allocator refuse more than a number of bytes."""
    total = torch.cuda.get_device_properties(0).total_memory

    def limit(size):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(size / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


async def test_a_shortage_of_memory_lowers_the_limit(tmp_path, allow):
    allow(256 * 2**20)  # cuBLAS alone takes 32 MiB for each stream of each thread
    first = await train(tmp_path, policy={"devices": "cuda"}, max_steps=2, **LARGE)
    assert first[-1].step == 2
    assert first[-1].oom_retries_total > 0
    limit = first[-1].micro_batch_tokens
    assert 0 < limit < LARGE["per_device_train_tokens"]


async def test_too_small_gpu_fails_with_one_line(tmp_path, allow):
    allow(2**10)
    # not in memory that the allocator has cached in other tests
    many = {**LARGE, "max_completion_length": 256}
    with pytest.raises(ExceptionGroup) as raised:
        await train(tmp_path, policy={"devices": "cuda"}, max_steps=1, **many)
    assert isinstance(raised.value.exceptions[0], DeviceError)
