"""The decisions of pull gossip: which peers to poll, which groups to fetch, and from which holders.

Pure: no clock, no I/O. `exchange.PullGossip` carries out the decisions.

    drew ─▶ demand ─▶ polls_due ─▶ polled ─▶ offers ─▶ fetches_due ─▶ fetched ─▶ scored
                          ▲                                │             │          │
                          └── Holder: proven or not, rest ─┴─────────────┴──────────┘

A node is hungry in two cases:

* its pool holds less than STEPS_AHEAD steps of groups, and its next draw is near;
* it has fetched less than one group per FORWARD_SECONDS. Groups reach distant nodes through other
  nodes, so a node with a slow trainer must pass them on too.

Identities are free, so a peer may hold little before it has given something. A holder is *proven*
by PROVING_GROUPS fetched groups that are as they were listed and can be trained on. A false
listing, `busy` or a missing answer ends that, and the holder rests: twice as long each time.

    proven      MOST_POLLED polls, MOST_FETCHES fetches of up to 16 groups and 1 MiB
    unproven    MOST_POLLED polls, none of a holder with offers; UNPROVEN_FETCHES fetches of one
                group each, the smallest first; more while there are few proven holders
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Literal, get_args

import msgspec

from swarmnode.latest import Latest
from swarmnode.rollouts import sampling
from swarmnode.rollouts.groups import is_useful
from swarmnode.rollouts.network.admission import clock_reason
from swarmnode.wire import limits
from swarmnode.wire.listings import ListedGroup, ListingResponse
from swarmnode.wire.messages import RolloutGroup

STEPS_AHEAD = 2
"""Steps of groups that a node keeps in its pool. More than 1, because the trainer refuses some."""
FIRST_STEP = 8
"""Assumed groups per step until the trainer's first draw. Without them a swarm trains its first
step on own groups alone, and the mean reward over training falls by 7 % (RESULTS.md)."""
MOST_POLLED = 8
"""Maximum number of polls of proven holders under way, and of unproven ones, each of another
peer."""
PLENTY = 4
"""Steps of groups on offer at proven holders at which the node stops polling more peers: an answer
costs about 3 ms of CPU and up to 1.5 KB."""
PLENTY_POLL_SECONDS = 5.0
"""Time between two polls of a hungry node with PLENTY steps of groups on offer."""
MOST_FETCHES = 4
"""Maximum number of fetches from proven holders under way."""
UNPROVEN_FETCHES = 2
"""Maximum number of fetches from unproven holders under way, if proven ones have offers. Otherwise
it is MOST_FETCHES."""
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
"""Minimum time before the expected next draw at which a node starts to fetch. A later fetch gets
newer groups, but a step may be shorter than usual."""
USUAL_SHARE = 0.3
"""Weight of the latest step in the moving average of step lengths."""
MOST_LONGER = 2.0
"""Longest step that enters the moving average, in units of the average. The trainer may have been
paused."""
POLL_INTERVAL_SECONDS = 1.0
"""Minimum time between two polls of a proven holder, which may answer at once with an empty
listing. Unproven ones are polled as often as peers that hold each poll: once per patience."""
REFUSED_SECONDS = 1.0
"""First rest of a peer that refuses polls: it may not serve yet."""
BUSY_SECONDS = 5.0
"""First rest of a holder that answered a fetch with `busy`, had a group no more, or needed more
than half of the deadline. Every rest of one that answered a poll with `busy`."""
FAILED_SECONDS = 60.0
"""First rest of a holder that did not answer, or whose listing was false."""
MOST_REST_SECONDS = 600.0
"""Longest rest."""
RECOVERY = 0.9
"""Factor on a holder's last rest for each group that counts for it: seven groups halve its next
rest."""
PROVING_GROUPS = 4
"""Groups after which a holder is proven. With 1, thirty identities that give one group and then
hold fetches left a node 1 to 5 of 8 groups per step; with 4 or 8 it had all (RESULTS.md)."""
MOST_ASKED = 1024
"""Fetched groups that are remembered until their rewards are known."""
MOST_HOLDERS = 1024
"""Peers that are remembered."""
MOST_OFFERED = 32
"""Offers stored per holder, the newest. Older offers are rarely chosen, and each costs 4 µs per
choice."""
HALF_LIFE_SECONDS = 60.0
"""Age at which the weight of a listed group has halved: about two steps."""
RELAYED_WEIGHT = 0.3
"""Weight of a holder that is not the author, against 1. Preferring authors spreads the load: every
reader learns of a group from its author first."""
SPREAD_TOLERANCE = 0.01
"""Tolerance for rounding. Rewards are deterministic."""

Fault = Literal[
    "absent",
    "content",
    "size",
    "author",
    "task",
    "age",
    "spread",
    "cursor",
    "slow",
    "trajectory",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)
EVIDENT: frozenset[Fault] = frozenset({"content", "size", "author", "task", "age"})
"""Faults that the fetched bytes prove; they also cost reputation. Other faults may have an honest
explanation."""


class Pull(msgspec.Struct, frozen=True):
    """One fetch request: a holder and the groups to ask it for, the most wanted first."""

    holder: str
    groups: tuple[ListedGroup, ...]


class Holder(msgspec.Struct):
    """Memory of one peer: its cursor, its offers, the requests to it, and what they showed."""

    life: bytes = b""
    position: int = 0
    offers: Latest[bytes, ListedGroup] = msgspec.field(default_factory=lambda: Latest(MOST_OFFERED))
    """Content id → its listing."""
    proofs: int = 0
    """Groups that were as listed and can be trained on, since the last rest."""
    rest: float = 0.0
    """Length of the last rest in seconds, lowered by RECOVERY."""
    rests_until: float = -math.inf
    polled_at: float = -math.inf
    polling: bool = False
    fetching: int = 0
    """Groups of the fetch under way."""

    @property
    def proven(self) -> bool:
        """True after PROVING_GROUPS groups without a rest."""
        return self.proofs >= PROVING_GROUPS

    @property
    def next_poll(self) -> float:
        """Time from which the holder may be polled."""
        interval = POLL_INTERVAL_SECONDS if self.proven else float(limits.PATIENCE_SECONDS)
        return max(self.rests_until, self.polled_at + interval)

    def fail(self, now: float, least: float) -> None:
        """Let the holder rest for at least `least` seconds, and at least twice as long as last
        time."""
        self.rest = min(MOST_REST_SECONDS, max(least, 2 * self.rest))
        self.pause(now, self.rest)

    def pause(self, now: float, seconds: float) -> None:
        """Let the holder rest, instead of the interval between polls. It is unproven again."""
        self.rests_until, self.polled_at = now + seconds, -math.inf
        self.proofs = 0

    def take(self, response: ListingResponse, own_key: bytes, unix: float) -> bool:
        """Store the offers of a listing with the status `ok`, except own groups.

        Returns:
            False if the cursor went back within one life, or advanced by less than the number of
            groups listed. Such a holder could list groups without end.
        """
        if self.life != response.life:
            self.life, self.position = response.life, 0
            self.offers.clear()
        if response.position - self.position < len(response.groups):
            return False
        self.position = response.position
        for listed in response.groups:
            if listed.author != own_key and clock_reason(listed.created_at, unix) is None:
                self.offers[listed.content] = listed
        return True

    def disconnect(self) -> None:
        """Forget cursor and offers. The next connection starts with all groups."""
        self.life, self.position = b"", 0
        self.offers.clear()


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
    """

    def __init__(
        self, own_key: bytes, author_of: Callable[[bytes], str], rng: random.Random
    ) -> None:
        self._own_key = own_key
        self._author_of = author_of
        self._rng = rng
        self._timer = PullTimer()
        self._step = FIRST_STEP
        self._wanted = STEPS_AHEAD * FIRST_STEP
        self._forwards_at = -math.inf
        self._polled_at = -math.inf
        self._settles_at = -math.inf
        """Time at which the first poll under way is SETTLE_SECONDS old."""
        self._holders = Latest[str, Holder](MOST_HOLDERS)
        self._asked = Latest[bytes, tuple[str, ListedGroup]](MOST_ASKED)
        """Content id → (holder, its listing) of groups that are being fetched or scored."""
        self._confirmed = 0
        self._faults: Counter[Fault] = Counter()

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
        ]
        for holder in self._holders.values():
            times += [holder.rests_until, holder.next_poll]
        return min((time for time in times if time > now), default=math.inf)

    # -- listings

    @property
    def polling(self) -> int:
        """Number of polls under way."""
        return sum(holder.polling for holder in self._holders.values())

    @property
    def offered(self) -> int:
        """Number of offers; a group counts once for each of its holders."""
        return sum(len(holder.offers) for holder in self._holders.values())

    def cursor(self, peer: str) -> tuple[bytes, int]:
        """Return (life, position) for the next poll of `peer`."""
        holder = self._holder(peer)
        return holder.life, holder.position

    def polls_due(
        self, connected: Collection[str], now: float, is_known: Callable[[bytes], bool]
    ) -> list[str]:
        """Choose peers to poll now. Each poll is under way until `polled` or `refused` is called.

        Args:
            connected: Peers that may be polled.
            is_known: Content id → True if the group was received before.
        """
        here = {peer: self._holder(peer) for peer in connected}
        for peer, holder in self._holders.items():
            if peer not in here:
                holder.disconnect()
        if self.wanted(now) <= 0:
            return []
        proven = [holder for holder in here.values() if holder.proven]
        room = {True: MOST_POLLED, False: MOST_POLLED}
        for holder in here.values():
            room[holder.proven] -= holder.polling
        offered = {content for holder in proven for content in holder.offers}
        news = sum(content not in self._asked and not is_known(content) for content in offered)
        rare = news >= PLENTY * self._step
        most = int(now >= self._polled_at + PLENTY_POLL_SECONDS) if rare else len(here)
        due = [
            peer
            for peer, holder in here.items()
            if not holder.polling
            and holder.next_poll <= now
            and (holder.proven or not holder.offers)
        ]
        chosen: list[str] = []
        for peer in self._rng.sample(due, len(due)):
            if len(chosen) < most and room[here[peer].proven] > 0:
                room[here[peer].proven] -= 1
                chosen.append(peer)
        if chosen and not self.polling:
            self._settles_at = now + SETTLE_SECONDS
        for peer in chosen:
            here[peer].polling = True
            here[peer].polled_at = self._polled_at = now
        return chosen

    def polled(self, peer: str, response: ListingResponse | None, now: float, unix: float) -> bool:
        """Process the answer to a poll; `response` is None if there was no valid one.

        Returns:
            False if the cursor of the answer contradicts the peer's earlier answers.
        """
        holder = self._holder(peer)
        holder.polling = False
        if response is None:
            self.fault(peer, "slow", now)
        elif response.status != "ok":
            holder.pause(now, BUSY_SECONDS if response.status == "busy" else MOST_REST_SECONDS)
        elif not holder.take(response, self._own_key, unix):
            self.fault(peer, "cursor", now)
            return False
        return True

    def refused(self, peer: str, now: float) -> None:
        """Record that `peer` does not speak the listing protocol, or reset the stream."""
        holder = self._holder(peer)
        holder.polling = False
        holder.fail(now, REFUSED_SECONDS)

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
        fetching = [holder for holder in self._holders.values() if holder.fetching]
        missing = self.wanted(now) - sum(holder.fetching for holder in fetching if holder.proven)
        settling = now < self._settles_at and self.polling
        if missing <= 0 or (settling and not self.urgent):
            return []
        proven: dict[str, Holder] = {}
        unproven: dict[str, Holder] = {}
        for peer, holder in self._holders.items():
            if holder.offers:
                self._forget(holder, unix, trust, is_known)
            if holder.offers and not holder.fetching and holder.rests_until <= now:
                (proven if holder.proven else unproven)[peer] = holder
        under_way = sum(holder.proven for holder in fetching)
        slots = MOST_FETCHES - under_way
        pulls = self._choose(proven, missing, slots, unix, trust) if slots > 0 else []
        most = UNPROVEN_FETCHES if proven or under_way else MOST_FETCHES
        pulls += self._probe(unproven, most - (len(fetching) - under_way))
        for pull in pulls:
            forwarded = FORWARD_SECONDS * len(pull.groups)
            self._forwards_at = min(
                max(self._forwards_at, now) + forwarded, now + MOST_AHEAD_SECONDS
            )
            self._holder(pull.holder).fetching = len(pull.groups)
        return pulls

    def _forget(
        self,
        holder: Holder,
        unix: float,
        trust: Callable[[str], float],
        is_known: Callable[[bytes], bool],
    ) -> None:
        """Forget offers that are too old or known, and those of greylisted authors."""
        for content, listed in list(holder.offers.items()):
            if (
                is_known(content)
                or clock_reason(listed.created_at, unix) is not None
                or trust(self._author_of(listed.author)) <= 0
            ):
                del holder.offers[content]

    def _choose(
        self,
        holders: dict[str, Holder],
        count: int,
        slots: int,
        unix: float,
        trust: Callable[[str], float],
    ) -> list[Pull]:
        """Choose up to `count` groups of proven holders, in at most `slots` requests.

        Each author gets one place before any gets a second one, its best group first. The authors
        of a round are drawn by the weight of their group: spread × freshness × trust. The groups of
        unknown authors at one holder count as groups of one author, because identities are free.
        If several holders have offers, at most half of the groups come from one of them.
        """
        offered = defaultdict[bytes, list[tuple[str, ListedGroup]]](list)
        for peer, holder in holders.items():
            for content, listed in holder.offers.items():
                if content not in self._asked:
                    offered[content].append((peer, listed))
        ranked = defaultdict[str, list[tuple[float, str, ListedGroup]]](list)
        for claims in offered.values():
            chances = [
                1.0 if self._author_of(listed.author) == peer else RELAYED_WEIGHT
                for peer, listed in claims
            ]
            peer, listed = self._rng.choices(claims, chances)[0]
            author = self._author_of(listed.author)
            trusted = trust(author)
            weight = max(sampling.SPREAD_FLOOR, listed.spread) * freshness(listed, unix) * trusted
            is_own = author == peer or trusted > sampling.PROBATION_TRUST
            ranked[author if is_own else f"others' at {peer}"].append((weight, peer, listed))
        for groups in ranked.values():
            groups.sort(key=lambda group: group[0], reverse=True)
        most = count if len(holders) == 1 else -(-count // 2)
        requests: dict[str, list[ListedGroup]] = {}
        for nth in range(max(map(len, ranked.values()), default=0)):
            round_ = [groups[nth] for groups in ranked.values() if nth < len(groups)]
            for _, peer, listed in sampling.shuffle_weighted(
                round_, [weight for weight, *_ in round_], self._rng
            ):
                if not count or (peer not in requests and len(requests) >= slots):
                    continue
                asked = requests.get(peer, [])
                size = listed.size + sum(other.size for other in asked)
                if len(asked) < min(most, limits.PULLED) and size <= limits.GROUP_BYTES:
                    requests[peer] = [*asked, listed]
                    count -= 1
        return [self._pull(peer, groups) for peer, groups in requests.items()]

    def _probe(self, holders: dict[str, Holder], slots: int) -> list[Pull]:
        """Choose one group of each of `slots` unproven holders: the nearest to a proof first, and
        among equal ones the smallest groups, which have the shortest deadlines."""
        pulls: list[Pull] = []
        for peer in sorted(
            self._rng.sample(list(holders), len(holders)),
            key=lambda peer: (
                -holders[peer].proofs,
                min(listed.size for listed in holders[peer].offers.values()),
            ),
        ):
            offers = holders[peer].offers.values()
            free = [listed for listed in offers if listed.content not in self._asked]
            if free and len(pulls) < slots:
                pulls.append(self._pull(peer, [min(free, key=lambda listed: listed.size)]))
        return pulls

    def _pull(self, peer: str, groups: list[ListedGroup]) -> Pull:
        """Record that `groups` are being fetched from `peer`."""
        for listed in groups:
            self._asked[listed.content] = (peer, listed)
            del self._holders[peer].offers[listed.content]
        return Pull(peer, tuple(groups))

    def fetched(self, pull: Pull, outcomes: Sequence[str], now: float, *, slow: bool) -> None:
        """Record the outcome of each group of a fetch, one of `exchange.PULLED`.

        Args:
            pull: The fetch.
            outcomes: One for each of its groups.
            now: Monotonic seconds.
            slow: True if the answer took more than half of the deadline.
        """
        holder = self._holder(pull.holder)
        holder.fetching = 0
        for listed, outcome in zip(pull.groups, outcomes, strict=True):
            if outcome == "ok":
                self._wanted = max(0, self._wanted - 1)
            else:
                self._asked.pop(listed.content, None)
            if outcome == "busy":
                holder.offers.setdefault(listed.content, listed)
        if slow:
            self.fault(pull.holder, "slow", now, BUSY_SECONDS)
        elif "busy" in outcomes:
            holder.fail(now, BUSY_SECONDS)
        elif "unknown" in outcomes:
            self.fault(pull.holder, "absent", now, BUSY_SECONDS)

    def failed(self, pull: Pull, now: float) -> None:
        """Record a fetch without a valid answer.

        The groups may be fetched from other holders at once, and from this one after its rest.
        """
        holder = self._holder(pull.holder)
        holder.fetching = 0
        self.fault(pull.holder, "slow", now)
        for listed in pull.groups:
            self._asked.pop(listed.content, None)
            holder.offers.setdefault(listed.content, listed)

    def fault(self, peer: str, fault: Fault, now: float, rest: float = FAILED_SECONDS) -> None:
        """Count a false listing of `peer`, or an unanswered request to it."""
        self._faults[fault] += 1
        self._holder(peer).fail(now, rest)

    def contradicted(self, content: bytes) -> None:
        """Forget the listing of a fetched group that contradicts it. The fault is counted."""
        self._asked.pop(content, None)

    def scored(self, content: bytes, rewards: list[float], now: float) -> None:
        """Compare a fetched group's rewards (G,) with the spread that its holder listed."""
        if content not in self._asked:
            return
        peer, listed = self._asked.pop(content)
        if not is_useful(rewards):
            self._wanted += 1  # it cannot be trained on, so the node needs another one
        if not has_spread(listed, rewards):
            self.fault(peer, "spread", now)
            return
        self._confirmed += 1
        if is_useful(rewards):
            holder = self._holder(peer)
            holder.proofs += 1
            holder.rest *= RECOVERY

    def replay_failed(self, content: bytes, now: float) -> None:
        """Note that the episodes of a fetched group end elsewhere when they are replayed."""
        if (asked := self._asked.pop(content, None)) is not None:
            self._wanted += 1  # it cannot be trained on, so the node needs another one
            self.fault(asked[0], "trajectory", now, BUSY_SECONDS)

    def statistics(self) -> ListingStatistics:
        """Return the counts of true and false listings."""
        return ListingStatistics(
            self._confirmed,
            {fault: self._faults[fault] for fault in FAULTS if self._faults[fault]},
            len(self._holders),
        )

    def _holder(self, peer: str) -> Holder:
        """Return the memory of `peer`, and make it the latest."""
        holder = self._holders[peer] = self._holders.get(peer) or Holder()
        return holder


class ListingStatistics(msgspec.Struct, frozen=True):
    """Counts of true and false listings."""

    confirmed: int = 0
    """Groups that were as listed, including the spread of rewards."""
    faults: dict[str, int] = {}
    """False listings and unanswered requests by kind, of FAULTS."""
    holders: int = 0
    """Peers that are remembered."""


def contradiction(
    listed: ListedGroup, author: bytes, group: RolloutGroup, size: int
) -> Fault | None:
    """Return the first field of a listing that contradicts the signed group, or None.

    Args:
        listed: The group as listed.
        author: Raw key of the group's signer.
        group: The fetched group.
        size: Length of its envelope, bytes.
    """
    if size != listed.size:
        return "size"
    if author != listed.author:
        return "author"
    if group.task.id != listed.task:
        return "task"
    return "age" if group.created_at != listed.created_at else None


def has_spread(listed: ListedGroup, rewards: list[float]) -> bool:
    """Return True if the rewards (G,), as computed by this node, have the listed spread."""
    return math.isclose(sampling.spread(rewards), listed.spread, abs_tol=SPREAD_TOLERANCE)


def freshness(listed: ListedGroup, now: float) -> float:
    """Return `0.5 ** (age / HALF_LIFE_SECONDS)`."""
    return float(0.5 ** (max(0.0, now - listed.created_at / 1000) / HALF_LIFE_SECONDS))
