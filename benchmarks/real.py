"""Measure what sharing and averaging gain with a real model.

Nodes train an adapter of SmolLM2-135M-Instruct (LoRA) with the product's training loop. They take
turns in one process, on one frozen base (benchmarks/lib/turns.py). All arms of a seed have the same
start and the same held-out questions, and every node reads its own stream of questions.

Held-out reward is measured with four answers to each held-out question. The questions are divided
among the nodes, so an evaluation costs the same in every arm. Own tokens are those that a node
sampled for training. CPU seconds are those of a node's own steps, without evaluations and without
the scorer's process. A cell ends when the held-out reward, the mean of two successive evaluations,
has reached 0.8.

Peak memory is the largest of the process since its start, so compare arms that ran alone in theirs
(`--arms alone`; TRL always does).

Each cell, one arm with one seed and task, appends a row to the file of `--rows`; finished cells are
not repeated. `--table` prints the file, and `--plot FILE` draws held-out reward by number of nodes.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.lib.real_cell import (
    GOAL,
    PARTS,
    Arm,
    Cell,
    Member,
    Row,
    Size,
    curve,
    node_seed,
    until_goal,
)
from benchmarks.lib.report import (
    append_row,
    columns,
    heading,
    machine,
    make_parser,
    read_rows,
    seeds_of,
    spread,
    value_at,
)
from benchmarks.lib.simulator import single_thread
from swarmnode.demo.nodes import DemoNode
from swarmnode.errors import Unavailable
from swarmnode.policy.load import Policy
from swarmnode.tasks.child import ScorerLimits
from swarmnode.tasks.client import Scorer

ROWS = Path(__file__).parent / "results" / "real.jsonl"
SOCKETS = "2 nodes over sockets"
"""Arm of two whole nodes, each with its own processes, at the settings of the arm `2 nodes`."""
TRL = "TRL"
"""Arm of TRL's GRPOTrainer with the settings of the arm `alone`, in a process of its own."""
NODE_MINUTES = 60
"""Longest run of whole nodes."""
BRIEF = Member(system="Answer with the result only.")
ARMS: dict[str, Arm] = {
    "alone": Arm(),
    "2 nodes": Arm(2),
    "4 nodes": Arm(4),
    "8 nodes": Arm(8),
    "4 nodes, averaging only": Arm(4, shares=False, averages=True),
    "4 nodes, sharing and averaging": Arm(4, averages=True),
    "4 nodes, half own": Arm(4, own_groups=2),
    "adapter beside all weights": Arm(others=(Member(rank=0),)),
    "r = 16 beside r = 4": Arm(others=(Member(rank=4),)),
    TRL: Arm(),
    "another system prompt": Arm(others=(BRIEF,)),
    "another system prompt, HACPO": Arm(others=(BRIEF,), by_capability=True),
}
BY_NODES = ("alone", "2 nodes", "4 nodes", "8 nodes")
"""Arms of the plot."""


def run_sockets(seed: int, size: Size, directory: Path) -> Row:
    """Train with two whole nodes, and return the row of this cell.

    Raises:
        Unavailable: A node did not start, or ended.
    """
    nodes: list[DemoNode] = []
    try:
        for index in range(2):
            name = f"node{index}"
            settings = size.settings(
                Member(), ARMS["2 nodes"], node_seed(seed, index), directory / name
            ) | {
                "swarm": {"name": f"real-{seed}"},
                "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
                "http": {"port": 0},
            }
            nodes.append(
                DemoNode(name, directory / name, {k: flat(v) for k, v in settings.items()})
            )
            deadline = time.monotonic() + 60 * NODE_MINUTES
            nodes[-1].start(nodes[0].wait_for_address(deadline) if index else [])
        # The step after the last one has the evaluation that followed the last one.
        while any(len(recorded_steps(node)) <= size.steps for node in nodes):
            if time.monotonic() > deadline or not all(node.alive() for node in nodes):
                lines = "; ".join(node.last_log_line() for node in nodes)
                raise Unavailable(f"the nodes ended or took {NODE_MINUTES} minutes: {lines}")
            time.sleep(2.0)
    finally:
        for node in nodes:
            node.stop()
        for node in nodes:
            node.wait(60.0)
    steps = [recorded_steps(node)[: size.steps + 1] for node in nodes]
    rewards = lambda key: [record[-1][key] for record in steps]
    held_out = [rewards("reward_held_out_start"), rewards("reward_held_out")]
    return {
        "arm": SOCKETS,
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "held_out": [
            {"questions": size.questions, "reward": fmean(each), "rewards": each}
            for each in held_out
        ],
        "nodes": [
            {
                key: [step[name] for step in record[:-1]]
                for key, name in (
                    ("own", "own_groups"),
                    ("external", "external_groups"),
                    ("reward", "reward_own"),
                )
            }
            | {"tokens": sampled_tokens(record[:-1])}
            for record in steps
        ],
    }


