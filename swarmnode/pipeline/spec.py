"""Which layers, embedding, norm and head belong to which stage, and what a tensor of the whole
model is called there. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Protocol

from swarmnode.errors import ConfigError

MODEL_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures that are nothing but embedding → equal layers → norm → head. Others that look so
scale the embedding between its module and the first layer, or let a layer's number decide what it
is: cut in two they would compute something else."""


class ModelShape(Protocol):
    """What is needed of transformers' configuration of a model."""

    @property
    def model_type(self) -> str: ...

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool


@dataclass(frozen=True)
class StageSpec:
    """One stage of `stages`: layers first … last − 1 of the whole model."""

    index: int
    """0 is the head of the crew, stages − 1 its tail."""
    stages: int
    first: int
    last: int
    tied: bool
    """The model's head is its embedding; then both ends hold it, and their gradients are summed."""

    @property
    def layers(self) -> int:
        return self.last - self.first

    @property
    def has_embedding(self) -> bool:
        return self.index == 0

    @property
    def has_head(self) -> bool:
        """And the norm before it."""
        return self.index == self.stages - 1

    @property
    def shares_embedding(self) -> bool:
        """Whether this stage and another one hold the same tied tensor."""
        return self.tied and self.stages > 1 and (self.has_embedding or self.has_head)

    def local(self, name: str) -> str | None:
        """Name in this stage of the whole model's tensor `name`; None where this stage does not
        hold it.

        Names are transformers', with or without peft's prefix. Raises ValueError for one that
        belongs to no stage.
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

    def whole(self, name: str) -> str:
        """Name in the whole model of this stage's tensor `name`: the inverse of `local`."""
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            return ".".join([*parts[:at], str(int(parts[at]) + self.first), *parts[at + 1 :]])
        if "lm_head" in parts and self.tied:
            return name.replace("lm_head.", "model.embed_tokens.")
        return name


def stage_specs(config: ModelShape, layers: Sequence[int]) -> tuple[StageSpec, ...]:
    """The stages of a model with transformers config `config`, stage i with `layers[i]` of its
    layers.

    Raises ConfigError for an architecture outside MODEL_TYPES, an empty stage, or layers that are
    not the model's.
    """
    check_model_type(config)
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


def check_model_type(config: ModelShape) -> None:
    """Raises ConfigError for an architecture that cannot be split."""
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"a {config.model_type!r} model cannot be held in stages; {', '.join(MODEL_TYPES)} can"
        )
