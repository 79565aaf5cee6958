"""Where a stage's work is computed. No torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class Compute(Protocol):
    """How a piece of work is computed: beside the event loop, in it, or measured."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def in_thread(work: Callable[[], T]) -> T:
    """Computes beside the event loop: heartbeats and other streams go on."""
    return await trio.to_thread.run_sync(work)


async def inline(work: Callable[[], T]) -> T:
    """Computes here and now: deterministic, for tests and for a crew in one process."""
    return work()
