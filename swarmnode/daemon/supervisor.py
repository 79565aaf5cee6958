"""`swarmnode run`: starts the network process and the trainer, monitors both, restarts either
alone.

Neither libp2p nor torch is loaded here, so that the supervisor stays small and does not crash with
its children. It handles signals and the exit code: the first SIGTERM or SIGINT drains, the second
aborts. `control.py` handles the operator's commands.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import trio

from swarmnode.daemon.control import Control
from swarmnode.daemon.watchdog import DRAIN_SECONDS, EndNode, Watchdog
from swarmnode.errors import SwarmNodeError, Unavailable
from swarmnode.files import lock_data_dir, write_atomically
from swarmnode.observe.logfile import ERRORS, last_line, log_file
from swarmnode.observe.systemd import Notifier
from swarmnode.process import PROGRESS_FD, RESTART_CODE

log = structlog.get_logger("swarmnode.daemon.supervisor")

COMMANDS = {"network": "swarmnode.daemon.node", "trainer": "swarmnode.trainer"}
WATCH_INTERVAL_SECONDS = 0.25
THAW_SECONDS = 1.0
NOTIFY_SECONDS = 1.0
"""Interval between sd_notify messages. systemd's watchdog timeout must be several times longer."""
OVERDUE_SECONDS = 5.0
"""If a killed process still exists after this time, heartbeats to systemd stop."""
LINE_BYTES = 4096


def run(
    data_dir: Path,
    configuration: Callable[[], str],
    commands: Mapping[str, str] = COMMANDS,
) -> int:
    """Run a node until it is stopped or cannot continue; return its exit code.

    Args:
        data_dir: data directory of the node.
        configuration: returns the configuration for the next process as JSON. Called before each
            start, because a manifest may have changed it.
        commands: process name → module.

    Raises:
        Unavailable: the data directory cannot be written, or another node is running in it.
        SwarmNodeError: there is no valid configuration at the start.
    """
    supervisor = Supervisor(data_dir, configuration, commands)
    exit_code = trio.run(supervisor.run)
    if supervisor.failure:
        print(f"swarmnode: {supervisor.failure}", file=sys.stderr, flush=True)
    return exit_code


@dataclass
class Child:
    """One supervised process."""

    name: str
    watchdog: Watchdog
    process: subprocess.Popen[bytes] | None = None
    exited: trio.Event = field(default_factory=trio.Event)
    kill_reason: str = ""
    """Reason for which the supervisor or the network process killed the last process; empty if it
    ended by itself."""
    down_reason: str = ""
    """Reason why no process is working; empty once one works."""
    loading: str = ""
    """Present activity of a process that loads."""


