"""A trio program in a thread of its own: begun, woken, called into and ended from other threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from swarmnode.errors import EngineGone

T = TypeVar("T")


class TrioThread:
    """main: the program; it ends soon after `ending` is true. ended: called in the thread when it
    is over, however it ended."""

    def __init__(
        self, name: str, main: Callable[[], Awaitable[None]], ended: Callable[[], None]
    ) -> None:
        self.ending = False
        self.death: BaseException | None = None
        """What ended the program, if anything did."""
        self._main = main
        self._ended = ended
        self._begun = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._wake: trio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ---- from other threads ----------------------------------------------------------------------

    def start(self) -> None:
        """Its loop runs when this returns."""
        self._thread.start()
        self._begun.wait()

    def stop(self, seconds: float = 10.0) -> None:
        self.ending = True
        self.wake()
        self._thread.join(seconds)

    def wake(self) -> None:
        """`woken` returns, now or the next time."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._woken)

    def check(self) -> None:
        """Raises what ended the program, if anything did."""
        if self.death is not None:
            raise self.death

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """`await work()` in the loop. Raises what it raises, and EngineGone when the loop has
        ended."""
        if self._token is None:
            raise EngineGone("the crew's thread has not begun")
        try:
            return trio.from_thread.run(work, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            self.check()
            raise EngineGone("the crew's thread has ended") from None

    # ---- in the thread ---------------------------------------------------------------------------

    async def woken(self) -> None:
        """Returns once `wake` was called since the last time that it returned."""
        assert self._wake is not None
        await self._wake.wait()
        self._wake = trio.Event()

    def _woken(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _run(self) -> None:
        try:
            trio.run(self._program)
        except BaseException as error:  # raised again where somebody waits  # noqa: BLE001
            self.death = error
        finally:
            self._begun.set()
            self._ended()

    async def _program(self) -> None:
        self._token, self._wake = trio.lowlevel.current_trio_token(), trio.Event()
        self._begun.set()
        await self._main()
