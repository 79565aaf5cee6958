"""Everything in a process that is not decided by its program, decided by a seed: scheduling, time, randomness, threads."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest import mock

import trio
import trio._core._run as scheduler
import trio.testing
from cryptography.hazmat.primitives.asymmetric import ed25519

from swarmnode.wire import envelope

EPOCH = 1_800_000_000.0
"""Unix time at which every simulation begins."""


def run(seed: int, main: Callable[[], Awaitable[None]]) -> None:
    """`trio.run(main)` such that another run with this seed does the same: also in another process, with another PYTHONHASHSEED."""
    with _seeded(seed):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def now() -> float:
    """Unix time here."""
    try:
        return EPOCH + trio.current_time()
    except RuntimeError:  # before the first task, or after the last
        return EPOCH


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    entropy = random.Random(f"entropy {seed}")

    class Seeded(random.Random):
        """Python's, which takes its seed from the simulation where it is given none."""

        def __init__(self, x: Any = None) -> None:
            super().__init__(entropy.getrandbits(64) if x is None else x)

    def some_bytes(count: int | None = None) -> bytes:
        return entropy.randbytes(32 if count is None else count)

    patches = [
        mock.patch.object(scheduler, "_r", random.Random(f"scheduler {seed}")),
        mock.patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        mock.patch.object(trio.to_thread, "run_sync", _at_once),
        mock.patch.object(time, "time", now),
        mock.patch.object(random, "Random", Seeded),
        mock.patch.object(os, "urandom", some_bytes),
        mock.patch.object(secrets, "token_bytes", some_bytes),
        mock.patch.object(secrets, "token_hex", lambda count=32: some_bytes(count).hex()),
        mock.patch.object(envelope, "Ed25519PublicKey", _RememberedKeys()),
    ]
    collecting = gc.isenabled()
    gc.disable()  # what a collection closes, and when, would be part of the history
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            yield
        finally:
            if collecting:
                gc.enable()


async def _at_once(sync_fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Instead of a thread: a clock that jumps ahead does not wait for one."""
    await trio.lowlevel.checkpoint()
    return sync_fn(*args)


class _RememberedKeys:
    """Checks of signatures, each done once in a process instead of once for every node: the answer is the same."""

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
