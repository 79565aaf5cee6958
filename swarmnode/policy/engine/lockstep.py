"""All requests together, one token of each at every step, until the longest has ended: best where
answers are short or of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from swarmnode.policy.engine.protocol import Finished, GenerationStatistics, Request
from swarmnode.policy.generate import GroupSample

Generate = Callable[[Sequence[str]], list[GroupSample]]


class Lockstep:
    """generate: a group of completions of each prompt, in order. check: raises for a prompt that
    cannot be answered."""

    def __init__(
        self, generate: Generate, check: Callable[[str], object] = lambda prompt: None
    ) -> None:
        self._generate = generate
        self._check = check
        self._waiting: dict[int, str] = {}
        self._steps = 0
        self._tokens = 0

    def submit(self, request: Request) -> None:
        self._check(request.prompt)
        self._waiting[request.number] = request.prompt

    def cancel(self, number: int) -> None:
        self._waiting.pop(number, None)

    def finished(self, version: int) -> list[Finished]:
        """Everything that was submitted."""
        if not self._waiting:
            return []
        samples = self._generate(list(self._waiting.values()))
        done = [
            Finished(number, sample) for number, sample in zip(self._waiting, samples, strict=True)
        ]
        self._waiting.clear()
        lengths = [len(completion.ids) for sample in samples for completion in sample.completions]
        self._steps += max(lengths, default=0)
        self._tokens += sum(lengths)
        return done

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing is ever half done between two calls."""
        yield

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float] | None:
        return None

    def ahead(self, count: int) -> int:
        return 0

    def statistics(self) -> GenerationStatistics:
        return GenerationStatistics(self._steps, self._tokens, len(self._waiting))
