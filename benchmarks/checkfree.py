"""What does it cost to lose a stage? `python -m benchmarks.checkfree [--quick] [--json PATH]
[--seeds N] [--processes N]`

A tiny Llama of eight one-layer stages (benchmarks/staged.py), trained from scratch. (a) One loss,
every way to recover, against the paired run that lost nothing (benchmarks/forks.py). (b) Losses at
random at the paper's rates, iterations to a target loss (benchmarks/failures.py). (c) As (a) for a
policy that was fine-tuned from a published base, whole and with LoRA. (d) Inner stages lost again
and again, made anew each time: loss at equal iterations (benchmarks/repeated.py). The recoveries
are the product's own functions. `--table PATH …` prints the tables of JSON files again, of several
as of one.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import failures, repeated
from benchmarks import recoveries as ways
from benchmarks.failures import (
    ARMS,
    LONGER,
    NO_FAILURE,
    NO_FAILURE_SWAPPED,
    RATES,
    schedule,
    survive,
)
from benchmarks.forks import METHODS, PLACES, Size, Trunk, compare, grow
from benchmarks.recoveries import Recovery
from benchmarks.report import heading, signed, table, write_json
from benchmarks.staged import STAGES, Corpus, Staged, build, language, tasks
from swarmnode.config import LoraSettings

FULL = Size()
QUICK = Size(trunk_steps=100, steps=100, tuned_steps=60, repeated=60, marks=(0, 10), quick=True)
FINER = ("exact, Adam fresh", "checkpoint in bfloat16 without Adam, 20 steps old")
"""Measured at the inner stage only."""
QUICK_ARMS = ("checkpoint every 10", "neighbours' checkpoints every 20", "CheckFree", "CheckFree+")
PARTS = ("single", "failures", "repeated")
CAP = 2.0
"""Iterations of (b) at most, in units of those to the target without failures."""
TUNED = (
    "exact, with Adam",
    "checkpoint, 20 steps old",
    "checkpoint, 50 steps old",
    "base weights",
    "CheckFree",
    "identity",
)
ADAPTER = {
    "exact, with Adam": "exact, with Adam",
    "checkpoint, 20 steps old": "checkpoint, 20 steps old",
    "checkpoint, 50 steps old": "checkpoint, 50 steps old",
    "base weights": "base without its adapter",
    "CheckFree": "neighbours' adapters averaged (forced)",
}
"""Method → what it is for an adapter."""


# ---- the parts


def text_of(size: Size) -> Corpus:
    return language(32 if size.quick else 64)


def single(seed: int, size: Size) -> list[dict[str, Any]]:
    """Parts (a) and (c) of one seed."""
    torch.set_num_threads(1)
    text, demonstrations = (
        text_of(size),
        tasks(32 if size.quick else 64, 100 if size.quick else 400),
    )
    rows: list[dict[str, Any]] = []

    def part(
        name: str,
        trunk: Trunk,
        corpus: Corpus,
        first: int,
        methods: dict[str, Recovery],
        places: Sequence[str],
        marks: Sequence[int],
    ) -> None:
        wanted = []
        for place in places:
            for method, recovery in methods.items():
                wanted.append((method, PLACES[place], recovery))
        where = {lost: place for place, lost in PLACES.items()}
        for row in compare(trunk, corpus, seed, first, marks, wanted):
            rows.append({"part": name, "place": where[tuple(row["lost"])]} | row)

    inner, others = ("an inner stage",), tuple(p for p in PLACES if p != "an inner stage")
    trunk = grow(Staged(build(seed), size.rate), text, seed, 0, size.trunk_steps)
    part("from scratch", trunk, text, size.trunk_steps, METHODS, inner, size.marks)
    if not size.quick:
        fewer = {name: way for name, way in METHODS.items() if name not in FINER}
        part("from scratch", trunk, text, size.trunk_steps, fewer, others, size.marks)

    if not size.quick:
        swapped = grow(
            Staged(build(seed), size.rate, swapped=True), text, seed, 0, size.trunk_steps
        )
        average, copies = (
            {"CheckFree": METHODS["CheckFree"]},
            {"copy (CheckFree+)": ways.synthesis("copy")},
        )
        part(
            "trained with swapped order",
            swapped,
            text,
            size.trunk_steps,
            average,
            inner,
            size.marks,
        )
        part(
            "trained with swapped order",
            swapped,
            text,
            size.trunk_steps,
            copies,
            ("the first stage", "the last stage"),
            size.marks,
        )

    trunk.staged.roll_back(trunk.checkpoint)
    published = copy.deepcopy(trunk.staged.model)
    tuned = grow(
        Staged(copy.deepcopy(published), size.tuned_rate),
        demonstrations,
        seed,
        0,
        size.tuned_steps,
        [kept.without_moments() for kept in trunk.history.now],
    )
    part(
        "fine-tuned",
        tuned,
        demonstrations,
        size.tuned_steps,
        {m: METHODS[m] for m in TUNED},
        inner,
        size.marks,
    )
    if not size.quick:
        part(
            "fine-tuned",
            tuned,
            demonstrations,
            size.tuned_steps,
            {m: METHODS[m] for m in TUNED},
            others,
            (0,),
        )
    rows.append({"part": "weights moved", "seed": seed, "share": moved(tuned)})

    staged = Staged(adapted(published, size.rank, seed), size.adapter_rate)
    start = [staged.copy_of(i) for i in range(STAGES)]
    with_adapter = grow(staged, demonstrations, seed, 0, size.tuned_steps, start)
    named = {name: METHODS[method] for method, name in ADAPTER.items()}
    part(
        "fine-tuned with LoRA",
        with_adapter,
        demonstrations,
        size.tuned_steps,
        named,
        inner,
        size.marks,
    )
    if not size.quick:
        part(
            "fine-tuned with LoRA",
            with_adapter,
            demonstrations,
            size.tuned_steps,
            named,
            others,
            (0,),
        )
    return rows


def adapted(model: Any, rank: int, seed: int) -> Any:
    """A copy of `model` under a fresh adapter, as `policy.load` makes it."""
    from peft import LoraConfig, get_peft_model

    from swarmnode.policy.load import LORA_MODULES

    torch.manual_seed(seed)
    usual = LoraSettings(r=rank)
    settings = LoraConfig(
        r=usual.r, lora_alpha=usual.lora_alpha, target_modules=LORA_MODULES, task_type="CAUSAL_LM"
    )
    return get_peft_model(copy.deepcopy(model), settings).eval()


def moved(trunk: Trunk) -> list[float]:
    """‖W − W_base‖ / ‖W_base‖ of each stage."""
    shares = []
    for now, base in zip(trunk.history.now, trunk.history.base, strict=True):
        square = lambda tensors: float(sum(t.square().sum() for t in tensors))
        shares.append(
            (
                square(now.weights[n] - t for n, t in base.weights.items())
                / square(base.weights.values())
            )
            ** 0.5
        )
    return shares


def at_random(seed: int, size: Size, rates: Sequence[str]) -> list[dict[str, Any]]:
    """Part (b) of one seed. Of each length the run without failures sets the target."""
    torch.set_num_threads(1)
    corpus, rows = text_of(size), []
    for times in dict.fromkeys(LONGER.get(rate, 1) for rate in rates):
        steps = times * size.steps
        cap = int(CAP * steps)
        control, plain = survive(NO_FAILURE, size, corpus, seed, {}, steps, None)
        target = failures.target_of(plain.curve, steps)
        control |= {"iterations": failures.first_at(plain.curve, target), "target": target}
        other, swapped = survive(NO_FAILURE_SWAPPED, size, corpus, seed, {}, cap, target)
        for rate in (rate for rate in rates if LONGER.get(rate, 1) == times):
            rows += [control | {"rate": rate}, other | {"rate": rate}]
            lost = schedule(seed, RATES[rate], cap)
            for arm in ARMS:
                if rate in arm.rates and (not size.quick or arm.name in QUICK_ARMS):
                    row, _ = survive(
                        arm,
                        size,
                        corpus,
                        seed,
                        lost,
                        cap,
                        target,
                        swapped if arm.swapped else plain,
                    )
                    rows.append(row | {"rate": rate})
    return rows


def again(seed: int, size: Size) -> list[dict[str, Any]]:
    """Part (d) of one seed."""
    torch.set_num_threads(1)
    return repeated.again(seed, size, text_of(size))


# ---- the tables


def single_tables(rows: list[dict[str, Any]]) -> str:
    """Where runs were followed one table for each place, else the jumps of all places in one."""
    lines: list[str] = []
    rows = [r for r in rows if "method" in r]
    for part in dict.fromkeys(r["part"] for r in rows):
        here = [r for r in rows if r["part"] == part]
        places = list(dict.fromkeys(r["place"] for r in here))
        followed = [
            place for place in places if any(r.get("gap") for r in here if r["place"] == place)
        ]
        for place in followed:
            lines += [
                f"### {part}, lost: {place}",
                "",
                place_table([r for r in here if r["place"] == place]),
                "",
            ]
        if jumps := [place for place in places if place not in followed]:
            some = [r for r in here if r["place"] in jumps]
            body = []
            for method in methods_of(some):
                mine = [r for r in some if r["method"] == method and "jump" in r]
                body.append(
                    [
                        method,
                        *[with_gate([r for r in mine if r["place"] == place]) for place in jumps],
                    ]
                )
            lines += [
                f"### {part}, jump (passes the gate), lost:",
                "",
                table(["", *jumps], body),
                "",
            ]
    return "\n".join(lines)


def methods_of(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(r["method"] for r in rows))


def with_gate(done: list[dict[str, Any]]) -> str:
    return (
        f"{signed([r['jump'] for r in done])} ({sum(r['gate'] for r in done)} of {len(done)})"
        if done
        else "refused"
    )


def place_table(rows: list[dict[str, Any]]) -> str:
    marks = sorted({int(m) for r in rows for m in r.get("gap", {})})
    body = []
    for method in methods_of(rows):
        done = [r for r in rows if r["method"] == method and "jump" in r]
        if not done:
            body.append([method, "refused", *["–"] * (len(marks) + 2)])
            continue
        # JSON has text for keys
        gap = lambda m, done=done: [{int(k): v for k, v in r["gap"].items()}[m] for r in done]
        kl = statistics.median(r["kl"] for r in done)
        passed = f"{sum(r['gate'] for r in done)} of {len(done)}"
        body.append(
            [
                method,
                signed([r["jump"] for r in done]),
                *[signed(gap(m)) for m in marks],
                f"{kl:.4f}",
                passed,
            ]
        )
    return table(["", "jump", *[f"gap after {m}" for m in marks], "KL", "passes the gate"], body)


def failure_table(runs: list[dict[str, Any]]) -> str:
    """Iterations to the target over those without failures, by seed; time in the same unit."""
    alone = {(r["seed"], r["rate"]): r["iterations"] for r in runs if r["arm"] == NO_FAILURE.name}
    rates = [rate for rate in RATES if any(r["rate"] == rate for r in runs)]

    def cell(arm: str, rate: str) -> str:
        here = [r for r in runs if (r["arm"], r["rate"]) == (arm, rate)]
        if not here:
            return "–"
        ratios = sorted((r["iterations"] or float("inf")) / alone[r["seed"], rate] for r in here)
        show = lambda x, r=here[0]: (
            f"{x:.2f}" if x < float("inf") else f">{r['cap'] / alone[r['seed'], rate]:.1f}"
        )
        lost = statistics.median(r["failures"] for r in here)
        return (
            f"{show(statistics.median_high(ratios))} [{show(ratios[0])} … {show(ratios[-1])}],"
            f" {lost:g} losses"
        )

    body = [[NO_FAILURE.name, *["1"] * len(rates)]]
    factor = failures.REDUNDANT_SECONDS / failures.PLAIN_SECONDS
    body += [["redundant computation: time, modelled", *[f"{factor:.2f}"] * len(rates)]]
    arms = [arm.name for arm in (NO_FAILURE_SWAPPED, *ARMS)]
    body += [
        [name, *[cell(name, rate) for rate in rates]]
        for name in arms
        if any(r["arm"] == name for r in runs)
    ]
    return table(["iterations to the target, of those without failure", *rates], body)


def tables(results: dict[str, Any]) -> str:
    lines = []
    if results["single"]:
        share = [s for r in results["single"] if r["part"] == "weights moved" for s in r["share"]]
        note = (
            f"Fine-tuning moved a stage's weights by {statistics.median(share):.1%} of their norm"
            " (median over stages and seeds).\n"
        )
        lines += [single_tables(results["single"]), note]
    if results["failures"]:
        lines += ["### failures at random", "", failure_table(results["failures"]), ""]
    if results["repeated"]:
        lines += ["### lost again and again", "", repeated.tables(results["repeated"])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkfree",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed, short, an inner stage and one failure rate only; under a minute",
    )
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="run nothing: print the tables of these results",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="single: (a) and (c); failures: (b); repeated: (d)",
    )
    parser.add_argument(
        "--rates", nargs="+", choices=list(RATES), default=list(RATES), help="of (b)"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--first-seed", type=int, default=1, help="seed 0 was used to choose the sizes"
    )
    parser.add_argument("--processes", type=int, default=2, help="one thread each")
    args = parser.parse_args()
    if args.table:
        read = [json.loads(path.read_text())["results"] for path in args.table]
        print(
            tables(
                {part: [row for results in read for row in results.get(part, [])] for part in PARTS}
            )
        )
        return
    seeds, size = (1, QUICK) if args.quick else (args.seeds, FULL)
    args.rates = ["16 %/h"] if args.quick else args.rates
    print(heading("checkfree: what does it cost to lose a stage?"), flush=True)
    results = run(
        range(args.first_seed, args.first_seed + seeds),
        size,
        args.parts,
        args.rates,
        args.processes,
        args.json,
    )
    print(tables(results), flush=True)


def run(
    seeds: Sequence[int],
    size: Size,
    parts: Sequence[str],
    rates: Sequence[str],
    processes: int,
    path: Path | None,
) -> dict[str, Any]:
    """All parts of all seeds; what there is is written to `path` whenever a piece is done."""
    results: dict[str, Any] = {"size": vars(size), "cap": CAP} | {part: [] for part in PARTS}
    started = time.time()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = {"single": single, "failures": partial(at_random, rates=rates), "repeated": again}
        jobs = [
            (seed, part, pool.submit(work[part], seed, size)) for seed in seeds for part in parts
        ]
        for seed, part, rows in jobs:
            results[part] += rows.result()
            print(
                f"{time.time() - started:5.0f} s  seed {seed}: {part}", file=sys.stderr, flush=True
            )
            if path:
                write_json(path, results)
    return results


if __name__ == "__main__":
    main()
