"""Counters of a scorer client."""

from __future__ import annotations

from collections import Counter

import msgspec

from swarmnode.tasks.child import Child
from swarmnode.tasks.frames import (
    Question,
    QuestionFailed,
    Scored,
    ScoreError,
    ScorerFailed,
    TaskUnknown,
)


class ScorerStatistics(msgspec.Struct, frozen=True):
    """Counters of a client since its creation, and the present state of its child."""

    pid: int | None = None
    """Pid of the child; None while no child runs."""
    layers: tuple[str, ...] = ()
    """Active sandbox layers (`sandbox.LAYERS`)."""
    frames: int = 0
    """Answered requests."""
    groups: int = 0
    completions: int = 0
    skipped: int = 0
    """Completions that were too long or unencodable. They are part of `completions`, and their
    reward is 0.
    """
    unknown: int = 0
    """Questions that could not be regenerated."""
    starts: int = 0
    failures: int = 0
    """Children that died, exceeded a deadline or did not start."""
    waiting: int = 0
    """Questions in the queue."""
    last_failure: str = ""
    reward_errors: dict[str, int] = {}
    """Task → completions whose reward raised an exception or was no number from 0 to 1, and
    questions that could not be made.
    """
    last_reward_error: str = ""
    """Last such error in one line, starting with the task."""


class Tally:
    """Mutable counters behind ScorerStatistics."""

    def __init__(self) -> None:
        self._frames = self._groups = self._completions = self._skipped = self._unknown = (
            self._starts
        ) = self._failures = 0
        self._last_failure = ""
        self._reward_errors: Counter[str] = Counter()
        self._last_reward_error = ""

    def frame(self, questions: list[Question], scored: list[Scored]) -> list[Scored | ScoreError]:
        """Count a frame and return its results. A question that could not be made has the result
        QuestionFailed.
        """
        self._frames += 1
        self._groups += len(questions)
        results: list[Scored | ScoreError] = []
        for question, result in zip(questions, scored, strict=True):
            self._completions += len(question.answers) + len(question.actions)
            self._skipped += question.answers.count(None)
            self._skipped += sum(None in actions for actions in question.actions)
            if result.error:
                self._reward_errors[question.task] += result.errors or 1
                self._last_reward_error = f"{question.task}: {result.error}"
            results.append(
                result
                if result.prompt
                else QuestionFailed(f"{question.task} made no question: {result.error}")
            )
        return results

    def unknown(self, error: TaskUnknown) -> TaskUnknown:
        self._unknown += 1
        return error

    def started(self) -> None:
        self._starts += 1

    def failure(self, error: Exception, ending: str, *, starting: bool = False) -> ScorerFailed:
        """Count a failure and describe it in one line: the observed error, how the child ended, and
        the end of its standard error.
        """
        self._failures += 1
        self._last_failure = (
            f"the scorer {'did not start' if starting else 'was replaced'}:"
            f" {error}{'; ' + ending if ending else ''}"
        )
        return ScorerFailed(self._last_failure)

    def snapshot(self, child: Child | None, waiting: int) -> ScorerStatistics:
        return ScorerStatistics(
            pid=child.pid if child else None,
            layers=child.layers if child else (),
            frames=self._frames,
            groups=self._groups,
            completions=self._completions,
            skipped=self._skipped,
            unknown=self._unknown,
            starts=self._starts,
            failures=self._failures,
            waiting=waiting,
            last_failure=self._last_failure,
            reward_errors=dict(self._reward_errors),
            last_reward_error=self._last_reward_error,
        )
