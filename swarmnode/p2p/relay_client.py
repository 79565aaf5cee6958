"""Circuit relay v2, client side: reserves at relays, accepts circuits, and dials peers through
relays.

    `Reservations` (pure) chooses a connected peer ─▶ RESERVE ─┬─ granted: dialable there ─▶ renew
                                                               └─ refused: back-off, try others
    inbound circuit  ─▶ accepted only from a relay with a reservation ─▶ handshake as responder
    outbound circuit ─▶ stream to the relay ─▶ CONNECT ─▶ handshake as initiator

The caller's peer id in the relay's message is not trusted; the inner handshake proves it.
"""

from __future__ import annotations

import collections
import logging
import random
import time
from collections.abc import Callable

import msgspec
import trio
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.addresses import Address, Circuit
from swarmnode.p2p.library.hosts import Host, UpgradedConnection
from swarmnode.p2p.library.identifiers import peer_id_bytes, peer_id_text
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.relay import HOP, STOP
from swarmnode.p2p.stream_calls import read_message, run_on_new_stream, try_on_stream, write_message

log = logging.getLogger(__name__)

RELAYS = 2
"""Number of reservations, so that one relay may fail."""
RESERVE_SECONDS = 10.0
CONNECT_SECONDS = 9.0
"""Shorter than `connection_manager.DIAL_SECONDS`, so that the reason of a failure is reported."""
SHORTEST_SECONDS = 60.0
LONGEST_SECONDS = 6 * 3600.0
"""Bounds of a grant's duration, because the relay's clock may be wrong."""
FIRST_BACKOFF = 5.0
LONGEST_BACKOFF = 600.0
POLL_INTERVAL = 30.0
POLL_INTERVAL_WITHOUT_RELAY = 5.0
"""Maximum sleep of the loop, with and without a reservation. This node may learn an address of a
peer without an event."""
CALLS = 16
"""Maximum number of inbound circuits in their handshake."""
HANDSHAKE_SECONDS = 15.0


class RelayClientStatistics(msgspec.Struct, frozen=True):
    relays: list[str] = []
    """Peer ids of the relays with a valid reservation."""
    reserved: int = 0
    """Number of grants, including renewals."""
    refused: int = 0
    calls: dict[str, int] = {}
    """Inbound circuits by outcome."""
    dials: dict[str, int] = {}
    """Outbound circuits by outcome."""


class Reservations:
    """Chooses the relays to ask and the times of renewal. Pure: `now` is monotonic time in
    seconds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._granted: dict[str, tuple[float, float]] = {}
        self._waiting: dict[str, tuple[int, float]] = {}

    def valid(self, now: float) -> list[str]:
        """Return the relays with a valid reservation."""
        return [relay for relay, (_, until) in self._granted.items() if until > now]

    def due(self, candidates: list[str], now: float) -> str | None:
        """Return the next relay to ask for a reservation, or None.

        A relay whose reservation needs renewal comes first. If there are fewer than RELAYS valid
        reservations, the first candidate without a back-off follows.
        """
        for relay, (renew, _) in self._granted.items():
            if renew <= now and self._ready(relay, now):
                return relay
        if len(self.valid(now)) < RELAYS:
            return next(
                (
                    each
                    for each in candidates
                    if each not in self._granted and self._ready(each, now)
                ),
                None,
            )
        return None

    def granted(self, relay: str, seconds: float, now: float) -> None:
        """Record a grant for `seconds`."""
        seconds = min(max(seconds, SHORTEST_SECONDS), LONGEST_SECONDS)
        self._granted[relay] = (now + seconds * self._rng.uniform(0.5, 0.75), now + seconds)
        self._waiting.pop(relay, None)

    def refused(self, relay: str, now: float) -> None:
        """Record a refusal and extend the relay's back-off."""
        failures = self._waiting.get(relay, (0, 0.0))[0] + 1
        pause = min(
            LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(failures - 1, 10)
        ) * self._rng.uniform(0.5, 1.0)
        self._waiting[relay] = (failures, now + pause)
        if relay in self._granted and self._granted[relay][1] <= now:
            del self._granted[relay]

    def forget_peer(self, relay: str) -> bool:
        """Drop the reservation of a disconnected relay. Returns True if there was one."""
        self._waiting.pop(relay, None)
        return self._granted.pop(relay, None) is not None

    def drop_all(self) -> None:
        """Drop all reservations, because this node can be reached directly."""
        self._granted.clear()

    def next_due(self, now: float) -> float:
        """Return the seconds until `due` may return something else."""
        times = [renew for renew, _ in self._granted.values()] + [
            ready for _, ready in self._waiting.values()
        ]
        return max(
            0.0, min([each for each in times if each > now], default=now + POLL_INTERVAL) - now
        )

    def _ready(self, relay: str, now: float) -> bool:
        return self._waiting.get(relay, (0, 0.0))[1] <= now


