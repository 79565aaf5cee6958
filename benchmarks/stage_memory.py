"""What a micro-batch takes in the last stage of a crew, beside its weights: `python -m
benchmarks.stage_memory [--length 2000]`.

Qwen2.5-0.5B's shape cut in two, one completion, in float32 and on one core: `all at once` is all
logits and all layers' activations together, `head in pieces` what is done where those fit, and
`layers again` what is done where they do not. Each in a process of its own; `the plan` is what the
members' memory is asked for. rank: of an adapter; 0 trains all weights, and then the gradient of
the head, which each piece adds to, is there three times.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoConfig

from benchmarks.report import heading, table
from benchmarks.shapes import build
from swarmnode.config import Config, LoraSettings, PolicyConfig, TrainingConfig
from swarmnode.policy.device import TRAINED_BYTES, probe, set_up
from swarmnode.policy.load import load_policy
from swarmnode.policy.logprobs import collate
from swarmnode.stages import model as stage_model
from swarmnode.stages.model import StageRuntime, add_adapter, load_stage, make_packing
from swarmnode.stages.trainer import cached_tokens, estimate_cost, host_bytes_per_weight
from swarmnode.stages.wire import model_cost, stage_memory, stage_specs

SHAPE, LAYERS, PROMPT = "qwen2.5-0.5b", (12, 12), 64
ARMS = {
    "all at once": (False, False),
    "head in pieces": (True, False),
    "layers again": (True, True),
}
"""name → (whether the head is run in pieces, whether layers keep their input only)."""


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def learn(runtime: StageRuntime, length: int) -> None:
    batch = collate([([5] * PROMPT, [7 + i % 90 for i in range(length)])], 0)
    x = torch.randn(
        make_packing(batch).rows, runtime.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    runtime.learn(batch, x, 1.0, lambda logprobs, entropy: logprobs.sum())


def measure(directory: Path, arm: str, length: int, rank: int) -> tuple[float, float]:
    """(bytes at the peak above what was there before, seconds) of one `learn`."""
    torch.set_num_threads(1)
    set_up(torch.device("cpu"))
    pieces, again = ARMS[arm]
    stage_model.needs_checkpointing = lambda *given: again
    if not pieces:
        stage_model.logits_tokens = lambda *given: 10**9
    spec = stage_specs(AutoConfig.from_pretrained(directory), LAYERS)[-1]
    stage = load_stage(directory, spec)
    runtime = StageRuntime(
        spec,
        add_adapter(stage, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
        if rank
        else stage,
    )
    for parameter in runtime.parameters():
        # zeros would be no memory until something is added
        parameter.grad = torch.ones_like(parameter)
    learn(runtime, 2)  # weights are mapped from their file until something is computed with them
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak begins anew
    before, began = peak_bytes(), time.perf_counter()
    learn(runtime, length)
    return peak_bytes() - before, time.perf_counter() - began


def planned_bytes(directory: str, length: int, rank: int) -> float:
    """What a crew's plan counts for it: all that the stage needs, but the weights and what is
    trained of them, and the caches."""
    config, placement = AutoConfig.from_pretrained(directory), probe(PolicyConfig(devices="cpu"))
    settings = Config(
        policy=PolicyConfig(lora=LoraSettings(r=rank)),
        training=TrainingConfig(max_completion_length=length),
    )
    cost = estimate_cost(settings, config, placement)
    trained = 0 if rank else TRAINED_BYTES - 4 + host_bytes_per_weight(settings.weights)
    weights = model_cost(
        config,
        batch_tokens=1,
        cached_tokens=cached_tokens(settings.training),
        weight_bytes=4,
        trained_bytes=trained,
    )
    return stage_memory(cost, LAYERS, 1) - stage_memory(weights, LAYERS, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2000, help="tokens of the completion")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--arm", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.arm:
        print(*measure(Path(asked.arm[1]), asked.arm[0], asked.length, asked.rank))
        return
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = build(
            SHAPE, load_policy(PolicyConfig(devices="cpu")).tokenizer, Path(directory) / "model"
        )
        for arm in ARMS:
            sizes = ["--length", str(asked.length), "--rank", str(asked.rank)]
            child = [sys.executable, "-m", "benchmarks.stage_memory", *sizes, "--arm", arm, model]
            taken, seconds = subprocess.run(
                child, capture_output=True, text=True, check=True
            ).stdout.split()
            rows.append([arm, f"{float(taken) / 1e9:.2f}", f"{float(seconds):.0f}"])
        rows.append(["the plan", f"{planned_bytes(model, asked.length, asked.rank) / 1e9:.2f}", ""])
    print(heading("crew: what a micro-batch takes in the last stage"))
    print(table(["way", "GB beside weights and gradients", "s"], rows))


if __name__ == "__main__":
    main()
