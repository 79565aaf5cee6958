"""Measure the effect of hostile nodes on the others.

    learning   honest nodes with tiny policies and the product's admission, pool, reputation and
               judgement (benchmarks/lib/adversaries.py), against the same nodes among silent
               hostile ones. An attack succeeds if its payload is in held-out answers, if answers
               grow longer, or if its groups are trained on.
    marks      attacks with right answers that carry a mark (benchmarks/lib/marks.py). `--defences`
               turns defences off.
    network    the network half of real nodes over simulated wires (CONTRIBUTING.md). Each run has a
               process of its own, and reports violations, errors, memory, and bytes against the
               same swarm with silent hostile nodes.

`--real` runs nodes with SmolLM2 instead (benchmarks/lib/real_hostile.py): one with one peer, or
with `--nodes 8` six with two peers. The peers send marks or are honest; `alone` has none. Each
cell appends a row to the file of `--rows`.

Two swarms of one seed with different random numbers differ by some per cent. To measure this noise,
`--controls` silent swarms of each seed run with different random numbers. The row `silent` compares
each of them with the rest. With `--draws N`, each attack runs with N of these random numbers. Its
loss compares its mean with the mean of the silent swarms of the same random numbers.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.lib import real_hostile
from benchmarks.lib.marks import ATTACKS as MARKED
from benchmarks.lib.marks import MARKS, BlindScorer
from benchmarks.lib.report import columns, heading, make_parser, note, seeds_of, spread, write_json
from benchmarks.sapo import B, G

PARTS = ("learning", "marks", "network")
ROWS = Path(__file__).parent / "results" / "hostile_real.jsonl"
SHARES = (10, 25, 40)
GOAL_SHARE = 25
SILENT = "silent"
NEVER_TRAINED_ON = (
    "garbage",
    "forged",
    "ids",
    "trajectory",
    "stripped",
    "foreign",
    "poison",
    "informed",
    "hot",
)
TOGETHER = "together"
LEARNING = (
    *NEVER_TRAINED_ON,
    "replay",
    "length",
    "diluted",
    "lengthy",
    "patient",
    "colluding",
    TOGETHER,
)
KINDS = (
    "garbage",
    "cherry",
    "stolen",
    "lister",
    "dripper",
    "peers",
    "vanisher",
    "forger",
    "poet",
    "storm",
)
NETWORK = (*KINDS, "taker", "clock", "patient", TOGETHER)
REGIME = "moderate"
SIMULATED_SECONDS = 300.0
AFTER_PATIENCE_SECONDS = 600.0
MAX_LOSS, MAX_PAYLOAD = 2.0, 1.0
"""Goals with a hostile quarter, in per cent."""
MAX_MARKED, MAX_MARKED_TASK = 1.0, 5.0
"""Goals for honest answers with a mark, in per cent: mean of the mark's tasks, and worst task."""
AVERAGE_ROUNDS = 5
"""Rounds between two outer steps if the attack is on averaging."""
DEFENCES = ("product", "quota alone", "no quota", "undefended")
"""Defences of the honest nodes in the part `marks`. Each turns off more than the one before:

    quota alone    tokens are learned that the reward of an answer does not need
    no quota       peers' tokens are not limited by own rewarded answers
    undefended     nor by their probability, completions of low reward are learned too, and shares
                   are counted by key
"""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Size:
    """Size of the experiment. honest: number of honest nodes, for every share of hostile nodes."""

    honest: int = 9
    rounds: int = 20
    eval_every: int = 5
    eval_questions: int = 8
    learning_rate: float = 3e-4
    controls: int = 3
    regime: str = REGIME


def hostile_count(honest: int, share: int) -> int:
    """Return the number of hostile nodes that is `share` per cent of all, at least one."""
    return max(1, round(share * honest / (100 - share)))


# ---- learning


