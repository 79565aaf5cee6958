"""Which stage keeps a crew from learning: a member that refuses step after step, or reports norms
that leave nothing of the others'. Pure.

The head counts. What one stage refuses now and then is nobody's fault; what it refuses again and
again is its own, and the crew goes on without it. A step that is taken makes up for a third of one
that was spoilt: who spoils more than a quarter is found. One that another spoils makes up for
nothing: two that spoil in turn would clear each other. A norm far above what the stage itself
reported before takes every other stage's part of the step away by clipping: that counts like a
refusal. Where two contradict each other both are blamed (`whereabouts.py`): one of them is bad, and
has others beside it elsewhere. One in the middle that contradicts both its neighbours is bad, or
both of them are: who was beside it is named with the verdict.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

PATIENCE: Final = 5
"""Steps that one stage spoils, one less for each `REDEEMED` that are taken meanwhile."""
REDEEMED: Final = 3
IMPATIENCE: Final = 2
"""Deadlines in a row that one stage lets pass before the first step: a crew that has never worked
is given up sooner."""
SLOWNESS: Final = 3
"""The same of one that says that it computes, while there can be less to compute."""
REMEMBERED: Final = 32
"""Norms of a stage."""
LEAST: Final = 8
"""Norms that must be known before one can be absurd."""
ABSURD: Final = 1e4
"""Times the median of a stage's squared norm."""
ALONE: Final = 1e8
"""Times the median of the other stages' squared norms: hardly anything of theirs is left where the
step is clipped by that. A stage with a head or an embedding may have some hundred times the norm of
one without."""


class Verdict(NamedTuple):
    stages: tuple[int, ...]
    """One of them is to blame."""
    reason: str
    seconds: float
    """Since one of them began to spoil steps: of these it has spoilt more than a quarter."""
    beside: tuple[int, ...] = ()
    """Others that contradict them: if these are right, all of those are bad."""


class Blame:
    """Counts for a crew of `stages`, at its head. Each call returns a verdict where there is one
    because of it."""

    def __init__(self, stages: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.verdict: Verdict | None = None
        """The first one."""
        self._clock = clock
        self._spoilt = [0] * stages
        """Steps, each counted as `REDEEMED`."""
        self._clean_at = [clock()] * stages
        """When a stage last had none to make up for."""
        self._beside: list[set[int]] = [set() for _ in range(stages)]
        """Whom each was blamed with, for those."""
        self._worked = False
        self._norms: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in range(stages)]

    def refused(self, stages: Collection[int], reason: str) -> Verdict | None:
        """One of `stages` has refused a step, or made the other refuse it."""
        return self._spoils(stages, f"refused step after step: {reason}", PATIENCE)

    def silent(self, stages: Collection[int]) -> Verdict | None:
        """Work was given up that did not come back in time, and one of these has it."""
        return self._spoils(
            stages, "no answer again and again", PATIENCE if self._worked else IMPATIENCE
        )

    def slow(self, stages: Collection[int], *, smallest: bool) -> Verdict | None:
        """As `silent`, of those who say that they compute. smallest: what cannot be cut further,
        and was waited for that much longer."""
        return self._spoils(stages, "too slow again and again", 1 if smallest else SLOWNESS)

    def ended(self, stages: Collection[int], why: str) -> Verdict | None:
        """Nothing can come of this crew any more, because of one of these."""
        return self._spoils(stages, why, 1)

    def taken(self, norms: Mapping[int, float]) -> Verdict | None:
        """A step was taken; `norms` are the squared norms by stage."""
        self._worked = True
        absurd = [
            stage
            for stage, norm in norms.items()
            if self._is_absurd(stage, norm) or _is_alone(stage, norms)
        ]
        for stage, norm in norms.items():
            if stage not in absurd:
                self._norms[stage].append(norm)
        if len(absurd) != 1:  # none, or all of them: a batch that is hard for everybody
            self._spoilt = [max(0, count - 1) for count in self._spoilt]
            for stage, count in enumerate(self._spoilt):
                if not count:
                    self._clean_at[stage] = self._clock()
                    self._beside[stage].clear()
            return None
        return self._spoils(absurd, "an absurd norm step after step", PATIENCE)

    def _spoils(self, stages: Collection[int], why: str, patience: int) -> Verdict | None:
        if not stages:
            return None
        for stage in stages:
            self._spoilt[stage] += REDEEMED
            self._beside[stage].update(stages)
        guilty = tuple(
            stage for stage in sorted(stages) if self._spoilt[stage] >= REDEEMED * patience
        )
        if not guilty:
            return None
        beside = set().union(*(self._beside[stage] for stage in guilty)) - set(guilty)
        verdict = Verdict(
            guilty,
            why,
            self._clock() - min(self._clean_at[stage] for stage in guilty),
            tuple(sorted(beside)),
        )
        self.verdict = self.verdict or verdict
        return verdict

    def _is_absurd(self, stage: int, norm: float) -> bool:
        known = self._norms[stage]
        return len(known) >= LEAST and norm > ABSURD * max(statistics.median(known), 1e-30)


def _is_alone(stage: int, norms: Mapping[int, float]) -> bool:
    """Whether one stage's norm leaves nothing of the others', from the first step on: it would be
    its own median."""
    others = [norm for other, norm in norms.items() if other != stage]
    return len(others) > 1 and norms[stage] > ALONE * statistics.median_low(others) > 0
