"""A bounded past of the few numbers that the page draws. For anything longer, scrape /metrics.

A ring of `capacity` points. When it is full, every second point goes and new ones are taken half as often, so that the whole life of
the node stays in view at a constant cost: 2,000 points are half an hour by the second, then an hour by two seconds, …
"""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.observe.snapshot import NodeSnapshot

POINTS = 2000


def _bytes(way: str) -> Callable[[NodeSnapshot], float]:
    return lambda s: sum((s.network.traffic.received if way == "in" else s.network.traffic.sent).values())


def _process(name: str, field: str) -> Callable[[NodeSnapshot], float | None]:
    return lambda s: getattr(s.processes[name], field) if name in s.processes else None


def _report(field: str) -> Callable[[NodeSnapshot], float | None]:
    """Nothing while there is no trainer to measure it: what it said last is not what is now."""
    return lambda s: getattr(s.trainer.report, field) if s.trainer.report is not None and s.trainer.connected and s.leads else None


COLUMNS: dict[str, Callable[[NodeSnapshot], float | None]] = {
    "at": lambda s: round(s.at, 3),
    "reward_own": _report("reward_own"),
    "reward_external": _report("reward_external"),
    "reward_held_out": _report("reward_held_out"),
    "admitted": lambda s: s.rollouts.admission.admitted,
    "ignored": lambda s: sum(s.rollouts.admission.ignored.values()),
    "rejected": lambda s: sum(s.rollouts.admission.rejected.values()),
    "used": lambda s: s.rollouts.judged.get("used", 0),
    "published": lambda s: s.rollouts.published,
    "peers": lambda s: s.network.peers.connected,
    "policy_version": _report("policy_version"),
    "step_seconds": _report("step_seconds"),
    "bytes_in": _bytes("in"),
    "bytes_out": _bytes("out"),
    "memory_network": _process("network", "memory_bytes"),
    "memory_trainer": _process("trainer", "memory_bytes"),
    "cpu_network": _process("network", "cpu_seconds"),
    "cpu_trainer": _process("trainer", "cpu_seconds"),
}
"""Column → its value. Counters stay totals here; the page takes differences."""


class History:
    """Columns of equal length, oldest first."""

    def __init__(self, capacity: int = POINTS, interval: float = 1.0) -> None:
        assert capacity >= 2
        self._capacity = capacity
        self._interval = interval
        self._slack = interval / 2  # ticks are not punctual
        self._rows: list[tuple[float | None, ...]] = []

    def add(self, snapshot: NodeSnapshot) -> None:
        """Take a point, unless the last one is younger than the interval. A clock that jumps back starts over."""
        if self._rows:
            last = self._rows[-1][0]
            assert last is not None
            if snapshot.at < last:
                self._rows.clear()
            elif snapshot.at - last < self._interval - self._slack:
                return
        self._rows.append(tuple(read(snapshot) for read in COLUMNS.values()))
        if len(self._rows) > self._capacity:
            self._rows = self._rows[::2]
            self._interval *= 2

    def columns(self, points: int = POINTS) -> dict[str, list[float | None]]:
        """At most `points` of them, evenly thinned out, the newest always among them."""
        stride = max(1, -(-len(self._rows) // max(1, points)))
        rows = self._rows[::-1][::stride][::-1]
        return {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
