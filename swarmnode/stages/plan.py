"""Who holds which layers: contiguous blocks that make the slowest stage as fast as the members' memory allows. Pure; no torch.

A pipeline is as fast as its slowest stage, so that is what is minimised, over every order of the members and every way to leave some out.
Dynamic programming over (set of members used, layers placed) is exact, and small: a crew has at most eight members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from swarmnode.errors import Refused
from swarmnode.stages.spec import check_model_type

MEMBERS: Final = 8
"""Members considered for one crew, at most."""


@dataclass(frozen=True)
class Part:
    """What one layer, the embedding or the head costs whoever holds it."""

    memory: float
    """Bytes: weights, gradients, optimizer, and the cache of its share of the waves in flight."""
    work: float
    """Of a micro-batch, forward and backward; in units of which a member does `speed` per second."""


@dataclass(frozen=True)
class ModelCost:
    embedding: Part
    layers: tuple[Part, ...]
    head: Part
    """Norm and head; with tied embeddings it holds the embedding a second time."""


@dataclass(frozen=True)
class Capacity:
    """What a member measured of itself."""

    memory: float
    """Bytes it can give."""
    speed: float
    """Work per second, > 0."""
    hop_seconds: float = 0.0
    """To send one micro-batch's activations on, not hidden behind work."""


@dataclass(frozen=True)
class Plan:
    members: tuple[int, ...]
    """Which member is stage 0, 1, …"""
    layers: tuple[int, ...]
    """How many layers each of them holds."""
    slowest_seconds: float
    """Of a micro-batch in the slowest stage."""


def stage_memory(model: ModelCost, layers: Sequence[int], stage: int) -> float:
    """Bytes that whoever holds `stage` of these blocks needs."""
    start = sum(layers[:stage])
    memory = sum(part.memory for part in model.layers[start : start + layers[stage]])
    memory += model.embedding.memory if stage == 0 else 0.0
    return memory + (model.head.memory if stage == len(layers) - 1 else 0.0)


def make_plan(model: ModelCost, members: Sequence[Capacity], stages: int = 0) -> Plan:
    """The fastest plan; among equals the one with the fewest stages, then the one that uses earlier members. Deterministic.

    `stages` asks for exactly so many; 0 for as many as is fastest.

    Raises Refused when no crew of these members can hold the model, ValueError for more than MEMBERS.
    """
    if len(members) > MEMBERS:
        raise ValueError(f"at most {MEMBERS} members")
    count = len(model.layers)
    memory = [0.0, *accumulate(part.memory for part in model.layers)]
    work = [0.0, *accumulate(part.work for part in model.layers)]
    # best[used][l]: (slowest seconds, stages, member order, layers per stage) with the first l layers placed on the set `used`
    best: list[dict[int, tuple[float, int, tuple[int, ...], tuple[int, ...]]]] = [{} for _ in range(1 << len(members))]
    best[0][0] = (0.0, 0, (), ())
    for used in range(1 << len(members)):
        for start, (slowest, placed, order, blocks) in best[used].items():
            for index, member in enumerate(members):
                if used >> index & 1:
                    continue
                for end in range(start + 1, count + 1):
                    bytes_, amount = memory[end] - memory[start], work[end] - work[start]
                    if start == 0:
                        bytes_, amount = bytes_ + model.embedding.memory, amount + model.embedding.work
                    if bytes_ > member.memory:
                        break  # more layers need only more
                    if end == count:
                        bytes_, amount = bytes_ + model.head.memory, amount + model.head.work
                        if bytes_ > member.memory:
                            break
                    seconds = max(slowest, amount / member.speed + (member.hop_seconds if end < count else 0.0))
                    found = (seconds, placed + 1, (*order, index), (*blocks, end - start))
                    grown = best[used | 1 << index]
                    if end not in grown or found < grown[end]:
                        grown[end] = found
    whole = [table[count] for used, table in enumerate(best) if count in table and stages in (0, used.bit_count())]
    if not whole:
        need = model.embedding.memory + memory[-1] + model.head.memory
        have = sum(member.memory for member in members)
        raise Refused(f"{len(members)} members with {have:.3g} bytes together cannot hold the model's {need:.3g} in blocks of layers")
    slowest, _, order, blocks = min(whole)
    return Plan(order, blocks, slowest)


def model_cost(config: Any, *, batch_tokens: int, cached_tokens: int, weight_bytes: int = 4, trained_bytes: int = 12) -> ModelCost:
    """Estimate for a transformers config before anything is measured. Work is in floating-point operations.

    `batch_tokens` of a micro-batch; `cached_tokens` in all waves together (2 bytes per key and value); `trained_bytes` per weight for
    gradient and optimizer, 0 for a frozen base. Forward, recomputed forward and backward are 8 operations per weight and token.
    """
    check_model_type(config)
    width, head = config.hidden_size, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = config.num_key_value_heads * head
    layer = 2 * width * config.num_attention_heads * head + 2 * width * keys + 3 * width * config.intermediate_size + 2 * width
    vocabulary = config.vocab_size * width
    each = weight_bytes + trained_bytes
    layers = Part(layer * each + 2 * 2 * keys * cached_tokens, 8.0 * layer * batch_tokens)
    return ModelCost(
        embedding=Part(vocabulary * each, 0.0),
        layers=(layers,) * config.num_hidden_layers,
        head=Part(vocabulary * each, 8.0 * vocabulary * batch_tokens),
    )
