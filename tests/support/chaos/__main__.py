"""`python -m tests.support.chaos` plays schedules in turn and prints a table of the cost of each
fault. A failure prints its replay command."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.report import heading, percentile, table
from tests.support.chaos.faults import BY_NAME, FAULTS
from tests.support.chaos.schedule import GOAL_SECONDS, ScheduleResult, play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="this schedule alone")
    parser.add_argument("--first", type=int, help="first schedule, instead of fresh ones")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="leave out the long faults")
    parser.add_argument(
        "--faults",
        nargs="*",
        default=[],
        choices=sorted(BY_NAME),
        metavar="FAULT",
        help="these alone",
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that file systems are unmounted
    fresh = random.SystemRandom().randrange(2**31)
    first = next(one for one in (args.seed, args.first, fresh) if one is not None)
    seeds = range(first, first + (1 if args.seed is not None else args.count))
    return schedules(seeds, args.nodes, short=args.short, names=args.faults)


def schedules(
    seeds: Sequence[int], nodes: int, *, short: bool = False, names: Sequence[str] = ()
) -> int:
    """Play the schedules and print the table.

    Args:
        names: Names of faults, all if empty.
    """
    all_played = []
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="chaos") as directory:
            played = play(
                seed, Path(directory), nodes=nodes, long=not short, names=names, tell=print_line
            )
        all_played.append(played)
        if played.problems:
            print_line(
                f"  replay: python -m tests.support.chaos --seed {seed} --nodes {nodes}"
                + (" --short" if short else "")
            )
    print(
        "\n"
        + heading(f"{len(all_played)} schedules of faults, seeds from {seeds[0]}, {nodes} nodes")
    )
    print(table_of(all_played), flush=True)
    return 1 if any(played.problems for played in all_played) else 0


def table_of(all_played: Sequence[ScheduleResult]) -> str:
    """Return a table of recovery times by fault."""
    rows = []
    for fault in FAULTS:
        outcomes = [
            one for played in all_played for one in played.outcomes if one.fault == fault.name
        ]
        seconds = [one.seconds if one.seconds is not None else float("inf") for one in outcomes]
        if outcomes:
            times = [
                f"{value:.1f}"
                for value in (percentile(seconds, 0.5), percentile(seconds, 0.95), max(seconds))
            ]
            within, problems = (
                sum(one <= GOAL_SECONDS for one in seconds),
                sum(bool(one.problems) for one in outcomes),
            )
            rows.append([fault.name, len(outcomes), *times, within, problems])
    return table(
        [
            "fault",
            "times",
            "p50, s",
            "p95, s",
            "longest, s",
            f"within {GOAL_SECONDS:.0f} s",
            "with a problem",
        ],
        rows,
    )


def print_line(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
