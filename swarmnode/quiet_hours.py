"""Quiet hours: the part of a day in which a node leaves machine and line to its owner. Pure."""

from __future__ import annotations

DAY_MINUTES = 24 * 60


def is_quiet(hours: str, minute: int) -> bool:
    """Whether `minute` (of the local day, 0 to 1439) lies in `hours`, "22:00-07:00"; the end is no longer part of it. Empty is never.

    Equal ends mean the whole day: whoever writes "00:00-00:00" wants no work at all.
    """
    if not hours:
        return False
    start, end = (_minute(text) for text in hours.split("-"))
    return (minute - start) % DAY_MINUTES < ((end - start) % DAY_MINUTES or DAY_MINUTES)


def _minute(text: str) -> int:
    hour, minute = text.split(":")
    return int(hour) * 60 + int(minute)
