"""`swarmnode demo`: starts the nodes, shows them, stops them, and judges the run."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.live import Live

from swarmnode.demo.crew import CrewSwarm
from swarmnode.demo.nodes import DemoNode, Liar
from swarmnode.demo.table import print_verdict, status_line, table
from swarmnode.demo.verdict import Finding, Kill, judge
from swarmnode.errors import Unavailable

START_SECONDS = 90.0
RETURN_SECONDS = 60.0
POLL_INTERVAL = 1.0
"""Seconds between polls of the nodes."""
LINE_INTERVAL = 10.0
"""Seconds between lines, if the output is not a terminal."""
STEP_SECONDS = 0.6
"""Least duration of a step. The embedded policy needs 30 ms; the pause lets three trainers share
two cores, and the user see the progress."""
SYNC_EVERY = 10
"""Inner steps per outer step. With the default of 50, a demo of 100 steps would have only two outer
steps."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of `swarmnode demo`, see `swarmnode.cli.demo`."""

    nodes: int = 3
    minutes: float = 1.0
    keep_running: bool = False
    solo: bool = False
    byzantine: int = 0
    kill: int = 0
    data_dir: Path | None = None
    http_port: int = 9464
    crew: bool = False
    delay: float = 0.0
    """One-way latency between the nodes of a crew, milliseconds."""


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
    swarm = CrewSwarm(options, directory) if options.crew else Swarm(options, directory)
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


class Swarm:
    """The nodes of a demo: honest nodes, then liars."""

    def __init__(self, options: DemoOptions, directory: Path) -> None:
        self._options = options
        self.nodes = [
            DemoNode(f"node{i}", directory / f"node{i}", node_settings(options, i))
            for i in range(options.nodes)
        ]
        self.liars = [
            Liar(f"liar{i}", directory / f"liar{i}", node_settings(options, 100 + i))
            for i in range(options.byzantine)
        ]
        self._first: list[str] = []
        self._kills: dict[str, Kill] = {}
        self._crashed: list[str] = []
        self._started = time.monotonic()

    @property
    def all_nodes(self) -> list[DemoNode]:
        return [*self.nodes, *self.liars]

    def start(self, console: Console) -> None:
        """Start the first node, wait until it listens, and start the other nodes, which join
        through it."""
        self.nodes[0].start([])
        self._first = self.nodes[0].wait_for_address(time.monotonic() + START_SECONDS)
        for node in self.nodes[1:]:
            node.start(self._first)
        if self.liars:
            # Liars dial all nodes, because peer exchange does not share banned peers.
            addresses = [
                address
                for node in self.nodes
                for address in node.wait_for_address(time.monotonic() + START_SECONDS)
            ]
            for liar in self.liars:
                liar.start(addresses)
        console.print(
            f"started {len(self.nodes)} nodes; status page of the first: {self.nodes[0].url}/",
            soft_wrap=True,
        )

    def watch(self, console: Console, stop: threading.Event) -> None:
        """Show the nodes until the time is over, a node ends, or `stop` is set. Meanwhile, kill and
        restart nodes."""
        duration = self._options.minutes * 60
        learning_since = None
        printed = 0.0
        live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
        with live or nullcontext():
            while not stop.wait(POLL_INTERVAL):
                for node in self.all_nodes:
                    node.poll()
                self._record_returns()
                now = time.monotonic()
                if live is not None:
                    live.update(table(self.all_nodes, now - self._started, console.width))
                elif now - printed >= LINE_INTERVAL:
                    printed = now
                    console.print(status_line(self.all_nodes, now - self._started), soft_wrap=True)
                if not all(node.alive() for node in self.all_nodes):
                    return
                if learning_since is None and (
                    all(node.view.step for node in self.nodes)
                    or now - self._started > START_SECONDS
                ):
                    learning_since = now
                if learning_since is None or self._options.keep_running:
                    continue
                if self._options.kill and not self._kills and now - learning_since >= duration / 3:
                    self._kill()
                waiting = any(kill.step_after is None for kill in self._kills.values())
                if now - learning_since >= duration + (RETURN_SECONDS if waiting else 0.0):
                    return

    def end(self) -> None:
        """Poll all nodes once more, then stop them."""
        for node in self.all_nodes:
            if node.alive():
                node.poll()
            elif node.started:
                self._crashed.append(
                    f"{node.name} ended with exit code {node.exit_code()}: {node.last_log_line()}"
                )
        for liar in self.liars:
            liar.kill()
        for node in self.nodes:
            node.stop()
        for node in self.nodes:
            node.wait(30.0)

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
