"""Make scheduling, time, randomness and threads of a process depend on one seed."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import math
import os
import random
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest import mock

import trio
import trio._core._run as scheduler
from cryptography.hazmat.primitives.asymmetric import ed25519

from swarmnode.wire import envelope
from tests.support.sim.wires import Timeline

EPOCH = 1_800_000_000.0
"""Unix time at the start of every simulation."""
LOOK_EVERY = 32


def run(seed: int, main: Callable[[Timeline], Awaitable[None]]) -> None:
    """Run `main` deterministically with `trio.run`. Another run with this seed is identical, also
    in another process with another PYTHONHASHSEED. Calls on the timeline run when due."""
    clock = _Clock()
    with _seeded(seed):
        try:
            trio.run(main, clock.timeline, clock=clock)
        except trio.TrioInternalError:
            if clock.failed is None:
                raise
            raise clock.failed from None


class _Clock(trio.abc.Clock):
    """A clock that jumps to the next due call when no task can run.

    trio asks for the time to wait exactly then. Message deliveries, which are the most frequent
    events, thus need neither a sleep nor a task.
    """

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.failed: BaseException | None = None
        """Exception of a timeline call, which trio would report as an internal error."""
        self._now = 0.0

    def start_clock(self) -> None:
        """The clock starts at 0."""

    def current_time(self) -> float:
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        due = self.timeline.next
        if due == deadline == math.inf:
            return deadline
        self._now = max(self._now, min(deadline, due))
        if due < deadline:
            try:
                self.timeline.call()
            except BaseException as error:
                self.failed = error
                raise
        return 0.0


def now() -> float:
    """Return the simulated Unix time."""
    try:
        return EPOCH + trio.current_time()
    except RuntimeError:  # before the first task, or after the last
        return EPOCH


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    entropy, ours, really = random.Random(f"entropy {seed}"), threading.get_ident(), os.urandom

    class Seeded(random.Random):
        """`random.Random` that takes its seed from the simulation by default."""

        def __init__(self, x: Any = None) -> None:
            super().__init__(int.from_bytes(some_bytes(8), "little") if x is None else x)

    def some_bytes(count: int | None = None) -> bytes:
        some = 32 if count is None else count
        # A thread left over from an earlier test.
        return entropy.randbytes(some) if threading.get_ident() == ours else really(some)

    patches = [
        mock.patch.object(scheduler, "_r", random.Random(f"scheduler {seed}")),
        mock.patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        mock.patch.object(
            scheduler.TheIOManager, "get_events", _seldom(scheduler.TheIOManager.get_events)
        ),
        mock.patch.object(trio.to_thread, "run_sync", _at_once),
        mock.patch.object(time, "time", now),
        mock.patch.object(random, "Random", Seeded),
        mock.patch.object(os, "urandom", some_bytes),
        mock.patch.object(secrets, "token_bytes", some_bytes),
        mock.patch.object(secrets, "token_hex", lambda count=32: some_bytes(count).hex()),
        mock.patch.object(envelope, "Ed25519PublicKey", _RememberedKeys()),
    ]
    collecting = gc.isenabled()
    gc.disable()  # finalizers would run at unpredictable times
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            yield
        finally:
            if collecting:
                gc.enable()


def _seldom(get_events: Callable[[Any, float], Any]) -> Callable[[Any, float], Any]:
    """Poll sockets only after every LOOK_EVERY steps. The only socket is trio's own wakeup
    socket."""
    step = itertools.count(1)

    def look(manager: Any, timeout: float) -> Any:
        return get_events(manager, timeout) if timeout > 0 or next(step) % LOOK_EVERY == 0 else []

    return look


async def _at_once(sync_fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a function at once instead of in a thread: a clock that jumps ahead does not wait for
    threads."""
    await trio.lowlevel.checkpoint()
    return sync_fn(*args)


class _RememberedKeys:
    """Verify each signature once per process instead of once per node. The result is the same."""

    def __init__(self) -> None:
        self._good: set[tuple[bytes, bytes, bytes]] = set()

    def from_public_bytes(self, key: bytes) -> _RememberedKey:
        return _RememberedKey(self._good, key)


class _RememberedKey:
    def __init__(self, good: set[tuple[bytes, bytes, bytes]], key: bytes) -> None:
        self._good = good
        self._key = key

    def verify(self, signature: bytes, data: bytes) -> None:
        checked = (self._key, signature, hashlib.blake2b(data).digest())
        if checked not in self._good:
            ed25519.Ed25519PublicKey.from_public_bytes(self._key).verify(signature, data)
            self._good.add(checked)
