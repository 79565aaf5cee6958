"""What a scorer client counts."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.tasks.child import Child
from swarmnode.tasks.frames import Question, ScorerFailed, TaskUnknown


@dataclass(frozen=True, slots=True)
class ScorerStatistics:
    """A client's counters since it was made, and its child as it is now."""

    pid: int | None
    """The child's, None between two children."""
    layers: tuple[str, ...]
    """Active sandbox layers, of `sandbox.LAYERS`."""
    frames: int
    """Requests answered."""
    groups: int
    completions: int
    not_looked_at: int
    """Completions too long or unencodable, counted in `completions` too; reward 0."""
    unknown: int
    """Questions that could not be regenerated."""
    starts: int
    failures: int
    """Times that the child died, overran or did not start."""
    waiting: int
    """Questions in the queue."""
    last_failure: str


class Tally:
    """Mutable counters behind ScorerStatistics."""

    def __init__(self) -> None:
        self._frames = self._groups = self._completions = self._not_looked_at = self._unknown = self._starts = self._failures = 0
        self._last_failure = ""

    def frame(self, questions: list[Question]) -> None:
        self._frames += 1
        self._groups += len(questions)
        for question in questions:
            self._completions += len(question.answers)
            self._not_looked_at += question.answers.count(None)

    def unknown(self, error: TaskUnknown) -> TaskUnknown:
        self._unknown += 1
        return error

    def started(self) -> None:
        self._starts += 1

    def failure(self, error: Exception, ending: str, *, starting: bool = False) -> ScorerFailed:
        """Count it and say it in one line: what we saw, then how the child ended and its last words."""
        self._failures += 1
        self._last_failure = f"the scorer {'did not start' if starting else 'was replaced'}: {error}{'; ' + ending if ending else ''}"
        return ScorerFailed(self._last_failure)

    def snapshot(self, child: Child | None, waiting: int) -> ScorerStatistics:
        return ScorerStatistics(
            pid=child.pid if child else None,
            layers=child.layers if child else (),
            frames=self._frames,
            groups=self._groups,
            completions=self._completions,
            not_looked_at=self._not_looked_at,
            unknown=self._unknown,
            starts=self._starts,
            failures=self._failures,
            waiting=waiting,
            last_failure=self._last_failure,
        )
