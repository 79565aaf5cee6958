"""Whether others can reach us: peers are asked to dial us back (AutoNAT v1, `/libp2p/autonat/1.0.0`, wire-compatible).

    we ─ our ports ─▶ peer ─ TCP and Noise to the address it sees us at ─▶ our listener      we count it only if we saw it arrive
    we ◀─ ok, or no way ─ peer

A peer that says ok without having come is not believed: that would keep us from looking for a relay. A peer that says no may lie. The
majority of those asked counts, of those that see us from furthest away: a neighbour on the LAN says nothing about the world.

We dial back nothing but the address at which we see the asking peer, one TCP connection at a time, rarely: whoever asks must already hold a
connection from there, so nobody can send us to anybody else. (The library's service does not dial at all: it asks for a connection with a
peer that it is connected to, and so finds everybody reachable.)
"""

from __future__ import annotations

import collections
import logging
import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import trio
from libp2p.host.autonat.pb import autonat_pb2 as pb
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.errors import PeerError
from swarmnode.p2p.addresses import Address, from_socket, parse
from swarmnode.p2p.circuits import relay_of
from swarmnode.p2p.requests import close
from swarmnode.p2p.talk import answer, converse, read_message, write_message

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
"""While nobody has told us: a peer may have refused because it had just dialled a neighbour of ours behind the same router."""

Verdict = Literal["unknown", "public", "private"]


class ReachStatistics(msgspec.Struct, frozen=True):
    verdict: Verdict = "unknown"
    """`private`: nobody can dial us; we only dial out, and are called through relays."""
    observed: str = ""
    """The IP address that peers see us at, empty while unknown."""
    reachable_votes: int = 0
    unreachable_votes: int = 0
    dial_backs: dict[str, int] = {}
    """That we made for others, by outcome."""


class Votes:
    """What peers found. Pure: `now` in seconds, any monotonic clock."""

    def __init__(self) -> None:
        self._votes: collections.OrderedDict[str, tuple[bool, int, float]] = collections.OrderedDict()

    def vote(self, peer: str, reachable: bool, scope: int, now: float) -> None:
        """`scope`: of the address at which the peer sees us, or we see it."""
        self._votes.pop(peer, None)
        self._votes[peer] = (reachable, scope, now)
        while len(self._votes) > VOTERS:
            self._votes.popitem(last=False)

    def counts(self, now: float) -> tuple[int, int]:
        """(reachable, unreachable), of those that see us from furthest away."""
        recent = [(reachable, scope) for reachable, scope, at in self._votes.values() if now - at <= VOTE_SECONDS]
        furthest = max((scope for _, scope in recent), default=0)
        votes = [reachable for reachable, scope in recent if scope == furthest]
        return sum(votes), len(votes) - sum(votes)

    def verdict(self, now: float, before: Verdict = "unknown") -> Verdict:
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


