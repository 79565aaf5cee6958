"""Waiting for something to become true: woken by whatever arrives, ended by a stage that is gone or
by a time in which no work arrives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import trio

from swarmnode.errors import PeerError, PeerTimeout

BELIEVED: Final = 3.5
"""Times as long is waited for a stage that says that it computes what cannot be cut smaller. What
it says is not proved, so no longer."""


class Waiting:
    """`seconds` bounds the time in which no work arrives."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.gone: str | None = None
        """Why nothing can become true any more."""
        self.believing = False
        """Whether words count in the present call."""
        self._wake = trio.Event()
        self._scope: trio.CancelScope | None = None
        """It bounds the present call; work that arrives moves its deadline."""
        self._arrived = 0.0

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
    def deadline(self, *, believing: bool = False) -> Iterator[None]:
        """Around waiting only, never around a stream. Raises PeerTimeout."""
        self.believing, self._arrived = believing, trio.current_time()
        try:
            with trio.CancelScope(deadline=self._arrived + self.seconds) as scope:
                self._scope = scope
                yield
        finally:
            self._scope = None
        if scope.cancelled_caught:
            raise PeerTimeout("the crew did not answer in time")

    def extend(self) -> None:
        """Work arrived: a slow crew is waited for, a silent one is not."""
        self._arrived = trio.current_time()
        if self._scope is not None:
            self._scope.deadline = self._arrived + self.seconds

    def believe(self) -> None:
        """Who has the work says that it computes."""
        if self._scope is not None and self.believing:
            self._scope.deadline = min(
                trio.current_time() + self.seconds, self._arrived + BELIEVED * self.seconds
            )

    @property
    def open(self) -> bool:
        """Whether there is a call."""
        return self._scope is not None
