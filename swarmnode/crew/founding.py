"""Which crew to found, from offers: at the newest step that copies cover, or from the base. Pure; no torch.

A *point* is a (lineage, step, hash) that somebody has layers of. Every block of layers of the lineage's cut needs a copy: an exact one, of
the very point, or else an older one of the same lineage, which the gate judges when it is put in. Each block gets one node: whoever has
it exactly goes first, in memory before on disk, then whoever has an older copy, then whoever has room.

    after …                       these may be founded
    at once                       the newest point, where every block has an exact copy
    settings.exact_seconds        the newest point, where some blocks have older copies
    twice that                    an older point with exact copies of all
    four times that               the newest point, although nobody has some blocks: they are fetched from another crew, or made anew
    settings.lost_seconds         from the base, although something was learnt; at once where nothing was

Whatever others claim: who has learnt something plans his own lineage, and no point that a single other node vouches for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from types import MappingProxyType
from typing import Final

from swarmnode.crew.messages import Offer
from swarmnode.crew.plan import MEMBERS, Capacity, ModelCost, make_plan, stage_memory
from swarmnode.crew.record import NO_HASH, NONCE_BYTES, Copy, Member, Record, Taken, peers_of
from swarmnode.errors import Refused

CONSIDERED: Final = 12
"""Nodes that a plan chooses from, at most."""
STRIKES: Final = 3
"""From so many on, a node without any copy goes before one with an exact one."""
IMPOSSIBLE: Final = 10**15
_WHERE: Final = {"memory": 0, "disk": 1, "neighbour": 2}
GAP: Final = 10**6
"""Steps that a block lacks of which there is no copy."""
OLDER: Final = 1000
"""More than any exact copy costs; an older one costs its lag besides."""
FETCHED: Final = 10**9
"""For a node that has no copy of the block: it has to be sent there."""

Block = tuple[int, int]
"""(first, last) layer, the last one not included."""


@dataclass(frozen=True)
class Waits:
    """Seconds after which less than everything will do; see above."""

    exact: float
    lost: float


@dataclass(frozen=True)
class Plan:
    record: Record
    """Its nonce is all zero, and so is its lineage where training begins."""
    exact: bool
    """Nothing that anybody here has is lost."""


@dataclass(frozen=True)
class _Choice:
    """What there is to choose from, as `plan_crew` was given it: the offers for our model, and what they say of copies."""

    me: str
    able: Mapping[str, Offer]
    copies: Sequence[tuple[str, Copy]]
    model: bytes
    cost: ModelCost
    strikes: Mapping[str, int]


@dataclass(frozen=True)
class _Point:
    lineage: bytes
    step: int
    hash: bytes
    taken: Taken


def newest(copies: Iterable[Copy]) -> Copy | None:
    """The copy in which a node has learnt most, those that it keeps for neighbours excepted; None where it has learnt nothing."""
    own = [copy for copy in copies if copy.where != "neighbour" and copy.step > 0]
    return max(own, key=lambda copy: (copy.step, copy.hash), default=None)


def plan_crew(
    me: str, offers: Mapping[str, Offer], model: bytes, cost: ModelCost, stages: int, waited: float, waits: Waits,
    strikes: Mapping[str, int] = MappingProxyType({}),
) -> Plan | None:  # fmt: skip
    """What to propose now; None where nothing can be founded yet. Whoever has the same offers plans the same crew.

    `offers` by peer, our own included; `waited`: seconds since this node has been free; `stages`: of a crew that begins, 0 for any number;
    `strikes`: crews that came to nothing with a peer. Who has many is taken where nobody else will do.
    """
    able = {peer: offer for peer, offer in offers.items() if offer.model == model and offer.memory > 0 and offer.speed > 0}
    if me not in able:
        return None
    copies = [(peer, copy) for peer, offer in sorted(able.items()) for copy in offer.copies if copy.last <= len(cost.layers)]
    learnt = any(copy.step > 0 for _, copy in copies)
    mine = newest(able[me].copies)
    lineages = [mine.lineage] if mine is not None else sorted({copy.lineage for _, copy in copies if copy.step > 0})
    choice = _Choice(me, able, copies, model, cost, strikes)
    found = [plan for lineage in lineages if (plan := _continue(choice, lineage, waited, waits)) is not None]
    best = max(found, key=lambda plan: (plan.record.step, plan.record.lineage), default=None)
    bad = [peer for peer in peers_of(best.record) if strikes.get(peer, 0) >= STRIKES] if best is not None else []
    if best is not None and (not bad or waited < 3 * waits.lost):  # else nobody would ever do without who brings crews to nothing
        return best
    if mine is not None and waited < waits.lost:
        return None
    fresh = able if not learnt or waited >= waits.lost else {peer: offer for peer, offer in able.items() if newest(offer.copies) is None}
    for most in sorted({strikes.get(peer, 0) for peer in fresh}):
        record = _begin({peer: offer for peer, offer in fresh.items() if strikes.get(peer, 0) <= most}, model, cost, stages)
        if record is not None:
            return Plan(record, exact=False)
    return best


def _begin(able: Mapping[str, Offer], model: bytes, cost: ModelCost, stages: int) -> Record | None:
    """From the base, as `plan.make_plan` places its layers on the largest of them. A speed is a claim: it counts half, as it were."""
    peers = sorted(sorted(able, key=lambda peer: (-able[peer].memory, peer))[:MEMBERS])
    if not peers:
        return None
    usual = median(able[peer].speed for peer in peers)
    try:
        plan = make_plan(cost, [Capacity(able[p].memory, math.sqrt(able[p].speed * usual), able[p].hop_seconds) for p in peers], stages)
    except Refused:
        return None
    members = tuple(Member(peers[member], layers) for member, layers in zip(plan.members, plan.layers, strict=True))
    return Record(NO_HASH, model, NO_HASH, 0, Taken(), members, bytes(NONCE_BYTES))


def _continue(choice: _Choice, lineage: bytes, waited: float, waits: Waits) -> Plan | None:
    """The newest point of `lineage` that may be gone on from after `waited` seconds."""
    me, cost = choice.me, choice.cost
    mine = [(peer, copy) for peer, copy in choice.copies if copy.lineage == lineage and copy.step > 0]
    points = sorted(_points(mine), key=lambda point: (-point.step, point.hash))
    newest_step = max((point.step for point in points if _is_backed(me, point, mine)), default=0)
    for point in points:
        cut = _cut(point, mine, len(cost.layers))
        if cut is None:
            continue
        exact = sum(_exact(point, mine, block) for block in cut)
        if not _believed(me, point, cut, mine):
            continue
        if exact == len(cut):
            wait = 0.0 if point.step >= newest_step else 2 * waits.exact
        else:
            wait = waits.exact
            if not {copy.layers for _, copy in mine} >= set(cut):  # nobody has some of them: then at least half of the layers, as they are
                layers = sum(last - start for start, last in cut if _exact(point, mine, (start, last)))
                ours = any(peer == me and copy.where != "neighbour" and _has(point, copy) for peer, copy in mine)
                if 2 * layers < len(cost.layers) or not ours:
                    continue
                wait = 4 * waits.exact
        if waited < wait:
            continue
        holders = _place(point, cut, mine, choice.able, cost, choice.strikes)
        if holders is not None:
            members = tuple(Member(peer, last - start) for peer, (start, last) in zip(holders, cut, strict=True))
            record = Record(lineage, choice.model, point.hash, point.step, point.taken, members, bytes(NONCE_BYTES))
            return Plan(record, exact=wait == 0.0)
    return None


def _points(copies: Iterable[tuple[str, Copy]]) -> Iterable[_Point]:
    """Each once; of how its last step was taken, what the lowest peer says that has taken it."""
    found: dict[tuple[int, bytes], _Point] = {}
    for _, copy in copies:
        found.setdefault((copy.step, copy.hash), _Point(copy.lineage, copy.step, copy.hash, copy.taken))
    return found.values()


def _has(point: _Point, copy: Copy) -> bool:
    return (copy.step, copy.hash) == (point.step, point.hash) or (copy.next == point.hash and copy.step + 1 == point.step)


def _is_backed(me: str, point: _Point, copies: Sequence[tuple[str, Copy]]) -> bool:
    """Whether we have been there, or more than one other node says that it has."""
    sayers = {peer for peer, copy in copies if _has(point, copy)}
    return me in sayers or len(sayers) > 1


def _believed(me: str, point: _Point, cut: Sequence[Block], copies: Sequence[tuple[str, Copy]]) -> bool:
    """Whether a point is more than a claim: we have been there, or half of the blocks' holders say so, and more than one of them."""
    sayers = {peer for peer, copy in copies if copy.layers in cut and _has(point, copy)}
    learnt = any(peer == me and copy.where != "neighbour" for peer, copy in copies)
    if 2 * len(sayers) < len(cut) and 2 * sum(_exact(point, copies, block) for block in cut) < len(cut):
        return False
    return me in sayers or not learnt or len(sayers) > 1


