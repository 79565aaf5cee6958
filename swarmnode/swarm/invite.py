"""The invite: addresses of peers that serve a swarm's manifest, and the swarm id.

    /ip4/192.0.2.7/tcp/9512/p2p/12D3Koo…,/dns4/example.org/tcp/9512/p2p/12D3Koo…/swarm/<swarm id, 64
    hex digits>

An invite needs no trust: a handshake proves the peer id, and the swarm id proves the manifest. It
is therefore not signed and does not expire; a founder at a new address signs a successor.

The invite to a private swarm may end in /secret/<64 hex digits>, so that one text suffices to join.
Only `join` reads that part, and never from its arguments, which other users of a machine can see.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.errors import ConfigError
from swarmnode.p2p import addresses
from swarmnode.wire import limits

MAX_INVITE_CHARACTERS = (limits.BOOTSTRAP_ADDRESSES + 1) * (limits.ADDRESS_BYTES + 80)
"""Maximum length in characters."""
_ID = re.compile("[0-9a-f]{64}")
_SECRET_MARK = "/secret/"


@dataclass(frozen=True)
class Invite:
    """Addresses and swarm id of an invite."""

    addresses: tuple[str, ...]
    """Multiaddrs that end in /p2p/<peer id>."""
    swarm: bytes
    """Swarm id, 32 bytes."""

    def __str__(self) -> str:
        return f"{','.join(self.addresses)}/swarm/{self.swarm.hex()}"


def with_secret(invite: Invite, secret: bytes) -> str:
    return f"{invite}{_SECRET_MARK}{secret.hex()}"


def split_secret(text: str) -> tuple[str, bytes | None]:
    """Return an invite without its secret, and the secret if there is one. Raises ConfigError."""
    invite, mark, secret = text.strip().partition(_SECRET_MARK)
    if mark and not _ID.fullmatch(secret):
        raise ConfigError("invite: no 64 hex digits after /secret/; was it cut off?")
    return invite, bytes.fromhex(secret) if mark else None


def parse(text: str) -> Invite:
    """Parse an invite. Raises ConfigError that names the invalid part."""
    text = text.strip()
    if len(text) > MAX_INVITE_CHARACTERS:
        raise ConfigError(
            f"invite: longer than {MAX_INVITE_CHARACTERS} characters; was something else pasted?"
        )
    if _SECRET_MARK in text:
        raise ConfigError(
            "invite: it contains a secret, which others could read here: run `swarmnode join`"
            " without it and paste it, or remove its end from /secret/ on and use --secret-file"
        )
    where, mark, swarm = text.rpartition("/swarm/")
    if not mark:
        raise ConfigError(
            "invite: no /swarm/<swarm id> at its end; an invite is"
            " /ip4/<address>/tcp/<port>/p2p/<peer id>/swarm/<swarm id>"
        )
    if not _ID.fullmatch(swarm):
        raise ConfigError(
            f"invite: {swarm[:80]!r} after /swarm/ is not a swarm id of 64 lower-case hex digits;"
            " was it cut off?"
        )
    return Invite(check_addresses(where.split(","), "invite"), bytes.fromhex(swarm))


def check_addresses(texts: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the multiaddrs without duplicates. `where` is named in errors. Raises ConfigError
    unless each has a peer id and can be dialled."""
    if len(texts) > limits.BOOTSTRAP_ADDRESSES:
        raise ConfigError(f"{where}: {len(texts)} addresses, at most {limits.BOOTSTRAP_ADDRESSES}")
    found = []
    for text in texts:
        try:
            address, peer = addresses.parse(text)
        except ValueError as error:
            raise ConfigError(f"{where}: {text[:120]!r}: {error}") from None
        if peer is None:
            raise ConfigError(f"{where}: {text[:120]!r} does not end in /p2p/<peer id>")
        if address.port == 0 or (address.ip is not None and address.ip.is_unspecified):
            raise ConfigError(f"{where}: {text[:120]!r} cannot be dialled")
        found.append(f"{address}/p2p/{peer}")
    return tuple(dict.fromkeys(found))
