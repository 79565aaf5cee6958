"""The summary protocol, `/swarmnode/summary/1`: nodes describe themselves, for the status page of
any member.

    this node ─ own signed summary, or nothing ─▶ peer    every 30 s at most, a few peers a round
    this node ◀─ summaries that the peer knows ── peer    each signed by its subject
    signature ─ age ─ interval ─ room? ─▶ Claims ─▶ status page, aggregates

The content is for display only; a lie misleads the reader of the page and nothing else. Memory, the
share of it that one peer can fill, and work are bounded. A summary that comes directly from its
signer also carries that peer's time. The times of many peers show whether the own clock is wrong.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import random
import statistics
import time
from collections.abc import Callable

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import Requests
from swarmnode.p2p.slots import RateLimiter
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.envelope import open_summary, seal_summary
from swarmnode.wire.messages import Summary, SummaryRequest, SummaryResponse

log = logging.getLogger(__name__)

DEADLINE = 10.0
POLL_INTERVAL = 1.0
ROUND_SECONDS = limits.SUMMARY_SECONDS
"""Minimum interval between rounds; jitter adds up to half of it."""
PEERS_PER_ROUND = 4
"""Number of peers that receive a request in one round, in order of their last request, oldest
first."""
REQUEST_BURST = 4
REQUEST_SECONDS = ROUND_SECONDS / 2
"""A peer may send REQUEST_BURST requests at once and one more per REQUEST_SECONDS."""
MAX_CLAIMS = 1024
"""Maximum number of stored summaries. A summary that comes directly from its signer replaces the
oldest forwarded one, or else the oldest."""
MAX_FORWARDED = 256
"""Maximum number of stored summaries that one peer forwarded."""
MAX_CLOCKS = 256
CLOCK_SECONDS = 600.0
MAX_ROWS = 128
"""Maximum number of summaries on the page."""
NAME_CHARACTERS = 32
"""Maximum length of a displayed name."""
MIN_CLOCKS = 2
"""Minimum number of peers for an estimate of the clock offset."""
OUTCOMES = ("taken", "known", "own", "future", "old", "full", "unwelcome", "malformed", "failed")
"""Outcomes of a received summary; `failed` is a failed request."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A stored summary."""

    peer: str
    """The signer, the only verified part."""
    frame: bytes
    """The signed summary as received."""
    summary: Summary
    sender: str
    """Peer that sent it."""

    @property
    def direct(self) -> bool:
        """True if the signer sent it itself."""
        return self.sender == self.peer

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
    policy_version_median: float | None = None
    rows: list[ClaimStatistics] = []
    """The latest summary of each peer: direct ones first, then by age; at most MAX_ROWS."""
    received: dict[str, int] = {}
    """Received summaries by outcome of OUTCOMES."""
    clock_offset_seconds: float | None = None
    """Median in seconds by which the peers' clocks are ahead of the own clock; None with fewer than
    MIN_CLOCKS peers."""


