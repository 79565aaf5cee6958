"""The nodes of a demo: their settings, and how they are started, shown and stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.config import TaskConfig
from swarmnode.demo.nodes import DemoNode, Liar
from swarmnode.demo.output import answers, status_line
from swarmnode.demo.verdict import Finding, Kill, judge

REAL_STEPS = 14
"""Steps of each node with the real model."""
REAL_RATE = 5e-4
"""Learning rate with the real model: high, so that a few steps suffice."""
QUESTIONS = 128
"""Held-out questions with the real model, for a standard error of at most 0.045."""
REAL_TASK = "chat/json_fields"
STEP_SECONDS = 0.6
"""Least duration of a step. The embedded policy needs 30 ms; the pause lets three trainers share
two cores, and the user see the progress."""
SYNC_EVERY = 10
"""Inner steps per outer step. With the default of 50, a demo of 100 steps would have only two outer
steps."""
START_SECONDS = 120.0
RETURN_SECONDS = 60.0
"""Longest extension of a demo to see a killed node return."""
POLL_SECONDS = 1.0
LINE_INTERVAL = 10.0
"""Seconds between lines."""


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


def make_keys(directories: Sequence[Path]) -> list[str]:
    """Create the keys of the nodes in these data directories, so that the nodes know each other
    from the start. Return their peer ids."""
    from swarmnode.p2p.identity import load_or_create  # imports libp2p

    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return [load_or_create(directory / "identity.key").peer_id for directory in directories]


def node_settings(options: DemoOptions, number: int) -> dict[str, dict[str, object]]:
    """Return the configuration of node `number`: one thread, on loopback. The embedded policy is
    trained as a whole in paced steps, the real model with an adapter on one task."""
    rule = "off" if options.solo else "noloco"
    settings: dict[str, dict[str, object]] = {
        "swarm": {"name": "demo"},
        "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
        "sharing": {"enabled": not options.solo},
        "http": {"port": options.http_port + number if options.http_port else 0},
    }
    if not options.model:
        return settings | {
            "policy": {"threads": 1},
            "training": {
                "step_interval": STEP_SECONDS,
                "eval_every": 10,
                "save_every": 1.0,
                "seed": number,
            },
            # With a liar, the gate is shown: nodes average with strangers, too.
            "weights": {
                "rule": rule,
                "sync_every": SYNC_EVERY,
                "partners": "anyone" if options.byzantine else "known",
            },
        }
    return settings | {
        "policy": {
            "model": options.model,
            "threads": 1,
            "lora.r": 16,
            "lora.lora_alpha": 32,
        },
        "task": {"names": [REAL_TASK], "held_out_per_task": QUESTIONS},
        "training": {
            "groups_per_step": 4,
            "learning_rate": REAL_RATE,
            "max_completion_length": 40,
            "eval_every": REAL_STEPS,
            "seed": number,
        },
        # The adapter is small enough to be averaged as a whole.
        "weights": {"rule": rule, "sync_every": 2, "fragments": 1},
    }


class Swarm:
    """The nodes of a demo: honest nodes, then liars."""

    def __init__(self, options: DemoOptions, directory: Path) -> None:
        places = [directory / f"node{i}" for i in range(options.nodes)]
        known: dict[str, dict[str, object]] = {"stages": {"trust": make_keys(places)}}
        self._options = options
        self.nodes = [
            DemoNode(place.name, place, node_settings(options, i) | known)
            for i, place in enumerate(places)
        ]
        self.liars = [
            Liar(f"liar{i}", directory / f"liar{i}", node_settings(options, 100 + i))
            for i in range(options.byzantine)
        ]
        self._all_nodes = [*self.nodes, *self.liars]
        self._first: list[str] = []
        """Multiaddrs of the first node."""
        self._crashed: list[str] = []
        self._started = time.monotonic()
        self._task = TaskConfig.model_validate(node_settings(options, 0).get("task", {}))
        self._kills: dict[str, Kill] = {}
        self._learning_since: float | None = None
        self._steps = REAL_STEPS if options.model and not options.keep_running else None
        self._first_answers_shown = False

    def start(self) -> None:
        """Start the first node, wait until it listens, and start the other nodes, which join
        through it."""
        self.nodes[0].start([])
        self._first = self.nodes[0].wait_for_address(time.monotonic() + START_SECONDS)
        for node in self.nodes[1:]:
            node.start(self._first)
        print(
            f"started {len(self.nodes)} nodes; status page of the first: {self.nodes[0].url}/",
            flush=True,
        )
        if self.liars:
            # Liars dial all nodes, because honest nodes do not report banned peers.
            addresses = [
                address
                for node in self.nodes
                for address in node.wait_for_address(time.monotonic() + START_SECONDS)
            ]
            for liar in self.liars:
                liar.start(addresses)

    def watch(self, stop: threading.Event) -> None:
        """Show the nodes until the demo is over, a node ends, or `stop` is set."""
        printed = 0.0
        while not stop.wait(POLL_SECONDS):
            for node in self._all_nodes:
                node.poll()
            now = time.monotonic() - self._started
            if not all(node.alive() for node in self._all_nodes):
                return
            self._update(now)
            if not self._first_answers_shown and any(node.rise.step >= 0 for node in self.nodes):
                self._first_answers_shown = True
                print(answers(self.nodes), flush=True)
            if now - printed >= LINE_INTERVAL:
                printed = now
                print(f"{now:4.0f} s  {status_line(self._all_nodes, self._steps)}", flush=True)
            if self._is_over(now):
                return

    def end(self) -> None:
        """Poll all nodes once more, record those that have ended, and stop the others."""
        for node in self._all_nodes:
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
        for liar in self.liars:
            liar.kill()

    def findings(self) -> list[Finding]:
        return judge(
            [(node.name, node.status) for node in self.nodes],
            shares=not self._options.solo and len(self.nodes) > 1,
            questions=len(self._task.names) * self._task.held_out_per_task,
            liars=[liar.peer_id() for liar in self.liars],
            kills=list(self._kills.values()),
            crashed=self._crashed,
        )

    def _update(self, now: float) -> None:
        """Update the state `now` seconds after the start, and kill nodes that are due."""
        self._record_returns()
        if self._learning_since is None and (
            all(node.report.step for node in self.nodes) or now > START_SECONDS
        ):
            self._learning_since = now
        if self._options.keep_running or self._kills:
            return
        if self._options.kill and self._share(now) >= 1 / 3:
            self._kill()

    def _is_over(self, now: float) -> bool:
        if self._options.keep_running:
            return False
        if self._steps is not None:
            return all(node.rise.step >= self._steps for node in self.nodes)
        waiting = any(kill.step_after is None for kill in self._kills.values())
        extension = RETURN_SECONDS / (self._options.minutes * 60) if waiting else 0.0
        return self._share(now) >= 1 + extension

    def _share(self, now: float) -> float:
        """Return the share of the training that is done: of the steps, or of the time."""
        if self._learning_since is None:
            return 0.0
        if self._steps is not None:
            return min(node.report.step for node in self.nodes) / self._steps
        return (now - self._learning_since) / (self._options.minutes * 60)

    def _kill(self) -> None:
        """Kill all processes of the last nodes with SIGKILL, and restart the nodes from their saved
        state."""
        for node in self.nodes[-min(self._options.kill, len(self.nodes) - 1) :]:
            self._kills[node.name] = Kill(
                node.name, node.status.node.peer, node.report.step, node.report.state_saved_step
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
                and node.report.step > 0
            ):
                self._kills[node.name] = replace(
                    kill, step_after=node.report.step, peer_after=node.status.node.peer
                )
