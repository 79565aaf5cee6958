"""Measure the speed-up by a second rank. `python -m benchmarks.cards [--quick] [--ranks 1 2]`

Samples per second and steps per second of one engine at each number of ranks: on the GPUs of this
machine if it has that many, else on its CPU with one thread per rank. Two ranks on two cores share
caches and memory, so they say little about two cards. Rank counts take turns, `--seeds` times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.shapes import random_llama
from benchmarks.report import heading, spread, table, write_json
from swarmnode.config import Config, PolicyConfig
from swarmnode.policy.device import devices
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy
from swarmnode.trainer.batch import assemble, own_group
from swarmnode.trainer.engine import Engine, make_whole_policy
from swarmnode.trainer.rank_pool import on_device
from swarmnode.trainer.ranks import other_ranks
from swarmnode.trainer.state import Counters

G = 8
"""Completions of a question."""


def configured(model: str, count: int) -> Config:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = ",".join(f"cuda:{index}" for index in range(count))
    return Config.model_validate(
        {
            "policy": {
                "model": model,
                "devices": named if gpus >= count else count if count > 1 else "cpu",
                "threads": 0 if gpus >= count else 1,
            },
            "weights": {"rule": "off"},
        }
    )


def timed(engine: Engine, questions: int, tokens: int, steps: int) -> tuple[float, float]:
    """Return (samples per second, steps per second): medians of `steps` steps after a first one."""
    prompts = [f"What is {n} + {n + 3}?" for n in range(questions)]
    rng = engine.random_generator(7)
    sampled, updated = [], []
    for step in range(steps + 1):
        started = time.monotonic()
        samples = engine.generate(prompts, Sampling(G, tokens), rng)
        between = time.monotonic()
        rows = assemble([own_group(one, [1.0, 0.0] * (G // 2)) for one in samples], "grpo")
        engine.update(rows)
        if step:
            sampled.append(questions * G / (between - started))
            updated.append(1 / (time.monotonic() - between))
    return statistics.median(sampled), statistics.median(updated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one short run of each number of ranks"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--hidden", type=int, default=256, help="width of the random Llama")
    parser.add_argument(
        "--questions", type=int, default=8, help="groups of 8 completions in a step"
    )
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of a completion")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    if args.quick:
        args.questions, args.tokens, args.steps, args.seeds, args.hidden = 2, 8, 1, 1, 64
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_policy(PolicyConfig(devices="cpu")).tokenizer
        model = random_llama(tokenizer, Path(folder), args.hidden)
        for seed in range(args.seeds):
            for count in args.ranks:
                config = configured(model, count)
                named = devices(config.policy)
                alive = lambda: None
                policy = load_policy(on_device(config, named, 0).policy)
                with other_ranks(config, named, alive) as make:
                    engine = make_whole_policy(
                        config, policy, Counters(), lambda message: None, alive, count, make
                    )
                    samples, steps = timed(engine, args.questions, args.tokens, args.steps)
                results.append({"ranks": count, "seed": seed, "samples": samples, "steps": steps})
    print(heading("cards: one machine, several ranks"))
    lines = []
    for count in args.ranks:
        of = [result for result in results if result["ranks"] == count]
        lines.append(
            (
                f"{count} × {named[0].type}",
                spread([each["samples"] for each in of]),
                spread([each["steps"] for each in of]),
            )
        )
    print(table(("ranks", "samples/s", "steps/s"), lines))
    if args.json:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
