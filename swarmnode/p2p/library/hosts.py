"""A libp2p host, with peers as text, addresses as `Address`, and every error as PeerError."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee, IRawConnection
from libp2p.custom_types import TProtocol
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.errors import PeerError
from swarmnode.p2p.addresses import Address
from swarmnode.p2p.library.circuits import CircuitConnection, relay_of
from swarmnode.p2p.library.errors import ignored_errors, peer_errors
from swarmnode.p2p.library.identifiers import address_of_socket
from swarmnode.p2p.library.objects import (
    LibraryHost,
    MuxedConnection,
    NetConnection,
    NetStream,
    Swarm,
)
from swarmnode.p2p.library.streams import SHORT, Stream

CLOSE_SECONDS = 1.0
HELD = "held"
"""Tag of connections that the library's pruner leaves alone."""

StreamTask = Callable[[Stream], Awaitable[None]]
"""Handles a stream that a peer has opened, which lives as long as this runs."""


class Connection:
    """One connection. `peer`: at its other end. `inbound`: it dialled us. `relay`: the peer that it
    goes through, None if it is direct. `remote`: where it comes from or leads to, None for one
    through a relay."""

    def __init__(self, connection: NetConnection, swarm: Swarm) -> None:
        muxed = connection.muxed_conn
        self.peer = muxed.peer_id.to_base58()
        self.inbound = str(connection.direction).lower().endswith("inbound")
        self.relay = relay_of(muxed)
        self.remote = address_of_socket(muxed.get_remote_address())
        self._connection = connection
        self._swarm = swarm

    @property
    def is_closed(self) -> bool:
        return self._connection.is_closed

    @property
    def ping(self) -> tuple[int, bool]:
        """The number of Yamux's latest ping on it, 0 before the first, and whether that was
        answered."""
        muxed = self._connection.muxed_conn
        return muxed._ping_id, muxed._ping_event.is_set()

    @property
    def heard(self) -> float | None:
        """When the peer last said anything on it, by trio's clock."""
        return getattr(self._connection.muxed_conn, "heard_at", None)

    @property
    def is_busy(self) -> bool:
        """Whether anything of ours is going on over it: what we ask for, and what was granted
        (`Stream.keep_connection`). Not a stream that the peer has opened, which it can keep open
        for as long as it likes."""
        return any(_is_ours(each) for each in self._connection.get_streams())

    async def close(self) -> None:
        """Never raises: a connection that is gone for good has many ways to say so."""
        with ignored_errors("closing a connection"):
            await self._connection.close()

    def forget(self) -> None:
        """It is closed, and the library has not noticed: has it do so."""
        self._swarm.remove_conn(self._connection)


class ConnectionEvents(Protocol):
    """Is told of connections as they come and go."""

    def opened(self, connection: Connection) -> None: ...
    def closed(self, connection: Connection) -> None: ...


