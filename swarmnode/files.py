"""Files that are replaced whole or not at all, the data directory and who holds it, and Unix
sockets whose path is too long for one."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swarmnode.errors import Refused, StateError, Unavailable

FORMAT = 1
"""How the files of a data directory are written. A version that an earlier one would misread counts
on."""
FORMAT_FILE = "format"
PUBLIC_FILE, PUBLIC_DIRECTORY = 0o644, 0o755
"""Modes of what other users may read."""
SOCKET_PATH_BYTES = 100
"""A Unix socket's path may have about 107 bytes; a data directory may be deeper than that."""


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write to a temporary name beside `path`, sync, rename. A crash leaves the old file or the new
    one.

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


def make_readable(directory: Path) -> None:
    """Let other users read a directory and everything in it, whatever wrote the files: an export is
    for them, too. Raises OSError."""
    for path in (directory, *directory.rglob("*")):
        path.chmod(PUBLIC_DIRECTORY if path.is_dir() else PUBLIC_FILE)


def sync_directory(directory: Path) -> None:
    """Make a rename in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def held(path: Path) -> Iterator[str]:
    """Another name for the file that `path` names now, whatever takes its place: for safetensors,
    which opens a name twice, and would have the header of one file and the tensors of the next.
    Raises OSError."""
    with open(path, "rb") as file:
        yield f"/dev/fd/{file.fileno()}"


def read_private(path: Path, what: str, limit: int) -> bytes | None:
    """At most `limit` bytes of a file that only its owner may read; None if there is none. `what`:
    named in errors, e.g. "key file". Of systemd's credentials the group may be one that reads: with
    DynamicUser they are root's, with an ACL for the service alone.

    The descriptor that is read is checked, not the name, so that nothing can be swapped between.
    Raises Refused when others can read it, Unavailable when we cannot.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & (0o037 if _is_credential(path) else 0o077):
                raise Refused(f"others can read the {what} (mode {mode:04o}): chmod 600 {path}")
            return file.read(limit)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unavailable(f"cannot read the {what} {path}: {error.strerror}") from None


def _is_credential(path: Path) -> bool:
    directory = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return bool(directory) and path.resolve().is_relative_to(Path(directory).resolve())


def socket_address(path: Path) -> tuple[str, int | None]:
    """Address of a Unix socket at `path`, and a descriptor to close when done with it.

    A path that is too long is reached through a descriptor of its directory (Linux).
    Raises Unavailable where that does not exist.
    """
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return str(path), None
    if not sys.platform.startswith("linux"):
        raise Unavailable(
            f"{path} is too deep for a Unix socket: choose a data directory that keeps it under"
            f" {SOCKET_PATH_BYTES} bytes"
        )
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{directory}/{path.name}", directory


@contextmanager
def listening(path: Path, backlog: int, name: str) -> Iterator[socket.socket]:
    """A Unix socket that listens at `path`, to this user alone. Raises Unavailable, with its
    `name`, where it cannot be made."""
    address, directory = socket_address(path)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            with suppress(FileNotFoundError):
                # of an earlier process: the data directory's lock is held by our supervisor
                os.unlink(address)
            try:
                listener.bind(address)
                os.chmod(address, 0o600)
                listener.listen(backlog)
            except OSError as error:
                raise Unavailable(f"{name}: {error.strerror}") from None
            yield listener
    finally:
        if directory is not None:
            os.close(directory)


def check_format(data_dir: Path) -> None:
    """Raises StateError for a data directory of a version that is newer than this one, of which
    nothing else may be read or written."""
    try:
        with open(data_dir / FORMAT_FILE, "rb") as file:
            text = file.read(32)
    except OSError:
        return  # A new directory. Unreadable files are reported where they are used.
    if not text.strip().isdigit():
        raise StateError(
            f"{data_dir / FORMAT_FILE} is damaged: copy the directory again, or remove that file"
        )
    if int(text) > FORMAT:
        raise StateError(
            f"data directory {data_dir} is of a newer version of swarmnode (format {int(text)},"
            f" this one knows {FORMAT}): upgrade, or name another directory with -d"
        )


def make_data_dir(data_dir: Path) -> None:
    """The directory, and the one in it that lives as long as a run. Raises Unavailable,
    StateError."""
    check_format(data_dir)
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        (data_dir / "run").mkdir(exist_ok=True, mode=0o700)
    except (FileExistsError, NotADirectoryError):
        raise Unavailable(
            f"data directory {data_dir} cannot be used: it is not a directory"
        ) from None
    except OSError as error:
        raise Unavailable(f"data directory {data_dir} cannot be used: {error.strerror}") from None
    if not (data_dir / FORMAT_FILE).exists():
        with suppress(OSError):  # a directory that is full or read-only may do for what comes
            write_atomically(data_dir / FORMAT_FILE, f"{FORMAT}\n".encode())


def lock_data_dir(data_dir: Path) -> int:
    """Create the directory and hold it: one node per directory. Returns the descriptor that holds
    the lock."""
    make_data_dir(data_dir)
    try:
        fd = os.open(data_dir / "run" / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(f"data directory {data_dir} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise Unavailable(
            f"data directory {data_dir} is in use by another node (pid {owner or 'unknown'})"
        ) from None
    with suppress(OSError):  # on a full disk it is held all the same
        os.truncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
    return fd


@contextmanager
def held_data_dir(data_dir: Path) -> Iterator[None]:
    """Nobody else runs with this directory and its key meanwhile. Raises Unavailable where somebody
    does."""
    lock = lock_data_dir(data_dir)
    try:
        yield
    finally:
        os.close(lock)
