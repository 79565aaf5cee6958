"""One format for all log lines of a process, from structlog and from the standard library (libp2p,
transformers). Values bound with structlog.contextvars are on all of them.

Lines go to standard error: as text on a terminal, otherwise as one JSON object per line. In each
line secrets are blanked, control characters are escaped, because a peer's text must not move the
cursor or fake a second line, and lengths are limited.
"""

from __future__ import annotations

import logging
import re
import select
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import structlog
from structlog.typing import EventDict, Processor

from swarmnode.config import LogConfig
from swarmnode.observe.logfile import FileHandler, log_file
from swarmnode.process import leaves

MAX_TEXT = 2000
"""Maximum number of characters of one value."""

NOISY = {
    "libp2p": logging.WARNING,
    "multiaddr": logging.WARNING,
    "async_service": logging.WARNING,
    "zeroconf": logging.WARNING,
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
    "urllib3": logging.WARNING,
    "huggingface_hub": logging.WARNING,
    "transformers": logging.WARNING,
    "filelock": logging.WARNING,
    "accelerate": logging.WARNING,
}
"""Least severe level of each library that is logged."""
BURST, REFILL_SECONDS = 5, 10.0
"""Token bucket for the lines of a noisy library: its size, and seconds per additional line.
Strangers determine how often libp2p warns."""

SECRET_KEY = re.compile(
    r"(^|_)(private|secret|password|passphrase|token|authorization|cookie|credential|api_key)($|_)",
    re.IGNORECASE,
)
COUNTS = re.compile(r"token_(ids?|count|limit)$", re.IGNORECASE)
SECRET_TEXT = re.compile(
    r"hf_[A-Za-z0-9]{16,}|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE"
    r" KEY-----|$)",
    re.DOTALL,
)
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
HIDDEN = "[secret]"


def clean_text(text: str) -> str:
    """Return a text without secrets and control characters, and of limited length."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}… ({len(text)} characters)"
    text = SECRET_TEXT.sub(HIDDEN, text)
    return CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def clean(_: object, __: str, event: EventDict) -> EventDict:
    """structlog processor: blank, escape and shorten all values, except tracebacks."""
    return {key: _value(key, value) for key, value in event.items()}


def clean_exception(_: object, __: str, event: EventDict) -> EventDict:
    """structlog processor: clean a formatted traceback, whose message may quote a peer.

    Line breaks stay, but all lines are indented, so that none looks like a log line.
    """
    if text := event.get("exception"):
        event["exception"] = "\n".join(
            f"  {clean_text(line)}" for line in SECRET_TEXT.sub(HIDDEN, text).split("\n")
        )
    return event


def _value(key: str, value: object) -> object:
    if key.startswith("_") or key in ("exc_info", "stack_info"):
        return value
    if SECRET_KEY.search(key) and not COUNTS.search(key):
        return HIDDEN
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, dict):
        return {str(k)[:64]: _value(str(k), v) for k, v in list(value.items())[:64]}
    if isinstance(value, list | tuple | set | frozenset):
        return [_value("", item) for item in list(value)[:64]]
    return clean_text(value if isinstance(value, str) else repr(value))


class LineHandler(logging.StreamHandler[IO[str]]):
    """Writes lines to a stream, and drops them while a write would block.

    A reader may stop, such as a pager or a terminal after Ctrl-S. A blocked write would stop the
    event loop.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_writable():
            self._dropped += 1
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            lost = f"{dropped} lines were not written because standard error was not read"
            super().emit(logging.LogRecord(__name__, logging.WARNING, "", 0, lost, (), None))
        super().emit(record)

    def _is_writable(self) -> bool:
        """Return False if a write would block."""
        try:
            poll = select.poll()
            poll.register(self.stream.fileno(), select.POLLOUT)
            return bool(poll.poll(0))
        except (OSError, ValueError, AttributeError):  # no descriptor, or one without poll
            return True


