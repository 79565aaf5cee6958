"""`benchmarks.sapo --curriculum`: which question next, chosen by what own groups say of each task
at each difficulty.

Every task has four difficulties: what the start policies were shown, a little harder, and twice
questions too hard for them. Four nodes sample four groups in a round; those that share have room
for four of others, and those of the arms `alone` share nothing. Held-out questions are of all tasks
and difficulties alike.

`python -m benchmarks.curricula` is the choice alone, in seconds: no policy, each bucket has a
signal with a chance of its own that stays.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.report import heading, spread, table
from benchmarks.simulator import Arm, Node, OwnSample, Sharing, Swarm, at, mean_until
from swarmnode.config import TrainingConfig
from swarmnode.policy.load import Policy
from swarmnode.rl.curricula import Bucket, Curriculum
from swarmnode.rollouts.groups import is_useful
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import evaluation_seed, task_seed
from swarmnode.wire.messages import TaskRef

CURRICULA = (
    "alone, uniform",
    "alone, own evidence",
    "uniform",
    "own evidence",
)
BASE = {name: "alone, uniform" if name.startswith("alone") else "uniform" for name in CURRICULA}
"""What each is compared with."""
HONEST = 4
OWN_GROUPS = 4
LEVELS: dict[str, dict[str, list[int]]] = {
    "rg/chain_sum": {"min_digits": [1, 1, 2, 3], "max_digits": [1, 2, 3, 4]},
    "rg/basic_arithmetic": {"min_digits": [1, 1, 2, 3], "max_digits": [1, 2, 3, 4]},
    "rg/base_conversion": {"min_value": [0, 10, 100, 1000], "max_value": [15, 60, 900, 9000]},
    "rg/spell_backward": {"min_word_len": [3, 4, 6, 8], "max_word_len": [4, 6, 8, 10]},
    "rg/gcd": {"min_value": [1, 10, 100, 1000], "max_value": [20, 90, 900, 9000]},
    "rg/lcm": {"min_value": [1, 5, 30, 100], "max_value": [9, 30, 90, 900]},
    "rg/count_bits": {"min_n": [1, 32, 5000, 90_000], "max_n": [63, 900, 90_000, 900_000]},
    "rg/fraction_simplification": {"min_value": [1, 5, 30, 100], "max_value": [9, 30, 90, 900]},
    "rg/products": {"min_digits": [1, 1, 2, 3], "max_digits": [1, 2, 3, 4]},
}
"""What an owner would write under `task.settings`."""
DIFFICULTIES = range(4)


@dataclass(frozen=True)
class Start:
    """What all arms of a seed begin with."""

    regime: str
    seed: int
    policies: Sequence[Policy]


class CurriculumSwarm(Swarm):
    """Nodes that choose their questions."""

    def __init__(
        self,
        curriculum: str,
        start: Start,
        training: TrainingConfig,
        scorer: Scorer,
        eval_questions: int,
    ) -> None:
        self._rngs: dict[int, random.Random] = {}
        self._curricula: dict[int, Curriculum] = {}
        self.asked: Counter[int] = Counter()
        """Questions by difficulty."""
        alone = curriculum.startswith("alone")
        if alone:
            training = training.model_copy(update={"groups_per_step": OWN_GROUPS})
        arm = Arm(
            curriculum,
            0 if alone else training.groups_per_step - OWN_GROUPS,
            Sharing(),
            keep_pool=True,
        )
        super().__init__(
            arm, [p.clone() for p in start.policies], training, scorer, start.seed, eval_questions
        )
        buckets = [Bucket(name, difficulty) for name in self.names for difficulty in DIFFICULTIES]
        explore = 1.0 if curriculum.endswith("uniform") else None
        for node in self.nodes:
            self._rngs[node.index] = random.Random(f"curriculum/{start.seed}/{node.index}")
            self._curricula[node.index] = (
                Curriculum(buckets) if explore is None else Curriculum(buckets, explore)
            )
            node.ask = self._asker(node)  # type: ignore[method-assign]

    def _asker(self, node: Node) -> Any:
        def ask(count: int, names: Sequence[str]) -> list[tuple[TaskRef, int]]:
            asked = []
            for _ in range(count):
                task, difficulty = self._curricula[node.index].choose(self._rngs[node.index])
                seed, index = task_seed(self.swarm, node.peer, node.sequence, task, difficulty)
                asked.append(
                    (TaskRef(task, task_version(task), seed, index, difficulty), node.sequence)
                )
                self.asked[difficulty] += 1
                node.sequence += 1
            return asked

        return ask

    def generate(self) -> dict[int, list[OwnSample]]:
        own = super().generate()
        for index, groups in own.items():
            for group in groups:
                bucket = Bucket(group.ref.id, group.ref.difficulty)
                self._curricula[index].own(bucket, is_useful(group.rewards))
        return own

    def _make_exam(self, per_task: int) -> list[list[tuple[TaskRef, str]]]:
        refs = [
            [
                TaskRef(n, task_version(n), evaluation_seed(n, block=node.index), i, difficulty)
                for n in self.names
                for difficulty in DIFFICULTIES
                for i in range(per_task)
            ]
            for node in self.nodes
        ]
        texts = iter([p.prompt for p in self.score([(ref, []) for mine in refs for ref in mine])])
        return [[(ref, next(texts)) for ref in mine] for mine in refs]


def curriculum_table(results: Sequence[dict[str, Any]], tokens: float) -> str:
    """Arms of one regime at equal generated tokens."""
    seeds = sorted({r["seed"] for r in results})
    of = {name: {r["seed"]: r for r in results if r["arm"] == name} for name in CURRICULA}
    rows = []
    for name, runs in of.items():
        row = lambda key, digits=3, runs=runs: spread([runs[s][key] for s in seeds], digits)
        base = of[BASE[name]]
        ratios = [
            runs[s]["mean_held_out"] / base[s]["mean_held_out"]
            for s in seeds
            if base[s]["mean_held_out"]
        ]
        rows.append(
            [
                name,
                row("held_out"),
                row("mean_held_out"),
                f"{spread(ratios)} (≥ 1 in {sum(r >= 1 for r in ratios)})",
                row("useful_own"),
                row("useful_step", 2),
                row("first", 2),
                row("tokens", 0),
            ]
        )
    headers = [
        "questions by",
        "held-out",
        "mean held-out on the way",
        "÷ uniform by seed",
        "own groups with a signal",
        "groups with a signal a step",
        "questions of the first difficulty",
        "tokens a node",
    ]
    title = (
        f"### curriculum, {results[0]['regime']} ({len(seeds)} seeds, {tokens:.0f} generated tokens"
        " a node)"
    )
    return f"{title}\n\n{table(headers, rows)}"


def run_arm(
    curriculum: str, start: Start, training: TrainingConfig, scorer: Scorer, tokens: float
) -> dict[str, Any]:
    """One arm of a regime and seed, until a node has generated `tokens`."""
    swarm = CurriculumSwarm(curriculum, start, training, scorer, eval_questions=2)
    trace = swarm.run(lambda t: sum(t.tokens) >= tokens, eval_every=4)
    return {
        "regime": start.regime,
        "arm": curriculum,
        "seed": start.seed,
        "held_out": at(trace.held_out, "tokens", tokens),
        "mean_held_out": mean_until(trace.held_out, "tokens", tokens),
        "useful_own": fmean(trace.useful_own),
        "useful_step": fmean(trace.useful_samples),
        "first": swarm.asked[0] / swarm.asked.total(),
        "tokens": sum(trace.tokens),
        "trace": trace.as_dict(),
    }


# ---- the choice alone ----------------------------------------------------------------------------

TASKS, CHOOSERS, ROUNDS, CHOICE_SEEDS = 9, 6, 30, 10
EASY_CHANCES = (0.015, 0.05, 0.1)
"""Chances of a right answer in the buckets of the first difficulty."""
HARD_CHANCE = 0.002


class FlatPrior(Curriculum):
    """As it was: each bucket is known by itself, and expected to have a signal every other time
    until it was tried."""

    def _mean(self) -> float:
        return 0.5


def choose_only(
    evidence: str, kind: Callable[..., Curriculum], levels: int, seed: int
) -> tuple[float, float]:
    """Share of own groups with a signal in all rounds, and in the last third."""
    rng = random.Random(f"{seed}/{levels}")  # the same chances for all kinds of evidence
    buckets = [Bucket(f"task {task}", level) for task in range(TASKS) for level in range(levels)]
    chance = {
        bucket: HARD_CHANCE if bucket.difficulty else rng.choice(EASY_CHANCES) for bucket in buckets
    }
    nodes = [
        kind(buckets, 1.0) if evidence == "uniform" else kind(buckets) for _ in range(CHOOSERS)
    ]
    useful: list[bool] = []
    for _ in range(ROUNDS):
        for node in nodes:
            for bucket in (node.choose(rng) for _ in range(OWN_GROUPS)):
                rewards = [float(rng.random() < chance[bucket]) for _ in range(8)]
                useful.append(is_useful(rewards))
                node.own(bucket, useful[-1])
    return fmean(useful), fmean(useful[-len(useful) // 3 :])


def main() -> None:
    print(heading("curricula: the choice alone"))
    rows = []
    for levels, evidence in itertools.product((2, 4, 8), CURRICULA[2:]):
        row = [str(TASKS * levels), evidence]
        for kind in (FlatPrior, Curriculum):
            results = [choose_only(evidence, kind, levels, seed) for seed in range(CHOICE_SEEDS)]
            row += [
                spread([whole for whole, _ in results], 3),
                spread([last for _, last in results], 3),
            ]
        rows.append(row)
    headers = [
        "buckets",
        "questions by",
        "flat prior: groups with a signal",
        "in the last third",
        "shared prior",
        "in the last third",
    ]
    print(table(headers, rows))


if __name__ == "__main__":
    main()
