"""The known peers, and when to dial which. Pure: no sockets and no clock; `now` is monotonic time
in seconds.

    learned ──▶ due ──▶ dialling ──▶ connected ──▶ due (after a random delay)
                 ▲          │ failed
                 └ back-off ┘  … until hopeless: forgotten (never a bootstrap peer)

Bootstrap peers are dialled without a limit on attempts. While no peer is connected, every back-off
is capped like theirs and no peer is forgotten, because the own network has probably failed.
Addresses reported by strangers are bounded in number, per peer and per network prefix.
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
"""Sources of peers, best first. A peer keeps its best source."""
DropReason = Literal["exchanged", "full"]
"""Purpose of dropping a connected peer: to meet another peer, or to make room for new peers."""
DROP_REASONS: tuple[str, ...] = get_args(DropReason)

MAX_PEERS = 1024
ADDRESSES_PER_PEER = 8
PEERS_PER_PREFIX = 8
"""Limit for peers of one /24 or /48 network that are known from the book or from other peers only.
mDNS and bootstrap are exempt, because a LAN is one prefix."""
PEERS_PER_RELAY = 64
"""The same limit for peers behind one relay."""
DIRECT_FIRST = 2
"""Direct addresses to try before the first relay address."""
OUTBOUND_SHARE = 2
"""1/OUTBOUND_SHARE of the connected peers must have been dialled by this node. Otherwise peers that
dial often enough would choose the node's neighbourhood."""
GUEST_SHARE = 4
"""One inbound peer is reported to others per GUEST_SHARE outbound peers."""
FIRST_BACKOFF = 0.5
BOOTSTRAP_BACKOFF = 15.0
OTHER_BACKOFF = 300.0
PINNED_BACKOFF = 4.0
"""Maximum back-off of pinned peers."""
IDLE_BOOTSTRAP_BACKOFF = 1200.0
"""Maximum back-off of bootstrap peers while enough other peers are connected. A swarm has few
bootstrap peers and many members."""
TRIES_TO_GET_IN = 40
"""Number of failed dials to a bootstrap peer before other peers' addresses are accepted instead,
about eight minutes. A full bootstrap peer has free places again within one minute."""
COOL_DOWN_SECONDS = 1800.0
"""A dropped peer is not dialled again for this time, unless no other peer is left."""
ANCHOR_SHARE = 4
"""1/ANCHOR_SHARE of the outbound peers are the most recently seen ones; the others are random."""
ALIKE_SHARE = 8
"""At most 1/ALIKE_SHARE of the target is dialled in one /24 or /48 network or behind one relay,
while there are other peers to dial."""
STABLE_SECONDS = 30.0
"""A shorter connection counts as a failure: the peer is full, has banned this node, or does not
work."""
HOPELESS_NEVER_CONNECTED = 5
"""Number of failed dials after which a peer without any earlier connection is forgotten."""
HOPELESS_SECONDS = 7 * 86400.0
"""A peer with an earlier connection is forgotten after this time without another one."""
HINT_SECONDS = 60.0
"""Minimum interval between reports that shorten the back-off of a failing peer."""


@dataclasses.dataclass(slots=True)
class Peer:
    """State of one known peer. `addresses` are in dialling order, working ones first."""

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
    cooling_until: float = -math.inf
    worked: set[str] = dataclasses.field(default_factory=set)
    """Addresses at which this node reached the peer."""
    claimed: set[str] = dataclasses.field(default_factory=set)
    """Addresses that the peer reported for itself, with its observed IP address."""

    def seen_at(self, now: float) -> float:
        """Return `now` while the peer is connected, else the time of its last connection; −∞ if
        never."""
        return now if self.connections else self.last_seen


@dataclasses.dataclass(frozen=True)
class Dial:
    """An order to dial one peer now, at these addresses in this order."""

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
    """Number of addresses dropped because a bound was reached."""
    dropped: dict[str, int] = {}
    """Number of peers dropped for other peers, by entry of DROP_REASONS."""


