"""Pool of admitted groups that wait for training: bounds (`Pool`), shares of sources
(`SourceShares`). Pure: time, policy version and randomness are arguments.

A source is the network prefix or relay through which a group came. A step draws from several
sources. The pool is bounded in groups and in bytes, and so is each author's share of it. In a full
share, an author's newest group replaces its oldest. In a full pool, the oldest group of the most
represented author is evicted.

A group is **drawn at most once**. A second pass over a group in a later step would be a second and
more off-policy epoch, and a peer could affect any number of steps with a single good group. SAPO
(arXiv 2509.08721) likewise samples each round only from the rollouts of that round.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable

import msgspec

from swarmnode.latest import Latest
from swarmnode.rollouts import sampling
from swarmnode.rollouts.groups import ExternalGroup, memory_bytes
from swarmnode.wire import limits

MOST_GROUPS = 2000
"""Maximum number of groups. At eight groups per step, groups become stale before this many are
drawn."""
POOL_BYTES = 64 * 2**20
"""Maximum memory of the groups, as `memory_bytes` estimates it: about 160 groups of eight answers
of 4,000 tokens, twenty times the draw of a step."""
PEER_SHARE = 0.125
"""Maximum share of the pool of one author. Eight authors must cooperate to displace all others."""
FRESH_VERSIONS = 4
"""Own policy versions during which a group counts as fresh. Older groups are drawn only to fill a
batch."""
DROP_VERSIONS = 8
"""Own policy versions after which a group is dropped. A guess: by then this node's policy
differs much from the one that sampled the group."""
HALF_LIFE_VERSIONS = 4.0
"""Own policy versions in which a group's sampling weight halves."""

NEWCOMERS = ""
"""Source name that all unknown authors share (`sampling.is_known`)."""


class PoolStatistics(msgspec.Struct, frozen=True):
    groups: int = 0
    bytes: int = 0
    peers: int = 0
    added: int = 0
    drawn: int = 0
    evicted_peer_share: int = 0
    evicted_full: int = 0
    expired_age: int = 0
    expired_version: int = 0
    refused: int = 0
    """Groups that are larger than one author's share of the bytes, or already in the pool."""
    staleness: dict[int, int] = {}
    """Own policy versions since the arrival of a group, at most DROP_VERSIONS → number of drawn
    groups.
    """
    max_groups: int = 0
    max_bytes: int = 0


class _Entry(msgspec.Struct):
    group: ExternalGroup
    arrived_at: float
    arrived_version: int
    bytes: int
    source: str
    is_direct: bool
    """True if the author itself is the source."""


