"""What waits for the scorer, and who wears it out. Pure, bounded."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from swarmnode.rollouts.groups import Candidate, memory_bytes

QUEUE_GROUPS = 512
QUEUE_BYTES = 32 * 2**20
QUEUE_PEER_GROUPS = 64
"""Candidates waiting for the scorer: in all, and of one peer."""
STRIKES = 3
STRIKE_SECONDS = 600.0
STRIKE_PEERS = 1024


class CandidateQueue:
    """First in, first out, bounded by groups, bytes and groups of one peer."""

    def __init__(
        self,
        groups: int = QUEUE_GROUPS,
        size: int = QUEUE_BYTES,
        peer_groups: int = QUEUE_PEER_GROUPS,
    ) -> None:
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
        if (
            len(self._items) >= self.groups
            or self._bytes + size > self.size
            or self._of_peer[candidate.peer] >= self.peer_groups
        ):
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
    """Authors whose groups failed the scorer: after STRIKES within STRIKE_SECONDS they are not
    scored for as long.

    A failure may be ours, so it costs no reputation; but each can take the scorer away from
    everybody for seconds.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def add(self, peer: str, now: float) -> None:
        count, since = self._of.pop(peer, (0, now))
        self._of[peer] = (
            (1, now)
            if now - since > STRIKE_SECONDS
            else (count + 1, since if count + 1 < STRIKES else now)
        )
        if len(self._of) > STRIKE_PEERS:
            self._of.popitem(last=False)

    def is_out(self, peer: str, now: float) -> bool:
        count, since = self._of.get(peer, (0, now))
        return count >= STRIKES and now - since <= STRIKE_SECONDS
