"""Regenerates questions and judges answers in a sandboxed child. `Scorer` blocks (for the trainer);
`AsyncScorer` is for trio (the network process).

Both replace a child that dies or exceeds its deadline, and retry the questions of its frame one by
one (`child.FrameClient`). Only the question that caused the failure has no result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import trio

from swarmnode.errors import ConfigError
from swarmnode.tasks.answers import extract, has_text_after
from swarmnode.tasks.child import (
    LIMITS,
    FrameClient,
    FrameScorer,
    ScorerLimits,
    ScorerStatistics,
    TimedWait,
)
from swarmnode.tasks.environments import Environments, is_remote
from swarmnode.tasks.frames import (
    FRAME_GROUPS,
    CompletionText,
    Question,
    Scored,
    ScoreError,
    ScorerFailed,
    TaskUnknown,
)
from swarmnode.tasks.registry import TASKS, TaskSpec, changed_settings, encode_tasks, task_version
from swarmnode.tasks.seeds import is_address
from swarmnode.wire.limits import COMPLETIONS, TEXT_BYTES, TURNS
from swarmnode.wire.messages import TaskRef

__all__ = [
    "AsyncScorer",
    "ScoreError",
    "Scored",
    "Scorer",
    "ScorerFailed",
    "ScorerLimits",
    "ScorerStatistics",
    "TaskUnknown",
    "check_tasks",
]

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to start a child


class Scorer(FrameScorer):
    """A scorer child for threads that loads all tasks of this process. It scores questions of
    environment servers itself. The arguments are those of `FrameScorer`.
    """

    def __init__(
        self, limits: ScorerLimits = LIMITS, *, alive: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(encode_tasks, limits, alive=alive)
        self._environments = Environments(alive)

    def score(self, ref: TaskRef, completions: Sequence[CompletionText]) -> Scored:
        """Return the question's text and a reward in [0, 1] for each completion.

        Args:
            completions: At most 64. For an episode task, a completion is the list of its actions so
                far.

        Raises:
            TaskUnknown: This node cannot regenerate the question.
            ScorerFailed: The child failed.
            ValueError: See `prepare`.
        """
        (result,) = self.score_many([(ref, completions)])
        if isinstance(result, Exception):
            raise result
        return result

    def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[CompletionText]]], *, reveal: bool = False
    ) -> list[Scored | ScoreError]:
        """Score several questions and return their results in order. The error of one question
        takes the place of its result and does not affect the other questions.

        Args:
            reveal: Return the right answers too.

        Raises:
            ValueError: See `prepare`.
        """
        results: list[Scored | ScoreError | None] = [None] * len(items)
        asked: list[tuple[int, Question]] = []
        for place, (ref, completions) in enumerate(items):
            try:
                asked.append((place, prepare(ref, completions, reveal=reveal)))
            except TaskUnknown as error:
                results[place] = self._client.unknown(error)
        with self._lock:
            if remote := [(place, question) for place, question in asked if is_remote(question)]:
                questions = [question for _, question in remote]
                found = self._client.tally(questions, self._environments.judge(questions))
                for (place, _), result in zip(remote, found, strict=True):
                    results[place] = result
                asked = [(place, question) for place, question in asked if not is_remote(question)]
            for start in range(0, len(asked), FRAME_GROUPS):
                part = asked[start : start + FRAME_GROUPS]
                for (place, _), result in zip(
                    part, self._ask([question for _, question in part]), strict=True
                ):
                    results[place] = result
        return [result for result in results if result is not None]


def check_tasks(names: Iterable[str]) -> None:
    """Load the owner's tasks and the games among `names` once in the sandbox. This reports a defect
    of code, data or settings in one line before the node starts.

    Raises:
        ConfigError: A task cannot be loaded.
        Unavailable: A game's library is not installed.
    """
    specs = [TASKS[name] for name in names if name in TASKS]
    for spec in specs:
        if spec.turns > 1:
            task_version(spec.id)
    changed = changed_settings()
    if any(spec.kind in ("own", "dataset", "game") or spec.id in changed for spec in specs):
        try:
            with Scorer():
                pass
        except ScorerFailed as error:
            raise ConfigError(str(error)) from None


# ---- for trio ------------------------------------------------------------------------------------


class AsyncScorer:
    """A scorer child for trio. Use `async with AsyncScorer() as scorer`, or start `run` in a
    nursery.

    Callers queue questions, and `run` sends them to the child in frames. Questions gather while a
    frame is with the child, so frames get fuller under load.
    """

    def __init__(self, limits: ScorerLimits = LIMITS) -> None:
        self._client = FrameClient(encode_tasks, limits, clock=trio.current_time)
        self._queue: deque[_Job] = deque()
        self._queued = trio.Event()
        self._running = False
        self._environments = Environments()

    async def __aenter__(self) -> Self:
        self._manager = trio.open_nursery()
        nursery = await self._manager.__aenter__()
        self._cancel = nursery.cancel_scope.cancel
        await nursery.start(self.run)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cancel()
        # Raise an error of the body as it is, not inside an ExceptionGroup.
        await self._manager.__aexit__(None, None, None)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the queue until cancelled. The task reports `started` when it accepts questions,
        which may be before the child is ready.
        """
        self._running = True
        pause = _FIRST_PAUSE
        jobs: list[_Job] = []
        try:
            task_status.started()
            while True:
                jobs = await self._next_jobs()
                try:
                    results = await _converse(self._client.score([job.question for job in jobs]))
                    pause = _FIRST_PAUSE
                except ScorerFailed as error:
                    # No child could be started. Do not let these questions wait for the next
                    # attempt.
                    _fail(jobs, error)
                    await trio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                    continue
                for job, result in zip(jobs, results, strict=True):
                    job.settle(result)
        finally:
            self._running = False
            self._client.end()
            _fail([*jobs, *self._queue], ScorerFailed("the scorer was closed"))
            self._queue.clear()

    async def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[CompletionText]]]
    ) -> list[Scored | ScoreError]:
        """Score several questions and return their results in order. The error of one question
        takes the place of its result and does not affect the other questions.

        If the caller is cancelled, its waiting questions are dropped.

        Raises:
            ScorerFailed: The scorer is not running.
            ValueError: See `prepare`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        results: list[Scored | ScoreError | _Job] = []
        for ref, completions in items:
            try:
                results.append(_Job(prepare(ref, completions)))
            except TaskUnknown as error:
                results.append(self._client.unknown(error))
        jobs = [result for result in results if isinstance(result, _Job)]
        if jobs and not self._running:
            raise ScorerFailed("the scorer is not running")
        self._queue.extend(job for job in jobs if not is_remote(job.question))
        self._queued.set()
        try:
            if remote := [job for job in jobs if is_remote(job.question)]:
                questions = [job.question for job in remote]
                scored = await trio.to_thread.run_sync(
                    self._environments.judge, questions, abandon_on_cancel=True
                )
                found = self._client.tally(questions, scored)
                for job, result in zip(remote, found, strict=True):
                    job.settle(result)
            for job in jobs:
                await job.done.wait()
        finally:
            for job in jobs:
                job.wanted = False
        return [_result_of(result) if isinstance(result, _Job) else result for result in results]

    def statistics(self) -> ScorerStatistics:
        return self._client.statistics(waiting=len(self._queue))

    async def _next_jobs(self) -> list[_Job]:
        """Return up to FRAME_GROUPS queued questions whose callers still wait; wait for the first
        one.
        """
        while True:
            jobs: list[_Job] = []
            while self._queue and len(jobs) < FRAME_GROUPS:
                job = self._queue.popleft()
                if job.wanted:
                    jobs.append(job)
            if jobs:
                return jobs
            self._queued = trio.Event()
            await self._queued.wait()


class _Job:
    """A queued question and, later, its result."""

    __slots__ = ("done", "question", "result", "wanted")

    def __init__(self, question: Question) -> None:
        self.question = question
        self.done = trio.Event()
        self.result: Scored | ScoreError | None = None
        self.wanted = True

    def settle(self, result: Scored | ScoreError) -> None:
        self.result = result
        self.done.set()


async def _converse(conversation: Generator[TimedWait, bool, T]) -> T:
    """Run a conversation to its end in this task, and return its result."""
    try:
        (direction, descriptor), end = next(conversation)
        while True:
            with trio.move_on_at(end) as scope:
                if direction == "read":
                    await trio.lowlevel.wait_readable(descriptor)
                else:
                    await trio.lowlevel.wait_writable(descriptor)
            (direction, descriptor), end = conversation.send(not scope.cancelled_caught)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        conversation.close()


def _fail(jobs: Sequence[_Job], error: ScorerFailed) -> None:
    for job in jobs:
        if not job.done.is_set():
            job.settle(error)


def _result_of(job: _Job) -> Scored | ScoreError:
    assert job.result is not None
    return job.result


# ---- questions -----------------------------------------------------------------------------------


def prepare(
    ref: TaskRef, completions: Sequence[CompletionText], *, reveal: bool = False
) -> Question:
    """Return the question for the child.

    The child receives only questions that this node can regenerate, and only the part of a
    completion that can earn a reward.

    Args:
        reveal: Return the right answer too.

    Raises:
        TaskUnknown: This node cannot regenerate the question.
        ValueError: There are more than 64 completions or 32 actions, or a completion has the wrong
            form for the task (one answer, or a list of actions).
    """
    spec = TASKS.get(ref.id)
    if spec is None:
        raise TaskUnknown("task", repr(ref.id))
    if ref.version != task_version(ref.id):
        raise TaskUnknown(
            "version", f"{ref.version!r} of {ref.id}, this node has {task_version(ref.id)!r}"
        )
    if not is_address(ref.seed, ref.index):
        raise TaskUnknown("address", f"seed {ref.seed}, index {ref.index}")
    if len(completions) > COMPLETIONS:
        raise ValueError(f"{len(completions)} completions, more than {COMPLETIONS}")
    answers = list[str | None]()
    episodes = list[list[str | None]]()
    for completion in completions:
        if isinstance(completion, str) != (spec.turns == 1):
            wanted = "an answer" if spec.turns == 1 else "a list of actions"
            raise ValueError(f"a completion of {ref.id} is {wanted}")
        if isinstance(completion, str):
            answers.append(_sendable(completion, spec))
        elif len(completion) > TURNS:
            raise ValueError(f"{len(completion)} actions, more than {TURNS}")
        else:
            episodes.append([_sendable(action, spec) for action in completion])
    formulas = spec.generator == "math"
    return Question(ref.id, ref.seed, ref.index, answers, reveal, episodes, formulas)


def _sendable(text: str, spec: TaskSpec) -> str | None:
    if len(text) > TEXT_BYTES:
        return None
    if spec.nothing_after and has_text_after(text, *spec.place):
        return None
    answer = extract(text, *spec.place)
    try:
        return answer if len(answer.encode()) <= spec.max_answer_bytes else None
    except UnicodeEncodeError:  # a lone surrogate, which no UTF-8 text contains
        return None
