"""`swarmnode chat` in a terminal, and `swarmnode serve` with OpenAI's client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from swarmnode import cli
from swarmnode.talk import messages
from swarmnode.talk.messages import End, Ready
from tests.support.terminal import typed

pytestmark = pytest.mark.slow

SWARMNODE = str(Path(sys.executable).with_name("swarmnode"))


@contextmanager
def serving(*arguments: str):
    """Yield the base URL of a server and its process."""
    command = [SWARMNODE, "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, (re.search(r"http://\S+", li) for li in process.stderr)))
            yield found[0], process
        finally:
            process.terminate()


def test_openai_client_talks_to_the_server(tmp_path) -> None:
    with serving("embedded", "-d", str(tmp_path), "--length", "12") as (url, process):
        client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
        assert [model.id for model in client.models.list()] == ["embedded"]
        turns = [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": [{"type": "text", "text": "2+3="}]},
        ]
        asked = {"model": "embedded", "messages": turns, "seed": 1}
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].finish_reason in ("stop", "length")
        assert 0 < whole.usage.completion_tokens <= 12
        chunks = list(
            client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        )
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        with pytest.raises(openai.NotFoundError, match="this server has 'embedded'"):
            client.chat.completions.create(model="gpt", messages=turns)
        foreign = urllib.request.Request(f"{url}/models", headers={"Host": "attic.example"})
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(foreign, timeout=60)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_chat_in_a_terminal(tmp_path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    line = f"{SWARMNODE} chat embedded -d {tmp_path} --temperature 0 --length 4"
    replies = [("> ", "2+3="), ("> ", "/new"), ("> ", "2+3="), ("> ", "\x04")]
    code, written = typed(line, env, tmp_path, replies)
    assert code == 0, written
    assert "swarmnode: embedded. Ctrl-C stops an answer" in written
    first, _, second = re.findall(r"> .*\n([^>]*)", written)[:3]
    assert first == second, "the second conversation starts anew"
    assert "Traceback" not in written


def test_chat_without_a_saved_policy_has_the_exit_code_of_the_child(tmp_path, capfd) -> None:
    assert cli.run(["chat", "-d", str(tmp_path)]) == 69
    assert "no saved policy in" in capfd.readouterr().err


class FakeChild:
    """A child that answers with control characters."""

    def __init__(self, opening) -> None:
        self.opening = opening
        self.asked: list[list[str]] = []

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        FakeChild.last = self

    def wait_until_ready(self) -> Ready:
        return Ready(3)

    def answer(self, question, show):
        self.asked.append([turn.content for turn in question.turns])
        show("\x1b[2Jred")
        return "\x1b[2Jred", End(question.id, "length", 1, 1)


def test_answers_cannot_control_the_terminal(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(messages, "Child", FakeChild)
    lines = iter(["one\\", "two", "", "three", "/new", "four"])

    def next_line(_):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", next_line)
    assert cli.run(["chat", "-d", str(tmp_path), "--set", "policy.chat.system=Be\x07brief"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("⟨U+001B⟩[2Jred\n") == 3
    assert not set(printed.out + printed.err) & {"\x1b", "\x07"}
    assert "embedded after 3 training steps" in printed.err
    assert "cut after 1 tokens" in printed.err
    answer = "\x1b[2Jred"
    assert FakeChild.last.asked == [["one\ntwo"], ["one\ntwo", answer, "three"], ["four"]]


def test_before_needs_the_record_of_an_export(tmp_path, monkeypatch, capsys) -> None:
    assert cli.run(["chat", str(tmp_path), "--before", "-d", str(tmp_path / "data")]) == 69
    assert "was not written by `swarmnode export`" in capsys.readouterr().err
    (tmp_path / "swarmnode.json").write_text('{"base": "embedded"}')
    monkeypatch.setattr(messages, "Child", FakeChild)
    monkeypatch.setattr("builtins.input", lambda _: (_ for _ in ()).throw(EOFError))
    assert cli.run(["chat", str(tmp_path), "--before", "-d", str(tmp_path / "data")]) == 0
    assert not FakeChild.last.opening.saved
    assert '"model":"embedded"' in FakeChild.last.opening.config
