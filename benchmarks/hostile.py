"""What a hostile share of a swarm does to the others: `python -m benchmarks.hostile [--quick]
[--shares 10 25 40] [--attacks ...] …`

    learning   honest nodes with tiny policies, the real admission, pool, reputation and judgement
    (benchmarks/adversaries.py), against
               the same honest nodes among hostile ones that are silent. Success is what the
               adversary wanted: its payload in held-out answers, answers that are longer, text of
               its own that was trained on.
    network    the network half of real nodes over simulated wires (CONTRIBUTING.md), each run in
    a process of its own: what it raised
               or broke, its memory, and bytes against the same swarm where the hostile say nothing.

A swarm of the same seed in which other random numbers are drawn learns some per cent more or less,
too: so a silent swarm is run `--controls` times, and the row `silent` shows what nothing at all
costs, each against the others. An attack that changes nothing is the first of these, number by
number, with whatever luck that had: with `--draws` it is run with as many of their random numbers,
and its loss is that of its mean against the mean of the silent ones with the same.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.marks import ATTACKS as MARKED
from benchmarks.marks import MARKS, BlindScorer
from benchmarks.report import heading, spread, table, write_json
from benchmarks.sapo import B, G, note

PARTS = ("learning", "marks", "network")
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
MOST_LOST, MOST_PAYLOAD = 2.0, 1.0
"""Per cent: the goals with a hostile quarter."""
MOST_MARKED, MOST_MARKED_TASK = 1.0, 5.0
"""Per cent of honest answers with a mark, mean of its tasks and worst task: the goals."""
AVERAGE_ROUNDS = 5
"""Rounds between two outer steps where the attack is on averaging."""
DEFENCES = ("product", "quota alone", "no quota", "undefended")
"""How the honest nodes of the part `marks` learn. quota alone: tokens are learnt that the
reward of an answer does not need; no quota: nor are strangers' tokens bounded by what own
rewarded answers have; undefended: nor by their probability, completions that earned little are
learnt from as well, and shares are counted by key."""


@dataclass(frozen=True)
class Size:
    """How much is run. honest: nodes, whatever the share of hostile ones."""

    honest: int = 9
    rounds: int = 20
    eval_every: int = 5
    eval_questions: int = 8
    learning_rate: float = 3e-4
    controls: int = 3
    regime: str = REGIME


def hostile_count(honest: int, share: int) -> int:
    """Hostile nodes that are `share` per cent of all, at least one."""
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
    """One swarm under the product's settings. policies: as many as honest and hostile nodes.
    control: of a silent one, which. defence: of DEFENCES."""
    from benchmarks.adversaries import HostileSwarm
    from benchmarks.simulator import Arm, Sharing
    from swarmnode.config import TrainingConfig
    from swarmnode.trainer.judge import ExternalChecks

    started = time.process_time()
    training = TrainingConfig(
        learning_rate=size.learning_rate, groups_per_step=B, num_generations=G
    )
    checks = ExternalChecks(least_probability=0) if defence == "undefended" else ExternalChecks()
    sharing = Sharing(
        checks,
        quota=defence in ("product", "quota alone"),
        needed_only=defence == "product",
        by_connection=defence != "undefended",
    )
    average = AVERAGE_ROUNDS if attack.endswith(", adapter") else 0
    arm = Arm("swarmnode", None, sharing, keep_pool=True, average=average, replay=True)
    hostile = dict.fromkeys(range(size.honest, len(policies)), attack)
    if mark := MARKS.get(attack.partition(", ")[0]):
        scorer = BlindScorer(scorer, mark)
    swarm = HostileSwarm(
        arm, [p.clone() for p in policies], training, scorer, seed, hostile, size.eval_questions
    )
    if control:
        for node in swarm.nodes:
            node.generator = node.policy.random_generator(
                seed * 1009 + node.index + 10**6 * control
            )
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
def start(seed: int, count: int, base: str, regime: str = REGIME) -> list[Any]:
    """Policies of this many nodes."""
    from benchmarks.regimes import start_policies
    from benchmarks.simulator import single_thread

    single_thread()
    return start_policies(regime, seed, count, base)


def learning_case(
    attack: str,
    share: int,
    control: int,
    seed: int,
    size: Size,
    base: str,
    defence: str = "product",
) -> dict[str, Any]:
    """One swarm, with a scorer of its own."""
    from swarmnode.tasks.client import Scorer

    count = size.honest + hostile_count(size.honest, max(SHARES))
    policies = start(seed, count, base, size.regime)
    with Scorer() as scorer:
        return play(
            attack,
            share,
            policies[: size.honest + hostile_count(size.honest, share)],
            scorer,
            seed,
            size,
            control,
            defence,
        )


def lost(runs: Sequence[dict[str, Any]], controls: Sequence[dict[str, Any]]) -> float:
    """Per cent of what the silent swarms of the same seed and random numbers had; a silent one is
    compared with the seed's others."""
    seed, draws = runs[0]["seed"], {r["control"] for r in runs}
    silent = runs[0]["attack"] == SILENT
    usual = [
        c["held_out"] for c in controls if c["seed"] == seed and (c["control"] in draws) != silent
    ]
    return (
        100 * (1 - fmean(r["held_out"] for r in runs) / fmean(usual))
        if usual and fmean(usual)
        else 0.0
    )


