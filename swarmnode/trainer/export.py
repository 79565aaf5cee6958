"""`python -m swarmnode.trainer.export DIR [--merge]`, with the configuration on stdin: exports the
policy for `swarmnode export`.

    whole policy   base weights + trainer/state.safetensors ─▶ model ─▶ DIR.partial ─▶ DIR
    in stages      trainer/shadows/<crew>/stage-*.safetensors ─▶ a shard per stage ─▶ DIR.partial ─▶
                   DIR

The export runs on the CPU in float32, so that no precision is lost and a running trainer keeps its
device. If a node has trained both ways, the newer state is exported. The stages of a crew are
written one after the other, so that only one stage is in memory.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from swarmnode.config import Config, PolicyConfig
from swarmnode.errors import BadMessage, LocalError, StateError, Unavailable
from swarmnode.files import make_readable, sync_directory
from swarmnode.policy.device import Placement
from swarmnode.policy.fingerprint import fingerprint
from swarmnode.policy.load import (
    add_adapter,
    is_on_hub,
    load_model,
    local_directory,
    lora_settings,
    overwrite,
    trainable,
)
from swarmnode.stages.specs import stage_specs
from swarmnode.stages.trainer.stage_checkpoints import (
    CHECKPOINTS,
    CheckpointIdentity,
    decode_state,
    find_checkpoints,
    read_checkpoint,
    stage_layouts,
)
from swarmnode.trainer import state
from swarmnode.weights.trainer.lora import freeze_a

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


@dataclass(frozen=True)
class ExportRecord:
    """Content of swarmnode.json in the directory."""

    kind: str
    """`weights` or `adapter`."""
    step: int
    policy_version: int
    reward_held_out: float | None
    """None if this node has not measured it."""
    reward_held_out_step: int | None = None
    """Step after which it was measured."""
    base: str = ""
    """policy.model."""
    base_fingerprint: str = ""
    """Fingerprint of the base model in the manifest, hex."""
    swarm: str = ""
    """Swarm id, hex; empty for a policy in stages."""
    own_groups: int = 0
    """Own groups that were trained on; 0 for a policy in stages, which does not count them."""
    external_groups: int = 0
    """Peers' groups that were trained on."""
    stages: tuple[int, ...] = ()
    """Committed steps of each stage, for a policy in stages."""


def export(cfg: PolicyConfig, trainer: Path, target: Path, merge: bool) -> ExportRecord:
    """Export the policy, see `swarmnode.swarm.export.export`.

    Args:
        trainer: The trainer's directory.
        target: Directory of the export; it must be empty or absent.
        merge: True to write an adapter's weights merged into the base.

    Raises:
        LocalError: There is no state, it cannot be used, or the target cannot be written.
    """
    disable_progress_bar()
    cfg = cfg.model_copy(update={"devices": "cpu", "dtype": "float32", "quantization": "none"})
    partial = target.with_name(f".{target.name}.partial")
    with local_directory(cfg, fits=False) as directory:
        owner = state.owner(fingerprint(directory), state.adapter_shape(cfg.lora))
        base = Base(cfg, directory, owner)
        crew = find_copies(trainer)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            if crew is not None and crew.written > _written(trainer):
                exported = _write_crew(base, crew, partial, merge)
            else:
                exported = _write_whole(base, trainer, partial, merge)
            exported = replace(exported, base=cfg.model, base_fingerprint=base.owner.split("/")[0])
            AutoTokenizer.from_pretrained(directory, trust_remote_code=False).save_pretrained(
                partial
            )
            (partial / "swarmnode.json").write_text(json.dumps(asdict(exported), indent=1) + "\n")
            make_readable(partial)
            if target.exists():
                target.rmdir()  # fails if another process has just written into it
            os.replace(partial, target)
            sync_directory(target.parent)
        except (OSError, SafetensorError) as error:
            raise Unavailable(
                f"cannot write {target}: {getattr(error, 'strerror', None) or error}"
            ) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return exported


@dataclass(frozen=True)
class Base:
    """The base model and the kind of training."""

    cfg: PolicyConfig
    directory: Path
    """Directory of the base model."""
    owner: str
    """See `state.owner`."""

    def trained(self, weights: dict[str, torch.Tensor]) -> PreTrainedModel | PeftModel:
        """Return the base with the trained tensors.

        Raises:
            StateError: The tensors belong to another model.
        """
        base = load_model(
            self.cfg, self.directory, Placement(torch.device("cpu"), torch.float32, "")
        )
        model = add_adapter(self.cfg, base) if self.cfg.lora.r else base
        freeze_a(dict(model.named_parameters()))
        overwrite(trainable(model), weights)
        return model