class PeerTable:
    """The known peers of one node.

    Args:
        own: peer id of this node, which is never dialled.
        target: number of peers to keep connected, half of them dialled by this node.
        rng: random source.
        may_connect: (peer, now) → False for a banned peer, which is neither stored nor dialled.
    """

    def __init__(
        self,
        own: str,
        target: int,
        rng: random.Random,
        *,
        may_connect: Callable[[str, float], bool] = lambda peer, now: True,
    ) -> None:
        self._own = own
        self.target = target
        self._rng = rng
        self._may_connect = may_connect
        self._peers: dict[str, Peer] = {}
        self._key = rng.randbytes(16)
        self._pinned: frozenset[str] = frozenset()
        self._dials = self._failures = self._forgotten = self._refused = 0
        self._dropped = dict.fromkeys(DROP_REASONS, 0)

    # -- learning of peers

    def add(self, peer: str, address: str, source: str, now: float) -> bool:
        """Store an address of `peer`. Returns False if the peer is this node or unwanted, the
        address is known, or a bound is reached."""
        if peer == self._own or (source != "bootstrap" and not self._may_connect(peer, now)):
            return False
        known = self._peers.get(peer)
        if known is None:
            prefix = parse_any(address)[0].prefix
            if not self._make_room(peer, prefix, source):
                self._refused += 1
                return False
            self._peers[peer] = Peer(
                peer, source, [address], due=now + self._initial_delay(source), prefix=prefix
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

    def add_self_reported(self, peer: str, address: str, now: float) -> None:
        """Store an address that a connected peer reported for itself, with its observed IP
        address."""
        self.add(peer, address, "exchange", now)
        if (known := self._peers.get(peer)) is not None and address in known.addresses:
            known.claimed.add(address)

    def restore(self, peer: str, addresses: list[str], last_seen: float, now: float) -> None:
        """Add a peer from the book. `last_seen` is before `now`."""
        for address in addresses:
            self.add(peer, address, "book", now)
        if (known := self._peers.get(peer)) is not None:
            known.last_seen = max(known.last_seen, last_seen)

    def pin(self, peers: Iterable[str], now: float) -> None:
        """Pin `peers` in place of the peers of the last call. Pinned peers are dialled now and
        redialled after a disconnect, even if the target number of peers is reached."""
        before, self._pinned = self._pinned, frozenset(peers)
        for peer in self._pinned - before:
            if (
                (known := self._peers.get(peer)) is not None
                and known.addresses
                and not known.connections
            ):
                known.due = min(known.due, now)

    def cool_down(self, peer: str, now: float, why: DropReason) -> None:
        """Drop `peer` in favour of others: do not dial it for COOL_DOWN_SECONDS."""
        self._dropped[why] += 1
        if (known := self._peers.get(peer)) is not None:
            known.cooling_until = now + COOL_DOWN_SECONDS

    def accepts_reports(self, peer: str) -> bool:
        """Return True if addresses that `peer` reports are accepted.

        They are accepted from outbound peers. They are accepted from inbound peers only while there
        are too few outbound peers, and only after TRIES_TO_GET_IN failed dials to the bootstrap
        peers. Otherwise peers that dial this node would choose its neighbourhood.
        """
        known = self._peers.get(peer)
        if known is None or not known.inbound:
            return known is not None
        ways_in = self.bootstrap()
        tried = not ways_in or any(
            each.last_seen > -math.inf or each.failures >= TRIES_TO_GET_IN for each in ways_in
        )
        return tried and self._outbound() < self.target // OUTBOUND_SHARE

    # -- dialling

    def has_fresh_peers(self, now: float) -> bool:
        """Return True if there is another peer to dial in place of a connected one."""
        fresh = lambda each: (
            each.addresses
            and not each.connections
            and not each.failures
            and each.cooling_until <= now
        )
        return any(fresh(each) for each in self._peers.values())

    def to_dial(self, now: float, limit: int = 8) -> list[Dial]:
        """Return at most `limit` peers to dial now, and mark them as dialling. Order: pinned,
        bootstrap, then as `_dial_order`."""
        dialling = sum(1 for each in self._peers.values() if each.dialling)
        missing = self._missing() - dialling
        due = [
            each
            for each in self._peers.values()
            if each.due <= now and not each.dialling and not each.connections and each.addresses
        ]
        due.sort(key=self._dial_order())
        dials: list[Dial] = []
        for each in due:
            pinned = each.peer in self._pinned
            if len(dials) >= limit or (missing <= 0 and each.source != "bootstrap" and not pinned):
                break
            if not self._may_connect(each.peer, now):
                each.due = now + OTHER_BACKOFF
                continue
            if (
                missing <= 0
                and not pinned
                and (self._bootstrap_connected() or now - each.last_seen < IDLE_BOOTSTRAP_BACKOFF)
            ):
                each.due = now + IDLE_BOOTSTRAP_BACKOFF * self._rng.uniform(0.5, 1.0)
                continue
            each.dialling = True
            missing -= 1
            self._dials += 1
            dials.append(Dial(each.peer, _sort_addresses(each.addresses), each.source))
        return dials

    def next_due(self, now: float) -> float:
        """Return the seconds until `to_dial` may return something new; infinite if only an event
        can change that."""
        enough = self._missing() <= 0
        always = lambda each: each.source == "bootstrap" or each.peer in self._pinned
        candidates = [each for each in self._peers.values() if always(each) or not enough]
        waiting = [each.due for each in candidates if not each.dialling and not each.connections]
        return max(0.0, min(waiting) - now) if waiting else math.inf

    def record_dialled(self, peer: str, address: str, now: float) -> None:
        """Record that a dial to `address` reached this peer. `record_connected` records the
        connection itself."""
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

    def cancel_dial(self, peer: str) -> None:
        """Record that a dial was not needed, because the peer had connected meanwhile."""
        if (known := self._peers.get(peer)) is not None:
            known.dialling = False

    def record_failed(self, peer: str, now: float) -> None:
        """Record that the dials to all addresses failed."""
        self._failures += 1
        if (known := self._peers.get(peer)) is None:
            return
        known.dialling = False
        known.failures += 1
        known.worked.clear()
        if self._is_hopeless(known, now):
            self._forget(known)
        else:
            known.due = now + self._backoff(known)

    # -- connections

    def record_connected(self, peer: str, *, inbound: bool, now: float) -> None:
        """Record a new connection. An inbound peer has no address until it reports one."""
        known = self._peers.get(peer)
        if known is None:
            if not self._make_room(None, None, "exchange"):
                self._refused += 1
                return
            known = self._peers[peer] = Peer(peer, "exchange", [], due=math.inf, prefix=None)
        if known.connections == 0:
            known.connected_at = now
            known.inbound = inbound
        known.connections += 1
        known.last_seen = now

    def record_disconnected(self, peer: str, now: float) -> None:
        """Record a closed connection."""
        if (known := self._peers.get(peer)) is None or known.connections == 0:
            return
        known.connections -= 1
        if known.connections:
            return
        known.last_seen = now
        known.failures = 0 if now - known.connected_at >= STABLE_SECONDS else known.failures + 1
        if known.addresses and (known.source == "bootstrap" or self._may_connect(peer, now)):
            known.due = max(
                now + self._backoff(known),
                known.cooling_until if known.source != "bootstrap" else now,
            )
        else:
            self._forget(known)

    # -- queries

    def connected(self) -> list[str]:
        return [each.peer for each in self._peers.values() if each.connections]

    def get(self, peer: str) -> Peer | None:
        return self._peers.get(peer)

    def peers_to_share(
        self,
        limit: int,
        *,
        exclude: str,
        scope: int,
        also: Callable[[str], list[str]] = lambda peer: [],
    ) -> list[tuple[str, list[str]]]:
        """Return (peer, addresses) of a random `limit` of the connected peers, to send to another
        peer.

        Only addresses with at least `scope` are sent, and only those that this node dialled or
        observed: passing on reports would let one liar direct the whole swarm at a victim. A
        working relay address proves nothing about the relay, which may already have been connected.
        Once enough outbound peers are connected, few inbound peers are sent; otherwise a peer that
        dials every node would be advertised by every node. A node without bootstrap peers is a
        bootstrap peer itself and sends all its inbound peers, which are the swarm.

        Args:
            limit: maximum number of peers.
            exclude: the receiver, which is excluded.
            scope: LOOPBACK, PRIVATE or PUBLIC.
            also: returns further addresses of a peer.
        """
        found: list[tuple[str, list[str]]] = []
        inbound: list[tuple[str, list[str]]] = []
        for each in self._peers.values():
            if each.connections and each.peer != exclude:
                sure = each.claimed | {
                    address for address in each.worked if not is_circuit(address)
                }
                shared = [
                    address
                    for address in each.addresses
                    if address in sure and _scope(address) >= scope
                ] + also(each.peer)
                if shared:
                    (inbound if each.inbound else found).append((each.peer, shared))
        if self.bootstrap() and len(found) >= self.target // OUTBOUND_SHARE:
            inbound = self._rng.sample(inbound, min(len(found) // GUEST_SHARE, len(inbound)))
        found += inbound
        return self._rng.sample(found, min(limit, len(found)))

    def for_book(self, limit: int, now: float) -> list[Peer]:
        """Return the peers to save, most recently seen first."""
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
            dropped=dict(self._dropped),
        )

    # -- rules

    def _missing(self) -> int:
        """Return the number of peers to dial until the target is met, in all and for outbound
        connections."""
        connected = [each for each in self._peers.values() if each.connections]
        return max(self.target - len(connected), self.target // OUTBOUND_SHARE - self._outbound())

    def _outbound(self) -> int:
        return sum(1 for each in self._peers.values() if each.connections and not each.inbound)

    def _dial_order(self) -> Callable[[Peer], tuple[bool, bool, bool, float, float]]:
        """Return the sort key for dialling: pinned peers first, then bootstrap peers, then prefixes
        and relays below their limit. Within these, the most recently seen peers come first until
        there are enough anchors, then any."""
        outbound = [
            each
            for each in self._peers.values()
            if each.dialling or (each.connections and not each.inbound)
        ]
        alike: Counter[str | None] = Counter(
            each.prefix for each in outbound if each.prefix is not None
        )
        most = max(1, self.target // ALIKE_SHARE)
        anchored = len(outbound) >= self.target // ANCHOR_SHARE
        return lambda each: (
            each.peer not in self._pinned,
            each.source != "bootstrap",
            alike[each.prefix] >= most,
            self._rng.random() if anchored else -each.last_seen,
            each.due,
        )

    def _backoff(self, known: Peer) -> float:
        """Return the back-off in seconds: exponential in the failures and capped. Half of it is
        random, so that the members of a swarm do not dial a lost bootstrap peer in step."""
        if known.peer in self._pinned:
            return min(
                PINNED_BACKOFF, FIRST_BACKOFF * 2.0 ** min(known.failures, 20)
            ) * self._rng.uniform(0.5, 1.0)
        patient = known.source != "bootstrap" and self.connected()
        longest = OTHER_BACKOFF if patient else BOOTSTRAP_BACKOFF
        return min(longest, FIRST_BACKOFF * 2.0 ** min(known.failures, 20)) * self._rng.uniform(
            0.5, 1.0
        )

    def _is_hopeless(self, known: Peer, now: float) -> bool:
        if known.source == "bootstrap" or known.peer in self._pinned or not self.connected():
            return False
        if known.last_seen == -math.inf:
            return known.failures >= HOPELESS_NEVER_CONNECTED
        return (
            now - known.last_seen > HOPELESS_SECONDS and known.failures >= HOPELESS_NEVER_CONNECTED
        )

    def _make_room(self, peer: str | None, prefix: str | None, source: str) -> bool:
        """Return True if one more peer may be stored, after forgetting the least useful one if the
        table is full.

        Among the never reached peers, those with the lowest hash under a random key are kept. This
        is a uniform sample of all reported peers. The number of reports of a peer does not matter.

        Args:
            peer: the new peer; None if it is connected already.
            prefix: its network prefix.
            source: one of SOURCES.
        """
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
        spare = [each for each in self._peers.values() if self._is_evictable(each)]
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

    def _is_evictable(self, each: Peer) -> bool:
        return (
            each.source != "bootstrap"
            and each.peer not in self._pinned
            and not each.connections
            and not each.dialling
        )

    def _forget(self, known: Peer) -> None:
        del self._peers[known.peer]
        self._forgotten += 1

    def _initial_delay(self, source: str) -> float:
        return 0.0 if source == "bootstrap" else self._rng.uniform(0.0, 0.25)

    def bootstrap(self) -> list[Peer]:
        return [each for each in self._peers.values() if each.source == "bootstrap"]

    def _bootstrap_connected(self) -> bool:
        return any(each.connections for each in self.bootstrap())


def _scope(address: str) -> int:
    return parse_any(address)[0].scope


def _sort_addresses(known: list[str]) -> tuple[str, ...]:
    """Return direct addresses first, but at most DIRECT_FIRST of them before the relay
    addresses."""
    direct = [each for each in known if not is_circuit(each)]
    return (
        *direct[:DIRECT_FIRST],
        *(each for each in known if is_circuit(each)),
        *direct[DIRECT_FIRST:],
    )