class Claims:
    """The latest summary of each peer, bounded. Pure: `now` is Unix time in seconds, which decides
    about ages."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._claims: dict[str, Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, frame: bytes) -> bool:
        return any(claim.frame == frame for claim in self._claims.values())

    def take(self, frame: bytes, signer: str, summary: Summary, sender: str, now: float) -> str:
        """Store the summary of `signer` that `sender` sent, unless a rule forbids it. Returns an
        outcome of OUTCOMES."""
        age = now - summary.created_at / 1000
        if signer == self._own:
            return "own"
        if age < -limits.CLOCK_SKEW_SECONDS:
            return "future"
        if age > limits.SUMMARY_AGE_SECONDS:
            return "old"
        known = self._claims.get(signer)
        if known is not None:
            if summary.created_at < known.summary.created_at + 1000 * limits.SUMMARY_SECONDS:
                return "known"
            first_sender = signer if sender == signer else known.sender
            self._claims[signer] = Claim(signer, frame, summary, first_sender)
            return "taken"
        self.expire(now)
        if sender != signer and (
            len(self) >= MAX_CLAIMS
            or sum(1 for claim in self._claims.values() if claim.sender == sender) >= MAX_FORWARDED
        ):
            return "full"
        if len(self) >= MAX_CLAIMS:
            del self._claims[min(self._claims.values(), key=lambda claim: claim.rank).peer]
        self._claims[signer] = Claim(signer, frame, summary, sender)
        return "taken"

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


class Clocks:
    """Clock offsets of peers, from the last summary of each. Pure: `now` is in seconds on any
    clock."""

    def __init__(self) -> None:
        self._offsets: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def record(self, peer: str, offset: float, now: float) -> None:
        """Record an offset: seconds by which the clock of `peer` is ahead."""
        self._offsets.pop(peer, None)
        self._offsets[peer] = (offset, now)
        if len(self._offsets) > MAX_CLOCKS:
            self._offsets.popitem(last=False)

    def offset(self, now: float) -> float | None:
        """Return the median; of two middle values the one nearer to zero, so that a majority is
        needed to make a clock look wrong."""
        offsets = sorted(
            offset for offset, at in self._offsets.values() if now - at <= CLOCK_SECONDS
        )
        if len(offsets) < MIN_CLOCKS:
            return None
        return min(offsets[(len(offsets) - 1) // 2], offsets[len(offsets) // 2], key=abs)


class Summaries:
    """Exchanges summaries with a few peers per round.

    Args:
        requests: transport of the messages.
        own: peer id of this node.
        key: signs the own summary.
        swarm: swarm id, part of the signature.
        connected: returns the connected peers.
        is_allowed: returns False for peers whose summaries are dropped.
        clock: Unix time in seconds.
        rng: random source.

    Attributes:
        own_summary: (creation time in ms) → own summary; None shares nothing.
    """

    def __init__(
        self,
        requests: Requests,
        own: str,
        key: Ed25519PrivateKey,
        swarm: bytes,
        connected: Callable[[], list[str]],
        *,
        is_allowed: Callable[[str], bool] = lambda peer: True,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.own_summary: Callable[[int], Summary | None] = lambda created_at: None
        self._requests = requests
        self._swarm = swarm
        self._connected = connected
        self._is_allowed = is_allowed
        self._clock = clock
        self._rng = rng or random.Random()
        self._claims = Claims(own)
        self._clocks = Clocks()
        self._outcomes = collections.Counter[str](dict.fromkeys(OUTCOMES, 0))
        self._asked: dict[
            str, float
        ] = {}  # connected peer → time of the last request, on trio's clock
        self._limiter = RateLimiter(REQUEST_BURST, REQUEST_SECONDS)
        self._key = key
        self._own_frame = b""
        """The own summary as signed in the latest round; empty if nothing is shared."""
        self._signed_at = -math.inf
        requests.serve(
            ids.SUMMARY_PROTOCOL,
            self._answer,
            max_request_bytes=limits.SUMMARY_REQUEST_BYTES,
            max_response_bytes=limits.SUMMARY_RESPONSE_BYTES,
            concurrent=16,
            per_peer=1,
            deadline=DEADLINE,
        )

    async def run(self) -> None:
        """Run rounds until cancelled."""
        while True:
            connected = self._connected()
            self._claims.expire(self._clock())
            if connected:
                await self.round(connected)
                await trio.sleep(ROUND_SECONDS * self._rng.uniform(1.0, 1.5))
            else:
                await trio.sleep(POLL_INTERVAL)

    async def round(self, connected: list[str]) -> None:
        """Sign the own summary and ask a few peers."""
        self._asked = {peer: self._asked.get(peer, -math.inf) for peer in connected}
        now = trio.current_time()
        own = self.own_summary(int(self._clock() * 1000))
        frame = b"" if own is None else seal_summary(own, self._key, self._swarm)
        self._own_frame, self._signed_at = frame, now
        async with trio.open_nursery() as nursery:
            for peer in sorted(connected, key=lambda peer: (self._asked[peer], self._rng.random()))[
                :PEERS_PER_ROUND
            ]:
                self._asked[peer] = now
                nursery.start_soon(self.ask, peer, frame)

    async def ask(self, peer: str, frame: bytes) -> None:
        """Send the own summary to one peer and store the ones that it returns. Never raises for a
        fault of the peer."""
        try:
            data = await self._requests.request(
                peer,
                ids.SUMMARY_PROTOCOL,
                codec.encode(SummaryRequest(frame)),
                deadline=DEADLINE,
                max_response_bytes=limits.SUMMARY_RESPONSE_BYTES,
            )
            response = codec.decode(data, SummaryResponse, limits.SUMMARY_RESPONSE_BYTES)
        except PeerError as error:
            self._outcomes["malformed" if isinstance(error, BadMessage) else "failed"] += 1
            log.debug("no summaries from %s: %s", peer, error)
            return
        for received in response.summaries:
            if received in self._claims:
                self._outcomes["known"] += 1
                continue
            # verifying many signatures takes time, so other tasks may run in between
            await trio.lowlevel.checkpoint()
            try:
                signer, summary = open_summary(received, self._swarm)
            except BadMessage:
                self._outcomes["malformed"] += 1
                continue
            self._take(received, signer, summary, peer)

    def _take(self, frame: bytes, signer: str, summary: Summary, sender: str) -> None:
        outcome = (
            self._claims.take(frame, signer, summary, sender, self._clock())
            if self._is_allowed(signer)
            else "unwelcome"
        )
        self._outcomes[outcome] += 1

    async def _answer(self, peer: str, data: bytes) -> bytes:
        """Handle a request. Raises BadMessage, also if another peer signed the summary, and
        PeerError above the request rate."""
        if not self._limiter.allow(peer, trio.current_time()):
            raise PeerError(f"{peer} sends too many requests")
        request = codec.decode(data, SummaryRequest, limits.SUMMARY_REQUEST_BYTES)
        if request.summary:
            signer, summary = open_summary(request.summary, self._swarm)
            if signer != peer:
                raise BadMessage("bounds", "the summary is signed by another peer")
            self._clocks.record(
                peer, summary.created_at / 1000 - self._clock(), trio.current_time()
            )
            self._take(request.summary, signer, summary, peer)
        self._claims.expire(self._clock())
        fresh = trio.current_time() - self._signed_at <= limits.SUMMARY_AGE_SECONDS
        own = [self._own_frame] if self._own_frame and fresh else []
        return codec.encode(
            SummaryResponse(own + self._claims.frames(limits.SUMMARIES - len(own), peer, self._rng))
        )

    def version_of(self, peer: str) -> str:
        """Return the swarmnode version in the latest summary of `peer`; empty if there is none."""
        claim = self._claims.get(peer)
        return "" if claim is None else claim.summary.version

    def statistics(self) -> SummaryStatistics:
        now = self._clock()
        self._claims.expire(now)
        return aggregate(
            self._claims.all(), dict(self._outcomes), self._clocks.offset(trio.current_time()), now
        )


def aggregate(
    claims: list[Claim], received: dict[str, int], clock_offset: float | None, now: float
) -> SummaryStatistics:
    """Aggregate `claims`, which are in display order. `now` is Unix time in seconds."""
    rewards = [claim.summary.reward for claim in claims if claim.summary.reward >= 0]
    return SummaryStatistics(
        reporting=len(claims),
        reward_median=statistics.median(rewards) if rewards else None,
        policy_version_median=statistics.median(claim.summary.policy_version for claim in claims)
        if claims
        else None,
        rows=[_row(claim, now) for claim in claims[:MAX_ROWS]],
        received=received,
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
