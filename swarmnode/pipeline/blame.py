"""Which stage keeps a crew from learning: a member that refuses step after step, or reports norms that leave nothing of the others'. Pure.

The head counts. What one stage refuses now and then is nobody's fault; what it refuses again and again, while no other does, is its own,
and the crew goes on without it. A step that is taken makes up for one that was spoilt, not for all: who lets every fifth pass is found too.
A norm far above what the stage itself reported before takes every other stage's part of the step away by clipping: that counts like a
refusal.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final

PATIENCE: Final = 5
"""Steps that one stage alone spoils, more than are taken meanwhile."""
IMPATIENCE: Final = 2
"""Deadlines in a row that one stage lets pass before the first step: a crew that has never worked is given up sooner."""
REMEMBERED: Final = 32
"""Norms of a stage."""
LEAST: Final = 8
"""Norms that must be known before one can be absurd."""
ABSURD: Final = 1e4
"""Times the median of a stage's squared norm."""


class Blame:
    """Counts for a crew of `stages`, at its head."""

    def __init__(self, stages: int) -> None:
        self._spoilt = [0] * stages
        self._worked = False
        self._norms: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in range(stages)]

    def refused(self, stage: int, reason: str) -> tuple[int, str] | None:
        """`stage` has refused a step. (stage, why) once that is too often."""
        return self._spoils(stage, f"refused step after step: {reason}", PATIENCE)

    def silent(self, stages: Collection[int]) -> tuple[int, str] | None:
        """A step was given up because these said nothing in time: the first of them, since the others wait for what it sends on."""
        return self._spoils(min(stages), "no answer again and again", PATIENCE if self._worked else IMPATIENCE) if stages else None

    def taken(self, norms: Mapping[int, float]) -> tuple[int, str] | None:
        """A step was taken; `norms` are the squared norms by stage. (stage, why) where one was absurd too often."""
        self._worked = True
        absurd = [stage for stage, norm in norms.items() if self._is_absurd(stage, norm)]
        for stage, norm in norms.items():
            if stage not in absurd:
                self._norms[stage].append(norm)
        if len(absurd) != 1:  # none, or all of them: a batch that is hard for everybody
            self._spoilt = [max(0, count - 1) for count in self._spoilt]
            return None
        return self._spoils(absurd[0], "an absurd norm step after step", PATIENCE)

    def _spoils(self, stage: int, why: str, patience: int) -> tuple[int, str] | None:
        self._spoilt = [count + 1 if i == stage else 0 for i, count in enumerate(self._spoilt)]
        return (stage, why) if self._spoilt[stage] >= patience else None

    def _is_absurd(self, stage: int, norm: float) -> bool:
        known = self._norms[stage]
        return len(known) >= LEAST and norm > ABSURD * max(statistics.median(known), 1e-30)
