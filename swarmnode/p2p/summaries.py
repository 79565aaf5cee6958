"""Summaries: signed figures with which nodes describe themselves, for the status page of any
member. Pure.

    signature ─ age ─ interval ─▶ Claims ─▶ status page, aggregates

The content is for display only; a lie misleads the reader of the page and nothing else. Memory is
bounded. `Requesters` stores what peers report with each request: their clock, and how many groups
of this node they used.
"""

from __future__ import annotations

import dataclasses
import random
import statistics

import msgspec

from swarmnode.latest import Latest
from swarmnode.wire import limits
from swarmnode.wire.messages import Summary

MAX_CLAIMS = 1024
"""Maximum number of stored summaries. Above it the oldest forwarded one is dropped, or else the
oldest."""
MAX_REQUESTERS = 256
CLOCK_SECONDS = 600.0
"""A clock that was observed longer ago is ignored."""
MIN_CLOCKS = 2
"""Minimum number of peers for an estimate of the clock offset."""
MAX_ROWS = 128
"""Maximum number of summaries on the page."""
NAME_CHARACTERS = 32
"""Maximum length of a displayed name."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A stored summary. Only `peer` is verified, as its signer."""

    peer: str
    frame: bytes
    """The signed summary as received."""
    summary: Summary
    direct: bool
    """True if the signer sent it itself."""

    @property
    def rank(self) -> tuple[bool, int]:
        """Sort key: direct ones first, then by age."""
        return self.direct, self.summary.created_at


class ClaimStatistics(msgspec.Struct, frozen=True):
    """The summary of another node for display. Only `peer` is verified, as its signer."""

    peer: str
    name: str = ""
    version: str = ""
    step: int = 0
    policy_version: int = 0
    reward: float | None = None
    """Held-out reward of that node; None if it has none."""
    reward_step: int = 0
    """Step after which it was measured."""
    published: int = 0
    peers: int = 0
    uptime_seconds: int = 0
    age_seconds: float = 0.0
    """Time since it was signed, by the own clock."""
    direct: bool = False
    """True if its signer sent it itself."""


class SummaryStatistics(msgspec.Struct, frozen=True):
    """The swarm as its nodes describe themselves; unverified."""

    reporting: int = 0
    """Number of peers with a recent summary; `rows` may be fewer."""
    reward_median: float | None = None
    """Median of the reported held-out rewards."""
    rows: list[ClaimStatistics] = []
    """The latest summary of each peer: direct ones first, then by age; at most MAX_ROWS."""
    used: int = 0
    """Groups of this node that its peers have trained on, as they report; of the MAX_REQUESTERS
    latest peers."""
    used_by: int = 0
    """Number of these peers."""
    clock_offset_seconds: float | None = None
    """Median in seconds by which the peers' clocks are ahead of the own clock; None with fewer than
    MIN_CLOCKS peers."""


class Claims:
    """The latest summary of each peer, bounded. `now` is Unix time in seconds, which decides about
    ages."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._claims: dict[str, Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, frame: bytes) -> bool:
        return any(claim.frame == frame for claim in self._claims.values())

    def take(self, frame: bytes, signer: str, summary: Summary, sender: str, now: float) -> None:
        """Store the summary of `signer` that `sender` sent, unless a rule forbids it."""
        age = now - summary.created_at / 1000
        if (
            signer == self._own
            or not -limits.CLOCK_SKEW_SECONDS <= age <= limits.SUMMARY_AGE_SECONDS
        ):
            return
        direct = sender == signer
        if (known := self._claims.get(signer)) is not None:
            if summary.created_at < known.summary.created_at + 1000 * limits.SUMMARY_SECONDS:
                return
            direct = direct or known.direct
        self._claims[signer] = Claim(signer, frame, summary, direct)
        if len(self._claims) > MAX_CLAIMS:
            del self._claims[min(self._claims.values(), key=lambda claim: claim.rank).peer]

    def expire(self, now: float) -> None:
        """Drop summaries that are too old or from the future."""
        oldest = 1000 * (now - limits.SUMMARY_AGE_SECONDS)
        newest = 1000 * (now + limits.CLOCK_SKEW_SECONDS)
        self._claims = {
            peer: claim
            for peer, claim in self._claims.items()
            if oldest <= claim.summary.created_at <= newest
        }

    def frames(self, count: int, exclude: str, rng: random.Random) -> list[bytes]:
        """Return at most `count` random frames, except the one of `exclude`."""
        others = [claim.frame for peer, claim in self._claims.items() if peer != exclude]
        return rng.sample(others, min(count, len(others)))

    def all(self) -> list[Claim]:
        """Return all summaries, direct ones first, then by age."""
        return sorted(self._claims.values(), key=lambda claim: claim.rank, reverse=True)

    def get(self, peer: str) -> Claim | None:
        """Return the summary of `peer`."""
        return self._claims.get(peer)


@dataclasses.dataclass(frozen=True)
class Requester:
    """What a peer reported with its latest request."""

    offset: float
    """Seconds by which its clock is ahead of the own clock."""
    used: int
    """Number of groups of this node that it has trained on."""
    at: float
    """Time of the request on trio's clock."""


class Requesters:
    """The latest report of each peer, bounded. `now` is trio's clock."""

    def __init__(self) -> None:
        self._peers = Latest[str, Requester](MAX_REQUESTERS)

    def record(self, peer: str, offset: float, used: int, now: float) -> None:
        """Record a request. `used` of 0 does not replace an earlier number."""
        before = self._peers.get(peer)
        self._peers[peer] = Requester(offset, used or (before.used if before else 0), now)

    def used(self) -> list[int]:
        """Return the positive numbers of used groups, one per peer."""
        return [each.used for each in self._peers.values() if each.used]

    def clock_offset(self, now: float) -> float | None:
        """Return the median offset; of two middle values the one nearer to zero, so that a majority
        is needed to make a clock look wrong."""
        offsets = sorted(
            each.offset for each in self._peers.values() if now - each.at <= CLOCK_SECONDS
        )
        if len(offsets) < MIN_CLOCKS:
            return None
        return min(offsets[(len(offsets) - 1) // 2], offsets[len(offsets) // 2], key=abs)


def aggregate(
    claims: list[Claim], used: list[int], clock_offset: float | None, now: float
) -> SummaryStatistics:
    """Aggregate `claims`, which are in display order. `now` is Unix time in seconds."""
    rewards = [claim.summary.reward for claim in claims if claim.summary.reward >= 0]
    return SummaryStatistics(
        reporting=len(claims),
        reward_median=statistics.median(rewards) if rewards else None,
        rows=[_row(claim, now) for claim in claims[:MAX_ROWS]],
        used=sum(used),
        used_by=len(used),
        clock_offset_seconds=clock_offset,
    )


def _row(claim: Claim, now: float) -> ClaimStatistics:
    """Return a claim for display. `now` is Unix time in seconds."""
    summary = claim.summary
    return ClaimStatistics(
        peer=claim.peer,
        name=plain_name(summary.name),
        version=summary.version,
        step=summary.step,
        policy_version=summary.policy_version,
        reward=summary.reward if summary.reward >= 0 else None,
        reward_step=summary.reward_step,
        published=summary.published,
        peers=summary.peers,
        uptime_seconds=summary.uptime,
        age_seconds=max(0.0, now - summary.created_at / 1000),
        direct=claim.direct,
    )


def plain_name(name: str) -> str:
    """Return at most NAME_CHARACTERS of a name with unprintable characters replaced: a stranger's
    name must not change the direction of the surrounding text."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name[:NAME_CHARACTERS])
