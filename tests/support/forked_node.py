"""Whole nodes whose processes are forks of one server that has imported torch and libp2p.

A node starts with 0.1 s of CPU time instead of 4 s. Each of its three processes is still a process
of its own, a child of its supervisor, and can be killed, stopped and restarted.
tests/swarm/test_node.py starts the same nodes as a user does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from trio._core._run import GLOBAL_RUN_CONTEXT

from swarmnode import cli
from swarmnode.daemon import supervisor
from swarmnode.demo.nodes import START, DemoNode
from swarmnode.process import die_with_parent, run_main
from tests.support import forked

INSIDE = Path(__file__).parent / "inside"
"""Folder on the PYTHONPATH of nodes with test hooks."""
NAMES = {"swarmnode.daemon.node": "node-network", "swarmnode.trainer": "node-trainer"}
"""Module of a forked process → its name in the process table, at most 15 characters."""
MAINS = {
    "swarmnode.daemon.node": "swarmnode.daemon.node",
    "swarmnode.trainer": "swarmnode.trainer.__main__",
}
"""Module of a forked process → module with its function `main`."""


class ForkedNode(DemoNode):
    """A `DemoNode` that is forked. A process other than `swarmnode run` starts as usual."""

    def launch(self, *arguments: str) -> None:
        if self.prefix or arguments[:2] != ("-c", START):
            super().launch(*arguments)
            return
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("SWARMNODE_")
        }
        process = forked.context.Process(
            target=_run_supervisor,
            args=(arguments[2:], {**environment, "HF_HUB_OFFLINE": "1"}, self.log_file),
            daemon=True,
        )
        process.start()
        self._process = _Supervisor(process)  # type: ignore[assignment]


def runs(process: psutil.Process, module: str) -> bool:
    """Return True if `process` runs the module of a node, started or forked."""
    return module in process.cmdline() or process.name() == NAMES.get(module)


class _Supervisor:
    """The part of `subprocess.Popen` that `DemoNode` uses."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("forked node", timeout)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run_supervisor(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    _detach(environment, log)
    if "SKEW_FILE" in environment or "TASKS_DIR" in environment:
        runpy.run_path(str(INSIDE / "sitecustomize.py"))  # also for its children
    supervisor.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=_ForkedChild, DEVNULL=subprocess.DEVNULL
    )
    die_with_parent()
    _exit_with(lambda: cli.run(list(arguments)))


class _ForkedChild(subprocess.Popen):  # type: ignore[type-arg]
    """A network process or a trainer: a fork of the supervisor in place of a new Python."""

    def _execute_child(  # type: ignore[override]
        self,
        args: Sequence[str],
        executable: str | None,
        preexec_fn: None,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: None,
        env: Mapping[str, str],
        *_: object,
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            _run_child(args[2], args[3:], pass_fds, env)


def _run_child(
    module: str, arguments: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
) -> None:
    """Run the main function of `module` inside the forked process, and exit.

    The process still has the stack, the trio run and the descriptors of the supervisor. It never
    returns to that stack.
    """

    def main() -> int:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for entry in os.listdir("/proc/self/fd"):
            if int(entry) not in (0, 1, 2, *pass_fds):
                _close(int(entry))
        vars(GLOBAL_RUN_CONTEXT).clear()
        _detach(environment)
        sys.argv = [module, *arguments]
        sys.orig_argv = [sys.executable, "-m", *sys.argv]
        ctypes.CDLL(None).prctl(15, NAMES[module].encode())  # PR_SET_NAME
        if "GROW_FILE" in environment:
            runpy.run_path(str(INSIDE / "sitecustomize.py"))
        return run_main(module, importlib.import_module(MAINS[module]).main)

    _exit_with(main)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # the descriptor of the listing itself
        os.close(fd)


def _detach(environment: Mapping[str, str], log: Path | None = None) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)


def _exit_with(main: Callable[[], int]) -> None:
    """Call `main` and end the process with its exit code, without the cleanup of the parent."""
    code = 1
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
