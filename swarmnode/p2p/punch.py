"""Hole punching (DCUtR, `/libp2p/dcutr`, wire-compatible): two peers that met through a relay try
to connect directly.

    called peer ─ CONNECT, its addresses ─▶ caller         both now know where the other's router
    shows it, if that router keeps ports
    called peer ◀─ CONNECT, its addresses ─ caller called peer ─ SYNC ─▶ caller, which dials at
    once; the called peer dials half a round trip later: the two SYNs cross, each opens its own
    router for the other's, and TCP's simultaneous open makes one connection of the two. On it the
    caller is Noise's initiator.

Both dial from the port that they listen on, so that the address that others see is the one that is
dialled. Routers that choose another outside port for each destination (symmetric NAT) cannot be
predicted: then the connection through the relay stays (docs/networking.md).
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable

import msgspec
import trio
from libp2p.relay.circuit_v2.pb import dcutr_pb2 as pb

from swarmnode.errors import PeerError
from swarmnode.p2p.addresses import Address, dialable
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.conversations import answer, converse, read_message, write_message
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.identifiers import address_of_bytes, multiaddr_bytes
from swarmnode.p2p.library.streams import Stream

log = logging.getLogger(__name__)

DCUTR = "/libp2p/dcutr"
ROUNDS = 3
ROUND_PAUSE_SECONDS = 1.0
TALK_SECONDS = 10.0
LATER_SECONDS = 0.01
"""The caller, who is the initiator, goes first: where one side has no router, its SYN meets a
listener, which takes the other role."""
DIAL_SECONDS = 4.0
REFUSED_SECONDS = 0.03
HANDSHAKE_SECONDS = 10.0
ADDRESSES = 2
"""Addresses of the other side that are dialled. It tells them, so that more would be a way to have
us dial around."""
AT_ONCE = 8
SESSIONS = 6
SESSION_SECONDS = 600.0
"""With one peer, at most SESSIONS in this time, whoever begins them."""
PEERS = 1024


class PunchStatistics(msgspec.Struct, frozen=True):
    succeeded: int = 0
    failed: int = 0
    """Peers that stayed on the relay, after all rounds."""
    refused: int = 0


class Allowance:
    """Sessions per peer and time. Pure."""

    def __init__(self) -> None:
        self._begun: collections.OrderedDict[str, list[float]] = collections.OrderedDict()

    def take(self, peer: str, now: float) -> bool:
        begun = [at for at in self._begun.pop(peer, []) if now - at < SESSION_SECONDS]
        allowed = len(begun) < SESSIONS
        self._begun[peer] = [*begun, now] if allowed else begun
        while len(self._begun) > PEERS:
            self._begun.popitem(last=False)
        return allowed


class Puncher:
    """`own()`: addresses at which others see us. `listen`: what we listen on, to dial from.
    `welcome(peer)`: False for who is not to be served."""

    def __init__(
        self,
        host: Host,
        connections: ConnectionTable,
        listen: list[Address],
        own: Callable[[], list[Address]],
        welcome: Callable[[str], bool],
    ) -> None:
        self.own = own
        self._host = host
        self._connections = connections
        self._listen = listen
        self._welcome = welcome
        self._allowance = Allowance()
        self._active: set[str] = set()
        self._succeeded = self._failed = self._refused = 0

    def start(self) -> None:
        """The host listens: from now on its ports can be dialled from, and others may ask us to."""
        self._host.share_ports()
        self._host.set_handler(DCUTR, self._on_stream)

    def statistics(self) -> PunchStatistics:
        return PunchStatistics(self._succeeded, self._failed, self._refused)

    async def upgrade(self, peer: str) -> None:
        """We were called by `peer` through a relay: try to connect directly. Never raises for
        anything the peer does."""
        if peer in self._active or len(self._active) >= AT_ONCE or not self.own():
            return
        self._active.add(peer)
        try:
            for attempt in range(ROUNDS):
                if attempt:
                    await trio.sleep(ROUND_PAUSE_SECONDS * attempt)
                if (
                    self._connections.is_direct(peer)
                    or not self._allowance.take(peer, trio.current_time())
                    or not await self._round(peer)
                ):
                    break
            if self._connections.is_direct(peer):
                self._succeeded += 1
                log.info("direct connection with %s, the relay is not needed", peer)
            else:
                self._failed += 1
                log.debug("no direct way to %s, staying on the relay", peer)
        finally:
            self._active.discard(peer)

    async def _round(self, peer: str) -> bool:
        """One attempt. False if another makes no sense."""
        try:
            (addresses, seconds), _ = await converse(
                self._host, peer, DCUTR, self._agree, deadline=TALK_SECONDS
            )
        except PeerError as error:
            log.debug("%s does not punch: %s", peer, error)
            return False
        if not (targets := targets_of(addresses, self._connections.vantage(peer))):
            return False
        await trio.sleep(min(seconds / 2, 1.0) + LATER_SECONDS)
        await self._dial_all(peer, targets, initiator=False)
        return True

    async def _agree(self, stream: Stream) -> tuple[list[bytes], float]:
        """(their addresses, round trip in seconds); SYNC is on its way to them when this
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
        """We called, and the called peer wants a direct connection."""
        peer = stream.peer
        # both began: the session of the lesser id goes on
        rival = peer in self._active and self._host.peer_id < peer
        pointless = stream.relay is None or self._connections.is_direct(peer) or not self.own()
        busy = len(self._active) >= AT_ONCE or not self._welcome(peer)
        if rival or pointless or busy or not self._allowance.take(peer, trio.current_time()):
            self._refused += 1
            await stream.reset()
            return
        self._active.add(peer)
        try:
            addresses = await answer(stream, self._answer, deadline=TALK_SECONDS)
            if addresses:
                await self._dial_all(
                    peer, targets_of(addresses, self._connections.vantage(peer)), initiator=True
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
        """One simultaneous open and the handshake on it. Never raises."""
        source = next((each for each in self._listen if each.kind == target.kind), None)
        if source is None:
            return
        try:
            with trio.fail_after(DIAL_SECONDS):
                connected = await connect_until_open(source, target)
            with trio.fail_after(HANDSHAKE_SECONDS):
                await self._host.punch(peer, connected, target, initiator=initiator)
        except (OSError, PeerError, trio.TooSlowError) as error:  # this attempt is over
            log.debug("no way to %s at %s: %r", peer, target, error)


def targets_of(told: list[bytes], vantage: Address | None) -> list[Address]:
    """Those of a peer's addresses that we dial. `vantage`: from where it speaks; nothing that
    reaches less far is dialled for it."""
    targets = []
    for each in told[: 2 * ADDRESSES]:
        try:
            address = address_of_bytes(each)
        except PeerError as error:
            log.debug("a peer told something that is not an address: %s", error)
            continue
        if vantage is not None and dialable(address, vantage):
            targets.append(address)
    return targets[:ADDRESSES]


async def connect_until_open(source: Address, target: Address) -> trio.SocketStream:
    """Like `connect_from`, again and again while the other router refuses: it may not have seen its
    own side's SYN yet."""
    while True:
        try:
            return await connect_from(source, target)
        except ConnectionRefusedError:
            await trio.sleep(REFUSED_SECONDS)


async def connect_from(source: Address, target: Address) -> trio.SocketStream:
    """A TCP connection to `target` from the very port that we listen on. Raises OSError.

    The port stays ours alone: a listener binds it without SO_REUSEPORT (guards/swarm.py) and is
    given that option only once it listens.
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
