"""`python -m tests.support.sim.crowd` measures how many groups of peers the nodes of a simulated
swarm train on while thirty slow identities crowd in, against the same swarm without them.

    0 s      four nodes join
    150 s    the crowd joins: on one address, or on thirty
    210 s    a newcomer joins; the count of groups and of listing bytes begins
    390 s    the count ends
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import structlog.testing
import trio

from swarmnode.p2p.addresses import Address
from swarmnode.wire import ids
from tests.support.sim import determinism
from tests.support.sim.hostile import SLOW
from tests.support.sim.schedule import Foe, draw
from tests.support.sim.wires import Timeline
from tests.support.sim.world import World

HONEST, CROWD = 4, 30
JOINS, COUNTS, ENDS = 150.0, 210.0, 390.0


@dataclass(frozen=True)
class Counted:
    """Figures of one run. A newcomer without a peer's group at the end counts with the whole
    time."""

    groups: float
    """Peers' groups per step and node."""
    listing: float
    """Bytes of polls and their answers per second and node, both directions."""
    newcomer: float
    """Seconds until the newcomer trains on a peer's group."""


class _World(World):
    async def run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self.timeline.run)
            for place in self.schedule.places:
                self._nursery.start_soon(self._boot_at, self.nodes[place.name], place.joins_at)
            await trio.sleep_until(JOINS)
            for foe in self.foes.values():
                self._nursery.start_soon(foe.live, self.medium)
            self.counted = await self._count()
            self._nursery.cancel_scope.cancel()

    async def _count(self) -> Counted:
        await trio.sleep_until(COUNTS)
        *settled, newcomer = self.nodes.values()
        steps = sum(node.tally.steps for node in settled)
        used = sum(node.tally.used.total() for node in settled)
        listing = self._listing_bytes()
        waited = ENDS - COUNTS
        while trio.current_time() < ENDS:
            await trio.sleep(1.0)
            if newcomer.tally.used:
                waited = min(waited, trio.current_time() - COUNTS)
        return Counted(
            (sum(node.tally.used.total() for node in settled) - used)
            / (sum(node.tally.steps for node in settled) - steps),
            (self._listing_bytes() - listing) / len(settled) / (ENDS - COUNTS),
            waited,
        )

    def _listing_bytes(self) -> int:
        """Return the bytes of this node's polls and of their answers, of all settled nodes."""
        lives = [node.life for node in list(self.nodes.values())[:-1]]
        return sum(
            life.network.received[ids.LISTING_PROTOCOL] + life.network.sent[ids.LISTING_PROTOCOL]
            for life in lives
            if life is not None
        )


def count(kind: str, addresses: int, seed: int) -> Counted:
    """Run one swarm. kind: attack of the crowd; empty: no crowd."""
    schedule = draw(seed, HONEST + 1, ["silent"])
    *settled, newcomer = schedule.places
    schedule.places = [
        *(replace(p, joins_at=0.0) for p in settled),
        replace(newcomer, joins_at=COUNTS),
    ]
    schedule.faults = []
    schedule.foes = [
        Foe(
            f"h{i}",
            kind,
            Address("ip4", "45.99.9.7" if addresses == 1 else f"45.99.{10 + i}.7", 9000 + i),
            0.02,
            0.01,
            1e6,
        )
        for i in range(CROWD if kind else 0)
    ]
    world: _World | None = None

    async def main(timeline: Timeline) -> None:
        nonlocal world
        world = _World(schedule, Path(directory), timeline, None)
        for foe in world.foes.values():  # each dials every node
            foe.bootstrap = [(node.address, node.peer) for node in world.nodes.values()]
        await world.run()

    with tempfile.TemporaryDirectory() as directory, structlog.testing.capture_logs():
        determinism.run(seed, main)
    assert world is not None
    return world.counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=SLOW, default=SLOW)
    parser.add_argument("--addresses", nargs="+", type=int, default=(1, CROWD))
    args = parser.parse_args()
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, fresh, max_tasks_per_child=1) as pool:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            usual = pool.submit(count, "", 1, seed).result()
            print(f"seed {seed} no crowd: {usual}", flush=True)
            for kind in args.kinds:
                for addresses in args.addresses:
                    got = pool.submit(count, kind, addresses, seed).result()
                    print(
                        f"seed {seed} {kind}, {addresses} addresses: groups"
                        f" {got.groups:.2f} ({got.groups / usual.groups:.0%}), listing"
                        f" {got.listing:.0f} B/s ({got.listing / usual.listing:.2f}), newcomer"
                        f" {got.newcomer:.0f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    sys.exit(main())
