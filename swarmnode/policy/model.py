"""A loaded model with its tokenizer: what everything else computes with."""

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
class Adapted(Protocol):
    """peft's wrapper around a model with an adapter; peft itself takes a second to import, and most
    policies do without."""

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
    """A loaded model with its tokenizer, and everything about the pair that the trainer and peers
    ask for."""

    model: Model
    device: torch.device
    """Where input ids go."""
    dtype: torch.dtype
    """Dtype of the computation. Trained weights are float32 (accelerate's mixed precision)."""
    accelerator: Accelerator
    """With dtype float16 use its `prepare_optimizer`, `backward` and `clip_grad_norm_`: they scale
    the loss."""
    adapter_off: bool = False
    """True for the reference policy of a LoRA policy: same weights, adapter bypassed."""
    obstacles: dict[str, str] = field(default_factory=dict, compare=False)
    """Way of computing → why the model does not take it, empty if it does; see `ways.py`. Shared
    with the policies that are made of this one."""
    measured: dict[str, float] = field(default_factory=dict, compare=False)
    """What trials have measured, by name. Shared like `obstacles`."""

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def base(self) -> PreTrainedModel:
        """transformers' model, inside peft's wrapper where there is an adapter."""
        return base_model(self.model)

    @property
    def is_spread(self) -> bool:
        """Whether its layers lie on several devices."""
        return len(set(self.device_map.values())) > 1

    @property
    def device_map(self) -> dict[str, str | int | torch.device]:
        """Device of each module that accelerate has placed, by module name; empty if it placed
        none."""
        return getattr(self.base, "hf_device_map", None) or {}

    @property
    def lora_rank(self) -> int:
        """0 where all weights are trained."""
        adapters = getattr(self.model, "peft_config", {})
        return max((settings.r for settings in adapters.values()), default=0)

    def random_generator(self, seed: int) -> torch.Generator:
        """A generator on the policy's device."""
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
        """Return logits (N, keep, V) of the last `keep` positions, of all where 0, in mixed
        precision, of the tokens that the tokenizer has (`known_logits`).

        `cache` is read and extended. No mask: no padding."""
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
        # a model that is spread may give them on the card of its head
        return self.known_logits(output.logits[:, -keep:]).to(input_ids.device)

    def bypassed(self) -> contextlib.AbstractContextManager[None]:
        """Bypass the adapter inside, if this is the reference policy of a LoRA policy."""
        return (
            self.model.disable_adapter()
            if self.adapter_off and isinstance(self.model, Adapted)
            else contextlib.nullcontext()
        )

    def reference(self) -> Policy:
        """This policy as it is now, frozen, for a KL term: a copy, or with LoRA the base under the
        same weights."""
        if isinstance(self.model, Adapted):
            return replace(self, adapter_off=True)
        return replace(self, model=copy.deepcopy(self.model).requires_grad_(False))

    def clone(self) -> Policy:
        """An independent policy with equal weights, e.g. for many simulated nodes in one
        process."""
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
    """transformers' model, inside peft's wrapper where there is an adapter."""
    if isinstance(model, PreTrainedModel):  # first: it is fast, and a look at a protocol is not
        return model
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    return base


@functools.cache
def takes_logits_to_keep(forward: Callable[..., object]) -> bool:
    return "logits_to_keep" in inspect.signature(forward).parameters


@functools.cache
def cache_keyword(forward: Callable[..., object]) -> str:
    """Return the name under which a model takes its keys and values. transformers 5.24 calls it
    `cache`, and deprecates the earlier name."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
