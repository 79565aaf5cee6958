"""Measure the recovery of a crew from the loss of a stage, and the cost of being split.

Four whole nodes on this machine (supervisor, network process and trainer each) hold the embedded
policy, made eight layers deep, as four stages. Each of these is killed with SIGKILL, repeatedly:

    trainer      the trainer of each stage in turn
    node         all processes of a node, which is restarted at once, as systemd would
    disk         a trainer whose own checkpoint is deleted, so that a neighbour's is restored
    neighbours   the trainers of two neighbours at the same time

Measured from outside, ten times a second: seconds from the kill to the next step of all stages,
lost steps, and the source of the restored stage. The log of the killed node divides these seconds
(`PARTS`). The same nodes before the first kill, and one node that holds the whole policy, show the
cost of the split.

Goals: p95 at most 10 s; at most one step lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from benchmarks.lib.report import columns, heading, make_parser, percentile, table, write_json
from swarmnode.demo.crew import crew_settings, is_active, stage_of, steps_of, write_model
from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.swarm import DemoOptions

STAGES = 4
POLL_SECONDS = 0.1
FORM_SECONDS = 180.0
RETURN_SECONDS = 120.0
STEPS = 10
"""Undisturbed steps that are timed."""

PARTS = {
    "seen": ("restarting", "trainer"),
    "process start": ("started", "trainer"),
    "load": ("trainer connected", ""),
    "crew": ("assigned", ""),
    "restore": ("stage ready", ""),
}
"""Part of a recovery → the log event that ends it, and the process that the event names."""
FIRST_STEP = "first step"
CALM_SECONDS = 5.0
"""Time between two kills, in which neighbours store checkpoints of the stages."""
KINDS = ("trainer", "disk", "neighbours", "node")


@dataclass(frozen=True)
class Recovery:
    kind: str
    """trainer, disk, neighbours or node."""
    stages: tuple[int, ...]
    seconds: float | None
    """Seconds from the kill to the crew's next step; None if there was none within
    RETURN_SECONDS."""
    lost: int
    """Steps that had been taken before the kill and are gone."""
    sources: tuple[str, ...]
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each of PARTS, in the first killed node."""
    load: float = 0.0
    """Load average of the last minute."""


@dataclass(frozen=True)
class Speed:
    arm: str
    step_seconds: float
    tokens_per_second: float | None


class Crew:
    """The nodes of a crew."""

    def __init__(self, nodes: Sequence[DemoNode]) -> None:
        self.nodes = nodes
        self._known: list[str] = []

    def start(self) -> None:
        """Start the nodes. Each gets the addresses of the nodes before it."""
        for node in self.nodes:
            node.start(self._known)
            self._known = [*self._known, *node.wait_for_address(time.monotonic() + FORM_SECONDS)]

    def holder(self, stage: int) -> DemoNode:
        """Return the node that holds `stage`. Raises LookupError while no node does."""
        return {stage_of(node): node for node in self.nodes}[stage]

    def steps(self) -> list[int]:
        """Return the steps taken, by stage. Raises LookupError while a stage has no holder."""
        return [steps_of(self.holder(stage).status) for stage in range(len(self.nodes))]

    def wait(self, true: Callable[[], bool], seconds: float) -> float | None:
        """Return the seconds until `true()`; None after `seconds`."""
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            for node in self.nodes:
                node.poll()
            with contextlib.suppress(LookupError):
                if true():
                    return time.monotonic() - started
            time.sleep(POLL_SECONDS)
        return None

    def running(self) -> bool:
        return (
            all(is_active(self.holder(stage)) for stage in range(len(self.nodes)))
            and min(self.steps()) > 0
        )

    def lose(self, kind: str, stages: Sequence[int]) -> Recovery:
        """Kill the holders of `stages` and wait until the crew continues.

        Raises:
            LookupError: A stage has no holder.
        """
        holders = [self.holder(stage) for stage in stages]
        before, pids = max(self.steps()), [node.status.trainer.pid for node in holders]
        log, killed_at = holders[0].log_file, time.time()
        size = log.stat().st_size
        for node, pid in zip(holders, pids, strict=True):
            if kind == "node":
                node.kill()
                node.start([one for one in self._known if node.status.node.peer not in one])
            elif pid is not None:
                psutil.Process(pid).kill()
                if kind == "disk":
                    shutil.rmtree(node.directory / "trainer" / "stages", ignore_errors=True)
        least = before

        def continues() -> bool:
            nonlocal least
            back = all(
                node.status.trainer.pid not in (None, pid)
                for node, pid in zip(holders, pids, strict=True)
            )
            steps = self.steps()
            if not back:
                least = max(least, *steps)  # a step under way may still complete
                return False
            return self.running() and min(steps) > least

        seconds = self.wait(continues, RETURN_SECONDS)
        after = max(
            (steps_of(node.status) for node in self.nodes if stage_of(node) is not None), default=0
        )
        return Recovery(
            kind,
            tuple(stages),
            seconds,
            max(0, before - after),
            tuple(own.source if (own := node.status.stages.own) else "" for node in holders),
            parts_of(log, size, killed_at, seconds),
            os.getloadavg()[0],
        )

    def speed(self, arm: str) -> Speed:
        """Return the speed over STEPS steps of the node that leads the crew."""
        lead = lambda: self.holder(0) if len(self.nodes) > 1 else self.nodes[0]
        first = lead().report.step
        seconds = self.wait(lambda: lead().report.step >= first + STEPS, RETURN_SECONDS)
        own = lead().status.stages.own
        tokens = own.tokens_per_second if own is not None else None
        return Speed(arm, seconds / STEPS if seconds is not None else float("nan"), tokens)

    def end(self) -> None:
        for node in self.nodes:
            node.stop()
        for node in self.nodes:
            node.wait(30.0)


