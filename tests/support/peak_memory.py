"""`python -m tests.support.peak_memory` reads cases as a JSON list from stdin and writes the memory
peak of a trainer's update for each to stdout.

torch is loaded once; the kernel resets the peak between cases.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.policy import logprobs
from swarmnode.policy.load import load_policy
from swarmnode.policy.micro import MicroBatcher
from swarmnode.rollouts.trainer.batch import TrainingGroup, assemble
from swarmnode.trainer.update import Updater


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
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def main() -> None:
    peaks: list[int] = []
    for case in json.load(sys.stdin):
        peaks.append(peak(case))
        gc.collect()
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
