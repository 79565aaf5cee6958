"""One scorer process as its parent sees it: started, talked to, killed.

Knows neither threads nor trio: `client` and `async_client` wait for it, each in its way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import msgspec

from swarmnode.tasks import frames
from swarmnode.tasks.registry import TASKS, TaskSpec, adjusted, loaded_games

STDERR_BYTES = 4096
"""The last words that are kept."""
_ROOT = Path(__file__).parents[2]  # the folder that holds the package `swarmnode`

Wait = tuple[Literal["read", "write"], int]
"""What a conversation waits for: this file descriptor to become readable or writable."""


class Died(Exception):
    """Raised in a conversation when the child is gone or talks nonsense."""


class Child:
    """A running scorer. The kernel kills it when the thread that made it ends: that is how it goes
    when its client is killed.

    So never make one in a worker thread, which is where `trio.lowlevel.open_process` makes
    processes.
    """

    def __init__(self, cpu_seconds: int, brought: str | None = None, hash_seed: str = "0") -> None:
        """Start it; it is of use after `hello`.

        Args:
            cpu_seconds: CPU time that one request may use, in seconds.
            brought: Tasks that it loads beside the built-in ones, as JSON of `brought_tasks`;
                None for all of this process.
            hash_seed: Its PYTHONHASHSEED.

        Raises:
            OSError: No process can be started.
        """
        error_read, error_write = os.pipe()
        try:
            os.set_blocking(error_read, False)
            os.set_blocking(error_write, False)  # a child that talks too much loses words, not time
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
                    brought_tasks() if brought is None else brought,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error_write,
                bufsize=0,
                cwd=_ROOT,
                env=_environment(hash_seed),
                start_new_session=True,  # a Ctrl-C is for us, and the child is ours to end
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
        self._closed = False  # it has left, or is leaving, by itself

    @property
    def pid(self) -> int:
        return self._process.pid

    # Conversations are generators that yield what they wait for, so that a thread and a trio task
    # can hold the same one.

    def hello(self) -> Generator[Wait, None, None]:
        """Wait until it has loaded its tasks and locked itself in. Raises Died."""
        body = yield from self._receive()
        try:
            self.layers = tuple(frames.decode_ready(body).layers)
        except msgspec.MsgspecError as error:
            raise Died(f"no greeting: {error}") from None

    def ask(self, questions: list[frames.Question]) -> Generator[Wait, None, list[frames.Scored]]:
        """Send a request and return the response, one Scored per question. Raises Died."""
        body = frames.encode_questions(questions)
        yield from self._send(frames.HEADER.pack(len(body)) + body)
        response = yield from self._receive()
        try:
            scored = frames.decode_scored(response)
        except msgspec.MsgspecError as error:
            raise Died(f"no valid response: {error}") from None
        if not frames.valid(scored, questions):
            raise Died("its response does not fit the request")
        return scored

    def _send(self, data: bytes) -> Generator[Wait, None, None]:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._stdin.fileno(), view) :]
            except BlockingIOError:
                yield "write", self._stdin.fileno()
            except OSError:
                self._closed = True
                raise Died("it closed its end") from None

    def _receive(self) -> Generator[Wait, None, bytes]:
        header = yield from self._read(frames.HEADER.size)
        (length,) = frames.HEADER.unpack(header)
        if length > frames.FRAME_BYTES:
            raise Died("its response is too long")
        return (yield from self._read(length))

    def _read(self, length: int) -> Generator[Wait, None, bytes]:
        data = bytearray()
        while len(data) < length:
            try:
                chunk = os.read(self._stdout.fileno(), min(length - len(data), 1 << 20))
            except BlockingIOError:
                yield "read", self._stdout.fileno()
                continue
            if not chunk:
                self._closed = True
                raise Died("it closed its end")
            data += chunk
        return bytes(data)

    def end(self) -> str:
        """Kill and reap it, close its pipes, and return how it ended and its last words. Takes
        milliseconds; a second call does nothing."""
        if self._stderr < 0:
            return ""
        how = (
            self._reap()
            if os.getpid() == self.owner
            else "left to the process that we were forked from"
        )
        words = self._last_words()
        self._stdin.close()
        self._stdout.close()
        os.close(self._stderr)
        self._stderr = -1
        return f"{how}: {words}" if words else how

    def _reap(self) -> str:
        """How it ended, waiting for that if it is on its way, else killing it."""
        code = self._process.poll()
        if code is None and self._closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=0.2)
        if code is None:
            self._process.kill()
            self._process.wait()
            return "killed by its client"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def _last_words(self) -> str:
        data = bytearray()
        try:
            while chunk := os.read(self._stderr, 65536):
                data = (data + chunk)[-STDERR_BYTES:]
        except BlockingIOError:  # a forked copy still holds the other end: what was written is read
            pass
        return data.decode(errors="replace").strip()


def brought_tasks(spec: TaskSpec | None = None) -> str:
    """Return the owner's tasks and datasets and the loaded games of this process, or `spec` alone,
    as JSON. The child has no other source for them."""
    if spec is not None:
        return msgspec.json.encode([_brought(spec)]).decode()
    own = [spec for spec in TASKS.values() if spec.source is not None or spec.rows is not None]
    told = [_brought(spec) for spec in (*own, *loaded_games())]
    told += [frames.Brought(task, None, None, settings) for task, settings in adjusted().items()]
    return msgspec.json.encode(told).decode()


def _brought(spec: TaskSpec) -> frames.Brought:
    return frames.Brought(spec.id, spec.source, spec.rows, dict(spec.settings))


def _environment(hash_seed: str) -> dict[str, str]:
    """What the interpreter needs to start, and nothing a scorer could want: no home, no token, no
    proxy."""
    keep = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {"LANG": "C.UTF-8", "PYTHONHASHSEED": hash_seed, **keep}
