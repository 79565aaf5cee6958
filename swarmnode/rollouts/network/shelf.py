"""The shelf: the groups that a node serves to peers, its own and admitted ones.
`Shelf` does no I/O; `ShelfServer` answers peers.

    put ─▶ positions 1, 2, 3, … of this life ─ listing since a cursor ─▶ at most 14 groups: up to 7
                                                                        own, then one per author
                                             └ give, by content id ───▶ at most 16 groups and 1 MiB

Each answer is charged to the peer's allowance. A peer that never made an admitted group is charged
four times as much.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import trio

from swarmnode.errors import BadMessage
from swarmnode.latest import Latest
from swarmnode.p2p.api import Requests
from swarmnode.p2p.budget import TokenBucket
from swarmnode.rollouts import sampling
from swarmnode.wire import codec, envelope, ids, limits
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
        self._buckets = Latest[str, TokenBucket](MOST_PEERS)

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
        known = self._buckets.get(peer)
        bucket = self._buckets[peer] = known or TokenBucket(PEER_BYTES_PER_SECOND, now)
        return bucket


# ---- serving -------------------------------------------------------------------------------------

NEWS_SECONDS = 0.1
"""A held poll is answered this long after the first new group. The groups of one step are
published together, so one answer lists all of them."""
ANSWER_INTERVAL_SECONDS = 1.0
"""Least time between two answers to one peer's polls with `patience` above 0."""
POLLS_PER_PEER = 2
"""Polls of one peer that are held open at a time. Further ones are refused."""
POLLS_SERVED = 512
"""Polls of all peers that are held open at a time. Further ones are refused."""
FETCHES_PER_PEER = 2
"""Fetches of one peer that are answered at a time. Further ones are refused."""
FETCHES_SERVED = 32
"""Fetches of all peers that are answered at a time. Each is answered from memory, so many readers
can fetch a group as soon as it is listed."""
MOST_READERS = 1024
"""Peers whose last answer is remembered."""
SERVED = ("listing", "group", "unknown", "busy", "malformed")
"""Outcomes of peers' requests: one per poll, and one per group of a fetch."""

Request = TypeVar("Request", bound=msgspec.Struct)


class ServingStatistics(msgspec.Struct, frozen=True):
    """Counts of answers to peers."""

    served: dict[str, int] = {}
    """Answers by outcome, of SERVED."""
    waiting: int = 0
    """Polls held open now."""
    shelf: ShelfStatistics = ShelfStatistics()


class ShelfServer:
    """Answers peers' polls and fetches from a shelf.

    Args:
        requests: Carries the answers.
        shelf: The groups that are served.
        allows: Returns True while budget and pauses permit serving.
        gives: Peer id → True if a group made by this peer was ever admitted.
        clock: Returns Unix seconds.
    """

    def __init__(
        self,
        requests: Requests,
        shelf: Shelf,
        *,
        allows: Callable[[], bool],
        gives: Callable[[str], bool],
        clock: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._shelf = shelf
        self._allows = allows
        self._gives = gives
        self._clock = clock
        self._allowances = Allowances()
        self._answered = Latest[str, float](MOST_READERS)
        """Peer → time of the last answer to its polls, in the future if an answer is scheduled."""
        self._news = trio.Event()
        self._waiting = 0
        self._served: Counter[str] = Counter()

    def start(self) -> None:
        """Register the handlers of both protocols."""
        self._requests.serve(
            ids.LISTING_PROTOCOL,
            self._list,
            concurrent=POLLS_SERVED,
            per_peer=POLLS_PER_PEER,
            max_request_bytes=limits.LISTING_REQUEST_BYTES,
            max_response_bytes=limits.LISTING_RESPONSE_BYTES,
        )
        self._requests.serve(
            ids.GROUPS_PROTOCOL,
            self._give,
            concurrent=FETCHES_SERVED,
            per_peer=FETCHES_PER_PEER,
            max_request_bytes=limits.GROUPS_REQUEST_BYTES,
            max_response_bytes=limits.GROUPS_RESPONSE_BYTES,
        )

    def news(self) -> None:
        """Wake the held polls after the shelf has changed."""
        self._news.set()
        self._news = trio.Event()

    def statistics(self) -> ServingStatistics:
        """Return the counts of answers."""
        return ServingStatistics(dict(self._served), self._waiting, self._shelf.statistics())

    async def _list(self, peer: str, data: bytes) -> bytes:
        """Answer a poll.

        The answer is sent when there is a group to list and the last answer to this peer is
        ANSWER_INTERVAL_SECONDS old, at the latest when the patience is over.

        Raises:
            BadMessage: The request is malformed; the stream is reset.
        """
        request = self._read(data, ListingRequest, limits.LISTING_REQUEST_BYTES)
        if not self._may_answer(peer):
            self._served["busy"] += 1
            return codec.encode(self._shelf.busy())
        reader = envelope.peer_key(peer) or b""
        listing = self._shelf.listing(request, self._clock(), reader)
        if listing.status == "ok" and request.patience:
            self._waiting += 1
            try:
                with trio.move_on_after(request.patience):
                    if not listing.groups:
                        await self._wait_for_news(request, reader)
                    await self._wait_turn(peer)
            finally:
                self._waiting -= 1
            listing = self._shelf.listing(request, self._clock(), reader)
        self._note_answer(peer, trio.current_time())
        answer = codec.encode(listing)
        self._served["listing"] += 1
        self._allowances.charge(peer, len(answer), self._gives(peer), self._clock())
        return answer

    async def _wait_for_news(self, request: ListingRequest, reader: bytes) -> None:
        """Return NEWS_SECONDS after the shelf has a new own group for `reader`."""
        while not self._shelf.has_news(request, reader):
            await self._news.wait()
        await trio.sleep(NEWS_SECONDS)

    async def _wait_turn(self, peer: str) -> None:
        """Return when the last answer to `peer` is ANSWER_INTERVAL_SECONDS old.

        The turn is recorded before the wait, so that a second poll of the same peer gets a later
        one.
        """
        turn = self._answered.get(peer, -math.inf) + ANSWER_INTERVAL_SECONDS
        if turn > trio.current_time():
            self._note_answer(peer, turn)
            await trio.sleep_until(turn)

    def _note_answer(self, peer: str, at: float) -> None:
        """Record the time `at` of an answer to a poll of `peer`."""
        self._answered[peer] = max(at, self._answered.get(peer, -math.inf))

    async def _give(self, peer: str, data: bytes) -> bytes:
        """Answer a fetch.

        Raises:
            BadMessage: The request is malformed; the stream is reset.
        """
        request = self._read(data, GroupsRequest, limits.GROUPS_REQUEST_BYTES)
        if self._may_answer(peer):
            response = self._shelf.give(request, self._clock())
            size = sum(len(group.body) for group in response.groups)
            self._allowances.charge(peer, size, self._gives(peer), self._clock())
        else:
            response = GroupsResponse([GroupResponse("busy")] * len(request.contents))
        self._served.update(
            "group" if group.status == "ok" else group.status for group in response.groups
        )
        return codec.encode(response)

    def _read(self, data: bytes, kind: type[Request], limit: int) -> Request:
        try:
            return codec.decode(data, kind, limit)
        except BadMessage:
            self._served["malformed"] += 1
            raise

    def _may_answer(self, peer: str) -> bool:
        return self._allowances.has_room(peer, self._clock()) and self._allows()
