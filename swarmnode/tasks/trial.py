"""What `swarmnode task try` shows: some questions of a task, and what answers to them are worth,
judged where they will be judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmnode.errors import SwarmNodeError
from swarmnode.tasks.answers import extract
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.seeds import evaluation_seed, task_seed
from swarmnode.wire.messages import TaskRef

QUESTIONS = 10
_SWARM, _PEER = bytes(32), "nobody"
"""Whose questions are tried: nobody's, so that nothing of a swarm is looked at before it is
asked."""


@dataclass(frozen=True)
class Tried:
    """One question and the rewards of answers to it."""

    prompt: str
    held_out: bool
    sampled: str | None
    """What the policy answered; None where it was not asked."""
    answer: str | None
    """The part of it that is judged."""
    reward: float | None
    """What the sampled answer earned."""
    empty: float
    """Reward of an empty answer."""
    error: str
    """What went wrong in the task's own code, with file and line."""


def try_task(
    task: str, sample: Callable[[Sequence[str]], Sequence[str]] | None, count: int = QUESTIONS
) -> list[Tried]:
    """Ask `count` questions of `task`, half of them held out, and judge an empty answer to each and
    what `sample` answers.

    Raises TaskUnknown, ScorerFailed.
    """
    spec, version = TASKS[task], task_version(task)
    refs = []
    for number in range(count):
        seed, index = task_seed(_SWARM, _PEER, number)
        refs.append(TaskRef(task, version, evaluation_seed(task) if number % 2 else seed, index))
    with Scorer() as scorer:
        asked = scorer.score_many([(ref, []) for ref in refs])
        prompts = [result.prompt for result in asked if isinstance(result, Scored)]
        answers = iter(sample(prompts) if sample is not None and prompts else [])
        sampled = [next(answers, None) if isinstance(result, Scored) else None for result in asked]
        judged = scorer.score_many(
            [
                (ref, ["", text] if text is not None else [""])
                for ref, text in zip(refs, sampled, strict=True)
            ]
        )
    tried = []
    for number, (question, text, result) in enumerate(zip(asked, sampled, judged, strict=True)):
        prompt = question.prompt if isinstance(question, Scored) else ""
        if isinstance(result, SwarmNodeError):
            tried.append(Tried(prompt, bool(number % 2), text, None, None, 0.0, str(result)))
            continue
        answer = extract(text, spec.extract, spec.fallback) if text is not None else None
        reward = result.rewards[1] if text is not None else None
        tried.append(
            Tried(prompt, bool(number % 2), text, answer, reward, result.rewards[0], result.error)
        )
    return tried
