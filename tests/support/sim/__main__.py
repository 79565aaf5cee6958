"""`python -m tests.support.sim` runs seeds in turn until the time is up. A failing seed prints its
replay command."""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from pathlib import Path

from tests.support.sim.hostile import KINDS, NOT_DRAWN
from tests.support.sim.schedule import draw
from tests.support.sim.world import Ended, simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run one swarm and print its schedule")
    parser.add_argument("--first", type=int, help="first seed, instead of fresh ones")
    parser.add_argument("--count", type=int, help="number of seeds")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of the run, unless a count is given"
    )
    parser.add_argument("--nodes", type=int, help="number of nodes, instead of the seed's")
    parser.add_argument(
        "--foes",
        nargs="*",
        default=[],
        choices=(*KINDS, *NOT_DRAWN),
        help="one hostile node of each kind, and no others",
    )
    parser.add_argument("--history", type=Path, help="write what happened here")
    args = parser.parse_args()
    if args.seed is not None:
        lines: list[str] = []
        schedule = draw(args.seed, args.nodes, args.foes)
        counts = (
            f"{len(schedule.places)} nodes, {len(schedule.foes)} hostile, {len(schedule.faults)}"
            " faults"
        )
        print(f"seed {args.seed}: {counts}, calm from {schedule.calm_from:.0f} s")
        for foe in schedule.foes:
            print(f"  {foe.name} {foe.kind} at {foe.address}")
        for fault in schedule.faults:
            print(f"  {fault}")
        ended = simulate(schedule, lines)
        if args.history:
            args.history.write_text("".join(f"{line}\n" for line in lines))
        print(f"history {ended.digest}, {ended.events} events")
        _report(ended, args.nodes)
        print(
            f"{ended.simulated:.0f} s simulated in {ended.cpu:.1f} s of CPU; whole after"
            f" {ended.whole_after:.0f} s, {ended.steps} steps, {ended.used} groups of peers,"
            f" {ended.averaged} averages"
        )
        return 1 if ended.problem else 0
    first = args.first if args.first is not None else random.SystemRandom().randrange(2**31)
    return _many(first, args.count, args.seconds, args.nodes)


def _many(first: int, count: int | None, seconds: float, nodes: int | None) -> int:
    began, ended = time.monotonic(), list[Ended]()
    with contextlib.suppress(KeyboardInterrupt):
        while len(ended) < count if count is not None else time.monotonic() - began < seconds:
            ended.append(simulate(draw(first + len(ended), nodes)))
            _report(ended[-1], nodes)
    took, failed = time.monotonic() - began, [each for each in ended if each.problem]
    hours, cpu = sum(each.simulated for each in ended) / 3600, sum(each.cpu for each in ended)
    nodes_in_all, averages = sum(each.nodes for each in ended), sum(each.averaged for each in ended)
    print(
        f"{len(ended)} seeds from {first} in {took:.0f} s ({cpu:.0f} s of CPU):"
        f" {len(ended) / took:.2f} seeds/s, {60 * hours / took:.1f} simulated hours per minute"
        f" ({60 * hours / cpu:.1f} per minute of CPU); {nodes_in_all} nodes,"
        f" {sum(each.used for each in ended)} groups of peers, {averages} averages; {len(failed)}"
        " failed"
    )
    return 1 if failed else 0


def _report(ended: Ended, nodes: int | None) -> None:
    if ended.problem:
        print(f"seed {ended.seed} FAILED: {ended.problem}")
        print(
            f"  replay: python -m tests.support.sim --seed {ended.seed}"
            + (f" --nodes {nodes}" if nodes else ""),
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
