"""The common part of both demos: options, and nodes that are started, shown and stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swarmnode.demo.nodes import DemoNode
from swarmnode.demo.verdict import Finding

START_SECONDS = 120.0
RETURN_SECONDS = 60.0
"""Longest extension of a demo to see a killed node or stage return."""
LINE_INTERVAL = 10.0
"""Seconds between lines, if the output is not a terminal."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of `swarmnode demo`, see `swarmnode.cli.demo`."""

    nodes: int = 2
    model: str = ""
    """The model, or empty for the embedded policy."""
    minutes: float = 1.0
    """Training time of the embedded policy."""
    keep_running: bool = False
    solo: bool = False
    byzantine: int = 0
    kill: int = 0
    data_dir: Path | None = None
    http_port: int = 9464
    crew: bool = False


def make_keys(directories: Sequence[Path]) -> list[str]:
    """Create the keys of the nodes in these data directories, so that the nodes know each other
    from the start. Return their peer ids."""
    from swarmnode.p2p.identity import load_or_create  # imports libp2p

    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return [load_or_create(directory / "identity.key").peer_id for directory in directories]


class DemoSwarm:
    """The nodes of a demo."""

    poll_interval = 1.0
    """Seconds between polls of the nodes."""

    def __init__(self, options: DemoOptions, nodes: Sequence[DemoNode]) -> None:
        self._options = options
        self.nodes = nodes
        self.all_nodes: Sequence[DemoNode] = nodes
        """`nodes`, and those that are only shown."""
        self._first: list[str] = []
        """Multiaddrs of the first node."""
        self._crashed: list[str] = []
        self._started = time.monotonic()

    def start(self, console: Console) -> None:
        """Start the first node, wait until it listens, and start the other nodes, which join
        through it."""
        self.nodes[0].start([])
        self._first = self.nodes[0].wait_for_address(time.monotonic() + START_SECONDS)
        for node in self.nodes[1:]:
            node.start(self._first)
        console.print(
            f"started {len(self.nodes)} nodes; status page of the first: {self.nodes[0].url}/",
            soft_wrap=True,
        )

    def watch(self, console: Console, stop: threading.Event) -> None:
        """Show the nodes until the demo is over, a node ends, or `stop` is set."""
        printed = 0.0
        live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
        with live or nullcontext():
            while not stop.wait(self.poll_interval):
                for node in self.all_nodes:
                    node.poll()
                now = time.monotonic() - self._started
                if not all(node.alive() for node in self.all_nodes):
                    return
                self.update(now)
                for text in self.news():
                    console.print(Text(text), soft_wrap=not console.is_terminal)
                if live is not None:
                    live.update(self.table(now, console.width))
                elif now - printed >= LINE_INTERVAL:
                    printed = now
                    console.print(self.line(now), soft_wrap=True)
                if self.is_over(now):
                    return

    def end(self) -> None:
        """Poll all nodes once more, record those that have ended, and stop the others."""
        for node in self.all_nodes:
            if node.alive():
                node.poll()
            elif node.started:
                self._crashed.append(
                    f"{node.name} ended with exit code {node.exit_code()}: {node.last_log_line()}"
                )
        for node in self.nodes:
            node.stop()
        for node in self.nodes:
            node.wait(30.0)

    def update(self, now: float) -> None:
        """Update the state of the demo after a poll, and kill nodes that are due.

        Args:
            now: Seconds since the start of the demo.
        """
        raise NotImplementedError

    def news(self) -> Sequence[str]:
        """Return texts to print once, above the table."""
        return ()

    def is_over(self, now: float) -> bool:
        raise NotImplementedError

    def table(self, now: float, width: int) -> Table:
        """Return the table for a terminal."""
        raise NotImplementedError

    def line(self, now: float) -> str:
        """Return the same facts as one line."""
        raise NotImplementedError

    def findings(self) -> list[Finding]:
        raise NotImplementedError
