"""The decisions of pull gossip: which peers to poll, and which groups to fetch from whom. Pure: no
clock, no I/O. `pull_gossip` carries them out, benchmarks drive them without a network.

    drew ─▶ demand ─▶ polls_due ─▶ polled ─▶ offers ─▶ fetches_due ─▶ fetched ─▶ scored
                                                                         │          │
                                          claims (is a listing true?) ◀──┴──────────┘

A node is hungry while its pool holds less than `STEPS_AHEAD` steps of groups and its next draw is
near, and whenever it fetched less than one group in FORWARD_SECONDS: groups travel through
nodes, so that a slow trainer must not stop them. A hungry node polls at most MOST_POLLED connected
peers, and no more of them once enough is on offer.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from swarmnode.rollouts.claims import Claims, has_spread
from swarmnode.rollouts.groups import is_useful
from swarmnode.rollouts.offers import Offers, Pull
from swarmnode.wire.listings import Listed, ListingResponse

STEPS_AHEAD = 2
"""Steps of groups that a node keeps in its pool: not every group that arrives can be trained on."""
FIRST_STEP = 8
"""Groups that a node wants before its trainer has drawn any. Without them a swarm's first step is
trained on own groups alone, which costs 7 % of the reward on the way (RESULTS.md)."""
MOST_POLLED = 8
"""Peers polled at a time."""
PLENTY = 4
"""Offered groups per group of a step from which on no further peer is polled: an answer costs about
3 ms of CPU and up to 1.5 KB."""
PLENTY_POLL_SECONDS = 5.0
"""Between two polls where there is plenty on offer and the node is hungry nevertheless."""
MOST_FETCHES = 4
"""Fetches under way from which on no other is begun."""
SETTLE_SECONDS = 2.0
"""How long a node whose pool holds the next step waits for its first polls before it chooses."""
FORWARD_SECONDS = 10.0
"""A node fetches one group in so long, whatever its trainer draws."""
MOST_AHEAD_SECONDS = 60.0
"""A node that fetched several groups together waits up to this long before it fetches one
that its trainer does not want: a request costs as much as six more groups in it."""
LEAD_SHARE = 0.25
LEAST_LEAD_SECONDS = 5.0
"""A node fetches `max(5 s, step / 4)` before its next draw: the later, the newer is what it gets;
but a step may be shorter than usual."""
USUAL_SHARE = 0.3
"""Weight of the latest step in the moving average of step lengths."""
MOST_LONGER = 2.0
"""A step counts at most this many times the usual length: the trainer may have been paused."""
POLL_INTERVAL_SECONDS = 1.0
"""Between two polls of one peer, at least: it may answer at once without news."""
BUSY_SECONDS = 5.0
"""Before the next poll of, or fetch from, a peer that answered `busy`."""
FAILED_SECONDS = 60.0
"""Before the next poll of, or fetch from, a peer that did not answer."""
REFUSED_SECONDS = 600.0
"""Before the next poll of a peer that does not list, at most: the wait begins with a second and
doubles, because a peer that has just started does not list yet."""
MOST_ASKED = 1024
"""Fetched groups that are remembered until their rewards are known."""
MOST_PEERS = 1024


class PullTimer:
    """Predicts the trainer's next draw. Times are in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._usual: float | None = None
        self._drew_at: float | None = None
        self._version: int | None = None

    @property
    def lead_seconds(self) -> float:
        """How long before its next draw a node fetches."""
        return max(LEAST_LEAD_SECONDS, LEAD_SHARE * (self._usual or 0.0))

    @property
    def opens_at(self) -> float:
        """When fetching for the next draw begins; in the past where a step's length is unknown."""
        if self._usual is None or self._drew_at is None:
            return -math.inf
        return self._drew_at + self._usual - self.lead_seconds

    def drew(self, version: int, now: float) -> bool:
        """Note a draw for the step at policy `version`. Return False for a second draw of the same
        step."""
        if version == self._version:
            return False
        if self._drew_at is not None:
            took = now - self._drew_at
            usual = took if self._usual is None else self._usual
            self._usual = (1 - USUAL_SHARE) * usual + USUAL_SHARE * min(took, MOST_LONGER * usual)
        self._drew_at, self._version = now, version
        return True


