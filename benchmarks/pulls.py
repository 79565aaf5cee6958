"""What a group costs that is trained on: by gossip, where a node receives all of them, and by
listings and pulls.

    python -m benchmarks.pulls            4, 8 and 16 nodes, groups of 17 KB, both ways in turn
    python -m benchmarks.pulls --quick    4 nodes
    python -m benchmarks.pulls --nodes 8 --exchange pull --seeds 3

Real hosts and the real exchange in one process. In a step each node publishes PUBLISHED groups and
draws DRAWN, so that what arrives by gossip grows with the swarm and what is drawn does not.
Counted: CPU time of all hosts, less what they take when nothing happens and what making up the
groups takes; and all bytes read from sockets, listings and gossip's own among them. Both are
divided by the groups drawn.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import msgspec
import trio

from benchmarks import gossip, report
from benchmarks.gossip import Meter, group
from swarmnode.p2p import guards
from swarmnode.rollouts.groups import Draw

PUBLISHED, DRAWN = 8, 6
RECEIPTS = 40.0
"""Groups received per second by all nodes together where they gossip: decides how long a step is,
ten seconds at least."""
WARM_STEPS, STEPS = 2, 2
IDLE_SECONDS = 5.0
RUN_SECONDS = 1200.0


class Run(msgspec.Struct, frozen=True):
    """One process."""

    nodes: int
    size: int
    exchange: Literal["gossip", "pull"]
    seed: int = 0


class Outcome(msgspec.Struct, frozen=True):
    cpu_ms: float
    """Of a host, for each group that its trainer drew, what it publishes in that time included."""
    publishing_ms: float
    """Of that, checking, compressing, signing and handing to gossip what it publishes itself, which
    is not the cost of what it gets."""
    idle_ms: float
    """Of a host per second in which nothing happens."""
    bytes_ratio: float
    """Bytes read ÷ bytes of the groups that were drawn."""
    filled: float
    """Share of the groups asked for that were there."""
    frame_bytes: float


async def measure(run: Run) -> Outcome:
    meter = Meter()
    guards.install()
    guards.swarm.INBOUND_PER_ADDRESS = run.nodes**2  # they are all at 127.0.0.1
    meter.install()
    pause = max(10.0, run.nodes * (run.nodes - 1) * PUBLISHED / RECEIPTS)
    hosts = gossip.Run(run.nodes, run.size, "after", 0, run.seed, exchange=run.exchange)
    drawn = sequence = 0
    making = publishing = 0.0
    with tempfile.TemporaryDirectory() as directory:
        async with gossip.swarm(hosts, meter, Path(directory)) as nodes:

            async def step(number: int) -> None:
                """One node's: what it publishes is spread over the step, as sampling is."""
                nonlocal drawn, making, publishing
                exchange, author, _ = nodes[number]
                began = time.process_time()
                made = [group(author, sequence + each, run.size) for each in range(PUBLISHED)]
                making += time.process_time() - began
                got = exchange.draw(Draw(1, DRAWN, 0, DRAWN // 2)).groups
                drawn += len(got)
                for own in made:
                    began = time.process_time()
                    await exchange.publish(own)
                    publishing += time.process_time() - began
                    await trio.sleep(pause / PUBLISHED)

            async def steps(count: int) -> None:
                nonlocal sequence
                for _ in range(count):
                    async with trio.open_nursery() as nursery:
                        for number in range(len(nodes)):
                            nursery.start_soon(step, number)
                    sequence += PUBLISHED

            await trio.sleep(gossip.MESH_SECONDS)
            before = time.process_time()
            await trio.sleep(IDLE_SECONDS)
            idle = (time.process_time() - before) / IDLE_SECONDS
            await steps(WARM_STEPS)
            drawn, making, publishing = 0, 0.0, 0.0
            received, began, clock = meter.bytes, time.process_time(), trio.current_time()
            await steps(STEPS)
            cpu, wall = time.process_time() - began, trio.current_time() - clock
            kept = [exchange.statistics().serving.catalogue for exchange, _, _ in nodes]
            size = sum(each.bytes for each in kept) / sum(each.groups for each in kept)
            return Outcome(
                cpu_ms=1000 * max(0.0, cpu - making - idle * wall) / max(1, drawn),
                publishing_ms=1000 * publishing / max(1, drawn),
                idle_ms=1000 * idle / run.nodes,
                bytes_ratio=(meter.bytes - received) / (max(1, drawn) * size),
                filled=drawn / (STEPS * DRAWN * run.nodes),
                frame_bytes=size,
            )


def run(one: Run) -> Outcome:
    """`one` in a process of its own. Raises subprocess.CalledProcessError, TimeoutExpired."""
    command = [sys.executable, "-m", "benchmarks.pulls", "--one", msgspec.json.encode(one).decode()]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=RUN_SECONDS)
    return msgspec.json.decode(done.stdout, type=Outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="4 nodes")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument(
        "--exchange", nargs="+", choices=["gossip", "pull"], default=["gossip", "pull"]
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--one", help="a Run as JSON, done here and now; prints its Outcome")
    arguments = parser.parse_args()
    if arguments.one:
        print(
            msgspec.json.encode(
                trio.run(measure, msgspec.json.decode(arguments.one, type=Run))
            ).decode()
        )
        return
    rows = []
    for nodes in [4] if arguments.quick else arguments.nodes:
        for seed in range(arguments.seeds):
            for exchange in arguments.exchange:
                got = run(Run(nodes, 17_000, exchange, seed))
                costs = [f"{got.cpu_ms:.1f}", f"{got.publishing_ms:.1f}"]
                numbers = [
                    *costs,
                    f"{got.bytes_ratio:.2f}",
                    f"{got.filled:.0%}",
                    f"{got.idle_ms:.1f}",
                ]
                rows.append([str(nodes), exchange, str(seed), *numbers])
                print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    head = [
        "nodes",
        "way",
        "seed",
        "CPU ms per group drawn",
        "of that, publishing",
        "bytes ÷ size",
        "drawn of asked for",
        "idle ms/s",
    ]
    print(
        report.heading("pulls: what a group costs that is trained on")
        + "\n"
        + report.table(head, rows)
    )


if __name__ == "__main__":
    main()
