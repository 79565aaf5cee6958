"""A node's identity: one Ed25519 key, from which its libp2p peer id follows.

The file is PKCS#8 PEM, with a passphrase or without (`passphrase.py`), so that ordinary tools can
back it up. Whoever can read it can be this node; it is therefore created 0600 and refused when
others may read it. Nothing here logs, formats or returns the key's bytes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID

from swarmnode.errors import Refused, Unavailable
from swarmnode.files import write_atomically
from swarmnode.p2p import passphrase

log = logging.getLogger("swarmnode.p2p.identity")
"""Not structlog's, which says it on standard output to a command that has not configured it."""

FORMER_LIFE = ("peers.json", "trainer")
"""Beside the key, in the data directory of a node that has run."""
LOST = (
    "%s was gone, though a node has run here: to its peers this is another one now, %s. "
    "If there is a backup, stop the node and `swarmnode key import FILE --replace`"
)
LONGEST_FILE = 4096
"""A PKCS#8 Ed25519 key is 119 bytes; anything much longer is not one."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """`private_key` signs envelopes, `key_pair` is the same key for libp2p, `peer_id` is its base58
    name ("12D3Koo…")."""

    private_key: Ed25519PrivateKey = dataclasses.field(repr=False)
    key_pair: KeyPair = dataclasses.field(repr=False)
    peer_id: str


def load_or_create(path: Path) -> Identity:
    """The identity in `path`, made and saved first if there is no such file.

    A new one has the passphrase that is given, if one is. Raises Refused if others may read the
    file or its passphrase is missing or wrong, StateError if it is not an Ed25519 key, Unavailable
    if it cannot be read or written.
    """
    try:
        data = _read_private(path)
        if data is None:
            key = Ed25519PrivateKey.generate()
            write_atomically(path, passphrase.pem(key, passphrase.given()), mode=0o600)
            made = from_key(key)
            if any((path.parent / name).exists() for name in FORMER_LIFE):
                log.warning(LOST, path, made.peer_id)
            return made
    except OSError as error:
        raise Unavailable(f"cannot use the identity file {path}: {error.strerror}") from error
    return from_key(passphrase.open_key(data, path))


def from_key(key: Ed25519PrivateKey) -> Identity:
    """The identity of a key that is already in memory."""
    seed = key.private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )
    pair = create_new_key_pair(seed)
    return Identity(
        private_key=key, key_pair=pair, peer_id=ID.from_pubkey(pair.public_key).to_base58()
    )


def _read_private(path: Path) -> bytes | None:
    """The file's bytes, None if there is none. Checks the descriptor that is read, not the name, so
    that nothing can be swapped between."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & 0o077:
            raise Refused(f"others can read the identity file (mode {mode:04o}): chmod 600 {path}")
        return file.read(LONGEST_FILE)
