"""Does anything grow? `python -m benchmarks.soak [--minutes 60] [--nodes 8] [--churn 20]`: real
nodes for an hour while others come and go.

The first half of the nodes stays and is measured: memory, descriptors and threads of each process,
tasks of trio, bytes in the data directory. Of the other half one is killed, asked to end or loses
its disk every `--churn` seconds, and is started again at once. After the first quarter, in which
caches fill, the slope of each series is the median of all slopes between two of its points (Theil
and Sen),
and a trend is what Kendall's test does not take for chance (|z| > 4) and an hour of which is more
than a twentieth of the median.
Counters must not fall, nobody who stays may be started again, and every error that is logged has to
be one that churn explains.
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
from tests.support.chaos.schedule import errors, logged_since, now

SAMPLE_SECONDS, POINTS = 10.0, 40
"""Between two looks; in a short soak so much less that there are so many."""
NAMES = {SUPERVISOR: "supervisor", NETWORK: "network", TRAINER: "trainer", SCORER: "scorer"}
GROWS, SURE = 0.05, 4.0
"""Share of the median in an hour, and |z| of Kendall's test, from which on a slope is a trend."""
EXPLAINED = ()
"""Errors that neighbours which come and go explain, as regular expressions. None does: a
neighbour's end is no error."""
Series = list[tuple[float, float]]
"""(seconds, value)."""


def slope(series: Sequence[tuple[float, float]]) -> float:
    """Theil and Sen's: the median over all pairs, per hour."""
    slopes = [(y - x) / (t - s) for (s, x), (t, y) in itertools.combinations(series, 2) if t > s]
    return 3600 * statistics.median(slopes) if slopes else 0.0


def surety(series: Sequence[tuple[float, float]]) -> float:
    """z of Kendall's test of a trend (Mann 1945), ties corrected for; 0 of a series without any
    change."""
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
    """Of one node that stays."""

    def __init__(self, node: ChaosNode) -> None:
        self.node = node
        self.series: dict[str, Series] = {}
        self.fallen: set[str] = set()
        """Counters that were less than before."""
        self.unanswered = 0
        self._counters: dict[str, float] = {}

    def look(self, at: float) -> None:
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
        self._look_at_counters()

    def _add(self, name: str, at: float, value: float) -> None:
        self.series.setdefault(name, []).append((at, value))

    def _look_at_counters(self) -> None:
        try:
            with urllib.request.urlopen(f"{self.node.url}/metrics", timeout=20) as answer:
                text = answer.read().decode()
        except OSError:
            self.unanswered += 1
            return
        told = [
            line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")
        ]
        counters = {
            name: float(value)
            for name, _, value in told
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
    """One that leaves and comes back; how."""
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


def soak(directory: Path, count: int, seconds: float, every: float, pace: float, seed: int) -> int:
    rng = random.Random(seed)
    with swarm_of(directory, count, small_disks=False, pace=pace) as swarm:
        stay, come_and_go = swarm.nodes[: (count + 1) // 2], swarm.nodes[(count + 1) // 2 :]
        assert until(lambda: all(now(node) for node in swarm.nodes), 600.0), [
            node.log()[-800:] for node in swarm.nodes
        ]
        watches, hows = [Watch(node) for node in stay], Counter[str]()
        began, over, late = time.monotonic(), threading.Event(), list[float]()

        def come_and_gone() -> None:
            while not over.wait(every):
                hows[churn(rng.choice(come_and_go), swarm, rng)] += 1

        others = threading.Thread(target=come_and_gone)  # to stop one takes up to a minute
        others.start()
        while (at := time.monotonic()) < began + seconds:
            for watch in watches:
                watch.look(at - began)
            due = at + min(SAMPLE_SECONDS, seconds / POINTS)
            time.sleep(max(0.0, due - time.monotonic()))
            late.append(time.monotonic() - due)
        over.set()
        others.join()
        last = [now(node) for node in stay]
        unexplained = Counter(line for node in swarm.nodes for line in told(node))
        swarm.stop()
    print(
        heading(
            f"soak: {count} nodes, {seconds / 60:.0f} minutes, one comes and goes every"
            f" {every:.0f} s"
        )
    )
    print(
        f"Came and went: {', '.join(f'{how} {times}' for how, times in sorted(hows.items()))}."
        " Steps of those that stayed:"
        f" {', '.join(str(said.step if said else None) for said in last)}.\n"
    )
    waited = f"{statistics.median(late):.2f} s in the median, {max(late):.1f} s at most"
    print(f"What the machine makes a process wait: this one was late to a look by {waited}.\n")
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
            [f"Errors that nothing explains: {unexplained.total()}."]
            + [f"  {n} × {line}" for line, n in unexplained.items()]
        )
    )
    return 1 if bad or restarted or fallen or unexplained else 0


def report(watches: Sequence[Watch], skip: float) -> tuple[list[list[object]], bool]:
    """A row for each series, its nodes together; and whether any of them grows. skip: seconds at
    the beginning that do not count."""
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


def told(node: ChaosNode) -> list[str]:
    """Its unexplained errors, what differs from one time to the next left out."""
    lines = [
        {k: v for k, v in line.items() if k not in ("timestamp", "pid")}
        for line in logged_since(node, 0)
    ]
    return errors(lines, EXPLAINED)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument(
        "--churn", type=float, default=20.0, help="seconds between two that come and go"
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=PACE,
        help="seconds that a step takes at the least; more where CPU is scarce",
    )
    parser.add_argument("--seed", type=int, default=1, help="of who, when and how")
    parser.add_argument("--quick", action="store_true", help="three nodes, a minute")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.nodes = 1.0, 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="soak") as directory:
        sys.exit(
            soak(Path(directory), args.nodes, 60 * args.minutes, args.churn, args.pace, args.seed)
        )


if __name__ == "__main__":
    main()
