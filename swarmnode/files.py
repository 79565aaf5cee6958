"""Atomic writes of files, the data directory and its lock, and Unix sockets with long paths."""

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
"""Version of the file formats in a data directory. Incremented if earlier versions of swarmnode
would misread the files."""
FORMAT_FILE = "format"
PUBLIC_FILE, PUBLIC_DIRECTORY = 0o644, 0o755
"""Modes of files and directories that other users may read."""
SOCKET_PATH_BYTES = 100
"""Longest path of a Unix socket. The kernel allows about 107 bytes."""


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file under a temporary name, sync it, and rename it to `path`. A crash leaves the old
    or the new file.

    The directory is created with mode 0700 if it does not exist.

    Raises:
        OSError: The disk is full or the directory is not writable. The old file is unchanged.
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


def write_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file atomically, see `write_atomically`. Raises Unavailable."""
    try:
        write_atomically(path, data, mode)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror}") from None


def make_readable(directory: Path) -> None:
    """Let other users read a directory and its content, for an export.

    Raises:
        OSError: A mode cannot be changed.
    """
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
def pinned(path: Path) -> Iterator[str]:
    """Yield a path that stays bound to the current file even if another file replaces `path`.

    safetensors opens a path twice. Without this, it could read the header of one file and the
    tensors of the next.

    Raises:
        OSError: The file cannot be opened.
    """
    with open(path, "rb") as file:
        yield f"/dev/fd/{file.fileno()}"


def read_private(path: Path, name: str, limit: int) -> bytes | None:
    """Read a file that only its owner may read. Return None if it does not exist.

    The permissions are those of the open descriptor, so that the file cannot be exchanged between
    check and read. The group may read credentials of systemd: with DynamicUser these belong to
    root, and an ACL admits only the service.

    Args:
        name: Name of the file in errors, for example "key file".
        limit: Largest number of bytes to read.

    Raises:
        Refused: Other users can read the file.
        Unavailable: This process cannot read the file.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & (0o037 if _is_credential(path) else 0o077):
                raise Refused(
                    f"other users can read the {name} (mode {mode:04o}): chmod 600 {path}"
                )
            return file.read(limit)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unavailable(f"cannot read the {name} {path}: {error.strerror}") from None


def _is_credential(path: Path) -> bool:
    directory = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return bool(directory) and path.resolve().is_relative_to(Path(directory).resolve())


def socket_address(path: Path) -> tuple[str, int | None]:
    """Return the address of a Unix socket, and a descriptor that the caller closes afterwards.

    On Linux, a socket with a long path is addressed through a descriptor of its directory.

    Raises:
        Unavailable: The path is too long on this system.
    """
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return str(path), None
    if not sys.platform.startswith("linux"):
        raise Unavailable(
            f"{path} is too long for a Unix socket (limit {SOCKET_PATH_BYTES} bytes): choose a data"
            " directory with a shorter path"
        )
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{directory}/{path.name}", directory


@contextmanager
def unix_listener(path: Path, backlog: int, name: str) -> Iterator[socket.socket]:
    """Yield a listening Unix socket that only this user can connect to.

    Args:
        name: Name of the socket in errors.

    Raises:
        Unavailable: The socket cannot be created.
    """
    address, directory = socket_address(path)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            with suppress(FileNotFoundError):
                # A socket of an earlier process. The lock of the data directory excludes another
                # running node.
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
    """Check the format of a data directory. Call it before reading or writing any other file.

    Raises:
        StateError: A newer version of swarmnode has written the directory.
    """
    try:
        with open(data_dir / FORMAT_FILE, "rb") as file:
            text = file.read(32)
    except OSError:
        return  # A new directory. Readers of other files report unreadable files.
    if not text.strip().isdigit():
        raise StateError(
            f"{data_dir / FORMAT_FILE} is damaged: copy the directory again, or remove that file"
        )
    if int(text) > FORMAT:
        raise StateError(
            f"data directory {data_dir} belongs to a newer version of swarmnode (format"
            f" {int(text)}, supported: {FORMAT}): upgrade, or use another directory with -d"
        )


def make_data_dir(data_dir: Path) -> None:
    """Create the data directory, and `run` in it for files that last as long as a run.

    Raises:
        Unavailable: The directory cannot be created.
        StateError: A newer version of swarmnode has written the directory.
    """
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
        with suppress(OSError):  # the command may not need to write
            write_atomically(data_dir / FORMAT_FILE, f"{FORMAT}\n".encode())


def lock_data_dir(data_dir: Path) -> int:
    """Create the data directory and lock it for one node. Return the descriptor of the lock.

    Raises:
        Unavailable: Another node uses the directory, or it cannot be created.
    """
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
    with suppress(OSError):  # the lock works even if the disk is full
        os.truncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
    return fd


@contextmanager
def locked_data_dir(data_dir: Path) -> Iterator[None]:
    """Lock the data directory and its key, so that no node can start with them.

    Raises:
        Unavailable: A node uses the directory.
    """
    lock = lock_data_dir(data_dir)
    try:
        yield
    finally:
        os.close(lock)
