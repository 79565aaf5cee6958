"""`benchmarks.sapo --curriculum`: which question next, chosen by what own groups and peers' say of each task at each difficulty.

Every task has two difficulties: what the start policies were shown, and questions too hard for most of them. All arms have the same six
honest nodes, which sample four groups in a round and have room for four of others. Held-out questions are of all tasks and difficulties
alike. The liars' every word is believed to have passed judgement, and said as strongly as it may be: each round they praise the buckets
that taught the honest nodes least so far. Nobody trains on what they send.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.report import spread, table
from benchmarks.simulator import Arm, Node, OwnSample, Sharing, Swarm, at, mean_until
from swarmnode.config import TrainingConfig
from swarmnode.policy.load import Policy
from swarmnode.rl.curricula import Bucket, Curriculum
from swarmnode.rollouts.groups import is_useful
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import bucket_seed, evaluation_seed
from swarmnode.trainer.batch import TrainingGroup
from swarmnode.wire.messages import TaskRef

CURRICULA = ("uniform", "own evidence", "swarm evidence", "swarm evidence, liars")
HONEST, LIARS = 6, 2
OWN_GROUPS = 4
LEVELS: dict[str, dict[str, list[int]]] = {
    "rg/chain_sum": {"min_digits": [1, 3], "max_digits": [1, 3]},
    "rg/basic_arithmetic": {"min_digits": [1, 3], "max_digits": [1, 3]},
    "rg/base_conversion": {"min_value": [0, 100], "max_value": [15, 900]},
    "rg/spell_backward": {"min_word_len": [3, 7], "max_word_len": [4, 9]},
    "rg/gcd": {"min_value": [1, 100], "max_value": [20, 900]},
    "rg/lcm": {"min_value": [1, 30], "max_value": [9, 90]},
    "rg/count_bits": {"min_n": [1, 5000], "max_n": [63, 90_000]},
    "rg/fraction_simplification": {"min_value": [1, 30], "max_value": [9, 90]},
    "rg/products": {"min_digits": [1, 3], "max_digits": [1, 3]},
}
"""What an owner would write under `task.settings`."""
PRAISED = 9
"""Buckets that a liar speaks for in a round: half of all."""
HALF_RIGHT = (1.0,) * 4 + (0.0,) * 4


@dataclass(frozen=True)
class Start:
    """What all arms of a seed begin with."""

    regime: str
    seed: int
    policies: Sequence[Policy]


class CurriculumSwarm(Swarm):
    """Nodes that choose their questions."""

    def __init__(self, curriculum: str, start: Start, training: TrainingConfig, scorer: Scorer, eval_questions: int) -> None:
        self._kind = curriculum
        self._rngs: dict[int, random.Random] = {}
        self._curricula: dict[int, Curriculum] = {}
        self._signals: defaultdict[Bucket, list[bool]] = defaultdict(list)
        self.asked: Counter[int] = Counter()
        """Questions by difficulty."""
        super().__init__(Arm(curriculum, training.groups_per_step - OWN_GROUPS, Sharing(), keep_pool=True),
                         [p.clone() for p in start.policies], training, scorer, start.seed, eval_questions)  # fmt: skip
        buckets = [Bucket(name, difficulty) for name in self.names for difficulty in (0, 1)]
        explore = 1.0 if curriculum == "uniform" else None
        for node in self.nodes:
            self._rngs[node.index] = random.Random(f"curriculum/{start.seed}/{node.index}")
            self._curricula[node.index] = Curriculum(buckets) if explore is None else Curriculum(buckets, explore)
            node.ask = self._asker(node)  # type: ignore[method-assign]

    def _asker(self, node: Node) -> Any:
        def ask(count: int, names: Sequence[str]) -> list[tuple[TaskRef, int]]:
            asked = []
            for _ in range(count):
                task, difficulty = self._curricula[node.index].choose(self._rngs[node.index])
                seed, index = bucket_seed(self.swarm, node.peer, node.sequence, task, difficulty)
                asked.append((TaskRef(task, task_version(task), seed, index, difficulty), node.sequence))
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
                self._signals[bucket].append(is_useful(group.rewards))
        return own

    def draw(self, node: Node) -> list[TrainingGroup]:
        heard: list[tuple[str, Bucket, list[float]]] = []
        count = len(node.judged)
        drawn = super().draw(node)
        if self._kind.startswith("swarm"):
            heard = [(g.peer, Bucket(g.group.task.id, g.group.task.difficulty), g.rewards) for g, o in node.judged[count:] if o == "used"]
        for peer, bucket, rewards in heard:
            self._curricula[node.index].hint(peer, bucket, rewards)
        if self._kind.endswith("liars"):
            worst = sorted(self._curricula[node.index].buckets, key=lambda bucket: fmean(self._signals[bucket] or [0.0]))
            for liar in range(LIARS):
                for bucket in worst[:PRAISED]:
                    self._curricula[node.index].hint(f"liar {liar}", bucket, HALF_RIGHT)
        self._curricula[node.index].step()
        return drawn

    def _make_exam(self, per_task: int) -> list[list[tuple[TaskRef, str]]]:
        refs = [
            [TaskRef(n, task_version(n), evaluation_seed(n, block=node.index), i, difficulty)
             for n in self.names for difficulty in (0, 1) for i in range(per_task)]
            for node in self.nodes
        ]  # fmt: skip
        texts = iter([p.prompt for p in self.score([(ref, []) for mine in refs for ref in mine])])
        return [[(ref, next(texts)) for ref in mine] for mine in refs]


def curriculum_table(results: Sequence[dict[str, Any]], tokens: float) -> str:
    """Arms of one regime at equal generated tokens."""
    seeds = sorted({r["seed"] for r in results})
    of = {name: {r["seed"]: r for r in results if r["arm"] == name} for name in CURRICULA}
    base = of[CURRICULA[0]]
    rows = []
    for name, runs in of.items():
        row = lambda key, digits=3, runs=runs: spread([runs[s][key] for s in seeds], digits)
        ratios = [runs[s]["mean_held_out"] / base[s]["mean_held_out"] for s in seeds if base[s]["mean_held_out"]]
        rows.append([name, row("held_out"), row("mean_held_out"), f"{spread(ratios)} (≥ 1 in {sum(r >= 1 for r in ratios)})",
                     row("useful_own"), row("hard", 2), row("tokens", 0)])  # fmt: skip
    honest, lied = of["swarm evidence"], of["swarm evidence, liars"]
    cost = [100 * (1 - lied[s]["mean_held_out"] / honest[s]["mean_held_out"]) for s in seeds if honest[s]["mean_held_out"]]
    headers = ["questions by", "held-out", "mean held-out on the way", "÷ uniform by seed", "own groups with a signal", "hard questions",
               "tokens a node"]  # fmt: skip
    title = f"### curriculum, {results[0]['regime']} ({len(seeds)} seeds, {tokens:.0f} generated tokens a node)"
    return f"{title}\n\n{table(headers, rows)}\n\nWhat liars cost of the mean held-out reward, %: {spread(cost, 1)}."


def run_arm(curriculum: str, start: Start, training: TrainingConfig, scorer: Scorer, tokens: float) -> dict[str, Any]:
    """One arm of a regime and seed, until a node has generated `tokens`."""
    swarm = CurriculumSwarm(curriculum, start, training, scorer, eval_questions=8)
    trace = swarm.run(lambda t: sum(t.tokens) >= tokens, eval_every=4)
    return {
        "regime": start.regime, "arm": curriculum, "seed": start.seed, "held_out": at(trace.held_out, "tokens", tokens),
        "mean_held_out": mean_until(trace.held_out, "tokens", tokens), "useful_own": fmean(trace.useful_own),
        "hard": swarm.asked[1] / swarm.asked.total(), "tokens": sum(trace.tokens), "trace": trace.as_dict(),
    }  # fmt: skip
