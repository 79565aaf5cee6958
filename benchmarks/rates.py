"""Find the learning rate that teaches a real chat model within 15 steps.

SmolLM2-135M-Instruct learns one of two tasks with the product's sampling, scoring and
update, alone and on one thread, with two groups of eight answers a step:

    sums     "6 + 2 =", verifier `numeric`, at most 12 tokens
    json     name, age and city of a sentence as JSON, verifier `json`, at most 40 tokens

A cell is a task, a seed, the trained part and a learning rate. Trained parts are all weights and an
adapter (`shared`, because all nodes derive its frozen A). The cells of a seed see the same
questions in the same order. Rewards on the way are those of the sampled answers; the held-out
reward after the last step is of 128 answers to 32 questions. Each cell appends a row to the file of
`--rows`; finished cells are not repeated. `--table` prints the file.
"""

from __future__ import annotations

import functools
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.lib.report import (
    append_row,
    columns,
    heading,
    machine,
    make_parser,
    note,
    read_rows,
    rounded,
)
from benchmarks.lib.simulator import single_thread
from swarmnode.config import Config, DatasetConfig
from swarmnode.policy.load import Policy
from swarmnode.rl.split import AdaptiveSplit
from swarmnode.rollouts.groups import is_useful
from swarmnode.rollouts.trainer.batch import assemble
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import install_datasets
from swarmnode.trainer.engine import Engine, make_whole_policy, open_policy
from swarmnode.trainer.evaluate import Evaluation
from swarmnode.trainer.learning import LEAST, LearningWatch
from swarmnode.trainer.reporting import completion_lengths
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters

ROWS = Path(__file__).parent / "results" / "rates.jsonl"
NAMES = "Anna Boris Clara David Elena Frank Greta Henry Irene Jonas Karin Louis Maria Nadia Oscar"
CITIES = "Paris Rome Berlin Madrid Vienna Prague Lisbon Dublin Athens Oslo Warsaw Helsinki"
RESAMPLED = 400
"""Runs that are resampled from a cell's rewards, for the share of reports of `trainer.learning`."""
LONGEST = {"sums": 12, "json": 40}
"""Maximum number of tokens of a completion, by task."""


@dataclass(frozen=True)
class Cell:
    task: str
    seed: int
    trained: str
    """`all`: all weights; `shared`: an adapter."""
    alpha: int
    """Alpha of the adapter; 0 without one."""
    rate: float
    rank: int = 16
    steps: int = 15


def write_datasets(folder: Path) -> dict[str, DatasetConfig]:
    """Write the rows of both tasks, and return their settings."""
    rng = random.Random(0)
    sums = [(f"{a} + {b} =", str(a + b)) for a in range(1, 13) for b in range(1, 13)]
    people = [
        (name, rng.randint(18, 80), city) for name in NAMES.split() for city in CITIES.split()
    ]
    fields = [
        (
            f"{name} is {age} years old and lives in {city}. Write this as a JSON object with the"
            " keys name, age and city.",
            json.dumps({"name": name, "age": age, "city": city}),
        )
        for name, age, city in people
    ]
    found = {}
    for task, verifier, rows in (("sums", "numeric", sums), ("json", "json", fields)):
        file = folder / f"{task}.jsonl"
        lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows]
        file.write_text("".join(lines))
        found[f"data/{task}"] = DatasetConfig(source=str(file), verifier=verifier, held_out=0.25)
    return found


def config_of(cell: Cell, model: str, folder: Path) -> Config:
    lora = {"r": cell.rank, "lora_alpha": cell.alpha} if cell.alpha else {}
    return Config.model_validate(
        {
            "node": {"data_dir": folder},
            "policy": {"model": model, "devices": "cpu", "threads": 1, "lora": lora},
            "task": {"names": [f"data/{cell.task}"], "held_out_per_task": 32},
            "weights": {"rule": "off"},
            "training": {
                "learning_rate": cell.rate,
                "groups_per_step": 2,
                "max_completion_length": LONGEST[cell.task],
                "options": ["lockstep"],
            },
        }
    )


