"""One failure at a time, in an otherwise calm simulated swarm: the `World` of the nemesis in which only what a test does goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swarmnode.crew import events as ev
from tests.support.nemesis import Node, World


class Story(World):
    """`crews` are to come of the nodes; `later`: who comes after how many seconds, and not at once."""

    def __init__(self, stages: int, spares: int = 0, seed: int = 1, *, crews: int = 1, later: Mapping[str, float] = {}) -> None:
        self.sizes, self.crews, self.later = (stages, spares), crews, later
        super().__init__(seed, encode=True)
        self.loss = self.copies = self.failing = 0.0
        self.frames_overtake = self.replicas = False
        self.delay = 0.05

    def draw_sizes(self) -> tuple[int, int]:
        return self.sizes

    def _add(self, name: str, rate: float, when: float) -> None:
        super()._add(name, rate, self.later.get(name, 0.0))

    def until(self, condition: Callable[[], Any], within: float = 60.0) -> float:
        """Let time pass until `condition()`; seconds that it took."""
        began = self.now
        while not condition():
            when, _, function, args = self.next_event()
            self.now = when
            function(*args)
            assert self.now - began < within, [self._describe(node) for node in self.nodes.values()]
        return self.now - began

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        self.at(end, lambda: None)
        self.until(lambda: self.now >= end, seconds + 1)

    def everybody_runs(self) -> bool:
        members = [node.control for node in self.nodes.values() if node.control is not None and node.control.stage is not None]
        return len(members) == self.crews * self.stages and all(control.running for control in members)

    def holders(self) -> dict[str, int]:
        roster = next(n.control.roster for n in self.nodes.values() if n.control is not None and n.control.running)
        return {seat.peer: seat.stage_epoch for seat in roster.seats}

    def head(self) -> Node:
        return next(n for n in self.nodes.values() if n.control is not None and n.control.stage == 0)

    def step(self) -> int:
        trainer = self.head().trainer
        return trainer.participant.step if trainer is not None else 0

    def running(self) -> Story:
        self.until(self.everybody_runs)
        step, head = self.step(), self.head()
        self.until(lambda: self.step() >= step + 2 and head.trainer is not None and not head.trainer.in_step)  # between two steps
        return self


def reset(world: Story, name: str, back: float | None = None, remembers: bool = True) -> None:
    """Kill −9 of a whole node: its connections are reset."""
    node = world.nodes[name]
    node.control = node.trainer = None
    if not remembers:
        node.memory = b""
    for other in world.nodes.values():
        if other.control is not None:
            world.event(other.name, other.life, ev.PeerGone(name))
    world._streams_end(name)
    if back is not None:
        world.after(back, world.boot, name)
