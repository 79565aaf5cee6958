"""`swarmnode serve`: an OpenAI-compatible server on loopback, in front of the child that answers.

    GET  /v1/models              the one model
    POST /v1/chat/completions    an answer, whole or as server-sent events

Three rules protect the operator:

* A web site must not use the model through the operator's browser. A foreign Host (DNS rebinding)
  or Origin is refused, and a body that is not declared as JSON.
* Body, length of answers, connections and concurrent answers have limits.
* Every wait has a deadline. An answer ends when its client disconnects.
"""

from __future__ import annotations

import itertools
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal

import h11
import msgspec
import structlog
import trio

from swarmnode.observe.http import is_loopback
from swarmnode.talk.messages import End, Piece, Question, Stop, Turn, from_child, line

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

ANSWERS = 4
"""Concurrent answers; a further question gets status 429."""
CONNECTIONS = 32
BODY_BYTES = 2**20
REQUEST_SECONDS = 30.0
"""Time from the start of a connection to the end of its request."""
ANSWER_SECONDS = 600.0
SEND_SECONDS = 30.0
READ_BYTES = 2**16
JSON, EVENTS = b"application/json", b"text/event-stream"

log = structlog.get_logger(__name__)

Zero = Annotated[float, msgspec.Meta(ge=0, le=0)]
Nothing = Annotated[list[Any], msgspec.Meta(max_length=0)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]


class TextPart(msgspec.Struct, frozen=True):
    text: str
    type: Literal["text"] = "text"


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def turn(self) -> Turn:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return Turn("system" if self.role == "developer" else self.role, text)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text"]


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request. Unsupported parameters are refused, except at values without effect."""

    model: str
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    stop: Nothing | None = None
    tools: Nothing | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    metadata: Any = None
    store: Any = None


decode_completion = msgspec.json.Decoder(Completion).decode


class HttpError(Exception):
    """A refused request."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Served:
    """The served model and the defaults of a question."""

    model: str
    max_tokens: int
    """Largest and default number of tokens of an answer."""
    temperature: float
    top_p: float

    def question(self, asked: Completion, number: int) -> Question:
        wanted = asked.max_completion_tokens or asked.max_tokens or self.max_tokens
        return Question(
            number,
            [message.turn() for message in asked.messages],
            min(wanted, self.max_tokens),
            self.temperature if asked.temperature is None else asked.temperature,
            self.top_p if asked.top_p is None else asked.top_p,
            asked.seed,
        )


class Answers:
    """The questions that the child is answering.

    Args:
        to_child, from_child: Pipes of the child.
    """

    def __init__(self, to_child: trio.abc.SendStream, from_child: trio.abc.ReceiveStream) -> None:
        self._to_child, self._from_child = to_child, from_child
        self._lock = trio.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, trio.MemorySendChannel[Piece | End]] = {}

    async def run(self) -> None:
        """Deliver the child's messages until it ends."""
        rest = b""
        while received := await self._from_child.receive_some(READ_BYTES):
            *lines, rest = (rest + received).split(b"\n")
            for message in map(from_child, lines):
                if isinstance(message, Piece | End) and message.id in self._open:
                    self._open[message.id].send_nowait(message)  # at most max_tokens + 1 of them

    async def ask(self, question: Callable[[int], Question]) -> AsyncGenerator[Piece | End, None]:
        """Yield the parts of an answer. Closing the generator stops the answer.

        Raises:
            HttpError: Too many answers are in progress.
        """
        if len(self._open) >= ANSWERS:
            raise HttpError(429, f"{ANSWERS} answers are in progress; try again later")
        number = next(self._numbers)
        self._open[number], parts = trio.open_memory_channel[Piece | End](math.inf)
        part: Piece | End | None = None
        try:
            await self._send(question(number))
            while not isinstance(part, End):
                part = await parts.receive()
                yield part
        finally:
            del self._open[number]
            if not isinstance(part, End):
                with trio.CancelScope(shield=True), trio.move_on_after(SEND_SECONDS):
                    await self._send(Stop(number))

    async def _send(self, message: Question | Stop) -> None:
        async with self._lock:
            await self._to_child.send_all(line(message))


