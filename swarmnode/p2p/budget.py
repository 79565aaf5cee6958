"""Bandwidth budget: allows optional transfers within the caps.

    bytes by protocol ─▶ Meter ─ observe ─▶ Budget ─▶ allows(one of CHOICES)
                           └ once a minute ─▶ budget.json, the monthly total

Every byte of every protocol is charged. Only optional transfers ask for permission first:
a ping is never refused, and optional transfers are reduced to make up for it. A node that is over
its budget or paused neither fetches nor serves groups.

Bytes are counted at the reads and writes of streams, before Noise and Yamux, which add two to five
percent. The monthly total is saved once a minute and at the end, so a crash loses at most a minute.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import trio

from swarmnode.config import NetworkConfig
from swarmnode.files import write_atomically
from swarmnode.pauses import is_quiet

log = logging.getLogger(__name__)

BURST_SECONDS = 10.0
"""Capacity of a bucket, in seconds of its rate."""
BURST_BYTES = 2**18
"""Minimum capacity of a bucket, enough to send a group of 64 KB to several neighbours."""
DEBT_SECONDS = 60.0
"""Maximum debt of a bucket, in seconds of its rate. A flood therefore silences a node for a minute
at most."""
UPLOADS = ("publish", "serve", "relay")
CHOICES = (*UPLOADS, "fetch")
"""Optional transfers, which are made only within the budget."""
PAUSES = ("quiet_hours", "month", "owner", "download")
"""Reasons for not fetching. `download` means that the download bucket is in debt. All other reasons
also stop serving groups; the first two stop every transfer of CHOICES."""
ALLOWED_WHILE_PAUSED = ("serve", "relay")
"""Transfers that continue while the operator has paused the node: serving weights and relaying.
Fetched groups would be stale after the pause, and there are no new groups to publish."""
SAVE_SECONDS = 60.0
READ_SECONDS = 0.2
"""Minimum interval between reads of the meter, because it is queried for every message."""
BUDGET_FILE = "budget.json"
BUDGET_FILE_BYTES = 4096


class TrafficStatistics(msgspec.Struct, frozen=True):
    """Bytes of all streams."""

    received: dict[str, int] = {}
    """Bytes by protocol."""
    sent: dict[str, int] = {}


class Month(msgspec.Struct, frozen=True):
    """The monthly total as saved on disk."""

    month: str = ""
    """Local calendar month, "2026-11"."""
    sent: int = 0
    received: int = 0


class BudgetStatistics(msgspec.Struct, frozen=True):
    paused: dict[str, bool] = {}
    """Entry of PAUSES → True if it stops fetching now."""
    level_bytes: dict[str, float] = {}
    """Level of the bucket by direction ("in", "out"), negative in debt. A direction without a cap
    is missing."""
    month_bytes: dict[str, int] = {}
    """Bytes by direction ("in", "out") in this calendar month."""
    month_limit_bytes: int | None = None
    """None without a limit."""
    refused: dict[str, int] = {}
    """Transfers omitted for lack of budget, by entry of CHOICES."""


class Meter:
    """Connects a `Budget` to the traffic of this node.

    Args:
        cfg: the caps.
        quiet_hours: as `node.quiet_hours`.
        data_dir: holds the monthly total.
        traffic: returns the bytes by protocol since the process started.
        clock: Unix time in seconds.
        is_paused: as in `Budget`.
    """

    def __init__(
        self,
        cfg: NetworkConfig,
        quiet_hours: str,
        data_dir: Path,
        traffic: Callable[[], TrafficStatistics],
        clock: Callable[[], float] = time.time,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._path = data_dir / BUDGET_FILE
        self._traffic = traffic
        self._clock = clock
        self._budget = Budget(
            cfg, quiet_hours, clock(), month=load_month(self._path), is_paused=is_paused
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


def load_month(path: Path) -> Month | None:
    """Return the saved total; None if there is none or it cannot be read, in which case the month
    starts at 0 and a warning is logged."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(BUDGET_FILE_BYTES), type=Month)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("cannot read %s, counting this month's bytes from 0: %s", path, error)
        return None


