"""A node's identity: one Ed25519 key, from which its libp2p peer id follows.

The file is PKCS#8 PEM, so that ordinary tools can back it up. Anyone who can read the file can
impersonate the node. It is therefore created with mode 0600 and refused if others can read it.
Nothing here logs, formats or returns the bytes of the key.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID

from swarmnode.files import read_private, write_file
from swarmnode.p2p import pem

log = logging.getLogger("swarmnode.p2p.identity")
"""Not structlog's logger, which writes to standard output in a command that has not configured
it."""

EARLIER_RUN_FILES = ("peers.json", "trainer")
"""Files beside the key in the data directory of a node that has run before."""
KEY_LOST_WARNING = (
    "%s is missing although a node has run here; created a new key, peers see a new node %s. "
    "To restore a backup, stop the node and run `swarmnode key import FILE --replace`"
)
MAX_FILE_BYTES = 4096
"""Bytes. A PKCS#8 Ed25519 key has 119; a much longer file is not a key."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """Key and peer id of a node.

    Attributes:
        private_key: signs envelopes.
        key_pair: the same key for libp2p.
        peer_id: base58 peer id ("12D3Koo…").
    """

    private_key: Ed25519PrivateKey = dataclasses.field(repr=False)
    key_pair: KeyPair = dataclasses.field(repr=False)
    peer_id: str


def load_or_create(path: Path) -> Identity:
    """Load the identity from `path`, or create and save a new one if the file does not exist.

    Raises:
        Refused: others can read the file.
        StateError: it is not an Ed25519 key.
        Unavailable: it cannot be read or written.
    """
    data = read_private(path, "identity file", MAX_FILE_BYTES)
    if data is not None:
        return from_key(pem.read_key(data, path))
    key = Ed25519PrivateKey.generate()
    write_file(path, pem.write_key(key))
    made = from_key(key)
    if any((path.parent / name).exists() for name in EARLIER_RUN_FILES):
        log.warning(KEY_LOST_WARNING, path, made.peer_id)
    return made


def from_key(key: Ed25519PrivateKey) -> Identity:
    """Return the identity of a key in memory."""
    seed = key.private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )
    pair = create_new_key_pair(seed)
    return Identity(
        private_key=key, key_pair=pair, peer_id=ID.from_pubkey(pair.public_key).to_base58()
    )
