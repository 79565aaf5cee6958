"""How much this node may send and receive: two token buckets, a month's total, quiet hours. Pure:
no clock, no socket, no file.

    bytes that went by ─ observe ─▶ buckets (may go below zero) ─▶ allows(choice of CHOICES)
                                  └▶ the month's total

Every byte is charged, whatever protocol moved it. Only what a node can do without asks first. So a
ping is never refused, and a group that is not sent pays for it. A node that is over its budget or
paused neither fetches groups nor gives any.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection

import msgspec

from swarmnode import pauses
from swarmnode.config import NetworkConfig
from swarmnode.pauses import is_quiet

BURST_SECONDS = 10.0
"""What a bucket holds, in seconds of its rate …"""
BURST_BYTES = 2**18
"""… and never less than this, or a group of 64 KB to a few neighbours would not fit."""
DEBT_SECONDS = 60.0
"""A bucket's deepest debt, in seconds of its rate: a flood must not silence a node for the rest of
the day."""
UPLOADS = ("publish", "serve", "relay")
CHOICES = (*UPLOADS, "fetch")
"""What is done only while there is budget for it."""
PAUSES = ("quiet_hours", "month", *pauses.REASONS, "download")
"""Why a node does not fetch: `download` is a download cap in debt. All others also stop giving
groups, and the first two everything else in CHOICES."""
RESTING = ("serve", "relay")
"""What a node does for its peers while its trainer rests by `pauses.REASONS`: it gives weights and
relays. Groups that it fetched would be stale afterwards, and its shelf has no new ones."""


class TokenBucket:
    """`rate` bytes per second, full at the start. Time that runs backwards adds nothing."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self.capacity = max(rate * BURST_SECONDS, BURST_BYTES)
        self._level = self.capacity
        self._at = now

    def set_rate(self, rate: float, now: float) -> None:
        """From now on another one; what may go by at once stays, as far as it fits."""
        self.level(now)
        self.rate, self.capacity = rate, max(rate * BURST_SECONDS, BURST_BYTES)

    def level(self, now: float) -> float:
        """Bytes that may go by at once; below zero in debt."""
        self._level = min(self.capacity, self._level + max(0.0, now - self._at) * self.rate)
        self._at = now
        return self._level

    def charge(self, count: int, now: float) -> None:
        """`count` bytes went by, allowed or not."""
        self._level = max(self.level(now) - count, -DEBT_SECONDS * self.rate)


class Month(msgspec.Struct, frozen=True):
    """What is kept on disk."""

    month: str = ""
    """Local calendar month, "2026-11"."""
    sent: int = 0
    received: int = 0


class BudgetStatistics(msgspec.Struct, frozen=True):
    paused: dict[str, bool] = {}
    """Which of PAUSES keep the node from fetching."""
    level_bytes: dict[str, float] = {}
    """Bytes that may go "in" and "out" at once, below zero in debt; each only where it has a
    cap."""
    month_bytes: dict[str, int] = {}
    """Bytes that went "in" and "out" in this calendar month."""
    month_limit_bytes: int | None = None
    """None without one."""
    refused: dict[str, int] = {}
    """What was left out for want of budget, by choice of CHOICES."""


class Budget:
    """The caps of `cfg` and the node's quiet hours. `now` is Unix seconds everywhere; `local` makes
    local calendar time of it.

    month: as it was saved, so that a restart forgets nothing. resting(): of `pauses.REASONS`, those
    that hold.
    """

    def __init__(
        self,
        cfg: NetworkConfig,
        quiet_hours: str,
        now: float,
        *,
        month: Month | None = None,
        local: Callable[[float], time.struct_time] = time.localtime,
        resting: Callable[[], Collection[str]] = tuple,
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
        self._resting = resting
        self._sent = self._received = 0
        self._refused: Counter[str] = Counter()
        saved = month or Month()
        self._month = saved if saved.month == self._name(now) else Month(self._name(now))

    def observe(self, sent: int, received: int, now: float) -> None:
        """Tell the meter's totals since the process started."""
        more_sent, more_received = max(0, sent - self._sent), max(0, received - self._received)
        self._sent, self._received = sent, received
        if self._upload is not None:
            self._upload.charge(more_sent, now)
        if self._download is not None:
            self._download.charge(more_received, now)
        kept = self._month if self._month.month == self._name(now) else Month(self._name(now))
        self._month = Month(kept.month, kept.sent + more_sent, kept.received + more_received)

    def allows(self, choice: str, now: float) -> bool:
        """Whether `choice` (of CHOICES) may be done now. A refusal is counted."""
        allowed = self.has_room(choice, now)
        if not allowed:
            self._refused[choice] += 1
        return allowed

    def has_room(self, choice: str, now: float) -> bool:
        """The same for who will wait: nothing is counted."""
        bucket = self._upload if choice in UPLOADS else self._download
        rests = choice not in RESTING and bool(self._resting())
        return not rests and not self._pauses(now) and (bucket is None or bucket.level(now) > 0)

    def statistics(self, now: float) -> BudgetStatistics:
        found = (
            *self._pauses(now),
            *self._resting(),
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
        """What is to be kept on disk."""
        return self._month

    def _pauses(self, now: float) -> tuple[str, ...]:
        """Reasons for sharing nothing at all."""
        local = self._local(now)
        quiet = is_quiet(self._quiet_hours, local.tm_hour * 60 + local.tm_min)
        # Of an earlier month's total nothing is left once the calendar has turned, also when
        # nothing was observed since.
        spent = (
            self._month.sent + self._month.received if self._month.month == self._name(now) else 0
        )
        return (
            *(("quiet_hours",) if quiet else ()),
            *(("month",) if self._limit and spent >= self._limit else ()),
        )

    def _name(self, now: float) -> str:
        local = self._local(now)
        return f"{local.tm_year:04d}-{local.tm_mon:02d}"
