"""What peers say they have, and which of it to ask whom for. Pure: time, belief and randomness are
arguments.

listing ─▶ offers of a holder (64 holders, the newest 32 groups of each) choose ─▶ those that are
new, in an order drawn by spread × freshness × trust × novelty of the author × belief in who lists
it
       ─▶ an author's all together as likely as its best alone: who lists more is not asked for
       before others; and so with all that a
          holder lists of others whom nobody knows here, since names cost nothing
       ─▶ of a few holders, where nothing is urgent ─▶ each from one of its holders, drawn by
       belief; a step's worth over several authors and holders ─▶ one request for each holder: at
       most 16 groups, and 1 MiB as listed
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from swarmnode.rollouts import sampling
from swarmnode.wire import limits
from swarmnode.wire.listings import Listed, ListingResponse

MOST_HOLDERS = 64
MOST_OFFERED = 32
"""Offers of one holder, its newest. What is older is hardly ever chosen, and each costs four
microseconds whenever a choice is made."""
HALF_LIFE_SECONDS = 60.0
"""In which a listed group's weight halves: two steps or so."""
FEW_HOLDERS = 3
"""Holders that a choice is made from where nothing is urgent: a request costs what six more groups
in it do."""
SECOND_HAND = 0.3
"""Weight of a holder that is not the author: the author's own groups are on one shelf first, and on
all soon."""
BELIEVED = 0.25
"""Belief from which on a holder takes part whenever groups are chosen, as a new one does; below it
is left out the more often: it shall not be asked for want of others."""
REMEMBERED_AUTHORS = 64
"""Groups asked for last, of whose authors more is less welcome."""
REMEMBERED_CONTENTS = 4096


_Claim = tuple[bytes, bytes, int]
"""(content id, author, when it was made): what a choice is among. What holders say differently of
one group is several, so that a lie stands beside what others say, and never in its place."""
_Held = dict[_Claim, list[tuple[str, Listed]]]
"""Claim → (holder, what it says)."""


class Pull(msgspec.Struct, frozen=True):
    """One request: the most wanted first."""

    holder: str
    groups: tuple[Listed, ...]


class _Holder(msgspec.Struct):
    life: bytes
    position: int
    groups: OrderedDict[bytes, Listed]


