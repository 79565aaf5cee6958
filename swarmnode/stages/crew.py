"""One node's part in crews: `advance(state, event, now, means) → (state, actions)`. No clock, I/O
or torch.

    FREE ──all members signed a record──▶ PREPARING ──every stage active──▶ RUNNING ⇄ PAUSED
      ▲                                       │                                │      (suspicion)
      └──────────── this node saw the crew break: it offers its copies again ──┘

A node signs only while it is FREE: for one proposer at a time, with peers that the operator trusts,
and no record that would discard steps that the node holds. The crew ends for this node when a
member leaves, is silent for `evict_seconds`, loses a stream to it, prepares or steps without end,
or forgets the crew. Strangers change nothing but their own offer.
"""

from __future__ import annotations

import enum
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from types import MappingProxyType
from typing import Any, Final, Literal, cast, get_args

import msgspec
from msgspec.structs import replace

from swarmnode.errors import BadMessage, Refused
from swarmnode.stages import wire
from swarmnode.stages.wire import (
    HASH_BYTES,
    MEMBERS,
    NO_HASH,
    NONCE_BYTES,
    WITHOUT,
    Capacity,
    Copy,
    Founded,
    Member,
    ModelCost,
    Offer,
    Record,
    Refuse,
    Settings,
    Signed,
    Status,
    Taken,
    Verify,
    check_founded,
    crew_id,
    member_bytes,
    peers_of,
    plan_apart,
    stage_memory,
    stage_of,
    stage_work,
)

# φ-accrual failure detector (Hayashibara et al. 2004): φ = −log10 of the probability that a
# heartbeat still comes, normal intervals with a deviation of at least one second: over ten
# simulated node-days that cut false suspicions from 16 to 0.4 a day. Times are this machine's
# monotonic seconds.
#
# A broken connection suspects at once; any younger sign of life refutes it. A process that runs
# late stretches its own timeouts by how late its ticks come.

EXPECTED_SECONDS: Final = 1.0
"""Between two heartbeats."""
FLOOR_SECONDS: Final = 1.0
PHI: Final = 8.0
WEIGHT: Final = 1 / 32
"""The newest interval's share of the running mean."""
FADING: Final = 0.7
"""The share of the slowness factor that is left after a tick."""
HEARD_SECONDS: Final = 60.0
"""A member of which bytes come is taken to be alive for so long after its last heartbeat."""
STEPS: Final = 100
"""Steps whose durations are remembered."""
LEAST: Final = 5
"""Intervals, or steps, below which nothing is known."""
STALL_FLOOR_SECONDS: Final = 15.0
"""No progress for less is no failure, however short steps are: a pause of the device or the disk is
longer than a tiny model's step."""


def phi(elapsed: float, mean: float, deviation: float) -> float:
    """−log10 P(interval > elapsed) for a normal interval; 300 where that is too small for a
    float."""
    later = 0.5 * math.erfc((elapsed - mean) / (deviation * math.sqrt(2)))
    return -math.log10(later) if later > 1e-300 else 300.0


class Signs(msgspec.Struct, frozen=True):
    """Signs of life of one peer."""

    last_seen: float
    """When its last heartbeat came, or its answer to ours."""
    last_heard: float = -math.inf
    """When bytes of any kind last came from it: a line that tensors fill holds a heartbeat up for
    seconds, and they are there meanwhile."""
    count: int = 0
    mean: float = EXPECTED_SECONDS
    variance: float = 0.0
    suspected: bool = False
    gone_since: float | None = None
    """When its last connection ended; None while there is one."""

    def seen(self, now: float) -> Signs:
        """A sign of life, which refutes a suspicion."""
        interval = now - self.last_seen
        if interval <= 0.1 * EXPECTED_SECONDS:  # the answer to our own heartbeat right after theirs
            return replace(self, suspected=False)
        weight = max(WEIGHT, 1 / (self.count + 1))
        off = interval - self.mean
        mean, variance = (
            self.mean + weight * off,
            (1 - weight) * (self.variance + weight * off * off),
        )
        return replace(
            self, last_seen=now, count=self.count + 1, mean=mean, variance=variance, suspected=False
        )

    def heard(self, at: float) -> Signs:
        """Bytes came."""
        if at <= self.last_heard:
            return self
        return replace(
            self,
            last_heard=at,
            gone_since=None
            if self.gone_since is not None and at > self.gone_since
            else self.gone_since,
        )

    def silent_seconds(self, now: float, slowness: float) -> float:
        """Seconds since the last sign of life, by this process's own slow clock. Who sends no
        heartbeat is not believed for ever."""
        return (
            now - max(self.last_seen, min(self.last_heard, self.last_seen + HEARD_SECONDS))
        ) / slowness

    def overdue(self, now: float, slowness: float) -> bool:
        elapsed = self.silent_seconds(now, slowness)
        if elapsed < 2 * EXPECTED_SECONDS:  # φ is not worth computing
            return False
        known = self.count >= LEAST
        mean, deviation = (
            (self.mean, max(FLOOR_SECONDS, math.sqrt(self.variance)))
            if known
            else (EXPECTED_SECONDS, FLOOR_SECONDS)
        )
        return phi(elapsed, mean, deviation) > PHI


def slowness_at(before: float, last_tick: float | None, now: float, tick_seconds: float) -> float:
    """What our own timeouts are multiplied by, after a tick."""
    late = 1.0 if last_tick is None else (now - last_tick) / tick_seconds
    return max(1.0, late, before * FADING)


class Progress:
    """Whether a trainer with work in hand does any of it."""

    def __init__(self, slow_steps: float) -> None:
        self._slow_steps = slow_steps
        self._durations: deque[float] = deque(maxlen=STEPS)
        self._step: tuple[int, float] | None = None
        self._progress: tuple[int, float] | None = None

    def restart(self) -> None:
        """The time until now belongs to no step."""
        self._step = self._progress = None

    def report(self, step: int, progress: int, load: int, now: float) -> None:
        if self._step is None or step < self._step[0]:
            self._step = (step, now)
        elif step > self._step[0]:
            self._durations.append((now - self._step[1]) / (step - self._step[0]))
            self._step = (step, now)
        if self._progress is None or progress != self._progress[0] or load == 0:
            self._progress = (progress, now)

    @property
    def slow_step_seconds(self) -> float | None:
        """99th percentile of the last steps; None while they are too few."""
        if len(self._durations) < LEAST:
            return None
        ordered = sorted(self._durations)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def stalled(self, now: float) -> bool:
        slow = self.slow_step_seconds
        if self._progress is None or slow is None:
            return False
        return now - self._progress[1] > max(STALL_FLOOR_SECONDS, self._slow_steps * slow)


# The crew to found, from offers: at the newest step that copies cover, or from the base.
#
#     after …                       these may be founded
#     at once                       the newest point, where every block has an exact copy
#     settings.exact_seconds        the newest point, where some blocks have older copies
#     twice that                    an older point with exact copies of all
#     four times that               the newest point, although some blocks have no copy: they are
#                                   fetched from another crew, or synthesised
#     settings.lost_seconds         from the base although steps were taken; at once where none were
#
# A point is a (lineage, step, hash) of which a node has layers. A node that has taken steps plans
# its own lineage, and no point that a single other node vouches for.

CONSIDERED: Final = 12
"""Nodes that a plan chooses from, at most."""
PLAUSIBLE: Final = 64
"""Steps that a single other node may be ahead of us, and be believed."""
POINTS: Final = 4
"""The newest of what a node offers of a lineage that are looked at: a claim costs it nothing, and
us a search."""
IMPOSSIBLE: Final = 10**15
_WHERE: Final = {"memory": 0, "disk": 1, "neighbour": 3}
GAP: Final = 10**6
"""Steps that a block lacks of which there is no copy."""
OLDER: Final = 1000
"""More than any exact copy costs; an older one costs its lag besides."""
FETCHED: Final = 10**9
"""For a node that has no copy of the block: it has to be sent there."""

