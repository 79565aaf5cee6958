"""Held-out reward. The questions are the same for every node and every evaluation, from seeds that
training never draws."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import msgspec

from swarmnode.config import TaskConfig, TrainingConfig
from swarmnode.drops import DropTally, TrainerDrops
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.generate import GroupSample, SampledCompletion, Sampling
from swarmnode.policy.logprobs import Row
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.trainer.engine import Engine
from swarmnode.trainer.episodes import answer_all, judged_text, sampled_tokens
from swarmnode.trainer.state import Counters
from swarmnode.wire.messages import TaskRef

ANSWERS, SMALL_ANSWERS = 64, 16
"""Answers per task of a full evaluation, if there are fewer questions, and of a small one. More
questions with one answer each have a smaller standard error than fewer questions with several."""
MOST_ANSWERS = 4
"""Maximum number of answers to one question."""
GENERATOR_SEED = 20_260
STEPS_BETWEEN, TOKEN_SHARE = 10, 0.05
"""Steps between two evaluations, and the share of all sampled tokens above which only small ones
follow, if `training.eval_every` is not set."""
ROWS_TOGETHER, ROWS_ON_CPU = 64, 32
"""Answers that are sampled together. A long evaluation reports its progress between two batches. A
CPU gains little from larger ones."""

Size = Literal["full", "small"]
"""A small evaluation asks the first questions of each task once. Its error is larger."""


def evaluation_due(cfg: TrainingConfig, counters: Counters) -> Size | None:
    """Return the size of the held-out evaluation that follows this step; None if none does.

    Without a budget for a full one, small ones follow when the number of steps has doubled since
    the last: after 10, 20, 40 and 80 steps.
    """
    step = counters.step
    if step % (cfg.eval_every or STEPS_BETWEEN):
        return None
    if cfg.eval_every or counters.evaluation_tokens_total <= TOKEN_SHARE * counters.tokens_total:
        return "full"
    return "small" if step >= 2 * (counters.reward_held_out_step or 0) else None


def forget_other_questions(counters: Counters, questions: str) -> None:
    """Reset the held-out rewards if they were measured on other questions than `questions`.

    The tasks change with a successor of the swarm, or in the configuration. A state of an earlier
    version does not name its questions, and keeps its rewards.
    """
    if counters.held_out_questions not in ("", questions):
        counters.reward_held_out = counters.reward_held_out_error = None
        counters.reward_held_out_start = counters.reward_held_out_start_error = None
        counters.reward_held_out_step = None
    counters.held_out_questions = questions


def held_out_refs(task: str, count: int) -> list[TaskRef]:
    """Return the first `count` held-out questions of a task, or all if a dataset has fewer."""
    version, seed = task_version(task), evaluation_seed(task)
    if (rows := TASKS[task].rows) is not None:
        # A repeated question would count as an independent one in the standard error.
        count = min(count, rows.held_out)
    return [TaskRef(task, version, seed, i) for i in range(count)]


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of `values`; None for fewer than two.

    The completions of one question are not independent: take the mean of each question first.
    """
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(
        math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
    )


@dataclass(frozen=True)
class HeldOutReward:
    """A held-out reward."""

    reward: float
    """Mean over the questions."""
    error: float | None
    """Its standard error over the questions; None with one question."""
    task: str
    """Task of the first question. The following fields are of this question."""
    prompt: str
    completions: Sequence[SampledCompletion]
    rewards: Sequence[float]


