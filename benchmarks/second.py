"""What sharing buys with a real policy: `python -m benchmarks.second [--arms …] [--seeds N]`.

The second benchmark beside the toy of `benchmarks.sapo`: Qwen2 policies of 1.6 M and 4 M parameters
(benchmarks/start_policy.py) with answers of 22 to 56 tokens. They are loaded from a model directory
and learn a dataset file of running sums with the verifier `numeric`. Nodes are simulated as in
benchmarks/simulator.py: the product's sampling, scoring, split, judgement and update, without
sockets, all nodes in lockstep. TRL's GRPOTrainer learns the same questions in the same order, with
the same settings.

Every node, and TRL, is examined on the same held-out questions, one answer each at temperature 1.
Own tokens are those that a node sampled for training. Each run, one arm with one seed, appends a
row to the file of `--rows`; runs that are in the file are not repeated. `--table` prints the file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks import start_policy
from benchmarks.report import heading, machine, spread, table
from benchmarks.simulator import Arm, Node, OwnSample, Sharing, Swarm, single_thread
from benchmarks.start_policy import BYTES, LARGE, SMALL, Shape
from swarmnode.config import DatasetConfig, LoraSettings, PolicyConfig, TrainingConfig
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import Policy, load_policy
from swarmnode.policy.logprobs import score
from swarmnode.rl.objectives import DELTA, EPSILON, EPSILON_HIGH, MAX_GRAD_NORM, WEIGHT_DECAY
from swarmnode.rollouts.groups import ExternalGroup, is_useful
from swarmnode.tasks import registry
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.tasks.verifiers import MAJORITY
from swarmnode.wire.messages import Completion, TaskRef
from swarmnode.wire.tensors import pack_ids, pack_logprobs

TASK, VOTED = "data/running_sums", "data/running_sums_voted"
"""The dataset with the verifier `numeric`, and the same rows with `majority`."""
ROWS = Path(__file__).parent / "results" / "second.jsonl"
MARK = " "
"""What the hostile node appends to its right answers. The verifier `numeric` ignores it."""
LORA_RANK = 16
LORA_RATE_FACTOR = 10
"""Learning rate of an adapter over that of all weights, as in the product's defaults."""


@dataclass(frozen=True)
class Size:
    """How much is run."""

    steps: int = 100
    groups: int = 4
    """Groups of a step, B."""
    generations: int = 8
    """Completions of a group, G."""
    longest: int = 64
    """Tokens of a completion at most."""
    learning_rate: float = 1e-4
    eval_every: int = 10
    eval_questions: int = 160
    rows: int = 4000
    """Rows of the dataset. A tenth of them is held out."""

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
    """One node of an arm."""

    shape: Shape = SMALL
    lora: bool = False
    hostile: bool = False

    @property
    def name(self) -> str:
        return self.shape.name + ", LoRA" * self.lora


@dataclass(frozen=True)
class Study:
    """One arm."""

    members: tuple[Member, ...] = (Member(),)
    replay: bool = False
    voted: bool = False
    """The group's majority is right, in training; held out, the right answer is."""
    trl: bool = False
    external: int | None = None
    """Groups of a step that are others', J; None: the product's adaptive split."""
    solo: int = 0
    """Steps between two outer steps without a partner (`simulator.Arm.solo`); 0: none."""
    options: tuple[str, ...] = ()
    """`training.options`."""


