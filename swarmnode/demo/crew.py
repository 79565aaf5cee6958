"""`swarmnode demo --crew`: one policy in stages on several nodes. Every 20 seconds the demo kills
the trainer of the next stage with SIGKILL."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from rich.table import Table

from swarmnode.demo.nodes import DemoNode, Rise
from swarmnode.demo.swarm import RETURN_SECONDS, START_SECONDS, DemoOptions, DemoSwarm, make_keys
from swarmnode.demo.table import node_and_peer, short, slim_table
from swarmnode.demo.verdict import Finding
from swarmnode.errors import Unavailable
from swarmnode.observe.snapshot import NodeSnapshot

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
    options: DemoOptions, number: int, model: Path, known: list[str]
) -> dict[str, dict[str, object]]:
    """Return the configuration of node `number`. known: peer ids of all nodes."""
    return {
        "swarm": {"name": "demo"},
        "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
        "policy": {"model": str(model), "threads": 1},
        "training": {"eval_every": 10, "save_every": 1.0, "seed": number},
        "stages": {
            "mode": "always",
            "stages": options.nodes,
            "checkpoint_every": 5,
            "trust": known,
        },
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
        places = [directory / f"node{i}" for i in range(options.nodes)]
        known = make_keys(places)
        super().__init__(
            options,
            [
                DemoNode(place.name, place, crew_settings(options, i, model, known))
                for i, place in enumerate(places)
            ],
        )
        self.kills: list[StageKill] = []
        self._formed_at: float | None = None
        self._killed_pid: int | None = None
        self._step_seen = 0
        self._rise = Rise()

    def findings(self) -> list[Finding]:
        return judge_crew(
            [node.status for node in self.nodes],
            self._formed_at,
            self.kills,
            self._rise,
            self._crashed,
        )

    # ---- progress and kills ----------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps of the crew: the largest that a node reports."""
        return max(steps_of(node.status) for node in self.nodes)

    def update(self, now: float) -> None:
        stages = {stage_of(node) for node in self.nodes if is_active(node)}
        whole = stages == set(range(len(self.nodes)))
        if self._formed_at is None and whole and self.step:
            self._formed_at = now
        for rise in (node.rise for node in self.nodes if stage_of(node) == 0):
            if rise.after is not None:  # the head may have moved to another node
                self._rise = replace(rise, before=self._rise.before or rise.before)
        if self.kills and self.kills[-1].step_after is None:
            kill = self.kills[-1]
            node = next((node for node in self.nodes if stage_of(node) == kill.stage), None)
            back = (
                node is not None
                and is_active(node)
                and node.status.trainer.pid not in (None, self._killed_pid)
            )
            own = node.status.stages.own if node is not None else None
            if back and own is not None and self.step > max(kill.step_before, self._step_seen):
                self.kills[-1] = replace(
                    kill, step_after=self.step, seconds=now - kill.at, source=own.source
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
        node = next(node for node in self.nodes if stage_of(node) == stage)
        pid = node.status.trainer.pid
        if pid is None:
            return
        self._killed_pid, self._step_seen = pid, self.step
        self.kills.append(StageKill(stage, node.name, self.step, now))
        psutil.Process(pid).kill()

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
        state, rise = head_of(self.nodes)
        shown = lambda node, own: f"{own.phase} {own.source}".rstrip() if own else node.phase
        stages = " | ".join(
            f"stage {stage_of(node)}: {shown(node, node.status.stages.own)}" for node in self.nodes
        )
        return (
            f"{now:4.0f} s  crew {state} step {self.step} held-out"
            f" {short(rise.after)} | {stages}  {self._kill_text()}"
        )

    def _kill_text(self) -> str:
        return "; ".join(format_kill(kill) for kill in self.kills[-4:])


def stage_of(node: DemoNode) -> int | None:
    """Return the stage that a node holds, or None."""
    return node.status.stages.crew.stage


def is_active(node: DemoNode) -> bool:
    own = node.status.stages.own
    return own is not None and own.phase == "active"


def steps_of(status: NodeSnapshot) -> int:
    """Return the number of steps of a node's stage."""
    return status.stages.own.step if status.stages.own else 0


def head_of(nodes: Sequence[DemoNode]) -> tuple[str, Rise]:
    """Return the state of the crew and the held-out reward, which its head reports."""
    head = next((node for node in nodes if stage_of(node) == 0), None)
    return ("none", Rise()) if head is None else (head.status.stages.crew.state, head.rise)


def crew_table(nodes: Sequence[DemoNode], seconds: float, caption: str) -> Table:
    """Return a table with one row per node, sorted by stage. It fits into 80 columns."""
    state, rise = head_of(nodes)
    out = slim_table(
        f"one policy on {len(nodes)} nodes, {seconds:.0f} s: crew {state}, held-out"
        f" {short(rise.before)} → {short(rise.after)}",
        caption,
    )
    for heading in ("stage", "node", "phase"):
        out.add_column(heading)
    for heading in ("step", "source", "in s", "age", "tok/s", "restarts"):
        out.add_column(heading, justify="right")
    last = len(nodes)
    for node in sorted(nodes, key=lambda n: last if (at := stage_of(n)) is None else at):
        own = node.status.stages.own
        out.add_row(
            _format_optional(stage_of(node), "d"),
            node_and_peer(node),
            own.phase if own else node.phase,
            str(steps_of(node.status)),
            own.source if own and own.source else "–",
            _format_optional(own.source_seconds if own else None, ".1f"),
            _format_optional(own.checkpoint_age_steps if own else None, "d"),
            _format_optional(own.tokens_per_second if own else None, ".0f"),
            str(sum(node.status.supervisor.restarts.values())),
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
    nodes: Sequence[NodeSnapshot],
    formed_at: float | None,
    kills: list[StageKill],
    rise: Rise,
    crashed: list[str],
) -> list[Finding]:
    """Judge a demo of a crew.

    Args:
        nodes: Last status of each node.
        formed_at: Seconds until the crew was complete; None if it never was.
        crashed: One line for each node that ended before the demo.
    """
    step = max(map(steps_of, nodes), default=0)
    findings = [
        Finding(
            f"the crew formed after {_format_optional(formed_at, '.0f')} s and took {step} steps",
            formed_at is not None and step > 0,
        ),
        Finding(f"held-out reward {rise}", rise.is_significant),
        Finding(f"killed {len(kills)} stages with SIGKILL", bool(kills)),
    ]
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
