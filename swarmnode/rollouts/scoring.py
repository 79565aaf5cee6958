"""Candidates on their way through the scorer: a bounded queue, in batches, without those whose
authors wear the scorer out.

put ─ author out? room? ─▶ queue ─▶ scorer ─▶ on_scored
                                        └ failed ─▶ on_failed, and a strike where only this one
                                        failed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from swarmnode.rollouts.groups import Candidate
from swarmnode.rollouts.queues import CandidateQueue, Strikes
from swarmnode.tasks.frames import Scored, ScoreError, ScorerFailed, TaskUnknown
from swarmnode.wire.messages import TaskRef

SCORER_GROUPS = 32
"""Groups handed to the scorer at once, by each of SCORER_TASKS tasks: one frame is judged while the
next is decoded."""
SCORER_TASKS = 2


class Scorer(Protocol):
    """What is needed of `tasks.client.AsyncScorer`."""

    async def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[str]]]
    ) -> list[Scored | ScoreError]: ...


class ScoringQueue:
    """on_scored(candidate, scored) takes what was scored; on_failed(reason, peer) is told what was
    not, and whose it is."""

    def __init__(
        self,
        scorer: Scorer,
        on_scored: Callable[[Candidate, Scored], None],
        on_failed: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._scorer = scorer
        self._on_scored = on_scored
        self._on_failed = on_failed
        self._clock = clock
        self._queue = CandidateQueue()
        self._strikes = Strikes()
        self._news = trio.Event()

    def __len__(self) -> int:
        """Candidates before the scorer."""
        return len(self._queue)

    def put(self, candidate: Candidate) -> str | None:
        """Have it scored. Returns why not: `scorer` (its author wears the scorer out), `busy` (no
        room)."""
        if self._strikes.is_out(candidate.peer, self._clock()):
            return "scorer"
        if not self._queue.put(candidate):
            return "busy"
        self._news.set()
        return None

    def start(self, nursery: trio.Nursery) -> None:
        for _ in range(SCORER_TASKS):
            nursery.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            while not (batch := self._queue.take(SCORER_GROUPS)):
                self._news = trio.Event() if self._news.is_set() else self._news
                await self._news.wait()
            questions = [
                (c.group.task, [completion.text for completion in c.group.completions])
                for c in batch
            ]
            try:
                results = await self._scorer.score_many(questions)
            except ScorerFailed as failed:  # there is no scorer to be had at all
                results = [failed] * len(batch)
            works = any(isinstance(scored, Scored) for scored in results)
            for candidate, scored in zip(batch, results, strict=True):
                if isinstance(scored, Scored):
                    self._on_scored(candidate, scored)
                    continue
                if isinstance(scored, ScorerFailed) and works:
                    self._strikes.add(candidate.peer, self._clock())
                self._on_failed(
                    "unregenerable" if isinstance(scored, TaskUnknown) else "scorer", candidate.peer
                )
