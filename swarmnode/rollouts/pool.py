"""Pool of admitted groups that wait for training. Pure: time, policy version and randomness are
arguments.

A source is the connection that delivered a group (`rollouts.sources`); a step draws from several
sources. The pool is bounded in groups and in bytes, and so is each peer's share of it. In a full
share, a peer's newest group replaces its oldest. In a full pool, the oldest group of the most
represented peer is evicted.

A group is **drawn at most once**. A second pass over a group in a later step would be a second and
more off-policy epoch, and a peer could affect any number of steps with a single good group. SAPO
(arXiv 2509.08721) likewise samples each round only from the rollouts of that round.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from swarmnode.rollouts import sampling
from swarmnode.rollouts.groups import ExternalGroup, is_useful, memory_bytes
from swarmnode.rollouts.sources import SourceShares
from swarmnode.wire import limits

MOST_GROUPS = 2000
"""Maximum number of groups. At eight groups per step, groups become stale before this many are
drawn."""
POOL_BYTES = 64 * 2**20
"""Maximum memory of the groups, as `memory_bytes` estimates it: about 160 groups of eight answers
of 4,000 tokens, twenty times the draw of a step."""
PEER_SHARE = 0.125
"""Maximum share of the pool of one peer. Eight peers must cooperate to displace all others."""
FRESH_VERSIONS = 4
"""Own policy versions during which a group counts as fresh. Older groups are drawn only to fill a
batch."""
DROP_VERSIONS = 8
"""Own policy versions after which a group is dropped. By then this node's policy differs so much
from the policy that sampled the group that the importance weight of each token is at its lower
bound."""
HALF_LIFE_VERSIONS = 4.0
"""Own policy versions in which a group's sampling weight halves."""

NEWCOMERS = ""
"""Common source name of all new peers."""


