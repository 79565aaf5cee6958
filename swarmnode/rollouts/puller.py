"""The decisions of pull gossip: which peers to poll, which groups to fetch, and from which holders.

Pure: no clock, no I/O. `exchange.PullGossip` carries out the decisions; benchmarks call this module
without a network.

    drew ─▶ demand ─▶ polls_due ─▶ polled ─▶ Offers ─▶ fetches_due ─▶ fetched ─▶ scored
                                                                         │          │
                                   ListingTrust (is a listing true?) ◀───┴──────────┘

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
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, get_args

import msgspec

from swarmnode.rollouts import sampling
from swarmnode.rollouts.admission import clock_reason
from swarmnode.rollouts.groups import is_useful
from swarmnode.wire import limits
from swarmnode.wire.listings import ListedGroup, ListingResponse
from swarmnode.wire.messages import RolloutGroup

STEPS_AHEAD = 2
"""Steps of groups that a node keeps in its pool. More than 1, because the trainer refuses some."""
FIRST_STEP = 8
"""Assumed groups per step until the trainer's first draw. Without them a swarm trains its first
step on own groups alone, and the mean reward over training falls by 7 % (RESULTS.md)."""
MOST_POLLED = 8
"""Maximum number of polls under way at a time, each of another peer."""
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
        self.claims = ListingTrust()
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
        chosen = sampling.shuffle_weighted(due, belief, self._rng)[: max(0, room)]
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
            self.claims.fault(peer, "slow")
            self._rest(peer, now, FAILED_SECONDS)
            return True
        if response.status == "ok":
            self._rest(peer, sent_at, POLL_INTERVAL_SECONDS)
            if not self.offers.take(peer, response, unix):
                self.claims.fault(peer, "cursor")
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
        """Record the outcome of each group of a fetch, one of `exchange.PULLED`."""
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
                self.claims.fault(pull.holder, "absent")

    def failed(self, pull: Pull, now: float) -> None:
        """Record a fetch without a valid answer.

        The groups may be fetched from other holders at once, and from this one after
        FAILED_SECONDS.
        """
        del self._fetches[pull.holder]
        self.claims.fault(pull.holder, "slow")
        self._busy_until[pull.holder] = now + FAILED_SECONDS
        for listed in pull.groups:
            self._asked.pop(listed.content, None)
            self.offers.restore(pull.holder, listed)

    def contradicted(self, content: bytes) -> None:
        """Forget the listing of a fetched group that contradicts it. The fault is counted."""
        self._asked.pop(content, None)

    def scored(self, content: bytes, rewards: list[float], now: float) -> None:
        """Compare a fetched group's rewards (G,) with the spread that its holder listed."""
        if not is_useful(rewards) and content in self._asked:
            self._wanted += 1  # it cannot be trained on, so the node needs another one
        holder, listed = self._asked.pop(content, (None, None))
        if holder is None or listed is None:
            return
        if has_spread(listed, rewards):
            self.claims.confirm(holder)
        else:
            self.claims.fault(holder, "spread")

    def replay_failed(self, content: bytes) -> None:
        """Note that the episodes of a fetched group end elsewhere when they are replayed."""
        if (asked := self._asked.pop(content, None)) is not None:
            self._wanted += 1  # it cannot be trained on, so the node needs another one
            self.claims.fault(asked[0], "trajectory")

    def _busy(self, now: float) -> Collection[str]:
        """Return the peers that may be neither polled nor fetched from at `now`."""
        self._busy_until = {peer: at for peer, at in self._busy_until.items() if at > now}
        return self._busy_until

    def _is_known(self, content: bytes, is_known: Callable[[bytes], bool]) -> bool:
        return content in self._asked or is_known(content)


