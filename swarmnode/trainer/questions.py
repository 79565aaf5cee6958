"""A node's next question: number, task, difficulty, address."""

from __future__ import annotations

import random
from collections.abc import Sequence

from swarmnode.rl.curricula import Bucket, Curriculum
from swarmnode.rollouts.groups import is_useful
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import choose_task, task_seed
from swarmnode.trainer.state import Counters
from swarmnode.wire.messages import TaskRef


class Questions:
    """The series of them. Where the swarm lets its members choose, all buckets alike or by the
    curriculum.

    In a swarm that does not, a curriculum chooses among the tasks, at the difficulty 0. What it
    knows is not saved: a few steps teach it.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        counters: Counters,
        members_choose_difficulty: bool = False,
        curriculum: bool = False,
    ) -> None:
        self.tasks = tasks
        self._alike = not curriculum
        self._counters = counters
        buckets = [
            Bucket(task, difficulty)
            for task in tasks
            for difficulty in range(TASKS[task].levels if members_choose_difficulty else 1)
        ]
        self._curriculum = (
            Curriculum(buckets)
            if curriculum
            else Curriculum(buckets, explore=1.0)
            if members_choose_difficulty
            else None
        )

    def next(self) -> tuple[int, TaskRef]:
        """Return the next number and the question that has it."""
        c = self._counters
        sequence = c.sequence
        c.sequence += 1
        swarm = bytes.fromhex(c.swarm)
        if self._curriculum is None:
            name, difficulty = choose_task(self.tasks, swarm, c.peer, sequence), 0
        else:
            rng = random.Random(f"{c.swarm}/{c.peer}/{sequence}")
            name, difficulty = self._curriculum.choose(rng)
        seed, index = task_seed(swarm, c.peer, sequence, name, difficulty)
        return sequence, TaskRef(name, task_version(name), seed, index, difficulty)

    def signals(self) -> dict[str, float]:
        """The share of groups with a signal that is expected of each task at each difficulty; empty
        without a curriculum."""
        if self._curriculum is None:
            return {}
        return {
            f"{task} {difficulty}": share
            for (task, difficulty), share in self._curriculum.expected().items()
        }

    def evidence(self) -> dict[str, float]:
        """Return how many own groups that rests on, by the same names. Empty where nothing is
        chosen by it."""
        if self._curriculum is None or self._alike:
            return {}
        return {
            f"{task} {difficulty}": known
            for (task, difficulty), known in self._curriculum.evidence().items()
        }

    def answered(self, ref: TaskRef, rewards: list[float]) -> None:
        """What an own group earned. rewards: (G,)."""
        if self._curriculum is not None:
            self._curriculum.own(Bucket(ref.id, ref.difficulty), is_useful(rewards))
