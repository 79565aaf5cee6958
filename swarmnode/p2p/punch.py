"""Hole punching (DCUtR, `/libp2p/dcutr`, wire-compatible): two peers connected through a relay try
to connect directly.

    called peer ─ CONNECT, its addresses ─▶ caller
    called peer ◀─ CONNECT, its addresses ─ caller
    called peer ─ SYNC ─▶ caller, which dials at once; the called peer dials half a round trip later

The two SYNs cross, each opens its own router for the other, and TCP's simultaneous open merges both
dials into one connection. The caller is Noise's initiator on it.

Both sides dial from their listening port, so that the address that other peers see is the one to
dial. A router that chooses another external port per destination (symmetric NAT) cannot be
predicted; the connection through the relay stays in that case (docs/networking.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import trio
from libp2p.relay.circuit_v2.pb import dcutr_pb2 as pb

from swarmnode.errors import PeerError
from swarmnode.p2p.addresses import Address, dialable
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.identifiers import address_from_bytes, multiaddr_bytes
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.slots import RateLimiter
from swarmnode.p2p.stream_calls import read_message, run_on_new_stream, try_on_stream, write_message

log = logging.getLogger(__name__)

DCUTR = "/libp2p/dcutr"
ROUNDS = 3
ROUND_PAUSE_SECONDS = 1.0
EXCHANGE_TIMEOUT_SECONDS = 10.0
CALLED_DELAY_SECONDS = 0.01
"""Extra delay of the called peer. The caller, as the initiator, goes first: where one side has no
router, its SYN reaches a listener, which takes the responder's role."""
DIAL_SECONDS = 4.0
REFUSED_SECONDS = 0.03
HANDSHAKE_SECONDS = 10.0
ADDRESSES = 2
"""Number of the other side's addresses that are dialled. The peer chooses them, so a larger number
would let it direct dials at third parties."""
MAX_CONCURRENT = 8
SESSION_BURST = 6
SESSION_SECONDS = 100.0
"""SESSION_BURST sessions with one peer are allowed at once, whichever side starts them, and one
more per SESSION_SECONDS."""


class PunchStatistics(msgspec.Struct, frozen=True):
    succeeded: int = 0
    failed: int = 0
    """Peers that stayed on the relay after all rounds."""
    refused: int = 0


