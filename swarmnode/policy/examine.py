"""`python -m swarmnode.policy.examine`, with a Request as JSON on stdin: prints device, torch and
memory fit as JSON. With `--trial` it also loads the weights and tries the policy (`trial.py`).

Of a model on the Hub only config.json is downloaded. It is a separate process, since torch takes
seconds to load and may crash.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
from pydantic import BaseModel
from transformers import AutoConfig, PretrainedConfig

from swarmnode.config import PolicyConfig, TrainingConfig
from swarmnode.errors import LocalError, Unavailable
from swarmnode.model_defaults import is_on_hub
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
from swarmnode.policy.load import check_optim, config_directory, offline
from swarmnode.policy.trial import is_here, try_policy
from swarmnode.policy.ways import reason


class Request(BaseModel):
    """Settings to examine."""

    policy: PolicyConfig
    training: TrainingConfig = TrainingConfig()


def examine(
    cfg: PolicyConfig, trial: bool = False, training: TrainingConfig | None = None
) -> dict[str, object]:
    """Return fields of `doctor.checks.DeviceFacts`. An error is reported in `error` and
    `error_code`, beside the fields that were found before it.

    Args:
        trial: True to also load the model, if it is on this machine, and try to train it.
        training: Settings of the trial.
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
        found.update(memory_fit(cfg, placement))
        if trial:
            result, warned = try_policy(cfg, training) if is_here(cfg) else ("", [])
            found.update(trial=result, trial_warnings=list(warned))
    except LocalError as error:
        found.update(error=str(error), error_code=error.exit_code)
    except Exception as error:  # a model's code may raise anything  # noqa: BLE001
        why = f"policy.model {cfg.model!r}: {reason(error)}"
        found.update(error=why, error_code=Unavailable.exit_code)
    return found


def card_lines(cfg: PolicyConfig, placement: Placement) -> list[str]:
    """Return one line per GPU, and one line of ranks if there are several. Raises LocalError."""
    here, chosen, excluded = cards(), devices(cfg), list[str]()
    if len(chosen) > 1 and placement.device.type == "cuda":
        need = update_bytes(cfg, architecture(cfg), placement)
        chosen, excluded = training_devices(cfg, chosen, here, need)
    ranks = ", ".join(map(str, chosen))
    return [
        *map(str, here),
        *(f"not used: {line}" for line in excluded),
        *([f"{len(chosen)} ranks: {ranks}"] if len(chosen) > 1 else []),
    ]


def memory_fit(cfg: PolicyConfig, placement: Placement) -> dict[str, object]:
    """Return the number of parameters, needed and free bytes, and the final placement.

    Raises:
        Unavailable: The model does not exist.
        DeviceError: The model does not fit.
    """
    config = architecture(cfg)
    need, free = update_bytes(cfg, config, placement), free_bytes(placement.device)
    found = {"parameters": count_parameters(config)[0], "need_bytes": need, "free_bytes": free}
    return {**found, "placement": fit(cfg, config, placement).reason}


def architecture(cfg: PolicyConfig) -> PretrainedConfig:
    """Return the model's configuration.

    Raises:
        Unavailable: The model does not exist.
    """
    with config_directory(cfg) as directory:
        if not is_on_hub(cfg.model):
            weight_files(directory)
        read = lambda: AutoConfig.from_pretrained(directory, trust_remote_code=False)
        return offline(cfg, read)


if __name__ == "__main__":
    request = Request.model_validate_json(sys.stdin.buffer.read())
    print(json.dumps(examine(request.policy, "--trial" in sys.argv, request.training)))
