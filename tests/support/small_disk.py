"""A file system that a test may fill or make read-only. Root ignores permission bits, so a mount is
needed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_mount = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small file system needs root"
)


@contextmanager
def mounted(directory: Path, size: str) -> Iterator[Path]:
    """Mount a file system of `size` ("12m") at `directory`. Skip the test where mounting is not
    permitted."""
    directory.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(directory)],
        capture_output=True,
    ).returncode:
        pytest.skip("this container does not permit mounting a file system")
    assert os.path.ismount(directory)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path) -> None:
    """Fill the file system. Refuse the machine's own disk: a test that replaced `subprocess.run`
    had mounted nothing."""
    assert os.path.ismount(directory), f"{directory} is no file system of its own"
    with contextlib.suppress(OSError), open(directory / "filler", "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def read_only(directory: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
