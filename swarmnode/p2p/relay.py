"""Circuit relay v2, the relay's side: carries bytes between two peers that cannot reach each other.
Wire-compatible with other libp2ps.

    peer B ─ RESERVE ─▶ relay: B may be called through us for RESERVATION_SECONDS, while it stays
    connected peer A ─ CONNECT B ─▶ relay ─ CONNECT from A ─▶ B ─ OK ─▶ relay ─ OK ─▶ A, then bytes
    both ways until a limit or either end

Ours instead of the library's, which keeps a place for whatever peer id a message names (so that one
peer can take them all), keeps one circuit per peer and closes another's streams when one ends, and
writes its error messages into the middle of a circuit's data. Here a reservation belongs to the
peer that the handshake proved, ends with its connection, and everything is bounded.
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
from swarmnode.p2p.conversations import answer, converse, read_message, write_message
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.identifiers import multiaddr_bytes, peer_id_bytes, peer_id_text
from swarmnode.p2p.library.streams import Stream

log = logging.getLogger(__name__)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
HOP_SECONDS = 10.0
"""A request must have come by then."""
STOP_SECONDS = 8.0
"""The peer that is called must have answered by then."""
BUDGET_SECONDS = 3.0
"""A circuit that may carry nothing for so long is ended."""
PIECE_BYTES = 65536
CALLS_PER_PEER = 8
CALL_SECONDS = 4.0
"""A peer may call, or reserve, CALLS_PER_PEER times at once and once more for each CALL_SECONDS."""
CALLERS = 4096
"""Peers whose calls are counted, the latest."""
OUTCOMES = ("ok", "refused", "no_reservation", "full", "failed", "malformed")


@dataclasses.dataclass(frozen=True)
class RelayLimits:
    """What a relay gives away, so that being one never keeps a node from its own work."""

    reservations: int = 64
    """Peers that can be called through this node."""
    circuits: int = 128
    """Relayed connections at a time: two of everybody that has reserved."""
    circuits_per_peer: int = 16
    """Circuits that one peer may have, counted at both ends."""
    reservation_seconds: int = 1800
    circuit_seconds: int = 3600
    circuit_bytes: int = 1 << 30
    """Both ways together. The end of a circuit is the end of a connection; its ends may call
    again."""
    bytes_per_second: int = 0
    """All circuits together; 0 is no limit."""


class RelayStatistics(msgspec.Struct, frozen=True):
    serving: bool = False
    reservations: int = 0
    circuits: int = 0
    reserved: dict[str, int] = {}
    """Requests for a reservation, by outcome, since the start."""
    called: dict[str, int] = {}
    """Requests for a circuit."""
    bytes: int = 0
    """Relayed, since the start."""


class Book:
    """Who has a reservation and who has how many circuits. Pure: `now` in seconds, any monotonic
    clock."""

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._until: dict[str, float] = {}
        self._circuits = collections.Counter[str]()
        self._open = 0
        self._callers: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def reserve(self, peer: str, now: float) -> bool:
        """Grants or renews; False when all are taken."""
        self._expire(now)
        if peer not in self._until and len(self._until) >= self._limits.reservations:
            return False
        self._until[peer] = now + self._limits.reservation_seconds
        return True

    def reserved(self, peer: str, now: float) -> bool:
        return self._until.get(peer, 0.0) > now

    def gone(self, peer: str) -> None:
        """`peer` has disconnected, or is not to be served any more."""
        self._until.pop(peer, None)

    def open(self, caller: str, called: str) -> bool:
        """Counts a circuit; False when that would be one too many."""
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

    def may_ask(self, peer: str, now: float) -> bool:
        """A token bucket for each peer."""
        left, at = self._callers.pop(peer, (float(CALLS_PER_PEER), now))
        left = min(float(CALLS_PER_PEER), left + (now - at) / CALL_SECONDS)
        self._callers[peer] = (left - 1.0 if left >= 1.0 else left, now)
        if len(self._callers) > CALLERS:
            self._callers.popitem(last=False)
        return left >= 1.0

    def counts(self, now: float) -> tuple[int, int]:
        """(reservations, circuits) now."""
        self._expire(now)
        return len(self._until), self._open

    def _expire(self, now: float) -> None:
        for peer in [peer for peer, until in self._until.items() if until <= now]:
            del self._until[peer]


class Relay:
    """`addresses()`: multiaddrs at which we are dialled, without our peer id. `welcome(peer)`:
    False for who is not to be served."""

    def __init__(
        self,
        host: Host,
        limits: RelayLimits,
        addresses: Callable[[], list[str]],
        welcome: Callable[[str], bool],
    ) -> None:
        self._host = host
        self._limits = limits
        self._addresses = addresses
        self._welcome = welcome
        self.allows: Callable[[], bool] = lambda: True
        """Whether there is budget for others' bytes."""
        self._book = Book(limits)
        self._serving = False
        self._bytes = 0
        self._throttle = _Throttle(limits.bytes_per_second)
        self._reserved = collections.Counter[str](dict.fromkeys(OUTCOMES, 0))
        self._called = collections.Counter[str](dict.fromkeys(OUTCOMES, 0))

    @property
    def serving(self) -> bool:
        return self._serving

    def serve(self, serving: bool) -> None:
        """Begins or stops to be a relay. Circuits that are open stay so."""
        if serving and not self._serving:
            self._host.set_handler(HOP, self._on_hop)
            log.info(
                "relaying for peers that cannot be reached: up to %d of them",
                self._limits.reservations,
            )
        elif self._serving and not serving:
            self._host.remove_handler(HOP)
        self._serving = serving

    def gone(self, peer: str) -> None:
        """`peer` has disconnected."""
        self._book.gone(peer)

    def reserved(self, peer: str) -> bool:
        """Whether `peer` can be called through us."""
        return self._serving and self._book.reserved(peer, trio.current_time())

    def statistics(self) -> RelayStatistics:
        reservations, circuits = self._book.counts(trio.current_time())
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
        """One request of a peer; a circuit lives in here until it ends."""
        peer = stream.peer
        request = await answer(
            stream, lambda stream: read_message(stream, pb.HopMessage), deadline=HOP_SECONDS
        )
        if request is None:
            self._called["malformed"] += 1
        elif not self._serving or not self._welcome(peer) or stream.relay is not None:
            self._called["refused"] += 1
            await self._refuse(stream, pb.PERMISSION_DENIED)
        elif not self._book.may_ask(peer, trio.current_time()):
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
        """For whoever is at the other end of this connection, whatever the message says."""
        if not self._book.reserve(peer, trio.current_time()):
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
        if await answer(
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
        if not self._book.reserved(called, now) or not self._welcome(called) or called == caller:
            self._called["no_reservation"] += 1
            await self._refuse(stream, pb.NO_RESERVATION)
        elif not self.allows() or not self._book.open(caller, called):
            self._called["full"] += 1
            await self._refuse(stream, pb.RESOURCE_LIMIT_EXCEEDED)
        else:
            try:
                await self._circuit(caller, called, stream)
            finally:
                self._book.close(caller, called)
        return None

    async def _circuit(self, caller: str, called: str, stream: Stream) -> None:
        """Calls `called`, then carries bytes until either end, or a limit, ends it."""
        call = pb.StopMessage(
            type=pb.StopMessage.CONNECT,
            peer=pb.PeerId(id=peer_id_bytes(caller)),
            limit=self._limit(),
        )

        async def ring(other: Stream) -> None:
            await write_message(other, call)
            reply = await read_message(other, pb.StopMessage)
            if reply.type != pb.StopMessage.STATUS or reply.status != pb.OK:
                raise PeerError(f"{called} does not take the call")

        try:
            _, other = await converse(
                self._host, called, STOP, ring, deadline=STOP_SECONDS, keep=True
            )
        except PeerError as error:
            log.debug("no circuit from %s to %s: %s", caller, called, error)
            self._called["failed"] += 1
            await self._refuse(stream, pb.CONNECTION_FAILED)
            return
        established = pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK, limit=self._limit())
        if not await answer(
            stream, lambda stream: write_message(stream, established), deadline=HOP_SECONDS
        ):
            self._called["failed"] += 1
            await other.reset()
            return
        self._called["ok"] += 1
        stream.keep_connection()
        await self._carry(stream, other)

    async def _carry(self, one: Stream, other: Stream) -> None:
        """Bytes both ways. Returns when both streams are reset; the peers' own handshake tells them
        what an end means."""
        ended = trio.Event()
        left = self._limits.circuit_bytes

        async def pump(source: Stream, sink: Stream) -> None:
            nonlocal left
            try:
                while (data := await source.read(PIECE_BYTES)) and left >= len(data):
                    left -= len(data)
                    self._bytes += len(data)
                    await self._throttle.wait(len(data))
                    if not await self._in_budget():
                        break
                    await sink.write(data)
            except PeerError as error:  # closed, reset, stalled, connection lost: an end
                log.debug("a circuit ended: %r", error)
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

    async def _in_budget(self) -> bool:
        """Waits a little for the budget to allow more. Not for long: whoever is not read from ends
        the connection, and circuits are begun again sooner than that."""
        with trio.move_on_after(BUDGET_SECONDS):
            while not self.allows():  # noqa: ASYNC110 - the budget is read, it tells nobody
                await trio.sleep(0.2)
            return True
        return False

    async def _refuse(self, stream: Stream, status: pb.Status.ValueType) -> None:
        refusal = pb.HopMessage(type=pb.HopMessage.STATUS, status=status)
        if await answer(
            stream, lambda stream: write_message(stream, refusal), deadline=HOP_SECONDS
        ):
            await stream.close()

    def _limit(self) -> pb.Limit:
        return pb.Limit(duration=self._limits.circuit_seconds, data=self._limits.circuit_bytes)


class _Throttle:
    """`rate`: bytes per second of all circuits together, 0 for no limit."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def wait(self, count: int) -> None:
        """Waits as long as `count` bytes take."""
        if self._rate:
            now = trio.current_time()
            self._free_at = max(self._free_at, now - 1.0) + count / self._rate
            if self._free_at > now:
                await trio.sleep(self._free_at - now)
