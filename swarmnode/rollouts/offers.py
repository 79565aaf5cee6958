"""The groups that peers list, and the choice of groups and holders for fetches.

Pure: time, belief and randomness are arguments.

    listing ─▶ offers of a holder (at most 64 holders, the newest 32 groups of each)
    choose ─▶ unknown groups in a random order, weighted by
              spread × freshness × trust in the author ÷ (1 + recent fetches of the author)
              × belief in the holder
           ─▶ one request per holder: at most 16 groups, and 1 MiB as listed

All groups of an author together have the weight of its best group, so that listing more gains
nothing. The groups of unknown authors at one holder count as groups of one author, because
identities are free.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from swarmnode.rollouts import sampling
from swarmnode.wire import limits
from swarmnode.wire.listings import ListedGroup, ListingResponse

MOST_HOLDERS = 64
"""Holders whose offers are stored; the one polled least recently is dropped."""
MOST_OFFERED = 32
"""Offers stored per holder, the newest. Older offers are rarely chosen, and each costs 4 µs per
choice."""
HALF_LIFE_SECONDS = 60.0
"""Age at which the weight of a listed group has halved: about two steps."""
FEW_HOLDERS = 3
"""Most holders in a choice that is not urgent: a request costs as much as six more groups in it."""
SECOND_HAND = 0.3
"""Weight of a holder that is not the author. Preferring authors spreads the load: every reader
learns of a group from its author first."""
BELIEVED = 0.25
"""Belief in a new holder. A holder with less takes part in a choice with probability `belief /
0.25`, so that a liar is not asked each time only because no other holder is connected."""
REMEMBERED_AUTHORS = 64
"""Number of latest fetched groups whose authors are remembered. Each remembered group of an author
lowers the weight of its next one."""

_Claim = tuple[bytes, bytes, int]
"""(content id, author, creation time). Contradicting listings of one group are separate claims, so
that a false listing never replaces a true one."""
_Held = dict[_Claim, list[tuple[str, ListedGroup]]]
"""Claim → (holder, its listing)."""


class Pull(msgspec.Struct, frozen=True):
    """One fetch request: a holder and the groups to ask it for, the most wanted first."""

    holder: str
    groups: tuple[ListedGroup, ...]


class _Holder(msgspec.Struct):
    """Cursor and offers of one holder."""

    life: bytes
    position: int
    groups: OrderedDict[bytes, ListedGroup]


class Offers:
    """Offers by holder.

    Args:
        own_key: This node's raw public key; its own groups are no offers.
        author_of: Raw public key → peer id.
    """

    def __init__(self, own_key: bytes, author_of: Callable[[bytes], str]) -> None:
        self._own_key = own_key
        self._author_of = author_of
        self._holders: OrderedDict[str, _Holder] = OrderedDict()
        self._asked_of: deque[str] = deque(maxlen=REMEMBERED_AUTHORS)

    def __len__(self) -> int:
        """Return the number of offers; a group counts once for each of its holders."""
        return sum(len(holder.groups) for holder in self._holders.values())

    def cursor(self, holder: str) -> tuple[bytes, int]:
        """Return (life, position) for the next poll of `holder`."""
        known = self._holders.get(holder)
        return (known.life, known.position) if known else (b"", 0)

    def count(self, is_known: Callable[[bytes], bool], busy: Collection[str] = ()) -> int:
        """Return the number of distinct unknown groups that holders outside `busy` offer."""
        contents = {
            content
            for holder, known in self._holders.items()
            if holder not in busy
            for content in known.groups
        }
        return sum(not is_known(content) for content in contents)

    def take(self, holder: str, response: ListingResponse, now: float) -> bool:
        """Store the offers of a listing with the status `ok`.

        Returns:
            False if the cursor went back within one life, or advanced by less than the number of
            groups listed. Such a holder could list groups without end.
        """
        known = self._holders.pop(holder, None)
        if known is None or known.life != response.life:
            known = _Holder(response.life, 0, OrderedDict())
        self._holders[holder] = known
        if len(self._holders) > MOST_HOLDERS:
            self._holders.popitem(last=False)
        if response.position - known.position < len(response.groups):
            return False
        known.position = response.position
        for listed in response.groups:
            if listed.author != self._own_key and is_timely(listed, now):
                known.groups[listed.content] = listed
        while len(known.groups) > MOST_OFFERED:
            known.groups.popitem(last=False)
        return True

    def restore(self, holder: str, listed: ListedGroup) -> None:
        """Offer a group again after a failed fetch from `holder`."""
        if (known := self._holders.get(holder)) is not None:
            known.groups.setdefault(listed.content, listed)

    def forget(self, holder: str, contents: Iterable[bytes]) -> None:
        """Remove these groups from the offers of `holder`."""
        if (known := self._holders.get(holder)) is not None:
            for content in contents:
                known.groups.pop(content, None)

    def keep(self, connected: Collection[str]) -> None:
        """Drop the offers of peers that are not connected."""
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
        asked: Collection[bytes] = (),
        *,
        few: bool = False,
    ) -> list[Pull]:
        """Choose up to `count` groups and the holder of each. Chosen groups are no longer offered.

        If several holders have offers, at most half of the groups come from one of them.

        Args:
            count: Number of groups to fetch.
            now: Unix seconds.
            rng: Source of randomness.
            trust: Author's peer id → 0 to 1. An author with less trust than a new one takes part
                with probability `trust / 0.25`. A lower weight alone would not be enough, because
                every author gets one place before any author gets two.
            belief: Holder's peer id → 0 to 1.
            is_known: Content id → True if the group was received before.
            busy: Peers that may not be asked now.
            asked: Content ids that are being fetched. They stay on offer at other holders, because
                the fetch may fail.
            few: Choose at most FEW_HOLDERS holders.
        """
        if count <= 0:
            return []
        believed = {holder: belief(holder) for holder in self._holders}
        belief = believed.__getitem__
        doubted = [holder for holder in self._holders if rng.random() >= belief(holder) / BELIEVED]
        held = self._held(now, is_known, {*busy, *doubted}, asked)
        authors = {claim: self._author_of(claim[1]) for claim in held}
        trusted = {author: trust(author) for author in dict.fromkeys(authors.values())}
        allowed = {
            author
            for author, value in trusted.items()
            if rng.random() < value / sampling.PROBATION_TRUST
        }
        held = {claim: holders for claim, holders in held.items() if authors[claim] in allowed}
        if not held:
            return []
        recent = Counter(self._asked_of)
        weight = {
            claim: max(belief(holder) for holder, _ in holders)
            * _spread(holders, belief)
            * freshness(holders[0][1], now)
            * trusted[authors[claim]]
            / (1 + recent[authors[claim]])
            for claim, holders in held.items()
        }
        known = {author for author in allowed if trusted[author] > sampling.PROBATION_TRUST}
        names = {
            claim: _name(authors[claim], known, holders, rng) for claim, holders in held.items()
        }
        weight = _by_name(weight, names)
        held = _of_few(held, weight, belief, rng) if few else held
        ordered = sampling.shuffle_weighted(list(held), [weight[claim] for claim in held], rng)
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

    def _held(
        self,
        now: float,
        is_known: Callable[[bytes], bool],
        busy: Collection[str],
        asked: Collection[bytes],
    ) -> _Held:
        """Return all claims that may be fetched. Forget offers that are too old or known."""
        held: _Held = {}
        for holder, known in self._holders.items():
            gone = [
                content
                for content, listed in known.groups.items()
                if not is_timely(listed, now) or is_known(content)
            ]
            self.forget(holder, gone)
            for content, listed in known.groups.items() if holder not in busy else ():
                if content not in asked:
                    held.setdefault((content, listed.author, listed.created_at), []).append(
                        (holder, listed)
                    )
        return held


def is_timely(listed: ListedGroup, now: float) -> bool:
    """Return True if admission would accept a group of this age."""
    return -limits.CLOCK_SKEW_SECONDS <= now - listed.created_at / 1000 <= limits.GROUP_AGE_SECONDS


def freshness(listed: ListedGroup, now: float) -> float:
    """Return `0.5 ** (age / HALF_LIFE_SECONDS)`."""
    return float(0.5 ** (max(0.0, now - listed.created_at / 1000) / HALF_LIFE_SECONDS))


def _name(
    author: str, known: Collection[str], holders: list[tuple[str, ListedGroup]], rng: random.Random
) -> str:
    """Return the name that a group is counted under in a choice.

    It is the author if the author is known or lists the group itself. Otherwise it is derived from
    a random holder, so that all groups of unknown authors at one holder share a name.
    """
    return (
        author
        if author in known or any(holder == author for holder, _ in holders)
        else f"others' at {rng.choice(holders)[0]}"
    )


def _by_name(weight: dict[_Claim, float], names: dict[_Claim, str]) -> dict[_Claim, float]:
    """Scale the weights so that the claims of each name add up to the weight of its best claim."""
    best, total = defaultdict[str, float](float), defaultdict[str, float](float)
    for claim, value in weight.items():
        best[names[claim]] = max(best[names[claim]], value)
        total[names[claim]] += value
    return {
        claim: value * best[names[claim]] / total[names[claim]] if value else 0.0
        for claim, value in weight.items()
    }


def _of_few(
    held: _Held, weight: dict[_Claim, float], belief: Callable[[str], float], rng: random.Random
) -> _Held:
    """Restrict the claims to FEW_HOLDERS holders, drawn by belief × the total weight of their
    offers."""
    total: defaultdict[str, float] = defaultdict(float)
    for claim, holders in held.items():
        for holder, _ in holders:
            total[holder] += weight[claim]
    chosen = sampling.shuffle_weighted(
        list(total), [belief(holder) * value for holder, value in total.items()], rng
    )[:FEW_HOLDERS]
    some = {
        claim: [each for each in holders if each[0] in chosen] for claim, holders in held.items()
    }
    return {claim: holders for claim, holders in some.items() if holders}


def _pack(
    count: int,
    ordered: Sequence[tuple[_Claim, str, str, list[tuple[str, ListedGroup]]]],
    belief: Callable[[str], float],
    rng: random.Random,
) -> list[Pull]:
    """Pack up to `count` claims into requests.

    Each name gets one place before any name gets two. An author gets at most half of all places. If
    there are several holders, a name and a holder also get at most half. A claim is skipped if its
    group is already requested, or no holder has room.

    Args:
        count: Number of groups to request.
        ordered: (claim, author, name, holders), the most wanted first.
        belief: Holder's peer id → 0 to 1.
        rng: Source of randomness.
    """
    half = -(-count // 2)
    most = half if len({holder for *_, holders in ordered for holder, _ in holders}) > 1 else count
    waiting: defaultdict[str, deque[int]] = defaultdict(deque)
    for place, (_, _, name, _) in enumerate(ordered):
        waiting[name].append(place)
    turns = [(0, places.popleft()) for places in waiting.values()]
    asked: set[bytes] = set()
    taken: Counter[str] = Counter()
    requests: dict[str, list[ListedGroup]] = {}
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


def _spread(holders: list[tuple[str, ListedGroup]], belief: Callable[[str], float]) -> float:
    """Return the mean of the listed spreads of one group, weighted by belief in the holders."""
    total = sum(belief(holder) for holder, _ in holders)
    return max(
        sampling.SPREAD_FLOOR,
        sum(belief(holder) * listed.spread for holder, listed in holders) / total,
    )


def _draw(
    holders: list[tuple[str, ListedGroup]],
    author: str,
    belief: Callable[[str], float],
    rng: random.Random,
) -> tuple[str, ListedGroup]:
    """Draw one holder, weighted by belief, and by SECOND_HAND if it is not the author."""
    return rng.choices(
        holders,
        [belief(holder) * (1.0 if author == holder else SECOND_HAND) for holder, _ in holders],
    )[0]
