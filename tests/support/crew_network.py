"""The network half of a crew without a network: real links and stage sockets to real trainers, one roster in between, in one trio program.

    async with crew_network(directories) as network:        # run `CrewTrainer`s there, in threads or processes
        await until(lambda: network.step >= 5)

It founds a crew of all, settles and resumes as crew control does, and makes a new roster when a trainer comes; a seat belongs to its
directory for ever. What it does not have: votes, leases, spares, failures of its own.
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

from swarmnode.crew import local
from swarmnode.crew.local import Assigned, Offering, Open, Released, Resumed, Settled, StageStatus, Suspended
from swarmnode.crew.messages import Status
from swarmnode.crew.settling import settle
from swarmnode.link.messages import Drawn, Welcome
from swarmnode.link.server import LinkServer

CREW = b"\x07" * 32
SWARM = b"\x08" * 32


@dataclass
class Node:
    """One trainer's network process. Is a `link_server.Trainer`."""

    stage: int
    directory: Path
    network: CrewNetwork
    pid: int = 0
    connected: bool = False
    epoch: int = 0
    """Of the stage: a trainer that begins without it in memory is another holder."""
    held: bool = False
    status: StageStatus | None = None
    published: list[Any] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    hellos: list[Any] = field(default_factory=list)
    averaging: list[Any] = field(default_factory=list)
    rungs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.link = LinkServer(self.directory, self)

    def hello(self, hello: Any) -> Welcome:
        self.hellos.append(hello)
        if hello.pid != self.pid:
            self.pid, self.held = hello.pid, False
        return Welcome(f"12D3KooW{self.stage}", SWARM)

    async def own_group(self, group: Any) -> None:
        self.published.append(group)

    def draw(self, draw: Any) -> Drawn:
        return Drawn(draw.request, [], useful_arrived=0)

    def judged(self, judged: Any) -> None:
        pass

    def report(self, report: Any) -> None:
        self.reports.append(report)

    def weights(self, message: Any) -> None:
        self.averaging.append(message)

    def stages(self, message: local.FromTrainer) -> None:
        if isinstance(message, Offering):
            if not self.connected:  # an offer may be made again
                self.network.came(self)
        else:
            self.network.said(self, message)


class CrewNetwork:
    def __init__(self, directories: Sequence[Path], layers: Sequence[int], crew: bytes = CREW) -> None:
        self.crew = crew
        self.layers = tuple(layers)
        self.nodes = [Node(i, directory, self) for i, directory in enumerate(directories)]
        self.epoch = 0
        self.step = 0
        """Committed, as far as all have said."""
        self.running = False
        self.resumed_at: list[tuple[float, int]] = []
        """(time, step) of each beginning to run."""
        self._settled: Settled | None = None
        self._broken = False
        """Only a new roster helps."""
        self._parked: dict[tuple[int, int, int, str], trio.SocketStream] = {}
        self._sockets: set[trio.SocketStream] = set()

    # ---- rosters -------------------------------------------------------------------------------------------------------

    def came(self, node: Node) -> None:
        node.connected = True
        if all(n.connected for n in self.nodes):
            self.new_roster()

    def left(self, node: Node) -> None:
        node.connected = node.held = False
        self._broken = True
        if self.running:
            self.running = False
            self._tell(Suspended("a trainer is gone"))

    def new_roster(self) -> None:
        """Everybody stops, says where, and goes on."""
        self.epoch += 1
        self.running, self._settled, self._broken = False, None, False
        for stream in list(self._sockets):
            stream.socket.close()
        self._sockets.clear()
        self._parked.clear()
        for node in self.nodes:
            node.epoch += not node.held
            node.status = None
        epochs = tuple(node.epoch for node in self.nodes)
        members = tuple(f"12D3KooW{node.stage}" for node in self.nodes)
        for node in self.nodes:
            founding = node.epoch == 1 and self.step == 0 and not node.held
            path = str(local.socket_file(node.directory))
            node.link.send_to_trainer(
                Assigned(self.crew, self.epoch, node.stage, epochs, self.layers, members, self.step, founding, node.held, path)
            )  # fmt: skip

    def said(self, node: Node, status: StageStatus) -> None:
        if status.roster_epoch != self.epoch:
            return
        before = node.status
        node.status = status
        if status.rung and (before is None or before.phase != "active") and status.phase == "active":
            node.rungs.append(status.rung)
        statuses = [n.status for n in self.nodes]
        if self._settled is None:
            self._settled = settle(self.epoch, self.step, [_report(s) for s in statuses])
            if self._settled is not None:
                self._tell(self._settled)
            return
        if not all(s is not None and s.phase == "active" and s.step >= self._settled.step for s in statuses) or self._broken:
            return
        for n in self.nodes:
            n.held = True
        self.step = max(self.step, min(s.step for s in statuses if s is not None))
        if not self.running:
            self.running = True
            self.resumed_at.append((trio.current_time(), self.step))
            self._tell(Resumed(self.epoch))

    def _tell(self, message: Any) -> None:
        for node in self.nodes:
            node.link.send_to_trainer(message)

    def release(self, node: Node) -> None:
        node.held = False
        node.link.send_to_trainer(Released("for a test"))

    # ---- streams -------------------------------------------------------------------------------------------------------

    async def run(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            for node in self.nodes:
                (node.directory / "run").mkdir(parents=True, exist_ok=True)
                await nursery.start(node.link.run)
                nursery.start_soon(self._watch, node)
                path = local.socket_file(node.directory)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
                await listener.bind(str(path))
                listener.listen(64)
                nursery.start_soon(self._listen, node, listener, nursery)
            task_status.started()

    async def _watch(self, node: Node) -> None:
        """A link that ends is a trainer that is gone."""
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
            opened = msgspec.msgpack.decode(await _exactly(stream, size), type=Open)
            if opened.roster_epoch != self.epoch:
                return await stream.aclose()
            self._sockets.add(stream)
            low, high = sorted((node.stage, opened.stage))
            key = (opened.roster_epoch, low, high, opened.kind)
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


def _report(status: StageStatus | None) -> Status | None:
    """As crew control understands it."""
    if status is None:
        return None
    phase = "probation" if status.phase == "active" else status.phase
    return Status(
        phase, status.step, status.prepared, status.attempt, status.clip, status.learning_rate, status.progress, status.load,
        journal=status.rung == "R0" and status.phase not in ("ready", "active"),
    )  # type: ignore[arg-type]  # fmt: skip


@contextlib.asynccontextmanager
async def crew_network(directories: Sequence[Path], layers: Sequence[int]) -> AsyncIterator[CrewNetwork]:
    network = CrewNetwork(directories, layers)
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        yield network
        nursery.cancel_scope.cancel()
