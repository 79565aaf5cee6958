"""How a model is cut into stages: layers and tensors of each stage, the routes of micro-batches
through them, and memory and work of a stage. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

from swarmnode.errors import ConfigError, Refused
from swarmnode.stages.stage_frames import Purpose

# The layers, embedding, norm and head of each stage, and their tensor names in the whole model.


class ModelConfig(Protocol):
    """Fields that are read from a model's transformers configuration."""

    num_hidden_layers: int
    tie_word_embeddings: bool


@dataclass(frozen=True)
class StageSpec:
    """One stage of a model: layers first … last − 1."""

    index: int
    """Number of the stage; 0 is the head of the crew."""
    stages: int
    """Number of stages of the model."""
    first: int
    last: int
    tied: bool
    """True if the output matrix is the embedding. Both ends hold it, and their gradients are
    summed."""

    @property
    def layers(self) -> int:
        return self.last - self.first

    @property
    def has_embedding(self) -> bool:
        return self.index == 0

    @property
    def has_head(self) -> bool:
        """True if the stage has the output matrix, and the norm before it."""
        return self.index == self.stages - 1

    @property
    def shares_embedding(self) -> bool:
        """True if this stage and another one hold the same tied tensor."""
        return self.tied and self.stages > 1 and (self.has_embedding or self.has_head)

    def local_name(self, name: str) -> str | None:
        """Return the name in this stage of the whole model's tensor `name`; None if this stage does
        not hold it.

        Args:
            name: As in transformers, with or without peft's prefix.

        Raises:
            ValueError: `name` belongs to no layer, embedding, norm or head.
        """
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            layer = int(parts[at])
            if not self.first <= layer < self.last:
                return None
            return ".".join([*parts[:at], str(layer - self.first), *parts[at + 1 :]])
        if "embed_tokens" in parts:
            if self.has_embedding:
                return name
            return (
                name.replace("model.embed_tokens.", "lm_head.")
                if self.has_head and self.tied
                else None
            )
        if "lm_head" in parts or "norm" in parts:
            return name if self.has_head else None
        raise ValueError(f"{name!r} is of no layer, embedding, norm or head")

    def whole_name(self, name: str) -> str:
        """Return the name in the whole model of this stage's tensor `name`, as inverse of
        `local_name`."""
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            return ".".join([*parts[:at], str(int(parts[at]) + self.first), *parts[at + 1 :]])
        if "lm_head" in parts and self.tied:
            return name.replace("lm_head.", "model.embed_tokens.")
        return name


def stage_specs(config: ModelConfig, layers: Sequence[int]) -> tuple[StageSpec, ...]:
    """Return the stages of a model; stage i has `layers[i]` layers.

    `stage_model.check_split` checks that the model can be split.

    Args:
        config: The model's transformers configuration.

    Raises:
        ConfigError: a stage is empty, or the numbers do not add up to the model's layers.
    """
    if not layers or min(layers) < 1 or sum(layers) != config.num_hidden_layers:
        raise ConfigError(
            f"stages of {list(layers)} layers do not make the model's {config.num_hidden_layers}"
        )
    ends = list(accumulate(layers))
    tied = bool(config.tie_word_embeddings)
    return tuple(
        StageSpec(i, len(layers), end - count, end, tied)
        for i, (count, end) in enumerate(zip(layers, ends, strict=True))
    )


# The order in which a micro-batch visits the stages:
#
#     plain      0 → 1 → … → S − 1
#     swapped    0: embedding → 1 → 0: layers → 2 → … → S − 1: layers → S − 2 → S − 1: norm and head
#                (CheckFree+, arXiv 2506.15461 §3.3)
#
# In a swapped run the micro-batch number's parity picks the route.

StagePart = Literal["all", "embed", "layers", "head"]
"""Part of a stage that a hop runs. `all`: its embedding if it has one, its layers, and its norm and
head if it has them."""


@dataclass(frozen=True)
class Hop:
    """One visit of a micro-batch to a stage."""

    stage: int
    part: StagePart


Route = tuple[Hop, ...]


def plain_route(stages: int) -> Route:
    """Return the route that visits all stages in order."""
    return tuple(Hop(stage, "all") for stage in range(stages))


def swapped_order(stages: int) -> tuple[int, ...]:
    """Return the order of the stages' layers for half of the micro-batches (CheckFree+).

    Raises:
        Refused: there are fewer than four stages, so the exchanged pairs would overlap.
    """
    if stages < 4:
        raise Refused("swapped stages need at least four")
    return (1, 0, *range(2, stages - 2), stages - 1, stages - 2)


def swapped_route(stages: int) -> Route:
    """Return the route of every other micro-batch in a swapped run (CheckFree+).

    Raises:
        Refused: there are fewer than four stages.
    """
    return (
        Hop(0, "embed"),
        *(Hop(stage, "layers") for stage in swapped_order(stages)),
        Hop(stages - 1, "head"),
    )


class Routes:
    """Routes of one crew.

    Args:
        swap: True for a swapped run (CheckFree+).

    Raises:
        Refused: a swapped run has fewer than four stages.
    """

    def __init__(self, stages: int, swap: bool) -> None:
        self._plain = plain_route(stages)
        self._swapped = swapped_route(stages) if swap else self._plain

    def route(self, micro_batch: int, purpose: Purpose = "learn") -> Route:
        """Return the route of a micro-batch. Only training is swapped: generation and scores use
        the plain order."""
        return self._swapped if purpose == "learn" and micro_batch % 2 else self._plain


def forward_hop(route: Route, sender: int, stage: int) -> int | None:
    """Return the index of the hop of `route` that starts with a forward from `sender` to `stage`;
    None if there is none. The head sends the first forward to itself."""
    if sender == stage == route[0].stage:
        return 0
    return next(
        (
            i
            for i in range(1, len(route))
            if (route[i - 1].stage, route[i].stage) == (sender, stage)
        ),
        None,
    )


def backward_hop(route: Route, sender: int, stage: int) -> int | None:
    """Return the index of the hop of `route` at `stage` whose gradient comes from `sender`; None if
    there is none."""
    return next(
        (
            i
            for i in range(len(route) - 1)
            if (route[i].stage, route[i + 1].stage) == (stage, sender)
        ),
        None,
    )


# Cost of a model's parts: the input of the plan in `crew_plan.py`.


@dataclass(frozen=True)
class PartCost:
    """Cost of one layer, of the embedding or of the head, for the node that holds it."""

    memory: float
    """Bytes of weights, gradients, optimizer, activations, and the cache of the waves in flight."""
    work: float
    """Number of weights that each token is multiplied with."""


@dataclass(frozen=True)
class ModelCost:
    """Costs of all parts of a model."""

    embedding: PartCost
    layers: tuple[PartCost, ...]
    head: PartCost
    """Norm and head; with tied embeddings it holds the embedding a second time."""
    stage: float = 0.0
    """Further bytes that every stage needs, for the layer that is being computed."""


def stage_memory(model: ModelCost, layers: Sequence[int], stage: int) -> float:
    """Return the bytes that a node needs to hold `stage`.

    Args:
        layers: Number of layers of each stage.
    """
    start = sum(layers[:stage])
    ends = [model.embedding] * (stage == 0) + [model.head] * (stage == len(layers) - 1)
    parts = [*model.layers[start : start + layers[stage]], *ends]
    return model.stage + sum(part.memory for part in parts)
