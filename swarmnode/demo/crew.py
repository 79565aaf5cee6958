"""`swarmnode demo --crew`: one policy in stages on several nodes. Every 20 seconds the demo kills
the trainer of the next stage with SIGKILL."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from swarmnode.demo.delay import DelayProxy, free_port
from swarmnode.demo.nodes import DemoNode, View
from swarmnode.demo.swarm import RETURN_SECONDS, START_SECONDS, DemoOptions, DemoSwarm
from swarmnode.demo.table import node_and_peer, reward, slim_table
from swarmnode.demo.verdict import RISE, Finding
from swarmnode.errors import Unavailable

LAYERS = 8
"""Layers of the policy. The embedded policy has two; `policy.build_deep` adds identity layers."""
KILL_INTERVAL = 20.0
LOST_STEPS = 1
"""Steps that the crew may lose with a stage."""


@dataclass(frozen=True)
class StageKill:
    """One stage whose trainer was killed."""

    stage: int
    name: str
    step_before: int
    """Steps of the crew before the kill."""
    at: float
    """Time of the kill, in seconds since the start of the demo."""
    step_after: int | None = None
    """First step of the crew after the stage returned; None if it has not returned."""
    seconds: float | None = None
    """Seconds from the kill to that step, with an error of half a second."""
    source: str = ""


def crew_settings(
    options: DemoOptions, number: int, model: Path, proxy: DelayProxy | None = None
) -> dict[str, dict[str, object]]:
    """Return the configuration of node `number`. With a proxy, peers reach the node through it."""
    port = free_port() if proxy is not None else 0
    announced = [f"/ip4/127.0.0.1/tcp/{proxy.add_proxy(port)}"] if proxy is not None else []
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
    """Write the policy of the demo's crew to a directory, in a child process that loads torch.

    Raises:
        Unavailable: The child failed.
    """
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
            f"cannot create the demo's policy: {done.stderr.strip().splitlines()[-1:]}"
        )
    return directory


class CrewSwarm(DemoSwarm):
    """The nodes of a demo, each with one stage of the policy."""

    poll_interval = 0.5

    def __init__(self, options: DemoOptions, directory: Path) -> None:
        model = write_model(directory / "model")
        self._proxy = DelayProxy(options.delay / 1000) if options.delay else None
        super().__init__(
            options,
            [
                DemoNode(
                    f"node{i}",
                    directory / f"node{i}",
                    crew_settings(options, i, model, self._proxy),
                )
                for i in range(options.nodes)
            ],
        )
        self.kills: list[StageKill] = []
        self._formed_at: float | None = None
        self._killed_pid: int | None = None
        self._step_seen = 0
        self._held_out: tuple[float | None, float | None] = (None, None)

    def start(self, console: Console) -> None:
        if self._proxy is not None:
            self._proxy.open()
        super().start(console)

    def end(self) -> None:
        super().end()
        if self._proxy is not None:
            self._proxy.close()

    def findings(self) -> list[Finding]:
        held_out = self._held_out if self._proxy is None else None
        return judge_crew(
            [(node.name, node.view) for node in self.nodes],
            self._formed_at,
            self.kills,
            held_out,
            self._crashed,
        )

    # ---- progress and kills ----------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps of the crew: the largest that a node reports."""
        return max(node.view.stage_step for node in self.nodes)

    def update(self, now: float) -> None:
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
        """Return True if a kill is due, and the demo lasts long enough to see the stage return."""
        if self._formed_at is None or (
            not self._options.keep_running and now > self._end() - KILL_INTERVAL / 2
        ):
            return False
        return now - max([self._formed_at, *(kill.at for kill in self.kills)]) >= KILL_INTERVAL

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

    def is_over(self, now: float) -> bool:
        if self._formed_at is None:
            return now > START_SECONDS
        if self._options.keep_running:
            return False
        waiting = bool(self.kills) and self.kills[-1].step_after is None
        return now >= self._end() + (RETURN_SECONDS if waiting else 0.0)

    # ---- output ----------------------------------------------------------------------------------

    def table(self, now: float, width: int) -> Table:
        return crew_table(self.nodes, now, self._kill_text())

    def line(self, now: float) -> str:
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
        return "; ".join(format_kill(kill) for kill in self.kills[-4:])


def crew_table(nodes: Sequence[DemoNode], seconds: float, caption: str) -> Table:
    """Return a table with one row per node, sorted by stage. It fits into 80 columns."""
    head = next((node.view for node in nodes if node.view.stage == 0), View())
    rise = f"{reward(head.held_out_start)} → {reward(head.held_out)}"
    out = slim_table(
        f"one policy on {len(nodes)} nodes, {seconds:.0f} s: crew {head.crew_state}, held-out"
        f" {rise}",
        caption,
    )
    for heading in ("stage", "node", "phase"):
        out.add_column(heading)
    for heading in ("step", "source", "in s", "age", "tok/s", "restarts"):
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
            _format_optional(v.source_seconds, ".1f"),
            _format_optional(v.checkpoint_age, "d"),
            _format_optional(v.tokens_per_second, ".0f"),
            str(v.restarts),
        )
    return out


def format_kill(kill: StageKill) -> str:
    """Return a line about a kill and the return of the stage."""
    result = (
        f"restored from {kill.source or '?'}, next step after {kill.seconds:.1f} s"
        if kill.seconds is not None
        else "not restored"
    )
    return f"stage {kill.stage} killed at step {kill.step_before}: {result}"


def judge_crew(
    views: list[tuple[str, View]],
    formed_at: float | None,
    kills: list[StageKill],
    held_out: tuple[float | None, float | None] | None,
    crashed: list[str],
) -> list[Finding]:
    """Judge a demo of a crew.

    Args:
        views: (name, view) of each node.
        formed_at: Seconds until the crew was complete; None if it never was.
        held_out: First and last held-out reward; None to skip this finding, because latency leaves
            time for only a few steps.
        crashed: One line for each node that ended before the demo.
    """
    step = max((view.stage_step for _, view in views), default=0)
    findings = [
        Finding(
            f"the crew formed after {_format_optional(formed_at, '.0f')} s and took {step} steps",
            formed_at is not None and step > 0,
        )
    ]
    if held_out is not None:
        start, end = held_out
        rose = start is not None and end is not None and end - start >= RISE
        findings.append(Finding(f"held-out reward {reward(start)} → {reward(end)}", rose))
    findings.append(Finding(f"killed {len(kills)} stages with SIGKILL", bool(kills)))
    for kill in kills:
        # The crew continues with the step in progress. Completed steps must not be lost.
        back = (
            kill.step_after is not None
            and kill.step_after >= kill.step_before + 1 - LOST_STEPS
            and bool(kill.source)
        )
        findings.append(Finding(format_kill(kill), back))
    return [*findings, *(Finding(text, False) for text in crashed)]


def _format_optional(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