def _written(trainer: Path) -> float:
    """Return the time of the last save in Unix seconds; 0 without one."""
    path = trainer / state.FILE
    return path.stat().st_mtime if path.exists() else 0.0


def _write_whole(base: Base, trainer: Path, partial: Path, merge: bool) -> ExportRecord:
    found = state.read_file(trainer / state.FILE, base.owner)
    if found is None:
        raise Unavailable(
            f"nothing to export: {trainer.parent} has no trained state yet; run the node first"
        )
    counters, tensors = found
    kind = _save(base, state.weights(tensors), partial, merge)
    return ExportRecord(
        kind,
        counters.step,
        counters.policy_version,
        counters.reward_held_out,
        counters.reward_held_out_step,
        swarm=counters.swarm,
        own_groups=counters.own_groups_total,
        external_groups=counters.external_groups_total,
    )


def _write_crew(base: Base, crew: CrewCopies, partial: Path, merge: bool) -> ExportRecord:
    if crew.about.owner != base.owner:
        raise StateError(
            "the checkpoints of the crew's stages belong to another model; set policy.model and"
            " policy.lora to their former values"
        )
    adapter = lora_settings(base.cfg) if base.cfg.lora.r else None
    if adapter is not None:
        weights, steps = read_adapter(crew, adapter, base.directory)
        kind = _save(base, weights, partial, merge)
    else:
        kind, steps = "weights", write_shards(crew, base.directory, partial)
    return ExportRecord(kind, min(steps), min(steps), None, stages=tuple(steps))


def _save(base: Base, weights: dict[str, torch.Tensor], partial: Path, merge: bool) -> str:
    """Write the base with `weights` into `partial`; return the kind of the export."""
    model = base.trained(weights)
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(partial)
    elif merge:
        merged = model.merge_and_unload()
        merged.save_pretrained(partial)
    else:
        model.peft_config["default"].base_model_name_or_path = (
            base.cfg.model if is_on_hub(base.cfg.model) else str(base.directory.absolute())
        )
        model.save_pretrained(str(partial))
        return "adapter"
    return "weights"


# ---- a policy in stages --------------------------------------------------------------------------


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
    crew: CrewCopies, base: Path, adapter: LoraConfig | None = None
) -> Iterator[tuple[int, dict[str, torch.Tensor], int]]:
    """Yield (stage, tensors by their names in the whole model, committed steps), one stage after
    the other. Tensors of a bfloat16 checkpoint stay in bfloat16.

    Args:
        adapter: Settings of the adapter, if one was trained.

    Raises:
        Unavailable: A stage is missing.
        StateError: A checkpoint is damaged.
    """
    if crew.missing:
        raise Unavailable(
            f"this node has no checkpoint of {len(crew.missing)} of {len(crew.about.layers)} stages"
            f" ({', '.join(map(str, crew.missing))}), since it stores its own and its neighbours'."
            " Run it with stages.policy_copy = disk until the crew has copied its stages, then"
            " export again"
        )
    hf = AutoConfig.from_pretrained(base, trust_remote_code=False)
    specs = stage_specs(hf, crew.about.layers)
    layouts = stage_layouts(hf, specs, adapter)
    for spec, layout in zip(specs, layouts, strict=True):
        path = crew.about.path(spec.index)
        found = read_checkpoint(crew.directory, path)
        try:
            decoded = decode_state(
                found.body, layout, found.metadata.form, found.metadata.step, 0.0
            )
        except BadMessage as error:
            raise StateError(f"{path}: {error}") from None
        dtype = torch.float32 if found.metadata.form == "full" else torch.bfloat16
        tensors = {
            spec.whole_name(name): tensor.to(dtype) for name, tensor in decoded.weights.items()
        }
        yield spec.index, tensors, found.metadata.step


def write_shards(crew: CrewCopies, base: Path, target: Path) -> list[int]:
    """Write the weights and their configuration into `target`; return each stage's committed steps.

    Raises:
        OSError: A file cannot be written.
        Unavailable, StateError: See `read_stages`.
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
    crew: CrewCopies, adapter: LoraConfig, base: Path
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return (the adapter, each stage's committed steps).

    Raises:
        Unavailable, StateError: See `read_stages`.
    """
    weights: dict[str, torch.Tensor] = {}
    steps = []
    for _, tensors, step in read_stages(crew, base, adapter):
        weights |= tensors
        steps.append(step)
    return weights, steps


def main() -> int:
    config = Config.model_validate_json(sys.stdin.buffer.read())
    try:
        exported = export(
            config.policy,
            config.node.data_dir / "trainer",
            Path(sys.argv[1]),
            "--merge" in sys.argv[2:],
        )
        print(json.dumps(asdict(exported)))
        return 0
    except LocalError as error:
        print(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
