"""`swarmnode top`: show the state of a node in the terminal, updated every second. Keys scroll and
quit."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from swarmnode.errors import Unavailable
from swarmnode.observe.address import NodeAddress
from swarmnode.observe.top import fetch, render_or_fail, text

POLL_SECONDS = 1.0
"""Interval between two requests."""
KEY_SECONDS = 0.1
"""Interval between two checks for a new state or another size of the terminal."""
KEYS = {
    b"\x1b[A": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"j": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"b": "page up",
    b"\x1b[6~": "page down",
    b" ": "page down",
    b"\x1b[H": "home",
    b"\x1b[1~": "home",
    b"\x1bOH": "home",
    b"g": "home",
    b"\x1b[F": "end",
    b"\x1b[4~": "end",
    b"\x1bOF": "end",
    b"G": "end",
    b"q": "quit",
    b"Q": "quit",
    b"\x03": "quit",
    b"\x04": "quit",
}
LONGEST_FIRST = sorted(KEYS, key=len, reverse=True)


@dataclass(frozen=True)
class View:
    """The lines on the screen."""

    first: int = 0
    height: int = 24
    lines: int = 0
    """Number of all lines."""

    def scrolled(self, key: str) -> View:
        """Return the view after a key."""
        page = max(1, self.height - 1)
        last = max(0, self.lines - self.height)
        wanted = {
            "up": self.first - 1,
            "down": self.first + 1,
            "page up": self.first - page,
            "page down": self.first + page,
            "home": 0,
            "end": last,
        }.get(key, self.first)
        return replace(self, first=min(max(0, wanted), last))

    def resized(self, height: int, lines: int) -> View:
        """Return the view for another number of lines or size of the terminal."""
        return replace(
            self, height=height, lines=lines, first=min(self.first, max(0, lines - height))
        )


def keys_in(typed: bytes) -> list[str]:
    """Return the keys in the bytes of a terminal. Unknown bytes are skipped."""
    found, at = [], 0
    while at < len(typed):
        key = next((each for each in LONGEST_FIRST if typed.startswith(each, at)), None)
        if key is not None:
            found.append(KEYS[key])
        at += len(key) if key is not None else 1
    return found


class Window:
    """The lines of `shown` in `view`, and a line of help."""

    def __init__(self, shown: RenderableType) -> None:
        self.shown = shown
        self.view = View()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(2, console.size.height)
        lines = console.render_lines(self.shown, options.update(height=None), pad=False)
        self.view = view = self.view.resized(height - 1, len(lines))
        for line in lines[view.first : view.first + view.height]:
            yield from line
            yield Segment.line()
        below = view.lines - view.first - view.height
        more = (
            f"{view.first} lines above, {max(0, below)} below · arrows, page keys"
            if view.lines > view.height
            else ""
        )
        yield Text.assemble(
            ("q", "bold"),
            " quits",
            "   ",
            more,
            style="dim",
            no_wrap=True,
            overflow="ellipsis",
            end="",
        )


class StatusPoller:
    """Fetches the state in a thread, so that keys work while the node does not answer."""

    def __init__(self, address: NodeAddress, first: RenderableType) -> None:
        self._place = address
        self._shown = self.latest = first
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="poll-status", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            try:
                self.latest = self._shown = render_or_fail(fetch(self._place), self._place)
            except Unavailable as error:
                self.latest = Group(text(error, "red"), self._shown)


def top_command(address: NodeAddress) -> None:
    """Show the node until q or Ctrl-C.

    If the node stops answering, the last state stays with an error, and requests continue.

    Raises:
        Unavailable: the node does not answer at the start.
    """
    first = render_or_fail(fetch(address), address)
    console = Console()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print_states(console, address, first)
        return
    window, poller = Window(first), StatusPoller(address, first)
    drawn_at = (first, console.size)
    try:
        with (
            _raw_keys(sys.stdin.fileno()),
            Live(window, console=console, screen=True, auto_refresh=False) as live,
        ):
            live.refresh()
            while True:
                ready, _, _ = select.select([sys.stdin], [], [], KEY_SECONDS)
                pressed = keys_in(os.read(sys.stdin.fileno(), 1024)) if ready else []
                if "quit" in pressed:
                    return
                for key in pressed:
                    window.view = window.view.scrolled(key)
                window.shown = poller.latest
                if pressed or (window.shown, console.size) != drawn_at:
                    drawn_at = (window.shown, console.size)
                    live.refresh()
    except KeyboardInterrupt:
        return
    finally:
        poller.end()


@contextlib.contextmanager
def _raw_keys(fd: int) -> Iterator[None]:
    """Read each key at once and without echo; restore the terminal afterwards."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _print_states(console: Console, address: NodeAddress, shown: RenderableType) -> None:
    """Print one state after the other until interrupted, if there is no terminal."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            console.print(shown)
            time.sleep(POLL_SECONDS)
            try:
                shown = render_or_fail(fetch(address), address)
            except Unavailable as error:
                shown = text(error, "red")
