"""Does sharing rollouts help? `python -m benchmarks.sapo [--quick] [--json PATH] [--seeds N] [--arms ...] [--regimes ...] [--attacks ...]`

Eight nodes in one process with a tiny policy each, the real parts of a node, synchronous rounds (benchmarks/simulator.py). Every arm of a
seed starts from the same policies and asks from the same streams of questions. Three accountings of the same runs:

    optimizer samples   groups in the optimizer's batches, useful or not, own or external
    generated tokens    what a node sampled for training
    optimizer steps     as the paper counts (rounds); a batch may be smaller or larger than B here

Held-out reward: temperature 1, questions from the evaluation range. Local reward: groups that the node generated itself, nobody else's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.report import heading, spread, table, write_json

B, G, NODES = 8, 8, 8
TOKENS_PER_COMPLETION = 3.6
REGIMES = ("ultra-sparse", "sparse", "moderate", "dense", "heterogeneous")
ARMS = ("8/0", "8/0 + filter", "6/2", "4/4 unfiltered", "4/4", "4/4 + correction", "2/6", "adaptive", "swarmnode", "lone, over-sampling")
AVERAGING = ("8/0 + NoLoCo", "4/4 + NoLoCo")
"""Arms of their own: `--arms 8/0 4/4 "8/0 + NoLoCo" "4/4 + NoLoCo"`."""
AVERAGE_EVERY = 5
FIXED = ("8/0", "6/2", "4/4", "2/6")
ATTACKS = (
    "none", "silent", "forged", "poison", "informed", "informed, unchecked", "ids", "length", "length, unchecked", "garbage", "replay",
    "mixed",
)  # fmt: skip
HOSTILE_REGIME = "moderate"
HOSTILE_NODES = (6, 7)


@dataclass(frozen=True)
class Size:
    """How much is run. Budgets are per node."""

    rounds: int
    hostile_rounds: int
    learning_rate: float
    eval_every: int = 5
    eval_questions: int = 8

    @property
    def samples(self) -> float:
        """Groups in batches at which arms are compared: an arm that trains on five of eight gets there in `rounds`."""
        return self.rounds * B * 5 / 8

    @property
    def tokens(self) -> float:
        """Generated tokens at which arms are compared: half of what 8/0 generates in `rounds`, about all that 4/4 does."""
        return self.rounds * B / 2 * G * TOKENS_PER_COMPLETION


def arms(names: Sequence[str]) -> list[Any]:
    from benchmarks.simulator import PAPER, Arm
    from swarmnode.config import SharingConfig

    known = [
        Arm("8/0"),
        Arm("8/0 + filter", filter_own=True),
        Arm("6/2", 2),
        Arm("4/4 unfiltered", 4, PAPER.model_copy(update={"zero_advantage_filter": False})),
        Arm("4/4", 4),
        Arm("4/4 + correction", 4, PAPER.model_copy(update={"correction": "sequence"})),
        Arm("2/6", 6),
        Arm("adaptive", None),
        Arm("swarmnode", None, SharingConfig(), keep_pool=True, guard=True),
        Arm("lone, over-sampling", oversample=4 * B),
        Arm("8/0 + NoLoCo", average=AVERAGE_EVERY),
        Arm("4/4 + NoLoCo", 4, average=AVERAGE_EVERY),
    ]
    return [arm for arm in known if arm.name in names]


def run_regime(regime: str, seed: int, names: Sequence[str], size: Size, base: str) -> list[dict[str, Any]]:
    """All arms of one regime and seed, in a process of its own."""
    from benchmarks.regimes import start_policies
    from benchmarks.simulator import Swarm, Trace, single_thread
    from swarmnode.config import TrainingConfig
    from swarmnode.tasks.client import Scorer

    single_thread()
    training = TrainingConfig(learning_rate=size.learning_rate, groups_per_step=B, num_generations=G)

    def enough(trace: Trace) -> bool:
        rounds = len(trace.tokens)
        done = rounds >= size.rounds and sum(trace.tokens) >= size.tokens and sum(trace.samples) >= size.samples
        return done or rounds >= 5 * size.rounds // 2

    policies = start_policies(regime, seed, NODES, base)
    results = []
    with Scorer() as scorer:
        for arm in arms(names):
            started = time.process_time()
            some = policies[: NODES // 2] if arm.oversample else policies  # lone nodes do not interact, and these are dear
            swarm = Swarm(arm, [p.clone() for p in some], training, scorer, seed, size.eval_questions)
            trace = swarm.run(enough, size.eval_every)
            results.append({"regime": regime, "seed": seed, **summary(trace, size), "trace": rounded(trace.as_dict())})
            note(f"{regime} seed {seed} {arm.name}: {len(trace.tokens)} rounds, {time.process_time() - started:.0f} CPU s")
    return results


def run_hostile(seed: int, attacks: Sequence[str], size: Size, base: str) -> list[dict[str, Any]]:
    """Two of eight peers attack in one of the ways of benchmarks.adversaries, under the product's own settings."""
    from benchmarks.adversaries import HostileSwarm
    from benchmarks.regimes import start_policies
    from benchmarks.simulator import Arm, single_thread
    from swarmnode.config import SharingConfig, TrainingConfig
    from swarmnode.tasks.client import Scorer

    single_thread()
    training = TrainingConfig(learning_rate=size.learning_rate, groups_per_step=B, num_generations=G)
    product = Arm("swarmnode", None, SharingConfig(), keep_pool=True, guard=True)
    policies = start_policies(HOSTILE_REGIME, seed, NODES, base)
    results = []
    with Scorer() as scorer:
        for attack in attacks:
            started = time.process_time()
            kind, _, unchecked = attack.partition(", ")  # unchecked: nobody asks whether a policy can have sampled a text
            sharing = SharingConfig(surprise_tolerance=1e9) if unchecked else SharingConfig()
            arm = replace(product, sharing=sharing)
            hostile = {} if kind == "none" else dict.fromkeys(HOSTILE_NODES, kind)
            swarm = HostileSwarm(arm, [p.clone() for p in policies], training, scorer, seed, hostile, size.eval_questions)
            if kind == "none":  # all eight honest; measured on the six that are honest in every arm
                swarm.report = [n for n in swarm.nodes if n.index not in HOSTILE_NODES]
            trace = swarm.run(lambda t: len(t.tokens) >= size.hostile_rounds, size.eval_every)
            last = trace.held_out[-1]
            results.append({
                "attack": attack, "seed": seed, "mean_held_out": fmean(p.reward for p in trace.held_out), "final": last.reward,
                "payload": last.payload, "length": last.length, "local_reward": sum(trace.reward_own), **swarm.result(),
                "trace": rounded(trace.as_dict()),
            })  # fmt: skip
            note(f"hostile seed {seed} {attack}: {time.process_time() - started:.0f} CPU s, {len(swarm.crashes)} crashes")
    return results


