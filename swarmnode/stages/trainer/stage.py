"""The stage that this node holds, across crews: weights, optimizer, and a worker for each crew."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import structlog
import trio

from swarmnode.stages.crew_messages import BlockLocation, HeldBlock, StageAssignment
from swarmnode.stages.stage_frames import CREW_BYTES, Fence, FrameLimits, Place
from swarmnode.stages.trainer.head import Head
from swarmnode.stages.trainer.links import Links
from swarmnode.stages.trainer.pipeline import Observer, StageWorker, WorkerSettings
from swarmnode.stages.trainer.stage_model import StageOptimizer, StageRuntime

log = structlog.get_logger("swarmnode.crew")
T = TypeVar("T")


class StageMeter(Observer):
    """Runs a stage's computations in a thread, and measures their time."""

    def __init__(self) -> None:
        self.computing = 0
        """Number of computations that run now."""
        self.waited_share: float | None = None
        """Share of the last step's time without a computation."""
        self.tokens_per_second: float | None = None
        """Tokens that were run forward in the last step ÷ its time."""
        self.step_seconds = 0.0
        """Duration of the last step."""
        self._busy = 0.0
        self._since = time.monotonic()
        self._tokens = 0

    async def __call__(self, work: Callable[[], T]) -> T:
        self.computing += 1
        started = time.monotonic()
        try:
            return await trio.to_thread.run_sync(work)
        finally:
            self.computing -= 1
            self._busy += time.monotonic() - started

    def on_step_in_thread(self, worker: StageWorker) -> None:
        now, tokens = time.monotonic(), worker.runtime.tokens
        elapsed = self.step_seconds = max(now - self._since, 1e-9)
        self.waited_share = max(0.0, 1.0 - self._busy / elapsed)
        self.tokens_per_second = (tokens - self._tokens) / elapsed
        self._busy, self._since, self._tokens = 0.0, now, tokens


class Stage:
    """One stage of one lineage in this process. Its optimizer continues from crew to crew."""

    def __init__(
        self,
        assignment: StageAssignment,
        runtime: StageRuntime,
        settings: WorkerSettings,
        limits: FrameLimits,
    ) -> None:
        self.lineage, self.index, self.layers = (
            assignment.lineage,
            assignment.stage,
            assignment.layers,
        )
        self.runtime = runtime
        self.meter = StageMeter()
        self.optimizer = StageOptimizer(runtime, settings.learning_rate)
        self.observers: list[Observer] = [self.meter]
        self.source: str | None = None
        """One of `SOURCES`; None until the stage has its weights."""
        self._settings = settings
        self._limits = limits
        self._first_step = assignment.step
        self._dropped: Counter[str] = Counter()
        self.worker = self._make_worker(assignment, {})

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.worker.participant.step

    def is_of(self, assignment: StageAssignment) -> bool:
        """Return True if this is the assigned block of layers of the assigned lineage."""
        return (self.lineage, self.index, self.layers) == (
            assignment.lineage,
            assignment.stage,
            assignment.layers,
        )

    def continue_at(self, assignment: StageAssignment) -> bool:
        """Continue at the crew's step if these weights are of that step or the one before.

        A stage that is one step behind counts as if it had taken the step. Losing one update of
        one stage costs less than returning all stages to an older step. The last worker must have
        stopped.

        Returns:
            True if the stage continues. Otherwise it is to be restored.
        """
        if not self.is_of(assignment) or self.source is None:
            return False
        behind = assignment.step - self.step
        if behind not in (0, 1):
            return False
        if behind:
            log.info("stage continues one step behind its crew", step=self.step)
        self.worker.participant.step = assignment.step
        return True

    def held_block(self) -> HeldBlock | None:
        """Return the block in memory, for this node's offer; None before the first step or restore.

        Weights that were restored from another node and have taken no step here count as a
        neighbour's, so that the plan prefers the node that trained them.
        """
        if self.step == 0 or self.source is None:
            return None
        own = self.source in ("", "memory", "checkpoint") or self.step > self._first_step
        where: BlockLocation = "memory" if own else "neighbour"
        return HeldBlock(self.lineage, self.layers, self.index, self.step, where)

    def begin(
        self, assignment: StageAssignment, streams: dict[int, trio.abc.Stream]
    ) -> StageWorker:
        """Return a worker for a new crew, with the stage's weights and optimizer."""
        self._dropped = Counter(self.dropped())
        self.worker = self._make_worker(assignment, streams)
        for parameter in self.runtime.parameters():
            parameter.grad = None
        self.runtime.caches.clear()
        return self.worker

    def _make_worker(
        self, assignment: StageAssignment, streams: dict[int, trio.abc.Stream]
    ) -> StageWorker:
        place = Place(assignment.crew[:CREW_BYTES], self.index, assignment.step)
        links = Links(self.index, streams, self._limits)
        fence = Fence(place, len(assignment.layers))
        common = (self.runtime, links, fence, self._settings, self.meter, self.optimizer)
        worker = Head(*common) if self.index == 0 else StageWorker(*common)
        worker.observers = self.observers
        return worker

    def progress(self) -> int:
        """Return a number that grows with each piece of work done."""
        return self.runtime.work_count + self.worker.links.frames_received + self.step

    def dropped(self) -> dict[str, int]:
        """Return the number of dropped frames in all crews, by reason."""
        return dict(self._dropped + self.worker.ignored_frames)

    def load(self) -> int:
        """Return the number of pieces of work that run or could run now.

        Work that waits for a gradient or a slow link does not count, because a restart of this
        trainer would not help it.
        """
        return self.meter.computing + self.worker.ready()
