from __future__ import annotations

import io
import json

import pytest
import structlog

from swarmnode.config import LogConfig
from swarmnode.observe import logfile
from swarmnode.observe.logfile import LogTail, last_line, log_file, parse
from swarmnode.observe.logs import configure

pytestmark = pytest.mark.usefixtures("logging_as_before")


def fail() -> None:
    try:
        raise ValueError("no such tokenizer")
    except ValueError:
        structlog.get_logger("swarmnode.trainer").exception("loading failed")


def test_warnings_outlast_many_other_lines(tmp_path) -> None:
    def line(level: str, event: str) -> str:
        return json.dumps({"timestamp": "2026-01-01T00:00:00Z", "level": level, "event": event})

    path = tmp_path / "trainer.jsonl"
    tail = LogTail(path, "trainer", 200)
    path.write_text(line("warning", "disk full") + "\n")
    tail.statistics()
    with path.open("a") as file:
        file.writelines(line("info", "step") + "\n" for _ in range(500))
    assert {each.text for each in tail.statistics()} == {"step"}
    assert [each.text for each in tail.warnings] == ["disk full"]


@pytest.mark.parametrize("terminal", [True, False])
def test_traceback_is_in_the_file_only(tmp_path, monkeypatch, terminal) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    configure(LogConfig(), "trainer", stream, tmp_path)
    fail()
    (line,) = log_file(tmp_path, "trainer").read_text().splitlines()
    kept = json.loads(line)
    assert kept["component"] == "trainer"
    assert "Traceback (most recent call last)" in kept["exception"]
    (on_page,) = LogTail(log_file(tmp_path, "trainer"), "trainer", 9).statistics()
    for written in (stream.getvalue().strip(), on_page.text):
        assert "ValueError: no such tokenizer (test_observe_logfile.py:" in written
        assert "Traceback" not in written
        assert len(written.splitlines()) == 1
    assert on_page.process == "trainer"


def test_last_error_is_the_newest_since_a_time(tmp_path) -> None:
    configure(LogConfig(), "trainer", io.StringIO(), tmp_path)
    path = log_file(tmp_path, "trainer")
    fail()
    structlog.get_logger("swarmnode.trainer").info("continues")
    last = last_line(path, 0.0)
    assert last.startswith("loading failed error=ValueError: no such tokenizer (")
    (at,) = [line.at for line in LogTail(path, "trainer", 9).statistics() if line.level == "error"]
    assert last_line(path, at + 1) == ""
    assert last_line(tmp_path / "absent", 0.0) == ""


def test_tail_follows_rotation(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(logfile, "FILE_BYTES", 2000)
    configure(LogConfig(), "trainer", io.StringIO(), tmp_path)
    tail = LogTail(log_file(tmp_path, "trainer"), "trainer", 200)
    for i in range(60):
        structlog.get_logger("swarmnode.trainer").info("line", i=i)
        newest = tail.statistics()[-1]
    assert (newest.text, newest.process, newest.level) == ("line i=59", "trainer", "info")
    assert [line.text for line in tail.statistics()] == [f"line i={i}" for i in range(60)]
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == [
        "trainer.jsonl",
        "trainer.jsonl.1",
    ]
    assert all(path.stat().st_size <= 2000 for path in (tmp_path / "log").iterdir())


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"{}", b'{"timestamp": 3}', b'{"timestamp": "yesterday"}', b"\xff\xfe"],
)
def test_invalid_lines_are_none(line) -> None:
    assert parse(line, "trainer") is None


def test_unusable_directory_loses_only_the_file(tmp_path) -> None:
    (tmp_path / "log").write_text("in the way")
    stream = io.StringIO()
    configure(LogConfig(), "trainer", stream, tmp_path)
    structlog.get_logger("swarmnode").info("on")
    assert "on" in stream.getvalue()
