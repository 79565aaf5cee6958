"""Matrix products of a policy on a CPU, by oneDNN instead of MKL.

torch multiplies float32 matrices with MKL, which uses AVX-512 on Intel's CPUs only. oneDNN uses it
on every CPU that has it. One core of an AMD EPYC (Zen 5) computed 220 instead of 105 GFLOP/s at 256
rows, and at 16 rows 130 instead of 57 with packed weights. Both compute in full float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear

SMALLEST = 2**16
"""Least number of weights of a layer that uses oneDNN. A call takes 10 µs, one of MKL 3 µs."""
_product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def use_onednn(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Let the linear layers of `model` multiply with oneDNN where that is faster."""
    if (
        device.type != "cpu"
        or dtype != torch.float32
        or _product is None
        or not torch.backends.mkldnn.is_available()
        or torch.backends.cpu.get_cpu_capability() != "AVX512"
    ):
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight.numel() >= SMALLEST:
            module.__class__ = OneDnnLinear
    if hasattr(model, "peft_config"):
        from swarmnode.policy.lora import OneDnnLora, is_plain

        for module in model.modules():
            if is_plain(module):
                module.__class__ = OneDnnLora


def multiply(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return states (…, I) · weight (O, I)ᵀ + bias (O,), without gradient. `weight` may be the
    result of `pack`."""
    assert _product is not None
    out: torch.Tensor = _product(states, weight, bias, "none", [], "")
    return out


def pack(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a copy of weight (O, I) in the layout that oneDNN prefers for about `rows` rows."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


class OneDnnLinear(torch.nn.Linear):
    """A linear layer that multiplies with oneDNN."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Product.apply(input, self.weight, self.bias)
        return out


class _Product(torch.autograd.Function):
    """`multiply` with gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(states if ctx.needs_input_grad[1] else None, weight)
        return multiply(states, weight, bias)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        (states, weight), gradient = ctx.saved_tensors, gradients[0].flatten(0, -2)
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad
        of_weight = None
        if wants_weight:
            columns = states.flatten(0, -2).t()
            # oneDNN refuses a product over no rows.
            empty = not len(gradient)
            of_weight = torch.zeros_like(weight) if empty else multiply(gradient.t(), columns)
        return (
            multiply(gradients[0], weight.t()) if wants_states else None,
            of_weight,
            gradient.sum(0) if wants_bias else None,
        )


class AdaptedProduct(torch.autograd.Function):
    """x Wᵀ + b + s (x Aᵀ) Bᵀ, with gradients of x, A and B, for frozen W and b.

    The adapter's part is added in place, so that no other tensor of the size of the result is
    written. x is stored only if A is trained.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        flat = states.flatten(0, -2)  # (N, I)
        inner = multiply(flat, a)  # (N, r)
        out = multiply(flat, weight, bias).addmm_(inner, b.t(), alpha=scale)  # (N, O)
        ctx.save_for_backward(weight, a, b, inner, flat if ctx.needs_input_grad[3] else None)
        ctx.scale = scale
        return out.view(*states.shape[:-1], len(b))

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        weight, a, b, inner, states = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)  # (N, O)
        of_inner = (gradient @ b).mul_(ctx.scale)  # (N, r)
        of_states = None
        if ctx.needs_input_grad[0]:
            of_states = multiply(gradient, weight.t()).addmm_(of_inner, a)
            of_states = of_states.view(*gradients[0].shape[:-1], a.shape[1])
        of_a = of_inner.t() @ states if states is not None else None
        of_b = (gradient.t() @ inner).mul_(ctx.scale)
        return of_states, None, None, of_a, of_b, None


def merged_weight(module: torch.nn.Linear | LoraLinear) -> torch.Tensor:
    """Return the weight (O, I) of a linear layer, with its adapter merged if it has one."""
    if isinstance(module, torch.nn.Linear):
        return module.weight
    (name,) = module.active_adapters
    weight, a, b = (
        each.get_parameter("weight")
        for each in (module.base_layer, module.lora_A[name], module.lora_B[name])
    )
    return torch.addmm(weight, b, a, alpha=module.scaling[name])
