"""`swarmnode demo`: starts the nodes, shows them, stops them, and judges the run."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swarmnode.demo.crew import CrewSwarm
from swarmnode.demo.nodes import DemoNode, Liar
from swarmnode.demo.swarm import RETURN_SECONDS, START_SECONDS, DemoOptions, DemoSwarm
from swarmnode.demo.table import print_verdict, status_line, table
from swarmnode.demo.verdict import Finding, Kill, judge
from swarmnode.errors import Unavailable

STEP_SECONDS = 0.6
"""Least duration of a step. The embedded policy needs 30 ms; the pause lets three trainers share
two cores, and the user see the progress."""
SYNC_EVERY = 10
"""Inner steps per outer step. With the default of 50, a demo of 100 steps would have only two outer
steps."""


def node_settings(options: DemoOptions, number: int) -> dict[str, dict[str, object]]:
    """Return the configuration of node `number`: the embedded policy, with paced steps, on
    loopback."""
    return {
        "swarm": {"name": "demo"},
        "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
        "policy": {"threads": 1},
        "training": {
            "step_interval": STEP_SECONDS,
            "eval_every": 10,
            "save_every": 1.0,
            "seed": number,
        },
        "sharing": {"enabled": not options.solo},
        "weights": {"rule": "off" if options.solo else "noloco", "sync_every": SYNC_EVERY},
        "http": {"port": options.http_port + number if options.http_port else 0},
    }


def run_demo(options: DemoOptions) -> int:
    """Run the demo and return 0 if all findings are good, else 1.

    Raises:
        Unavailable: The first node did not start, or the directory cannot be created.
    """
    console = Console()
    temporary = options.data_dir is None
    directory = (
        Path(tempfile.mkdtemp(prefix="swarmnode-demo-"))
        if options.data_dir is None
        else options.data_dir.absolute()
    )
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise Unavailable(f"--data-dir {directory} cannot be used: {error.strerror}") from None
    swarm = (CrewSwarm if options.crew else Swarm)(options, directory)
    with _stop_on_signal() as stop:
        try:
            swarm.start(console)
            swarm.watch(console, stop)
        finally:
            swarm.end()
    findings = swarm.findings()
    ok = all(finding.ok for finding in findings)
    print_verdict(console, findings)
    if ok and temporary:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        console.print(f"logs and state are in {directory}", soft_wrap=True)
    return 0 if ok else 1


class Swarm(DemoSwarm):
    """The nodes of a demo: honest nodes, then liars."""

    def __init__(self, options: DemoOptions, directory: Path) -> None:
        super().__init__(
            options,
            [
                DemoNode(f"node{i}", directory / f"node{i}", node_settings(options, i))
                for i in range(options.nodes)
            ],
        )
        self.liars = [
            Liar(f"liar{i}", directory / f"liar{i}", node_settings(options, 100 + i))
            for i in range(options.byzantine)
        ]
        self.all_nodes = [*self.nodes, *self.liars]
        self._kills: dict[str, Kill] = {}
        self._learning_since: float | None = None

    def start(self, console: Console) -> None:
        super().start(console)
        if self.liars:
            # Liars dial all nodes, because peer exchange does not share banned peers.
            addresses = [
                address
                for node in self.nodes
                for address in node.wait_for_address(time.monotonic() + START_SECONDS)
            ]
            for liar in self.liars:
                liar.start(addresses)

    def update(self, now: float) -> None:
        self._record_returns()
        if self._learning_since is None and (
            all(node.view.step for node in self.nodes) or now > START_SECONDS
        ):
            self._learning_since = now
        if self._learning_since is None or self._options.keep_running or self._kills:
            return
        if self._options.kill and now - self._learning_since >= self._options.minutes * 20:
            self._kill()

    def is_over(self, now: float) -> bool:
        if self._learning_since is None or self._options.keep_running:
            return False
        waiting = any(kill.step_after is None for kill in self._kills.values())
        duration = self._options.minutes * 60 + (RETURN_SECONDS if waiting else 0.0)
        return now - self._learning_since >= duration

    def end(self) -> None:
        super().end()
        for liar in self.liars:
            liar.kill()

    def table(self, now: float, width: int) -> Table:
        return table(self.all_nodes, now, width)

    def line(self, now: float) -> str:
        return status_line(self.all_nodes, now)

    def findings(self) -> list[Finding]:
        return judge(
            [(node.name, node.view) for node in self.nodes],
            sharing=not self._options.solo and len(self.nodes) > 1,
            liars=[liar.peer_id() for liar in self.liars],
            kills=list(self._kills.values()),
            crashed=self._crashed,
            averaging=not self._options.solo and len(self.nodes) > 1,
        )

    def _kill(self) -> None:
        """Kill all processes of the last nodes with SIGKILL, and restart the nodes from their saved
        state."""
        for node in self.nodes[-min(self._options.kill, len(self.nodes) - 1) :]:
            self._kills[node.name] = Kill(
                node.name, node.view.peer, node.view.step, node.view.saved_step
            )
            node.kill()
            node.start(self._first)

    def _record_returns(self) -> None:
        """Record the first step after the restart of each killed node."""
        for node in self.nodes:
            kill = self._kills.get(node.name)
            if (
                kill is not None
                and kill.step_after is None
                and node.has_responded
                and node.view.step > 0
            ):
                self._kills[node.name] = replace(
                    kill, step_after=node.view.step, peer_after=node.view.peer
                )


@contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    stop = threading.Event()
    before = {
        signum: signal.signal(signum, lambda *_: stop.set())
        for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
