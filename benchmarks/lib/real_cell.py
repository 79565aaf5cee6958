"""One arm with one seed of an experiment in which nodes train an adapter of a real model, taking
turns in one process (benchmarks/lib/turns.py)."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.lib.capability import weigh_by_capability
from benchmarks.lib.report import commit, machine, note, rounded
from benchmarks.lib.turns import (
    TurnNode,
    TurnSwarm,
    ask,
    checked,
    directory_of,
    on_one_base,
    share_a,
)
from swarmnode.config import Config
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import Policy, load_policy
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import task_version
from swarmnode.trainer.evaluate import MOST_ANSWERS, held_out_refs
from swarmnode.wire.manifest import swarm_id

GOAL = 0.8
"""Held-out reward at which steps, own tokens and CPU seconds are compared."""
AVERAGE_EVERY = 5
"""Steps between two outer steps of all nodes in random pairs."""
TEMPERATURE = 1.0
ADAPTER_RATE_FACTOR = 20
"""Learning rate of an adapter with alpha 32 ÷ that of all weights."""
KIB = 1024
Settings = dict[str, dict[str, Any]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Member:
    """A node of an arm."""

    rank: int = 16
    """Rank of the adapter; 0 trains all weights."""
    system: str = ""
    """System prompt; empty for that of the template."""


@dataclass(frozen=True)
class Arm:
    """An arm. The defaults are the product's."""

    nodes: int = 1
    shares: bool = True
    averages: bool = False
    own_groups: int | None = None
    """Own groups of each step; None is the adaptive split."""
    options: tuple[str, ...] = ()
    """`training.options`."""
    others: tuple[Member, ...] = ()
    """Nodes beside the first one, if they are unlike it."""
    by_capability: bool = False
    """Peers' answers are weighted as HACPO weights them (benchmarks/lib/capability.py)."""

    @property
    def members(self) -> list[Member]:
        return [Member(), *self.others] if self.others else [Member()] * self.nodes


@dataclass(frozen=True)
class Size:
    """Size of the experiment."""

    task: str = "chat/json_fields"
    model: str = "smollm2"
    steps: int = 20
    """Maximum number of steps. A cell ends when it has reached GOAL."""
    groups: int = 4
    """Groups of a step, B."""
    generations: int = 4
    """Completions of a group, G."""
    longest: int = 40
    """Maximum number of tokens of a completion."""
    learning_rate: float = 5e-4
    lora_alpha: int = 32
    eval_every: int = 3
    questions: int = 32
    """Held-out questions of an evaluation on the way."""
    last_questions: int = 32
    """Held-out questions before the first and after the last step."""

    def settings(self, member: Member, arm: Arm, seed: int, directory: Path) -> Settings:
        """Return the configuration of a node."""
        rate = self.learning_rate / (1 if member.rank else ADAPTER_RATE_FACTOR)
        return {
            "node": {"data_dir": str(directory)},
            "policy": {
                "model": self.model,
                "devices": "cpu",
                "threads": 1,
                "lora": {"r": member.rank, "lora_alpha": self.lora_alpha},
                "chat": {"system": member.system} if member.system else {},
            },
            "task": {"names": [self.task], "held_out_per_task": self.questions},
            "training": {
                "groups_per_step": self.groups,
                "num_generations": self.generations,
                "max_completion_length": self.longest,
                "learning_rate": rate,
                "temperature": TEMPERATURE,
                "options": ["lockstep", *arm.options],
                "seed": seed,
                "eval_every": self.steps,
            },
            "sharing": {"enabled": arm.shares},
        }