LEAST_SECONDS: Final = 0.001
MOST_SECONDS: Final = 10.0
"""A shorter distance is none, a longer one counts as this."""
UNLIKE: Final = 4.0
USUAL_SECONDS: Final = 0.01
"""Who has a line that takes UNLIKE times what the usual one does, or this, gets a smaller block for
it. All others are planned as if they had none: crews are cut alike, and can average, although each
has measured something else."""
RANKS: Final = 1000
UNKNOWN: Final = 3
"""For a node with whom no step was taken, or that is in debt: more than the difference between
memory and disk. At the head one more: who does nothing there is found out last. Not more than a
neighbour's copy costs: nobody changes his stage for it."""

Block = tuple[int, int]
"""(first, last) layer, the last one not included."""


@dataclass(frozen=True)
class Plan:
    record: Record
    """Its nonce is all zero, and so is its lineage where training begins."""
    exact: bool
    """Nothing that anybody here has is lost."""

    @property
    def turns(self) -> tuple[str, ...]:
        """Who proposes it: the first at once, the next one when nothing came of it. Where training
        begins, the order of stages is each node's own."""
        members = peers_of(self.record)
        return members if self.record.step else tuple(sorted(members))


@dataclass(frozen=True)
class _Choice:
    """What there is to choose from, as `plan_crew` was given it: the offers for our model, and what
    they say of copies."""

    me: str
    able: Mapping[str, Offer]
    copies: Sequence[tuple[str, Copy]]
    model: bytes
    cost: ModelCost
    ranks: Mapping[str, int]
    distances: Mapping[str, float]

    def clash(self, one: str, other: str) -> bool:
        """Whether one of them would not be in a crew with the other."""
        return other in self.able[one].without or one in self.able[other].without


@dataclass(frozen=True)
class Point:
    lineage: bytes
    step: int
    hash: bytes
    taken: Taken

    def is_of(self, copies: Iterable[Copy]) -> bool:
        """Whether who has these has been there, or would take the step that leads there."""
        return any(copy.lineage == self.lineage and _has(self, copy) for copy in copies)


def newest(copies: Iterable[Copy]) -> Copy | None:
    """The copy in which a node has learnt most, those that it keeps for neighbours excepted; None
    where it has learnt nothing."""
    own = [copy for copy in copies if copy.where != "neighbour" and copy.step > 0]
    return max(own, key=lambda copy: (copy.step, copy.hash), default=None)


def is_behind(
    own: Iterable[Copy],
    point: Point,
    vouchers: int,
    members: int,
    waited: float,
    settings: Settings,
) -> bool:
    """Whether who has `own` copies does not sign a record that goes on from `point`: it would give
    up what it has learnt, or has only the word of too few. `vouchers`: others of the record's
    `members` who have been there; `waited`: seconds without a crew."""
    own = tuple(own)
    mine = newest(own)
    if mine is not None:
        if point.lineage != mine.lineage and waited < settings.lost_seconds:
            return True
        if point.step < mine.step and waited < 2 * settings.exact_seconds:
            return True
    if (
        point.step == 0
        or point.is_of(own)
        or (mine is not None and mine.lineage == point.lineage and point.step <= mine.step)
    ):
        return False
    # what one node alone still has would be lost
    if waited >= 4 * settings.exact_seconds and _is_near(point, mine):
        return vouchers < 1
    far = mine is not None and point.step > mine.step + PLAUSIBLE and waited < settings.lost_seconds
    return vouchers < (2 if far else min(2, members - 1))


def _is_near(point: Point, mine: Copy | None) -> bool:
    """Whether little would be lost with a single node that only says that it has been there, by who
    has learnt `mine`."""
    return mine is None or (mine.lineage == point.lineage and point.step <= mine.step + PLAUSIBLE)


def plan_crew(
    me: str,
    offers: Mapping[str, Offer],
    cost: ModelCost,
    settings: Settings,
    waited: float,
    ranks: Mapping[str, int] = MappingProxyType({}),
    distances: Mapping[str, float] = MappingProxyType({}),
) -> Plan | None:
    """What to propose now; None where nothing can be founded yet. Whoever has the same offers plans
    the same crew.

    `offers` by peer, our own included; `waited`: seconds since this node has been free; `ranks`: of
    two that would do equally well the lower one is taken, and the base is begun with the lowest
    that can. `distances`: seconds to a peer, one way, as this node has measured them.
    """
    model = offers[me].model
    able = {
        peer: offer
        for peer, offer in offers.items()
        if offer.model == model and offer.memory > 0 and offer.speed > 0
    }
    if me not in able:
        return None
    copies = [
        (peer, copy)
        for peer, offer in sorted(able.items())
        for copy in offer.copies
        if copy.last <= len(cost.layers)
    ]
    learnt = any(copy.step > 0 for _, copy in copies)
    mine = newest(able[me].copies)
    lineages = (
        [mine.lineage]
        if mine is not None
        else sorted({copy.lineage for _, copy in copies if copy.step > 0})
    )
    choice = _Choice(me, able, copies, model, cost, ranks, distances)
    found = [
        plan
        for lineage in lineages
        if (plan := _continue(choice, lineage, waited, settings)) is not None
    ]
    best = max(found, key=lambda plan: (plan.record.step, plan.record.lineage), default=None)
    if best is not None:
        return best
    begins = not learnt or waited >= settings.lost_seconds
    if not begins and (
        mine is not None
        or any(_continue(choice, lineage, math.inf, settings) for lineage in lineages)
    ):
        return None  # soon there is something better than the base
    fresh = (
        able
        if begins
        else {peer: offer for peer, offer in able.items() if newest(offer.copies) is None}
    )
    for most in sorted({ranks.get(peer, 0) for peer in fresh}):
        record = _begin(
            choice, [peer for peer in fresh if ranks.get(peer, 0) <= most], settings.stages
        )
        if record is not None:
            return Plan(record, exact=False)
    return None


def _begin(choice: _Choice, willing: Collection[str], stages: int) -> Record | None:
    """From the base, as `plan_apart` places its layers on the nearest and largest of those who
    would be together. A speed is a claim: it counts half, as it were."""
    able, cost, model = choice.able, choice.cost, choice.model
    near = {
        peer: 0.0 if peer == choice.me else _rough(choice.distances.get(peer, 0.0)) for peer in able
    }
    peers: list[str] = []
    for peer in sorted(
        willing,
        key=lambda peer: (
            peer != choice.me,
            choice.ranks.get(peer, 0),
            near[peer],
            -able[peer].memory,
            peer,
        ),
    ):
        if len(peers) < MEMBERS and not any(choice.clash(peer, other) for other in peers):
            peers.append(peer)
    peers.sort(key=lambda peer: (near[peer], peer))
    if not peers:
        return None
    speed, usual = (
        median(able[peer].speed for peer in peers),
        median(able[peer].hop_seconds for peer in peers),
    )
    slow = {
        peer: min(hop, MOST_SECONDS)
        for peer in peers
        if (hop := able[peer].hop_seconds) > UNLIKE * max(usual, USUAL_SECONDS)
    }
    capacities = tuple(
        Capacity(able[peer].memory, math.sqrt(able[peer].speed * speed), slow.get(peer, 0.0))
        for peer in peers
    )
    apart = tuple(
        tuple(_apart(near[a], near[b], choice.me in (a, b)) if a != b else 0.0 for b in peers)
        for a in peers
    )
    try:
        plan = plan_apart(cost, capacities, apart, stages)
    except Refused:
        return None
    members = tuple(
        Member(peers[member], layers)
        for member, layers in zip(plan.members, plan.layers, strict=True)
    )
    # who would do it alone may: the others wait for nobody
    if len(members) == 1 and members[0].peer != choice.me:
        return _begin(choice, [peer for peer in willing if peer != members[0].peer], stages)
    return Record(NO_HASH, model, NO_HASH, 0, Taken(), members, bytes(NONCE_BYTES))


def _rough(seconds: float) -> float:
    """A power of two: no plan changes because a line was measured anew."""
    return 0.0 if seconds < LEAST_SECONDS else 2.0 ** round(math.log2(min(seconds, MOST_SECONDS)))


def _apart(one: float, other: float, exact: bool) -> float:
    """Seconds between two that are so far from us, or of whom one is we (`exact`). Else they are
    between the difference and the sum of these apart, and probably nearer to the difference: who is
    equally far is often in one place."""
    return max(one, other) if exact else 0.75 * abs(one - other) + 0.25 * (one + other)


