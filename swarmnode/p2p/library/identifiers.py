"""Conversion of peer ids and addresses between strings and the library's objects and bytes."""

from __future__ import annotations

from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.errors import BadMessage
from swarmnode.p2p.addresses import Address, from_socket, parse
from swarmnode.p2p.library.errors import peer_errors
from swarmnode.wire.envelope import peer_key
from swarmnode.wire.limits import PEER_ID_BYTES

LONGEST_MULTIADDR = 256
"""Maximum length in bytes."""


def peer_id_bytes(peer: str) -> bytes:
    return ID.from_string(peer).to_bytes()


def peer_id_text(raw: bytes) -> str:
    """Return the peer id of its bytes. Raises BadMessage unless it is of an Ed25519 key."""
    peer = ID(raw).to_base58() if len(raw) <= PEER_ID_BYTES else ""
    if peer_key(peer) is None:
        raise BadMessage("bounds", "not the peer id of an Ed25519 key")
    return peer


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
