"""Circuit relay v2, server side: carries bytes between two peers that cannot reach each other.
Wire-compatible with other libp2p implementations.

    peer B ─ RESERVE ─▶ relay: B can be dialled through it for reservation_seconds while connected
    peer A ─ CONNECT B ─▶ relay ─ CONNECT from A ─▶ B ─ OK ─▶ relay ─ OK ─▶ A
    then bytes flow both ways until a limit or until either side ends

This replaces the library's relay, which has four defects. It grants reservations to any peer id in
a message, so one peer can take them all. It allows one circuit per peer, closes streams of other
circuits, and writes error messages into the data of a circuit. Here a reservation belongs to the
authenticated peer and ends with its connection, and all state is bounded.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable

import msgspec
import trio
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.identifiers import multiaddr_bytes, peer_id_bytes, peer_id_text
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.slots import RateLimiter
from swarmnode.p2p.stream_calls import read_message, run_on_new_stream, try_on_stream, write_message

log = logging.getLogger(__name__)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
HOP_SECONDS = 10.0
"""Timeout for a request."""
STOP_SECONDS = 8.0
"""Timeout for the answer of the called peer."""
BUDGET_SECONDS = 3.0
"""A circuit ends when the budget allows no bytes for this long."""
PIECE_BYTES = 65536
REQUEST_BURST = 8
REQUEST_SECONDS = 4.0
"""A peer may send REQUEST_BURST requests (CONNECT or RESERVE) at once and one more per
REQUEST_SECONDS."""
OUTCOMES = ("ok", "refused", "no_reservation", "full", "failed", "malformed")


@dataclasses.dataclass(frozen=True)
class RelayLimits:
    """Limits of a relay, so that relaying never displaces the node's own work."""

    reservations: int = 64
    """Peers that can be dialled through this node."""
    circuits: int = 128
    """Concurrent circuits: two per reservation."""
    circuits_per_peer: int = 16
    """Circuits of one peer, as caller or called."""
    reservation_seconds: int = 1800
    circuit_seconds: int = 3600
    circuit_bytes: int = 1 << 30
    """Bytes per circuit in both directions together. The peers may open another circuit
    afterwards."""
    bytes_per_second: int = 0
    """Rate of all circuits together; 0 is unlimited."""


class RelayStatistics(msgspec.Struct, frozen=True):
    serving: bool = False
    reservations: int = 0
    circuits: int = 0
    reserved: dict[str, int] = {}
    """Reservation requests by outcome since the start."""
    called: dict[str, int] = {}
    """Circuit requests by outcome since the start."""
    bytes: int = 0
    """Relayed bytes since the start."""


class RelayState:
    """Reservations and circuits by peer. Pure: `now` is monotonic time in seconds."""

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._until: dict[str, float] = {}
        self._circuits = collections.Counter[str]()
        self._open = 0

    def reserve(self, peer: str, now: float) -> bool:
        """Grant or renew a reservation; returns False if all are taken."""
        self._expire(now)
        if peer not in self._until and len(self._until) >= self._limits.reservations:
            return False
        self._until[peer] = now + self._limits.reservation_seconds
        return True

    def reserved(self, peer: str, now: float) -> bool:
        return self._until.get(peer, 0.0) > now

    def forget_peer(self, peer: str) -> None:
        """Drop the reservation of a disconnected or unwelcome peer."""
        self._until.pop(peer, None)

    def open(self, caller: str, called: str) -> bool:
        """Count a new circuit; returns False if a limit is reached."""
        most = self._limits.circuits_per_peer
        if (
            self._open >= self._limits.circuits
            or self._circuits[caller] >= most
            or self._circuits[called] >= most
        ):
            return False
        self._open += 1
        self._circuits[caller] += 1
        self._circuits[called] += 1
        return True

    def close(self, caller: str, called: str) -> None:
        self._open -= 1
        for peer in (caller, called):
            self._circuits[peer] -= 1
            if not self._circuits[peer]:
                del self._circuits[peer]

    def counts(self, now: float) -> tuple[int, int]:
        """Return the numbers of (reservations, circuits)."""
        self._expire(now)
        return len(self._until), self._open

    def _expire(self, now: float) -> None:
        for peer in [peer for peer, until in self._until.items() if until <= now]:
            del self._until[peer]