def _continue(choice: _Choice, lineage: bytes, waited: float, settings: Settings) -> Plan | None:
    """The newest point of `lineage` that may be gone on from after `waited` seconds."""
    me, able, cost = choice.me, choice.able, choice.cost
    claimed = [
        (peer, copy) for peer, copy in choice.copies if copy.lineage == lineage and copy.step > 0
    ]
    points = sorted(_points(claimed), key=lambda point: (-point.step, point.hash))
    sayers = {point: {peer for peer, copy in claimed if _has(point, copy)} for point in points}
    backed = {point for point in points if me in sayers[point] or len(sayers[point]) > 1}
    newest_step = max((point.step for point in backed), default=0)
    own = newest(able[me].copies)
    for point in points:
        cut = _cut(point, claimed, len(cost.layers))
        if cut is None:
            continue
        sizes = [last - start for start, last in cut]
        least = min(stage_memory(cost, sizes, stage) for stage in range(len(cut)))
        # who has no room is no member to fetch from
        mine = [(peer, copy) for peer, copy in claimed if able[peer].memory >= least]
        if not any(_has(point, copy) for _, copy in mine):
            continue
        if (
            own is not None
            and point not in backed
            and (
                point.step <= own.step
                or is_behind(able[me].copies, point, len(sayers[point]), len(cut), waited, settings)
            )
        ):  # we would not sign it
            continue
        exact = sum(_exact(point, mine, block) for block in cut)
        if exact == len(cut):
            wait = 0.0 if point.step >= newest_step else 2 * settings.exact_seconds
        else:
            wait = settings.exact_seconds
            # nobody has some of them: then at least half of the layers, as they are
            if not {copy.layers for _, copy in mine} >= set(cut):
                layers = sum(
                    last - start for start, last in cut if _exact(point, mine, (start, last))
                )
                ours = any(
                    peer == me and copy.where != "neighbour" and _has(point, copy)
                    for peer, copy in mine
                )
                if 2 * layers < len(cost.layers) or not ours:
                    continue
                wait = 4 * settings.exact_seconds
        if waited < wait:
            continue
        behind = {
            peer
            for peer, offer in able.items()
            if is_behind(offer.copies, point, MEMBERS, len(cut), waited, settings)
        }
        if len(cut) == 1:  # who would do it alone may: the others wait for nobody
            behind |= able.keys() - {me}
        holders = _place(
            point, cut, [(peer, copy) for peer, copy in mine if peer not in behind], choice, behind
        )
        if holders is None:
            continue
        vouchers = sayers[point] & set(holders)
        if not any(
            is_behind(able[peer].copies, point, len(vouchers - {peer}), len(cut), waited, settings)
            for peer in holders
        ):
            members = tuple(
                Member(peer, last - start) for peer, (start, last) in zip(holders, cut, strict=True)
            )
            record = Record(
                lineage,
                choice.model,
                point.hash,
                point.step,
                point.taken,
                members,
                bytes(NONCE_BYTES),
            )
            return Plan(record, exact=wait == 0.0)
    return None


def _points(copies: Iterable[tuple[str, Copy]]) -> Iterable[Point]:
    """Each once; of how its last step was taken, what the lowest peer says that has taken it."""
    found: dict[tuple[int, bytes], Point] = {}
    named: dict[str, set[tuple[int, bytes]]] = {}
    for peer, copy in sorted(copies, key=lambda each: -each[1].step):
        of_peer, at = named.setdefault(peer, set()), (copy.step, copy.hash)
        if at in of_peer or len(of_peer) < POINTS:
            of_peer.add(at)
            found.setdefault(at, Point(copy.lineage, copy.step, copy.hash, copy.taken))
    return found.values()


def _has(point: Point, copy: Copy) -> bool:
    return (copy.step, copy.hash) == (point.step, point.hash) or (
        copy.next == point.hash and copy.step + 1 == point.step
    )


def _exact(point: Point, copies: Iterable[tuple[str, Copy]], block: Block) -> bool:
    return any(copy.layers == block and _has(point, copy) for _, copy in copies)


def _cut(point: Point, copies: Sequence[tuple[str, Copy]], layers: int) -> tuple[Block, ...] | None:
    """Blocks that follow each other from the first layer to the last: those with most exact copies,
    then with younger ones."""
    lags: dict[Block, int] = {}
    for _, copy in copies:
        lag = 0 if _has(point, copy) else point.step - copy.step
        if lag > 0 or _has(point, copy):
            lags[copy.layers] = min(lag, lags.get(copy.layers, lag))

    @cache
    def best(start: int, left: int) -> tuple[int, int, tuple[Block, ...]] | None:
        if start == layers:
            return 0, 0, ()
        options = []
        known = {block: lag for block, lag in lags.items() if block[0] == start}
        if not known:  # nobody has what begins here: up to what somebody has
            known = {
                (start, min([first for first, _ in lags if first > start], default=layers)): GAP
            }
        for block, lag in sorted(known.items()):
            if left and (rest := best(block[1], left - 1)) is not None:
                options.append((rest[0] + (lag > 0), rest[1] + lag, (block, *rest[2])))
        return min(options, default=None)

    found = best(0, MEMBERS)
    return None if found is None else found[2]


def _place(
    point: Point,
    cut: Sequence[Block],
    copies: Sequence[tuple[str, Copy]],
    choice: _Choice,
    never: Collection[str],
) -> tuple[str, ...] | None:
    """A node for each block, each at most once, none with one with whom it would not be, with the
    least to fetch; None without.

    `never`: who would refuse.
    """
    able, sizes = choice.able, [last - first for first, last in cut]
    needs = [stage_memory(choice.cost, sizes, stage) for stage in range(len(cut))]
    costs = {
        peer: [FETCHED if offer.memory >= need else IMPOSSIBLE for need in needs]
        for peer, offer in able.items()
        if peer not in never
    }
    for peer, copy in copies:
        if copy.layers in cut:
            stage = cut.index(copy.layers)
            if able[peer].memory >= needs[stage]:
                lag = point.step - copy.step
                # else the exact one is fetched
                older = lag > 0 and not _exact(point, copies, copy.layers)
                price = (
                    _WHERE[copy.where] if _has(point, copy) else OLDER + lag if older else FETCHED
                )
                costs[peer][stage] = min(costs[peer][stage], price)
    held = {copy.layers for _, copy in copies}
    ranks = {peer: min(choice.ranks.get(peer, 0), RANKS - 1) for peer in costs}
    if choice.me in ranks and newest(able[choice.me].copies) is None:
        # who has learnt nothing is no better known than the others: else it would take what they
        # have
        ranks[choice.me] = 1
    # as they say: each plans the same crew
    lines = {peer: _rough(offer.hop_seconds) for peer, offer in able.items()}
    # a claim alone goes before nobody who is known
    least = {peer: min(costs[peer]) + UNKNOWN * (ranks[peer] > 0) for peer in costs}
    peers = sorted(
        costs, key=lambda peer: (least[peer], ranks[peer], lines[peer], -able[peer].speed, peer)
    )[:CONSIDERED]
    clashes = [
        sum(1 << number for number, other in enumerate(peers) if choice.clash(peer, other))
        for peer in peers
    ]

    @cache
    def best(stage: int, used: int) -> tuple[int, tuple[str, ...]] | None:
        if stage == len(cut):
            return 0, ()
        options = []
        for number, peer in enumerate(peers):
            price = costs[peer][stage]
            if price >= IMPOSSIBLE or used >> number & 1 or used & clashes[number]:
                continue
            if (rest := best(stage + 1, used | 1 << number)) is not None:
                doubt = UNKNOWN + (stage == 0) if ranks[peer] else 0
                options.append(
                    ((price + doubt) * RANKS + ranks[peer] + rest[0], number, (peer, *rest[1]))
                )
        if not options:
            return None
        total, _, chosen = min(options)
        return total, chosen

    found = best(0, 0)
    if found is None:
        return None
    has = {(peer, copy.layers) for peer, copy in copies if copy.step <= point.step}
    # a member fetches from members
    within = all(any((peer, block) in has for peer in found[1]) for block in cut if block in held)
    return found[1] if within else None


