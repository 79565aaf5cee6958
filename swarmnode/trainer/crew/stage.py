"""The stage that this node holds, from one roster to the next: weights, optimizer, and a member that works with them under each."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch
import trio

from swarmnode.crew.local import Assigned, Settled
from swarmnode.pipeline.commit import Take
from swarmnode.pipeline.fence import Fence
from swarmnode.pipeline.frames import CREW_BYTES, FrameLimits, Place
from swarmnode.pipeline.head import Head
from swarmnode.pipeline.links import Links
from swarmnode.pipeline.observer import Observer
from swarmnode.pipeline.runtime import StageRuntime
from swarmnode.pipeline.worker import CrewSettings, StageWorker

T = TypeVar("T")
HEAD_SECONDS = 120.0
"""Bounds each of a head's calls: a crew that does less in that time is too slow to train, or hangs."""


class Meter:
    """Computes in a thread, and says how much of the time that was."""

    def __init__(self) -> None:
        self.computing = 0
        self._busy = 0.0
        self._since = time.monotonic()
        self._tokens = 0
        self.waited_share: float | None = None
        """Of the last step's time."""
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

    def step(self, tokens: int) -> None:
        """A step was taken; `tokens` have gone through so far."""
        now = time.monotonic()
        elapsed = max(now - self._since, 1e-9)
        self.waited_share = max(0.0, 1.0 - self._busy / elapsed)
        self.tokens_per_second = (tokens - self._tokens) / elapsed
        self._busy, self._since, self._tokens = 0.0, now, tokens


class Stage:
    """One stage of one crew in this process. `lock` is held while the optimizer moves the weights."""

    def __init__(self, assigned: Assigned, runtime: StageRuntime, settings: CrewSettings, limits: FrameLimits) -> None:
        self.crew, self.index, self.layers = assigned.crew, assigned.stage, assigned.layers
        self.runtime = runtime
        self.meter = Meter()
        self.lock = threading.Lock()
        self.observers: list[Observer] = []
        self._settings = settings
        self._limits = limits
        self._dropped: Counter[str] = Counter()
        self.worker = self._make(assigned, {}, 0)

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.worker.participant.step

    @property
    def prepared(self) -> bool:
        return self.worker.participant.phase == "prepared"

    def is_of(self, assigned: Assigned) -> bool:
        return (self.crew, self.index, self.layers) == (assigned.crew, assigned.stage, assigned.layers)

    async def settle(self, settled: Settled) -> bool:
        """Take the step that others took; what nobody took is dropped when the next worker begins. The last worker has stopped.

        False when this stage is behind and cannot follow: it has to be restored then.
        """
        participant = self.worker.participant
        if settled.step == self.step + 1 and isinstance(participant.commit(self.step, settled.attempt), Take):
            await self.worker.take(settled.clip, settled.learning_rate)
        return settled.step == self.step

    def begin(self, assigned: Assigned, streams: dict[int, trio.abc.Stream], step: int) -> StageWorker:
        """A new worker under a new roster, with what the old one had of weights, optimizer and learning rate. To be `run`."""
        before, self._dropped = self.worker, Counter(self.dropped())
        self.worker = self._make(assigned, streams, step)
        self.worker.optimizer, self.worker.lr_scale = before.optimizer, before.lr_scale
        self.worker.squared_norm, self.worker.last_commit = before.squared_norm, before.last_commit
        for parameter in self.runtime.parameters():
            parameter.grad = None
        self.runtime.sessions.clear()
        return self.worker

    def _make(self, assigned: Assigned, streams: dict[int, trio.abc.Stream], step: int) -> StageWorker:
        epochs = assigned.stage_epochs
        place = Place(assigned.crew[:CREW_BYTES], assigned.roster_epoch, self.index, epochs[self.index], step)
        links = Links(self.index, streams, self._limits)
        fence = Fence(place, epochs)
        worker: StageWorker
        if self.index == 0:
            worker = Head(self.runtime, links, fence, self._settings, self.meter, seconds=HEAD_SECONDS)
        else:
            worker = StageWorker(self.runtime, links, fence, self._settings, self.meter)
        worker.lock = self.lock
        worker.observer = Observers(self)
        return worker

    def progress(self) -> int:
        """Grows with each piece of work done."""
        done = self.runtime.statistics()
        return done.forwards + done.backwards + done.decode_steps + self.worker.statistics().links.frames_received + self.step

    def dropped(self) -> dict[str, int]:
        """Frames that counted for nothing, under all rosters, by reason."""
        now = self.worker.statistics()
        return dict(self._dropped + Counter(now.fence.dropped) + Counter(now.links.refused) + Counter(now.refused))

    def load(self) -> int:
        """Pieces of work in hand. What waits for a gradient, or for a slow link, is none: no new trainer would do it sooner."""
        return self.meter.computing + self.worker.ready()


class Observers(Observer):
    """All of a stage's observers as one; the meter first."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def received(self, micro_batch: int, about: bytes, sender: int, body: bytes) -> None:
        for observer in self._stage.observers:
            observer.received(micro_batch, about, sender, body)

    def sent(self, micro_batch: int, receiver: int, body: bytes) -> None:
        for observer in self._stage.observers:
            observer.sent(micro_batch, receiver, body)

    def learnt(self, micro_batch: int, logprobs: torch.Tensor) -> None:
        for observer in self._stage.observers:
            observer.learnt(micro_batch, logprobs)

    def committed(self, worker: StageWorker) -> None:
        self._stage.meter.step(self._stage.runtime.statistics().tokens)
        for observer in self._stage.observers:
            observer.committed(worker)

    def stepped(self) -> None:
        for observer in self._stage.observers:
            observer.stepped()

    def dropped(self) -> None:
        for observer in self._stage.observers:
            observer.dropped()
