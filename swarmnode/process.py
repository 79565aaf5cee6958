"""What the network process and the trainer owe their supervisor: signs of progress, and not
outliving it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from swarmnode.errors import SwarmNodeError

PROGRESS_FD = "SWARMNODE_PROGRESS_FD"
ALIVE_SECONDS = 1.0


class Progress:
    """Writes one JSON line per sign of progress to the pipe that the supervisor reads.

    Does nothing when the process was started by hand. Never blocks and never raises: a supervisor
    that has gone must not end its child here, `die_with_parent` does that.
    """

    def __init__(self) -> None:
        text = os.environ.pop(PROGRESS_FD, "")
        self._fd = int(text) if text else None
        self._count = 0
        self._status = "starting"
        self._reported_at = float("-inf")
        if self._fd is not None:
            os.set_inheritable(self._fd, False)  # the scorer must not keep the pipe open
            os.set_blocking(self._fd, False)

    def __call__(self, status: str, step_seconds: float | None = None) -> None:
        """Report progress. `step_seconds` is the length of a finished step, the basis of the stall
        deadline."""
        self._count += 1
        self._status, self._reported_at = status, time.monotonic()
        if self._fd is None:
            return
        line = (
            json.dumps({"progress": self._count, "step_seconds": step_seconds, "status": status})
            + "\n"
        )
        with contextlib.suppress(OSError):
            os.write(self._fd, line.encode())

    def alive(self) -> None:
        """Report the last status again, at most once in ALIVE_SECONDS: for the middle of what takes
        long. Costs nothing in between."""
        if time.monotonic() - self._reported_at >= ALIVE_SECONDS:
            self(self._status)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send a signal when the parent ends, however it ends (Linux; elsewhere
    nothing)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, number)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def loading_modules() -> Iterator[None]:
    """Import large packages without the garbage collector, and keep it from what they made for
    good.

    Their objects stay as long as the process: looking for garbage among them again and again is a
    fifth of the time in which torch and transformers load, and a tenth of a second in each later
    full collection. Not even once at the end: that would be 0.4 s for a megabyte.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_main(name: str, main: Callable[[], int]) -> int:
    """Run `main` and turn our own errors into one line on stderr and their exit code."""
    try:
        return main()
    except SwarmNodeError as error:
        first = error
    except BaseExceptionGroup as group:
        # what a nursery makes of one error; anything else in it is a defect and keeps its traceback
        leaf = next(leaves(group))
        if not isinstance(leaf, SwarmNodeError):
            return _crashed(name, group)
        first = leaf
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001
        return _crashed(name, error)
    if logging.getLogger().handlers:
        logging.getLogger(name).error("%s", first)
    else:
        print(f"{name}: {first}", file=sys.stderr, flush=True)
    return first.exit_code


def _crashed(name: str, error: BaseException) -> int:
    """A defect of ours, in the log: one line, and the traceback in the log's file. Without a log as
    Python does it."""
    if not logging.getLogger().handlers:
        raise error
    logging.getLogger(name).critical("crashed", exc_info=error)
    return 1


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions inside nested groups, our own first."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    inner = [leaf for child in error.exceptions for leaf in leaves(child)]
    yield from sorted(inner, key=lambda leaf: not isinstance(leaf, SwarmNodeError))
