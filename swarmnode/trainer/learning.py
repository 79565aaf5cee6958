"""Watches whether a run learns.

    unmoved     the mean reward of the latest WINDOW steps is not 1.5 standard errors above that of
                the first START steps
    collapsed   it is below half of the best mean of WINDOW steps, by four standard errors

Only steps with an update count; the groups of a step without one are added to the next.
docs/learning.md, "A run that does not learn", has the rates of false alarms.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnode.config import Config
from swarmnode.model_defaults import ModelDefaults

START, WINDOW, LEAST = 5, 10, 20
"""Steps with an update: in the mean of the start, in a later mean, and before the first verdict on
an unmoved reward. A fast run learns much within ten steps, so that the start is shorter."""
RISE_ERRORS, FALL_ERRORS = 1.5, 4.0
"""Standard errors of a rise that counts as learning, and of a fall that counts as a collapse. The
latter is larger, because the best of many means is high by chance."""
FALL_SHARE = 0.5
"""Share of the best mean below which the reward has collapsed."""
SOLVED = 0.8
"""Mean reward from which little is left to learn."""
REMEDY_FACTOR = 3.0
"""Factor of the learning rate that is advised for an unmoved reward, and its inverse after a
collapse."""
HIGHEST_REMEDY = 2.0
"""Largest factor of the default that is advised."""


@dataclass(frozen=True)
class Verdict:
    kind: str = ""
    """`unmoved`, `collapsed`, or empty for a run that may be learning."""
    text: str = ""
    """Problem and remedy for the operator, in one line."""


@dataclass
class Window:
    """Rewards, entropies and shares of cut answers of some steps."""

    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    entropies: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    cuts: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, reward: float, entropy: float | None, cut: float) -> None:
        self.rewards.append(reward)
        self.cuts.append(cut)
        if entropy is not None:
            self.entropies.append(entropy)

    def copy(self) -> Window:
        return Window(self.rewards.copy(), self.entropies.copy(), self.cuts.copy())

    @property
    def is_full(self) -> bool:
        return len(self.rewards) == WINDOW

    @property
    def reward(self) -> float:
        return statistics.fmean(self.rewards)


class LearningWatch:
    """Judges a run by the rewards of its own groups."""

    def __init__(self, config: Config) -> None:
        self._defaults, self._rate = config.model_defaults, config.training.learning_rate
        self._first: list[float] | None = None
        """Rewards of the first steps of the run; None if its start is not known, or once the reward
        has risen."""
        self._latest, self._best = Window(), Window()
        self._pending: list[float] = []
        """Mean rewards of the groups since the last update."""
        self._steps = 0

    def start(self, fresh: bool) -> None:
        """Begin with the next step.

        Args:
            fresh: True if the policy has not been trained before. An unmoved reward is reported
                only then, and not of the embedded policy, which needs hundreds of steps.
        """
        self._first = [] if fresh and math.isfinite(self._defaults.spoiling_rate) else None

    def observe(
        self, rewards: Sequence[float], cut: float | None, entropy: float | None, stepped: bool
    ) -> Verdict:
        """Add a step, and return the verdict on the run.

        Args:
            rewards: Mean reward of each own group.
            cut: Share of cut answers.
            stepped: True if the step updated the policy.
        """
        self._pending += rewards
        if stepped and self._pending:
            reward = statistics.fmean(self._pending)
            self._pending = []
            self._steps += 1
            self._latest.add(reward, entropy, cut or 0.0)
            if self._first is not None and len(self._first) < START:
                self._first.append(reward)
            if self._latest.is_full and (
                not self._best.is_full or self._latest.reward > self._best.reward
            ):
                self._best = self._latest.copy()
        return self._verdict()

    def _verdict(self) -> Verdict:
        first, latest, best = self._first, self._latest, self._best
        if not latest.is_full:
            return Verdict()
        if (
            latest.reward < FALL_SHARE * best.reward
            and _change(best.rewards, latest.rewards) < -FALL_ERRORS
        ):
            return Verdict("collapsed", self._describe_collapse())
        if first is None or self._steps < LEAST:
            return Verdict()
        if _change(first, latest.rewards) >= RISE_ERRORS or latest.reward >= SOLVED:
            self._first = None  # it has learned; a reward that stays where it is now is no problem
            return Verdict()
        return Verdict("unmoved", self._describe_unmoved(first))

    def _describe_unmoved(self, first: Sequence[float]) -> str:
        raised = remedy_rate(self._rate, self._defaults)
        rate = f"set training.learning_rate to {raised:.2g}, or " if raised else ""
        return (
            f"the reward has not moved in {self._steps} steps with an update:"
            f" {statistics.fmean(first):.2f} in the first {START}, {self._latest.reward:.2f} in the"
            f" latest {WINDOW}: {rate}ask easier questions, or show the form of the answer in the"
            " template"
        )

    def _describe_collapse(self) -> str:
        latest, best = self._latest, self._best
        lowered = min(self._rate / REMEDY_FACTOR, self._defaults.learning_rate)
        entropy = (
            f", entropy {statistics.fmean(best.entropies):.2f} then and"
            f" {statistics.fmean(latest.entropies):.2f} now"
            if best.entropies and latest.entropies
            else ""
        )
        return (
            f"the reward has collapsed from {best.reward:.2f} to {latest.reward:.2f} in {WINDOW}"
            f" steps{entropy}, {statistics.fmean(latest.cuts):.0%} of the answers cut: restore an"
            f" earlier state with `swarmnode rollback`, and set training.learning_rate to"
            f" {lowered:.2g}"
        )


def remedy_rate(rate: float, defaults: ModelDefaults) -> float | None:
    """Return the learning rate to try if the reward does not move: three times the present one, but
    at most twice the default; None if the present rate is that high."""
    highest = float(f"{HIGHEST_REMEDY * defaults.learning_rate:.2g}")
    return min(REMEDY_FACTOR * rate, highest) if rate < highest else None


def _change(before: Sequence[float], now: Sequence[float]) -> float:
    """Return the change of the mean in standard errors."""
    change = statistics.fmean(now) - statistics.fmean(before)
    error = math.sqrt(
        statistics.variance(before) / len(before) + statistics.variance(now) / len(now)
    )
    return change / error if error > 0 else math.copysign(math.inf, change) if change else 0.0
