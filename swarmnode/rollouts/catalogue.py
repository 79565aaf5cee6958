"""What this node can give to whoever asks: its own newest groups and those of others that it
admitted, as they were signed. Pure.

    put ─▶ positions 1, 2, 3, … of this life ─ listing since a cursor ─▶ at most 14: own ones, and
    of each author the newest
                                             └ groups by content id ──▶ at most 16, and 1 MiB
    each answer ─▶ charged to the peer's allowance; four times where it never gave anything

A listing says nothing that its reader cannot check, and a group is signed by its author: all that
is left to a liar is not to answer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import msgspec

from swarmnode.p2p.budget import TokenBucket
from swarmnode.rollouts import sampling
from swarmnode.wire import limits
from swarmnode.wire.listings import (
    GroupsRequest,
    GroupsResponse,
    Listed,
    ListingRequest,
    ListingResponse,
)
from swarmnode.wire.messages import FetchResponse

MOST_GROUPS = 256
MOST_BYTES = 32 * 2**20
LISTED_SECONDS = 1800.0
"""A group older than this is listed no more: half of the age at which nobody takes it."""
OWN_LISTED = limits.NEWEST // 2
"""Own groups that have a place in a listing whatever others made: nobody else has them first."""
PEER_BYTES_PER_SECOND = 256 * 2**10
"""What one peer is given, sustained; ten seconds of it at once. Twelve groups of 100 KB in five
seconds."""
REQUEST_BYTES = 16 * 2**10
"""What a request costs beside its answer: it takes ten milliseconds of CPU whatever it brings."""
TAKER_FACTOR = 4.0
"""How much dearer everything is for a peer of which no group was ever admitted."""
MOST_PEERS = 1024


class CatalogueStatistics(msgspec.Struct, frozen=True):
    groups: int = 0
    bytes: int = 0


class _Kept(msgspec.Struct, frozen=True):
    position: int
    listed: Listed
    envelope: bytes


class Catalogue:
    """Groups by content id, the oldest first. `now` is Unix seconds.

    own_key: this node's; swarm: its id; life: 8 bytes, drawn when the process started.
    """

    def __init__(
        self,
        own_key: bytes,
        swarm: bytes,
        life: bytes,
        groups: int = MOST_GROUPS,
        size: int = MOST_BYTES,
    ) -> None:
        self._own_key = own_key
        self.swarm = swarm
        self.life = life
        self.groups = groups
        self.size = size
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._bytes = 0
        self._position = 0

    def put(self, envelope: bytes, listed: Listed) -> None:
        """Keep a group that may be given to anybody; the oldest of the author with most make room
        for it."""
        if listed.content in self._kept or len(envelope) > self.size:
            return
        self._position += 1
        self._kept[listed.content] = _Kept(self._position, listed, envelope)
        self._bytes += len(envelope)
        while len(self._kept) > self.groups or self._bytes > self.size:
            self._drop(self._most())

    def listing(self, request: ListingRequest, now: float) -> ListingResponse:
        """What is new since the request's cursor: everything, where that is of another life, or
        ahead of this one. OWN_LISTED of this node's own at most, then one of each author before any
        has two, the newest first."""
        if request.swarm != self.swarm:
            return ListingResponse("unknown", self.life, 0, [])
        self._expire(now)
        known = (
            request.position
            if request.life == self.life and request.position <= self._position
            else 0
        )
        own: list[_Kept] = []
        others: list[_Kept] = []
        for kept in reversed(self._kept.values()):
            if kept.position <= known:
                break
            (own if kept.listed.author == self._own_key else others).append(kept)
        rest = [*own[OWN_LISTED:], *others]
        chosen = sampling.spread_over_peers(
            rest, limits.NEWEST, _author, limits.NEWEST, already=own[:OWN_LISTED]
        )
        listed = [kept.listed for kept in sorted(chosen, key=lambda kept: kept.position)]
        return ListingResponse("ok", self.life, self._position, listed)

    def busy(self) -> ListingResponse:
        """The answer to whoever has to wait: its cursor stays as it is."""
        return ListingResponse("busy", self.life, 0, [])

    def give(self, request: GroupsRequest, now: float) -> GroupsResponse:
        """Each group that is asked for: the first that fit 1 MiB together, `busy` for the others,
        `unknown` where it is not here."""
        self._expire(now)
        room, answers = limits.GROUP_BYTES, []
        for content in request.contents:
            kept = self._kept.get(content)
            if kept is None:
                answers.append(FetchResponse("unknown"))
            elif len(kept.envelope) > room:
                answers.append(FetchResponse("busy"))
            else:
                room -= len(kept.envelope)
                answers.append(FetchResponse("ok", kept.envelope))
        return GroupsResponse(answers)

    def statistics(self) -> CatalogueStatistics:
        return CatalogueStatistics(len(self._kept), self._bytes)

    def _expire(self, now: float) -> None:
        """They came in the order in which they were admitted, which is nearly that of their ages:
        an old one behind a newer one waits."""
        while (
            self._kept
            and now - next(iter(self._kept.values())).listed.created_at / 1000 > LISTED_SECONDS
        ):
            self._drop(next(iter(self._kept)))

    def _most(self) -> bytes:
        """The oldest group of the author with most. This node's own make room only where they are
        more than half: an author has a name for each of its groups if it likes, and nobody else has
        what this node made."""
        by_bytes = len(self._kept) <= self.groups
        most: Counter[bytes] = Counter()
        for kept in self._kept.values():
            most[kept.listed.author] += len(kept.envelope) if by_bytes else 1
        if 2 * most[self._own_key] <= most.total():
            del most[self._own_key]
        author = max(most, key=most.__getitem__)
        return next(content for content, kept in self._kept.items() if kept.listed.author == author)

    def _drop(self, content: bytes) -> None:
        self._bytes -= len(self._kept.pop(content).envelope)


def _author(kept: _Kept) -> bytes:
    return kept.listed.author


class Allowances:
    """How much each peer may still be given: a bucket for each of the MOST_PEERS that asked
    last."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def has_room(self, peer: str, now: float) -> bool:
        """Whether `peer` is answered now. Whoever is in debt waits until it is not."""
        bucket = self._buckets.pop(peer, None) or TokenBucket(PEER_BYTES_PER_SECOND, now)
        self._buckets[peer] = bucket
        if len(self._buckets) > MOST_PEERS:
            self._buckets.popitem(last=False)
        return bucket.level(now) > 0

    def charge(self, peer: str, size: int, gives: bool, now: float) -> None:
        """`peer`, which has just been found to have room, was given `size` bytes. gives: whether
        anything was ever admitted of it."""
        cost = REQUEST_BYTES + size
        self._buckets[peer].charge(cost if gives else int(TAKER_FACTOR * cost), now)