class Puller:
    """One node's pulling.

    Args:
        own_key: the node's raw public key, 32 bytes.
        author_of: raw public key → peer id.
        rng: source of randomness.
        now: monotonic seconds. Methods that also take `unix`, in Unix seconds, compare it with the
            time at which a group was made.
    """

    def __init__(
        self, own_key: bytes, author_of: Callable[[bytes], str], rng: random.Random, now: float
    ) -> None:
        self.offers = Offers(own_key, author_of)
        self.claims = Claims()
        self._rng = rng
        self._timer = PullTimer()
        self._step = FIRST_STEP
        self._wanted = STEPS_AHEAD * FIRST_STEP
        self._forwards_at = now + FORWARD_SECONDS
        self._polls: dict[str, float] = {}
        """Peer → when the poll under way was sent."""
        self._polled_at = -math.inf
        self._settles_at = -math.inf
        """When the first of the polls under way is SETTLE_SECONDS old."""
        self._rests: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Peer → (when it may be polled again, seconds of that rest)."""
        self._busy_until: dict[str, float] = {}
        """Peer that answered a fetch with `busy`, or not at all → when it may be asked again."""
        self._fetches: dict[str, int] = {}
        """Peer → groups of the fetch under way."""
        self._asked: OrderedDict[bytes, tuple[str, Listed]] = OrderedDict()

    # -- demand

    def drew(self, count: int, waiting: int, version: int, now: float) -> None:
        """Note that the trainer drew `count` groups for the step at policy `version`, after which
        `waiting` groups are in the pool."""
        self._step = count if self._timer.drew(version, now) else max(self._step, count)
        self._wanted = max(0, STEPS_AHEAD * self._step - waiting)

    @property
    def urgent(self) -> bool:
        """Whether the pool holds less than the next step's groups."""
        return self._wanted > (STEPS_AHEAD - 1) * self._step

    def wanted(self, now: float) -> int:
        """Groups that should be fetched now, those of fetches under way included."""
        if self._wanted > 0 and (self.urgent or now >= self._timer.opens_at):
            return self._wanted
        return int(now >= self._forwards_at)

    def next_time(self, now: float) -> float:
        """When, after `now`, another poll or fetch may be due although nothing happened."""
        times = [
            self._timer.opens_at,
            self._forwards_at,
            self._settles_at,
            self._polled_at + PLENTY_POLL_SECONDS,
            *(until for until, _ in self._rests.values()),
            *self._busy_until.values(),
        ]
        return min((time for time in times if time > now), default=math.inf)

    # -- listings

    @property
    def polling(self) -> int:
        """Polls under way."""
        return len(self._polls)

    def polls_due(
        self, connected: Collection[str], now: float, is_known: Callable[[bytes], bool]
    ) -> list[str]:
        """Choose peers to poll now. Each is under way until `polled` is called.

        Peers are drawn with a probability in proportion to how far their listings are believed: a
        peer of which nothing came yet has a quarter of the weight of one that gave eight groups.

        Args:
            connected: peers that may be polled.
            is_known: whether the group with a content id was received before.
        """
        self.offers.keep(connected)
        if self.wanted(now) <= 0:
            return []
        busy = self._busy(now)
        room = min(MOST_POLLED, len(connected)) - len(self._polls)
        offered = self.offers.count(lambda content: self._is_known(content, is_known), busy)
        if offered >= PLENTY * self._step:
            room = int(now >= self._polled_at + PLENTY_POLL_SECONDS and not self._polls)
        due = [
            peer
            for peer in connected
            if peer not in self._polls
            and peer not in busy
            and self._rests.get(peer, (-math.inf, 0.0))[0] <= now
        ]
        belief = [self.claims.belief(peer) for peer in due]
        chosen = _draw_distinct(due, belief, room, self._rng)
        if chosen and not self._polls:
            self._settles_at = now + SETTLE_SECONDS
        for peer in chosen:
            self._polls[peer] = self._polled_at = now
        return chosen

    def polled(self, peer: str, response: ListingResponse | None, now: float, unix: float) -> bool:
        """Take the answer to a poll, None where there was no usable one. Return False for a
        dishonest one: its cursor went back."""
        sent_at = self._polls.pop(peer, now)
        if response is None:
            self.claims.lie(peer, "slow")
            self._rest(peer, now, FAILED_SECONDS)
            return True
        if response.status == "ok":
            self._rest(peer, sent_at, POLL_INTERVAL_SECONDS)
            if not self.offers.take(peer, response, unix):
                self.claims.lie(peer, "cursor")
                return False
            return True
        self._rest(peer, now, BUSY_SECONDS if response.status == "busy" else REFUSED_SECONDS)
        return True

    def refused(self, peer: str, now: float) -> None:
        """Note that `peer` does not speak the listing protocol, or reset the stream."""
        self._polls.pop(peer, None)
        _, rest = self._rests.get(peer, (now, 0.0))
        self._rest(peer, now, min(REFUSED_SECONDS, max(1.0, 2 * rest)))

    def _rest(self, peer: str, now: float, seconds: float) -> None:
        """Do not poll `peer` for so long."""
        self._rests.pop(peer, None)
        self._rests[peer] = (now + seconds, seconds)
        if len(self._rests) > MOST_PEERS:
            self._rests.popitem(last=False)

    # -- groups

    def fetches_due(
        self,
        now: float,
        unix: float,
        trust: Callable[[str], float],
        is_known: Callable[[bytes], bool],
    ) -> list[Pull]:
        """Choose groups to fetch now. Each fetch is under way until `fetched` or `failed`.

        Args:
            trust: peer id of an author → how much its groups count, 0 to 1.
            is_known: whether the group with a content id was received before.
        """
        missing = self.wanted(now) - sum(self._fetches.values())
        settling = self._polls and now < self._settles_at
        if missing <= 0 or len(self._fetches) >= MOST_FETCHES or (settling and not self.urgent):
            return []
        pulls = self.offers.choose(
            missing,
            unix,
            self._rng,
            trust,
            self.claims.belief,
            is_known,
            {*self._fetches, *self._busy(now)},
            self._asked,
            few=not self.urgent,
        )
        for pull in pulls:
            forwarded = FORWARD_SECONDS * len(pull.groups)
            self._forwards_at = min(
                max(self._forwards_at, now) + forwarded, now + MOST_AHEAD_SECONDS
            )
            self._fetches[pull.holder] = len(pull.groups)
            for listed in pull.groups:
                self._asked[listed.content] = (pull.holder, listed)
        while len(self._asked) > MOST_ASKED:
            self._asked.popitem(last=False)
        return pulls

    def fetched(self, pull: Pull, came: Sequence[str], now: float) -> None:
        """Take how the groups of a fetch ended, each `ok`, `busy`, `unknown` or anything else."""
        del self._fetches[pull.holder]
        for listed, outcome in zip(pull.groups, came, strict=True):
            if outcome == "ok":
                self._wanted = max(0, self._wanted - 1)
                continue
            self._asked.pop(listed.content, None)
            if outcome == "busy":
                self.offers.restore(pull.holder, listed)
                self._busy_until[pull.holder] = now + BUSY_SECONDS
            elif outcome == "unknown":
                self.claims.lie(pull.holder, "absent")

    def failed(self, pull: Pull, now: float) -> None:
        """Note a fetch without an answer. The groups may be fetched from others now, and from the
        same peer after FAILED_SECONDS."""
        del self._fetches[pull.holder]
        self.claims.lie(pull.holder, "slow")
        self._busy_until[pull.holder] = now + FAILED_SECONDS
        for listed in pull.groups:
            self._asked.pop(listed.content, None)
            self.offers.restore(pull.holder, listed)

    def contradicted(self, content: bytes) -> None:
        """Forget what was listed of a fetched group that the group itself contradicts."""
        self._asked.pop(content, None)

    def scored(self, content: bytes, rewards: list[float], now: float) -> None:
        """Compare a fetched group's rewards (G,) with the spread that its holder listed."""
        if not is_useful(rewards) and content in self._asked:
            self._wanted += 1  # it is not trained on, so another one is wanted in its place
        holder, listed = self._asked.pop(content, (None, None))
        if holder is None or listed is None:
            return
        if has_spread(listed, rewards):
            self.claims.keep(holder)
        else:
            self.claims.lie(holder, "spread")

    def _busy(self, now: float) -> Collection[str]:
        """Return the peers that are neither polled nor fetched from now."""
        self._busy_until = {peer: at for peer, at in self._busy_until.items() if at > now}
        return self._busy_until

    def _is_known(self, content: bytes, is_known: Callable[[bytes], bool]) -> bool:
        return content in self._asked or is_known(content)


def _draw_distinct(
    items: Sequence[str], weights: Sequence[float], count: int, rng: random.Random
) -> list[str]:
    """Draw up to `count` of `items` without replacement, in proportion to `weights`."""
    keyed = [
        (rng.random() ** (1.0 / weight), item) for item, weight in zip(items, weights, strict=True)
    ]
    return [item for _, item in sorted(keyed, reverse=True)[: max(0, count)]]
