"""`swarmnode run`: starts the network process and the trainer, watches both, restarts either alone.

Neither libp2p nor torch is loaded here, so that what brings the others back is small and does not
crash with them. Owns signals and the exit code: the first SIGTERM or SIGINT drains, the second
aborts. What its owner says meanwhile is in `control.py`.
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
from swarmnode.daemon.machine import Machine, Rules
from swarmnode.daemon.starvation import Starvation
from swarmnode.daemon.watchdog import DRAIN_SECONDS, End, Watchdog
from swarmnode.errors import SwarmNodeError, Unavailable
from swarmnode.files import lock_data_dir, write_atomically
from swarmnode.observe.logfile import last_error, log_file
from swarmnode.observe.systemd import Notifier
from swarmnode.p2p.passphrase import without
from swarmnode.process import PROGRESS_FD

log = structlog.get_logger("swarmnode.daemon.supervisor")

COMMANDS = {"network": "swarmnode.daemon.node", "trainer": "swarmnode.trainer"}
WATCH_INTERVAL_SECONDS = 0.25
NOTIFY_SECONDS = 1.0
"""Between two words to systemd; its watchdog must be patient for several of them."""
OVERDUE_SECONDS = 5.0
"""A process that is still there so long after it should have been killed is beyond us: systemd
hears no more."""
LINE_BYTES = 4096
NO_RULES = Rules()
ENDED = Path("run") / "ended"
"""Below the data directory: pid of the trainer that the network process ended last, a space, and
why."""


def run(
    data_dir: Path,
    configuration: Callable[[], str],
    commands: Mapping[str, str] = COMMANDS,
    rules: Rules = NO_RULES,
) -> int:
    """Run a node until it is told to stop or cannot go on; return its exit code.

    configuration: what the next process is started with, as JSON. Asked before each start, because
    a manifest may have changed it since. commands: process name to module. rules: when to rest for
    the machine's sake.

    Raises:
        Unavailable: the data directory cannot be written, or another node runs in it.
        SwarmNodeError: there is no configuration to begin with.
    """
    supervisor = Supervisor(data_dir, configuration, commands, rules)
    exit_code = trio.run(supervisor.run)
    if supervisor.failure:
        print(f"swarmnode: {supervisor.failure}", file=sys.stderr, flush=True)
    return exit_code


@dataclass
class Child:
    name: str
    watchdog: Watchdog
    process: subprocess.Popen[bytes] | None = None
    exited: trio.Event = field(default_factory=trio.Event)
    ended: str = ""
    """Why we ended the process that ran last; empty where it ended by itself."""
    down: str = ""
    """Why there is none at work; empty from its first work on."""


class Supervisor:
    """Starts one process per command and keeps it running. Parameters as those of `run`."""

    def __init__(
        self,
        data_dir: Path,
        configuration: Callable[[], str],
        commands: Mapping[str, str] = COMMANDS,
        rules: Rules = NO_RULES,
    ) -> None:
        self._data_dir = data_dir
        self._configuration = configuration
        self._commands = commands
        self._run_dir = data_dir / "run"
        rng = random.Random()
        self._children = {name: Child(name, Watchdog(name, rng)) for name in commands}
        self._stopping = trio.Event()
        self._patient = False
        self._exit_code = 0
        self.failure = ""
        """Why the node gave up, in one line; empty unless it did."""
        self._written = False
        self._control = Control(
            data_dir, rules, Machine(), self.finish, trains="trainer" in commands
        )

    def finish(self) -> None:
        """Stop after the step that runs, however long it takes."""
        if not self._stopping.is_set():
            self._patient = True
            self._stopping.set()

    async def run(self) -> int:
        lock = lock_data_dir(self._data_dir)
        try:
            config_file = self._run_dir / "config.json"
            self._write_statistics()
            self._notifier = Notifier(os.environ)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._signals)
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
        """Start `child`, wait for its end, and start it again until the watchdog or a signal says
        otherwise."""
        while not self._stopping.is_set():
            self._write_config(config_file)
            read_fd, write_fd = os.pipe()
            child.exited = trio.Event()
            # From this thread: trio would start it from a worker thread, and die_with_parent fires
            # when *that* ends.
            child.process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-m", self._commands[child.name], "--config", str(config_file)],
                stdin=subprocess.DEVNULL,
                pass_fds=(write_fd,),
                env={
                    **(os.environ if child.name == "network" else without(os.environ)),
                    PROGRESS_FD: str(write_fd),
                },
                start_new_session=True,  # a terminal's Ctrl-C reaches us alone; we pass it on once
            )
            os.close(write_fd)
            child.watchdog.started(trio.current_time())
            child.ended, started_at = "", time.time()
            log.info("started", process=child.name, pid=child.process.pid)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_progress, child, read_fd)
                nursery.start_soon(self._kill_when_stalled, child)
                exit_code = await wait_for(child.process)
                child.exited.set()
                nursery.cancel_scope.cancel()
            if self._stopping.is_set():
                log.info("stopped", process=child.name, exit_code=exit_code)
                return
            child.ended = child.ended or self._ended_by_network(child.process.pid)
            last = last_error(log_file(self._data_dir, child.name), started_at)
            cause = "" if child.ended else last
            verdict = child.watchdog.exited(trio.current_time(), exit_code, cause)
            child.down = child.ended or how_it_ended(exit_code, last)
            self._write_statistics()
            if isinstance(verdict, End):
                log_ending = log.info if verdict.exit_code == 0 else log.error
                log_ending(
                    "ending", reason=verdict.reason, exit_code=verdict.exit_code, last=child.down
                )
                self._exit_code = verdict.exit_code
                if verdict.exit_code != 0:
                    self.failure = f"{verdict.reason}: {child.down}"
                self._stopping.set()
                return
            pause = round(verdict.after_seconds, 2)
            log.warning(
                "restarting",
                process=child.name,
                because=child.down,
                exit_code=exit_code,
                after_seconds=pause,
            )
            with trio.move_on_after(verdict.after_seconds):
                await self._stopping.wait()

    def _ended_by_network(self, pid: int) -> str:
        """Why the network process ended the process `pid`; empty if it did not."""
        try:
            ended, _, reason = (self._data_dir / ENDED).read_text(errors="replace").partition(" ")
        except OSError:
            return ""
        return f"the network process ended it: {reason}" if ended == str(pid) else ""

    def _write_config(self, config_file: Path) -> None:
        """Write what the next process is started with. When it cannot be had or written again, it
        stays what it was.

        Raises Unavailable when there is none from before.
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
                    before = len(child.watchdog.statistics().recovery_seconds)
                    message = parse_progress(line)
                    if message is not None:
                        child.watchdog.progressed(trio.current_time(), *message)
                    if len(child.watchdog.statistics().recovery_seconds) != before:
                        child.down = ""
                        self._write_statistics()

    async def _kill_when_stalled(self, child: Child) -> None:
        assert child.process is not None
        starvation = Starvation(child.process.pid, trio.current_time())
        while True:
            await trio.sleep(WATCH_INTERVAL_SECONDS)
            now = trio.current_time()
            if starvation.due(now) or now > child.watchdog.deadline():
                child.watchdog.starved(starvation.since(child.watchdog.last_progress, now))
            if now > child.watchdog.deadline() and not self._stopping.is_set():
                status = child.watchdog.statistics().status
                log.error("no progress", process=child.name, status=status)
                child.watchdog.stalled()
                child.ended = f"it made no progress while {status}, and was ended"
                child.process.kill()
                await child.exited.wait()

    async def _notify(self) -> None:
        """Keep systemd informed. Nothing hangs while each process is either in time, or gone and
        about to be started again."""
        while True:
            late = trio.current_time() - OVERDUE_SECONDS
            running = [
                child
                for child in self._children.values()
                if child.process is not None and child.process.poll() is None
            ]
            well = self._stopping.is_set() or all(
                child.watchdog.deadline() > late for child in running
            )
            self._notifier.beat(
                {
                    name: child.watchdog.statistics().status
                    for name, child in self._children.items()
                },
                well,
            )
            await trio.sleep(NOTIFY_SECONDS)

    async def _signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            async for signum in received:
                if self._stopping.is_set() and not self._patient:
                    log.warning("aborting", signal=signal.Signals(signum).name)
                    self._exit_code = 130 if signum == signal.SIGINT else 128 + signum
                    self._send(signal.SIGKILL)
                    return
                log.info("draining", signal=signal.Signals(signum).name)
                self._patient = False
                self._stopping.set()

    async def _drain_when_stopping(self, scope: trio.CancelScope) -> None:
        """The trainer first, so that its last groups can still be published; then the network."""
        await self._stopping.wait()
        if "trainer" in self._children:
            await self._last_step(self._children["trainer"])
        for name in ("trainer", "network"):
            if name in self._children:
                await self._terminate(self._children[name])
        for child in self._children.values():
            if child.process is not None:
                await child.exited.wait()
        self._write_statistics()
        scope.cancel()

    async def _last_step(self, trainer: Child) -> None:
        """Wait for it, where there is time: until the trainer has saved and ended, hangs, or a
        signal takes the time away."""
        if trainer.process is None or trainer.process.poll() is not None or not self._patient:
            return
        trainer.process.terminate()
        while self._patient and trio.current_time() <= trainer.watchdog.deadline():
            with trio.move_on_after(WATCH_INTERVAL_SECONDS):
                await trainer.exited.wait()
                break
        self._patient = False

    async def _terminate(self, child: Child) -> None:
        """Ask it to stop, and wait for as long as `Watchdog.drained_by` says; then force."""
        if child.process is None or child.process.poll() is not None:
            return
        child.process.terminate()
        asked_at = trio.current_time()
        while not child.exited.is_set():
            late = child.watchdog.drained_by(asked_at)
            if trio.current_time() > late:
                log.warning(
                    "drain took too long",
                    process=child.name,
                    status=child.watchdog.statistics().status,
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
        """For the network process to export: it serves the metrics, but cannot count its own
        deaths."""
        written = {}
        for name, child in self._children.items():
            watched = child.watchdog.statistics()
            written[name] = {
                "restarts": watched.restarts,
                "stalls": watched.stalls,
                "recovery_seconds": watched.recovery_seconds,
                "down": child.down,
            }
        try:
            write_atomically(
                self._run_dir / "supervisor.json", json.dumps({"processes": written}).encode()
            )
        except OSError as error:  # a full disk must not end a node that still trains
            log.error("cannot write statistics", error=str(error))


def how_it_ended(exit_code: int, last: str) -> str:
    """Why a process that nobody told to end is gone, in one line. `last`: the last error of its own
    log, empty without one."""
    if exit_code == 0:
        return "it finished"
    how = (
        f"exit code {exit_code}"
        if exit_code > 0
        else f"killed by {signal.Signals(-exit_code).name}"
    )
    if exit_code == -signal.SIGKILL and not last:
        how += "; where nobody did that, the machine ran out of memory"
    if exit_code == -signal.SIGILL:
        how += ": a package, most often torch, is built for a newer processor than this one"
    return f"{last.removeprefix('crashed error=')} ({how})" if last else how


async def wait_for(process: subprocess.Popen[bytes]) -> int:
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
    """(step seconds, status) of one line of a child's pipe; None for a line that is not one of
    ours."""
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
