"""Wait for a condition, for tests over real processes and sockets, which have no clock to
advance."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

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


def wait_for(
    condition: Callable[[], T | None],
    what: str | Callable[[], object] = "it happens",
    seconds: float = 240.0,
    pause: float = 0.1,
) -> T:
    """Return the first true value of `condition()`, which may raise OSError. Outside of trio.

    Raises:
        AssertionError: With `what`, or the result of calling it, after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if result := condition():
                return result
        except OSError:  # a node does not answer
            pass
        time.sleep(pause)
    raise AssertionError(f"not within {seconds:g} s: {what() if callable(what) else what}")


class HasPage(Protocol):
    url: str


def status(node: HasPage) -> dict[str, Any]:
    """Return the snapshot of a node's status page. Raise OSError while it does not answer."""
    with urllib.request.urlopen(f"{node.url}/status?points=1", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)["snapshot"]
        return found


def snapshot(node: HasPage) -> dict[str, Any] | None:
    """Return the snapshot of a node's status page, or None while it does not answer."""
    try:
        return status(node)
    except (OSError, ValueError):
        return None


def free_port() -> int:
    """Return a free port below Linux's ephemeral ports, so that no outgoing connection takes it
    before the caller listens."""
    while True:
        port = random.randrange(20000, 32768)
        with contextlib.suppress(OSError), socket.socket() as chosen:
            chosen.bind(("127.0.0.1", port))
            return port
