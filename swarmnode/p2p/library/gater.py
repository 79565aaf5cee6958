"""Who may connect at all, decided at the end of the Noise handshake: the first moment at which a
peer's id is proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure

from swarmnode.p2p.addresses import Address
from swarmnode.p2p.library.circuits import CircuitConnection
from swarmnode.p2p.library.identifiers import address_of_socket
from swarmnode.p2p.library.objects import Upgrader


class Newcomer(NamedTuple):
    """A peer at the end of a handshake."""

    peer: str
    remote: Address | None
    """Where the connection comes from or leads to; None if unknown."""
    inbound: bool
    relay: str | None
    """The peer that the connection goes through, if any."""


class ConnectionGater:
    """`admits(newcomer)` is set once there is somebody to decide; until then everybody may pass.

    `refused`: peers that were not admitted. `failed`: inbound connections that did not get through
    the handshake: port scans, garbage, peers that went silent.
    """

    def __init__(self) -> None:
        self.admits: Callable[[Newcomer], bool] = lambda newcomer: True
        self.refused = 0
        self.failed = 0

    def around(self, transport: ISecureTransport) -> ISecureTransport:
        """The same transport behind this gater."""
        return _Gated(transport, self)

    def watch(self, upgrader: Upgrader) -> None:
        """Counts in `failed` what ends before it comes to be admitted."""
        upgrade = upgrader.upgrade_security

        async def counting(
            raw: IRawConnection, is_initiator: bool, peer_id: ID | None = None
        ) -> ISecureConn:
            refused = self.refused
            try:
                return await upgrade(raw, is_initiator, peer_id)
            except BaseException:  # a peer that goes silent is cancelled
                if not is_initiator and refused == self.refused:
                    self.failed += 1
                raise

        upgrader.upgrade_security = counting

    async def check(self, connection: ISecureConn, inbound: bool, relay: str | None) -> ISecureConn:
        """`connection` itself, or a closed connection and HandshakeFailure."""
        peer = connection.get_remote_peer().to_base58()
        if self.admits(
            Newcomer(peer, address_of_socket(connection.get_remote_address()), inbound, relay)
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
