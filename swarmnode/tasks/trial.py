"""Questions, answers and rewards for `swarmnode task try`, judged in the scorer's sandbox."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmnode.errors import SwarmNodeError
from swarmnode.tasks.answers import extract
from swarmnode.tasks.client import Scored, Scorer
from swarmnode.tasks.registry import TASKS, TaskSpec, task_version
from swarmnode.tasks.seeds import evaluation_seed, task_seed
from swarmnode.tasks.verifiers import MAJORITY
from swarmnode.wire.messages import TaskRef

QUESTIONS = 10
_SWARM, _PEER = bytes(32), "nobody"
"""Swarm and peer of the trial questions. They do not exist, so a trial shows no question of a real
swarm."""


@dataclass(frozen=True)
class QuestionTrial:
    """One question and the rewards of answers to it."""

    prompt: str
    held_out: bool
    sampled: str | None
    """Answer of the policy; None without one."""
    cut: bool
    """True if the answer of the policy was cut at the length limit."""
    answer: str | None
    """Part of the sampled answer that is judged."""
    reward: float | None
    """Reward of the sampled answer."""
    empty: float
    """Reward of an empty answer."""
    error: str
    """Error of the task's own code, with file and line; empty without one."""
    right: str | None = None
    """The right answer; None if the task does not have one."""
    right_reward: float | None = None
    """Reward of a completion with the right answer, marked as the task expects it."""
    arguments: tuple[str, ...] = ()
    """Names of the arguments that the owner's reward function receives."""


@dataclass(frozen=True)
class EpisodeTrial:
    """One episode that the operator or a script played."""

    prompt: str
    held_out: bool
    actions: tuple[str, ...]
    observations: tuple[str, ...]
    done: bool
    """False if the player left before the end."""
    reward: float
    error: str
    """Error of the task's own code, with file and line; empty without one."""


def play_episode(
    task: str, number: int, act: Callable[[Sequence[str]], str | None]
) -> EpisodeTrial:
    """Play an episode of `task`; a held-out one if `number` is odd.

    Args:
        act: All texts of the environment so far → the next action, or None to leave.

    Raises:
        TaskUnknown: This node cannot regenerate the question.
        ScorerFailed: The scorer child failed.
    """
    ref, actions = _make_ref(task, number), list[str]()
    with Scorer() as scorer:
        scored = scorer.score(ref, [actions])
        while not scored.episodes[0].done:
            action = act([scored.prompt, *scored.episodes[0].observations])
            if action is None:
                break
            actions.append(action)
            scored = scorer.score(ref, [actions])
    (episode,) = scored.episodes
    return EpisodeTrial(
        scored.prompt,
        bool(number % 2),
        tuple(actions),
        tuple(episode.observations),
        episode.done,
        scored.rewards[0],
        scored.error,
    )


def _make_ref(task: str, number: int) -> TaskRef:
    """Return question `number`; questions with an odd number are held out."""
    seed, index = task_seed(_SWARM, _PEER, number, task)
    seed = evaluation_seed(task) if number % 2 else seed
    return TaskRef(task, task_version(task), seed, index)


def try_task(
    task: str,
    sample: Callable[[Sequence[str]], Sequence[tuple[str, str]]] | None,
    count: int = QUESTIONS,
) -> list[QuestionTrial]:
    """Ask `count` questions of `task`, half of them held out. For each question judge an empty
    answer, the right answer if the task has one, and the answer of `sample`.

    Args:
        sample: Returns (answer, finish) for each prompt.

    Raises:
        TaskUnknown: This node cannot regenerate a question.
        ScorerFailed: The scorer child failed.
    """
    spec = TASKS[task]
    refs = [_make_ref(task, number) for number in range(count)]
    with Scorer() as scorer:
        asked = scorer.score_many([(ref, []) for ref in refs], reveal=True)
        rights = [
            result.answer or None
            if isinstance(result, Scored) and spec.generator not in ("json_schema", MAJORITY)
            else None
            for result in asked
        ]
        prompts = [result.prompt for result in asked if isinstance(result, Scored)]
        answers = iter(sample(prompts) if sample is not None and prompts else [])
        finished = [next(answers, None) if isinstance(result, Scored) else None for result in asked]
        sampled = [each[0] if each is not None else None for each in finished]
        cut = [each is not None and each[1] == "length" for each in finished]
        answers_to = [
            ["", *([marked(spec, right)] if right is not None else []), *([text] if text else [])]
            for right, text in zip(rights, sampled, strict=True)
        ]
        judged = scorer.score_many(list(zip(refs, answers_to, strict=True)))
    trials = []
    for number, (question, right, text, was_cut, result) in enumerate(
        zip(asked, rights, sampled, cut, judged, strict=True)
    ):
        prompt = question.prompt if isinstance(question, Scored) else ""
        held_out = bool(number % 2)
        if isinstance(result, SwarmNodeError):
            trials.append(
                QuestionTrial(prompt, held_out, text, was_cut, None, None, 0.0, str(result))
            )
            continue
        trials.append(
            QuestionTrial(
                prompt,
                held_out,
                text,
                was_cut,
                extract(text, spec.extract, spec.fallback) if text is not None else None,
                (result.rewards[-1] if text else result.rewards[0]) if text is not None else None,
                result.rewards[0],
                result.error,
                right,
                result.rewards[1] if right is not None else None,
                tuple(question.arguments) if isinstance(question, Scored) else (),
            )
        )
    return trials


def marked(spec: TaskSpec, right: str) -> str:
    """Return a completion with the right answer where `spec` looks for an answer."""
    if spec.generator == "choice":
        right = right.strip(" \t\n()[].:").upper()
    if spec.extract in ("auto", "tag"):
        return f"<answer>{right}</answer>"
    if spec.extract == "boxed":
        return f"\\boxed{{{right}}}"
    return right
