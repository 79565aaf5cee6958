"""How fast is a policy whole again when a stage is lost, and what does being split cost? `python -m
benchmarks.crew`

Four real nodes on this machine (supervisor, network process and trainer each) hold the embedded
policy, made eight layers deep, as four stages. Then, again and again: kill -9 of the trainer of one
stage, each in turn; the same with its own checkpoint gone, so that it comes back from a
neighbour's; of two neighbours' trainers at once; of everything that a node runs, which is started
again at once, as systemd would. (Base, CheckFree: `benchmarks.recovery`, `benchmarks.checkfree`.)
Measured from outside, ten times a second: seconds from the kill to the next step that every stage
has taken, the steps that were taken and are gone, and the source that brought the stage back.

The log of the killed node divides these seconds (MARKS): until its supervisor has seen the end,
until the next process is started, until that has loaded and is connected, until a crew has formed,
until the weights are there, until the next step.

The same nodes before the first kill, and one node that holds the same policy whole, say what the
split costs.

Goals: p95 of the seconds at most 10; at most one step lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from benchmarks import report
from swarmnode.demo.crew import crew_settings, write_model
from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.run import DemoOptions

STAGES = 4
LOOK_SECONDS = 0.1
FORM_SECONDS = 180.0
RETURN_SECONDS = 120.0
CALM_SECONDS = 5.0
"""Between two kills: the crew has taken steps again, and copies of the stages have been sent."""
KINDS = ("trainer", "disk", "neighbours", "node")
STEPS = 10
"""Of undisturbed training that are timed."""


MARKS = {
    "seen": ("restarting", "trainer"),
    "process start": ("started", "trainer"),
    "load": ("trainer connected", ""),
    "crew": ("assigned", ""),
    "restore": ("stage ready", ""),
}
"""Part of a recovery → the log event that ends it, and the process that the event names."""
FIRST_STEP = "first step"


@dataclass(frozen=True)
class Recovery:
    kind: str
    """One of KINDS."""
    stages: tuple[int, ...]
    seconds: float | None
    """From the kill to the next step of the whole crew; None if there was none within
    RETURN_SECONDS."""
    lost: int
    """Steps that had been taken and are not any more, of the stages that are held."""
    sources: tuple[str, ...]
    parts: dict[str, float] = field(default_factory=dict)
    """What of `seconds` each of MARKS took, in the first killed node."""
    load: float = 0.0
    """Mean number of processes that wanted a core in the last minute."""


@dataclass(frozen=True)
class Speed:
    arm: str
    step_seconds: float
    tokens_per_second: float | None


class Crew:
    """The nodes, by what their status pages say."""

    def __init__(self, nodes: Sequence[DemoNode]) -> None:
        self.nodes = nodes
        self._known: list[str] = []

    def start(self) -> None:
        """Each knows all before it: behind a delay they are not seen where they can be reached, and
        so nobody is told of them."""
        for node in self.nodes:
            node.start(self._known)
            self._known = [*self._known, *node.wait_for_address(time.monotonic() + FORM_SECONDS)]

    def holder(self, stage: int) -> DemoNode:
        """Raises LookupError while nobody says that it holds it."""
        return {node.view.stage: node for node in self.nodes}[stage]

    def steps(self) -> list[int]:
        """Taken, by stage. Raises LookupError while a stage is nobody's."""
        return [self.holder(stage).view.stage_step for stage in range(len(self.nodes))]

    def wait(self, true: Callable[[], bool], seconds: float) -> float | None:
        """Seconds until `true()`; None if it does not become so."""
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            for node in self.nodes:
                node.ask()
            with contextlib.suppress(LookupError):
                if true():
                    return time.monotonic() - started
            time.sleep(LOOK_SECONDS)
        return None

    def running(self) -> bool:
        return (
            all(self.holder(stage).view.stage_phase == "active" for stage in range(len(self.nodes)))
            and min(self.steps()) > 0
        )

    def lose(self, kind: str, stages: Sequence[int], patience: float = RETURN_SECONDS) -> Recovery:
        """Kill what holds `stages`, and wait for the crew to go on. Raises LookupError where one of
        them is nobody's."""
        holders = [self.holder(stage) for stage in stages]
        before, pids = max(self.steps()), [node.view.trainer_pid for node in holders]
        log, killed_at = holders[0].log_file, time.time()
        told = log.stat().st_size
        for node, pid in zip(holders, pids, strict=True):
            if kind == "node":
                node.kill()
                node.start([one for one in self._known if node.view.peer not in one])
            elif pid is not None:
                psutil.Process(pid).kill()
                if kind == "disk":
                    shutil.rmtree(node.directory / "trainer" / "stages", ignore_errors=True)
        least = before

        def again() -> bool:
            nonlocal least
            back = all(
                node.view.trainer_pid not in (None, pid)
                for node, pid in zip(holders, pids, strict=True)
            )
            steps = self.steps()
            if not back:
                least = max(least, *steps)  # a step that was under way may still have been taken
                return False
            return self.running() and min(steps) > least

        seconds = self.wait(again, patience)
        after = max(
            (node.view.stage_step for node in self.nodes if node.view.stage is not None), default=0
        )
        return Recovery(
            kind,
            tuple(stages),
            seconds,
            max(0, before - after),
            tuple(node.view.source for node in holders),
            reward_parts(log, told, killed_at, seconds),
            os.getloadavg()[0],
        )

    def speed(self, arm: str) -> Speed:
        """Over STEPS steps, of the node that leads them."""
        lead = lambda: self.holder(0) if len(self.nodes) > 1 else self.nodes[0]
        first = lead().view.step
        seconds = self.wait(lambda: lead().view.step >= first + STEPS, RETURN_SECONDS)
        tokens = lead().view.tokens_per_second
        return Speed(arm, seconds / STEPS if seconds is not None else float("nan"), tokens)

    def end(self) -> None:
        for node in self.nodes:
            node.stop()
        for node in self.nodes:
            node.wait(30.0)


