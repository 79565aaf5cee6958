"""Conversion of peer ids and addresses between strings and the library's objects and bytes."""

from __future__ import annotations

from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.errors import BadMessage
from swarmnode.p2p.addresses import ED25519_PEER_ID, Address, from_socket, parse
from swarmnode.p2p.library.errors import peer_errors
from swarmnode.wire.envelope import is_small_order

LONGEST_MULTIADDR = 256
"""Maximum length in bytes."""


def is_peer_id(text: str) -> bool:
    """Return True if `text` is a canonical peer id."""
    try:
        return ID.from_string(text).to_base58() == text
    except ValueError:
        return False


def peer_id_bytes(peer: str) -> bytes:
    return ID.from_string(peer).to_bytes()


def peer_id_text(raw: bytes) -> str:
    """Return the peer id of its bytes. Raises BadMessage unless it is of an Ed25519 key."""
    if (
        len(raw) != 38
        or not raw.startswith(ED25519_PEER_ID)
        or is_small_order(raw[len(ED25519_PEER_ID) :])
    ):
        raise BadMessage("bounds", "not a peer id")
    return ID(raw).to_base58()


def multiaddr_bytes(text: str) -> bytes:
    return Multiaddr(text).to_bytes()


def address_from_bytes(raw: bytes) -> Address:
    """Decode a binary multiaddr of a TCP endpoint. Raises PeerError for other kinds and garbage."""
    if not raw or len(raw) > LONGEST_MULTIADDR:
        raise BadMessage("bounds", f"an address of {len(raw)} bytes")
    with peer_errors("not an address"):
        return parse(str(Multiaddr(raw)))[0]


def address_from_socket(remote: tuple[str, int] | None) -> Address | None:
    """Return the remote address of a socket; None if it has no IP address."""
    if remote is None:
        return None
    try:
        return from_socket(*remote[:2])
    except ValueError:
        return None
