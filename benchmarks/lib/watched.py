"""Whole nodes with a large model, watched from outside: phases, steps, restarts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from benchmarks.report import middle
from swarmnode.demo.nodes import DemoNode
from tests.support.chaos.nodes import changed_environment, until
from tests.support.whole_crew import snapshot, start

POLL_SECONDS = 1.0
LOAD_SECONDS = 600.0

ROWS = "".join(f'{{"prompt": "Tell me about the number {i}.", "answer": ""}}\n' for i in range(200))
REWARD = """
def length(prompts, completions, **columns):
    return [min(1.0, len(completion) / 1000) for completion in completions]
"""


class Watched:
    """Records the phases of a node with their seconds, its steps, and the crews it joined."""

    def __init__(self, node: DemoNode) -> None:
        self.node = node
        self.phases: list[tuple[str, float]] = []
        self.step = self.crews = 0
        self.report: dict[str, Any] = {}
        """The trainer's latest report."""
        self._since = time.monotonic()
        self._phase = "starting"

    def look(self) -> None:
        self.node.poll()
        now, phase, status = time.monotonic(), self.node.view.phase, snapshot(self.node)
        self.step = max(self.step, self.node.view.step, self.node.view.stage_step)
        if status is not None:
            self.crews = status["stages"]["events"]["formed"]
            self.report = status["trainer"].get("report") or self.report
        if phase != self._phase:
            self.phases.append((self._phase, now - self._since))
            self._phase, self._since = phase, now

    def rows(self) -> list[list[object]]:
        names = dict.fromkeys(name for name, _ in self.phases if name not in ("starting", "down"))
        took = {
            name: [seconds for phase, seconds in self.phases if phase == name] for name in names
        }
        return [
            [self.node.name, name, len(seconds), middle(seconds, 0)]
            for name, seconds in took.items()
        ]

    def restarts(self) -> dict[str, int]:
        """Return how often the supervisor has restarted each process."""
        counted = self.node.directory / "run" / "supervisor.json"
        return json.loads(counted.read_text())["restarts"] if counted.exists() else {}


W = TypeVar("W", bound=Watched)


def run(
    nodes: Sequence[DemoNode],
    minutes: float,
    watch: Callable[[DemoNode], W],
    patience: float,
) -> list[W]:
    """Run the nodes for `minutes` and stop them. Kill those alive `patience` seconds later."""
    watched = [watch(node) for node in nodes]
    with changed_environment(PYTHONPATH=str(nodes[0].directory.parent)):
        start(nodes)
    try:
        until(
            lambda: all(node.url or not node.alive() for node in nodes), LOAD_SECONDS, POLL_SECONDS
        )
        ends = time.monotonic() + 60 * minutes
        while time.monotonic() < ends and all(node.alive() for node in nodes):
            for each in watched:
                each.look()
            time.sleep(POLL_SECONDS)
        for node in nodes:
            node.stop()
        for node in nodes:
            node.wait(patience)
    finally:
        for node in nodes:
            node.kill()
    return watched
