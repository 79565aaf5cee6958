"""Measure the cost of a group that is trained on. `python -m benchmarks.pulls [--quick]`

Real hosts on loopback with the real exchange, all in one process. In a step each node publishes
PUBLISHED groups and draws DRAWN. Counted are the CPU time of all hosts, without idle connections
and without making the groups, and all bytes read from sockets; both are divided by the groups
drawn. The hosts' clock stands still while any host has work, so that neither the number of hosts
nor other load makes a request time out.

Goals: at most 7 ms of CPU per group; bytes at most 1.1 × its size at 17 KB and 1.6 × at 1.5 KB.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
import trio
import trio.testing

from benchmarks import report
from benchmarks.lib.pull_hosts import SETTLE_SECONDS, SWARM, Meter, connected_hosts, group
from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, Author
from swarmnode.link.messages import Hello
from swarmnode.p2p.network import Libp2pNetwork
from swarmnode.rollouts.exchange import RolloutExchange
from swarmnode.rollouts.groups import Draw, GroupRules
from swarmnode.wire.envelope import Credentials
from tests.support.fakes.scorer import InProcessScorer

SIZES = (17_000, 2_000)
"""Bytes of a group before compression, about: 17.9 KB and 1.5 KB as sent."""
PUBLISHED, DRAWN = 8, 6
STEP_SECONDS = 10.0
JUMP_SECONDS = 0.005
"""Idle real time after which the clock jumps to the next timer."""
IDLE_SECONDS = 5.0
MOST_SETTLING = 20
"""Most windows of IDLE_SECONDS until the hosts count as idle."""
WARM_STEPS, STEPS = 2, 3
RUN_SECONDS = 3600.0
START = time.time()


class Run(msgspec.Struct, frozen=True):
    """A run in one process: `nodes` hosts, groups of about `size` bytes.

    Attributes:
        settings: overridden constants, "module.NAME" in swarmnode.rollouts → value.
    """

    nodes: int
    size: int
    seed: int = 0
    step_seconds: float = STEP_SECONDS
    settings: dict[str, float] = {}


class Outcome(msgspec.Struct, frozen=True):
    cpu_ms: float
    """CPU time of a host per group that its trainer drew, publishing included."""
    publishing_ms: float
    """CPU time of checking, compressing and signing own groups, contained in `cpu_ms`."""
    idle_ms: float
    """CPU time of a host's idle connections per second. Not contained in `cpu_ms`."""
    bytes_ratio: float
    """Bytes read ÷ bytes of the groups that were drawn."""
    filled: float
    """Share of the groups asked for that were in the pool."""
    frame_bytes: float
    step_seconds: float
    connections: float
    counts: dict[str, float]
    """Per group drawn: polls and listed polls by outcome, fetches, fetched groups by outcome."""


