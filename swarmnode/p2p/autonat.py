"""Finds out whether other nodes can reach this node (AutoNAT v1, `/libp2p/autonat/1.0.0`,
wire-compatible).

    this node ─ own ports ─▶ peer ─ TCP and Noise to the address it observes ─▶ own listener
    this node ◀─ ok | dial error ─ peer          ok counts only if the connection arrived

A false "ok" would keep this node from looking for a relay, so "ok" counts only together with the
arrival of the connection. A peer can still lie with "dial error". The majority decides, among the
peers that see this node with the widest scope: a neighbour on the LAN cannot observe reachability
from the internet.

As a server, this node dials only the IP address at which it sees the asking peer, one TCP
connection at a time and at a low rate. The asking peer already holds a connection from that
address, so it cannot direct a dial at a third party. The library's own service does not dial; it
requests a connection to a peer that is already connected, and so reports every peer as reachable.
"""

from __future__ import annotations

import collections
import logging
import random
from collections.abc import Callable
from typing import Literal

import msgspec
import trio
from libp2p.host.autonat.pb import autonat_pb2 as pb

from swarmnode.errors import PeerError
from swarmnode.latest import Latest
from swarmnode.p2p.addresses import PRIVATE, PUBLIC, Address
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.identifiers import address_from_bytes, multiaddr_bytes, peer_id_bytes
from swarmnode.p2p.library.streams import Stream
from swarmnode.p2p.slots import RateLimiter
from swarmnode.p2p.stream_calls import read_message, run_on_new_stream, try_on_stream, write_message

log = logging.getLogger(__name__)

AUTONAT = "/libp2p/autonat/1.0.0"
DIAL_BACK_SECONDS = 5.0
CHECK_SECONDS = 12.0
ARRIVAL_SECONDS = 3.0
PORTS = 2
"""Ports dialled for one request."""
DIALS_AT_ONCE = 4
PAUSE_SECONDS = 20.0
"""Minimum interval between dial-backs to one IP address."""
MAX_VOTES = 8
"""Number of most recent votes that count. A peer has one vote; a new one replaces the old one."""
VOTE_SECONDS = 3600.0
FIRST_CHECKS = 3
"""Number of peers that are asked right after they connect; later checks are rare."""
CHECK_EVERY_SECONDS = 600.0
CHECK_UNKNOWN_SECONDS = 40.0
"""Interval between checks without any vote. A peer may have refused because it had just dialled a
neighbour behind the same router."""

Reachability = Literal["unknown", "public", "private"]


class ReachStatistics(msgspec.Struct, frozen=True):
    verdict: Reachability = "unknown"
    """`private`: no node can dial this one. It only dials out, and is dialled through relays."""
    observed: str = ""
    """The IP address at which peers see this node; empty while unknown."""
    local: bool = False
    """True if `observed` is an address of the local network. Then `public` is the verdict of peers
    there, and does not hold for strangers."""
    dial_backs: dict[str, int] = {}
    """Dial-backs made for peers, by outcome."""


class Votes:
    """Results of the dial-backs that peers made for this node. Pure: `now` is in seconds on any
    monotonic clock."""

    def __init__(self) -> None:
        self._votes = Latest[str, tuple[bool, int, float]](MAX_VOTES)

    def vote(self, peer: str, reachable: bool, scope: int, now: float) -> None:
        """Record a vote. `scope` is the scope of the address at which this node sees the peer."""
        self._votes[peer] = (reachable, scope, now)

    def counts(self, now: float) -> tuple[int, int]:
        """Return (reachable, unreachable) votes among the peers with the widest scope."""
        recent = [
            (reachable, scope)
            for reachable, scope, at in self._votes.values()
            if now - at <= VOTE_SECONDS
        ]
        furthest = max((scope for _, scope in recent), default=0)
        votes = [reachable for reachable, scope in recent if scope == furthest]
        return sum(votes), len(votes) - sum(votes)

    def verdict(self, now: float, before: Reachability = "unknown") -> Reachability:
        """Return the majority; a tie keeps `before`, so that one slow or lying peer does not end a
        relay reservation."""
        yes, no = self.counts(now)
        if yes == no:
            return before
        return "public" if yes > no else "private"