class NoiseFilter(logging.Filter):
    """Limits the rate of lines of each noisy library.

    The next line that passes reports the number of suppressed ones.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._allowance: dict[str, tuple[float, float]] = {}  # library → (lines left, as of)
        self._suppressed: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "passes"):  # an earlier handler has decided
            return bool(record.passes)
        passes = self._passes(record)
        record.passes = passes
        return passes

    def _passes(self, record: logging.LogRecord) -> bool:
        library = record.name.partition(".")[0]
        if library not in NOISY:
            return True
        now = self._now()
        left, since = self._allowance.get(library, (float(BURST), now))
        left = min(float(BURST), left + (now - since) / REFILL_SECONDS)
        passes = left >= 1
        self._allowance[library] = (left - 1 if passes else left, now)
        if not passes:
            self._suppressed[library] = self._suppressed.get(library, 0) + 1
        elif suppressed := self._suppressed.pop(library, 0):
            record.msg, record.args = (
                f"{record.getMessage()} (and {suppressed} more lines not shown)",
                (),
            )
        return passes


def add_error_line(_: object, __: str, event: EventDict) -> EventDict:
    """structlog processor: add an exception with its place, as `error`, in one line."""
    info = event.get("exc_info")
    error = (
        info
        if isinstance(info, BaseException)
        else info[1]
        if isinstance(info, tuple)
        else sys.exc_info()[1]
        if info
        else None
    )
    if error is not None:
        first = next(leaves(error))
        at = traceback.extract_tb(first.__traceback__)[-1:]
        where = f" ({Path(at[0].filename).name}:{at[0].lineno} in {at[0].name})" if at else ""
        event.setdefault("error", clean_text(f"{type(first).__name__}: {first}{where}"))
    return event


def remove_traceback(_: object, __: str, event: EventDict) -> EventDict:
    """structlog processor: remove the traceback, which is in the log file."""
    for key in ("exc_info", "exception"):
        event.pop(key, None)
    return event


def remove_info_logger(_: object, __: str, event: EventDict) -> EventDict:
    """structlog processor: remove the logger of lines at info and below, for a terminal."""
    if event.get("level") in ("info", "debug"):
        event.pop("logger", None)
    return event


def add_date(_: object, __: str, event: EventDict) -> EventDict:
    """structlog processor: add the date, which lines on a terminal omit."""
    record = event.get("_record")
    at = datetime.fromtimestamp(
        record.created if isinstance(record, logging.LogRecord) else time.time(), tz=UTC
    )
    return {**event, "timestamp": at.isoformat()}


def _file_handler(path: Path) -> FileHandler | None:
    """Return a handler for a log file; None if its directory cannot be used."""
    try:
        return FileHandler(path)
    except OSError:
        return None


def configure(
    cfg: LogConfig, process: str, stream: IO[str] | None = None, data_dir: Path | None = None
) -> None:
    """Set up logging of this process.

    Args:
        process: `supervisor`, `network`, `trainer` or `scorer`; `component` of a JSON line.
        stream: output; standard error by default.
        data_dir: data directory whose log file also gets the lines, with tracebacks; or None.

    A second call replaces the first configuration.
    """
    stream = sys.stderr if stream is None else stream
    as_json = not stream.isatty()

    def in_order(_: object, __: str, event: EventDict) -> EventDict:
        first = {
            "timestamp": event.pop("timestamp", ""),
            "level": event.pop("level", ""),
            "component": process,
        }
        return {
            **first,
            "logger": event.pop("logger", ""),
            "event": event.pop("event", ""),
            **event,
        }

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
        structlog.processors.StackInfoRenderer(),
        clean,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )

    def formatter(*last: Processor) -> logging.Formatter:
        processors: list[Processor] = [
            add_error_line,
            *last[:-1],
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            last[-1],
        ]
        return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=processors)

    lines = LineHandler(stream)
    if as_json:
        lines.setFormatter(
            formatter(remove_traceback, in_order, structlog.processors.JSONRenderer())
        )
    else:
        lines.setFormatter(
            formatter(
                remove_traceback,
                remove_info_logger,
                structlog.dev.ConsoleRenderer(
                    colors=stream.isatty(), pad_event_to=0, pad_level=False, sort_keys=False
                ),
            )
        )
    handlers: list[logging.Handler] = [lines]
    if data_dir is not None and (file := _file_handler(log_file(data_dir, process))) is not None:
        tracebacks: tuple[Processor, ...] = (structlog.processors.format_exc_info, clean_exception)
        file.setFormatter(
            formatter(add_date, *tracebacks, in_order, structlog.processors.JSONRenderer())
        )
        handlers.append(file)

    noise_filter = NoiseFilter()
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        handler.addFilter(noise_filter)
        root.addHandler(handler)
    level = getattr(logging, cfg.level.upper())
    root.setLevel(level)
    for name, least in NOISY.items():
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(max(level, least))
    logging.captureWarnings(True)
