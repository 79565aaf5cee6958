"""Whether one value of a decoded message is allowed: what every protocol's checks are made of. Each
raises BadMessage, or says nothing.

The reason is "bounds"; for a float that is NaN or infinite it is "not_finite". Types were checked
by the decoder.
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
    """Check the fields that `message` has and that are not None: exactly so many bytes, or lowest
    and highest value."""
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
    """Both ends are allowed, unless they are infinite."""
    check_finite(name, value)
    if not low <= value <= high:
        raise BadMessage("bounds", f"{name} is {low} to {high}")


def check_positive(name: str, value: float, high: float = math.inf) -> None:
    """Above 0, at most `high`, finite."""
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
    """Printable ASCII without spaces: names end up in logs and metric labels."""
    if not 1 <= len(value) <= most or not all("!" <= character <= "~" for character in value):
        raise BadMessage("bounds", f"{name} is 1 to {most} printable ASCII characters")


def check_text(name: str, value: str, low: int, high: int) -> None:
    """UTF-8 text for people, of `low` to `high` bytes, without control characters."""
    if not low <= len(utf8(name, value)) <= high or any(
        c < " " or "\x7f" <= c <= "\x9f" for c in value
    ):
        raise BadMessage(
            "bounds", f"{name} is {low} to {high} bytes of text without control characters"
        )


def check_rising(name: str, values: Sequence[Any], low: int, high: int) -> None:
    """`low` to `high` of them, each greater than the one before: a set has one order."""
    check_between(name, len(values), low, high)
    if any(a >= b for a, b in pairwise(values)):
        raise BadMessage("bounds", f"{name} are sorted, none twice")


def utf8(name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        # a lone surrogate: cannot come off the wire, but out of a local tokenizer
        raise BadMessage("bounds", f"{name} is not Unicode text") from None
