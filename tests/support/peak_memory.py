"""`python -m tests.support.peak_memory` reads cases as a JSON list from stdin and writes the memory
peak of a trainer's update for each to stdout.

A case with `checkpoint_every` measures the copies of a stage per weight while the disk stalls.
torch is loaded once; the kernel resets the peak between cases.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.policy import logprobs
from swarmnode.policy.load import load_policy
from swarmnode.policy.micro import MicroBatcher
from swarmnode.rollouts.trainer.batch import TrainingGroup, assemble
from swarmnode.stages.stage_frames import Fence, FrameLimits, Place
from swarmnode.stages.trainer import stage_checkpoints
from swarmnode.stages.trainer.links import Links
from swarmnode.stages.trainer.pipeline import StageWorker, WorkerSettings
from swarmnode.stages.trainer.stage_checkpoints import (
    CheckpointIdentity,
    CheckpointStore,
    Recorder,
    RecoverySettings,
    trained_layout,
)
from swarmnode.stages.trainer.stage_model import StageRuntime
from swarmnode.trainer.update import Updater
from tests.support.crew import run_inline
from tests.support.split_models import split_model


def peak(case: dict[str, Any]) -> int:
    """Return the resident bytes at the peak of an update with one row of `length` completion
    tokens. Adam's moments already exist."""
    ctypes.CDLL(None).malloc_trim(0)  # return what the last case has left in the heap
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): reset the peak
    torch.set_num_threads(1)
    policy = load_policy(PolicyConfig.model_validate(case["policy"]))
    logprobs.needs_checkpointing = lambda *given: bool(case["checkpointing"])
    updater = Updater(policy, TrainingConfig(), MicroBatcher(case["length"] + 16))
    for parameter in policy.trainable_parameters():
        parameter.grad = torch.zeros_like(parameter)
    updater.optimizer.step()
    updater.optimizer.zero_grad()
    completions = [[5 + i % 7] * case["length"] for i in range(2)]
    old = [[-1.0] * len(completion) for completion in completions]
    # The first update is not measured.
    group = TrainingGroup([([3, 4] * 8, c) for c in completions], old, [0.0, 1.0], [0.0, 1.0])
    assert updater.update(assemble([group], "grpo")).stepped
    return resident_peak()


def resident_peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def copies_peak(case: dict[str, Any]) -> float:
    """Return the bytes per weight at the peak of the copies after a step."""
    torch.set_num_threads(1)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=5,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    spec, model = split_model(AutoModelForCausalLM.from_config(shape), [1, 3, 1])[1]
    links, fence = (
        Links(1, {}, FrameLimits(hidden=512, vocab=64, tokens=64)),
        Fence(Place(b"c" * 16, 1, 0), 3),
    )
    worker = StageWorker(StageRuntime(spec, model), links, fence, WorkerSettings(), run_inline)
    for parameter in worker.runtime.parameters():
        parameter.grad = torch.ones_like(parameter)
    worker.optimizer.step(1.0, 1e-3)
    worker.participant.step = 1
    go, save = threading.Event(), stage_checkpoints.save_file
    stage_checkpoints.save_file = lambda *given, **more: (go.wait(60), save(*given, **more))
    with tempfile.TemporaryDirectory() as directory:
        identity, store = CheckpointIdentity("aa" * 32, (1, 3, 1)), CheckpointStore(Path(directory))
        store.begin(identity, (1,))
        recorder = Recorder(
            spec,
            RecoverySettings(case["checkpoint_every"], full_bytes=0),
            [trained_layout(worker.runtime.model)] * 3,
            store,
        )
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_peak()
        recorder.on_step_in_thread(worker)
        after = resident_peak()
        go.set()
        store.close()
    return (after - before) / sum(p.numel() for p in worker.runtime.parameters())


def main() -> None:
    peaks: list[float] = []
    for case in json.load(sys.stdin):
        peaks.append(copies_peak(case) if "checkpoint_every" in case else peak(case))
        gc.collect()
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
