"""`swarmnode key …`: back up, import and replace a node's identity. Files have mode 0600, old
keys are kept, and no key is ever printed.

The key file is the node: its reputation with peers, its membership in a private swarm and, for a
founder, the right to sign successors. No command changes the key of a running node, because each
takes the lock of the data directory first.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import ConfigError, Refused, Unavailable
from swarmnode.files import locked_data_dir, read_private, write_file
from swarmnode.p2p import pem
from swarmnode.wire.envelope import peer_id

IDENTITY = "identity.key"
MAX_FILE_BYTES = 4096


def backup(data_dir: Path, file: Path) -> str:
    """Copy the key to a new file and return its peer id.

    Raises:
        Unavailable: there is no key, or the file cannot be written.
        Refused: the file exists; it may be the only backup of another key.
    """
    data = _read_existing(data_dir)
    _write_new(file, data)
    return peer_id_of(data, data_dir / IDENTITY)


def import_key(data_dir: Path, file: Path, replace: bool = False) -> tuple[str, Path | None]:
    """Make the key in `file` this node's key.

    Returns:
        The peer id, and the path of the previous key, None if there was none.

    Raises:
        Refused: others can read the file, or the node has another key and `replace` is not set.
        StateError: the file is not a key.
    """
    data = read_private(file, "key file", MAX_FILE_BYTES)
    if data is None:
        raise ConfigError(f"{file}: no such file")
    peer = peer_id_of(data, file)
    with locked_data_dir(data_dir):
        former = read_private(data_dir / IDENTITY, "identity file", MAX_FILE_BYTES)
        if former is None:
            write_file(data_dir / IDENTITY, data)
            return peer, None
        before = peer_id_of(former, data_dir / IDENTITY)
        if before == peer:
            return peer, None
        if not replace:
            raise Refused(
                f"this node already has a key ({before}): use --replace to install the new one"
                " and keep a copy of the old one"
            )
        stored_path = _store_former(data_dir, former)
        write_file(data_dir / IDENTITY, data)
        return peer, stored_path


def rotate(data_dir: Path) -> tuple[str, str, Path]:
    """Create a new key. Raises the errors of `backup`.

    Returns:
        The previous peer id, the new peer id, and the path of the previous key.
    """
    with locked_data_dir(data_dir):
        former = _read_existing(data_dir)
        before = peer_id_of(former, data_dir / IDENTITY)
        stored_path = _store_former(data_dir, former)
        key = Ed25519PrivateKey.generate()
        write_file(data_dir / IDENTITY, pem.write_key(key))
        return before, peer_id(key.public_key().public_bytes_raw()), stored_path


def peer_id_of(data: bytes, path: Path) -> str:
    """Return the peer id of a PEM key. Raises StateError if it is not an Ed25519 key."""
    return peer_id(pem.read_key(data, path).public_key().public_bytes_raw())


def check_key(data_dir: Path) -> None:
    """Check this node's key, if there is one, before anything starts. Raises as `peer_id_of`."""
    if not data_dir.is_dir():
        return  # the caller reports the missing directory
    data = read_private(data_dir / IDENTITY, "identity file", MAX_FILE_BYTES)
    if data is not None:
        pem.read_key(data, data_dir / IDENTITY)


def _read_existing(data_dir: Path) -> bytes:
    data = read_private(data_dir / IDENTITY, "identity file", MAX_FILE_BYTES)
    if data is None:
        raise Unavailable(f"there is no key in {data_dir}; `swarmnode key show` creates one")
    return data


def _store_former(data_dir: Path, former: bytes) -> Path:
    """Write the previous key to a new file beside the identity and return its path."""
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = data_dir / f"identity-{when}-{peer_id_of(former, data_dir / IDENTITY)[-8:]}.key"
    _write_new(path, former)
    return path


def _write_new(path: Path, data: bytes) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise Refused(f"{path} exists; name another file") from None
    except OSError as error:
        missing = (
            f"there is no directory {path.parent}"
            if isinstance(error, FileNotFoundError)
            else error.strerror
        )
        raise Unavailable(f"cannot write {path}: {missing}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink()
        raise Unavailable(f"cannot write {path}: {error.strerror}") from None
