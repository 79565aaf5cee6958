"""One simulated node: the components of `daemon/node.py` over the simulated network, with a
learner, and the state that outlives it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.config import NetworkConfig, SharingConfig, StagesConfig, WeightsConfig
from swarmnode.daemon.trainer_port import TrainerPort
from swarmnode.link.messages import Welcome
from swarmnode.observe.watch import TrainerWatch
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.budget import Meter
from swarmnode.rollouts.groups import GroupRules
from swarmnode.rollouts.network.exchange import RolloutExchange
from swarmnode.stages.network.crew_service import NodeCallbacks, StageService
from swarmnode.swarm.known import KnownPeers
from swarmnode.weights.network.service import WeightService
from swarmnode.wire.envelope import Credentials, peer_id
from swarmnode.wire.messages import Summary
from tests.support.fakes.scorer import InProcessScorer
from tests.support.sim import determinism
from tests.support.sim.averaging import Averaging
from tests.support.sim.learner import TASKS, Learner, Memory, Pace, Tally
from tests.support.sim.network import Medium, SimNetwork

SNAPSHOT_SECONDS = 60.0
KEPT_SNAPSHOTS = 8


def key_of(seed: int, name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(
        hashlib.blake2b(f"{seed} {name}".encode(), digest_size=32).digest()
    )


@dataclass
class Traits:
    """Properties of a node that the schedule decides."""

    pace: Pace
    upload: int = 0
    """Bytes per second. 0: no cap."""
    skew: float = 0.0
    """Error of its clock in seconds."""


@dataclass
class Life:
    """One process of a node. `scope` ends it."""

    scope: trio.CancelScope
    network: SimNetwork
    rollouts: RolloutExchange
    weights: WeightService
    meter: Meter
    port: TrainerPort
    trainer: trio.CancelScope | None = None
    learner: Learner | None = None
    """None while there is no trainer."""
    ended: trio.Event = field(default_factory=trio.Event)
    began: float = 0.0


class Node:
    """A node. name: used in the history. life: None while it is dead."""

    def __init__(
        self, name: str, seed: int, swarm: bytes, address: Address, directory: Path, traits: Traits
    ) -> None:
        self.name = name
        self.key = key_of(seed, name)
        self.peer = peer_id(self.key.public_key().public_bytes_raw())
        self.address = address
        self.swarm = swarm
        self.traits = traits
        self.life: Life | None = None
        self.lives = 0
        self.memory = Memory()
        self.tally = Tally()
        self.defects: list[str] = []
        """Errors of the network process that the trainer found."""
        self.bootstrap: list[tuple[Address, str]] = []
        self._directory = directory
        self._rng = random.Random(f"{seed} {name}")
        self._disks: list[dict[Path, bytes]] = []

    def clock(self) -> float:
        return determinism.now() + self.traits.skew

    async def live(
        self,
        medium: Medium,
        note: Callable[[str], None],
        task_status: Any = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run until the scope is cancelled. Any exception is a defect."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self.lives += 1
        async with trio.open_nursery() as nursery:
            life = self.life = self._make(medium, nursery)
            life.network.start()
            await nursery.start(life.rollouts.run)
            await nursery.start(life.weights.run)
            nursery.start_soon(life.meter.run)
            nursery.start_soon(self._keep_disks)
            task_status.started()
            nursery.start_soon(self._train, note)
        life.ended.set()

    def _make(self, medium: Medium, nursery: trio.Nursery) -> Life:
        rng, traits = self._rng, self.traits
        own = lambda: random.Random(rng.getrandbits(64))
        credentials = Credentials(self.key, self.swarm)
        network = SimNetwork(
            medium,
            credentials,
            self.address,
            self._directory,
            self.bootstrap,
            own(),
            self.clock,
            nursery,
        )
        network.neighbours.detect_duplicates()
        meter = Meter(
            NetworkConfig(upload_bytes_per_second=traits.upload),
            "",
            self._directory,
            network.traffic,
            clock=self.clock,
        )
        rollouts = RolloutExchange(
            network,
            InProcessScorer(seconds=0.01),
            credentials,
            GroupRules(TASKS),
            SharingConfig(),
            clock=self.clock,
            rng=own(),
            allows=meter.allows,
        )
        crew = StageService(
            network,
            StagesConfig(mode="off"),
            KnownPeers(),
            self._directory,
            NodeCallbacks(lambda message: False),
            rng=own(),
        )
        weights = WeightService(
            network,
            self.swarm,
            WeightsConfig(sync_every=traits.pace.sync_every, fragments=1),
            KnownPeers(everyone=True),
            self._directory,
            lambda message: life.learner is not None and life.learner.averaging.receive(message),
            budget=meter.allows,
        )
        port = TrainerPort(Welcome(self.peer, self.swarm), TrainerWatch(), rollouts, weights, crew)
        life = Life(
            nursery.cancel_scope, network, rollouts, weights, meter, port, began=trio.current_time()
        )
        network.neighbours.own_summary = lambda created_at: Summary(
            self.name,
            "sim",
            created_at,
            int(trio.current_time() - life.began),
            self.memory.version,
            self.memory.version,
            0.0,
            self.memory.version,
            rollouts.statistics().published,
            len(network.connected()),
        )
        return life

    # -- trainer

    async def _train(self, note: Callable[[str], None]) -> None:
        """Run a trainer, and a new one after each kill."""
        life = self.life
        assert life is not None
        while True:
            with trio.CancelScope() as life.trainer:
                memory = self.memory.copy()
                life.learner = Learner(
                    self.peer,
                    self.swarm,
                    life.port,
                    memory,
                    self.tally,
                    self.traits.pace,
                    self._rng,
                    note,
                    self._averaging,
                )
                await life.learner.run(self._saved)
            life.learner = None
            life.port.trainer_left()
            await trio.sleep(self._rng.uniform(2.0, 10.0))

    def _averaging(self, learner: Learner) -> Averaging:
        memory, life = learner.memory, self.life
        assert life is not None

        def set_skill(values: list[float]) -> None:
            memory.skill[:] = values

        return Averaging(
            self.peer,
            memory.outer_step,
            lambda: memory.skill,
            set_skill,
            self._directory,
            life.port.weights,
            self._rng,
            lambda what: self.defects.append(f"{self.name}: {what}"),
            self.tally.averaged,
        )

    def _saved(self, memory: Memory) -> None:
        self.memory = memory

    # -- end of a life

    async def kill(self, *, silently: bool, old_disk: bool) -> None:
        """Simulate SIGKILL, or (silently) a power cut: the node writes nothing on exit.

        Args:
            old_disk: Restart with the files of some minutes ago.
        """
        life = self.life
        if life is None:
            return
        disk = self._read_disk()
        if old_disk and self._disks:
            disk = self._disks[0]
        life.network.stop(silently=silently)
        self.life = None
        life.scope.cancel()
        await life.ended.wait()
        for path in [path for path in self._directory.rglob("*") if path.is_file()]:
            path.unlink()
        for path, data in disk.items():
            path.write_bytes(data)

    async def _keep_disks(self) -> None:
        while True:
            await trio.sleep(SNAPSHOT_SECONDS)
            self._disks = [*self._disks, self._read_disk()][-KEPT_SNAPSHOTS:]

    def _read_disk(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(self._directory.glob("*.json"))}
