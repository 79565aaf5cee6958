"""Scoring of shortened answers, with a budget of time for each peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from swarmnode.latest import Latest
from swarmnode.tasks.frames import Scored, ScoreError, ScorerFailed
from swarmnode.wire.messages import TaskRef

SCORING_SECONDS, SCORING_SHARE = 5.0, 0.05
"""Seconds of scoring shortened answers of a peer after which its next group is refused, and share
of the passing time by which the count falls."""
MOST_PEERS = 256
"""Number of peers whose scoring time is remembered."""


class Rescore(Protocol):
    """`tasks.client.Scorer.score_many`."""

    def __call__(
        self, items: Sequence[tuple[TaskRef, Sequence[str]]], *, reveal: bool = False
    ) -> list[Scored | ScoreError]: ...


class ScoringBudget:
    """Limits the time of scoring shortened answers per peer: a slow verifier of the operator could
    take 30 s for a group."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent = Latest[str, tuple[float, float]](MOST_PEERS)
        """Peer → seconds spent and not yet refilled, and the time of that count."""

    def of(self, peer: str, rescore: Rescore) -> Rescore:
        """Return `rescore` for one group of a peer, which counts its time.

        Raises:
            ScorerFailed: The peer's earlier groups took too long.
        """
        now = self._clock()
        spent, counted = self._spent.get(peer, (0.0, now))
        spent = max(0.0, spent - SCORING_SHARE * (now - counted))
        self._spent[peer] = spent, now
        if spent >= SCORING_SECONDS:
            raise ScorerFailed(
                f"scoring shortened answers of this peer took {spent:.0f} seconds: use a faster"
                " verifier"
            )

        def scored(
            items: Sequence[tuple[TaskRef, Sequence[str]]], *, reveal: bool = False
        ) -> list[Scored | ScoreError]:
            started = self._clock()
            try:
                return rescore(items, reveal=reveal)
            finally:
                before, counted = self._spent.get(peer, (0.0, started))
                self._spent[peer] = before + self._clock() - started, counted

        return scored
