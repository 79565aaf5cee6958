"""One scorer process, seen from its parent: start, requests and responses, end.

Conversations are generators that wait for file descriptors. `client` runs them in a thread,
`async_client` in a trio task.
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

STDERR_BYTES = 4096
"""Bytes of standard error that are kept, from its end."""
_ROOT = Path(__file__).parents[2]  # the folder with the package `swarmnode`

PipeWait = tuple[Literal["read", "write"], int]
"""Direction and file descriptor that a conversation waits for."""


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
        self._closed = False  # it ended, or is ending, by itself

    @property
    def pid(self) -> int:
        return self._process.pid

    # Conversations yield what they wait for, so that a thread and a trio task can run the same
    # code.

    def hello(self) -> Generator[PipeWait, None, None]:
        """Wait until the child has loaded its tasks and entered its sandbox. Raises ScorerDied."""
        body = yield from self._receive()
        try:
            self.layers = tuple(frames.decode_ready(body).layers)
        except msgspec.MsgspecError as error:
            raise ScorerDied(f"no greeting: {error}") from None

    def ask(
        self, questions: list[frames.Question]
    ) -> Generator[PipeWait, None, list[frames.Scored]]:
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