class RelayClient:
    """Relay client of one node.

    Args:
        host: the libp2p host.
        candidates: returns directly connected peers, best first.
        needed: returns True while this node needs relays.
        address_of: returns the address at which other nodes can dial a relay.
        on_change: called when own addresses have changed.
        rng: random source.
    """

    def __init__(
        self,
        host: Host,
        *,
        candidates: Callable[[], list[str]],
        needed: Callable[[], bool],
        address_of: Callable[[str], Address | None],
        on_change: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._host = host
        self._candidates = candidates
        self._needed = needed
        self._address_of = address_of
        self._on_change = on_change
        self._reservations = Reservations(rng)
        self._wake = trio.Event()
        self._handshakes = 0
        self._asked = collections.Counter[str]({"ok": 0, "refused": 0})
        self._calls = collections.Counter[str]({"ok": 0, "refused": 0, "failed": 0})
        self._dials = collections.Counter[str]({"ok": 0, "failed": 0})
        host.set_handler(STOP, self._on_stop)

    # -- being reachable

    async def run(self) -> None:
        """Keep reservations until cancelled."""
        while True:
            self._wake = trio.Event()
            if self._needed():
                await self._reserve_due()
            elif self._reservations.valid(trio.current_time()):
                self._reservations.drop_all()
                self._on_change()
            now = trio.current_time()
            content = not self._needed() or self._reservations.valid(now)
            with trio.move_on_after(
                max(
                    0.1,
                    min(
                        POLL_INTERVAL if content else POLL_INTERVAL_WITHOUT_RELAY,
                        self._reservations.next_due(now),
                    ),
                )
            ):
                await self._wake.wait()

    def wake(self) -> None:
        """Check again now, because a peer connected or the need for relays changed."""
        self._wake.set()

    def forget_peer(self, peer: str) -> None:
        """Handle the disconnection of `peer`."""
        if self._reservations.forget_peer(peer):
            self._on_change()
        self.wake()

    def addresses(self) -> list[Circuit]:
        """Return the current relay addresses of this node."""
        found = [
            (relay, self._address_of(relay))
            for relay in self._reservations.valid(trio.current_time())
        ]
        return [Circuit(address, relay) for relay, address in found if address is not None]

    def statistics(self) -> RelayClientStatistics:
        valid = self._reservations.valid(trio.current_time())
        return RelayClientStatistics(
            valid, self._asked["ok"], self._asked["refused"], dict(self._calls), dict(self._dials)
        )

    async def _reserve_due(self) -> None:
        while (
            relay := self._reservations.due(self._candidates(), trio.current_time())
        ) is not None:
            before = relay in self._reservations.valid(trio.current_time())
            try:
                seconds, _ = await run_on_new_stream(
                    self._host, relay, HOP, _request_reservation, deadline=RESERVE_SECONDS
                )
            except PeerError as error:
                log.debug("no reservation with %s: %s", relay, error)
                self._asked["refused"] += 1
                self._reservations.refused(relay, trio.current_time())
                continue
            if not self._host.is_connected(relay):  # it disconnected meanwhile
                continue
            self._asked["ok"] += 1
            self._reservations.granted(relay, seconds, trio.current_time())
            if not before:
                log.info("reachable through the relay %s", relay)
                self._on_change()

    async def _on_stop(self, stream: Stream) -> None:
        """Handle an inbound circuit until its connection ends."""
        relay = stream.peer
        expected = relay in self._reservations.valid(trio.current_time()) and stream.relay is None
        if not expected or self._handshakes >= CALLS:
            self._calls["refused"] += 1
            await stream.reset()
            return
        self._handshakes += 1
        try:
            connection = await self._accept_circuit(relay, stream)
        finally:
            self._handshakes -= 1
        self._calls["failed" if connection is None else "ok"] += 1
        if connection is None:
            await stream.reset()
        else:
            stream.keep_connection()
            await connection.wait_closed()

    async def _accept_circuit(self, relay: str, stream: Stream) -> UpgradedConnection | None:
        """Accept a circuit. Returns its connection, or None on failure."""
        caller = await try_on_stream(stream, _accept_call, deadline=HANDSHAKE_SECONDS)
        if caller is None:
            return None
        with trio.move_on_after(HANDSHAKE_SECONDS):
            try:
                return await self._host.accept_circuit(stream, relay, caller)
            except PeerError as error:
                log.debug("inbound circuit through %s failed: %s", relay, error)
        return None

    # -- calling

    async def call(self, peer: str, circuit: Circuit) -> None:
        """Connect to `peer` through a relay. Raises PeerError."""
        try:
            await self._call(peer, circuit)
        except BaseException:
            self._dials["failed"] += 1
            raise
        self._dials["ok"] += 1

    async def _call(self, peer: str, circuit: Circuit) -> None:
        if not self._host.is_connected(circuit.relay):
            await self._host.dial(circuit.relay, circuit.address)

        async def connect(stream: Stream) -> None:
            await write_message(
                stream,
                pb.HopMessage(type=pb.HopMessage.CONNECT, peer=pb.PeerId(id=peer_id_bytes(peer))),
            )
            _check(await read_message(stream, pb.HopMessage))

        _, stream = await run_on_new_stream(
            self._host, circuit.relay, HOP, connect, deadline=CONNECT_SECONDS, keep=True
        )
        await self._host.connect_through(stream, circuit.relay, peer)


async def _request_reservation(stream: Stream) -> float:
    """Request a reservation; returns its duration in seconds."""
    await write_message(stream, pb.HopMessage(type=pb.HopMessage.RESERVE))
    reply = await read_message(stream, pb.HopMessage)
    _check(reply)
    return float(reply.reservation.expire) - time.time()


async def _accept_call(stream: Stream) -> str:
    """Accept a circuit; returns the caller's peer id as reported by the relay."""
    call = await read_message(stream, pb.StopMessage)
    if call.type != pb.StopMessage.CONNECT:
        raise BadMessage("bounds", "not a call")
    caller = peer_id_text(call.peer.id)
    await write_message(stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.OK))
    return caller


def _check(reply: pb.HopMessage) -> None:
    if reply.type != pb.HopMessage.STATUS or reply.status != pb.OK:
        raise PeerError(f"the relay refused (status {reply.status})")
