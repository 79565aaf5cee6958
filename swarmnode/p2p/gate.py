"""Who may connect at all, decided at the end of the Noise handshake: the first moment at which a peer's id is proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libp2p.abc import ISecureTransport
from libp2p.security.exceptions import HandshakeFailure

from swarmnode.p2p.circuits import CircuitConnection


class Gate:
    """`admit(peer, address, inbound, relay)` is set by the network once it stands; until then everybody may pass.

    `address`: the remote (host, port), None if unknown. `relay`: the peer that the connection goes through, if any. `refused`: peers that
    were not admitted. `failed`: inbound connections that did not get through the handshake: port scans, garbage, peers that went silent.
    """

    def __init__(self) -> None:
        self.admit: Callable[[str, tuple[str, int] | None, bool, str | None], bool] = lambda peer, address, inbound, relay: True
        self.refused = 0
        self.failed = 0

    def around(self, transport: ISecureTransport) -> ISecureTransport:
        """The same transport behind this gate."""
        return _Gated(transport, self)

    def watch(self, upgrader: Any) -> None:
        """Counts in `failed` what ends before it comes to the gate."""
        upgrade = upgrader.upgrade_security

        async def counting(raw: Any, is_initiator: bool, peer_id: Any = None) -> Any:
            refused = self.refused
            try:
                return await upgrade(raw, is_initiator, peer_id)
            except BaseException:  # a peer that goes silent is cancelled
                if not is_initiator and refused == self.refused:
                    self.failed += 1
                raise

        upgrader.upgrade_security = counting

    async def check(self, connection: Any, inbound: bool, relay: str | None) -> Any:
        """`connection` itself, or a closed connection and HandshakeFailure."""
        peer = connection.get_remote_peer().to_base58()
        if self.admit(peer, connection.get_remote_address(), inbound, relay):
            return connection
        self.refused += 1
        await connection.close()
        raise HandshakeFailure(f"{peer} is not admitted")


class _Gated(ISecureTransport):
    def __init__(self, transport: ISecureTransport, gate: Gate) -> None:
        self._transport = transport
        self._gate = gate

    async def secure_inbound(self, conn: Any) -> Any:
        return await self._gate.check(await self._transport.secure_inbound(conn), True, _relay(conn))

    async def secure_outbound(self, conn: Any, peer_id: Any) -> Any:
        return await self._gate.check(await self._transport.secure_outbound(conn, peer_id), False, _relay(conn))


def _relay(raw: Any) -> str | None:
    return raw.relay if isinstance(raw, CircuitConnection) else None