def parts_of(log: Path, size: int, killed_at: float, seconds: float | None) -> dict[str, float]:
    """Return the seconds of each part of a recovery, from the lines of `log` after byte `size`."""
    with log.open("rb") as file:
        file.seek(size)
        lines = [json.loads(line) for line in file.read().splitlines() if line.startswith(b"{")]
    parts, before = {}, killed_at
    for name, (event, process) in PARTS.items():
        times = (
            datetime.fromisoformat(line["timestamp"]).timestamp()
            for line in lines
            if line["event"] == event and line.get("process", "") == process
        )
        if (at := next((t for t in times if t >= before), None)) is not None:
            parts[name], before = at - before, at
    if seconds is not None:
        parts[FIRST_STEP] = killed_at + seconds - before
    return parts


@contextlib.contextmanager
def crew(directory: Path, nodes: int, mode: str) -> Iterator[Crew]:
    options, model = DemoOptions(nodes=nodes, http_port=0), write_model(directory / "model")
    made = []
    for i in range(nodes):
        settings = crew_settings(options, i, model, ["anyone"])
        settings["stages"]["mode"] = mode
        made.append(DemoNode(f"node{i}", directory / f"{mode}{i}", settings))
    running = Crew(made)
    try:
        running.start()
        yield running
    finally:
        running.end()


def kills(rounds: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return (kind, stages) of `rounds` rounds of fifteen kills."""
    trainers = [("trainer", (stage,)) for stage in range(STAGES)]
    pairs = [("neighbours", (stage, stage + 1)) for stage in range(STAGES - 1)]
    nodes = [("node", (stage,)) for stage in range(STAGES)]
    disks = [("disk", (stage,)) for stage in range(STAGES)]
    return [*trainers, *nodes, *disks, *pairs] * rounds


def measure(
    directory: Path, wanted: Sequence[tuple[str, tuple[int, ...]]], out: Path | None
) -> tuple[list[Speed], list[Recovery]]:
    """Return all results. After every kill, write the results so far to `out`."""
    speeds, recoveries = [], []
    with crew(directory, 1, "off") as whole:
        whole.wait(lambda: whole.nodes[0].report.step > 0, FORM_SECONDS)
        speeds.append(whole.speed("whole, one node"))
    with crew(directory, STAGES, "always") as split:
        if split.wait(split.running, FORM_SECONDS) is None:
            raise SystemExit(
                f"the crew did not form: {[node.last_log_line() for node in split.nodes]}"
            )
        speeds.append(split.speed(f"in {STAGES} stages"))
        for kind, stages in wanted:
            split.wait(split.running, RETURN_SECONDS)
            time.sleep(CALM_SECONDS)
            split.wait(split.running, RETURN_SECONDS)
            recoveries.append(split.lose(kind, stages))
            print(recoveries[-1], flush=True)
            results = {
                "speeds": [asdict(s) for s in speeds],
                "recoveries": [asdict(r) for r in recoveries],
            }
            write_json(out, results)
    return speeds, recoveries


def part_table(recoveries: Sequence[Recovery]) -> str:
    """Return the seconds of each part of a recovery, of trainers that were killed alone."""
    mine = [r for r in recoveries if r.kind in ("trainer", "disk") and r.seconds is not None]
    parts = {
        name: [r.parts[name] for r in mine if name in r.parts] for name in (*PARTS, FIRST_STEP)
    }
    return columns(
        [(name, seconds) for name, seconds in parts.items() if seconds],
        {
            "part, s": lambda part: part[0],
            "kills": lambda part: len(part[1]),
            "p50": lambda part: f"{statistics.median(part[1]):.2f}",
            "p95": lambda part: f"{percentile(part[1], 0.95):.2f}",
        },
    )


def kill_table(recoveries: Sequence[Recovery]) -> str:
    by_kind = {kind: [r for r in recoveries if r.kind == kind] for kind in KINDS}
    seconds = lambda kind: [
        r.seconds if r.seconds is not None else float("inf") for r in by_kind[kind]
    ]
    sources = lambda kind: Counter(source or "none" for r in by_kind[kind] for source in r.sources)
    return columns(
        [kind for kind in KINDS if by_kind[kind]],
        {
            "killed": str,
            "times": lambda kind: len(by_kind[kind]),
            "s, p50": lambda kind: f"{statistics.median(seconds(kind)):.1f}",
            "s, p95": lambda kind: f"{percentile(seconds(kind), 0.95):.1f}",
            "s, most": lambda kind: f"{max(seconds(kind)):.1f}",
            "steps lost, most": lambda kind: max(r.lost for r in by_kind[kind]),
            "sources": lambda kind: ", ".join(f"{s} {n}" for s, n in sorted(sources(kind).items())),
        },
    )


def main() -> None:
    parser = make_parser("crew", __doc__, quick="two kills")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of fifteen kills")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="only these kills")
    args = parser.parse_args()
    wanted = [kill for kill in kills(args.rounds) if kill[0] in args.kinds]
    if args.quick:
        wanted = [("trainer", (2,)), ("disk", (1,))]
    with tempfile.TemporaryDirectory(prefix="swarmnode-crew-") as directory:
        speeds, recoveries = measure(Path(directory), wanted, args.json)
    print(heading("crew: recovery of a lost stage, and cost of the split"))
    print(f"{kill_table(recoveries)}\n\n{part_table(recoveries)}\n")
    base = speeds[0].step_seconds
    rows = [[s.arm, f"{s.step_seconds:.2f}", f"{base / s.step_seconds:.2f}"] for s in speeds]
    print(table(["arm", "s per step", "of whole"], rows))


if __name__ == "__main__":
    main()
