"""Reads the policy of a crew from the checkpoints of its stages on this node's disk, for
`trainer.export`.

Whole weights are written one stage after the other, each as a file of the export, so that only one
stage is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig

from swarmnode.errors import BadMessage, StateError, Unavailable
from swarmnode.stages.recovery import (
    CHECKPOINTS,
    CheckpointIdentity,
    decode_state,
    find_checkpoints,
    read_checkpoint,
    stage_layouts,
)
from swarmnode.stages.wire import stage_specs

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True)
class CrewCopies:
    """The checkpoints of one crew on this node's disk."""

    directory: Path
    about: CheckpointIdentity
    steps: dict[int, int]
    """Stage → committed steps in its checkpoint."""
    written: float
    """Modification time of the newest checkpoint."""

    @property
    def missing(self) -> list[int]:
        """Stages without a checkpoint here."""
        return [stage for stage in range(len(self.about.layers)) if stage not in self.steps]


def find_copies(trainer: Path) -> CrewCopies | None:
    """Return the checkpoints of the crew that wrote last on this disk; None if there are none.

    Args:
        trainer: The trainer's directory.
    """
    directory = trainer / CHECKPOINTS
    crews: dict[CheckpointIdentity, dict[int, int]] = {}
    for about in find_checkpoints(directory):
        crews.setdefault(about.identity, {})[about.stage] = about.step
    written = lambda crew: max((directory / crew.path(i)).stat().st_mtime for i in crews[crew])
    found = [CrewCopies(directory, crew, steps, written(crew)) for crew, steps in crews.items()]
    return max(found, key=lambda crew: crew.written, default=None)


def read_stages(
    crew: CrewCopies, base: Path, adapter: LoraConfig | None = None, shared_a: bool = False
) -> Iterator[tuple[int, dict[str, torch.Tensor], int]]:
    """Yield (stage, tensors by their names in the whole model, committed steps), one stage after
    the other. Tensors of a bfloat16 checkpoint stay in bfloat16.

    Args:
        adapter: Settings of the adapter, if one was trained.
        shared_a: True if all nodes derive the adapter's A, so that the checkpoints omit it.

    Raises:
        Unavailable: A stage is missing.
        StateError: A checkpoint is damaged.
    """
    if crew.missing:
        raise Unavailable(
            f"of {len(crew.about.layers)} stages this node has no copy of"
            f" {', '.join(map(str, crew.missing))}: it stores its own and its neighbours'. Run it"
            " with stages.policy_copy = disk until the crew has copied its stages, then export"
            " again"
        )
    hf = AutoConfig.from_pretrained(base, trust_remote_code=False)
    specs = stage_specs(hf, crew.about.layers)
    layouts = stage_layouts(hf, specs, adapter, shared_a)
    for spec, layout in zip(specs, layouts, strict=True):
        path = crew.about.path(spec.index)
        found = read_checkpoint(crew.directory, path)
        try:
            state = decode_state(found.body, layout, found.metadata.form, found.metadata.step, 0.0)
        except BadMessage as error:
            raise StateError(f"{path}: {error}") from None
        dtype = torch.float32 if found.metadata.form == "exact" else torch.bfloat16
        tensors = {
            spec.whole_name(name): tensor.to(dtype) for name, tensor in state.weights.items()
        }
        yield spec.index, tensors, found.metadata.step


def write_shards(crew: CrewCopies, base: Path, target: Path) -> list[int]:
    """Write the weights and their configuration into `target`; return each stage's committed steps.

    Raises:
        OSError: A file cannot be written.
        Unavailable, StateError: As `read_stages` does.
    """
    where: dict[str, str] = {}
    steps, size, dtypes = [], 0, set()
    count = len(crew.about.layers)
    for stage, tensors, step in read_stages(crew, base):
        # The first and the last stage both hold a tied embedding.
        new = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in where}
        file = f"model-{stage + 1:05d}-of-{count:05d}.safetensors"
        save_file(new, target / file, metadata={"format": "pt"})
        where |= dict.fromkeys(new, file)
        size += sum(tensor.nbytes for tensor in new.values())
        dtypes |= {tensor.dtype for tensor in new.values()}
        steps.append(step)
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    hf = AutoConfig.from_pretrained(base, trust_remote_code=False)
    hf.dtype = torch.float32 if torch.float32 in dtypes else torch.bfloat16
    hf.save_pretrained(target)
    if (base / "generation_config.json").exists():
        GenerationConfig.from_pretrained(base).save_pretrained(target)
    return steps


def read_adapter(
    crew: CrewCopies, adapter: LoraConfig, shared_a: bool, base: Path
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return (the adapter, each stage's committed steps).

    Raises:
        Unavailable, StateError: As `read_stages` does.
    """
    weights: dict[str, torch.Tensor] = {}
    steps = []
    for _, tensors, step in read_stages(crew, base, adapter, shared_a):
        weights |= tensors
        steps.append(step)
    return weights, steps
