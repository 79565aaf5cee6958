"""Nodes on loopback, each with its own disk, an adjustable clock, and a cable in front of it
through which all others connect."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from swarmnode.p2p import identity
from tests.support.cable import Cable
from tests.support.forked_node import INSIDE, ForkedNode, runs
from tests.support.waiting import free_port, snapshot

SUPERVISOR, NETWORK, TRAINER, SCORER = (
    "supervisor",
    "swarmnode.daemon.node",
    "swarmnode.trainer",
    "swarmnode.tasks.scorer",
)
DISK = "24m"
PACE = 0.5
SETTINGS: dict[str, dict[str, object]] = {
    "swarm": {"name": "chaos"},
    "policy": {"threads": 1},
    "training": {"groups_per_step": 4, "eval_every": 20, "save_every": 0.0},
    "task": {"names": ["rg/chain_sum", "rg/spell_backward"], "held_out_per_task": 16},
    "weights": {"sync_every": 8, "fragments": 1, "partners": "anyone"},
    "http": {"port": 0},
}


class ChaosNode(ForkedNode):
    """A node whose data directory is its own file system if `small_disk` is set. Its log is stored
    elsewhere. pace: minimum seconds per step."""

    def __init__(
        self,
        number: int,
        directory: Path,
        small_disk: bool,
        pace: float,
        settings: Mapping[str, dict[str, object]] = SETTINGS,
    ) -> None:
        self.data, self.number = directory / "data", number
        self.small_disk = small_disk
        directory.mkdir(mode=0o700)
        self.data.mkdir(mode=0o700)
        if small_disk:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "tmpfs", str(self.data)],
                check=True,
            )
            assert os.path.ismount(self.data)
        self.port = free_port()
        self.cable = Cable(self.port)
        network = {
            "listen_addrs": [f"/ip4/127.0.0.1/tcp/{self.port}"],
            "announce_addrs": [f"/ip4/127.0.0.1/tcp/{self.cable.port}"],
            "mdns": False,
        }
        training = {**settings["training"], "seed": number, "step_interval": pace}
        super().__init__(
            f"node{number}", self.data, {**settings, "network": network, "training": training}
        )
        self.log_file = directory / "node.log"
        self.skew_file, self.tasks_dir = directory / "skew", directory / "tasks"

    def launch(self, *arguments: str) -> None:
        """Start the node with the clock of `skew` and the task counter of `tasks`."""
        self.tasks_dir.mkdir(exist_ok=True)
        with changed_environment(
            PYTHONPATH=f"{INSIDE}:{os.getcwd()}",
            SKEW_FILE=str(self.skew_file),
            TASKS_DIR=str(self.tasks_dir),
        ):
            super().launch(*arguments)

    def skew(self, seconds: float) -> None:
        self.skew_file.write_text(str(seconds))

    def tasks(self, pid: int) -> int | None:
        """Return the number of trio tasks in one of its processes, or None before the first
        report."""
        try:
            return int((self.tasks_dir / str(pid)).read_text())
        except (OSError, ValueError):
            return None

    @property
    def peer(self) -> str:
        return identity.load_or_create(self.data / "identity.key").peer_id

    @property
    def wire(self) -> str:
        """Return the address at which the others connect."""
        return f"/ip4/127.0.0.1/tcp/{self.cable.port}/p2p/{self.peer}"

    def snapshot(self) -> dict[str, Any] | None:
        """Return the node's snapshot, or None while it does not answer."""
        return snapshot(self)

    def process(self, name: str) -> psutil.Process | None:
        """Return the running process named SUPERVISOR, NETWORK, TRAINER or SCORER."""
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self.pid)
            if name == SUPERVISOR:
                return own
            for child in own.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if runs(child, name):
                        return child
        return None

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self.pid)
            return [own, *own.children(recursive=True)]
        return []

    def log(self, since: int = 0) -> str:
        with open(self.log_file, "rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")

    def log_size(self) -> int:
        return self.log_file.stat().st_size if self.log_file.exists() else 0

    def steps(self) -> list[dict[str, Any]]:
        """Return every step in its log."""
        found = []
        for path in sorted((self.data / "log").glob("steps.jsonl*"), reverse=True):
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def end(self) -> None:
        """Stop the node, or kill it after a time, and remove its disk."""
        self.kill()
        self.cable.close()
        if self.small_disk:
            subprocess.run(["umount", "-l", str(self.data)], check=True)


class ChaosSwarm:
    """Nodes that know each other. can_mount: each node's disk is a small file system that can be
    filled."""

    def __init__(
        self,
        directory: Path,
        count: int,
        small_disks: bool = True,
        pace: float = PACE,
        settings: Mapping[str, dict[str, object]] = SETTINGS,
    ) -> None:
        self.can_mount = small_disks and sys.platform == "linux" and os.geteuid() == 0
        self.nodes = [
            ChaosNode(i, directory / f"node{i}", self.can_mount, pace, settings)
            for i in range(count)
        ]

    def start(self, *nodes: ChaosNode) -> None:
        """Start some nodes, or all, with the addresses of the others."""
        for node in nodes or self.nodes:
            node.start([other.wire for other in self.nodes if other is not node])

    def stop(self) -> None:
        """Ask all nodes to stop at once."""
        for node in self.nodes:
            node.stop()
        for node in self.nodes:
            node.wait(60)

    def end(self) -> None:
        for node in self.nodes:
            node.end()


@contextlib.contextmanager
def swarm_of(
    directory: Path,
    count: int,
    small_disks: bool = True,
    pace: float = PACE,
    settings: Mapping[str, dict[str, object]] = SETTINGS,
) -> Iterator[ChaosSwarm]:
    swarm = ChaosSwarm(directory, count, small_disks, pace, settings)
    try:
        swarm.start()
        yield swarm
    finally:
        swarm.end()


@contextlib.contextmanager
def changed_environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def stopped(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Send SIGSTOP, and SIGCONT after `seconds`."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


def until(condition: Callable[[], Any], seconds: float, interval: float = 0.1) -> Any:
    """Return the first true value of `condition()`, or its last value after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(interval)
    return value
