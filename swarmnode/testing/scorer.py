"""A scorer in this process for the builtin tasks: no child, no sandbox, so only for text that a test wrote."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from swarmnode.tasks.answers import answer_of
from swarmnode.tasks.builtin import GENERATORS
from swarmnode.tasks.frames import Scored, ScoreError, ScorerFailed, TaskUnknown, prepare
from swarmnode.tasks.registry import TASKS
from swarmnode.wire.messages import TaskRef


class InProcessScorer:
    """`tasks.client.AsyncScorer`'s `score_many`. A completion that contains `poison` fails its group as a killed child would.

    seconds: how long a call takes.
    """

    def __init__(self, poison: str = "\N{SKULL}", seconds: float = 0.0) -> None:
        self.poison = poison
        self.seconds = seconds
        self.calls = 0

    async def score_many(self, items: Sequence[tuple[TaskRef, Sequence[str]]]) -> list[Scored | ScoreError]:
        self.calls += 1
        await trio.sleep(self.seconds)
        return [self._score(ref, list(texts)) for ref, texts in items]

    def _score(self, ref: TaskRef, texts: list[str]) -> Scored | ScoreError:
        try:
            prepare(ref, texts)
        except TaskUnknown as unknown:
            return unknown
        if any(self.poison in text for text in texts):
            return ScorerFailed("poisoned")
        spec = TASKS[ref.id]
        item = GENERATORS[spec.generator](ref.seed + ref.index, **spec.settings)
        return Scored(item.prompt, [item.reward(answer_of(text)) for text in texts])
