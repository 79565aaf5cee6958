"""Interface of all engines: submit requests, sample for a while, return finished requests.

lockstep.py      samples all requests together, until the longest completion has ended
continuous.py    a finished completion frees its row for a waiting request at once
selector.py      chooses one of them
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from swarmnode.policy.generate import GroupSample


@dataclass(frozen=True)
class Request:
    """A question, or the next turn of an episode."""

    number: int
    """Number that the caller has chosen; used once."""
    prompt: str | Sequence[int]
    """Text of a question; for a later turn of an episode, all ids of the episode so far."""
    generations: int | None = None
    """Number of completions; None is the number in the engine's `Sampling`."""
    follows: int | None = None
    """Number of the finished request whose prompt and completion this prompt begins with. An engine
    that kept that request's keys and values (`continues`) prefills only the remaining tokens."""
    continues: bool = False
    """True if requests may follow this one. The caller cancels it once they are submitted."""


@dataclass(frozen=True)
class FinishedRequest:
    """A finished request with its completions."""

    number: int
    sample: GroupSample


@dataclass(frozen=True)
class GenerationStatistics:
    """Unfinished requests of an engine."""

    unfinished: int
    """Number of unfinished requests."""
    oldest: int | None = None
    """Policy version of the first token of the oldest unfinished request."""


class Generation(Protocol):
    """An engine. Its methods are called from one thread, and every wait has a timeout."""

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            PromptTooLong: The prompt leaves no room for a completion.
        """
        ...

    def cancel(self, number: int) -> None:
        """Drop a request, its completions so far, and the state that is kept for following
        requests."""
        ...

    def finished(self, version: int) -> list[FinishedRequest]:
        """Sample for a while; return the requests that have finished, possibly none.

        Args:
            version: Policy version of the tokens that are sampled.
        """
        ...

    def pause(self) -> AbstractContextManager[None]:
        """Allow weights to change inside the block. Unfinished requests continue with the new
        weights."""
        ...

    def ahead(self, count: int) -> int:
        """Return the number of additional requests that keep the engine busy while the next
        `count` requests finish."""
        ...

    def statistics(self) -> GenerationStatistics: ...
