"""The command's side of the child: Ctrl-C stops an answer, and an end of the child is an error."""

from __future__ import annotations

import sys

import pytest

from swarmnode.errors import DeviceError, Unavailable
from swarmnode.talk import messages
from swarmnode.talk.messages import Child, End, Opening, Piece, Question, Ready

PLAYED = """
import sys
from swarmnode.talk.messages import End, Piece, Ready, line, to_child
send = lambda *each: (sys.stdout.buffer.write(b"".join(map(line, each))), sys.stdout.flush())
sys.stdin.buffer.readline()
send(Ready(4))
asked = to_child(sys.stdin.buffer.readline())
send(Piece(asked.id, "one "))
stopped = to_child(sys.stdin.buffer.readline())
send(Piece(asked.id, "two"), End(stopped.id, "", 0, 0))
sys.exit(75)
"""


def test_ctrl_c_stops_the_answer_and_the_child_stays(tmp_path, monkeypatch) -> None:
    (tmp_path / "played.py").write_text(PLAYED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    monkeypatch.setattr(messages, "CHILD", "played")

    def show(text: str) -> None:
        if text == "one ":
            raise KeyboardInterrupt

    with Child(Opening("{}", "chat", True)) as child:
        assert child.wait_until_ready() == Ready(4)
        text, end = child.answer(Question(1, [], 8, 1.0, 1.0), show)
        assert (text, end) == ("one two", End(1, "", 0, 0))
        with pytest.raises(DeviceError, match="the cause is above"):
            child.answer(Question(2, [], 8, 1.0, 1.0), show)


def test_unknown_exit_codes_are_unavailable() -> None:
    assert isinstance(messages.ended(-9), Unavailable)
    assert messages.from_child(messages.line(Piece(1, "é\n"))) == Piece(1, "é\n")
