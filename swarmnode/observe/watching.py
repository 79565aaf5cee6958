"""`swarmnode top`: asks a node every second and shows the answer, as much of it as the terminal has
lines; keys scroll and end it."""

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
from swarmnode.observe.top import drawn, fetch, text
from swarmnode.observe.where import Place

ASK_SECONDS = 1.0
KEY_SECONDS = 0.1
"""Between two looks at whether there is a new answer, or the terminal another size."""
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
    """Which lines are shown. Pure."""

    first: int = 0
    height: int = 24
    lines: int = 0
    """How many there are."""

    def pressed(self, key: str) -> View:
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

    def sized(self, height: int, lines: int) -> View:
        """The same lines, as far as there are so many."""
        return replace(
            self, height=height, lines=lines, first=min(self.first, max(0, lines - height))
        )


def keys_in(typed: bytes) -> list[str]:
    """What was pressed, of what a terminal sent; what is unknown is skipped."""
    found, at = [], 0
    while at < len(typed):
        key = next((each for each in LONGEST_FIRST if typed.startswith(each, at)), None)
        if key is not None:
            found.append(KEYS[key])
        at += len(key) if key is not None else 1
    return found


class Window:
    """The lines of `shown` that `view` says, and below them where one is."""

    def __init__(self, shown: RenderableType) -> None:
        self.shown = shown
        self.view = View()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(2, console.size.height)
        lines = console.render_lines(self.shown, options.update(height=None), pad=False)
        self.view = view = self.view.sized(height - 1, len(lines))
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
            " ends",
            "   ",
            more,
            style="dim",
            no_wrap=True,
            overflow="ellipsis",
            end="",
        )


class Asking:
    """Asks in a thread of its own, so that a node that does not answer does not hold up the
    keys."""

    def __init__(self, place: Place, first: RenderableType) -> None:
        self._place = place
        self._shown = self.latest = first
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="asking", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(ASK_SECONDS):
            try:
                self.latest = self._shown = drawn(fetch(self._place), self._place)
            except Unavailable as error:
                self.latest = Group(text(error, "red"), self._shown)


def top_command(place: Place) -> None:
    """Show the node until q or Ctrl-C. Raises `Unavailable` when it does not answer at the start;
    later it says so and goes on asking."""
    first = drawn(fetch(place), place)
    console = Console()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        _lines_only(console, place, first)
        return
    window, asking = Window(first), Asking(place, first)
    drawn_at = (first, console.size)
    try:
        with (
            _keys_at_once(sys.stdin.fileno()),
            Live(window, console=console, screen=True, auto_refresh=False) as live,
        ):
            live.refresh()
            while True:
                ready, _, _ = select.select([sys.stdin], [], [], KEY_SECONDS)
                pressed = keys_in(os.read(sys.stdin.fileno(), 1024)) if ready else []
                if "quit" in pressed:
                    return
                for key in pressed:
                    window.view = window.view.pressed(key)
                window.shown = asking.latest
                if pressed or (window.shown, console.size) != drawn_at:
                    drawn_at = (window.shown, console.size)
                    live.refresh()
    except KeyboardInterrupt:
        return
    finally:
        asking.end()


@contextlib.contextmanager
def _keys_at_once(fd: int) -> Iterator[None]:
    """The terminal hands over every key as it is pressed and does not show it; afterwards it is as
    before."""
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _lines_only(console: Console, place: Place, shown: RenderableType) -> None:
    """Where nobody can press a key: one picture after the other, until interrupted."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            console.print(shown)
            time.sleep(ASK_SECONDS)
            try:
                shown = drawn(fetch(place), place)
            except Unavailable as error:
                shown = text(error, "red")