def play(
    attack: str,
    share: int,
    policies: Sequence[Any],
    scorer: Any,
    seed: int,
    size: Size,
    control: int = 0,
    defence: str = "product",
) -> dict[str, Any]:
    """Run one swarm under the product's settings and return its figures.

    Args:
        policies: One for each honest and hostile node.
        control: Number of the random stream.
        defence: One of DEFENCES.
    """
    from benchmarks.lib.adversaries import HostileSwarm
    from benchmarks.lib.simulator import PRODUCT, Sharing
    from swarmnode.config import TrainingConfig
    from swarmnode.rollouts.trainer.judge import ExternalChecks

    started = time.process_time()
    training = TrainingConfig(
        learning_rate=size.learning_rate, groups_per_step=B, num_generations=G
    )
    sharing = Sharing(
        ExternalChecks(least_probability=0) if defence == "undefended" else ExternalChecks(),
        quota=defence in ("product", "quota alone"),
        needed_only=defence == "product",
        by_connection=defence != "undefended",
    )
    average = AVERAGE_ROUNDS if attack.endswith(", adapter") else 0
    arm = replace(PRODUCT, sharing=sharing, average=average)
    hostile = dict.fromkeys(range(size.honest, len(policies)), attack)
    if mark := MARKS.get(attack.partition(", ")[0]):
        scorer = BlindScorer(scorer, mark)
    swarm = HostileSwarm(
        arm, [p.clone() for p in policies], training, scorer, seed, hostile, size.eval_questions
    )
    if control:
        for node in swarm.nodes:
            number = seed * 1009 + node.index + 10**6 * control
            node.generator = node.policy.random_generator(number)
    trace = swarm.run(lambda t: len(t.tokens) >= size.rounds, size.eval_every)
    last = trace.held_out[-1]
    note(f"seed {seed}, {attack} {share} %: {time.process_time() - started:.0f} CPU s")
    return {
        "attack": attack,
        "share": share,
        "seed": seed,
        "control": control,
        "defence": defence,
        "marked": [(p.round, p.marked) for p in trace.held_out],
        "held_out": fmean(p.reward for p in trace.held_out),
        "final": last.reward,
        "payload": 100 * last.payload,
        "length": last.length,
        "sampled": sum(trace.generated_groups),
        **swarm.result(),
    }


@functools.lru_cache(maxsize=1)
def start(seed: int, count: int, regime: str) -> list[Any]:
    """Return the policies of `count` nodes."""
    from benchmarks.lib.regimes import start_policies
    from benchmarks.lib.simulator import single_thread

    single_thread()
    return start_policies(regime, seed, count)


def learning_case(
    attack: str, share: int, control: int, defence: str, seed: int, size: Size
) -> dict[str, Any]:
    """Run one swarm with a scorer of its own."""
    from swarmnode.tasks.client import Scorer

    policies = start(seed, size.honest + hostile_count(size.honest, max(SHARES)), size.regime)
    some = policies[: size.honest + hostile_count(size.honest, share)]
    with Scorer() as scorer:
        return play(attack, share, some, scorer, seed, size, control, defence)


def lost(runs: Rows, controls: Rows) -> float:
    """Return the loss of held-out reward in per cent, against the silent swarms of the same seed
    and random numbers. A silent swarm is compared with the seed's other silent swarms."""
    seed, draws = runs[0]["seed"], {r["control"] for r in runs}
    silent = runs[0]["attack"] == SILENT
    usual = [
        c["held_out"] for c in controls if c["seed"] == seed and (c["control"] in draws) != silent
    ]
    if not usual or not fmean(usual):
        return 0.0
    return 100 * (1 - fmean(r["held_out"] for r in runs) / fmean(usual))


def of_each_seed(runs: Rows) -> list[Rows]:
    """Return the runs behind each loss: an attack's runs of one seed, or one silent swarm."""
    cases: dict[tuple[int, int], Rows] = {}
    for r in runs:
        case = (r["seed"], r["control"] if r["attack"] == SILENT else 0)
        cases.setdefault(case, []).append(r)
    return list(cases.values())


def grouped(results: Rows, *keys: str) -> list[Rows]:
    """Return the results that agree in `keys`, in the order of their first."""
    groups: dict[tuple[Any, ...], Rows] = {}
    for r in results:
        groups.setdefault(tuple(r[key] for key in keys), []).append(r)
    return list(groups.values())


def crashes(runs: Rows) -> int:
    return sum(r["crashes"] + r["internal_errors"] for r in runs)