class Supervisor:
    """Runs one process per command. See `run` for the parameters."""

    def __init__(
        self,
        data_dir: Path,
        configuration: Callable[[], str],
        commands: Mapping[str, str] = COMMANDS,
    ) -> None:
        self._data_dir = data_dir
        self._configuration = configuration
        self._commands = commands
        self._run_dir = data_dir / "run"
        rng = random.Random()
        self._children = {name: Child(name, Watchdog(name, rng)) for name in commands}
        self._stopping = trio.Event()
        self._exit_code = 0
        self.failure = ""
        """Reason for which the node stopped, in one line; empty while it runs."""
        self._written = False
        self._control = Control(data_dir, trains="trainer" in commands)

    async def run(self) -> int:
        """Run until stopped; return the exit code. Raises the errors of the function `run`."""
        lock = lock_data_dir(self._data_dir)
        try:
            config_file = self._run_dir / "config.json"
            self._write_statistics()
            self._notifier = Notifier(os.environ)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._handle_signals)
                nursery.start_soon(self._notify)
                nursery.start_soon(self._control.run)
                nursery.start_soon(self._drain_when_stopping, nursery.cancel_scope)
                for child in self._children.values():
                    nursery.start_soon(self._keep_running, child, config_file)
            return self._exit_code
        finally:
            for child in self._children.values():
                if child.process is not None and child.process.poll() is None:
                    child.process.kill()
                    child.process.wait()
            os.close(lock)

    async def _keep_running(self, child: Child, config_file: Path) -> None:
        """Start `child`, wait for its end, and restart it until the watchdog or a signal ends the
        node."""
        while not self._stopping.is_set():
            self._write_config(config_file)
            read_fd, write_fd = os.pipe()
            child.exited = trio.Event()
            # Not in a worker thread, as trio would do: die_with_parent fires when the starting
            # thread ends.
            child.process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-m", self._commands[child.name], "--config", str(config_file)],
                stdin=subprocess.DEVNULL,
                pass_fds=(write_fd,),
                env={**os.environ, PROGRESS_FD: str(write_fd)},
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which forwards it
            )
            os.close(write_fd)
            child.watchdog.started(trio.current_time())
            child.kill_reason, started_at = "", time.time()
            log.info("started", process=child.name, pid=child.process.pid)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_progress, child, read_fd)
                nursery.start_soon(self._kill_when_stalled, child)
                exit_code = await wait_for_exit(child.process)
                child.exited.set()
                nursery.cancel_scope.cancel()
            if self._stopping.is_set():
                log.info("stopped", process=child.name, exit_code=exit_code)
                return
            wanted = exit_code == RESTART_CODE
            levels = ("warning",) if wanted else ERRORS
            last = last_line(log_file(self._data_dir, child.name), started_at, levels)
            cause = "" if child.kill_reason or wanted else last
            verdict = child.watchdog.exited(trio.current_time(), exit_code, cause)
            child.down_reason = child.kill_reason or describe_exit(exit_code, last)
            self._write_statistics()
            if isinstance(verdict, EndNode):
                log_ending = log.info if verdict.exit_code == 0 else log.error
                log_ending(
                    "ending",
                    reason=verdict.reason,
                    exit_code=verdict.exit_code,
                    last=child.down_reason,
                )
                self._exit_code = verdict.exit_code
                if verdict.exit_code != 0:
                    self.failure = f"{verdict.reason}: {child.down_reason}"
                self._stopping.set()
                return
            pause = round(verdict.after_seconds, 2)
            log.warning(
                "restarting",
                process=child.name,
                because=child.down_reason,
                exit_code=exit_code,
                after_seconds=pause,
            )
            with trio.move_on_after(verdict.after_seconds):
                await self._stopping.wait()

    def _write_config(self, config_file: Path) -> None:
        """Write the configuration of the next process. On failure the previous one stays in use.

        Raises:
            Unavailable: there is no previous one.
        """
        try:
            configuration = self._configuration()
        except SwarmNodeError as error:
            if not self._written:
                raise
            log.error("keeping the configuration", error=str(error))
            return
        try:
            write_atomically(config_file, configuration.encode())
        except OSError as error:  # a full disk must not end a node that still trains
            if not self._written:
                raise Unavailable(f"cannot write {config_file}: {error.strerror}") from None
            log.error("cannot write the configuration, keeping what was written", error=str(error))
        self._written = True

    async def _read_progress(self, child: Child, fd: int) -> None:
        async with trio.lowlevel.FdStream(fd) as pipe:
            pending = b""
            async for chunk in pipe:
                *lines, pending = (pending + chunk).split(b"\n")
                pending = pending[-LINE_BYTES:]
                for line in lines:
                    message = parse_progress(line)
                    if message is not None:
                        child.watchdog.progressed(trio.current_time(), *message)
                    loading = "" if child.watchdog.past_loading else child.watchdog.status
                    if loading != child.loading or (child.down_reason and not loading):
                        child.loading = loading
                        child.down_reason = child.down_reason if loading else ""
                        self._write_statistics()

    async def _kill_when_stalled(self, child: Child) -> None:
        assert child.process is not None
        while True:
            await trio.sleep(WATCH_INTERVAL_SECONDS)
            if trio.current_time() <= child.watchdog.deadline():
                continue
            # After a pause of the whole container, the child must report before it is judged.
            await trio.sleep(THAW_SECONDS)
            if trio.current_time() > child.watchdog.deadline() and not self._stopping.is_set():
                status = child.watchdog.status
                log.error("no progress", process=child.name, status=status)
                child.watchdog.stalled()
                child.kill_reason = f"no progress while {status}, killed"
                child.process.kill()
                await child.exited.wait()

    async def _notify(self) -> None:
        """Send heartbeats to systemd while every process is within its deadline or about to be
        restarted."""
        while True:
            late = trio.current_time() - OVERDUE_SECONDS
            running = [
                child
                for child in self._children.values()
                if child.process is not None and child.process.poll() is None
            ]
            healthy = self._stopping.is_set() or all(
                child.watchdog.deadline() > late for child in running
            )
            self._notifier.beat(
                {name: child.watchdog.status for name, child in self._children.items()},
                healthy,
            )
            await trio.sleep(NOTIFY_SECONDS)

    async def _handle_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            async for signum in received:
                if self._stopping.is_set():
                    log.warning("aborting", signal=signal.Signals(signum).name)
                    self._exit_code = 130 if signum == signal.SIGINT else 128 + signum
                    self._send(signal.SIGKILL)
                    return
                log.info("draining", signal=signal.Signals(signum).name)
                self._stopping.set()

    async def _drain_when_stopping(self, scope: trio.CancelScope) -> None:
        """Stop the trainer first, so that its last groups can still be published, then the network
        process."""
        await self._stopping.wait()
        for name in ("trainer", "network"):
            if name in self._children:
                await self._terminate(self._children[name])
        for child in self._children.values():
            if child.process is not None:
                await child.exited.wait()
        self._write_statistics()
        scope.cancel()

    async def _terminate(self, child: Child) -> None:
        """Ask a process to stop, and kill it if it still runs at `Watchdog.drain_deadline`."""
        if child.process is None or child.process.poll() is not None:
            return
        child.process.terminate()
        asked_at = trio.current_time()
        while not child.exited.is_set():
            late = child.watchdog.drain_deadline(asked_at)
            if trio.current_time() > late:
                log.warning(
                    "drain took too long",
                    process=child.name,
                    status=child.watchdog.status,
                )
                self._send(signal.SIGKILL)
                return
            self._notifier.stopping(late - trio.current_time())
            with trio.move_on_after(min(WATCH_INTERVAL_SECONDS, DRAIN_SECONDS)):
                await child.exited.wait()

    def _send(self, signum: signal.Signals) -> None:
        for child in self._children.values():
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(signum)

    def _write_statistics(self) -> None:
        """Write the file that the network process reads as `observe.watch.SupervisorStatistics`."""
        children = self._children.values()
        written = {
            "restarts": {child.name: child.watchdog.restarts for child in children},
            "stalls": {child.name: child.watchdog.stalls for child in children},
            "down": {child.name: child.down_reason for child in children if child.down_reason},
            "loading": {child.name: child.loading for child in children if child.loading},
        }
        try:
            write_atomically(self._run_dir / "supervisor.json", json.dumps(written).encode())
        except OSError as error:  # a full disk must not end a node that still trains
            log.error("cannot write statistics", error=str(error))


