"""`FrameScorer`: one scorer child for threads, which scores frames of prepared questions."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from swarmnode.tasks.child import Child, PipeWait, ScorerDied
from swarmnode.tasks.frames import Question, Scored, ScoreError, ScorerFailed
from swarmnode.tasks.tally import ScorerStatistics, Tally

T = TypeVar("T")


class FrameScorer:
    """A scorer child for threads. Use it as a context manager. Calls from several threads run one
    after another.

    It replaces a child that dies or exceeds its deadline, and retries the questions of its frame
    one by one.

    Args:
        setups: Returns the tasks that a child loads, as JSON of `frames.TaskSetup`.
        hash_seed: PYTHONHASHSEED of the child.
        deadline: Wall-clock limit of one request of up to 64 groups, in seconds.
        cpu_seconds: CPU time limit of one request, in seconds.
        startup_seconds: Wall-clock limit of the start of a child, in seconds.
        alive: Called after each request.
    """

    def __init__(
        self,
        setups: Callable[[], str],
        *,
        hash_seed: str = "0",
        deadline: float = 10.0,
        cpu_seconds: int = 2,
        startup_seconds: float = 60.0,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._setups = setups
        self._hash_seed = hash_seed
        self._alive = alive
        self._deadline = deadline
        self._cpu_seconds = cpu_seconds
        self._startup_seconds = startup_seconds
        self._child: Child | None = None
        self._lock = threading.Lock()
        self._tally = Tally()

    def __enter__(self) -> Self:
        """Start the child, so that the first question does not wait for it. Raises ScorerFailed."""
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
        """End the child. A later request starts another one."""
        with self._lock:
            self._end()

    def ask(self, questions: list[Question]) -> Sequence[Scored | ScoreError]:
        """Score one frame of prepared questions."""
        with self._lock:
            return self._ask(questions)

    def statistics(self) -> ScorerStatistics:
        return self._tally.snapshot(self._child, waiting=0)

    def _ask(self, questions: list[Question], retry: bool = True) -> Sequence[Scored | ScoreError]:
        """Send one frame. If the child fails, retry each question alone: a question that fails
        again is the cause.
        """
        try:
            child = self._start()
        except ScorerFailed as error:
            return [error] * len(questions)
        try:
            scored = self._converse(child.ask(questions), self._deadline)
        except (ScorerDied, TimeoutError) as error:
            failure = self._tally.failure(error, self._end())
            if not retry:
                return [failure]
            return [
                result for question in questions for result in self._ask([question], retry=False)
            ]
        except BaseException:
            self._end()  # interrupted inside a frame: the pipe may hold part of a response
            raise
        finally:
            self._alive()
        return self._tally.frame(questions, scored)

    def _start(self) -> Child:
        """Return the running child; start one if there is none. Raises ScorerFailed."""
        if self._child is not None and self._child.owner != os.getpid():
            self._end()  # this process is a fork; close its copies of the parent's pipes only
        if self._child is None:
            try:
                self._child = Child(self._cpu_seconds, self._setups(), self._hash_seed)
                self._converse(self._child.hello(), self._startup_seconds)
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

    @staticmethod
    def _converse(conversation: Generator[PipeWait, None, T], seconds: float) -> T:
        """Run a conversation to its end and return its result.

        Raises:
            TimeoutError: It takes more than `seconds`.
            ScorerDied: As the conversation raises it.
        """
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
