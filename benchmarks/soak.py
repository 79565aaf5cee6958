"""Run nodes with churn for an hour and check for growth.

Half of the nodes stay and are measured: memory, descriptors and threads of each process, tasks of
trio, bytes in the data directory. Every `--churn` seconds one of the other nodes is killed, stopped
or loses its disk, and restarts at once. After the first quarter, in which caches fill, the slope of
a series is the median of all slopes between two points (Theil and Sen). A series grows if Kendall's
test has |z| > 4 and the slope per hour exceeds a twentieth of the median. Counters must not fall,
no process of a node that stays may restart, and no error may be logged.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.lib.report import heading, make_parser, table, write_json
from tests.support.chaos.nodes import (
    NETWORK,
    PACE,
    SCORER,
    SUPERVISOR,
    TRAINER,
    ChaosNode,
    ChaosSwarm,
    swarm_of,
    until,
)
from tests.support.chaos.schedule import errors, logged_since, report_of

SAMPLE_SECONDS, POINTS = 10.0, 40
"""Interval between samples, in seconds; a short soak has at least POINTS of them."""
NAMES = {SUPERVISOR: "supervisor", NETWORK: "network", TRAINER: "trainer", SCORER: "scorer"}
GROWS, SURE = 0.05, 4.0
"""Least slope per hour as a share of the median, and least |z|, of a series that grows."""
Series = list[tuple[float, float]]
"""(seconds, value)."""


def slope(series: Sequence[tuple[float, float]]) -> float:
    """Return Theil and Sen's slope per hour: the median over all pairs."""
    slopes = [(y - x) / (t - s) for (s, x), (t, y) in itertools.combinations(series, 2) if t > s]
    return 3600 * statistics.median(slopes) if slopes else 0.0