class Pool:
    """Groups by author, in order of arrival. `now` is in Unix seconds; `policy_version` is this
    node's own counter.

    Args:
        max_bytes: Limit of memory as `memory_bytes` estimates it.
        max_groups: Limit of groups.
        peer_share: Share of both limits for one author.
    """

    def __init__(
        self,
        max_bytes: int = POOL_BYTES,
        max_groups: int = MOST_GROUPS,
        peer_share: float = PEER_SHARE,
    ) -> None:
        self.max_bytes = max_bytes
        self.max_groups = max_groups
        self.peer_groups = max(1, int(max_groups * peer_share))
        self.peer_bytes = max(1, int(max_bytes * peer_share))
        self._authors: dict[str, OrderedDict[bytes, _Entry]] = {}
        self._shares = SourceShares()
        self._bytes_of: dict[str, int] = {}
        self._groups = 0
        self._bytes = 0
        self._staleness: Counter[int] = Counter()
        self._counts = dict.fromkeys(
            (
                "added",
                "drawn",
                "evicted_peer_share",
                "evicted_full",
                "expired_age",
                "expired_version",
                "refused",
            ),
            0,
        )

    def __len__(self) -> int:
        return self._groups

    def waiting(self, participation: Callable[[str], float]) -> int:
        """Return the number of groups, each weighted by `participation`, its author's share of
        draws. Groups that are rarely drawn thus do not keep this node from fetching others.
        """
        return round(
            sum(participation(author) * len(mine) for author, mine in self._authors.items())
        )

    def add(
        self,
        group: ExternalGroup,
        now: float,
        policy_version: int,
        source: str = "",
        *,
        is_direct: bool = True,
    ) -> bool:
        """Add `group`, which arrives at `policy_version`.

        Args:
            source: Connection that delivered the group; empty for the connection of its author.
            is_direct: True if the author itself is the source.

        Returns:
            False if the group is already there or too large for its author's share.
        """
        size = memory_bytes(group.group, group.prompt, group.observations)
        mine = self._authors.get(group.peer)
        if size > self.peer_bytes or (mine is not None and group.content in mine):
            self._counts["refused"] += 1
            return False
        while mine and (
            len(mine) >= self.peer_groups or self._bytes_of[group.peer] + size > self.peer_bytes
        ):
            self._remove(group.peer, next(iter(mine)), "evicted_peer_share")
        while self._groups >= self.max_groups or self._bytes + size > self.max_bytes:
            self._evict()
        self._authors.setdefault(group.peer, OrderedDict())[group.content] = _Entry(
            group, now, policy_version, size, source or group.peer, is_direct
        )
        self._shares.arrived(source or group.peer, group.peer, group.group.sequence)
        self._bytes_of[group.peer] = self._bytes_of.get(group.peer, 0) + size
        self._groups += 1
        self._bytes += size
        self._counts["added"] += 1
        return True

    def expire(self, now: float, policy_version: int) -> None:
        """Drop groups that arrived more than `limits.GROUP_AGE_SECONDS` or `DROP_VERSIONS` own
        policy versions ago.
        """
        for author in list(self._authors):
            for content, entry in list(self._authors[author].items()):
                if now - entry.arrived_at > limits.GROUP_AGE_SECONDS:
                    self._remove(author, content, "expired_age")
                elif policy_version - entry.arrived_version > DROP_VERSIONS:
                    self._remove(author, content, "expired_version")

    def draw(
        self,
        count: int,
        policy_version: int,
        now: float,
        rng: random.Random,
        trust: Callable[[str], float] = lambda peer: 1.0,
        participation: Callable[[str], float] = lambda peer: 1.0,
        per_peer: int | None = None,
    ) -> list[ExternalGroup]:
        """Remove and return up to `count` groups for the step at `policy_version`.

        Every source gets one group before any source gets two; unknown authors count as one
        source. No source contributes more than its share. Fresh groups come first, in a random
        order weighted by `sampling.weight`; older groups only fill the batch.

        Args:
            trust: Author's peer id → weight of its groups, in [0, 1].
            participation: Author's peer id → share of draws in which its groups take part. A low
                weight alone would not exclude it, because every source gets a group.
            per_peer: Maximum number of groups of one author if there are several; None for
                `sampling.most_per_peer(count)`.
        """
        self.expire(now, policy_version)
        entries = [entry for mine in self._authors.values() for entry in mine.values()]
        if count <= 0 or not entries:
            return []
        trusted = {author: trust(author) for author in self._authors}
        name = lambda e: e.source if sampling.is_known(trusted[e.group.peer]) else NEWCOMERS
        weights = {
            author: weight if rng.random() < participation(author) else 0.0
            for author, weight in trusted.items()
        }
        most = sampling.most_per_peer(count) if per_peer is None else per_peer
        if len(self._authors) == 1:
            most = count
        ordered = self._within_shares(
            self._shuffled(entries, policy_version, rng, weights, name), count
        )
        fresh = [e for e in ordered if _lag(e, policy_version) <= FRESH_VERSIONS]
        stale = [e for e in ordered if _lag(e, policy_version) > FRESH_VERSIONS]
        chosen: list[_Entry] = []
        for some in (fresh, stale):
            some = sampling.spread_over_peers(
                some, len(chosen) + len(some), _author, most, already=chosen
            )[len(chosen) :]
            chosen = sampling.spread_over_peers(some, count, name, count, already=chosen)
        self._shares.drew(entry.source for entry in chosen)
        for entry in chosen:
            self._remove(entry.group.peer, entry.group.content, "drawn")
        groups = [
            msgspec.structs.replace(e.group, staleness=_lag(e, policy_version)) for e in chosen
        ]
        self._staleness.update(group.staleness for group in groups)
        return groups

    def _within_shares(self, ordered: list[_Entry], count: int) -> list[_Entry]:
        """Return the entries of `ordered` that fit into their sources' shares of the draw.

        A holder's own groups come before the groups that it relays, so groups of invented keys
        cannot displace them.
        """
        room = self._shares.room((entry.source for entry in ordered), count)
        of_source: dict[str, list[_Entry]] = {}
        for entry in sorted(ordered, key=lambda entry: not entry.is_direct):
            of_source.setdefault(entry.source, []).append(entry)
        turns = {source: iter(some[: room[source]]) for source, some in of_source.items()}
        in_turn = (next(turns[entry.source], None) for entry in ordered)
        return [entry for entry in in_turn if entry is not None]

    def _shuffled(
        self,
        entries: list[_Entry],
        policy_version: int,
        rng: random.Random,
        trusted: dict[str, float],
        name: Callable[[_Entry], str],
    ) -> list[_Entry]:
        sharing = Counter(named for named, _ in {(name(e), e.group.peer) for e in entries})
        weights = [
            sampling.weight(
                e.group.rewards,
                _lag(e, policy_version),
                HALF_LIFE_VERSIONS,
                # An author with more groups is not drawn earlier.
                trusted[e.group.peer] / (sharing[name(e)] * len(self._authors[e.group.peer])),
            )
            for e in entries
        ]
        return sampling.shuffle_weighted(entries, weights, rng)

    def _evict(self) -> None:
        by_bytes = self._groups < self.max_groups
        most = max(
            self._authors,
            key=(lambda p: self._bytes_of[p]) if by_bytes else (lambda p: len(self._authors[p])),
        )
        self._remove(most, next(iter(self._authors[most])), "evicted_full")

    def _remove(self, author: str, content: bytes, why: str) -> None:
        entry = self._authors[author].pop(content)
        self._bytes_of[author] -= entry.bytes
        if not self._authors[author]:
            del self._authors[author], self._bytes_of[author]
        self._groups -= 1
        self._bytes -= entry.bytes
        self._counts[why] += 1

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            groups=self._groups,
            bytes=self._bytes,
            peers=len(self._authors),
            staleness=dict(self._staleness),
            max_groups=self.max_groups,
            max_bytes=self.max_bytes,
            **self._counts,
        )


