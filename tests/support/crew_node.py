"""A crew node over a real network with a simulated trainer. The trainer opens stage streams,
reports, and counts steps.

    async with crew_node(network, directory) as node:
        node.trainer.step                     # steps that its stage has taken

The step protocol is one u64 in the frame streams: the head sends the next step, the other stages
take it and acknowledge it.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import trio

from swarmnode.config import StagesConfig
from swarmnode.p2p.network import Libp2pNetwork
from swarmnode.stages import wire
from swarmnode.stages.crew import MembershipSettings
from swarmnode.stages.service import NodeCallbacks, StageService
from swarmnode.stages.wire import Capacity, HeldBlock, ModelCost, PartCost, StreamPeers
from tests.support.pipe_ends import open_pipe

MODEL = b"\x05" * 32
LAYER = 1e9
"""Size of one layer in bytes."""
QUICK = MembershipSettings(
    tick_seconds=0.25,
    heartbeat_seconds=1.0,
    offer_seconds=2.0,
    gather_seconds=1.5,
    turn_seconds=2.0,
    discard_wait_seconds=5.0,
    join_seconds=4.0,
    gone_seconds=8.0,
    base_wait_seconds=25.0,
    strike_seconds=2.0,
)
"""Timeouts of about half their real values. A request takes milliseconds of CPU, and all nodes of a
test share one thread."""
STATUS_SECONDS = 0.5
STEP_SECONDS = 0.1
_STEP = struct.Struct(">Q")
_pids = itertools.count(1000)


class FakeTrainer:
    """A trainer process for a model of `layers` layers that can hold one layer."""

    def __init__(self, service: StageService, layers: int) -> None:
        self.pid = next(_pids)
        self.step = 0
        self.assigned: wire.StageAssignment | None = None
        self.running = False
        self.keeps: list[tuple[int, int]] = []
        """(stage, step) of its copies of other stages."""
        self._service = service
        self._trainer_offer = wire.TrainerOffer(
            MODEL,
            Capacity(1.3 * LAYER, 1e9),
            ModelCost(
                PartCost(0.1 * LAYER, 0),
                (PartCost(LAYER, 1e6),) * layers,
                PartCost(0.1 * LAYER, 1e5),
            ),
        )
        self._phase: wire.StagePhase = "loading"
        self._lineage, self._stage, self._layers = b"", 0, (1,) * layers
        self._progress = 0
        self._source = ""
        self._scope = trio.CancelScope()
        self._outbox, self._inbox = trio.open_memory_channel[wire.ToTrainer](256)

    def connect(self) -> None:
        self._service.hello(self.pid)
        self._offer()

    def _offer(self) -> None:
        """Offer the layer in memory, as of the last step that all stages have taken."""
        own = (
            [HeldBlock(self._lineage, self._layers, self._stage, self.step, "memory")]
            if self.step
            else []
        )
        stored = [
            HeldBlock(self._lineage, self._layers, i, step, "neighbour")
            for i, step in self.keeps
            if self._lineage
        ]
        copies = (*own, *stored)
        self._service.receive(msgspec.structs.replace(self._trainer_offer, held_blocks=copies))

    def stop(self) -> None:
        self._scope.cancel()

    def take_over(self, other: FakeTrainer) -> None:
        """Take over the memory of another trainer process."""
        self.step, self._lineage, self._stage = other.step, other._lineage, other._stage
        self._offer()

    def tell(self, message: wire.ToTrainer) -> bool:
        self._outbox.send_nowait(message)
        return True

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._repeat)
            async for message in self._inbox:
                match message:
                    case wire.StageAssignment():
                        self._scope.cancel()
                        self._scope = trio.CancelScope()
                        self.assigned, self.running = message, False
                        self._source = "base" if message.step == 0 else "memory"
                        self._lineage, self._stage = message.lineage, message.stage
                        self.step, self._phase = message.step, "active"
                        nursery.start_soon(self._serve, message, self._scope)
                    case wire.CrewStart():
                        self.running = True
                    case wire.CrewEnd():
                        self._scope.cancel()
                        self.assigned, self.running = None, False
                        self._offer()
                self._status()

    def _status(self) -> None:
        if self.assigned is not None:
            a = self.assigned
            self._service.receive(
                wire.StageStatus(
                    a.crew, a.stage, self._phase, self.step, self._progress, source=self._source
                )
            )

    async def _repeat(self) -> None:
        while True:
            self._status()
            await trio.sleep(STATUS_SECONDS)

    async def _serve(self, assigned: wire.StageAssignment, scope: trio.CancelScope) -> None:
        """Open the streams of one crew, from every stage to every other stage."""
        peers = StreamPeers(assigned.crew, assigned.stage, assigned.members)
        with scope, contextlib.suppress(trio.BrokenResourceError, OSError):
            async with contextlib.AsyncExitStack() as stack:
                streams: dict[int, Any] = {}
                for stage, peer in enumerate(assigned.members):
                    if peer and stage != assigned.stage:
                        streams[stage] = await stack.enter_async_context(
                            await open_pipe(self._service.proxy, peers, stage)
                        )
                if assigned.stage == 0:
                    await self._lead(list(streams.values()))
                elif 0 in streams:
                    await self._follow(streams[0])
                await trio.sleep_forever()

    async def _lead(self, streams: list[Any]) -> None:
        while True:
            await trio.sleep(STEP_SECONDS)
            if not self.running:
                continue
            for stream in streams:
                await stream.send_all(_STEP.pack(self.step + 1))
            for stream in streams:
                await _exactly(stream)
            self.step += 1
            self._progress += 1

    async def _follow(self, stream: Any) -> None:
        while (step := await _exactly(stream)) is not None:
            while not self.running:  # noqa: ASYNC110
                await trio.sleep(STEP_SECONDS)
            self.step = step
            self._progress += 1
            await stream.send_all(_STEP.pack(step))


class CrewNode:
    """The network and the stage service of one node."""

    def __init__(
        self,
        network: Libp2pNetwork,
        directory: Path,
        settings: MembershipSettings,
        cfg: StagesConfig,
        layers: int,
    ) -> None:
        self.network = network
        self.paused = ""
        self._layers = layers
        self._gone = trio.Event()
        self._scope = trio.CancelScope()
        self.service = StageService(
            network,
            cfg,
            directory,
            NodeCallbacks(self._send_to_trainer, lambda: self.paused),
            settings=settings,
        )
        self.trainer = FakeTrainer(self.service, layers)

    def _send_to_trainer(self, message: wire.ToTrainer) -> bool:
        return self.trainer.tell(message)

    @property
    def state(self) -> str:
        return self.service.statistics().crew.state

    @property
    def crew(self) -> str:
        return self.service.statistics().crew.id

    @property
    def stage(self) -> int | None:
        return self.service.statistics().crew.stage

    async def run(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.service.run)
            task_status.started()
            while True:
                self._scope = trio.CancelScope()
                with self._scope:
                    self.trainer.connect()
                    await self.trainer.run()
                await self._gone.wait()

    def kill_trainer(self) -> None:
        """Simulate kill -9: the memory is lost and the streams end."""
        self._gone = trio.Event()
        self._scope.cancel()
        self.trainer.stop()
        self.service.trainer_left()

    def start_trainer(self) -> None:
        """Start a new trainer process."""
        self.trainer = FakeTrainer(self.service, self._layers)
        self._gone.set()


@contextlib.asynccontextmanager
async def crew_node(
    network: Libp2pNetwork,
    directory: Path,
    *,
    settings: MembershipSettings = QUICK,
    layers: int = 3,
    **cfg: Any,
) -> AsyncIterator[CrewNode]:
    """Yield a running node whose trainer offers to hold one of `layers` layers."""
    (directory / "run").mkdir(exist_ok=True)
    node = CrewNode(
        network, directory, settings, StagesConfig(**{"trust": ["anyone"], **cfg}), layers
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(node.run)
        try:
            yield node
        finally:
            nursery.cancel_scope.cancel()


async def _exactly(stream: Any) -> int | None:
    data = b""
    while len(data) < _STEP.size:
        more = await stream.receive_some(_STEP.size - len(data))
        if not more:
            return None
        data += more
    return int(_STEP.unpack(data)[0])
