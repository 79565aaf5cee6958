"""A node's key as PEM. This module does not load libp2p."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import StateError

RESTORE = "restore it from a backup, or move it away to start as a new peer"


class UnusableKey(StateError):
    """Raised for anything but an unencrypted Ed25519 key, with the problem and the remedy."""

    def __init__(self, problem: str, remedy: str = RESTORE) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


def read_key(data: bytes, path: Path) -> Ed25519PrivateKey:
    """Read the key in a PEM file. Raises UnusableKey for anything but an unencrypted Ed25519
    key."""
    if b"BEGIN ENCRYPTED" in data:
        raise UnusableKey(
            f"{path} has a passphrase, which this version does not read",
            f"write it without one, `openssl pkey -in {path} -out NEW`, and use NEW with mode 0600",
        )
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError):
        raise UnusableKey(f"{path} is not a PEM key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UnusableKey(f"{path} holds a key that is not Ed25519")
    return key


def write_key(key: Ed25519PrivateKey) -> bytes:
    """Return the key as PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
