"""Measure what sharing gains with a real policy.

Qwen2 policies of 1.6 M parameters (benchmarks/lib/sums_policy.py) are loaded from a model directory
and learn a dataset file of running sums with the verifier `numeric`, in answers of 22 to 56 tokens.
Nodes are simulated in lockstep with the product's sampling, scoring, split, judgement and update
(benchmarks/lib/simulator.py). TRL's GRPOTrainer learns the same questions in the same order with
the same settings.

Every node, and TRL, is evaluated on the same held-out questions, one answer each at temperature 1.
Own tokens are those that a node sampled for training. Each run, one arm with one seed, appends a
row to the file of `--rows`; finished runs are not repeated. `--table` prints the file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.lib import sums_policy
from benchmarks.lib.report import (
    append_row,
    columns,
    heading,
    machine,
    make_parser,
    mean_until,
    read_rows,
    rounded,
    seeds_of,
    spread,
    value_at,
)
from benchmarks.lib.simulator import PRODUCT, OwnSample, Swarm, single_thread
from benchmarks.lib.sums_policy import BYTES, SMALL, Recipe
from swarmnode.config import DatasetConfig, LoraSettings, PolicyConfig, TrainingConfig
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import Policy, load_policy
from swarmnode.rollouts.groups import is_useful
from swarmnode.tasks import registry
from swarmnode.tasks.child import ScorerLimits
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.wire.messages import TaskRef

TASK = "data/running_sums"
"""The dataset, with the verifier `numeric`."""
ROWS = Path(__file__).parent / "results" / "second.jsonl"
LORA_RANK = 16
LORA_RATE_FACTOR = 10
"""Learning rate of an adapter relative to that of all weights, as in the product's defaults."""
QUICK = replace(SMALL, name="quick", hidden=32, layers=1, intermediate=64, most_steps=20)
"""A start policy that is made in seconds and learns nothing."""
Kind = tuple[str, str]
"""Arm, and name of a policy in it."""
GOAL = 0.4
"""Held-out reward at which own tokens are compared."""


@dataclass(frozen=True)
class Size:
    """Size of the experiment."""

    steps: int = 100
    groups: int = 4
    """Groups of a step, B."""
    generations: int = 8
    """Completions of a group, G."""
    longest: int = 64
    """Maximum number of tokens of a completion."""
    learning_rate: float = 1e-4
    eval_every: int = 10
    eval_questions: int = 160
    rows: int = 4000
    """Number of rows of the dataset. A tenth of the rows is held out."""

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig(
            learning_rate=self.learning_rate,
            groups_per_step=self.groups,
            num_generations=self.generations,
            max_completion_length=self.longest,
        )


@dataclass(frozen=True)
class Member:
    """A node of an arm."""

    recipe: Recipe = SMALL
    lora: bool = False

    @property
    def name(self) -> str:
        return self.recipe.name + ", LoRA" * self.lora


@dataclass(frozen=True)
class Study:
    """An arm."""

    members: tuple[Member, ...] = (Member(),)
    trl: bool = False


STUDIES: dict[str, Study] = {
    "alone": Study(),
    "two nodes": Study((Member(), Member())),
    "TRL": Study(trl=True),
    "alone, bytes": Study((Member(BYTES),)),
    "1.6 M with bytes": Study((Member(), Member(BYTES))),
    "alone, LoRA": Study((Member(lora=True),)),
    "LoRA with full": Study((Member(lora=True), Member())),
}


def run(name: str, seed: int, size: Size, scorer: Scorer, policies: Sequence[Policy]) -> Any:
    """Run one arm with one seed and return its row. policies: one for each member."""
    study, started = STUDIES[name], time.process_time()
    if study.trl:
        nodes = [run_trl(policies[0], seed, size, scorer)]
    else:
        swarm = SecondSwarm(study, policies, size, scorer, seed)
        swarm.run(lambda trace: len(trace.tokens) >= size.steps, size.eval_every)
        nodes = [
            {**record.as_dict(), "judged": dict(node.outcomes)}
            for record, node in zip(swarm.records, swarm.nodes, strict=True)
        ]
    return {
        "arm": name,
        "seed": seed,
        "size": asdict(size),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "cpu_seconds": round(time.process_time() - started),
        "nodes": [
            {"policy": member.name, **node}
            for member, node in zip(study.members, nodes, strict=True)
        ],
    }