def summary(trace: Any, size: Size) -> dict[str, Any]:
    """The numbers of the tables, of one run."""
    from benchmarks.simulator import at, count_until, mean_until

    first = slice(0, size.rounds)
    samples, tokens = size.samples, size.tokens
    each = [1.0] * len(trace.tokens)
    rewards = [r * g for r, g in zip(trace.reward_own, trace.generated_groups, strict=True)]
    groups_at_tokens = count_until(trace.tokens, tokens, trace.generated_groups)
    return {
        "arm": trace.arm,
        "start_useful": fmean(trace.useful_own[:5]),
        "samples": {
            "held_out": at(trace.held_out, "samples", samples),
            "mean_held_out": mean_until(trace.held_out, "samples", samples),
            "steps": count_until(trace.samples, samples, each),
            "generated": count_until(trace.samples, samples, trace.generated_groups),
            "useful_share": count_until(trace.samples, samples, trace.useful_samples) / samples,
        },
        "tokens": {
            "held_out": at(trace.held_out, "tokens", tokens),
            "mean_held_out": mean_until(trace.held_out, "tokens", tokens),
            "local_reward": count_until(trace.tokens, tokens, rewards) / max(groups_at_tokens, 1.0),
            "steps": count_until(trace.tokens, tokens, each),
            "generated": groups_at_tokens,
        },
        "steps": {
            "local_reward": sum(trace.reward_own[first]),
            "held_out": at(trace.held_out, "round", size.rounds),
            "mean_held_out": mean_until(trace.held_out, "round", size.rounds),
            "generated": sum(trace.generated_groups[first]),
            "useful": fmean(trace.useful_samples[first]),
            "samples": fmean(trace.samples[first]),
        },
    }


