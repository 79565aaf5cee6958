"""Guards for libp2p/network: inbound slots, stream handlers, connection tasks, the dial cache,
shutdown.

A `Swarm` is libp2p's network service. One exception that reaches its nursery ends the service and
every connection of this node.
"""

# mypy: disable-error-code="method-assign,assignment,attr-defined,arg-type,type-arg,override"

import collections
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Collection

import trio
from libp2p.abc import IHost, IMuxedConn
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream
from libp2p.network.swarm import Swarm
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream
from libp2p.transport.tcp import tcp
from multiaddr import Multiaddr

from swarmnode.errors import Unavailable
from swarmnode.p2p.guards.counting import contain_errors, count_firing
from swarmnode.p2p.guards.inbox import abandon, discard
from swarmnode.p2p.guards.peerstore import guard_peerstore

RESET_SECONDS = 2.0
"""Timeout for resetting a failed stream."""
CLOSE_SECONDS = 5.0
"""Timeout for closing all connections, and then the host; afterwards its sockets are left to the
kernel."""
NEGATIVE_CACHE_SECONDS = 1.0
"""Time after a failed dial during which libp2p refuses to dial the same peer. The redial loop has
its own back-off."""
INBOUND_PER_ADDRESS = 64
"""Inbound connections from one IPv4 address or one IPv6 /64 network, so that one machine cannot
take all slots."""

_inbound: collections.Counter[str] = collections.Counter()


def _origin(stream: object) -> str:
    """Return the part of the remote address that one machine cannot choose freely; empty if the
    transport does not know it."""
    remote = stream.get_remote_address()
    if remote is None:
        return ""
    address = ipaddress.ip_address(remote[0].partition("%")[0])
    return (
        str(ipaddress.ip_network((address, 64), strict=False))
        if address.version == 6
        else str(address)
    )


def _install_inbound_slots() -> None:
    """Release the slot of an inbound connection when the connection ends.

    Defect: A slot and a task are kept until shutdown for every connection ever accepted: after 250
        connections all further ones are refused. One address may take all slots.
    Upstream: network/swarm.py `_do_handle_inbound_connection`
    Guard: The slot is released at the end of the connection. One IPv4 address or IPv6 /64 gets at
        most `INBOUND_PER_ADDRESS` (64) slots.
    Cost: At most 64 nodes behind one address can connect to one node.
    Remove when: A stock host serves 400 connections one after another and limits each address.
    Tests: test_guards_connections.py
    """
    original = Swarm._do_handle_inbound_connection

    async def _do_handle_inbound_connection(
        self: Swarm, stream: object, maddr: Multiaddr, failure: object
    ) -> None:
        if isinstance(stream, IMuxedConn):  # a transport with its own multiplexing; none is used
            return await original(self, stream, maddr, failure)
        origin = _origin(stream)
        if _inbound[origin] >= INBOUND_PER_ADDRESS:
            count_firing("address_full", origin)
            return await stream.close()
        _inbound[origin] += 1
        raw = RawConnection(stream, False)
        try:
            with contain_errors("inbound_failed", origin):
                remote = self._build_remote_multiaddr(stream)
                if remote is None or await self.connection_gate.is_allowed(remote):
                    connection = await self.upgrade_inbound_raw_conn(raw, maddr)
                    await connection.event_closed.wait()
        finally:
            count_firing("slot_released", origin)
            _inbound[origin] -= 1
            if not _inbound[origin]:
                del _inbound[origin]
            with trio.CancelScope(shield=True), trio.move_on_after(RESET_SECONDS):
                await raw.close()
        return None

    Swarm._do_handle_inbound_connection = _do_handle_inbound_connection


def _install_handlers() -> None:
    """Contain exceptions of stream handlers, and close each stream with its handler.

    Defect: An exception of any handler (swarmnode's, identify, ping) ends the host. `StreamEOF` and
        `StreamReset` end the accept loop, so that all other streams of that peer hang. A handler
        that returns without `close` leaves entries on both sides, and one that returns early leaves
        up to a window of unread bytes.
    Upstream: network/connection/swarm_connection.py `_handle_muxed_stream`
    Guard: Exceptions are counted and reset the stream. After a clean return the stream is closed
        and its unread bytes are dropped.
    Cost: A handler cannot lend its stream to another task.
    Remove when: A stock host survives a handler that raises.
    Tests: test_guards_killers.py, test_guards_connections.py
    """
    original, close = SwarmConn._handle_muxed_stream, NetStream.close

    async def _handle_muxed_stream(self: SwarmConn, stream: YamuxStream) -> None:
        with contain_errors("handler_failed", self.muxed_conn.peer_id) as failure:
            await original(self, stream)
            if not stream.send_closed:
                await stream.close()
            abandon(stream)
            discard(stream)
        if failure.error is not None:
            with (
                trio.CancelScope(shield=True),
                trio.move_on_after(RESET_SECONDS),
                contextlib.suppress(Exception),
            ):
                await stream.reset()

    async def _close(self: NetStream) -> None:
        await close(self)
        if isinstance(self.muxed_stream, YamuxStream):
            abandon(self.muxed_stream)

    SwarmConn._handle_muxed_stream = _handle_muxed_stream
    NetStream.close = _close


