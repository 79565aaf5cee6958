"""`swarmnode demo --crew`: one policy in stages on several nodes. Every twenty seconds the trainer
of a stage is killed -9, in turn."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.live import Live
from rich.table import Table

from swarmnode.demo.distance import Distance, free_port
from swarmnode.demo.nodes import DemoNode, View
from swarmnode.demo.table import node_and_peer, reward, slim_table
from swarmnode.demo.verdict import RISE, Finding
from swarmnode.errors import Unavailable

if TYPE_CHECKING:
    from swarmnode.demo.run import DemoOptions

LAYERS = 8
"""The embedded policy has two; those added begin as nothing (`policy.build_deep`)."""
FORM_SECONDS = 120.0
KILL_EVERY_SECONDS = 20.0
RETURN_SECONDS = 60.0
ASK_EVERY_SECONDS = 0.5
LINE_EVERY_SECONDS = 10.0
LOST_STEPS = 1
"""Steps of work that may be lost with a stage."""


@dataclass(frozen=True)
class StageKill:
    """One stage whose trainer was killed."""

    stage: int
    name: str
    step_before: int
    """Steps of the whole crew."""
    at: float
    """Seconds since the demo began."""
    step_after: int | None = None
    """First step of the crew that was taken after the stage was back; None if it never was."""
    seconds: float | None = None
    """From the kill to that step, seen twice a second."""
    source: str = ""


def crew_settings(
    options: DemoOptions, number: int, model: Path, distance: Distance | None = None
) -> dict[str, dict[str, object]]:
    """Configuration of node `number`. It is reached through a line of `distance`, where there is
    one."""
    port = free_port() if distance is not None else 0
    announced = [f"/ip4/127.0.0.1/tcp/{distance.line_to(port)}"] if distance is not None else []
    return {
        "swarm": {"name": "demo"},
        "network": {
            "listen_addrs": [f"/ip4/127.0.0.1/tcp/{port}"],
            "announce_addrs": announced,
            "mdns": False,
        },
        "policy": {"model": str(model), "threads": 1},
        "training": {"eval_every": 10, "save_every": 1.0, "seed": number},
        "stages": {"mode": "always", "stages": options.nodes, "checkpoint_every": 5},
        "http": {"port": options.http_port + number if options.http_port else 0},
    }


def write_model(directory: Path) -> Path:
    """The policy of the demo's crew, made by a child: no torch here. Raises Unavailable."""
    command = [
        sys.executable,
        "-m",
        "swarmnode.policy.build_deep",
        str(directory),
        "--layers",
        str(LAYERS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(
            f"the demo's policy was not made: {done.stderr.strip().splitlines()[-1:]}"
        )
    return directory


class CrewSwarm:
    """The nodes of one demo, each to hold a stage."""

    def __init__(self, options: DemoOptions, directory: Path) -> None:
        self._options = options
        model = write_model(directory / "model")
        self._distance = Distance(options.delay / 1000) if options.delay else None
        self.nodes = [
            DemoNode(
                f"node{i}", directory / f"node{i}", crew_settings(options, i, model, self._distance)
            )
            for i in range(options.nodes)
        ]
        self.kills: list[StageKill] = []
        self._formed_at: float | None = None
        self._killed_pid: int | None = None
        self._step_seen = 0
        self._crashed: list[str] = []
        self._held_out: tuple[float | None, float | None] = (None, None)
        self._started = time.monotonic()

    def start(self, console: Console) -> None:
        """The first node, and when it listens the others, which join through it."""
        if self._distance is not None:
            self._distance.open()
        self.nodes[0].start([])
        first = self.nodes[0].wait_for_address(time.monotonic() + FORM_SECONDS)
        for node in self.nodes[1:]:
            node.start(first)
        console.print(
            f"{len(self.nodes)} nodes for one policy on this machine; status page of the first:"
            f" {self.nodes[0].url}/",
            soft_wrap=True,
        )

    def watch(self, console: Console, stop: threading.Event) -> None:
        """Show the crew until the time is over, a node ends, or `stop` is set; kill a stage now and
        then."""
        printed = 0.0
        live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
        with live or nullcontext():
            while not stop.wait(ASK_EVERY_SECONDS):
                for node in self.nodes:
                    node.ask()
                now = time.monotonic() - self._started
                self._note(now)
                if live is not None:
                    live.update(self.table(now))
                elif now - printed >= LINE_EVERY_SECONDS:
                    printed = now
                    console.print(self.line(now), soft_wrap=True)
                if not all(node.alive() for node in self.nodes) or self._over(now):
                    return

    def end(self) -> None:
        for node in self.nodes:
            if node.started and not node.alive():
                self._crashed.append(
                    f"{node.name} ended with exit code {node.exit_code()}: {node.last_words()}"
                )
            node.stop()
        for node in self.nodes:
            node.wait(30.0)
        if self._distance is not None:
            self._distance.close()

    def findings(self) -> list[Finding]:
        held_out = self._held_out if self._distance is None else None
        return judge_crew(
            [(node.name, node.view) for node in self.nodes],
            self._formed_at,
            self.kills,
            held_out,
            self._crashed,
        )

    # ---- what happens ----------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps that the crew has taken, as far as anybody says."""
        return max(node.view.stage_step for node in self.nodes)

    def _note(self, now: float) -> None:
        stages = {node.view.stage for node in self.nodes if node.view.stage_phase == "active"}
        whole = stages == set(range(len(self.nodes)))
        if self._formed_at is None and whole and self.step:
            self._formed_at = now
        start, end = self._held_out
        for view in (node.view for node in self.nodes):
            if view.stage == 0 and view.held_out is not None:
                start, end = start if start is not None else view.held_out_start, view.held_out
        self._held_out = (start, end)
        if self.kills and self.kills[-1].step_after is None:
            kill = self.kills[-1]
            node = next((node for node in self.nodes if node.view.stage == kill.stage), None)
            back = (
                node is not None
                and node.view.stage_phase == "active"
                and node.view.trainer_pid not in (None, self._killed_pid)
            )
            if back and node is not None and self.step > max(kill.step_before, self._step_seen):
                self.kills[-1] = replace(
                    kill, step_after=self.step, seconds=now - kill.at, source=node.view.source
                )
            elif not back:
                self._step_seen = self.step
        elif whole and self._kill_is_due(now):
            self._kill(now)

    def _kill_is_due(self, now: float) -> bool:
        """Not so late that its return would not be seen."""
        if self._formed_at is None or (
            not self._options.keep_running and now > self._end() - KILL_EVERY_SECONDS / 2
        ):
            return False
        return now - max([self._formed_at, *(kill.at for kill in self.kills)]) >= KILL_EVERY_SECONDS

    def _kill(self, now: float) -> None:
        stage = len(self.kills) % len(self.nodes)
        node = next(node for node in self.nodes if node.view.stage == stage)
        if node.view.trainer_pid is None:
            return
        self._killed_pid, self._step_seen = node.view.trainer_pid, self.step
        self.kills.append(StageKill(stage, node.name, self.step, now))
        psutil.Process(node.view.trainer_pid).kill()

    def _end(self) -> float:
        return (self._formed_at or 0.0) + self._options.minutes * 60

    def _over(self, now: float) -> bool:
        if self._formed_at is None:
            return now > FORM_SECONDS
        if self._options.keep_running:
            return False
        waiting = bool(self.kills) and self.kills[-1].step_after is None
        return now >= self._end() + (RETURN_SECONDS if waiting else 0.0)

    # ---- what a person sees ----------------------------------------------------------------------

    def table(self, now: float) -> Table:
        """One row per node, by stage; under it what was killed, and how it came back."""
        return crew_table(self.nodes, now, self._kill_text())

    def line(self, now: float) -> str:
        """The same in one line."""
        head = next((node.view for node in self.nodes if node.view.stage == 0), View())
        stages = " | ".join(
            f"stage {n.view.stage}: {n.view.stage_phase or n.view.phase} {n.view.source}".rstrip()
            for n in self.nodes
        )
        return (
            f"{now:4.0f} s  crew {head.crew_state} step {self.step} held-out"
            f" {reward(head.held_out)} | {stages}  {self._kill_text()}"
        )

    def _kill_text(self) -> str:
        return "; ".join(kill_text(kill) for kill in self.kills[-4:])


def crew_table(nodes: Sequence[DemoNode], seconds: float, caption: str) -> Table:
    """One row per node, by stage. It is readable on 80 columns."""
    head = next((node.view for node in nodes if node.view.stage == 0), View())
    rise = f"{reward(head.held_out_start)} → {reward(head.held_out)}"
    out = slim_table(
        f"one policy on {len(nodes)} nodes, {seconds:.0f} s: crew {head.crew_state}, held-out"
        f" {rise}",
        caption,
    )
    for heading in ("stage", "node", "phase"):
        out.add_column(heading)
    for heading in ("step", "source", "in s", "age", "KL", "tok/s", "restarts"):
        out.add_column(heading, justify="right")
    for node in sorted(
        nodes, key=lambda node: node.view.stage if node.view.stage is not None else len(nodes)
    ):
        v = node.view
        out.add_row(
            "–" if v.stage is None else str(v.stage),
            node_and_peer(node),
            v.stage_phase or v.phase,
            str(v.stage_step),
            v.source or "–",
            _some(v.source_seconds, ".1f"),
            _some(v.checkpoint_age, "d"),
            _some(v.gate_kl, ".4f"),
            _some(v.tokens_per_second, ".0f"),
            str(v.restarts),
        )
    return out


def kill_text(kill: StageKill) -> str:
    how = (
        f"by {kill.source or '?'}, next step after {kill.seconds:.1f} s"
        if kill.seconds is not None
        else "not back"
    )
    return f"stage {kill.stage} killed at step {kill.step_before}: {how}"


def judge_crew(
    views: list[tuple[str, View]],
    formed_at: float | None,
    kills: list[StageKill],
    held_out: tuple[float | None, float | None] | None,
    crashed: list[str],
) -> list[Finding]:
    """Everything that has to be true. Pure. `held_out`: None where a few steps are all that there
    is time for."""
    step = max((view.stage_step for _, view in views), default=0)
    findings = [
        Finding(
            f"the crew formed after {_some(formed_at, '.0f')} s and took {step} steps",
            formed_at is not None and step > 0,
        )
    ]
    if held_out is not None:
        start, end = held_out
        rose = start is not None and end is not None and end - start >= RISE
        findings.append(Finding(f"held-out reward {reward(start)} → {reward(end)}", rose))
    findings.append(Finding(f"{len(kills)} stages were killed -9", bool(kills)))
    for kill in kills:
        # The crew goes on with the step that was under way: what it had taken stays taken.
        back = (
            kill.step_after is not None
            and kill.step_after >= kill.step_before + 1 - LOST_STEPS
            and bool(kill.source)
        )
        findings.append(Finding(kill_text(kill), back))
    return [*findings, *(Finding(text, False) for text in crashed)]


def _some(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
