"""`swarmnode top` in a pseudo-terminal of 80 × 24: screens, and the restored terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from swarmnode.observe.history import History
from swarmnode.observe.http import status_json
from tests.support.snapshots import example


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, command: list[str], columns: int = 80, lines: int = 24) -> None:
        self._ours, self.theirs = pty.openpty()
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, size)
        self.before = termios.tcgetattr(self.theirs)
        env = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES"):
            env.pop(name, None)
        # a background process inherits an ignored SIGINT
        restore_sigint = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.process = subprocess.Popen(
            command,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env=env,
            start_new_session=True,
            preexec_fn=restore_sigint,
        )

    def until(self, expected: str, seconds: float = 30.0) -> str:
        """Return the output up to `expected`, without escape sequences. Each redrawn screen begins
        on a new line."""
        written, late = b"", time.monotonic() + seconds
        while True:
            screens = written.replace(b"\x1b[H", b"\n")
            # a read may end within an escape sequence
            plain = re.sub(rb"\x1b(\[[0-9;?]*([a-zA-Z]|$)|$)", b"", screens).decode(
                errors="replace"
            )
            if expected in plain:
                return plain
            assert time.monotonic() < late, f"never written: {expected!r}; but: {plain[-3000:]}"
            if select.select([self._ours], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # EIO: the program has closed the terminal
                    written += os.read(self._ours, 65536)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


class Node:
    """A node's HTTP server, which can start to answer with errors."""

    def __init__(self) -> None:
        self.fails = threading.Event()
        body = status_json(example(), History())
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(b"{}" if node.fails.is_set() else body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.server.shutdown()
    node.server.server_close()


@pytest.fixture
def terminal(node: Node) -> Iterator[Terminal]:
    terminal = Terminal([sys.executable, "-m", "swarmnode", "top", node.address])
    yield terminal
    terminal.close()


def test_fills_the_terminal_and_ctrl_c_restores_it(terminal: Terminal) -> None:
    lines = terminal.until("kitchen-3090").replace("\r", "").split("\n")
    assert max(map(len, lines)) <= 80
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(60) == 0
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_keeps_the_last_state_while_the_node_fails(node: Node, terminal: Terminal) -> None:
    terminal.until("kitchen-3090")
    node.fails.set()
    assert "kitchen-3090" in terminal.until("is not a swarmnode")


def test_prints_the_state_once_without_a_terminal(node: Node) -> None:
    command = [sys.executable, "-m", "swarmnode", "top", node.address]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert b"kitchen-3090" in done.stdout


def test_reports_a_node_of_another_directory(node: Node, tmp_path, capsys) -> None:
    from swarmnode import cli

    (tmp_path / "run").mkdir()
    addresses = {"peer": example().node.peer, "addrs": [], "http": f"http://{node.address}"}
    (tmp_path / "run" / "addresses.json").write_text(json.dumps(addresses))
    assert cli.run(["status", "-d", str(tmp_path)]) == 0
    assert "kitchen-3090" in capsys.readouterr().out
    (tmp_path / "run" / "addresses.json").write_text(
        json.dumps({**addresses, "peer": "12D3KooWAnother"})
    )
    assert cli.run(["status", "-d", str(tmp_path)]) == 69
    assert "is not running" in capsys.readouterr().err
