"""Waiting for something to become true: woken by whatever arrives, ended by a stage that is gone or by a time in which no work arrives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import trio

from swarmnode.errors import PeerError, PeerTimeout


class Waiting:
    """`seconds` bounds the time in which no work arrives."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.gone: str | None = None
        """Why nothing can become true any more."""
        self._wake = trio.Event()
        self._scope: trio.CancelScope | None = None
        """It bounds the present call; work that arrives moves its deadline."""

    async def until(self, true: Callable[[], bool]) -> None:
        """Raises PeerError when a stage is gone."""
        while not true():
            if self.gone is not None:
                raise PeerError(self.gone)
            self._wake = trio.Event()
            await self._wake.wait()

    def wake(self) -> None:
        self._wake.set()

    @contextlib.contextmanager
    def deadline(self) -> Iterator[None]:
        """Around waiting only, never around a stream. Raises PeerTimeout."""
        with trio.CancelScope(deadline=trio.current_time() + self.seconds) as scope:
            self._scope = scope
            yield
        if scope.cancelled_caught:
            raise PeerTimeout("the crew did not answer in time")

    def extend(self) -> None:
        """Work arrived: a slow crew is waited for, a silent one is not."""
        if self._scope is not None:
            self._scope.deadline = trio.current_time() + self.seconds
