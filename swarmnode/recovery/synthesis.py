"""Weights for a stage of which no copy is left, from its neighbours': CheckFree and CheckFree+,
arXiv 2506.15461 §3, and two baselines.

    checkfree   W_i ← (ω_{i−1} W_{i−1} + ω_{i+1} W_{i+1}) / (ω_{i−1} + ω_{i+1}),  ω_j = ‖∇W_j‖²,
    then lr_i ← 1.1 lr_i   (algorithm 1)
    copy        first ← second, last ← last but one; embedding, norm and head from the copies that
    neighbours hold   (CheckFree+)
    uniform     checkfree with ω_{i−1} = ω_{i+1}
    identity    the residual branches end in zero: the stage passes on what it gets

ω is the squared norm of the last **raw** gradient. Taken after clipping to a common norm, as the
authors' code does, both are equal as soon as both clip, and `checkfree` is `uniform`. These are
last resorts. In a small model the average was no better than `identity`, and copies at the ends of
a model that was not trained with swapped stages cost 3 nats: there, and wherever a true copy must
be had, they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from swarmnode.errors import Incompatible, Refused
from swarmnode.pipeline.spec import StageSpec
from swarmnode.recovery.sources import LEARNING_RATE_FACTOR, Method, Run, check

BRANCH_ENDS: Final = ("self_attn.o_proj.", "mlp.down_proj.")


@dataclass(frozen=True)
class Neighbour:
    """What a stage next to the lost one gives."""

    layers: Mapping[str, torch.Tensor]
    """Its layers' tensors by their local names, `model.layers.0.…`; others are ignored."""
    squared_norm: float
    """‖∇W‖² over those layers at the last step, before clipping."""


@dataclass(frozen=True)
class Synthesis:
    state: dict[str, torch.Tensor]
    """Every tensor of the stage, by local name; new memory."""
    learning_rate_factor: float


def synthesise(
    method: Method,
    spec: StageSpec,
    before: Neighbour | None,
    after: Neighbour | None,
    run: Run,
    *,
    ends: Mapping[str, torch.Tensor] | None = None,
    paper: bool = True,
) -> Synthesis:
    """Weights for the lost stage `spec` from the stages `before` and `after` it.

    `ends` are true copies of embedding, or norm and head, by local name. `paper` raises the
    learning rate as algorithm 1 does; we measured no gain. Raises Refused, saying why, where the
    method would harm, and Incompatible where the neighbours' layers are not this stage's.
    """
    check(method, spec, run)
    if method == "copy":
        source = after if spec.has_embedding else before
        state = {name: tensor.clone() for name, tensor in layers_of(source, spec).items()}
    elif method == "identity":
        source = before if before is not None else after
        blocked = layers_of(source, spec).items()
        state = {
            n: torch.zeros_like(t) if any(end in n for end in BRANCH_ENDS) else t.clone()
            for n, t in blocked
        }
    else:
        state = average(before, after, spec, uniform=method == "uniform")
    for name in end_names(spec):
        if ends is None or name not in ends:
            raise Refused(f"{name} can only be restored from a true copy, and none is left")
        state[name] = ends[name].clone()
    return Synthesis(state, LEARNING_RATE_FACTOR if paper else 1.0)


def average(
    before: Neighbour | None, after: Neighbour | None, spec: StageSpec, uniform: bool
) -> dict[str, torch.Tensor]:
    """Algorithm 1, line 3, in float64. Two zero gradients say nothing of either side, and weigh
    alike."""
    left, right = layers_of(before, spec), layers_of(after, spec)
    assert before is not None
    assert after is not None
    weights = (1.0, 1.0) if uniform else (before.squared_norm, after.squared_norm)
    if left.keys() != right.keys() or any(left[n].shape != right[n].shape for n in left):
        raise Incompatible("the neighbours' layers are not alike")
    if not all(math.isfinite(w) and w >= 0 for w in weights):
        raise Incompatible(f"squared gradient norms of {weights[0]} and {weights[1]}")
    if sum(weights) == 0:
        weights = (1.0, 1.0)
    share = weights[0] / sum(weights)
    return {
        n: (share * left[n].double() + (1.0 - share) * right[n].double()).to(left[n].dtype)
        for n in left
    }


def layers_of(neighbour: Neighbour | None, spec: StageSpec) -> dict[str, torch.Tensor]:
    """A neighbour's layers, as many as this stage has. Raises Refused without the neighbour,
    Incompatible for other layers."""
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
    """Local names of what an end stage holds beside its layers."""
    names = ["model.embed_tokens.weight"] if spec.has_embedding else []
    tied_here = spec.tied and spec.stages == 1
    return names + (
        ["model.norm.weight"] + ([] if tied_here else ["lm_head.weight"]) if spec.has_head else []
    )