# ---- belief in holders ---------------------------------------------------------------------------


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
PROVEN: frozenset[Fault] = frozenset({"content", "size", "author", "task", "age"})
"""Faults that the fetched bytes prove; they also cost reputation. Other faults may have an honest
explanation."""
HALVINGS: dict[Fault, float] = {"absent": 0.25, "slow": 0.5, "trajectory": 0.5}
"""Halvings of belief per fault; every other kind costs one."""
RESTORED_HALVINGS = 0.125
"""Halvings restored by each group that is as listed."""
MAX_HALVINGS = 6.0
"""Maximum number of halvings. Such a holder keeps 1/64 of its belief, so that it can recover."""
PROVING_GROUPS = 8
"""Groups as listed after which a new holder has full belief."""
NEW_HOLDER_BELIEF = 0.25
"""Belief in a holder before its first fetched group. It rises to 1 over the first PROVING_GROUPS
groups that are as listed. A holder with less belief takes part in a choice with probability
`belief / NEW_HOLDER_BELIEF`, so that it is not asked each time only because no other holder is
connected."""
SPREAD_TOLERANCE = 0.01
"""Tolerance for rounding. Rewards are deterministic."""
MOST_HOLDERS = 1024
"""Holders that are remembered; the one observed least recently is forgotten."""


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


class ListingStatistics(msgspec.Struct, frozen=True):
    """Counts of true and false listings."""

    confirmed: int = 0
    """Groups that were as listed, including the spread of rewards."""
    faults: dict[str, int] = {}
    """False listings and unanswered requests by kind, of FAULTS."""
    holders: int = 0
    """Holders that are remembered."""


class ListingTrust:
    """Belief in the listings of the MOST_HOLDERS latest holders, from comparing them with the
    fetched groups.

        listed ─▶ fetched ─▶ not on the holder's shelf    `absent`: it may have expired
                          └▶ other bytes, size, author, task or creation time than listed
                          ├▶ replayed ─▶ its episodes end elsewhere: `trajectory`, another version?
                          └▶ scored ─▶ another spread of rewards than listed

    A fault halves the belief in its holder, at most MAX_HALVINGS times; `absent`, `slow` and
    `trajectory` cost a fraction of a halving (HALVINGS). Eight groups that are as listed restore
    one halving.
    """

    def __init__(self) -> None:
        self._confirmed: OrderedDict[str, int] = OrderedDict()
        self._halvings: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def confirm(self, holder: str) -> None:
        """Count a group that is as `holder` listed it."""
        self._counts["confirmed"] += 1
        self._touch(holder)
        self._confirmed[holder] = min(PROVING_GROUPS, self._confirmed[holder] + 1)
        if (left := self._halvings.pop(holder, 0.0) - RESTORED_HALVINGS) > 0:
            self._halvings[holder] = left

    def fault(self, holder: str, fault: Fault) -> None:
        """Count a false listing of `holder`, or an unanswered request to it."""
        self._counts[fault] += 1
        self._touch(holder)
        halvings = self._halvings.get(holder, 0.0) + HALVINGS.get(fault, 1.0)
        self._halvings[holder] = min(MAX_HALVINGS, halvings)

    def credit(self, holder: str) -> float:
        """Return `0.5 ** halvings` of `holder`."""
        return float(0.5 ** self._halvings.get(holder, 0.0))

    def belief(self, holder: str) -> float:
        """Return the belief in `holder`, above 0 and at most 1: its credit × a share that rises
        from NEW_HOLDER_BELIEF to 1 with the number of groups that were as listed."""
        confirmed = self._confirmed.get(holder, 0) / PROVING_GROUPS
        return self.credit(holder) * (NEW_HOLDER_BELIEF + (1 - NEW_HOLDER_BELIEF) * confirmed)

    def statistics(self) -> ListingStatistics:
        return ListingStatistics(
            self._counts["confirmed"],
            {fault: self._counts[fault] for fault in FAULTS if self._counts[fault]},
            len(self._confirmed),
        )

    def _touch(self, holder: str) -> None:
        self._confirmed[holder] = self._confirmed.pop(holder, 0)
        if len(self._confirmed) > MOST_HOLDERS:
            forgotten, _ = self._confirmed.popitem(last=False)
            self._halvings.pop(forgotten, None)


# ---- listed groups, and the choice among them ----------------------------------------------------


