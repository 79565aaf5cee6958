"""The trainer's end of the link: two threads that own the socket, so that a step never waits for
the network. One connects and reads, the other writes.

Outgoing messages are queued; the bounded queue drops the oldest when the network process is away.
Incoming groups wait until the next step takes them. The reader reconnects without a limit; without
a network process the trainer trains alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarmnode.link.frames import FrameError, Unpacker, pack, socket_path, to_trainer
from swarmnode.link.messages import Hello, ToNetwork, ToTrainer, Welcome
from swarmnode.rollouts.groups import Draw, Drawn, ExternalGroup
from swarmnode.stages import crew_messages
from swarmnode.weights import local

log = logging.getLogger(__name__)

MAX_QUEUED_FRAMES = 512
RETRY_SECONDS = 0.2
READ_BYTES = 256 * 1024


@dataclass(frozen=True)
class LinkStatistics:
    connected: bool
    connections: int
    dropped_frames: int
    """Frames dropped because the network process was away for too long."""


class Link:
    """The link to the network process, a context manager. Methods return at once, except those with
    a timeout `seconds`.

    Args:
        data_dir: data directory of the node.
        hello: returns the first message of every connection; called in the link's thread.
        weights: handles messages about averaging; called in the link's thread, must not block.
        stages: handles messages about a crew in the same way.
    """

    def __init__(
        self,
        data_dir: Path,
        hello: Callable[[], Hello],
        weights: Callable[[local.ToTrainer], None] = lambda message: None,
        stages: Callable[[crew_messages.ToTrainer], None] = lambda message: None,
    ) -> None:
        self._data_dir = data_dir
        self._hello = hello
        self._weights = weights
        self._stages = stages
        self._outbox = Outbox()
        self._inbox = Inbox()
        self._connections = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._outbox.close()
        self._thread.join(timeout=5.0)

    def welcome(self, seconds: float) -> Welcome | None:
        """Return the network process's welcome; None if it has not arrived within `seconds`."""
        return self._inbox.welcome(seconds)

    def send(self, message: ToNetwork) -> None:
        """Queue a message. It is dropped if MAX_QUEUED_FRAMES others follow while the network
        process is away."""
        self._outbox.put(pack(message))

    def request_external(self, count: int, policy_version: int, per_peer: int) -> None:
        """Request up to `count` external groups, at most `per_peer` of one author. `take_external`
        returns them in this step or a later one."""
        request = self._inbox.next_request()
        if request is not None:
            self.send(Draw(request, count, policy_version, per_peer))

    def take_external(self, seconds: float) -> list[ExternalGroup]:
        """Return the groups that have arrived, after waiting up to `seconds` for the answer to the
        newest request.

        The caller stores groups that it cannot use yet.
        """
        return self._inbox.take(seconds)

    def flush(self, seconds: float) -> bool:
        """Wait until all queued messages have been written to the socket; returns False after
        `seconds`."""
        return self._outbox.flush(seconds)

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(self._inbox.connected, self._connections, self._outbox.dropped)

    # ---- the threads -----------------------------------------------------------------------------

    def _run(self) -> None:
        last_error = ""
        while not self._closing:
            try:
                path, directory = socket_path(self._data_dir)
                try:
                    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                        connection.connect(path)
                        self._serve(connection)
                finally:
                    if directory is not None:
                        os.close(directory)
            except OSError:
                pass  # the network process is away or was replaced: reconnect
            except FrameError as error:
                if (
                    str(error) != last_error
                ):  # log once, because it is tried again several times a second
                    log.warning(
                        "invalid message from the network process, probably of another"
                        " version of swarmnode: %s",
                        last_error := str(error),
                    )
            self._inbox.disconnect()
            if not self._closing:
                time.sleep(RETRY_SECONDS)

    def _serve(self, connection: socket.socket) -> None:
        """Read messages until the connection ends or this link is closed."""
        connection.sendall(pack(self._hello()))
        self._connections += 1
        self._inbox.connect()
        ended = threading.Event()
        writer = threading.Thread(target=self._write, args=(connection, ended), daemon=True)
        writer.start()
        unpacker = Unpacker(to_trainer)
        try:
            while data := connection.recv(READ_BYTES):
                for message in unpacker.feed(data):
                    self._receive(message)
        finally:
            ended.set()
            self._outbox.wake()
            with contextlib.suppress(OSError):  # ends a write that waits
                connection.shutdown(socket.SHUT_RDWR)
            writer.join()

    def _write(self, connection: socket.socket, ended: threading.Event) -> None:
        """Write queued frames until the connection has ended, or all are written and this link is
        closed."""
        with contextlib.suppress(OSError):
            while (frame := self._outbox.pop(ended)) is not None:
                connection.sendall(frame)
            connection.shutdown(socket.SHUT_RDWR)

    def _receive(self, message: ToTrainer) -> None:
        if isinstance(message, Welcome | Drawn):
            self._inbox.put(message)
        elif isinstance(message, crew_messages.ToTrainer):
            self._stages(message)
        else:
            self._weights(message)


class Outbox:
    """Frames for the link's writer. `put` may be called in any thread."""

    def __init__(self) -> None:
        self.dropped = 0
        self._frames: deque[bytes] = deque()
        self._writing = self._closed = False
        self._changed = threading.Condition()

    def put(self, frame: bytes) -> None:
        with self._changed:
            if len(self._frames) >= MAX_QUEUED_FRAMES:
                self._frames.popleft()
                self.dropped += 1
            self._frames.append(frame)
            self._changed.notify_all()

    def pop(self, ended: threading.Event) -> bytes | None:
        """Wait for the next frame; None when the connection has ended, or if all frames are written
        and the link is closed. The frame before counts as written."""
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._frames or self._closed or ended.is_set())
            if not self._frames or ended.is_set():
                return None
            self._writing = True
            return self._frames.popleft()

    def flush(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._frames and not self._writing, timeout=seconds
            )

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Inbox:
    """Messages of the network process for the trainer's thread."""

    def __init__(self) -> None:
        self.connected = False
        self._changed = threading.Condition()
        self._welcome: Welcome | None = None
        self._groups: list[ExternalGroup] = []
        self._requests = 0
        self._answered = 0

    def connect(self) -> None:
        with self._changed:
            self.connected = True
            # requests to an earlier network process are never answered
            self._answered = self._requests

    def disconnect(self) -> None:
        with self._changed:
            self.connected = False
            self._changed.notify_all()

    def put(self, message: Welcome | Drawn) -> None:
        with self._changed:
            if isinstance(message, Welcome):
                self._welcome = message
            else:
                self._groups += message.groups
                self._answered = max(self._answered, message.request)
            self._changed.notify_all()

    def welcome(self, seconds: float) -> Welcome | None:
        with self._changed:
            self._changed.wait_for(lambda: self._welcome is not None, timeout=seconds)
            return self._welcome

    def next_request(self) -> int | None:
        """Return the number of a new request; None while not connected."""
        with self._changed:
            if not self.connected:
                return None
            self._requests += 1
            return self._requests

    def take(self, seconds: float) -> list[ExternalGroup]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._answered >= self._requests or not self.connected, timeout=seconds
            )
            groups, self._groups = self._groups, []
            return groups
