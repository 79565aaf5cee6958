"""The decisions of pull gossip: which peers to poll, which groups to fetch, and from which holders.

Pure: no clock, no I/O. `pull_gossip` carries out the decisions; benchmarks call this module without
a network.

    drew ─▶ demand ─▶ polls_due ─▶ polled ─▶ offers ─▶ fetches_due ─▶ fetched ─▶ scored
                                                                         │          │
                                          claims (is a listing true?) ◀──┴──────────┘

A node is hungry in two cases:

* its pool holds less than STEPS_AHEAD steps of groups, and its next draw is near;
* it has fetched less than one group per FORWARD_SECONDS. Groups reach distant nodes through other
  nodes, so a node with a slow trainer must pass them on too.

A hungry node polls at most MOST_POLLED connected peers. Once PLENTY steps of groups are on offer,
it polls one peer per PLENTY_POLL_SECONDS.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from swarmnode.rollouts.claims import Claims, has_spread
from swarmnode.rollouts.groups import is_useful
from swarmnode.rollouts.offers import Offers, Pull
from swarmnode.wire.listings import ListedGroup, ListingResponse

STEPS_AHEAD = 2
"""Steps of groups that a node keeps in its pool. More than 1, because the trainer refuses some."""
FIRST_STEP = 8
"""Assumed groups per step until the trainer's first draw. Without them a swarm trains its first
step on own groups alone, and the mean reward over training falls by 7 % (RESULTS.md)."""
MOST_POLLED = 8
"""Most polls under way at a time, each of another peer."""
PLENTY = 4
"""Steps of groups on offer at which the node stops polling more peers: an answer costs about 3 ms
of CPU and up to 1.5 KB."""
PLENTY_POLL_SECONDS = 5.0
"""Time between two polls of a hungry node with PLENTY steps of groups on offer."""
MOST_FETCHES = 4
"""The node starts no fetch while this many are under way."""
SETTLE_SECONDS = 2.0
"""A node whose pool holds the next step's groups collects listings for this time before it
chooses."""
FORWARD_SECONDS = 10.0
"""Longest average interval between fetched groups, independent of the trainer's draws."""
MOST_AHEAD_SECONDS = 60.0
"""Longest pause of forwarding after a fetch of several groups. Fetching several groups in one
request is cheaper: a request costs as much as six more groups in it."""
LEAD_SHARE = 0.25
"""Share of a step before its end at which a node starts to fetch for the next draw."""
LEAST_LEAD_SECONDS = 5.0
"""Least time before the expected next draw at which a node starts to fetch. A later fetch gets
newer groups, but a step may be shorter than usual."""
USUAL_SHARE = 0.3
"""Weight of the latest step in the moving average of step lengths."""
MOST_LONGER = 2.0
"""Longest step that enters the moving average, in units of the average. The trainer may have been
paused."""
POLL_INTERVAL_SECONDS = 1.0
"""Least time between two polls of one peer, which may answer at once with an empty listing."""
BUSY_SECONDS = 5.0
"""Time before the next poll of, or fetch from, a peer that answered `busy`."""
FAILED_SECONDS = 60.0
"""Time before the next poll of, or fetch from, a peer that did not answer."""
REFUSED_SECONDS = 600.0
"""Longest time before the next poll of a peer that refuses polls. The wait starts at 1 s and
doubles, because a peer that has just started may not serve listings yet."""
MOST_ASKED = 1024
"""Fetched groups that are remembered until their rewards are known."""
MOST_PEERS = 1024
"""Peers whose next poll time is remembered."""


