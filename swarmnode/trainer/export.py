"""`python -m swarmnode.trainer.export DIR [--merge]`, with the configuration on stdin: exports the
policy for `swarmnode export`.

    whole policy   base weights + trainer/state.safetensors ─▶ model ─▶ DIR.partial ─▶ DIR
    in stages      trainer/shadows/<crew>/stage-*.safetensors ─▶ a shard per stage ─▶ DIR.partial ─▶
                   DIR

The export runs on the CPU in float32, so that no precision is lost and a running trainer keeps its
device. If a node has trained both ways, the newer state is exported.
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
from swarmnode.trainer.export_crew import CrewCopies, find_copies, read_adapter, write_shards

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class ExportRecord:
    """Content of swarmnode.json in the directory."""

    kind: str
    """`weights` or `adapter`."""
    step: int
    policy_version: int
    reward_held_out: float | None
    """None if this node has not measured it."""
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


def export(
    cfg: PolicyConfig, trainer: Path, shared_a: bool, target: Path, merge: bool
) -> ExportRecord:
    """Export the policy, see `swarmnode.swarm.export.export`.

    Args:
        trainer: The trainer's directory.
        shared_a: See `averaging.lora.shares_a`.
        target: Directory of the export; it must be empty or absent.
        merge: True to write an adapter's weights merged into the base.

    Raises:
        LocalError: There is no state, it cannot be used, or the target cannot be written.
    """
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
    shared_a: bool
    """True if the adapter's A matrices are the same on all nodes."""
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
        if self.shared_a:
            freeze_a(dict(model.named_parameters()), A_SEED)
        overwrite(trainable(model), weights)
        return model


def _written(trainer: Path) -> float:
    """Return the time of the last save in Unix seconds; 0 without one."""
    files = [trainer / name for name in (state.FILE, state.WEIGHTS_FILE)]
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)


def _write_whole(base: Base, trainer: Path, partial: Path, merge: bool) -> ExportRecord:
    found = state.read(trainer, base.owner)
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
        weights, steps = read_adapter(crew, adapter, base.shared_a, base.directory)
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
