"""Applies the budget: reads the traffic meter and the clock, saves the monthly total, answers
queries.

The total is saved once a minute and at the end, so a crash loses at most a minute. Metered are
bytes of streams, before Noise and Yamux, which add two to five percent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
import trio

from swarmnode.config import NetworkConfig
from swarmnode.files import write_atomically
from swarmnode.p2p.budget import Budget, BudgetStatistics, Month
from swarmnode.p2p.traffic import TrafficStatistics

log = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
READ_SECONDS = 0.2
"""Minimum interval between reads of the meter, because it is queried for every message."""
FILE = "budget.json"
FILE_BYTES = 4096


class Meter:
    """Connects a `Budget` to the traffic of this node.

    Args:
        cfg: the caps.
        quiet_hours: as `node.quiet_hours`.
        data_dir: holds the monthly total.
        traffic: returns the bytes by protocol since the process started.
        clock: Unix time in seconds.
        pause_reasons: as in `Budget`.
    """

    def __init__(
        self,
        cfg: NetworkConfig,
        quiet_hours: str,
        data_dir: Path,
        traffic: Callable[[], TrafficStatistics],
        clock: Callable[[], float] = time.time,
        pause_reasons: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._path = data_dir / FILE
        self._traffic = traffic
        self._clock = clock
        self._budget = Budget(
            cfg, quiet_hours, clock(), month=load(self._path), pause_reasons=pause_reasons
        )
        self._saved: Month | None = None
        self._read_at = float("-inf")

    def allows(self, choice: str) -> bool:
        """See `Budget.allows`."""
        return self._budget.allows(choice, self._observe())

    def has_room(self, choice: str) -> bool:
        """See `Budget.has_room`."""
        return self._budget.has_room(choice, self._observe())

    def statistics(self) -> BudgetStatistics:
        return self._budget.statistics(self._observe())

    async def run(self) -> None:
        """Save the monthly total at intervals until cancelled, and once at the end."""
        try:
            while True:
                await trio.sleep(SAVE_SECONDS)
                await trio.to_thread.run_sync(self._save, self._month())
        finally:
            self._save(self._month())

    def _month(self) -> Month:
        self._observe()
        return self._budget.month

    def _observe(self) -> float:
        now = self._clock()
        if not self._read_at <= now < self._read_at + READ_SECONDS:
            traffic, self._read_at = self._traffic(), now
            self._budget.observe(sum(traffic.sent.values()), sum(traffic.received.values()), now)
        return now

    def _save(self, month: Month) -> None:
        if month == self._saved:
            return
        try:
            write_atomically(self._path, msgspec.json.encode(month))
            self._saved = month
        except OSError as error:  # a full disk must not end a node that still trains
            log.error("cannot save %s: %s", self._path, error)


def load(path: Path) -> Month | None:
    """Return the saved total; None if there is none or it cannot be read, in which case the month
    starts at 0 and a warning is logged."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(FILE_BYTES), type=Month)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("cannot read %s, counting this month's bytes from 0: %s", path, error)
        return None
