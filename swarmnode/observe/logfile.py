"""Log files of a node's processes: `<data_dir>/log/<process>.jsonl`, and `.jsonl.1` before it.

The status page shows the lines of all processes, and the supervisor reads the last error of a
process that ended. On a full disk, lines are lost and the node continues.
"""

from __future__ import annotations

import logging
import logging.handlers
from collections import deque
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

import msgspec

FILE_BYTES = 2 * 2**20
"""Size at which a file is rotated. One older file is stored."""
TAIL_BYTES = 2**16
"""Bytes that are read from the end of a file."""
LINE_CHARACTERS = 1000
"""Maximum number of characters of a line on the page."""
ERRORS = ("error", "critical")
WARNING_LEVELS = ("warning", *ERRORS)
WARNINGS = 50
"""Maximum number of warnings of a process on the page."""
HEAD_FIELDS = ("timestamp", "level", "component", "logger", "event", "exception")


class LogLine(msgspec.Struct, frozen=True):
    at: float
    """Unix seconds."""
    level: str
    logger: str
    text: str
    process: str = ""


def log_file(data_dir: Path, process: str) -> Path:
    return data_dir / "log" / f"{process}.jsonl"


class FileHandler(logging.handlers.RotatingFileHandler):
    """Writes lines and ignores errors. The constructor raises OSError for an unusable directory."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().__init__(
            path,
            maxBytes=FILE_BYTES if most is None else most,
            backupCount=1,
            encoding="utf-8",
            delay=True,
        )

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error, because the line is on standard error too."""


class LogTail:
    """Reads the newest lines of the log of another process."""

    def __init__(self, path: Path, process: str, lines: int) -> None:
        self._path = path
        self._process = process
        self._lines: deque[LogLine] = deque(maxlen=lines)
        self.warnings: deque[LogLine] = deque(maxlen=WARNINGS)
        """Newest lines of WARNING_LEVELS, oldest first, as of the last call of `statistics`."""
        self._file = 0
        self._read = 0

    def statistics(self) -> list[LogLine]:
        """Return the newest lines, oldest first. Reads only new bytes. Never raises."""
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                if status.st_ino != self._file or status.st_size < self._read:
                    self._file, self._read = status.st_ino, max(0, status.st_size - TAIL_BYTES)
                file.seek(max(self._read, status.st_size - TAIL_BYTES))
                *whole, rest = file.read(TAIL_BYTES).split(b"\n")
                self._read = file.tell() - len(rest)
        except OSError:
            return list(self._lines)
        lines = [line for each in whole if (line := parse(each, self._process)) is not None]
        self._lines.extend(lines)
        self.warnings.extend(line for line in lines if line.level in WARNING_LEVELS)
        return list(self._lines)


def parse(line: bytes, process: str) -> LogLine | None:
    """Return a line of a log file; None for an invalid line, such as an incomplete one."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
        at = datetime.fromisoformat(str(fields["timestamp"])).timestamp()
    except (msgspec.MsgspecError, KeyError, ValueError):
        return None
    words = [
        str(fields.get("event", "")),
        *(f"{key}={value}" for key, value in fields.items() if key not in HEAD_FIELDS),
    ]
    return LogLine(
        at,
        str(fields.get("level", "")),
        str(fields.get("logger", "")),
        " ".join(words)[:LINE_CHARACTERS],
        process,
    )


def last_line(path: Path, since: float, levels: Collection[str] = ERRORS) -> str:
    """Return the newest line of `levels` since a time in Unix seconds, or an empty text."""
    lines = [
        line
        for line in LogTail(path, "", 1000).statistics()
        if line.level in levels and line.at >= since
    ]
    return lines[-1].text if lines else ""
