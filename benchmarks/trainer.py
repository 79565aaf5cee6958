"""How fast is our local step (generate, score, update) against TRL's GRPOTrainer: `python -m benchmarks.trainer [--quick] [--json PATH]`.

Same model, tasks, batch (8 questions × 8 completions), dtype (float32), sampling, loss and optimizer settings; one thread each.
The two take turns **step by step in one process**, so that whatever else the machine does hits both and the ratio stands. TRL is
timed between its `on_step_begin` and `on_step_end`, without data loading and logging; both score through the same sandboxed scorer;
TRL gets its prompts ready made, ours regenerates them.
Gradient checkpointing, TRL's default, is off.

    real rewards       what a node does. Most groups earn nothing at first and are then not run through the model again: part of our speed
    every group useful rewards replaced by 1, 0, 1, 0, …: both train on all 64 completions
    a larger model     random weights, 32 new tokens: less Python, more arithmetic
    long prompts       the same, prompts of 17 to 185 tokens (mean 83): ours runs a prompt once, TRL once per completion

That both compute the same loss is held by tests/unit/rl/test_trl.py.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import torch
import transformers
import trl
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback

from benchmarks.report import heading, middle, table, write_json
from swarmnode.config import Config, PolicyConfig, TrainingConfig, WeightsConfig
from swarmnode.policy.build_tiny import build_tokenizer
from swarmnode.policy.load import Policy, load_policy
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import choose_task, task_seed
from swarmnode.trainer.batch import assemble
from swarmnode.trainer.engine import WholePolicy
from swarmnode.trainer.sampler import Sampler
from swarmnode.trainer.state import Counters
from swarmnode.wire.messages import TaskRef

G, B = 8, 8
WARM = 2  # steps of each that are not counted
SWARM = bytes(32)


@dataclass(frozen=True)
class Case:
    name: str
    steps: int
    new_tokens: int
    real_rewards: bool
    hidden: int = 0
    """0: the embedded policy. Else a random Llama of this width."""
    long_prompts: bool = False
    """Without the embedded tokenizer's phrases: one token per character."""


@dataclass
class Result:
    case: str
    parameters: int
    real_rewards: bool
    ours_seconds: list[float] = field(default_factory=list)
    trl_seconds: list[float] = field(default_factory=list)
    ours_cpu_seconds: list[float] = field(default_factory=list)
    trl_cpu_seconds: list[float] = field(default_factory=list)
    ours_generate_seconds: list[float] = field(default_factory=list)
    """Sampling and scoring; the rest of a step is the update."""
    ours_useful_groups: list[float] = field(default_factory=list)
    """Share of groups that the update ran through the model."""
    ours_reward: list[float] = field(default_factory=list)
    trl_reward: list[float] = field(default_factory=list)

    def ratio(self, cpu: bool = False) -> float:
        """Samples per second, ours over TRL's: equal samples a step, so the ratio of total times."""
        ours, theirs = (self.ours_cpu_seconds, self.trl_cpu_seconds) if cpu else (self.ours_seconds, self.trl_seconds)
        return sum(theirs) / sum(ours)


def step_of_ours(case: Case, policy: Policy, scorer: Scorer, result: Result) -> Callable[[], None]:
    """Our local step, the parts that `swarmnode.trainer.loop` is made of."""
    training = TrainingConfig(num_generations=G, groups_per_step=B, max_completion_length=case.new_tokens)
    config = Config(training=training, weights=WeightsConfig(rule="off"))
    counters = Counters(peer="ours", swarm=SWARM.hex())
    engine = WholePolicy(config, policy, counters, send=lambda message: None)
    sampler = Sampler(config, engine, scorer, policy.random_generator(0), counters)
    count = 0

    def step() -> None:
        nonlocal count
        wall, cpu = time.perf_counter(), time.process_time()
        groups = sampler(B).groups
        sampled = time.perf_counter()
        if not case.real_rewards:
            groups = [replace(g, rewards=alternating(len(g.rewards))) for g in groups]
        engine.update(assemble(groups, training.advantage), count)
        result.ours_seconds.append(time.perf_counter() - wall)
        result.ours_cpu_seconds.append(time.process_time() - cpu)
        result.ours_generate_seconds.append(sampled - wall)
        result.ours_useful_groups.append(statistics.fmean(len(set(g.rewards)) > 1 for g in groups))
        result.ours_reward.append(statistics.fmean(r for g in groups for r in g.rewards))
        count += 1

    return step


def alternating(count: int) -> list[float]:
    return [float(i % 2 == 0) for i in range(count)]


class Turns(TrainerCallback):
    """Times TRL's steps, and takes one of ours after each."""

    def __init__(self, ours: Callable[[], None], result: Result) -> None:
        self._ours = ours
        self._result = result
        self._start = (0.0, 0.0)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter(), time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._result.trl_seconds.append(time.perf_counter() - self._start[0])
        self._result.trl_cpu_seconds.append(time.process_time() - self._start[1])
        self._ours()


