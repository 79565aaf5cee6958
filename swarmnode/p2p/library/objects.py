"""Types of py-libp2p's objects, as far as they are used. The library's own annotations omit most of
their methods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio
from libp2p.abc import INotifee, IRawConnection, ISecureConn, ITransport
from libp2p.crypto.keys import PublicKey
from libp2p.custom_types import TProtocol
from libp2p.network.config import RetryConfig
from libp2p.peer.id import ID
from multiaddr import Multiaddr


class MuxedConnection(Protocol):
    """A Yamux connection."""

    peer_id: ID
    event_shutting_down: trio.Event
    event_closed: trio.Event
    secured_conn: object
    _ping_id: int
    """Number of the latest ping; `_ping_event` is set when it was answered."""
    _ping_event: trio.Event
    last_received_at: float
    """Time of the last received bytes on trio's clock, set by `p2p.budget`; missing before the
    first."""

    def get_remote_address(self) -> tuple[str, int] | None: ...
    async def close(self) -> None: ...


class MuxedStream(Protocol):
    """A Yamux stream.

    Attributes:
        is_initiator: this node opened it.
        patience_seconds: how long a writer waits for credit (guards/yamux.py).
        keeps_connection: set by `library.Stream.keep_connection`; missing before.
    """

    conn: MuxedConnection
    is_initiator: bool
    reset_received: bool
    patience_seconds: float
    keeps_connection: bool


class NetStream(Protocol):
    """A stream with a negotiated protocol."""

    muxed_stream: MuxedStream
    muxed_conn: MuxedConnection
    protocol_id: TProtocol | None
    read: Callable[[int | None], Awaitable[bytes]]
    write: Callable[[bytes], Awaitable[None]]

    async def close(self) -> None: ...
    async def close_write(self) -> None: ...
    async def reset(self) -> None: ...


class NetConnection(Protocol):
    """`muxed_conn` with the state of the library's swarm."""

    muxed_conn: MuxedConnection

    def get_streams(self) -> tuple[NetStream, ...]: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def direction(self) -> object: ...
    async def close(self) -> None: ...


class TcpListener(Protocol):
    listeners: list[trio.SocketListener]


class Transports(Protocol):
    def transport_for_dialing(self, maddr: Multiaddr) -> ITransport | None: ...


class Upgrader(Protocol):
    """Secures raw connections."""

    upgrade_security: Callable[[IRawConnection, bool, ID | None], Awaitable[ISecureConn]]


class AutoConnector(Protocol):
    """Dials peers of the library's own choice; disabled here."""

    maybe_connect: Callable[[], Awaitable[None]]


class Swarm(Protocol):
    """The library's network service: all connections of a host."""

    connections: dict[ID, list[NetConnection]]
    listeners: dict[str, TcpListener]
    transport_manager: Transports
    upgrader: Upgrader
    auto_connector: AutoConnector
    retry_config: RetryConfig

    def get_connections(self, peer_id: ID | None = None) -> list[NetConnection]: ...
    def register_notifee(self, notifee: INotifee) -> None: ...
    def remove_conn(self, conn: NetConnection) -> None: ...
    def unblock_peer(self, peer_id: ID) -> None: ...
    def protect(self, peer_id: ID, tag: str) -> None: ...
    def unprotect(self, peer_id: ID, tag: str) -> bool: ...
    async def dial_addr(self, addr: Multiaddr, peer_id: ID) -> NetConnection: ...
    async def upgrade_outbound_raw_conn(
        self, raw_conn: IRawConnection, peer_id: ID
    ) -> NetConnection: ...
    async def upgrade_inbound_raw_conn(
        self, raw_conn: IRawConnection, maddr: Multiaddr
    ) -> MuxedConnection: ...
    async def close_peer(self, peer_id: ID) -> None: ...
    async def new_stream(self, peer_id: ID) -> NetStream: ...


class PeerStore(Protocol):
    def supports_protocols(self, peer_id: ID, protocols: Sequence[str]) -> list[str]: ...


class LibraryHost(Protocol):
    """A host: streams on top of a swarm."""

    def get_id(self) -> ID: ...
    def get_public_key(self) -> PublicKey: ...
    def get_network(self) -> Swarm: ...
    def get_peerstore(self) -> PeerStore: ...
    def set_stream_handler(
        self, protocol_id: TProtocol, stream_handler: Callable[[NetStream], Awaitable[None]]
    ) -> None: ...
    def remove_stream_handler(self, protocol_id: TProtocol) -> None: ...
    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[TProtocol]) -> NetStream: ...
