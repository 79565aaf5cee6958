"""The trainer on a real CUDA device, skipped where there is none: it learns, is restored, and finds
out how much memory there is."""

import pytest
import torch
import trio

from swarmnode.config import Config
from swarmnode.errors import DeviceError
from swarmnode.link.server import LinkServer
from swarmnode.process import Progress
from swarmnode.trainer.loop import Trainer
from tests.support.network_side import NetworkSide

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
    (data_dir / "run").mkdir(exist_ok=True, parents=True)
    network = NetworkSide()
    settings = {
        "node": {"data_dir": data_dir},
        "policy": policy,
        "training": {"eval_every": 100, **training},
        "task": {"held_out_per_task": 4},
        "weights": {"rule": "off"},
    }
    async with trio.open_nursery() as nursery:
        await nursery.start(LinkServer(data_dir, network).run)
        await trio.to_thread.run_sync(Trainer(Config.model_validate(settings), Progress()).run)
        nursery.cancel_scope.cancel()
    return network.reports


async def test_it_learns_in_bfloat16_and_is_restored(tmp_path):
    first = await train(
        tmp_path,
        policy={"devices": "cuda"},
        max_steps=60,
        eval_every=60,
        eval_budget=1.0,
        learning_rate=1e-3,
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


@pytest.fixture
def allow():
    """Bytes → None: the allocator refuses to hold more, as a small card does."""
    total = torch.cuda.get_device_properties(0).total_memory

    def limit(size):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(size / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


async def test_a_memory_limit_is_learnt_in_one_run_and_known_in_the_next(tmp_path, allow):
    allow(128 * 2**20)
    first = await train(tmp_path, policy={"devices": "cuda"}, max_steps=2, **LARGE)
    assert first[-1].step == 2
    assert first[-1].oom_retries_total > 0
    limit = first[-1].micro_batch_tokens
    assert 0 < limit < LARGE["per_device_train_tokens"]
    second = await train(tmp_path, policy={"devices": "cuda"}, max_steps=3, **LARGE)
    assert second[-1].step == 3
    assert second[-1].micro_batch_tokens <= limit
    # a longer batch may teach it a little more
    assert second[-1].oom_retries_total <= first[-1].oom_retries_total + 1


async def test_a_card_too_small_for_the_policy_ends_in_one_line(tmp_path, allow):
    allow(2**10)
    # not in what the allocator has left of other tests
    many = {**LARGE, "max_completion_length": 256}
    with pytest.raises(ExceptionGroup) as raised:
        await train(tmp_path, policy={"devices": "cuda"}, max_steps=1, **many)
    assert isinstance(raised.value.exceptions[0], DeviceError)
