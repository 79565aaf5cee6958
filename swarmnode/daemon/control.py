"""`swarmnode pause`, `resume` and `finish`: the socket by which a node's owner says what it shall
do, and when it rests by itself.

    client   {"command": "pause"}\n ─▶ <data_dir>/run/control (0600, in a directory that is 0700) ─▶
    {"changed": true, …}\n

The supervisor serves it, since it alone outlives the other processes. It writes why the node rests
to a file, which they read: so a process that is started again rests too, and nobody who can reach
the HTTP server can change anything.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import structlog
import trio

from swarmnode import pauses
from swarmnode.daemon.machine import Load, Machine, Rules, observed
from swarmnode.errors import Refused, Unavailable
from swarmnode.files import lock_data_dir, socket_address

log = structlog.get_logger("swarmnode.daemon.control")

SOCKET = Path("run") / "control"
"""Below the data directory."""
ASK_SECONDS = 5.0
"""A client that says nothing for so long, or takes so long to listen, is hung up on."""
ANSWER_SECONDS = 60.0
"""A node that takes so long is not answering. It writes before it answers, to a disk that may be
busy with gigabytes of a state."""
MESSAGE_BYTES = 4096
POLL_INTERVAL = 5.0
"""Between two looks at the machine."""

Command = Literal["pause", "resume", "finish"]


class Request(msgspec.Struct, frozen=True):
    command: Command


class Answer(msgspec.Struct, frozen=True):
    changed: bool = False
    """False where it was so already."""
    paused: dict[str, float] = {}
    """Why the node rests now: reason → since when, in Unix seconds."""
    error: str = ""
    """Why nothing was done; empty where it was."""


class Control:
    """What the owner wants of a node that runs, and what its rules say. `finish` ends the node
    after the step that runs.

    trains: False for a node without a trainer, which has nothing to pause.
    """

    def __init__(
        self,
        data_dir: Path,
        rules: Rules,
        machine: Machine,
        finish: Callable[[], None],
        *,
        trains: bool,
    ) -> None:
        self._data_dir = data_dir
        self._rules = rules
        self._machine = machine
        self._finish = finish
        self._trains = trains
        self._load = Load()
        self._since = {
            reason: at
            for reason, at in pauses.read(data_dir).items()
            if reason == "owner" and trains
        }

    async def run(self) -> None:
        """Serve, and mind the machine, until cancelled. A socket that cannot be had is said in the
        log: the node goes on without."""
        self._tell()
        if "owner" in self._since:
            log.warning(
                "paused by its owner",
                since=_clock(self._since["owner"]),
                remedy="`swarmnode resume` goes on",
            )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve)
            if self._trains:
                nursery.start_soon(self._mind)

    # ---- the machine -----------------------------------------------------------------------------

    async def _mind(self) -> None:
        rules = self._rules
        while rules.on_battery or rules.above_load:
            now = trio.current_time()
            if rules.above_load:
                self._load = observed(
                    self._load, self._machine.load_of_others(now), rules.above_load, now
                )
            found = {
                "battery": rules.on_battery and self._machine.on_battery(),
                "busy": now < self._load.busy_until,
            }
            before = dict(self._since)
            for reason, holds in found.items():
                if holds:
                    self._since.setdefault(reason, time.time())
                else:
                    self._since.pop(reason, None)
            if before.keys() != self._since.keys():
                log.info(
                    "the machine decides",
                    rests=sorted(self._since) or "no",
                    load_of_others=round(self._load.mean, 2),
                )
                self._tell()
            await trio.sleep(POLL_INTERVAL)

    def _tell(self) -> str:
        """Tell the other processes. Returns what stood against it, empty when nothing did."""
        try:
            pauses.write(self._data_dir, self._since)
        except OSError as error:  # a full disk must not end a node that still trains
            log.error("cannot say why the node rests", error=str(error))
            return error.strerror or str(error)
        return ""

    # ---- the owner -------------------------------------------------------------------------------

    async def _serve(self) -> None:
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        directory = None
        try:
            path, directory = socket_address(self._data_dir / SOCKET)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of an earlier run: we hold the directory's lock
            await listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(4)
        except (OSError, Unavailable) as error:
            listener.close()
            log.error("no control socket: pause, resume and finish do not work", error=str(error))
            await trio.sleep_forever()
        finally:
            if directory is not None:
                os.close(directory)
        with listener:
            async with trio.open_nursery() as kept:
                while True:
                    try:
                        connection, _ = await listener.accept()
                    except OSError as error:  # no descriptor left, say
                        log.error("cannot hear who controls the node", error=str(error))
                        await trio.sleep(1.0)
                        continue
                    await self._hear(trio.SocketStream(connection), kept)

    async def _hear(self, stream: trio.SocketStream, kept: trio.Nursery) -> None:
        """One request, one answer; then the stream is closed, or kept until the node ends."""
        request = None
        with trio.move_on_after(ASK_SECONDS):
            try:
                data = b""
                while (
                    not data.endswith(b"\n")
                    and len(data) < MESSAGE_BYTES
                    and (more := await stream.receive_some(MESSAGE_BYTES))
                ):
                    data += more
                try:
                    request = msgspec.json.decode(data, type=Request)
                    answer = self._obey(request.command)
                except msgspec.MsgspecError as error:
                    answer = Answer(error=f"not a request: {error}")
                await stream.send_all(msgspec.json.encode(answer) + b"\n")
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # it was obeyed all the same
        if request is not None and request.command == "finish":
            kept.start_soon(_keep, stream)
        else:
            await trio.aclose_forcefully(stream)

    def _obey(self, command: Command) -> Answer:
        if command == "finish":
            log.info("told to finish")
            self._finish()
            return Answer(True, dict(self._since))
        if not self._trains:
            return Answer(
                error=(
                    "this node has no trainer, so there is nothing to pause; `swarmnode finish`"
                    " ends it"
                )
            )
        before = dict(self._since)
        if command == "pause":
            self._since.setdefault("owner", time.time())
        else:
            self._since.pop("owner", None)
        changed = before.keys() != self._since.keys()
        if changed and (error := self._tell()):
            self._since = before
            return Answer(paused=before, error=f"cannot keep that: {error}")
        if changed:
            log.info(
                "paused by its owner" if command == "pause" else "resumed by its owner",
                rests=sorted(self._since) or "no",
            )
        return Answer(changed, dict(self._since))


async def _keep(stream: trio.SocketStream) -> None:
    """A client that waits for the end of the node hears it as the end of the stream; one that goes
    away before leaves nothing behind."""
    async with stream:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while await stream.receive_some(MESSAGE_BYTES):
                pass


def ask(data_dir: Path, command: Command, agreed: Callable[[], None] = lambda: None) -> Answer:
    """Have the node that runs in `data_dir` do something; with `finish`, call `agreed` once it
    will, and return once it has ended.

    Raises Unavailable where no node runs or it cannot do that, Refused where the node is another
    user's.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            _connect(connection, data_dir)
            connection.sendall(msgspec.json.encode(Request(command)) + b"\n")
            answer = msgspec.json.decode(_line(connection), type=Answer)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            raise Unavailable(_nobody(data_dir)) from None
        except PermissionError:
            raise Refused(
                f"the node in {data_dir} is another user's: only its owner may control it"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise Unavailable(
                f"the node in {data_dir} does not answer ({error}); its log may say why"
            ) from None
        if answer.error:
            raise Unavailable(answer.error)
        if command == "finish":
            agreed()
            connection.settimeout(None)
            with contextlib.suppress(OSError):
                connection.recv(1)  # nothing comes: the end of the stream is the end of the node
            _wait_for_end(data_dir)
        return answer


def _connect(connection: socket.socket, data_dir: Path) -> None:
    """A node that is starting up has held its directory for a moment before it listens."""
    deadline = time.monotonic() + ASK_SECONDS
    path, directory = socket_address(data_dir / SOCKET)
    try:
        while True:
            try:
                connection.connect(path)
                return
            except (FileNotFoundError, ConnectionRefusedError):
                if not _held(data_dir) or time.monotonic() >= deadline:
                    raise
            time.sleep(0.1)
    finally:
        if directory is not None:
            os.close(directory)


def _line(connection: socket.socket) -> bytes:
    data = b""
    while (
        not data.endswith(b"\n")
        and len(data) < MESSAGE_BYTES
        and (more := connection.recv(MESSAGE_BYTES))
    ):
        data += more
    return data


def _nobody(data_dir: Path) -> str:
    if _held(data_dir):
        return f"the node in {data_dir} has no control socket: its log says why"
    return (
        f"no node runs in {data_dir}: name its directory with -d, or start it with `swarmnode run`"
    )


def _wait_for_end(data_dir: Path) -> None:
    deadline = time.monotonic() + ASK_SECONDS
    while _held(data_dir) and time.monotonic() < deadline:
        time.sleep(0.05)


def _held(data_dir: Path) -> bool:
    """Whether a node runs with this directory."""
    if not (data_dir / "run" / "lock").exists():
        return False
    try:
        os.close(lock_data_dir(data_dir))
    except Unavailable:
        return True
    return False


def _clock(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
