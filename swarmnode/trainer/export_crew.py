"""The policy of a crew, from the copies of its stages on this node's disk
(`stages.recovery.snapshots`): what `trainer.export` reads where the policy is held in stages.

    trainer/shadows/<crew>/ran                      which layers each stage has, of what
    trainer/shadows/<crew>/stage-<i>.safetensors    stage i after some step

Whole weights are written a stage after the other, each a file of the export, so that no more than
one is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig

from swarmnode.averaging.lora import A_MARK
from swarmnode.errors import BadMessage, StateError, Unavailable
from swarmnode.stages.transfer import (
    RAN,
    SNAPSHOTS,
    copy_file,
    decode_state,
    read_copy,
    stage_layouts,
)
from swarmnode.stages.wire import stage_specs

if TYPE_CHECKING:
    from peft import LoraConfig


class About(msgspec.Struct, frozen=True):
    """What a crew trains: the content of `ran`."""

    layers: tuple[int, ...]
    """Number of layers of each stage."""
    owner: str
    """`trainer.state.owner`."""


@dataclass(frozen=True)
class CrewCopies:
    directory: Path
    about: About
    written: float
    """Modification time of the newest copy."""

    @property
    def missing(self) -> list[int]:
        """Stages of which there is no copy here."""
        return [
            stage
            for stage in range(len(self.about.layers))
            if not copy_file(self.directory, stage).exists()
        ]


def find_copies(trainer: Path) -> CrewCopies | None:
    """The copies of the last crew that took a step with this node, in its trainer's directory; None
    where there was none."""
    found = []
    for ran in (trainer / SNAPSHOTS).glob(f"*/{RAN}"):
        try:
            about = msgspec.json.decode(ran.read_bytes(), type=About)
        except (OSError, msgspec.MsgspecError):
            continue  # Damaged, or written by another version.
        copies = [
            path.stat().st_mtime
            for stage in range(len(about.layers))
            if (path := copy_file(ran.parent, stage)).exists()
        ]
        found.append(CrewCopies(ran.parent, about, max(copies, default=0.0)))
    return max(found, key=lambda crew: crew.written, default=None)


def read_stages(
    crew: CrewCopies, base: Path, adapter: LoraConfig | None = None, shared_a: bool = False
) -> Iterator[tuple[int, dict[str, torch.Tensor], int]]:
    """(stage, tensors by their names in the whole model, committed steps) of one stage after the
    other; a snapshot in bfloat16 as such.

    adapter: if one was trained; shared_a: its A is that which all nodes have, and not in the
    copies. Raises Unavailable where a stage is missing, StateError where a copy is damaged.
    """
    if crew.missing:
        raise Unavailable(
            f"of {len(crew.about.layers)} stages this node has no copy of"
            f" {', '.join(map(str, crew.missing))}: it keeps its own and its neighbours'. Run it"
            " with stages.policy_copy = disk until the crew has copied its stages, then export"
            " again"
        )
    hf = AutoConfig.from_pretrained(base, trust_remote_code=False)
    specs = stage_specs(hf, crew.about.layers)
    layouts = stage_layouts(hf, specs, adapter)
    if shared_a:
        layouts = tuple(
            tuple(tensor for tensor in layout if A_MARK not in tensor.name) for layout in layouts
        )
    for spec, layout in zip(specs, layouts, strict=True):
        snapshot, body = read_copy(crew.directory, spec.index)
        try:
            state = decode_state(
                body, layout, snapshot.form, snapshot.step, snapshot.squared_norm, snapshot.factor
            )
        except BadMessage as error:
            raise StateError(f"{copy_file(crew.directory, spec.index)}: {error}") from None
        dtype = torch.float32 if snapshot.form == "exact" else torch.bfloat16
        yield (
            spec.index,
            {spec.whole(name): tensor.to(dtype) for name, tensor in state.weights.items()},
            snapshot.step,
        )


def write_shards(crew: CrewCopies, base: Path, target: Path) -> list[int]:
    """The weights and their configuration into `target`; each stage's committed steps. Raises as
    `read_stages` does, and OSError."""
    where: dict[str, str] = {}
    steps, size, dtypes = [], 0, set()
    count = len(crew.about.layers)
    for stage, tensors, step in read_stages(crew, base):
        # a tied embedding is at both ends
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


def adapter_of(
    crew: CrewCopies, adapter: LoraConfig, shared_a: bool, base: Path
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """(what is trained under LoRA, each stage's committed steps). Raises as `read_stages` does."""
    weights: dict[str, torch.Tensor] = {}
    steps = []
    for _, tensors, step in read_stages(crew, base, adapter, shared_a):
        weights |= tensors
        steps.append(step)
    return weights, steps
