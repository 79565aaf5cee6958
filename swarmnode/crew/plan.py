"""The assignment of layers: contiguous blocks that make the slowest stage as fast as the members'
memory allows. Pure; no torch.

A pipeline is as fast as its slowest stage, so that is what is minimised, over every order of the
members and every way to leave some out. Whether a bound on its seconds can be kept is dynamic
programming over sets of members, exact and small: a crew has at most eight. The least such bound is
found by halving.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final

from swarmnode.errors import Refused
from swarmnode.pipeline.spec import ModelShape, check_model_type

MEMBERS: Final = 8
"""Members considered for one crew, at most."""


@dataclass(frozen=True)
class Part:
    """What one layer, the embedding or the head costs whoever holds it."""

    memory: float
    """Bytes: weights, gradients, optimizer, the cache of its share of the waves in flight, and what
    a micro-batch leaves in it."""
    work: float
    """What a micro-batch takes, forward and backward; in units of which a member does `speed` per
    second."""


@dataclass(frozen=True)
class ModelCost:
    embedding: Part
    layers: tuple[Part, ...]
    head: Part
    """Norm and head; with tied embeddings it holds the embedding a second time."""
    batch_bytes: float = 0.0
    """What a stage sends of a micro-batch: activations to the next one, gradients to the one
    before."""
    stage: float = 0.0
    """Bytes that any stage needs besides, however many layers it holds: while one of them is
    computed."""
    batches: float = 1.0
    """Micro-batches of a step."""
    crossings: float = 0.0
    """How often, for each micro-batch of a step, everybody waits for the way through all stages and
    back: once for each token that is sampled, and while the pipeline fills and drains."""


@dataclass(frozen=True)
class Capacity:
    """What a member can do."""

    memory: float
    """Bytes it can give."""
    speed: float
    """Work per second, > 0."""
    hop_seconds: float = 0.0
    """What it takes to send one micro-batch's activations on, where work does not hide it; measured
    by the network process."""


@dataclass(frozen=True)
class Plan:
    members: tuple[int, ...]
    """Which member is stage 0, 1, …"""
    layers: tuple[int, ...]
    """How many layers each of them holds."""
    slowest_seconds: float
    """What a micro-batch takes in the slowest stage."""


def stage_memory(model: ModelCost, layers: Sequence[int], stage: int) -> float:
    """Bytes that whoever holds `stage` of these blocks needs."""
    return model.stage + sum(part.memory for part in _parts(model, layers, stage))


def stage_work(model: ModelCost, layers: Sequence[int], stage: int) -> float:
    """What all micro-batches of a step take in `stage` of these blocks."""
    return model.batches * sum(part.work for part in _parts(model, layers, stage))


def _parts(model: ModelCost, layers: Sequence[int], stage: int) -> list[Part]:
    start = sum(layers[:stage])
    ends = [model.embedding] * (stage == 0) + [model.head] * (stage == len(layers) - 1)
    return [*model.layers[start : start + layers[stage]], *ends]


def make_plan(model: ModelCost, members: Sequence[Capacity], stages: int = 0) -> Plan:
    """The fastest plan; among equals the one with the fewest stages, then the one that uses earlier
    members. Deterministic.

    `stages` asks for exactly so many; 0 for as many as is fastest. Asked for a number, it is the
    fastest where layers cost alike.

    Raises Refused when no crew of these members can hold the model, ValueError for more than
    MEMBERS.
    """
    if len(members) > MEMBERS:
        raise ValueError(f"at most {MEMBERS} members")
    search = _Search(model, members)
    found = search.within(sys.float_info.max, stages)
    if found is None:
        need = model.stage + model.embedding.memory + search.memory[-1] + model.head.memory
        have = sum(member.memory for member in members)
        raise Refused(
            f"{len(members)} members with {have:.3g} bytes together cannot hold the model's"
            f" {need:.3g} in blocks of layers"
        )
    too_fast = 0.0  # nothing is known to be faster than this
    while (
        better := search.within(math.nextafter(found.slowest_seconds, -1.0), stages)
    ) is not None:
        found = better
        middle = too_fast + (found.slowest_seconds - too_fast) / 2
        if (better := search.within(middle, stages)) is None:
            too_fast = middle
        else:
            found = better
    return search.earliest(found)


@lru_cache(maxsize=8)
def plan_apart(
    model: ModelCost,
    members: tuple[Capacity, ...],
    apart: tuple[tuple[float, ...], ...],
    stages: int = 0,
) -> Plan:
    """As `make_plan`, of members that are `apart[i][j]` seconds, one way; the nearest to us come
    first.

    Each further member makes the slowest stage faster and the way through all of them longer: as
    many as make a step fastest. Their order is the one, of those no slower, with the shortest way.
    Raises as `make_plan` does.
    """
    if not any(any(row) for row in apart):
        return make_plan(model, members, stages)
    best: tuple[float, Plan] | None = None
    for count in range(max(1, stages), len(members) + 1):
        try:
            plan, way = _nearest(model, members, make_plan(model, members[:count], stages), apart)
        except Refused:
            if best is None and count == len(members):
                raise
            continue
        seconds = plan.slowest_seconds + model.crossings * way
        if best is None or seconds < best[0]:
            best = seconds, plan
    return best[1] if best is not None else make_plan(model, members, stages)


def _nearest(
    model: ModelCost, members: Sequence[Capacity], plan: Plan, apart: Sequence[Sequence[float]]
) -> tuple[Plan, float]:
    """The order of the plan's members with the shortest way, none of whose stages is slower than
    its slowest; the blocks stay as they are, since crews that are cut alike can average. And the
    seconds of that way, once through all of them and back to the first."""
    search, chosen, bound = _Search(model, members), plan.members, plan.slowest_seconds
    blocks = [*pairwise(accumulate((0, *plan.layers)))]

    def way(order: Sequence[int]) -> float:
        return sum(apart[one][other] for one, other in pairwise(order))

    # (those placed, the last of them) → the shortest order
    ends: dict[tuple[int, int], tuple[int, ...]] = {}
    for used in range(1, 1 << len(chosen)):
        for number, index in enumerate(chosen):
            if used >> number & 1 and search.seconds(index, *blocks[used.bit_count() - 1]) <= bound:
                rest = used & ~(1 << number)
                before = (
                    [(*ends[rest, other], index) for other in chosen if (rest, other) in ends]
                    if rest
                    else [(index,)]
                )
                if before:
                    ends[used, index] = min(before, key=way)
    order = min(
        [chosen, *(order for (used, _), order in ends.items() if used == (1 << len(chosen)) - 1)],
        key=way,
    )
    return Plan(order, plan.layers, bound), way(order) + apart[order[-1]][order[0]]


class _Search:
    """Plans none of whose stages takes longer than a bound: of a set of members, only how far they
    reach counts, and further is always better. So a search is at most MEMBERS · 2^MEMBERS steps,
    whatever the model."""

    def __init__(self, model: ModelCost, members: Sequence[Capacity]) -> None:
        self.model, self.members, self.count = model, members, len(model.layers)
        self.memory = [0.0, *accumulate(part.memory for part in model.layers)]
        self.work = [0.0, *accumulate(part.work for part in model.layers)]

    def within(self, bound: float, stages: int) -> Plan | None:
        """The plan with the fewest stages, then of the earliest members. `stages`: exactly so many;
        0 for any number."""
        reach = [-1] * (1 << len(self.members))
        reach[0] = 0
        fewest = len(self.members) + 1
        for used, start in enumerate(reach):
            placed = used.bit_count() + 1
            if start < 0 or placed >= fewest or (stages and placed > stages):
                continue
            for index in range(len(self.members)):
                if used >> index & 1:
                    continue
                if stages in (0, placed) and self.seconds(index, start, self.count) <= bound:
                    fewest = placed
                    break
                end = self._reach(index, start, self.count - max(1, stages - placed), bound)
                if end > start:
                    reach[used | 1 << index] = max(end, reach[used | 1 << index])
        if fewest > len(self.members):
            return None
        order = self._order(0, 0, fewest, bound, set())
        assert order is not None
        ends = self.ends(order, bound)
        assert ends is not None
        blocks = [*pairwise((0, *ends))]
        slowest = max(
            self.seconds(index, *block) for index, block in zip(order, blocks, strict=True)
        )
        return Plan(order, tuple(end - start for start, end in blocks), slowest)

    def seconds(self, index: int, start: int, end: int) -> float:
        """What a micro-batch takes in layers [start, end) at this member; infinite where they do
        not fit."""
        member, last = self.members[index], end == self.count
        memory, work = (
            self.model.stage + self.memory[end] - self.memory[start],
            self.work[end] - self.work[start],
        )
        if start == 0:
            memory, work = memory + self.model.embedding.memory, work + self.model.embedding.work
        if last:
            memory, work = memory + self.model.head.memory, work + self.model.head.work
        return (
            math.inf
            if memory > member.memory
            else work / member.speed + (0.0 if last else member.hop_seconds)
        )

    def _reach(self, index: int, start: int, most: int, bound: float) -> int:
        """How far this member can go on from `start`, at most to `most`, which is not the end;
        `start` where it cannot take a layer."""
        member, first = self.members[index], self.model.embedding if start == 0 else Part(0.0, 0.0)
        room = self.memory[start] + member.memory - self.model.stage - first.memory
        time = self.work[start] + (bound - member.hop_seconds) * member.speed - first.work
        end = min(bisect.bisect_right(self.memory, room), bisect.bisect_right(self.work, time)) - 1
        end = max(start, min(end, most))  # but for rounding
        while end < most and self.seconds(index, start, end + 1) <= bound:
            end += 1
        while end > start and self.seconds(index, start, end) > bound:
            end -= 1
        return end

    def _order(
        self, used: int, start: int, left: int, bound: float, dead: set[tuple[int, int]]
    ) -> tuple[int, ...] | None:
        """`left` members that hold what is left from `start` on, the earliest; None without."""
        if (used, start) in dead:
            return None
        for index in range(len(self.members)):
            if used >> index & 1:
                continue
            if left == 1:
                if self.seconds(index, start, self.count) <= bound:
                    return (index,)
                continue
            end = self._reach(index, start, self.count - left + 1, bound)
            rest = (
                self._order(used | 1 << index, end, left - 1, bound, dead) if end > start else None
            )
            if rest is not None:
                return (index, *rest)
        dead.add((used, start))
        return None

    def ends(self, order: tuple[int, ...], bound: float, start: int = 0) -> tuple[int, ...] | None:
        """Where each of these stops when each takes as much as it can, from `start` on; None where
        that does not hold the rest."""
        ends = [start]
        for position, index in enumerate(order[:-1]):
            ends.append(self._reach(index, ends[-1], self.count - len(order) + position + 1, bound))
            if ends[-1] <= ends[-2]:
                return None
        if not ends[-1] < self.count or self.seconds(order[-1], ends[-1], self.count) > bound:
            return None
        return (*ends[1:], self.count)

    def earliest(self, plan: Plan) -> Plan:
        """As fast as `plan`, with as little as can be in its first stages."""
        order, bound, cuts = plan.members, plan.slowest_seconds, [0]
        for position in range(1, len(order)):
            start, rest = cuts[-1], order[position:]
            fits = (
                e
                for e in range(start + 1, self.count)
                if self.seconds(order[position - 1], start, e) <= bound
            )
            cuts.append(next(e for e in fits if self.ends(rest, bound, e) is not None))
        return Plan(
            order, tuple(after - before for before, after in pairwise((*cuts, self.count))), bound
        )


def model_cost(
    config: ModelShape,
    *,
    batch_tokens: int,
    cached_tokens: int,
    weight_bytes: int = 4,
    trained_bytes: int = 12,
) -> ModelCost:
    """Estimate for a transformers config before anything is measured. Work is in floating-point
    operations.

    `batch_tokens` of a micro-batch; `cached_tokens` in all waves together (2 bytes per key and
    value); `trained_bytes` per weight for gradient and optimizer, 0 for a frozen base. Forward,
    recomputed forward and backward are 8 operations per weight and token.
    """
    check_model_type(config)
    width, head = (
        config.hidden_size,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
    keys = config.num_key_value_heads * head
    layer = (
        2 * width * config.num_attention_heads * head
        + 2 * width * keys
        + 3 * width * config.intermediate_size
        + 2 * width
    )
    vocabulary = config.vocab_size * width
    each = weight_bytes + trained_bytes
    layers = Part(layer * each + 2 * 2 * keys * cached_tokens, 8.0 * layer * batch_tokens)
    return ModelCost(
        embedding=Part(vocabulary * each, 0.0),
        layers=(layers,) * config.num_hidden_layers,
        head=Part(vocabulary * each, 8.0 * vocabulary * batch_tokens),
    )
