"""A shell in a pseudo-terminal, with scripted answers to its prompts."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


def typed(
    line: str,
    env: dict[str, str],
    cwd: Path,
    answers: Sequence[tuple[str, str]] = (),
    seconds: float = 300.0,
) -> tuple[int, str]:
    """Run a line of shell and return its exit code and output. answers: (prompt, reply), in
    order."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        ["bash", "-c", line], env=env, cwd=cwd, preexec_fn=lambda: os.login_tty(theirs)
    )
    os.close(theirs)
    written, seen, due, late = b"", 0, list(answers), time.monotonic() + seconds
    try:
        while time.monotonic() < late:
            if due and (at := written.find(due[0][0].encode(), seen)) >= 0:
                seen = at + len(due[0][0])
                os.write(ours, f"{due.pop(0)[1]}\n".encode())
            if select.select([ours], [], [], 0.2)[0]:
                more = b""
                with contextlib.suppress(OSError):  # EIO: the other end is closed
                    more = os.read(ours, 65536)
                if not more:
                    break
                written += more
        return process.wait(max(0.1, late - time.monotonic())), written.decode(
            errors="replace"
        ).replace("\r\n", "\n")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
