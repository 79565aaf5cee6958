"""A policy to sample from whose matrices are int8, a scale for each row: a byte per weight, where a
trained policy takes four. Torch.

A matrix is multiplied as it is and its rows are scaled afterwards, so no more than one of them is
ever there in the dtype of the activations. What is not a matrix (norms, biases, adapters) is kept
as it is. A weight errs by at most 1/254 of the largest in its row.
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
"""Values at a time, each of which takes some 20 bytes meanwhile: an embedding of 7 B whole took 6
GB beside the stage."""
ROOM = 1.004
"""A row keeps its scale until its largest weight has grown by so much: half a unit of 127, which is
cut off."""


def quantise(
    weight: torch.Tensor, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) → int8 of the same shape and (rows,) float32 scales: weight ≈ scale · code,
    codes in −127 … 127.

    scales: those of an earlier state, which are kept for every row that they still fit, so that
    what has not moved has the same code.
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
    """(out, in) codes and (out,) scales."""

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
        """An embedding's rows are of it."""


class Int8Linear(Int8Matrix):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.linear(x, self.codes.to(x.dtype)) * self.scales.to(x.dtype)
        return out if self.bias is None else out + self.bias.to(x.dtype)


class Int8Embedding(Int8Matrix):
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
    """The model with weights `read(name)`, one tensor at a time. adapt: puts an untrained adapter
    on a model without weights.

    `read` may be asked for the names of transformers' model only; what `adapt` adds is zero.
    """
    with torch.device("meta"):
        model = adapt(AutoModelForCausalLM.from_config(config, dtype=dtype))
        base = base_model(model)
    # buffers that no file holds
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