class Reach:
    """`ports`: where we listen, other than on loopback alone; empty if nowhere. `observed(peer)`: the address we see a peer at, None if it
    is relayed. `changed(verdict)` is called with each new one."""

    def __init__(
        self,
        host: Any,
        nursery: trio.Nursery,
        *,
        own: str,
        ports: list[int],
        welcome: Callable[[str], bool],
        observed: Callable[[str], Address | None],
        connected: Callable[[], list[str]],
        changed: Callable[[Verdict], None],
        rng: random.Random,
        least_scope: int = 1,
    ) -> None:
        self._host = host
        self._nursery = nursery
        self._own = own
        self._ports = ports
        self._welcome = welcome
        self._observed = observed
        self._connected = connected
        self._changed = changed
        self._rng = rng
        self._least_scope = least_scope
        self._votes = Votes()
        self._pauses = Pauses()
        self._asked: dict[str, trio.Event] = {}
        self._verdict: Verdict = "unknown"
        self._own_address: Address | None = None
        self._dialling = 0
        self._served = collections.Counter[str]({"ok": 0, "unreachable": 0, "refused": 0})
        host.set_stream_handler(AUTONAT, self._on_stream)

    @property
    def verdict(self) -> Verdict:
        return self._verdict

    @property
    def own_address(self) -> Address | None:
        """The address at which peers see us, with our own port, once known."""
        return self._own_address

    def came(self, peer: str) -> None:
        """`peer` has connected to our listener, as its handshake proved."""
        if peer in self._asked:
            self._asked[peer].set()

    def alone(self) -> None:
        """No peer is left: the next one may see us in another network. The verdict stays until it has told."""
        self._votes = Votes()

    def statistics(self) -> ReachStatistics:
        yes, no = self._votes.counts(trio.current_time())
        return ReachStatistics(self._verdict, self._own_address.host if self._own_address else "", yes, no, dict(self._served))

    # -- asking

    async def run(self) -> None:
        """Asks one connected peer now and then, until cancelled."""
        while True:
            known = sum(self._votes.counts(trio.current_time())) > 0
            await trio.sleep((CHECK_EVERY_SECONDS if known else CHECK_UNKNOWN_SECONDS) * self._rng.uniform(0.5, 1.0))
            candidates = [peer for peer in self._connected() if self._askable(peer)]
            if candidates:
                await self.check(self._rng.choice(candidates))

    async def greet(self, peer: str) -> None:
        """A new peer: asked while too few have been."""
        if self._askable(peer) and sum(self._votes.counts(trio.current_time())) < CHECK_FIRST:
            await self.check(peer)

    async def check(self, peer: str) -> None:
        """Asks one connected peer. Never raises for anything the peer does."""
        seen = self._observed(peer)
        if seen is None or peer in self._asked:
            return
        if not self._ports:
            self._vote(peer, False, seen)
            return
        came = self._asked[peer] = trio.Event()
        try:
            (reachable, address), _ = await converse(self._host, self._nursery, peer, AUTONAT, self._ask, deadline=CHECK_SECONDS)
        except PeerError as error:
            log.debug("%s does not say whether we can be reached: %s", peer, error)
        else:
            if address is not None:
                self._own_address = address
            with trio.move_on_after(ARRIVAL_SECONDS):  # its answer may overtake the end of its handshake
                if reachable:
                    await came.wait()
            self._vote(peer, reachable and came.is_set(), seen)
        finally:
            del self._asked[peer]

    def _askable(self, peer: str) -> bool:
        seen = self._observed(peer)
        return seen is not None and seen.scope >= self._least_scope

    async def _ask(self, stream: Any) -> tuple[bool, Address | None]:
        """(it says that it reached us, where it sees us). Raises PeerError when it did not try."""
        told = [Multiaddr(f"/ip4/0.0.0.0/tcp/{port}").to_bytes() for port in self._ports[:PORTS]]
        info = pb.Message.PeerInfo(id=ID.from_string(self._own).to_bytes(), addrs=told)
        await write_message(stream, pb.Message(type=pb.Message.DIAL, dial=pb.Message.Dial(peer=info)))
        reply = await read_message(stream, pb.Message)
        status = reply.dialResponse.status
        if reply.type != pb.Message.DIAL_RESPONSE or status not in (pb.Message.OK, pb.Message.E_DIAL_ERROR):
            raise PeerError(f"no dial-back (status {status})")
        return status == pb.Message.OK, _address(reply.dialResponse.addr)

    def _vote(self, peer: str, reachable: bool, seen: Address) -> None:
        now = trio.current_time()
        self._votes.vote(peer, reachable, seen.scope, now)
        verdict = self._votes.verdict(now, self._verdict)
        if verdict == self._verdict:
            return
        self._verdict = verdict
        if verdict == "private":
            where = f"port {self._ports[0]} is not reachable" if self._ports else "this node listens on loopback only, it is not reachable"
            log.warning("%s from outside: running outbound-only (docs/networking.md)", where)
        else:
            log.info("reachable from outside%s", f" at {self._own_address}" if self._own_address else "")
        self._changed(verdict)

    # -- being asked

    async def _on_stream(self, stream: Any) -> None:
        request = await answer(stream, lambda stream: read_message(stream, pb.Message), deadline=CHECK_SECONDS)
        if request is None:
            return
        status, address = await self._dial_back(stream.muxed_conn, request)
        reply = pb.Message.DialResponse(status=status, statusText="", addr=b"" if address is None else Multiaddr(str(address)).to_bytes())
        response = pb.Message(type=pb.Message.DIAL_RESPONSE, dialResponse=reply)

        async def reply_to(stream: Any) -> bool:
            await write_message(stream, response)
            return True

        if await answer(stream, reply_to, deadline=CHECK_SECONDS):
            await close(stream)

    async def _dial_back(self, muxed: Any, request: pb.Message) -> tuple[int, Address | None]:
        """Dials the asking peer at the IP address we see it at. Returns the status and the address that was tried last."""
        peer = muxed.peer_id.to_base58()
        remote = muxed.get_remote_address()
        ports = list(dict.fromkeys(port for raw in list(request.dial.peer.addrs)[:8] if (port := _port(raw))))[:PORTS]
        if request.type != pb.Message.DIAL or not ports:
            return pb.Message.E_BAD_REQUEST, None
        relayed = remote is None or relay_of(muxed) is not None
        now = trio.current_time()
        if relayed or not self._welcome(peer) or self._dialling >= DIALS_AT_ONCE or not self._pauses.take(remote[0], now):
            self._served["refused"] += 1
            return pb.Message.E_DIAL_REFUSED, None
        self._dialling += 1
        try:
            for port in ports:
                address = from_socket(remote[0], port)
                if await self._reaches(peer, address):
                    self._served["ok"] += 1
                    return pb.Message.OK, address
        finally:
            self._dialling -= 1
        self._served["unreachable"] += 1
        return pb.Message.E_DIAL_ERROR, address

    async def _reaches(self, peer: str, address: Address) -> bool:
        """Whether this very peer answers there. The connection is closed after the handshake."""
        swarm = self._host.get_network()
        with trio.move_on_after(DIAL_BACK_SECONDS):
            raw = None
            try:
                multiaddr = Multiaddr(str(address))
                raw = await swarm.transport_manager.transport_for_dialing(multiaddr).dial(multiaddr)
                await swarm.upgrader.upgrade_security(raw, True, ID.from_string(peer))
                return True
            except Exception as error:  # refused, unreachable, another peer, garbage: in a dozen exception types
                log.debug("%s cannot be dialled at %s: %r", peer, address, error)
            finally:
                if raw is not None:
                    with trio.CancelScope(shield=True), trio.move_on_after(1.0):
                        await _close_raw(raw)
        return False


async def _close_raw(raw: Any) -> None:
    try:
        await raw.close()
    except Exception as error:  # it may have gone by itself
        log.debug("closing a dial-back: %r", error)


def _port(raw: bytes) -> int | None:
    """The TCP port of a binary multiaddr; None if there is none, or it goes through a relay."""
    address = _address(raw)
    return address.port if address is not None and address.port else None


def _address(raw: bytes) -> Address | None:
    """A binary multiaddr of the one kind that we use; None for any other, and for garbage."""
    if not raw or len(raw) > 256:
        return None
    try:
        return parse(str(Multiaddr(raw)))[0]
    except Exception as error:  # the parser raises what its codecs raise
        log.debug("not an address: %r", error)
        return None
