"""One format for every line that this node writes, whoever writes it: ours through structlog,
libp2p's and transformers' through the standard library, all end in the same handler.
What is bound with structlog.contextvars shows on their lines too.

On a terminal the lines are for eyes, elsewhere they are JSON, one object per line, on standard
error. Three things are done to each: secrets are blanked, control characters escaped (a peer's text
must not move the cursor or fake a second line), lengths bounded.
"""

from __future__ import annotations

import logging
import re
import select
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import structlog
from structlog.typing import EventDict, Processor

from swarmnode.config import LogConfig
from swarmnode.observe.logfile import FileHandler, LogLine, log_file
from swarmnode.process import leaves

RING_LINES = 200
MAX_TEXT = 2000
"""Characters of one value. A frame that somebody logs by mistake must not fill the disk."""

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
"""Libraries and the least severe level of theirs that is of interest to who runs a node."""
BURST, REFILL_SECONDS = 5, 10.0
"""A noisy library may write this many lines at once, and one more every so many seconds: strangers
choose how often libp2p warns."""

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
    """Printable, bounded, and without what looks like a key."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}… ({len(text)} characters)"
    text = SECRET_TEXT.sub(HIDDEN, text)
    return CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def clean(_: object, __: str, event: EventDict) -> EventDict:
    """structlog processor: see the top of this file. Tracebacks are not there yet;
    `clean_exception` follows for them."""
    return {key: _value(key, value) for key, value in event.items()}


def clean_exception(_: object, __: str, event: EventDict) -> EventDict:
    """The same for a formatted traceback, whose message may quote a peer. Line breaks stay, but
    none of its lines starts at the margin."""
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
    """Writes lines to a stream, and drops them while the stream takes none.

    A reader may stop: a pager, a terminal after Ctrl-S. A blocked write would stop the event loop,
    and with it the node.
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
            lost = f"{dropped} lines were not written: nobody read them"
            super().emit(logging.LogRecord(__name__, logging.WARNING, "", 0, lost, (), None))
        super().emit(record)

    def _is_writable(self) -> bool:
        """Return False where a write would block."""
        try:
            poll = select.poll()
            poll.register(self.stream.fileno(), select.POLLOUT)
            return bool(poll.poll(0))
        except (OSError, ValueError, AttributeError):  # no descriptor, or no poll on it
            return True


class LogRing(logging.Handler):
    """Keeps the newest lines for the status page. Reads are copies; writes come from any thread."""

    def __init__(self, process: str = "", lines: int = RING_LINES) -> None:
        super().__init__()
        self._process = process
        self._lines: deque[LogLine] = deque(maxlen=lines)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(
                LogLine(
                    record.created,
                    record.levelname.lower(),
                    record.name,
                    self.format(record),
                    self._process,
                )
            )
        except Exception:  # noqa: BLE001
            self.handleError(record)

    def statistics(self) -> list[LogLine]:
        """Oldest first."""
        return list(self._lines)


class Calm(logging.Filter):
    """Lets a bounded number of lines of each noisy library through; the next one that passes says
    how many did not."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._room: dict[str, tuple[float, float]] = {}  # library → (lines left, as of)
        self._held: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "calm"):  # several handlers ask about the same line
            return bool(record.calm)
        passes = self._passes(record)
        record.calm = passes
        return passes

    def _passes(self, record: logging.LogRecord) -> bool:
        library = record.name.partition(".")[0]
        if library not in NOISY:
            return True
        now = self._now()
        left, since = self._room.get(library, (float(BURST), now))
        left = min(float(BURST), left + (now - since) / REFILL_SECONDS)
        passes = left >= 1
        self._room[library] = (left - 1 if passes else left, now)
        if not passes:
            self._held[library] = self._held.get(library, 0) + 1
        elif held := self._held.pop(library, 0):
            record.msg, record.args = f"{record.getMessage()} (and {held} more lines not shown)", ()
        return passes


def exception_line(_: object, __: str, event: EventDict) -> EventDict:
    """Adds an exception as one line, `error`: what and where."""
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


def without_traceback(_: object, __: str, event: EventDict) -> EventDict:
    """For lines that people read as they come: the whole traceback is in the log file."""
    for key in ("exc_info", "exception"):
        event.pop(key, None)
    return event


def without_logger_of_info(_: object, __: str, event: EventDict) -> EventDict:
    """For a terminal, whose lines are short: who wrote a line matters where something is wrong."""
    if event.get("level") in ("info", "debug"):
        event.pop("logger", None)
    return event


def dated(_: object, __: str, event: EventDict) -> EventDict:
    """With the date, also where a terminal's lines have the time alone."""
    record = event.get("_record")
    at = datetime.fromtimestamp(
        record.created if isinstance(record, logging.LogRecord) else time.time(), tz=UTC
    )
    return {**event, "timestamp": at.isoformat()}


def _kept(path: Path) -> FileHandler | None:
    """None where the directory cannot be had: then the log is on standard error alone."""
    try:
        return FileHandler(path)
    except OSError:
        return None


def line_text(_: object, __: str, event: EventDict) -> str:
    """structlog renderer of the page's lines: the event and its values; time, level and logger have
    columns of their own."""
    words = [str(event.pop("event", ""))]
    for key in ("timestamp", "level", "logger"):
        event.pop(key, None)
    words += [f"{key}={value}" for key, value in event.items() if not key.startswith("_")]
    return " ".join(words)


def configure(
    cfg: LogConfig, process: str, stream: IO[str] | None = None, data_dir: Path | None = None
) -> LogRing:
    """Take over logging of this process, and return the ring that the status page shows.

    Args:
        process: `supervisor`, `network`, `trainer` or `scorer`; on every JSON line, as `component`.
        stream: where lines go; standard error by default.
        data_dir: whose log directory keeps them too, with whole tracebacks; None keeps none.

    Calling it again replaces the earlier configuration.
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
            exception_line,
            *last[:-1],
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            last[-1],
        ]
        return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=processors)

    lines, ring = LineHandler(stream), LogRing(process)
    if as_json:
        lines.setFormatter(
            formatter(without_traceback, in_order, structlog.processors.JSONRenderer())
        )
    else:
        lines.setFormatter(
            formatter(
                without_traceback,
                without_logger_of_info,
                structlog.dev.ConsoleRenderer(
                    colors=stream.isatty(), pad_event_to=0, pad_level=False, sort_keys=False
                ),
            )
        )
    ring.setFormatter(formatter(without_traceback, line_text))
    handlers: list[logging.Handler] = [lines, ring]
    if data_dir is not None and (kept := _kept(log_file(data_dir, process))) is not None:
        tracebacks: tuple[Processor, ...] = (structlog.processors.format_exc_info, clean_exception)
        kept.setFormatter(
            formatter(dated, *tracebacks, in_order, structlog.processors.JSONRenderer())
        )
        handlers.append(kept)

    calm = Calm()
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        handler.addFilter(calm)
        root.addHandler(handler)
    level = getattr(logging, cfg.level.upper())
    root.setLevel(level)
    for name, least in NOISY.items():
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(max(level, least))
    logging.captureWarnings(True)
    return ring