class Budget:
    """The bandwidth caps and quiet hours of this node.

    Args:
        cfg: the caps.
        quiet_hours: as `node.quiet_hours`.
        now: Unix time in seconds, here and in every method.
        month: the saved total, so that a restart forgets nothing.
        local: converts Unix time to local calendar time.
        is_paused: returns True while the operator has paused the node.
    """

    def __init__(
        self,
        cfg: NetworkConfig,
        quiet_hours: str,
        now: float,
        *,
        month: Month | None = None,
        local: Callable[[float], time.struct_time] = time.localtime,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._upload = (
            TokenBucket(cfg.upload_bytes_per_second, now) if cfg.upload_bytes_per_second else None
        )
        self._download = (
            TokenBucket(cfg.download_bytes_per_second, now)
            if cfg.download_bytes_per_second
            else None
        )
        self._limit = cfg.monthly_bytes
        self._quiet_hours = quiet_hours
        self._local = local
        self._is_paused = is_paused
        self._sent = self._received = 0
        self._refused: Counter[str] = Counter()
        saved = month or Month()
        self._month = (
            saved if saved.month == self._month_name(now) else Month(self._month_name(now))
        )

    def observe(self, sent: int, received: int, now: float) -> None:
        """Record the meter's totals since the process started."""
        more_sent, more_received = max(0, sent - self._sent), max(0, received - self._received)
        self._sent, self._received = sent, received
        if self._upload is not None:
            self._upload.charge(more_sent, now)
        if self._download is not None:
            self._download.charge(more_received, now)
        kept = (
            self._month
            if self._month.month == self._month_name(now)
            else Month(self._month_name(now))
        )
        self._month = Month(kept.month, kept.sent + more_sent, kept.received + more_received)

    def allows(self, choice: str, now: float) -> bool:
        """Return True if `choice` (one of CHOICES) is allowed now. A refusal is counted."""
        allowed = self.has_room(choice, now)
        if not allowed:
            self._refused[choice] += 1
        return allowed

    def has_room(self, choice: str, now: float) -> bool:
        """Like `allows`, for a caller that will wait: a refusal is not counted."""
        bucket = self._upload if choice in UPLOADS else self._download
        rests = choice not in ALLOWED_WHILE_PAUSED and self._is_paused()
        return not rests and not self._pauses(now) and (bucket is None or bucket.level(now) > 0)

    def statistics(self, now: float) -> BudgetStatistics:
        found = (
            *self._pauses(now),
            *(("owner",) if self._is_paused() else ()),
            *(("download",) if self._download and self._download.level(now) < 0 else ()),
        )
        buckets = {"in": self._download, "out": self._upload}
        return BudgetStatistics(
            paused={reason: reason in found for reason in PAUSES},
            level_bytes={
                way: bucket.level(now) for way, bucket in buckets.items() if bucket is not None
            },
            month_bytes={"in": self._month.received, "out": self._month.sent},
            month_limit_bytes=self._limit or None,
            refused={choice: self._refused[choice] for choice in CHOICES},
        )

    @property
    def month(self) -> Month:
        """The total to save on disk."""
        return self._month

    def _pauses(self, now: float) -> tuple[str, ...]:
        """Return the reasons for sharing nothing at all."""
        local = self._local(now)
        quiet = is_quiet(self._quiet_hours, local.tm_hour * 60 + local.tm_min)
        # The total of an earlier month no longer counts, even if nothing was observed since the
        # month changed.
        spent = (
            self._month.sent + self._month.received
            if self._month.month == self._month_name(now)
            else 0
        )
        return (
            *(("quiet_hours",) if quiet else ()),
            *(("month",) if self._limit and spent >= self._limit else ()),
        )

    def _month_name(self, now: float) -> str:
        local = self._local(now)
        return f"{local.tm_year:04d}-{local.tm_mon:02d}"


class TokenBucket:
    """A token bucket with `rate` bytes per second, full at the start. A clock that runs backwards
    adds nothing."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self.capacity = max(rate * BURST_SECONDS, BURST_BYTES)
        self._level = self.capacity
        self._at = now

    def level(self, now: float) -> float:
        """Return the bytes that may be sent at once; negative in debt."""
        self._level = min(self.capacity, self._level + max(0.0, now - self._at) * self.rate)
        self._at = now
        return self._level

    def charge(self, count: int, now: float) -> None:
        """Charge `count` transferred bytes, whether they were allowed or not."""
        self._level = max(self.level(now) - count, -DEBT_SECONDS * self.rate)
