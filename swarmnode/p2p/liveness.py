"""Notices connections whose other end is gone without a word: power lost, cable pulled, process
stopped. Pure.

Yamux pings every connection every 30 s but draws no conclusion from silence, and TCP needs a
quarter of an hour for its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

SILENT_SECONDS = 30.0
"""A ping unanswered for this long means that nobody is there. The next ping is sent 40 s after an
unanswered one."""


C = TypeVar("C")


class Liveness(Generic[C]):
    """Fed now and then with the state of every connection's ping."""

    def __init__(self) -> None:
        self._unanswered: dict[C, tuple[int, float]] = {}

    def dead(
        self,
        pings: Mapping[C, tuple[int, bool]],
        now: float,
        heard: Mapping[C, float | None] = MappingProxyType({}),
    ) -> list[C]:
        """Connections to close. `pings`: connection → (number of its latest ping, whether that was
        answered). `heard`: when bytes last came. They are a sign of life as good as an answer,
        which on a line that a policy fills may be half a minute behind them."""
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
