"""Files are replaced whole or not at all; and how to reach a Unix socket whose path is too long for one."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

from swarmnode.errors import Refused, Unavailable

SOCKET_PATH_BYTES = 100
"""A Unix socket's path may have about 107 bytes; a data directory may be deeper than that."""


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write to a temporary name beside `path`, sync, rename. A crash leaves the old file or the new one.

    The directory is made (0700) if need be.

    Raises:
        OSError: the disk is full or the directory is not writable; the old file is untouched.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_private(path: Path, what: str, limit: int) -> bytes | None:
    """At most `limit` bytes of a file that only its owner may read; None if there is none. `what`: named in errors, e.g. "key file".

    The descriptor that is read is checked, not the name, so that nothing can be swapped between. Raises Refused when others can read it,
    Unavailable when we cannot.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise Refused(f"others can read the {what} (mode {mode:04o}): chmod 600 {path}")
            return file.read(limit)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unavailable(f"cannot read the {what} {path}: {error.strerror}") from None


def socket_address(path: Path) -> tuple[str, int | None]:
    """Address of a Unix socket at `path`, and a descriptor to close when done with it.

    A path that is too long is reached through a descriptor of its directory (Linux).
    Raises Unavailable where that does not exist.
    """
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return str(path), None
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"{path} is too deep for a Unix socket: choose a data directory that keeps it under {SOCKET_PATH_BYTES} bytes")
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{directory}/{path.name}", directory