class Offers:
    """author_of: raw key → peer id."""

    def __init__(self, own_key: bytes, author_of: Callable[[bytes], str]) -> None:
        self._own_key = own_key
        self._author_of = author_of
        self._holders: OrderedDict[str, _Holder] = OrderedDict()
        self._listed: OrderedDict[bytes, None] = OrderedDict()
        self._asked_of: deque[str] = deque(maxlen=REMEMBERED_AUTHORS)

    def __len__(self) -> int:
        """Offers, each as often as there are holders of it."""
        return sum(len(holder.groups) for holder in self._holders.values())

    def cursor(self, holder: str) -> tuple[bytes, int]:
        """(life, position) for the next request."""
        known = self._holders.get(holder)
        return (known.life, known.position) if known else (b"", 0)

    def take(self, holder: str, response: ListingResponse, now: float) -> int | None:
        """Take an `ok` listing. Returns how many groups nobody listed before, of those that it
        leaves out as of those that it names, and 64 at most; or None where its cursor went back
        within one life: an endless listing of the same."""
        known = self._holders.pop(holder, None)
        if known is None or known.life != response.life:
            known = _Holder(response.life, 0, OrderedDict())
        self._holders[holder] = known
        if len(self._holders) > MOST_HOLDERS:
            self._holders.popitem(last=False)
        if response.position < known.position or response.position - known.position < len(
            response.groups
        ):
            return None
        since = min(response.position - known.position, limits.LISTED)
        known.position = response.position
        new = 0
        for listed in response.groups:
            if listed.author != self._own_key and is_timely(listed, now):
                known.groups[listed.content] = listed
                new += self._note(listed.content)
        while len(known.groups) > MOST_OFFERED:
            known.groups.popitem(last=False)
        return round(new * since / len(response.groups)) if new else 0

    def forget(self, holder: str, contents: Iterable[bytes]) -> None:
        """Do not ask `holder` for these again."""
        if (known := self._holders.get(holder)) is not None:
            for content in contents:
                known.groups.pop(content, None)

    def drop(self, holder: str) -> None:
        """Ask `holder` for nothing that it has listed so far."""
        self._holders.pop(holder, None)

    def keep(self, connected: Collection[str]) -> None:
        """Drop the offers of whoever is not connected."""
        for holder in [holder for holder in self._holders if holder not in connected]:
            del self._holders[holder]

    def choose(
        self,
        count: int,
        now: float,
        rng: random.Random,
        trust: Callable[[str], float],
        belief: Callable[[str], float],
        is_known: Callable[[bytes], bool],
        busy: Collection[str] = (),
        *,
        few: bool = False,
    ) -> list[Pull]:
        """Requests for up to `count` groups, at most half of them from one holder where there are
        several; what is asked for is no longer offered. trust: of a peer as author, below that of a
        new one it is left out the more often, since each author has one group before any has two;
        belief: in a peer as holder; busy: peers that are not to be asked now; few: ask FEW_HOLDERS
        at most."""
        if count <= 0:
            return []
        doubted = [holder for holder in self._holders if rng.random() >= belief(holder) / BELIEVED]
        held = self._held(now, is_known, {*busy, *doubted})
        authors = {claim: self._author_of(claim[1]) for claim in held}
        trusted = {author: trust(author) for author in dict.fromkeys(authors.values())}
        heeded = {
            author
            for author, much in trusted.items()
            if rng.random() < much / sampling.PROBATION_TRUST
        }
        held = {claim: holders for claim, holders in held.items() if authors[claim] in heeded}
        if not held:
            return []
        met = Counter(self._asked_of)
        worth = {
            claim: max(belief(holder) for holder, _ in holders)
            * _spread(holders, belief)
            * freshness(holders[0][1], now)
            * trusted[authors[claim]]
            / (1 + met[authors[claim]])
            for claim, holders in held.items()
        }
        known = {author for author in heeded if trusted[author] > sampling.PROBATION_TRUST}
        names = {
            claim: _name(authors[claim], known, holders, rng) for claim, holders in held.items()
        }
        worth = _by_name(worth, names)
        held = _of_few(held, worth, belief, rng) if few else held
        ordered = sampling.shuffle_weighted(list(held), [worth[claim] for claim in held], rng)
        ordered = sampling.spread_over_peers(
            ordered, len(ordered), authors.__getitem__, len(ordered)
        )
        pulls = _pack(
            count,
            [(claim, authors[claim], names[claim], held[claim]) for claim in ordered],
            belief,
            rng,
        )
        for pull in pulls:
            for listed in pull.groups:
                self._asked_of.append(self._author_of(listed.author))
            self.forget(pull.holder, [listed.content for listed in pull.groups])
        return pulls

    def _held(self, now: float, is_known: Callable[[bytes], bool], busy: Collection[str]) -> _Held:
        """Everything that may be asked for; what is old or known is forgotten."""
        held: _Held = {}
        for holder, known in self._holders.items():
            gone = [
                content
                for content, listed in known.groups.items()
                if not is_timely(listed, now) or is_known(content)
            ]
            self.forget(holder, gone)
            for content, listed in known.groups.items() if holder not in busy else ():
                held.setdefault((content, listed.author, listed.created_at), []).append(
                    (holder, listed)
                )
        return held

    def _note(self, content: bytes) -> bool:
        """Whether nobody listed it before, as far as that is remembered."""
        new = content not in self._listed
        self._listed.pop(content, None)
        self._listed[content] = None
        if len(self._listed) > REMEMBERED_CONTENTS:
            self._listed.popitem(last=False)
        return new


def is_timely(listed: Listed, now: float) -> bool:
    """Whether admission would take a group of this age."""
    return -limits.CLOCK_SKEW_SECONDS <= now - listed.created_at / 1000 <= limits.GROUP_AGE_SECONDS


def freshness(listed: Listed, now: float) -> float:
    """1 for a group that was just made, half of it every HALF_LIFE_SECONDS."""
    return float(0.5 ** (max(0.0, now - listed.created_at / 1000) / HALF_LIFE_SECONDS))


