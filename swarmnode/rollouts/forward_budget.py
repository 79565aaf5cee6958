"""How much of what comes by gossip a node passes on: bounded bytes per second for each author, and
for each place they come from. Pure.

    admitted frame ─ its author's bucket ─ its origin's bucket ─▶ passed on, and charged to both
                           └ empty: not         └ lower than this author may take it: not

The author's bucket keeps one storm from costing more than what a node could learn from it.
Identities are free, so that many authors may be one: the origin's bucket bounds what the neighbours
in one /24 or /48 bring, or those behind one relay, whoever signed it. Its lower half is for those
who have used little of their own allowance lately, the less, the deeper; the bottom is for those
who began with a whole one, neighbours and authors of whom a group was trained on here. So a crowd
of new identities leaves them theirs, and who storms goes behind those who do not.

Rates follow what this node's trainer asks for, which no peer can raise, and never fall below what a
slow swarm needs. What is not passed on is taken all the same, and nobody is blamed for it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable

from swarmnode.p2p.budget import TokenBucket

LEAST_BYTES = 16 * 2**10
"""What a group costs at least: its check, its scorer and its frame cost a neighbour more than its
bytes where it is short."""
AUTHOR_BYTES, ORIGIN_BYTES = 16 * 2**10, 128 * 2**10
"""Per second, at least: a group a second of one author, eight of one origin."""
AUTHOR_SHARE, ORIGIN_SHARE = 4.0, 24.0
"""Groups that are passed on for each that the trainer asks for. All that arrives is not twelve
times as much for long: see mode.py."""
NEWCOMER = 0.25
"""Part of its allowance that an author begins with who is neither a neighbour nor was trained
on."""
HALF_LIFE_SECONDS = 300.0
MOST_AUTHORS, MOST_ORIGINS = 4096, 256
OUTCOMES = ("passed", "author", "origin")


class ForwardBudget:
    """known(author): whether a group of it was trained on; clock: seconds."""

    def __init__(self, known: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._known = known
        self._clock = clock
        self._authors: OrderedDict[str, TokenBucket] = OrderedDict()
        self._origins: OrderedDict[str, TokenBucket] = OrderedDict()
        self._wanted = 0.0
        self._wanted_at = clock()
        self._outcomes: Counter[str] = Counter()

    def want(self, count: int) -> None:
        """The trainer asks for `count` groups."""
        now = self._clock()
        self._wanted, self._wanted_at = self._lately(now) + count, now

    def allows(self, author: str, origin: str, size: int, *, near: bool = False) -> bool:
        """Whether a group of `size` bytes that came from `origin` is passed on; if so it is
        charged. Each answer is counted. near: its author is the neighbour that brought it, and a
        connection costs more than a key."""
        now, cost = self._clock(), max(size, LEAST_BYTES)
        asked = self._lately(now) * math.log(2) / HALF_LIFE_SECONDS * LEAST_BYTES
        part = 1.0 if near or self._known(author) else NEWCOMER
        theirs = _bucket(
            self._authors, author, max(AUTHOR_BYTES, AUTHOR_SHARE * asked), now, MOST_AUTHORS, part
        )
        place = _bucket(
            self._origins, origin, max(ORIGIN_BYTES, ORIGIN_SHARE * asked), now, MOST_ORIGINS
        )
        lowest = place.capacity / 2 * (1 - theirs.level(now) / theirs.capacity)
        outcome = "passed"
        if theirs.level(now) < cost:
            outcome = "author"
        elif place.level(now) - cost < lowest:
            outcome = "origin"
        else:
            theirs.charge(cost, now)
            place.charge(cost, now)
        self._outcomes[outcome] += 1
        return outcome == "passed"

    def outcomes(self) -> dict[str, int]:
        """Groups by what became of them here, of OUTCOMES."""
        return dict(self._outcomes)

    def _lately(self, now: float) -> float:
        """Groups that the trainer asked for, those of HALF_LIFE_SECONDS ago counting half."""
        return self._wanted * 0.5 ** (max(0.0, now - self._wanted_at) / HALF_LIFE_SECONDS)


def _bucket(
    buckets: OrderedDict[str, TokenBucket],
    name: str,
    rate: float,
    now: float,
    most: int,
    part: float = 1.0,
) -> TokenBucket:
    """Its bucket, the latest one now. A new one is `part` full; the one not asked for longest
    goes."""
    bucket = buckets.pop(name, None)
    if bucket is None:
        bucket = TokenBucket(rate, now)
        bucket.charge(round((1 - part) * bucket.capacity), now)
    bucket.set_rate(rate, now)
    buckets[name] = bucket
    if len(buckets) > most:
        buckets.popitem(last=False)
    return bucket
