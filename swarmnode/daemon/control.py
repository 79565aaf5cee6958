r"""`swarmnode pause` and `resume`: the control socket of a running node.

    client   {"command": "pause"}\n ─▶ <data_dir>/run/control (mode 0600, directory 0700)
             ◀─ {"changed": true, …}\n

The supervisor serves the socket, because it outlives the other processes. It writes a pause to a
file, which the other processes read. A restarted process is therefore still paused,
and the HTTP server cannot change anything.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Literal

import msgspec
import structlog
import trio

from swarmnode import pauses
from swarmnode.errors import Refused, Unavailable
from swarmnode.files import lock_data_dir, socket_address, unix_listener

log = structlog.get_logger("swarmnode.daemon.control")

SOCKET = Path("run") / "control"
"""Path below the data directory."""
REQUEST_TIMEOUT_SECONDS = 5.0
"""Timeout for receiving a client's request, and for sending the answer to the client."""
ANSWER_TIMEOUT_SECONDS = 60.0
"""Timeout for the node's answer. The node writes a file first, on a disk that may be busy with
gigabytes of a trainer state."""
MESSAGE_BYTES = 4096

Command = Literal["pause", "resume"]


class Request(msgspec.Struct, frozen=True):
    command: Command


class Answer(msgspec.Struct, frozen=True):
    changed: bool = False
    """False if the node was already in the requested state."""
    paused_since: float | None = None
    """Start of the present pause, Unix seconds; None without one."""
    error: str = ""
    """Reason of a failure; empty on success."""


class Control:
    """Applies the operator's commands to a running node.

    Args:
        data_dir: data directory of the node.
        trains: False for a node without a trainer, which cannot pause.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        trains: bool,
    ) -> None:
        self._data_dir = data_dir
        self._trains = trains
        self._since = pauses.read(data_dir) if trains else None

    async def run(self) -> None:
        """Serve commands until cancelled. Without a socket the node continues, with an error in the
        log."""
        self._write_pause()
        if self._since is not None:
            log.warning(
                "paused by the operator",
                since=_format_time(self._since),
                remedy="`swarmnode resume` continues",
            )
        try:
            with unix_listener(self._data_dir / SOCKET, 4, "control socket") as listener:
                await self._accept(trio.socket.from_stdlib_socket(listener))
        except (OSError, Unavailable) as error:
            log.error("no control socket: pause and resume do not work", error=str(error))

    def _write_pause(self) -> str:
        """Write the pause for the other processes. Returns the error; empty on success."""
        try:
            pauses.write(self._data_dir, self._since)
        except OSError as error:  # a full disk must not end a node that still trains
            log.error("cannot write the pause file", error=str(error))
            return error.strerror or str(error)
        return ""

    # ---- commands --------------------------------------------------------------------------------

    async def _accept(self, listener: trio.socket.SocketType) -> None:
        while True:
            try:
                connection, _ = await listener.accept()
            except OSError as error:  # for example, no file descriptor is left
                log.error("cannot accept control connections", error=str(error))
                await trio.sleep(1.0)
                continue
            await self._handle_connection(trio.SocketStream(connection))

    async def _handle_connection(self, stream: trio.SocketStream) -> None:
        """Handle one request, and close the stream."""
        with trio.move_on_after(REQUEST_TIMEOUT_SECONDS):
            try:
                data = b""
                while (
                    not data.endswith(b"\n")
                    and len(data) < MESSAGE_BYTES
                    and (more := await stream.receive_some(MESSAGE_BYTES))
                ):
                    data += more
                try:
                    answer = self._execute(msgspec.json.decode(data, type=Request).command)
                except msgspec.MsgspecError as error:
                    answer = Answer(error=f"not a request: {error}")
                await stream.send_all(msgspec.json.encode(answer) + b"\n")
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the command was executed nevertheless
        await trio.aclose_forcefully(stream)

    def _execute(self, command: Command) -> Answer:
        if not self._trains:
            return Answer(error="this node has no trainer, so there is nothing to pause")
        before = self._since
        changed = (before is None) == (command == "pause")
        if not changed:
            return Answer(False, before)
        self._since = time.time() if command == "pause" else None
        if error := self._write_pause():
            self._since = before
            return Answer(paused_since=before, error=f"cannot save the pause: {error}")
        log.info("paused by the operator" if command == "pause" else "resumed by the operator")
        return Answer(True, self._since)


def send_command(data_dir: Path, command: Command) -> Answer:
    """Send a command to the node in `data_dir`.

    Raises:
        Unavailable: no node is running, or it cannot execute the command.
        Refused: the node belongs to another user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_TIMEOUT_SECONDS)
        try:
            _connect(connection, data_dir)
            connection.sendall(msgspec.json.encode(Request(command)) + b"\n")
            answer = msgspec.json.decode(_read_line(connection), type=Answer)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            raise Unavailable(_not_running_message(data_dir)) from None
        except PermissionError:
            raise Refused(
                f"the node in {data_dir} belongs to another user, who alone may control it"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise Unavailable(
                f"the node in {data_dir} does not answer ({error}); its log may have the reason"
            ) from None
        if answer.error:
            raise Unavailable(answer.error)
        return answer


def _connect(connection: socket.socket, data_dir: Path) -> None:
    """Connect, waiting for a starting node, which locks its directory before it listens."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS
    path, directory = socket_address(data_dir / SOCKET)
    try:
        while True:
            try:
                connection.connect(path)
                return
            except (FileNotFoundError, ConnectionRefusedError):
                if not _is_running(data_dir) or time.monotonic() >= deadline:
                    raise
            time.sleep(0.1)
    finally:
        if directory is not None:
            os.close(directory)


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while (
        not data.endswith(b"\n")
        and len(data) < MESSAGE_BYTES
        and (more := connection.recv(MESSAGE_BYTES))
    ):
        data += more
    return data


def _not_running_message(data_dir: Path) -> str:
    if _is_running(data_dir):
        return f"the node in {data_dir} has no control socket: see its log"
    return (
        f"no node is running in {data_dir}: name its directory with -d, or start it with"
        " `swarmnode run`"
    )


def _is_running(data_dir: Path) -> bool:
    """Return True if a node is running with this directory."""
    if not (data_dir / "run" / "lock").exists():
        return False
    try:
        os.close(lock_data_dir(data_dir))
    except Unavailable:
        return True
    return False


def _format_time(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
