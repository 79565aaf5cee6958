"""Regenerates questions and judges answers in a sandboxed child. `Scorer` blocks (for the trainer);
`AsyncScorer` is for trio (the network process).

Both replace a child that dies or exceeds its deadline, and retry the questions of its frame one by
one. Only the question that caused the failure has no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from swarmnode.errors import ConfigError
from swarmnode.tasks.async_client import AsyncScorer
from swarmnode.tasks.environments import Environments, is_remote
from swarmnode.tasks.frame_scorer import FrameScorer
from swarmnode.tasks.frames import (
    FRAME_GROUPS,
    CompletionText,
    Question,
    Scored,
    ScoreError,
    ScorerFailed,
    TaskUnknown,
)
from swarmnode.tasks.questions import prepare
from swarmnode.tasks.registry import TASKS, changed_settings, encode_tasks, task_version
from swarmnode.tasks.tally import ScorerStatistics
from swarmnode.wire.messages import TaskRef

__all__ = [
    "AsyncScorer",
    "ScoreError",
    "Scored",
    "Scorer",
    "ScorerFailed",
    "ScorerStatistics",
    "TaskUnknown",
    "check_tasks",
]


class Scorer(FrameScorer):
    """A scorer child for threads that loads all tasks of this process. It scores questions of
    environment servers itself. The arguments are those of `FrameScorer`.
    """

    def __init__(
        self,
        *,
        deadline: float = 10.0,
        cpu_seconds: int = 2,
        startup_seconds: float = 60.0,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            encode_tasks,
            deadline=deadline,
            cpu_seconds=cpu_seconds,
            startup_seconds=startup_seconds,
            alive=alive,
        )
        self._environments = Environments(alive)

    def prompt(self, ref: TaskRef) -> str:
        """Return the question's text.

        Raises:
            TaskUnknown: This node cannot regenerate the question.
            ScorerFailed: The child failed.
        """
        return self.score(ref, []).prompt

    def score(self, ref: TaskRef, completions: Sequence[CompletionText]) -> Scored:
        """Return the question's text and a reward in [0, 1] for each completion.

        Args:
            completions: At most 64. For an episode task, a completion is the list of its actions so
                far.

        Raises:
            TaskUnknown: This node cannot regenerate the question.
            ScorerFailed: The child failed.
            ValueError: As `questions.prepare` raises it.
        """
        (result,) = self.score_many([(ref, completions)])
        if isinstance(result, Exception):
            raise result
        return result

    def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[CompletionText]]], *, reveal: bool = False
    ) -> list[Scored | ScoreError]:
        """Score several questions and return their results in order. The error of one question
        takes the place of its result and does not affect the other questions.

        Args:
            reveal: Return the right answers too.

        Raises:
            ValueError: As `questions.prepare` raises it.
        """
        results: list[Scored | ScoreError | None] = [None] * len(items)
        asked: list[tuple[int, Question]] = []
        for place, (ref, completions) in enumerate(items):
            try:
                asked.append((place, prepare(ref, completions, reveal=reveal)))
            except TaskUnknown as error:
                results[place] = self._tally.unknown(error)
        with self._lock:
            if remote := [(place, question) for place, question in asked if is_remote(question)]:
                questions = [question for _, question in remote]
                for (place, _), result in zip(
                    remote,
                    self._tally.frame(questions, self._environments.judge(questions)),
                    strict=True,
                ):
                    results[place] = result
                asked = [(place, question) for place, question in asked if not is_remote(question)]
            for start in range(0, len(asked), FRAME_GROUPS):
                part = asked[start : start + FRAME_GROUPS]
                for (place, _), result in zip(
                    part, self._ask([question for _, question in part]), strict=True
                ):
                    results[place] = result
        return [result for result in results if result is not None]


def check_tasks(names: Iterable[str]) -> None:
    """Load the owner's tasks and the games among `names` once in the sandbox. This reports a defect
    of code, data or settings in one line before the node starts.

    Raises:
        ConfigError: A task cannot be loaded.
        Unavailable: A game's library is not installed.
    """
    specs = [TASKS[name] for name in names if name in TASKS]
    for spec in specs:
        if spec.turns > 1:
            task_version(spec.id)
    changed = changed_settings()
    if any(spec.kind in ("own", "dataset", "game") or spec.id in changed for spec in specs):
        try:
            with Scorer():
                pass
        except ScorerFailed as error:
            raise ConfigError(str(error)) from None
