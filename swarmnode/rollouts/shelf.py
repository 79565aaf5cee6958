"""The shelf: the groups that a node can give to others, its own and those that it admitted. Pure.

    put ─▶ positions 1, 2, 3, … of this life ─ listing since a cursor ─▶ at most 14: up to 7 own
                                                                        ones, then one per author
                                             └ give, by content id ──▶ at most 16, and 1 MiB

Each answer is charged to the peer's allowance, at four times its cost where that peer never gave a
useful group. Everything in a listing can be checked by its reader, and every group is signed by its
author.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

import msgspec

from swarmnode.p2p.budget import TokenBucket
from swarmnode.rollouts import sampling
from swarmnode.wire import limits
from swarmnode.wire.listings import (
    GroupResponse,
    GroupsRequest,
    GroupsResponse,
    Listed,
    ListingRequest,
    ListingResponse,
)

MOST_GROUPS = 256
MOST_BYTES = 32 * 2**20
LISTED_SECONDS = 1800.0
"""Age up to which a group is listed: half of the age at which admission refuses it."""
OWN_LISTED = limits.LISTED // 2
"""Places of a listing that own groups have before others': no other node has them first."""
PEER_BYTES_PER_SECOND = 256 * 2**10
"""Sustained rate of one peer's allowance, with a burst of ten seconds of it: twelve groups of
100 KB in five seconds."""
REQUEST_BYTES = 16 * 2**10
"""Charge of a request beside its answer's bytes: a request takes about 3 ms of CPU."""
TAKER_FACTOR = 4.0
"""Factor on all charges of a peer of which no group was ever admitted."""
MOST_PEERS = 1024


class ShelfStatistics(msgspec.Struct, frozen=True):
    groups: int = 0
    bytes: int = 0


class _Entry(msgspec.Struct, frozen=True):
    position: int
    listed: Listed
    envelope: bytes
    source: bytes
    """Raw key of the peer that gave it; the author's for an own group."""


