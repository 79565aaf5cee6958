"""A small or paused node: a shortage of memory, quiet hours."""

import threading

import pytest
import torch

from swarmnode.errors import DeviceError
from swarmnode.policy import logprobs
from swarmnode.policy.load import Policy
from swarmnode.trainer import loop
from tests.support.network_side import train_alone


class Allocator:
    """Stands in for a device's memory: a forward pass over more tokens than fit fails as torch's
    CPU allocator does; with `training` False only while tokens are sampled."""

    def __init__(self, monkeypatch, tokens, training=True):
        self.tokens, self.failures = tokens, 0
        real = Policy.logits

        def logits(policy, input_ids, *inputs, **keys):
            if input_ids.numel() > self.tokens and (training or not torch.is_grad_enabled()):
                self.failures += 1
                raise RuntimeError(
                    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate"
                    " memory: you tried to allocate"
                )
            return real(policy, input_ids, *inputs, **keys)

        monkeypatch.setattr(Policy, "logits", logits)


async def test_a_shortage_of_memory_lowers_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(logprobs, "ONE_PASS_ELSEWHERE", 24)  # its trial has such a row
    allocator = Allocator(monkeypatch, tokens=60, training=False)
    first = await train_alone(tmp_path, max_steps=2)
    assert first[-1].step == 2
    assert first[-1].oom_retries_total > 0
    limit = first[-1].generation_tokens
    assert 0 < limit < 16384
    assert first[-1].micro_batch_tokens > limit, "a shortage in generation does not bound training"
    assert allocator.failures == first[-1].oom_retries_total


async def test_too_small_machine_fails_with_one_line(tmp_path, monkeypatch):
    Allocator(monkeypatch, tokens=4)
    with pytest.raises(ExceptionGroup) as raised:
        await train_alone(tmp_path, max_steps=1)
    assert isinstance(raised.value.exceptions[0], DeviceError)


async def test_trainer_rests_in_quiet_hours_and_can_be_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "REST_SECONDS", 0.01)
    rested = threading.Event()

    def stop_once_paused(trainer, report):
        if report.phase == "paused":
            rested.set()
            trainer.stop()

    reports = await train_alone(
        tmp_path, on_report=stop_once_paused, node={"quiet_hours": "00:00-00:00"}, max_steps=5
    )
    assert rested.is_set()
    assert reports[-1].step == 0
