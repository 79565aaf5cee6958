"""Check of a question's reference, and preparation of its completions for the scorer child."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.tasks.answers import extract, has_text_after
from swarmnode.tasks.frames import CompletionText, Question, TaskUnknown
from swarmnode.tasks.registry import TASKS, TaskSpec, task_version
from swarmnode.tasks.seeds import is_address
from swarmnode.wire.limits import COMPLETIONS, TEXT_BYTES, TURNS
from swarmnode.wire.messages import TaskRef


def prepare(
    ref: TaskRef, completions: Sequence[CompletionText], *, reveal: bool = False
) -> Question:
    """Return the question for the child.

    The child receives only questions that this node can regenerate, and only the part of a
    completion that can earn a reward.

    Args:
        reveal: Return the right answer too.

    Raises:
        TaskUnknown: This node cannot regenerate the question.
        ValueError: There are more than 64 completions or 32 actions, or a completion has the wrong
            form for the task (one answer, or a list of actions).
    """
    spec = TASKS.get(ref.id)
    if spec is None:
        raise TaskUnknown("task", repr(ref.id))
    if ref.version != task_version(ref.id):
        raise TaskUnknown(
            "version", f"{ref.version!r} of {ref.id}, this node has {task_version(ref.id)!r}"
        )
    if not is_address(ref.seed, ref.index):
        raise TaskUnknown("address", f"seed {ref.seed}, index {ref.index}")
    if not 0 <= ref.difficulty < spec.levels:
        known = "0" if spec.levels == 1 else f"0 to {spec.levels - 1}"
        raise TaskUnknown("difficulty", f"{ref.difficulty} of {ref.id}, which has only {known}")
    if len(completions) > COMPLETIONS:
        raise ValueError(f"{len(completions)} completions, more than {COMPLETIONS}")
    answers = list[str | None]()
    episodes = list[list[str | None]]()
    for completion in completions:
        if isinstance(completion, str) != (spec.turns == 1):
            wanted = "an answer" if spec.turns == 1 else "a list of actions"
            raise ValueError(f"a completion of {ref.id} is {wanted}")
        if isinstance(completion, str):
            answers.append(_sendable(completion, spec))
        elif len(completion) > TURNS:
            raise ValueError(f"{len(completion)} actions, more than {TURNS}")
        else:
            episodes.append([_sendable(action, spec) for action in completion])
    return Question(ref.id, ref.seed, ref.index, answers, ref.difficulty, reveal, episodes)


def _sendable(text: str, spec: TaskSpec) -> str | None:
    if len(text) > TEXT_BYTES:
        return None
    if spec.nothing_after and has_text_after(text, spec.extract):
        return None
    answer = extract(text, spec.extract, spec.fallback)
    try:
        return answer if len(answer.encode()) <= spec.max_answer_bytes else None
    except UnicodeEncodeError:  # a lone surrogate, which no UTF-8 text contains
        return None
