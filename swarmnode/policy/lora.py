"""peft's linear layer with an adapter, with the products of `linear.py`. Importing peft takes a
second, so this module is imported only for a model that has an adapter."""

from __future__ import annotations

import torch
from peft.tuners.lora import Linear

from swarmnode.policy.linear import AdaptedProduct, OneDnnLinear


class OneDnnLora(Linear):
    """A frozen linear layer with one adapter. peft's own forward pass writes three tensors of the
    size of the result, and as many in the backward pass."""

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            plain: torch.Tensor = super().forward(x, *args, **kwargs)
            return plain
        (name,) = self.active_adapters
        out: torch.Tensor = AdaptedProduct.apply(
            x,
            self.base_layer.weight,
            self.base_layer.bias,
            self.lora_A[name].weight,
            self.lora_B[name].weight,
            self.scaling[name],
        )
        return out


def is_plain(module: torch.nn.Module) -> bool:
    """Return True for a layer that `OneDnnLora` computes: an adapter without dropout or variant, on
    a frozen layer."""
    return (
        type(module) is Linear
        and type(module.base_layer) is OneDnnLinear
        and not module.base_layer.weight.requires_grad
        and not module.lora_variant
        and all(isinstance(each, torch.nn.Identity) for each in module.lora_dropout.values())
    )
