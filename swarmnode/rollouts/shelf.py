"""The shelf: the groups that a node serves to peers, its own and admitted ones. Pure.

    put ─▶ positions 1, 2, 3, … of this life ─ listing since a cursor ─▶ at most 14 groups: up to 7
                                                                        own, then one per author
                                             └ give, by content id ───▶ at most 16 groups and 1 MiB

Each answer is charged to the peer's allowance. A peer that never made an admitted group is charged
four times as much.
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
    ListedGroup,
    ListingRequest,
    ListingResponse,
)

MOST_GROUPS = 256
"""Capacity in groups."""
MOST_BYTES = 32 * 2**20
"""Capacity in bytes of envelopes."""
LISTED_SECONDS = 1800.0
"""Age at which a group leaves the shelf: half of the age at which admission refuses it."""
OWN_LISTED = limits.LISTED // 2
"""Places of a listing reserved for own groups. No other node has these before this node lists
them."""
PEER_BYTES_PER_SECOND = 256 * 2**10
"""Rate of one peer's allowance, with a burst of ten seconds of it. It admits twelve groups of 100
KB in five seconds."""
REQUEST_BYTES = 16 * 2**10
"""Charge of a request in addition to the bytes of its answer: a request takes about 3 ms of CPU."""
TAKER_FACTOR = 4.0
"""Factor on all charges of a peer that never made an admitted group."""
MOST_PEERS = 1024
"""Peers whose allowance is remembered."""


class ShelfStatistics(msgspec.Struct, frozen=True):
    """Occupancy of the shelf."""

    groups: int = 0
    bytes: int = 0


class _Entry(msgspec.Struct, frozen=True):
    position: int
    listed: ListedGroup
    envelope: bytes
    source: bytes
    """Raw key of the holder it was fetched from; the author's for an own group."""


class Shelf:
    """Groups by content id, in the order of their positions. `now` is in Unix seconds.

    Args:
        own_key: This node's raw public key.
        swarm: The swarm's id, 32 bytes.
        life: 8 random bytes, drawn when the process started.
        groups: Capacity in groups.
        size: Capacity in bytes of envelopes.
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

    def put(self, envelope: bytes, listed: ListedGroup, source: bytes = b"") -> None:
        """Store a group. If the shelf is full, drop the oldest groups of the author with most.

        Args:
            envelope: The group as its author signed it.
            listed: Its entry in listings.
            source: Raw key of the holder it was fetched from, to which it is not listed. May be
                empty.
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
        """Return True if an own group of this node is beyond the cursor of `request`.

        Only own groups wake a held poll. Groups of other authors are listed with the next answer,
        because their authors list them too.

        Args:
            request: The held poll.
            reader: Raw key of the peer that polls; empty if it is unknown.
        """
        return any(entry.listed.author == self._own_key for entry in self._since(request, reader))

    def listing(self, request: ListingRequest, now: float, reader: bytes = b"") -> ListingResponse:
        """Return the newest groups beyond the cursor of `request`.

        At most OWN_LISTED own groups come first, then one group per author before a second of any.
        Groups that `reader` made or gave are excluded. A cursor of another life, or ahead of this
        shelf, counts as 0.
        """
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
        """Yield the entries beyond the cursor of `request` that `reader` neither made nor gave, the
        newest first."""
        mine = request.life == self.life and request.position <= self._position
        known = request.position if mine else 0
        for entry in reversed(self._entries.values()):
            if entry.position <= known:
                return
            if not reader or reader not in (entry.listed.author, entry.source):
                yield entry

    def busy(self) -> ListingResponse:
        """Return the answer to a peer whose allowance is used up. The peer's cursor stays valid."""
        return ListingResponse("busy", self.life, 0, [])

    def give(self, request: GroupsRequest, now: float) -> GroupsResponse:
        """Return an answer for each requested group, in order.

        A group that is not on the shelf is `unknown`. A group that does not fit into the rest of
        1 MiB is `busy`.
        """
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
        """Drop all groups older than LISTED_SECONDS. Positions do not follow age: a group may be
        admitted up to an hour after it was made."""
        oldest = (now - LISTED_SECONDS) * 1000
        for content in [
            content for content, entry in self._entries.items() if entry.listed.created_at < oldest
        ]:
            self._drop(content)

    def _most(self) -> bytes:
        """Return the oldest group of the author with most.

        Own groups are dropped only if they are more than half of all. Otherwise an attacker with
        many identities could displace them, and no other node may have them yet.
        """
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
    """A token bucket of bytes for each of the MOST_PEERS latest requesters."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def has_room(self, peer: str, now: float) -> bool:
        """Return True if the allowance of `peer` is not used up."""
        return self._bucket(peer, now).level(now) > 0

    def charge(self, peer: str, size: int, gives: bool, now: float) -> None:
        """Charge an answer of `size` bytes to `peer`.

        Args:
            peer: The requester.
            size: Bytes of the answer.
            gives: True if a group made by `peer` was ever admitted.
            now: Unix seconds.
        """
        cost = REQUEST_BYTES + size
        self._bucket(peer, now).charge(cost if gives else int(TAKER_FACTOR * cost), now)

    def _bucket(self, peer: str, now: float) -> TokenBucket:
        bucket = self._buckets.pop(peer, None) or TokenBucket(PEER_BYTES_PER_SECOND, now)
        self._buckets[peer] = bucket
        if len(self._buckets) > MOST_PEERS:
            self._buckets.popitem(last=False)
        return bucket
