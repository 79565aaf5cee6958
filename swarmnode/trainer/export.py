"""`python -m swarmnode.trainer.export DIR [--merge]`, configuration on stdin: what `swarmnode
export` starts.

    base weights + trainer/state.safetensors ─▶ model ─▶ DIR.partial ─▶ DIR
    trainer/shadows/<crew>/stage-*.safetensors ─▶ a shard each ─▶ DIR.partial ─▶ DIR       where the
    policy is held in stages

On the CPU and in float32, whatever the trainer uses, so that nothing is lost and a running trainer
keeps its device. What was saved last counts, where a node has trained both ways.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from swarmnode.averaging.lora import A_SEED, freeze_a, shares_a
from swarmnode.config import Config, PolicyConfig
from swarmnode.errors import LocalError, StateError, Unavailable
from swarmnode.files import make_readable, sync_directory
from swarmnode.policy.device import Placement
from swarmnode.policy.fingerprint import fingerprint
from swarmnode.policy.load import (
    add_adapter,
    load_model,
    local_directory,
    lora_settings,
    overwrite,
    trainable,
)
from swarmnode.trainer import state
from swarmnode.trainer.export_crew import CrewCopies, adapter_of, find_copies, write_shards

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class Exported:
    """swarmnode.json in the directory."""

    kind: str
    """weights, or adapter."""
    step: int
    policy_version: int
    reward_held_out: float | None
    """None where this node has not measured it."""
    base: str = ""
    base_fingerprint: str = ""
    """Hex; what a manifest calls the model."""
    swarm: str = ""
    """Id, hex; empty for a crew's."""
    own_groups: int = 0
    """Groups that this node sampled and learnt from; 0 of a crew's, where they are not counted."""
    external_groups: int = 0
    """Groups of peers' that it learnt from."""
    stages: tuple[int, ...] = ()
    """Committed steps in the copy of each stage, where the policy was held in stages."""


def export(cfg: PolicyConfig, trainer: Path, shared_a: bool, target: Path, merge: bool) -> Exported:
    """See `swarmnode.swarm.export.export`. trainer: its directory; shared_a: see
    `averaging.lora.shares_a`."""
    disable_progress_bar()
    cfg = cfg.model_copy(update={"devices": "cpu", "dtype": "float32", "quantization": "none"})
    partial = target.with_name(f".{target.name}.partial")
    with local_directory(cfg, fits=False) as directory:
        base = Base(
            cfg, directory, shared_a, state.owner(fingerprint(directory), cfg.lora.r, shared_a)
        )
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
                target.rmdir()  # empty, or somebody else has just filled it
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
    """What was trained, and how."""

    cfg: PolicyConfig
    directory: Path
    """Where the base model is."""
    shared_a: bool
    """The adapter's A is that which all nodes have."""
    owner: str
    """See `state.owner`."""

    def trained(self, weights: dict[str, torch.Tensor]) -> PreTrainedModel | PeftModel:
        """The base with the trained tensors in it. Raises StateError when they are not this
        model's."""
        base = load_model(
            self.cfg, self.directory, Placement(torch.device("cpu"), torch.float32, "")
        )
        model = add_adapter(self.cfg, base) if self.cfg.lora.r else base
        if self.shared_a:
            freeze_a(dict(model.named_parameters()), A_SEED)
        overwrite(trainable(model), weights)
        return model


def _written(trainer: Path) -> float:
    """Unix seconds of the last save; 0 without one."""
    files = [trainer / name for name in (state.FILE, state.WEIGHTS_FILE)]
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)


def _write_whole(base: Base, trainer: Path, partial: Path, merge: bool) -> Exported:
    found = state.read(trainer, base.owner)
    if found is None:
        raise Unavailable(
            f"nothing to export: {trainer.parent} has no trained state yet; run the node first"
        )
    counters, tensors = found
    kind = _save(base, state.weights(tensors), partial, merge)
    return Exported(
        kind,
        counters.step,
        counters.policy_version,
        counters.reward_held_out,
        swarm=counters.swarm,
        own_groups=counters.own_groups_total,
        external_groups=counters.external_groups_total,
    )


def _write_crew(base: Base, crew: CrewCopies, partial: Path, merge: bool) -> Exported:
    if crew.about.owner != base.owner:
        raise StateError(
            "the copies of the crew's stages are of another model; set policy.model and policy.lora"
            " as they were"
        )
    adapter = lora_settings(base.cfg) if base.cfg.lora.r else None
    if adapter is not None:
        weights, steps = adapter_of(crew, adapter, base.shared_a, base.directory)
        kind = _save(base, weights, partial, merge)
    else:
        kind, steps = "weights", write_shards(crew, base.directory, partial)
    return Exported(kind, min(steps), min(steps), None, stages=tuple(steps))


def _save(base: Base, weights: dict[str, torch.Tensor], partial: Path, merge: bool) -> str:
    """Write the base with `weights` into `partial`; returns which kind of export it is."""
    model = base.trained(weights)
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(partial)
    elif merge:
        merged = model.merge_and_unload()
        merged.save_pretrained(partial)
    else:
        model.peft_config["default"].base_model_name_or_path = (
            str(base.directory) if base.cfg.model == "embedded" else base.cfg.model
        )
        model.save_pretrained(str(partial))
        return "adapter"
    return "weights"


def main() -> int:
    config = Config.model_validate_json(sys.stdin.buffer.read())
    try:
        shared_a = shares_a(config.policy.lora, config.weights)
        exported = export(
            config.policy,
            config.node.data_dir / "trainer",
            shared_a,
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
