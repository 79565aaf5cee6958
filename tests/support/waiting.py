"""Wait for a condition, for tests over real processes and sockets, which have no clock to
advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from swarmnode.p2p.api import Connections

T = TypeVar("T")


async def until(
    condition: Callable[[], object], seconds: float = 120.0, interval: float = 0.02
) -> None:
    """Return when `condition()` is true; raise trio.TooSlowError after `seconds`."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - the condition is outside this process
            await trio.sleep(interval)


async def still(value: Callable[[], T], seconds: float = 0.5, within: float = 120.0) -> T:
    """Return `value()` once it has been the same for `seconds`; raise trio.TooSlowError after
    `within`."""
    last, since = value(), trio.current_time()
    with trio.fail_after(within):
        while trio.current_time() - since < seconds:
            await trio.sleep(0.02)
            if (now := value()) != last:
                last, since = now, trio.current_time()
    return last


async def wait_connected(network: Connections, count: int = 1) -> None:
    """Return once `network` has `count` connected peers. Has no deadline."""
    while len(network.connected()) < count:
        await network.changed()