# The reducer. All free nodes compute the same plan from the same offers. The holder of the first
# stage proposes at once, the next one after `turn_seconds`. A proposal lapses unless all members
# sign.

LONGEST_BAR_SECONDS: Final = 3600.0
GATHERS: Final = 3
"""Times that a plan waits for further offers, at most, and for a plan that stays."""
LAPSES: Final = 10
"""A proposer waits up to 1,024 turns: many strangers hold nobody for long, and who failed for long
waits about as long."""
DOUBTS: Final = 8
"""Bars' worth of debt from which on a peer is left out on doubt alone."""
LONG_AGO: Final = -1e18
FARTHER: Final = 1 / 32
"""The share by which a slower answer than the fastest makes a peer farther away."""
LOADING: Final = Status("loading")
_PHASES: Final = (*get_args(wire.StagePhase), "absent")
"""In the order in which a stage goes through them in one crew."""


class Phase(enum.Enum):
    FREE = "free"
    PREPARING = "preparing"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True)
class Means:
    """What a decision needs beside state and time. `trusts(peer)`: whether our person would be in a
    crew with it."""

    settings: Settings
    sign: Callable[[bytes], bytes]
    verify: Verify
    rng: random.Random
    trusts: Callable[[str], bool] = lambda peer: True
    uplink: Callable[[], float] = lambda: math.inf
    """Bytes per second that our line takes, as far as that was seen."""


class Peer(msgspec.Struct, frozen=True):
    """What is known of a peer outside any crew."""

    connected: bool = False
    offer: Offer | None = None
    offered_at: float = LONG_AGO
    foreign_until: float = LONG_AGO
    """It does not speak of crews."""
    worked: bool = False
    """A crew with it has taken a step."""
    debt: float = 0.0
    """Seconds that it is left out for, twice as long with each further failure; steps with us make
    it less."""
    barred_until: float = LONG_AGO
    """It is in none of our crews before."""
    uninformed: bool = False
    """It got no offer of ours while it was left out, and has answered none since: it would not know
    what we propose to go on from."""
    blamed: int = 0
    """Crews that our trainer led and that came to nothing because of it, or of it or another: the
    bad one is there each time."""
    lapses: int = 0
    """Proposals of its own that we signed and that came to nothing, since we last worked
    together."""
    deaf_until: float = LONG_AGO
    """What it proposes is not signed before: others have their turn."""
    seconds: float | None = None
    """What a message takes to it, one way: the fastest, nearly, of what was measured."""


class MemberState(msgspec.Struct, frozen=True):
    """Another member of our crew, as we see it."""

    signs: Signs
    status: Status
    status_since: float
    """When phase or progress last changed."""
    joined: bool = False
    """We have received something from it in this crew."""
    refused_at: float | None = None
    """When it said that it is in another crew or none, and nothing else since."""
    owed: float = 0.0
    """Its debt when the crew was founded."""


class Crew(msgspec.Struct, frozen=True):
    founded: Founded
    id: bytes
    stage: int
    """Ours."""
    since: float
    members: Mapping[str, MemberState]
    own: Status
    stepped_at: float = 0.0
    """When we last took a step, or began to run."""
    stepped: bool = False
    """We have taken a step in it."""

    @property
    def record(self) -> Record:
        return self.founded.record


class Proposal(msgspec.Struct, frozen=True):
    """A record that we have proposed, until all have signed it or it lapses."""

    record: Record
    crew: bytes
    signatures: Mapping[str, bytes]
    until: float


class Reserved(msgspec.Struct, frozen=True):
    """We have signed `record`, and sign nothing else before `until`, but for its members that
    propose one another anew: whoever has proposed signs nothing, so of all these records one is
    founded."""

    proposer: str
    """Who proposed `record`."""
    record: Record
    signed: Mapping[str, bytes]
    """Proposer → crew, which may still be founded."""
    since: float
    """When we signed the first one: nobody takes its place after what that one had of time."""
    until: float

    def keeps_from(self, proposer: str, record: Record, late: bool) -> bool:
        """Whether `record` is not to be signed now. If one whose proposal we signed were not in it,
        `proposer` could sign both, and we would not be where that one expects us."""
        known = proposer in self.signed or (
            not late and proposer in peers_of(self.record) and len(self.signed) < MEMBERS
        )
        return not known or not self.signed.keys() - {proposer} <= {*peers_of(record)}


class State(msgspec.Struct, frozen=True):
    """Everything that one node knows of crews. `me`: its peer id."""

    me: str
    phase: Phase = Phase.FREE
    offering: wire.Offering | None = None
    """What our trainer offers, while it could work in a crew; None otherwise."""
    draining: str = ""
    peers: Mapping[str, Peer] = {}
    crew: Crew | None = None
    proposal: Proposal | None = None
    reserved: Reserved | None = None
    free_since: float | None = None
    """The moment since which it has been in no crew, less the time in those that took no step; None
    before the first event."""
    new_offer_at: float = 0.0
    """When something new was offered that may be planned with."""
    plan_since: float = math.inf
    """The moment since which there has always been a plan, whichever; infinite while there is
    none."""
    turn_from: float = 0.0
    """The moment since which our place in the present plan counts."""
    planned: tuple[str, ...] = ()
    """Members of that plan, as it is their turn."""
    retry_at: float = 0.0
    lapses: int = 0
    """Proposals of ours in a row that came to nothing."""
    offered_at: float = LONG_AGO
    hop_offered: float = 0.0
    """What our last offer says of our line."""
    beat_at: float = LONG_AGO
    last_tick: float | None = None
    slowness: float = 1.0
    stood_since: float | None = None
    """The moment since which a crew that ran does not."""
    recovery_seconds: float | None = None
    """From the last pause or end of a crew that ran to one that runs."""


CrewState = Literal["none", "preparing", "running", "paused"]
SlotState = Literal["absent", "loading", "probation", "active", "failed", "suspect"]


class SlotStatistics(msgspec.Struct, frozen=True):
    """One stage of the crew, as its record and the heartbeats have it."""

    stage: int
    peer: str
    """Its holder."""
    state: SlotState
    """Phase of the stage, or that its holder is suspected."""
    step: int
    """Steps that it has taken."""
    layers: int


class CrewStatistics(msgspec.Struct, frozen=True):
    """The crew of which this node holds a stage, if it does."""

    state: CrewState = "none"
    id: str = ""
    """Hex; empty outside a crew."""
    stage: int | None = None
    """Held by us."""
    slots: tuple[SlotStatistics, ...] = ()
    offers: int = 0
    """Other nodes that would hold a stage."""
    standing_seconds: float | None = None
    """Seconds since a crew of ours last ran; 0 while it does, or where none ever did. None outside
    a crew."""
    recovery_seconds: float | None = None
    """From the last crew's standing still to its running again."""
    peer_seconds: float = 0.0
    """What a message takes to the usual peer, one way."""


def statistics(state: State, now: float, settings: Settings) -> CrewStatistics:
    crew, offers = state.crew, len(_offers(state, now, settings))
    if crew is None:
        return CrewStatistics(
            offers=offers,
            recovery_seconds=state.recovery_seconds,
            peer_seconds=usual_seconds(state),
        )
    slots = []
    for stage, (peer, layers) in enumerate(
        (member.peer, member.layers) for member in crew.record.members
    ):
        member = crew.members.get(peer)
        status = crew.own if member is None else member.status
        suspected = member is not None and member.signs.suspected
        slots.append(
            SlotStatistics(
                stage, peer, "suspect" if suspected else status.phase, status.step, layers
            )
        )
    return CrewStatistics(
        state=cast("CrewState", state.phase.value),  # of one in a crew
        id=crew.id.hex(),
        stage=crew.stage,
        slots=tuple(slots),
        offers=offers,
        standing_seconds=0.0 if state.stood_since is None else now - state.stood_since,
        recovery_seconds=state.recovery_seconds,
        peer_seconds=usual_seconds(state),
    )


