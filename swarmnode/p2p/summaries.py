"""The summary protocol, `/swarmnode/summary/1`: what nodes say of themselves, for whoever looks at
the swarm from one of them.

    we ─ our summary, signed just now, or nothing ─▶ peer      twice a minute at most, a few peers a
    round
    we ◀─ summaries of others that it knows ─ peer             each signed by whom it is about
    signature ─ age ─ not too soon after the last ─ room? ─▶ Claims ─▶ status page, aggregates

A display and nothing else: whoever lies here lies to people. What is bounded is the memory, how
much of it one peer can fill, and the work. A summary that comes from its signer also tells the time
there, and many peers' time tells whether our own clock is off.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import random
import statistics
import time
from collections.abc import Callable

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.api import Requests
from swarmnode.wire import codec, ids, limits
from swarmnode.wire.messages import Summary, SummaryRequest, SummaryResponse
from swarmnode.wire.summary import open_summary, seal_summary

log = logging.getLogger(__name__)

DEADLINE = 10.0
POLL_INTERVAL = 1.0
ROUND_SECONDS = limits.SUMMARY_SECONDS
"""Between two rounds of asking, at least; with jitter up to half as long again."""
AT_ONCE = 4
"""Peers asked in one round, those first that were not asked for longest."""
ANSWERS = 4
"""A peer is answered this often at once, and then once per half a round."""
CLAIMS = 1024
"""Summaries kept. From its signer one always finds room, if need be in place of the oldest passed
on, or of the oldest."""
PASSED_ON = 256
"""Summaries kept that one peer has passed on."""
CLOCKS = 256
CLOCK_SECONDS = 600.0
ROWS = 128
"""Peers whose summaries are shown."""
NAME_CHARACTERS = 32
"""Characters of a node's name, as told and as shown."""
LEAST_CLOCKS = 2
"""A single peer does not tell the time."""
OUTCOMES = ("taken", "known", "own", "future", "old", "full", "unwelcome", "malformed", "failed")
"""What becomes of a summary; `failed` is an answer that did not come."""


@dataclasses.dataclass(frozen=True)
class Claim:
    peer: str
    """Who signed it: the one thing here that is proved."""
    summary: Summary
    direct: bool
    """Whether the peer itself told us."""


class ClaimStatistics(msgspec.Struct, frozen=True):
    """What another node says of itself, as it is shown. Only `peer` is proved: it signed this."""

    peer: str
    name: str = ""
    version: str = ""
    step: int = 0
    policy_version: int = 0
    reward: float | None = None
    """Its held-out reward; None while it has none."""
    published: int = 0
    peers: int = 0
    uptime_seconds: int = 0
    age_seconds: float = 0.0
    """Since it was signed, by our clock."""
    direct: bool = False
    """Whether it told us itself, rather than another peer."""


class SummaryStatistics(msgspec.Struct, frozen=True):
    """The swarm as its nodes describe themselves: claimed, not verified."""

    reporting: int = 0
    """Peers with a summary that is not too old; `rows` may be fewer."""
    reward_median: float | None = None
    """Median of the held-out rewards that they claim."""
    policy_version_median: float | None = None
    rows: list[ClaimStatistics] = []
    """The latest of each peer, those first that told us themselves, then by age; at most ROWS."""
    heard: dict[str, int] = {}
    """Summaries by outcome of OUTCOMES."""
    clock_offset_seconds: float | None = None
    """Seconds by which our peers' clocks are ahead of ours, their median; None while fewer than
    LEAST_CLOCKS have told."""


@dataclasses.dataclass
class _Entry:
    frame: bytes
    summary: Summary
    by: str
    """Who told us."""


