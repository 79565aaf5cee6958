"""Reports of the trainer: progress to the supervisor, phase and measurements to the network
process."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from swarmnode.link.client import Link
from swarmnode.link.messages import Report
from swarmnode.process import Progress
from swarmnode.rollouts.groups import OwnGroup
from swarmnode.rollouts.trainer.batch import TrainingGroup, silent_share
from swarmnode.tasks.client import Scorer
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
        self._sending = threading.Lock()

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
            activity="",
            step=counters.step,
            policy_version=counters.policy_version,
            held_out_questions=counters.held_out_questions,
            reward_held_out=counters.reward_held_out,
            reward_held_out_error=counters.reward_held_out_error,
            reward_held_out_step=counters.reward_held_out_step,
            reward_held_out_start=counters.reward_held_out_start,
            reward_held_out_start_error=counters.reward_held_out_start_error,
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
            engine=statistics.engine,
            server=statistics.server,
            scorer_restarts_total=max(0, scorer.starts - 1),
            reward_errors=scorer.reward_errors,
            last_reward_error=scorer.last_reward_error,
            refusals=scorer.refusals,
            last_refusal=scorer.last_refusal,
            **self._saves(),
            peers_used=dict(counters.peers_used),
            weights=self._engine.averaging(),
        )
        with self._sending:
            self._link.send(self.last)

    def show(self, activity: str) -> None:
        """Report progress within the phase."""
        self._progress.alive()
        self.last = msgspec.structs.replace(self.last, activity=activity)
        with self._sending:
            self._link.send(self.last)

    def state_written(self) -> None:
        """Report the end of a save, because the next phase may begin hours later.

        The saver's thread calls it.
        """
        with self._sending:
            self._link.send(msgspec.structs.replace(self.last, **self._saves()))

    def _saves(self) -> dict[str, Any]:
        """Return the fields of a report on saves of the state."""
        return {
            "state_saved_step": self._checkpoints.saved_step,
            "state_due_at": self._checkpoints.due_at,
            "state_error": self._checkpoints.error,
        }

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
    update: UpdateStatistics
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
        "tokens_per_second": made.tokens / max(done.ended - done.started, 1e-9),
        "reward_own": _mean([r for g in own for r in g.rewards]),
        "reward_external": _mean([r for g in external for r in g.rewards]),
        "own_groups": len(own),
        "external_groups": len(external),
        "external_share": len(external) / total if total else None,
        "zero_advantage_share": silent_share(own),
        "loss": update.loss,
        "entropy": update.entropy,
        "grad_norm": update.grad_norm,
        "effective_own": update.effective_own,
        "effective_external": update.effective_external,
        "own_gap": update.own_gap,
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


def cut_rewarded_share(groups: Sequence[TrainingGroup]) -> float | None:
    """Return the share of completions that were cut and earned 1; None without a completion."""
    count = sum(len(group.rewards) for group in groups)
    cut = [zip(group.rewards, group.was_cut, strict=False) for group in groups]
    return (
        sum(r >= 1.0 and was_cut for each in cut for r, was_cut in each) / count if count else None
    )


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
