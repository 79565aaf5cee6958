"""A small learner in place of the trainer: a bandit over difficulties that sends the trainer's
messages to the network process.

The learner answers a question of some difficulty correctly with a probability equal to its skill
there. Training on an honest group raises the skill; training on a made-up group lowers it. Like the
trainer, the learner checks drawn groups first: token ids that do not match the text are always
found, made-up text with probability FOUND.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import trio

from swarmnode.daemon.trainer_port import TrainerPort
from swarmnode.demo.liar.author import MODEL, TOKENIZER, answer, completion
from swarmnode.link.messages import Hello, Report
from swarmnode.rollouts.groups import Draw, ExternalGroup, Judged, Outcome, OwnGroup, is_useful
from swarmnode.rollouts.sampling import most_per_peer
from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import task_seed
from swarmnode.wire import tensors
from swarmnode.wire.messages import SamplingParams, TaskRef
from tests.support.sim.averaging import Averaging

DIFFICULTIES = 8
GAIN, HARM = 0.02, 0.1
"""Change of the skill at a difficulty by one group."""
FOUND = 0.9
"""Probability that made-up text is detected."""
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=64)
TASKS = ("builtin/copy", "builtin/sum")
MADE_UP = "~"
"""A character that no honest learner samples."""


@dataclass(frozen=True)
class Pace:
    """Speed and group sizes of a node."""

    step_seconds: float
    own_groups: int
    external_groups: int
    completions: int = 4
    long: float = 0.0
    """Share of its groups that are long."""
    save_seconds: float = 60.0
    sync_every: int = 4
    """Steps between two outer steps."""


@dataclass
class Memory:
    """State that survives the trainer process, as saved last."""

    skill: list[float] = field(default_factory=lambda: [0.1] * DIFFICULTIES)
    sequence: int = 0
    version: int = 0
    outer_step: int = 0

    def copy(self) -> Memory:
        return replace(self, skill=list(self.skill))


@dataclass
class Tally:
    """Groups trained on, over all lives of a node."""

    steps: int = 0
    own: int = 0
    used: Counter[str] = field(default_factory=Counter)
    """External groups by author."""
    drawn: Counter[str] = field(default_factory=Counter)
    made_up: int = 0
    """Made-up groups that were trained on."""
    outcomes: Counter[str] = field(default_factory=Counter)
    averaged: Counter[str] = field(default_factory=Counter)
    """Outer steps by kind, see averaging.py."""


class Learner:
    """One trainer process. note: adds a line to the history."""

    def __init__(
        self,
        peer: str,
        swarm: bytes,
        port: TrainerPort,
        memory: Memory,
        tally: Tally,
        pace: Pace,
        rng: random.Random,
        note: Callable[[str], None],
        averaging: Callable[[Learner], Averaging],
    ) -> None:
        self.memory = memory
        self.averaging = averaging(self)
        self.tally = tally
        self._peer = peer
        self._swarm = swarm
        self._port = port
        self._pace = pace
        self._rng = rng
        self._note = note
        self._requests = 0

    async def run(self, save: Callable[[Memory], None]) -> None:
        """Take steps until cancelled. save: called with the state that survives."""
        fresh = self.memory.version == 0 and self.averaging.outer_step == 0
        self._port.hello(
            Hello(MODEL, TOKENIZER, self.memory.version, pid=1, replica=self.averaging.facts(fresh))
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.averaging.run)
            await self._train(save)

    async def _train(self, save: Callable[[Memory], None]) -> None:
        saved = trio.current_time()
        await trio.sleep(self._rng.uniform(0, self._pace.step_seconds))
        while True:
            await self.step()
            self.memory.outer_step = self.averaging.outer_step
            if self.memory.version % self._pace.sync_every == 0:
                self.averaging.due(self.memory.version, self._pace.step_seconds)
            if trio.current_time() - saved >= self._pace.save_seconds:
                save(self.memory.copy())
                saved = trio.current_time()

    async def step(self) -> None:
        memory, pace = self.memory, self._pace
        learnt = []
        for _ in range(pace.own_groups):
            await trio.sleep(pace.step_seconds / pace.own_groups * self._rng.uniform(0.8, 1.2))
            group = self._sample()
            if is_useful(group.rewards):
                learnt.append((_difficulty(group.task), GAIN))
                self.tally.own += 1
            await self._port.own_group(group)
        self._requests += 1
        most = most_per_peer(pace.external_groups)
        drawn = self._port.draw(Draw(self._requests, pace.external_groups, memory.version, most))
        for external in drawn.groups:
            outcome = self._judge(external)
            self._port.judged(Judged(external.peer, outcome))
            self.tally.drawn[external.peer] += 1
            self.tally.outcomes[outcome] += 1
            if outcome == "used":
                self.tally.used[external.peer] += 1
                self.tally.made_up += _made_up(external)
                learnt.append(
                    (_difficulty(external.group.task), -HARM if _made_up(external) else GAIN)
                )
        for difficulty, change in learnt:
            memory.skill[difficulty] = min(0.95, max(0.05, memory.skill[difficulty] + change))
        memory.version += 1
        self.tally.steps += 1
        self._port.report(
            Report(
                "training",
                step=memory.version,
                policy_version=memory.version,
                step_seconds=pace.step_seconds,
            )
        )
        used = sum(1 for change in learnt if change)
        self._note(
            f"step {memory.version} of {self._peer[-6:]}: {used} groups, skill"
            f" {sum(memory.skill):.4f}"
        )

    def _sample(self) -> OwnGroup:
        memory = self.memory
        task = question(self._swarm, self._peer, memory.sequence)
        right, skill = answer(task), memory.skill[_difficulty(task)]
        texts = [
            right if self._rng.random() < skill else wrong(right, self._rng)
            for _ in range(self._pace.completions)
        ]
        if self._rng.random() < self._pace.long:
            texts[1:] = [
                "".join(self._rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=16_000))
                for _ in texts[1:]
            ]
        rewards = [
            float(text == right) if task.id == "builtin/sum" else _in_place(text, right)
            for text in texts
        ]
        group = OwnGroup(
            task,
            memory.version,
            memory.sequence,
            SAMPLING,
            [completion(text) for text in texts],
            rewards,
        )
        memory.sequence += 1
        return group

    def _judge(self, external: ExternalGroup) -> Outcome:
        for each in external.group.completions:
            if tensors.unpack_ids(each.token_ids).tolist() != [
                ord(character) for character in each.text
            ]:
                return "forged_ids"
        return "surprise" if _made_up(external) and self._rng.random() < FOUND else "used"


def question(swarm: bytes, peer: str, sequence: int) -> TaskRef:
    """Return the question that `peer` must ask at `sequence`."""
    name = TASKS[sequence % len(TASKS)]
    seed, index = task_seed(swarm, peer, sequence, name)
    return TaskRef(id=name, version=task_version(name), seed=seed, index=index)


def _difficulty(task: TaskRef) -> int:
    return (
        hashlib.blake2b(f"{task.seed} {task.index}".encode(), digest_size=1).digest()[0]
        % DIFFICULTIES
    )


def _made_up(external: ExternalGroup) -> bool:
    return any(MADE_UP in each.text for each in external.group.completions)


def wrong(right: str, rng: random.Random) -> str:
    """Return a wrong answer of the same length."""
    at = rng.randrange(len(right))
    return right[:at] + str((int(right[at]) + rng.randrange(1, 10)) % 10) + right[at + 1 :]


def _in_place(text: str, right: str) -> float:
    return sum(a == b for a, b in zip(text, right, strict=False)) / max(len(text), len(right))
