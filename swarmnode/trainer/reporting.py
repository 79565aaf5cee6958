"""Reports of the trainer: progress to the supervisor, phase and measurements to the network
process."""

from __future__ import annotations

import msgspec
import psutil

from swarmnode.link.client import Link
from swarmnode.link.messages import Report
from swarmnode.process import Progress
from swarmnode.tasks.client import Scorer
from swarmnode.trainer.checkpoints import Checkpoints
from swarmnode.trainer.engine import Engine
from swarmnode.trainer.state import Counters


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
