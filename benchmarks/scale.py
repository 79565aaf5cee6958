"""What a swarm of N costs each of its members that asks for groups, and what they learn from.
`python -m benchmarks.scale [--quick]`

    real hosts     benchmarks.scale_hosts: what a listing, a pull, a connection cost; run here, so
    that CPU times belong to this machine
    10 to 1,000    benchmarks.scale_events: the product's own decisions, event by event, with churn,
    liars, and nodes that leave at once
    to 10,000      benchmarks.scale_model: the same rules simplified, in numpy

Every node makes 8 useful groups in a step of 30 s and trains on 6 of others'. The rows of flooding
are arithmetic: every node receives every group once, for what one more group in a fetch costs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec

from benchmarks import report, scale_events, scale_hosts, scale_model
from benchmarks.scale_events import DEGREE, MADE, ROOM, STEP_SECONDS, Result, Setup
from benchmarks.scale_hosts import Constants

SIZES = (2_000, 17_000)
"""Bytes of a group: short answers, and eight of some hundred tokens."""
LISTED_BYTES = 100
WARM = 6
"""Steps before anything is counted."""
BUDGET_CORES, BUDGET_BITS = 0.1, 100_000
MOST_CPU_MS = 7.0
MOST_BYTES = {2_000: 1.6, 17_000: 1.1}
"""Goals, per group trained on: CPU, and bytes received ÷ its size."""
MOST_GROWN = 1.1
"""Goal: cost of a node in the largest swarm ÷ in one of 100."""


@dataclass(frozen=True)
class Load:
    """What a node does in a step, on average."""

    listings: float
    listing_bytes: float
    pulls: float
    pulled: float
    trained: float
    decisions_ms: float


@dataclass(frozen=True)
class Cost:
    """Of one node."""

    cpu_ms: float
    """Of asking, answering, admitting and deciding, for each group trained on."""
    connections_ms: float
    """Of being connected, per second."""
    bytes: float
    """Received, for each byte of a group trained on."""
    kbit: float
    """Received per second; sent is as much."""
    messages: float
    """Per minute, there and back counted as two."""
    cores: float
    """All of it."""


def cost(load: Load, constants: Constants, nodes: int) -> Cost:
    """What `load` costs by `constants`."""
    trained = max(load.trained, 1e-9)
    asking = load.listings * constants.listing.cpu_ms + load.pulls * (
        constants.pull.cpu_ms - constants.more.cpu_ms
    )
    cpu = asking + load.pulled * constants.more.cpu_ms + load.decisions_ms
    streams = load.listings * constants.empty.bytes + load.pulls * (
        constants.pull.bytes - constants.more.bytes
    )
    received = load.listing_bytes + streams + load.pulled * constants.more.bytes
    links = min(DEGREE, nodes - 1)
    idle_ms, idle_bytes = links * constants.idle.cpu_ms, links * constants.idle.bytes
    return Cost(
        cpu_ms=cpu / trained,
        connections_ms=idle_ms,
        bytes=received / (trained * constants.size),
        kbit=8 * (received / STEP_SECONDS + idle_bytes) / 1000,
        messages=2 * (load.listings + load.pulls) * 60 / STEP_SECONDS * 2,  # asked and answered
        cores=(cpu / STEP_SECONDS + idle_ms) / 1000,
    )


def load_of(result: Result) -> Load:
    """Of a run of scale_events."""
    c, steps = result.counts, max(1, result.counts.node_steps)
    return Load(
        c.listings / steps,
        c.listing_bytes / steps,
        c.pulls / steps,
        c.pulled / steps,
        c.trained / steps,
        1000 * c.seconds / steps,
    )


def load_of_model(outcome: scale_model.Outcome, decisions_ms: float) -> Load:
    """Of a run of scale_model, which decides in another way: `decisions_ms` are those of
    scale_events."""
    return Load(
        outcome.listings,
        LISTED_BYTES * outcome.entries,
        outcome.pulls,
        outcome.pulled,
        ROOM * outcome.full,
        decisions_ms,
    )


@dataclass(frozen=True)
class Plan:
    """What is run. events, model: nodes → steps."""

    events: dict[int, int]
    model: dict[int, int]
    troubled: int
    """Nodes in the runs with liars and with those who leave."""
    seeds: int

    @property
    def troubles(self) -> list[Setup]:
        """Runs in which something is wrong."""
        base = Setup(self.troubled, steps=max(self.events.values()) // 2 + 6, warm=WARM)
        return [replace(base, leave=0.3), replace(base, hostile=0.25), replace(base, hostile=0.5)]


FULL = Plan({10: 36, 100: 30, 1000: 12}, {100: 36, 1_000: 36, 10_000: 26}, 60, 3)
QUICK = Plan({10: 12, 30: 12}, {100: 16, 1_000: 16}, 20, 1)
SIMULATED = "simulated"
One = TypeVar("One")


class Runs:
    """Results by nodes, one for each seed; printed as they come. Each run is a process of its own,
    `processes` of them at a time."""

    def __init__(self, plan: Plan, processes: int) -> None:
        self.plan = plan
        # spawn, and one run for each: memory that another run has used is no memory of this one
        with ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as pool:
            simulated = lambda setup: [
                pool.submit(scale_events.simulate, replace(setup, seed=seed))
                for seed in range(plan.seeds)
            ]
            modelled = lambda nodes, steps: [
                pool.submit(scale_model.run, nodes, seed, steps, warm=WARM)
                for seed in range(plan.seeds)
            ]
            events = {
                nodes: simulated(Setup(nodes, steps=steps, warm=WARM))
                for nodes, steps in plan.events.items()
            }
            model = {nodes: modelled(nodes, steps) for nodes, steps in plan.model.items()}
            troubles = [simulated(setup) for setup in plan.troubles]
            self.events = {
                nodes: [_noted(run.result()) for run in some] for nodes, some in events.items()
            }
            self.model = {
                nodes: [_noted(run.result()) for run in some] for nodes, some in model.items()
            }
            self.troubles = [[_noted(run.result()) for run in some] for some in troubles]

    @property
    def decisions_ms(self) -> float:
        return fmean(load_of(result).decisions_ms for result in self.events[max(self.events)])

    def loads(self, kind: str, nodes: int) -> list[Load]:
        """One for each seed. kind: SIMULATED, or of the model."""
        if kind == SIMULATED:
            return [load_of(result) for result in self.events[nodes]]
        return [load_of_model(outcome, self.decisions_ms) for outcome in self.model[nodes]]


def note(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _noted(result: One) -> One:
    note(
        f"{result.setup}: {result.counts.node_steps} steps of nodes"
        if isinstance(result, Result)
        else f"{result}"
    )
    return result


def _several(values: Sequence[float | None], digits: int = 2) -> str:
    known = [value for value in values if value is not None]
    return (
        report.spread(known, digits)
        if len(known) == len(values)
        else f"more ({len(known)} of {len(values)} runs)"
        if known
        else "more"
    )


def cost_table(runs: Runs, constants: Constants) -> str:
    """What a member pays."""
    headers = [
        "nodes",
        "how",
        "kbit/s in, and out",
        "÷ bytes trained on",
        "messages/min",
        "CPU ms per group trained on",
        "connections, ms/s",
        "of a core, %",
    ]
    rows = []
    keys = [(nodes, SIMULATED) for nodes in runs.events] + [
        (nodes, "model") for nodes in runs.model
    ]
    for nodes, kind in sorted(keys, key=lambda key: (key[0], key[1] != SIMULATED)):
        costs = [cost(load, constants, nodes) for load in runs.loads(kind, nodes)]
        rows.append(
            [
                f"{nodes:,}",
                f"pull, {kind}",
                _several([c.kbit for c in costs], 1),
                _several([c.bytes for c in costs]),
                _several([c.messages for c in costs], 0),
                _several([c.cpu_ms for c in costs], 1),
                _several([c.connections_ms for c in costs], 1),
                _several([100 * c.cores for c in costs]),
            ]
        )
        came = MADE * (nodes - 1)
        rows.append(
            [
                f"{nodes:,}",
                "flooding, computed",
                f"{8 * came * constants.more.bytes / STEP_SECONDS / 1000:,.0f}",
                f"{came * constants.more.bytes / (min(ROOM, came) * constants.size):,.0f}",
                "–",
                f"{came * constants.more.cpu_ms / min(ROOM, came):,.0f}",
                "–",
                f"{came * constants.more.cpu_ms / STEP_SECONDS / 10:,.1f}",
            ]
        )
    return report.table(headers, rows)


def learning_table(runs: Runs) -> str:
    """What it gets."""
    headers = [
        "nodes",
        "how",
        "batches full, %",
        "groups used by others, %",
        "age when used, s",
        "authors met",
        "steps until 90 % show it",
        "KiB a node",
    ]
    rows = []
    for nodes, results in runs.events.items():
        full = [100 * r.counts.full / max(1, r.counts.node_steps) for r in results]
        rows.append(
            [
                f"{nodes:,}",
                f"{SIMULATED}, {results[0].setup.steps - results[0].setup.warm} steps",
                _several(full, 1),
                _several([100 * r.used_share for r in results], 0),
                _several([fmean(r.counts.ages) for r in results], 0),
                _several([r.authors for r in results], 0),
                _several([r.spread_steps for r in results], 0),
                _several([r.kilobytes for r in results], 0),
            ]
        )
    for nodes, outcomes in runs.model.items():
        rows.append(
            [
                f"{nodes:,}",
                f"model, {runs.plan.model[nodes] - WARM} steps",
                _several([100 * o.full for o in outcomes], 1),
                _several([100 * o.used_share for o in outcomes], 0),
                _several([o.age_seconds for o in outcomes], 0),
                _several([o.authors for o in outcomes], 0),
                _several([o.spread_steps for o in outcomes], 0),
                "–",
            ]
        )
    return report.table(headers, rows)


def trouble_table(runs: Runs) -> str:
    """Liars, and those who leave."""
    headers = [
        "nodes",
        "what",
        "batches full, %",
        "hostile of what was asked for, %",
        "absorbed after, s",
        "least full 30 s, %",
    ]
    rows = []
    for results in runs.troubles:
        setup = results[0].setup
        what = (
            f"{100 * setup.leave:.0f} % leave at once"
            if setup.leave
            else f"{100 * setup.hostile:.0f} % hostile identities"
        )
        rows.append(
            [
                f"{setup.nodes:,}",
                what,
                _several([100 * r.counts.full / max(1, r.counts.node_steps) for r in results], 1),
                _several(
                    [100 * r.counts.hostile_pulled / max(1, r.counts.pulled) for r in results], 1
                ),
                _several([r.absorbed_seconds for r in results], 0) if setup.leave else "–",
                _several([100 * r.least_fill for r in results], 0),
            ]
        )
    return report.table(headers, rows)


def goals(runs: Runs, by_size: dict[int, Constants]) -> list[tuple[bool, str]]:
    """Whether each goal is met, and by what number."""
    lines = []
    far = 10_000 if 10_000 in runs.model else max(runs.model)
    for size, constants in by_size.items():
        most = max(runs.events)
        few = 100 if 100 in runs.events else min(runs.events)
        for kind, less, more in ((SIMULATED, few, most), ("model", 100, far)):
            at = {
                nodes: [cost(load, constants, nodes) for load in runs.loads(kind, nodes)]
                for nodes in (less, more)
            }
            cpu, kbit = (
                fmean(getattr(c, what) for c in at[more])
                / fmean(getattr(c, what) for c in at[less])
                for what in ("cpu_ms", "kbit")
            )
            lines.append(
                (
                    max(cpu, kbit) <= MOST_GROWN,
                    (
                        f"{size} B: cost at {more:,} ÷ at {less:,} ({kind}), CPU {cpu:.2f}, bytes"
                        f" {kbit:.2f} (at most {MOST_GROWN})"
                    ),
                )
            )
        of = [cost(load, constants, most) for load in runs.loads(SIMULATED, most)]
        cpu, ratio = fmean(c.cpu_ms for c in of), fmean(c.bytes for c in of)
        lines.append(
            (
                cpu <= MOST_CPU_MS,
                (
                    f"{size} B: {cpu:.1f} ms of CPU per group trained on, connections not counted"
                    f" (at most {MOST_CPU_MS:g})"
                ),
            )
        )
        lines.append(
            (
                ratio <= MOST_BYTES[size],
                (
                    f"{size} B: {ratio:.2f} bytes received per byte trained on, listings included"
                    f" (at most {MOST_BYTES[size]:g})"
                ),
            )
        )
        cores, kbit = fmean(c.cores for c in of), fmean(c.kbit for c in of)
        fits = cores <= BUDGET_CORES and 1000 * kbit <= BUDGET_BITS
        lines.append(
            (
                fits,
                (
                    f"{size} B: {100 * cores:.1f} % of a core, {kbit:.0f} kbit/s each way with 30 s"
                    " steps (at most 10 % and 100)"
                ),
            )
        )
    fulls = {
        nodes: fmean(r.counts.full / max(1, r.counts.node_steps) for r in results)
        for nodes, results in runs.events.items()
    }
    told = ", ".join(f"{100 * full:.1f} % at {nodes:,}" for nodes, full in fulls.items())
    lines.append((min(fulls.values()) >= 0.95, f"batches full: {told} (at least 95 %)"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="few nodes, one seed; under a minute of CPU time"
    )
    parser.add_argument(
        "--seeds", type=int, help="runs of everything that is simulated; 3 unless told otherwise"
    )
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--json", type=Path, help="write all results there, too")
    parser.add_argument(
        "--one",
        help="a Setup of scale_events as JSON, simulated here and now; prints what came of it",
    )
    arguments = parser.parse_args()
    if arguments.one:
        result = scale_events.simulate(msgspec.json.decode(arguments.one, type=Setup))
        print(msgspec.json.encode({**_summary(result), "load": asdict(load_of(result))}).decode())
        return
    plan = QUICK if arguments.quick else FULL
    plan = replace(plan, seeds=arguments.seeds or plan.seeds)
    by_size = {}
    for size in SIZES[-1:] if arguments.quick else SIZES:
        by_size[size] = scale_hosts.measure(size)
        note(f"{size} B: {by_size[size]}")
    runs = Runs(plan, arguments.processes)
    print(report.heading("scale: what a swarm of N costs a member"))
    for constants in by_size.values():
        print(
            f"Groups of {constants.size / 1000:.1f} KB; of both ends on this machine:"
            f" {_constants(constants)}.\n"
        )
        print(f"{cost_table(runs, constants)}\n")
    print(f"{learning_table(runs)}\n\n{trouble_table(runs)}\n")
    for met, line in goals(runs, by_size):
        print(f"* {'met' if met else 'MISSED'}: {line}")
    if arguments.json:
        results: dict[str, Any] = {
            "constants": {size: msgspec.to_builtins(one) for size, one in by_size.items()}
        }
        results["events"] = [
            _summary(result) for each in [*runs.events.values(), *runs.troubles] for result in each
        ]
        results["model"] = [asdict(outcome) for each in runs.model.values() for outcome in each]
        report.write_json(arguments.json, results)


def _constants(constants: Constants) -> str:
    of = lambda name, what: f"{name} {what.cpu_ms:.2f} ms and {what.bytes:,.0f} bytes"
    return ", ".join(
        [
            of("a listing of 14", constants.listing),
            of("an empty one", constants.empty),
            of("a group", constants.pull),
            of("one more in the same request", constants.more),
            of("a connection, a second, one end", constants.idle),
        ]
    )


def _summary(result: Result) -> dict[str, Any]:
    summary = asdict(result)
    summary["counts"]["ages"] = fmean(result.counts.ages or [0.0])
    return summary


if __name__ == "__main__":
    main()
