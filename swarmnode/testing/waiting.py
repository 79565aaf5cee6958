"""For tests over real processes and sockets, which have no clock to advance: poll, with a deadline."""

from __future__ import annotations

from collections.abc import Callable

import trio


async def until(condition: Callable[[], object], seconds: float = 20.0, interval: float = 0.02) -> None:
    """Return when `condition()` is true; raise trio.TooSlowError after `seconds`."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - the condition is outside this process
            await trio.sleep(interval)
