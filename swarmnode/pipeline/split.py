"""One stage as a transformers model of its own: the model's own class with a shorter configuration,
its missing ends replaced by nothing.

So a stage runs the very code that the whole model runs, masks, rotary positions, caches and LoRA
included, and there is no second implementation of any architecture to keep equal. A stage that
lacks the head has the identity in its place: what transformers calls `logits` is then the hidden
state that goes to the next stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from swarmnode.errors import Incompatible, Unavailable
from swarmnode.pipeline.spec import StageSpec
from swarmnode.policy.fingerprint import weight_files
from swarmnode.policy.load import rename_checkpointing_flag

if TYPE_CHECKING:
    from peft import PeftConfig


def stage_config(config: PretrainedConfig, spec: StageSpec) -> PretrainedConfig:
    """The whole model's config with this stage's layers only."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = spec.layers
    if getattr(config, "layer_types", None):  # which layers see a sliding window only
        own.layer_types = list(config.layer_types[spec.first : spec.last])
    own.tie_word_embeddings = spec.tied and spec.stages == 1
    return own


def build_stage(
    config: PretrainedConfig,
    spec: StageSpec,
    read: Callable[[str], torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The stage with weights `read(name in the whole model)`. Memory is taken for its own tensors
    only.

    Raises Incompatible when the weights do not have the shapes of `config`.
    """
    own = stage_config(config, spec)
    # shapes without memory: the ends that are cut off would be the largest tensors
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(own, dtype=dtype)
    cut_ends(model, spec)
    # buffers that no file holds
    model.model.rotary_emb = type(model.model.rotary_emb)(config=own).to(device)
    state = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and own.tie_word_embeddings:
            continue
        tensor = read(spec.whole(name))
        if tensor.shape != parameter.shape:
            raise Incompatible(
                f"{spec.whole(name)} is {tuple(tensor.shape)}, not {tuple(parameter.shape)}"
            )
        state[name] = tensor.to(device=device, dtype=dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model.requires_grad_(True).eval()  # no dropout, as in `policy.load`


def cut_ends(model: PreTrainedModel, spec: StageSpec) -> None:
    """Whatever of embedding, norm and head is not this stage's is replaced by nothing."""
    if not spec.has_embedding:
        model.model.embed_tokens = nn.Identity()
    if not spec.has_head:
        model.model.norm = nn.Identity()
        model.lm_head = nn.Identity()


def load_stage(
    directory: Path,
    spec: StageSpec,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The stage from a model's directory; only its own tensors are read.

    Raises Unavailable when a tensor is not there or a file is damaged.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return build_stage(config, spec, tensors_of(directory), dtype=dtype, device=device)


def tensors_of(directory: Path) -> Callable[[str], torch.Tensor]:
    """What reads one tensor of a model's directory, by its name. Raises Unavailable, then or now,
    where it is not there or damaged."""
    try:
        handles = [safe_open(file, framework="pt") for file in weight_files(directory)]
        where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118  (safe_open is no mapping)
    except SafetensorError as error:
        raise Unavailable(f"{directory} is damaged: {error}") from None

    def read(name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = where[name].get_tensor(name)
        except (SafetensorError, KeyError) as error:
            raise Unavailable(f"{directory}: no weights {name} ({error})") from None
        return tensor

    return read


def adapt(stage: PreTrainedModel, settings: PeftConfig) -> Any:  # noqa: ANN401
    """`stage` under a LoRA adapter of peft's `settings`: base frozen, adapter float32."""
    from peft import get_peft_model

    rename_checkpointing_flag(type(stage))
    return get_peft_model(stage, copy.deepcopy(settings)).eval()
