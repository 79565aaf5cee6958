"""Helpers for child processes of the supervisor: progress reports, exit with the parent, and exit
codes."""

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

from swarmnode.errors import RestartWanted, SwarmNodeError

PROGRESS_FD = "SWARMNODE_PROGRESS_FD"
"""Environment variable with the descriptor of the progress pipe."""
RESTART_CODE = 79
"""Exit code of a process that wants to be restarted (`RestartWanted`). The supervisor never returns
it. sysexits.h ends at 78."""
ALIVE_SECONDS = 1.0
"""Shortest interval between repeated reports."""


class Progress:
    """Reports progress to the supervisor, as JSON lines in a pipe.

    It does nothing if the process was started by hand. It never blocks and never raises; if the
    supervisor has ended, `die_with_parent` ends this process.
    """

    def __init__(self) -> None:
        text = os.environ.pop(PROGRESS_FD, "")
        self._fd = int(text) if text else None
        self._count = 0
        self._status = "starting"
        self._reported_at = float("-inf")
        if self._fd is not None:
            os.set_inheritable(self._fd, False)  # the scorer must not inherit the pipe
            os.set_blocking(self._fd, False)

    def __call__(self, status: str, step_seconds: float | None = None) -> None:
        """Report progress.

        Args:
            status: Current activity.
            step_seconds: Duration of a finished step. The supervisor derives its stall deadline
                from it.
        """
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
        """Repeat the last status, at most once per `ALIVE_SECONDS`. Call it during long
        computations."""
        if time.monotonic() - self._reported_at >= ALIVE_SECONDS:
            self(self._status)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel send a signal to this process when its parent ends. Does nothing on systems
    other than Linux."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, number)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def loading_modules() -> Iterator[None]:
    """Disable the garbage collector during imports of large packages, and exclude their objects
    from all later collections.

    The objects live as long as the process. Collections take a fifth of the time in which torch and
    transformers load, and would take 0.1 s in each later full collection. There is no
    collection at the end, because it takes 0.4 s and frees a megabyte.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_main(name: str, main: Callable[[], int]) -> int:
    """Run `main` and return its exit code. A `SwarmNodeError` or `RestartWanted` becomes one line
    of the log."""
    try:
        return main()
    except (SwarmNodeError, RestartWanted) as error:
        first = error
    except BaseExceptionGroup as group:
        # A nursery wraps errors in a group. Any other exception in it is a bug and keeps its
        # traceback.
        leaf = next(leaves(group))
        if not isinstance(leaf, SwarmNodeError | RestartWanted):
            return _crashed(name, group)
        first = leaf
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001
        return _crashed(name, error)
    if isinstance(first, RestartWanted):
        logging.getLogger(name).warning("%s", first)
        return RESTART_CODE
    if logging.getLogger().handlers:
        logging.getLogger(name).error("%s", first)
    else:
        print(f"{name}: {first}", file=sys.stderr, flush=True)
    return first.exit_code


def _crashed(name: str, error: BaseException) -> int:
    """Log an exception that indicates a bug, and return exit code 1. Raise it if logging is not
    configured."""
    if not logging.getLogger().handlers:
        raise error
    logging.getLogger(name).critical("crashed", exc_info=error)
    return 1


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside nested groups: each `SwarmNodeError` first, `RestartWanted`
    last."""

    def rank(leaf: BaseException) -> int:
        return 0 if isinstance(leaf, SwarmNodeError) else 1 + isinstance(leaf, RestartWanted)

    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    yield from sorted((leaf for each in error.exceptions for leaf in leaves(each)), key=rank)