@functools.lru_cache(maxsize=1)
def start_policy(model: str, trained: str, rank: int, alpha: int) -> Policy:
    """Return the policy that the cells of one trained part start from."""
    lora = {"r": rank, "lora_alpha": alpha} if alpha else {}
    config = Config.model_validate(
        {"policy": {"model": model, "devices": "cpu", "threads": 1, "lora": lora}}
    )
    return open_policy(config.policy, None, lambda line: None)


def evaluate(engine: Engine, config: Config, scorer: Scorer) -> tuple[float, float | None]:
    """Return the held-out reward and its standard error."""
    held_out = Evaluation(config.task, config.training, scorer)(engine, Counters())
    assert held_out is not None
    return held_out.reward, held_out.error


def run(
    cell: Cell,
    model: str,
    scorer: Scorer,
    folder: Path,
    start: dict[str, tuple[float, float | None]],
) -> dict[str, Any]:
    """Train a cell, and return its row.

    Args:
        start: Held-out reward before training, by task. The first cell of a task adds it.
    """
    config = config_of(cell, model, folder)
    training, names = config.training, config.task.names
    policy = start_policy(model, cell.trained, cell.rank, cell.alpha).clone()
    counters = Counters(peer="rates", swarm=bytes([cell.seed] * 32).hex())
    engine = make_whole_policy(config, policy, counters, lambda message: None)
    if cell.task not in start:
        start[cell.task] = evaluate(engine, config, scorer)
    started = time.process_time()
    split = AdaptiveSplit(training.groups_per_step, shares=config.sharing.enabled)
    sampler = Sampler(
        training,
        names,
        engine,
        scorer,
        policy.random_generator(cell.seed),
        counters,
    )
    steps = []
    for _ in range(cell.steps):
        experience = sampler(split.own_groups)
        fresh = experience.trained
        result = engine.update(assemble(fresh, training.advantage))
        counters.step += 1
        counters.policy_version += result.stepped
        lengths = completion_lengths(experience.groups)
        steps.append(
            {
                "reward": fmean(r for g in experience.groups for r in g.rewards),
                "useful": fmean(is_useful(g.rewards) for g in experience.groups),
                "rewards": [fmean(g.rewards) for g in experience.groups],
                "stepped": result.stepped,
                "entropy": result.entropy,
                "gap": result.own_gap,
                "grad_norm": result.grad_norm,
                "tokens": lengths["completion_tokens"],
                "cut": lengths["completion_cut_share"],
            }
        )
    seconds = time.process_time() - started
    held_out = evaluate(engine, config, scorer)
    return {
        "size": asdict(cell),
        "steps": rounded(steps),
        "held_out_start": rounded(list(start[cell.task])),
        "held_out": rounded(list(held_out)),
        "cpu_seconds": round(seconds, 1),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
    }


def cells(first: int, second: int) -> list[Cell]:
    """Return all cells of two seeds, the most decisive first."""
    shared = lambda task, seed, rate, alpha=32: Cell(task, seed, "shared", alpha, rate)
    return [
        shared("sums", first, 2e-4),
        shared("sums", first, 5e-4),
        shared("json", first, 2e-4),
        Cell("sums", first, "all", 0, 1e-5),
        shared("sums", second, 2e-4),
        shared("sums", first, 4e-4, alpha=16),
        shared("sums", first, 1e-3),
        shared("json", first, 5e-4),
        shared("sums", first, 1e-4),
        shared("sums", second, 5e-4),
        shared("sums", first, 3e-5),
        shared("json", second, 2e-4),
        Cell("sums", first, "all", 0, 3e-6),
        shared("json", second, 5e-4),
        Cell("json", first, "all", 0, 1e-5),
        shared("sums", second, 1e-3),
        Cell("sums", second, "all", 0, 1e-5),
        shared("json", first, 1e-3),
        shared("sums", first, 1e-3, alpha=16),
        shared("json", first, 1e-4),
        Cell("sums", first, "all", 0, 3e-5),
        Cell("sums", first, "all", 0, 1e-6),
        Cell("json", second, "all", 0, 1e-5),
        Cell("json", first, "all", 0, 3e-6),
        Cell("sums", second, "all", 0, 3e-6),
        shared("json", second, 1e-3),
    ]


