"""A libp2p host with peers as strings, addresses as `Address`, and errors as PeerError."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

import trio
from libp2p.abc import (
    IHost,
    IMuxedConn,
    INetConn,
    INetStream,
    INetwork,
    INotifee,
    IRawConnection,
)
from libp2p.custom_types import TProtocol
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream
from multiaddr import Multiaddr

from swarmnode.errors import PeerError
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.library.errors import ignored_errors, peer_errors
from swarmnode.p2p.library.identifiers import address_from_socket
from swarmnode.p2p.library.streams import (
    MAX_LAZY_NAME,
    CircuitConnection,
    Stream,
    count_bytes,
    find_relay,
)

CLOSE_SECONDS = 1.0
PINNED = "pinned"
"""Tag of connections that the library's pruner must keep."""

StreamTask = Callable[[Stream], Awaitable[None]]
"""Handler of a peer's stream. The stream ends with the task."""


class Connection:
    """An open connection.

    Attributes:
        peer: peer id of the remote end.
        inbound: True if the peer dialled this node.
        relay: peer id of the relay; None for a direct connection.
        remote: remote address; None for a relayed connection.
    """

    def __init__(self, connection: SwarmConn, swarm: Swarm) -> None:
        self._muxed = muxed = cast("Yamux", connection.muxed_conn)
        self.peer = muxed.peer_id.to_base58()
        self.inbound = str(connection.direction).lower().endswith("inbound")
        self.relay = find_relay(muxed)
        self.remote = address_from_socket(muxed.get_remote_address())
        self._connection = connection
        self._swarm = swarm

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    @property
    def ping(self) -> tuple[int, bool]:
        """(number of Yamux's latest ping, whether it was answered); the number is 0 before the
        first ping."""
        return self._muxed._ping_id, self._muxed._ping_event.is_set()

    @property
    def last_received(self) -> float | None:
        """Time of the last received bytes on trio's clock; None before the first."""
        return getattr(self._muxed, "last_received_at", None)

    @property
    def is_busy(self) -> bool:
        """True while a request of this node or a granted stream (`Stream.keep_connection`) uses the
        connection. Other streams of the peer do not count, because the peer can keep them open."""
        return any(_counts_as_busy(each) for each in self._connection.get_streams())

    async def close(self) -> None:
        """Close the connection. Never raises, because the library reports a lost connection in many
        ways."""
        with ignored_errors("closing a connection"):
            await self._connection.close()

    def forget(self) -> None:
        """Make the library process the closure of a connection that it has not noticed."""
        self._swarm.remove_conn(self._connection)


class ConnectionEvents(Protocol):
    """Receives opened and closed connections."""

    def opened(self, connection: Connection) -> None: ...
    def closed(self, connection: Connection) -> None: ...


