"""The trainer on a CUDA device: learning, restart, and memory limits. Skipped without a device."""

import functools

import pytest
import torch

from swarmnode.errors import DeviceError
from tests.support.network_side import train_alone

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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_it_learns_and_is_restored(tmp_path, dtype):
    gpu = {"devices": "cuda"} if dtype == "bfloat16" else {"devices": "cuda", "dtype": dtype}
    train = functools.partial(train_alone, tmp_path, held_out=4)
    first = await train(policy=gpu, max_steps=60, eval_every=60, learning_rate=1e-3)
    assert (first[-1].device, first[-1].dtype) == ("cuda:0", dtype)
    assert first[-1].reward_held_out > first[-1].reward_held_out_start + 0.1
    assert first[-1].drops["update"].dropped.keys() <= {"no_signal", "overflow"}
    second = await train(policy=gpu, max_steps=62)
    assert second[-1].step == 62
    assert second[-1].reward_held_out == first[-1].reward_held_out
    # and again on a CPU: another kind of random generator, the same optimizer
    third = await train(policy={"devices": "cpu"}, max_steps=64)
    assert (third[-1].step, third[-1].device) == (64, "cpu")
    fourth = await train(policy=gpu, max_steps=65)
    assert (fourth[-1].step, fourth[-1].device) == (65, "cuda:0")


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
    first = await train_alone(tmp_path, policy={"devices": "cuda"}, max_steps=2, **LARGE)
    assert first[-1].step == 2
    assert first[-1].oom_retries_total > 0
    limit = first[-1].micro_batch_tokens
    assert 0 < limit < LARGE["per_device_train_tokens"]


async def test_too_small_gpu_fails_with_one_line(tmp_path, allow):
    allow(2**10)
    # not in memory that the allocator has cached in other tests
    many = {**LARGE, "max_completion_length": 256}
    with pytest.raises(ExceptionGroup) as raised:
        await train_alone(tmp_path, policy={"devices": "cuda"}, max_steps=1, **many)
    assert isinstance(raised.value.exceptions[0], DeviceError)
