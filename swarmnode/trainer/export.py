"""`python -m swarmnode.trainer.export DIR [--merge]`, configuration on stdin: what `swarmnode export` starts.

    base weights + trainer/state.safetensors ─▶ model ─▶ DIR.partial ─▶ DIR
    trainer/shadows/<crew>/stage-*.safetensors ─▶ a shard each ─▶ DIR.partial ─▶ DIR       where the policy is held in stages

On the CPU and in float32, whatever the trainer uses, so that nothing is lost and a running trainer keeps its device. What was saved last
counts, where a node has trained both ways.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from swarmnode.averaging.lora import A_SEED, freeze_a, shares_a
from swarmnode.config import Config, PolicyConfig
from swarmnode.errors import LocalError, StateError, Unavailable
from swarmnode.files import sync_directory
from swarmnode.policy.device import Placement
from swarmnode.policy.fingerprint import fingerprint
from swarmnode.policy.load import add_adapter, load_model, local_directory
from swarmnode.trainer import state
from swarmnode.trainer.export_crew import CrewCopies, adapter_of, find_copies, write_shards


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
    stages: tuple[int, ...] = ()
    """Committed steps in the copy of each stage, where the policy was held in stages."""


def export(config: Config, target: Path, merge: bool) -> Exported:
    """See `swarmnode.swarm.export.export`."""
    disable_progress_bar()
    trainer = config.node.data_dir / "trainer"
    cfg = config.policy.model_copy(update={"device": "cpu", "dtype": "float32", "quantization": "none"})
    partial = target.with_name(f".{target.name}.partial")
    with local_directory(cfg, fits=False) as directory:
        base = fingerprint(directory)
        whose = state.owner(base, cfg.lora.r, shares_a(config))
        crew = find_copies(trainer)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            if crew is not None and crew.written > _written(trainer / state.FILE):
                told = _write_crew(config, cfg, directory, whose, crew, partial, merge)
            else:
                told = _write_whole(config, cfg, directory, whose, partial, merge)
            told = replace(told, base=cfg.model, base_fingerprint=base.hex())
            AutoTokenizer.from_pretrained(directory, trust_remote_code=False).save_pretrained(partial)
            (partial / "swarmnode.json").write_text(json.dumps(asdict(told), indent=1) + "\n")
            if target.exists():
                target.rmdir()  # empty, or somebody else has just filled it
            os.replace(partial, target)
            sync_directory(target.parent)
        except (OSError, SafetensorError) as error:
            raise Unavailable(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return told


def _written(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _write_whole(config: Config, cfg: PolicyConfig, directory: Path, whose: str, partial: Path, merge: bool) -> Exported:
    found = state.read(config.node.data_dir / "trainer", whose)
    if found is None:
        raise Unavailable(f"nothing to export: {config.node.data_dir} has no trained state yet; run the node first")
    counters, tensors = found
    weights = {n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")}
    kind = _save(cfg, directory, trained(cfg, directory, weights, shares_a(config)), partial, merge)
    return Exported(kind, counters.step, counters.policy_version, counters.reward_held_out, swarm=counters.swarm)


def _write_crew(
    config: Config, cfg: PolicyConfig, directory: Path, whose: str, crew: CrewCopies, partial: Path, merge: bool
) -> Exported:  # fmt: skip
    if crew.about.owner != whose:
        raise StateError("the copies of the crew's stages are of another model; set policy.model and policy.lora as they were")
    if cfg.lora.r:
        weights, steps = adapter_of(crew, config, directory)
        kind = _save(cfg, directory, trained(cfg, directory, weights, shares_a(config)), partial, merge)
    else:
        kind, steps = "weights", write_shards(crew, config, directory, partial)
    return Exported(kind, min(steps), min(steps), None, stages=tuple(steps))


def _save(cfg: PolicyConfig, directory: Path, model: Any, partial: Path, merge: bool) -> str:
    """Into `partial`; what it was."""
    if cfg.lora.r and not merge:
        model.peft_config["default"].base_model_name_or_path = str(directory) if cfg.model == "embedded" else cfg.model
    else:
        model = model.merge_and_unload() if cfg.lora.r else model
    model.save_pretrained(partial)
    return "adapter" if cfg.lora.r and not merge else "weights"


def trained(cfg: PolicyConfig, directory: Path, weights: dict[str, torch.Tensor], shared_a: bool = False) -> PreTrainedModel:
    """The base in `directory` with the trained tensors in it; shared_a: with the A that all nodes have.

    Raises StateError when they are not this model's.
    """
    model = load_model(cfg, directory, Placement(torch.device("cpu"), torch.float32, ""))
    if cfg.lora.r:
        model = add_adapter(cfg, model)
    if shared_a:
        freeze_a(dict(model.named_parameters()), A_SEED)
    mine = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if {name: p.shape for name, p in mine.items()} != {name: t.shape for name, t in weights.items()}:
        raise StateError("the saved state has other tensors than the model; set policy.lora as it was")
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(weights[name])
    return model


def main() -> int:
    config = Config.model_validate_json(sys.stdin.buffer.read())
    try:
        print(json.dumps(asdict(export(config, Path(sys.argv[1]), "--merge" in sys.argv[2:]))))
        return 0
    except LocalError as error:
        print(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
