"""The series of a node's questions: number, task, difficulty and seed of each."""

from __future__ import annotations

import random
from collections.abc import Sequence

from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import choose_task, task_seed
from swarmnode.trainer.state import Counters
from swarmnode.wire.messages import TaskRef


class Questions:
    """The series of this node's questions. If the swarm lets its members choose, task and
    difficulty are drawn uniformly from all of them. Otherwise all questions have difficulty 0."""

    def __init__(
        self, tasks: Sequence[str], counters: Counters, members_choose_difficulty: bool = False
    ) -> None:
        self.tasks = tasks
        self._counters = counters
        self._choices = [
            (task, difficulty)
            for task in sorted(set(tasks))
            for difficulty in range(TASKS[task].levels if members_choose_difficulty else 1)
        ]
        self._chooses = members_choose_difficulty

    def next(self) -> tuple[int, TaskRef]:
        """Return the next number and the question that has it."""
        c = self._counters
        sequence = c.sequence
        c.sequence += 1
        swarm = bytes.fromhex(c.swarm)
        if self._chooses:
            name, difficulty = random.Random(f"{c.swarm}/{c.peer}/{sequence}").choice(self._choices)
        else:
            name, difficulty = choose_task(self.tasks, swarm, c.peer, sequence), 0
        seed, index = task_seed(swarm, c.peer, sequence, name, difficulty)
        return sequence, TaskRef(name, task_version(name), seed, index, difficulty)
