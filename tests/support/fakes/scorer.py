"""A scorer in this process, without a child or a sandbox: only for completions written by tests. It
scores as the child does, user tasks included."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from swarmnode.tasks import builtin, chat, dataset, own
from swarmnode.tasks.client import AsyncScorer, prepare
from swarmnode.tasks.episodes import EpisodeTask, Player
from swarmnode.tasks.frames import CompletionText, Scored, ScoreError, ScorerFailed, TaskUnknown
from swarmnode.tasks.games import GameTask
from swarmnode.tasks.registry import TASKS, TaskSpec
from swarmnode.tasks.scorer import GymTask, judge
from swarmnode.wire.messages import TaskRef

Items = Callable[[int, int], builtin.Item]
"""(seed, index) → question."""


class InProcessScorer:
    """Implements `score_many` of `tasks.client.AsyncScorer` for every task of the allow-list
    and all installed tasks.

    Args:
        poison: A completion with this text fails its group, as a killed child would.
        seconds: Duration of a call.
    """

    def __init__(self, poison: str = "\N{SKULL}", seconds: float = 0.0) -> None:
        self.poison = poison
        self.seconds = seconds
        self._tasks: dict[tuple[str, int], Items] = {}
        self._episode_tasks: dict[str, EpisodeTask] = {}
        self._player = Player()

    async def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[CompletionText]]]
    ) -> list[Scored | ScoreError]:
        """Return a result for each of `items`, (question, completions). A failed item has its error
        as the result."""
        await trio.sleep(self.seconds)
        return [self._score(ref, texts) for ref, texts in items]

    def _score(self, ref: TaskRef, texts: Sequence[CompletionText]) -> Scored | ScoreError:
        try:
            question = prepare(ref, texts)
        except TaskUnknown as unknown:
            return unknown
        completions = [
            text for each in texts for text in ([each] if isinstance(each, str) else each)
        ]
        if any(self.poison in text for text in completions):
            return ScorerFailed("poisoned")
        if TASKS[ref.id].turns > 1:
            return self._player.play(self._episode_task(TASKS[ref.id]), question)
        return judge(question, self._item)

    def _episode_task(self, spec: TaskSpec) -> EpisodeTask:
        if spec.id not in self._episode_tasks:
            self._episode_tasks[spec.id] = _episode_task(spec)
        return self._episode_tasks[spec.id]

    def _item(self, task_id: str, seed: int, index: int) -> builtin.Item:
        if task_id not in self._tasks:
            self._tasks[task_id] = _items(TASKS[task_id])
        return self._tasks[task_id](seed, index)


def _episode_task(spec: TaskSpec) -> EpisodeTask:
    """Return an episode task. Runs the code of user tasks."""
    if spec.rows is not None:
        settings = dataset.Settings.from_settings(spec.settings)
        return dataset.build_task(spec.id, spec.rows, settings, spec.source)
    if spec.source is not None:
        return own.OwnTask(spec.id, spec.source, spec.settings)
    return GameTask(spec.id, spec.settings)


def _items(spec: TaskSpec) -> Items:
    """Return the questions of a task. Runs the code of user tasks."""
    if spec.rows is not None:
        settings = dataset.Settings.from_settings(spec.settings)
        return dataset.build_task(spec.id, spec.rows, settings, spec.source).item
    if spec.source is not None:
        return own.OwnTask(spec.id, spec.source, spec.settings).item
    if spec.kind == "builtin":
        generate = builtin.GENERATORS[spec.generator]
        return lambda seed, index: generate(seed + index, **spec.settings)
    if spec.kind == "chat":
        return lambda seed, index: chat.GENERATORS[spec.generator](seed + index)
    return GymTask(spec).item


async def score_one(
    scorer: AsyncScorer, ref: TaskRef, completions: Sequence[CompletionText] = ()
) -> Scored:
    """Score the completions of one question. Raises its error."""
    (result,) = await scorer.score_many([(ref, completions)])
    if isinstance(result, Exception):
        raise result
    return result