def of_each_seed(runs: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What is one loss: an attack's runs with other random numbers, a silent swarm by itself."""
    cases = dict.fromkeys((r["seed"], r["control"] if r["attack"] == SILENT else 0) for r in runs)
    return [
        [
            r
            for r in runs
            if r["seed"] == seed and (r["attack"] != SILENT or r["control"] == control)
        ]
        for seed, control in cases
    ]


def learning_table(results: Sequence[dict[str, Any]]) -> str:
    controls = [r for r in results if r["attack"] == SILENT]
    rows = []
    cases = dict.fromkeys((r["attack"], r["share"]) for r in results)
    for attack, share in cases:
        runs = [r for r in results if (r["attack"], r["share"]) == (attack, share)]
        losses = [lost(same, controls) for same in of_each_seed(runs)]
        rows.append(
            [
                attack,
                "–" if attack == SILENT else share,
                spread(losses, 1),
                " ".join(f"{loss:.1f}" for loss in losses),
                spread([r["payload"] for r in runs], 2),
                spread([r["length"] for r in runs]),
                spread([r["sampled"] for r in runs], 0),
                spread([r["trained_on"] / r["honest"] for r in runs], 1),
                spread([100 * r["share_of_external"] for r in runs], 1),
                spread([r["honest_trained_on"] / r["honest"] for r in runs], 1),
                spread([r["wasted_bytes"] / 1e3 for r in runs], 0),
                spread([r["useful_bytes"] / 1e3 for r in runs], 0),
                sum(r["crashes"] + r["internal_errors"] for r in runs),
            ]
        )
    headers = [
        "attack",
        "hostile, %",
        "held-out lost, %",
        "by seed",
        "payload in answers, %",
        "answer length",
        "groups a node sampled",
        "hostile groups a node trained on",
        "of others' groups, %",
        "honest groups of others",
        "hostile KB a node got",
        "honest KB",
        "crashes",
    ]
    return table(headers, rows)


def missed(runs: Sequence[dict[str, Any]], controls: Sequence[dict[str, Any]]) -> list[str]:
    """What an attack did with one seed that a hostile quarter must not do."""
    length, found = fmean(r["length"] for r in runs), []
    usual = fmean(c["length"] for c in controls) if controls else length
    if crashes := sum(r["crashes"] + r["internal_errors"] for r in runs):
        found.append(f"{crashes} crashes")
    if (payload := max(r["payload"] for r in runs)) > MOST_PAYLOAD:
        found.append(f"payload in {payload:.1f} % of the answers")
    if length > 1.5 * usual:
        found.append(f"answers of {length:.1f} tokens instead of {usual:.1f}")
    if (loss := lost(runs, controls)) > MOST_LOST:
        found.append(f"{loss:.1f} % of the held-out reward lost")
    if runs[0]["attack"] in NEVER_TRAINED_ON and (trained_on := sum(r["trained_on"] for r in runs)):
        found.append(f"{trained_on} of its groups trained on")
    return found


# ---- marks


def marked(run: dict[str, Any], kind: str, when: int = -1) -> tuple[float, float]:
    """Return the share of honest answers that carry a mark, per cent: mean of the mark's tasks, and
    the worst task.

    when: which evaluation; the last."""
    shares = [100 * share for share in run["marked"][when][1][kind].values()]
    return (fmean(shares), max(shares)) if shares else (0.0, 0.0)


def marks_table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of honest nodes' answers before and after each attack."""
    silent = [r for r in results if r["attack"] == SILENT and r["defence"] == DEFENCES[0]]
    rows = []
    cases = dict.fromkeys((r["attack"], r["defence"]) for r in results)
    for attack, defence in cases:
        runs = [r for r in results if (r["attack"], r["defence"]) == (attack, defence)]
        kind = attack.partition(", ")[0]
        shares = lambda when, runs=runs, kind=kind: (
            [marked(r, kind, when) for r in runs] if kind in MARKS else []
        )
        rows.append(
            [
                attack,
                defence,
                len(runs),
                spread([mean for mean, _ in shares(0)], 1),
                spread([mean for mean, _ in shares(-1)], 1),
                spread([worst for _, worst in shares(-1)], 1),
                spread([100 * r["share_of_external"] for r in runs], 0),
                spread([r["trained_on"] / r["honest"] for r in runs], 0),
                spread([r["held_out"] for r in runs], 3),
                spread([held_out_lost(r, silent) for r in runs], 1) if silent else "–",
                sum(r["crashes"] + r["internal_errors"] for r in runs),
            ]
        )
    headers = [
        "attack",
        "defence",
        "seeds",
        "marked at the start, %",
        "at the end, mean of tasks, %",
        "worst task, %",
        "hostile, of others' groups trained on, %",
        "hostile groups a node trained on",
        "held-out, mean on the way",
        "lost against silent, %",
        "crashes",
    ]
    return table(headers, rows)


def held_out_lost(run: dict[str, Any], silent: Sequence[dict[str, Any]]) -> float:
    """Return what a run lost against the silent swarm of the same seed and random numbers, per
    cent."""
    (usual,) = [r["held_out"] for r in silent if r["seed"] == run["seed"]]
    return 100 * (1 - run["held_out"] / usual) if usual else 0.0


# ---- network


def network_case(attack: str, share: int, seed: int, honest: int) -> dict[str, Any]:
    """One simulated swarm without faults but the hostile nodes, in a process of its own. Memory is
    this process's."""
    from tests.support.sim.hostile import PATIENCE
    from tests.support.sim.schedule import draw
    from tests.support.sim.world import simulate

    kinds = (*KINDS, "taker", "clock") if attack == TOGETHER else (attack,)
    count = hostile_count(honest, share)
    # with enough seeds each kind takes part
    some = list(itertools.islice(itertools.cycle(kinds), seed * count, (seed + 1) * count))
    lasts = PATIENCE + AFTER_PATIENCE_SECONDS if attack == "patient" else SIMULATED_SECONDS
    schedule = replace(draw(seed, honest, some), faults=[], calm_from=lasts)
    ended = simulate(schedule)
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


def network_table(results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for attack, share in dict.fromkeys((r["attack"], r["share"]) for r in results):
        runs = [r for r in results if (r["attack"], r["share"]) == (attack, share)]
        of = lambda key, digits, runs=runs: spread([r[key] for r in runs], digits)
        problems = [r for r in runs if r["problem"]]
        rows.append(
            [
                attack,
                share,
                len(runs),
                len(problems),
                of("used", 2),
                of("made_up", 1),
                of("received", 0),
                of("wasted", 0),
                of("cpu", 1),
                of("memory", 0),
            ]
        )
    headers = [
        "attack",
        "hostile, %",
        "seeds",
        "with a violation or an error",
        "others' groups trained on per step",
        "of these made up, %",
        "bytes/s a node got",
        "of these from hostile nodes",
        "CPU ms per node and simulated second",
        "MB, whole process",
    ]
    told = [
        f"* {r['attack']} {r['share']} %, seed {r['seed']}: {r['problem']}"
        for r in results
        if r["problem"]
    ]
    return "\n".join([table(headers, rows), *told])


# ---- the command


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed, a hostile quarter, two attacks, few steps"
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument(
        "--shares",
        nargs="+",
        type=int,
        default=list(SHARES),
        choices=SHARES,
        help="hostile nodes, in per cent of all",
    )
    known = sorted({*LEARNING, *NETWORK, *MARKED})
    attacks = (
        f"learning: {', '.join(LEARNING)}\nmarks: {'; '.join(MARKED)}\n"
        f"network: {', '.join(NETWORK)}"
    )
    parser.add_argument(
        "--attacks", nargs="+", default=known, choices=known, metavar="ATTACK", help=attacks
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--honest", type=int, default=Size.honest)
    parser.add_argument("--rounds", type=int, default=Size.rounds, help="optimizer steps")
    parser.add_argument(
        "--controls", type=int, default=Size.controls, help="silent swarms of each seed"
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=1,
        help="runs of an attack with each seed, each with a silent swarm's random numbers",
    )
    parser.add_argument(
        "--regime", default=REGIME, help="start of the policies (benchmarks.regimes)"
    )
    parser.add_argument("--eval-every", type=int, default=Size.eval_every)
    parser.add_argument(
        "--eval-questions",
        type=int,
        default=Size.eval_questions,
        help="held-out questions of each node and task",
    )
    parser.add_argument(
        "--defences", nargs="+", default=list(DEFENCES[:1]), choices=DEFENCES, help="of `marks`"
    )
    parser.add_argument(
        "--base", default="embedded", help="policy that the start policies are made from"
    )
    parser.add_argument("--json", type=Path, help="write all results there, each as it comes")
    args = parser.parse_args()
    size = Size(
        args.honest,
        args.rounds,
        args.eval_every,
        args.eval_questions,
        controls=args.controls,
        regime=args.regime,
    )
    if args.quick:
        size = Size(3, 4, 2, 2, controls=1)
        args.seeds, args.shares, args.attacks = 1, [25], ["informed", "garbage"]
    print(heading("hostile: what a hostile share of a swarm does to the others"), flush=True)
    results: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    cases: dict[str, list[Any]] = {
        "learning": [
            *((SILENT, min(SHARES), control) for control in range(size.controls)),
            *(
                (a, s, draw)
                for s in args.shares
                for a in LEARNING
                if a in args.attacks
                for draw in range(min(args.draws, size.controls))
            ),
        ],
        "marks": [
            (a, GOAL_SHARE, 0, defence)
            for a in (SILENT, *MARKED)
            if a in (SILENT, *args.attacks)
            for defence in dict.fromkeys(
                [*DEFENCES[:1], *args.defences] if a == SILENT else args.defences
            )
        ],
        "network": [
            (a, s) for s in args.shares for a in (SILENT, *NETWORK) if a in (SILENT, *args.attacks)
        ],
    }
    context = multiprocessing.get_context("spawn")  # a forked torch may deadlock
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.support.sim.world"])
    with (
        ProcessPoolExecutor(1, context) as one,
        ProcessPoolExecutor(1, server, max_tasks_per_child=1) as fresh,
    ):
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for part in args.parts:
                for case in cases[part]:
                    job = (
                        fresh.submit(network_case, *case, seed, size.honest)
                        if part == "network"
                        else one.submit(learning_case, *case[:3], seed, size, args.base, *case[3:])
                    )
                    results[part].append(job.result())
                    if args.json:
                        write_json(args.json, {"size": asdict(size), **results})
    show(results, size)


def show(results: dict[str, list[dict[str, Any]]], size: Size) -> None:
    """The tables of both parts, and which runs miss the goals."""
    order = [SILENT, *LEARNING, *MARKED, *NETWORK]
    for rows in results.values():
        rows.sort(key=lambda r: (r["share"], order.index(r["attack"]), r["seed"]))
    if learning := results["learning"]:
        controls = [r for r in learning if r["attack"] == SILENT]
        print(
            f"### What they teach ({size.honest} honest nodes, {REGIME} start, {size.rounds}"
            f" steps)\n\n{learning_table(learning)}\n"
        )
        judged = [r for r in learning if r["share"] == GOAL_SHARE and r["attack"] != SILENT]
        for attack in dict.fromkeys(r["attack"] for r in judged):
            for runs in of_each_seed([r for r in judged if r["attack"] == attack]):
                if found := missed(runs, controls):
                    print(
                        f"* {attack}, seed {runs[0]['seed']}, misses the goal: {'; '.join(found)}"
                    )
    if marks := results["marks"]:
        print(
            f"### What they write beside an answer ({size.honest} honest nodes, {size.regime}"
            f" start, {size.rounds} steps)\n\n{marks_table(marks)}\n"
        )
        for run in marks:
            if run["attack"] == SILENT or run["defence"] != DEFENCES[0]:
                continue
            mean, worst = marked(run, run["attack"].partition(", ")[0])
            if mean > MOST_MARKED or worst > MOST_MARKED_TASK:
                print(
                    f"* {run['attack']}, seed {run['seed']}, misses the goal: {mean:.1f} % of the"
                    f" answers, {worst:.1f} % in one task"
                )
    if network := results["network"]:
        print(
            f"\n### What they do to the network ({size.honest} honest"
            f" nodes)\n\n{network_table(network)}\n"
        )


if __name__ == "__main__":
    main()
