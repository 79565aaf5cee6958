"""Regenerate questions and judge answers, in a sandboxed child. `Scorer` blocks (for the trainer);
`AsyncScorer` is for trio (the network).

Both replace their child when it dies or overruns, and ask again, one question at a time, so that
only the one that did it goes without.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from swarmnode.errors import ConfigError
from swarmnode.tasks.async_client import AsyncScorer
from swarmnode.tasks.child import Child, Died, Wait
from swarmnode.tasks.environments import Environments, by_url
from swarmnode.tasks.frames import (
    FRAME_GROUPS,
    CompletionText,
    Question,
    Scored,
    ScoreError,
    ScorerFailed,
    TaskUnknown,
    prepare,
)
from swarmnode.tasks.registry import TASKS, adjusted, task_version
from swarmnode.tasks.tally import ScorerStatistics, Tally
from swarmnode.wire.messages import TaskRef

__all__ = [
    "AsyncScorer",
    "ScoreError",
    "Scored",
    "Scorer",
    "ScorerFailed",
    "ScorerStatistics",
    "TaskUnknown",
    "prove_own",
]

T = TypeVar("T")


class Scorer:
    """A scorer child for plain threads. Use it as a context manager; calls from several threads
    take turns.

    deadline: wall-clock seconds for a request of up to 64 groups; cpu_seconds: CPU time that one
    may use; startup_seconds: until a new child is ready; alive: called after every request; child:
    what starts one.
    """

    def __init__(
        self,
        *,
        deadline: float = 10.0,
        cpu_seconds: int = 2,
        startup_seconds: float = 60.0,
        alive: Callable[[], None] = lambda: None,
        child: Callable[[int], Child] = Child,
    ) -> None:
        self._alive = alive
        self._make_child = child
        self._deadline = deadline
        self._cpu_seconds = cpu_seconds
        self._startup_seconds = startup_seconds
        self._child: Child | None = None
        self._lock = threading.Lock()
        self._tally = Tally()
        self._environments = Environments(alive)

    def __enter__(self) -> Self:
        """Start the child, so that the first question need not wait for it. Raises ScorerFailed."""
        with self._lock:
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child. A later call would start another."""
        with self._lock:
            self._end()

    def prompt(self, ref: TaskRef) -> str:
        """The question's text. Raises TaskUnknown, ScorerFailed."""
        return self.score(ref, []).prompt

    def score(self, ref: TaskRef, completions: Sequence[CompletionText]) -> Scored:
        """The question's text and a reward in [0, 1] for each completion (at most 64). Of an
        episode task a completion is the list of its actions so far. Raises TaskUnknown,
        ScorerFailed, ValueError."""
        (result,) = self.score_many([(ref, completions)])
        if isinstance(result, Exception):
            raise result
        return result

    def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[CompletionText]]], *, reveal: bool = False
    ) -> list[Scored | ScoreError]:
        """The same for many questions at once, in order; what went wrong with one is in its place
        and costs the others nothing. reveal: with the right answers.

        Raises ValueError as `frames.prepare` does.
        """
        results: list[Scored | ScoreError | None] = [None] * len(items)
        asked: list[tuple[int, Question]] = []
        for place, (ref, completions) in enumerate(items):
            try:
                asked.append((place, prepare(ref, completions, reveal=reveal)))
            except TaskUnknown as error:
                results[place] = self._tally.unknown(error)
        with self._lock:
            if away := [(place, question) for place, question in asked if by_url(question)]:
                questions = [question for _, question in away]
                for (place, _), result in zip(
                    away,
                    self._tally.frame(questions, self._environments.judge(questions)),
                    strict=True,
                ):
                    results[place] = result
                asked = [(place, question) for place, question in asked if not by_url(question)]
            for start in range(0, len(asked), FRAME_GROUPS):
                part = asked[start : start + FRAME_GROUPS]
                for (place, _), result in zip(
                    part, self._ask([question for _, question in part]), strict=True
                ):
                    results[place] = result
        return [result for result in results if result is not None]

    def ask(self, questions: list[Question]) -> Sequence[Scored | ScoreError]:
        """The same for one frame of questions that are prepared already."""
        with self._lock:
            return self._ask(questions)

    def statistics(self) -> ScorerStatistics:
        return self._tally.snapshot(self._child, waiting=0)

    def _ask(self, questions: list[Question], again: bool = True) -> Sequence[Scored | ScoreError]:
        """One frame. When it costs us the child, each of its questions once more, alone: whoever is
        there the second time too did it."""
        try:
            child = self._start()
        except ScorerFailed as error:
            return [error] * len(questions)
        try:
            scored = self._hold(child.ask(questions), self._deadline)
        except (Died, TimeoutError) as error:
            failure = self._tally.failure(error, self._end())
            if not again:
                return [failure]
            return [
                result for question in questions for result in self._ask([question], again=False)
            ]
        except BaseException:
            self._end()  # interrupted in the middle of a frame: what the pipe holds is nobody's
            raise
        finally:
            self._alive()
        return self._tally.frame(questions, scored)

    def _start(self) -> Child:
        """The child, a new one if there is none. Raises ScorerFailed."""
        if self._child is not None and self._child.owner != os.getpid():
            self._end()  # we are a fork: it is our parent's, we only close our copy of its pipes
        if self._child is None:
            try:
                self._child = self._make_child(self._cpu_seconds)
                self._hold(self._child.hello(), self._startup_seconds)
            except (OSError, Died) as error:  # TimeoutError is an OSError
                raise self._tally.failure(error, self._end(), starting=True) from None
            except BaseException:
                self._end()
                raise
            self._tally.started()
        return self._child

    def _end(self) -> str:
        child, self._child = self._child, None
        return child.end() if child is not None else ""

    @staticmethod
    def _hold(conversation: Generator[Wait, None, T], seconds: float) -> T:
        """Hold a conversation to its end. Raises TimeoutError, and Died as the conversation
        does."""
        end = time.monotonic() + seconds
        try:
            while True:
                direction, descriptor = next(conversation)
                poll = select.poll()
                poll.register(descriptor, select.POLLIN if direction == "read" else select.POLLOUT)
                if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                    raise TimeoutError(f"no answer within {seconds:g} s")
        except StopIteration as stop:
            return stop.value


def prove_own(names: Iterable[str]) -> None:
    """Load the owner's tasks and the games among `names` once in the sandbox, so that a defect in
    code, data or settings is reported in one line before the node starts.

    Raises ConfigError, and Unavailable where a game's library is not installed.
    """
    specs = [TASKS[name] for name in names if name in TASKS]
    for spec in specs:
        if spec.turns > 1:
            task_version(spec.id)
    changed = adjusted()
    if any(spec.kind in ("own", "dataset", "game") or spec.id in changed for spec in specs):
        try:
            with Scorer():
                pass
        except ScorerFailed as error:
            raise ConfigError(str(error)) from None
