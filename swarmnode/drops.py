"""Counters of dropped groups, updates, completions and messages, by reason.

The first drop of each reason is logged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import msgspec
import structlog

log = structlog.get_logger("swarmnode.drops")


class DropCounts(msgspec.Struct, frozen=True):
    """Totals since the process started. Reasons are a closed set of constants."""

    kept: int = 0
    dropped: dict[str, int] = {}
    """Dropped items by reason."""
    since_kept: dict[str, int] = {}
    """Drops since the last `keep`, by reason."""


class DropTally:
    """Counter of one kind of item, each of which is kept or dropped."""

    def __init__(
        self, event: str, quiet: Collection[str] = (), *, reasons: Collection[str] = ()
    ) -> None:
        """
        Args:
            event: Log event of the first drop of each reason.
            quiet: Reasons that are logged at level info. All others are warnings.
            reasons: Reasons that are counted from 0, so that a metric shows their first drop.
        """
        self._event = event
        self._quiet = frozenset(quiet)
        self._kept = 0
        self._dropped: Counter[str] = Counter(dict.fromkeys(reasons, 0))
        self._since_kept: Counter[str] = Counter()

    def keep(self, count: int = 1) -> None:
        """Count `count` kept items."""
        if count > 0:
            self._kept += count
            self._since_kept.clear()

    def drop(self, reason: str, count: int = 1, **details: object) -> None:
        """Count `count` items that were dropped for `reason`, and log the first."""
        if count <= 0:
            return
        if not self._dropped[reason]:
            level = log.info if reason in self._quiet else log.warning
            level(self._event, reason=reason, **details)
        self._dropped[reason] += count
        self._since_kept[reason] += count

    def statistics(self) -> DropCounts:
        return DropCounts(self._kept, dict(self._dropped), dict(self._since_kept))


class TrainerDrops:
    """One tally for each kind of item that the trainer keeps or drops."""

    def __init__(self) -> None:
        self.update = DropTally(
            "no update",
            quiet=("no_signal", "overflow"),
            reasons=("no_signal", "not_finite", "overflow", "refused"),
        )
        """`no_signal`: no row had an advantage. `not_finite`: the gradient was not finite.
        `overflow`: the gradient overflowed float16, and the loss scale was lowered. `refused`: the
        crew rejected the step."""
        self.question = DropTally("question not asked", reasons=("no_question", "too_long"))
        """`no_question`: the task made no question. `too_long`: the question leaves no room for an
        answer in the model's context."""
        self.held_out = DropTally(
            "held-out question not asked", reasons=("no_question", "not_scored")
        )
        """`no_question`: the task made no question. `not_scored`: the scorer failed."""
        self.group = DropTally(
            "own group not shared", reasons=("not_scored", "special_ids", "charset")
        )
        """`not_scored`: the scorer failed. `special_ids`, `charset`: fewer than two
        of its completions can be shared."""
        self.completion = DropTally(
            "completion dropped",
            quiet=("cut",),
            reasons=("charset", "special_ids", "cut", "too_large"),
        )
        """`charset`: it holds control characters, earned 0 and was not shared. `special_ids`: it
        holds tokens without text and was not shared. `cut`: it ended at the length limit, and
        `mask_truncated` is on. `too_large`: it did not fit into memory."""
        self.external = DropTally("group of a peer refused")
        """Reasons are those of `rollouts.groups.Outcome`."""
        self.message = DropTally("message to the network process lost", reasons=("link_full",))
        """`link_full`: the queue filled up while the network process was not connected."""

    def statistics(self) -> dict[str, DropCounts]:
        return {name: tally.statistics() for name, tally in vars(self).items()}
