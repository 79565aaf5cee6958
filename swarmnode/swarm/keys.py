"""`swarmnode key …`: backing a node's identity up, bringing one in, and replacing it. Files 0600,
old keys kept, no key ever printed.

Whoever has the file is the node: its standing with peers, its place on a private swarm's list, and,
for a founder, the swarm's successors. None of this works under a running node: the data directory's
lock is taken first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import ConfigError, Refused, Unavailable
from swarmnode.files import held_data_dir, read_private, write_atomically
from swarmnode.p2p import passphrase as passphrases
from swarmnode.wire.envelope import peer_id

IDENTITY = "identity.key"
LONGEST_FILE = 4096


def backup(data_dir: Path, file: Path) -> str:
    """Copy the key to a new file. Returns its peer id.

    Raises Unavailable when there is no key or the file cannot be written, Refused when it exists:
    an older backup may be the only one.
    """
    data = _existing(data_dir)
    _write_new(file, data)
    return peer_of(data, data_dir / IDENTITY)


def bring(data_dir: Path, file: Path, replace: bool = False) -> tuple[str, Path | None]:
    """Make the key in `file` this node's. Returns its peer id and where the former key went, None
    if there was none.

    Raises Refused when others can read the file, or when there is another key here and `replace` is
    not set; StateError if it is no key.
    """
    data = read_private(file, "key file", LONGEST_FILE)
    if data is None:
        raise ConfigError(f"{file}: no such file")
    peer = peer_of(data, file)
    with held_data_dir(data_dir):
        former = read_private(data_dir / IDENTITY, "identity file", LONGEST_FILE)
        if former is None:
            _write(data_dir / IDENTITY, data)
            return peer, None
        before = peer_of(former, data_dir / IDENTITY)
        if before == peer:
            return peer, None
        if not replace:
            raise Refused(
                f"this node has a key already ({before}): --replace puts the new one in its place"
                " and keeps the old one"
            )
        kept = _keep(data_dir, former)
        _write(data_dir / IDENTITY, data)
        return peer, kept


def rotate(data_dir: Path) -> tuple[str, str, Path]:
    """A new key, with the passphrase of the former one. Returns the former peer id, the new one,
    and where the former key is kept.

    Raises as `backup` does.
    """
    with held_data_dir(data_dir):
        former = _existing(data_dir)
        before = peer_of(former, data_dir / IDENTITY)
        kept = _keep(data_dir, former)
        key = Ed25519PrivateKey.generate()
        data = passphrases.pem(key, passphrases.given() if passphrases.is_locked(former) else None)
        _write(data_dir / IDENTITY, data)
        return before, peer_id(key.public_key().public_bytes_raw()), kept


def peer_of(data: bytes, path: Path) -> str:
    """The peer id of a PEM key. Raises StateError when it is not an Ed25519 key, Refused when its
    passphrase is missing or wrong."""
    return peer_id(passphrases.open_key(data, path).public_key().public_bytes_raw())


def unlock(data_dir: Path) -> None:
    """Before anything starts: find out whether this node's key is one, and ask for its passphrase
    if it has one.

    Raises as `peer_of` does; does nothing where there is no key yet.
    """
    if not data_dir.is_dir():
        return  # what comes next says so
    data = read_private(data_dir / IDENTITY, "identity file", LONGEST_FILE)
    if data is not None:
        passphrases.open_key(data, data_dir / IDENTITY)


def set_passphrase(data_dir: Path, new: Callable[[], bytes | None]) -> str:
    """Give this node's key the passphrase that `new` returns, once the present one is known, or
    none. Returns the peer id.

    Raises Unavailable when there is no key, or a node runs with it; Refused and ConfigError for
    passphrases.
    """
    with held_data_dir(data_dir):
        path = data_dir / IDENTITY
        key = passphrases.open_key(_existing(data_dir), path)
        _write(path, passphrases.pem(key, new()))
        return peer_id(key.public_key().public_bytes_raw())


def _existing(data_dir: Path) -> bytes:
    data = read_private(data_dir / IDENTITY, "identity file", LONGEST_FILE)
    if data is None:
        raise Unavailable(f"there is no key in {data_dir} yet; `swarmnode key show` makes one")
    return data


def _keep(data_dir: Path, former: bytes) -> Path:
    """The former key beside the new one, under a name of its own."""
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = data_dir / f"identity-{when}-{peer_of(former, data_dir / IDENTITY)[-8:]}.key"
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


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data, mode=0o600)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror}") from None