class Claims:
    """The latest summary of each peer, bounded. Pure: `now` is Unix seconds, by which a summary is
    young or not."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, frame: bytes) -> bool:
        return any(entry.frame == frame for entry in self._entries.values())

    def take(self, frame: bytes, signer: str, summary: Summary, by: str, now: float) -> str:
        """Keeps what `by` told of `signer`, unless there is a reason not to: an outcome of
        OUTCOMES."""
        age = now - summary.created_at / 1000
        if signer == self._own:
            return "own"
        if age < -limits.CLOCK_SKEW_SECONDS:
            return "future"
        if age > limits.SUMMARY_AGE_SECONDS:
            return "old"
        known = self._entries.get(signer)
        if known is not None:
            if summary.created_at < known.summary.created_at + 1000 * limits.SUMMARY_SECONDS:
                return "known"
            self._entries[signer] = _Entry(frame, summary, signer if by == signer else known.by)
            return "taken"
        self.expire(now)
        if by != signer and (
            len(self) >= CLAIMS
            or sum(1 for entry in self._entries.values() if entry.by == by) >= PASSED_ON
        ):
            return "full"
        if len(self) >= CLAIMS:
            del self._entries[min(self._entries, key=self._worth)]
        self._entries[signer] = _Entry(frame, summary, by)
        return "taken"

    def expire(self, now: float) -> None:
        oldest, newest = (
            1000 * (now - limits.SUMMARY_AGE_SECONDS),
            1000 * (now + limits.CLOCK_SKEW_SECONDS),
        )
        self._entries = {
            peer: entry
            for peer, entry in self._entries.items()
            if oldest <= entry.summary.created_at <= newest
        }

    def frames(self, count: int, apart_from: str, rng: random.Random) -> list[bytes]:
        """At most `count` of them, chosen at random, as they came."""
        others = [entry.frame for peer, entry in self._entries.items() if peer != apart_from]
        return rng.sample(others, min(count, len(others)))

    def all(self) -> list[Claim]:
        ranked = sorted(self._entries, key=self._worth, reverse=True)
        return [
            Claim(peer, self._entries[peer].summary, self._entries[peer].by == peer)
            for peer in ranked
        ]

    def _worth(self, peer: str) -> tuple[bool, int]:
        entry = self._entries[peer]
        return entry.by == peer, entry.summary.created_at


class Clocks:
    """What time peers have, each by its last summary. Pure: `now` in seconds, any clock."""

    def __init__(self) -> None:
        self._told: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def note(self, peer: str, offset: float, now: float) -> None:
        """`offset`: seconds by which its clock is ahead of ours."""
        self._told.pop(peer, None)
        self._told[peer] = (offset, now)
        if len(self._told) > CLOCKS:
            self._told.popitem(last=False)

    def offset(self, now: float) -> float | None:
        """The median; of two in the middle, the one nearer to zero, so that it takes a majority to
        make a clock look wrong."""
        offsets = sorted(offset for offset, at in self._told.values() if now - at <= CLOCK_SECONDS)
        if len(offsets) < LEAST_CLOCKS:
            return None
        return min(offsets[(len(offsets) - 1) // 2], offsets[len(offsets) // 2], key=abs)


class Allowance:
    """How often each connected peer may still ask: ANSWERS times at once, and then once per half a
    round. Pure: `now` in seconds."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}  # peer → what it had left, and when

    def keep(self, peers: list[str]) -> None:
        """Forget all others."""
        self._left = {peer: self._left[peer] for peer in peers if peer in self._left}

    def take(self, peer: str, now: float) -> bool:
        """Whether `peer` may ask now, which is then counted."""
        left, at = self._left.get(peer, (float(ANSWERS), now))
        left = min(float(ANSWERS), left + (now - at) * 2 / ROUND_SECONDS) - 1.0
        self._left[peer] = (max(0.0, left), now)
        return left >= 0


class Signed:
    """This node's own summary as it was signed in the latest round."""

    def __init__(self, key: Ed25519PrivateKey, swarm: bytes) -> None:
        self._key = key
        self._swarm = swarm
        self._frame, self._at = b"", -float("inf")

    def sign(self, summary: Summary | None, now: float) -> bytes:
        """The frame that says it; empty for None, which shares nothing. `now`: seconds, any
        clock."""
        self._frame = b"" if summary is None else seal_summary(summary, self._key, self._swarm)
        self._at = now
        return self._frame

    def fresh(self, now: float) -> list[bytes]:
        """The frame, unless it is too old for anybody, or there is none."""
        return [self._frame] if self._frame and now - self._at <= limits.SUMMARY_AGE_SECONDS else []


