"""Weights for decoding on a CPU: the adapter is merged, projections of one input are joined, and
all matrices are packed for oneDNN.

A decoding step has few rows, so it spends most of its time reading weights. Merging saves an
adapter's two products per projection, joining saves calls, and packing doubles the speed of a
product. The copy needs as much memory as the weights. It lives until the next update; the policy's
own weights do not change.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from swarmnode.policy.device import spare_bytes
from swarmnode.policy.linear import OneDnnLinear, merged_weight, multiply, pack
from swarmnode.policy.logprobs import SPARE_SHARE
from swarmnode.policy.model import Policy

ROWS = 16
"""Number of rows that the layout of packed weights suits best. With other numbers it is at most a
tenth slower."""

Version = list[tuple[int, int]]
"""Address and version counter of each parameter. Every change raises the counter: torch's
operations do, and `Updater` does after a fused optimizer step."""


@dataclass(frozen=True)
class Projection:
    """One or several linear layers with the same input."""

    weight: torch.Tensor
    """(O, I), packed."""
    bias: torch.Tensor | None
    sizes: list[int]
    """Output size of each layer."""

    @classmethod
    def of(cls, *layers: Any) -> Projection:  # noqa: ANN401 - linear layers, peft's too
        weights = [merged_weight(layer) for layer in layers]
        biases = [layer.bias for layer in layers]
        sizes = [len(weight) for weight in weights]
        # Each layer may have a bias of its own.
        bias = None
        if any(each is not None for each in biases):
            bias = torch.cat(
                [
                    weight.new_zeros(len(weight)) if each is None else each
                    for weight, each in zip(weights, biases, strict=True)
                ]
            )
        return cls(pack(torch.cat(weights) if len(weights) > 1 else weights[0], ROWS), bias, sizes)

    def __call__(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the output (N, O) of each layer."""
        return multiply(states, self.weight, self.bias).split(self.sizes, -1)


@dataclass(frozen=True)
class MergedLayer:
    """The projections of one transformer layer."""

    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class MergedWeights:
    """All matrices of a decoding step."""

    layers: list[MergedLayer]
    head: Projection


_copies: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Version, MergedWeights]] = (
    weakref.WeakKeyDictionary()
)


@torch.no_grad()
def merged_weights(policy: Policy) -> MergedWeights | None:
    """Return merged weights for the models of `step.MODEL_TYPES`; None on other devices than a CPU
    with oneDNN, or if memory is short. They are built again after the weights have changed."""
    model: Any = policy.base
    if policy.adapter_off or type(model.lm_head) is not OneDnnLinear:
        return None
    parameters = list(policy.model.parameters())
    version = [(each.data_ptr(), each._version) for each in parameters]
    if model in _copies and _copies[model][0] == version:
        return _copies[model][1]
    _copies.clear()  # at most one copy
    spare = spare_bytes(policy.device)
    if spare is not None and 4 * sum(p.numel() for p in parameters) > SPARE_SHARE * spare:
        return None
    layers = [
        MergedLayer(
            Projection.of(attention.q_proj, attention.k_proj, attention.v_proj),
            Projection.of(attention.o_proj),
            Projection.of(mlp.gate_proj, mlp.up_proj),
            Projection.of(mlp.down_proj),
        )
        for attention, mlp in ((layer.self_attn, layer.mlp) for layer in model.model.layers)
    ]
    made = MergedWeights(layers, Projection.of(model.lm_head))
    _copies[model] = version, made
    return made


def forget_merged(policy: Policy) -> None:
    """Free the merged weights."""
    _copies.pop(policy.base, None)