def flat(section: dict[str, Any]) -> dict[str, object]:
    """Return a section with the values of nested tables, keyed as in TOML."""
    found = dict[str, object]()
    for key, value in section.items():
        nested = value if isinstance(value, dict) else None
        found |= {key: value} if nested is None else {f"{key}.{k}": v for k, v in nested.items()}
    return found


def recorded_steps(node: DemoNode) -> list[dict[str, Any]]:
    """Return the measurements of each finished step of a whole node."""
    file = node.directory / "log" / "steps.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def sampled_tokens(steps: Sequence[dict[str, Any]]) -> list[int]:
    """Return the tokens that a whole node sampled for training in each step."""
    totals = [step["tokens_total"] - step["evaluation_tokens_total"] for step in steps]
    return [now - before for before, now in itertools.pairwise([0, *totals])]


# ---- tables and plot -----------------------------------------------------------------------------


def taken(row: Row) -> int:
    """Return the number of steps."""
    return len(row["nodes"][0]["reward"])


def total(row: Row, key: str) -> float:
    """Return the mean over nodes of the sum of a measurement over all steps."""
    return fmean(sum(node[key]) for node in row["nodes"])


def agreement(rows: Sequence[Row]) -> str:
    """Return a table that compares whole and simulated nodes by seed; empty without whole nodes."""
    seeds = {row["seed"] for row in rows if row["arm"] == SOCKETS}
    shown = [row for row in rows if row["arm"] in ("2 nodes", SOCKETS) and row["seed"] in seeds]
    if not shown:
        return ""

    def sampled(row: Row, third: int) -> str:
        part = slice(third * taken(row) // 3, (third + 1) * taken(row) // 3)
        return f"{fmean(fmean(node['reward'][part]) for node in row['nodes']):.2f}"

    return columns(
        sorted(shown, key=lambda row: (row["seed"], row["arm"])),
        {
            "nodes": lambda row: "whole" if row["arm"] == SOCKETS else "simulated",
            "seed": lambda row: row["seed"],
            **{
                f"{name} third": lambda row, third=third: sampled(row, third)
                for third, name in enumerate(("first", "second", "last"))
            },
            "held out at the end": lambda row: f"{row['held_out'][-1]['reward']:.2f}",
            "own tokens": lambda row: f"{total(row, 'tokens'):.0f}",
            "own groups per step": lambda row: f"{total(row, 'own') / taken(row):.2f}",
            "of peers": lambda row: f"{total(row, 'external') / taken(row):.2f}",
        },
    )


def share(row: Row, part: str) -> float:
    """Return the share of one of PARTS in the CPU seconds of a step."""
    return total(row, part) / sum(total(row, each) for each in PARTS)


def show(rows: Sequence[Row]) -> str:
    """Return the tables of the finished cells of one size: one line for each arm, mean ± standard
    deviation over seeds."""
    whole = agreement(rows)
    rows = [row for row in rows if row["arm"] != SOCKETS]
    if not rows:
        return whole
    arms = [name for name in ARMS if any(row["arm"] == name for row in rows)]
    of = lambda arm: [row for row in rows if row["arm"] == arm]

    def mean(value: Callable[[Row], float | None], digits: int = 2) -> Callable[[str], str]:
        def cell(arm: str) -> str:
            found = [value(row) for row in of(arm)]
            reached = [each for each in found if each is not None]
            if len(reached) < len(found):
                return f"– ({len(found) - len(reached)} of {len(found)} did not)"
            return spread(reached, digits)

        return cell

    ends = {axis: min(curve(row, axis)[-1][0] for row in rows) for axis in ("tokens", "cpu")}
    at = lambda axis: mean(lambda row: value_at(curve(row, axis), ends[axis]), 3)
    held_out = lambda number: mean(lambda row: row["held_out"][number]["reward"], 3)
    speed = {
        "arm": str,
        "seeds": lambda arm: len(of(arm)),
        f"steps to {GOAL}": mean(lambda row: until_goal(row, "step"), 1),
        f"own tokens to {GOAL}": mean(lambda row: until_goal(row, "tokens"), 0),
        f"CPU s of a node to {GOAL}": mean(lambda row: until_goal(row, "cpu"), 0),
        f"at {ends['tokens']:.0f} own tokens": at("tokens"),
        f"at {ends['cpu']:.0f} CPU s": at("cpu"),
        "steps": mean(lambda row: float(taken(row)), 0),
        "held out at the start": held_out(0),
        "at the end": held_out(-1),
    }
    cost = {
        "arm": str,
        "own groups per step": mean(lambda r: total(r, "own") / taken(r)),
        "of peers": mean(lambda r: total(r, "external") / taken(r)),
        "own tokens per step": mean(lambda r: total(r, "tokens") / taken(r), 0),
        "CPU s per step": mean(lambda r: sum(total(r, part) for part in PARTS) / taken(r)),
        **{f"{part}, %": mean(lambda r, p=part: 100 * share(r, p), 0) for part in PARTS},
        # rows of an earlier version have none
        "peak GB": lambda arm: spread([row["peak_gb"] for row in of(arm) if "peak_gb" in row], 1),
    }
    return "\n\n".join([columns(arms, speed), columns(arms, cost), whole]).strip()


def plot(rows: Sequence[Row], file: Path) -> None:
    """Draw held-out reward over own tokens and over steps, by number of nodes: thin lines are
    seeds, thick lines their mean."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "real"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    axis_names = {"tokens": "own tokens of a node", "step": "steps"}
    for axis, (key, label) in zip(axes, axis_names.items(), strict=True):
        for arm, color in zip(BY_NODES, ("#7f7f7f", "#1f77b4", "#2ca02c", "#d62728"), strict=True):
            curves = [curve(row, key) for row in rows if row["arm"] == arm]
            if not curves:
                continue
            for points in curves:
                axis.plot(*zip(*points, strict=True), color=color, linewidth=0.6, alpha=0.4)
            first = max(points[0][0] for points in curves)
            end = min(points[-1][0] for points in curves)
            grid = [first + (end - first) * i / 40 for i in range(41)]
            means = [fmean(value_at(points, x) or 0.0 for points in curves) for x in grid]
            axis.plot(grid, means, color=color, linewidth=2, label=arm)
        axis.axhline(GOAL, color="black", linewidth=0.6, linestyle=":")
        axis.set(xlabel=label, xlim=(0, None), ylim=(0, 1))
    axes[0].set_ylabel("held-out reward")
    axes[1].legend(loc="lower right", frameon=False)
    figure.savefig(file, metadata={"Date": None})


# ---- command line --------------------------------------------------------------------------------


def main() -> None:
    parser = make_parser(
        "real", __doc__, quick="two arms, three steps, no file", seeds=3, first_seed=1, json=False
    )
    parser.add_argument(
        "--arms", nargs="+", choices=[*ARMS, SOCKETS], default=list(BY_NODES), metavar="ARM"
    )
    parser.add_argument("--task", default=Size.task)
    parser.add_argument("--model", default=Size.model, help="smollm2, or a model directory")
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--longest", type=int, default=Size.longest, help="tokens of an answer")
    parser.add_argument("--learning-rate", type=float, default=Size.learning_rate)
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of finished cells")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figure, SVG or PNG")
    args = parser.parse_args()
    single_thread()
    size = Size(
        args.task,
        args.model,
        steps=args.steps,
        longest=args.longest,
        learning_rate=args.learning_rate,
    )
    with tempfile.TemporaryDirectory() as folder:
        if args.quick:
            size = replace(size, steps=3, groups=2, questions=4, last_questions=4)
            args.arms, args.seeds, args.rows = ["alone", "2 nodes"], 1, Path(folder) / "rows.jsonl"
        # A finished cell is not continued if another call has a larger `--steps`.
        key = {**asdict(size), "model": Path(size.model).name}
        del key["steps"]
        done = {(row["arm"], row["seed"]) for row in read_rows(args.rows, [key])}
        left = [
            each for each in itertools.product(seeds_of(args), args.arms) if each[::-1] not in done
        ]
        if left and not args.table:
            bases, starts = dict[Member, Policy](), dict[int, dict[str, Any]]()
            # a busy machine may leave the child without a core for a while
            with Scorer(ScorerLimits(request=300.0)) as scorer:
                for seed, arm in left:
                    with tempfile.TemporaryDirectory(dir=folder) as directory:
                        home = Path(directory)
                        if arm == SOCKETS:
                            row = run_sockets(seed, size, home)
                        elif arm == TRL:
                            from benchmarks.lib.trl_cell import run_trl  # loads slowly

                            row = run_trl(arm, seed, size, home)
                        else:
                            arguments = arm, ARMS[arm], seed, size, scorer, bases, starts, home
                            row = Cell(*arguments).run()
                    append_row(args.rows, {**row, "size": key})
        rows = read_rows(args.rows, [key])
    print(heading("real: what sharing and averaging gain with a real model"))
    print(", ".join(f"{name} {value}" for name, value in key.items()) + "\n")
    print(show(rows))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
