"""Scores groups that passed admission: a bounded queue and batches, without the groups of authors
whose groups keep failing the scorer.

    put ─ author excluded? room? ─▶ queue ─▶ scorer ─▶ on_scored
                                              └ failed ─▶ on_failed, and a strike for the author
                                                where others in the batch did not fail
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from swarmnode.rollouts.groups import Candidate, memory_bytes
from swarmnode.tasks.frames import Scored, ScoreError, ScorerFailed, TaskUnknown
from swarmnode.wire.messages import TaskRef

SCORER_GROUPS = 32
"""Groups handed to the scorer at once by each of SCORER_TASKS tasks: one batch is scored while the
next is decoded."""
SCORER_TASKS = 2
QUEUE_GROUPS = 512
QUEUE_BYTES = 32 * 2**20
QUEUE_PEER_GROUPS = 64
"""Candidates that wait for the scorer: in all, and of one peer."""
STRIKES = 3
STRIKE_SECONDS = 600.0
STRIKE_PEERS = 1024


class Scorer(Protocol):
    """The part of `tasks.client.AsyncScorer` that is needed here."""

    async def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[str]]]
    ) -> list[Scored | ScoreError]: ...


class ScoringQueue:
    """The queue and the tasks that empty it.

    Args:
        scorer: computes rewards.
        on_scored: takes a scored candidate.
        on_failed: takes the reason and the author of a candidate that could not be scored.
        clock: Unix seconds.
    """

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
        """Candidates that wait."""
        return len(self._queue)

    def put(self, candidate: Candidate) -> str | None:
        """Queue a candidate. Return None, or why it is refused: `scorer` (its author is excluded),
        `busy` (no room)."""
        if self._strikes.is_out(candidate.peer, self._clock()):
            return "scorer"
        if not self._queue.put(candidate):
            return "busy"
        self._news.set()
        return None

    def start(self, nursery: trio.Nursery) -> None:
        """Start scoring."""
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
            except ScorerFailed as failed:  # no scorer can be started
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


class CandidateQueue:
    """First in, first out, bounded by groups, bytes and groups of one peer."""

    def __init__(
        self,
        groups: int = QUEUE_GROUPS,
        size: int = QUEUE_BYTES,
        peer_groups: int = QUEUE_PEER_GROUPS,
    ) -> None:
        self.groups = groups
        self.size = size
        self.peer_groups = peer_groups
        self._items: deque[tuple[Candidate, int]] = deque()
        self._bytes = 0
        self._of_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, candidate: Candidate) -> bool:
        """Return False where there is no room."""
        size = memory_bytes(candidate.group) + len(candidate.envelope)
        if (
            len(self._items) >= self.groups
            or self._bytes + size > self.size
            or self._of_peer[candidate.peer] >= self.peer_groups
        ):
            return False
        self._items.append((candidate, size))
        self._bytes += size
        self._of_peer[candidate.peer] += 1
        return True

    def take(self, most: int) -> list[Candidate]:
        """Take out up to `most` of the oldest candidates."""
        taken: list[Candidate] = []
        while self._items and len(taken) < most:
            candidate, size = self._items.popleft()
            self._bytes -= size
            self._of_peer[candidate.peer] -= 1
            if not self._of_peer[candidate.peer]:
                del self._of_peer[candidate.peer]
            taken.append(candidate)
        return taken


class Strikes:
    """Authors whose groups failed the scorer: after STRIKES within STRIKE_SECONDS they are excluded
    for STRIKE_SECONDS.

    A failure may be a defect of ours, so it costs no reputation. But each can block the scorer for
    seconds.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def add(self, peer: str, now: float) -> None:
        """Count a failure."""
        count, since = self._of.pop(peer, (0, now))
        self._of[peer] = (
            (1, now)
            if now - since > STRIKE_SECONDS
            else (count + 1, since if count + 1 < STRIKES else now)
        )
        if len(self._of) > STRIKE_PEERS:
            self._of.popitem(last=False)

    def is_out(self, peer: str, now: float) -> bool:
        """Return whether groups of `peer` are not scored now."""
        count, since = self._of.get(peer, (0, now))
        return count >= STRIKES and now - since <= STRIKE_SECONDS