def _lag(entry: _Entry, policy_version: int) -> int:
    return max(0, policy_version - entry.arrived_version)


def _author(entry: _Entry) -> str:
    return entry.group.peer


# ---- sources -------------------------------------------------------------------------------------


FIRST_GAP = 16
"""Sequence numbers that an author's first group counts for, since its earlier numbers are unknown.
So a new key for each group gains nothing."""
MOST_GAP = 64
"""Most sequence numbers that one gap counts for."""
MEMORY_NUMBERS = 512
"""Sequence numbers of a source that are remembered: at twice as many, all counts are halved."""
HISTORY_DRAWS = 16
"""Draws over which a source's part is bounded. Rare successes come in bursts."""
EXCESS = 1.5
"""Maximum number of groups that a source may contribute, as a multiple of its part."""
MOST_AUTHORS = 4096
MOST_SOURCES = 1024


class Density:
    """Groups of one source, and the numbers that its authors advanced for them."""

    __slots__ = ("groups", "numbers")

    def __init__(self) -> None:
        self.groups = self.numbers = 0.0

    def add(self, numbers: int) -> None:
        """Count one group and the numbers since the one before it."""
        self.groups += 1
        self.numbers += numbers
        if self.numbers > 2 * MEMORY_NUMBERS:
            self.groups, self.numbers = self.groups / 2, self.numbers / 2

    @property
    def value(self) -> float:
        """Groups per number, 0 to 1."""
        return min(1.0, self.groups / self.numbers) if self.numbers else 1.0


class SourceShares:
    """Bound on what one source contributes to training.

    A source is the connection by which groups came: the address prefix or relay of their author
    where the author is connected, else that of the holder they were fetched from. Keys are free,
    connections from many networks are not.

        arrived ─▶ density of a source: its groups ÷ numbers that its authors have advanced
        room    ─▶ groups of a source in the next draw: at most EXCESS × its part of all densities
                   over the last draws, but always floor(part × count)

    An author may skip numbers, because a question without a signal is not published, and no reader
    sees all groups of an author. So a gap is not refused, but lowers the density. An author that
    answers one question in eight, to choose the text it teaches, has an eighth of the density and
    an eighth of the room. Honest authors have similar gaps: questions without a signal, and groups
    that are over the rate, not shared, or never fetched by this reader. A pause advances no number.
    A restart skips 4096 numbers and counts MOST_GAP once.
    """

    def __init__(self) -> None:
        self._newest = Latest[str, int](MOST_AUTHORS)
        """Author → its highest number."""
        self._density = Latest[str, Density](MOST_SOURCES)
        self._draws: deque[Counter[str]] = deque(maxlen=HISTORY_DRAWS - 1)

    def arrived(self, source: str, author: str, sequence: int) -> None:
        """Record an admitted group."""
        newest = self._newest.get(author)
        gap = FIRST_GAP if newest is None else min(MOST_GAP, max(0, sequence - newest))
        self._newest[author] = sequence if newest is None else max(newest, sequence)
        density = self._density[source] = self._density.get(source) or Density()
        density.add(gap)

    def room(self, waiting: Iterable[str], count: int) -> dict[str, int]:
        """Return the number of groups of each source that the next draw may take: the larger of

        * EXCESS × the source's part of the groups of the last HISTORY_DRAWS draws including this
          one, at least 1, minus the groups that were drawn from it;
        * floor(part × count), in every draw.

        Args:
            waiting: Sources of the groups that can be drawn.
            count: Groups that are asked for.
        """
        recent: Counter[str] = Counter()
        for drawn in self._draws:
            recent.update(drawn)
        sources = {*waiting, *recent}
        if len(sources) <= 1:
            return dict.fromkeys(sources, count)
        density = {source: self._value(source) for source in sources}
        total = sum(density.values())
        part = {source: value / total for source, value in density.items()}
        most = EXCESS * (recent.total() + count)
        return {
            source: max(
                math.floor(count * part[source]),
                max(1, math.ceil(most * part[source])) - recent[source],
            )
            for source in sources
        }

    def drew(self, sources: Iterable[str]) -> None:
        """Record the sources of a draw's groups, one for each group."""
        self._draws.append(Counter(sources))

    def _value(self, source: str) -> float:
        known = self._density.get(source)
        return known.value if known is not None else 1.0 / FIRST_GAP
