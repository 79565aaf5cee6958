from __future__ import annotations

import io
import json
import logging
import os

import pytest
import structlog

from swarmnode.config import LogConfig
from swarmnode.observe.logfile import LogTail, log_file
from swarmnode.observe.logs import BURST, MAX_TEXT, REFILL_SECONDS, NoiseFilter, configure

pytestmark = pytest.mark.usefixtures("logging_as_before")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_all_libraries_write_the_same_lines(stream) -> None:
    configure(LogConfig(), "network", stream)
    structlog.contextvars.bind_contextvars(round=3)
    structlog.get_logger("swarmnode.daemon.node").info("step finished", step=4)
    logging.getLogger("libp2p.host").warning("stream %s failed", 7)
    ours, theirs = lines(stream)
    of = lambda line: [line[key] for key in ("level", "logger", "event")]
    assert of(ours) == ["info", "swarmnode.daemon.node", "step finished"]
    assert of(theirs) == ["warning", "libp2p.host", "stream 7 failed"]
    assert ours.keys() - {"step"} == theirs.keys()
    assert (ours["round"], ours["component"], ours["step"]) == (3, "network", 4)
    assert list(ours)[:5] == ["timestamp", "level", "component", "logger", "event"]


@pytest.mark.parametrize("key", ["private_key", "hf_token", "Authorization"])
def test_secrets_are_blanked_by_key(key, tmp_path, stream) -> None:
    configure(LogConfig(), "network", stream, tmp_path)
    structlog.get_logger("swarmnode").warning("opened", **{key: "hunter2"}, nested={key: "hunter2"})
    assert "hunter2" not in stream.getvalue() + log_file(tmp_path, "network").read_text()
    assert "opened" in stream.getvalue()


def test_token_counts_are_not_secrets(stream) -> None:
    configure(LogConfig(), "trainer", stream)
    counts = {"tokens": 5, "tokens_per_second": 2.5, "token_ids": [1, 2], "tokenizer": "abc"}
    structlog.get_logger("swarmnode").info("step", **counts)
    assert lines(stream)[0].items() >= counts.items()


def test_secrets_are_blanked_in_text_and_tracebacks(tmp_path, stream) -> None:
    configure(LogConfig(), "trainer", stream, tmp_path)
    key = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2Vw\n-----END PRIVATE KEY-----"
    try:
        raise ValueError(f"no access with hf_{'a' * 34} and {key}")
    except ValueError:
        logging.getLogger("huggingface_hub").exception("401 for hf_%s", "b" * 34)
    written = stream.getvalue() + log_file(tmp_path, "trainer").read_text()
    assert "ValueError: no access with [secret]" in written
    assert not any(secret in written for secret in ("aaaa", "bbbb", "MC4CAQ"))


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_peer_text_cannot_fake_a_log_line(kind, tmp_path) -> None:
    stream = kind()
    configure(LogConfig(), "network", stream, tmp_path)
    evil = "x\x1b[2J\n12:00:00 [info] all is well\u202e\x9b"
    structlog.get_logger("swarmnode").warning(f"bad {evil}", agent=evil)
    try:
        raise RuntimeError(evil)
    except RuntimeError:
        structlog.get_logger("swarmnode").exception("handler failed")
    written = stream.getvalue()
    assert not any(bad in written for bad in ("\x1b[2J", "\u202e", "\x9b"))
    page = LogTail(log_file(tmp_path, "network"), "network", 9).statistics()
    shown = [line for each in page for line in each.text.splitlines()] + written.splitlines()
    assert len(page) == 2
    assert not any(line.startswith("12:00:00 [info] all is well") for line in shown)
    assert len([line for line in written.splitlines() if "agent" in line]) == 1


def test_long_values_and_bytes_are_cut(stream) -> None:
    configure(LogConfig(), "network", stream)
    structlog.get_logger("swarmnode").info(
        "got", frame=b"\x00" * 10_000, text="y" * 100_000, many=list(range(1000))
    )
    line = lines(stream)[0]
    assert line["frame"] == "<10000 bytes>"
    assert len(line["text"]) < MAX_TEXT + 40
    assert len(line["many"]) == 64


def test_noisy_library_is_limited_and_counted() -> None:
    clock = [0.0]
    calm = NoiseFilter(now=lambda: clock[0])

    def passes(name: str) -> str | None:
        record = logging.LogRecord(name, logging.WARNING, "", 0, "peer failed", (), None)
        return record.getMessage() if calm.filter(record) and calm.filter(record) else None

    storm = [passes("libp2p.host") for _ in range(100)]
    assert sum(message is not None for message in storm) == BURST
    assert passes("swarmnode.daemon.node") == "peer failed"
    clock[0] += REFILL_SECONDS
    assert passes("libp2p.other") == f"peer failed (and {100 - BURST} more lines not shown)"
    assert passes("libp2p.other") is None


def test_stopped_reader_does_not_block_logging() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as read, open(writer, "w", encoding="utf-8") as write:
        configure(LogConfig(), "network", write)
        logger = structlog.get_logger("swarmnode")
        for number in range(5000):  # more than a pipe holds
            logger.info("step", number=number)
        os.set_blocking(reader, False)
        assert len(read.read()) > 4096
        logger.info("later")
        records = [json.loads(line) for line in read.read().splitlines()]
    configure(LogConfig(), "network", io.StringIO())
    assert "were not written" in records[0]["event"]
    assert records[1]["event"] == "later"