def trl_trainer(case: Case, policy: Policy, scorer: Scorer, result: Result, folder: str, callback: TrainerCallback) -> trl.GRPOTrainer:
    """GRPOTrainer with our settings, on an equal copy of the model, on questions of its own from the same tasks."""
    names = Config().task.names
    refs = []
    for sequence in range((case.steps + WARM) * B):
        seed, index = task_seed(SWARM, "trl", sequence)
        name = choose_task(names, seed, index)
        refs.append(TaskRef(name, task_version(name), seed, index))
    prompts = [s.prompt for s in scorer.score_many([(r, []) for r in refs]) if isinstance(s, Scored)]
    rendered = [policy.tokenizer.decode(policy.encode_prompt(p), skip_special_tokens=False) for p in prompts]
    data = datasets.Dataset.from_dict({"prompt": rendered, "number": list(range(len(refs)))})

    def reward(completions: list[str], number: list[int], **_: Any) -> list[float]:
        """Rows come as B questions × G completions in a row, as TRL's sampler repeats them."""
        asked = [(refs[number[i]], completions[i : i + G]) for i in range(0, len(completions), G)]
        rewards = [r for s in scorer.score_many(asked) for r in (s.rewards if isinstance(s, Scored) else [0.0] * G)]
        result.trl_reward.append(statistics.fmean(rewards))
        return rewards if case.real_rewards else alternating(len(rewards))

    ours = TrainingConfig()
    settings = trl.GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, disable_dropout=True, seed=0,
        per_device_train_batch_size=B * G, gradient_accumulation_steps=1, num_generations=G, max_steps=case.steps + WARM,
        max_completion_length=case.new_tokens, temperature=ours.temperature, top_p=ours.top_p, learning_rate=ours.learning_rate,
        lr_scheduler_type="constant", weight_decay=ours.weight_decay, max_grad_norm=ours.max_grad_norm, loss_type=ours.loss_type,
        scale_rewards="group", epsilon=ours.epsilon, epsilon_high=ours.epsilon_high, delta=ours.delta, beta=ours.beta,
        num_iterations=1, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True, shuffle_dataset=False,
    )  # fmt: skip
    model = policy.clone().model
    return trl.GRPOTrainer(model, reward, settings, data, processing_class=policy.tokenizer, callbacks=[callback])


def run(case: Case, scorer: Scorer) -> Result:
    """`case.steps` steps of each, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        policy = load_policy(PolicyConfig(model=random_model(case, folder) if case.hidden else "embedded", device="cpu"))
        result = Result(case.name, policy.statistics().parameters, case.real_rewards)
        turns = Turns(step_of_ours(case, policy, scorer, result), result)
        trainer = trl_trainer(case, policy, scorer, result, folder, turns)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    for values in vars(result).values():
        if isinstance(values, list):
            del values[:WARM]
    return result


def random_model(case: Case, folder: str) -> str:
    """A directory with a random Llama of 4 layers."""
    tokenizer = build_tokenizer(set()) if case.long_prompts else load_policy(PolicyConfig(device="cpu")).tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=case.hidden, intermediate_size=3 * case.hidden, num_hidden_layers=4,
        num_attention_heads=case.hidden // 32, max_position_embeddings=512, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    directory = Path(folder) / "model"
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def show(results: list[Result]) -> str:
    ms = lambda seconds: middle([1000 * s for s in seconds], 0)
    per_second = lambda seconds: f"{B * G * len(seconds) / sum(seconds):.0f}"
    last = lambda r, rewards: f"{statistics.fmean(rewards[-10:]):.2f}" if r.real_rewards else "–"
    headers = [
        "case", "parameters", "ours, samples/s", "TRL, samples/s", "ratio", "ratio of CPU time", "ours, ms a step",
        "of it sampling, scoring", "TRL, ms a step", "groups trained on", "reward of last 10, ours", "TRL",
    ]  # fmt: skip
    rows = [
        [
            r.case, f"{r.parameters:,}", per_second(r.ours_seconds), per_second(r.trl_seconds),
            f"{r.ratio():.2f}", f"{r.ratio(cpu=True):.2f}", ms(r.ours_seconds), ms(r.ours_generate_seconds), ms(r.trl_seconds),
            f"{statistics.fmean(r.ours_useful_groups):.0%}", last(r, r.ours_reward), last(r, r.trl_reward),
        ]
        for r in results
    ]  # fmt: skip
    return table(headers, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few steps, without the larger model; under a minute")
    parser.add_argument("--json", type=Path, help="write the same as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    steps = 15 if args.quick else 80
    cases = [
        Case("embedded policy, real rewards", steps, 8, True),
        Case("embedded policy, every group useful", steps, 8, False),
    ]
    if not args.quick:
        cases.append(Case("random Llama, 256 wide, every group useful", 12, 32, False, hidden=256))
        cases.append(Case("the same, long prompts", 12, 32, False, hidden=256, long_prompts=True))
    with Scorer() as scorer:
        results = [run(case, scorer) for case in cases]
    print(heading(f"trainer: local step against TRL {trl.__version__} GRPOTrainer"))
    print(show(results))
    if args.json:
        write_json(args.json, [asdict(r) | {"ratio": r.ratio(), "ratio_cpu": r.ratio(cpu=True), "trl": trl.__version__} for r in results])


if __name__ == "__main__":
    main()
