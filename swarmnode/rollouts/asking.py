"""When listings are asked for, and which connected peers are asked next: a few for each time that
the trainer draws. Pure, bounded."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Collection

import msgspec

AT_ONCE = 4
"""Listings under way, and what is asked for at a moment where there is enough for the next step;
the cursors see to it that nothing is missed until a peer's turn."""
WHERE_SHORT = 16
"""Listings at a moment where the pool has less than the next one and there is no plenty: what
others have is then little, and listings short."""
PLENTY = 4
"""Groups on offer for each that is drawn, from which on fewer peers are asked: a listing costs some
four milliseconds of CPU and up to 7 KB."""
PAUSE_SECONDS = 5.0
"""Between two listings of one peer, at least."""
FAILED_SECONDS = 60.0
"""After one that did not come."""
SILENT_SECONDS = 600.0
"""After the answer that the peer does not list: its version may have been replaced by then."""
MOST_PEERS = 1024
LEAD_SHARE = 0.25
"""A node asks so long before it expects its next draw, as a share of its step's usual length: the
later, the newer is what it gets; but a step may be shorter than usual."""
USUAL_SHARE = 0.3
"""Weight of the latest step in the usual length of one."""
UNKNOWN_SECONDS = (10.0, 20.0, 40.0)
"""After the first draw, while nobody knows how long a step takes."""
MOST_LONGER = 2.0
"""As many times the usual length a step counts at most: the trainer may have stood still."""


class Moments:
    """When a node asks: shortly before its trainer draws again, so that what it gets is as new as
    what is gossiped; and at once where the pool holds less than the next step, or nobody knows how
    long a step takes. `now`: any monotonic seconds."""

    def __init__(self) -> None:
        self._usual: float | None = None
        self._drew: float | None = None
        self._due: deque[float] = deque()

    @property
    def next(self) -> float:
        """The next of them; infinite where there is none before the next draw."""
        return self._due[0] if self._due else float("inf")

    @property
    def lead(self) -> float:
        """Seconds before the next draw in which a node asks, and between two times that it asks the
        same peers."""
        return (
            UNKNOWN_SECONDS[0]
            if self._usual is None
            else max(PAUSE_SECONDS, LEAD_SHARE * self._usual)
        )

    def drew(self, now: float, *, urgent: bool) -> None:
        """The trainer draws. urgent: the pool has less than the next step."""
        if self._drew is not None:
            took = now - self._drew
            usual = took if self._usual is None else self._usual
            self._usual = (1 - USUAL_SHARE) * usual + USUAL_SHARE * min(took, MOST_LONGER * usual)
        self._drew = now
        waits = UNKNOWN_SECONDS if self._usual is None else (self._usual - self.lead,)
        self._due = deque(now + wait for wait in waits if wait > 0)
        if urgent or not self._due:
            self._due.appendleft(now)

    def come(self, now: float) -> bool:
        """Whether one has come since this was last asked."""
        came = self.next <= now
        while self.next <= now:
            self._due.popleft()
        return came


class _Peer(msgspec.Struct):
    due: float
    lists: bool | None = None
    """None: not known yet."""


class Asking:
    """When each peer may be asked again, of the MOST_PEERS asked last. `now`: any monotonic
    seconds."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._under_way: set[str] = set()
        self._allowed = 0

    @property
    def waits(self) -> bool:
        """Whether a listing is under way."""
        return bool(self._under_way)

    @property
    def left(self) -> bool:
        """Whether more may be asked, once the PAUSE_SECONDS of those that were asked are over."""
        return self._allowed > 0

    def allow(self, *, plenty: bool = False, urgent: bool = False) -> None:
        """A moment has come: so many more may be asked, and none that were allowed before and not
        asked. plenty: PLENTY is on offer, so that one is enough; where that was not what it says,
        the next moment is urgent."""
        self._allowed = 1 if plenty else WHERE_SHORT if urgent else AT_ONCE

    def next(self, connected: Collection[str], now: float, rng: random.Random) -> list[str]:
        """Peers to ask now, those first that were not asked for longest. They are under way until
        `done`."""
        due = [peer for peer in connected if peer not in self._under_way and self._due(peer) <= now]
        rng.shuffle(due)
        chosen = sorted(due, key=self._due)[
            : max(0, min(self._allowed, AT_ONCE - len(self._under_way)))
        ]
        self._allowed -= len(chosen)
        self._under_way.update(chosen)
        return chosen

    def done(self, peer: str, now: float, *, lists: bool | None = True) -> None:
        """It has answered; `lists` None: it did not, False: it never will. Another may be asked in
        its place then."""
        self._allowed += not lists
        self._under_way.discard(peer)
        known = self._peers.pop(peer, None) or _Peer(now)
        known.due = now + {True: PAUSE_SECONDS, None: FAILED_SECONDS, False: SILENT_SECONDS}[lists]
        known.lists = known.lists if lists is None else lists
        self._peers[peer] = known
        if len(self._peers) > MOST_PEERS:
            self._peers.popitem(last=False)

    def listers(self, connected: Collection[str]) -> int:
        """How many of `connected` have answered with a listing."""
        return sum(1 for peer in connected if peer in self._peers and self._peers[peer].lists)

    def mutes(self, connected: Collection[str]) -> int:
        """How many of `connected` have said that they do not list."""
        return sum(
            1 for peer in connected if peer in self._peers and self._peers[peer].lists is False
        )

    def _due(self, peer: str) -> float:
        known = self._peers.get(peer)
        return known.due if known else float("-inf")
