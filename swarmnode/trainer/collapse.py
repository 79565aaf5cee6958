"""Warns when a majority vote rewards one answer to every question.

The verifier `majority` has no right answers. A policy earns all of its reward with an answer that
does not depend on the question, and held-out rows without right answers show nothing of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from swarmnode.rollouts.groups import OwnGroup
from swarmnode.tasks.answers import extract
from swarmnode.tasks.registry import TASKS
from swarmnode.tasks.verifiers import MAJORITY, ballot

WINDOW = 64
"""Number of latest own groups whose winning answers are compared."""
FEWEST = 32
"""Least number of winning answers for a report."""


class WinningAnswers:
    """Winning answers of the node's latest groups that were judged by vote."""

    def __init__(self) -> None:
        self._latest: deque[str] = deque(maxlen=WINDOW)

    def sampled(self, groups: Sequence[OwnGroup]) -> None:
        """Add the own groups of a step. Groups of other verifiers are ignored."""
        for group in groups:
            spec = TASKS.get(group.task.id)
            if spec is None or spec.generator != MAJORITY or not any(group.rewards):
                continue
            winner = group.completions[group.rewards.index(max(group.rewards))]
            self._latest.append(ballot(extract(winner.text, spec.extract, spec.fallback)))

    @property
    def top_share(self) -> float | None:
        """Share of the winning answers that are the most frequent one; None with too few groups."""
        if len(self._latest) < FEWEST:
            return None
        ((_, count),) = Counter(self._latest).most_common(1)
        return count / len(self._latest)
