"""What each process of a node has written to its log, on disk and bounded:
`<data_dir>/log/<process>.jsonl` and, before it, `.jsonl.1`.

The status page shows the lines of all processes, the supervisor finds here why one ended. A full
disk costs lines, nothing else.
"""

from __future__ import annotations

import logging
import logging.handlers
from collections import deque
from datetime import datetime
from pathlib import Path

import msgspec

FILE_BYTES = 2 * 2**20
"""The file is put aside when it is longer, and the one put aside before it is gone."""
TAIL_BYTES = 2**16
"""What is read of a file's end."""
TEXT = 1000
"""Characters of a line that are shown."""
HEADS = ("timestamp", "level", "component", "logger", "event", "exception")


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
    """Writes what it can. Raises OSError when made only if the directory cannot be had."""

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
        """Nothing: the line is on standard error as well."""


class Tail:
    """The newest lines of a log that another process writes."""

    def __init__(self, path: Path, process: str, lines: int) -> None:
        self._path = path
        self._process = process
        self._lines: deque[LogLine] = deque(maxlen=lines)
        self._file = 0
        self._read = 0

    def statistics(self) -> list[LogLine]:
        """Oldest first. Reads only what was appended since the last time; never raises for what is
        or is not there."""
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
        self._lines.extend(
            line for line in (parse(each, self._process) for each in whole) if line is not None
        )
        return list(self._lines)


def parse(line: bytes, process: str) -> LogLine | None:
    """One line of a log file; None for what is none of ours, such as the end of a line that was
    cut."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
        at = datetime.fromisoformat(str(fields["timestamp"])).timestamp()
    except (msgspec.MsgspecError, KeyError, ValueError):
        return None
    words = [
        str(fields.get("event", "")),
        *(f"{key}={value}" for key, value in fields.items() if key not in HEADS),
    ]
    return LogLine(
        at,
        str(fields.get("level", "")),
        str(fields.get("logger", "")),
        " ".join(words)[:TEXT],
        process,
    )


def last_error(path: Path, since: float) -> str:
    """The newest line at level error or above that was written after `since` (Unix seconds); empty
    without one."""
    errors = [
        line
        for line in Tail(path, "", 1000).statistics()
        if line.level in ("error", "critical") and line.at >= since
    ]
    return errors[-1].text if errors else ""
