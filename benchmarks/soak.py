"""Does anything grow over an hour? `python -m benchmarks.soak [--minutes 60] [--nodes 8]`

Half of the nodes stay and are measured: memory, descriptors and threads of each process, tasks of
trio, bytes in the data directory. Every `--churn` seconds one of the others is killed, stopped or
loses its disk, and is restarted at once. After the first quarter, in which caches fill, the slope
of a series is the median of all slopes between two points (Theil and Sen). A series grows if
Kendall's test is sure (|z| > 4) and the slope of an hour exceeds a twentieth of the median.
Counters must not fall, no process of a node that stays may restart, and no error may be logged.
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

from benchmarks.report import heading, table
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


def soak(
    directory: Path, count: int, seconds: float, every: float, pace: float, seed: int, judged: bool
) -> int:
    """Run the nodes; return the exit code. judged: growth makes it 1."""
    rng = random.Random(seed)
    with swarm_of(directory, count, small_disks=False, pace=pace) as swarm:
        stay, come_and_go = swarm.nodes[: (count + 1) // 2], swarm.nodes[(count + 1) // 2 :]
        assert until(lambda: all(report_of(node) for node in swarm.nodes), 600.0), [
            node.log()[-800:] for node in swarm.nodes
        ]
        watches, hows = [Watch(node) for node in stay], Counter[str]()
        began, over, late = time.monotonic(), threading.Event(), list[float]()

        def churn_nodes() -> None:
            while not over.wait(every):
                hows[churn(rng.choice(come_and_go), swarm, rng)] += 1

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
        last = [report_of(node) for node in stay]
        logged = Counter(line for node in swarm.nodes for line in errors_of(node))
        swarm.stop()
    print(heading(f"soak: {count} nodes, {seconds / 60:.0f} minutes, churn every {every:.0f} s"))
    print(
        f"Churn: {', '.join(f'{how} {times}' for how, times in sorted(hows.items()))}."
        " Steps of those that stayed:"
        f" {', '.join(str(said.step if said else None) for said in last)}.\n"
    )
    waited = f"{statistics.median(late):.2f} s in the median, {max(late):.1f} s at most"
    print(f"Lateness of this process's samples, a measure of the load: {waited}.\n")
    rows, bad = report(watches, seconds / 4)
    assert rows, "nothing was measured"
    print(
        table(
            [
                "series, of the nodes that stay",
                "points",
                "first",
                "median",
                "last",
                "slope per hour",
                "greatest |z|",
                "grows",
            ],
            rows,
        )
    )
    restarted = sum(sum(said.restarts.values()) for said in last if said)
    fallen = sorted({name for watch in watches for name in watch.fallen})
    unanswered = sum(watch.unanswered for watch in watches)
    print(
        f"\nRestarts of processes that stayed: {restarted}. Counters that fell: {fallen or 'none'}."
        f" Unanswered scrapes: {unanswered}."
    )
    print(
        "\n".join(
            [f"Logged errors: {logged.total()}."]
            + [f"  {n} × {line}" for line, n in logged.items()]
        )
    )
    return 1 if (bad and judged) or restarted or fallen or logged else 0


def report(watches: Sequence[Watch], skip: float) -> tuple[list[list[object]], bool]:
    """Return a row for each series over all nodes, and whether any grows. skip: uncounted seconds
    at the start."""
    rows, bad = [], False
    for name in sorted({name for watch in watches for name in watch.series}):
        found = [
            [point for point in watch.series.get(name, []) if point[0] >= skip] for watch in watches
        ]
        found = [series for series in found if len(series) >= 5]
        if not found:
            continue
        growing = sum(grows(series) for series in found)
        bad |= bool(growing)
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
                f"{growing} of {len(found)}",
            ]
        )
    return rows, bad


def errors_of(node: ChaosNode) -> list[str]:
    """Return the logged errors of a node, without times and process ids."""
    lines = [
        {k: v for k, v in line.items() if k not in ("timestamp", "pid")}
        for line in logged_since(node, 0)
    ]
    return errors(lines, ())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--churn", type=float, default=20.0, help="seconds between two departures")
    parser.add_argument(
        "--pace",
        type=float,
        default=PACE,
        help="least seconds of a step; more where CPU is scarce",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the churn")
    parser.add_argument("--quick", action="store_true", help="three nodes, a minute")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.nodes = 1.0, 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="soak") as directory:
        sys.exit(
            soak(
                Path(directory),
                args.nodes,
                60 * args.minutes,
                args.churn,
                args.pace,
                args.seed,
                not args.quick,  # in a minute caches still fill
            )
        )


if __name__ == "__main__":
    main()
