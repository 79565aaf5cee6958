"""Synthesis of a stage from its neighbours: CheckFree and CheckFree+ (arXiv 2506.15461 §3).

    inner stage   W_i ← (ω_{i−1} W_{i−1} + ω_{i+1} W_{i+1}) / (ω_{i−1} + ω_{i+1}),  ω_j = ‖∇W_j‖²,
                  then lr_i ← 1.1 lr_i   (algorithm 1)
    an end        layers of the first ← second stage, of the last ← last but one; embedding, norm
                  and head as stored by a neighbour (CheckFree+)

ω is the squared norm of the last gradient before clipping. The authors' code takes it after
clipping to a common norm, so both weights are equal as soon as both gradients are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from swarmnode.errors import Incompatible, Refused
from swarmnode.stages.specs import StageSpec

LEARNING_RATE_FACTOR: Final = 1.1
"""Algorithm 1, line 4. After any number of recoveries the factor is 1.1."""


@dataclass(frozen=True)
class NeighbourLayers:
    """Layers of a neighbour of the lost stage, and their last gradient norm."""

    layers: Mapping[str, torch.Tensor]
    """Tensors of its layers by local name, `model.layers.0.…`. Other tensors are ignored."""
    squared_norm: float
    """‖∇W‖² over these layers at the last step, before clipping."""


def synthesise(
    spec: StageSpec,
    before: NeighbourLayers | None,
    after: NeighbourLayers | None,
    *,
    ends: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Return weights for the lost stage `spec`, by local name, in new memory.

    Args:
        before: Stage `spec.index - 1`; None if it is lost or does not exist.
        after: Stage `spec.index + 1`; None if it is lost or does not exist.
        ends: Stored embedding, or norm and head, by local name.

    Raises:
        Refused: A neighbour, or a tensor of `ends`, is missing.
        Incompatible: The neighbours' layers are not this stage's.
    """
    if spec.has_embedding or spec.has_head:
        layers = neighbour_layers(after if spec.has_embedding else before, spec)
        state = {name: tensor.clone() for name, tensor in layers.items()}
    else:
        state = average(before, after, spec)
    for name in end_names(spec):
        if ends is None or name not in ends:
            raise Refused(f"{name} is in one stage only, and no member has stored it")
        state[name] = ends[name].clone()
    return state


def average(
    before: NeighbourLayers | None, after: NeighbourLayers | None, spec: StageSpec
) -> dict[str, torch.Tensor]:
    """Return the average of algorithm 1, line 3, computed in float64. If both gradients are zero,
    both weights are equal.

    Raises:
        Refused: A neighbour is lost too.
        Incompatible: The neighbours' layers or norms cannot be averaged.
    """
    left, right = neighbour_layers(before, spec), neighbour_layers(after, spec)
    assert before is not None
    assert after is not None
    weights = (before.squared_norm, after.squared_norm)
    if left.keys() != right.keys() or any(left[n].shape != right[n].shape for n in left):
        raise Incompatible("the neighbours' layers are not alike")
    if not all(math.isfinite(w) and w >= 0 for w in weights):
        raise Incompatible(f"squared gradient norms of {weights[0]} and {weights[1]}")
    share = weights[0] / sum(weights) if sum(weights) else 0.5
    return {
        n: (share * left[n].double() + (1.0 - share) * right[n].double()).to(left[n].dtype)
        for n in left
    }


def neighbour_layers(neighbour: NeighbourLayers | None, spec: StageSpec) -> dict[str, torch.Tensor]:
    """Return the tensors of a neighbour's layers, by local name.

    Raises:
        Refused: The neighbour is lost too.
        Incompatible: It has another number of layers, or numbers that are not finite.
    """
    if neighbour is None:
        raise Refused(f"stage {spec.index}'s neighbour is lost too")
    found = {name: tensor for name, tensor in neighbour.layers.items() if ".layers." in name}
    count = len({name.split(".layers.")[1].split(".")[0] for name in found})
    if count != spec.layers:
        raise Incompatible(f"a neighbour of {count} layers for a stage of {spec.layers}")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in found.values()):
        raise Incompatible("a neighbour's weights are not finite")
    return found


def end_names(spec: StageSpec) -> list[str]:
    """Return the local names of the tensors that an end stage has beside its layers."""
    names = ["model.embed_tokens.weight"] if spec.has_embedding else []
    if spec.has_head:
        tied_here = spec.tied and spec.stages == 1
        names += ["model.norm.weight"] if tied_here else ["model.norm.weight", "lm_head.weight"]
    return names


RecoveryMode = Literal["checkpoints", "checkfree", "checkfree+"]
"""Values of `stages.recovery`. `checkpoints`: stages are restored from checkpoints."""


def check_checkfree(mode: RecoveryMode, stages: int, adapter: bool) -> None:
    """Check that a crew may rebuild stages by CheckFree or CheckFree+.

    Args:
        stages: Configured number of stages; 0 for any number.
        adapter: True if only a LoRA adapter is trained.

    Raises:
        Refused: An adapter is trained, or there are too few stages.
    """
    if mode == "checkpoints":
        return
    if adapter:
        raise Refused(
            f"{mode} averages whole weights, and only an adapter is trained here: set"
            " stages.recovery to checkpoints"
        )
    least = 3 if mode == "checkfree" else 4
    if stages < least:
        raise Refused(
            f"{mode} needs {least} or more stages, and stages.stages is {stages}: raise it, or set"
            " stages.recovery to checkpoints"
        )
