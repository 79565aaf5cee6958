"""`swarmnode serve` in front of a child that the test plays."""

from __future__ import annotations

import json
import re
import socket
from contextlib import asynccontextmanager

import httpx
import pytest
import trio
import trio.testing

from swarmnode.talk import server
from swarmnode.talk.messages import End, Piece, Question, Stop, line, to_child

ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETIONS = "/v1/chat/completions"


class Child:
    """The child's end of the pipes."""

    def __init__(self, stream) -> None:
        self._stream = stream
        self._lines = b""

    async def receive(self) -> Question | Stop:
        while b"\n" not in self._lines:
            self._lines += await self._stream.receive_some()
        first, _, self._lines = self._lines.partition(b"\n")
        return to_child(first)

    async def send(self, *messages) -> None:
        await self._stream.send_all(b"".join(map(line, messages)))


@asynccontextmanager
async def served():
    """Yield a client and the child."""
    ours, theirs = trio.testing.memory_stream_pair()
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with sock:
        async with trio.open_nursery() as nursery:
            about = server.Served("m", 8, 1.0, 0.9)
            nursery.start_soon(server.serve, sock, server.Answers(ours, ours), about, lambda: 5)
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
                yield client, Child(theirs)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "attic.example"}, 421),
        ({"origin": "https://attic.example"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 415),
    ],
)
async def test_requests_that_a_web_site_could_send_are_refused(headers, status) -> None:
    async with served() as (client, _):
        kind = {"content-type": "application/json"}
        body = json.dumps(ASKED)
        refused = await client.post(COMPLETIONS, content=body, headers=kind | headers)
    assert refused.status_code == status
    assert refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "status", "problem"),
    [
        ({"model": "other"}, 404, "this server has 'm'"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "content"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": 3}, 400, "temperature"),
        ({"seed": 2**70}, 400, "seed"),
        ({"n": 2}, 400, r"\$.n"),
        ({"stop": ["x"]}, 400, "stop"),
        ({"logit_bias": {"1": 2}}, 400, "logit_bias"),
    ],
)
async def test_parameters_are_used_or_refused(change, status, problem) -> None:
    async with served() as (client, _):
        refused = await client.post(COMPLETIONS, json=ASKED | change)
    assert refused.status_code == status
    assert re.search(problem, refused.json()["error"]["message"])


async def test_large_bodies_and_other_paths_are_refused() -> None:
    async with served() as (client, _):
        large = await client.post(COMPLETIONS, json=ASKED | {"user": "x" * server.BODY_BYTES})
        deep = await client.post(
            COMPLETIONS, content=b"[" * 100_000, headers={"content-type": "application/json"}
        )
        other = await client.get("/v1/other")
        method = await client.get(COMPLETIONS)
    assert [each.status_code for each in (large, deep, other, method)] == [413, 400, 404, 405]


async def test_answers_have_defaults_and_a_largest_length() -> None:
    async with served() as (client, child):
        asked = []

        async def play() -> None:
            for _ in range(2):
                asked.append(await child.receive())
                await child.send(Piece(asked[-1].id, "Hey"), End(asked[-1].id, "stop", 4, 2))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(play)
            whole = await client.post(COMPLETIONS, json=ASKED)
            more = {"max_tokens": 99, "temperature": 0.5, "seed": 1, "stream": True}
            streamed = await client.post(COMPLETIONS, json=ASKED | more)
    assert [(q.max_tokens, q.temperature, q.top_p, q.seed) for q in asked] == [
        (8, 1.0, 0.9, None),
        (8, 0.5, 0.9, 1),
    ]
    assert whole.json()["choices"][0]["message"]["content"] == "Hey"
    assert whole.json()["usage"]["total_tokens"] == 6
    events = streamed.text.strip().split("\n\n")
    assert streamed.headers["content-type"] == "text/event-stream"
    assert json.loads(events[1].removeprefix("data: "))["choices"][0]["delta"] == {"content": "Hey"}
    assert events[-1] == "data: [DONE]"


async def test_refusal_by_the_child_is_an_error_also_in_a_stream() -> None:
    async with served() as (client, child):

        async def play() -> None:
            first = await child.receive()
            await child.send(End(first.id, "", 4, 0, "too long"))
            second = await child.receive()
            await child.send(Piece(second.id, "H"), End(second.id, "", 4, 1, "memory ran out"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(play)
            whole = await client.post(COMPLETIONS, json=ASKED)
            streamed = await client.post(COMPLETIONS, json=ASKED | {"stream": True})
    assert (whole.status_code, whole.json()["error"]["message"]) == (400, "too long")
    last = streamed.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "memory ran out"


async def test_further_questions_wait_and_a_lost_client_stops_its_answer() -> None:
    async with served() as (client, child):
        scopes = []

        async def ask() -> None:
            with trio.CancelScope() as scope:
                scopes.append(scope)
                await client.post(COMPLETIONS, json=ASKED)

        async with trio.open_nursery() as nursery:
            for _ in range(server.ANSWERS):
                nursery.start_soon(ask)
            numbers = {(await child.receive()).id for _ in range(server.ANSWERS)}
            refused = await client.post(COMPLETIONS, json=ASKED)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            for scope in scopes:
                scope.cancel()
        stopped = [await child.receive() for _ in numbers]
        assert {each.id for each in stopped if isinstance(each, Stop)} == numbers


async def test_server_ends_with_its_child() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setblocking(False)
        await theirs.aclose()
        with trio.fail_after(60):
            await server.serve(sock, server.Answers(ours, ours), server.Served("m", 8, 1.0, 1.0))
