"""Environments by URL: questions and rewards of an OpenEnv server that the operator runs.
docs/own-task.md is the guide.

    reset {seed}          ─▶ an observation; one of its fields is the question
    step {field: answer}  ─▶ the reward

A question has one turn or an episode of several turns. Each request uses a WebSocket of its own
(OpenEnv 0.10: one connection, one session).

The URL comes from this node's configuration. A manifest or a peer cannot set it, and redirections
are not followed. Answers of the server are bounded in bytes and in seconds; any misbehaviour is a
one-line error and no reward. Every member uses a server of its own, so only a private swarm may
have such a task.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import SplitResult, urlsplit

import msgspec
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Event,
    Message,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import ProtocolError

from swarmnode.errors import ConfigError, SwarmNodeError
from swarmnode.files import write_atomically
from swarmnode.tasks.dataset import PROMPT_CHARACTERS, check_question_settings

if TYPE_CHECKING:
    from swarmnode.config import DatasetConfig

ANSWER_BYTES = 2**20
"""Maximum size of an answer in bytes, with its frames."""
SECONDS = 10.0
"""Deadline of a connection and of each answer. The supervisor regards a trainer without a sign of
life for 30 s as hung."""
PROBES = 4
"""Number of questions that identify an environment. Each is asked twice."""


class ServerFailed(SwarmNodeError):
    """Raised if a server cannot be reached or violates OpenEnv's protocol. The connection is then
    unusable.
    """


class StepRefused(SwarmNodeError):
    """Raised if the environment answers a message with an error. The session continues."""


@dataclass(frozen=True, slots=True)
class Source:
    """An environment that has been checked and can be used."""

    url: str
    observation: str
    """Name of the observation's field that holds the question."""
    action: str
    """Name of the action's field that receives the answer."""
    template: str
    content: str
    """32 hex digits: hash of the questions of the first seeds. Servers with equal questions are the
    same task.
    """


_UNTRUSTED = (
    "its issuer must be trusted by this machine, or be in the file that SSL_CERT_FILE names"
)
_MISNAMED = "name the server as its certificate does"
_REMEDIES = {18: _UNTRUSTED, 19: _UNTRUSTED, 20: _UNTRUSTED, 62: _MISNAMED, 64: _MISNAMED}
"""OpenSSL's X509_V_ERR → remedy. The errors are: self-signed, self-signed in a chain, no issuer
found, another host name, another address."""


class _Data(msgspec.Struct):
    """Fields of an `observation`, and of an `error` (`message`)."""

    observation: dict[str, msgspec.Raw] = {}
    reward: float | bool | None = None
    done: bool = False
    message: str = ""


class _Reply(msgspec.Struct):
    type: str
    data: _Data


_decode = msgspec.json.Decoder(_Reply).decode