def _name(
    author: str, known: Collection[str], holders: list[tuple[str, Listed]], rng: random.Random
) -> str:
    """Whose a group is when places are given out. One by an author nobody knows, who does not list
    it itself, is a holder's among others', whichever holder's: who lists what everybody has shall
    not have it all go by its name."""
    return (
        author
        if author in known or any(holder == author for holder, _ in holders)
        else f"others' at {rng.choice(holders)[0]}"
    )


def _by_name(worth: dict[_Claim, float], names: dict[_Claim, str]) -> dict[_Claim, float]:
    """Each claim's share of what goes by one name, so that these add up to what the best of them is
    worth."""
    best, total = defaultdict[str, float](float), defaultdict[str, float](float)
    for claim, value in worth.items():
        best[names[claim]] = max(best[names[claim]], value)
        total[names[claim]] += value
    return {
        claim: value * best[names[claim]] / total[names[claim]] if value else 0.0
        for claim, value in worth.items()
    }


def _of_few(
    held: _Held, worth: dict[_Claim, float], belief: Callable[[str], float], rng: random.Random
) -> _Held:
    """What FEW_HOLDERS offer, drawn by how far they are believed and what their offers are worth
    together."""
    total: defaultdict[str, float] = defaultdict(float)
    for claim, holders in held.items():
        for holder, _ in holders:
            total[holder] += worth[claim]
    chosen = sampling.shuffle_weighted(
        list(total), [belief(holder) * value for holder, value in total.items()], rng
    )[:FEW_HOLDERS]
    some = {
        claim: [each for each in holders if each[0] in chosen] for claim, holders in held.items()
    }
    return {claim: holders for claim, holders in some.items() if holders}


def _pack(
    count: int,
    ordered: Sequence[tuple[_Claim, str, str, list[tuple[str, Listed]]]],
    belief: Callable[[str], float],
    rng: random.Random,
) -> list[Pull]:
    """Requests for `count` of (claim, author, name, holders): each name has one place before any
    has two, an author and, where there are several, a name and a holder half of all. A place goes
    to the next of its name where the group is asked for already, by another claim, or nobody has
    room."""
    half = -(-count // 2)
    most = half if len({holder for *_, holders in ordered for holder, _ in holders}) > 1 else count
    waiting: defaultdict[str, deque[int]] = defaultdict(deque)
    for place, (_, _, name, _) in enumerate(ordered):
        waiting[name].append(place)
    turns = [(0, places.popleft()) for places in waiting.values()]
    asked: set[bytes] = set()
    taken: Counter[str] = Counter()
    requests: dict[str, list[Listed]] = {}
    room: dict[str, int] = {}
    while turns and len(asked) < count:
        turn, place = heapq.heappop(turns)
        (content, *_), author, name, holders = ordered[place]
        fits = (
            []
            if content in asked or taken[author] == half
            else [
                (holder, listed)
                for holder, listed in holders
                if len(requests.get(holder, ())) < min(most, limits.PULLED)
                and listed.size <= room.get(holder, limits.GROUP_BYTES)
            ]
        )
        if fits:
            holder, listed = _draw(fits, author, belief, rng)
            requests.setdefault(holder, []).append(listed)
            room[holder] = room.get(holder, limits.GROUP_BYTES) - listed.size
            asked.add(content)
            taken[author] += 1
            turn += 1
        if waiting[name] and turn < most:
            heapq.heappush(turns, (turn, waiting[name].popleft()))
    return [Pull(holder, tuple(groups)) for holder, groups in requests.items()]


def _spread(holders: list[tuple[str, Listed]], belief: Callable[[str], float]) -> float:
    """What they say of one group's spread, each as far as it is believed: nobody alone makes a
    group look good, or not worth asking for."""
    total = sum(belief(holder) for holder, _ in holders)
    return max(
        sampling.SPREAD_FLOOR,
        sum(belief(holder) * listed.spread for holder, listed in holders) / total,
    )


def _draw(
    holders: list[tuple[str, Listed]],
    author: str,
    belief: Callable[[str], float],
    rng: random.Random,
) -> tuple[str, Listed]:
    return rng.choices(
        holders,
        [belief(holder) * (1.0 if author == holder else SECOND_HAND) for holder, _ in holders],
    )[0]