def rounded(value: Any) -> Any:
    """Four digits are enough in a file."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


def note(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def regime_tables(regime: str, results: Sequence[dict[str, Any]], size: Size) -> str:
    """Three tables of one regime: mean ± s.d. over seeds. – where an arm never reached the budget."""
    by_arm = {name: [r for r in results if r["arm"] == name] for name in ARMS + AVERAGING}
    by_arm = {name: rows for name, rows in by_arm.items() if rows}
    seeds = len(next(iter(by_arm.values())))

    def of(name: str, part: str, key: str, digits: int = 3) -> str:
        values = [r[part][key] for r in by_arm[name]]
        return "–" if any(v is None for v in values) else spread(values, digits)

    start = spread([r["start_useful"] for r in by_arm.get("8/0", next(iter(by_arm.values())))], 3)
    lines = [f"### {regime} ({seeds} seeds; useful share of a node's own groups at the start {start})", ""]
    lines += [f"Equal optimizer samples: {size.samples:.0f} groups in batches per node.", ""]
    lines.append(table(
        ["arm", "held-out", "mean held-out on the way", "steps", "groups generated", "useful share of batch"],
        [[n, of(n, "samples", "held_out"), of(n, "samples", "mean_held_out"), of(n, "samples", "steps", 0),
          of(n, "samples", "generated", 0), of(n, "samples", "useful_share", 2)] for n in by_arm],
    ))  # fmt: skip
    lines += ["", f"Equal generated tokens: {size.tokens:.0f} per node.", ""]
    lines.append(table(
        ["arm", "held-out", "mean held-out on the way", "local reward per rollout", "steps", "groups generated"],
        [[n, of(n, "tokens", "held_out"), of(n, "tokens", "mean_held_out"), of(n, "tokens", "local_reward"),
          of(n, "tokens", "steps", 0), of(n, "tokens", "generated", 0)] for n in by_arm],
    ))  # fmt: skip
    lines += ["", f"Equal optimizer steps: {size.rounds}, as the paper counts.", ""]
    lines.append(table(
        ["arm", "local reward, sum over steps", "against 8/0 by seed, %", "held-out", "mean held-out", "groups generated",
         "useful per step", "samples per step"],
        [[n, of(n, "steps", "local_reward", 2), against(by_arm, n), of(n, "steps", "held_out"), of(n, "steps", "mean_held_out"),
          of(n, "steps", "generated", 0), of(n, "steps", "useful", 2), of(n, "steps", "samples", 1)] for n in by_arm],
    ))  # fmt: skip
    lines += ["", *adaptive_verdict(by_arm)]
    return "\n".join(lines)


def against(by_arm: dict[str, list[dict[str, Any]]], name: str) -> str:
    """Change of the local reward against 8/0, seed by seed."""
    if name == "8/0" or "8/0" not in by_arm:
        return "–"
    base = {r["seed"]: r["steps"]["local_reward"] for r in by_arm["8/0"]}
    return " ".join(f"{100 * (r['steps']['local_reward'] / base[r['seed']] - 1):+.0f}" for r in by_arm[name] if base.get(r["seed"]))


def adaptive_verdict(by_arm: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The adaptive split against the best fixed one of each seed, by each accounting."""
    fixed = [n for n in FIXED if n in by_arm]
    lines = []
    for name in ("adaptive", "swarmnode"):
        if name not in by_arm or not fixed:
            continue
        parts = []
        for part, label in (("steps", "steps"), ("samples", "samples"), ("tokens", "tokens")):
            ratios = []
            for row in by_arm[name]:
                rivals = [r[part]["mean_held_out"] for n in fixed for r in by_arm[n] if r["seed"] == row["seed"]]
                best = max((v for v in rivals if v is not None), default=None)
                if best and row[part]["mean_held_out"] is not None:
                    ratios.append(row[part]["mean_held_out"] / best)
            if ratios:
                parts.append(f"{label} {spread(ratios, 2)} (≥ 1 in {sum(r >= 1 for r in ratios)} of {len(ratios)})")
        lines.append(f"{name} ÷ best fixed split of the same seed, mean held-out reward at equal: {'; '.join(parts)}.")
    return lines