class Cell:
    """One arm with one seed.

    Args:
        name: Name of the arm.
        bases: Policies by member, loaded once per process. A node copies the trained part.
        starts: First evaluation by seed. All nodes with the same adapter start with one policy.
    """

    stops_at_goal = True

    def __init__(
        self,
        name: str,
        arm: Arm,
        seed: int,
        size: Size,
        scorer: Scorer,
        bases: dict[Member, Policy],
        starts: dict[Any, Any],
        directory: Path,
    ) -> None:
        self.starts = starts
        self.name, self.seed, self.size, self.scorer = name, seed, size, scorer
        self.arm, self.bases, self.directory = arm, bases, directory
        self.swarm = TurnSwarm(
            f"real-{seed}",
            swarm_id(f"real-{seed}", {size.task: task_version(size.task)}),
            scorer,
        )
        self.make_nodes()
        self.counted = list(self.swarm.nodes)
        """Nodes that are measured."""
        self.texts: list[str] = []
        """Answers of the last evaluation."""
        self.steps: list[list[dict[str, float]]] = [[] for _ in self.swarm.nodes]
        self.held_out: list[dict[str, Any]] = []
        self.refs = held_out_refs(size.task, size.last_questions)
        self.prompts = ask(scorer, self.refs)

    def make_nodes(self) -> None:
        """Add the nodes of the arm to the swarm."""
        for index, member in enumerate(self.arm.members):
            self.swarm.add(*self.setup(index, member), self.arm.averages, self.arm.own_groups)
        if self.arm.by_capability:
            for node in self.swarm.nodes:
                weigh_by_capability(node)

    def setup(self, index: int, member: Member) -> tuple[Policy, Config]:
        """Return the untrained policy and the configuration of a node."""
        home = directory_of(self.directory, index)
        seed = node_seed(self.seed, index)
        config = Config.model_validate(self.size.settings(member, self.arm, seed, home))
        if member not in self.bases:
            self.bases[member] = load_policy(config.policy)
            if member.rank:
                share_a(self.bases[member])
        # A full policy is changed by training: the next cell loads it again.
        whole = not member.rank
        return (self.bases.pop(member) if whole else on_one_base(self.bases[member])), config

    def run(self) -> dict[str, Any]:
        """Train, and return the row of this cell."""
        started = time.process_time()
        self.evaluate_start()
        self.train()
        self.evaluate(self.size.last_questions)
        return rounded({**self.row(), "cpu_seconds": round(time.process_time() - started)})

    def train(self) -> None:
        """Take the steps of all nodes."""
        for step in range(1, self.size.steps + 1):
            for node, record in zip(self.swarm.nodes, self.steps, strict=True):
                record.append(node.turn())
            if self.arm.averages and step % AVERAGE_EVERY == 0:
                self.swarm.average(step)
            if self.after_step():
                break

    def after_step(self) -> bool:
        """Evaluate if it is time to. Return True if the goal is reached."""
        step, size = len(self.steps[0]), self.size
        reward = fmean(record[-1]["reward"] for record in self.steps)
        note(f"{self.name}, seed {self.seed}: step {step}, own reward {reward:.2f}")
        if step % size.eval_every == 0 and step < size.steps:
            self.evaluate(size.questions)
            return self.stops_at_goal and until_goal(self.row(), "step") is not None
        return False

    def evaluate_start(self) -> None:
        """Measure the untrained nodes, or reuse the measurement of an earlier cell."""
        if self.arm.others or self.seed not in self.starts:
            self.evaluate(self.size.last_questions)
            self.starts.setdefault(self.seed, self.held_out[0])
        else:
            self.held_out.append(self.starts[self.seed])

    def row(self) -> Row:
        """Return the row of this cell so far."""
        series = lambda record: {key: [row[key] for row in record] for key in record[0]}
        return {
            "arm": self.name,
            "seed": self.seed,
            "size": asdict(self.size),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "commit": commit(),
            "held_out": self.held_out,
            "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB / 1e9,
            "exchanges": dict(self.swarm.exchanges),
            "nodes": [
                {**asdict(member), "judged": dict(node.judged), **series(record)}
                for member, node, record in zip(
                    self.arm.members, self.swarm.nodes, self.steps, strict=True
                )
            ],
        }

    def evaluate(self, questions: int) -> None:
        """Measure the held-out reward of each measured node on its part of the questions."""
        nodes = self.counted
        self.texts = []
        parts = [range(i, questions, len(nodes)) for i in range(len(nodes))]
        rewards = [self._held_out(node, part) for node, part in zip(nodes, parts, strict=True)]
        self.held_out.append(
            {
                "step": len(self.steps[0]),
                "questions": questions,
                "reward": fmean(rewards),
                "rewards": rewards,
                "tokens": self._mean(("tokens",)),
                "cpu": self._mean(PARTS),
            }
        )
        note(f"{self.name}, seed {self.seed}: held out {self.held_out[-1]['reward']:.3f}")

    def _held_out(self, node: TurnNode, numbers: Sequence[int]) -> float:
        prompts = [self.prompts[i] for i in numbers]
        sampling = Sampling(MOST_ANSWERS, self.size.longest, TEMPERATURE)
        generator = node.policy.random_generator(self.seed)
        groups = node.engine.generate(prompts, sampling, generator)
        texts = [[answer.text for answer in group.completions] for group in groups]
        self.texts += [text for each in texts for text in each]
        scored = self.scorer.score_many(
            [(self.refs[i], each) for i, each in zip(numbers, texts, strict=True)]
        )
        return fmean(fmean(one.rewards) for one in checked(scored))

    def _mean(self, keys: Sequence[str]) -> float:
        """Return the mean over the measured nodes of what they have spent so far."""
        return fmean(
            sum(row[key] for row in record for key in keys)
            for node, record in zip(self.swarm.nodes, self.steps, strict=True)
            if node in self.counted
        )


PARTS = ("sampling", "judging", "update")
"""Parts of a step's CPU seconds."""


def node_seed(seed: int, index: int) -> int:
    """Return the seed of a node's sampling."""
    return 1000 * seed + index


def curve(row: Row, axis: str) -> list[tuple[float, float]]:
    """Return (axis, held-out reward) of each evaluation. axis: step, tokens or cpu."""
    return [(point[axis], point["reward"]) for point in row["held_out"]]


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the means of successive pairs of points."""
    pairs = itertools.pairwise(points)
    return [((x0 + x1) / 2, (y0 + y1) / 2) for (x0, y0), (x1, y1) in pairs]


def until_goal(row: Row, axis: str) -> float | None:
    """Return where the mean of two successive evaluations reaches GOAL; None if it never does."""
    for (x, before), (later, after) in itertools.pairwise(smooth(curve(row, axis))):
        if before < GOAL <= after:
            return x + (later - x) * (GOAL - before) / (after - before)
    return None
