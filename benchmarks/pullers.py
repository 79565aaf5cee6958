"""One simulated node's ends of listings and pulls: the state machines that `rollouts.pulling` and
`rollouts.serving` are made of, called by a simulation instead of by sockets. benchmarks.neighbours
(learning) and benchmarks.scale (cost) drive it."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection

from swarmnode.rollouts.asking import PLENTY, Asking, Moments
from swarmnode.rollouts.catalogue import Catalogue
from swarmnode.rollouts.claims import Claims
from swarmnode.rollouts.offers import Offers, Pull
from swarmnode.rollouts.pulling import MOST_ASKED, STEPS_AHEAD
from swarmnode.wire.listings import (
    GroupsRequest,
    GroupsResponse,
    Listed,
    ListingRequest,
    ListingResponse,
)


class Puller:
    """key: 32 raw bytes; author_of: raw key → peer id. `now`: Unix seconds."""

    def __init__(
        self, key: bytes, swarm: bytes, author_of: Callable[[bytes], str], rng: random.Random
    ) -> None:
        self.swarm = swarm
        self.rng = rng
        self.catalogue = Catalogue(key, swarm, rng.randbytes(8))
        self.asking = Asking()
        self.moments = Moments()
        self.offers = Offers(key, author_of)
        self.claims = Claims()
        self.step = self.wanted = 0
        self._asked: OrderedDict[bytes, tuple[str, Listed]] = OrderedDict()
        self._under_way: dict[str, int] = {}

    @property
    def urgent(self) -> bool:
        """Whether the pool holds less than the next step's."""
        return self.wanted > (STEPS_AHEAD - 1) * self.step

    def want(self, count: int, waiting: int, now: float) -> None:
        """The trainer draws `count` groups, and `waiting` are in the pool after that."""
        self.step = count
        self.wanted = max(0, STEPS_AHEAD * count - waiting)
        self.moments.drew(now, urgent=self.urgent)

    def to_list(
        self, connected: Collection[str], now: float, *, trial: bool = False
    ) -> list[tuple[str, ListingRequest]]:
        """Whom to ask for a listing now, and what to ask; each is followed by `listed`. trial: also
        where nothing is wanted."""
        if self.moments.come(now):
            self.asking.allow(plenty=len(self.offers) >= PLENTY * self.step, urgent=self.urgent)
        if self.wanted <= 0 and not trial:
            return []
        self.offers.keep(connected)
        return [
            (peer, ListingRequest(self.swarm, *self.offers.cursor(peer)))
            for peer in self.asking.next(connected, now, self.rng)
        ]

    def listed(self, holder: str, response: ListingResponse | None, now: float) -> int:
        """What came of a listing; None: nothing. Returns how many groups nobody listed before, as
        `Offers.take`."""
        self.asking.done(holder, now, lists=None if response is None else True)
        if response is None or response.status != "ok":
            return 0
        new = self.offers.take(holder, response, now)
        if new is None:
            self.claims.lie(holder, "cursor")
        return new or 0

    def to_pull(
        self, now: float, trust: Callable[[str], float], has_seen: Callable[[bytes], bool]
    ) -> list[Pull]:
        """What to ask whom for now; each is followed by `pulled`."""
        if not self.urgent and (self.asking.waits or self.moments.next < math.inf):
            return []
        missing = max(0, self.wanted - sum(self._under_way.values()))
        known = lambda content: content in self._asked or has_seen(content)
        pulls = self.offers.choose(
            missing,
            now,
            self.rng,
            trust,
            self.claims.belief,
            known,
            self._under_way,
            few=not self.urgent,
        )
        for pull in pulls:
            self._under_way[pull.holder] = len(pull.groups)
            for listed in pull.groups:
                self._asked[listed.content] = (pull.holder, listed)
        while len(self._asked) > MOST_ASKED:
            self._asked.popitem(last=False)
        return pulls

    def give(self, pull: Pull, now: float) -> GroupsResponse:
        """What this node answers to `pull`."""
        return self.catalogue.give(GroupsRequest([listed.content for listed in pull.groups]), now)

    def pulled(
        self, pull: Pull, response: GroupsResponse | None, now: float
    ) -> list[tuple[Listed, bytes]]:
        """What came of a pull; None: nothing. Returns the groups, each with its envelope."""
        del self._under_way[pull.holder]
        if response is None:
            self.claims.lie(pull.holder, "slow")
            self.asking.done(pull.holder, now, lists=None)
            self.offers.drop(pull.holder)
            self._forget(pull.groups)
            return []
        here = []
        for listed, group in zip(pull.groups, response.groups, strict=True):
            if group.status == "ok":
                here.append((listed, group.body))
            else:
                self._forget([listed])
                if group.status == "unknown":
                    self.claims.lie(pull.holder, "absent")
        self.wanted = max(0, self.wanted - len(here))
        return here

    def scored(self, content: bytes, as_listed: bool) -> None:
        """Its rewards are known: were they as spread as its listing said?"""
        holder, _ = self._asked.pop(content, (None, None))
        if holder is not None:
            self.claims.keep(holder) if as_listed else self.claims.lie(holder, "spread")

    def _forget(self, groups: Collection[Listed]) -> None:
        for listed in groups:
            self._asked.pop(listed.content, None)