class Puncher:
    """Upgrades relayed connections to direct ones.

    Args:
        host: the libp2p host.
        connections: the open connections.
        listen: listening addresses, used as source of the dials.
        own: returns the addresses at which peers see this node.
        is_allowed: returns False for peers that are not served.
    """

    def __init__(
        self,
        host: Host,
        connections: ConnectionTable,
        listen: list[Address],
        own: Callable[[], list[Address]],
        is_allowed: Callable[[str], bool],
    ) -> None:
        self.own = own
        self._host = host
        self._connections = connections
        self._listen = listen
        self._is_allowed = is_allowed
        self._limiter = RateLimiter(SESSION_BURST, SESSION_SECONDS)
        self._active: set[str] = set()
        self._succeeded = self._failed = self._refused = 0

    def start(self) -> None:
        """Start to serve hole punching. The host must already listen, because dials share its
        ports."""
        self._host.share_ports()
        self._host.set_handler(DCUTR, self._on_stream)

    def statistics(self) -> PunchStatistics:
        return PunchStatistics(self._succeeded, self._failed, self._refused)

    async def upgrade(self, peer: str) -> None:
        """Try to connect directly to `peer`, which connected through a relay. Never raises for a
        fault of the peer."""
        if peer in self._active or len(self._active) >= MAX_CONCURRENT or not self.own():
            return
        self._active.add(peer)
        try:
            for attempt in range(ROUNDS):
                if attempt:
                    await trio.sleep(ROUND_PAUSE_SECONDS * attempt)
                if (
                    self._connections.is_direct(peer)
                    or not self._limiter.allow(peer, trio.current_time())
                    or not await self._attempt(peer)
                ):
                    break
            if self._connections.is_direct(peer):
                self._succeeded += 1
                log.info("direct connection with %s, no longer using the relay", peer)
            else:
                self._failed += 1
                log.debug("no direct connection with %s, staying on the relay", peer)
        finally:
            self._active.discard(peer)

    async def _attempt(self, peer: str) -> bool:
        """Make one attempt. Returns False if another attempt is pointless."""
        try:
            (addresses, seconds), _ = await run_on_new_stream(
                self._host, peer, DCUTR, self._exchange_addresses, deadline=EXCHANGE_TIMEOUT_SECONDS
            )
        except PeerError as error:
            log.debug("hole punching with %s failed: %s", peer, error)
            return False
        if not (targets := dialable_targets(addresses, self._connections.vantage_address(peer))):
            return False
        await trio.sleep(min(seconds / 2, 1.0) + CALLED_DELAY_SECONDS)
        await self._dial_all(peer, targets, initiator=False)
        return True

    async def _exchange_addresses(self, stream: Stream) -> tuple[list[bytes], float]:
        """Return (addresses of the peer, round trip in seconds). SYNC has been sent when this
        returns."""
        await write_message(stream, self._connect_message())
        at = trio.current_time()
        reply = await read_message(stream, pb.HolePunch)
        seconds = trio.current_time() - at
        if reply.type != pb.HolePunch.CONNECT:
            raise PeerError("not a CONNECT")
        await write_message(stream, pb.HolePunch(type=pb.HolePunch.SYNC))
        return list(reply.ObsAddrs), seconds

    async def _on_stream(self, stream: Stream) -> None:
        """Handle a hole punching request of a peer that this node called."""
        peer = stream.peer
        # if both sides started a session, the one of the lower peer id continues
        rival = peer in self._active and self._host.peer_id < peer
        pointless = stream.relay is None or self._connections.is_direct(peer) or not self.own()
        busy = len(self._active) >= MAX_CONCURRENT or not self._is_allowed(peer)
        if rival or pointless or busy or not self._limiter.allow(peer, trio.current_time()):
            self._refused += 1
            await stream.reset()
            return
        self._active.add(peer)
        try:
            addresses = await try_on_stream(stream, self._answer, deadline=EXCHANGE_TIMEOUT_SECONDS)
            if addresses:
                await self._dial_all(
                    peer,
                    dialable_targets(addresses, self._connections.vantage_address(peer)),
                    initiator=True,
                )
                await stream.close()
        finally:
            self._active.discard(peer)

    async def _answer(self, stream: Stream) -> list[bytes]:
        request = await read_message(stream, pb.HolePunch)
        if request.type != pb.HolePunch.CONNECT:
            raise PeerError("not a CONNECT")
        await write_message(stream, self._connect_message())
        if (await read_message(stream, pb.HolePunch)).type != pb.HolePunch.SYNC:
            raise PeerError("not a SYNC")
        return list(request.ObsAddrs)

    def _connect_message(self) -> pb.HolePunch:
        return pb.HolePunch(
            type=pb.HolePunch.CONNECT,
            ObsAddrs=[multiaddr_bytes(str(each)) for each in self.own()[:ADDRESSES]],
        )

    async def _dial_all(self, peer: str, targets: list[Address], *, initiator: bool) -> None:
        async with trio.open_nursery() as nursery:
            for address in targets:
                nursery.start_soon(self._dial, peer, address, initiator)

    async def _dial(self, peer: str, target: Address, initiator: bool) -> None:
        """Make one simultaneous open and its handshake. Never raises."""
        source = next((each for each in self._listen if each.kind == target.kind), None)
        if source is None:
            return
        try:
            with trio.fail_after(DIAL_SECONDS):
                connected = await connect_until_open(source, target)
            with trio.fail_after(HANDSHAKE_SECONDS):
                await self._host.punch(peer, connected, target, initiator=initiator)
        except (OSError, PeerError, trio.TooSlowError) as error:  # this attempt failed
            log.debug("hole punch to %s at %s failed: %r", peer, target, error)


def dialable_targets(raw_addresses: list[bytes], vantage: Address | None) -> list[Address]:
    """Return the addresses of a peer that may be dialled.

    Args:
        raw_addresses: binary multiaddrs from the peer.
        vantage: the address from which the peer observes the network; narrower scopes are refused.
    """
    targets = []
    for each in raw_addresses[: 2 * ADDRESSES]:
        try:
            address = address_from_bytes(each)
        except PeerError as error:
            log.debug("not an address: %s", error)
            continue
        if vantage is not None and dialable(address, vantage):
            targets.append(address)
    return targets[:ADDRESSES]


async def connect_until_open(source: Address, target: Address) -> trio.SocketStream:
    """Repeat `connect_from` while the other router refuses, because it may not have seen its own
    side's SYN yet."""
    while True:
        try:
            return await connect_from(source, target)
        except ConnectionRefusedError:
            await trio.sleep(REFUSED_SECONDS)


async def connect_from(source: Address, target: Address) -> trio.SocketStream:
    """Open a TCP connection to `target` from the listening port. Raises OSError.

    No other process can listen on the port: the listener binds it without SO_REUSEPORT
    (guards/swarm.py) and gets that option only once it listens.
    """
    family = trio.socket.AF_INET if target.kind == "ip4" else trio.socket.AF_INET6
    sock = trio.socket.socket(family, trio.socket.SOCK_STREAM)
    try:
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEPORT, 1)
        await sock.bind((source.host, source.port))
        await sock.connect((target.host, target.port))
        return trio.SocketStream(sock)
    except BaseException:
        sock.close()
        raise