class Member:
    """A host with its exchange and a simulated trainer."""

    def __init__(self, network: Libp2pNetwork, author: Author, run: Run) -> None:
        self.network, self.author, self.run = network, author, run
        self.exchange = RolloutExchange(
            network,
            InProcessScorer(),
            Credentials(author.key, SWARM),
            GroupRules(BUILTIN_TASKS),
            SharingConfig(),
            clock=lambda: START + trio.current_time(),
            rng=random.Random(f"{run.seed} {author.peer}"),
        )
        self.exchange.set_policy(Hello(MODEL, TOKENIZER, 0, 120))
        self.sequence = self.drawn = 0
        self.making = self.publishing = 0.0
        """CPU seconds."""

    async def steps(self, seconds: float, offset: float) -> None:
        """Take steps of `seconds` until cancelled, the first after `offset` seconds."""
        clock = trio.current_time() + offset
        for version in itertools.count():
            await trio.sleep_until(clock + version * seconds)
            await self._step(version, seconds)

    async def _step(self, version: int, seconds: float) -> None:
        """Draw, and publish own groups over the whole step, as sampling does."""
        began = time.process_time()
        made = [
            group(self.author, self.sequence + each, self.run.size, version)
            for each in range(PUBLISHED)
        ]
        self.making += time.process_time() - began
        self.sequence += PUBLISHED
        self.drawn += len(self.exchange.draw(Draw(1, DRAWN, version, DRAWN // 2)).groups)
        clock = trio.current_time()
        for number, own in enumerate(made):
            await trio.sleep_until(clock + (number + 0.5) * seconds / PUBLISHED)
            began = time.process_time()
            self.exchange.publish(own)
            self.publishing += time.process_time() - began


async def measure(run: Run) -> Outcome:
    """Run WARM_STEPS steps of all nodes, then count STEPS steps."""
    override(run.settings)
    meter, seconds = Meter(), run.step_seconds
    meter.install()
    with tempfile.TemporaryDirectory() as directory:
        async with (
            connected_hosts(run.nodes, run.seed, Path(directory)) as hosts,
            trio.open_nursery() as nursery,
        ):
            idle = await _settle()
            members = [Member(network, author, run) for network, author in hosts]
            for number, member in enumerate(members):
                await nursery.start(member.exchange.run)
                # evenly over a step, since trainers are not synchronised
                nursery.start_soon(member.steps, seconds, seconds * (number + 0.5) / run.nodes)
            await trio.sleep((1 + WARM_STEPS) * seconds)
            for member in members:
                member.drawn, member.making, member.publishing = 0, 0.0, 0.0
            counts, received = _counts(members), meter.bytes
            began, clock = time.process_time(), trio.current_time()
            await trio.sleep(STEPS * seconds)
            cpu, wall = time.process_time() - began, trio.current_time() - clock
            read, done = meter.bytes - received, _counts(members) - counts
            making = sum(member.making for member in members)
            drawn = max(1, sum(member.drawn for member in members))
            shelves = [member.exchange.statistics().serving.shelf for member in members]
            size = sum(each.bytes for each in shelves) / sum(each.groups for each in shelves)
            connections = sum(len(network.connected()) for network, _ in hosts) / run.nodes
            nursery.cancel_scope.cancel()
    return Outcome(
        cpu_ms=1000 * max(0.0, cpu - making - idle * wall) / drawn,
        publishing_ms=1000 * sum(member.publishing for member in members) / drawn,
        idle_ms=1000 * idle / run.nodes,
        bytes_ratio=read / (drawn * size),
        filled=drawn / (STEPS * DRAWN * run.nodes),
        frame_bytes=size,
        step_seconds=seconds,
        connections=connections,
        counts={name: round(count / drawn, 3) for name, count in sorted(done.items())},
    )


async def _settle() -> float:
    """Wait until the hosts have connected and greeted each other; return the CPU seconds per second
    that they take when idle."""
    await trio.sleep(SETTLE_SECONDS)
    latest = math.inf
    for _ in range(MOST_SETTLING):
        before, began = latest, time.process_time()
        await trio.sleep(IDLE_SECONDS)
        latest = (time.process_time() - began) / IDLE_SECONDS
        if latest > 0.8 * before:
            break
    return min(before, latest)


def _counts(members: list[Member]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for member in members:
        pulling = member.exchange.statistics().pulling
        counts.update({f"poll {name}": count for name, count in pulling.listings.items()})
        counts.update({f"group {name}": count for name, count in pulling.pulled.items()})
        for protocol, outcomes in member.network.statistics().requests.requests.items():
            counts[protocol] += sum(outcomes.values())
    return counts


def override(settings: dict[str, float]) -> None:
    """Set constants of modules of swarmnode.rollouts, by "module.NAME"."""
    for name, value in settings.items():
        module, _, constant = name.rpartition(".")
        found = importlib.import_module(f"swarmnode.rollouts.{module}")
        getattr(found, constant)  # raises AttributeError for a constant that does not exist
        setattr(found, constant, value)


def run(one: Run) -> Outcome:
    """Run `one` in a process of its own. Raises subprocess.CalledProcessError, TimeoutExpired."""
    command = [sys.executable, "-m", "benchmarks.pulls", "--one", msgspec.json.encode(one).decode()]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=RUN_SECONDS)
    return msgspec.json.decode(done.stdout, type=Outcome)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 nodes, groups of 17 KB")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 48])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of a group"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--one", help="a Run as JSON: run it in this process and print the Outcome")
    arguments = parser.parse_args()
    if arguments.one:
        one = msgspec.json.decode(arguments.one, type=Run)
        clock = trio.testing.MockClock(autojump_threshold=JUMP_SECONDS)
        outcome = trio.run(measure, one, clock=clock)
        print(msgspec.json.encode(outcome).decode())
        return
    all_nodes = [4] if arguments.quick else arguments.nodes
    sizes = SIZES[:1] if arguments.quick else arguments.sizes
    rows, results = [], []
    for one in [
        Run(nodes, size, seed, arguments.step_seconds)
        for nodes in all_nodes
        for size in sizes
        for seed in range(arguments.seeds)
    ]:
        got = run(one)
        results.append(msgspec.to_builtins([one, got]))
        rows.append(row(one, got))
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
        if arguments.json:
            report.write_json(arguments.json, results)
    print(report.heading("pulls: what a group costs that is trained on"))
    print(report.table(HEAD, rows))


HEAD = [
    "nodes",
    "KB",
    "seed",
    "step, s",
    "CPU ms per group drawn",
    "of that, publishing",
    "bytes ÷ size",
    "drawn of asked for",
    "idle ms/s",
    "polls per group",
    "fetches per group",
]


def row(one: Run, got: Outcome) -> list[str]:
    """Return a line of the table."""
    of = lambda name: sum(count for key, count in got.counts.items() if name in key)
    return [
        str(one.nodes),
        f"{got.frame_bytes / 1000:.1f}",
        str(one.seed),
        f"{got.step_seconds:g}",
        f"{got.cpu_ms:.1f}",
        f"{got.publishing_ms:.1f}",
        f"{got.bytes_ratio:.2f}",
        f"{got.filled:.0%}",
        f"{got.idle_ms:.1f}",
        f"{of('poll '):.2f}",
        f"{of('/groups'):.2f}",
    ]


if __name__ == "__main__":
    main()