class Record:
    """History of one node. Lists have one entry per step."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Tokens sampled for training."""
        self.reward: list[float] = []
        """Mean reward of own groups."""
        self.useful: list[float] = []
        """Share of own groups whose rewards differ."""
        self.held_out: list[dict[str, float]] = []

    def add_step(self, rewards: Sequence[list[float]], tokens: int) -> None:
        """Record the own groups of a step."""
        self.tokens.append(tokens)
        self.reward.append(fmean(map(fmean, rewards)))
        self.useful.append(fmean(float(is_useful(group)) for group in rewards))

    def evaluate(self, policy: Policy, exam: Exam, seed: int) -> None:
        """Measure the held-out reward of `policy`, with the same random numbers each time."""
        sampling = Sampling(1, exam.longest)
        groups = generate(policy, exam.prompts, sampling, policy.random_generator(seed))
        answers = [group.completions[0] for group in groups]
        scored = exam.scorer.score_many(
            [(ref, [answer.text]) for ref, answer in zip(exam.refs, answers, strict=True)]
        )
        self.held_out.append(
            {
                "step": len(self.tokens),
                "tokens": sum(self.tokens),
                "reward": fmean(one.rewards[0] for one in checked(scored)),
                "length": fmean(len(answer.ids) for answer in answers),
            }
        )

    def as_dict(self) -> dict[str, Any]:
        return rounded(vars(self))


class Exam:
    """The held-out questions."""

    def __init__(self, scorer: Scorer, size: Size) -> None:
        self.scorer, self.longest = scorer, size.longest
        seed, version = evaluation_seed(TASK), task_version(TASK)
        self.refs = [TaskRef(TASK, version, seed, index) for index in range(size.eval_questions)]
        scored = checked(scorer.score_many([(ref, []) for ref in self.refs]))
        self.prompts = [one.prompt for one in scored]


def checked(results: Sequence[Any]) -> list[Any]:
    """Return the scorer's results. Raises its first error: honest questions have none."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)


class SecondSwarm(Swarm):
    """The nodes of one arm, with a record each."""

    def __init__(
        self, study: Study, policies: Sequence[Policy], size: Size, scorer: Scorer, seed: int
    ) -> None:
        self.names = (TASK,)
        super().__init__(PRODUCT, policies, size.training, scorer, seed, eval_questions=0)
        self.records = [Record() for _ in self.nodes]
        self._questions = Exam(scorer, size)

    def training_of(self, policy: Policy) -> TrainingConfig:
        if not policy.lora_rank:
            return self.training
        rate = LORA_RATE_FACTOR * self.training.learning_rate
        return self.training.model_copy(update={"learning_rate": rate})

    def generate(self) -> dict[int, list[OwnSample]]:
        own = super().generate()
        for index, samples in own.items():
            tokens = sum(len(c.ids) for one in samples for c in one.sample.completions)
            self.records[index].add_step([one.rewards for one in samples], tokens)
        return own

    def _make_exam(self, per_task: int) -> list[Any]:
        return []

    def evaluate(self) -> None:
        for node, record in zip(self.nodes, self.records, strict=True):
            record.evaluate(node.policy, self._questions, node.index)


def run_trl(policy: Policy, seed: int, size: Size, scorer: Scorer) -> dict[str, Any]:
    """Train with TRL's GRPOTrainer on the questions of the arm `alone`."""
    import datasets
    import trl
    from transformers import PrinterCallback, TrainerCallback

    from benchmarks.lib.trl_setup import grpo_config

    alone = SecondSwarm(STUDIES["alone"], [policy], size, scorer, seed)
    asked = [ref for ref, _ in alone.nodes[0].next_questions(size.steps * size.groups, alone.names)]
    prompts = [one.prompt for one in alone.score([(ref, []) for ref in asked])]
    rendered = [
        policy.tokenizer.decode(policy.encode_prompt(p), skip_special_tokens=False) for p in prompts
    ]
    record, exam = Record(), Exam(scorer, size)

    def reward(
        completions: list[str], number: list[int], completion_ids: list[list[int]], **_: Any
    ) -> list[float | None]:
        """Score B questions × G completions, in the order of TRL's sampler."""
        g = size.generations
        groups = [(asked[number[i]], completions[i : i + g]) for i in range(0, len(number), g)]
        rewards = [one.rewards for one in alone.score(groups)]
        record.add_step(rewards, sum(map(len, completion_ids)))
        return [each for group in rewards for each in group]

    class Evaluation(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if len(record.tokens) % size.eval_every == 0:
                model = trainer.accelerator.unwrap_model(trainer.model)
                with torch.random.fork_rng():
                    record.evaluate(replace(policy, model=model), exam, 0)

    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            policy.model,
            reward,
            grpo_config(folder, size.training, steps=size.steps, seed=seed),
            datasets.Dataset.from_dict({"prompt": rendered, "number": list(range(len(asked)))}),
            processing_class=policy.tokenizer,
            callbacks=[Evaluation()],
        )
        trainer.remove_callback(PrinterCallback)
        record.evaluate(policy, exam, 0)
        trainer.train()
    return record.as_dict()


@contextlib.contextmanager
def installed(size: Size, folder: Path) -> Iterator[Scorer]:
    """Install the dataset as a task of this process, and yield a scorer for it."""
    file = folder / "running_sums.jsonl"
    sums_policy.write_dataset(file, size.rows)
    datasets = {TASK: DatasetConfig(source=str(file), verifier="numeric")}
    registry.install_datasets(datasets, folder / registry.DATASETS)
    # a busy machine may leave the child without a core for a while
    with Scorer(ScorerLimits(request=120.0)) as scorer:
        yield scorer


