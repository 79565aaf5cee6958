"""Held-out reward. The questions are the same for every node and every evaluation, from seeds that
training never draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.config import TaskConfig, TrainingConfig
from swarmnode.drops import DropTally, TrainerDrops
from swarmnode.policy.engine.lockstep import Lockstep
from swarmnode.policy.generate import Sampling
from swarmnode.policy.logprobs import Row
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.trainer.engine import Engine
from swarmnode.trainer.episodes import answer_all, judged_text, sampled_tokens
from swarmnode.trainer.state import Counters
from swarmnode.wire.messages import TaskRef

COMPLETIONS = 4
"""Completions per question."""
GENERATOR_SEED = 20_260
STEPS_BETWEEN, TOKEN_SHARE = 10, 0.05
"""Steps between two evaluations, and the largest share of all sampled tokens that evaluations take,
if `training.eval_every` is not set."""


def evaluation_due(cfg: TrainingConfig, counters: Counters) -> bool:
    """Return True if a held-out evaluation follows this step."""
    if cfg.eval_every:
        return counters.step % cfg.eval_every == 0
    has_budget = counters.evaluation_tokens_total <= TOKEN_SHARE * counters.tokens_total
    return counters.step % STEPS_BETWEEN == 0 and has_budget


def held_out_refs(task: str, count: int) -> list[TaskRef]:
    """Return the first `count` held-out questions of a task, or all if a dataset has fewer. They
    cycle through the task's difficulties."""
    version, seed, levels = task_version(task), evaluation_seed(task), TASKS[task].levels
    if (rows := TASKS[task].rows) is not None:
        # A repeated question would count as an independent one in the standard error.
        count = min(count, rows.held_out)
    return [TaskRef(task, version, seed, i // levels, i % levels) for i in range(count)]


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
        self._scorer = scorer
        self._refs = [
            ref for name in tasks.names for ref in held_out_refs(name, tasks.held_out_per_task)
        ]
        questions = scorer.score_many([(ref, []) for ref in self._refs])
        self._prompts: list[str | None] = []
        for ref, question in zip(self._refs, questions, strict=True):
            if isinstance(question, Scored):
                self._prompts.append(question.prompt)
            else:
                self._prompts.append(None)
                self._drops.drop("no_question", task=ref.id, error=str(question))

    def __call__(self, engine: Engine, counters: Counters) -> HeldOutReward | None:
        """Return the held-out reward at the training temperature; None if no question could be
        scored. Adds the sampled tokens to `counters`."""
        asked = [
            (ref, prompt)
            for ref, prompt in zip(self._refs, self._prompts, strict=True)
            if prompt is not None and engine.text.fits(prompt)
        ]
        cfg = self._training
        generator = engine.random_generator(GENERATOR_SEED)
        sampling = Sampling(COMPLETIONS, cfg.max_completion_length, cfg.temperature, cfg.top_p)
        lockstep = Lockstep(
            lambda prompts, count: engine.generate(
                prompts, sampling.with_generations(count), generator
            )
        )
        answered = answer_all(lockstep, engine.text, self._scorer, asked)
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
        rewards = []
        for (ref, _), result in zip(asked, scored, strict=True):
            if isinstance(result, Scored) and result.rewards:
                rewards.append(sum(result.rewards) / len(result.rewards))
            else:
                self._drops.drop("not_scored", task=ref.id, error=str(result))
        self._drops.keep(len(rewards))
        if not rewards:
            return None
        return HeldOutReward(sum(rewards) / len(rewards), standard_error(rewards))
