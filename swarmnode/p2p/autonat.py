"""Whether others can reach us: peers are asked to dial us back (AutoNAT v1,
`/libp2p/autonat/1.0.0`, wire-compatible).

    we ─ our ports ─▶ peer ─ TCP and Noise to the address it sees us at ─▶ our listener      we
    count it only if we saw it arrive
    we ◀─ ok, or no way ─ peer

A peer that says ok without having come is not believed: that would keep us from looking for a
relay. A peer that says no may lie. The majority of those asked counts, of those that see us from
furthest away: a neighbour on the LAN says nothing about the world.

We dial back nothing but the address at which we see the asking peer, one TCP connection at a time,
rarely: whoever asks must already hold a connection from there, so nobody can send us to anybody
else. (The library's service does not dial at all: it asks for a connection with a peer that it is
connected to, and so finds everybody reachable.)
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
from swarmnode.p2p.addresses import PRIVATE, Address
from swarmnode.p2p.connections import ConnectionTable
from swarmnode.p2p.conversations import answer, converse, read_message, write_message
from swarmnode.p2p.library.hosts import Host
from swarmnode.p2p.library.identifiers import address_of_bytes, multiaddr_bytes, peer_id_bytes
from swarmnode.p2p.library.streams import Stream

log = logging.getLogger(__name__)

AUTONAT = "/libp2p/autonat/1.0.0"
DIAL_BACK_SECONDS = 5.0
CHECK_SECONDS = 12.0
ARRIVAL_SECONDS = 3.0
PORTS = 2
"""Ports dialled for one request."""
DIALS_AT_ONCE = 4
PAUSE_SECONDS = 20.0
"""Between two dial-backs to one IP address."""
PAUSED = 4096
VOTERS = 8
"""The latest votes count; an older one of the same peer is replaced."""
VOTE_SECONDS = 3600.0
CHECK_FIRST = 3
"""Peers asked as they connect, before asking becomes rare."""
CHECK_EVERY_SECONDS = 600.0
CHECK_UNKNOWN_SECONDS = 40.0
"""While nobody has told us: a peer may have refused because it had just dialled a neighbour of ours
behind the same router."""

Reachability = Literal["unknown", "public", "private"]


class ReachStatistics(msgspec.Struct, frozen=True):
    verdict: Reachability = "unknown"
    """`private`: nobody can dial us; we only dial out, and are called through relays."""
    observed: str = ""
    """The IP address that peers see us at, empty while unknown."""
    reachable_votes: int = 0
    unreachable_votes: int = 0
    dial_backs: dict[str, int] = {}
    """Dials that we made because peers asked for them, by outcome."""


class Votes:
    """What peers found. Pure: `now` in seconds, any monotonic clock."""

    def __init__(self) -> None:
        self._votes: collections.OrderedDict[str, tuple[bool, int, float]] = (
            collections.OrderedDict()
        )

    def vote(self, peer: str, reachable: bool, scope: int, now: float) -> None:
        """`scope`: of the address at which the peer sees us, or we see it."""
        self._votes.pop(peer, None)
        self._votes[peer] = (reachable, scope, now)
        while len(self._votes) > VOTERS:
            self._votes.popitem(last=False)

    def counts(self, now: float) -> tuple[int, int]:
        """(reachable, unreachable), of those that see us from furthest away."""
        recent = [
            (reachable, scope)
            for reachable, scope, at in self._votes.values()
            if now - at <= VOTE_SECONDS
        ]
        furthest = max((scope for _, scope in recent), default=0)
        votes = [reachable for reachable, scope in recent if scope == furthest]
        return sum(votes), len(votes) - sum(votes)

    def verdict(self, now: float, before: Reachability = "unknown") -> Reachability:
        """A tie changes nothing: one peer that is too slow, or lies, does not end a relay."""
        yes, no = self.counts(now)
        if yes == no:
            return before
        return "public" if yes > no else "private"


class Pauses:
    """One dial-back per IP address and PAUSE_SECONDS. Pure."""

    def __init__(self) -> None:
        self._until: collections.OrderedDict[str, float] = collections.OrderedDict()

    def take(self, host: str, now: float) -> bool:
        if self._until.get(host, now) > now:
            return False
        self._until.pop(host, None)
        self._until[host] = now + PAUSE_SECONDS
        while len(self._until) > PAUSED:
            self._until.popitem(last=False)
        return True


class ReachabilityCheck:
    """Asks peers to dial us back, and draws the conclusion.

    `ports`: where we listen, other than on loopback alone; empty if nowhere.
    `changed(reachability)` is called with each new one. Peers that see us from less far than
    `least_scope` are not asked.
    """

    def __init__(
        self,
        host: Host,
        connections: ConnectionTable,
        ports: list[int],
        changed: Callable[[Reachability], None],
        rng: random.Random,
        least_scope: int = PRIVATE,
    ) -> None:
        self.ports = ports
        self.least_scope = least_scope
        self.verdict: Reachability = "unknown"
        self.own_address: Address | None = None
        """The address at which peers see us, with our own port, once known."""
        self._host = host
        self._connections = connections
        self._changed = changed
        self._rng = rng
        self._votes = Votes()
        self._asked: dict[str, trio.Event] = {}

    def arrived(self, peer: str) -> None:
        """`peer` has connected to our listener, as its handshake proved."""
        if peer in self._asked:
            self._asked[peer].set()

    def alone(self) -> None:
        """No peer is left: the next one may see us in another network. The verdict stays until it
        has told."""
        self._votes = Votes()

    def votes(self) -> tuple[int, int]:
        """(reachable, unreachable)"""
        return self._votes.counts(trio.current_time())

    async def run(self) -> None:
        """Asks one connected peer now and then, until cancelled."""
        while True:
            await trio.sleep(
                (CHECK_EVERY_SECONDS if sum(self.votes()) else CHECK_UNKNOWN_SECONDS)
                * self._rng.uniform(0.5, 1.0)
            )
            candidates = [peer for peer in self._connections.peers() if self._askable(peer)]
            if candidates:
                await self.check(self._rng.choice(candidates))

    async def greet(self, peer: str) -> None:
        """A new peer: asked while too few have been."""
        if self._askable(peer) and sum(self.votes()) < CHECK_FIRST:
            await self.check(peer)

    async def check(self, peer: str) -> None:
        """Asks one connected peer. Never raises for anything the peer does."""
        seen = self._connections.observed(peer)
        if seen is None or peer in self._asked:
            return
        if not self.ports:
            self._vote(peer, False, seen)
            return
        arrived = self._asked[peer] = trio.Event()
        try:
            (reachable, address), _ = await converse(
                self._host, peer, AUTONAT, self._ask, deadline=CHECK_SECONDS
            )
        except PeerError as error:
            log.debug("%s does not say whether we can be reached: %s", peer, error)
        else:
            if address is not None:
                self.own_address = address
            # its answer may overtake the end of its handshake
            with trio.move_on_after(ARRIVAL_SECONDS):
                if reachable:
                    await arrived.wait()
            self._vote(peer, reachable and arrived.is_set(), seen)
        finally:
            del self._asked[peer]

    def _askable(self, peer: str) -> bool:
        """Not those for which we punched a hole: our router lets them in, whoever else it keeps
        out."""
        seen = self._connections.observed(peer)
        return (
            seen is not None
            and seen.scope >= self.least_scope
            and not self._connections.is_punched(peer)
        )

    async def _ask(self, stream: Stream) -> tuple[bool, Address | None]:
        """(it says that it reached us, where it sees us). Raises PeerError when it did not try."""
        told = [multiaddr_bytes(f"/ip4/0.0.0.0/tcp/{port}") for port in self.ports[:PORTS]]
        info = pb.Message.PeerInfo(id=peer_id_bytes(self._host.peer_id), addrs=told)
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
            log.info(
                "reachable from outside%s", f" at {self.own_address}" if self.own_address else ""
            )
        self._changed(verdict)


class DialBack:
    """Dials peers back that ask for it. `welcome(peer)`: False for who is not to be served.
    `outcomes`: counts."""

    def __init__(self, host: Host, welcome: Callable[[str], bool]) -> None:
        self.outcomes = collections.Counter[str]({"ok": 0, "unreachable": 0, "refused": 0})
        self._host = host
        self._welcome = welcome
        self._pauses = Pauses()
        self._dialling = 0
        host.set_handler(AUTONAT, self._on_stream)

    async def _on_stream(self, stream: Stream) -> None:
        request = await answer(
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
        if await answer(
            stream, lambda stream: write_message(stream, response), deadline=CHECK_SECONDS
        ):
            await stream.close()

    async def dial_back(
        self, stream: Stream, request: pb.Message
    ) -> tuple[pb.Message.ResponseStatus.ValueType, Address | None]:
        """Dials the asking peer at the IP address we see it at. Returns the status and the address
        that was tried last."""
        told = [_address(raw) for raw in list(request.dial.peer.addrs)[:8]]
        ports = list(dict.fromkeys(each.port for each in told if each is not None and each.port))[
            :PORTS
        ]
        if request.type != pb.Message.DIAL or not ports:
            return pb.Message.E_BAD_REQUEST, None
        remote = stream.remote if stream.relay is None else None
        busy = self._dialling >= DIALS_AT_ONCE or not self._welcome(stream.peer)
        if remote is None or busy or not self._pauses.take(remote.host, trio.current_time()):
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
        """Whether this very peer answers there. The connection is closed after the handshake."""
        with trio.move_on_after(DIAL_BACK_SECONDS):
            try:
                await self._host.probe(peer, address)
                return True
            except PeerError as error:
                log.debug("%s cannot be dialled at %s: %s", peer, address, error)
        return False


def _address(raw: bytes) -> Address | None:
    """A binary multiaddr of the one kind that we use; None for any other, for one through a relay,
    and for garbage."""
    try:
        return address_of_bytes(raw)
    except PeerError as error:
        log.debug("not an address: %s", error)
        return None
