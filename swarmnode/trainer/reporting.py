"""Reports of the trainer: progress to the supervisor, phase and measurements to the network
process."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from swarmnode.link.client import Link
from swarmnode.link.messages import Report
from swarmnode.process import Progress
from swarmnode.rollouts.groups import OwnGroup
from swarmnode.tasks.answers import extract
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import TASKS
from swarmnode.tasks.verifiers import MAJORITY, ballot
from swarmnode.trainer.batch import TrainingGroup, silent_share
from swarmnode.trainer.checkpoints import Checkpoints
from swarmnode.trainer.engine import Engine
from swarmnode.trainer.episodes import EpisodeTotals
from swarmnode.trainer.sampler import Experience
from swarmnode.trainer.state import Counters
from swarmnode.trainer.update import UpdateStatistics


class Reporter:
    """Sends complete reports: the last measurements and the present totals."""

    def __init__(
        self,
        progress: Progress,
        link: Link,
        engine: Engine,
        scorer: Scorer,
        checkpoints: Checkpoints,
        counters: Counters,
    ) -> None:
        self.last = Report(phase="loading")
        """The next report. It is sent when the trainer enters a phase."""
        self._progress = progress
        self._link = link
        self._engine = engine
        self._scorer = scorer
        self._checkpoints = checkpoints
        self._counters = counters

    def enter(self, phase: str, step_seconds: float | None = None) -> None:
        """Report the phase, the step's measurements and all totals.

        Args:
            step_seconds: Duration of a step that has just ended.
        """
        self._progress(phase, step_seconds)
        counters, statistics, scorer = (
            self._counters,
            self._engine.statistics(),
            self._scorer.statistics(),
        )
        self.last = msgspec.structs.replace(
            self.last,
            phase=phase,
            step=counters.step,
            policy_version=counters.policy_version,
            reward_held_out=counters.reward_held_out,
            reward_held_out_error=counters.reward_held_out_error,
            reward_held_out_start=counters.reward_held_out_start,
            own_groups_total=counters.own_groups_total,
            external_groups_total=counters.external_groups_total,
            tokens_total=counters.tokens_total,
            episodes_total=counters.episodes_total,
            evaluation_tokens_total=counters.evaluation_tokens_total,
            device=statistics.device,
            dtype=statistics.dtype,
            device_memory_bytes=statistics.device_memory_bytes,
            cards=statistics.cards,
            memory_bytes=psutil.Process().memory_info().rss,
            oom_retries_total=counters.oom_retries_total,
            micro_batch_tokens=statistics.micro_batch_tokens,
            generation_tokens=statistics.generation_tokens,
            engine_failures=statistics.engine_failures,
            engine=statistics.engine,
            server=statistics.server,
            scorer_restarts_total=max(0, scorer.starts - 1),
            reward_errors=scorer.reward_errors,
            last_reward_error=scorer.last_reward_error,
            state_saved_step=self._checkpoints.saved_step,
            peers_used=dict(counters.peers_used),
            weights=self._engine.averaging(),
        )
        self._link.send(self.last)

    def alive(self, status: str) -> None:
        """Report progress to the supervisor only, so that a wait does not count as a hang."""
        self._progress(status)

    def flush(self, seconds: float) -> None:
        """Wait at most `seconds` until all reports have been sent to the network process."""
        self._link.flush(seconds)

    @property
    def connected(self) -> bool:
        """True if a network process is connected."""
        return self._link.statistics().connected


# ---- measurements of a step ----------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """A training step, for its measurements."""

    experience: Experience
    external: Sequence[TrainingGroup]
    """Peers' groups that were trained on."""
    replayed: int
    """Number of groups of earlier steps."""
    update: UpdateStatistics
    rate: float
    """Learning rate before `UpdateStatistics.rate_factor`."""
    started: float
    """Monotonic time in seconds; so are `sampled` and `ended`."""
    sampled: float
    ended: float


def measures(done: StepResult) -> dict[str, Any]:
    """Return the measurements of a step, keyed by field names of a report."""
    made, own, external, update = (
        done.experience,
        done.experience.groups,
        done.external,
        done.update,
    )
    total, sampling = len(own) + len(external), done.sampled - done.started
    return {
        "step_seconds": done.ended - done.started,
        "generate_seconds": sampling,
        "train_seconds": done.ended - done.sampled,
        "tokens_per_second": made.tokens / max(sampling, 1e-9),
        "generation_lag": _mean([float(lag) for lag in made.lags]),
        "generation_rows": made.rows,
        "reward_own": _mean([r for g in own for r in g.rewards]),
        "reward_external": _mean([r for g in external for r in g.rewards]),
        "own_groups": len(own),
        "external_groups": len(external),
        "replayed_groups": done.replayed,
        "external_share": len(external) / total if total else None,
        "zero_advantage_share": silent_share(own),
        "correction_mean": _mean([w for g in external for w in g.weights]),
        "loss": update.loss,
        "entropy": update.entropy,
        "kl": update.kl,
        "clip_fraction": update.clip_fraction,
        "grad_norm": update.grad_norm,
        "learning_rate": done.rate * update.rate_factor,
        "effective_own": update.effective_own,
        "effective_external": update.effective_external,
        "own_gap": update.own_gap,
        "gradient_agreement": update.agreement,
        **completion_lengths(own),
        **episode_measures(made.played, sampling),
    }


def completion_lengths(groups: Sequence[TrainingGroup]) -> dict[str, float | int | None]:
    """Return length statistics of the completions of `groups`, keyed by field names of a report.

    They are the mean and the 95th percentile in sampled tokens, and the share that was cut.
    """
    lengths = sorted(row.tokens for group in groups for row in group.rows)
    if not lengths:
        return {
            "completion_tokens": None,
            "completion_tokens_p95": None,
            "completion_cut_share": None,
        }
    return {
        "completion_tokens": sum(lengths) / len(lengths),
        "completion_tokens_p95": lengths[math.ceil(0.95 * len(lengths)) - 1],
        "completion_cut_share": sum(sum(group.was_cut) for group in groups) / len(lengths),
    }


def episode_measures(played: EpisodeTotals, seconds: float) -> dict[str, float | None]:
    """Return measures of a step's episodes, keyed by field names of a report; None without
    episodes.

    Args:
        seconds: Duration of the step's sampling.
    """
    if not played.episodes:
        return {"episode_turns": None, "environment_share": None}
    share = min(1.0, played.environment_seconds / max(seconds, 1e-9))
    return {"episode_turns": played.turns / played.episodes, "environment_share": share}


def reward_by_task(groups: Sequence[OwnGroup]) -> dict[str, float]:
    """Return the mean reward of all completions in a batch, by task."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        rewards.setdefault(group.task.id, []).extend(group.rewards)
    return {task: sum(each) / len(each) for task, each in rewards.items() if each}


def rounded(value: float | None, digits: int) -> float | None:
    """Return `value` rounded to `digits`, or None."""
    return None if value is None else round(value, digits)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


WINDOW = 64
"""Number of latest own groups whose winning answers are compared."""
FEWEST = 32
"""Least number of winning answers for a report."""


class WinningAnswers:
    """Winning answers of the node's latest groups that were judged by vote.

    The verifier `majority` has no right answers. A policy earns all of its reward with one answer
    to every question, and held-out rows without right answers do not show it. `top_share` does.
    """

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
