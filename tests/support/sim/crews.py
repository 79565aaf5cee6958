"""Crews in the deterministic simulator: the product's `StageService` over the simulated `p2p.api`,
with a trainer whose stage is a number.

Members commit a step one by one, a few milliseconds apart, and write it to their disks. A kill in
between leaves stages at n and n − 1. Neighbours' checkpoints are written every few steps.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
from msgspec.structs import replace

from swarmnode.config import StagesConfig
from swarmnode.p2p.addresses import Address
from swarmnode.stages.crew_messages import (
    CrewEnd,
    CrewStart,
    HeldBlock,
    StageAssignment,
    StageFault,
    StagePhase,
    StageStatus,
    ToTrainer,
    TrainerOffer,
)
from swarmnode.stages.network.crew_service import NodeCallbacks, StageService
from swarmnode.stages.network.crew_state import MembershipSettings
from swarmnode.stages.specs import ModelCost, PartCost
from swarmnode.swarm.known import KnownPeers
from swarmnode.wire.envelope import Credentials
from tests.support.sim import determinism
from tests.support.sim.network import Medium, SimNetwork
from tests.support.sim.node import key_of
from tests.support.sim.wires import History, Timeline, Way, Wires

STEP_SECONDS = 0.5
CHECKPOINT_EVERY = 5
LAYERS = (1, 1, 1, 1)
CALL_SECONDS = 20.0
"""The head abandons a step after this time."""


class Trainer:
    """One trainer process. memory: state of its stage. None: untrained."""

    def __init__(self, node: CrewNode) -> None:
        self.node, self.rng = node, node.rng
        self.pid = node.rng.getrandbits(30)
        self.memory: HeldBlock | None = None
        self.assigned: StageAssignment | None = None
        self.active = self.running = False
        self.load = self.progress = 0
        self.scope = trio.CancelScope()
        self.inbox, self.received = trio.open_memory_channel[ToTrainer](256)

    async def run(self) -> None:
        service = self.node.service
        service.hello(self.pid)
        self._offer()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report)
            try:
                async for message in self.received:
                    match message:
                        case StageAssignment():
                            self._forget()
                            self.assigned = message
                            nursery.start_soon(self._work, message, self.scope)
                        case CrewStart():
                            self.running = True
                        case CrewEnd():
                            self._forget()
                            await trio.sleep(self.rng.uniform(0.0, 0.5))
                            self._offer()
            finally:
                self.scope.cancel()

    def _forget(self) -> None:
        self.scope.cancel()
        self.scope = trio.CancelScope()
        self.assigned, self.active, self.running, self.load = None, False, False, 0

    def _offer(self) -> None:
        memory = [self.memory] if self.memory is not None else []
        copies = (*memory, *self.node.disk.values())
        if self.node.liar:
            lineage = copies[0].lineage if copies else b"x" * 32
            claims = (HeldBlock(lineage, LAYERS, number, 10**12, "disk") for number in range(4))
            copies = (*copies, *claims)
        cost = self.node.world.cost
        self.node.service.receive(TrainerOffer(bytes(32), 1.0, 1.0, cost, copies))

    async def _report(self) -> None:
        while True:
            self.report()
            await trio.sleep(1.0)

    def report(self) -> None:
        if (a := self.assigned) is not None:
            step = self.memory.step if self.active and self.memory else a.step
            phase: StagePhase = "active" if self.active else "loading"
            self.node.service.receive(
                StageStatus(a.crew, a.stage, phase, step, self.progress, load=self.load)
            )

    async def _work(self, assigned: StageAssignment, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(self.rng.uniform(0.1, 1.0))
            self._restore(assigned)
            self.active = True
            self.report()
            if assigned.stage == 0:
                await self._lead(assigned)

    def _restore(self, assigned: StageAssignment) -> None:
        """Restore from memory or disk at n or n − 1. Otherwise use an older state, which is
        counted."""
        own = [self.memory, *(copy for copy in self.node.disk.values() if copy.where == "disk")]
        exact = assigned.step == 0 or any(
            copy is not None
            and (copy.lineage, copy.stage) == (assigned.lineage, assigned.stage)
            and assigned.step - 1 <= copy.step <= assigned.step
            for copy in own
        )
        self.node.world.restored(self.node, assigned, exact)
        self.memory = HeldBlock(assigned.lineage, LAYERS, assigned.stage, assigned.step, "memory")

    async def _lead(self, assigned: StageAssignment) -> None:
        """Propose and commit steps, member by member."""
        world = self.node.world
        while True:
            peers = [world.by_peer[peer] for peer in assigned.members]
            await trio.sleep(STEP_SECONDS * max(peer.slowness for peer in peers))
            with trio.move_on_after(CALL_SECONDS):
                while not (trainers := self._ready(peers, assigned)):  # noqa: ASYNC110
                    await trio.sleep(0.2)
                if not self.running:
                    continue
                for trainer in trainers:
                    await trio.sleep(self.rng.uniform(0.0, 0.02))
                    if trainer.assigned is assigned or (
                        trainer.assigned is not None and trainer.assigned.crew == assigned.crew
                    ):
                        trainer.take()
                continue
            self.node.service.receive(StageFault(assigned.crew, None, "a step took too long"))

    def _ready(self, peers: list[CrewNode], assigned: StageAssignment) -> list[Trainer]:
        """Return the trainers of all members, the head's last. Empty while one of them cannot
        work."""
        found = []
        for peer in reversed(peers):
            trainer = peer.trainer
            if trainer is None or trainer.assigned is None or peer.is_cut_from(self.node):
                return []
            if trainer.assigned.crew != assigned.crew or not trainer.running:
                return []
            trainer.load = 0
            if peer.liar:
                trainer.load = 1
                return []
            found.append(trainer)
        return found

    def take(self) -> None:
        assert self.memory is not None
        step = self.memory.step + 1
        self.memory = replace(self.memory, step=step)
        self.node.disk["own"] = replace(self.memory, where="disk")
        self.progress += 1
        self.report()
        self.node.world.took_step(self.node, self.memory)


class CrewNode:
    """A machine.

    Attributes:
        disk: Outlives the processes.
        slowness: Factor of its step time.
        liar: Claims every stage at an absurd step, and never reports a finished step.
    """

    def __init__(self, world: CrewWorld, name: str, number: int) -> None:
        self.world, self.name = world, name
        self.rng = random.Random(f"{world.seed} {name}")
        self.credentials = Credentials(key_of(world.seed, name), b"s" * 32)
        self.peer = self.credentials.peer
        self.address = Address("ip4", f"10.0.0.{number + 1}", 4000)
        self.disk: dict[str, HeldBlock] = {}
        self.slowness, self.liar = 1.0, False
        self.trainer: Trainer | None = None
        self.network: SimNetwork | None = None
        self.service: StageService
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    @property
    def state(self) -> str:
        return self.service.statistics().crew.state if self.network is not None else "dead"

    def is_cut_from(self, other: CrewNode) -> bool:
        wires, here, there = self.world.wires, str(self.address), str(other.address)
        return not (wires.passes(here, there) and wires.passes(there, here))

    async def live(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # type: ignore[name-defined]
        world, directory = self.world, self.world.directory / self.name
        (directory / "run").mkdir(parents=True, exist_ok=True)
        known = [(one.address, one.peer) for one in world.nodes[:2] if one is not self]
        self._ended = trio.Event()
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                network = self.network = SimNetwork(
                    world.medium,
                    self.credentials,
                    self.address,
                    directory,
                    known,
                    random.Random(self.rng.getrandbits(64)),
                    determinism.now,
                    nursery,
                )
                network.start()
                self.service = StageService(
                    network,
                    StagesConfig(),
                    KnownPeers(everyone=True),
                    directory,
                    NodeCallbacks(self._send_to_trainer),
                    settings=world.settings,
                    rng=random.Random(self.rng.getrandbits(64)),
                )
                await nursery.start(self.service.run)
                task_status.started()
                self.trainer = Trainer(self)
                await self.trainer.run()
        self._ended.set()

    def _send_to_trainer(self, message: ToTrainer) -> bool:
        if self.trainer is None:
            return False
        self.trainer.inbox.send_nowait(message)
        return True

    async def kill(self, *, lose_disk: bool = False, silently: bool = False) -> None:
        """Simulate SIGKILL of all processes, or (silently) a power cut."""
        if self.network is not None:
            self.network.stop(silently=silently)
            self.network = self.trainer = None
            self._scope.cancel()
            await self._ended.wait()
        if lose_disk:
            self.disk.clear()


class CrewWorld:
    """All nodes and the observations of them.

    Attributes:
        inexact: Stages restored from an older state.
        lost: Steps below which a lineage continued although they were taken.
    """

    def __init__(self, seed: int, nodes: int, timeline: Timeline, directory: Path) -> None:
        self.seed, self.directory = seed, directory
        self.rng = random.Random(f"crews {seed}")
        self.settings = MembershipSettings(stages=4, base_wait_seconds=120.0)
        self.cost = ModelCost(PartCost(0, 0), (PartCost(1.0, 0.01),) * 4, PartCost(0, 0))
        self.wires = Wires(
            random.Random(f"wires {seed}"), timeline, lambda a, b: Way(0.02, 0.01, 1e6)
        )
        self.medium = Medium(self.wires, timeline, History())
        self.nodes = [CrewNode(self, f"n{number}", number) for number in range(nodes)]
        self.by_peer = {node.peer: node for node in self.nodes}
        self.inexact = 0
        self.newest: dict[bytes, int] = {}
        self.lost: list[str] = []
        self.steps_at: list[float] = []
        """Times at which the head of a crew took a step."""
        self.nursery: trio.Nursery

    def restored(self, node: CrewNode, assigned: StageAssignment, exact: bool) -> None:
        self.inexact += not exact
        newest = self.newest.get(assigned.lineage, 0)
        if assigned.step < newest - 1:
            self.lost.append(f"{node.name} continues at {assigned.step} instead of {newest}")

    def took_step(self, node: CrewNode, copy: HeldBlock) -> None:
        self.newest[copy.lineage] = max(copy.step, self.newest.get(copy.lineage, 0))
        if copy.stage == 0:
            self.steps_at.append(trio.current_time())
        if copy.step % CHECKPOINT_EVERY == 0:
            assigned = node.trainer.assigned if node.trainer is not None else None
            if assigned is not None:
                peers = assigned.members
                keeper = self.by_peer[peers[(assigned.stage + 1) % len(peers)]]
                kept = replace(copy, where="neighbour")
                keeper.disk[f"of {assigned.stage}"] = kept

    async def boot(self, *nodes: CrewNode) -> None:
        for node in nodes:
            await self.nursery.start(node.live)

    def crew(self) -> list[CrewNode]:
        """Return the members of a running crew by stage. Empty when there is none."""
        for node in self.nodes:
            if node.state == "running":
                slots = node.service.statistics().crew.slots
                return [self.by_peer[slot.peer] for slot in slots]
        return []

    async def next_step(self, within: float) -> float:
        """Wait for the next committed step. Return the seconds it took."""
        began, count = trio.current_time(), len(self.steps_at)
        with trio.move_on_after(within):
            while len(self.steps_at) == count:  # noqa: ASYNC110
                await trio.sleep(0.05)
            return trio.current_time() - began
        raise AssertionError(f"no step for {within} s: {[node.state for node in self.nodes]}")

    def cut(self, inside: list[CrewNode], is_cut: bool) -> None:
        """Cut the links between `inside` and all other nodes, or repair them."""
        for one in self.nodes:
            for other in self.nodes:
                if (one in inside) != (other in inside):
                    self.wires.way(str(one.address), str(other.address)).cut = is_cut
        self.wires.changed()


def run(seed: int, nodes: int, story: Callable[[CrewWorld], Awaitable[None]]) -> CrewWorld:
    """Run `story` in a world with this number of nodes, all of them running."""
    directory = Path(tempfile.mkdtemp(prefix="swarmnode-crews-"))
    made: list[CrewWorld] = []

    async def main(timeline: Timeline) -> None:
        world = CrewWorld(seed, nodes, timeline, directory)
        made.append(world)
        async with trio.open_nursery() as world.nursery:
            world.nursery.start_soon(timeline.run)
            await world.boot(*world.nodes)
            await story(world)
            for node in world.nodes:
                await node.kill()
            world.nursery.cancel_scope.cancel()

    try:
        determinism.run(seed, main)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return made[0]
