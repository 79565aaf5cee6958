"""Measure the time and memory saved by packing rows of unequal lengths. `python -m
benchmarks.packing [--quick]`

CPU seconds of one thread, or with `--device cuda --shape NAME` seconds of a GPU.

    padded   micro-batches of similar lengths, prompts once, padded completions
    packed   one row per question: its prompt and all of its completions behind it

Forward and backward pass over the same rows. Lengths of completions are geometric, or all equal.
The model is a random Llama of 4 layers, or one of benchmarks/lib/shapes.py.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
import unittest.mock
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.shapes import SHAPES, build, random_llama
from benchmarks.report import heading, spread, table, write_json
from swarmnode.config import PolicyConfig
from swarmnode.policy import logprobs
from swarmnode.policy.load import Policy, load_policy
from swarmnode.policy.logprobs import Row, collate, completion_logprobs
from swarmnode.policy.micro import micro_batches
from tools.build_tiny import build_tokenizer

G = 8
"""Completions of a question."""
CASES = {
    "short": (16, 64, (8, 60)),
    "middle": (60, 255, (17, 185)),
    "unlike": (30, 255, (8, 60)),
    "alike": (60, 60, (60, 60)),
    "long": (128, 512, (60, 255)),
    "longest": (300, 1024, (60, 255)),
}
"""Case → mean and cap of completions in tokens (equal: all of that length), range of prompts."""
MICRO_TOKENS = 16_384


def rows_of(case: str, groups: int, vocabulary: int, seed: int) -> list[Row]:
    mean, cap, prompts = CASES[case]
    rng = random.Random(f"{case} {seed}")
    tokens = lambda count: [rng.randrange(3, vocabulary) for _ in range(count)]
    rows: list[Row] = []
    for _ in range(groups):
        prompt = tokens(rng.randint(*prompts))
        rows += [
            (
                prompt,
                tokens(cap if mean == cap else max(1, min(cap, round(rng.expovariate(1 / mean))))),
            )
            for _ in range(G)
        ]
    return rows


def one_step(policy: Policy, rows: Sequence[Row]) -> list[torch.Tensor]:
    """Return the log-probabilities of each row's completion; gradients accumulate."""
    found: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    groups = [row // G for row in range(len(rows))]
    for batch in micro_batches([len(p) + len(c) for p, c in rows], MICRO_TOKENS, groups):
        logprobs, _ = completion_logprobs(
            policy, collate([rows[i] for i in batch], policy.pad_id, policy.device), 1.0
        )
        logprobs.sum().backward()
        for row, values in zip(batch, logprobs, strict=True):
            found[row] = values[: len(rows[row][1])].detach()
    return found


def padded_tokens(rows: Sequence[Row]) -> tuple[int, int]:
    """Return (tokens of a padded pass, those of them that are not padding)."""
    groups = [row // G for row in range(len(rows))]
    run = real = 0
    for batch in micro_batches([len(p) + len(c) for p, c in rows], MICRO_TOKENS, groups):
        made = collate([rows[i] for i in batch], 0)
        run += made.prompt_ids.numel() + made.completion_ids.numel()
        real += int(made.prompt_mask.sum() + made.completion_mask.sum())
    return run, real


@dataclass(frozen=True)
class Measured:
    """A step of one arm."""

    seconds: float
    logprobs: list[torch.Tensor]
    gradient: torch.Tensor
    held_bytes: int
    """Peak GPU memory in addition to weights and gradients; 0 on a CPU."""


def measure(gain: float, policy: Policy, rows: Sequence[Row]) -> Measured:
    """Time a step. gain: ratio of tokens from which rows are packed."""
    policy.base.zero_grad(set_to_none=False)
    on_gpu = policy.device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    clock = time.perf_counter if on_gpu else time.process_time
    with (
        unittest.mock.patch.object(logprobs, "PACKED_GAIN", {}),
        unittest.mock.patch.object(logprobs, "PACKED_GAIN_ELSEWHERE", gain),
    ):
        began = clock()
        found = one_step(policy, rows)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = clock() - began
    held = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    gradient = torch.cat([p.grad.flatten() for p in policy.base.parameters() if p.grad is not None])
    return Measured(seconds, found, gradient, held)


def model_in(folder: str, asked: argparse.Namespace) -> Policy:
    """Return a policy with random weights."""
    tokenizer, directory = build_tokenizer(set()), Path(folder) / "model"
    if asked.shape:
        model = build(asked.shape, tokenizer, directory, asked.device)
    else:
        model = random_llama(tokenizer, directory, asked.hidden)
    return load_policy(
        PolicyConfig(model=model, devices=asked.device, dtype=asked.dtype, threads=1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one case, one group, one seed")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 completions in a step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="shape of the model instead of the random Llama"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--columns", type=int, default=logprobs.PACKED_COLUMNS)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    if args.quick:
        args.cases, args.groups, args.seeds = args.cases[:1], 1, 1
    torch.set_num_threads(1)
    logprobs.PACKED_COLUMNS = args.columns
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        policy = model_in(folder, args)
        arms = {"padded": math.inf, "packed": 0.0}
        for case in args.cases:
            for seed in range(args.seeds):
                rows = rows_of(case, args.groups, policy.vocab_size, seed)
                if not seed:  # warm up
                    for gain in arms.values():
                        measure(gain, policy, rows if args.device != "cpu" else rows[:G])
                done: dict[str, Measured] = {}
                for name in (list(arms), list(reversed(arms)))[seed % 2]:
                    done[name] = measure(arms[name], policy, rows)
                one, other = done["padded"], done["packed"]
                run, real = padded_tokens(rows)
                results.append(
                    {
                        "case": case,
                        "seed": seed,
                        "run": run,
                        "real": real,
                        "seconds": {name: each.seconds for name, each in done.items()},
                        "held_bytes": {name: each.held_bytes for name, each in done.items()},
                        "apart": max(
                            float((a - b).abs().max())
                            for a, b in zip(one.logprobs, other.logprobs, strict=True)
                        ),
                        "gradient_apart": float(
                            (one.gradient - other.gradient).norm() / one.gradient.norm()
                        ),
                    }
                )
    print(heading("packing: short rows one behind the other"))
    unit = "s" if args.device != "cpu" else "CPU s"
    lines = []
    for case in args.cases:
        of = [result for result in results if result["case"] == case]
        mean, cap, (least, most) = CASES[case]
        ratios = [result["seconds"]["padded"] / result["seconds"]["packed"] for result in of]
        held = [max(r["held_bytes"][arm] for r in of) / 1e9 for arm in arms]
        lines.append(
            (
                f"{case}: answers of {mean} on the mean, at most {cap}; prompts {least} to {most}",
                spread([r["run"] / r["real"] for r in of]),
                spread([r["seconds"]["padded"] for r in of], 3),
                spread([r["seconds"]["packed"] for r in of], 3),
                spread(ratios),
                " / ".join(f"{each:.1f}" for each in held) if any(held) else "–",
                f"{max(r['apart'] for r in of):.0e}",
                f"{max(r['gradient_apart'] for r in of):.0e}",
            )
        )
    print(
        table(
            (
                "case",
                "tokens run ÷ real",
                f"padded, {unit}",
                f"packed, {unit}",
                "faster by",
                "GB held, padded / packed",
                "nats apart",
                "gradient apart",
            ),
            lines,
        )
    )
    if args.json:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