class Host:
    """`nursery`: where everything that goes on for longer than a call lives; it ends with the host.
    `peer_id`: ours. `library`: the library's own object, for tests of what it does without us."""

    def __init__(self, host: LibraryHost, nursery: trio.Nursery) -> None:
        self.peer_id = host.get_id().to_base58()
        self.nursery = nursery
        self.library = host
        self._swarm = host.get_network()
        self.held: frozenset[str] = frozenset()

    # -- streams

    async def open_stream(self, peer: str, protocol: str, lazily: bool = False) -> Stream:
        """A new stream to a connected peer. Raises Incompatible if it does not speak the protocol,
        PeerError if anything else is in the way. lazily: where the peer has said that it speaks it,
        it is not asked again before something is said: `Stream`, `proposed`."""
        identity = ID.from_string(peer)
        with peer_errors(f"{protocol} with {peer}"):
            if not self.is_connected(peer):
                raise PeerError(f"{peer} is not connected")
            known = (
                lazily
                and len(protocol) <= SHORT
                and self.library.get_peerstore().supports_protocols(identity, [protocol])
            )
            if not known:
                return Stream(await self.library.new_stream(identity, [TProtocol(protocol)]))
            stream = await self._swarm.new_stream(identity)
            stream.protocol_id = TProtocol(protocol)
            return Stream(stream, proposed=protocol)

    def set_handler(self, protocol: str, handler: StreamTask) -> None:
        """Has `handler` take the streams that peers open for `protocol`, instead of whoever took
        them before."""

        async def on_stream(stream: NetStream) -> None:
            await handler(Stream(stream))

        self.library.set_stream_handler(TProtocol(protocol), on_stream)

    def remove_handler(self, protocol: str) -> None:
        self.library.remove_stream_handler(TProtocol(protocol))

    # -- connections

    def is_connected(self, peer: str) -> bool:
        """Whether there is any connection with `peer`. Raises ValueError if that is not a peer
        id."""
        return bool(self._swarm.get_connections(ID.from_string(peer)))

    async def dial(self, peer: str, address: Address) -> None:
        """Connects. Raises PeerError. May be cancelled."""
        with peer_errors():
            identity = ID.from_string(peer)
            self._swarm.unblock_peer(identity)
            await self._swarm.dial_addr(Multiaddr(f"{address}/p2p/{peer}"), identity)

    async def close_peer(self, peer: str) -> None:
        """Closes all connections with `peer`. Never raises."""
        with ignored_errors(f"closing the connections with {peer}"):
            await self._swarm.close_peer(ID.from_string(peer))

    def hold(self, peers: set[str]) -> None:
        """Keeps the library from pruning connections with these, and no longer with those of the
        last call."""
        for peer in self.held - peers:
            self._swarm.unprotect(ID.from_string(peer), HELD)
        for peer in peers - self.held:
            self._swarm.protect(ID.from_string(peer), HELD)
        self.held = frozenset(peers)

    def watch(self, events: ConnectionEvents, stream_opened: Callable[[NetStream], None]) -> None:
        """Tells `events` of every connection from now on; some ends the library does not announce.
        Calls `stream_opened` with every new stream, ours and theirs, before anything is read from
        it."""
        self._swarm.register_notifee(_Announcements(self._swarm, events, stream_opened))

    # -- connections that are not simply dialled

    async def upgrade_outbound(self, raw: IRawConnection, peer: str) -> None:
        """Makes a connection of `raw`, with us as Noise's initiator. Raises PeerError unless `peer`
        is at its other end."""
        with peer_errors(f"the handshake with {peer}"):
            await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_string(peer))

    async def upgrade_inbound(self, raw: IRawConnection, address: str) -> UpgradedConnection:
        """Makes a connection of `raw`, with the other side as Noise's initiator, seen at the
        multiaddr `address`. Raises PeerError."""
        with peer_errors("the handshake of a peer that calls"):
            return UpgradedConnection(
                await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr(address))
            )

    async def call_through(self, stream: Stream, relay: str, peer: str) -> None:
        """Connects with `peer` over a stream to `relay` that has been put through. Raises
        PeerError; the stream is reset then."""
        raw = CircuitConnection(stream, relay, peer, initiator=True)
        try:
            await self.upgrade_outbound(raw, peer)
        except BaseException:
            self.nursery.start_soon(raw.close)
            raise

    async def take_call(self, stream: Stream, relay: str, caller: str) -> UpgradedConnection:
        """The connection over a stream from `relay`, which says that `caller` calls. Raises
        PeerError."""
        raw = CircuitConnection(stream, relay, caller, initiator=False)
        return await self.upgrade_inbound(raw, str(raw.get_transport_addresses()[0]))

    async def probe(self, peer: str, address: Address) -> None:
        """Returns if this very peer answers at `address`, with TCP and a handshake; closes that
        connection again. Raises PeerError."""
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
        """Makes a connection with `peer` of a TCP connection to `target`. Raises PeerError; what is
        left is closed then."""
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
        """Lets others of our sockets be bound to the ports that this host listens on, for hole
        punching. Nobody can listen on them: that takes the option before binding too."""
        for listener in self._swarm.listeners.values():
            for each in getattr(listener, "listeners", []):
                if hasattr(socket, "SO_REUSEPORT"):
                    each.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


class UpgradedConnection:
    """A connection that the library was made to take over. `peer`: at its other end, as its
    handshake proved."""

    def __init__(self, muxed: MuxedConnection) -> None:
        self.peer = muxed.peer_id.to_base58()
        self._muxed = muxed

    async def wait_closed(self) -> None:
        await self._muxed.event_closed.wait()

    async def close(self) -> None:
        """Never raises."""
        with ignored_errors("closing a connection"):
            await self._muxed.close()


class _Announcements(INotifee):
    """Passes the swarm's announcements on, with our objects for the library's."""

    def __init__(
        self, swarm: Swarm, events: ConnectionEvents, stream_opened: Callable[[NetStream], None]
    ) -> None:
        self._swarm = swarm
        self._events = events
        self._stream_opened = stream_opened
        self._connections: dict[INetConn, Connection] = {}

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        if conn not in self._connections and not conn.is_closed:
            self._connections[conn] = Connection(conn, self._swarm)  # type: ignore[arg-type]  # annotated with less than it can do
            self._events.opened(self._connections[conn])

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        if (known := self._connections.pop(conn, None)) is not None:
            self._events.closed(known)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None:
        self._stream_opened(stream)  # type: ignore[arg-type]

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None:
        return None

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None:
        return None

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None:
        return None


def _is_ours(stream: NetStream) -> bool:
    opened = stream.muxed_stream.is_initiator and stream.protocol_id is not None
    return opened or getattr(stream.muxed_stream, "keeps_connection", False)


async def _close_raw(raw: IRawConnection) -> None:
    with (
        trio.CancelScope(shield=True),
        trio.move_on_after(CLOSE_SECONDS),
        ignored_errors("closing a socket"),
    ):
        await raw.close()
