"""Which announced group is asked for next, and which give way where there are too many. Pure,
bounded.

    put ─ half full of strangers: one of the longest line gives way ─▶ pending ─ take: a line at
    random, its oldest ─▶ under way
                                                                         ▲
                                                                         │
                                                                         └─── not now: later, and
                                                                         nobody waits for it ───┴─▶
                                                                         over

A line is what one peer is asked for: an author, or where we are not connected with it, whoever told
us. Each is asked for one group at a time, and whoever fails is remembered, not whose group it was.
Names cost nothing and connections little, so all of whom nothing was ever admitted are strangers
and share half of the list and of the workers; those that have failed have one worker of these, and
one group each.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum

from swarmnode.rollouts.groups import Announced
from swarmnode.rollouts.trust import count

WORKERS = 8
"""Requests under way. Whoever gives nothing holds one until its deadline, at the cost of no
bytes."""
PENDING = 64
PENDING_PEER = 8
FAILURES_AT_MOST = 4
PAUSES: dict[str, tuple[float, ...]] = {
    "fetch_unknown": (1.0, 2.0, 4.0),
    "fetch_busy": (5.0, 10.0, 20.0),
}
"""Seconds before asking again whoever is still fetching it too, or has given as much as it does for
now."""


class Kind(IntEnum):
    """What its author and whoever is asked for it are to us, the worse of the two."""

    KNOWN = -1
    STRANGER = 0
    FAILED = 1


WORKERS_OF = {Kind.STRANGER: WORKERS // 2 - 1, Kind.FAILED: 1, Kind.KNOWN: WORKERS}
"""At most, in the order in which a free one is given out."""


@dataclass(eq=False)
class Wanted:
    """An announced group that did not come yet."""

    announced: Announced
    forwarder: str
    source: str
    """Whom it is asked of: its author, who has it, or the forwarder."""
    asked: int = 0
    """Times that it was not given yet."""
    not_before: float = 0.0


class FetchQueue:
    """knows(peer): whether a group of it was admitted; connected(): peers. `now` is any monotonic
    seconds."""

    def __init__(
        self,
        knows: Callable[[str], bool],
        connected: Callable[[], Collection[str]],
        rng: random.Random,
    ) -> None:
        self._knows = knows
        self._connected = connected
        self._rng = rng
        self._pending: list[Wanted] = []
        self._active: list[Wanted] = []
        self._resting: dict[str, float] = {}
        """Who is not asked for anything before when."""
        self._failures: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending) + len(self._active)

    def __contains__(self, content: bytes) -> bool:
        return any(
            wanted.announced.content == content for wanted in (*self._pending, *self._active)
        )

    def put(self, announced: Announced, forwarder: str) -> Announced | None:
        """Have it fetched. Returns what finds no room: this one, or another that gives way to
        it."""
        self._find_sources()
        wanted = Wanted(
            announced,
            forwarder,
            announced.peer if announced.peer in self._connected() else forwarder,
        )
        failed = {peer for peer in (announced.peer, wanted.source) if self._failures_of(peer) > 0}
        of_author = sum(
            other.announced.peer == announced.peer for other in (*self._pending, *self._active)
        )
        if of_author >= PENDING_PEER or any(
            failed & {other.announced.peer, other.source} for other in self._pending
        ):
            return announced
        self._pending.append(wanted)
        strangers = [other for other in self._pending if self._kind(other) != Kind.KNOWN]
        if len(strangers) > PENDING // 2:
            out = self._one_of_the_longest(
                [other for other in strangers if self._kind(other) == Kind.FAILED] or strangers
            )
        elif len(self._pending) > PENDING:
            out = self._one_of_the_longest(
                [other for other in self._pending if self._kind(other) == Kind.KNOWN]
            )
        else:
            return None
        self._pending.remove(out)
        return out.announced

    def take(self, now: float) -> Wanted | None:
        """What a free worker shall ask for, if anything: tell `answered` what came of it."""
        self._find_sources()
        self._resting = {peer: until for peer, until in self._resting.items() if until > now}
        asked = {wanted.source for wanted in self._active}
        due = [
            wanted
            for wanted in self._pending
            if wanted.source not in asked and self._due(wanted) <= now
        ]
        for kind, workers in WORKERS_OF.items():
            some = [wanted for wanted in due if self._kind(wanted) == kind]
            if some and sum(self._kind(wanted) == kind for wanted in self._active) < workers:
                lines = list(dict.fromkeys(wanted.source for wanted in some))
                (line,) = self._rng.choices(
                    lines, [0.5 ** max(0, self._failures_of(source)) for source in lines]
                )
                chosen = next(wanted for wanted in some if wanted.source == line)
                self._pending.remove(chosen)
                self._active.append(chosen)
                return chosen
        return None

    def wait(self, now: float) -> float:
        """Seconds until something may be asked for that may not be now."""
        return min(
            (due - now for wanted in self._pending if (due := self._due(wanted)) > now),
            default=math.inf,
        )

    def answered(self, wanted: Wanted, outcome: str, now: float) -> bool:
        """What was taken ended like this; "" where we gave it up ourselves. Returns whether that is
        final."""
        self._active.remove(wanted)
        from_author = wanted.source == wanted.announced.peer
        pauses = () if from_author and outcome == "fetch_unknown" else PAUSES.get(outcome, ())
        if wanted.asked < len(pauses):
            pause = pauses[wanted.asked]
            wanted.asked += 1
            wanted.not_before = now + pause
            self._resting[wanted.source] = now + (pause if outcome == "fetch_busy" else pauses[0])
            self._pending.insert(0, wanted)
            return False
        if outcome == "ok":
            self._failures.pop(wanted.source, None)
        elif outcome and (from_author or outcome not in PAUSES):
            # a forwarder cannot give what its author gave nobody
            count(self._failures, wanted.source, FAILURES_AT_MOST)
        return True

    def _find_sources(self) -> None:
        connected = set(self._connected())
        for wanted in self._pending:
            wanted.source = (
                wanted.announced.peer if wanted.announced.peer in connected else wanted.forwarder
            )

    def _due(self, wanted: Wanted) -> float:
        return max(wanted.not_before, self._resting.get(wanted.source, 0.0))

    def _failures_of(self, peer: str) -> int:
        """Since it gave something last; whoever is known has one to spare."""
        return self._failures.get(peer, 0) - self._knows(peer)

    def _kind(self, wanted: Wanted) -> Kind:
        worse = max(self._failures_of(wanted.announced.peer), self._failures_of(wanted.source))
        return Kind(max(-1, min(1, worse)))

    def _one_of_the_longest(self, some: list[Wanted]) -> Wanted:
        lines: dict[str, list[Wanted]] = {}
        for wanted in some:
            lines.setdefault(wanted.source, []).append(wanted)
        longest = max(len(line) for line in lines.values())
        return self._rng.choice(
            [wanted for line in lines.values() if len(line) == longest for wanted in line]
        )
