"""A loaded model with its tokenizer."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from accelerate import Accelerator
from transformers import Cache, PreTrainedModel

from swarmnode.policy.text import PolicyText

if TYPE_CHECKING:
    from peft import PeftModel

    Model = PreTrainedModel | PeftModel


@runtime_checkable
class AdaptedModel(Protocol):
    """peft's wrapper around a model with an adapter. It is a protocol, because importing peft takes
    a second, and most policies have no adapter."""

    def get_base_model(self) -> torch.nn.Module: ...
    def disable_adapter(self) -> contextlib.AbstractContextManager[None]: ...


@dataclass(frozen=True)
class PolicyStatistics:
    parameters: int
    trainable_parameters: int
    device: str
    dtype: str
    device_memory_bytes: int | None
    """Peak allocation on a CUDA device; None elsewhere."""


@dataclass(frozen=True)
class Policy(PolicyText):
    """A loaded model with its tokenizer."""

    model: Model
    device: torch.device
    """Device of the input ids."""
    dtype: torch.dtype
    """Dtype of the computation. Trained weights are float32 (accelerate's mixed precision)."""
    accelerator: Accelerator
    """Its `prepare_optimizer`, `backward` and `clip_grad_norm_` scale the loss in float16."""
    adapter_off: bool = False
    """True to bypass the adapter."""
    obstacles: dict[str, str] = field(default_factory=dict, compare=False)
    """Reason why a method does not work with the model, by method; empty if it works. See
    `ways.py`. Copies of this policy share it."""
    measured: dict[str, float] = field(default_factory=dict, compare=False)
    """Measurements of trials, by name. Copies of this policy share it."""

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model, without peft's wrapper."""
        return base_model(self.model)

    @property
    def is_spread(self) -> bool:
        """True if the layers are on several devices."""
        return len(set(self.device_map.values())) > 1

    @property
    def device_map(self) -> dict[str, str | int | torch.device]:
        """Device of each module that accelerate has placed, by module name; empty if it placed
        none."""
        return getattr(self.base, "hf_device_map", None) or {}

    @property
    def lora_rank(self) -> int:
        """Rank of the adapter; 0 if all weights are trained."""
        adapters = getattr(self.model, "peft_config", {})
        return max((settings.r for settings in adapters.values()), default=0)

    def random_generator(self, seed: int) -> torch.Generator:
        """Return a generator on the policy's device."""
        return torch.Generator(
            self.device if self.device.type in ("cpu", "cuda") else "cpu"
        ).manual_seed(seed)

    def logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        keep: int = 0,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Return logits (N, keep, V) in mixed precision, masked by `known_logits`.

        Args:
            input_ids: (N, T).
            attention_mask: (N, T); None without padding.
            position_ids: (N, T).
            keep: Number of last positions with logits; 0 means all.
            cache: Keys and values, which are read and extended.
        """
        fewer = (
            {"logits_to_keep": keep}
            if keep and takes_logits_to_keep(self.base.__class__.forward)
            else {}
        )
        with self.accelerator.autocast(), self.bypassed():
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=cache is not None,
                **{cache_keyword(self.base.__class__.forward): cache},
                **fewer,
            )
        # A model on several devices returns them on the device of its head.
        return self.known_logits(output.logits[:, -keep:]).to(input_ids.device)

    def bypassed(self) -> contextlib.AbstractContextManager[None]:
        """Bypass the adapter inside the block, if `adapter_off` is set."""
        return (
            self.model.disable_adapter()
            if self.adapter_off and isinstance(self.model, AdaptedModel)
            else contextlib.nullcontext()
        )

    def clone(self) -> Policy:
        """Return an independent policy with equal weights."""
        return replace(self, model=copy.deepcopy(self.model))

    def statistics(self) -> PolicyStatistics:
        return PolicyStatistics(
            parameters=sum(p.numel() for p in self.model.parameters()),
            trainable_parameters=sum(p.numel() for p in self.trainable_parameters()),
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            device_memory_bytes=(
                torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
            ),
        )


def base_model(model: Model) -> PreTrainedModel:
    """Return the transformers model, without peft's wrapper."""
    if isinstance(model, PreTrainedModel):  # first, because a check of a protocol is slow
        return model
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    return base


@functools.cache
def takes_logits_to_keep(forward: Callable[..., object]) -> bool:
    return "logits_to_keep" in inspect.signature(forward).parameters


@functools.cache
def cache_keyword(forward: Callable[..., object]) -> str:
    """Return the name of the model's argument for keys and values. transformers 5.24 renamed it to
    `cache` and deprecates the former name."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
