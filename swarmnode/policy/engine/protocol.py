"""What every engine does: take requests, go on with them for a while, give out those that are
finished.

lockstep     all requests together, until the longest completion has ended
engine/lockstep.py
continuous   requests come and go: whoever ends makes room at once
engine/continuous.py
keeper       chooses one of them, watches it, and builds it anew where it must be
engine/keeper.py
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from swarmnode.policy.generate import GroupSample


@dataclass(frozen=True)
class Request:
    """One question to answer, or the next turn of an episode."""

    number: int
    """The caller's name for it, used once."""
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
class Finished:
    """A request all of whose completions have ended."""

    number: int
    sample: GroupSample


@dataclass(frozen=True)
class GenerationStatistics:
    """Totals since the engine was built, and what is under way."""

    steps: int
    """Decoding steps; an engine in which this stands still has stopped."""
    tokens: int
    """Sampled, in unfinished completions too."""
    unfinished: int
    """Requests."""
    oldest: int | None = None
    """The policy version under which the oldest of them began."""


class Generation(Protocol):
    """Calls come from one thread, one at a time, and none waits without an end."""

    def submit(self, request: Request) -> None:
        """Answer it, as soon as there is room. Raises PromptTooLong."""
        ...

    def cancel(self, number: int) -> None:
        """Drop a request, its completions so far, and the state that is kept for following
        requests."""
        ...

    def finished(self, version: int) -> list[Finished]:
        """Go on for a while; what has ended in it, which may be nothing. Tokens that are sampled
        now are of policy version `version`."""
        ...

    def pause(self) -> AbstractContextManager[None]:
        """Inside, weights may change. What is unfinished goes on afterwards with the new ones."""
        ...

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float] | None:
        """Log-probability at temperature 1 of each of `ids` after the prompt, by the way on which
        the engine itself samples.

        None from one that keeps nothing from one call to the next, and so cannot be behind the
        trainer.
        """
        ...

    def ahead(self, count: int) -> int:
        """Requests beyond `count` that are of use to an engine from which the next `count` are
        wanted."""
        ...

    def statistics(self) -> GenerationStatistics: ...
