"""Samples all requests together, one token of each per step, until the longest has ended. This is
the best engine if answers are short or of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from swarmnode.policy.engine.protocol import FinishedRequest, GenerationStatistics, Request
from swarmnode.policy.generate import GroupSample

Prompt = str | Sequence[int]
Generate = Callable[[Sequence[Prompt], int | None], list[GroupSample]]


class Lockstep:
    """Engine that answers all requests of a batch together.

    Args:
        generate: Returns the given number of completions for each prompt, in order; None is the
            default number.
        check: Raises an error for a prompt that cannot be answered.
    """

    kind: Final = "lockstep"

    def __init__(
        self, generate: Generate, check: Callable[[Prompt], object] = lambda prompt: None
    ) -> None:
        self._generate = generate
        self._check = check
        self._waiting: dict[int, Request] = {}

    def submit(self, request: Request) -> None:
        self._check(request.prompt)
        self._waiting[request.number] = request

    def cancel(self, number: int) -> None:
        self._waiting.pop(number, None)

    def finished(self, version: int) -> list[FinishedRequest]:
        """Everything that was submitted."""
        if not self._waiting:
            return []
        waiting, done = list(self._waiting.values()), list[FinishedRequest]()
        for generations in dict.fromkeys(request.generations for request in waiting):
            alike = [request for request in waiting if request.generations == generations]
            samples = self._generate([request.prompt for request in alike], generations)
            done += [
                FinishedRequest(request.number, sample)
                for request, sample in zip(alike, samples, strict=True)
            ]
        self._waiting.clear()
        return done

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Allow weights to change inside the block. No request is in progress between two calls."""
        yield

    def ahead(self, count: int) -> int:
        return 0

    def statistics(self) -> GenerationStatistics:
        return GenerationStatistics(len(self._waiting))
