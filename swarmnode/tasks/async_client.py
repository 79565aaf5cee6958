"""`AsyncScorer`: `client.Scorer` for trio. Callers queue their questions; one task carries them to
the child, a frame at a time.

While a frame is with the child, more questions gather for the next one: the busier it is, the
fuller the frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import trio

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
from swarmnode.tasks.tally import ScorerStatistics, Tally
from swarmnode.wire.messages import TaskRef

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to start a child


class _Job:
    """A question in the queue and, later, its result."""

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
    """A scorer child for trio. `async with AsyncScorer() as scorer`, or start `run` in a nursery of
    your own.

    deadline: wall-clock seconds for a request of up to 64 groups; cpu_seconds: CPU time that one
    may use; startup_seconds: until a new child is ready.
    """

    def __init__(
        self, *, deadline: float = 10.0, cpu_seconds: int = 2, startup_seconds: float = 60.0
    ) -> None:
        self._deadline = deadline
        self._cpu_seconds = cpu_seconds
        self._startup_seconds = startup_seconds
        self._child: Child | None = None
        self._queue: deque[_Job] = deque()
        self._news = trio.Event()
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
        # an error of the body leaves as it is, not in an ExceptionGroup
        await self._manager.__aexit__(None, None, None)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the queue until cancelled. Started as soon as it takes questions, which may be
        before the child is ready."""
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
                    # no child to be had: these questions have waited long enough
                    _settle(jobs, error)
                    await trio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            self._running = False
            self._end()
            _settle([*jobs, *self._queue], ScorerFailed("the scorer was closed"))
            self._queue.clear()

    async def prompt(self, ref: TaskRef) -> str:
        """The question's text. Raises TaskUnknown, ScorerFailed."""
        return (await self.score(ref, [])).prompt

    async def score(self, ref: TaskRef, completions: Sequence[CompletionText]) -> Scored:
        """The question's text and a reward in [0, 1] for each completion (at most 64). Of an
        episode task a completion is the list of its actions so far. Raises TaskUnknown,
        ScorerFailed, ValueError."""
        (result,) = await self.score_many([(ref, completions)])
        if isinstance(result, Exception):
            raise result
        return result

    async def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[CompletionText]]]
    ) -> list[Scored | ScoreError]:
        """The same for many questions at once, in order; what went wrong with one is in its place
        and costs the others nothing.

        Raises ValueError as `frames.prepare` does. Cancelled, it takes its
        questions back.
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
        self._queue.extend(job for job in jobs if not by_url(job.question))
        self._news.set()
        try:
            if away := [job for job in jobs if by_url(job.question)]:
                questions = [job.question for job in away]
                scored = await trio.to_thread.run_sync(
                    self._environments.judge, questions, abandon_on_cancel=True
                )
                for job, found in zip(away, self._tally.frame(questions, scored), strict=True):
                    job.settle(found)
            for job in jobs:
                await job.done.wait()
        finally:
            for job in jobs:
                job.wanted = False
        return [result if not isinstance(result, _Job) else _settled(result) for result in results]

    def statistics(self) -> ScorerStatistics:
        return self._tally.snapshot(self._child, waiting=len(self._queue))

    async def _next_jobs(self) -> list[_Job]:
        """A frame's worth of questions that somebody still waits for."""
        while True:
            jobs: list[_Job] = []
            while self._queue and len(jobs) < FRAME_GROUPS:
                job = self._queue.popleft()
                if job.wanted:
                    jobs.append(job)
            if jobs:
                return jobs
            self._news = trio.Event()
            await self._news.wait()

    async def _serve(self, jobs: list[_Job], again: bool = True) -> None:
        """One frame. When it costs us the child, each of its questions once more, alone: whoever is
        there the second time too did it.

        Raises ScorerFailed when no child can be started.
        """
        child = await self._start()
        questions = [job.question for job in jobs]
        try:
            scored = await _hold(child.ask(questions), self._deadline)
        except (Died, TimeoutError) as error:
            failure = self._tally.failure(error, self._end())
            if not again:
                jobs[0].settle(failure)
                return
            for job in jobs:
                if job.wanted:
                    await self._serve([job], again=False)
            return
        except BaseException:
            self._end()  # cancelled in the middle of a frame: what the pipe holds is nobody's
            raise
        for job, result in zip(jobs, self._tally.frame(questions, scored), strict=True):
            job.settle(result)

    async def _start(self) -> Child:
        """The child, a new one if there is none. Raises ScorerFailed."""
        if self._child is None:
            try:
                # here and not in a worker thread, whose end would be the child's
                self._child = Child(self._cpu_seconds)
                await _hold(self._child.hello(), self._startup_seconds)
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


async def _hold(conversation: Generator[Wait, None, T], seconds: float) -> T:
    """Hold a conversation to its end. Raises TimeoutError, and Died as the conversation does."""
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


def _settle(jobs: Sequence[_Job], error: ScorerFailed) -> None:
    for job in jobs:
        if not job.done.is_set():
            job.settle(error)


def _settled(job: _Job) -> Scored | ScoreError:
    assert job.result is not None
    return job.result
