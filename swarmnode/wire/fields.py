"""Checks of single values, used by the checks of every protocol. Each raises BadMessage or returns
None.

The reason is "bounds", or "not_finite" for a float that is NaN or infinite. The decoder has already
checked the types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from swarmnode.errors import BadMessage
from swarmnode.wire.limits import INTEGER_BITS

COUNTER: Final = 2**INTEGER_BITS - 1
ANY_COUNTER: Final = (0, COUNTER)


def check_fields(
    message: Any,  # noqa: ANN401
    lengths: Mapping[str, int],
    ranges: Mapping[str, tuple[float, float]],
) -> None:
    """Check the fields that `message` has and that are not None.

    Args:
        message: any message.
        lengths: exact number of bytes by field.
        ranges: lowest and highest value by field.
    """
    for name, exactly in lengths.items():
        if (value := getattr(message, name, None)) is not None:
            check_length(name, value, exactly)
    for name, (low, high) in ranges.items():
        if (value := getattr(message, name, None)) is not None:
            check_between(name, value, low, high)


def check_length(name: str, value: bytes, exactly: int) -> None:
    if len(value) != exactly:
        raise BadMessage("bounds", f"{name} is {exactly} bytes")


def check_between(name: str, value: float, low: float, high: float) -> None:
    """Check low ≤ value ≤ high, and that a float is finite."""
    check_finite(name, value)
    if not low <= value <= high:
        raise BadMessage("bounds", f"{name} is {low} to {high}")


def check_positive(name: str, value: float, high: float = math.inf) -> None:
    """Check 0 < value ≤ high, and that a float is finite."""
    check_finite(name, value)
    if not 0 < value <= high:
        raise BadMessage(
            "bounds", f"{name} is above 0" + (f", at most {high}" if high < math.inf else "")
        )


def check_counter(name: str, value: int) -> None:
    check_between(name, value, 0, COUNTER)


def check_finite(name: str, value: float) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise BadMessage("not_finite", name)


def check_name(name: str, value: str, most: int) -> None:
    """Check that a name is printable ASCII without spaces, because names appear in logs and metric
    labels."""
    if not 1 <= len(value) <= most or not all("!" <= character <= "~" for character in value):
        raise BadMessage("bounds", f"{name} is 1 to {most} printable ASCII characters")


def check_text(name: str, value: str, low: int, high: int) -> None:
    """Check that a text has `low` to `high` bytes of UTF-8 and no control characters."""
    if not low <= len(utf8(name, value)) <= high or any(
        c < " " or "\x7f" <= c <= "\x9f" for c in value
    ):
        raise BadMessage(
            "bounds", f"{name} is {low} to {high} bytes of text without control characters"
        )


def check_rising(name: str, values: Sequence[Any], low: int, high: int) -> None:
    """Check that there are `low` to `high` values in strictly rising order, so that a set has only
    one encoding."""
    check_between(name, len(values), low, high)
    if any(a >= b for a, b in pairwise(values)):
        raise BadMessage("bounds", f"{name} are not sorted or not unique")


def utf8(name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        # a lone surrogate, which a local tokenizer can produce
        raise BadMessage("bounds", f"{name} is not Unicode text") from None
