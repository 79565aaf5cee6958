"""A connection through a relay: a stream to the relay that is used as if it were a socket.

    us ═ Noise, Yamux ═ circuit ═ Noise, Yamux ═ peer      the peer's id is proved by the inner
    handshake; the relay sees ciphertext
          us ─ stream ─ relay ─ stream ─ peer

It has no address of its own: what is limited or banned by network prefix must not hit everybody
behind one relay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from libp2p.abc import IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from multiaddr import Multiaddr

from swarmnode.errors import PeerError

if TYPE_CHECKING:
    from swarmnode.p2p.library.streams import Stream


class CircuitConnection(IRawConnection):
    """`stream`: to or from `relay` (a peer id), past the relay's own handshake. `peer`: who is at
    the other end, as the relay says."""

    def __init__(self, stream: Stream, relay: str, peer: str, *, initiator: bool) -> None:
        self.is_initiator = initiator
        self.relay = relay
        self._stream = stream
        self._peer = peer
        self._unread = bytearray()

    async def read(self, n: int | None = None) -> bytes:
        """Exactly `n` bytes (any number for None), so that many small frames of a relay are not
        mistaken for a short message. Raises ConnectionClosedError at the end, whatever kind of end
        it is."""
        try:
            while len(self._unread) < (n or 1):
                self._unread += await self._stream.read()
        except PeerError as error:
            raise ConnectionClosedError("the circuit ended", transport="circuit") from error
        size = len(self._unread) if n is None else n
        data = bytes(self._unread[:size])
        del self._unread[:size]
        return data

    async def write(self, data: bytes) -> None:
        """Raises ConnectionClosedError."""
        try:
            await self._stream.write(data)
        except PeerError as error:
            raise ConnectionClosedError("the circuit ended", transport="circuit") from error

    async def close(self) -> None:
        """Resets the stream: the library's close would leave our own reader waiting for ever."""
        await self._stream.reset()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_transport_addresses(self) -> list[Multiaddr]:
        return [Multiaddr(f"/p2p/{self.relay}/p2p-circuit/p2p/{self._peer}")]

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.RELAYED


def relay_of(muxed: object) -> str | None:
    """The relay that a multiplexed connection goes through, None if it is direct. (Yamux ▸ Noise
    session ▸ its codec ▸ framing ▸ raw.)"""
    raw = muxed
    for name in ("secured_conn", "conn", "read_writer", "read_write_closer"):
        raw = getattr(raw, name, None)
    return raw.relay if isinstance(raw, CircuitConnection) else None