def reward_parts(log: Path, told: int, killed_at: float, seconds: float | None) -> dict[str, float]:
    """Return the seconds of each part of a recovery, by the lines of `log` after byte `told`."""
    with log.open("rb") as file:
        file.seek(told)
        lines = [json.loads(line) for line in file.read().splitlines() if line.startswith(b"{")]
    parts, before = {}, killed_at
    for name, (event, process) in MARKS.items():
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
        settings = crew_settings(options, i, model)
        settings["stages"]["mode"] = mode
        made.append(DemoNode(f"node{i}", directory / f"{mode}{i}", settings))
    running = Crew(made)
    try:
        running.start()
        yield running
    finally:
        running.end()


def kills(rounds: int) -> list[tuple[str, tuple[int, ...]]]:
    """Each stage in turn, first and last included: its trainer, the whole node, the trainer with
    its disk; then neighbours."""
    trainers = [("trainer", (stage,)) for stage in range(STAGES)]
    pairs = [("neighbours", (stage, stage + 1)) for stage in range(STAGES - 1)]
    nodes = [("node", (stage,)) for stage in range(STAGES)]
    disks = [("disk", (stage,)) for stage in range(STAGES)]
    return [*trainers, *nodes, *disks, *pairs] * rounds


def measure(
    directory: Path, wanted: Sequence[tuple[str, tuple[int, ...]]], out: Path | None
) -> tuple[list[Speed], list[Recovery]]:
    """Return all results; those that are there are written to `out` after every kill."""
    speeds, recoveries = [], []
    with crew(directory, 1, "off") as whole:
        whole.wait(lambda: whole.nodes[0].view.step > 0, FORM_SECONDS)
        speeds.append(whole.speed("whole, one node"))
    with crew(directory, STAGES, "always") as split:
        if split.wait(split.running, FORM_SECONDS) is None:
            raise SystemExit(
                f"the crew did not form: {[node.last_words() for node in split.nodes]}"
            )
        speeds.append(split.speed(f"in {STAGES} stages"))
        for kind, stages in wanted:
            split.wait(split.running, RETURN_SECONDS)
            time.sleep(CALM_SECONDS)
            split.wait(split.running, RETURN_SECONDS)
            recoveries.append(split.lose(kind, stages))
            print(recoveries[-1], flush=True)
            if out is not None:
                write(out, speeds, recoveries)
    return speeds, recoveries


def write(out: Path, speeds: Sequence[Speed], recoveries: Sequence[Recovery]) -> None:
    results = {
        "speeds": [asdict(s) for s in speeds],
        "recoveries": [asdict(r) for r in recoveries],
    }
    report.write_json(out, results)


def part_rows(recoveries: Sequence[Recovery]) -> list[list[str]]:
    """Median and p95 of each part, of the trainers that were killed alone."""
    mine = [r for r in recoveries if r.kind in ("trainer", "disk") and r.seconds is not None]
    out = []
    for name in (*MARKS, FIRST_STEP):
        seconds = [r.parts[name] for r in mine if name in r.parts]
        if seconds:
            p50, p95 = statistics.median(seconds), report.percentile(seconds, 0.95)
            out.append([name, str(len(seconds)), f"{p50:.2f}", f"{p95:.2f}"])
    return out


