"""Detects connections whose remote end vanished silently: power loss, pulled cable, stopped
process. Pure.

Yamux pings every connection every 30 s but ignores missing answers, and TCP needs about 15 minutes
to notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

SILENT_SECONDS = 30.0
"""A connection is dead after a ping was unanswered for this long. Yamux sends the next ping 40 s
after an unanswered one."""


C = TypeVar("C")


class Liveness(Generic[C]):
    """Tracks the pings of all connections."""

    def __init__(self) -> None:
        self._unanswered: dict[C, tuple[int, float]] = {}

    def dead(
        self,
        pings: Mapping[C, tuple[int, bool]],
        now: float,
        heard: Mapping[C, float | None] = MappingProxyType({}),
    ) -> list[C]:
        """Return the connections to close.

        Args:
            pings: for each connection, the number of its latest ping and whether it was answered.
            now: monotonic time in seconds.
            heard: time of the last received bytes. They count as a sign of life, because the answer
                to a ping can be half a minute late on a line that is busy with weights.
        """
        unanswered = {
            each: number for each, (number, answered) in pings.items() if number and not answered
        }
        since = {}
        for each, number in unanswered.items():
            before = self._unanswered.get(each)
            since[each] = before if before is not None and before[0] == number else (number, now)
        self._unanswered = since
        return [
            each
            for each, (_, at) in since.items()
            if now - max(at, heard.get(each) or at) >= SILENT_SECONDS
        ]
