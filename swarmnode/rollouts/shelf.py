"""The bounded, pure parts of the exchange: the queue before the scorer, who wears the scorer out, the shelf of long groups, deadlines."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

import msgspec

from swarmnode.rollouts.groups import Candidate, memory_bytes
from swarmnode.wire.messages import FetchResponse

QUEUE_GROUPS = 512
QUEUE_BYTES = 32 * 2**20
QUEUE_PEER_GROUPS = 64
"""Candidates waiting for the scorer: in all, and of one peer."""
STRIKES = 3
STRIKE_SECONDS = 600.0
STRIKE_PEERS = 1024
SHELF_GROUPS = 256
SHELF_BYTES = 32 * 2**20
SERVINGS = 3
"""Times one peer is given one body; it needs it once, and a retry or two."""
REMEMBERED_SERVINGS = 4096


class CandidateQueue:
    """First in, first out, bounded by groups, bytes and groups of one peer."""

    def __init__(self, groups: int = QUEUE_GROUPS, size: int = QUEUE_BYTES, peer_groups: int = QUEUE_PEER_GROUPS) -> None:
        self.groups = groups
        self.size = size
        self.peer_groups = peer_groups
        self._items: deque[tuple[Candidate, int]] = deque()
        self._bytes = 0
        self._of_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, candidate: Candidate) -> bool:
        """False where there is no room."""
        size = memory_bytes(candidate.group) + len(candidate.envelope)
        if len(self._items) >= self.groups or self._bytes + size > self.size or self._of_peer[candidate.peer] >= self.peer_groups:
            return False
        self._items.append((candidate, size))
        self._bytes += size
        self._of_peer[candidate.peer] += 1
        return True

    def take(self, most: int) -> list[Candidate]:
        """Up to `most` of the oldest."""
        taken: list[Candidate] = []
        while self._items and len(taken) < most:
            candidate, size = self._items.popleft()
            self._bytes -= size
            self._of_peer[candidate.peer] -= 1
            if not self._of_peer[candidate.peer]:
                del self._of_peer[candidate.peer]
            taken.append(candidate)
        return taken


class Strikes:
    """Authors whose groups failed the scorer: after STRIKES within STRIKE_SECONDS they are not scored for as long.

    A failure may be ours, so it costs no reputation; but each can take the scorer away from everybody for seconds.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def add(self, peer: str, now: float) -> None:
        count, since = self._of.pop(peer, (0, now))
        self._of[peer] = (1, now) if now - since > STRIKE_SECONDS else (count + 1, since if count + 1 < STRIKES else now)
        if len(self._of) > STRIKE_PEERS:
            self._of.popitem(last=False)

    def is_out(self, peer: str, now: float) -> bool:
        count, since = self._of.get(peer, (0, now))
        return count >= STRIKES and now - since <= STRIKE_SECONDS


class ShelfStatistics(msgspec.Struct, frozen=True):
    groups: int = 0
    bytes: int = 0


class Shelf:
    """Envelopes too long for gossip, ours and those we fetched, by content id; the oldest leave first."""

    def __init__(self, groups: int = SHELF_GROUPS, size: int = SHELF_BYTES) -> None:
        self.groups = groups
        self.size = size
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._servings: OrderedDict[tuple[str, bytes], int] = OrderedDict()

    def put(self, content: bytes, body: bytes) -> None:
        if content in self._bodies or len(body) > self.size:
            return
        self._bodies[content] = body
        self._bytes += len(body)
        while len(self._bodies) > self.groups or self._bytes > self.size:
            _, dropped = self._bodies.popitem(last=False)
            self._bytes -= len(dropped)

    def answer(self, peer: str, content: bytes) -> FetchResponse:
        """`ok` with the body; `unknown` where it is not (or no longer) here; `busy` where `peer` was given it often enough."""
        body = self._bodies.get(content)
        if body is None:
            return FetchResponse("unknown")
        times = self._servings.pop((peer, content), 0) + 1
        self._servings[(peer, content)] = times
        if len(self._servings) > REMEMBERED_SERVINGS:
            self._servings.popitem(last=False)
        return FetchResponse("ok", body) if times <= SERVINGS else FetchResponse("busy")

    def statistics(self) -> ShelfStatistics:
        return ShelfStatistics(len(self._bodies), self._bytes)


class Throughput:
    """How fast bodies come in, as a moving average over fetches, and the deadline that follows from it.

    Starts at 256 KiB/s and never believes less than 64 KiB/s, so that a peer which drips cannot stretch everybody's deadlines.
    """

    START = 256 * 1024.0
    LEAST = 64 * 1024.0
    SHARE = 0.3
    LONGEST = 30.0

    def __init__(self) -> None:
        self.bytes_per_second = self.START

    def observe(self, size: int, seconds: float) -> None:
        rate = size / max(seconds, 1e-3)
        self.bytes_per_second = max(self.LEAST, (1 - self.SHARE) * self.bytes_per_second + self.SHARE * rate)

    def deadline(self, size: int) -> float:
        """Seconds: two, and three times what `size` bytes should take."""
        return min(self.LONGEST, 2.0 + 3.0 * size / self.bytes_per_second)
