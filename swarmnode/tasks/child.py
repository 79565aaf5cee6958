"""One scorer child, seen from its parent: the process (`Child`), frames of questions with retries
(`FrameClient`), and a client for threads (`FrameScorer`).

Conversations with a child are generators that yield what they wait for, so that a thread and a trio
task run the same code. `client.AsyncScorer` is the client for trio.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import msgspec

from swarmnode.tasks import frames
from swarmnode.tasks.frames import (
    Question,
    QuestionFailed,
    Scored,
    ScoreError,
    ScorerFailed,
    TaskUnknown,
)

T = TypeVar("T")

STDERR_BYTES = 4096
"""Bytes of standard error that are kept, from its end."""
_ROOT = Path(__file__).parents[2]  # the folder with the package `swarmnode`

PipeWait = tuple[Literal["read", "write"], int]
"""Direction and file descriptor that a conversation waits for."""
TimedWait = tuple[PipeWait, float]
"""A `PipeWait` with its deadline. The conversation is sent True when the descriptor is ready, and
False after the deadline."""


class ScorerDied(Exception):
    """Raised by a conversation if the child has ended or sends an invalid response."""


class Child:
    """A running scorer process. The kernel kills it when the thread that started it ends, so it
    cannot outlive its client.

    Do not start one in a worker thread, as `trio.lowlevel.open_process` does.
    """

    def __init__(self, cpu_seconds: int, setups: str, hash_seed: str = "0") -> None:
        """Start the process. Run `hello` before the first request.

        Args:
            cpu_seconds: CPU time that one request may use, in seconds.
            setups: Tasks that it loads in addition to the built-in ones, as JSON of
                `frames.TaskSetup`.
            hash_seed: Its PYTHONHASHSEED.

        Raises:
            OSError: No process can be started.
        """
        error_read, error_write = os.pipe()
        try:
            os.set_blocking(error_read, False)
            os.set_blocking(error_write, False)  # a full pipe loses output, not time
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-E",
                    "-s",
                    "-B",
                    "-m",
                    "swarmnode.tasks.scorer",
                    str(os.getpid()),
                    str(cpu_seconds),
                    setups,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error_write,
                bufsize=0,
                cwd=_ROOT,
                env=_make_environment(hash_seed),
                start_new_session=True,  # a Ctrl-C reaches this process only, which ends the child
            )
        except BaseException:
            os.close(error_read)
            raise
        finally:
            os.close(error_write)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout, self._stderr = (
            self._process.stdin,
            self._process.stdout,
            error_read,
        )
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self.owner = os.getpid()
        self.layers: tuple[str, ...] = ()
        self._closed = False  # the child ended, or is ending, without a kill

    @property
    def pid(self) -> int:
        return self._process.pid

    def hello(self) -> Generator[PipeWait, None, None]:
        """Wait until the child has loaded its tasks and entered its sandbox. Raises ScorerDied."""
        body = yield from self._receive()
        try:
            self.layers = tuple(frames.decode_ready(body).layers)
        except msgspec.MsgspecError as error:
            raise ScorerDied(f"no greeting: {error}") from None

    def ask(self, questions: list[Question]) -> Generator[PipeWait, None, list[Scored]]:
        """Send a request and return one Scored per question. Raises ScorerDied."""
        body = frames.encode_questions(questions)
        yield from self._send(frames.HEADER.pack(len(body)) + body)
        response = yield from self._receive()
        try:
            scored = frames.decode_scored(response)
        except msgspec.MsgspecError as error:
            raise ScorerDied(f"no valid response: {error}") from None
        if not frames.valid(scored, questions):
            raise ScorerDied("its response does not fit the request")
        return scored

    def _send(self, data: bytes) -> Generator[PipeWait, None, None]:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._stdin.fileno(), view) :]
            except BlockingIOError:
                yield "write", self._stdin.fileno()
            except OSError:
                self._closed = True
                raise ScorerDied("it closed its end") from None

    def _receive(self) -> Generator[PipeWait, None, bytes]:
        header = yield from self._read(frames.HEADER.size)
        (length,) = frames.HEADER.unpack(header)
        if length > frames.FRAME_BYTES:
            raise ScorerDied("its response is too long")
        return (yield from self._read(length))

    def _read(self, length: int) -> Generator[PipeWait, None, bytes]:
        data = bytearray()
        while len(data) < length:
            try:
                chunk = os.read(self._stdout.fileno(), min(length - len(data), 1 << 20))
            except BlockingIOError:
                yield "read", self._stdout.fileno()
                continue
            if not chunk:
                self._closed = True
                raise ScorerDied("it closed its end")
            data += chunk
        return bytes(data)

    def end(self) -> str:
        """Kill and reap the process and close its pipes. This takes milliseconds; a second call
        does nothing.

        Returns:
            How the process ended, and the end of its standard error.
        """
        if self._stderr < 0:
            return ""
        how = self._reap() if os.getpid() == self.owner else "left to the process that started it"
        words = self._read_stderr()
        self._stdin.close()
        self._stdout.close()
        os.close(self._stderr)
        self._stderr = -1
        return f"{how}: {words}" if words else how

    def _reap(self) -> str:
        """Return the cause of the process's end. Wait briefly if it is ending, else kill it."""
        code = self._process.poll()
        if code is None and self._closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=0.2)
        if code is None:
            self._process.kill()
            self._process.wait()
            return "killed by its client"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def _read_stderr(self) -> str:
        data = bytearray()
        try:
            while chunk := os.read(self._stderr, 65536):
                data = (data + chunk)[-STDERR_BYTES:]
        except BlockingIOError:  # a forked copy keeps the pipe open; all written bytes are read
            pass
        return data.decode(errors="replace").strip()


