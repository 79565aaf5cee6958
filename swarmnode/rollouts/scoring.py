"""Scoring of groups that passed admission: a bounded queue, batches, and the exclusion of authors
whose groups repeatedly fail the scorer.

    put ─ author excluded? room? ─▶ queue ─▶ scorer ─▶ on_scored
                                              └ failed ─▶ on_failed, and a strike for the author
                                                where the scorer works for others, or for a question
                                                of this node
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from swarmnode.rollouts.groups import Candidate, answers, memory_bytes
from swarmnode.tasks.frames import CompletionText, Scored, ScoreError, ScorerFailed, TaskUnknown
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.wire.messages import TaskRef

SCORER_GROUPS = 32
"""Most groups in a batch."""
SCORER_ACTIONS = 1024
"""Most actions of episodes in a batch of several groups, so that a batch of honest episodes stays
within the CPU time and the response of one scorer call."""
SCORER_TASKS = 2
"""Batches under way at a time: one is scored while the next is decoded."""
QUEUE_GROUPS = 512
"""Most candidates that wait for the scorer."""
QUEUE_BYTES = 32 * 2**20
"""Most memory of the waiting candidates."""
QUEUE_PEER_GROUPS = 64
"""Most waiting candidates of one author."""
STRIKES = 3
"""Failures within STRIKE_SECONDS after which an author is excluded."""
STRIKE_SECONDS = 600.0
"""Window of the failures, and length of the exclusion."""
STRIKE_PEERS = 1024
"""Authors whose failures are remembered."""


class Scorer(Protocol):
    """The part of `tasks.client.AsyncScorer` that the queue uses."""

    async def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[CompletionText]]]
    ) -> list[Scored | ScoreError]: ...


class ScoringQueue:
    """The queue of candidates and the tasks that score them.

    Args:
        scorer: Computes rewards.
        on_scored: Called with each scored candidate.
        on_failed: Called with reason and author of each candidate that could not be scored.
        clock: Returns Unix seconds.
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
        """Return the number of waiting candidates."""
        return len(self._queue)

    def put(self, candidate: Candidate) -> str | None:
        """Queue a candidate.

        Returns:
            None, or the reason of the refusal: `scorer` (its author is excluded) or `busy` (the
            queue is full).
        """
        if self._strikes.is_out(candidate.peer, self._clock()):
            return "scorer"
        if not self._queue.put(candidate):
            return "busy"
        self._news.set()
        return None

    def start(self, nursery: trio.Nursery) -> None:
        """Start the scoring tasks."""
        for _ in range(SCORER_TASKS):
            nursery.start_soon(self._work)

    async def _work(self) -> None:
        """Score batches until cancelled. An author gets a strike only if the scorer succeeded for
        another group of the batch, or succeeds for a question of this node; otherwise the scorer
        itself may be broken."""
        while True:
            while not (batch := self._queue.take(SCORER_GROUPS)):
                self._news = trio.Event() if self._news.is_set() else self._news
                await self._news.wait()
            questions = [(c.group.task, answers(c.group)) for c in batch]
            try:
                results = await self._scorer.score_many(questions)
            except ScorerFailed as failed:  # the scorer process cannot be started
                results = [failed] * len(batch)
            works = any(isinstance(scored, Scored) for scored in results)
            lost = [c for c, scored in zip(batch, results, strict=True) if _failed(scored)]
            if lost and not works:
                works = await self._works(lost[0].group.task)
            for candidate, scored in zip(batch, results, strict=True):
                if isinstance(scored, Scored):
                    self._on_scored(candidate, scored)
                    continue
                if works and _failed(scored):
                    self._strikes.add(candidate.peer, self._clock())
                self._on_failed(
                    "unregenerable" if isinstance(scored, TaskUnknown) else "scorer", candidate.peer
                )

    async def _works(self, task: TaskRef) -> bool:
        """Return True if the scorer makes a question of a task at an address of this node's
        choice. All groups of a batch may be of one author."""
        own = TaskRef(task.id, task.version, evaluation_seed(task.id), 0)
        try:
            (scored,) = await self._scorer.score_many([(own, [])])
        except ScorerFailed:
            return False
        return isinstance(scored, Scored)


def _failed(scored: Scored | ScoreError) -> bool:
    return isinstance(scored, ScorerFailed)


class CandidateQueue:
    """First-in, first-out queue bounded by groups, bytes and groups of one author."""

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
        """Append a candidate. Return False if the queue is full."""
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

    def take(self, most: int, most_actions: int = SCORER_ACTIONS) -> list[Candidate]:
        """Remove and return up to `most` of the oldest candidates; fewer where more would have
        above `most_actions` actions of episodes together."""
        taken: list[Candidate] = []
        actions = 0
        while self._items and len(taken) < most:
            actions += sum(len(c.turns) for c in self._items[0][0].group.completions)
            if taken and actions > most_actions:
                break
            candidate, size = self._items.popleft()
            self._bytes -= size
            self._of_peer[candidate.peer] -= 1
            if not self._of_peer[candidate.peer]:
                del self._of_peer[candidate.peer]
            taken.append(candidate)
        return taken


class Strikes:
    """Failures of the scorer by author. STRIKES failures within STRIKE_SECONDS exclude the author
    for STRIKE_SECONDS.

    A failure may be a defect of this node, so it costs no reputation. But each failure can block
    the scorer for seconds.
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
        """Return True while groups of `peer` are not scored."""
        count, since = self._of.get(peer, (0, now))
        return count >= STRIKES and now - since <= STRIKE_SECONDS
