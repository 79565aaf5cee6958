"""What does a swarm of N nodes cost a member, and what does the member learn from? `python -m
benchmarks.scale [--quick]`

    costs     benchmarks/lib/scale_hosts.py: a listing, a fetch and a connection between real hosts,
              measured here so that CPU times are of this machine
    counts    benchmarks/lib/scale_events.py: the product's own decisions, event by event, for 10 to
              1,000 nodes, with churn, hostile identities, and nodes that leave at once

Every node makes 8 useful groups in a step of 30 s and trains on 6 of its peers'. The rows of
flooding are computed: every node receives every group once, at the cost of one more group in a
fetch.
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
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.lib import scale_events, scale_hosts
from benchmarks.lib.scale_events import DEGREE, MADE, ROOM, STEP_SECONDS, Result, Setup
from benchmarks.lib.scale_hosts import Constants

SIZES = (2_000, 17_000)
"""Bytes of a group: short answers, and eight of some hundred tokens."""
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
    """Mean counts of a node and step."""

    listings: float
    listing_bytes: float
    pulls: float
    pulled: float
    trained: float
    decisions_ms: float


@dataclass(frozen=True)
class Cost:
    """Cost of one node."""

    cpu_ms: float
    """CPU of requests, answers, admission and decisions per group trained on."""
    connections_ms: float
    """CPU of idle connections per second."""
    bytes: float
    """Bytes received per byte of the groups trained on."""
    kbit: float
    """kbit/s received; as much is sent."""
    messages: float
    """Messages per minute; request and answer are two."""
    cores: float
    """Share of a core."""


def cost(load: Load, constants: Constants, nodes: int) -> Cost:
    """Return the cost of `load`."""
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
        messages=2 * (load.listings + load.pulls) * 60 / STEP_SECONDS * 2,  # both roles
        cores=(cpu / STEP_SECONDS + idle_ms) / 1000,
    )


def load_of(result: Result) -> Load:
    """Return the mean load of a run."""
    c, steps = result.counts, max(1, result.counts.node_steps)
    return Load(
        c.listings / steps,
        c.listing_bytes / steps,
        c.pulls / steps,
        c.pulled / steps,
        c.trained / steps,
        1000 * c.seconds / steps,
    )


@dataclass(frozen=True)
class Plan:
    """Runs of one call."""

    events: dict[int, int]
    """Nodes → steps."""
    troubled: int
    """Nodes of the runs with hostile identities and with a leave."""
    seeds: int

    @property
    def troubles(self) -> list[Setup]:
        """Runs with a disturbance."""
        base = Setup(self.troubled, steps=max(self.events.values()) // 2 + 6, warm=WARM)
        return [replace(base, leave=0.3), replace(base, hostile=0.25), replace(base, hostile=0.5)]


FULL = Plan({10: 36, 100: 30, 1000: 12}, 60, 3)
QUICK = Plan({10: 12, 30: 12}, 20, 1)


class Runs:
    """Results of all runs, one for each seed, `processes` at a time."""

    def __init__(self, plan: Plan, processes: int) -> None:
        setups = [Setup(nodes, steps=steps, warm=WARM) for nodes, steps in plan.events.items()]
        # a fresh process for each run, so that memory of one is not counted for the next
        with ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as pool:
            jobs = [
                [
                    pool.submit(scale_events.simulate, replace(setup, seed=seed))
                    for seed in range(plan.seeds)
                ]
                for setup in (*setups, *plan.troubles)
            ]
            found = [[_noted(job.result()) for job in some] for some in jobs]
        self.events = dict(zip(plan.events, found, strict=False))
        self.troubles = found[len(setups) :]

    def costs(self, nodes: int, constants: Constants) -> list[Cost]:
        """Return the costs of a swarm of `nodes`, one for each seed."""
        return [cost(load_of(result), constants, nodes) for result in self.events[nodes]]


def note(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _noted(result: Result) -> Result:
    note(f"{result.setup}: {result.counts.node_steps} steps of nodes")
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
    """Return the table of costs of a member."""
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
    for nodes in runs.events:
        costs = runs.costs(nodes, constants)
        rows.append(
            [
                f"{nodes:,}",
                "pull gossip",
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
    """Return the table of what a member trains on."""
    headers = [
        "nodes",
        "steps",
        "batches full, %",
        "groups used by others, %",
        "age when used, s",
        "authors met",
        "KiB a node",
    ]
    rows = []
    for nodes, results in runs.events.items():
        full = [100 * r.counts.full / max(1, r.counts.node_steps) for r in results]
        rows.append(
            [
                f"{nodes:,}",
                str(results[0].setup.steps - results[0].setup.warm),
                _several(full, 1),
                _several([100 * r.used_share for r in results], 0),
                _several([fmean(r.counts.ages) for r in results], 0),
                _several([r.authors for r in results], 0),
                _several([r.kilobytes for r in results], 0),
            ]
        )
    return report.table(headers, rows)


def trouble_table(runs: Runs) -> str:
    """Return the runs with a disturbance."""
    headers = [
        "nodes",
        "what",
        "batches full, %",
        "hostile of the fetched, %",
        "recovered after, s",
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
    """Return whether each goal is met, and its figure."""
    lines = []
    most = max(runs.events)
    few = 100 if 100 in runs.events else min(runs.events)
    for size, constants in by_size.items():
        mean = lambda nodes, what, c=constants: fmean(
            getattr(x, what) for x in runs.costs(nodes, c)
        )
        cpu, kbit = (mean(most, what) / mean(few, what) for what in ("cpu_ms", "kbit"))
        told = f"cost at {most:,} ÷ at {few:,}, CPU {cpu:.2f}, bytes {kbit:.2f}"
        lines.append((max(cpu, kbit) <= MOST_GROWN, f"{size} B: {told} (at most {MOST_GROWN})"))
        cpu, ratio = mean(most, "cpu_ms"), mean(most, "bytes")
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
        cores, kbit = mean(most, "cores"), mean(most, "kbit")
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
    parser.add_argument("--quick", action="store_true", help="few nodes, one seed")
    parser.add_argument("--seeds", type=int, help="seeds of each simulation (3)")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument(
        "--one",
        help="a Setup as JSON: simulate it and print the result",
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
