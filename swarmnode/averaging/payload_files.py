"""Payloads as files: what this process writes for the network process to serve, and what that has
fetched, mapped."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

FILES: Final = 64
"""Newest files that are left to the network process; what it has open stays readable without a
name."""


class PayloadFiles:
    """Writes below `directory`; for one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: deque[Path] = deque()

    def write(self, pieces: Iterable[bytes]) -> str:
        """Path of a new file; empty when there is no room. Not synced: it is worth nothing after a
        crash."""
        path = self._directory / f"out-{secrets.token_hex(8)}.bin"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            with open(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.writelines(pieces)
            os.replace(temporary, path)
            self._written.append(path)
            # the network process deletes what it has served; where there is none, nobody does
            while len(self._written) > FILES:
                self._written.popleft().unlink(missing_ok=True)
        except OSError as error:
            log.warning("weights not written: %s", error)
            return ""
        return str(path)


def mapped(path: str) -> memoryview:
    """A file's bytes, not read before they are needed; unmapped with the last view of them.

    Raises OSError, or ValueError where it is empty.
    """
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
