"""The network process's end of the link: answers the trainer, and survives its restarts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import structlog
import trio

from swarmnode.files import unix_listener
from swarmnode.link.frames import SOCKET, FrameError, Unpacker, pack, to_network
from swarmnode.link.messages import Hello, Report, ToNetwork, Welcome
from swarmnode.rollouts.groups import Draw, Drawn, Judged, OwnGroup
from swarmnode.stages.crew_messages import (
    FromTrainer,
    StageFault,
    StageStatus,
    ToTrainer,
    TrainerOffer,
)
from swarmnode.weights import local

log = structlog.get_logger("swarmnode.link")

WRITE_SECONDS = 10.0
MAX_QUEUED_MESSAGES = 256
"""Maximum number of unrequested messages that wait for the trainer; further ones are dropped."""

Unrequested = local.ToTrainer | ToTrainer


class TrainerHandler(Protocol):
    """Handles the trainer's messages in the network process."""

    def hello(self, hello: Hello) -> Welcome: ...
    def own_group(self, group: OwnGroup) -> Awaitable[None]: ...
    def draw(self, draw: Draw) -> Drawn: ...
    def judged(self, judged: Judged) -> None: ...
    def report(self, report: Report) -> None: ...
    def weights(self, message: local.FromTrainer) -> None: ...
    def stages(self, message: FromTrainer) -> None: ...


class LinkServer:
    """Listens on the data directory's socket; a new trainer replaces an old one.

    Args:
        data_dir: data directory of the node.
        handler: handles the messages.
        on_trainer_left: called when no trainer is connected any more.
    """

    def __init__(
        self,
        data_dir: Path,
        handler: TrainerHandler,
        on_trainer_left: Callable[[], None] = lambda: None,
    ) -> None:
        self._data_dir = data_dir
        self._handler = handler
        self._on_trainer_left = on_trainer_left
        self._current: trio.CancelScope | None = None
        self._outbox: trio.MemorySendChannel[Unrequested] | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled.

        Raises:
            Unavailable: the socket cannot be created.
        """
        with unix_listener(self._data_dir / SOCKET, 4, f"link socket in {self._data_dir}") as made:
            listener = trio.socket.from_stdlib_socket(made)
            task_status.started()
            async with trio.open_nursery() as nursery:
                while True:
                    connection, _ = await listener.accept()
                    if self._current is not None:
                        self._current.cancel()
                    nursery.start_soon(self._serve, trio.SocketStream(connection))

    def send_to_trainer(self, message: Unrequested) -> bool:
        """Queue an unrequested message; returns False if there is no trainer or its queue is
        full."""
        if self._outbox is None:
            return False
        try:
            self._outbox.send_nowait(message)
        except (trio.WouldBlock, trio.BrokenResourceError):
            return False
        return True

    async def _serve(self, stream: trio.SocketStream) -> None:
        outbox, unrequested = trio.open_memory_channel[Unrequested](MAX_QUEUED_MESSAGES)
        turn = trio.Lock()
        with trio.CancelScope() as scope, outbox:
            self._current, self._outbox = scope, outbox
            async with stream, trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream, turn, unrequested)
                await self._read(stream, turn)
                nursery.cancel_scope.cancel()
        if self._current is scope:
            self._current = self._outbox = None
            self._on_trainer_left()

    async def _read(self, stream: trio.SocketStream, turn: trio.Lock) -> None:
        unpacker = Unpacker(to_network)
        try:
            async for data in stream:
                for message in unpacker.feed(bytes(data)):
                    await self._handle(message, stream, turn)
        except FrameError as error:
            log.error("trainer sent a bad frame", error=str(error))
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
            log.info("trainer left", error=repr(error))

    async def _write(
        self,
        stream: trio.SocketStream,
        turn: trio.Lock,
        unrequested: trio.MemoryReceiveChannel[Unrequested],
    ) -> None:
        """Send unrequested messages, between answers."""
        try:
            async for message in unrequested:
                async with turn:
                    with trio.fail_after(WRITE_SECONDS):
                        await stream.send_all(pack(message))
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
            log.info("trainer does not read", error=repr(error))
            await stream.aclose()  # a frame may have been cut: the trainer reconnects

    async def _handle(self, message: ToNetwork, stream: trio.SocketStream, turn: trio.Lock) -> None:
        answer: Welcome | Drawn | None = None
        match message:
            case Hello():
                answer = self._handler.hello(message)
            case OwnGroup():
                await self._handler.own_group(message)
            case Draw():
                answer = self._handler.draw(message)
            case Judged():
                self._handler.judged(message)
            case Report():
                self._handler.report(message)
            case TrainerOffer() | StageStatus() | StageFault():
                self._handler.stages(message)
            case _:
                self._handler.weights(message)
        if answer is not None:
            async with turn:
                with trio.fail_after(WRITE_SECONDS):
                    await stream.send_all(pack(answer))
