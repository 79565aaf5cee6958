"""The series of a node's questions: number, task, difficulty and seed of each."""

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
    """The series of this node's questions.

    If the swarm lets its members choose, the buckets (task and difficulty) are drawn uniformly or
    by the curriculum. Otherwise a curriculum chooses only among the tasks, at difficulty 0. The
    curriculum's estimates are not saved; a few steps restore them.
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
        """Return the expected share of useful groups by task and difficulty; empty without a
        curriculum."""
        if self._curriculum is None:
            return {}
        return {
            f"{task} {difficulty}": share
            for (task, difficulty), share in self._curriculum.expected().items()
        }

    def evidence(self) -> dict[str, float]:
        """Return the number of own groups behind each value of `signals`; empty if questions are
        not chosen by the curriculum."""
        if self._curriculum is None or self._alike:
            return {}
        return {
            f"{task} {difficulty}": known
            for (task, difficulty), known in self._curriculum.evidence().items()
        }

    def answered(self, ref: TaskRef, rewards: list[float]) -> None:
        """Report the rewards (G,) of an own group."""
        if self._curriculum is not None:
            self._curriculum.own(Bucket(ref.id, ref.difficulty), is_useful(rewards))
