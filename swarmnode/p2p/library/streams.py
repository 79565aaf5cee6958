"""Streams to peers, and circuits: streams to a relay that are used as connections.

A cancel scope must not enclose `read` and `write`. When it cancels one of them, py-libp2p loses a
Noise nonce or received bytes, and the whole connection dies. To abort, another task resets the
stream, which wakes its reader and writer (see stream_calls.py).

    this node ═ Noise, Yamux ═ circuit ═ Noise, Yamux ═ peer     the relay sees ciphertext
    this node ─ stream ─ relay ─ stream ─ peer

The inner handshake of a circuit proves the peer id. A circuit has no address of its own, so that
limits and bans by network prefix do not hit every peer behind one relay.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import cast

import trio
from libp2p.abc import INetStream, IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.stream.net_stream import NetStream
from libp2p.stream_muxer.yamux.yamux import YamuxStream
from multiaddr import Multiaddr

from swarmnode.errors import Incompatible, PeerError
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.library.errors import ignored_errors, peer_errors
from swarmnode.p2p.library.identifiers import address_from_socket

READ_BYTES = 65536
MULTISTREAM = "/multistream/1.0.0"
MAX_LAZY_NAME = 126
"""Maximum length of a protocol id whose multistream-select length, with the newline, fits one
byte."""
NEGOTIATION = "negotiation"
"""Label of the bytes before a protocol is negotiated. Later labels are protocols of this node, so
peers cannot create labels."""
END_SECONDS = 30.0
"""Timeout for closing or resetting a stream. The guards drop a connection that accepts no frame for
half of this time, so this timeout never cuts a frame."""


class Stream:
    """A stream to `peer`. Reads and writes raise PeerError at any kind of end; closing and
    resetting never raise.

    A protocol in `proposed` is negotiated lazily: the proposal is sent with the first write, and
    the peer's answer is read before the first read. This takes one round trip instead of three,
    which matters between home connections and on full lines. A read raises Incompatible if the peer
    does not support the protocol after all. Source: the lazy form of multistream-select in
    go-libp2p.

    Args:
        stream: the library's stream.
        proposed: the protocol to negotiate lazily; empty if it is negotiated already.
    """

    def __init__(self, stream: INetStream, proposed: str = "") -> None:
        self.peer = stream.muxed_conn.peer_id.to_base58()
        self._stream = cast("NetStream", stream)
        self._doing = f"a stream of {self.peer}"
        self._unsent_lines = [MULTISTREAM, proposed] if proposed else []
        self._expected_lines = list(self._unsent_lines)

    @property
    def _muxed(self) -> YamuxStream:
        return cast("YamuxStream", self._stream.muxed_stream)

    @property
    def relay(self) -> str | None:
        """Peer id of the relay; None for a direct connection."""
        return find_relay(self._stream.muxed_conn)

    @property
    def remote(self) -> Address | None:
        """Remote address; None for a relayed connection."""
        return address_from_socket(self._muxed.conn.get_remote_address())

    @property
    def is_gone(self) -> bool:
        """True if the peer has reset the stream or its connection is closed. The library reports
        both as an end of the stream."""
        return self._muxed.reset_received or self._muxed.conn.event_shutting_down.is_set()

    async def read(self, most: int = READ_BYTES) -> bytes:
        """Read 1 to `most` bytes. Raises StreamEnd at the end of the stream."""
        with peer_errors(self._doing):
            if self._unsent_lines:
                await self._stream.write(self._proposal())
            while self._expected_lines:
                await self._read_line(self._expected_lines.pop(0))
            return await self._stream.read(most)

    async def read_exactly(self, count: int) -> bytes:
        """Read `count` bytes. Raises PeerError if the stream ends early."""
        buffer = bytearray()
        while len(buffer) < count:
            buffer += await self.read(min(count - len(buffer), READ_BYTES))
        return bytes(buffer)

    async def write(self, data: bytes | memoryview) -> None:
        """Write `data`. Waits while the peer gives no credit; returns when the connection has taken
        all bytes."""
        with peer_errors(self._doing):
            if self._unsent_lines:
                data = self._proposal() + bytes(data)
            await self._stream.write(data)  # type: ignore[arg-type]  # annotated as bytes, takes any buffer

    async def finish(self) -> None:
        """Signal the end of the written data. The peer may still send."""
        with peer_errors(self._doing):
            if self._unsent_lines:
                await self._stream.write(self._proposal())
            await self._stream.close_write()

    def _proposal(self) -> bytes:
        unsent, self._unsent_lines = self._unsent_lines, []
        return b"".join(bytes([len(line) + 1]) + line.encode() + b"\n" for line in unsent)

    async def _read_line(self, expected: str) -> None:
        """Read one line of the peer's negotiation and compare it."""
        (length,) = await self._stream.read(1)
        line = bytearray()
        while len(line) < min(length, MAX_LAZY_NAME + 1):
            line += await self._stream.read(min(length, MAX_LAZY_NAME + 1) - len(line))
        if bytes(line) == b"na\n":
            raise Incompatible(f"{self._doing}: protocol {expected} not supported")
        if bytes(line) != expected.encode() + b"\n":
            raise PeerError(f"{self._doing}: {bytes(line)!r} instead of {expected}")

    def wait_for_credit_unlimited(self) -> None:
        """Let a writer wait for credit without a timeout; the user of the stream detects stalls."""
        self._muxed.patience_seconds = math.inf  # type: ignore[attr-defined]

    def keep_connection(self) -> None:
        """Keep the connection while this stream is open: it carries a granted long-lived transfer,
        so the peer is not dropped to make room."""
        self._muxed.keeps_connection = True  # type: ignore[attr-defined]

    async def close(self) -> None:
        """Close the own side in order."""
        with (
            trio.CancelScope(shield=True),
            trio.move_on_after(END_SECONDS),
            ignored_errors("closing a stream"),
        ):
            await self._stream.close()

    async def reset(self) -> None:
        """End both sides at once and wake reader and writer (`guards/inbox.py` wakes the own
        reader)."""
        with (
            trio.CancelScope(shield=True),
            trio.move_on_after(END_SECONDS),
            ignored_errors("resetting a stream"),
        ):
            await self._stream.reset()


def count_bytes(stream: NetStream, received: Counter[str], sent: Counter[str]) -> None:
    """Add the bytes of a new, unread stream to `received` and `sent`, by protocol. A read also sets
    `last_received_at` of the connection."""
    read, write = stream.read, stream.write

    async def counting_read(n: int | None = None) -> bytes:
        data = await read(n)
        received[stream.protocol_id or NEGOTIATION] += len(data)
        if data:
            stream.muxed_conn.last_received_at = trio.current_time()  # type: ignore[attr-defined]
        return data

    async def counting_write(data: bytes) -> None:
        sent[stream.protocol_id or NEGOTIATION] += len(data)
        await write(data)

    stream.read, stream.write = counting_read, counting_write  # type: ignore[method-assign]


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


def find_relay(muxed: object) -> str | None:
    """Return the relay of a multiplexed connection, None if it is direct. The layers are Yamux ▸
    Noise session ▸ its codec ▸ framing ▸ raw connection."""
    raw = muxed
    for name in ("secured_conn", "conn", "read_writer", "read_write_closer"):
        raw = getattr(raw, name, None)
    return raw.relay if isinstance(raw, CircuitConnection) else None
