"""Crews of whole nodes on this machine. Each runs `swarmnode run` with supervisor, network process
and trainer."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from swarmnode.demo.nodes import DemoNode
from swarmnode.stages.trainer.stage_checkpoints import CHECKPOINTS, find_checkpoints
from tests.support.forked_node import runs
from tests.support.waiting import snapshot, wait_for

PATIENCE = 120.0
"""Timeout in seconds on a busy machine."""
STAGES = 4

Seen = dict[int, tuple[DemoNode, dict[str, Any]]]
"""Stage → its holder, and the crew section of that node's status page."""


def whole_settings(
    model: Path, number: int, members: int = STAGES, **sections: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the configuration of node `number`. The settings in `sections` take precedence."""
    settings: dict[str, dict[str, Any]] = {
        "swarm": {"name": "crew"},
        "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
        "policy": {"model": str(model), "threads": 1, "devices": "cpu"},
        "training": {"eval_every": 10_000, "seed": number, "step_interval": 0.2},
        "task": {"held_out_per_task": 1},
        "stages": {"mode": "always", "stages": members, "checkpoint_every": 5, "trust": ["anyone"]},
        "http": {"port": 0},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    return settings


def stage_view(node_snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node's view of its crew and of its own stage from a snapshot."""
    stages = node_snapshot["stages"]
    own = stages["own"] or {"phase": "", "step": 0, "source": ""}
    return {
        **own,
        **stages["crew"],
        "reason": stages["last_reason"],
        "sources": stages["sources"],
        "streams": stages["streams"]["open"],
    }


def child_of(node: DemoNode, module: str) -> psutil.Process | None:
    """Return the node's child process that runs `module`."""
    assert node.pid is not None
    return next((p for p in psutil.Process(node.pid).children() if runs(p, module)), None)


def trainer_of(node: DemoNode) -> psutil.Process | None:
    return child_of(node, "swarmnode.trainer")


def kill_trainers(nodes: Sequence[DemoNode]) -> None:
    """Kill all running trainers with SIGKILL at once."""
    found = [trainer_of(node) for node in nodes]
    for process in found:
        if process is not None:
            process.send_signal(signal.SIGKILL)


def start(nodes: Sequence[DemoNode], seconds: float = PATIENCE) -> list[str]:
    """Start the first node and then the others, which join through it. Return the addresses of the
    first."""
    nodes[0].start([])
    first = nodes[0].wait_for_address(time.monotonic() + seconds)
    for node in nodes[1:]:
        node.start(first)
    for node in nodes[1:]:
        node.wait_for_address(time.monotonic() + seconds)
    return first


def checkpoint_steps(nodes: Sequence[DemoNode]) -> list[int]:
    """Return the committed steps of the nodes' own checkpoints on their disks."""
    found = [find_checkpoints(node.directory / "trainer" / CHECKPOINTS) for node in nodes]
    return [about.step for abouts in found for about in abouts if about.own]


def stop(nodes: Sequence[DemoNode], seconds: float = 30.0) -> None:
    for node in nodes:
        node.stop()
    for node in nodes:
        node.wait(seconds)


class WholeCrew:
    """The started nodes of one crew. address: of one node, for nodes started later."""

    def __init__(self, nodes: list[DemoNode], address: list[str], stages: int = STAGES) -> None:
        self.nodes = nodes
        self.address = address
        self.stages = stages

    def seen(self) -> Seen:
        """Return the nodes that answer and hold a stage."""
        views = [(node, stage_view(s)) for node in self.nodes if (s := snapshot(node))]
        return {view["stage"]: (node, view) for node, view in views if view["stage"] is not None}

    def at(self, step: int, after: str = "") -> Seen | None:
        """Return all stages once a crew other than `after` runs with at least `step` steps;
        otherwise None."""
        seen = self.seen()
        running = len(seen) == self.stages and all(
            v["state"] == "running" and v["step"] >= step and v["id"] != after
            for _, v in seen.values()
        )
        return seen if running else None

    def story(self) -> list[tuple[Any, ...]]:
        return [
            (stage, v["state"], v["phase"], v["step"], v["source"], v["reason"])
            for stage, (_, v) in sorted(self.seen().items())
        ]

    def lose(self, kill: Callable[[dict[int, DemoNode]], None]) -> tuple[Seen, Seen]:
        """Call `kill` with the holders of a running crew. Return the crew before, and the crew one
        step later."""
        before = wait_for(lambda: self.at(0), self.story, PATIENCE)
        step, crew = max(v["step"] for _, v in before.values()), before[0][1]["id"]
        kill({stage: node for stage, (node, _) in before.items()})
        return before, wait_for(lambda: self.at(step + 1, crew), self.story, PATIENCE)
