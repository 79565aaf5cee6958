"""`status` and `doctor` against a hostile server."""

from __future__ import annotations

import copy
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from swarmnode import cli
from swarmnode.errors import Unavailable
from swarmnode.observe import client
from swarmnode.observe.address import NodeAddress
from swarmnode.observe.status import render_or_fail
from tests.support.answering import HEAD, Script, serving, whole
from tests.support.snapshots import example, status_of

MOVES = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202e\u2066\u200b"


def drip(first: bytes, again: bytes) -> Script:
    def script(to: socket.socket) -> None:
        to.sendall(first)
        while True:
            to.sendall(again)
            time.sleep(0.02)

    return script


@pytest.mark.parametrize(
    "script",
    [
        lambda to: to.recv(1),
        drip(b"", b"H"),
        drip(HEAD, b"X-"),
        drip(HEAD, b"X: y\r\n"),
        drip(HEAD + b"\r\n", b" "),
        drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["silent", "status line", "header", "headers", "body", "chunks", "continue"],
)
def test_slow_server_times_out(script) -> None:
    with serving(script) as url, pytest.raises(Unavailable, match="no complete answer"):
        client.fetch_status(NodeAddress(url), 1, seconds=0.5)


def test_endless_body_is_refused() -> None:
    def endless(to: socket.socket) -> None:
        to.sendall(HEAD + b"\r\n")
        while True:
            to.sendall(b"[" * 2**20)

    with serving(endless) as url, pytest.raises(Unavailable, match="more than"):
        client.fetch_status(NodeAddress(url), 1, seconds=60)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 " + MOVES.encode("latin-1", "ignore") + b"\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
        b"HTTP/1.1 401 \x1b[31m\r\n\r\n",
        MOVES.encode() + b"\r\n\r\n",
        HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n\x1b[2J\r\n",
        b"",
        HEAD + b"\r\n",
        HEAD + b"\r\nnull",
        HEAD + b"\r\n" + b"[" * 100_000,
        HEAD + b"\r\n\xff\xfe",
        HEAD + b'\r\n{"snapshot": null}',
        HEAD + b'\r\n{"snapshot": {"node": []}, "ready": {"ok": true}}',
    ],
    ids=lambda answer: repr(answer.removeprefix(HEAD)[:30]),
)
def test_invalid_answer_is_one_line(answer, capsys) -> None:
    with serving(lambda to: to.sendall(answer)) as url:
        for command in (["status"], ["status", "--json"], ["status", "--watch"]):
            assert cli.run([*command, "--url", url]) == Unavailable.exit_code
    shown = capsys.readouterr()
    assert not shown.out
    assert len(shown.err.splitlines()) == 3
    assert all(character.isprintable() or character == "\n" for character in shown.err)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, (*path, key))


WRONG = [None, MOVES, "\U000e0041[bold]x[/]", 10**400, 1e308, -1, True, [], {}, [MOVES], {MOVES: 1}]


def test_wrong_values_are_escaped_or_refused() -> None:
    status, draw = status_of(example()), random.Random(39)
    every = list(places(status))
    shown = refused = 0
    for path in draw.sample(every, 400):
        wrong = copy.deepcopy(status)
        at: Any = wrong
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = draw.choice(WRONG)
        place = NodeAddress("http://127.0.0.1:9")
        try:
            text = render_or_fail(client.decode_status(place, json.dumps(wrong).encode()), place)
        except Unavailable:
            refused += 1
            continue
        shown += 1
        assert all(character.isprintable() or character in "\n\u202f" for character in text)
    assert shown
    assert refused


def test_every_shown_text_is_escaped(capsys) -> None:
    """All strings of the answer are hostile at once."""

    def hostile(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hostile(each) for key, each in value.items()}
        if isinstance(value, list):
            return [hostile(each) for each in value]
        return f"{value[:3]}{MOVES}[red]" if isinstance(value, str) else value

    with serving(whole(json.dumps(hostile(status_of(example()))).encode())) as url:
        assert cli.run(["status", "--url", url]) == 0
        assert cli.run(["status", "--json", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert "[red]" in shown
    assert all(character.isprintable() or character in "\n\u202f" for character in shown)
