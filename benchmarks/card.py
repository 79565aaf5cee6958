"""Measure training and sampling of a model of a published size on a CUDA GPU.

The model has the shape of Qwen2.5-7B (`--shape`), random weights, the embedded tokenizer and an
adapter of rank 16. Nearly all completions run to their longest.

    update     one row in an update, activations stored or recomputed: seconds, and peak memory
               against `swarmnode plan`
    sampling   tokens per second by completions at once: both engines, and the int8 policy copy
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.lib.report import heading, make_parser, table, write_json
from benchmarks.lib.shapes import SHAPES, build
from swarmnode.config import LoraSettings, PolicyConfig, TrainingConfig
from swarmnode.errors import DeviceError, Unavailable
from swarmnode.model_shape import Shape
from swarmnode.policy import logprobs
from swarmnode.policy.device import BASE_BITS
from swarmnode.policy.engine.continuous import Continuous
from swarmnode.policy.engine.selector import answered
from swarmnode.policy.footprint import Method, footprint
from swarmnode.policy.generate import GroupSample, Sampling, generate
from swarmnode.policy.load import Policy, load_policy
from swarmnode.policy.micro import MicroBatcher, free_memory
from swarmnode.policy.quantised import build_quantised
from swarmnode.rollouts.trainer.batch import TrainingGroup, assemble
from swarmnode.trainer.update import Updater

RANK, PROMPT, TOKENS = 16, 64, 96
ADAPTER = PolicyConfig(devices="cuda", dtype="bfloat16", lora=LoraSettings(r=RANK))
WAYS: dict[str, tuple[PolicyConfig, tuple[tuple[int, bool], ...]]] = {
    "LoRA 16": (ADAPTER, ((2560, False), (2560, True), (4608, True), (8704, True))),
    "LoRA 16, base in 4 bits": (
        ADAPTER.model_copy(update={"quantization": "4bit"}),
        ((2560, True),),
    ),
    "LoRA 16, base in 8 bits": (
        ADAPTER.model_copy(update={"quantization": "8bit"}),
        ((2560, True),),
    ),
    "all weights, moments in 8 bits": (
        PolicyConfig(devices="cuda", dtype="bfloat16", optim="adamw_8bit"),
        ((2560, True),),
    ),
    "all weights": (PolicyConfig(devices="cuda", dtype="bfloat16"), ((2560, True),)),
}
"""Name → training configuration, and cases (tokens of the row, activations recomputed)."""
COMPLETIONS = (8, 64)
UPDATE = [
    "trained",
    "tokens",
    "recomputed",
    "plan, GB",
    "held, GB",
    "context, GB",
    "held ÷ plan",
    "s",
]
SAMPLING = ["engine", "completions at once", "ms a step", "tokens/s", "GB beside the weights"]
QUESTIONS = [f"Tell me about the number {i}." for i in range(32)]


def used_bytes() -> int:
    """Return the bytes of the card that all processes use."""
    free, total = torch.cuda.mem_get_info()
    return total - free


# ---- update


def update(
    name: str, policy: Policy, cfg: PolicyConfig, updater: Updater, length: int, recompute: bool
) -> list[object]:
    """Return a row: memory and seconds of the second update with one row of `length` tokens."""
    logprobs.needs_checkpointing = lambda *given: recompute
    answer = [5 + i % 90 for i in range(length - PROMPT)]
    old = [[-1.0] * len(answer)] * 2
    group = TrainingGroup([([5] * PROMPT, answer)] * 2, old, [0.0, 1.0], [0.0, 1.0])
    rows = assemble([group], "grpo")
    updater.update(rows)
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    updater.update(rows)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    context = used_bytes() - torch.cuda.memory_reserved()
    held = torch.cuda.max_memory_allocated() + context
    shape = Shape.of_config(policy.base.config.to_dict())
    bits = BASE_BITS[cfg.quantization]
    method = Method("cuda", "bfloat16", cfg.lora.r, bits, cfg.optim, recompute)
    plan = footprint(shape, method, length).total
    return [
        name,
        length,
        "yes" if recompute else "no",
        f"{plan / 1e9:.1f}",
        f"{held / 1e9:.1f}",
        f"{context / 1e9:.2f}",
        f"{held / plan:.2f}",
        f"{seconds:.2f}",
    ]


def updates(model: str) -> list[list[object]]:
    """Return the rows of each training configuration."""
    rows: list[list[object]] = []
    for name, (cfg, cases) in WAYS.items():
        try:
            policy = load_policy(cfg.model_copy(update={"model": model}))
            batcher = MicroBatcher(max(length for length, _ in cases))
            updater = Updater(policy, TrainingConfig(), batcher, optim=cfg.optim)
            rows += [update(name, policy, cfg, updater, *case) for case in cases]
        except (DeviceError, torch.OutOfMemoryError, ImportError, Unavailable) as error:
            rows.append([name, *["–"] * 6, str(error).partition("\n")[0][:80]])
        policy = updater = None  # type: ignore[assignment]
        free_memory()
        print(*rows[-1], flush=True)
    return rows


# ---- sampling


def continuous(
    policy: Policy, prompts: Sequence[str], sampling: Sampling, rng: torch.Generator
) -> list[GroupSample]:
    """Sample as `generate` does, with the continuous engine."""
    return answered(Continuous(policy, MicroBatcher(2**20), sampling, rng), prompts)


def sample(
    name: str, policy: Policy, count: int, engine: Callable[..., list[GroupSample]] = generate
) -> list[object]:
    """Return a row: tokens per second with `count` completions at once, the second time."""
    each = min(8, count)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        rng = policy.random_generator(0)
        groups = engine(policy, QUESTIONS[: count // each], Sampling(each, TOKENS), rng)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    steps = max(len(c.ids) for g in groups for c in g.completions)
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    print(name, count, f"{seconds:.1f} s", flush=True)
    rate = f"{count * steps / seconds:.0f}"
    return [name, count, f"{1000 * seconds / steps:.1f}", rate, f"{peak:.2f}"]


def samplings(model: str) -> list[list[object]]:
    policy = load_policy(ADAPTER.model_copy(update={"model": model}))
    rows = [sample("lockstep, bfloat16", policy, count) for count in COMPLETIONS]
    rows += [sample("continuous, bfloat16", policy, count, continuous) for count in COMPLETIONS]
    weights = {
        name.replace(".base_layer", ""): tensor for name, tensor in policy.base.state_dict().items()
    }
    config, dtype, device = policy.base.config, policy.dtype, policy.device
    copy = replace(policy, model=build_quantised(config, weights.__getitem__, dtype, device))
    del policy
    free_memory()
    return [*rows, *(sample("lockstep, int8 copy", copy, count) for count in COMPLETIONS)]


def main() -> None:
    parser = make_parser("card", __doc__, quick="0.5 B")
    parts = ("update", "sampling")
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-7b")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA GPU")
        return
    shape = "qwen2.5-0.5b" if args.quick else args.shape
    results: dict[str, list[list[object]]] = {}
    with tempfile.TemporaryDirectory(prefix="card-") as folder:
        tokenizer = load_policy(PolicyConfig(devices="cpu")).tokenizer
        model = build(shape, tokenizer, Path(folder) / "model", "cuda")
        free_memory()
        if "sampling" in args.parts:
            results["sampling"] = samplings(model)
            print(heading("card: sampling") + "\n" + table(SAMPLING, results["sampling"]))
            free_memory()
        if "update" in args.parts:
            results["update"] = updates(model)
            print(heading("card: update") + "\n" + table(UPDATE, results["update"]))
    write_json(args.json, results)


if __name__ == "__main__":
    main()