def learning_table(results: Rows) -> str:
    controls = [r for r in results if r["attack"] == SILENT]
    losses = lambda runs: [lost(same, controls) for same in of_each_seed(runs)]
    mean = lambda value, digits: lambda runs: spread([value(r) for r in runs], digits)
    return columns(
        grouped(results, "attack", "share"),
        {
            "attack": lambda runs: runs[0]["attack"],
            "hostile, %": lambda runs: "–" if runs[0]["attack"] == SILENT else runs[0]["share"],
            "held-out lost, %": lambda runs: spread(losses(runs), 1),
            "by seed": lambda runs: " ".join(f"{loss:.1f}" for loss in losses(runs)),
            "payload in answers, %": mean(lambda r: r["payload"], 2),
            "answer length": mean(lambda r: r["length"], 2),
            "groups a node sampled": mean(lambda r: r["sampled"], 0),
            "hostile groups trained on": mean(lambda r: r["trained_on"] / r["honest"], 1),
            "of peers' groups, %": mean(lambda r: 100 * r["share_of_external"], 1),
            "honest groups of peers": mean(lambda r: r["honest_trained_on"] / r["honest"], 1),
            "hostile KB received": mean(lambda r: r["wasted_bytes"] / 1e3, 0),
            "honest KB": mean(lambda r: r["useful_bytes"] / 1e3, 0),
            "crashes": crashes,
        },
    )


def missed(runs: Rows, controls: Rows) -> list[str]:
    """Return the goals that an attack of a hostile quarter misses with one seed."""
    length, found = fmean(r["length"] for r in runs), []
    usual = fmean(c["length"] for c in controls) if controls else length
    if count := crashes(runs):
        found.append(f"{count} crashes")
    if (payload := max(r["payload"] for r in runs)) > MAX_PAYLOAD:
        found.append(f"payload in {payload:.1f} % of the answers")
    if length > 1.5 * usual:
        found.append(f"answers of {length:.1f} tokens instead of {usual:.1f}")
    if (loss := lost(runs, controls)) > MAX_LOSS:
        found.append(f"{loss:.1f} % of the held-out reward lost")
    if runs[0]["attack"] in NEVER_TRAINED_ON and (trained_on := sum(r["trained_on"] for r in runs)):
        found.append(f"{trained_on} of its groups trained on")
    return found


# ---- marks


def marked(run: dict[str, Any], when: int = -1) -> tuple[float, float]:
    """Return the share of honest answers with the attack's mark in per cent: mean of the mark's
    tasks, and worst task. when: index of the evaluation."""
    shares = [100 * s for s in run["marked"][when][1][run["attack"].partition(", ")[0]].values()]
    return (fmean(shares), max(shares)) if shares else (0.0, 0.0)


def marks_table(results: Rows) -> str:
    """Return the table of honest nodes' answers before and after each attack."""
    usual = {
        r["seed"]: r["held_out"]
        for r in results
        if (r["attack"], r["defence"]) == (SILENT, DEFENCES[0])
    }
    mean = lambda value, digits: lambda runs: spread([value(r) for r in runs], digits)
    share = lambda when, which: (
        lambda runs: (
            "–"
            if runs[0]["attack"] == SILENT
            else spread([marked(r, when)[which] for r in runs], 1)
        )
    )
    return columns(
        grouped(results, "attack", "defence"),
        {
            "attack": lambda runs: runs[0]["attack"],
            "defence": lambda runs: runs[0]["defence"],
            "seeds": len,
            "marked at the start, %": share(0, 0),
            "at the end, mean of tasks, %": share(-1, 0),
            "worst task, %": share(-1, 1),
            "hostile, of peers' groups trained on, %": mean(
                lambda r: 100 * r["share_of_external"], 0
            ),
            "hostile groups trained on": mean(lambda r: r["trained_on"] / r["honest"], 0),
            "held-out, mean over the run": mean(lambda r: r["held_out"], 3),
            "lost against silent, %": mean(
                lambda r: 100 * (1 - r["held_out"] / max(usual[r["seed"]], 1e-9)), 1
            ),
            "crashes": crashes,
        },
    )