MOST_OFFERING = 64
"""Holders whose offers are stored; the one polled least recently is dropped."""
MOST_OFFERED = 32
"""Offers stored per holder, the newest. Older offers are rarely chosen, and each costs 4 µs per
choice."""
HALF_LIFE_SECONDS = 60.0
"""Age at which the weight of a listed group has halved: about two steps."""
FEW_HOLDERS = 3
"""Maximum number of holders in a choice that is not urgent: a request costs as much as six more
groups in it."""
RELAYED_WEIGHT = 0.3
"""Weight of a holder that is not the author. Preferring authors spreads the load: every reader
learns of a group from its author first."""
REMEMBERED_AUTHORS = 64
"""Number of latest fetched groups whose authors are remembered. Each remembered group of an author
lowers the weight of its next one."""

_ListingKey = tuple[bytes, bytes, int]
"""(content id, author, creation time). Contradicting listings of one group are separate claims, so
that a false listing never replaces a true one."""
_Held = dict[_ListingKey, list[tuple[str, ListedGroup]]]
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
    """The groups that peers list, and the choice of groups and holders for fetches.

        listing ─▶ offers of a holder (at most 64 holders, the newest 32 groups of each)
        choose ─▶ unknown groups in a random order, weighted by
                  spread × freshness × trust in the author ÷ (1 + recent fetches of the author)
                  × belief in the holder
               ─▶ one request per holder: at most 16 groups, and 1 MiB as listed

    All groups of an author together have the weight of its best group, so that listing more gains
    nothing. The groups of unknown authors at one holder count as groups of one author, because
    identities are free.

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
        if len(self._holders) > MOST_OFFERING:
            self._holders.popitem(last=False)
        if response.position - known.position < len(response.groups):
            return False
        known.position = response.position
        for listed in response.groups:
            if listed.author != self._own_key and clock_reason(listed.created_at, now) is None:
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
        doubted = [
            holder for holder in self._holders if rng.random() >= belief(holder) / NEW_HOLDER_BELIEF
        ]
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
                if clock_reason(listed.created_at, now) is not None or is_known(content)
            ]
            self.forget(holder, gone)
            for content, listed in known.groups.items() if holder not in busy else ():
                if content not in asked:
                    held.setdefault((content, listed.author, listed.created_at), []).append(
                        (holder, listed)
                    )
        return held


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


def _by_name(
    weight: dict[_ListingKey, float], names: dict[_ListingKey, str]
) -> dict[_ListingKey, float]:
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
    held: _Held,
    weight: dict[_ListingKey, float],
    belief: Callable[[str], float],
    rng: random.Random,
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
    ordered: Sequence[tuple[_ListingKey, str, str, list[tuple[str, ListedGroup]]]],
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
    asked: set[bytes] = set()
    of_author: Counter[str] = Counter()
    of_name: Counter[str] = Counter()
    requests: defaultdict[str, list[ListedGroup]] = defaultdict(list)
    sizes: Counter[str] = Counter()
    in_turn = sampling.spread_over_peers(
        ordered, len(ordered), lambda claimed: claimed[2], len(ordered)
    )
    for (content, *_), author, name, holders in in_turn:
        if len(asked) == count:
            break
        if content in asked or of_author[author] == half or of_name[name] == most:
            continue
        fits = [
            (holder, listed)
            for holder, listed in holders
            if len(requests[holder]) < min(most, limits.PULLED)
            and sizes[holder] + listed.size <= limits.GROUP_BYTES
        ]
        if fits:
            holder, listed = _draw(fits, author, belief, rng)
            requests[holder].append(listed)
            sizes[holder] += listed.size
            asked.add(content)
            of_author[author] += 1
            of_name[name] += 1
    return [Pull(holder, tuple(groups)) for holder, groups in requests.items() if groups]


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
    """Draw one holder, weighted by belief, and by RELAYED_WEIGHT if it is not the author."""
    return rng.choices(
        holders,
        [belief(holder) * (1.0 if author == holder else RELAYED_WEIGHT) for holder, _ in holders],
    )[0]