class Shelf:
    """Groups by content id, oldest first. `now` is in Unix seconds.

    Args:
        own_key: this node's raw public key.
        swarm: the swarm's id, 32 bytes.
        life: 8 random bytes, drawn when the process started.
        groups: capacity in groups.
        size: capacity in bytes of envelopes.
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
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._bytes = 0
        self._position = 0

    def put(self, envelope: bytes, listed: Listed, source: bytes = b"") -> None:
        """Store a group. The oldest groups of the author with most make room for it.

        Args:
            envelope: the group as its author signed it.
            listed: its line in listings.
            source: raw key of the peer that gave it, to which it is not listed; may be empty.
        """
        if listed.content in self._entries or len(envelope) > self.size:
            return
        self._position += 1
        self._entries[listed.content] = _Entry(self._position, listed, envelope, source)
        self._bytes += len(envelope)
        while len(self._entries) > self.groups or self._bytes > self.size:
            self._drop(self._most())

    def __contains__(self, content: bytes) -> bool:
        return content in self._entries

    def has_news(self, request: ListingRequest, reader: bytes) -> bool:
        """Return whether an answer to `request` is worth waking a waiting poll: an own group of
        this node is beyond the cursor. Groups of others are listed with the next answer, since
        their authors list them themselves.

        Args:
            request: the waiting poll.
            reader: raw key of the peer that polls; empty where it has none.
        """
        return any(entry.listed.author == self._own_key for entry in self._since(request, reader))

    def listing(self, request: ListingRequest, now: float, reader: bytes = b"") -> ListingResponse:
        """Return the newest groups beyond the request's cursor, of every group where the cursor is
        of another life or ahead of this one: at most OWN_LISTED own groups, then one of each author
        before a second of any. Groups that `reader` made or gave are left out."""
        if request.swarm != self.swarm:
            return ListingResponse("unknown", self.life, 0, [])
        self._expire(now)
        own: list[_Entry] = []
        others: list[_Entry] = []
        for entry in self._since(request, reader):
            (own if entry.listed.author == self._own_key else others).append(entry)
        chosen = sampling.spread_over_peers(
            [*own[OWN_LISTED:], *others],
            limits.LISTED,
            _author,
            limits.LISTED,
            already=own[:OWN_LISTED],
        )
        listed = [entry.listed for entry in sorted(chosen, key=lambda entry: entry.position)]
        return ListingResponse("ok", self.life, self._position, listed)

    def _since(self, request: ListingRequest, reader: bytes) -> Iterator[_Entry]:
        """Yield the entries beyond the request's cursor that `reader` neither made nor gave, the
        newest first."""
        mine = request.life == self.life and request.position <= self._position
        known = request.position if mine else 0
        for entry in reversed(self._entries.values()):
            if entry.position <= known:
                return
            if not reader or reader not in (entry.listed.author, entry.source):
                yield entry

    def busy(self) -> ListingResponse:
        """Return the answer to a peer whose allowance is used up: it keeps its cursor."""
        return ListingResponse("busy", self.life, 0, [])

    def give(self, request: GroupsRequest, now: float) -> GroupsResponse:
        """Return each requested group: the first that fit 1 MiB together, `busy` for the others,
        `unknown` for those that are not here."""
        self._expire(now)
        room, answers = limits.GROUP_BYTES, []
        for content in request.contents:
            entry = self._entries.get(content)
            if entry is None:
                answers.append(GroupResponse("unknown"))
            elif len(entry.envelope) > room:
                answers.append(GroupResponse("busy"))
            else:
                room -= len(entry.envelope)
                answers.append(GroupResponse("ok", entry.envelope))
        return GroupsResponse(answers)

    def statistics(self) -> ShelfStatistics:
        return ShelfStatistics(len(self._entries), self._bytes)

    def _expire(self, now: float) -> None:
        """Drop old groups from the front. Admission order is nearly the order of age; an old group
        behind a newer one waits."""
        while (
            self._entries
            and now - next(iter(self._entries.values())).listed.created_at / 1000 > LISTED_SECONDS
        ):
            self._drop(next(iter(self._entries)))

    def _most(self) -> bytes:
        """Return the oldest group of the author with most. Own groups make room only where they are
        more than half of all: identities are free, and no other node has the own groups."""
        by_bytes = len(self._entries) <= self.groups
        most: Counter[bytes] = Counter()
        for entry in self._entries.values():
            most[entry.listed.author] += len(entry.envelope) if by_bytes else 1
        if 2 * most[self._own_key] <= most.total():
            del most[self._own_key]
        author = max(most, key=most.__getitem__)
        return next(
            content for content, entry in self._entries.items() if entry.listed.author == author
        )

    def _drop(self, content: bytes) -> None:
        self._bytes -= len(self._entries.pop(content).envelope)


def _author(entry: _Entry) -> bytes:
    return entry.listed.author


class Allowances:
    """A token bucket of bytes for each of the MOST_PEERS peers that asked last."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def has_room(self, peer: str, now: float) -> bool:
        """Return whether `peer` is answered now; one in debt is not."""
        return self._bucket(peer, now).level(now) > 0

    def charge(self, peer: str, size: int, gives: bool, now: float) -> None:
        """Charge an answer of `size` bytes to `peer`. gives: whether a group of it was ever
        admitted."""
        cost = REQUEST_BYTES + size
        self._bucket(peer, now).charge(cost if gives else int(TAKER_FACTOR * cost), now)

    def _bucket(self, peer: str, now: float) -> TokenBucket:
        bucket = self._buckets.pop(peer, None) or TokenBucket(PEER_BYTES_PER_SECOND, now)
        self._buckets[peer] = bucket
        if len(self._buckets) > MOST_PEERS:
            self._buckets.popitem(last=False)
        return bucket
