"""A swarm of simulated nodes, built and disturbed by a schedule, and checked throughout. A
simulation ends when all nodes are connected and train again."""

from __future__ import annotations

import itertools
import logging
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import structlog.testing
import trio

from swarmnode.demo.liar.author import swarm_of
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.budget import BURST_BYTES, BURST_SECONDS
from swarmnode.p2p.peers import MAX_PEERS
from swarmnode.p2p.reputation import Standing
from swarmnode.rollouts.network.admission import QUEUE_GROUPS
from tests.support.sim import determinism
from tests.support.sim.hostile import NEVER_TRAINED_ON, Hostile
from tests.support.sim.learner import TASKS
from tests.support.sim.network import Medium
from tests.support.sim.node import Life, Node
from tests.support.sim.schedule import Fault, Foe, Place, Schedule
from tests.support.sim.wires import History, Timeline, Way, Wires

WATCH_SECONDS = 5.0
LONGEST_WAIT = 60.0
"""Upper bound on the duration of any request, for any behaviour of the other side."""
LONGEST_EXCHANGE = 180.0
"""Upper bound on the duration of an exchange of weights, for any behaviour of the partner.
Afterwards the trainer's commit is known."""
WHOLE_SECONDS = 420.0
"""Limit from the last fault until all nodes are connected, train on peers' groups and have
learnt."""
FORGED = 12
"""Maximum number of groups of one forger that a node draws in one life before it ignores the
forger."""
MADE_UP_GROUPS, MADE_UP_SHARE = 6, 0.08
"""Maximum number, and share, of made-up groups that a node trains on. Up to four of ten nodes make
them up, and one in ten is not detected."""
UNASKED_BYTES = 2**20
NOWHERE = Foe("absent", "", Address("ip4", "0.0.0.0", 1), 0.05, 0.01, 1e6)
"""An advertised address without a node."""


class Violation(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Ended:
    """Result of a simulation."""

    seed: int
    digest: str
    events: int
    simulated: float
    """Seconds."""
    cpu: float
    """Seconds."""
    whole_after: float
    """Seconds from the last fault."""
    nodes: int
    steps: int
    used: int
    """Peers' groups that were trained on."""
    averaged: int
    """Outer steps taken with a partner's weights."""
    made_up: int
    """Made-up groups that were trained on."""
    received: int
    """Bytes received by the lives that existed at the end."""
    wasted: int
    """Bytes sent by hostile nodes."""
    problem: str = ""


def simulate(schedule: Schedule, lines: list[str] | None = None) -> Ended:
    """Run a schedule. A broken invariant is the `problem` of the result."""
    began = time.process_time()
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="swarmnode-sim-", dir=place))
    world: World | None = None

    async def main(timeline: Timeline) -> None:
        nonlocal world
        world = World(schedule, directory, timeline, lines)
        await world.run()

    handler = _Errors()
    logger = logging.getLogger("swarmnode")
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    problem = ""
    try:
        with structlog.testing.capture_logs() as log:
            determinism.run(schedule.seed, main)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = explain(error)
    else:
        handler.found += [
            f"logged: {entry['event']}"
            for entry in log
            if entry["log_level"] in ("error", "critical")
        ]
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        shutil.rmtree(directory, ignore_errors=True)
    assert world is not None, problem
    lives = [node.life for node in world.nodes.values() if node.life is not None]
    hostile = [foe.network for foe in world.foes.values() if foe.network is not None]
    return Ended(
        schedule.seed,
        world.history.digest,
        world.history.events,
        world.now,
        time.process_time() - began,
        world.whole_after,
        len(world.nodes),
        sum(node.tally.steps for node in world.nodes.values()),
        sum(node.tally.used.total() for node in world.nodes.values()),
        sum(node.tally.averaged["exchanged"] for node in world.nodes.values()),
        sum(node.tally.made_up for node in world.nodes.values()),
        sum(life.network.received.total() for life in lives),
        sum(network.sent.total() for network in hostile),
        problem or "; ".join(handler.found[:3]),
    )


def explain(error: BaseException) -> str:
    """Return the first cause in one line, or the traceback of an unexpected error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Violation):
        return str(error)
    return "".join(traceback.format_exception(error))[-3000:]


class _Errors(logging.Handler):
    """Treat every error log of the product as a defect: no disk is full and every router
    answers."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(
            f"logged: {record.getMessage()}"
            + (f" ({record.exc_info[1]!r})" if record.exc_info else "")
        )


