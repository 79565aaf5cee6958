"""Reputation of peers, and the thresholds for ignoring and banning them. `now` is monotonic time in
seconds.

    score: 0 for a stranger, up to BEST for a useful peer; decays with HALF_LIFE; minus a cost per
    rejection
    GOOD ──score ≤ GREYLIST──▶ GREYLISTED ──score ≤ BAN──▶ BANNED ──24 h──▶ GREYLISTED
      ◀──score > FORGIVEN────┘ (messages ignored)          (connections closed and refused)

Like GossipSub v1.1's peer score (Vyzovitis et al. 2020, section 3.2), trust grows slowly and falls
fast. Here it depends on the full validation of messages, not on timing. Peer ids are free and
addresses less so: all peers of one /24 or /48 network together earn at most PREFIX_BEST, and each
ban lowers the initial score of new peers of that prefix.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math

import msgspec
import trio

BEST = 20.0
PREFIX_BEST = 40.0
EARNED = 0.1
COST = 10.0
"""Cost of one rejection. A peer without accepted messages can afford one every three minutes."""
GREYLIST = -50.0
FORGIVEN = -25.0
BAN = -100.0
BAN_SECONDS = 86400.0
HALF_LIFE = 600.0
NEWCOMER_COST = 10.0
NEWCOMER_LOWEST = -40.0
"""A new peer starts NEWCOMER_COST lower per ban in its prefix, but never greylisted, because it is
not responsible for its neighbours."""
MAX_PEERS = 4096


class Standing(enum.Enum):
    GOOD = "good"
    GREYLISTED = "greylisted"
    BANNED = "banned"


@dataclasses.dataclass(slots=True)
class Record:
    score: float
    at: float
    prefix: str | None = None
    greylisted: bool = False
    banned_until: float = -math.inf
    rejections: int = 0


@dataclasses.dataclass(frozen=True)
class SavedRecord:
    """One peer in a snapshot. Times are relative to the snapshot, because monotonic clocks do not
    survive a restart."""

    peer: str
    score: float
    prefix: str | None
    banned_for: float


class ReputationStatistics(msgspec.Struct, frozen=True):
    peers: int = 0
    greylisted: int = 0
    banned: int = 0
    accepted: int = 0
    rejected: dict[str, int] = {}
    """Rejections by reason."""
    bans: int = 0


class Reputation:
    """Scores of at most MAX_PEERS peers; the least significant ones are dropped first."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._by_prefix: dict[str, set[str]] = collections.defaultdict(set)
        self._accepted = self._bans = 0
        self._rejected = collections.Counter[str]()

    def accepted(self, peer: str, now: float) -> None:
        """Record a useful item of `peer`."""
        record = self._record(peer, now)
        record.score = min(BEST, record.score + EARNED)
        self._accepted += 1

    def rejected(self, peer: str, reason: str, now: float, cost: float = COST) -> Standing:
        """Record an item of `peer` that was provably invalid.

        Args:
            peer: its creator.
            reason: one of a closed set; it becomes a metric label.
            now: time.
            cost: what the score loses.

        Returns:
            The new standing.
        """
        record = self._record(peer, now)
        record.score -= cost
        record.rejections += 1
        self._rejected[reason] += 1
        if record.score <= BAN and record.banned_until <= now:
            record.banned_until = now + BAN_SECONDS
            self._bans += 1
        return self.standing(peer, now)

    def set_prefix(self, peer: str, prefix: str | None, now: float) -> None:
        """Record the network prefix of a connecting peer; None for this machine or unknown."""
        if prefix is None:
            return
        known = peer in self._records
        record = self._record(peer, now)
        if not known:
            bans = sum(
                1 for other in self._by_prefix[prefix] if self._records[other].banned_until > now
            )
            record.score = max(NEWCOMER_LOWEST, -NEWCOMER_COST * bans)
        self._leave_prefix(peer, record)
        record.prefix = prefix
        self._by_prefix[prefix].add(peer)

    def standing(self, peer: str, now: float) -> Standing:
        """Return the standing of `peer`."""
        if (record := self._records.get(peer)) is None:
            return Standing.GOOD
        if record.banned_until > now:
            return Standing.BANNED
        # After a ban the peer is greylisted until its score has decayed to FORGIVEN.
        if record.banned_until > -math.inf:
            record.banned_until = -math.inf
            record.score, record.at, record.greylisted = GREYLIST, now, True
        self._decay(record, now)
        record.greylisted = record.score <= (FORGIVEN if record.greylisted else GREYLIST)
        return Standing.GREYLISTED if record.greylisted else Standing.GOOD

    def rejections(self, peer: str) -> int:
        """Return the number of rejections of `peer` since the process started, for display."""
        record = self._records.get(peer)
        return 0 if record is None else record.rejections

    def score(self, peer: str, now: float) -> float:
        """Return the score, at most BEST. The peers of one prefix share PREFIX_BEST in proportion
        to their scores."""
        if (record := self._records.get(peer)) is None:
            return 0.0
        self._decay(record, now)
        if record.score <= 0 or record.prefix is None:
            return record.score
        earned = 0.0
        for other in self._by_prefix[record.prefix]:
            self._decay(self._records[other], now)
            earned += max(0.0, self._records[other].score)
        return record.score * min(1.0, PREFIX_BEST / earned)

    def snapshot(self, now: float) -> list[SavedRecord]:
        """Return the records to save."""
        saved = []
        for peer, record in self._records.items():
            self._decay(record, now)
            if abs(record.score) >= EARNED or record.banned_until > now:
                saved.append(
                    SavedRecord(
                        peer, record.score, record.prefix, max(0.0, record.banned_until - now)
                    )
                )
        return saved

    def restore(self, saved: list[SavedRecord], away: float, now: float) -> None:
        """Restore a snapshot that is `away` seconds old."""
        for each in saved[:MAX_PEERS]:
            if not (math.isfinite(each.score) and math.isfinite(each.banned_for)):
                continue
            remaining = min(each.banned_for, BAN_SECONDS) - away
            record = Record(
                min(BEST, each.score),
                now - away,
                each.prefix,
                banned_until=now + remaining if remaining > 0 else -math.inf,
            )
            self._records[each.peer] = record
            if each.prefix is not None:
                self._by_prefix[each.prefix].add(each.peer)

    def statistics(self, now: float) -> ReputationStatistics:
        standings = collections.Counter(self.standing(peer, now) for peer in self._records)
        return ReputationStatistics(
            peers=len(self._records),
            greylisted=standings[Standing.GREYLISTED],
            banned=standings[Standing.BANNED],
            accepted=self._accepted,
            rejected=dict(self._rejected),
            bans=self._bans,
        )

    def _record(self, peer: str, now: float) -> Record:
        record = self._records.get(peer)
        if record is None:
            if len(self._records) >= MAX_PEERS:
                self._evict(now)
            record = self._records[peer] = Record(0.0, now)
        self._decay(record, now)
        return record

    def _evict(self, now: float) -> None:
        """Drop the eighth of the records with the lowest significance, so that a flood of new peer
        ids costs one pass per many of them."""
        worth = {
            peer: (record.banned_until > now, abs(record.score))
            for peer, record in self._records.items()
        }
        for peer in sorted(worth, key=worth.__getitem__)[: MAX_PEERS // 8]:
            self._leave_prefix(peer, self._records.pop(peer))

    def _leave_prefix(self, peer: str, record: Record) -> None:
        if record.prefix is not None:
            self._by_prefix[record.prefix].discard(peer)
            if not self._by_prefix[record.prefix]:
                del self._by_prefix[record.prefix]

    @staticmethod
    def _decay(record: Record, now: float) -> None:
        if now > record.at:
            record.score *= 0.5 ** ((now - record.at) / HALF_LIFE)
            record.at = now


class PeerScores:
    """Base class of a network: `api.PeerScoring` on a `Reputation` and trio's clock."""

    def __init__(self) -> None:
        self.reputation = Reputation()

    def disconnect(self, peer: str) -> None:
        """Close all connections with `peer`, because it was banned."""
        raise NotImplementedError

    def is_allowed(self, peer: str) -> bool:
        """See `api.PeerScoring.is_allowed`."""
        return self.reputation.standing(peer, trio.current_time()) is Standing.GOOD

    def may_connect(self, peer: str, now: float) -> bool:
        """Return False if `peer` is banned, so that no connection with it is wanted."""
        return self.reputation.standing(peer, now) is not Standing.BANNED

    def score(self, peer: str) -> float:
        """See `api.PeerScoring.score`."""
        return self.reputation.score(peer, trio.current_time())

    def accepted(self, peer: str) -> None:
        """See `api.PeerScoring.accepted`."""
        self.reputation.accepted(peer, trio.current_time())

    def rejected(self, peer: str, reason: str, cost: float = COST) -> None:
        """See `api.PeerScoring.rejected`."""
        if self.reputation.rejected(peer, reason, trio.current_time(), cost) is Standing.BANNED:
            self.disconnect(peer)
