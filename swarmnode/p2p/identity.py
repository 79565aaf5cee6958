"""A node's identity: one Ed25519 key, from which its libp2p peer id follows.

The file is unencrypted PKCS#8 PEM, so that ordinary tools can back it up. Whoever can read it can be this node; it is therefore
created 0600 and refused when others may read it. Nothing here logs, formats or returns the key's bytes.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID

from swarmnode.errors import Refused, StateError, Unavailable
from swarmnode.files import write_atomically

LONGEST_FILE = 4096
"""A PKCS#8 Ed25519 key is 119 bytes; anything much longer is not one."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """`private_key` signs envelopes, `key_pair` is the same key for libp2p, `peer_id` is its base58 name ("12D3Koo…")."""

    private_key: Ed25519PrivateKey = dataclasses.field(repr=False)
    key_pair: KeyPair = dataclasses.field(repr=False)
    peer_id: str


def load_or_create(path: Path) -> Identity:
    """The identity in `path`, made and saved first if there is no such file.

    Raises Refused if others may read the file, StateError if it is not an Ed25519 key, Unavailable if it cannot be read or written.
    """
    try:
        data = _read_private(path)
        if data is None:
            key = Ed25519PrivateKey.generate()
            write_atomically(path, _pem(key), mode=0o600)
            return from_key(key)
    except OSError as error:
        raise Unavailable(f"cannot use the identity file {path}: {error.strerror}") from error
    try:
        loaded = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:  # TypeError: encrypted
        raise StateError(f"the identity file {path} is not an unencrypted PEM key; restore or remove it") from error
    if not isinstance(loaded, Ed25519PrivateKey):
        raise StateError(f"the identity file {path} holds a key that is not Ed25519")
    return from_key(loaded)


def from_key(key: Ed25519PrivateKey) -> Identity:
    """The identity of a key that is already in memory."""
    seed = key.private_bytes(serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption())
    pair = create_new_key_pair(seed)
    return Identity(private_key=key, key_pair=pair, peer_id=ID.from_pubkey(pair.public_key).to_base58())


def _read_private(path: Path) -> bytes | None:
    """The file's bytes, None if there is none. Checks the descriptor that is read, not the name, so that nothing can be swapped between."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & 0o077:
            raise Refused(f"others can read the identity file (mode {mode:04o}): chmod 600 {path}")
        return file.read(LONGEST_FILE)


def _pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
