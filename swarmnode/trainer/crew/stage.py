"""The stage that this node holds, from one crew to the next: weights, optimizer, and a worker for
each crew."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import trio

from swarmnode.crew.local import Assigned
from swarmnode.crew.record import Copy, Where
from swarmnode.pipeline.context import CrewSettings
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import CREW_BYTES, FrameLimits, Place
from swarmnode.pipeline.head import Head
from swarmnode.pipeline.links import Links
from swarmnode.pipeline.observer import Observer
from swarmnode.pipeline.optimizer import StageOptimizer
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.pipeline.worker import StageWorker

T = TypeVar("T")
HEAD_SECONDS = 120.0
"""Bounds the time in which no work arrives in one of a head's calls."""
PATIENCE = 0.8
"""Share of the time that the others give a head for a step, after which it goes on without whoever
had the work for most of it."""


class Meter(Observer):
    """Computes in a thread, and says how much of the time that was."""

    def __init__(self) -> None:
        self.computing = 0
        self._busy = 0.0
        self._since = time.monotonic()
        self._tokens = 0
        self.waited_share: float | None = None
        """The share of the last step's time in which nothing was computed."""
        self.tokens_per_second: float | None = None
        """In the last step's time."""

    async def __call__(self, work: Callable[[], T]) -> T:
        self.computing += 1
        started = time.monotonic()
        try:
            return await trio.to_thread.run_sync(work)
        finally:
            self.computing -= 1
            self._busy += time.monotonic() - started

    def committed(self, worker: StageWorker) -> None:
        now, tokens = time.monotonic(), worker.runtime.tokens
        elapsed = max(now - self._since, 1e-9)
        self.waited_share = max(0.0, 1.0 - self._busy / elapsed)
        self.tokens_per_second = (tokens - self._tokens) / elapsed
        self._busy, self._since, self._tokens = 0.0, now, tokens


class Stage:
    """One stage of one lineage in this process. `optimizer` goes from one crew to the next."""

    def __init__(
        self, assigned: Assigned, runtime: StageRuntime, settings: CrewSettings, limits: FrameLimits
    ) -> None:
        self.lineage, self.index, self.layers = assigned.lineage, assigned.stage, assigned.layers
        self.runtime = runtime
        self.meter = Meter()
        self.optimizer = StageOptimizer(runtime, settings.learning_rate)
        self.observers: list[Observer] = [self.meter]
        self._settings = settings
        self._limits = limits
        self._began = assigned.step
        self.source: str | None = None if assigned.step else ""
        """One of `local.RUNGS`: where its weights came from; None while they are not what its crew
        goes on from."""
        self._dropped: Counter[str] = Counter()
        self.worker = self._make(assigned, {})

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.worker.participant.step

    def is_of(self, assigned: Assigned) -> bool:
        return (self.lineage, self.index, self.layers) == (
            assigned.lineage,
            assigned.stage,
            assigned.layers,
        )

    async def follow(self, assigned: Assigned) -> bool:
        """Whether these weights are what the crew begins with; a step that was prepared here and
        taken elsewhere is taken. The last worker has stopped."""
        participant = self.worker.participant
        if self.source is None:  # its crew ended before they were there
            return False
        if (
            participant.next_hash == assigned.hash
            and participant.commit(self.step, participant.attempt) == "take"
        ):
            await self.worker.take(assigned.taken.clip, assigned.taken.learning_rate)
        return participant.hash == assigned.hash

    def copy(self) -> Copy | None:
        """What others are told of the weights in memory; None of those that have taken no step, or
        were not restored. The last worker has stopped. What came from others and has not taken a
        step here is kept, not learnt."""
        spec, participant, last = (
            self.runtime.spec,
            self.worker.participant,
            self.optimizer.last_commit,
        )
        if participant.step == 0 or self.source is None:
            return None
        where: Where = (
            "memory" if self.source in ("", "R0") or participant.step > self._began else "neighbour"
        )
        return Copy(
            self.lineage,
            spec.first,
            spec.last,
            participant.step,
            participant.hash,
            where,
            last,
            participant.next_hash,
        )

    def begin(self, assigned: Assigned, streams: dict[int, trio.abc.Stream]) -> StageWorker:
        """A new worker in a new crew, with the stage's weights and optimizer. To be `run`."""
        self._dropped = Counter(self.dropped())
        self.worker = self._make(assigned, streams)
        for parameter in self.runtime.parameters():
            parameter.grad = None
        self.runtime.sessions.clear()
        return self.worker

    def _make(self, assigned: Assigned, streams: dict[int, trio.abc.Stream]) -> StageWorker:
        place = Place(assigned.crew[:CREW_BYTES], self.index, assigned.step)
        links = Links(self.index, streams, self._limits)
        fence = Fence(place, len(assigned.layers))
        worker: StageWorker
        if self.index == 0:
            worker = Head(
                self.runtime,
                links,
                fence,
                self._settings,
                self.meter,
                self.optimizer,
                seconds=HEAD_SECONDS,
            )
            worker.search.patience = PATIENCE * assigned.step_seconds
        else:
            worker = StageWorker(
                self.runtime, links, fence, self._settings, self.meter, self.optimizer
            )
        worker.participant.hash = assigned.hash
        worker.context.observers = self.observers
        return worker

    def progress(self) -> int:
        """Grows with each piece of work done."""
        return self.runtime.worked + self.worker.links.frames_received + self.step

    def dropped(self) -> dict[str, int]:
        """Frames that counted for nothing, in all crews, by reason."""
        return dict(self._dropped + self.worker.dropped)

    def load(self) -> int:
        """Pieces of work in hand. What waits for a gradient, or for a slow link, is none: no new
        trainer would do it sooner."""
        return self.meter.computing + self.worker.ready()