class Evaluation:
    """Evaluation on held-out questions.

    The questions are generated once. Every evaluation samples with the same random numbers.
    """

    def __init__(
        self,
        tasks: TaskConfig,
        training: TrainingConfig,
        scorer: Scorer,
        drops: DropTally | None = None,
    ) -> None:
        self._drops = drops or TrainerDrops().held_out
        self._training = training
        self._answers = max(1, min(MOST_ANSWERS, ANSWERS // tasks.held_out_per_task))
        self._scorer = scorer
        by_task = [held_out_refs(name, tasks.held_out_per_task) for name in tasks.names]
        # The tasks take turns, so that the first questions are a sample of all.
        self._refs = [ref for turn in zip_longest(*by_task) for ref in turn if ref is not None]
        self._small = SMALL_ANSWERS * len(by_task)
        asked = (self._refs, self._answers, training.temperature, training.max_completion_length)
        self.questions = hashlib.sha256(msgspec.msgpack.encode(asked)).hexdigest()[:8]
        """Name of the questions and of how they are asked. Rewards under two names are not
        comparable."""
        questions = scorer.score_many([(ref, []) for ref in self._refs])
        self._prompts: list[str | None] = []
        for ref, question in zip(self._refs, questions, strict=True):
            if isinstance(question, Scored):
                self._prompts.append(question.prompt)
            else:
                self._prompts.append(None)
                self._drops.drop("no_question", task=ref.id, error=str(question))

    def __call__(
        self,
        engine: Engine,
        counters: Counters,
        size: Size = "full",
        report: Callable[[int, int], None] = lambda done, count: None,
        enough: Callable[[], bool] = lambda: False,
    ) -> HeldOutReward | None:
        """Return the held-out reward at the training temperature; None if no question could be
        scored. Adds the sampled tokens to `counters`.

        Args:
            report: Called with the number of finished answers and that of all answers.
            enough: Returns True to end the evaluation with the questions that are answered. Called
                after each batch.
        """
        answers, count = (1, self._small) if size == "small" else (self._answers, len(self._refs))
        asked = [
            (ref, prompt)
            for ref, prompt in zip(self._refs[:count], self._prompts[:count], strict=True)
            if prompt is not None and engine.text.fits(prompt)
        ]
        cfg = self._training
        generator = engine.random_generator(GENERATOR_SEED)
        sampling = Sampling(answers, cfg.max_completion_length, cfg.temperature, cfg.top_p)
        lockstep = Lockstep(
            lambda prompts, count: engine.generate(
                prompts, sampling.with_generations(count), generator
            )
        )
        answered: list[GroupSample | None] = []
        rows = ROWS_ON_CPU if engine.statistics().device == "cpu" else ROWS_TOGETHER
        while len(answered) < len(asked):
            report(len(answered) * answers, len(asked) * answers)
            some = asked[len(answered) :][: max(1, rows // answers)]
            answered += answer_all(lockstep, engine.text, self._scorer, some)
            if enough():
                asked = asked[: len(answered)]
        for (ref, _), sample in zip(asked, answered, strict=True):
            if sample is None:
                self._drops.drop("not_scored", task=ref.id, error="its environment failed")
        asked = [each for each, sample in zip(asked, answered, strict=True) if sample is not None]
        groups = [sample for sample in answered if sample is not None]
        # An untrained node has no other own completions for its probe.
        engine.remember(
            [],
            [
                Row(group.prompt_ids, c.ids, c.sampled)
                for group in groups
                for c in group.completions
            ],
        )
        tokens = sum(sampled_tokens(c) for group in groups for c in group.completions)
        counters.tokens_total += tokens
        counters.evaluation_tokens_total += tokens
        scored = self._scorer.score_many(
            [
                (ref, [judged_text(c) for c in group.completions])
                for (ref, _), group in zip(asked, groups, strict=True)
            ]
        )
        judged = []
        for (ref, prompt), group, result in zip(asked, groups, scored, strict=True):
            if isinstance(result, Scored) and result.rewards:
                judged.append((ref.id, prompt, group.completions, result.rewards))
            else:
                self._drops.drop("not_scored", task=ref.id, error=str(result))
        self._drops.keep(len(judged))
        if not judged:
            return None
        means = [math.fsum(rewards) / len(rewards) for *_, rewards in judged]
        return HeldOutReward(math.fsum(means) / len(means), standard_error(means), *judged[0])