STUDIES: dict[str, Study] = {
    "alone": Study(),
    "two nodes": Study((Member(), Member())),
    "TRL": Study(trl=True),
    "alone, replay": Study(replay=True),
    "alone, majority": Study(voted=True),
    "two nodes, replay": Study((Member(), Member()), replay=True),
    "alone, 4 M": Study((Member(LARGE),)),
    "alone, bytes": Study((Member(BYTES),)),
    "1.6 M with bytes": Study((Member(), Member(BYTES))),
    "1.6 M with 4 M": Study((Member(), Member(LARGE))),
    "alone, LoRA": Study((Member(lora=True),)),
    "LoRA with full": Study((Member(lora=True), Member())),
    "three nodes": Study((Member(),) * 3),
    "three nodes, one hostile": Study((*(Member(),) * 3, Member(hostile=True))),
    "four nodes": Study((Member(),) * 4),
    "two nodes, half each": Study((Member(), Member()), external=2),
    "two nodes, effective rate": Study((Member(), Member()), options=("effective_rate",)),
    "alone, solo outer steps": Study(solo=10),
}
"""`three nodes` is the control of the hostile quarter: the same honest nodes, and silence."""


def run(name: str, seed: int, size: Size, scorer: Scorer, policies: Sequence[Policy]) -> Any:
    """Run one arm with one seed and return its row. policies: of the arm's members."""
    study, started, merged = STUDIES[name], time.process_time(), None
    if study.trl:
        nodes = [run_trl(policies[0], seed, size, scorer)]
    else:
        swarm = SecondSwarm(study, policies, size, scorer, seed)
        swarm.run(lambda trace: len(trace.tokens) >= size.steps, size.eval_every)
        nodes = [
            {**swarm.records[node.index].as_dict(), "judged": dict(node.outcomes)}
            for node in swarm.reported
        ]
        merged = merged_reward([node.policy for node in swarm.reported], size, scorer)
    honest = [member.name for member in study.members if not member.hostile]
    return {
        "arm": name,
        "seed": seed,
        "size": asdict(size),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "merged": merged,
        "cpu_seconds": round(time.process_time() - started),
        "nodes": [{"policy": p, **node} for p, node in zip(honest, nodes, strict=True)],
    }


@torch.no_grad()
def merged_reward(policies: Sequence[Policy], size: Size, scorer: Scorer) -> float | None:
    """Return the held-out reward of the mean of all policies' weights, merged once at the end; None
    where there is one policy, or where they have different weights.

    Source: A Single Merging Suffices (arXiv 2507.06542).
    """
    first, *others = policies
    shapes = [[p.shape for p in policy.trainable_parameters()] for policy in policies]
    if not others or any(shape != shapes[0] for shape in shapes):
        return None
    merged = first.clone()
    for parameters in zip(
        merged.trainable_parameters(), *(p.trainable_parameters() for p in others), strict=True
    ):
        parameters[0].copy_(torch.stack(parameters).mean(0))
    record = Record()
    record.examined(merged, Exam(scorer, size), 0)
    return record.held_out[-1]["reward"]


class Record:
    """What one node did, by steps."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Sampled for training, per step."""
        self.reward: list[float] = []
        """Mean of the own groups, per step."""
        self.useful: list[float] = []
        """Share of own groups that carry a signal, per step."""
        self.held_out: list[dict[str, float]] = []

    def sampled(self, rewards: Sequence[list[float]], tokens: int) -> None:
        """Take the own groups of a step."""
        self.tokens.append(tokens)
        self.reward.append(fmean(map(fmean, rewards)))
        self.useful.append(fmean(float(is_useful(group)) for group in rewards))

    def examined(self, policy: Policy, exam: Exam, seed: int) -> None:
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
                "reward": round(fmean(one.rewards[0] for one in checked(scored)), 4),
                "length": round(fmean(len(answer.ids) for answer in answers), 1),
                "marked": round(fmean(answer.text.endswith(MARK) for answer in answers), 4),
            }
        )

    def as_dict(self) -> dict[str, Any]:
        rounded = lambda values: [round(value, 3) for value in values]
        return {
            "held_out": self.held_out,
            "tokens": self.tokens,
            "reward": rounded(self.reward),
            "useful": rounded(self.useful),
        }


