"""The trainer's end of the link: a thread that owns the socket, so that a step never waits for the network.

What goes out is queued, bounded, and dropped oldest first when the network process is away. Groups that come in wait here until the
next step asks. The thread reconnects for ever; a trainer whose network process is gone trains alone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarmnode.crew import local as stages_local
from swarmnode.link.frames import FrameError, Unpacker, pack, socket_path, to_trainer
from swarmnode.link.messages import Draw, Drawn, ExternalGroup, Hello, Judged, OwnGroup, Report, Welcome
from swarmnode.weights import local

QUEUED_FRAMES = 512
RETRY_SECONDS = 0.2
READ_BYTES = 256 * 1024


@dataclass(frozen=True)
class LinkStatistics:
    connected: bool
    connections: int
    dropped_frames: int
    """Frames that never left because the network process was away for too long."""


class Link:
    """Use as a context manager. Every method returns at once, but for the two that take seconds.

    Args:
        data_dir: of the node.
        hello: called for every new connection, from the link's thread.
        weights: called with what concerns averaging, from the link's thread; returns at once.
        stages: the same with what concerns a crew.
    """

    def __init__(
        self, data_dir: Path, hello: Callable[[], Hello], weights: Callable[[local.ToTrainer], None] = lambda message: None,
        stages: Callable[[stages_local.ToTrainer], None] = lambda message: None,
    ) -> None:  # fmt: skip
        self._data_dir = data_dir
        self._hello = hello
        self._weights = weights
        self._stages = stages
        self._lock = threading.Condition()
        self._outbox: deque[bytes] = deque()
        self._ready: list[ExternalGroup] = []
        self._useful_arrived = 0
        self._welcome: Welcome | None = None
        self._requests = 0
        self._answered = 0
        self._connected = False
        self._connections = 0
        self._dropped = 0
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._wake()
        self._thread.join(timeout=5.0)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def welcome(self, seconds: float) -> Welcome | None:
        """Who we are, as the network process says; None when it has not said so within `seconds`."""
        with self._lock:
            self._lock.wait_for(lambda: self._welcome is not None, timeout=seconds)
            return self._welcome

    def send(self, message: Hello | OwnGroup | Judged | Report | local.FromTrainer | stages_local.FromTrainer) -> None:
        """Queue a message; it is lost if the network process stays away while QUEUED_FRAMES others follow."""
        frame = pack(message)
        with self._lock:
            if len(self._outbox) >= QUEUED_FRAMES:
                self._outbox.popleft()
                self._dropped += 1
            self._outbox.append(frame)
        self._wake()

    def request_external(self, count: int, policy_version: int) -> None:
        """Ask for up to `count` external groups; `take_external` has them, in this step or a later one."""
        with self._lock:
            if not self._connected:
                return
            self._requests += 1
            self._outbox.append(pack(Draw(self._requests, count, policy_version)))
        self._wake()

    def take_external(self, seconds: float) -> tuple[list[ExternalGroup], int]:
        """Groups that have arrived, and how many useful ones the network process admitted since it was last asked.

        Waits up to `seconds` for the answer to the newest request. The caller keeps what it has no room for.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._answered >= self._requests or not self._connected, timeout=seconds)
            groups, self._ready = self._ready, []
            useful, self._useful_arrived = self._useful_arrived, 0
            return groups, useful

    def flush(self, seconds: float) -> bool:
        """Wait until everything queued has been handed to the kernel; False when `seconds` were not enough."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._outbox, timeout=seconds)

    def statistics(self) -> LinkStatistics:
        with self._lock:
            return LinkStatistics(self._connected, self._connections, self._dropped)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _run(self) -> None:
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
            except (OSError, FrameError):
                pass  # the network process is away or was replaced: connect again
            with self._lock:
                self._connected = False
                self._lock.notify_all()
            if not self._closing:
                time.sleep(RETRY_SECONDS)

    def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        unpacker = Unpacker(to_trainer)
        unsent = memoryview(pack(self._hello()))
        with self._lock:
            self._connected = True
            self._connections += 1
            self._answered = self._requests
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while not self._closing or unsent or self._outbox:
                for key, events in selector.select(timeout=1.0):
                    if key.fd == self._wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                    elif events & selectors.EVENT_READ:
                        data = connection.recv(READ_BYTES)
                        if not data:
                            return
                        for message in unpacker.feed(data):
                            self._receive(message)
                unsent = self._write(connection, unsent)
                want_write = selectors.EVENT_WRITE if unsent else 0
                selector.modify(connection, selectors.EVENT_READ | want_write)

    def _write(self, connection: socket.socket, unsent: memoryview) -> memoryview:
        while True:
            if not unsent:
                with self._lock:
                    if not self._outbox:
                        self._lock.notify_all()
                        return unsent
                    unsent = memoryview(self._outbox.popleft())
            try:
                unsent = unsent[connection.send(unsent) :]
            except BlockingIOError:
                return unsent

    def _receive(self, message: Welcome | Drawn | local.ToTrainer | stages_local.ToTrainer) -> None:
        if isinstance(message, stages_local.ToTrainer):
            self._stages(message)
            return
        if not isinstance(message, Welcome | Drawn):
            self._weights(message)
            return
        with self._lock:
            if isinstance(message, Welcome):
                self._welcome = message
            else:
                self._ready += message.groups
                self._useful_arrived += message.useful_arrived
                self._answered = max(self._answered, message.request)
            self._lock.notify_all()