def unmoved(row: dict[str, Any]) -> float:
    """Return the share of resampled runs whose reward the trainer reports as unmoved.

    A run has 20 steps. The reward of each is one of the recorded steps around the same share of
    the way.
    """
    rng, reported = random.Random(0), 0
    recorded = [step["reward"] for step in row["steps"]]
    last = len(recorded) - 1
    for _ in range(RESAMPLED):
        watch, kind = LearningWatch(Config.model_validate({"policy": {"model": "smollm2"}})), ""
        watch.start(fresh=True)
        for step in range(LEAST):
            at = round(last * step / (LEAST - 1) + rng.uniform(-1.5, 1.5))
            kind = watch.observe([recorded[min(last, max(0, at))]], None, None, stepped=True).kind
        reported += kind == "unmoved"
    return reported / RESAMPLED


def show(rows: Sequence[dict[str, Any]]) -> str:
    part = lambda row: (
        "all weights" if row["size"]["trained"] == "all" else f"{row['size']['trained']} A"
    )

    def mean(row: dict[str, Any], first: int) -> str:
        rewards = [step["reward"] for step in row["steps"][first : first + 5]]
        return f"{fmean(rewards):.2f}" if rewards else "–"

    reward = lambda held_out: f"{held_out[0]:.2f} ± {held_out[1]:.2f}"

    def last(row: dict[str, Any], key: str) -> str:
        values = [step[key] for step in row["steps"][-5:] if step[key] is not None]
        return f"{fmean(values):.2f}" if values else "–"

    return columns(
        rows,
        {
            "task": lambda row: row["size"]["task"],
            "trained": part,
            "alpha": lambda row: row["size"]["alpha"] or "–",
            "rate": lambda row: f"{row['size']['rate']:g}",
            "seed": lambda row: row["size"]["seed"],
            "steps 1–5": lambda row: mean(row, 0),
            "6–10": lambda row: mean(row, 5),
            "11–15": lambda row: mean(row, 10),
            "held out before": lambda row: reward(row["held_out_start"]),
            "after": lambda row: reward(row["held_out"]),
            "entropy, last 5": lambda row: last(row, "entropy"),
            "cut, last 5": lambda row: last(row, "cut"),
            "reported as unmoved": lambda row: f"{unmoved(row):.0%}",
            "CPU s a step": lambda row: f"{row['cpu_seconds'] / len(row['steps']):.1f}",
        },
    )


def main() -> None:
    parser = make_parser("rates", __doc__, quick="one cell of two steps, no file", json=False)
    parser.add_argument("--model", default="smollm2", help="policy.model (smollm2)")
    parser.add_argument("--seeds", type=int, nargs=2, default=[1, 2], help="the seeds (1 2)")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of finished cells")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    single_thread()
    wanted = cells(*args.seeds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.quick:
            wanted, args.rows = [replace(wanted[0], steps=2)], folder / "rows.jsonl"
        install_datasets(write_datasets(folder), folder)
        done = [row["size"] for row in read_rows(args.rows, [asdict(cell) for cell in wanted])]
        start: dict[str, tuple[float, float | None]] = {}
        with Scorer() as scorer:
            for cell in wanted if not args.table else []:
                if asdict(cell) in done:
                    continue
                row = run(cell, args.model, scorer, folder, start)
                append_row(args.rows, row)
                note(f"{cell}: {row['held_out'][0]}, {row['cpu_seconds']} CPU s")
        rows = read_rows(args.rows, [asdict(cell) for cell in wanted])
    print(heading("rates: the learning rate of a real chat model"))
    order = lambda row: [row["size"][key] for key in ("task", "trained", "alpha", "rate", "seed")]
    print(show(sorted(rows, key=order)))


if __name__ == "__main__":
    main()