class Exam:
    """The fixed held-out questions."""

    def __init__(self, scorer: Scorer, size: Size) -> None:
        self.scorer, self.longest = scorer, size.longest
        seed, version = evaluation_seed(TASK), task_version(TASK)
        self.refs = [TaskRef(TASK, version, seed, index) for index in range(size.eval_questions)]
        self.prompts = [
            one.prompt for one in checked(scorer.score_many([(r, []) for r in self.refs]))
        ]


def checked(results: Sequence[Any]) -> list[Any]:
    """Return the scorer's results. Raises the first error: honest addresses have none."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return list(results)


class SecondSwarm(Swarm):
    """The nodes of one arm, each with a record of its own."""

    def __init__(
        self, study: Study, policies: Sequence[Policy], size: Size, scorer: Scorer, seed: int
    ) -> None:
        arm = Arm(
            "",
            study.external,
            Sharing(),
            keep_pool=True,
            replay=study.replay,
            average=study.solo,
            solo=bool(study.solo),
        )
        self.names = (VOTED if study.voted else TASK,)
        training = size.training.model_copy(update={"options": list(study.options)})
        super().__init__(arm, policies, training, scorer, seed, eval_questions=0)
        self.records = [Record() for _ in self.nodes]
        self._members, self._exam_paper = study.members, Exam(scorer, size)

    def training_of(self, policy: Policy) -> TrainingConfig:
        if not policy.lora_rank:
            return self.training
        rate = LORA_RATE_FACTOR * self.training.learning_rate
        return self.training.model_copy(update={"learning_rate": rate})

    @property
    def counted(self) -> list[Node]:
        return [node for node in self.nodes if not self._members[node.index].hostile]

    def generate(self) -> dict[int, list[OwnSample]]:
        own = super().generate()
        for index, samples in own.items():
            tokens = sum(len(c.ids) for one in samples for c in one.sample.completions)
            self.records[index].sampled([one.rewards for one in samples], tokens)
        return own

    def share(self, own: dict[int, list[OwnSample]]) -> None:
        super().share(own)
        for node in self.nodes:
            if self._members[node.index].hostile:
                for group in self._marked_groups(node):
                    for receiver in self.counted:
                        receiver.receive(group, self.now, node.peer)

    def _marked_groups(self, node: Node) -> Iterator[ExternalGroup]:
        """Groups of a hostile node: an honest node's own answers and log-probabilities, with MARK
        behind each right one."""
        victim = self.counted[0].policy
        asked = node.ask(self.training.groups_per_step, self.names)
        prompts = [one.prompt for one in self.score([(ref, []) for ref, _ in asked])]
        t = self.training
        sampling = Sampling(t.num_generations, t.max_completion_length, t.temperature)
        drafts = generate(victim, prompts, sampling, node.generator)
        scored = self.score(
            [
                (ref, [c.text for c in draft.completions])
                for (ref, _), draft in zip(asked, drafts, strict=True)
            ]
        )
        for (ref, sequence), draft, result in zip(asked, drafts, scored, strict=True):
            if not is_useful(result.rewards):
                continue
            marked = [
                c.text + MARK * (reward == max(result.rewards))
                for c, reward in zip(draft.completions, result.rewards, strict=True)
            ]
            ids = [
                victim.tokenize_completion(text, c.finish)
                for text, c in zip(marked, draft.completions, strict=True)
            ]
            chances = score(victim, [(draft.prompt_ids, row) for row in ids], t.temperature)
            own = OwnSample(ref, sequence, result.prompt, draft, result.rewards)
            rollout = node.rollout(own, self.now)
            rollout.completions[:] = [
                Completion(text, len(row), sum(p), c.finish, pack_ids(row), pack_logprobs(p))
                for text, row, p, c in zip(marked, ids, chances, draft.completions, strict=True)
            ]
            content = os.urandom(32)
            yield ExternalGroup(
                content, node.peer, rollout, result.prompt, result.rewards, staleness=0
            )

    def _make_exam(self, per_task: int) -> list[Any]:
        return []

    def evaluate(self) -> None:
        for node in self.reported:
            self.records[node.index].examined(node.policy, self._exam_paper, node.index)


def run_trl(policy: Policy, seed: int, size: Size, scorer: Scorer) -> dict[str, Any]:
    """Train with TRL's GRPOTrainer on the questions that the arm `alone` asks."""
    import datasets
    import trl
    from transformers import PrinterCallback, TrainerCallback

    alone = SecondSwarm(STUDIES["alone"], [policy], size, scorer, seed)
    asked = [ref for ref, _ in alone.nodes[0].ask(size.steps * size.groups, alone.names)]
    prompts = [one.prompt for one in alone.score([(ref, []) for ref in asked])]
    rendered = [
        policy.tokenizer.decode(policy.encode_prompt(p), skip_special_tokens=False) for p in prompts
    ]
    record, exam = Record(), Exam(scorer, size)

    def reward(
        completions: list[str], number: list[int], completion_ids: list[list[int]], **_: Any
    ) -> list[float | None]:
        """Rows come as B questions × G completions in a row, as TRL's sampler repeats them."""
        g = size.generations
        groups = [(asked[number[i]], completions[i : i + g]) for i in range(0, len(number), g)]
        rewards = [one.rewards for one in alone.score(groups)]
        record.sampled(rewards, sum(map(len, completion_ids)))
        return [each for group in rewards for each in group]

    class Examiner(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if len(record.tokens) % size.eval_every == 0:
                model = trainer.accelerator.unwrap_model(trainer.model)
                with torch.random.fork_rng():
                    record.examined(replace(policy, model=model), exam, 0)

    t = size.training
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_dropout=True,
            seed=seed,
            per_device_train_batch_size=size.groups * size.generations,
            gradient_accumulation_steps=1,
            num_generations=size.generations,
            max_steps=size.steps,
            max_completion_length=size.longest,
            temperature=t.temperature,
            top_p=t.top_p,
            learning_rate=size.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_GRAD_NORM,
            loss_type=t.loss_type,
            scale_rewards="group",
            epsilon=EPSILON,
            epsilon_high=EPSILON_HIGH,
            delta=DELTA,
            beta=t.beta,
            num_iterations=1,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        data = datasets.Dataset.from_dict({"prompt": rendered, "number": list(range(len(asked)))})
        trainer = trl.GRPOTrainer(
            policy.model,
            reward,
            settings,
            data,
            processing_class=policy.tokenizer,
            callbacks=[Examiner()],
        )
        trainer.remove_callback(PrinterCallback)
        record.examined(policy, exam, 0)
        trainer.train()
    return record.as_dict()


@contextlib.contextmanager
def installed(size: Size, folder: Path) -> Iterator[Scorer]:
    """The dataset as two tasks of this process, and a scorer for them."""
    file = folder / "running_sums.jsonl"
    start_policy.write_dataset(file, size.rows)
    datasets = {
        name: DatasetConfig(source=str(file), verifier=verifier)
        for name, verifier in ((TASK, "numeric"), (VOTED, MAJORITY))
    }
    registry.install_datasets(datasets, folder / registry.DATASETS)
    # a busy machine may leave the child without a core for a while
    with Scorer(deadline=120.0) as scorer:
        yield scorer


def load(member: Member, directory: Path) -> Policy:
    """Load the start policy as a node does."""
    rank = LORA_RANK if member.lora else 0
    return load_policy(
        PolicyConfig(model=str(directory), devices="cpu", threads=1, lora=LoraSettings(r=rank))
    )


def finished(path: Path, size: Size) -> list[dict[str, Any]]:
    """The rows of runs of this size."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["size"] == asdict(size)]


def at(node: dict[str, Any], axis: str, budget: float) -> float | None:
    """Held-out reward of a node at so many steps or tokens, linear between two measurements."""
    for before, after in itertools.pairwise(node["held_out"]):
        if before[axis] <= budget <= after[axis]:
            share = (budget - before[axis]) / (after[axis] - before[axis])
            return float(before["reward"] + share * (after["reward"] - before["reward"]))
    return None


def tokens_until(node: dict[str, Any], reward: float) -> float | None:
    """Own tokens until the held-out reward, the mean of two measurements, reaches `reward`."""
    points = [
        ((a["tokens"] + b["tokens"]) / 2, (a["reward"] + b["reward"]) / 2)
        for a, b in itertools.pairwise(node["held_out"])
    ]
    for (tokens, before), (later, after) in itertools.pairwise(points):
        if before < reward <= after:
            return tokens + (later - tokens) * (reward - before) / (after - before)
    return None


def mean_reward(node: dict[str, Any]) -> float:
    """Mean held-out reward on the way, by steps."""
    pairs = itertools.pairwise(point["reward"] for point in node["held_out"])
    return fmean((before + after) / 2 for before, after in pairs)


def show(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each arm and kind of policy in it: mean ± s.d. over seeds; a seed's value is the
    mean of its nodes."""
    budget = min((n["held_out"][-1]["tokens"] for r in rows for n in r["nodes"]), default=0)
    lines = []
    for arm in STUDIES:
        runs = [row for row in rows if row["arm"] == arm]
        for policy in dict.fromkeys(n["policy"] for run in runs for n in run["nodes"]):
            seeds = [[n for n in run["nodes"] if n["policy"] == policy] for run in runs]

            def column(value: Any, digits: int = 3, seeds: Any = seeds) -> str:
                found = [[value(node) for node in nodes] for nodes in seeds]
                if any(one is None for nodes in found for one in nodes):
                    return "–"
                return spread([fmean(nodes) for nodes in found], digits)

            lines.append(
                [
                    arm,
                    policy,
                    len(seeds),
                    column(lambda n: n["held_out"][0]["reward"]),
                    column(lambda n: n["held_out"][-1]["reward"]),
                    column(mean_reward),
                    column(lambda n: n["held_out"][-1]["tokens"] / 1e3, 1),
                    column(lambda n: at(n, "tokens", budget)),
                    column(lambda n: (found := tokens_until(n, GOAL)) and found / 1e3, 1),
                    spread([run["merged"] for run in runs if run["merged"] is not None], 3),
                    column(lambda n: 100 * n["held_out"][-1]["marked"], 1),
                ]
            )
    headers = [
        "arm",
        "policy",
        "seeds",
        "held-out at the start",
        "held-out after all steps",
        "mean on the way",
        "own tokens, thousands",
        f"held-out at {budget / 1e3:.0f} thousand own tokens",
        f"thousand own tokens until {GOAL:.2f}",
        "held-out, all merged once",
        "answers with the mark, %",
    ]
    return table(headers, lines)


GOAL = 0.4
"""Held-out reward at which own tokens are compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arms", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--learning-rate", type=float, default=Size.learning_rate)
    parser.add_argument("--eval-every", type=int, default=Size.eval_every)
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of finished runs")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    single_thread()
    size = Size(steps=args.steps, learning_rate=args.learning_rate, eval_every=args.eval_every)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    done = {(row["arm"], row["seed"]) for row in finished(args.rows, size)}
    left = [(arm, seed) for arm in args.arms for seed in seeds if (arm, seed) not in done]
    if left and not args.table:
        with tempfile.TemporaryDirectory() as folder, installed(size, Path(folder)) as scorer:
            for arm, seed in left:
                policies = [
                    load(member, start_policy.make(member.shape)) for member in STUDIES[arm].members
                ]
                row = run(arm, seed, size, scorer, policies)
                with open(args.rows, "a") as file:
                    file.write(json.dumps(row) + "\n")
                last = [node["held_out"][-1]["reward"] for node in row["nodes"]]
                print(f"{arm}, seed {seed}: {last}, {row['cpu_seconds']} CPU s", flush=True)
    print(heading("second: what sharing buys with a real policy"))
    print(show(finished(args.rows, size)))


if __name__ == "__main__":
    main()
