"""The series of a node's questions: number, task and seed of each."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import choose_task, task_seed
from swarmnode.trainer.state import Counters
from swarmnode.wire.messages import TaskRef


class Questions:
    """The series of this node's questions."""

    def __init__(self, tasks: Sequence[str], counters: Counters) -> None:
        self.tasks = tasks
        self._counters = counters

    def next(self) -> tuple[int, TaskRef]:
        """Return the next number and the question that has it."""
        c = self._counters
        sequence = c.sequence
        c.sequence += 1
        swarm = bytes.fromhex(c.swarm)
        name = choose_task(self.tasks, swarm, c.peer, sequence)
        seed, index = task_seed(swarm, c.peer, sequence, name)
        return sequence, TaskRef(name, task_version(name), seed, index)