async def serve(
    sock: socket.socket, answers: Answers, served: Served, now: Callable[[], float] = time.time
) -> None:
    """Serve until cancelled, or until the child has ended.

    Args:
        sock: A listening socket.
        now: Returns Unix seconds.
    """
    places = trio.CapacityLimiter(CONNECTIONS)

    async def handle(stream: trio.SocketStream) -> None:
        async with stream, places:
            exchange = Exchange(stream, served, int(now()))
            try:
                await exchange.run(answers, nursery)
            except (trio.BrokenResourceError, trio.TooSlowError, h11.LocalProtocolError):
                pass  # the client has disconnected, or does not send or read
            except Exception:
                log.exception("a request failed")

    async with trio.open_nursery() as nursery:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
        nursery.start_soon(trio.serve_listeners, handle, [listener])
        await answers.run()
        nursery.cancel_scope.cancel()


class Exchange:
    """A connection with its one request and response."""

    def __init__(self, stream: trio.SocketStream, served: Served, created: int) -> None:
        self._connection, self._stream = h11.Connection(h11.SERVER), stream
        self._served, self._created = served, created
        self._id = f"chatcmpl-{id(self):x}-{created}"
        self._started = False
        """True if the head of the response was sent."""

    async def run(self, answers: Answers, nursery: trio.Nursery) -> None:
        """Answer the request.

        Args:
            nursery: Runs a task that ends with the connection.
        """
        try:
            with trio.fail_after(REQUEST_SECONDS):
                head, body = await self._receive()
            headers = _check_sender(head)
            match head.target.partition(b"?")[0], head.method:
                case b"/v1/models", b"GET":
                    await self._send_json(200, {"object": "list", "data": [self._about_model()]})
                case b"/v1/chat/completions", b"POST":
                    if headers.get(b"content-type", b"").partition(b";")[0].strip() != JSON:
                        raise HttpError(415, "the content type must be application/json")
                    with trio.CancelScope(deadline=trio.current_time() + ANSWER_SECONDS) as scope:
                        nursery.start_soon(self._watch, scope)
                        await self._complete(answers, self._parse(body))
                    if scope.cancelled_caught:
                        raise HttpError(504, f"no answer within {ANSWER_SECONDS:g} s")
                case ((b"/v1/models" | b"/v1/chat/completions"), _):
                    raise HttpError(405, "GET /v1/models, POST /v1/chat/completions")
                case _:
                    raise HttpError(404, "GET /v1/models, POST /v1/chat/completions")
        except HttpError as error:
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            refusal = {"error": {"message": str(error), "type": kind, "param": None, "code": None}}
            if self._started:
                await self._send_event(refusal)
                await self._send(h11.EndOfMessage())
            else:
                await self._send_json(error.status, refusal)

    async def _receive(self) -> tuple[h11.Request, bytes]:
        head: h11.Request | None = None
        body, size = bytearray(), 0
        try:
            while not isinstance(event := self._connection.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    self._connection.receive_data(await self._stream.receive_some(READ_BYTES))
                elif isinstance(event, h11.Request):
                    head = event
                elif isinstance(event, h11.Data):
                    size += len(event.data)
                    body += event.data if size <= BODY_BYTES else b""
                else:
                    raise trio.BrokenResourceError
        except h11.RemoteProtocolError as error:
            raise HttpError(error.error_status_hint, "not a request") from None
        if size > BODY_BYTES:  # all was read, so that the client reads the response
            raise HttpError(413, f"the body is longer than {BODY_BYTES} bytes")
        assert head is not None
        return head, bytes(body)

    def _parse(self, body: bytes) -> Completion:
        try:
            asked = decode_completion(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise HttpError(400, f"not supported here: {error}") from None
        if asked.model != self._served.model:
            raise HttpError(404, f"no such model; this server has {self._served.model!r}")
        return asked

    async def _watch(self, scope: trio.CancelScope) -> None:
        """Cancel `scope` when the client disconnects. Further bytes are discarded."""
        try:
            while await self._stream.receive_some(READ_BYTES):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()

    async def _complete(self, answers: Answers, asked: Completion) -> None:
        texts = []
        parts = answers.ask(lambda number: self._served.question(asked, number))
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, Piece):
                    texts.append(part.text)
                    if asked.stream:
                        await self._send_delta({"content": part.text})
                    continue
                if part.error:
                    raise HttpError(400, part.error)
                usage = {
                    "prompt_tokens": part.prompt_tokens,
                    "completion_tokens": part.completion_tokens,
                    "total_tokens": part.prompt_tokens + part.completion_tokens,
                }
                if not asked.stream:
                    message = {"role": "assistant", "content": "".join(texts)}
                    choice = {"message": message, "finish_reason": part.finish}
                    whole = self._object("chat.completion", [choice])
                    await self._send_json(200, whole | {"usage": usage})
                    return
                await self._send_delta({}, part.finish)
                if asked.stream_options is not None and asked.stream_options.include_usage:
                    await self._send_event(self._object(CHUNK, []) | {"usage": usage})
                await self._send(h11.Data(data=b"data: [DONE]\n\n"), h11.EndOfMessage())

    def _about_model(self) -> dict[str, object]:
        name = self._served.model
        return {"id": name, "object": "model", "created": self._created, "owned_by": "swarmnode"}

    async def _send_delta(self, delta: Mapping[str, str], finish: str | None = None) -> None:
        """Send a part of a streamed answer."""
        if not self._started:
            await self._send_head(200, EVENTS)
            await self._send_delta({"role": "assistant", "content": ""})
        await self._send_event(self._object(CHUNK, [{"delta": delta, "finish_reason": finish}]))

    def _object(self, kind: str, choices: Sequence[Mapping[str, object]]) -> dict[str, object]:
        about = {"id": self._id, "object": kind, "created": self._created}
        numbered = [{"index": i, "logprobs": None, **each} for i, each in enumerate(choices)]
        return about | {"model": self._served.model, "choices": numbered}

    async def _send_json(self, status: int, value: object) -> None:
        """Send a whole response."""
        body = msgspec.json.encode(value)
        more = [(b"retry-after", b"1")] if status == 429 else []
        await self._send_head(status, JSON, (b"content-length", str(len(body)).encode()), *more)
        await self._send(h11.Data(data=body), h11.EndOfMessage())

    async def _send_head(self, status: int, kind: bytes, *more: tuple[bytes, bytes]) -> None:
        self._started = True
        headers = [(b"content-type", kind), (b"connection", b"close"), *more]
        headers += [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
        reason = HTTPStatus(status).phrase.encode()
        await self._send(h11.Response(status_code=status, reason=reason, headers=headers))

    async def _send_event(self, value: object) -> None:
        await self._send(h11.Data(data=b"data: " + msgspec.json.encode(value) + b"\n\n"))

    async def _send(self, *events: h11.Event) -> None:
        data = b"".join(self._connection.send(event) or b"" for event in events)
        with trio.fail_after(SEND_SECONDS):
            await self._stream.send_all(data)


CHUNK = "chat.completion.chunk"


def _check_sender(head: h11.Request) -> Mapping[bytes, bytes]:
    """Return the headers of a request by a program on this machine.

    Raises:
        HttpError: It may come from a web site.
    """
    headers = dict(head.headers)
    text = lambda name: headers.get(name, b"").decode("latin-1")
    if not is_loopback(text(b"host")):
        raise HttpError(421, "this server answers to localhost only")
    if b"origin" in headers and not is_loopback(text(b"origin").partition("://")[2]):
        raise HttpError(403, "the request came from a web site")
    return headers
