"""Peer ids and addresses, between our text and the library's objects and bytes."""

from __future__ import annotations

from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.errors import BadMessage
from swarmnode.p2p.addresses import ED25519_PEER_ID, Address, from_socket, parse
from swarmnode.p2p.library.errors import peer_errors
from swarmnode.wire.envelope import is_small_order

LONGEST_MULTIADDR = 256
"""Bytes."""


def is_peer_id(text: str) -> bool:
    try:
        return ID.from_string(text).to_base58() == text
    except ValueError:
        return False


def peer_id_bytes(peer: str) -> bytes:
    return ID.from_string(peer).to_bytes()


def peer_id_text(raw: bytes) -> str:
    """Raises BadMessage if these are not the bytes of an Ed25519 key's peer id."""
    if (
        len(raw) != 38
        or not raw.startswith(ED25519_PEER_ID)
        or is_small_order(raw[len(ED25519_PEER_ID) :])
    ):
        raise BadMessage("bounds", "not a peer id")
    return ID(raw).to_base58()


def multiaddr_bytes(text: str) -> bytes:
    return Multiaddr(text).to_bytes()


def address_of_bytes(raw: bytes) -> Address:
    """A binary multiaddr of the one kind that we use. Raises PeerError for any other, and for
    garbage."""
    if not raw or len(raw) > LONGEST_MULTIADDR:
        raise BadMessage("bounds", f"an address of {len(raw)} bytes")
    with peer_errors("not an address"):
        return parse(str(Multiaddr(raw)))[0]


def address_of_socket(remote: tuple[str, int] | None) -> Address | None:
    """The address that a socket names as its other end; None for one that has no IP address."""
    if remote is None:
        return None
    try:
        return from_socket(*remote[:2])
    except ValueError:
        return None