def advance(
    state: State, event: wire.Event, now: float, means: Means
) -> tuple[State, list[wire.Action]]:
    """The state after `event`, and what is to be done about it, in order."""
    turn = _Turn(state, now, means)
    turn.handle(event)
    return turn.state, turn.actions


def usual_seconds(state: State) -> float:
    """What a message takes to a peer, one way: the median of those connected, whom a few that
    answer early or late do not move far."""
    near = [
        known.seconds
        for known in state.peers.values()
        if known.connected and known.seconds is not None
    ]
    return min(MOST_SECONDS, median(near)) if near else 0.0


def _offers(state: State, now: float, settings: Settings) -> dict[str, Offer]:
    """The others' offers that count."""
    oldest = now - 3 * settings.offer_seconds
    return {
        peer: known.offer
        for peer, known in state.peers.items()
        if known.offer is not None
        and known.offer.memory > 0
        and known.offered_at >= oldest
        and now >= known.barred_until
        and not known.uninformed
    }


class _Turn:
    """One call of `advance`: the state as it becomes, and the actions so far."""

    def __init__(self, state: State, now: float, means: Means) -> None:
        self.state, self.now, self.means, self.settings = state, now, means, means.settings
        self.actions: list[wire.Action] = []

    def handle(self, event: wire.Event) -> None:
        if self.state.free_since is None:
            self._set(free_since=self.now, new_offer_at=self.now)
        self._expire()
        match event:
            case wire.Tick(heard=heard):
                self._tick(heard)
            case wire.Received():
                self._do(wire.SendAnswer(self._received(event.peer, event.message)))
            case wire.Answered():
                self._answered(event)
            case wire.Offering():
                self._trainer_offers(event)
            case wire.StageStatus():
                self._trainer_status(event)
            case wire.Blames():
                self._blames(event)
            case wire.TrainerLeft():
                self._set(offering=None)
                self._break("our trainer is gone")
                self._send_offers()
            case wire.StreamLost():
                if self.state.crew is not None and event.crew == self.state.crew.id:
                    self._charge(event.peer)
                    self._break("lost a stream to it", event.peer)
            case wire.PeerGone():
                self._peer_gone(event.peer)
            case wire.PeerBack():
                self._peer_back(event.peer)
            case wire.Drain():
                self._drain(event.reason)

    # ---- small things ----------------------------------------------------------------------------

    def _set(self, **changes: Any) -> None:  # noqa: ANN401
        self.state = replace(self.state, **changes)

    def _set_crew(self, crew: Crew) -> None:
        self._set(crew=crew)

    def _set_member(self, crew: Crew, peer: str, member: MemberState) -> None:
        self._set_crew(replace(crew, members={**crew.members, peer: member}))

    def _set_peer(self, peer: str, known: Peer) -> None:
        self._set(peers={**self.state.peers, peer: known})

    def _peer(self, peer: str) -> Peer:
        return self.state.peers.get(peer, Peer())

    def _do(self, action: wire.Action) -> None:
        self.actions.append(action)

    def _note(self, what: str, detail: str = "") -> None:
        self._do(wire.Note(what, detail))

    @property
    def _waited(self) -> float:
        return self.now - (self.state.free_since or 0.0)

    def _is_out(self, peer: str) -> bool:
        return self.now < self._peer(peer).barred_until or not self.means.trusts(peer)

    def _charge(self, peer: str, cost: float | None = None, spoilt: float = 0.0) -> None:
        """`peer` kept us from working for `cost` seconds, as we saw ourselves: none of our crews
        has it for twice as long, and for longer with each further time. None for what happens to
        everybody (a process starts again): the first time is free, but for one with whom no step
        was ever taken and whose crew stood still. spoilt: for how long it has kept some of our
        steps from being taken; where that is most of the crew's time, those that were taken have
        repaid nothing."""
        known, crew = self._peer(peer), self.state.crew
        stood = (
            self.now - crew.stepped_at
            if crew is not None and self.state.phase != Phase.PREPARING
            else 0.0
        )
        if cost is None and not known.worked and stood > self.settings.bar_seconds:
            cost = stood
        before = known.debt
        if (
            crew is not None
            and 2 * spoilt > self.now - crew.since
            and (member := crew.members.get(peer)) is not None
        ):
            before = max(before, member.owed)
        cheapest, twice = self.settings.bar_seconds, 2 * (cost or 0.0)
        # of 7 B one step may have cost hours
        debt = min(max(LONGEST_BAR_SECONDS, twice), 2 * before + max(twice, cheapest))
        until = self.now + debt if cost is not None or known.debt else known.barred_until
        if peer != self.state.me:
            self._set_peer(peer, replace(known, debt=debt, barred_until=until))

    def _doubt(self, peer: str) -> None:
        """Nothing came of a crew with `peer`, and it or another one is to blame. It goes behind
        others from the second time on, and is left out once that was often."""
        known = self._peer(peer)
        debt = min(LONGEST_BAR_SECONDS, known.debt + self.settings.bar_seconds)
        until = (
            self.now + debt if debt >= DOUBTS * self.settings.bar_seconds else known.barred_until
        )
        if peer != self.state.me:
            self._set_peer(
                peer, replace(known, debt=debt, barred_until=max(until, known.barred_until))
            )

    def _repay(self, crew: Crew) -> None:
        """A step was taken: what its members owe us is less by the time that it took, and by an
        eighth at most, however long steps are: who fails in the middle of every other one is not
        even."""
        for peer in crew.members:
            known = self._peer(peer)
            repaid = min(
                self.now - crew.stepped_at, max(known.debt, 2 * self.settings.bar_seconds) / 8
            )
            self._set_peer(
                peer, replace(known, worked=True, lapses=0, debt=max(0.0, known.debt - repaid))
            )

    # ---- time ------------------------------------------------------------------------------------

    def _tick(self, heard: Mapping[str, float]) -> None:
        state, settings = self.state, self.settings
        slack = 0.25 * settings.tick_seconds
        self._set(
            slowness=slowness_at(state.slowness, state.last_tick, self.now, settings.tick_seconds),
            last_tick=self.now,
        )
        if state.crew is not None:
            self._watch(state.crew, heard)
        if (
            self.state.crew is not None
            and self.now - self.state.beat_at >= settings.heartbeat_seconds - slack
        ):
            self._send_heartbeats()
        hop, said = self._hop_seconds(), self.state.hop_offered
        news = self._offers_itself and abs(hop - said) > 0.5 * max(hop, said, LEAST_SECONDS)
        if news or self.now - self.state.offered_at >= settings.offer_seconds - slack:
            self._send_offers()
        self._consider()

    def _expire(self) -> None:
        """What has lapsed is over before anything else is heard; after somebody's proposal in vain
        it is our turn before another's."""
        if self.state.proposal is not None and self.now >= self.state.proposal.until:
            self._lapse(self.state.proposal)
        if self.state.reserved is not None and self.now >= self.state.reserved.until:
            self._release(self.state.reserved)
            self._consider()

    def _watch(self, crew: Crew, heard: Mapping[str, float]) -> None:
        """Whether the crew is what it was a moment ago."""
        settings, members = self.settings, dict(crew.members)
        for peer, member in crew.members.items():
            signs = member.signs.heard(heard.get(peer, -math.inf))
            overdue = signs.gone_since is not None or signs.overdue(self.now, self.state.slowness)
            if overdue != signs.suspected:
                signs = replace(signs, suspected=overdue)
                self._note(*(("suspected", f"{peer}: silent") if overdue else ("refuted", peer)))
            members[peer] = replace(member, signs=signs)
            gone = (
                signs.gone_since is not None
                and self.now - signs.gone_since >= settings.gone_seconds
            )
            if (
                gone
                or signs.silent_seconds(self.now, self.state.slowness) >= settings.evict_seconds
            ):
                self._charge(peer)
                self._break("is gone", peer)
                return
        awaited, why = self._awaited(crew)
        if awaited:
            for peer in awaited:
                self._charge(peer, self.now - crew.stepped_at)
            self._break(why, awaited[0])
            return
        self._set_crew(replace(crew, members=members))
        self._run_or_pause()

    def _awaited(self, crew: Crew, *, elsewhere: bool = False) -> tuple[list[str], str]:
        """For whom a crew that does not work has waited too long; why. Nothing that they say moves
        the bound. `elsewhere`: somebody else may have seen it a little earlier. Not much: a head
        finds out who keeps work back at four fifths of a step's bound."""
        settings, since, share = self.settings, self.now - crew.since, 0.9 if elsewhere else 1.0
        if since >= (0.5 if elsewhere else 1.0) * settings.join_seconds * self.state.slowness:
            absent = [peer for peer, member in crew.members.items() if not member.joined]
            if absent:
                return absent, "has not joined"
        if self.state.phase == Phase.PREPARING:
            late = [
                peer
                for peer, member in crew.members.items()
                if member.status.phase != "active"
                and (
                    self.now - member.status_since >= share * settings.prepare_seconds
                    or since >= share * self._ready_seconds(crew, peer)
                )
            ]
            if crew.own.phase != "active" and since >= self._ready_seconds(crew, self.state.me):
                late.append(self.state.me)
            return late, "does not get ready"
        stands = self.now - crew.stepped_at >= share * self._step_seconds(crew)
        return [crew.record.members[0].peer] if stands else [], "has taken no step for long"

    def _ready_seconds(self, crew: Crew, peer: str) -> float:
        """How long a member may get ready, whatever progress it reports: that grows with its stage,
        and with nothing that it says."""
        offering, sizes = self.state.offering, [member.layers for member in crew.record.members]
        stage = stage_of(crew.record, peer)
        memory = (
            stage_memory(offering.cost, sizes, stage)
            if offering is not None and stage is not None
            else 0.0
        )
        return self.settings.prepare_seconds + memory / self.settings.restore_bytes_per_second

    def _step_seconds(self, crew: Crew) -> float:
        """How long a crew may take no step: longer where our own stage is slow, since blocks are
        cut so that all take as long, and where peers are far: completions may go through all stages
        token by token, as many at a time as there are stages."""
        offering, settings = self.state.offering, self.settings
        if offering is None:
            return settings.step_seconds
        cost, sizes = offering.cost, [member.layers for member in crew.record.members]
        ways = cost.crossings * cost.batches * max(len(sizes), cost.batches)
        computing = (
            settings.slow_steps * stage_work(cost, sizes, crew.stage) / offering.capacity.speed
        )
        return max(settings.step_seconds, computing) + settings.slow_lines * ways * usual_seconds(
            self.state
        )

    # ---- the own trainer -------------------------------------------------------------------------

    def _trainer_offers(self, offering: wire.Offering) -> None:
        if self.state.crew is not None:
            return  # said before it knew that it is in one, or numbers that can wait
        self._set(offering=offering)
        if not self.state.draining:
            self._send_offers()
            self._consider()

    def _trainer_status(self, status: wire.StageStatus) -> None:
        crew = self.state.crew
        if crew is None or (status.crew, status.stage) != (crew.id, crew.stage):
            if crew is None:  # its connection was down when the crew ended
                self._do(wire.Released("that crew is over"))
            return
        before = crew.own
        own = Status(status.phase, status.step, status.progress)
        stepped = own.phase == "active" and own.step > crew.record.step
        if stepped and own.step != before.step:
            self._repay(crew)
            crew = replace(crew, stepped_at=self.now, stepped=True)
        self._set_crew(replace(crew, own=own))
        if own.phase == "failed":
            self._break(status.reason or "our stage failed")
            return
        self._run_or_pause()
        if own.phase != before.phase:
            self._send_heartbeats()

    def _blames(self, blames: wire.Blames) -> None:
        """Leave one out. Where it may be one of several it is who was blamed, or beside one that
        was, more often, in turn where that is no difference: the bad one, once it has been beside
        others; and of two around an honest one either, in the next crew. We are not it: if
        something here is broken, everybody else goes on together when we have left them out."""
        crew = self.state.crew
        if crew is None or blames.crew != crew.id:
            return
        stages = {stage: member.peer for stage, member in enumerate(crew.record.members)}
        blamed = {stages[stage] for stage in blames.stages if stage in stages}
        if not blamed:
            return
        peers = [peer for stage, peer in stages.items() if peer in blamed or stage in blames.beside]
        known = {peer: self._peer(peer) for peer in peers}
        others = [peer for peer in peers if peer != self.state.me] or peers
        out = max(
            others,
            key=lambda peer: (
                known[peer].blamed,
                peer in blamed,
                -known[peer].barred_until,
                self.means.rng.random(),
            ),
        )
        spoilt = min(blames.seconds, self.now - crew.since)
        self._charge(
            out, max(self.now - crew.stepped_at, spoilt if len(peers) == 1 else 0.0), spoilt
        )
        for peer in peers:
            self._set_peer(peer, replace(self._peer(peer), blamed=known[peer].blamed + 1))
            if peer in blamed:
                self._note("blamed", f"{peer}: {blames.reason}")
        self._break(f"no step comes of it: {blames.reason}", out)

    def _drain(self, reason: str) -> None:
        if not self.state.draining:
            self._set(draining=reason)
            self._break(reason)
            self._send_offers()

    # ---- peers -----------------------------------------------------------------------------------

    def _peer_back(self, peer: str) -> None:
        if not self._has_room(peer):
            return
        self._set_peer(peer, replace(self._peer(peer), connected=True))
        crew = self.state.crew
        if crew is not None and (member := crew.members.get(peer)) is not None:
            self._set_member(
                crew, peer, replace(member, signs=replace(member.signs, gone_since=None))
            )
            self._do(wire.Send(peer, wire.Heartbeat(crew.id, crew.own)))
        elif self._offers_itself:
            self._send_offer(peer)

    def _peer_gone(self, peer: str) -> None:
        if peer in self.state.peers:
            self._set_peer(peer, replace(self._peer(peer), connected=False, offer=None))
        crew = self.state.crew
        if (
            crew is not None
            and (member := crew.members.get(peer)) is not None
            and member.signs.gone_since is None
        ):
            self._note("suspected", f"{peer}: no connection")
            self._set_member(
                crew,
                peer,
                replace(member, signs=replace(member.signs, gone_since=self.now, suspected=True)),
            )
            self._run_or_pause()

    def _has_room(self, peer: str) -> bool:
        """Whether `peer` is known, or may be: where there are too many, one that is not connected,
        and not left out, is forgotten."""
        if peer in self.state.peers or len(self.state.peers) < self.settings.most_peers:
            return True
        for other, known in self.state.peers.items():
            if not known.connected and self.now >= known.barred_until:
                self._set(
                    peers={name: one for name, one in self.state.peers.items() if name != other}
                )
                return True
        return False

    def _received(self, peer: str, message: wire.Request) -> wire.CrewAnswer:
        match message:
            case wire.Heartbeat():
                return self._heartbeat(peer, message)
            case Offer():
                self._take_offer(peer, message)
            case wire.Propose():
                return self._sign(peer, message.record)
            case Founded():
                return self._join(message)
            case wire.Leave():
                self._left(peer, message)
        return wire.Noted()

    def _left(self, peer: str, message: wire.Leave) -> None:
        """A member is gone. Whose fault that is we judge by what we see ourselves: if we wait for
        somebody too, it is not its own. Else it is that of one of the two, whoever leaves and
        because of whom."""
        crew = self.state.crew
        if crew is not None and message.crew == crew.id and peer in crew.members:
            awaited = [
                one
                for one in self._awaited(crew, elsewhere=True)[0]
                if one not in (peer, self.state.me)
            ]
            for one in awaited:
                self._charge(one, self.now - crew.stepped_at)
            if not awaited and message.because:
                self._doubt(peer)
                if message.because in crew.members:
                    self._doubt(message.because)
            elif not awaited:
                self._charge(peer)
            self._break(f"left: {message.reason}", peer)

    def _answered(self, event: wire.Answered) -> None:
        peer, request, answer, crew = event.peer, event.request, event.answer, self.state.crew
        if event.seconds is not None and peer in self.state.peers:
            known, took = self._peer(peer), event.seconds
            before = took if known.seconds is None else known.seconds
            self._set_peer(
                peer, replace(known, seconds=min(took, before + FARTHER * (took - before)))
            )
        if isinstance(request, Offer) and event.foreign and peer in self.state.peers:
            self._set_peer(
                peer,
                replace(self._peer(peer), foreign_until=self.now + self.settings.foreign_seconds),
            )
        if (
            isinstance(request, Offer)
            and isinstance(answer, wire.Noted)
            and peer in self.state.peers
        ):
            self._set_peer(peer, replace(self._peer(peer), uninformed=False))
        if isinstance(answer, wire.Alive) and crew is not None and answer.crew == crew.id:
            self._seen(crew, peer, answer.status)
        elif isinstance(request, wire.Heartbeat) and isinstance(answer, Refuse):
            if crew is not None and peer in crew.members and answer.crew == crew.id:
                self._not_in(crew, peer)
        elif isinstance(request, wire.Propose) and isinstance(answer, wire.Signature):
            self._signed(peer, answer)
        elif isinstance(request, wire.Propose):
            self._not_signed(peer, request.record, answer)

    def _not_in(self, crew: Crew, peer: str) -> None:
        """A member says that it is not in our crew: it has not heard yet that it was founded, or
        has left it. What it said before it joined may come after what it said then: once is not
        enough."""
        member = crew.members[peer]
        if not member.joined:
            self._do(wire.Send(peer, crew.founded))
        elif member.refused_at is None:
            self._set_member(crew, peer, replace(member, refused_at=self.now))
        elif self.now - member.refused_at >= 0.5 * self.settings.heartbeat_seconds:
            self._charge(peer)
            self._break("is not in this crew any more", peer)

    # ---- heartbeats ------------------------------------------------------------------------------

    def _heartbeat(self, peer: str, message: wire.Heartbeat) -> wire.CrewAnswer:
        crew = self.state.crew
        if crew is None or message.crew != crew.id or peer not in crew.members:
            return Refuse("crew", message.crew)
        self._seen(crew, peer, message.status)
        own = self.state.crew.own if self.state.crew is not None else crew.own
        return wire.Alive(crew.id, own)

    def _seen(self, crew: Crew, peer: str, status: Status) -> None:
        member = crew.members.get(peer)
        if member is None:
            return
        if member.signs.suspected:
            self._note("refuted", peer)
        if _PHASES.index(status.phase) < _PHASES.index(member.status.phase):
            # said before and come later, as each message has a stream of its own: a sign of life
            status = member.status
        moved = (status.phase, status.progress) != (member.status.phase, member.status.progress)
        signs = replace(member.signs.seen(self.now), gone_since=None)
        changed = member.signs.suspected or status.phase != member.status.phase
        since = self.now if moved else member.status_since
        self._set_member(
            crew, peer, MemberState(signs, status, since, joined=True, owed=member.owed)
        )
        if status.phase in ("absent", "failed"):
            self._charge(peer)
            self._break(f"its stage is {status.phase}", peer)
        elif changed:
            self._run_or_pause()

    def _send_heartbeats(self) -> None:
        crew = self.state.crew
        if crew is not None:
            self._set(beat_at=self.now)
            for peer in crew.members:
                self._do(wire.Send(peer, wire.Heartbeat(crew.id, crew.own)))

    def _run_or_pause(self) -> None:
        crew, phase = self.state.crew, self.state.phase
        if crew is None:
            return
        well = not any(member.signs.suspected for member in crew.members.values())
        active = crew.own.phase == "active" and all(
            member.status.phase == "active" for member in crew.members.values()
        )
        if well and active and phase != Phase.RUNNING:
            recovered = (
                self.now - self.state.stood_since if self.state.stood_since is not None else None
            )
            if phase == Phase.PREPARING:  # a pause is no reason to wait longer for a step
                self._set_crew(replace(crew, stepped_at=self.now))
            self._set(
                phase=Phase.RUNNING,
                stood_since=None,
                recovery_seconds=recovered or self.state.recovery_seconds,
            )
            self._note("running", "" if recovered is None else f"{recovered:.3f}")
            self._do(wire.Resumed(crew.id))
        elif not well and phase == Phase.RUNNING:
            self._set(phase=Phase.PAUSED, stood_since=self.now)
            self._note("paused")
            self._do(wire.Suspended("a member is in doubt"))

    def _break(self, why: str, because: str = "") -> None:
        """Out of the crew: what was learnt stays with its copies. `because` of whom, where it is
        another member."""
        crew = self.state.crew
        if crew is None:
            return
        for peer in crew.members:
            self._do(wire.Send(peer, wire.Leave(crew.id, _printable(why), because)))
        since = (
            self.now
            if crew.stepped or self.state.free_since is None
            else self.state.free_since + self.now - crew.since
        )
        stood = self.now if self.state.phase == Phase.RUNNING else self.state.stood_since
        self._set(
            phase=Phase.FREE,
            crew=None,
            offering=None,
            free_since=since,
            new_offer_at=self.now,
            stood_since=stood,
        )
        self._set(planned=(), plan_since=math.inf)
        self._note("broken", f"{because} {why}".strip())
        self._do(wire.Released(why))

    # ---- offers ----------------------------------------------------------------------------------

    @property
    def _offers_itself(self) -> bool:
        return (
            self.state.phase == Phase.FREE
            and self.state.offering is not None
            and not self.state.draining
        )

    def _own_offer(self) -> Offer:
        offering = self.state.offering
        if offering is None or not self._offers_itself:
            return Offer(NO_HASH, 0.0, 0.0, 0.0)
        capacity = offering.capacity
        out = [peer for peer, known in self.state.peers.items() if self.now < known.barred_until]
        return Offer(
            offering.model,
            capacity.memory,
            capacity.speed,
            self._hop_seconds(),
            offering.copies,
            tuple(out[:WITHOUT]),
        )

    def _hop_seconds(self) -> float:
        """What a micro-batch takes from here to another stage: on our line, and from there to the
        usual one of our peers."""
        line = (
            self.state.offering.cost.batch_bytes / self.means.uplink()
            if self.state.offering is not None
            else 0.0
        )
        return min(MOST_SECONDS, line + usual_seconds(self.state))

    def _send_offers(self) -> None:
        """Send our offer to everybody connected; one that takes the last one back is sent once."""
        if not self._offers_itself and self.state.offered_at == LONG_AGO:
            return
        self._set(
            offered_at=self.now if self._offers_itself else LONG_AGO,
            hop_offered=self._hop_seconds(),
        )
        for peer, known in self.state.peers.items():
            if known.connected:
                self._send_offer(peer)

    def _send_offer(self, peer: str) -> None:
        if self.now < self._peer(peer).foreign_until:
            return
        if self._is_out(peer):
            self._set_peer(peer, replace(self._peer(peer), uninformed=True))
        else:
            self._do(wire.Send(peer, self._own_offer()))

    def _take_offer(self, peer: str, offer: Offer) -> None:
        known = self._peer(peer)
        if not self._has_room(peer):
            return
        own = self.state.offering
        new = (
            known.offer is None
            or known.offer.copies != offer.copies
            or known.offer.model != offer.model
        )
        news = new and offer.memory > 0 and (own is None or offer.model == own.model)
        fresh = known.foreign_until > self.now
        self._set_peer(
            peer, replace(known, offer=offer, offered_at=self.now, foreign_until=LONG_AGO)
        )
        if fresh and self._offers_itself:
            self._send_offer(peer)
        # who changes all the time
        again = (
            known.offer is not None and self.now - known.offered_at < self.settings.gather_seconds
        )
        if news and not again and not self._is_out(peer):
            self._set(new_offer_at=self.now)

    # ---- founding --------------------------------------------------------------------------------

    def _consider(self) -> None:
        """Propose, where there is something to found and it is our turn."""
        state, settings = self.state, self.settings
        if not self._offers_itself or state.proposal is not None or self.now < state.retry_at:
            return
        if state.reserved is not None:
            return
        offering = state.offering
        assert offering is not None
        offers = {
            peer: offer
            for peer, offer in _offers(state, self.now, settings).items()
            if self.means.trusts(peer)
        }
        offers[state.me] = self._own_offer()
        plan = plan_crew(
            state.me,
            offers,
            offering.cost,
            settings,
            self._waited,
            {
                peer: 1 - known.worked + math.ceil(max(0.0, known.debt - settings.bar_seconds))
                for peer, known in state.peers.items()
            },
            {
                peer: known.seconds
                for peer, known in state.peers.items()
                if known.seconds is not None
            },
        )
        if plan is None:
            self._set(planned=(), plan_since=math.inf)
            return
        turns, since = plan.turns, min(state.plan_since, self.now)
        settled = since + GATHERS * settings.gather_seconds
        if turns != state.planned:
            self._set(planned=turns, plan_since=since, turn_from=min(self.now, settled))
        if not plan.exact and self.now < min(state.new_offer_at + settings.gather_seconds, settled):
            return
        waited = self.now - self.state.turn_from
        if state.me not in turns:
            # of those whose turn it was nobody wanted this crew
            if waited >= 2 * len(turns) * settings.turn_seconds:
                for peer in turns:
                    self._doubt(peer)
                self._set(planned=(), plan_since=math.inf)
            return
        if waited < turns.index(state.me) * settings.turn_seconds:
            return
        lineage = plan.record.lineage if plan.record.step else self.means.rng.randbytes(HASH_BYTES)
        self._propose(
            msgspec.structs.replace(
                plan.record, lineage=lineage, nonce=self.means.rng.randbytes(NONCE_BYTES)
            )
        )

    def _propose(self, record: Record) -> None:
        crew = crew_id(record)
        until = self.now + self.settings.turn_seconds * (0.8 + 0.4 * self.means.rng.random())
        signature = self.means.sign(member_bytes(crew))
        self._set(proposal=Proposal(record, crew, {self.state.me: signature}, until))
        self._note("proposed", f"step {record.step}, {len(record.members)} stages")
        for peer in peers_of(record):
            if peer != self.state.me:
                self._do(wire.Send(peer, wire.Propose(record)))
        self._complete()

    def _lapse(self, proposal: Proposal) -> None:
        """Nothing came of it; who has not answered at all is left out of the next plans for a
        while."""
        silent = [peer for peer in peers_of(proposal.record) if peer not in proposal.signatures]
        for peer in silent if self.now >= proposal.until else ():
            self._charge(peer)
        lapses = self.state.lapses + 1
        pause = (
            self.settings.turn_seconds * self.means.rng.uniform(0.1, 0.5) * 2.0 ** min(lapses, 4)
        )
        self._set(proposal=None, retry_at=self.now + pause, lapses=lapses)

    def _release(self, reserved: Reserved) -> None:
        """What we signed came to nothing: others have their turn, and a longer one each time."""
        known = self._peer(reserved.proposer)
        lapses = min(known.lapses + 1, LAPSES)
        self._set(reserved=None)
        self._set_peer(
            reserved.proposer,
            replace(
                known, lapses=lapses, deaf_until=self.now + self.settings.turn_seconds * 2.0**lapses
            ),
        )

    def _signed(self, peer: str, answer: wire.Signature) -> None:
        proposal = self.state.proposal
        if (
            proposal is None
            or answer.crew != proposal.crew
            or peer not in peers_of(proposal.record)
        ):
            return
        if not self.means.verify(peer, member_bytes(proposal.crew), answer.signature):
            return
        self._set(
            proposal=replace(proposal, signatures={**proposal.signatures, peer: answer.signature})
        )
        self._complete()

    def _not_signed(self, peer: str, record: Record, answer: wire.CrewAnswer | None) -> None:
        """What we proposed comes to nothing because of `peer`, whatever it says: the honest have a
        reason now and then."""
        proposal = self.state.proposal
        ours = proposal is not None and record == proposal.record
        if ours or isinstance(answer, Refuse):  # who was silent has paid for it
            self._doubt(peer)
        if proposal is not None and ours:
            if isinstance(answer, Refuse) and answer.reason not in ("busy", "behind"):
                self._set_peer(peer, replace(self._peer(peer), offer=None))
            self._lapse(proposal)

    def _complete(self) -> None:
        proposal = self.state.proposal
        if proposal is None or not self._offers_itself:
            return
        peers = peers_of(proposal.record)
        if any(peer not in proposal.signatures for peer in peers):
            return
        founded = Founded(
            proposal.record, tuple(Signed(peer, proposal.signatures[peer]) for peer in peers)
        )
        for peer in peers:
            if peer != self.state.me:
                self._do(wire.Send(peer, founded))
        self._begin(founded, proposal.crew)

    def _why_not(self, proposer: str, record: Record) -> wire.Refusal | None:
        """Why `record` is not signed; None where it is."""
        state, offering = self.state, self.state.offering
        peers = peers_of(record)
        if state.me not in peers or proposer not in peers or proposer == state.me:
            return "record"
        if not self._offers_itself or offering is None:
            return "crew"
        sizes = [member.layers for member in record.members]
        if record.model != offering.model or sum(sizes) != len(offering.cost.layers):
            return "model"
        stage = peers.index(state.me)
        if stage_memory(offering.cost, sizes, stage) > offering.capacity.memory:
            return "model"
        if any(self._is_out(peer) for peer in peers if peer != state.me):
            return "trust"
        point = Point(record.lineage, record.step, record.previous, record.taken)
        others = [
            known.offer
            for peer in peers
            if peer != state.me and (known := self._peer(peer)).offer is not None
        ]
        vouchers = sum(point.is_of(offer.copies) for offer in others if offer is not None)
        if is_behind(offering.copies, point, vouchers, len(peers), self._waited, self.settings):
            return "behind"
        before = state.reserved
        late = before is not None and self.now >= before.since + 2 * self.settings.turn_seconds
        promised = state.proposal is not None or (
            before is not None and before.keeps_from(proposer, record, late)
        )
        if promised or self.now < self._peer(proposer).deaf_until:
            return "busy"
        return None

    def _sign(self, proposer: str, record: Record) -> wire.CrewAnswer:
        crew = crew_id(record)
        why = self._why_not(proposer, record)
        if why is not None:
            self._note("refused", f"{proposer}: {why}")
            return Refuse(why, crew)
        before = self.state.reserved
        signed, since = ({}, self.now) if before is None else (before.signed, before.since)
        until = (
            before.until
            if before is not None and proposer in signed
            else self.now + 2 * self.settings.turn_seconds
        )
        self._set(reserved=Reserved(proposer, record, {**signed, proposer: crew}, since, until))
        return wire.Signature(crew, self.means.sign(member_bytes(crew)))

    def _join(self, founded: Founded) -> wire.CrewAnswer:
        crew = crew_id(founded.record)
        if self.state.crew is not None and crew == self.state.crew.id:
            return wire.Noted()
        reserved = self.state.reserved
        # it lapsed, or we never signed it
        if reserved is None or crew not in reserved.signed.values() or not self._offers_itself:
            return Refuse("crew", crew)
        try:
            check_founded(founded, self.means.verify)
        except BadMessage as error:
            self._note("refused", str(error))
            return Refuse("record", crew)
        self._begin(founded, crew)
        return wire.Noted()

    def _begin(self, founded: Founded, crew: bytes) -> None:
        record, me = founded.record, self.state.me
        stage = stage_of(record, me)
        assert stage is not None
        others = [peer for peer in peers_of(record) if peer != me]
        members = {
            peer: MemberState(Signs(self.now), LOADING, self.now, owed=self._peer(peer).debt)
            for peer in others
        }
        self._set(
            phase=Phase.PREPARING,
            proposal=None,
            reserved=None,
            lapses=0,
            crew=Crew(founded, crew, stage, self.now, members, LOADING, stepped_at=self.now),
        )
        self._send_offers()  # takes ours back
        self._note("founded", f"step {record.step}, stage {stage} of {len(record.members)}")
        layers = tuple(member.layers for member in record.members)
        assert self.state.crew is not None
        patience = self._step_seconds(self.state.crew)
        peers = peers_of(record)
        self._do(
            wire.Assigned(
                crew,
                record.lineage,
                stage,
                layers,
                peers,
                record.step,
                record.previous,
                record.taken,
                "",
                patience,
            )
        )
        self._send_heartbeats()


def _printable(text: str) -> str:
    return "".join(character if " " <= character <= "~" else "?" for character in text)[
        : wire.REASON_BYTES
    ]
