"""Questions, answers and rewards for `swarmnode task try`, judged in the scorer's sandbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swarmnode.errors import SwarmNodeError
from swarmnode.tasks.answers import extract
from swarmnode.tasks.client import Scored, ScoreError, Scorer
from swarmnode.tasks.registry import TASKS, TaskSpec, task_version
from swarmnode.tasks.seeds import evaluation_seed, task_seed
from swarmnode.wire.messages import TaskRef

QUESTIONS = 10
ANSWERS = 7
"""Answers of the policy to each question. Of 70 answers, one that occurs in 5 % is seen almost
certainly (97 %)."""
RIGHT_ANSWERS = 64
"""Questions whose right answers are judged."""
_SWARM, _PEER = bytes(32), "nobody"
"""Swarm and peer of the trial questions. They do not exist, so a trial shows no question of a real
swarm."""


Answers = Sequence[tuple[str, str]]
"""(text, finish) of each sampled answer to a question."""


@dataclass(frozen=True)
class QuestionTrial:
    """One question and the rewards of answers to it."""

    prompt: str
    held_out: bool
    sampled: str | None
    """First answer of the policy; None without one."""
    cut: bool
    """True if the first answer was cut at the length limit."""
    answer: str | None
    """Part of the first answer that is judged."""
    reward: float | None
    """Reward of the first answer."""
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
    row: str = ""
    """The dataset's row, for a reward function."""
    rewards: tuple[float, ...] = ()
    """Rewards of all answers of the policy."""
    cuts: tuple[bool, ...] = ()
    """True for each of these answers that was cut at the length limit."""
    refusals: tuple[str, ...] = ()
    """What the sandbox refused while the answers were judged."""


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
    refusals: tuple[str, ...] = ()
    """What the sandbox refused."""


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
    ref, actions, refusals = _make_ref(task, number), list[str](), set[str]()
    with Scorer() as scorer:
        scored = scorer.score(ref, [actions])
        refusals |= scored.refusals.keys()
        while not scored.episodes[0].done:
            action = act([scored.prompt, *scored.episodes[0].observations])
            if action is None:
                break
            actions.append(action)
            scored = scorer.score(ref, [actions])
            refusals |= scored.refusals.keys()
    (episode,) = scored.episodes
    return EpisodeTrial(
        scored.prompt,
        bool(number % 2),
        tuple(actions),
        tuple(episode.observations),
        episode.done,
        scored.rewards[0],
        scored.error,
        tuple(sorted(refusals)),
    )


def _make_ref(task: str, number: int) -> TaskRef:
    """Return question `number`; questions with an odd number are held out."""
    seed, index = task_seed(_SWARM, _PEER, number, task)
    seed = evaluation_seed(task) if number % 2 else seed
    return TaskRef(task, task_version(task), seed, index)


def try_task(
    task: str,
    sample: Callable[[Sequence[str]], Iterator[Answers]] | None,
    count: int = QUESTIONS,
) -> Iterator[QuestionTrial]:
    """Ask `count` questions of `task`, half of them held out. For each question judge an empty
    answer, the right answer if the task has one, and the answers of `sample`.

    Args:
        sample: Yields the answers to each prompt.

    Raises:
        TaskUnknown: This node cannot regenerate a question.
        ScorerFailed: The scorer child failed.
    """
    refs = [_make_ref(task, number) for number in range(count)]
    with Scorer() as scorer:
        asked = scorer.score_many([(ref, []) for ref in refs], reveal=True)
        prompts = [result.prompt for result in asked if isinstance(result, Scored)]
        sampled = sample(prompts) if sample is not None and prompts else iter(())
        for number, (ref, question) in enumerate(zip(refs, asked, strict=True)):
            answers = next(sampled, ()) if isinstance(question, Scored) else ()
            yield _judge(scorer, ref, bool(number % 2), question, answers)


def check_right_answers(task: str, count: int = RIGHT_ANSWERS) -> list[QuestionTrial]:
    """Judge the right answers of `count` questions, without answers of a policy."""
    return list(try_task(task, None, count))


def _judge(
    scorer: Scorer, ref: TaskRef, held_out: bool, question: Scored | ScoreError, answers: Answers
) -> QuestionTrial:
    spec, right = TASKS[ref.id], None
    if isinstance(question, Scored):
        right = question.answer or None
    texts = ["", *([marked(spec, right)] if right is not None else [])]
    first = len(texts)
    (result,) = scorer.score_many([(ref, [*texts, *(text for text, _ in answers)])])
    text, cut = (answers[0][0], answers[0][1] == "length") if answers else (None, False)
    if isinstance(question, SwarmNodeError) or isinstance(result, SwarmNodeError):
        prompt = question.prompt if isinstance(question, Scored) else ""
        return QuestionTrial(prompt, held_out, text, cut, None, None, 0.0, str(result))
    return QuestionTrial(
        question.prompt,
        held_out,
        text,
        cut,
        extract(text, *spec.place) if text is not None else None,
        result.rewards[first] if answers else None,
        result.rewards[0],
        result.error,
        right,
        result.rewards[1] if right is not None else None,
        tuple(question.arguments),
        question.row,
        tuple(result.rewards[first:]),
        tuple(finish == "length" for _, finish in answers),
        tuple({**question.refusals, **result.refusals}),
    )


def marked(spec: TaskSpec, right: str) -> str:
    """Return a completion with the right answer where `spec` looks for an answer."""
    if spec.generator == "choice":
        right = right.strip(" \t\n()[].:").upper()
    if spec.extract in ("auto", "tag"):
        return f"<answer>{right}</answer>"
    if spec.extract == "boxed":
        return f"\\boxed{{{right}}}"
    return right
