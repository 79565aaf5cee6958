"""Wires between simulated nodes: delay, jitter, rate, cuts in one or both directions. Bytes of one
direction of a link arrive in order.

    dial ─▶ Link (one connection) ─ send ─▶ [held while the way is cut or an end is stopped]
                 │                            └─ delay + size / rate ─▶ arrive()
                 └ close ─▶ both ends are notified; nothing arrives any more
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

Arrive = Callable[[], None]


class History:
    """Events of a simulation as text lines. Frequent events are only hashed, unless `lines` is
    given."""

    def __init__(self, lines: list[str] | None = None) -> None:
        self.lines = lines
        self.events = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def note(self, what: str) -> None:
        line = f"{trio.current_time():.6f} {what}"
        self.events += 1
        self._hash.update(line.encode() + b"\n")
        if self.lines is not None:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


class Timeline:
    """Scheduled calls. Calls at the same time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._due, (when, self._number, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(trio.current_time() + seconds, call)

    @property
    def next(self) -> float:
        """Return the time of the earliest call."""
        return self._due[0][0] if self._due else float("inf")

    def call(self) -> None:
        """Run the earliest call."""
        heapq.heappop(self._due)[2]()

    async def run(self) -> None:
        """Run calls until cancelled."""
        try:
            await trio.sleep_forever()
        finally:
            self._due.clear()


@dataclass
class Way:
    """One direction between two machines."""

    delay: float
    jitter: float
    rate: float
    """Bytes per second."""
    cut: bool = False


@dataclass(eq=False)
class Direction:
    way: Way
    held: deque[tuple[int, Arrive]] = field(default_factory=deque)
    free_at: float = 0.0
    last: float = 0.0


class Link:
    """One connection. ends: the machines' names, the dialler first."""

    def __init__(self, wires: Wires, dialler: str, listener: str) -> None:
        self.ends = (dialler, listener)
        self.open = True
        self.opened_at = trio.current_time()
        self.on_close: list[Callable[[], None]] = []
        """Close handlers, each called once, in order."""
        self.under_way: Counter[str] = Counter()
        """Peer id of an end → its pending requests and transfers."""
        self._wires = wires
        self._directions = {
            dialler: Direction(wires.way(dialler, listener)),
            listener: Direction(wires.way(listener, dialler)),
        }

    def send(self, source: str, size: int, arrive: Arrive) -> None:
        """Call `arrive` at the other end when `size` bytes have arrived, unless the link closes
        first."""
        if not self.open:
            return
        direction = self._directions[source]
        if direction.held or not self.passes(source):
            direction.held.append((size, arrive))
        else:
            self._start(direction, size, arrive)

    def passes(self, source: str) -> bool:
        """Return True if data from `source` is transmitted without being held."""
        return not self._directions[source].way.cut and not self._wires.still.intersection(
            self.ends
        )

    def release(self) -> None:
        """Transmit held data where the way is open."""
        for source, direction in self._directions.items():
            while direction.held and self.open and self.passes(source):
                self._start(direction, *direction.held.popleft())

    def close(self) -> None:
        """Close the link and notify both ends at once."""
        if self.open:
            self.open = False
            self._wires.forget(self)
            for call in self.on_close:
                call()

    def _start(self, direction: Direction, size: int, arrive: Arrive) -> None:
        now, way = trio.current_time(), direction.way
        direction.free_at = max(now, direction.free_at) + size / way.rate
        direction.last = max(
            direction.last, direction.free_at + way.delay + self._wires.rng.random() * way.jitter
        )
        self._wires.timeline.at(direction.last, lambda: self._arrive(arrive))

    def _arrive(self, arrive: Arrive) -> None:
        if self.open:
            arrive()


class Wires:
    """All wires. still: stopped machines, whose bytes wait at either end."""

    def __init__(
        self, rng: random.Random, timeline: Timeline, make_way: Callable[[str, str], Way]
    ) -> None:
        self.rng = rng
        self.timeline = timeline
        self.still: set[str] = set()
        self._make_way = make_way
        self._ways: dict[tuple[str, str], Way] = {}
        self._links: dict[Link, None] = {}

    def way(self, source: str, target: str) -> Way:
        if (source, target) not in self._ways:
            self._ways[source, target] = self._make_way(source, target)
        return self._ways[source, target]

    def connect(self, dialler: str, listener: str) -> Link:
        link = Link(self, dialler, listener)
        self._links[link] = None
        return link

    def links_of(self, machine: str) -> list[Link]:
        return [link for link in self._links if machine in link.ends]

    def forget(self, link: Link) -> None:
        self._links.pop(link, None)

    def passes(self, source: str, target: str) -> bool:
        return not self.way(source, target).cut and not self.still.intersection((source, target))

    def changed(self) -> None:
        """Re-check held data after a change of a way or a machine."""
        for link in list(self._links):
            link.release()