class World:
    def __init__(
        self, schedule: Schedule, directory: Path, timeline: Timeline, lines: list[str] | None
    ) -> None:
        self.schedule = schedule
        self.history = History(lines)
        self.swarm = swarm_of(tasks=TASKS)
        self.timeline = timeline
        self.wires = Wires(random.Random(f"wires {schedule.seed}"), timeline, self._make_way)
        self.medium = Medium(self.wires, timeline, self.history)
        self.nodes: dict[str, Node] = {}
        self.now = 0.0
        self.whole_after = -1.0
        self.foes: dict[str, Hostile] = {}
        self._exchanging: dict[str, tuple[str, float]] = {}
        """(node, partner) → start of the exchange, as observed. A partner with steps of a minute
        may wait two minutes for each of several peers that agree and vanish."""
        self._places: dict[str, Place | Foe] = {
            str(place.address): place for place in (*schedule.places, *schedule.foes)
        }
        self._nursery: trio.Nursery
        for place in schedule.places:
            node = Node(
                place.name,
                schedule.seed,
                self.swarm,
                place.address,
                directory / place.name,
                place.traits,
            )
            self.nodes[place.name] = node
        for foe in schedule.foes:
            self.foes[foe.name] = Hostile(
                foe.name, foe.kind, schedule.seed, self.swarm, foe.address, directory / foe.name
            )
        for node in (*self.nodes.values(), *self.foes.values()):
            node.bootstrap = [
                (self.nodes[b].address, self.nodes[b].peer)
                for b in schedule.bootstrap
                if b != node.name
            ]

    def _make_way(self, source: str, target: str) -> Way:
        one, other = (self._places.get(address, NOWHERE) for address in (source, target))
        return Way(one.delay + other.delay, one.jitter + other.jitter, min(one.rate, other.rate))

    # -- run

    async def run(self) -> None:
        try:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self.timeline.run)
                    self._nursery.start_soon(self._watch)
                    for place in self.schedule.places:
                        self._nursery.start_soon(
                            self._boot_at, self.nodes[place.name], place.joins_at
                        )
                    for foe in self.foes.values():
                        self._nursery.start_soon(foe.live, self.medium)
                    self._nursery.start_soon(self._faults)
                    await self._until_whole()
                    scope.cancel()
        finally:
            self.now = trio.current_time()

    async def _boot_at(self, node: Node, when: float) -> None:
        await trio.sleep_until(when)
        await self._boot(node)

    async def _boot(self, node: Node) -> None:
        if node.life is None:
            self.history.note(f"boot {node.name}")
            await self._nursery.start(node.live, self.medium, self.history.note)

    async def _faults(self) -> None:
        for fault in self.schedule.faults:
            await trio.sleep_until(fault.at)
            self.history.note(f"fault {fault}")
            self._nursery.start_soon(self._inflict, fault)

    async def _inflict(self, fault: Fault) -> None:
        """Apply a fault and revert it after its duration."""
        nodes = [self.nodes[name] for name in fault.nodes]
        match fault.kind:
            case "kill" | "power":
                for node in nodes:
                    await node.kill(silently=fault.kind == "power", old_disk=fault.old_disk)
                await trio.sleep(fault.seconds)
                for node in nodes:
                    await self._boot(node)
            case "trainer":
                for node in nodes:
                    if node.life is not None and node.life.trainer is not None:
                        node.life.trainer.cancel()
            case "still":
                self.wires.still.update(str(node.address) for node in nodes)
                await trio.sleep(fault.seconds)
                self.wires.still.difference_update([str(node.address) for node in nodes])
                self.wires.changed()
            case "cut" | "one_way":
                inside = {str(node.address) for node in nodes}
                ways = self._ways(
                    lambda a, b: (
                        (a in inside and b not in inside)
                        or (fault.kind == "cut" and a not in inside and b in inside)
                    )
                )
                for way in ways:
                    way.cut = True
                await trio.sleep(fault.seconds)
                for way in ways:
                    way.cut = False
                self.wires.changed()
            case "slow":
                addresses = {str(node.address) for node in nodes}
                ways = self._ways(lambda a, b: bool(addresses & {a, b}))
                for way in ways:
                    way.rate, way.delay = way.rate / 50, way.delay + 0.5
                await trio.sleep(fault.seconds)
                for way in ways:
                    way.rate, way.delay = way.rate * 50, way.delay - 0.5

    def _ways(self, is_hit: Callable[[str, str], bool]) -> list[Way]:
        pairs = itertools.permutations(sorted(self._places), 2)
        return [self.wires.way(a, b) for a, b in pairs if is_hit(a, b)]

    # -- invariants

    def honest(self) -> list[Node]:
        return list(self.nodes.values())

    async def _watch(self) -> None:
        while True:
            await trio.sleep(WATCH_SECONDS)
            self._check_always()

    def _check_always(self) -> None:
        now = trio.current_time()
        hostile = {foe.peer for foe in self.foes.values()}
        for wait in self.medium.waits.values():
            if wait.node not in hostile and now - wait.since > LONGEST_WAIT:
                self._fail(
                    f"{self._name(wait.node)} has waited for {wait.what} for"
                    f" {now - wait.since:.0f} s"
                )
        for node in self.honest():
            if node.life is not None:
                self._check_node(node, node.life, now)

    def _check_node(self, node: Node, life: Life, now: float) -> None:
        for other in self.honest():
            if life.network.reputation.standing(other.peer, now) is not Standing.GOOD:
                self._fail(f"{node.name} rates the honest node {other.name} badly")
        statistics = life.rollouts.statistics()
        if statistics.admission.last_internal_error:
            self._fail(f"{node.name}: {statistics.admission.last_internal_error}")
        if statistics.waiting > QUEUE_GROUPS or statistics.pool.groups > statistics.pool.max_groups:
            kept = f"{statistics.waiting} waiting, {statistics.pool.groups} in the pool"
            self._fail(f"{node.name} exceeds its limits: {kept}")
        if life.network.peers.statistics().known > MAX_PEERS:
            self._fail(f"{node.name} knows {life.network.peers.statistics().known} peers")
        self._check_weights(node, life, now)
        self._check_budget(node, life, now)
        self._check_foes(node)

    def _check_weights(self, node: Node, life: Life, now: float) -> None:
        """Check that the network process knows the trainer's commits, and only those."""
        if node.defects:
            self._fail(node.defects[0])
        statistics = life.weights.statistics()
        if statistics.phase != "idle" or life.learner is None or life.learner.averaging.busy:
            partner, since = self._exchanging.get(node.name, (statistics.partner, now))
            self._exchanging[node.name] = (
                statistics.partner,
                since if statistics.partner == partner else now,
            )
            if now - self._exchanging[node.name][1] > LONGEST_EXCHANGE:
                self._fail(
                    f"{node.name} has been in an exchange with {self._name(statistics.partner)}"
                    f" ({statistics.phase}) for {now - since:.0f} s"
                )
            return
        self._exchanging.pop(node.name, None)

    def _check_budget(self, node: Node, life: Life, now: float) -> None:
        """Check that chosen uploads stay within the cap. Requests and answers to pings and to peer
        exchange are only a part of it."""
        cap, sent = node.traits.upload, life.network.sent.total()
        if cap and sent > BURST_BYTES + UNASKED_BYTES + 1.25 * cap * max(
            BURST_SECONDS, now - life.began
        ):
            self._fail(
                f"{node.name} has sent {sent} bytes in {now - life.began:.0f} s, with {cap} a"
                " second"
            )

    def _check_foes(self, node: Node) -> None:
        """Check how many trained groups came from hostile nodes."""
        total, made_up = node.tally.used.total(), node.tally.made_up
        for foe in self.foes.values():
            used = node.tally.used[foe.peer]
            if used and foe.kind in NEVER_TRAINED_ON:
                self._fail(f"{node.name} trains on groups of {foe.name}, a {foe.kind}")
            if foe.kind == "forger" and node.tally.drawn[foe.peer] > FORGED * node.lives:
                self._fail(
                    f"{node.name} has drawn {node.tally.drawn[foe.peer]} forged groups of"
                    f" {foe.name}"
                )
        if made_up > MADE_UP_GROUPS + MADE_UP_SHARE * total:
            self._fail(f"{made_up} of {total} groups that {node.name} has trained on were made up")

    def _name(self, peer: str) -> str:
        return next(
            (
                node.name
                for node in (*self.nodes.values(), *self.foes.values())
                if node.peer == peer
            ),
            peer,
        )

    def _fail(self, what: str) -> None:
        raise Violation(f"at {trio.current_time():.0f} s: {what}")

    # -- end

    async def _until_whole(self) -> None:
        """Return when the faults are over and everything works. Raise Violation if that takes too
        long."""
        await trio.sleep_until(self.schedule.calm_from)
        skill = {node.name: sum(node.memory.skill) for node in self.honest()}
        used = {node.name: node.tally.used.total() for node in self.honest()}
        averaged = self._averaged()
        missing: list[str] = ["not checked yet"]
        while missing:
            if trio.current_time() - self.schedule.calm_from > WHOLE_SECONDS:
                self._fail(
                    f"not whole {WHOLE_SECONDS:.0f} s after the last fault:"
                    f" {'; '.join(missing[:5])}"
                )
            await trio.sleep(WATCH_SECONDS)
            missing = [
                *self._unconnected(),
                *self._idle(used, skill),
                *(["no node averages"] if self._averaged() <= averaged else []),
            ]
        self.whole_after = trio.current_time() - self.schedule.calm_from

    def _averaged(self) -> int:
        return sum(node.tally.averaged["exchanged"] for node in self.honest())

    def _unconnected(self) -> list[str]:
        """Return nodes that are dead or that the first node cannot reach over honest
        connections."""
        alive = {node.peer: node for node in self.honest() if node.life is not None}
        missing = [f"{node.name} is dead" for node in self.honest() if node.life is None]
        if not alive:
            return missing
        reached, ahead = set[str](), [next(iter(alive))]
        while ahead:
            peer = ahead.pop()
            if peer not in reached:
                reached.add(peer)
                life = alive[peer].life
                assert life is not None
                ahead += [other for other in life.network.connected() if other in alive]
        return [
            *missing,
            *(f"{node.name} is apart" for peer, node in alive.items() if peer not in reached),
        ]

    def _idle(self, used: dict[str, int], skill: dict[str, float]) -> list[str]:
        found = []
        for node in self.honest():
            if node.tally.used.total() <= used[node.name]:
                found.append(f"{node.name} trains on no peer's groups")
            elif (
                sum(node.memory.skill) <= skill[node.name]
                and sum(node.memory.skill) < 0.8 * 8 * 0.95
            ):
                found.append(f"{node.name} does not learn")
        return found