class Session:
    """A connection to a server that plays one episode after another. Use it as a context manager.
    Every method may raise ServerFailed.

    Args:
        seconds: Deadline of the connection and of each answer.
        alive: Called after each answer.
    """

    def __init__(
        self, url: str, seconds: float = SECONDS, alive: Callable[[], None] = lambda: None
    ) -> None:
        self._url, self._seconds, self._alive = url, seconds, alive
        self._deadline, self._received = time.monotonic() + seconds, 0
        self._protocol = WSConnection(ConnectionType.CLIENT)
        parts = urlsplit(url)
        try:
            self._socket = _connect(parts, seconds)
        except (OSError, UnicodeError) as error:
            raise self._failure(error) from None
        try:
            path = f"{parts.path.rstrip('/').removesuffix('/ws')}/ws"
            self._send(Request(host=parts.netloc, target=path))
            answer = self._next()
            if not isinstance(answer, AcceptConnection):
                status = (
                    f"HTTP {answer.status_code}"
                    if isinstance(answer, RejectConnection)
                    else type(answer).__name__
                )
                raise ServerFailed(f"{url} does not speak OpenEnv's WebSocket: {status} for {path}")
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def reset(self, seed: int, field: str) -> str:
        """Begin an episode and return the text of the observation's `field`. Raises StepRefused."""
        observation = self._ask("reset", {"seed": seed}).observation
        if field not in observation:
            raise ServerFailed(
                f"{self._url}: its observation has no field {field!r}, only"
                f" {', '.join(sorted(observation)[:12])[:200]}"
            )
        text = self._text(observation[field])
        if not 0 < len(text) <= PROMPT_CHARACTERS:
            raise ServerFailed(
                f"{self._url}: a question of {len(text)} characters, not 1 to {PROMPT_CHARACTERS}"
            )
        return text

    def step(self, field: str, answer: str) -> float:
        """Take an episode's only step and return its reward, which may be any finite number. Raises
        StepRefused if the server refuses the step or returns no reward.
        """
        reward = self._ask("step", {field: answer}).reward
        if reward is None:
            raise StepRefused(
                "the first step gave no reward: set turns to the maximum number of steps"
            )
        return float(reward)

    def act(self, field: str, action: str, shown: str) -> tuple[str, float, bool]:
        """Take one step of an episode.

        Returns:
            The observation's field `shown` (empty if missing), the reward (0 if missing), and True
            if the episode has ended.

        Raises:
            StepRefused: The server refused the step.
        """
        reply = self._ask("step", {field: action})
        text = self._text(reply.observation[shown]) if shown in reply.observation else ""
        return text, float(reply.reward or 0.0), reply.done

    def _text(self, value: msgspec.Raw) -> str:
        raw = bytes(value)
        try:
            return msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else raw.decode()
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise self._failure(error) from None

    def _ask(self, kind: str, data: dict[str, object]) -> _Data:
        self._deadline, self._received = time.monotonic() + self._seconds, 0
        self._send(TextMessage(data=json.dumps({"type": kind, "data": data})))
        parts: list[str] = []
        while True:
            event = self._next()
            if not isinstance(event, TextMessage):
                raise ServerFailed(f"{self._url}: {type(event).__name__} instead of an answer")
            parts.append(event.data)
            if event.message_finished:
                break
        self._alive()
        try:
            reply = _decode("".join(parts))
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise ServerFailed(
                f"{self._url}: not an answer of OpenEnv: {str(error)[:200]}"
            ) from None
        if reply.type == "error":
            raise StepRefused(
                f"{kind} was refused:"
                f" {' '.join(reply.data.message.split())[:200] or 'no reason given'}"
            )
        if reply.type != "observation":
            raise ServerFailed(f"{self._url}: {reply.type[:40]!r} instead of an observation")
        return reply.data

    def _next(self) -> Event:
        """Return the next message or handshake answer, within the remaining time and bytes."""
        try:
            while True:
                for event in self._protocol.events():
                    if isinstance(event, Ping):
                        self._send(event.response())
                    elif isinstance(event, Message | AcceptConnection | RejectConnection):
                        return event
                    elif isinstance(event, CloseConnection):
                        raise ServerFailed(
                            f"{self._url}: it closed the connection ({event.code}"
                            f" {(event.reason or '')[:80]})"
                        )
                self._socket.settimeout(self._seconds_left())
                data = self._socket.recv(65536)
                self._received += len(data)
                if self._received > ANSWER_BYTES:
                    raise ServerFailed(
                        f"{self._url}: an answer of more than {ANSWER_BYTES >> 20} MiB"
                    )
                self._protocol.receive_data(data or None)
        except (OSError, ProtocolError) as error:
            raise self._failure(error) from None

    def _send(self, event: Event) -> None:
        try:
            self._socket.settimeout(self._seconds_left())
            self._socket.sendall(self._protocol.send(event))
        except (OSError, ProtocolError) as error:
            raise self._failure(error) from None

    def _seconds_left(self) -> float:
        """Return the seconds until the deadline. Raises TimeoutError after it."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _failure(self, error: Exception) -> ServerFailed:
        why = (
            f"no answer within {self._seconds:g} s"
            if isinstance(error, TimeoutError)
            else str(error) or type(error).__name__
        )
        if isinstance(error, ssl.SSLCertVerificationError):
            why = (
                f"its certificate: {error.verify_message[:90]};"
                f" {_REMEDIES.get(error.verify_code, 'a valid certificate is required')}"
            )
        elif isinstance(error, ssl.SSLError):
            why = f"{(error.reason or why)[:120]}: for a server without TLS use http:// or ws://"
        return ServerFailed(f"{self._url}: {' '.join(why.split())[:200]}")


def _connect(url: SplitResult, seconds: float) -> socket.socket:
    secure = url.scheme in ("wss", "https")
    assert url.hostname is not None
    plain = socket.create_connection((url.hostname, url.port or (443 if secure else 80)), seconds)
    if not secure:
        return plain
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=url.hostname)
    except BaseException:
        plain.close()
        raise


def hash_questions(session: Session, url: str, field: str) -> str:
    """Return 32 hex digits over the questions of an environment. Raises StepRefused, and
    ServerFailed if one seed gives two questions.
    """
    first, second = ([session.reset(seed, field) for seed in range(PROBES)] for _ in range(2))
    if first != second:
        raise ServerFailed(
            f"{url}: the same seed gave two questions: reset must draw everything from its seed"
        )
    return hashlib.blake2b(json.dumps(first).encode(), digest_size=16).hexdigest()


def prepare(task: str, config: DatasetConfig, directory: Path) -> Source:
    """Read and hash the questions of the server of `task`, or find the hash of an earlier start in
    `directory`. A node can therefore start while its server does not run.

    Raises:
        ConfigError: The environment cannot be used. It names the remedy.
    """
    where = f"task.datasets.{task}"
    check_question_settings(where, config)
    known = {"source", "prompt", "answer", "template", "extract", "nothing_after", "turns"}
    unused = sorted(config.model_fields_set - known)
    if unused:
        raise ConfigError(
            f"{where}: {', '.join(unused)}: not a setting of an environment, whose server asks and"
            " judges"
        )
    try:
        parts = urlsplit(config.source)
        usable = (
            bool(parts.hostname)
            and parts.port != 0
            and parts.username is None
            and not parts.query
            and not parts.fragment
        )
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{where}: {config.source[:120]!r} is not the URL of a server, such as"
            " ws://127.0.0.1:8000"
        )
    key = hashlib.blake2b(
        json.dumps([config.source, config.prompt]).encode(), digest_size=8
    ).hexdigest()
    hash_file = directory / f"{task.partition('/')[2]}-{key}.environment"
    try:
        content = hash_file.read_text()
    except OSError:
        content = ""
    if not re.fullmatch("[0-9a-f]{32}", content):
        try:
            with Session(config.source) as session:
                content = hash_questions(session, config.source, config.prompt)
            write_atomically(hash_file, content.encode())
        except (ServerFailed, StepRefused) as error:
            raise ConfigError(f"{where}: {error}") from None
        except OSError as error:
            raise ConfigError(
                f"{where}: cannot store its hash in {directory}: {error.strerror}"
            ) from None
    return Source(config.source, config.prompt, config.answer, config.template, content)