# ---- network


def network_case(attack: str, share: int, seed: int, honest: int) -> dict[str, Any]:
    """Run one simulated swarm without other faults. Memory is that of this process."""
    from tests.support.sim.hostile import PATIENCE
    from tests.support.sim.schedule import draw
    from tests.support.sim.world import simulate

    kinds = (*KINDS, "taker", "clock") if attack == TOGETHER else (attack,)
    count = hostile_count(honest, share)
    # with enough seeds each kind takes part
    some = list(itertools.islice(itertools.cycle(kinds), seed * count, (seed + 1) * count))
    lasts = PATIENCE + AFTER_PATIENCE_SECONDS if attack == "patient" else SIMULATED_SECONDS
    ended = simulate(replace(draw(seed, honest, some), faults=[], calm_from=lasts))
    seconds = ended.simulated * honest
    note(f"network seed {seed}, {attack} {share} %: {ended.cpu:.0f} CPU s {ended.problem}")
    return {
        "attack": attack,
        "share": share,
        "seed": seed,
        "problem": ended.problem,
        "kinds": some,
        "used": ended.used / ended.steps,
        "made_up": 100 * ended.made_up / max(1, ended.used),
        "received": ended.received / seconds,
        "wasted": ended.wasted / seconds,
        "cpu": ended.cpu / seconds * 1e3,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def network_table(results: Rows) -> str:
    mean = lambda key, digits: lambda runs: spread([r[key] for r in runs], digits)
    shown = columns(
        grouped(results, "attack", "share"),
        {
            "attack": lambda runs: runs[0]["attack"],
            "hostile, %": lambda runs: runs[0]["share"],
            "seeds": len,
            "with a violation or an error": lambda runs: sum(bool(r["problem"]) for r in runs),
            "peers' groups trained on per step": mean("used", 2),
            "of these made up, %": mean("made_up", 1),
            "bytes/s received per node": mean("received", 0),
            "of these from hostile nodes": mean("wasted", 0),
            "CPU ms per node and simulated second": mean("cpu", 1),
            "MB, whole process": mean("memory", 0),
        },
    )
    problems = [
        f"* {r['attack']} {r['share']} %, seed {r['seed']}: {r['problem']}"
        for r in results
        if r["problem"]
    ]
    return "\n".join([shown, *problems])


# ---- the command


def cases(args: Any, size: Size) -> dict[str, list[Any]]:
    """Return the runs of one seed, by part."""
    draws = range(min(args.draws, size.controls))
    learning = [(SILENT, min(SHARES), control, DEFENCES[0]) for control in range(size.controls)]
    learning += [
        (attack, share, draw, DEFENCES[0])
        for share in args.shares
        for attack in LEARNING
        if attack in args.attacks
        for draw in draws
    ]
    defences = dict.fromkeys([DEFENCES[0], *args.defences])
    marks = [(SILENT, GOAL_SHARE, 0, defence) for defence in defences]
    marks += [
        (attack, GOAL_SHARE, 0, defence)
        for attack in MARKED
        if attack in args.attacks
        for defence in args.defences
    ]
    network = [
        (attack, share)
        for share in args.shares
        for attack in (SILENT, *NETWORK)
        if attack in (SILENT, *args.attacks)
    ]
    return {"learning": learning, "marks": marks, "network": network}


def main() -> None:
    parser = make_parser(
        "hostile", __doc__, quick="a hostile quarter, two attacks, few steps", seeds=3
    )
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument(
        "--shares", nargs="+", type=int, default=SHARES, choices=SHARES, help="hostile, in per cent"
    )
    attacks = (
        f"learning: {', '.join(LEARNING)}\nmarks: {'; '.join(MARKED)}\n"
        f"network: {', '.join(NETWORK)}"
    )
    known = sorted({*LEARNING, *NETWORK, *MARKED})
    parser.add_argument(
        "--attacks", nargs="+", default=known, choices=known, metavar="ATTACK", help=attacks
    )
    parser.add_argument("--honest", type=int, default=Size.honest)
    parser.add_argument("--rounds", type=int, default=Size.rounds, help="optimizer steps")
    parser.add_argument("--controls", type=int, default=Size.controls)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument(
        "--regime", default=REGIME, help="start policies (benchmarks/lib/regimes.py)"
    )
    parser.add_argument("--defences", nargs="+", default=DEFENCES[:1], choices=DEFENCES)
    parser.add_argument("--real", action="store_true", help="a real model with one peer")
    parser.add_argument(
        "--peers", nargs="+", default=real_hostile.KINDS, choices=real_hostile.KINDS, metavar="PEER"
    )
    parser.add_argument(
        "--real-defences", nargs="+", default=["product"], choices=real_hostile.DEFENCES
    )
    parser.add_argument("--task", default=real_hostile.SIZE.task, help="of honest peers")
    parser.add_argument("--steps", type=int, default=real_hostile.SIZE.steps, help="with --real")
    parser.add_argument("--nodes", type=int, default=2, help="with --real; a quarter are peers")
    parser.add_argument(
        "--learning-rate", type=float, default=real_hostile.SIZE.learning_rate, help="with --real"
    )
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of finished cells")
    args = parser.parse_args()
    if args.real:
        sized = replace(
            real_hostile.SIZE,
            task=args.task,
            steps=args.steps,
            learning_rate=args.learning_rate,
        )
        print(heading("hostile: a real model"), flush=True)
        rows = real_hostile.run(
            args.rows, args.peers, args.real_defences, seeds_of(args), sized, args.nodes
        )
        print(real_hostile.show(rows))
        return
    size = Size(args.honest, args.rounds, controls=args.controls, regime=args.regime)
    if args.quick:
        size = Size(3, 4, 2, 2, controls=1)
        args.seeds, args.shares, args.attacks = 1, [25], ["informed", "stop, staged", "garbage"]
    print(heading("hostile: effect of hostile nodes on the others"), flush=True)
    results: dict[str, Rows] = {part: [] for part in PARTS}
    spawn = multiprocessing.get_context("spawn")  # a forked torch may deadlock
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.support.sim.world"])
    with (
        ProcessPoolExecutor(1, spawn) as one,
        ProcessPoolExecutor(1, server, max_tasks_per_child=1) as fresh,
    ):
        for seed, part in itertools.product(seeds_of(args), args.parts):
            for case in cases(args, size)[part]:
                job = (
                    fresh.submit(network_case, *case, seed, size.honest)
                    if part == "network"
                    else one.submit(learning_case, *case, seed, size)
                )
                results[part].append(job.result())
                write_json(args.json, {"size": asdict(size), **results})
    show(results, size)


def show(results: dict[str, Rows], size: Size) -> None:
    """Print the table of each part, and the runs that miss a goal."""
    order = [SILENT, *LEARNING, *MARKED, *NETWORK]
    for rows in results.values():
        rows.sort(key=lambda r: (r["share"], order.index(r["attack"]), r["seed"]))
    swarm = f"{size.honest} honest nodes, {size.regime} start, {size.rounds} steps"
    if learning := results["learning"]:
        controls = [r for r in learning if r["attack"] == SILENT]
        print(f"### learning ({swarm})\n\n{learning_table(learning)}\n")
        judged = [r for r in learning if r["share"] == GOAL_SHARE and r["attack"] != SILENT]
        for runs in grouped(judged, "attack", "seed"):
            if found := missed(runs, controls):
                name = f"{runs[0]['attack']}, seed {runs[0]['seed']}"
                print(f"* {name}, misses the goal: {'; '.join(found)}")
    if marks := results["marks"]:
        print(f"### marks ({swarm})\n\n{marks_table(marks)}\n")
        for run in marks:
            if run["attack"] == SILENT or run["defence"] != DEFENCES[0]:
                continue
            mean, worst = marked(run)
            if mean > MAX_MARKED or worst > MAX_MARKED_TASK:
                name = f"{run['attack']}, seed {run['seed']}"
                shares = f"{mean:.1f} % of the answers, {worst:.1f} % in one task"
                print(f"* {name}, misses the goal: {shares}")
    if network := results["network"]:
        print(f"### network ({size.honest} honest nodes)\n\n{network_table(network)}\n")


if __name__ == "__main__":
    main()
