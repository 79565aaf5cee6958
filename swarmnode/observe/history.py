"""History of the numbers in the page's charts, in bounded memory.

The history has at most `capacity` points. When it is full, every second point is removed and the
interval doubles, so it always covers the whole life of the node. 2,000 points cover half an hour at
an interval of one second, then an hour at two seconds, and so on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from swarmnode.files import write_atomically
from swarmnode.observe.snapshot import NodeSnapshot

POINTS = 2000
FILE = Path("log") / "history.json"
"""Below the data directory."""
FILE_BYTES = 2**24
SAVE_SECONDS = 60.0


def _bytes(direction: str) -> Callable[[NodeSnapshot], float]:
    return lambda s: sum(
        (s.network.traffic.received if direction == "in" else s.network.traffic.sent).values()
    )


def _process(name: str, field: str) -> Callable[[NodeSnapshot], float | None]:
    return lambda s: getattr(s.processes[name], field) if name in s.processes else None


def _report(field: str) -> Callable[[NodeSnapshot], float | None]:
    """Read a field of the trainer's report; None while no trainer is connected."""
    return lambda s: (
        getattr(s.trainer.report, field)
        if s.trainer.report is not None and s.trainer.connected and s.leads
        else None
    )


def _terms(s: NodeSnapshot) -> float | None:
    """Return a number that differs between two manifests or sets of held-out questions."""
    report = s.trainer.report
    if report is None or not report.held_out_questions:
        return None
    return zlib.crc32(f"{s.node.swarm} {report.held_out_questions}".encode())


COLUMNS: dict[str, Callable[[NodeSnapshot], float | None]] = {
    "at": lambda s: round(s.at, 3),
    "reward_own": _report("reward_own"),
    "reward_external": _report("reward_external"),
    "reward_held_out": _report("reward_held_out"),
    "reward_held_out_error": _report("reward_held_out_error"),
    "terms": _terms,
    "completion_tokens": _report("completion_tokens"),
    "completion_tokens_p95": _report("completion_tokens_p95"),
    "completion_cut_share": _report("completion_cut_share"),
    "zero_advantage_share": _report("zero_advantage_share"),
    "entropy": _report("entropy"),
    "grad_norm": _report("grad_norm"),
    "tokens_per_second": _report("tokens_per_second"),
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
"""Columns and their values. Counters are totals; the page computes the differences."""


class HistoryFile(msgspec.Struct, frozen=True):
    """Content of the file. Columns are read by name; missing ones are gaps."""

    interval: float
    columns: list[str]
    rows: list[list[float | None]]


class History:
    """Columns of equal length, oldest first."""

    def __init__(self, capacity: int = POINTS, interval: float = 1.0) -> None:
        assert capacity >= 2
        self._first_interval = interval
        self._capacity = capacity
        self._interval = interval
        self._slack = interval / 2  # timers are late
        self._rows: list[tuple[float | None, ...]] = []

    def add(self, snapshot: NodeSnapshot) -> None:
        """Add a point, unless the last one is younger than the interval.

        The history starts again if the clock was set back.
        """
        if self._rows:
            last = self._rows[-1][0]
            assert last is not None
            if snapshot.at < last:
                self._rows.clear()
                self._interval = self._first_interval
            elif snapshot.at - last < self._interval - self._slack:
                return
        self._rows.append(tuple(read(snapshot) for read in COLUMNS.values()))
        if len(self._rows) > self._capacity:
            self._rows = self._rows[::2]
            self._interval *= 2

    def save(self, data_dir: Path) -> None:
        """Write the history to disk. Raises OSError, for example for a full disk."""
        saved = HistoryFile(self._interval, list(COLUMNS), [list(row) for row in self._rows])
        write_atomically(data_dir / FILE, msgspec.json.encode(saved))

    def load(self, data_dir: Path) -> None:
        """Read the history of an earlier process, if there is one, and add a gap. Never raises."""
        try:
            with (data_dir / FILE).open("rb") as file:
                saved = msgspec.json.decode(file.read(FILE_BYTES), type=HistoryFile)
        except (OSError, msgspec.MsgspecError):
            return
        by_name = [dict(zip(saved.columns, row, strict=False)) for row in saved.rows]
        rows = [
            tuple(row.get(name) for name in COLUMNS) for row in by_name if row.get("at") is not None
        ]
        if not rows or saved.interval < self._first_interval:
            return
        last = rows[-1][0]
        assert last is not None
        gap = (last + saved.interval / 2, *([None] * (len(COLUMNS) - 1)))
        self._interval = saved.interval
        self._rows = [*rows[-self._capacity + 1 :], gap]

    def columns(self, points: int = POINTS) -> dict[str, list[float | None]]:
        """Return at most `points` evenly spaced points, always with the newest."""
        stride = max(1, -(-len(self._rows) // max(1, points)))
        rows = self._rows[::-1][::stride][::-1]
        return {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
