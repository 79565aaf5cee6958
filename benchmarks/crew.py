"""Measure the recovery of a crew from the loss of a stage, and the cost of being split.

Four whole nodes on this machine (supervisor, network process and trainer each) hold the embedded
policy, made eight layers deep, as four stages. Each of these is killed with SIGKILL, repeatedly:

    trainer      the trainer of each stage in turn
    node         all processes of a node, which is restarted at once, as systemd would
    disk         a trainer whose own checkpoint is deleted, so that a neighbour's is restored
    neighbours   the trainers of two neighbours at the same time

Measured from outside, ten times a second: seconds from the kill to the next step of all stages,
lost steps, and the source of the restored stage. The log of the killed node divides these seconds
(`MARKS`). The same nodes before the first kill, and one node that holds the whole policy, show the
cost of the split.

Goals: p95 at most 10 s; at most one step lost.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

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
from benchmarks.lib.report import columns, heading, make_parser, percentile, table, write_json
from swarmnode.demo.crew import crew_settings, write_model
from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.run import DemoOptions

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
    """Return all results. After every kill, write the results so far to `out`."""
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
        name: [r.parts[name] for r in mine if name in r.parts] for name in (*MARKS, FIRST_STEP)
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