class PoolStatistics(msgspec.Struct, frozen=True):
    groups: int = 0
    bytes: int = 0
    peers: int = 0
    largest_peer_share: float = 0.0
    """Groups of the most represented peer ÷ groups in the pool; 0 when empty."""
    oldest_seconds: float | None = None
    """Age of the oldest group; None when empty."""
    added: int = 0
    useful_added: int = 0
    """Added groups whose rewards differ."""
    drawn: int = 0
    evicted_peer_share: int = 0
    evicted_full: int = 0
    expired_age: int = 0
    expired_version: int = 0
    refused: int = 0
    """Groups that are larger than one peer's share of the bytes, or already in the pool."""
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
    """Groups by peer, in order of arrival. `now` is in Unix seconds; `policy_version` is this
    node's own counter.

    Args:
        max_bytes: Limit of memory as `memory_bytes` estimates it.
        max_groups: Limit of groups.
        peer_share: Share of both limits for one peer.
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
        self._peers: dict[str, OrderedDict[bytes, _Entry]] = {}
        self._shares = SourceShares()
        self._bytes_of: dict[str, int] = {}
        self._groups = 0
        self._bytes = 0
        self._staleness: Counter[int] = Counter()
        self._counts = dict.fromkeys(
            (
                "added",
                "useful_added",
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

    @property
    def useful_added(self) -> int:
        """Number of groups added so far whose rewards differ."""
        return self._counts["useful_added"]

    def waiting(self, belief: Callable[[str], float]) -> int:
        """Return the number of groups, each weighted by `belief`, its author's share of draws.
        Groups that are rarely drawn thus do not keep this node from fetching others.
        """
        return round(sum(belief(peer) * len(mine) for peer, mine in self._peers.items()))

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
            source: Connection that delivered the group (`rollouts.sources`); empty for the
                connection of its author.
            is_direct: True if the author itself is the source.

        Returns:
            False if the group is already there or too large for its peer's share.
        """
        size = memory_bytes(group.group, group.prompt, group.observations)
        mine = self._peers.get(group.peer)
        if size > self.peer_bytes or (mine is not None and group.content in mine):
            self._counts["refused"] += 1
            return False
        while mine and (
            len(mine) >= self.peer_groups or self._bytes_of[group.peer] + size > self.peer_bytes
        ):
            self._remove(group.peer, next(iter(mine)), "evicted_peer_share")
        while self._groups >= self.max_groups or self._bytes + size > self.max_bytes:
            self._evict()
        self._peers.setdefault(group.peer, OrderedDict())[group.content] = _Entry(
            group, now, policy_version, size, source or group.peer, is_direct
        )
        self._shares.arrived(source or group.peer, group.peer, group.group.sequence)
        self._bytes_of[group.peer] = self._bytes_of.get(group.peer, 0) + size
        self._groups += 1
        self._bytes += size
        self._counts["added"] += 1
        self._counts["useful_added"] += is_useful(group.rewards)
        return True

    def expire(self, now: float, policy_version: int) -> None:
        """Drop groups that arrived more than `limits.GROUP_AGE_SECONDS` or `DROP_VERSIONS` own
        policy versions ago.
        """
        for peer in list(self._peers):
            for content, entry in list(self._peers[peer].items()):
                if now - entry.arrived_at > limits.GROUP_AGE_SECONDS:
                    self._remove(peer, content, "expired_age")
                elif policy_version - entry.arrived_version > DROP_VERSIONS:
                    self._remove(peer, content, "expired_version")

    def draw(
        self,
        count: int,
        policy_version: int,
        now: float,
        rng: random.Random,
        trust: Callable[[str], float] = lambda peer: 1.0,
        belief: Callable[[str], float] = lambda peer: 1.0,
        per_peer: int | None = None,
    ) -> list[ExternalGroup]:
        """Remove and return up to `count` groups for the step at `policy_version`.

        Every source gets one group before any source gets two; new peers count as one
        source. No source contributes more than its share. Fresh groups come first, in a random
        order weighted by `sampling.weight`; older groups only fill the batch.

        Args:
            trust: Peer id → weight of the peer's groups, in [0, 1].
            belief: Peer id → share of draws in which the peer takes part. A low weight alone would
                not exclude a peer, because every source gets a group.
            per_peer: Maximum number of groups of one peer if there are several peers; None for
                `sampling.most_per_peer(count)`.
        """
        self.expire(now, policy_version)
        entries = [entry for mine in self._peers.values() for entry in mine.values()]
        if count <= 0 or not entries:
            return []
        trusted = {peer: trust(peer) for peer in self._peers}
        name = lambda e: e.source if sampling.is_known(trusted[e.group.peer]) else NEWCOMERS
        heeded = {
            peer: much if rng.random() < belief(peer) else 0.0 for peer, much in trusted.items()
        }
        most = sampling.most_per_peer(count) if per_peer is None else per_peer
        if len(self._peers) == 1:
            most = count
        ordered = self._within_shares(
            self._shuffled(entries, policy_version, rng, heeded, name), count
        )
        fresh = [e for e in ordered if _lag(e, policy_version) <= FRESH_VERSIONS]
        stale = [e for e in ordered if _lag(e, policy_version) > FRESH_VERSIONS]
        chosen: list[_Entry] = []
        for some in (fresh, stale):
            some = sampling.spread_over_peers(
                some, len(chosen) + len(some), _peer, most, already=chosen
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
                # A peer with more groups is not drawn earlier.
                trusted[e.group.peer] / (sharing[name(e)] * len(self._peers[e.group.peer])),
            )
            for e in entries
        ]
        return sampling.shuffle_weighted(entries, weights, rng)

    def _evict(self) -> None:
        by_bytes = self._groups < self.max_groups
        most = max(
            self._peers,
            key=(lambda p: self._bytes_of[p]) if by_bytes else (lambda p: len(self._peers[p])),
        )
        self._remove(most, next(iter(self._peers[most])), "evicted_full")

    def _remove(self, peer: str, content: bytes, why: str) -> None:
        entry = self._peers[peer].pop(content)
        self._bytes_of[peer] -= entry.bytes
        if not self._peers[peer]:
            del self._peers[peer], self._bytes_of[peer]
        self._groups -= 1
        self._bytes -= entry.bytes
        self._counts[why] += 1

    def statistics(self, now: float) -> PoolStatistics:
        firsts = [next(iter(mine.values())).arrived_at for mine in self._peers.values()]
        largest = max((len(mine) for mine in self._peers.values()), default=0)
        return PoolStatistics(
            groups=self._groups,
            bytes=self._bytes,
            peers=len(self._peers),
            largest_peer_share=largest / self._groups if self._groups else 0.0,
            oldest_seconds=max(0.0, now - min(firsts)) if firsts else None,
            staleness=dict(self._staleness),
            max_groups=self.max_groups,
            max_bytes=self.max_bytes,
            **self._counts,
        )


def _lag(entry: _Entry, policy_version: int) -> int:
    return max(0, policy_version - entry.arrived_version)


def _peer(entry: _Entry) -> str:
    return entry.group.peer