class PullTimer:
    """Predicts the trainer's next draw. Times are in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._usual: float | None = None
        self._drew_at: float | None = None
        self._version: int | None = None

    @property
    def lead_seconds(self) -> float:
        """Time before the expected next draw at which fetching starts."""
        return max(LEAST_LEAD_SECONDS, LEAD_SHARE * (self._usual or 0.0))

    @property
    def opens_at(self) -> float:
        """Time at which fetching for the next draw starts; −∞ while the step length is unknown."""
        if self._usual is None or self._drew_at is None:
            return -math.inf
        return self._drew_at + self._usual - self.lead_seconds

    def drew(self, version: int, now: float) -> bool:
        """Record a draw for the step at policy `version`.

        Returns:
            False for a second draw of the same step.
        """
        if version == self._version:
            return False
        if self._drew_at is not None:
            took = now - self._drew_at
            usual = took if self._usual is None else self._usual
            self._usual = (1 - USUAL_SHARE) * usual + USUAL_SHARE * min(took, MOST_LONGER * usual)
        self._drew_at, self._version = now, version
        return True


class Puller:
    """State and decisions of one node's pull gossip.

    Methods take `now` in monotonic seconds. Methods that compare with the creation time of a group
    also take `unix` in Unix seconds.

    Args:
        own_key: The node's raw public key, 32 bytes.
        author_of: Raw public key → peer id.
        rng: Source of randomness.
        now: Current time.
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
        """Peer → time at which the poll under way was sent."""
        self._polled_at = -math.inf
        self._settles_at = -math.inf
        """Time at which the first poll under way is SETTLE_SECONDS old."""
        self._rests: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Peer → (time of the next allowed poll, length of the wait in seconds)."""
        self._busy_until: dict[str, float] = {}
        """Peer whose last fetch failed or was answered `busy` → time of the next allowed
        request."""
        self._fetches: dict[str, int] = {}
        """Peer → number of groups in the fetch under way."""
        self._asked: OrderedDict[bytes, tuple[str, ListedGroup]] = OrderedDict()
        """Content id → (holder, its listing) of groups that are being fetched or scored."""

    # -- demand

    def drew(self, count: int, waiting: int, version: int, now: float) -> None:
        """Record that the trainer asked for `count` groups for the step at policy `version`, and
        that `waiting` groups are left in the pool."""
        self._step = count if self._timer.drew(version, now) else max(self._step, count)
        self._wanted = max(0, STEPS_AHEAD * self._step - waiting)

    @property
    def urgent(self) -> bool:
        """True while the pool holds less than the next step's groups."""
        return self._wanted > (STEPS_AHEAD - 1) * self._step

    def wanted(self, now: float) -> int:
        """Return the number of groups to fetch now, including those of fetches under way."""
        if self._wanted > 0 and (self.urgent or now >= self._timer.opens_at):
            return self._wanted
        return int(now >= self._forwards_at)

    def next_time(self, now: float) -> float:
        """Return the next time after `now` at which a timer makes a poll or fetch due."""
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
        """Number of polls under way."""
        return len(self._polls)

    def polls_due(
        self, connected: Collection[str], now: float, is_known: Callable[[bytes], bool]
    ) -> list[str]:
        """Choose peers to poll now. Each poll is under way until `polled` or `refused` is called.

        Peers are drawn with probability proportional to the belief in them (`claims`).

        Args:
            connected: Peers that may be polled.
            is_known: Content id → True if the group was received before.
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
        """Process the answer to a poll; `response` is None if there was no valid one.

        Returns:
            False if the cursor of the answer contradicts the peer's earlier answers.
        """
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
        """Record that `peer` does not speak the listing protocol, or reset the stream."""
        self._polls.pop(peer, None)
        _, rest = self._rests.get(peer, (now, 0.0))
        self._rest(peer, now, min(REFUSED_SECONDS, max(1.0, 2 * rest)))

    def _rest(self, peer: str, now: float, seconds: float) -> None:
        """Do not poll `peer` before `now` + `seconds`."""
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
        """Choose groups to fetch now. Each fetch is under way until `fetched` or `failed` is
        called.

        Args:
            now: Monotonic seconds.
            unix: Unix seconds.
            trust: Author's peer id → weight of its groups, 0 to 1.
            is_known: Content id → True if the group was received before.
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

    def fetched(self, pull: Pull, outcomes: Sequence[str], now: float) -> None:
        """Record the outcome of each group of a fetch, one of `pull_gossip.PULLED`."""
        del self._fetches[pull.holder]
        for listed, outcome in zip(pull.groups, outcomes, strict=True):
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
        """Record a fetch without a valid answer.

        The groups may be fetched from other holders at once, and from this one after
        FAILED_SECONDS.
        """
        del self._fetches[pull.holder]
        self.claims.lie(pull.holder, "slow")
        self._busy_until[pull.holder] = now + FAILED_SECONDS
        for listed in pull.groups:
            self._asked.pop(listed.content, None)
            self.offers.restore(pull.holder, listed)

    def contradicted(self, content: bytes) -> None:
        """Forget the listing of a fetched group that contradicts it: the lie is counted already."""
        self._asked.pop(content, None)

    def scored(self, content: bytes, rewards: list[float], now: float) -> None:
        """Compare a fetched group's rewards (G,) with the spread that its holder listed."""
        if not is_useful(rewards) and content in self._asked:
            self._wanted += 1  # it cannot be trained on, so the node needs another one
        holder, listed = self._asked.pop(content, (None, None))
        if holder is None or listed is None:
            return
        if has_spread(listed, rewards):
            self.claims.keep(holder)
        else:
            self.claims.lie(holder, "spread")

    def diverged(self, content: bytes) -> None:
        """Note that the episodes of a fetched group end elsewhere when they are replayed."""
        if (asked := self._asked.pop(content, None)) is not None:
            self._wanted += 1  # it cannot be trained on, so the node needs another one
            self.claims.lie(asked[0], "trajectory")

    def _busy(self, now: float) -> Collection[str]:
        """Return the peers that may be neither polled nor fetched from at `now`."""
        self._busy_until = {peer: at for peer, at in self._busy_until.items() if at > now}
        return self._busy_until

    def _is_known(self, content: bytes, is_known: Callable[[bytes], bool]) -> bool:
        return content in self._asked or is_known(content)


def _draw_distinct(
    items: Sequence[str], weights: Sequence[float], count: int, rng: random.Random
) -> list[str]:
    """Draw up to `count` of `items` without replacement, weighted by `weights`.

    Efraimidis and Spirakis (2006): the largest keys u^(1/weight), u uniform in [0, 1).
    """
    keyed = [
        (rng.random() ** (1.0 / weight), item) for item, weight in zip(items, weights, strict=True)
    ]
    return [item for _, item in sorted(keyed, reverse=True)[: max(0, count)]]
