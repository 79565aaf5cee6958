"""A policy for sampling with int8 matrices and one scale per row: one byte per weight instead of
the four of a trained policy.

A product uses the codes, and scales the result by row. Therefore at most one matrix exists in the
dtype of the activations at a time. Norms, biases and adapters are not quantised. The error of a
weight is at most 1/254 of the largest weight of its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from swarmnode.policy.model import base_model

if TYPE_CHECKING:
    from swarmnode.policy.model import Model

MOST = 127
BLOCK = 2**22
"""Number of weights that are quantised at a time, about 20 bytes each. The embedding of a model
with 7 billion parameters at once took 6 GB beside the stage."""
ROOM = 1.004
"""A row keeps its scale until its largest weight exceeds 127 units by this factor. Half a unit is
then clamped."""


def quantise(
    weight: torch.Tensor, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix by row: weight ≈ scale · code, with codes from −127 to 127.

    Args:
        weight: (rows, columns).
        scales: Scales (rows,) of an earlier state. A row keeps its scale while it fits, so that the
            codes of unchanged weights do not change.

    Returns:
        int8 codes (rows, columns) and float32 scales (rows,).
    """
    count = max(1, BLOCK // max(1, weight.shape[1]))
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    chosen = torch.empty(weight.shape[0], device=weight.device)
    for at in range(0, weight.shape[0], count):
        rows = weight.detach()[at : at + count].float()
        needed = rows.abs().amax(1) / MOST
        kept = None if scales is None else scales[at : at + count]
        scale = needed if kept is None else torch.where(needed <= ROOM * kept, kept, needed)
        chosen[at : at + count] = scale
        codes[at : at + count] = (
            torch.where(scale[:, None] > 0, rows / scale[:, None], 0.0).round().clamp(-MOST, MOST)
        )
    return codes, chosen


class Int8Matrix(nn.Module):
    """A quantised matrix: codes (out, in) and scales (out,)."""

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)
        self.dtype = dtype
        """Dtype of the rows of an embedding."""


class Int8Linear(Int8Matrix):
    """A linear layer with an int8 matrix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.linear(x, self.codes.to(x.dtype)) * self.scales.to(x.dtype)
        return out if self.bias is None else out + self.bias.to(x.dtype)


class Int8Embedding(Int8Matrix):
    """An embedding with an int8 matrix."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.codes[ids].to(self.dtype) * self.scales[ids].to(self.dtype)[..., None]


@torch.no_grad()
def build_quantised(
    config: PretrainedConfig,
    read: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
    adapt: Callable[[PreTrainedModel], Model] = lambda model: model,
) -> Model:
    """Build a quantised model, one tensor at a time.

    Args:
        read: Returns the weight with a name of the transformers model.
        dtype: Dtype of unquantised weights and of activations.
        adapt: Adds an adapter to a model without weights. The adapter's weights are 0.
    """
    with torch.device("meta"):
        model = adapt(AutoModelForCausalLM.from_config(config, dtype=dtype))
        base = base_model(model)
    # Its buffers are in no file.
    base.model.rotary_emb = type(base.model.rotary_emb)(config=config).to(device)
    tied: Int8Matrix | None = None
    for path, module in list(base.named_modules()):
        if ".lora_" in path or type(module) not in (nn.Linear, nn.Embedding):
            continue
        name = path.replace(".base_layer", "")
        new: Int8Matrix
        if (
            type(module) is nn.Linear
            and name == "lm_head"
            and config.tie_word_embeddings
            and tied is not None
        ):
            new = Int8Linear(tied.codes, tied.scales, dtype)
        else:
            codes, scales = quantise(read(f"{name}.weight").to(device))
            bias = getattr(module, "bias", None)
            offset = None if bias is None else read(f"{name}.bias").to(device, dtype)
            new = (Int8Linear if type(module) is nn.Linear else Int8Embedding)(
                codes, scales, dtype, offset
            )
        tied = new if name == "model.embed_tokens" else tied
        base.set_submodule(path, new)
    for path, parameter in list(base.named_parameters()):
        if parameter.is_meta:
            value = (
                torch.zeros(parameter.shape)
                if ".lora_" in path
                else read(path.replace(".base_layer", ""))
            )
            owner, _, last = path.rpartition(".")
            kept = torch.float32 if ".lora_" in path else dtype
            base.get_submodule(owner).register_parameter(
                last, nn.Parameter(value.to(device, kept), requires_grad=False)
            )
    return model.eval()
