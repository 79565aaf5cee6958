"""How far a local step is from its arithmetic: `python -m benchmarks.floor`; CPU seconds of one
thread.

A step samples rows of a fixed length, computes their log-probabilities with gradient and updates
all weights. Its arithmetic is 2 operations per weight and sampled token, and 6 per weight and
trained token; attention and everything else is not counted. The floor is that number of operations
at the rate of a large matrix product, measured between the parts of the step. Random Qwen2 of 22 M
weights with a vocabulary of 32,768; more than half of its weights are the tied head.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.report import heading, middle, table, write_json
from benchmarks.shapes import SHAPES, build
from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import Policy, load_policy
from swarmnode.policy.logprobs import collate, completion_logprobs
from swarmnode.policy.micro import micro_batches
from swarmnode.trainer.update import make_optimizer

SHAPE = "qwen2-22m"
PROMPT = "Calculate 10 + 8."
MATRIX = 1024
MICRO_TOKENS = TrainingConfig().per_device_train_tokens


@dataclass(frozen=True)
class Step:
    """CPU seconds of one step, and operations per CPU second of a matrix product beside it."""

    sampling: float
    update: float
    rate: float


def one_step(policy: Policy, optimizer: torch.optim.Optimizer, rows: int, tokens: int) -> Step:
    rates = [matrix_rate()]
    began = time.process_time()
    (group,) = generate(policy, [PROMPT], Sampling(rows, tokens), policy.random_generator(0))
    sampling = time.process_time() - began
    rates.append(matrix_rate())
    sampled = [(group.prompt_ids, completion.ids) for completion in group.completions]
    began = time.process_time()
    for batch in micro_batches([len(p) + len(c) for p, c in sampled], MICRO_TOKENS):
        logprobs, _ = completion_logprobs(
            policy, collate([sampled[row] for row in batch], policy.pad_id), 1.0
        )
        logprobs.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    update = time.process_time() - began
    return Step(sampling, update, statistics.fmean([*rates, matrix_rate()]))


def matrix_rate() -> float:
    """Return operations per CPU second of a product of two square matrices."""
    one, other = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    one @ other
    began = time.process_time()
    for _ in range(3):
        one @ other
    return 3 * 2 * MATRIX**3 / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one step of 2 rows of 16 tokens")
    parser.add_argument("--rows", type=int, nargs="+", default=[16], help="answers of a step")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the same as JSON")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.tokens, args.steps = [2], 16, 1
    torch.set_num_threads(1)
    lines, results = [], []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_policy(PolicyConfig(devices="cpu")).tokenizer
        model = build(SHAPE, tokenizer, Path(folder) / "model")
        policy = load_policy(PolicyConfig(model=model, devices="cpu", threads=1))
        # as if the tokenizer had a token for each, and none of them ended an answer
        vocabulary = SHAPES[SHAPE].vocab_size
        policy = replace(
            policy, vocab_size=vocabulary, unused_ids=frozenset(), eos_ids=frozenset({-1})
        )
        weights = sum(p.numel() for p in policy.trainable_parameters())
        optimizer = make_optimizer(policy, TrainingConfig(learning_rate=1e-6), "adamw")
        for rows in args.rows:
            one_step(policy, optimizer, 2, 4)
            steps = [one_step(policy, optimizer, rows, args.tokens) for _ in range(args.steps)]
            operations = 8 * weights * rows * args.tokens
            floors = [operations / step.rate for step in steps]
            ratios = [
                (step.sampling + step.update) / floor
                for step, floor in zip(steps, floors, strict=True)
            ]
            results += [
                {"rows": rows, "tokens": args.tokens, "weights": weights, "floor": floor}
                | vars(step)
                for step, floor in zip(steps, floors, strict=True)
            ]
            lines.append(
                (
                    f"{rows} x {args.tokens}",
                    middle([step.sampling for step in steps]),
                    middle([step.update for step in steps]),
                    middle(floors),
                    middle([step.rate / 1e9 for step in steps], 0),
                    middle(ratios),
                )
            )
    print(heading(f"floor: a step of {weights:,} weights and its arithmetic"))
    headers = (
        "answers x tokens",
        "sampling, CPU s",
        "update, CPU s",
        "floor, CPU s",
        "GFLOP/s",
        "step / floor",
    )
    print(table(headers, lines))
    if args.json:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
