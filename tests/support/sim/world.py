"""A swarm of simulated nodes: made as a schedule says, disturbed as it says, watched all the time, and over when it is whole again."""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import structlog.testing
import trio

from swarmnode.demo.liar.author import swarm_of
from swarmnode.p2p.reputation import Standing
from tests.support.sim import determinism
from tests.support.sim.learner import TASKS
from tests.support.sim.network import Medium
from tests.support.sim.node import Node
from tests.support.sim.schedule import Fault, Schedule
from tests.support.sim.wires import History, Timeline, Way, Wires

WATCH_SECONDS = 5.0
LONGEST_WAIT = 60.0
"""A request of any kind is over by then, whatever the other side does."""
WHOLE_SECONDS = 420.0
"""After the last fault, until everybody is connected, trains on others' groups and has learnt."""


class Violation(Exception):
    """Raised when something that must always hold does not."""


@dataclass(frozen=True)
class Ended:
    """How a simulation ended."""

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
    """Groups of others that were trained on."""
    problem: str = ""


def simulate(schedule: Schedule, lines: list[str] | None = None) -> Ended:
    """Run it. What must hold and does not is the result's `problem`."""
    began = time.process_time()
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="swarmnode-sim-", dir=place))
    world: World | None = None

    async def main() -> None:
        nonlocal world
        world = World(schedule, directory, lines)
        await world.run()

    handler = _Errors()
    logger = logging.getLogger("swarmnode")
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    problem = ""
    try:
        with structlog.testing.capture_logs() as told:
            determinism.run(schedule.seed, main)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = explain(error)
    else:
        handler.found += [f"logged: {entry['event']}" for entry in told if entry["log_level"] in ("error", "critical")]
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
        shutil.rmtree(directory, ignore_errors=True)
    assert world is not None, problem
    return Ended(
        schedule.seed, world.history.digest, world.history.events, world.now, time.process_time() - began, world.whole_after,
        len(world.nodes), sum(node.tally.steps for node in world.nodes.values()),
        sum(node.tally.used.total() for node in world.nodes.values()), problem or "; ".join(handler.found[:3]),
    )  # fmt: skip


def explain(error: BaseException) -> str:
    """The first cause in one line or, for what nobody expected, its traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Violation):
        return str(error)
    return "".join(traceback.format_exception(error))[-3000:]


class _Errors(logging.Handler):
    """What the product logs as an error is a defect here: no disk is full and no router answers."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"logged: {record.getMessage()}" + (f" ({record.exc_info[1]!r})" if record.exc_info else ""))


class World:
    def __init__(self, schedule: Schedule, directory: Path, lines: list[str] | None) -> None:
        self.schedule = schedule
        self.history = History(lines)
        self.swarm = swarm_of(tasks=TASKS)
        self.timeline = Timeline()
        self.wires = Wires(random.Random(f"wires {schedule.seed}"), self.timeline, self._make_way)
        self.medium = Medium(self.wires, self.timeline, self.history)
        self.nodes: dict[str, Node] = {}
        self.now = 0.0
        self.whole_after = -1.0
        self._places = {str(place.address): place for place in schedule.places}
        self._nursery: trio.Nursery
        for place in schedule.places:
            node = Node(place.name, schedule.seed, self.swarm, place.address, directory / place.name, place.traits)
            self.nodes[place.name] = node
        for node in self.nodes.values():
            node.bootstrap = [(self.nodes[b].address, self.nodes[b].peer) for b in schedule.bootstrap if b != node.name]

    def _make_way(self, source: str, target: str) -> Way:
        one, other = self._places[source], self._places[target]
        return Way(one.delay + other.delay, one.jitter + other.jitter, min(one.rate, other.rate))

    # -- the run

    async def run(self) -> None:
        try:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self.timeline.run)
                    self._nursery.start_soon(self._watch)
                    for place in self.schedule.places:
                        self._nursery.start_soon(self._boot_at, self.nodes[place.name], place.joins_at)
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
        """And take it back after its time."""
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
                ways = [
                    self.wires.way(a, b) for a in sorted(self._places) for b in sorted(self._places)
                    if a != b and ((a in inside and b not in inside) or (fault.kind == "cut" and a not in inside and b in inside))
                ]  # fmt: skip
                for way in ways:
                    way.cut = True
                await trio.sleep(fault.seconds)
                for way in ways:
                    way.cut = False
                self.wires.changed()
            case "slow":
                addresses = {str(node.address) for node in nodes}
                ways = [self.wires.way(a, b) for a in sorted(self._places) for b in sorted(self._places) if a != b and addresses & {a, b}]
                for way in ways:
                    way.rate, way.delay = way.rate / 50, way.delay + 0.5
                await trio.sleep(fault.seconds)
                for way in ways:
                    way.rate, way.delay = way.rate * 50, way.delay - 0.5

    # -- what must hold

    def honest(self) -> list[Node]:
        return list(self.nodes.values())

    async def _watch(self) -> None:
        while True:
            await trio.sleep(WATCH_SECONDS)
            self._check_always()

    def _check_always(self) -> None:
        now = trio.current_time()
        for wait in self.medium.waits.values():
            if now - wait.since > LONGEST_WAIT:
                self._fail(f"{self._name(wait.node)} has waited for {wait.what} for {now - wait.since:.0f} s")
        for node in self.honest():
            if node.life is not None:
                self._check_node(node, node.life, now)

    def _check_node(self, node: Node, life: Any, now: float) -> None:
        for other in self.honest():
            if life.network.reputation.standing(other.peer, now) is not Standing.GOOD:
                self._fail(f"{node.name} has no good word for {other.name}, which is honest")
        if life.rollouts.admission.statistics().last_internal_error:
            self._fail(f"{node.name}: {life.rollouts.admission.statistics().last_internal_error}")

    def _name(self, peer: str) -> str:
        return next((node.name for node in self.nodes.values() if node.peer == peer), peer)

    def _fail(self, what: str) -> None:
        raise Violation(f"at {trio.current_time():.0f} s: {what}")

    # -- the end

    async def _until_whole(self) -> None:
        """Returns when the faults are over and everything works; raises Violation if that takes too long."""
        await trio.sleep_until(self.schedule.calm_from)
        skill = {node.name: sum(node.memory.skill) for node in self.honest()}
        used = {node.name: node.tally.used.total() for node in self.honest()}
        missing: list[str] = ["nobody looked"]
        while missing:
            if trio.current_time() - self.schedule.calm_from > WHOLE_SECONDS:
                self._fail(f"not whole {WHOLE_SECONDS:.0f} s after the last fault: {'; '.join(missing[:5])}")
            await trio.sleep(WATCH_SECONDS)
            missing = [*self._unconnected(), *self._idle(used, skill)]
        self.whole_after = trio.current_time() - self.schedule.calm_from

    def _unconnected(self) -> list[str]:
        """Nodes that are dead, or that the first cannot reach over honest nodes' connections."""
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
        return [*missing, *(f"{node.name} is apart" for peer, node in alive.items() if peer not in reached)]

    def _idle(self, used: dict[str, int], skill: dict[str, float]) -> list[str]:
        found = []
        for node in self.honest():
            if node.tally.used.total() <= used[node.name]:
                found.append(f"{node.name} trains on nobody's groups")
            elif sum(node.memory.skill) <= skill[node.name] and sum(node.memory.skill) < 0.8 * 8 * 0.95:
                found.append(f"{node.name} does not learn")
        return found

