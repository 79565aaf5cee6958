"""Cut a whole model into stages, and join their trained tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swarmnode.errors import Incompatible
from swarmnode.policy.model import base_model
from swarmnode.stages.specs import StageSpec, stage_specs
from swarmnode.stages.trainer.stage_model import add_adapter, build_stage
from swarmnode.weights.trainer.lora import A_MARK, freeze_a


def split_model(model: Any, layers: Sequence[int]) -> list[tuple[StageSpec, PreTrainedModel]]:
    """Return (spec, independent copy) of every stage of a model. The copies have the LoRA adapter
    of the model, if any.

    Raises:
        ConfigError: As `stage_specs`.
    """
    specs = stage_specs(model.config, layers)
    base = base_model(model)
    tensors = {
        name.replace(".base_layer.", "."): tensor for name, tensor in base.state_dict().items()
    }
    stages: list[PreTrainedModel] = []
    for spec in specs:
        stage = build_stage(
            base.config, spec, lambda name: tensors[name].detach().clone(), dtype=base.dtype
        )
        stages.append(
            add_adapter(stage, model.peft_config["default"])
            if hasattr(model, "peft_config")
            else stage
        )
    state = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not any(A_MARK in name for name in state):
        for spec, stage in zip(specs, stages, strict=True):
            freeze_a({spec.whole_name(name): p for name, p in stage.named_parameters()})
    for spec, stage in zip(specs, stages, strict=True):
        load_whole_state(spec, stage, state)
    return list(zip(specs, stages, strict=True))


def whole_state(spec: StageSpec, stage: nn.Module) -> dict[str, torch.Tensor]:
    """Return name in the whole model → trained tensor of this stage, not copied. The stages
    together have all tensors of the model."""
    return {
        spec.whole_name(name): p.detach() for name, p in stage.named_parameters() if p.requires_grad
    }


def load_whole_state(spec: StageSpec, stage: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Overwrite the trained tensors of this stage from those of the whole model. Raise Incompatible
    when a tensor is missing or has another shape."""
    with torch.no_grad():
        for name, tensor in whole_state(spec, stage).items():
            if name not in state or state[name].shape != tensor.shape:
                raise Incompatible(f"weights for a stage lack {name}")
            tensor.copy_(state[name])
