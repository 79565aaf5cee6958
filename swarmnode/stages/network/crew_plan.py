"""The plan of a crew from offers: which node holds which layers. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from swarmnode.stages.crew_messages import (
    HASH_BYTES,
    NONCE_BYTES,
    CrewMember,
    CrewRecord,
    HeldBlock,
    Offer,
    member_peers,
)
from swarmnode.stages.network.crew_state import MembershipSettings
from swarmnode.stages.specs import ModelCost, PartCost, stage_memory
from swarmnode.stages.stage_frames import MAX_STAGES

MAX_PLANNED_STEPS: Final = 16
"""A node plans with the steps that most peers hold, this many of all lineages, and with the steps
that it holds itself."""
MIN_DISTANCE_SECONDS: Final = 0.001
"""A distance below this counts as 0."""


@dataclass(frozen=True)
class CrewPlan:
    """Crew that a node may propose."""

    record: CrewRecord
    """Record with a zero nonce, and with a zero lineage if training starts from the base."""
    lost: tuple[int, ...] = ()
    """Stages of which no node has a usable block."""


def plan_crew(
    me: str,
    offers: Mapping[str, Offer],
    cost: ModelCost,
    settings: MembershipSettings,
    waited: float,
    distances: Mapping[str, float] = MappingProxyType({}),
) -> CrewPlan | None:
    """Return the crew to propose now; None if no crew is possible yet.

    Args:
        me: Peer id of this node.
        offers: Offers by peer, including this node's.
        waited: Seconds that this node has been free.
        distances: One-way seconds to a peer, measured by this node.
    """
    model = offers[me].model
    candidates = {
        peer: offer
        for peer, offer in sorted(offers.items())
        if offer.model == model and offer.memory > 0 and offer.speed > 0
    }
    if me not in candidates:
        return None
    own = newest_own_block(candidates[me].held_blocks)
    held_blocks = [
        (peer, held_block)
        for peer, offer in candidates.items()
        for held_block in offer.held_blocks
        if held_block.step
    ]
    points = {
        (peer, (held_block.lineage, held_block.step))
        for peer, held_block in held_blocks
        if is_own_block(held_block)
    }
    peers_at = Counter(point for _, point in points)
    common = sorted(peers_at, key=lambda point: (-peers_at[point], -point[1], point))[
        :MAX_PLANNED_STEPS
    ]
    ours = {point for peer, point in points if peer == me}
    plans = [
        plan
        for lineage, step in sorted(ours.union(common))
        if (plan := _plan_continuation(me, candidates, cost, lineage, step, held_blocks, distances))
    ]

    def required_wait(plan: CrewPlan) -> float:
        record = plan.record
        ahead = any(
            lineage == record.lineage and step > record.step + 1 for lineage, step in peers_at
        )
        seconds = settings.discard_wait_seconds if plan.lost or ahead else 0.0
        return max(seconds, refusal_seconds(candidates[me].held_blocks, record, settings))

    def rank(plan: CrewPlan) -> tuple[bool, int, int, bytes]:
        is_ours = own is not None and own.lineage == plan.record.lineage
        return is_ours, -len(plan.lost), plan.record.step, plan.record.lineage

    best = max((plan for plan in plans if waited >= required_wait(plan)), key=rank, default=None)
    if best is not None and (
        me in member_peers(best.record) or waited < settings.base_wait_seconds
    ):
        return best
    if waited < settings.base_wait_seconds:
        if own is not None or plans:
            return None  # a crew that keeps trained steps may become possible
        candidates = {
            peer: offer
            for peer, offer in candidates.items()
            if newest_own_block(offer.held_blocks) is None
        }
    return _plan_from_base(me, candidates, cost, settings.stages, distances)


def is_own_block(held_block: HeldBlock) -> bool:
    """Return True if the node that offers this block has trained it."""
    return held_block.where != "neighbour" and held_block.step > 0


def is_usable_block(held_block: HeldBlock, step: int) -> bool:
    """Return True if a crew at `step` can continue with this block: its node trained it, and it is
    at `step` or one step behind."""
    return held_block.where != "neighbour" and step - 1 <= held_block.step <= step


def newest_own_block(held_blocks: Collection[HeldBlock]) -> HeldBlock | None:
    """Return the newest block that the node has trained; None for an untrained node."""
    return max(
        filter(is_own_block, held_blocks), key=lambda held_block: held_block.step, default=None
    )


def refusal_seconds(
    held_blocks: Collection[HeldBlock], record: CrewRecord, settings: MembershipSettings
) -> float:
    """Return for how many seconds without a crew a node refuses `record`, because it would discard
    steps of its `held_blocks`."""
    own = newest_own_block(held_blocks)
    if own is None:
        return 0.0
    if record.lineage == own.lineage and record.step > 0:
        return 0.0 if abs(record.step - own.step) <= 1 else settings.discard_wait_seconds
    return settings.discard_wait_seconds if record.step > own.step else settings.base_wait_seconds


def _plan_continuation(
    me: str,
    candidates: Mapping[str, Offer],
    cost: ModelCost,
    lineage: bytes,
    step: int,
    all_blocks: Sequence[tuple[str, HeldBlock]],
    distances: Mapping[str, float],
) -> CrewPlan | None:
    """Return a crew that continues `lineage` at `step`; None if it is not possible.

    It has the stages of the former crew; if peers disagree, those with the most usable blocks. A
    node with a usable block keeps its stage. A lost stage goes to another node with room, first to
    one that holds it at an older step.

    Args:
        all_blocks: (peer, held block) of all candidates.
    """
    held_blocks = [
        (peer, held)
        for peer, held in all_blocks
        if held.lineage == lineage and sum(held.layers) == len(cost.layers)
    ]
    claims = {(peer, held.layers) for peer, held in held_blocks if is_usable_block(held, step)}
    votes = Counter(layers for _, layers in claims)
    if not votes:
        return None
    layers = max(votes, key=lambda layers: (votes[layers], layers))
    stages = range(len(layers))
    needs = [stage_memory(cost, layers, stage) for stage in stages]
    usable: list[set[str]] = [set() for _ in stages]
    newest = Counter[tuple[str, int]]()  # rank of the newest block up to `step`; memory first
    for peer, held in held_blocks:
        if held.layers != layers:
            continue
        if is_usable_block(held, step):
            usable[held.stage].add(peer)
        if held.step <= step:
            rank = 2 * held.step + (held.where == "memory")
            newest[peer, held.stage] = max(rank, newest[peer, held.stage])
    chosen: dict[int, str] = {}

    def pick(stage: int, peers: Collection[str]) -> str | None:
        free = set(peers).difference(chosen.values())
        near = {peer: round_distance(distances.get(peer, 0.0)) for peer in free}
        size = {peer: candidates[peer].memory * candidates[peer].speed for peer in free}
        return min(
            (peer for peer in free if candidates[peer].memory >= needs[stage]),
            key=lambda peer: (-newest[peer, stage], near[peer], -size[peer], peer),
            default=None,
        )

    for stage in sorted(stages, key=lambda stage: len(usable[stage])):
        if (holder := pick(stage, usable[stage])) is not None:
            chosen[stage] = holder
    lost = tuple(stage for stage in stages if stage not in chosen)
    for stage in sorted(lost, key=lambda stage: -needs[stage]):
        if (spare := pick(stage, candidates)) is None:
            return None
        chosen[stage] = spare
    held_at_some_step = {stage for _, stage in newest}
    if 2 * len(set(lost) - held_at_some_step) > len(layers):
        return None  # more than half of the stages would come from the base
    if len(layers) == 1 and chosen[0] != me:
        return None  # only a node itself may propose a crew of one
    members = tuple(CrewMember(chosen[stage], layers[stage]) for stage in stages)
    return CrewPlan(
        CrewRecord(lineage, candidates[me].model, step, members, bytes(NONCE_BYTES)), lost
    )


def _plan_from_base(
    me: str,
    candidates: Mapping[str, Offer],
    cost: ModelCost,
    stages: int,
    distances: Mapping[str, float],
) -> CrewPlan | None:
    """Return a crew that starts from the base and contains this node; None if it is not possible.

    It has the fewest of the nearest nodes that hold the model, the nearest first, or of those with
    the most memory if the nearest cannot hold it. The other nodes are spares.

    Args:
        stages: Number of stages; 0 for the fewest.
    """
    near = {peer: round_distance(distances.get(peer, 0.0)) for peer in candidates}
    size = {peer: offer.memory * offer.speed for peer, offer in candidates.items()}
    by_distance = sorted(candidates, key=lambda peer: (peer != me, near[peer], -size[peer], peer))
    by_memory = sorted(candidates, key=lambda peer: (peer != me, -candidates[peer].memory, peer))
    for peers in (by_distance[:MAX_STAGES], by_memory[:MAX_STAGES]):
        for count in range(stages or 1, min(stages or len(peers), len(peers)) + 1):
            # second, the two members with the most memory at the ends, which also hold embedding
            # and head
            largest = sorted(peers[:count], key=lambda peer: -candidates[peer].memory)
            for order in (peers[:count], [*largest[:1], *largest[2:], *largest[1:2]]):
                layers = assign_layers(cost, [candidates[peer] for peer in order])
                if layers is not None:
                    return CrewPlan(
                        CrewRecord(
                            lineage=bytes(HASH_BYTES),
                            model=candidates[me].model,
                            step=0,
                            members=tuple(map(CrewMember, order, layers)),
                            nonce=bytes(NONCE_BYTES),
                        )
                    )
    return None


def round_distance(seconds: float) -> float:
    """Round a distance to a power of two, so that a new measurement rarely changes a plan."""
    return 0.0 if seconds < MIN_DISTANCE_SECONDS else 2.0 ** round(math.log2(seconds))


def assign_layers(model: ModelCost, members: Sequence[Offer]) -> tuple[int, ...] | None:
    """Return the number of layers of each member; None if the model does not fit.

    Each member gets one layer. Each further layer goes to the member that is the fastest with it.
    All layers count as the largest one.
    """
    layer = PartCost(max(p.memory for p in model.layers), max(p.work for p in model.layers))
    ends = [[model.embedding] * (member is members[0]) for member in members]
    ends[-1].append(model.head)
    sizes = [0] * len(members)

    def seconds(stage: int, size: int) -> float:
        member, parts = members[stage], [layer] * size + ends[stage]
        if model.stage + sum(part.memory for part in parts) > member.memory:
            return math.inf
        return sum(part.work for part in parts) / member.speed

    for _ in model.layers:
        fastest = min(range(len(members)), key=lambda n: (sizes[n] > 0, seconds(n, sizes[n] + 1)))
        sizes[fastest] += 1
    fits = all(seconds(stage, size) < math.inf for stage, size in enumerate(sizes))
    return tuple(sizes) if fits and min(sizes) > 0 else None
