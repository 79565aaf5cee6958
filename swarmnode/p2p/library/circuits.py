"""A connection through a relay: a stream to the relay, used like a socket.

    this node ═ Noise, Yamux ═ circuit ═ Noise, Yamux ═ peer     the relay sees ciphertext
    this node ─ stream ─ relay ─ stream ─ peer

The inner handshake proves the peer id. A circuit has no address of its own, so that limits and bans
by network prefix do not hit every peer behind one relay.
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
    """A circuit as a raw connection.

    Args:
        stream: to or from the relay, after the relay's own handshake.
        relay: peer id of the relay.
        peer: the remote peer id as reported by the relay.
        initiator: True for an outbound circuit.
    """

    def __init__(self, stream: Stream, relay: str, peer: str, *, initiator: bool) -> None:
        self.is_initiator = initiator
        self.relay = relay
        self._stream = stream
        self._peer = peer
        self._unread = bytearray()

    async def read(self, n: int | None = None) -> bytes:
        """Read exactly `n` bytes (any number for None), so that many small frames of a relay do not
        look like a short message. Raises ConnectionClosedError at any kind of end."""
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
        """Write `data`. Raises ConnectionClosedError."""
        try:
            await self._stream.write(data)
        except PeerError as error:
            raise ConnectionClosedError("the circuit ended", transport="circuit") from error

    async def close(self) -> None:
        """Reset the stream, because the library's close would leave the own reader waiting without
        bound."""
        await self._stream.reset()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_transport_addresses(self) -> list[Multiaddr]:
        return [Multiaddr(f"/p2p/{self.relay}/p2p-circuit/p2p/{self._peer}")]

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.RELAYED


def relay_of(muxed: object) -> str | None:
    """Return the relay of a multiplexed connection, None if it is direct. The layers are Yamux ▸
    Noise session ▸ its codec ▸ framing ▸ raw connection."""
    raw = muxed
    for name in ("secured_conn", "conn", "read_writer", "read_write_closer"):
        raw = getattr(raw, name, None)
    return raw.relay if isinstance(raw, CircuitConnection) else None