class Host:
    """The libp2p host.

    Attributes:
        peer_id: peer id of this node.
        nursery: runs the background tasks; ends with the host.
        library: the library's object, for tests.
        pinned: the pinned peers.
        received: bytes received on streams, by protocol, since `watch`.
        sent: bytes sent in the same way.
    """

    def __init__(self, host: IHost, nursery: trio.Nursery) -> None:
        self.peer_id = host.get_id().to_base58()
        self.nursery = nursery
        self.library = host
        self._swarm = cast("Swarm", host.get_network())
        self.pinned: frozenset[str] = frozenset()
        self.received = Counter[str]()
        self.sent = Counter[str]()

    # -- streams

    async def open_stream(self, peer: str, protocol: str, lazily: bool = False) -> Stream:
        """Open a stream to a connected peer.

        Args:
            peer: the peer.
            protocol: the protocol id.
            lazily: skip the negotiation if the peer is known to support the protocol; see `Stream`.

        Raises:
            Incompatible: the peer does not support the protocol.
            PeerError: any other failure.
        """
        identity = ID.from_string(peer)
        with peer_errors(f"{protocol} with {peer}"):
            if not self.is_connected(peer):
                raise PeerError(f"{peer} is not connected")
            known = (
                lazily
                and len(protocol) <= MAX_LAZY_NAME
                and self.library.get_peerstore().supports_protocols(identity, [protocol])
            )
            if not known:
                return Stream(await self.library.new_stream(identity, [TProtocol(protocol)]))
            stream = cast("NetStream", await self._swarm.new_stream(identity))
            stream.protocol_id = TProtocol(protocol)
            return Stream(stream, proposed=protocol)

    def set_handler(self, protocol: str, handler: StreamTask) -> None:
        """Set the handler for the streams of `protocol`, in place of an earlier one."""

        async def on_stream(stream: INetStream) -> None:
            await handler(Stream(stream))

        self.library.set_stream_handler(TProtocol(protocol), on_stream)

    def remove_handler(self, protocol: str) -> None:
        self.library.remove_stream_handler(TProtocol(protocol))

    # -- connections

    def is_connected(self, peer: str) -> bool:
        """Return True if there is a connection with `peer`. Raises ValueError if it is not a peer
        id."""
        return bool(self._swarm.get_connections(ID.from_string(peer)))

    async def dial(self, peer: str, address: Address) -> None:
        """Connect. May be cancelled. Raises PeerError."""
        with peer_errors():
            identity = ID.from_string(peer)
            self._swarm.unblock_peer(identity)
            await self._swarm.dial_addr(Multiaddr(f"{address}/p2p/{peer}"), identity)

    async def close_peer(self, peer: str) -> None:
        """Close all connections with `peer`. Never raises."""
        with ignored_errors(f"closing the connections with {peer}"):
            await self._swarm.close_peer(ID.from_string(peer))

    def pin(self, peers: set[str]) -> None:
        """Protect connections with `peers` from the library's pruner, in place of the peers of the
        last call."""
        for peer in self.pinned - peers:
            self._swarm.unprotect(ID.from_string(peer), PINNED)
        for peer in peers - self.pinned:
            self._swarm.protect(ID.from_string(peer), PINNED)
        self.pinned = frozenset(peers)

    def watch(self, events: ConnectionEvents) -> None:
        """Report opened and closed connections to `events` from now on, and count the bytes of
        streams. The library does not announce every closure."""
        self._swarm.register_notifee(_EventForwarder(self, self._swarm, events))

    # -- circuits and hole punching

    async def upgrade_outbound(self, raw: IRawConnection, peer: str) -> None:
        """Complete the handshake on `raw` as Noise's initiator. Raises PeerError unless `peer` is
        the remote peer."""
        with peer_errors(f"the handshake with {peer}"):
            await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_string(peer))

    async def upgrade_inbound(self, raw: IRawConnection, address: str) -> UpgradedConnection:
        """Complete the handshake on `raw` as Noise's responder. `address` is the remote multiaddr.
        Raises PeerError."""
        with peer_errors("the handshake of a peer that calls"):
            return UpgradedConnection(
                await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr(address))
            )

    async def connect_through(self, stream: Stream, relay: str, peer: str) -> None:
        """Connect to `peer` over a stream that `relay` has connected. On failure raises PeerError
        and resets the stream."""
        raw = CircuitConnection(stream, relay, peer, initiator=True)
        try:
            await self.upgrade_outbound(raw, peer)
        except BaseException:
            self.nursery.start_soon(raw.close)
            raise

    async def accept_circuit(self, stream: Stream, relay: str, caller: str) -> UpgradedConnection:
        """Accept a circuit over a stream from `relay`, which reports `caller`. Raises PeerError."""
        raw = CircuitConnection(stream, relay, caller, initiator=False)
        return await self.upgrade_inbound(raw, str(raw.get_transport_addresses()[0]))

    async def probe(self, peer: str, address: Address) -> None:
        """Return if this peer completes a handshake at `address`; the connection is closed. Raises
        PeerError."""
        raw: IRawConnection | None = None
        try:
            with peer_errors():
                multiaddr = Multiaddr(str(address))
                transport = self._swarm.transport_manager.transport_for_dialing(multiaddr)
                if transport is None:
                    raise PeerError(f"no transport for {address}")
                raw = await transport.dial(multiaddr)
                await self._swarm.upgrader.upgrade_security(raw, True, ID.from_string(peer))
        finally:
            if raw is not None:
                await _close_raw(raw)

    async def punch(
        self, peer: str, connected: trio.SocketStream, target: Address, *, initiator: bool
    ) -> None:
        """Complete the handshake with `peer` on a TCP connection to `target`.

        On failure the connection is closed and PeerError is raised.
        """
        raw = RawConnection(TrioTCPStream(connected), initiator)
        done = False
        try:
            if initiator:
                await self.upgrade_outbound(raw, peer)
            else:
                upgraded = await self.upgrade_inbound(raw, str(target))
                if upgraded.peer != peer:
                    await upgraded.close()
                    raise PeerError(f"{upgraded.peer} is at {target}, not {peer}")
            done = True
        finally:
            if not done:
                await _close_raw(raw)

    def share_ports(self) -> None:
        """Allow other sockets of this process on the listening ports, for hole punching. No other
        process can listen on them, because it would need the option before binding."""
        for listener in self._swarm.listeners.values():
            for each in getattr(listener, "listeners", []):
                if hasattr(socket, "SO_REUSEPORT"):
                    each.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


class UpgradedConnection:
    """A connection created from a raw one. `peer` is the remote peer id from the handshake."""

    def __init__(self, muxed: IMuxedConn) -> None:
        self.peer = muxed.peer_id.to_base58()
        self._muxed = cast("Yamux", muxed)

    async def wait_closed(self) -> None:
        await self._muxed.event_closed.wait()

    async def close(self) -> None:
        """Close the connection. Never raises."""
        with ignored_errors("closing a connection"):
            await self._muxed.close()


class _EventForwarder(INotifee):
    """Forwards the swarm's connections as `Connection`, and counts the bytes of its streams."""

    def __init__(self, host: Host, swarm: Swarm, events: ConnectionEvents) -> None:
        self._host = host
        self._swarm = swarm
        self._events = events
        self._connections: dict[INetConn, Connection] = {}

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        if conn not in self._connections and not conn.is_closed:
            self._connections[conn] = Connection(conn, self._swarm)  # type: ignore[arg-type]  # incomplete annotation
            self._events.opened(self._connections[conn])

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        if (known := self._connections.pop(conn, None)) is not None:
            self._events.closed(known)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None:
        count_bytes(cast("NetStream", stream), self._host.received, self._host.sent)

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None:
        return None

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None:
        return None

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None:
        return None


def _counts_as_busy(stream: NetStream) -> bool:
    muxed = cast("YamuxStream", stream.muxed_stream)
    opened = muxed.is_initiator and stream.protocol_id is not None
    return opened or getattr(muxed, "keeps_connection", False)


async def _close_raw(raw: IRawConnection) -> None:
    with (
        trio.CancelScope(shield=True),
        trio.move_on_after(CLOSE_SECONDS),
        ignored_errors("closing a socket"),
    ):
        await raw.close()
