"""`python -m swarmnode.policy.examine`, a Request as JSON on stdin: device, torch and memory fit as
JSON on stdout. Reads weights only with `--trial`, and then tries the policy (`trial.py`).

Of a model on the Hub only config.json is fetched. A process of its own, since torch takes seconds
to load and may fail in C.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from pydantic import BaseModel
from transformers import AutoConfig, PretrainedConfig

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.errors import LocalError, Unavailable
from swarmnode.policy.device import (
    Placement,
    cards,
    count_parameters,
    devices,
    fit,
    free_bytes,
    probe,
    training_devices,
    update_bytes,
)
from swarmnode.policy.fingerprint import weight_files
from swarmnode.policy.load import check_optim, local_directory, offline
from swarmnode.policy.trial import is_here, try_policy
from swarmnode.policy.ways import reason


class Request(BaseModel):
    """The settings that are examined."""

    policy: PolicyConfig
    training: TrainingConfig = TrainingConfig()


def examine(
    cfg: PolicyConfig, trial: bool = False, training: TrainingConfig | None = None
) -> dict[str, object]:
    """Fields of `doctor.checks.DeviceFacts`; an error of ours ends up in `error` and `error_code`
    beside what was found before it.

    trial: also load the model, if it is here, and try to train it as `training` says.
    """
    built = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else ""
    )
    found: dict[str, object] = {"torch": torch.__version__, "built_for": built}
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        if built and not torch.cuda.is_available() and complaints:
            found["gpu_error"] = str(complaints[0].message).split("\n")[0]
    try:
        placement = probe(cfg)
        found.update(placement=placement.reason, on_cpu=placement.device.type == "cpu")
        found.update(cards=card_lines(cfg, placement))
        check_optim(cfg, placement)
        found.update(fitted(cfg, placement))
        if trial:
            said, warned = try_policy(cfg, training) if is_here(cfg) else ("", [])
            found.update(trial=said, trial_warnings=list(warned))
    except LocalError as error:
        found.update(error=str(error), error_code=error.exit_code)
    except Exception as error:  # a model's code may raise anything  # noqa: BLE001
        why = f"policy.model {cfg.model!r}: {reason(error)}"
        found.update(error=why, error_code=Unavailable.exit_code)
    return found


def card_lines(cfg: PolicyConfig, placement: Placement) -> list[str]:
    """Return one line per GPU, and one line of ranks if there are several. Raises LocalError."""
    here, chosen, left_out = cards(), devices(cfg), list[str]()
    if len(chosen) > 1 and placement.device.type == "cuda":
        need = update_bytes(cfg, architecture(cfg), placement)
        chosen, left_out = training_devices(cfg, chosen, here, need)
    ranks = ", ".join(map(str, chosen))
    return [
        *map(str, here),
        *(f"not used: {line}" for line in left_out),
        *([f"{len(chosen)} ranks: {ranks}"] if len(chosen) > 1 else []),
    ]


def fitted(cfg: PolicyConfig, placement: Placement) -> dict[str, object]:
    """Raises Unavailable without the model, DeviceError when it does not fit."""
    config = architecture(cfg)
    need, free = update_bytes(cfg, config, placement), free_bytes(placement.device)
    found = {"parameters": count_parameters(config)[0], "need_bytes": need, "free_bytes": free}
    return {**found, "placement": fit(cfg, config, placement).reason}


def architecture(cfg: PolicyConfig) -> PretrainedConfig:
    """config.json of the model. Raises Unavailable."""
    read = lambda directory: offline(
        cfg, lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False)
    )
    on_hub = (
        cfg.model != "embedded"
        and not Path(cfg.model).expanduser().is_dir()
        and cfg.model.count("/") <= 1
    )
    if on_hub and not cfg.model.startswith((".", "/", "~")):
        from huggingface_hub import hf_hub_download

        return read(
            Path(
                offline(
                    cfg, lambda: hf_hub_download(cfg.model, "config.json", revision=cfg.revision)
                )
            ).parent
        )
    with local_directory(cfg) as directory:
        weight_files(directory)
        return read(directory)


if __name__ == "__main__":
    request = Request.model_validate_json(sys.stdin.buffer.read())
    print(json.dumps(examine(request.policy, "--trial" in sys.argv, request.training)))
