"""A crew of whole nodes that is watched through its status pages and loses stages."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from swarmnode.demo.nodes import DemoNode

STAGES = 4
POLL_SECONDS = 0.1
FORM_SECONDS = 180.0
RETURN_SECONDS = 120.0
STEPS = 10
"""Undisturbed steps that are timed."""

MARKS = {
    "seen": ("restarting", "trainer"),
    "process start": ("started", "trainer"),
    "load": ("trainer connected", ""),
    "crew": ("assigned", ""),
    "restore": ("stage ready", ""),
}
"""Part of a recovery → the log event that ends it, and the process that the event names."""
FIRST_STEP = "first step"


@dataclass(frozen=True)
class Recovery:
    kind: str
    """trainer, disk, neighbours or node."""
    stages: tuple[int, ...]
    seconds: float | None
    """Seconds from the kill to the crew's next step; None if there was none within
    RETURN_SECONDS."""
    lost: int
    """Steps that had been taken before the kill and are gone."""
    sources: tuple[str, ...]
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each of MARKS, in the first killed node."""
    load: float = 0.0
    """Load average of the last minute."""


@dataclass(frozen=True)
class Speed:
    arm: str
    step_seconds: float
    tokens_per_second: float | None


class Crew:
    """The nodes of a crew."""

    def __init__(self, nodes: Sequence[DemoNode]) -> None:
        self.nodes = nodes
        self._known: list[str] = []

    def start(self) -> None:
        """Start the nodes. Each gets the addresses of the nodes before it."""
        for node in self.nodes:
            node.start(self._known)
            self._known = [*self._known, *node.wait_for_address(time.monotonic() + FORM_SECONDS)]

    def holder(self, stage: int) -> DemoNode:
        """Return the node that holds `stage`. Raises LookupError while no node does."""
        return {node.view.stage: node for node in self.nodes}[stage]

    def steps(self) -> list[int]:
        """Return the steps taken, by stage. Raises LookupError while a stage has no holder."""
        return [self.holder(stage).view.stage_step for stage in range(len(self.nodes))]

    def wait(self, true: Callable[[], bool], seconds: float) -> float | None:
        """Return the seconds until `true()`; None after `seconds`."""
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            for node in self.nodes:
                node.poll()
            with contextlib.suppress(LookupError):
                if true():
                    return time.monotonic() - started
            time.sleep(POLL_SECONDS)
        return None

    def running(self) -> bool:
        return (
            all(self.holder(stage).view.stage_phase == "active" for stage in range(len(self.nodes)))
            and min(self.steps()) > 0
        )

    def lose(self, kind: str, stages: Sequence[int]) -> Recovery:
        """Kill the holders of `stages` and wait until the crew continues.

        Raises:
            LookupError: A stage has no holder.
        """
        holders = [self.holder(stage) for stage in stages]
        before, pids = max(self.steps()), [node.view.trainer_pid for node in holders]
        log, killed_at = holders[0].log_file, time.time()
        size = log.stat().st_size
        for node, pid in zip(holders, pids, strict=True):
            if kind == "node":
                node.kill()
                node.start([one for one in self._known if node.view.peer not in one])
            elif pid is not None:
                psutil.Process(pid).kill()
                if kind == "disk":
                    shutil.rmtree(node.directory / "trainer" / "stages", ignore_errors=True)
        least = before

        def continues() -> bool:
            nonlocal least
            back = all(
                node.view.trainer_pid not in (None, pid)
                for node, pid in zip(holders, pids, strict=True)
            )
            steps = self.steps()
            if not back:
                least = max(least, *steps)  # a step under way may still complete
                return False
            return self.running() and min(steps) > least

        seconds = self.wait(continues, RETURN_SECONDS)
        after = max(
            (node.view.stage_step for node in self.nodes if node.view.stage is not None), default=0
        )
        return Recovery(
            kind,
            tuple(stages),
            seconds,
            max(0, before - after),
            tuple(node.view.source for node in holders),
            parts_of(log, size, killed_at, seconds),
            os.getloadavg()[0],
        )

    def speed(self, arm: str) -> Speed:
        """Return the speed over STEPS steps of the node that leads the crew."""
        lead = lambda: self.holder(0) if len(self.nodes) > 1 else self.nodes[0]
        first = lead().view.step
        seconds = self.wait(lambda: lead().view.step >= first + STEPS, RETURN_SECONDS)
        tokens = lead().view.tokens_per_second
        return Speed(arm, seconds / STEPS if seconds is not None else float("nan"), tokens)

    def end(self) -> None:
        for node in self.nodes:
            node.stop()
        for node in self.nodes:
            node.wait(30.0)


def parts_of(log: Path, size: int, killed_at: float, seconds: float | None) -> dict[str, float]:
    """Return the seconds of each part of a recovery, from the lines of `log` after byte `size`."""
    with log.open("rb") as file:
        file.seek(size)
        lines = [json.loads(line) for line in file.read().splitlines() if line.startswith(b"{")]
    parts, before = {}, killed_at
    for name, (event, process) in MARKS.items():
        times = (
            datetime.fromisoformat(line["timestamp"]).timestamp()
            for line in lines
            if line["event"] == event and line.get("process", "") == process
        )
        if (at := next((t for t in times if t >= before), None)) is not None:
            parts[name], before = at - before, at
    if seconds is not None:
        parts[FIRST_STEP] = killed_at + seconds - before
    return parts
