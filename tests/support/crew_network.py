"""The network half of a crew without a network: real links and stage sockets to real trainers, in
one trio program.

    # run `CrewTrainer`s there, in threads
    async with crew_network(directories) as network:
        await until(lambda: network.step >= 5)

It founds a crew of all trainers at the newest step that they offer, and resumes as crew control
does. It founds a new crew when a trainer joins. A stage belongs to one directory until the test
ends. Offers between nodes, spares and failures of the network are not simulated.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio

from swarmnode.link.messages import Drawn, Welcome
from swarmnode.link.server import LinkServer
from swarmnode.stages.crew_messages import (
    CrewEnd,
    CrewStart,
    FromTrainer,
    SocketOpen,
    StageAssignment,
    StageFault,
    StageStatus,
    TrainerOffer,
)
from swarmnode.stages.network.stream_proxy import socket_file

LINEAGE = b"\x07" * 32
SWARM = b"\x08" * 32


@dataclass
class Node:
    """The network process of one trainer. Implements `link_server.Trainer`."""

    stage: int
    directory: Path
    network: CrewNetwork
    pid: int = 0
    connected: bool = False
    offering: TrainerOffer | None = None
    """Set while the trainer is in no crew."""
    status: StageStatus | None = None
    published: list[Any] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    hellos: list[Any] = field(default_factory=list)
    averaging: list[Any] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """Source of the stage in each crew that had to restore it."""
    faults: list[StageFault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.link = LinkServer(self.directory, self)

    def hello(self, hello: Any) -> Welcome:
        self.hellos.append(hello)
        if hello.pid != self.pid:
            self.pid = hello.pid
        return Welcome(f"12D3KooW{self.stage}", SWARM)

    async def own_group(self, group: Any) -> None:
        self.published.append(group)

    def draw(self, draw: Any) -> Drawn:
        return Drawn(draw.request, [])

    def judged(self, judged: Any) -> None:
        pass

    def report(self, report: Any) -> None:
        self.reports.append(report)

    def weights(self, message: Any) -> None:
        self.averaging.append(message)

    def stages(self, message: FromTrainer) -> None:
        match message:
            case TrainerOffer():
                self.network.offered(self, message)
            case StageStatus():
                self.network.on_status(self, message)
            case StageFault():
                self.faults.append(message)
                if message.crew == self.network.crew:
                    self.network.end(message.reason)


class CrewNetwork:
    def __init__(self, directories: Sequence[Path], layers: Sequence[int]) -> None:
        self.crew = b""
        """The current crew. Empty when there is none."""
        self.lineage = LINEAGE
        self.layers = tuple(layers)
        self.nodes = [Node(i, directory, self) for i, directory in enumerate(directories)]
        self.formed = 0
        self.step = 0
        """Highest step that all stages report as committed."""
        self.running = False
        self.started_at: list[tuple[float, int]] = []
        """(time, step) of each start of a crew."""
        self._parked: dict[tuple[bytes, int, int, str], trio.SocketStream] = {}
        self._sockets: set[trio.SocketStream] = set()

    # ---- foundings -------------------------------------------------------------------------------

    def offered(self, node: Node, offering: TrainerOffer) -> None:
        node.connected, node.offering = True, offering
        if not self.crew and all(n.offering is not None for n in self.nodes):
            self._found()

    def left(self, node: Node) -> None:
        node.connected, node.offering = False, None
        self.end("a trainer is gone")

    def end(self, why: str) -> None:
        """End the crew. The next one forms when all trainers have sent their offers."""
        if self.crew:
            self.crew, self.running = b"", False
            for node in self.nodes:
                node.offering = None
                node.link.send_to_trainer(CrewEnd(why))

    def _found(self) -> None:
        """Found a crew at the newest step that all trainers have or lack by one. Otherwise use the
        newest step of any trainer."""
        self.formed += 1
        self.crew = self.formed.to_bytes(16, "big") * 2
        for stream in list(self._sockets):
            stream.socket.close()
        self._sockets.clear()
        self._parked.clear()
        step = self._newest()
        members = tuple(f"12D3KooW{node.stage}" for node in self.nodes)
        for node in self.nodes:
            node.status = node.offering = None
            path = str(socket_file(node.directory))
            node.link.send_to_trainer(
                StageAssignment(
                    self.crew, self.lineage, node.stage, self.layers, members, step, path
                )
            )

    def _newest(self) -> int:
        own = [
            [
                c
                for c in node.offering.held_blocks
                if c.lineage == self.lineage and c.stage == node.stage and c.where != "neighbour"
            ]
            for node in self.nodes
            if node.offering is not None
        ]
        steps = {c.step for copies in own for c in copies}
        has = lambda copies, step: any(c.step in (step, step - 1) for c in copies)
        common = [step for step in steps if all(has(copies, step) for copies in own)]
        return max(common or steps, default=0)

    def on_status(self, node: Node, status: StageStatus) -> None:
        if status.crew != self.crew:
            if not self.crew:
                node.link.send_to_trainer(CrewEnd("that crew is over"))
            return
        before, node.status = node.status, status
        if (
            status.source not in ("", "memory")
            and (before is None or before.phase != "active")
            and status.phase == "active"
        ):
            node.sources.append(status.source)
        statuses = [n.status for n in self.nodes]
        if not all(s is not None and s.phase == "active" for s in statuses):
            return
        self.step = max(self.step, min(s.step for s in statuses if s is not None))
        if not self.running:
            self.running = True
            self.started_at.append((trio.current_time(), self.step))
            self._broadcast(CrewStart(self.crew))

    def _broadcast(self, message: Any) -> None:
        for node in self.nodes:
            node.link.send_to_trainer(message)

    # ---- streams ---------------------------------------------------------------------------------

    async def run(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            for node in self.nodes:
                (node.directory / "run").mkdir(parents=True, exist_ok=True)
                await nursery.start(node.link.run)
                nursery.start_soon(self._watch, node)
                path = socket_file(node.directory)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
                await listener.bind(str(path))
                listener.listen(64)
                nursery.start_soon(self._listen, node, listener, nursery)
            task_status.started()

    async def _watch(self, node: Node) -> None:
        """Drop a trainer whose link ends."""
        was = False
        while True:
            await trio.sleep(0.05)
            now = node.link.statistics().connected
            if was and not now:
                self.left(node)
            was = now

    async def _listen(self, node: Node, listener: Any, nursery: trio.Nursery) -> None:
        with listener:
            while True:
                connection, _ = await listener.accept()
                nursery.start_soon(self._pipe, node, trio.SocketStream(connection))

    async def _pipe(self, node: Node, stream: trio.SocketStream) -> None:
        try:
            size = int.from_bytes(await _exactly(stream, 4), "big")
            opened = msgspec.msgpack.decode(await _exactly(stream, size), type=SocketOpen)
            if opened.crew != self.crew:
                return await stream.aclose()
            self._sockets.add(stream)
            low, high = sorted((node.stage, opened.stage))
            key = (opened.crew, low, high, opened.kind)
            other = self._parked.pop(key, None)
            if other is None:
                self._parked[key] = stream
                return None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_pump, stream, other)
                nursery.start_soon(_pump, other, stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
            await trio.aclose_forcefully(stream)


async def _pump(source: trio.SocketStream, target: trio.SocketStream) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async for data in source:
            await target.send_all(data)
    await trio.aclose_forcefully(target)
    await trio.aclose_forcefully(source)


async def _exactly(stream: trio.SocketStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        some = await stream.receive_some(count - len(data))
        if not some:
            raise EOFError
        data += some
    return data


@contextlib.asynccontextmanager
async def crew_network(
    directories: Sequence[Path], layers: Sequence[int]
) -> AsyncIterator[CrewNetwork]:
    network = CrewNetwork(directories, layers)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        yield network
        nursery.cancel_scope.cancel()