def load(member: Member, directory: Path) -> Policy:
    """Load the start policy as a node does."""
    lora = LoraSettings(r=LORA_RANK if member.lora else 0)
    return load_policy(PolicyConfig(model=str(directory), devices="cpu", threads=1, lora=lora))


def curve(node: dict[str, Any], axis: str) -> list[tuple[float, float]]:
    """Return (axis, held-out reward) of each evaluation. axis: step or tokens."""
    return [(point[axis], point["reward"]) for point in node["held_out"]]


def tokens_until(node: dict[str, Any], reward: float) -> float | None:
    """Return the own tokens at which the mean of two successive evaluations reaches `reward`."""
    pairs = itertools.pairwise(curve(node, "tokens"))
    points = [((t0 + t1) / 2, (r0 + r1) / 2) for (t0, r0), (t1, r1) in pairs]
    for (tokens, before), (later, after) in itertools.pairwise(points):
        if before < reward <= after:
            return tokens + (later - tokens) * (reward - before) / (after - before)
    return None


def show(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line for each arm and kind of policy: mean ± s.d. over seeds. The value
    of a seed is the mean of its nodes."""
    budget = min((n["held_out"][-1]["tokens"] for r in rows for n in r["nodes"]), default=0)
    kinds = {(r["arm"], n["policy"]): None for r in rows for n in r["nodes"]}

    def seeds(kind: Kind) -> list[list[dict[str, Any]]]:
        arm, policy = kind
        runs = [row["nodes"] for row in rows if row["arm"] == arm]
        return [[node for node in nodes if node["policy"] == policy] for nodes in runs]

    def mean(value: Callable[[Any], float | None], digits: int = 3) -> Callable[[Kind], str]:
        def cell(kind: Kind) -> str:
            found = [[value(node) for node in nodes] for nodes in seeds(kind)]
            if any(one is None for nodes in found for one in nodes):
                return "–"
            return spread([fmean(nodes) for nodes in found], digits)  # type: ignore[type-var]

        return cell

    until = lambda node: (found := tokens_until(node, GOAL)) and found / 1e3
    mean_reward = lambda node: mean_until(curve(node, "step"), node["held_out"][-1]["step"])
    return columns(
        list(kinds),
        {
            "arm": lambda kind: kind[0],
            "policy": lambda kind: kind[1],
            "seeds": lambda kind: len(seeds(kind)),
            "held-out at the start": mean(lambda n: n["held_out"][0]["reward"]),
            "held-out after all steps": mean(lambda n: n["held_out"][-1]["reward"]),
            "mean over the run": mean(mean_reward),
            "own tokens, thousands": mean(lambda n: n["held_out"][-1]["tokens"] / 1e3, 1),
            f"held-out at {budget / 1e3:.0f} thousand own tokens": mean(
                lambda n: value_at(curve(n, "tokens"), budget)
            ),
            f"thousand own tokens until {GOAL:.2f}": mean(until, 1),
        },
    )


def main() -> None:
    parser = make_parser(
        "second", __doc__, quick="two arms, two steps, no file", seeds=3, json=False
    )
    parser.add_argument("--arms", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--eval-every", type=int, default=Size.eval_every)
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of finished runs")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    single_thread()
    size = Size(steps=args.steps, eval_every=args.eval_every)
    recipe = None
    with tempfile.TemporaryDirectory() as name:
        if args.quick:
            size = Size(steps=2, eval_every=1, eval_questions=8)
            args.seeds, args.arms, args.rows = 1, ["alone", "two nodes"], Path(name) / "rows.jsonl"
            recipe = QUICK
        done = {(row["arm"], row["seed"]) for row in read_rows(args.rows, [asdict(size)])}
        left = [run for run in itertools.product(args.arms, seeds_of(args)) if run not in done]
        if left and not args.table:
            with installed(size, Path(name)) as scorer:
                run_all(left, size, scorer, args.rows, recipe)
        rows = read_rows(args.rows, [asdict(size)])
    print(heading("second: what sharing gains with a real policy"))
    print(show(sorted(rows, key=lambda row: [*STUDIES, row["arm"]].index(row["arm"]))))


def run_all(
    left: Sequence[tuple[str, int]], size: Size, scorer: Scorer, rows: Path, recipe: Recipe | None
) -> None:
    """Run the arms and seeds of `left`, and append their rows to the file `rows`.

    Args:
        recipe: Start policy instead of the members' own.
    """
    for arm, seed in left:
        policies = [load(m, sums_policy.make(recipe or m.recipe)) for m in STUDIES[arm].members]
        row = run(arm, seed, size, scorer, policies)
        append_row(rows, row)
        last = [node["held_out"][-1]["reward"] for node in row["nodes"]]
        print(f"{arm}, seed {seed}: {last}, {row['cpu_seconds']} CPU s", flush=True)


if __name__ == "__main__":
    main()
