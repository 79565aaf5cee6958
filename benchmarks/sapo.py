"""Measure how sharing rollouts changes learning.

Eight nodes with a tiny policy each run in one process with the product's parts and in lockstep
(benchmarks/lib/simulator.py). All arms of a seed start from the same policies and read the same
streams of questions. Arms are compared at equal optimizer steps, as SAPO counts, and at equal own
generated tokens.

    8/0, 6/2, 4/4, 2/6    own / external groups of a step, treated as in SAPO
    4/4 unfiltered        groups whose rewards are all equal are sent too
    adaptive              the product's adaptive split, the rest as in SAPO
    swarmnode             the product: split and judgement
    lone, over-sampling   one node that generates until its batch is full of useful groups
    … + NoLoCo            with an outer step of all nodes every five rounds

Held-out reward is measured at temperature 1 on questions from the evaluation range. Local reward is
of the groups that a node generated itself. A regime is the ability of the start policies
(benchmarks/lib/regimes.py).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.lib.report import (
    columns,
    count_until,
    heading,
    make_parser,
    mean_until,
    note,
    rounded,
    seeds_of,
    spread,
    value_at,
    write_json,
)

B, G, NODES = 8, 8, 8
TOKENS_PER_COMPLETION = 3.6
REGIMES = ("ultra-sparse", "sparse", "moderate", "dense", "heterogeneous")
FIXED = ("8/0", "6/2", "4/4", "2/6")
OVERSAMPLING = "lone, over-sampling"
ADAPTIVE = ("adaptive", "swarmnode")
ARMS = (*FIXED[:3], "4/4 unfiltered", "2/6", *ADAPTIVE, OVERSAMPLING)
KNOWN = (*ARMS, "8/0 + NoLoCo", "4/4 + NoLoCo")
AVERAGE_EVERY = 5
"""Rounds between two outer steps."""


@dataclass(frozen=True)
class Size:
    """Size of the experiment."""

    rounds: int = 40
    learning_rate: float = 3e-4
    eval_every: int = 5
    eval_questions: int = 8
    steps_only: bool = False
    """End every arm after `rounds`, even before it has generated `tokens`."""
    nodes: int = NODES

    @property
    def tokens(self) -> float:
        """Generated tokens per node at which arms are compared: half of what 8/0 generates in
        `rounds`."""
        return self.rounds * B / 2 * G * TOKENS_PER_COMPLETION


def arms(names: Sequence[str]) -> list[Any]:
    """Return the arms of these names."""
    from benchmarks.lib.simulator import PAPER, PRODUCT, Arm

    known = [
        *(Arm(name, int(name[2])) for name in FIXED),
        Arm("4/4 unfiltered", 4, replace(PAPER, useful_only=False)),
        Arm("adaptive", None),
        PRODUCT,
        Arm(OVERSAMPLING, oversample=4 * B),
        Arm("8/0 + NoLoCo", average=AVERAGE_EVERY),
        Arm("4/4 + NoLoCo", 4, average=AVERAGE_EVERY),
    ]
    return [arm for arm in known if arm.name in names]


def run_regime(regime: str, seed: int, names: Sequence[str], size: Size) -> list[dict[str, Any]]:
    """Run all arms of one regime and seed."""
    from benchmarks.lib.regimes import start_policies
    from benchmarks.lib.simulator import Swarm, Trace, single_thread
    from swarmnode.config import TrainingConfig
    from swarmnode.tasks.client import Scorer

    single_thread()
    training = TrainingConfig(
        learning_rate=size.learning_rate, groups_per_step=B, num_generations=G
    )

    def enough(trace: Trace) -> bool:
        rounds = len(trace.tokens)
        spent = size.steps_only or sum(trace.tokens) >= size.tokens
        return (rounds >= size.rounds and spent) or rounds >= 5 * size.rounds // 2

    policies = start_policies(regime, seed, size.nodes)
    results = []
    with Scorer() as scorer:
        for arm in arms(names):
            started = time.process_time()
            # lone nodes do not interact and are expensive
            some = policies[: size.nodes // 2] if arm.oversample else policies
            swarm = Swarm(
                arm, [p.clone() for p in some], training, scorer, seed, size.eval_questions
            )
            trace = swarm.run(enough, size.eval_every)
            row = {"regime": regime, "seed": seed, **summary(trace, size)}
            results.append({**row, "trace": rounded(trace.as_dict())})
            seconds = time.process_time() - started
            note(
                f"{regime} seed {seed} {arm.name}: {len(trace.tokens)} rounds, {seconds:.0f} CPU s"
            )
    return results


def summary(trace: Any, size: Size) -> dict[str, Any]:
    """Return the figures of one run."""
    first, tokens = slice(0, size.rounds), size.tokens
    rounds, by_tokens = trace.curve("round"), trace.curve("tokens")
    return {
        "arm": trace.arm,
        "steps": {
            "local_reward": sum(trace.reward_own[first]),
            "held_out": value_at(rounds, size.rounds),
            "mean_held_out": mean_until(rounds, size.rounds),
            "generated": sum(trace.generated_groups[first]),
            "tokens": sum(trace.tokens[first]),
            "useful": fmean(trace.useful_samples[first]),
        },
        "tokens": {
            "held_out": value_at(by_tokens, tokens),
            "mean_held_out": mean_until(by_tokens, tokens),
            "steps": count_until(trace.tokens, tokens, [1.0] * len(trace.tokens)),
            "generated": count_until(trace.tokens, tokens, trace.generated_groups),
        },
    }


Runs = dict[str, list[dict[str, Any]]]
"""Arm → its results, one for each seed."""


def regime_tables(regime: str, results: Sequence[dict[str, Any]], size: Size) -> str:
    """Return the tables of one regime; – where an arm never reached the budget."""
    runs: Runs = {name: [r for r in results if r["arm"] == name] for name in KNOWN}
    runs = {name: rows for name, rows in runs.items() if rows}

    def cell(part: str, key: str, digits: int = 3) -> Any:
        def of(name: str) -> str:
            values = [r[part][key] for r in runs[name]]
            return "–" if None in values else spread(values, digits)

        return of

    steps = {
        "arm": str,
        "local reward, sum over steps": cell("steps", "local_reward", 2),
        "against 8/0 by seed, %": lambda name: against_alone(runs, name),
        "held-out": cell("steps", "held_out"),
        "mean held-out over the run": cell("steps", "mean_held_out"),
        "groups generated": cell("steps", "generated", 0),
        "tokens sampled": cell("steps", "tokens", 0),
        "useful groups per step": cell("steps", "useful", 2),
    }
    tokens = {
        "arm": str,
        "held-out": cell("tokens", "held_out"),
        "mean held-out over the run": cell("tokens", "mean_held_out"),
        "steps": cell("tokens", "steps", 0),
        "groups generated": cell("tokens", "generated", 0),
    }
    seeds = len(next(iter(runs.values())))
    return "\n\n".join(
        [
            f"### {regime} ({seeds} seeds)\n\nEqual optimizer steps: {size.rounds}.",
            columns(list(runs), steps),
            f"Equal generated tokens: {size.tokens:.0f} per node.",
            columns(list(runs), tokens),
            *adaptive_verdict(runs),
        ]
    )


def against_alone(runs: Runs, name: str) -> str:
    """Return the change of the local reward against 8/0 for each seed."""
    alone = {r["seed"]: r["steps"]["local_reward"] for r in runs.get("8/0", ())}
    changes = [
        f"{100 * (r['steps']['local_reward'] / alone[r['seed']] - 1):+.0f}"
        for r in runs[name]
        if name != "8/0" and alone.get(r["seed"])
    ]
    return " ".join(changes) or "–"


def adaptive_verdict(runs: Runs) -> list[str]:
    """Compare each adaptive arm with the best fixed split of each seed, at equal steps and at equal
    generated tokens."""
    fixed = [row for name in FIXED for row in runs.get(name, ())]
    lines = []
    for name in (name for name in ADAPTIVE if name in runs and fixed):
        parts = []
        for part in ("steps", "tokens"):
            ratios = []
            for row in runs[name]:
                rivals = [r[part]["mean_held_out"] for r in fixed if r["seed"] == row["seed"]]
                best = max((value for value in rivals if value is not None), default=None)
                if best and row[part]["mean_held_out"] is not None:
                    ratios.append(row[part]["mean_held_out"] / best)
            won = sum(ratio >= 1 for ratio in ratios)
            parts.append(f"{part} {spread(ratios)} (≥ 1 in {won} of {len(ratios)})")
        lines.append(
            f"{name} ÷ the best fixed split of the seed, mean held-out reward at equal"
            f" {'; '.join(parts)}."
        )
    return lines


def main() -> None:
    parser = make_parser("sapo", __doc__, quick="one regime, one seed, three arms", seeds=3)
    parser.add_argument("--rounds", type=int, default=Size.rounds, help="optimizer steps")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument(
        "--steps-only", action="store_true", help="no arm continues for the table of equal tokens"
    )
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=KNOWN, metavar="ARM")
    parser.add_argument("--regimes", nargs="+", default=REGIMES, choices=REGIMES, metavar="REGIME")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if "heterogeneous" in args.regimes and any("NoLoCo" in name for name in args.arms):
        parser.error("nodes average only if they start from one policy: name other --regimes")
    size = Size(args.rounds, nodes=args.nodes, steps_only=args.steps_only)
    if args.quick:
        size = Size(14, eval_every=4, eval_questions=6)
        args.seeds, args.arms, args.regimes = 1, ["8/0", "4/4", "adaptive"], ["sparse"]
    print(heading("sapo: how sharing rollouts changes learning"))
    settings = f"N = {size.nodes}, B = {B}, G = {G}, learning rate {size.learning_rate:g}"
    print(settings + "\n", flush=True)
    results: dict[str, list[dict[str, Any]]] = {regime: [] for regime in args.regimes}
    # spawn: a forked torch may deadlock, and each process has its own scorer child
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        jobs = {
            pool.submit(run_regime, regime, seed, args.arms, size): regime
            for regime in args.regimes
            for seed in seeds_of(args)
        }
        for job in as_completed(jobs):
            results[jobs[job]] += job.result()
            arms_found = [row for rows in results.values() for row in rows]
            write_json(args.json, {"settings": settings, "tokens": size.tokens, "arms": arms_found})
    for regime, rows in results.items():
        print(regime_tables(regime, rows, size) + "\n", flush=True)


if __name__ == "__main__":
    main()
