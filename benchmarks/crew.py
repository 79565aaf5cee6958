"""How soon does a crew continue after the loss of a stage, and what does being split cost?
`python -m benchmarks.crew [--quick] [--rounds N] [--kinds …]`

Four whole nodes on this machine (supervisor, network process and trainer each) hold the embedded
policy, made eight layers deep, as four stages. Each of these is killed with -9, again and again:

    trainer      the trainer of each stage in turn
    node         everything of a node, which is started again at once, as systemd would
    disk         a trainer whose own checkpoint is deleted, so that a neighbour's restores it
    neighbours   the trainers of two neighbours at once

Measured from outside, ten times a second: seconds from the kill to the next step of all stages,
lost steps, and the source of the restored stage. The log of the killed node divides these seconds
(`MARKS`). The same nodes before the first kill, and one node that holds the policy whole, show what
the split costs.

Goals: p95 at most 10 s; at most one step lost.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import report
from benchmarks.lib.crews import (
    FIRST_STEP,
    FORM_SECONDS,
    MARKS,
    RETURN_SECONDS,
    STAGES,
    Crew,
    Recovery,
    Speed,
)
from swarmnode.demo.crew import crew_settings, write_model
from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.swarm import DemoOptions

CALM_SECONDS = 5.0
"""Time between two kills, in which neighbours store checkpoints of the stages."""
KINDS = ("trainer", "disk", "neighbours", "node")


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
    """Return (kind, stages) of `rounds` rounds of fifteen kills."""
    trainers = [("trainer", (stage,)) for stage in range(STAGES)]
    pairs = [("neighbours", (stage, stage + 1)) for stage in range(STAGES - 1)]
    nodes = [("node", (stage,)) for stage in range(STAGES)]
    disks = [("disk", (stage,)) for stage in range(STAGES)]
    return [*trainers, *nodes, *disks, *pairs] * rounds


def measure(
    directory: Path, wanted: Sequence[tuple[str, tuple[int, ...]]], out: Path | None
) -> tuple[list[Speed], list[Recovery]]:
    """Return all results, and write the present ones to `out` after every kill."""
    speeds, recoveries = [], []
    with crew(directory, 1, "off") as whole:
        whole.wait(lambda: whole.nodes[0].view.step > 0, FORM_SECONDS)
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
    """Return median and p95 of each part, of trainers that were killed alone."""
    mine = [r for r in recoveries if r.kind in ("trainer", "disk") and r.seconds is not None]
    out = []
    for name in (*MARKS, FIRST_STEP):
        seconds = [r.parts[name] for r in mine if name in r.parts]
        if seconds:
            p50, p95 = statistics.median(seconds), report.percentile(seconds, 0.95)
            out.append([name, str(len(seconds)), f"{p50:.2f}", f"{p95:.2f}"])
    return out


def kill_rows(recoveries: Sequence[Recovery]) -> list[list[str]]:
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crew",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two kills")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of fifteen kills")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="only these kills")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    wanted = [kill for kill in kills(options.rounds) if kill[0] in options.kinds]
    if options.quick:
        wanted = [("trainer", (2,)), ("disk", (1,))]
    with tempfile.TemporaryDirectory(prefix="swarmnode-crew-") as directory:
        speeds, recoveries = measure(Path(directory), wanted, options.json)
    print(report.heading("crew: a lost stage, and what being split costs"))
    headers = ["killed", "times", "s, p50", "s, p95", "s, most", "steps lost, most", "sources"]
    print(report.table(headers, kill_rows(recoveries)))
    print()
    print(report.table(["part, s", "kills", "p50", "p95"], part_rows(recoveries)))
    print()
    base = speeds[0].step_seconds
    rows = [[s.arm, f"{s.step_seconds:.2f}", f"{base / s.step_seconds:.2f}"] for s in speeds]
    print(report.table(["arm", "s per step", "of whole"], rows))


if __name__ == "__main__":
    main()
