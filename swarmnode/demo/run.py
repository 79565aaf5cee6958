"""Starts the nodes, shows them, ends them, judges them."""

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
from swarmnode.demo.table import line, print_verdict, table
from swarmnode.demo.verdict import Finding, Kill, judge
from swarmnode.errors import Unavailable

START_SECONDS = 90.0
RETURN_SECONDS = 60.0
ASK_EVERY_SECONDS = 1.0
LINE_EVERY_SECONDS = 10.0
STEP_SECONDS = 0.6
"""A step of the embedded policy takes some 30 ms alone. Paced, three trainers fit on two cores and
a person can watch."""

SYNC_EVERY = 10
"""Steps between outer steps: fifty, as by default, would leave a demo of a hundred steps two of
them."""


@dataclass(frozen=True)
class DemoOptions:
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
    """Milliseconds, one way, between the nodes of a crew."""


def settings_of(options: DemoOptions, number: int) -> dict[str, dict[str, object]]:
    """Configuration of node `number`: the embedded default, paced, on loopback."""
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
    """Run the demo and return 0 if everything that it is to show was true, else 1.

    Raises:
        Unavailable: the first node did not start, or there is no directory for them.
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
        console.print(f"logs and state: {directory}", soft_wrap=True)
    return 0 if ok else 1


class Swarm:
    """The nodes of one demo, honest ones first."""

    def __init__(self, options: DemoOptions, directory: Path) -> None:
        self._options = options
        self.nodes = [
            DemoNode(f"node{i}", directory / f"node{i}", settings_of(options, i))
            for i in range(options.nodes)
        ]
        self.liars = [
            Liar(f"liar{i}", directory / f"liar{i}", settings_of(options, 100 + i))
            for i in range(options.byzantine)
        ]
        self._first: list[str] = []
        self._kills: dict[str, Kill] = {}
        self._crashed: list[str] = []
        self._started = time.monotonic()

    @property
    def everybody(self) -> list[DemoNode]:
        return [*self.nodes, *self.liars]

    def start(self, console: Console) -> None:
        """The first node, and when it listens the others, which join through it."""
        self.nodes[0].start([])
        self._first = self.nodes[0].wait_for_address(time.monotonic() + START_SECONDS)
        for node in self.nodes[1:]:
            node.start(self._first)
        if (
            self.liars
        ):  # at everybody's door: the peer exchange would not name a peer that is banned
            everywhere = [
                address
                for node in self.nodes
                for address in node.wait_for_address(time.monotonic() + START_SECONDS)
            ]
            for liar in self.liars:
                liar.start(everywhere)
        console.print(
            f"{len(self.nodes)} nodes on this machine; status page of the first:"
            f" {self.nodes[0].url}/",
            soft_wrap=True,
        )

    def watch(self, console: Console, stop: threading.Event) -> None:
        """Show the nodes until the time is over, somebody ends, or `stop` is set; kill and bring
        back on the way."""
        whole = self._options.minutes * 60
        learning_since = None
        printed = 0.0
        live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
        with live or nullcontext():
            while not stop.wait(ASK_EVERY_SECONDS):
                for node in self.everybody:
                    node.ask()
                self._note_returns()
                now = time.monotonic()
                if live is not None:
                    live.update(table(self.everybody, now - self._started, console.width))
                elif now - printed >= LINE_EVERY_SECONDS:
                    printed = now
                    console.print(line(self.everybody, now - self._started), soft_wrap=True)
                if not all(node.alive() for node in self.everybody):
                    return
                if learning_since is None and (
                    all(node.view.step for node in self.nodes)
                    or now - self._started > START_SECONDS
                ):
                    learning_since = now
                if learning_since is None or self._options.keep_running:
                    continue
                if self._options.kill and not self._kills and now - learning_since >= whole / 3:
                    self._kill()
                waiting = any(kill.step_after is None for kill in self._kills.values())
                if now - learning_since >= whole + (RETURN_SECONDS if waiting else 0.0):
                    return

    def end(self) -> None:
        """Ask every node once more, then end them all."""
        for node in self.everybody:
            if node.alive():
                node.ask()
            elif node.started:
                self._crashed.append(
                    f"{node.name} ended with exit code {node.exit_code()}: {node.last_words()}"
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
        """kill -9 the last nodes, all their processes, and start them again from what is on
        disk."""
        for node in self.nodes[-min(self._options.kill, len(self.nodes) - 1) :]:
            self._kills[node.name] = Kill(
                node.name, node.view.peer, node.view.step, node.view.saved_step
            )
            node.kill()
            node.start(self._first)

    def _note_returns(self) -> None:
        for node in self.nodes:
            kill = self._kills.get(node.name)
            if (
                kill is not None
                and kill.step_after is None
                and node.answered
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