class Relay:
    """Relay for other peers.

    Args:
        host: the libp2p host.
        limits: bounds of reservations, circuits and bytes.
        addresses: returns the multiaddrs of this node without its peer id.
        is_allowed: returns False for peers that are not served.
    """

    def __init__(
        self,
        host: Host,
        limits: RelayLimits,
        addresses: Callable[[], list[str]],
        is_allowed: Callable[[str], bool],
    ) -> None:
        self._host = host
        self._limits = limits
        self._addresses = addresses
        self._is_allowed = is_allowed
        self.allows: Callable[[], bool] = lambda: True
        """Returns True while the budget allows relaying."""
        self._state = RelayState(limits)
        self._limiter = RateLimiter(REQUEST_BURST, REQUEST_SECONDS)
        self._serving = False
        self._bytes = 0
        self._throttle = _Throttle(limits.bytes_per_second)
        self._reserved = collections.Counter[str](dict.fromkeys(OUTCOMES, 0))
        self._called = collections.Counter[str](dict.fromkeys(OUTCOMES, 0))

    @property
    def serving(self) -> bool:
        return self._serving

    def serve(self, serving: bool) -> None:
        """Start or stop accepting requests. Open circuits continue."""
        if serving and not self._serving:
            self._host.set_handler(HOP, self._on_hop)
            log.info(
                "relaying for unreachable peers, up to %d reservations",
                self._limits.reservations,
            )
        elif self._serving and not serving:
            self._host.remove_handler(HOP)
        self._serving = serving

    def forget_peer(self, peer: str) -> None:
        """Handle the disconnection of `peer`."""
        self._state.forget_peer(peer)

    def reserved(self, peer: str) -> bool:
        """Return True if `peer` can be dialled through this node."""
        return self._serving and self._state.reserved(peer, trio.current_time())

    def statistics(self) -> RelayStatistics:
        reservations, circuits = self._state.counts(trio.current_time())
        return RelayStatistics(
            self._serving,
            reservations,
            circuits,
            dict(self._reserved),
            dict(self._called),
            self._bytes,
        )

    # -- requests

    async def _on_hop(self, stream: Stream) -> None:
        """Handle one request of a peer. A circuit runs in this task until it ends."""
        peer = stream.peer
        request = await try_on_stream(
            stream, lambda stream: read_message(stream, pb.HopMessage), deadline=HOP_SECONDS
        )
        if request is None:
            self._called["malformed"] += 1
        elif not self._serving or not self._is_allowed(peer) or stream.relay is not None:
            self._called["refused"] += 1
            await self._refuse(stream, pb.PERMISSION_DENIED)
        elif not self._limiter.allow(peer, trio.current_time()):
            self._called["refused"] += 1
            await self._refuse(stream, pb.RESOURCE_LIMIT_EXCEEDED)
        elif request.type == pb.HopMessage.RESERVE:
            await self._reserve(peer, stream)
        elif request.type == pb.HopMessage.CONNECT:
            await self._connect(peer, request.peer.id, stream)
        else:
            self._called["malformed"] += 1
            await self._refuse(stream, pb.MALFORMED_MESSAGE)

    async def _reserve(self, peer: str, stream: Stream) -> None:
        """Reserve for the authenticated peer, and ignore the peer id in the message."""
        if not self._state.reserve(peer, trio.current_time()):
            self._reserved["full"] += 1
            await self._refuse(stream, pb.RESERVATION_REFUSED)
            return
        addresses = [
            multiaddr_bytes(f"{address}/p2p/{self._host.peer_id}")
            for address in self._addresses()[:8]
        ]
        granted = pb.HopMessage(
            type=pb.HopMessage.STATUS,
            status=pb.OK,
            reservation=pb.Reservation(
                expire=int(time.time()) + self._limits.reservation_seconds, addrs=addresses
            ),
            limit=self._limit(),
        )
        self._reserved["ok"] += 1
        if await try_on_stream(
            stream, lambda stream: write_message(stream, granted), deadline=HOP_SECONDS
        ):
            await stream.close()

    async def _connect(self, caller: str, wanted: bytes, stream: Stream) -> None:
        now = trio.current_time()
        try:
            called = peer_id_text(wanted)
        except BadMessage:
            self._called["malformed"] += 1
            return await self._refuse(stream, pb.MALFORMED_MESSAGE)
        if (
            not self._state.reserved(called, now)
            or not self._is_allowed(called)
            or called == caller
        ):
            self._called["no_reservation"] += 1
            await self._refuse(stream, pb.NO_RESERVATION)
        elif not self.allows() or not self._state.open(caller, called):
            self._called["full"] += 1
            await self._refuse(stream, pb.RESOURCE_LIMIT_EXCEEDED)
        else:
            try:
                await self._run_circuit(caller, called, stream)
            finally:
                self._state.close(caller, called)
        return None

    async def _run_circuit(self, caller: str, called: str, stream: Stream) -> None:
        """Call `called`, then carry bytes until either side or a limit ends the circuit."""
        call = pb.StopMessage(
            type=pb.StopMessage.CONNECT,
            peer=pb.PeerId(id=peer_id_bytes(caller)),
            limit=self._limit(),
        )

        async def call_peer(other: Stream) -> None:
            await write_message(other, call)
            reply = await read_message(other, pb.StopMessage)
            if reply.type != pb.StopMessage.STATUS or reply.status != pb.OK:
                raise PeerError(f"{called} refused the circuit")

        try:
            _, other = await run_on_new_stream(
                self._host, called, STOP, call_peer, deadline=STOP_SECONDS, keep=True
            )
        except PeerError as error:
            log.debug("no circuit from %s to %s: %s", caller, called, error)
            self._called["failed"] += 1
            await self._refuse(stream, pb.CONNECTION_FAILED)
            return
        established = pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK, limit=self._limit())
        if not await try_on_stream(
            stream, lambda stream: write_message(stream, established), deadline=HOP_SECONDS
        ):
            self._called["failed"] += 1
            await other.reset()
            return
        self._called["ok"] += 1
        stream.keep_connection()
        await self._relay_bytes(stream, other)

    async def _relay_bytes(self, one: Stream, other: Stream) -> None:
        """Carry bytes both ways; returns when both streams are reset. The peers' inner handshake
        detects a truncated circuit."""
        ended = trio.Event()
        left = self._limits.circuit_bytes

        async def pump(source: Stream, sink: Stream) -> None:
            nonlocal left
            try:
                while (data := await source.read(PIECE_BYTES)) and left >= len(data):
                    left -= len(data)
                    self._bytes += len(data)
                    await self._throttle.wait(len(data))
                    if not await self._wait_for_budget():
                        break
                    await sink.write(data)
            except PeerError as error:  # closed, reset, stalled or lost: the circuit ends
                log.debug("circuit ended: %r", error)
            finally:
                ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump, one, other)
            nursery.start_soon(pump, other, one)
            try:
                with trio.move_on_after(self._limits.circuit_seconds):
                    await ended.wait()
            finally:
                await one.reset()
                await other.reset()

    async def _wait_for_budget(self) -> bool:
        """Wait up to BUDGET_SECONDS for budget. A longer wait would make the sender drop the
        connection, and a new circuit is opened sooner."""
        with trio.move_on_after(BUDGET_SECONDS):
            while not self.allows():  # noqa: ASYNC110 - the budget has no event
                await trio.sleep(0.2)
            return True
        return False

    async def _refuse(self, stream: Stream, status: pb.Status.ValueType) -> None:
        refusal = pb.HopMessage(type=pb.HopMessage.STATUS, status=status)
        if await try_on_stream(
            stream, lambda stream: write_message(stream, refusal), deadline=HOP_SECONDS
        ):
            await stream.close()

    def _limit(self) -> pb.Limit:
        return pb.Limit(duration=self._limits.circuit_seconds, data=self._limits.circuit_bytes)


class _Throttle:
    """Limits the rate of all circuits together; `rate` in bytes per second, 0 for no limit."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def wait(self, count: int) -> None:
        """Wait until `count` more bytes fit the rate."""
        if self._rate:
            now = trio.current_time()
            self._free_at = max(self._free_at, now - 1.0) + count / self._rate
            if self._free_at > now:
                await trio.sleep(self._free_at - now)