class Summaries:
    """`run` tells a few peers of this node, and hears from them of others.

    `own_summary`: this node's summary, `created_at` left to us; None shares nothing. connected:
    peer ids; clock: Unix seconds.
    """

    def __init__(
        self,
        requests: Requests,
        own: str,
        key: Ed25519PrivateKey,
        swarm: bytes,
        connected: Callable[[], list[str]],
        *,
        welcome: Callable[[str], bool] = lambda peer: True,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.own_summary: Callable[[int], Summary | None] = lambda created_at: None
        self._requests = requests
        self._swarm = swarm
        self._connected = connected
        self._welcome = welcome
        self._clock = clock
        self._rng = rng or random.Random()
        self._claims = Claims(own)
        self._clocks = Clocks()
        self._outcomes = collections.Counter[str](dict.fromkeys(OUTCOMES, 0))
        self._asked: dict[str, float] = {}  # connected peer → when, by trio's clock
        self._allowance = Allowance()
        self._signed = Signed(key, swarm)
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
        """Until cancelled."""
        while True:
            connected = self._connected()
            self._claims.expire(self._clock())
            if connected:
                await self.round(connected)
                await trio.sleep(ROUND_SECONDS * self._rng.uniform(1.0, 1.5))
            else:
                await trio.sleep(POLL_INTERVAL)

    async def round(self, connected: list[str]) -> None:
        """Signs a summary and asks some peers."""
        self._asked = {peer: self._asked.get(peer, -float("inf")) for peer in connected}
        self._allowance.keep(connected)
        now = trio.current_time()
        frame = self._signed.sign(self.own_summary(int(self._clock() * 1000)), now)
        async with trio.open_nursery() as nursery:
            for peer in sorted(connected, key=lambda peer: (self._asked[peer], self._rng.random()))[
                :AT_ONCE
            ]:
                self._asked[peer] = now
                nursery.start_soon(self.ask, peer, frame)

    async def ask(self, peer: str, frame: bytes) -> None:
        """Tells one peer of this node and takes over what it knows of others. Never raises for
        anything the peer does."""
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
        for told in response.summaries:
            if told in self._claims:
                self._outcomes["known"] += 1
                continue
            # a signature takes a fraction of a millisecond, and there may be many
            await trio.lowlevel.checkpoint()
            try:
                signer, summary = open_summary(told, self._swarm)
            except BadMessage:
                self._outcomes["malformed"] += 1
                continue
            self._take(told, signer, summary, peer)

    def _take(self, frame: bytes, signer: str, summary: Summary, by: str) -> None:
        outcome = (
            self._claims.take(frame, signer, summary, by, self._clock())
            if self._welcome(signer)
            else "unwelcome"
        )
        self._outcomes[outcome] += 1

    async def _answer(self, peer: str, data: bytes) -> bytes:
        """Their summary. Raises BadMessage, also when it is not theirs, and PeerError when they ask
        too often."""
        if not self._allowance.take(peer, trio.current_time()):
            raise PeerError(f"{peer} asks too often")
        request = codec.decode(data, SummaryRequest, limits.SUMMARY_REQUEST_BYTES)
        if request.summary:
            signer, summary = open_summary(request.summary, self._swarm)
            if signer != peer:
                raise BadMessage("bounds", "a summary of somebody else")
            self._clocks.note(peer, summary.created_at / 1000 - self._clock(), trio.current_time())
            self._take(request.summary, signer, summary, peer)
        self._claims.expire(self._clock())
        own = self._signed.fresh(trio.current_time())
        return codec.encode(
            SummaryResponse(own + self._claims.frames(limits.SUMMARIES - len(own), peer, self._rng))
        )

    def version_of(self, peer: str) -> str:
        """Return the version of swarmnode in the latest summary of `peer`; empty if there is
        none."""
        return next((c.summary.version for c in self._claims.all() if c.peer == peer), "")

    def statistics(self) -> SummaryStatistics:
        now = self._clock()
        self._claims.expire(now)
        return summed_up(
            self._claims.all(), dict(self._outcomes), self._clocks.offset(trio.current_time()), now
        )


def summed_up(
    claims: list[Claim], heard: dict[str, int], clock_offset: float | None, now: float
) -> SummaryStatistics:
    """`claims`: in the order in which they are shown; `now`: Unix seconds."""
    rewards = [claim.summary.reward for claim in claims if claim.summary.reward >= 0]
    return SummaryStatistics(
        reporting=len(claims),
        reward_median=statistics.median(rewards) if rewards else None,
        policy_version_median=statistics.median(claim.summary.policy_version for claim in claims)
        if claims
        else None,
        rows=[_row(claim, now) for claim in claims[:ROWS]],
        heard=heard,
        clock_offset_seconds=clock_offset,
    )


def _row(claim: Claim, now: float) -> ClaimStatistics:
    """A claim as it is shown. `now`: Unix seconds."""
    told = claim.summary
    return ClaimStatistics(
        peer=claim.peer,
        name=plain_name(told.name),
        version=told.version,
        step=told.step,
        policy_version=told.policy_version,
        reward=told.reward if told.reward >= 0 else None,
        published=told.published,
        peers=told.peers,
        uptime_seconds=told.uptime,
        age_seconds=max(0.0, now - told.created_at / 1000),
        direct=claim.direct,
    )


def plain_name(name: str) -> str:
    """At most NAME_CHARACTERS of a name, without what turns the text around it or cannot be seen:
    it may be a stranger's."""
    return "".join(c if c.isprintable() else "\ufffd" for c in name[:NAME_CHARACTERS])