def hostile_table(results: Sequence[dict[str, Any]], size: Size) -> str:
    """Attack success, honest reward lost, crashes."""
    names = [a for a in ATTACKS if any(r["attack"] == a for r in results)]
    of = lambda name: [r for r in results if r["attack"] == name]
    base = {r["seed"]: r["mean_held_out"] for r in of("silent")}
    rows = []
    for name in names:
        runs = of(name)
        lost = [100 * (1 - r["mean_held_out"] / base[r["seed"]]) for r in runs if base.get(r["seed"])]
        admitted = [r["fates"].get("admitted", 0) - r["genuine"] for r in runs]
        rows.append([
            name, spread([r["mean_held_out"] for r in runs], 3), spread([r["final"] for r in runs], 3),
            "–" if name == "silent" or not lost else spread(lost, 1), spread([r["frames_sent"] for r in runs], 0),
            "–" if name in ("none", "silent") else spread([max(0, a) for a in admitted], 0),
            spread([r["trained_on"] for r in runs], 0), spread([100 * r["payload"] for r in runs], 2),
            spread([r["length"] for r in runs], 2),
            "–" if runs[0]["shut_out"] is None else spread([100 * r["shut_out"] for r in runs], 0),
            str(sum(r["crashes"] + r["internal_errors"] for r in runs)),
        ])  # fmt: skip
    headers = [
        "attack", "mean held-out", "final held-out", "lost against silent, %", "frames sent", "admitted (6 receivers)", "trained on",
        "payload in answers, %", "answer length", "shut out, %", "crashes",
    ]  # fmt: skip
    title = f"### 2 of 8 peers hostile ({HOSTILE_REGIME} start, {size.hostile_rounds} steps, {len(of(names[0]))} seeds)"
    return f"{title}\n\n{table(headers, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sapo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one regime, one seed, three arms, one attack; under a minute")
    parser.add_argument("--json", type=Path, help="write all results there, traces included")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=40, help="optimizer steps")
    parser.add_argument("--hostile-rounds", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="the default of training.learning_rate")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS + AVERAGING, metavar="ARM", help=", ".join(ARMS + AVERAGING))
    parser.add_argument("--regimes", nargs="*", default=list(REGIMES), choices=REGIMES, metavar="REGIME", help=", ".join(REGIMES))
    parser.add_argument("--attacks", nargs="*", default=list(ATTACKS), choices=ATTACKS, metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--base", default="embedded", help="policy that the start policies are made from")
    args = parser.parse_args()
    size = Size(args.rounds, args.hostile_rounds, args.learning_rate)
    if args.quick:
        size = Size(14, 8, 3e-4, eval_every=4, eval_questions=6)
        args.seeds, args.arms, args.regimes, args.attacks = 1, ["8/0", "4/4", "adaptive"], ["sparse"], ["silent", "mixed"]

    print(heading("sapo: does sharing rollouts help?"))
    settings = f"N = {NODES}, B = {B}, G = {G}, learning rate {size.learning_rate:g}, {args.seeds} seeds, AdamW, clip 0.2/0.28, no KL"
    print(settings + "\n", flush=True)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    results: dict[str, list[dict[str, Any]]] = {"arms": [], "attacks": []}
    waiting = {regime: args.seeds for regime in args.regimes}
    # spawn: a forked torch may deadlock, and each process has its own scorer child
    with ProcessPoolExecutor(args.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(run_regime, regime, s, args.arms, size, args.base): regime for regime in args.regimes for s in seeds}
        jobs |= {pool.submit(run_hostile, s, args.attacks, size, args.base): "" for s in seeds if args.attacks}
        for job in as_completed(jobs):
            regime = jobs[job]
            results["arms" if regime else "attacks"] += job.result()
            if regime:
                waiting[regime] -= 1
                if not waiting[regime]:
                    print(regime_tables(regime, [r for r in results["arms"] if r["regime"] == regime], size) + "\n", flush=True)
            if args.json:
                write_json(args.json, {"settings": settings, "samples": size.samples, "tokens": size.tokens, **results})
    if results["attacks"]:
        print(hostile_table(results["attacks"], size), flush=True)


if __name__ == "__main__":
    main()