def _exact(point: _Point, copies: Iterable[tuple[str, Copy]], block: Block) -> bool:
    return any(copy.layers == block and _has(point, copy) for _, copy in copies)


def _cut(point: _Point, copies: Sequence[tuple[str, Copy]], layers: int) -> tuple[Block, ...] | None:
    """Blocks that follow each other from the first layer to the last: those with most exact copies, then with younger ones."""
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
            known = {(start, min([first for first, _ in lags if first > start], default=layers)): GAP}
        for block, lag in sorted(known.items()):
            if left and (rest := best(block[1], left - 1)) is not None:
                options.append((rest[0] + (lag > 0), rest[1] + lag, (block, *rest[2])))
        return min(options, default=None)

    found = best(0, MEMBERS)
    return None if found is None else found[2]


def _place(
    point: _Point, cut: Sequence[Block], copies: Sequence[tuple[str, Copy]], able: Mapping[str, Offer], cost: ModelCost,
    strikes: Mapping[str, int],
) -> tuple[str, ...] | None:  # fmt: skip
    """A node for each block, each at most once, with the least to fetch; None where they do not fit."""
    sizes = [last - first for first, last in cut]
    needs = [stage_memory(cost, sizes, stage) for stage in range(len(cut))]
    costs = {peer: [FETCHED if offer.memory >= need else IMPOSSIBLE for need in needs] for peer, offer in able.items()}
    for peer, copy in copies:
        if copy.layers in cut:
            stage = cut.index(copy.layers)
            if able[peer].memory >= needs[stage]:
                lag = point.step - copy.step
                price = _WHERE[copy.where] if _has(point, copy) else OLDER + lag if lag > 0 else FETCHED
                costs[peer][stage] = min(costs[peer][stage], price)
    held = {copy.layers for _, copy in copies}
    trusted = {copy.layers for peer, copy in copies if strikes.get(peer, 0) < STRIKES}
    for stage, block in enumerate(cut):
        if block in held - trusted:  # whom to fetch it from?
            for prices in costs.values():
                prices[stage] = IMPOSSIBLE if prices[stage] == FETCHED else prices[stage]
    for peer, count in strikes.items():
        if count >= STRIKES and peer in costs:
            costs[peer] = [price + count * FETCHED if price < IMPOSSIBLE else price for price in costs[peer]]
    peers = sorted(costs, key=lambda peer: (min(costs[peer]), -able[peer].speed, peer))[:CONSIDERED]

    @cache
    def best(stage: int, used: int) -> tuple[int, tuple[str, ...]] | None:
        if stage == len(cut):
            return 0, ()
        options = []
        for number, peer in enumerate(peers):
            price = costs[peer][stage]
            if price < IMPOSSIBLE and not used >> number & 1 and (rest := best(stage + 1, used | 1 << number)) is not None:
                options.append((price + rest[0], number, (peer, *rest[1])))
        if not options:
            return None
        total, _, chosen = min(options)
        return total, chosen

    found = best(0, 0)
    if found is None:
        return None
    has = {(peer, copy.layers) for peer, copy in copies if copy.step <= point.step}
    within = all(any((peer, block) in has for peer in found[1]) for block in cut if block in held)  # a member fetches from members
    return found[1] if within else None
