"""A node's key as PEM. This module does not load libp2p."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import StateError


def read_key(data: bytes, path: Path) -> Ed25519PrivateKey:
    """Read the key in a PEM file. Raises StateError if it is not an Ed25519 key without a
    passphrase."""
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError):
        raise StateError(f"{path} is not a PEM key; restore or remove it") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(f"{path} holds a key that is not Ed25519")
    return key


def write_key(key: Ed25519PrivateKey) -> bytes:
    """Return the key as PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
