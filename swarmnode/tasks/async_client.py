"""`AsyncScorer`: the trio version of `client.Scorer`. Callers queue questions, and one task sends
them to the child in frames.

Questions gather while a frame is with the child, so frames get fuller under load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import trio

from swarmnode.tasks.child import Child, PipeWait, ScorerDied
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
from swarmnode.tasks.questions import prepare
from swarmnode.tasks.registry import encode_tasks
from swarmnode.tasks.tally import ScorerStatistics, Tally
from swarmnode.wire.messages import TaskRef

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to start a child


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


class AsyncScorer:
    """A scorer child for trio. Use `async with AsyncScorer() as scorer`, or start `run` in a
    nursery.

    Args:
        deadline: Wall-clock limit of one request of up to 64 groups, in seconds.
        cpu_seconds: CPU time limit of one request, in seconds.
        startup_seconds: Wall-clock limit of the start of a child, in seconds.
    """

    def __init__(
        self, *, deadline: float = 10.0, cpu_seconds: int = 2, startup_seconds: float = 60.0
    ) -> None:
        self._deadline = deadline
        self._cpu_seconds = cpu_seconds
        self._startup_seconds = startup_seconds
        self._child: Child | None = None
        self._queue: deque[_Job] = deque()
        self._queued = trio.Event()
        self._running = False
        self._tally = Tally()
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
                    await self._serve(jobs)
                    pause = _FIRST_PAUSE
                except ScorerFailed as error:
                    # No child could be started. Do not let these questions wait for the next
                    # attempt.
                    _fail(jobs, error)
                    await trio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            self._running = False
            self._end()
            _fail([*jobs, *self._queue], ScorerFailed("the scorer was closed"))
            self._queue.clear()

    async def prompt(self, ref: TaskRef) -> str:
        """Return the question's text.

        Raises:
            TaskUnknown: This node cannot regenerate the question.
            ScorerFailed: The child failed.
        """
        return (await self.score(ref, [])).prompt

    async def score(self, ref: TaskRef, completions: Sequence[CompletionText]) -> Scored:
        """Return the question's text and a reward in [0, 1] for each completion.

        Args:
            completions: At most 64. For an episode task, a completion is the list of its actions so
                far.

        Raises:
            TaskUnknown: This node cannot regenerate the question.
            ScorerFailed: The child failed.
            ValueError: As `questions.prepare` raises it.
        """
        (result,) = await self.score_many([(ref, completions)])
        if isinstance(result, Exception):
            raise result
        return result

    async def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[CompletionText]]]
    ) -> list[Scored | ScoreError]:
        """Score several questions and return their results in order. The error of one question
        takes the place of its result and does not affect the other questions.

        If the caller is cancelled, its waiting questions are dropped.

        Raises:
            ScorerFailed: The scorer is not running.
            ValueError: As `questions.prepare` raises it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        results: list[Scored | ScoreError | _Job] = []
        for ref, completions in items:
            try:
                results.append(_Job(prepare(ref, completions)))
            except TaskUnknown as error:
                results.append(self._tally.unknown(error))
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
                for job, found in zip(remote, self._tally.frame(questions, scored), strict=True):
                    job.settle(found)
            for job in jobs:
                await job.done.wait()
        finally:
            for job in jobs:
                job.wanted = False
        return [
            result if not isinstance(result, _Job) else _result_of(result) for result in results
        ]

    def statistics(self) -> ScorerStatistics:
        return self._tally.snapshot(self._child, waiting=len(self._queue))

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

    async def _serve(self, jobs: list[_Job], retry: bool = True) -> None:
        """Send one frame. If the child fails, retry each question alone: a question that fails
        again is the cause.

        Raises:
            ScorerFailed: No child can be started.
        """
        child = await self._start()
        questions = [job.question for job in jobs]
        try:
            scored = await _converse(child.ask(questions), self._deadline)
        except (ScorerDied, TimeoutError) as error:
            failure = self._tally.failure(error, self._end())
            if not retry:
                jobs[0].settle(failure)
                return
            for job in jobs:
                if job.wanted:
                    await self._serve([job], retry=False)
            return
        except BaseException:
            self._end()  # cancelled inside a frame: the pipe may hold part of a response
            raise
        for job, result in zip(jobs, self._tally.frame(questions, scored), strict=True):
            job.settle(result)

    async def _start(self) -> Child:
        """Return the running child; start one if there is none. Raises ScorerFailed."""
        if self._child is None:
            try:
                # Not in a worker thread: the kernel kills the child when its thread ends.
                self._child = Child(self._cpu_seconds, encode_tasks())
                await _converse(self._child.hello(), self._startup_seconds)
            except (OSError, ScorerDied) as error:  # TimeoutError is an OSError
                raise self._tally.failure(error, self._end(), starting=True) from None
            except BaseException:
                self._end()
                raise
            self._tally.started()
        return self._child

    def _end(self) -> str:
        child, self._child = self._child, None
        return child.end() if child is not None else ""


async def _converse(conversation: Generator[PipeWait, None, T], seconds: float) -> T:
    """Run a conversation to its end and return its result.

    Raises:
        TimeoutError: It takes more than `seconds`.
        ScorerDied: As the conversation raises it.
    """
    with trio.move_on_after(seconds) as scope:
        try:
            while True:
                direction, descriptor = next(conversation)
                if direction == "read":
                    await trio.lowlevel.wait_readable(descriptor)
                else:
                    await trio.lowlevel.wait_writable(descriptor)
        except StopIteration as stop:
            return stop.value
    assert scope.cancelled_caught
    raise TimeoutError(f"no answer within {seconds:g} s")


def _fail(jobs: Sequence[_Job], error: ScorerFailed) -> None:
    for job in jobs:
        if not job.done.is_set():
            job.settle(error)


def _result_of(job: _Job) -> Scored | ScoreError:
    assert job.result is not None
    return job.result
