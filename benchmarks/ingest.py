"""How many groups can a node admit per second and core, and does its memory stay flat under a
flood? `python -m benchmarks.ingest [--quick]`

Full admission through the product's RolloutExchange: envelope, signature, payload, windows, seed,
scoring in the sandboxed child, pool; only polls and fetches are missing. A core's worth is CPU time
of both processes, because wall time depends on the other load of the machine.

Goals: 1,000 groups per second and core with builtin tasks; memory flat over a million hostile and
valid frames.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import trio

from benchmarks import report
from swarmnode.config import SharingConfig, TaskConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, Author, swarm_of
from swarmnode.demo.liar.frames import hostile_frames
from swarmnode.rollouts.admission import QUEUE_PEER_GROUPS
from swarmnode.rollouts.exchange import RolloutExchange
from swarmnode.rollouts.groups import Candidate, Draw, GroupRules, Judged
from swarmnode.tasks.client import AsyncScorer
from swarmnode.wire.envelope import Credentials
from tests.support.fakes.network import MemorySwarm

AUTHORS = 64
EPOCH = 1_800_000_000.0
SECONDS_PER_FRAME = 0.002
"""Virtual time between two frames: 500 a second, far more than a node fetches."""


class Node:
    """An exchange with the real scorer and a virtual clock, fed frame by frame."""

    def __init__(self, tasks: Sequence[str], **cfg: Any) -> None:
        self.swarm = swarm_of("ingest", tasks)
        self.tasks = tasks
        self.now = EPOCH
        self.scorer = AsyncScorer()
        own = Author(self.swarm, seed=1_000_000)
        network = MemorySwarm().join(own.peer)
        self.exchange = RolloutExchange(
            network,
            self.scorer,
            Credentials(own.key, self.swarm),
            GroupRules(tasks),
            SharingConfig().model_copy(update=cfg),
            clock=lambda: self.now,
            rng=random.Random(0),
        )
        self.exchange.set_policy(
            SimpleNamespace(
                model=MODEL, tokenizer=TOKENIZER, policy_version=0, tokens_per_text_byte=1.0
            )
        )

    async def feed(self, frames: Iterator[bytes]) -> int:
        """Feed `frames` as fast as the scorer takes them, until the last is scored."""
        count = 0
        for frame in frames:
            candidate = self.exchange.admission.check(frame, self.now)
            if isinstance(candidate, Candidate):
                self.exchange._enqueue(candidate)
            count += 1
            while len(self.exchange._scoring) >= QUEUE_PEER_GROUPS:  # noqa: ASYNC110
                await trio.sleep(0.001)
            if count % 32 == 0:
                await trio.lowlevel.checkpoint()
        while not self.idle():  # noqa: ASYNC110
            await trio.sleep(0.001)
        return count

    def idle(self) -> bool:
        outcomes = self.outcomes()
        settled = sum(
            outcomes.get(name, 0)
            for name in (
                "admitted",
                "zero_advantage",
                "scorer",
                "unregenerable",
                "pool_full",
                "busy",
            )
        )
        return outcomes.get("candidate", 0) <= settled

    def outcomes(self) -> dict[str, int]:
        return self.exchange.admission.statistics().outcomes

    def usage(self) -> tuple[float, float]:
        """Return CPU seconds of this process and of the scorer child."""
        mine = psutil.Process().cpu_times()
        child = psutil.Process(self.scorer.statistics().pid).cpu_times()
        return mine.user + mine.system, child.user + child.system

    def memory(self) -> tuple[float, float]:
        """Return resident MiB of this process and of the scorer child."""
        return (
            psutil.Process().memory_info().rss / 2**20,
            psutil.Process(self.scorer.statistics().pid).memory_info().rss / 2**20,
        )


@contextlib.asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    async with node.scorer, trio.open_nursery() as nursery:
        await nursery.start(node.exchange.run)
        await node.scorer.prompt(Author(node.swarm, tasks=node.tasks).task(0))  # the child is ready
        yield node
        nursery.cancel_scope.cancel()


# -- groups per second and core


def long_texts(author: Author, sequence: int) -> list[str]:
    """Return eight completions of about a kilobyte that end with an answer; two are right."""
    answers = [c.text for c in author.group(sequence, 0.0).completions]
    thinking = " ".join(str((sequence * 7919 + i * 104_729) % 9973) for i in range(190))
    return [f"{thinking} <answer>{answer}</answer>" for answer in answers]


async def throughput(
    name: str, tasks: Sequence[str], groups: int, rounds: int, texts: Any = None
) -> dict[str, Any]:
    """Feed `rounds` × `groups` valid groups of 8; return groups per second of CPU and wall time."""
    node = Node(tasks, groups_per_second=1e9)
    authors = [Author(node.swarm, seed=n, tasks=tasks) for n in range(AUTHORS)]
    per_core, per_wall, scorer_share, sizes = [], [], [], []
    sequence = itertools.count()
    async with running(node):
        for measured in range(rounds + 1):
            frames = []
            for _, author in zip(range(groups), itertools.cycle(authors), strict=False):
                n = next(sequence)
                frames.append(
                    author.frame(author.group(n, EPOCH, texts=texts(author, n) if texts else None))
                )
            before, began = node.usage(), time.perf_counter()
            await node.feed(iter(frames))
            wall, after = time.perf_counter() - began, node.usage()
            mine, child = after[0] - before[0], after[1] - before[1]
            if measured:  # the first round warms up
                per_core.append(groups / (mine + child))
                per_wall.append(groups / wall)
                scorer_share.append(child / (mine + child))
                sizes.append(sum(map(len, frames)) / groups)
    # guesses at a reasoning-gym question are seldom right: such groups have zero advantage
    outcomes = node.outcomes()
    assert outcomes.get("admitted", 0) + outcomes.get("zero_advantage", 0) == groups * (
        rounds + 1
    ), outcomes
    return {
        "workload": name,
        "frame_bytes": sum(sizes) / len(sizes),
        "groups_per_second_and_core": per_core,
        "groups_per_second_wall": per_wall,
        "scorer_share_of_cpu": scorer_share,
    }


def rg_texts(author: Author, sequence: int) -> list[str]:
    """Return short answers to questions that only the scorer knows."""
    return [str((sequence + i) % 19) for i in range(8)]


# -- memory under a flood


def flood(node: Node, count: int, rng: random.Random) -> Iterator[bytes]:
    """Yield `count` frames: a fifth honest, the rest replays, mutations, a storm, garbage, and
    hostile frames of new identities."""
    honest = [Author(node.swarm, seed=n, tasks=node.tasks) for n in range(AUTHORS)]
    storm = Author(node.swarm, seed=500, tasks=node.tasks)
    sequences, storms, strangers = itertools.count(), itertools.count(), itertools.count(10_000)
    recent: list[bytes] = []
    hostile: list[bytes] = []
    for _ in range(count):
        node.now += SECONDS_PER_FRAME
        kind = rng.random()
        if kind < 0.2 or not recent:
            n = next(sequences)
            author = honest[n % AUTHORS]
            frame = author.frame(author.group(n, node.now, policy_version=n // 5000))
            recent = [*recent[-255:], frame]
        elif kind < 0.35:
            frame = rng.choice(recent)
        elif kind < 0.6:
            frame = mutated(rng, rng.choice(recent))
        elif kind < 0.75:
            frame = storm.frame(storm.group(next(storms), node.now))
        elif kind < 0.85:
            frame = rng.randbytes(rng.randrange(2000))
        else:
            if not hostile:
                stranger = Author(node.swarm, seed=next(strangers), tasks=node.tasks)
                hostile = [bad for bad, _ in hostile_frames(stranger, node.now).values()]
                rng.shuffle(hostile)
                del hostile[5:]
                hostile.append(stranger.frame(stranger.group(0, node.now)))
            frame = hostile.pop()
        yield frame


def mutated(rng: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data))
        data[at : at + rng.randint(0, 8)] = rng.randbytes(rng.randint(0, 8))
    return bytes(data)


async def memory(frames: int, samples: int = 20) -> dict[str, Any]:
    """Return resident memory after each part of the flood, and the outcomes of the frames."""
    node = Node(BUILTIN_TASKS)
    rng = random.Random(0)
    part = frames // samples
    async with running(node):
        series = [(0, *node.memory())]
        stream = flood(node, part * samples, rng)
        began = time.perf_counter()
        for n in range(samples):
            await node.feed(itertools.islice(stream, part))
            for group in node.exchange.draw(Draw(n, 8, n, 4)).groups:
                node.exchange.authors.judged(Judged(group.peer, "used"))
            series.append((part * (n + 1), *node.memory()))
        wall = time.perf_counter() - began
        statistics = node.exchange.statistics()
    return {
        "frames": part * samples,
        "seconds": wall,
        "series": series,
        "outcomes": statistics.admission.outcomes,
        "signers": statistics.admission.signers,
        "seen": statistics.admission.seen,
        "pool_groups": statistics.pool.groups,
        "scorer_starts": node.scorer.statistics().starts,
    }


def growth(series: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Return the growth of each process in MiB from the end of the first quarter, when all bounded
    memories are full, to its highest since."""
    settled = series[len(series) // 4]
    later = series[len(series) // 4 :]
    return max(s[1] for s in later) - settled[1], max(s[2] for s in later) - settled[2]


async def measure(quick: bool) -> dict[str, Any]:
    groups, rounds = (1500, 3) if quick else (10_000, 5)
    # first, since memory that was freed before would hide growth
    flooded = await memory(60_000 if quick else 1_000_000)
    gym = TaskConfig().names
    speed = [
        await throughput(
            "builtin tasks, 8 answers of 1–4 characters", BUILTIN_TASKS, groups, rounds
        ),
        await throughput(
            "builtin tasks, 8 texts of 1 KB, ids packed",
            BUILTIN_TASKS,
            groups // 3,
            rounds,
            long_texts,
        ),
        await throughput(
            "nine reasoning-gym tasks, 8 short answers", gym, groups, rounds, rg_texts
        ),
    ]
    return {"throughput": speed, "memory": flooded}


def show(results: dict[str, Any]) -> str:
    rows = [
        [
            r["workload"],
            f"{r['frame_bytes']:.0f}",
            report.middle(r["groups_per_second_and_core"], 0),
            report.middle(r["groups_per_second_wall"], 0),
            f"{100 * sum(r['scorer_share_of_cpu']) / len(r['scorer_share_of_cpu']):.0f} %",
        ]
        for r in results["throughput"]
    ]
    flood_ = results["memory"]
    mine, child = growth(flood_["series"])
    points = [
        flood_["series"][i]
        for i in sorted({0, 1, *((len(flood_["series"]) - 1) * k // 4 for k in (1, 2, 3, 4))})
    ]
    outcomes = sorted(flood_["outcomes"].items(), key=lambda item: -item[1])
    return "\n".join(
        [
            report.heading("ingest: full admission of strangers' groups"),
            (
                "Groups of 8 completions per second of CPU time, network process and scorer"
                " together; median [least–greatest] of the rounds:\n"
            ),
            report.table(
                [
                    "workload",
                    "bytes",
                    "groups/s and core",
                    "groups/s (wall)",
                    "scorer's share of CPU",
                ],
                rows,
            ),
            (
                f"\nMemory over {flood_['frames']:,} frames, a fifth of them honest"
                f" ({flood_['seconds']:.0f} s, making the frames included):\n"
            ),
            report.table(
                ["frames", "network process MiB", "scorer MiB"],
                [[f"{n:,}", f"{rss:.1f}", f"{scorer:.1f}"] for n, rss, scorer in points],
            ),
            (
                f"\nHighest after the first quarter: {mine:+.1f} MiB (network process),"
                f" {child:+.1f} MiB (scorer). {flood_['signers']} authors, {flood_['seen']} frames"
                f" and {flood_['pool_groups']} groups remembered; scorer started"
                f" {flood_['scorer_starts']} time(s).\n"
            ),
            "Outcomes: " + ", ".join(f"{name} {count:,}" for name, count in outcomes),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ingest", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer groups, 60,000 frames",
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    results = trio.run(measure, arguments.quick)
    print(show(results))
    if arguments.json:
        report.write_json(arguments.json, results)


if __name__ == "__main__":
    main()
