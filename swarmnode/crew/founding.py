"""Which crew to found, from offers: at the newest step that copies cover, or from the base. Pure;
no torch.

A *point* is a (lineage, step, hash) that somebody has layers of. Every block of layers of the
lineage's cut needs a copy: an exact one, of the very point, or else an older one of the same
lineage, which the gate judges when it is put in. Each block gets one node: whoever has it exactly
goes first, in memory before on disk, then whoever has an older copy, then whoever has room.

    after …                       these may be founded
    at once                       the newest point, where every block has an exact copy
    settings.exact_seconds        the newest point, where some blocks have older copies
    twice that                    an older point with exact copies of all
    four times that               the newest point, although nobody has some blocks: they are
    fetched from another crew, or made anew
    settings.lost_seconds         from the base, although something was learnt; at once where
    nothing was

Whatever others claim: who has learnt something plans his own lineage, and no point that a single
other node vouches for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from types import MappingProxyType
from typing import Final

from swarmnode.crew.events import Settings
from swarmnode.crew.messages import Offer
from swarmnode.crew.plan import MEMBERS, Capacity, ModelCost, plan_apart, stage_memory
from swarmnode.crew.record import NO_HASH, NONCE_BYTES, Copy, Member, Record, Taken, peers_of
from swarmnode.errors import Refused

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
    """From the base, as `plan.plan_apart` places its layers on the nearest and largest of those who
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