def surety(series: Sequence[tuple[float, float]]) -> float:
    """Return z of Kendall's test of a trend (Mann 1945), corrected for ties; 0 without a change."""
    n, values = len(series), [value for _, value in sorted(series)]
    concordant = sum(
        (later > earlier) - (later < earlier)
        for earlier, later in itertools.combinations(values, 2)
    )
    ties = sum(k * (k - 1) * (2 * k + 5) for k in Counter(values).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    return (
        (concordant - (concordant > 0) + (concordant < 0)) / math.sqrt(variance)
        if variance > 0
        else 0.0
    )


def grows(series: Sequence[tuple[float, float]]) -> bool:
    middle = statistics.median(value for _, value in series)
    return surety(series) > SURE and slope(series) > GROWS * max(middle, 1.0)


class Watch:
    """Samples of a node that stays."""

    def __init__(self, node: ChaosNode) -> None:
        self.node = node
        self.series: dict[str, Series] = {}
        self.fallen: set[str] = set()
        """Counters that fell."""
        self.unanswered = 0
        self._counters: dict[str, float] = {}

    def sample(self, at: float) -> None:
        for module, name in NAMES.items():
            process = self.node.process(module)
            if process is None:
                continue
            try:
                self._add(f"{name}: MB", at, process.memory_info().rss / 1e6)
                self._add(f"{name}: descriptors", at, process.num_fds())
                self._add(f"{name}: threads", at, process.num_threads())
            except psutil.Error:
                continue
            if (tasks := self.node.tasks(process.pid)) is not None:
                self._add(f"{name}: tasks", at, tasks)
        self._add("disk: MB", at, sum(size_of(path) for path in self.node.data.rglob("*")) / 1e6)
        self._read_counters()

    def _add(self, name: str, at: float, value: float) -> None:
        self.series.setdefault(name, []).append((at, value))

    def _read_counters(self) -> None:
        try:
            with urllib.request.urlopen(f"{self.node.url}/metrics", timeout=20) as answer:
                text = answer.read().decode()
        except OSError:
            self.unanswered += 1
            return
        lines = [
            line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")
        ]
        counters = {
            name: float(value)
            for name, _, value in lines
            if name.partition("{")[0].endswith("_total")
        }
        self.fallen |= {
            name for name, value in counters.items() if value < self._counters.get(name, 0.0)
        }
        self._counters |= counters


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def churn(node: ChaosNode, swarm: ChaosSwarm, rng: random.Random) -> str:
    """Make a node leave and return; return how it left."""
    how = rng.choice(("killed", "stopped", "without its disk"))
    if how == "stopped":
        node.stop()
        node.wait(60)
    node.kill()
    if how == "without its disk":
        for path in node.data.iterdir():
            if path.name not in ("identity.key", "demo.toml"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    node.start([other.wire for other in swarm.nodes if other is not node])
    return how


def soak(directory: Path, args: argparse.Namespace) -> int:
    """Run the nodes and return the exit code."""
    rng, seconds = random.Random(args.seed), 60 * args.minutes
    with swarm_of(directory, args.nodes, small_disks=False, pace=args.pace) as swarm:
        half = (args.nodes + 1) // 2
        stay, leaving = swarm.nodes[:half], swarm.nodes[half:]
        assert until(lambda: all(report_of(node) for node in swarm.nodes), 600.0), [
            node.log()[-800:] for node in swarm.nodes
        ]
        watches, departures = [Watch(node) for node in stay], Counter[str]()
        began, over, late = time.monotonic(), threading.Event(), list[float]()

        def churn_nodes() -> None:
            while not over.wait(args.churn):
                departures[churn(rng.choice(leaving), swarm, rng)] += 1

        others = threading.Thread(target=churn_nodes)  # a stop takes up to a minute
        others.start()
        while (at := time.monotonic()) < began + seconds:
            for watch in watches:
                watch.sample(at - began)
            due = at + min(SAMPLE_SECONDS, seconds / POINTS)
            time.sleep(max(0.0, due - time.monotonic()))
            late.append(time.monotonic() - due)
        over.set()
        others.join()
        last = [report for node in stay if (report := report_of(node)) is not None]
        logged = Counter(line for node in swarm.nodes for line in errors_of(node))
        swarm.stop()
    rows, growing = series_table(watches, seconds / 4)
    assert rows, "nothing was measured"
    found = {
        "departures": dict(departures),
        "steps of nodes that stayed": [report.step for report in last],
        "seconds that samples were late, median and most": [
            round(statistics.median(late), 2),
            round(max(late), 2),
        ],
        "restarts of nodes that stayed": sum(sum(each.restarts.values()) for each in last),
        "counters that fell": sorted({name for watch in watches for name in watch.fallen}),
        "unanswered scrapes": sum(watch.unanswered for watch in watches),
        "logged errors": dict(logged),
    }
    print(heading(f"soak: {args.nodes} nodes, {args.minutes:g} minutes, churn {args.churn:g} s"))
    print(table(HEADERS, rows) + "\n")
    for name, value in found.items():
        print(f"* {name}: {value}")
    series = [dict(zip(HEADERS, row, strict=True)) for row in rows]
    write_json(args.json, {"series": series, **found})
    growth = growing and not args.quick  # in a minute caches still fill
    failed = growth or found["restarts of nodes that stayed"] or found["counters that fell"]
    return int(bool(failed or logged))


HEADERS = (
    "series, of the nodes that stay",
    "points",
    "first",
    "median",
    "last",
    "slope per hour",
    "greatest |z|",
    "grows",
)


def series_table(watches: Sequence[Watch], skip: float) -> tuple[list[list[object]], bool]:
    """Return a row for each series over all nodes, and whether any series grows.

    Args:
        skip: Uncounted seconds at the start.
    """
    rows, growing = [], False
    for name in sorted({name for watch in watches for name in watch.series}):
        found = [
            [point for point in watch.series.get(name, []) if point[0] >= skip] for watch in watches
        ]
        found = [series for series in found if len(series) >= 5]
        if not found:
            continue
        count = sum(grows(series) for series in found)
        growing |= bool(count)
        mean = lambda pick, found=found: f"{statistics.fmean(pick(series) for series in found):.1f}"
        rows.append(
            [
                name,
                sum(map(len, found)),
                mean(lambda series: series[0][1]),
                mean(lambda series: statistics.median(v for _, v in series)),
                mean(lambda series: series[-1][1]),
                f"{statistics.fmean(map(slope, found)):+.2f}",
                f"{max(abs(surety(s)) for s in found):.1f}",
                f"{count} of {len(found)}",
            ]
        )
    return rows, growing


def errors_of(node: ChaosNode) -> list[str]:
    """Return the logged errors of a node, without times and process ids."""
    lines = [
        {k: v for k, v in line.items() if k not in ("timestamp", "pid")}
        for line in logged_since(node, 0)
    ]
    return errors(lines, ())


def main() -> None:
    parser = make_parser("soak", __doc__, quick="three nodes, a minute")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--churn", type=float, default=20.0, help="seconds between two departures")
    parser.add_argument("--pace", type=float, default=PACE, help="least seconds of a step")
    parser.add_argument("--seed", type=int, default=1, help="seed of the churn")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.nodes = 1.0, 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="soak") as directory:
        sys.exit(soak(Path(directory), args))


if __name__ == "__main__":
    main()
