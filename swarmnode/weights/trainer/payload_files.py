"""Payload files: written by the trainer for the network process to serve, or fetched by the network
process and mapped here."""

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
"""Number of newest files that are not deleted here. An open file stays readable after its
deletion."""


class PayloadFiles:
    """Writes payload files into `directory`. For one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: deque[Path] = deque()

    def write(self, pieces: Iterable[bytes]) -> str:
        """Write a new file and return its path; an empty string if the disk refuses. The file is
        not synced, because it is useless after a crash."""
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
            # the network process deletes served files, but it may not be running
            while len(self._written) > FILES:
                self._written.popleft().unlink(missing_ok=True)
        except OSError as error:
            log.warning("weights not written: %s", error)
            return ""
        return str(path)


def mapped(path: str) -> memoryview:
    """Map a file. It is unmapped with the last view of it.

    Raises:
        OSError: The file cannot be opened.
        ValueError: The file is empty.
    """
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
