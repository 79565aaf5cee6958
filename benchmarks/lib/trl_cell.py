"""TRL's GRPOTrainer in place of a node, with the settings, questions of the same task, adapter and
evaluations of the arm `alone` of `benchmarks.real`."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import torch
import transformers
import trl
from transformers import PrinterCallback, TrainerCallback, TrainerControl

from benchmarks.lib.real_cell import Arm, Cell, Row, Size
from benchmarks.lib.trl_setup import grpo_config
from benchmarks.lib.turns import ask, checked
from swarmnode.config import TrainingConfig
from swarmnode.policy import linear
from swarmnode.rollouts.groups import is_useful
from swarmnode.tasks.child import ScorerLimits
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import task_version
from swarmnode.tasks.seeds import task_seed
from swarmnode.wire.messages import TaskRef


def run_trl(name: str, seed: int, size: Size, directory: Path) -> Row:
    """Train one cell in a new process, because TRL is slower in a process with other models, and
    return its row."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run, name, seed, size, directory).result()


def _run(name: str, seed: int, size: Size, directory: Path) -> Row:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    linear.SMALLEST = sys.maxsize  # TRL's model has torch's own products
    with Scorer(ScorerLimits(request=300.0)) as scorer:
        return TrlCell(name, Arm(), seed, size, scorer, {}, {}, directory).run()


class TrlCell(Cell):
    """The policy and the evaluations are those of a node, which takes no step itself."""

    def train(self) -> None:
        (node,), size = self.swarm.nodes, self.size
        settings = size.settings(self.arm.members[0], self.arm, self.seed, self.directory)
        training = TrainingConfig.model_validate(settings["training"])
        count = size.steps * size.groups
        refs = [
            TaskRef(
                size.task, task_version(size.task), *task_seed(node.swarm.id, "trl", i, size.task)
            )
            for i in range(count)
        ]
        prompts = [
            node.policy.tokenizer.decode(
                node.policy.encode_prompt(prompt), skip_special_tokens=False
            )
            for prompt in ask(self.scorer, refs)
        ]
        watch = Watch(self)

        def reward(
            completions: list[str], number: list[int], completion_ids: list[list[int]], **_: Any
        ) -> list[float]:
            """Score B questions × G completions, in the order of TRL's sampler."""
            groups = range(0, len(completions), size.generations)
            answers = [(refs[number[i]], completions[i : i + size.generations]) for i in groups]
            rewards = [one.rewards for one in checked(self.scorer.score_many(answers))]
            watch.sampled(rewards, sum(map(len, completion_ids)))
            return [each for group in rewards for each in group]

        folder = str(self.directory / "trl")
        trainer = trl.GRPOTrainer(
            node.policy.model,
            reward,
            grpo_config(folder, training, steps=size.steps, seed=self.seed),
            datasets.Dataset.from_dict({"prompt": prompts, "number": list(range(count))}),
            processing_class=node.policy.tokenizer,
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class Watch(TrainerCallback):  # type: ignore[misc]
    """Measures TRL's steps like those of a node, and evaluates its policy."""

    def __init__(self, cell: TrlCell) -> None:
        self._cell = cell
        self._record: dict[str, float] = {}
        self._started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._started = time.process_time()

    def sampled(self, rewards: list[list[float]], tokens: int) -> None:
        self._record = {
            "own": len(rewards),
            "external": 0,
            "tokens": tokens,
            "reward": fmean(map(fmean, rewards)),
            "silent": fmean(not is_useful(group) for group in rewards),
            "sampling": time.process_time() - self._started,
            "judging": 0.0,
        }

    def on_step_end(
        self, args: Any, state: Any, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        spent = time.process_time() - self._started
        self._record["update"] = spent - self._record["sampling"]
        self._cell.steps[0].append(self._record)
        if self._cell.after_step():
            control.should_training_stop = True
        return control
