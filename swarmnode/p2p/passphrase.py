"""A node's key as PEM, and its optional passphrase from the environment, a file or the terminal.

A passphrase never appears on a command line, in the configuration, in a log or in a file of this
node. A typed passphrase is passed in the environment to the child processes that need it. A user
who can read their environment can read the key file as well. This module does not load libp2p.
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import ConfigError, Refused, StateError
from swarmnode.files import read_private

VARIABLE = "SWARMNODE_KEY_PASSPHRASE"
FILE_VARIABLE = "SWARMNODE_KEY_PASSPHRASE_FILE"
MIN_CHARACTERS = 12
"""Minimum length of a passphrase. PEM derives its key with 2,048 rounds of PBKDF2 (OpenSSL's
default), so a short one can be guessed."""
MAX_BYTES = 1023
"""Maximum length that `cryptography` accepts."""


def is_locked(data: bytes) -> bool:
    """Return True if a PEM key has a passphrase."""
    return data.lstrip().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")


def from_environment() -> bytes | None:
    """Return the passphrase from the environment, or from the file that it names; None without one.

    Raises:
        ConfigError: the file does not exist.
        Refused: others can read the file.
    """
    if (value := os.environ.get(VARIABLE)) is not None:
        return value.encode()
    if (named := os.environ.get(FILE_VARIABLE)) is None:
        return None
    data = read_private(Path(named), "passphrase file", MAX_BYTES + 2)
    if data is None:
        raise ConfigError(f"{FILE_VARIABLE}: {named}: no such file")
    return data.rstrip(b"\r\n")


def open_key(data: bytes, path: Path) -> Ed25519PrivateKey:
    """Open the key in a PEM file; prompt for a passphrase at a terminal if it is not in the
    environment.

    A typed passphrase is stored in the environment, for this process and its children.

    Raises:
        StateError: it is not an Ed25519 key.
        Refused: the passphrase is missing or wrong.
    """
    if not is_locked(data):
        return _load(data, path, None)
    passphrase = from_environment()
    if passphrase is None and sys.stdin is not None and sys.stdin.isatty():
        passphrase = getpass.getpass(f"passphrase of {path}: ").encode()
        key = _load(data, path, passphrase)
        os.environ[VARIABLE] = passphrase.decode()
        return key
    if passphrase is None:
        raise Refused(
            f"{path} has a passphrase: set {VARIABLE}, or the path of a file that holds it in"
            f" {FILE_VARIABLE}"
        )
    return _load(data, path, passphrase)


def pem(key: Ed25519PrivateKey, passphrase: bytes | None) -> bytes:
    """Return the key as PEM. Raises ConfigError if the passphrase is too short or too long."""
    if passphrase is None:
        locked: serialization.KeySerializationEncryption = serialization.NoEncryption()
    elif len(passphrase.decode(errors="replace")) < MIN_CHARACTERS or len(passphrase) > MAX_BYTES:
        raise ConfigError(
            f"a passphrase needs at least {MIN_CHARACTERS} characters and at most {MAX_BYTES}"
            " bytes; use five random words"
        )
    else:
        locked = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)


def ask_new() -> bytes:
    """Prompt twice for a new passphrase. Raises ConfigError without a terminal, or if the two
    differ."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(
            "no terminal to enter a new passphrase: pass a file that holds it with --new-file"
        )
    first = getpass.getpass("new passphrase: ")
    if getpass.getpass("repeat the passphrase:") != first:
        raise ConfigError("the two passphrases differ; nothing was changed")
    return first.encode()


def without_passphrase(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the passphrase, for processes that do not need the key."""
    return {
        name: value for name, value in environment.items() if name not in (VARIABLE, FILE_VARIABLE)
    }


def _load(data: bytes, path: Path, passphrase: bytes | None) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(data, password=passphrase or None)
    except (ValueError, TypeError):
        if passphrase is not None:
            raise Refused(f"wrong passphrase for {path}, or the file is damaged") from None
        raise StateError(f"{path} is not a PEM key; restore or remove it") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(f"{path} holds a key that is not Ed25519")
    return key
