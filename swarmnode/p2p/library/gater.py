"""Admission of peers at the end of the Noise handshake, the first moment at which the peer id is
proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure

from swarmnode.p2p.addresses import Address
from swarmnode.p2p.library.identifiers import address_from_socket
from swarmnode.p2p.library.streams import CircuitConnection


class HandshakePeer(NamedTuple):
    """A peer at the end of a handshake."""

    peer: str
    remote: Address | None
    """The remote address; None if unknown."""
    inbound: bool
    relay: str | None
    """Peer id of the relay; None for a direct connection."""


class ConnectionGater:
    """Applies an admission rule to every handshake.

    Attributes:
        admits: returns True for an admitted peer; all peers are admitted until it is set.
        refused: number of refused peers.
    """

    def __init__(self) -> None:
        self.admits: Callable[[HandshakePeer], bool] = lambda peer_info: True
        self.refused = 0

    def wrap(self, transport: ISecureTransport) -> ISecureTransport:
        """Return `transport` behind this gater."""
        return _Gated(transport, self)

    async def check(self, connection: ISecureConn, inbound: bool, relay: str | None) -> ISecureConn:
        """Return `connection`, or close it and raise HandshakeFailure."""
        peer = connection.get_remote_peer().to_base58()
        if self.admits(
            HandshakePeer(
                peer, address_from_socket(connection.get_remote_address()), inbound, relay
            )
        ):
            return connection
        self.refused += 1
        await connection.close()
        raise HandshakeFailure(f"{peer} is not admitted")


class _Gated(ISecureTransport):
    def __init__(self, transport: ISecureTransport, gater: ConnectionGater) -> None:
        self._transport = transport
        self._gater = gater

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        return await self._gater.check(
            await self._transport.secure_inbound(conn), True, _relay(conn)
        )

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        return await self._gater.check(
            await self._transport.secure_outbound(conn, peer_id), False, _relay(conn)
        )


def _relay(raw: IRawConnection) -> str | None:
    return raw.relay if isinstance(raw, CircuitConnection) else None
