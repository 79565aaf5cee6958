"""A TCP forwarder on loopback that a test can cut, hold, slow down or corrupt. It runs in a thread
in front of a node."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

CHUNK = 65536
TICK_SECONDS = 0.005
ON_THE_WAY = 64
"""Chunks buffered per direction before reading stops."""
RESET = b"\1\0\0\0\0\0\0\0"
"""SO_LINGER value for a reset on close, as from a machine that lost power."""


@dataclass
class Weather:
    """Faults that a cable applies. delay: seconds each way. rate: bytes per second each way."""

    cut: bool = False
    held: bool = False
    delay: float = 0.0
    rate: float = float("inf")


class Cable:
    """Forward connections to `port` to `target`, a port on loopback.

    cut: Reset all connections, new ones included.
    hold: Deliver nothing, without an error for either side.
    slow: Add a delay and limit the rate, each way.
    garble: Flip one bit of the next bytes of each connection.
    repair: Remove all faults. Lost and corrupted bytes stay lost.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.weather = Weather()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._pairs: list[_Pair] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def cut(self) -> None:
        self.weather = Weather(cut=True)

    def hold(self) -> None:
        self.weather = Weather(held=True)

    def slow(self, delay: float, rate: float) -> None:
        self.weather = Weather(delay=delay, rate=rate)

    def repair(self) -> None:
        self.weather = Weather()

    def garble(self) -> None:
        """Flip one bit in each connection."""
        for pair in list(self._pairs):
            pair.garbled = True

    def _run(self) -> None:
        with self._listener:
            while not self._closed.wait(TICK_SECONDS):
                self._accept()
                weather = self.weather
                self._keep(
                    [
                        pair
                        for pair in self._pairs
                        if not weather.cut and pair.move(time.monotonic(), weather)
                    ]
                )
            self._keep([])

    def _keep(self, pairs: list[_Pair]) -> None:
        for pair in self._pairs:
            if pair not in pairs:
                pair.reset()
        self._pairs = pairs

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        try:
            far = socket.create_connection(("127.0.0.1", self.target), timeout=1.0)
        except OSError:
            near.close()
            return
        self._pairs = [*self._pairs, _Pair(_Way(near, far), _Way(far, near))]


@dataclass
class _Way:
    """Bytes in transit from one socket to the other."""

    source: socket.socket
    sink: socket.socket
    chunks: deque[tuple[float, bytes]] = field(default_factory=deque)
    """(due time, bytes)."""
    free_at: float = 0.0
    """Time at which the last accepted byte has passed."""
    ended: bool = False

    def take_in(self, now: float, weather: Weather) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self.ended and len(self.chunks) < ON_THE_WAY:
                data = self.source.recv(CHUNK)
                self.ended = not data
                self.free_at = max(now, self.free_at) + len(data) / weather.rate
                self.chunks.append((self.free_at + weather.delay, data))

    def send_on(self, now: float, weather: Weather) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.chunks and self.chunks[0][0] <= now and not weather.held:
                due, data = self.chunks[0]
                sent = self.sink.send(data)
                self.chunks.popleft()
                if sent < len(data):
                    self.chunks.appendleft((due, data[sent:]))


class _Pair:
    """An accepted connection and the forwarded connection to the target."""

    def __init__(self, *ways: _Way) -> None:
        self.ways = ways
        self.garbled = False
        for way in ways:
            way.source.setblocking(False)
            way.source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def move(self, now: float, weather: Weather) -> bool:
        """Move bytes in both directions. Return False when the connection has ended."""
        try:
            for way in self.ways:
                way.take_in(now, weather)
                if self.garbled and way.chunks and way.chunks[0][1]:
                    due, data = way.chunks.popleft()
                    way.chunks.appendleft((due, data[:-1] + bytes([data[-1] ^ 1])))
                    self.garbled = False
                way.send_on(now, weather)
            return not any(
                way.ended and not any(data for _, data in way.chunks) for way in self.ways
            )
        except OSError:
            return False

    def reset(self) -> None:
        for way in self.ways:
            with contextlib.suppress(OSError):
                way.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            way.source.close()
