"""Lines of JSON between a command and the child process that answers.

command  Opening, then Question and Stop          ──▶  child's stdin
child    Ready, then Piece… and End per question  ──▶  command's pipe
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable

import msgspec

from swarmnode.errors import ConfigError, DeviceError, Refused, SwarmNodeError, Unavailable

CHILD = "swarmnode.talk.child"


class Opening(msgspec.Struct, frozen=True):
    """The policy to open."""

    config: str
    """Configuration, JSON. `policy.model` is the model, or the base of the saved policy."""
    command: str
    """Name of the command, for error messages."""
    saved: bool
    """True to load the trainer's last saved policy."""


class Turn(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class Question(msgspec.Struct, frozen=True, tag=True):
    """A conversation to continue."""

    id: int
    turns: list[Turn]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None = None
    """Seed of the random numbers; None for one that is not repeated."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Ends the answer to a question."""

    id: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The policy is loaded."""

    step: int | None
    """Training step of a saved policy; None for a model."""


class Piece(msgspec.Struct, frozen=True, tag=True):
    """The next characters of an answer."""

    id: int
    text: str


class End(msgspec.Struct, frozen=True, tag=True):
    """The last message about a question."""

    id: int
    finish: str
    """`stop` at the end of the turn, `length` at a limit; empty if it was stopped or refused."""
    prompt_tokens: int
    completion_tokens: int
    error: str = ""
    """Reason of a refusal."""


to_child = msgspec.json.Decoder(Question | Stop).decode
from_child = msgspec.json.Decoder(Ready | Piece | End).decode


def line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class Child:
    """The child process. It loads the policy at once, and its stderr shows the progress.

    It has a process group of its own, so that Ctrl-C reaches the command only. It ends with the
    `with` block or with its parent.
    """

    def __init__(self, opening: Opening) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # `pipes` reads what follows the last line
            process_group=0,
        )
        self._write(opening)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with self._process:
            pass

    @property
    def pipes(self) -> tuple[int, int]:
        """Descriptors of the child's input and output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin.fileno(), self._process.stdout.fileno()

    def wait_until_ready(self) -> Ready:
        """Wait until the policy is loaded.

        Raises:
            Unavailable, StateError, DeviceError: It cannot be loaded; see stderr.
        """
        message = self._read()
        assert isinstance(message, Ready)
        return message

    def answer(self, question: Question, show: Callable[[str], object]) -> tuple[str, End]:
        """Return an answer and its end. Ctrl-C stops the answer.

        Args:
            show: Receives each piece of the text.
        """
        texts = list[str]()
        self._write(question)
        while True:
            try:
                message = self._read()
                if isinstance(message, End):
                    return "".join(texts), message
                if isinstance(message, Piece):
                    texts.append(message.text)
                    show(message.text)
            except KeyboardInterrupt:
                self._write(Stop(question.id))

    def _write(self, message: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_read` raises
            self._process.stdin.write(line(message))

    def _read(self) -> Ready | Piece | End:
        assert self._process.stdout is not None
        if received := self._process.stdout.readline():
            return from_child(received)
        raise ended(self._process.wait())


def ended(code: int) -> SwarmNodeError:
    """Return the error of a child that has ended with `code`."""
    kinds = {kind.exit_code: kind for kind in (ConfigError, Refused, DeviceError, Unavailable)}
    return kinds.get(code, Unavailable)("the policy's process has ended; the cause is above")
