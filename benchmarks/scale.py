"""Measure what a swarm of N nodes costs a member, and what the member learns from.

    costs     benchmarks/lib/scale_hosts.py: a listing, a fetch and a connection between real hosts,
              measured here so that CPU times are of this machine
    counts    benchmarks/lib/scale_events.py: the product's own decisions, event by event, for 10 to
              1,000 nodes, with churn, hostile identities, and nodes that leave at the same time

Every node makes 8 useful groups in a step of 30 s and trains on 6 of its peers' groups.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.lib import scale_events, scale_hosts
from benchmarks.lib.report import columns, heading, make_parser, note, spread, write_json
from benchmarks.lib.scale_events import DEGREE, STEP_SECONDS, Counts, Result, Setup
from benchmarks.lib.scale_hosts import Constants

SIZES = (2_000, 17_000)
"""Bytes of a group: short answers, and eight answers of some hundred tokens."""
WARM = 6
"""Uncounted steps at the start."""
MAX_CORES, MAX_BITS = 0.1, 100_000
"""Goals for a member: share of a core, and bits per second each way."""
MAX_CPU_MS = 7.0
MAX_BYTES = {2_000: 1.6, 17_000: 1.1}
"""Goals per group trained on: CPU time, and bytes received ÷ its size."""
MAX_GROWTH = 1.1
"""Goal: cost of a node in the largest swarm ÷ in a swarm of 100."""


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


def cost(counts: Counts, constants: Constants, nodes: int) -> Cost:
    """Return the mean cost of a node with these counts in a swarm of `nodes`."""
    steps = max(1, counts.node_steps)
    listings, pulls, pulled = (
        count / steps for count in (counts.listings, counts.pulls, counts.pulled)
    )
    trained = max(counts.trained / steps, 1e-9)
    # the first group of a fetch costs `pull`, each further one `more`
    cpu = (
        listings * constants.listing.cpu_ms
        + pulls * (constants.pull.cpu_ms - constants.more.cpu_ms)
        + pulled * constants.more.cpu_ms
        + 1000 * counts.seconds / steps
    )
    received = (
        counts.listing_bytes / steps
        + listings * constants.empty.bytes
        + pulls * (constants.pull.bytes - constants.more.bytes)
        + pulled * constants.more.bytes
    )
    links = min(DEGREE, nodes - 1)
    idle_ms, idle_bytes = links * constants.idle.cpu_ms, links * constants.idle.bytes
    return Cost(
        cpu_ms=cpu / trained,
        connections_ms=idle_ms,
        bytes=received / (trained * constants.size),
        kbit=8 * (received / STEP_SECONDS + idle_bytes) / 1000,
        messages=2 * (listings + pulls) * 60 / STEP_SECONDS * 2,  # both roles
        cores=(cpu / STEP_SECONDS + idle_ms) / 1000,
    )


@dataclass(frozen=True)
class Plan:
    """The simulated runs."""

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
            found = [[_note(job.result()) for job in some] for some in jobs]
        self.events = dict(zip(plan.events, found, strict=False))
        self.troubles = found[len(setups) :]

    def costs(self, nodes: int, constants: Constants) -> list[Cost]:
        """Return the costs of a swarm of `nodes`, one for each seed."""
        return [cost(result.counts, constants, nodes) for result in self.events[nodes]]


def _note(result: Result) -> Result:
    note(f"{result.setup}: {result.counts.node_steps} steps of nodes")
    return result


def cost_table(runs: Runs, constants: Constants) -> str:
    """Return the costs of a member."""
    mean = lambda value, digits: (
        lambda nodes: spread([value(c) for c in runs.costs(nodes, constants)], digits)
    )
    return columns(
        list(runs.events),
        {
            "nodes": lambda nodes: f"{nodes:,}",
            "kbit/s in, and out": mean(lambda c: c.kbit, 1),
            "÷ bytes trained on": mean(lambda c: c.bytes, 2),
            "messages/min": mean(lambda c: c.messages, 0),
            "CPU ms per group trained on": mean(lambda c: c.cpu_ms, 1),
            "connections, ms/s": mean(lambda c: c.connections_ms, 1),
            "of a core, %": mean(lambda c: 100 * c.cores, 2),
        },
    )


def full_share(result: Result) -> float:
    """Return the share of steps that trained on a full batch."""
    return result.counts.full / max(1, result.counts.node_steps)


def of_runs(value: Callable[[Result], float], digits: int) -> Callable[[list[Result]], str]:
    return lambda results: spread([value(result) for result in results], digits)


def learning_table(runs: Runs) -> str:
    """Return the table of the groups that a member trains on."""
    return columns(
        list(runs.events.values()),
        {
            "nodes": lambda results: f"{results[0].setup.nodes:,}",
            "steps": lambda results: results[0].setup.steps - results[0].setup.warm,
            "batches full, %": of_runs(lambda r: 100 * full_share(r), 1),
            "groups used by others, %": of_runs(lambda r: 100 * r.used_share, 0),
            "age when used, s": of_runs(lambda r: fmean(r.counts.ages), 0),
            "authors used": of_runs(lambda r: r.authors, 0),
            "KiB a node": of_runs(lambda r: r.kilobytes, 0),
        },
    )


def disturbance(setup: Setup) -> str:
    if setup.leave:
        return f"{100 * setup.leave:.0f} % leave at the same time"
    return f"{100 * setup.hostile:.0f} % hostile identities"


def recovery(results: list[Result]) -> str:
    """Return the seconds until batches are full again after nodes left."""
    if not results[0].setup.leave:
        return "–"
    known = [r.absorbed_seconds for r in results if r.absorbed_seconds is not None]
    ended = f" in {len(known)} of {len(results)} runs" if len(known) < len(results) else ""
    return spread(known, 0) + ended


def trouble_table(runs: Runs) -> str:
    """Return the runs with a disturbance."""
    return columns(
        runs.troubles,
        {
            "nodes": lambda results: f"{results[0].setup.nodes:,}",
            "disturbance": lambda results: disturbance(results[0].setup),
            "batches full, %": of_runs(lambda r: 100 * full_share(r), 1),
            "hostile of the fetched, %": of_runs(
                lambda r: 100 * r.counts.hostile_pulled / max(1, r.counts.pulled), 1
            ),
            "recovered after, s": recovery,
            "least full 30 s, %": of_runs(lambda r: 100 * r.least_fill, 0),
        },
    )


def goals(runs: Runs, by_size: dict[int, Constants]) -> list[tuple[bool, str]]:
    """Return whether each goal is met, and its figure."""
    lines = []
    most = max(runs.events)
    few = 100 if 100 in runs.events else min(runs.events)
    for size, constants in by_size.items():
        mean = lambda nodes, what, c=constants: fmean(
            getattr(x, what) for x in runs.costs(nodes, c)
        )
        growth = {what: mean(most, what) / mean(few, what) for what in ("cpu_ms", "kbit")}
        cpu, ratio, cores = (mean(most, what) for what in ("cpu_ms", "bytes", "cores"))
        kbit = mean(most, "kbit")
        found = [
            (
                max(growth.values()) <= MAX_GROWTH,
                f"cost at {most:,} ÷ at {few:,}: CPU {growth['cpu_ms']:.2f}, bytes"
                f" {growth['kbit']:.2f} (at most {MAX_GROWTH})",
            ),
            (
                cpu <= MAX_CPU_MS,
                f"{cpu:.1f} ms of CPU per group trained on, without idle connections (at most"
                f" {MAX_CPU_MS:g})",
            ),
            (
                ratio <= MAX_BYTES[size],
                f"{ratio:.2f} bytes received per byte trained on (at most {MAX_BYTES[size]:g})",
            ),
            (
                cores <= MAX_CORES and 1000 * kbit <= MAX_BITS,
                f"{100 * cores:.1f} % of a core, {kbit:.0f} kbit/s each way (at most 10 % and 100)",
            ),
        ]
        lines += [(met, f"{size} B: {figure}") for met, figure in found]
    fulls = {nodes: fmean(map(full_share, results)) for nodes, results in runs.events.items()}
    figures = ", ".join(f"{100 * full:.1f} % at {nodes:,}" for nodes, full in fulls.items())
    return [*lines, (min(fulls.values()) >= 0.95, f"batches full: {figures} (at least 95 %)")]


def main() -> None:
    parser = make_parser("scale", __doc__, quick="few nodes, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    plan = QUICK if args.quick else replace(FULL, seeds=args.seeds)
    by_size = {}
    for size in SIZES[-1:] if args.quick else SIZES:
        by_size[size] = scale_hosts.measure(size)
        note(f"{size} B: {by_size[size]}")
    runs = Runs(plan, args.processes)
    print(heading("scale: cost of a swarm of N to a member"))
    for constants in by_size.values():
        print(f"Groups of {constants.size / 1000:.1f} KB. {describe(constants)}\n")
        print(f"{cost_table(runs, constants)}\n")
    print(f"{learning_table(runs)}\n\n{trouble_table(runs)}\n")
    for met, line in goals(runs, by_size):
        print(f"* {'met' if met else 'MISSED'}: {line}")
    results = [result for each in [*runs.events.values(), *runs.troubles] for result in each]
    write_json(
        args.json,
        {
            "constants": {size: msgspec.to_builtins(one) for size, one in by_size.items()},
            "events": [summary(result) for result in results],
        },
    )


def describe(constants: Constants) -> str:
    """Return the measured costs, of both ends together."""
    named = {
        "a listing of 14 groups:": constants.listing,
        "an empty listing:": constants.empty,
        "a fetch of a group:": constants.pull,
        "one more group in the same request:": constants.more,
        "one end of an idle connection, per second:": constants.idle,
    }
    costs = (f"{name} {one.cpu_ms:.2f} ms, {one.bytes:,.0f} bytes" for name, one in named.items())
    return f"Both ends together: {'; '.join(costs)}."


def summary(result: Result) -> dict[str, Any]:
    found = asdict(result)
    found["counts"]["ages"] = fmean(result.counts.ages or [0.0])
    return found


if __name__ == "__main__":
    main()