def rows(recoveries: Sequence[Recovery]) -> list[list[str]]:
    out = []
    for kind in KINDS:
        mine = [r for r in recoveries if r.kind == kind]
        if not mine:
            continue
        seconds = [r.seconds if r.seconds is not None else float("inf") for r in mine]
        sources = sorted({source for r in mine for source in r.sources})
        counted = ", ".join(
            f"{source or 'none'} {sum(r.sources.count(source) for r in mine)}" for source in sources
        )
        p50, p95 = statistics.median(seconds), report.percentile(seconds, 0.95)
        out.append(
            [
                kind,
                str(len(mine)),
                f"{p50:.1f}",
                f"{p95:.1f}",
                f"{max(seconds):.1f}",
                str(max(r.lost for r in mine)),
                counted,
            ]
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two kills")
    parser.add_argument(
        "--rounds", type=int, default=2, help="how often each of the fifteen kills is done"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="only these kinds of kills"
    )
    parser.add_argument(
        "--distance", action="store_true", help="nodes that are apart, see benchmarks.crew_distance"
    )
    parser.add_argument(
        "--scaled",
        action="store_true",
        help="7 B, with everything sixty times smaller, see benchmarks.crew_scaled",
    )
    parser.add_argument(
        "--rank", type=int, default=0, help="with --scaled: of an adapter; 0 trains all weights"
    )
    parser.add_argument(
        "--generation",
        action="store_true",
        help="sampling from a whole copy, see benchmarks.crew_copies",
    )
    parser.add_argument(
        "--codecs",
        action="store_true",
        help="int8 against bfloat16 between stages, see benchmarks.crew_codecs",
    )
    parser.add_argument(
        "--members",
        action="store_true",
        help="what members' samples bring, see benchmarks.crew_members",
    )
    parser.add_argument(
        "--copies",
        action="store_true",
        help="with --distance, --scaled: the head samples from a whole copy",
    )
    parser.add_argument(
        "--milliseconds",
        type=int,
        nargs="+",
        help="with --distance: only these; with --scaled: the first (50)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="--distance (5), --scaled (2), --generation, --codecs (120), --members (200)",
    )
    parser.add_argument(
        "--seeds", type=int, default=4, help="with --generation, --codecs, --members"
    )
    parser.add_argument(
        "--losses", type=int, default=3, help="with --distance, --scaled: stages that are lost"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.scaled:
        from benchmarks import crew_scaled

        crew_scaled.run(
            (options.milliseconds or [50])[0],
            options.steps or 2,
            options.losses,
            options.rank,
            options.copies,
        )
        return
    if options.distance:
        from benchmarks import crew_distance  # late: it is about this module's crews

        crew_distance.run(
            options.milliseconds or crew_distance.MILLISECONDS,
            options.steps or 5,
            options.losses,
            options.copies,
            options.json,
        )
        return
    if options.members:
        from benchmarks import crew_members

        crew_members.run(options.steps or 200, options.seeds)
        return
    if options.codecs:
        from benchmarks import crew_codecs

        crew_codecs.run(options.seeds, options.steps or 120, options.json)
        return
    if options.generation:
        from benchmarks import crew_copies

        crew_copies.run(options.seeds, options.steps or 120, options.json)
        return
    with tempfile.TemporaryDirectory(prefix="swarmnode-crew-") as directory:
        wanted = [k for k in kills(options.rounds) if k[0] in options.kinds]
        if options.quick:
            wanted = [("trainer", (2,)), ("disk", (1,))]
        speeds, recoveries = measure(Path(directory), wanted, options.json)
    print(report.heading("crew: a lost stage, and what being split costs"))
    headers = [
        "killed",
        "times",
        "s, p50",
        "s, p95",
        "s, most",
        "steps lost, most",
        "sources taken",
    ]
    print(report.table(headers, rows(recoveries)))
    print()
    print(report.table(["a trainer's seconds", "kills", "p50", "p95"], part_rows(recoveries)))
    print()
    base = speeds[0].step_seconds
    print(
        report.table(
            ["arm", "s per step", "of whole"],
            [[s.arm, f"{s.step_seconds:.2f}", f"{base / s.step_seconds:.2f}"] for s in speeds],
        )
    )


if __name__ == "__main__":
    main()