class ReachabilityCheck:
    """Asks peers to dial back and derives the reachability of this node.

    Args:
        host: the libp2p host.
        connections: the open connections.
        ports: listening ports other than on loopback; empty if there is none.
        changed: called with each new verdict.
        rng: random source.
    """

    def __init__(
        self,
        host: Host,
        connections: ConnectionTable,
        ports: list[int],
        changed: Callable[[Reachability], None],
        rng: random.Random,
    ) -> None:
        self.ports = ports
        self.verdict: Reachability = "unknown"
        self.own_address: Address | None = None
        """The address at which peers see this node, with its own port; None while unknown."""
        self._host = host
        self._connections = connections
        self._changed = changed
        self._rng = rng
        self._votes = Votes()
        self._asked: dict[str, trio.Event] = {}

    def arrived(self, peer: str) -> None:
        """Record that `peer` has authenticated over a direct inbound connection."""
        if peer in self._asked:
            self._asked[peer].set()

    def reset_votes(self) -> None:
        """Clear the votes, because no peer is connected and the next one may be in another network.
        The verdict stays until that peer votes."""
        self._votes = Votes()

    def votes(self) -> tuple[int, int]:
        """Return the counts (reachable, unreachable)."""
        return self._votes.counts(trio.current_time())

    async def run(self) -> None:
        """Ask one random connected peer at intervals, until cancelled."""
        while True:
            await trio.sleep(
                (CHECK_EVERY_SECONDS if sum(self.votes()) else CHECK_UNKNOWN_SECONDS)
                * self._rng.uniform(0.5, 1.0)
            )
            candidates = [peer for peer in self._connections.peers() if self._can_ask(peer)]
            if candidates:
                await self.check(self._rng.choice(candidates))

    async def greet(self, peer: str) -> None:
        """Ask a new peer while there are fewer than FIRST_CHECKS votes."""
        if self._can_ask(peer) and sum(self.votes()) < FIRST_CHECKS:
            await self.check(peer)

    async def check(self, peer: str) -> None:
        """Ask one connected peer. Never raises for a fault of the peer."""
        seen = self._connections.observed(peer)
        if seen is None or peer in self._asked:
            return
        if not self.ports:
            self._vote(peer, False, seen)
            return
        arrived = self._asked[peer] = trio.Event()
        try:
            (reachable, address), _ = await run_on_new_stream(
                self._host, peer, AUTONAT, self._ask, deadline=CHECK_SECONDS
            )
        except PeerError as error:
            log.debug("reachability check with %s failed: %s", peer, error)
        else:
            if address is not None:
                self.own_address = address
            # the response may overtake the end of the dial-back's handshake
            with trio.move_on_after(ARRIVAL_SECONDS):
                if reachable:
                    await arrived.wait()
            self._vote(peer, reachable and arrived.is_set(), seen)
        finally:
            del self._asked[peer]

    def _can_ask(self, peer: str) -> bool:
        """Exclude peers with a hole-punched connection: the router admits them while it may block
        every other peer."""
        seen = self._connections.observed(peer)
        return seen is not None and seen.scope >= PRIVATE and not self._connections.is_punched(peer)

    async def _ask(self, stream: Stream) -> tuple[bool, Address | None]:
        """Return (the peer reports success, the address at which it sees this node). Raises
        PeerError if the peer did not try."""
        advertised = [multiaddr_bytes(f"/ip4/0.0.0.0/tcp/{port}") for port in self.ports[:PORTS]]
        info = pb.Message.PeerInfo(id=peer_id_bytes(self._host.peer_id), addrs=advertised)
        await write_message(
            stream, pb.Message(type=pb.Message.DIAL, dial=pb.Message.Dial(peer=info))
        )
        reply = await read_message(stream, pb.Message)
        status = reply.dialResponse.status
        if reply.type != pb.Message.DIAL_RESPONSE or status not in (
            pb.Message.OK,
            pb.Message.E_DIAL_ERROR,
        ):
            raise PeerError(f"no dial-back (status {status})")
        return status == pb.Message.OK, _address(reply.dialResponse.addr)

    def _vote(self, peer: str, reachable: bool, seen: Address) -> None:
        now = trio.current_time()
        self._votes.vote(peer, reachable, seen.scope, now)
        verdict = self._votes.verdict(now, self.verdict)
        if verdict == self.verdict:
            return
        self.verdict = verdict
        if verdict == "private":
            where = (
                f"port {self.ports[0]} is not reachable"
                if self.ports
                else "this node listens on loopback only, it is not reachable"
            )
            log.warning("%s from outside: running outbound-only (docs/networking.md)", where)
        else:
            own = self.own_address
            where = "in the local network" if own and own.scope < PUBLIC else "from outside"
            log.info("reachable %s%s", where, f" at {own}" if own else "")
        self._changed(verdict)


