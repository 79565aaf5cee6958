"""Tasks that an event starts, outside whatever handles the event."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVarTuple

import trio

Args = TypeVarTuple("Args")


class Background:
    """A nursery that outlives every event. What is started before `run` or after its end is not
    done."""

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the nursery open until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def start(self, work: Callable[[*Args], Awaitable[None]], *args: *Args) -> None:
        """Start `work`; not when the service is ending, which the trainer may learn a moment later
        than we do."""
        # closed to new arrivals: trio has no way to ask first
        with contextlib.suppress(RuntimeError):
            if self._nursery is not None:
                self._nursery.start_soon(work, *args)
