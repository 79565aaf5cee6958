"""Which peers there are, and when to dial which. Pure: no sockets, no clock; `now` is any monotonic
time in seconds.

    heard of ──▶ due ──▶ dialling ──▶ connected ──▶ due (at once, with jitter)
                  ▲          │ failed
                  └ back-off ┘  … until hopeless: forgotten (never a bootstrap peer)

Bootstrap peers are dialled for ever. While no peer at all is connected every back-off is capped
like theirs and nobody is forgotten: then it is more likely our network that is down than everybody
else's. What strangers tell us is bounded in number, per peer and per prefix.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import msgspec

from swarmnode.p2p.addresses import is_circuit, parse_any

SOURCES = ("bootstrap", "mdns", "book", "exchange")
"""Where we heard of a peer, best first. A peer keeps the best source it was heard from."""
LetGo = Literal["exchanged", "full"]
"""Why a connected peer is let go: for another that is to be met, or so that newcomers find a
place."""
LET_GO: tuple[str, ...] = get_args(LetGo)

MAX_PEERS = 1024
ADDRESSES_PER_PEER = 8
PEERS_PER_PREFIX = 8
"""Peers of one /24 or /48 that are remembered from other peers' word alone. mDNS and bootstrap are
exempt: a LAN is one prefix."""
PEERS_PER_RELAY = 64
"""The same for peers that are known behind one relay only."""
DIRECT_FIRST = 2
"""Direct addresses to try before one at a relay."""
OUTBOUND_SHARE = 2
"""One in so many of the peers to keep connected is of our own choosing, however many have dialled
us: else whoever dials us often enough decides whom we know."""
GUEST_SHARE = 4
"""One peer that dialled us is told of for so many that we dialled."""
FIRST_BACKOFF = 0.5
BOOTSTRAP_BACKOFF = 15.0
OTHER_BACKOFF = 300.0
HELD_BACKOFF = 4.0
"""Peers that somebody here depends on are retried this often."""
IDLE_BOOTSTRAP_BACKOFF = 1200.0
"""Bootstrap peers are retried this seldom when enough peers are connected without them: a swarm has
few of them and many members."""
TRIES_TO_GET_IN = 40
"""A bootstrap peer that never let us in is dialled so often, for some eight minutes, before others
are asked instead: a full one has places again within one."""
REST_SECONDS = 1800.0
"""A peer that was let go is not dialled for so long, unless nobody else is left."""
ANCHOR_SHARE = 4
"""One in so many of the peers to keep connected is one that was seen last; the others are drawn."""
ALIKE_SHARE = 8
"""One in so many of them, at most, is dialled in one /24 or /48 or behind one relay, while there
are others to dial."""
STABLE_SECONDS = 30.0
"""A connection shorter than this counts as a failure: the peer is full, has banned us, or does not
work."""
HOPELESS_NEVER_CONNECTED = 5
"""Failed dials after which a peer we never reached is forgotten."""
HOPELESS_SECONDS = 7 * 86400.0
"""A peer we did reach is forgotten when we have not for this long."""
HINT_SECONDS = 60.0
"""Hearing of a failing peer again shortens its back-off at most this often."""


@dataclasses.dataclass(slots=True)
class Peer:
    """What we know of one peer. `addresses`: where to dial it, those that worked first."""

    peer: str
    source: str
    addresses: list[str]
    due: float
    prefix: str | None
    failures: int = 0
    dialling: bool = False
    connections: int = 0
    inbound: bool = False
    connected_at: float = -math.inf
    last_seen: float = -math.inf
    hinted: float = -math.inf
    rests_until: float = -math.inf
    worked: set[str] = dataclasses.field(default_factory=set)
    """Addresses at which we reached it."""
    claimed: set[str] = dataclasses.field(default_factory=set)
    """Addresses that it told of itself, at the IP address we see it at."""

    def seen_at(self, now: float) -> float:
        """`now` while it is connected, else when it last was; −∞ if never."""
        return now if self.connections else self.last_seen


@dataclasses.dataclass(frozen=True)
class Dial:
    """One peer to dial now, at these addresses in this order."""

    peer: str
    addresses: tuple[str, ...]
    source: str


class PeerStatistics(msgspec.Struct, frozen=True):
    known: int = 0
    known_by_source: dict[str, int] = {}
    connected: int = 0
    inbound: int = 0
    outbound: int = 0
    dialling: int = 0
    dials: int = 0
    dial_failures: int = 0
    forgotten: int = 0
    refused: int = 0
    """Addresses not remembered because a bound was reached."""
    let_go: dict[str, int] = {}
    """Peers disconnected for others, by why, of LET_GO."""


class PeerTable:
    """`own`: our peer id, never dialled. `target`: peers to keep connected, as far as there are
    that many, half of them dialled by us. `wanted(peer, now)`: False for one we want nothing to do
    with, for now; it is neither remembered nor dialled."""

    def __init__(
        self,
        own: str,
        target: int,
        rng: random.Random,
        *,
        wanted: Callable[[str, float], bool] = lambda peer, now: True,
    ) -> None:
        self._own = own
        self._target = target
        self._rng = rng
        self._wanted = wanted
        self._peers: dict[str, Peer] = {}
        self._key = rng.randbytes(16)
        self._held: frozenset[str] = frozenset()
        self._dials = self._failures = self._forgotten = self._refused = 0
        self._let_go = dict.fromkeys(LET_GO, 0)

    # -- hearing of peers

    def add(self, peer: str, address: str, source: str, now: float) -> bool:
        """Remembers where `peer` can be dialled. False if it is us, not wanted, already known
        there, or a bound is reached."""
        if peer == self._own or (source != "bootstrap" and not self._wanted(peer, now)):
            return False
        known = self._peers.get(peer)
        if known is None:
            prefix = parse_any(address)[0].prefix
            if not self._room(peer, prefix, source):
                self._refused += 1
                return False
            self._peers[peer] = Peer(
                peer, source, [address], due=now + self._jitter_start(source), prefix=prefix
            )
            return True
        known.source = min(known.source, source, key=SOURCES.index)
        if (
            known.failures
            and not known.connections
            and source != "book"
            and now - known.hinted >= HINT_SECONDS
        ):
            known.hinted = now
            known.due = min(known.due, now + self._rng.uniform(0.0, 2.0))
        if address in known.addresses:
            return False
        if len(known.addresses) >= ADDRESSES_PER_PEER:
            stale = [each for each in known.addresses if each not in known.worked]
            if not stale:
                self._refused += 1
                return False
            known.addresses.remove(stale[-1])
            known.claimed.discard(stale[-1])
        known.addresses.append(address)
        return True

    def claim(self, peer: str, address: str, now: float) -> None:
        """A connected peer says that it listens there, at the IP address we see it at."""
        self.add(peer, address, "exchange", now)
        if (known := self._peers.get(peer)) is not None and address in known.addresses:
            known.claimed.add(address)

    def restore(self, peer: str, addresses: list[str], last_seen: float, now: float) -> None:
        """A peer from the book. `last_seen` is in the past of `now`."""
        for address in addresses:
            self.add(peer, address, "book", now)
        if (known := self._peers.get(peer)) is not None:
            known.last_seen = max(known.last_seen, last_seen)

    def hold(self, peers: Iterable[str], now: float) -> None:
        """Somebody here depends on these, and no longer on those of the last call: dial them at
        once and for ever, whatever the target."""
        before, self._held = self._held, frozenset(peers)
        for peer in self._held - before:
            if (
                (known := self._peers.get(peer)) is not None
                and known.addresses
                and not known.connections
            ):
                known.due = min(known.due, now)

    def rest(self, peer: str, now: float, why: LetGo) -> None:
        """`peer` is let go for others."""
        self._let_go[why] += 1
        if (known := self._peers.get(peer)) is not None:
            known.rests_until = now + REST_SECONDS

    def heeds(self, peer: str) -> bool:
        """Whether what `peer` tells of others is taken: it is of our own choosing, or those are too
        few, and not for want of a place at our bootstrap peers, who are tried again first. Whoever
        dials us shall not decide whom we know."""
        known = self._peers.get(peer)
        if known is None or not known.inbound:
            return known is not None
        ways_in = self.bootstrap()
        tried = not ways_in or any(
            each.last_seen > -math.inf or each.failures >= TRIES_TO_GET_IN for each in ways_in
        )
        return tried and self._outbound() < self._target // OUTBOUND_SHARE

    # -- dialling

    def has_others(self, now: float) -> bool:
        """Whether there is anybody to dial instead of a peer that is connected."""
        fresh = lambda each: (
            each.addresses
            and not each.connections
            and not each.failures
            and each.rests_until <= now
        )
        return any(fresh(each) for each in self._peers.values())

    def to_dial(self, now: float, limit: int = 8) -> list[Dial]:
        """At most `limit` peers whose time has come, bootstrap first, then those seen last; each is
        dialling until told otherwise."""
        dialling = sum(1 for each in self._peers.values() if each.dialling)
        missing = self._missing() - dialling
        due = [
            each
            for each in self._peers.values()
            if each.due <= now and not each.dialling and not each.connections and each.addresses
        ]
        due.sort(key=self._by_merit())
        dials: list[Dial] = []
        for each in due:
            held = each.peer in self._held
            if len(dials) >= limit or (missing <= 0 and each.source != "bootstrap" and not held):
                break
            if not self._wanted(each.peer, now):
                each.due = now + OTHER_BACKOFF
                continue
            if (
                missing <= 0
                and not held
                and (self._bootstrap_connected() or now - each.last_seen < IDLE_BOOTSTRAP_BACKOFF)
            ):
                each.due = now + IDLE_BOOTSTRAP_BACKOFF * self._rng.uniform(0.5, 1.0)
                continue
            each.dialling = True
            missing -= 1
            self._dials += 1
            dials.append(Dial(each.peer, _in_order(each.addresses), each.source))
        return dials

    def next_due(self, now: float) -> float:
        """Seconds until `to_dial` may return something new; infinite if only an event can change
        that."""
        enough = self._missing() <= 0
        always = lambda each: each.source == "bootstrap" or each.peer in self._held
        candidates = [each for each in self._peers.values() if always(each) or not enough]
        waiting = [each.due for each in candidates if not each.dialling and not each.connections]
        return max(0.0, min(waiting) - now) if waiting else math.inf

    def dialed_ok(self, peer: str, address: str, now: float) -> None:
        """A dial to `address` ended in a connection with this very peer. (`connected` tells of the
        connection itself.)"""
        if (known := self._peers.get(peer)) is None:
            return
        known.dialling = False
        known.worked.add(address)
        known.last_seen = now
        if address in known.addresses:
            known.addresses.remove(address)
        known.addresses.insert(0, address)
        del known.addresses[ADDRESSES_PER_PEER:]
        known.worked &= set(known.addresses)
        known.claimed &= set(known.addresses)

    def undialled(self, peer: str) -> None:
        """A dial was not needed after all: the peer had connected to us meanwhile."""
        if (known := self._peers.get(peer)) is not None:
            known.dialling = False

    def failed(self, peer: str, now: float) -> None:
        """A dial to all of its addresses failed."""
        self._failures += 1
        if (known := self._peers.get(peer)) is None:
            return
        known.dialling = False
        known.failures += 1
        known.worked.clear()
        if self._hopeless(known, now):
            self._forget(known)
        else:
            known.due = now + self._backoff(known)

    # -- connections

    def connected_to(self, peer: str, *, inbound: bool, now: float) -> None:
        """A connection with `peer` was opened. An inbound peer is known without an address until it
        tells one."""
        known = self._peers.get(peer)
        if known is None:
            if not self._room(None, None, "exchange"):
                self._refused += 1
                return
            known = self._peers[peer] = Peer(peer, "exchange", [], due=math.inf, prefix=None)
        if known.connections == 0:
            known.connected_at = now
            known.inbound = inbound
        known.connections += 1
        known.last_seen = now

    def disconnected(self, peer: str, now: float) -> None:
        """A connection with `peer` was closed."""
        if (known := self._peers.get(peer)) is None or known.connections == 0:
            return
        known.connections -= 1
        if known.connections:
            return
        known.last_seen = now
        known.failures = 0 if now - known.connected_at >= STABLE_SECONDS else known.failures + 1
        if known.addresses and (known.source == "bootstrap" or self._wanted(peer, now)):
            known.due = max(
                now + self._backoff(known),
                known.rests_until if known.source != "bootstrap" else now,
            )
        else:
            self._forget(known)

    # -- asking

    def connected(self) -> list[str]:
        return [each.peer for each in self._peers.values() if each.connections]

    def get(self, peer: str) -> Peer | None:
        return self._peers.get(peer)

    def good(
        self,
        limit: int,
        *,
        apart_from: str,
        scope: int,
        also: Callable[[str], list[str]] = lambda peer: [],
    ) -> list[tuple[str, list[str]]]:
        """Peers to tell another of: connected now, a random `limit` of them, with addresses that
        reach at least as far as `scope`; where we dialled enough of them, few that dialled us: else
        whoever dials everybody is told of by all. Whoever has no bootstrap peer is one: everybody
        dials it, so that its guests are the swarm.

        Only what we dialled or saw ourselves is told: hearsay passed on would let one liar send the
        whole swarm to dial its victim. That a call through a relay came about does not prove the
        relay's address: we may have been connected to it. `also(peer)`: more to tell.
        """
        found: list[tuple[str, list[str]]] = []
        guests: list[tuple[str, list[str]]] = []
        for each in self._peers.values():
            if each.connections and each.peer != apart_from:
                sure = each.claimed | {
                    address for address in each.worked if not is_circuit(address)
                }
                told = [
                    address
                    for address in each.addresses
                    if address in sure and _scope(address) >= scope
                ] + also(each.peer)
                if told:
                    (guests if each.inbound else found).append((each.peer, told))
        if self.bootstrap() and len(found) >= self._target // OUTBOUND_SHARE:
            guests = self._rng.sample(guests, min(len(found) // GUEST_SHARE, len(guests)))
        found += guests
        return self._rng.sample(found, min(limit, len(found)))

    def for_book(self, limit: int, now: float) -> list[Peer]:
        """Peers worth remembering over a restart, those seen last first."""
        kept = [
            each for each in self._peers.values() if each.addresses and each.last_seen > -math.inf
        ]
        kept.sort(key=lambda each: each.seen_at(now), reverse=True)
        return kept[:limit]

    def statistics(self) -> PeerStatistics:
        connected = [each for each in self._peers.values() if each.connections]
        inbound = sum(1 for each in connected if each.inbound)
        return PeerStatistics(
            known=len(self._peers),
            known_by_source={
                source: sum(1 for each in self._peers.values() if each.source == source)
                for source in SOURCES
            },
            connected=len(connected),
            inbound=inbound,
            outbound=len(connected) - inbound,
            dialling=sum(1 for each in self._peers.values() if each.dialling),
            dials=self._dials,
            dial_failures=self._failures,
            forgotten=self._forgotten,
            refused=self._refused,
            let_go=dict(self._let_go),
        )

    # -- rules

    def _missing(self) -> int:
        """Peers to dial until there are enough: in all, and of those that we dialled."""
        connected = [each for each in self._peers.values() if each.connections]
        return max(self._target - len(connected), self._target // OUTBOUND_SHARE - self._outbound())

    def _outbound(self) -> int:
        return sum(1 for each in self._peers.values() if each.connections and not each.inbound)

    def _by_merit(self) -> Callable[[Peer], tuple[bool, bool, bool, float, float]]:
        """Whom to dial first: those that are depended on, bootstrap peers, those of prefixes and
        relays that we have not enough of; and of these the ones that were seen last, as long as
        there are few anchors, and any afterwards."""
        ours = [
            each
            for each in self._peers.values()
            if each.dialling or (each.connections and not each.inbound)
        ]
        alike: Counter[str | None] = Counter(
            each.prefix for each in ours if each.prefix is not None
        )
        most = max(1, self._target // ALIKE_SHARE)
        anchored = len(ours) >= self._target // ANCHOR_SHARE
        return lambda each: (
            each.peer not in self._held,
            each.source != "bootstrap",
            alike[each.prefix] >= most,
            self._rng.random() if anchored else -each.last_seen,
            each.due,
        )

    def _backoff(self, known: Peer) -> float:
        """Seconds: exponential in the failures, capped, half of it jitter so that a swarm does not
        dial its lost bootstrap in step."""
        if known.peer in self._held:
            return min(
                HELD_BACKOFF, FIRST_BACKOFF * 2.0 ** min(known.failures, 20)
            ) * self._rng.uniform(0.5, 1.0)
        patient = known.source != "bootstrap" and self.connected()
        longest = OTHER_BACKOFF if patient else BOOTSTRAP_BACKOFF
        return min(longest, FIRST_BACKOFF * 2.0 ** min(known.failures, 20)) * self._rng.uniform(
            0.5, 1.0
        )

    def _hopeless(self, known: Peer, now: float) -> bool:
        if known.source == "bootstrap" or known.peer in self._held or not self.connected():
            return False
        if known.last_seen == -math.inf:
            return known.failures >= HOPELESS_NEVER_CONNECTED
        return (
            now - known.last_seen > HOPELESS_SECONDS and known.failures >= HOPELESS_NEVER_CONNECTED
        )

    def _room(self, peer: str | None, prefix: str | None, source: str) -> bool:
        """Whether one more peer may be remembered, after making room by forgetting the least
        useful. Of those that we never reached, `peer` among them, those stay whose hash under our
        own key is least: a sample of all that were ever told of, however often anybody was. `peer`
        None: it is connected."""
        hearsay = ("book", "exchange")
        if source in hearsay and prefix is not None:
            neighbours = sum(
                1
                for each in self._peers.values()
                if each.prefix == prefix and each.source in hearsay
            )
            if neighbours >= (PEERS_PER_RELAY if prefix.startswith("relay ") else PEERS_PER_PREFIX):
                return False
        if len(self._peers) < MAX_PEERS:
            return True
        spare = [each for each in self._peers.values() if self._may_go(each)]
        if not spare:
            return False
        last = min(spare, key=lambda each: (each.last_seen, -self._rank(each.peer)))
        if (
            peer is not None
            and source in hearsay
            and last.last_seen == -math.inf
            and self._rank(peer) > self._rank(last.peer)
        ):
            return False
        self._forget(last)
        return True

    def _rank(self, peer: str) -> int:
        return int.from_bytes(
            hashlib.blake2b(peer.encode(), key=self._key, digest_size=8).digest(), "big"
        )

    def _may_go(self, each: Peer) -> bool:
        return (
            each.source != "bootstrap"
            and each.peer not in self._held
            and not each.connections
            and not each.dialling
        )

    def _forget(self, known: Peer) -> None:
        del self._peers[known.peer]
        self._forgotten += 1

    def _jitter_start(self, source: str) -> float:
        return 0.0 if source == "bootstrap" else self._rng.uniform(0.0, 0.25)

    def bootstrap(self) -> list[Peer]:
        return [each for each in self._peers.values() if each.source == "bootstrap"]

    def _bootstrap_connected(self) -> bool:
        return any(each.connections for each in self.bootstrap())


def _scope(address: str) -> int:
    return parse_any(address)[0].scope


def _in_order(known: list[str]) -> tuple[str, ...]:
    """Direct ones first, but no long row of dead ones before the first relay."""
    direct = [each for each in known if not is_circuit(each)]
    return (
        *direct[:DIRECT_FIRST],
        *(each for each in known if is_circuit(each)),
        *direct[DIRECT_FIRST:],
    )