class DialBack:
    """Dials peers back on request.

    Args:
        host: the libp2p host.
        is_allowed: returns False for peers that are not served.

    Attributes:
        outcomes: number of requests by outcome.
    """

    def __init__(self, host: Host, is_allowed: Callable[[str], bool]) -> None:
        self.outcomes = collections.Counter[str]({"ok": 0, "unreachable": 0, "refused": 0})
        self._host = host
        self._is_allowed = is_allowed
        self._limiter = RateLimiter(1, PAUSE_SECONDS)
        self._dialling = 0
        host.set_handler(AUTONAT, self._on_stream)

    async def _on_stream(self, stream: Stream) -> None:
        request = await try_on_stream(
            stream, lambda stream: read_message(stream, pb.Message), deadline=CHECK_SECONDS
        )
        if request is None:
            return
        status, address = await self.dial_back(stream, request)
        reply = pb.Message.DialResponse(
            status=status,
            statusText="",
            addr=b"" if address is None else multiaddr_bytes(str(address)),
        )
        response = pb.Message(type=pb.Message.DIAL_RESPONSE, dialResponse=reply)
        if await try_on_stream(
            stream, lambda stream: write_message(stream, response), deadline=CHECK_SECONDS
        ):
            await stream.close()

    async def dial_back(
        self, stream: Stream, request: pb.Message
    ) -> tuple[pb.Message.ResponseStatus.ValueType, Address | None]:
        """Dial the asking peer at its observed IP address. Returns the status and the address tried
        last."""
        advertised = [_address(raw) for raw in list(request.dial.peer.addrs)[:8]]
        ports = list(
            dict.fromkeys(each.port for each in advertised if each is not None and each.port)
        )[:PORTS]
        if request.type != pb.Message.DIAL or not ports:
            return pb.Message.E_BAD_REQUEST, None
        remote = stream.remote if stream.relay is None else None
        busy = self._dialling >= DIALS_AT_ONCE or not self._is_allowed(stream.peer)
        if remote is None or busy or not self._limiter.allow(remote.host, trio.current_time()):
            self.outcomes["refused"] += 1
            return pb.Message.E_DIAL_REFUSED, None
        self._dialling += 1
        try:
            for port in ports:
                address = Address(remote.kind, remote.host, port)
                if await self.reaches(stream.peer, address):
                    self.outcomes["ok"] += 1
                    return pb.Message.OK, address
        finally:
            self._dialling -= 1
        self.outcomes["unreachable"] += 1
        return pb.Message.E_DIAL_ERROR, address

    async def reaches(self, peer: str, address: Address) -> bool:
        """Return True if this peer answers at `address`. The connection is closed after the
        handshake."""
        with trio.move_on_after(DIAL_BACK_SECONDS):
            try:
                await self._host.probe(peer, address)
                return True
            except PeerError as error:
                log.debug("%s cannot be dialled at %s: %s", peer, address, error)
        return False


def _address(raw: bytes) -> Address | None:
    """Decode a binary multiaddr. Returns None for other address kinds, relayed addresses and
    garbage."""
    try:
        return address_from_bytes(raw)
    except PeerError as error:
        log.debug("not an address: %s", error)
        return None