def _make_environment(hash_seed: str) -> dict[str, str]:
    """Return the environment variables that the interpreter needs to start. HOME, tokens and
    proxies are excluded.
    """
    keep = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {"LANG": "C.UTF-8", "PYTHONHASHSEED": hash_seed, **keep}


# ---- frames, with retries ------------------------------------------------------------------------


@dataclass(frozen=True)
class ScorerLimits:
    """Limits of a scorer child, in seconds."""

    request: float = 10.0
    """Wall-clock time of one request of up to 64 groups."""
    cpu: int = 2
    """CPU time of one request."""
    startup: float = 60.0
    """Wall-clock time of the start of a child."""


LIMITS = ScorerLimits()


class FrameClient:
    """A scorer child that is started when it is needed and replaced after a failure, and its
    counters.

    Args:
        setups: Returns the tasks that a child loads, as JSON of `frames.TaskSetup`.
        hash_seed: PYTHONHASHSEED of the child.
        alive: Called after each request.
        clock: Clock of the deadlines, seconds.
    """

    def __init__(
        self,
        setups: Callable[[], str],
        limits: ScorerLimits,
        *,
        hash_seed: str = "0",
        alive: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.child: Child | None = None
        self._counts = ScorerStatistics()
        self._setups = setups
        self._hash_seed = hash_seed
        self._limits = limits
        self._alive = alive
        self._clock = clock

    def score(
        self, questions: list[Question]
    ) -> Generator[TimedWait, bool, list[Scored | ScoreError]]:
        """Score one frame. If the child fails, retry each question alone: a question that fails
        again is the cause, and only this question has no result.

        Raises:
            ScorerFailed: No child can be started.
        """
        results = yield from self._request(questions)
        if isinstance(results, list):
            return results
        retried: list[Scored | ScoreError] = []
        for question in questions:
            results = yield from self._request([question])
            retried += results if isinstance(results, list) else [results]
        return retried

    def _request(
        self, questions: list[Question]
    ) -> Generator[TimedWait, bool, list[Scored | ScoreError] | ScorerFailed]:
        """Send one frame. Return its results, or the failure of the child."""
        child = yield from self.start()
        try:
            # The CPU time of a formula takes about a second on a busy machine.
            extra = max(len(each.answers) if each.formulas else 0 for each in questions)
            scored = yield from self._within(self._limits.request + extra, child.ask(questions))
        except (ScorerDied, TimeoutError) as error:
            return self._failure(error, self.end())
        except BaseException:
            self.end()  # interrupted inside a frame: the pipe may hold part of a response
            raise
        finally:
            self._alive()
        return self.tally(questions, scored)

    def start(self) -> Generator[TimedWait, bool, Child]:
        """Return the running child; start one if there is none. Raises ScorerFailed."""
        if self.child is not None and self.child.owner != os.getpid():
            self.end()  # this process is a fork; close its copies of the parent's pipes only
        if self.child is None:
            try:
                self.child = Child(self._limits.cpu, self._setups(), self._hash_seed)
                yield from self._within(self._limits.startup, self.child.hello())
            except (OSError, ScorerDied) as error:  # TimeoutError is an OSError
                raise self._failure(error, self.end(), starting=True) from None
            except BaseException:
                self.end()
                raise
            self._add(starts=1)
        return self.child

    def _within(
        self, seconds: float, conversation: Generator[PipeWait, None, T]
    ) -> Generator[TimedWait, bool, T]:
        """Return the result of a conversation. Raises TimeoutError after `seconds`."""
        end = self._clock() + seconds
        try:
            while True:
                is_ready = yield next(conversation), end
                if not is_ready:
                    raise TimeoutError(f"no answer within {seconds:g} s")
        except StopIteration as stop:
            result: T = stop.value
            return result

    def end(self) -> str:
        """End the child. Return how it ended, and the end of its standard error."""
        child, self.child = self.child, None
        return child.end() if child is not None else ""

    def statistics(self, waiting: int = 0) -> ScorerStatistics:
        """Return the counters. `waiting` is the number of queued questions."""
        child = self.child
        return msgspec.structs.replace(
            self._counts,
            pid=child.pid if child else None,
            layers=child.layers if child else (),
            waiting=waiting,
        )

    def tally(self, questions: list[Question], scored: list[Scored]) -> list[Scored | ScoreError]:
        """Count a frame and return its results. A question that could not be made has the result
        QuestionFailed.
        """
        errors, refusals = Counter(self._counts.reward_errors), Counter(self._counts.refusals)
        results: list[Scored | ScoreError] = []
        for question, result in zip(questions, scored, strict=True):
            skipped = question.answers.count(None) + sum(None in each for each in question.actions)
            self._add(
                groups=1,
                completions=len(question.answers) + len(question.actions),
                skipped=skipped,
            )
            if result.error:
                errors[question.task] += result.errors or 1
                self._set(last_reward_error=f"{question.task}: {result.error}")
            if result.refusals:
                refusals[question.task] += sum(result.refusals.values())
                self._set(last_refusal=f"{question.task}: {', '.join(result.refusals)}")
            results.append(
                result
                if result.prompt
                else QuestionFailed(f"{question.task} made no question: {result.error}")
            )
        self._add(frames=1)
        self._set(reward_errors=dict(errors), refusals=dict(refusals))
        return results

    def unknown(self, error: TaskUnknown) -> TaskUnknown:
        """Count a question that cannot be regenerated, and return the error."""
        self._add(unknown=1)
        return error

    def _failure(self, error: Exception, ending: str, *, starting: bool = False) -> ScorerFailed:
        """Count a failure and describe it in one line: the observed error, how the child ended, and
        the end of its standard error.
        """
        what = "did not start" if starting else "was replaced"
        text = f"the scorer {what}: {error}{'; ' + ending if ending else ''}"
        self._add(failures=1)
        self._set(last_failure=text)
        return ScorerFailed(text)

    def _add(self, **more: int) -> None:
        """Raise counters of `ScorerStatistics` by these numbers."""
        self._set(**{name: getattr(self._counts, name) + count for name, count in more.items()})

    def _set(self, **values: object) -> None:
        self._counts = msgspec.structs.replace(self._counts, **values)


class FrameScorer:
    """A scorer child for threads. Use it as a context manager. Calls from several threads run one
    after another. The arguments are those of `FrameClient`.
    """

    def __init__(
        self,
        setups: Callable[[], str],
        limits: ScorerLimits = LIMITS,
        *,
        hash_seed: str = "0",
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = FrameClient(setups, limits, hash_seed=hash_seed, alive=alive)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Start the child, so that the first question does not wait for it. Raises ScorerFailed."""
        with self._lock:
            converse(self._client.start())
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
            self._client.end()

    def ask(self, questions: list[Question]) -> Sequence[Scored | ScoreError]:
        """Score one frame of prepared questions. If no child can be started, the failure is the
        result of each question."""
        with self._lock:
            return self._ask(questions)

    def _ask(self, questions: list[Question]) -> Sequence[Scored | ScoreError]:
        try:
            return converse(self._client.score(questions))
        except ScorerFailed as error:
            return [error] * len(questions)

    def statistics(self) -> ScorerStatistics:
        return self._client.statistics()


def converse(conversation: Generator[TimedWait, bool, T]) -> T:
    """Run a conversation to its end in this thread, and return its result."""
    try:
        (direction, descriptor), end = next(conversation)
        while True:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN if direction == "read" else select.POLLOUT)
            ready = poll.poll(max(0.0, end - time.monotonic()) * 1000)
            (direction, descriptor), end = conversation.send(bool(ready))
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        conversation.close()


# ---- counters ------------------------------------------------------------------------------------


class ScorerStatistics(msgspec.Struct, frozen=True):
    """Counters of a client since its creation, and the present state of its child."""

    pid: int | None = None
    """Pid of the child; None while no child runs."""
    layers: tuple[str, ...] = ()
    """Active sandbox layers (`sandbox.LAYERS`)."""
    frames: int = 0
    """Answered requests."""
    groups: int = 0
    completions: int = 0
    skipped: int = 0
    """Completions that were too long or unencodable. They are part of `completions`, and their
    reward is 0.
    """
    unknown: int = 0
    """Questions that could not be regenerated."""
    starts: int = 0
    failures: int = 0
    """Children that died, exceeded a deadline or did not start."""
    waiting: int = 0
    """Questions in the queue."""
    last_failure: str = ""
    reward_errors: dict[str, int] = {}
    """Task → completions whose reward raised an exception or was no number from 0 to 1, and
    questions that could not be made.
    """
    last_reward_error: str = ""
    """Last such error in one line, starting with the task."""
    refusals: dict[str, int] = {}
    """Task → actions of its code that the sandbox refused. Rewards may be wrong since."""
    last_refusal: str = ""
    """Last such action, starting with the task."""