def describe_exit(exit_code: int, last: str) -> str:
    """Return the cause of a process's own end, in one line. `last` is the last error of its log;
    empty without one."""
    if exit_code == 0:
        return "finished"
    if exit_code == RESTART_CODE:
        return last or "the process wants to be restarted"
    how = (
        f"exit code {exit_code}"
        if exit_code > 0
        else f"killed by {signal.Signals(-exit_code).name}"
    )
    if exit_code == -signal.SIGKILL and not last:
        how += "; unless someone killed it, the machine ran out of memory"
    if exit_code == -signal.SIGILL:
        how += ": a package, most often torch, is built for a newer processor"
    return f"{last.removeprefix('crashed error=')} ({how})" if last else how


async def wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """Wait for a child to end; return its exit code, negative for a signal."""
    if not hasattr(os, "pidfd_open"):
        return await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
    fd = os.pidfd_open(process.pid)
    try:
        await trio.lowlevel.wait_readable(fd)
    finally:
        os.close(fd)
    return process.wait()


def parse_progress(line: bytes) -> tuple[float | None, str] | None:
    """Parse (step seconds, status) from one line of a child's pipe; None for an invalid line."""
    try:
        message = json.loads(line)
        seconds = message["step_seconds"]
        if seconds is not None and not (
            isinstance(seconds, int | float) and math.isfinite(seconds)
        ):
            return None
        return seconds, str(message["status"])
    except (ValueError, KeyError, TypeError):
        return None
