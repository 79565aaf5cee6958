"""A node's key as PEM, and the passphrase that it may have: from the environment, from a file, or
from whoever sits at the terminal.

A passphrase is never on a command line, in the configuration, in a log or in a file of ours. What a
person typed goes to the processes that need it, and to no other, in their environment, which those
can read that can read the key file as well. libp2p is not loaded here.
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
LEAST_CHARACTERS = 12
"""PEM derives its key by 2,048 rounds of PBKDF2, which is OpenSSL's default: guessing costs little,
so a short passphrase is none."""
MOST_BYTES = 1023
"""The longest that cryptography takes."""


def is_locked(data: bytes) -> bool:
    """Whether a PEM key has a passphrase."""
    return data.lstrip().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")


def given() -> bytes | None:
    """The passphrase that the environment says or whose file it names. Raises ConfigError, Refused
    when others can read the file."""
    if (said := os.environ.get(VARIABLE)) is not None:
        return said.encode()
    if (named := os.environ.get(FILE_VARIABLE)) is None:
        return None
    data = read_private(Path(named), "passphrase file", MOST_BYTES + 2)
    if data is None:
        raise ConfigError(f"{FILE_VARIABLE}: {named}: no such file")
    return data.rstrip(b"\r\n")


def open_key(data: bytes, path: Path) -> Ed25519PrivateKey:
    """The key in a PEM file, asking at a terminal for a passphrase that is not given.

    What was typed is given from then on, to this process and its children. Raises StateError when
    it is no Ed25519 key, Refused when the passphrase is missing or wrong.
    """
    if not is_locked(data):
        return _loaded(data, path, None)
    passphrase = given()
    if passphrase is None and sys.stdin is not None and sys.stdin.isatty():
        passphrase = getpass.getpass(f"passphrase of {path}: ").encode()
        key = _loaded(data, path, passphrase)
        os.environ[VARIABLE] = passphrase.decode()
        return key
    if passphrase is None:
        raise Refused(
            f"{path} has a passphrase: say it in {VARIABLE}, or name a file that holds it in"
            f" {FILE_VARIABLE}"
        )
    return _loaded(data, path, passphrase)


def pem(key: Ed25519PrivateKey, passphrase: bytes | None) -> bytes:
    """A key as it is written. Raises ConfigError for a passphrase that is too short or too long."""
    if passphrase is None:
        locked: serialization.KeySerializationEncryption = serialization.NoEncryption()
    elif (
        len(passphrase.decode(errors="replace")) < LEAST_CHARACTERS or len(passphrase) > MOST_BYTES
    ):
        raise ConfigError(
            f"a passphrase has at least {LEAST_CHARACTERS} characters, at most {MOST_BYTES} bytes;"
            " take five random words"
        )
    else:
        locked = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)


def ask_new() -> bytes:
    """A new passphrase, typed twice. Raises ConfigError where nobody is there or the two differ."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(
            "nobody is here to be asked for a new passphrase: --new-file names a file that holds it"
        )
    first = getpass.getpass("new passphrase: ")
    if getpass.getpass("the same again: ") != first:
        raise ConfigError("those were two different passphrases; nothing was changed")
    return first.encode()


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that have no business with the key."""
    return {
        name: value for name, value in environment.items() if name not in (VARIABLE, FILE_VARIABLE)
    }


def _loaded(data: bytes, path: Path, passphrase: bytes | None) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(data, password=passphrase or None)
    except (ValueError, TypeError):
        if passphrase is not None:
            raise Refused(f"that is not the passphrase of {path}, or the file is damaged") from None
        raise StateError(f"{path} is not a PEM key; restore or remove it") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(f"{path} holds a key that is not Ed25519")
    return key