def _install_new_stream() -> None:
    """Hand an opened stream to its caller, or close it.

    Defect: A cancellation between opening a stream and registering it leaves a stream without an
        owner and takes one of 256 slots.
    Upstream: network/connection/swarm_connection.py `new_stream`
    Guard: Registration is shielded. `BasicHost.new_stream` resets the stream in later failures.
    Cost: A cancel scope per stream.
    Remove when: Upstream resets the stream there.
    Tests: test_guards_connections.py
    """

    async def new_stream(self: SwarmConn) -> NetStream:
        stream = await self.muxed_conn.open_stream()
        with trio.CancelScope(shield=True):
            return await self._add_stream(stream)

    SwarmConn.new_stream = new_stream


def _install_connection_tasks() -> None:
    """Close only the connection whose own task fails.

    Defect: `Yamux.start` and `SwarmConn.start` run as tasks of the whole service, so an error in
        either ends the host.
    Upstream: network/swarm.py `add_conn`
    Guard: The error is counted and the connection closed.
    Cost: None.
    Remove when: `add_conn` supervises these tasks.
    Tests: test_guards_killers.py
    """
    start_muxer, start_connection = Yamux.start, SwarmConn.start

    async def _start_muxer(self: Yamux) -> None:
        with contain_errors("service_failed", self.peer_id) as failure:
            await start_muxer(self)
        if failure.error is not None:
            self.event_started.set()  # a task that waits for the start then sees `is_closed`
            with (
                trio.CancelScope(shield=True),
                trio.move_on_after(RESET_SECONDS),
                contextlib.suppress(Exception),
            ):
                await self._cleanup_on_error()

    async def _start_connection(self: SwarmConn) -> None:
        with contain_errors("service_failed", self.muxed_conn.peer_id) as failure:
            await start_connection(self)
        if failure.error is not None:
            with (
                trio.CancelScope(shield=True),
                trio.move_on_after(RESET_SECONDS),
                contextlib.suppress(Exception),
            ):
                await self.close()

    Yamux.start = _start_muxer
    SwarmConn.start = _start_connection


def _install_exclusive_port() -> None:
    """Give a listening port to one process only.

    Defect: SO_REUSEPORT is set for hole punching. A second node on the same port binds it too, and
        the kernel distributes connections between both.
    Upstream: transport/tcp/tcp.py `_set_reuse_flags`
    Guard: SO_REUSEADDR only, so that the second bind fails. `Host.share_ports` sets SO_REUSEPORT
        once the port is bound.
    Cost: None.
    Remove when: SO_REUSEPORT is an option.
    Tests: test_guards_connections.py
    """

    def _set_reuse_flags(sock: trio.socket.SocketType) -> None:
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)

    tcp._set_reuse_flags = _set_reuse_flags


def install() -> None:
    """Replace the methods above on the upstream classes."""
    _install_inbound_slots()
    _install_handlers()
    _install_new_stream()
    _install_connection_tasks()
    _install_exclusive_port()


def guard_host(host: IHost) -> IHost:
    """Apply the settings of one host that have no constructor argument, and return `host`.

    Defect: A failed dial blocks its peer for 60 s, so a peer that restarts is unreachable for that
        time.
    Upstream: network/swarm.py `_NegativePeerCache`
    Guard: `NEGATIVE_CACHE_SECONDS` (1 s).
    Cost: None.
    Remove when: The time is a setting.
    Tests: test_guards_connections.py
    """
    host.get_network()._negative_peer_cache._ttl = NEGATIVE_CACHE_SECONDS
    guard_peerstore(host)
    return host


@contextlib.asynccontextmanager
async def running(host: IHost, listen: Collection[object]) -> AsyncIterator[None]:
    """Run a host that listens at `listen`, fail if it cannot, and leave no socket behind.

    Defect: A port that is taken is logged at debug level only, and the host accepts no connection.
        Leaving `host.run` without `host.close()` leaks every connection's socket. `host.close`
        takes 0.2 s for each connection in turn.
    Upstream: network/swarm.py `listen`; host/basic_host.py `run`
    Guard: `Unavailable` is raised. All connections are closed at once, then the host, each within
        `CLOSE_SECONDS` (5 s).
    Cost: None.
    Remove when: `host.run` raises and closes by itself.
    Tests: test_guards_connections.py

    Raises:
        Unavailable: An address cannot be listened on.
    """
    network = host.get_network()
    async with host.run([Multiaddr(str(address)) for address in listen]):
        try:
            for address in listen:
                if str(address) not in network.listeners:
                    raise Unavailable(
                        f"cannot listen on {address}: is another node using this port?"
                    )
            yield
        finally:
            with trio.CancelScope(shield=True):
                try:
                    with trio.move_on_after(CLOSE_SECONDS):
                        async with trio.open_nursery() as nursery:
                            for peer in list(network.connections):
                                nursery.start_soon(network.close_peer, peer)
                finally:
                    with trio.move_on_after(CLOSE_SECONDS):
                        await host.close()
