"""`swarmnode demo`: starts the nodes, shows them, stops them, and judges the run."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmnode import environment
from swarmnode.config import TaskConfig
from swarmnode.demo.crew import CrewSwarm
from swarmnode.demo.nodes import DemoNode, Liar
from swarmnode.demo.swarm import RETURN_SECONDS, START_SECONDS, DemoOptions, DemoSwarm, make_keys
from swarmnode.demo.table import answers, print_verdict, status_line, table
from swarmnode.demo.verdict import Finding, Kill, judge
from swarmnode.errors import Unavailable

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
    environment.provide_directories(directory)  # nodes share a converted model
    swarm = (CrewSwarm if options.crew else Swarm)(options, directory)
    with _stop_on_signal() as stop:
        try:
            swarm.start(console)
            swarm.watch(console, stop)
        finally:
            swarm.end()
    findings = swarm.findings()
    ok = all(finding.ok for finding in findings)
    if shown := answers(swarm.nodes):
        console.print(Text(shown), soft_wrap=not console.is_terminal)
    print_verdict(console, findings)
    if ok and options.model:
        for line in chat_commands(swarm.nodes[0].config_file):
            console.print(line, soft_wrap=True, highlight=False)
    if ok and temporary and not options.model:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        console.print(f"logs and state are in {directory}", soft_wrap=True)
    return 0 if ok else 1


def chat_commands(config: Path) -> list[str]:
    """Return the commands that ask a node's policy and its base model, as they were after and
    before training."""
    started = sys.argv[0]
    program = [sys.executable, started] if started.endswith(".py") else [started]
    chat = shlex.join([*program, "chat", "-c", str(config)])
    return [f"talk to the policy:      {chat}", f"and to the base model:   {chat} --before"]


def describe(options: DemoOptions) -> str:
    """Return what the demo does, in one line."""
    who = "1 node" if options.nodes == 1 else f"{options.nodes} nodes"
    if options.model:
        return (
            f"{who} on this machine: SmolLM2-135M-Instruct learns to write the fields of a sentence"
            f" as JSON (LoRA of rank 16, learning rate {REAL_RATE:g}, {REAL_STEPS} steps; about"
            " three minutes)"
        )
    return f"{who} on this machine: a policy of 114,000 parameters learns short answers"


class Swarm(DemoSwarm):
    """The nodes of a demo: honest nodes, then liars."""

    def __init__(self, options: DemoOptions, directory: Path) -> None:
        places = [directory / f"node{i}" for i in range(options.nodes)]
        known: dict[str, dict[str, object]] = {"stages": {"trust": make_keys(places)}}
        super().__init__(
            options,
            [
                DemoNode(place.name, place, node_settings(options, i) | known)
                for i, place in enumerate(places)
            ],
        )
        self.liars = [
            Liar(f"liar{i}", directory / f"liar{i}", node_settings(options, 100 + i))
            for i in range(options.byzantine)
        ]
        self._task = TaskConfig.model_validate(node_settings(options, 0).get("task", {}))
        self.all_nodes = [*self.nodes, *self.liars]
        self._kills: dict[str, Kill] = {}
        self._learning_since: float | None = None
        self._steps = REAL_STEPS if options.model and not options.keep_running else None
        self._first_answers_shown = False

    def start(self, console: Console) -> None:
        super().start(console)
        if self.liars:
            # Liars dial all nodes, because honest nodes do not report banned peers.
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
            all(node.report.step for node in self.nodes) or now > START_SECONDS
        ):
            self._learning_since = now
        if self._options.keep_running or self._kills:
            return
        if self._options.kill and self._share(now) >= 1 / 3:
            self._kill()

    def is_over(self, now: float) -> bool:
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

    def _clock(self, now: float) -> str:
        """Return the time since the start, and the time that is left once it can be estimated."""
        left: list[float | None] = [None]
        if self._steps is not None:
            left = [node.pace.seconds_left(self._steps) for node in self.nodes]
        elif self._learning_since is not None and not self._options.keep_running:
            left = [self._learning_since + self._options.minutes * 60 - now]
        known = [each for each in left if each is not None]
        if len(known) < len(left):
            return f"{now:.0f} s"
        return f"{now:.0f} s, about {max(0.0, *known):.0f} s left"

    def end(self) -> None:
        super().end()
        for liar in self.liars:
            liar.kill()

    def table(self, now: float, width: int) -> Table:
        return table(self.all_nodes, self._clock(now), self._steps, width)

    def line(self, now: float) -> str:
        return status_line(self.all_nodes, self._clock(now), self._steps)

    def news(self) -> Sequence[str]:
        """Return a held-out question with its answer before training, once it is known."""
        if self._first_answers_shown or not any(node.rise.step >= 0 for node in self.nodes):
            return ()
        self._first_answers_shown = True
        return (answers(self.nodes),)

    def findings(self) -> list[Finding]:
        return judge(
            [(node.name, node.status) for node in self.nodes],
            shares=not self._options.solo and len(self.nodes) > 1,
            questions=len(self._task.names) * self._task.held_out_per_task,
            liars=[liar.peer_id() for liar in self.liars],
            kills=list(self._kills.values()),
            crashed=self._crashed,
        )

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
